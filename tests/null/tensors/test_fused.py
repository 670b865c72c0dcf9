"""Fused kernels of optimizers on shards: torch's own results, in one call, and no other DTensor is touched."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import zero_compiler as zero
from zero_compiler.ranks.mesh import bare_mesh
from zero_compiler.tensors import fused

OPTIMIZERS = [
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"maximize": True}),
    (torch.optim.Adagrad, {"weight_decay": 0.1}),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def train(m: nn.Module, cls: type[torch.optim.Optimizer], kw: dict[str, object]) -> torch.optim.Optimizer:
    opt = cls(m.parameters(), **{"lr": 0.1} | kw, fused=True)
    for i in range(3):
        m(batch(i)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return opt


@pytest.mark.parametrize(("cls", "kw"), OPTIMIZERS)
def test_the_same_bits_as_plain_parameters(cls, kw):
    plain, model = net(), zero.shard(net(), device="cpu")
    for m in (plain, model):
        opt = train(m, cls, kw)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(p) is DTensor
        assert torch.equal(p.full_tensor(), q)
    states = opt.state[next(iter(model.parameters()))].items()
    assert all(isinstance(v, DTensor) == (k != "step") for k, v in states if isinstance(v, torch.Tensor))


def operands(model: nn.Module) -> list[list[torch.Tensor]]:
    """What fused AdamW is called with: parameters, gradients, three states of which one is not used, steps."""
    params = list(model.parameters())
    for p in params:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(
        params, lr=0.1, foreach=False
    ).step()  # what an optimizer steps is known from its first step on
    like = [[torch.ones_like(p) for p in params] for _ in range(3)]
    return [params, *like, [], [torch.tensor(1.0) for _ in params]]


def called_with(args: list[list[torch.Tensor]]) -> list[list[torch.Tensor]] | None:
    """What the kernel is called with for ``args``; None where DTensor's rule goes on."""
    calls: list[list[torch.Tensor]] = []

    def op(*given, **kwargs):
        calls.append(list(given))

    out = fused.on_rows(DTensor, op, (DTensor,), args, {"lr": 0.1})
    assert (out is NotImplemented) == (not calls)
    return calls[0] if calls else None


def test_one_call_takes_the_rows_of_all():
    model = zero.shard(net(), device="cpu")
    args = operands(model)
    given = called_with(args)
    assert given is not None
    for tensors, rows in zip(args[:4], given[:4], strict=True):
        assert all(r is t._local_tensor for t, r in zip(tensors, rows, strict=True))
    assert given[4:] == args[4:]


def test_what_is_not_ours_or_does_not_lie_alike_is_left_to_dtensor():
    model = zero.shard(net(), device="cpu")
    mesh = bare_mesh("cpu", [0])
    # On a mesh that equals the model's.
    other = nn.Module()
    other.weight = nn.Parameter(DTensor.from_local(torch.ones(7), mesh, [Shard(0)], run_check=False))
    assert called_with(operands(other)) is None
    for change in (
        lambda t: torch.ones(t.shape),
        lambda t: DTensor.from_local(t._local_tensor, t.device_mesh, [Replicate()], run_check=False),
        lambda t: DTensor.from_local(t._local_tensor[:1], t.device_mesh, t.placements, run_check=False),
        lambda t: t._local_tensor,
    ):
        args = operands(model)
        args[2][1] = change(args[2][1])
        assert called_with(args) is None
    args = operands(model)
    assert fused.on_rows(DTensor, None, (DTensor,), args, {"found_inf": args[1][0]}) is NotImplemented


def test_a_whole_state_is_not_taken_for_the_rows_of_this_rank():
    """One that plain training has saved. The kernel asks for no shapes: it would begin at the first row."""
    model = zero.shard(net(), device="cpu")
    for k in (1, 2):  # gradients, a state
        args = operands(model)
        args[k] = [torch.ones(t.shape) for t in args[k]]
        assert called_with(args) is None
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    plain = torch.optim.AdamW(net().parameters(), fused=True)
    operands(model)
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    plain.step()
    opt.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        opt.step()


def test_dtensors_of_others_are_stepped_by_their_own_rule():
    operands(zero.shard(net(), device="cpu"))
    mesh = bare_mesh("cpu", [0])
    ours = nn.Parameter(torch.ones(8, 4))
    theirs = nn.Parameter(DTensor.from_local(torch.ones(8, 4), mesh, [Shard(0)], run_check=False))
    for p in (ours, theirs):
        p.grad = torch.full_like(p, 0.5)
        torch.optim.AdamW([p], lr=0.1, fused=True).step()
    assert torch.equal(theirs._local_tensor, ours)
    assert not torch.equal(ours, torch.ones(8, 4))


@pytest.mark.parametrize(("cls", "kw"), OPTIMIZERS)
@pytest.mark.parametrize("sharded", [0, 2])
def test_plain_parameters_beside_sharded_ones(sharded, cls, kw):
    plain, model = net(), net()
    zero.shard(model[sharded], device="cpu")
    for m in (plain, model):
        train(m, cls, kw)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, q)


def test_a_loss_scaler_takes_plain_gradients_beside_sharded_ones():
    plain, model = net(), net()
    zero.shard(model[2], device="cpu")
    for m in (plain, model):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        for i in range(3):
            scaler.scale(m(batch(i)).square().sum()).backward()
            if i == 1:
                m[0].bias.grad[0] = torch.inf
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert scaler.get_scale() == 512.0
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, q)
