"""What is no business of this project is as it was before: others' models, optimizers, meshes, threads and processes.

Everything is looked at twice, in a process that has used a sharded model in every way, and in one that has not.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import pickle
import signal
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zero_compiler as zero
from zero_compiler.errors import ShardError

O = torch.optim
CLASSES = [
    getattr(O, name)
    for name in (
        "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD Adafactor LBFGS SparseAdam Muon"
    ).split()
    if hasattr(O, name)
]
FUSED = (O.SGD, O.Adam, O.AdamW, O.Adagrad)


def _use() -> None:
    """A sharded model in every way that registers something with torch."""
    first = zero.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), stage=3, device="cpu")
    run = torch.compile(first, backend="zero", options={"compute": "aten"})
    for kw in ({"foreach": True}, {"fused": True}):
        opt = O.AdamW(first.parameters(), lr=0.1, **kw)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with zero.no_sync(run):
            scaler.scale(run(torch.ones(2, 8)).sum()).backward()
        scaler.scale(run(torch.ones(2, 8)).sum()).backward()
        scaler.step(opt)
        scaler.update()
    with zero.gathered(first):
        pass
    with zero.init(device="cpu"):
        second = nn.Linear(8, 8)
    opt = zero.optimizer(O.AdamW, second, lr=0.1)
    second(torch.ones(2, 8)).sum().backward()
    opt.step()
    plain = nn.Linear(8, 8)
    torch.compile(plain, backend="zero", options={"compute": "aten"})(torch.ones(2, 8)).sum().backward()
    torch._dynamo.reset()


def _outcome(look) -> object:
    """What it returns, or how it fails."""
    try:
        return look()
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {str(error)[:300]}"


def _values(tensors) -> list:
    return [
        (type(t).__name__, (t._local_tensor if isinstance(t, DTensor) else t).detach().tolist(), t._version)
        for t in tensors
    ]


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))


def _fsdp(seed: int = 0) -> nn.Module:
    return fully_shard(_net(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _trained(model: nn.Module, opt: O.Optimizer) -> list:
    x = torch.ones(2, 4) * (1 + dist.get_rank())

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)
    states = [(type(v).__name__, k) for s in opt.state.values() for k, v in s.items()]
    return [
        _values(model.parameters()),
        _values(p.grad for p in model.parameters()),
        states,
        sorted(vars(opt)),
    ]


def _optimizers() -> dict:
    seen = {}
    for cls in CLASSES:
        for kw in ({}, {"foreach": False}, {"foreach": True}, {"fused": True}):
            if kw and (cls in (O.LBFGS, O.SparseAdam) or ("fused" in kw and cls not in FUSED)):
                continue

            def look(cls=cls, kw=kw):
                model = _fsdp()
                return _trained(model, cls(model.parameters(), lr=0.1, **kw))

            seen[f"{cls.__name__} {kw}"] = _outcome(look)
    return seen


class Halved(O.Optimizer):
    """An optimizer of somebody's own, with groups of its own."""

    def __init__(self, params, note):
        super().__init__(params, {"note": note})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)
        return closure() if closure else None


class Around(O.Optimizer):
    """One around another, as libraries wrap them."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


def _of_their_own() -> dict:
    def own():
        model = _fsdp()
        return _trained(model, Halved(model.parameters(), "mine"))

    def around():
        model = _fsdp()
        opt = Around(O.AdamW(model.parameters(), lr=0.1))
        return [*_trained(model, opt), sorted(copy.deepcopy(opt.inner.__dict__))]

    return {"own": _outcome(own), "around": _outcome(around)}


def _placed() -> list[nn.Parameter]:
    """Parameters that others have placed: cut, whole and cut along columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    kinds = ([Replicate()], [Shard(0)], [Shard(1)])
    return [nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, kind)) for kind in kinds]


def _mixed() -> dict:
    rank = dist.get_rank()

    def scaler(alike: bool, plain: bool):
        params = _placed()[1:2] * 1 if alike else _placed()
        params += [nn.Parameter(torch.ones(3))] if plain else []
        for p in params:
            p.grad = torch.ones_like(p)
        local = params[-1].grad if not isinstance(params[-1].grad, DTensor) else params[-1].grad._local_tensor
        if rank == 1:
            local[0] = float("inf")
        opt = O.SGD(params, lr=0.1)
        scale = torch.amp.GradScaler("cpu", init_scale=4.0)
        scale.scale(torch.ones(()))
        scale.unscale_(opt)
        found = [v.item() for v in scale._per_optimizer_states[id(opt)]["found_inf_per_device"].values()]
        scale.step(opt)
        scale.update()
        return [found, scale.get_scale(), _values(params), _values(p.grad for p in params)]

    def clip(plain: bool, foreach: bool):
        params = _placed() + ([nn.Parameter(torch.ones(3))] if plain else [])
        for p in params:
            p.grad = torch.ones_like(p)
        norm = nn.utils.clip_grad_norm_(params, 0.1, foreach=foreach)
        return [type(norm).__name__, _values(p.grad for p in params)]

    def between(kw: dict):
        """A step between forward and backward: what torch says of it, or does not."""
        params = _placed()
        opt = O.AdamW(params, lr=0.1, **kw)
        x = torch.ones(4, 4)
        mesh = params[0].device_mesh
        y = distribute_tensor(x, mesh, [Replicate()])
        for p in params:
            y = (y @ p).redistribute(mesh, [Replicate()])
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        y.sum().backward()
        return _values(p.grad for p in params)

    def by_hand():
        params = _placed()
        with torch.no_grad():
            torch._foreach_mul_(params, 0.5)
        return _values(params)

    seen = {
        f"scaler {alike} {plain}": _outcome(lambda a=alike, p=plain: scaler(a, p))
        for alike in (False, True)
        for plain in (False, True)
    }
    for flag in (False, True):
        for foreach in (False, True):
            seen[f"clip {flag} {foreach}"] = _outcome(lambda a=flag, b=foreach: clip(a, b))
    for kw in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        seen[f"between {kw}"] = _outcome(lambda kw=kw: between(kw))
    return seen | {"by hand": _outcome(by_hand)}


def _compiled() -> dict:
    def trained(backend: str):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        model = _net()
        run = torch.compile(model, backend=counter)
        opt = O.AdamW(run.parameters(), lr=0.1)
        for _ in range(2):
            run(torch.ones(2, 4)).sum().backward()
            opt.step()
        return [_values(model.parameters()), counter.frame_count, counter.op_count]

    def step(cls):
        """The step of an optimizer is a frame as it was."""
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
        model = _net()
        opt = cls(model.parameters(), lr=0.1)
        run = torch.compile(opt.step, backend=counter)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            run()
        whole = _outcome(lambda: torch.compile(opt.step, backend="eager", fullgraph=True)())
        return [_values(model.parameters()), counter.frame_count, counter.op_count, whole]

    def sharded():
        torch._dynamo.reset()
        model = _fsdp()
        run = torch.compile(model, backend="aot_eager")
        return _trained(run, O.AdamW(model.parameters(), lr=0.1))

    def built():
        @torch.compile(backend="eager", fullgraph=True)
        def f(x):
            return nn.Sequential(nn.ReLU(), nn.Tanh())(x)

        return f(torch.ones(2)).tolist()

    def averaged():
        model = nn.parallel.DistributedDataParallel(_net())
        return _trained(model, O.AdamW(model.parameters(), lr=0.1, foreach=True))

    seen = {backend: _outcome(lambda b=backend: trained(b)) for backend in ("eager", "aot_eager")}
    seen |= {
        f"step of {cls.__name__}": _outcome(lambda c=cls: step(c)) for cls in (O.SGD, O.AdamW, O.Adafactor)
    }
    return seen | {
        "sharded": _outcome(sharded),
        "built": _outcome(built),
        "averaged": _outcome(averaged),
    }


def _process() -> dict:
    """What all code of a process shares."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("a",))

    def meshes():
        again = pickle.loads(pickle.dumps(mesh))
        saved = io.BytesIO()
        torch.save(mesh, saved)
        return [again == mesh, sorted(vars(again)), hash(again) == hash(mesh), sorted(vars(mesh))]

    def forked():
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                model = _net()
                loss = model(torch.ones(2, 4)).sum()
                loss.backward()
                O.AdamW(model.parameters(), lr=0.1).step()
                code = 0
            except RuntimeError as error:
                # torch itself refuses that behind any DTensor, FSDP2's too (2.15, built for an accelerator).
                code = 0 if "autograd's threading in combination with fork" in str(error) else 1
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def threads():
        out = []

        def work():
            model = _net()
            model(torch.ones(2, 4)).sum().backward()
            O.AdamW(model.parameters(), lr=0.1, foreach=True).step()
            out.append([_values(model.parameters()), torch.is_grad_enabled()])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return out

    functorch, inductor, dynamo = torch._functorch.config, torch._inductor.config, torch._dynamo.config
    return {
        "meshes": _outcome(meshes),
        "forked": _outcome(forked),
        "threads": _outcome(threads),
        "signals": [repr(signal.getsignal(s)).split(" at ")[0] for s in sorted(signal.valid_signals())],
        "environment": sorted(os.environ),
        "warnings": [repr(f) for f in warnings.filters],
        "logging": [repr(h) for h in logging.getLogger().handlers] + [logging.getLogger().level],
        "torch": [
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_deterministic_algorithms_enabled()
            if hasattr(torch, "is_deterministic_algorithms_enabled")
            else None,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        ],
        "configs": [
            functorch.save_config_portable(),
            inductor.save_config_portable(),
            dynamo.save_config_portable(),
        ],
        "hooks": [
            sys.excepthook.__qualname__,
            threading.excepthook.__qualname__,
            gc.get_threshold(),
            gc.isenabled(),
        ],
        "modules": [
            len(getattr(nn.modules.module, name))
            for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
        ],
        "classes": [nn.Linear.__call__ is nn.Module.__call__, nn.Linear.forward.__qualname__],
    }


def observe(rank: int, world: int, used: bool) -> dict:
    if used:
        _use()
    torch.manual_seed(0)
    seen = {}
    for part in (_process, _optimizers, _of_their_own, _mixed, _compiled):
        seen |= {f"{part.__name__}: {what}": found for what, found in part().items()}
    return seen


@pytest.mark.slow
def test_all_is_as_it_was():
    before, after = (run_ranks(observe, 2, used) for used in (False, True))
    for rank, (was, now) in enumerate(zip(before, after, strict=True)):
        assert was.keys() == now.keys()
        differ = {what: (was[what], now[what]) for what in was if was[what] != now[what]}
        assert not differ, f"rank {rank}: {differ}"
        assert isinstance(now["_optimizers: LBFGS {}"], list), now["_optimizers: LBFGS {}"]


def mixed(rank: int, world: int) -> list[str]:
    """Optimizers that have parameters of a sharded model and others."""
    wrong = []
    x = torch.ones(2, 4)

    def models():
        return zero.shard(_net(1), device="cpu"), _fsdp(2), _net(3)

    wanted = []
    for model in models():
        opt = O.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(x).square().sum().backward()
            opt.step()
            opt.zero_grad()
        wanted.append([v[1] for v in _values(model.parameters())])
    for kw in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        made = models()[:2]  # DTensors and plain tensors do not mix in kernels over lists
        opt = O.AdamW([p for m in made for p in m.parameters()], lr=0.1, **kw)
        for _ in range(2):
            for m in made:
                m(x).square().sum().backward()
            opt.step()
            opt.zero_grad()
        for model, values in zip(made, wanted, strict=False):
            got = [v[1] for v in _values(model.parameters())]
            if not torch.allclose(torch.tensor(got[0]), torch.tensor(values[0])):
                wrong.append(f"AdamW({kw}) over both: {got[0]}, not {values[0]}")
    ours, theirs, _ = models()
    ours(x).sum().backward()
    opt = O.LBFGS([*theirs.parameters(), *ours.parameters()], lr=0.1)
    try:
        opt.step(lambda: torch.ones(()))
        wrong.append("LBFGS over rows of a sharded model")
    except ShardError as error:
        if "LBFGS needs parameters that are whole" not in str(error):
            wrong.append(str(error))
    whole = zero.shard(_net(1), device="cpu", stage=0)
    whole(x).sum().backward()
    opt = O.LBFGS(whole.parameters(), lr=0.1, max_iter=2)
    opt.step(lambda: torch.ones(()))
    return wrong


@pytest.mark.slow
def test_an_optimizer_is_judged_by_what_it_has_of_sharded_models():
    for wrong in run_ranks(mixed, 2):
        assert not wrong, "\n".join(wrong)


def copied(rank: int, world: int, way: str) -> list[str]:
    """A step between forward and backward is noticed for parameters that zero.shard has not made itself."""
    model = zero.shard(_net(), device="cpu")
    if way == "deepcopy":
        model = copy.deepcopy(model)
    elif way == "pickle":
        model = pickle.loads(pickle.dumps(model))
    else:
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    loss = model(torch.ones(2, 4)).square().sum()
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)
    try:
        loss.backward()
    except ShardError as error:
        return [] if "was modified in place" in str(error) else [str(error)]
    return [f"{way}: not noticed"]


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "assign"])
def test_writes_to_copies_of_parameters_count(way):
    for wrong in run_ranks(copied, 2, way):
        assert not wrong
