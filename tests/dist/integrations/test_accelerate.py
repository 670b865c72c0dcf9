"""``Accelerator(fsdp_plugin=ZeroPlugin())`` on two CPU ranks, beside accelerate's own DDP of the same script."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist.cases import Cases
from dist.library_runs import as_rank, differences, number, one_rank_alone, shared_folder, weights
from dist.loops import counters
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, IntegrationError
from zero_compiler.optim.optimizer import StreamedOptimizer
from zero_compiler.params.modules import is_root, sharded_models_of

pytest.importorskip("accelerate", reason="needs the extra accelerate")
pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__)
CLOSE = 1e-6  # of the same sums in another order
CLOSE_BF16 = 2e-2


def accelerator(**kwargs: Any) -> Any:
    """An accelerator of this case alone; without a plugin it trains by DDP."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    as_rank()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **kwargs)


def zero_accelerator(stage: int = 3, fields: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    from zero_compiler.integrations.accelerate import ZeroPlugin

    return accelerator(fsdp_plugin=ZeroPlugin(stage=stage, **{"compute": "aten", **(fields or {})}), **kwargs)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 17), nn.GELU(), nn.Linear(17, 3))


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(64, 8, generator=generator), torch.randn(64, 3, generator=generator)
    )
    return torch.utils.data.DataLoader(data, batch_size=4)


def train(
    acc: Any, model: Any, opt: Any, batches: Any, sched: Any = None, clip: Any = None
) -> dict[str, Any]:
    """The loop of accelerate's documentation: losses, norms and weights."""
    losses, norms = [], []
    for x, y in batches:
        with acc.accumulate(model):
            loss = F.mse_loss(model(x).float(), y)
            acc.backward(loss)
            if acc.sync_gradients and clip == "value":
                acc.clip_grad_value_(model.parameters(), 0.05)
            elif acc.sync_gradients:
                norms.append(number(acc.clip_grad_norm_(model.parameters(), 0.5)))
            opt.step()
            if sched is not None:
                sched.step()
            opt.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": weights(model)}


def script(acc: Any, clip: Any = None) -> dict[str, Any]:
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    model, opt, batches, sched = acc.prepare(model, opt, loader(), sched)
    return train(acc, model, opt, batches, sched, clip)


@cases.add
def the_documented_loop_has_the_numbers_of_ddp(rank: int) -> list[str]:
    """Accumulation over two micro-batches, clipping by norm, a scheduler."""
    plain = script(accelerator(gradient_accumulation_steps=2))
    errors = []
    for stage in range(4):
        ours = script(zero_accelerator(stage, gradient_accumulation_steps=2))
        errors += differences(f"stage {stage}", ours, plain, CLOSE)
    return errors


@cases.add
def a_model_that_was_not_prepared(rank: int) -> list[str]:
    """accelerate's loop over a model that zero.shard made, beside the prepared one under DDP."""
    acc = accelerator(gradient_accumulation_steps=2)
    model = zero.shard(net(), device="cpu", compute="aten")
    opt, batches = acc.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), loader())
    ours = train(acc, model, opt, batches)
    gathered = acc.gather_for_metrics(torch.full((1,), float(rank))).tolist()
    out = [] if acc.unwrap_model(model) is model and gathered == [0.0, 1.0] else [f"gathered {gathered}"]
    theirs = accelerator(gradient_accumulation_steps=2)
    plain = theirs.prepare(net())
    opt, batches = theirs.prepare(torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4), loader())
    return out + differences("not prepared", ours, train(theirs, plain, opt, batches), CLOSE)


@cases.add
def clipping_by_value(rank: int) -> list[str]:
    return differences("clipped", script(zero_accelerator(), "value"), script(accelerator(), "value"), CLOSE)


@cases.add
def bf16_keeps_weights_in_float32(rank: int) -> list[str]:
    ours = script(zero_accelerator(mixed_precision="bf16"))
    errors = differences("bf16", ours, script(accelerator(mixed_precision="bf16")), CLOSE_BF16)
    return errors + [f"{n} is {w.dtype}" for n, w in ours["weights"].items() if w.dtype != torch.float32]


@cases.add
def models_and_optimizers_may_be_prepared_apart(rank: int) -> list[str]:
    def apart(order: str, acc: Any) -> dict[str, Any]:
        model = net()
        if order == "optimizer made after":
            model = acc.prepare(model)
            opt = acc.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
        else:
            opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
            if order == "model first":
                model = acc.prepare(model)
                opt = acc.prepare(opt)
            else:
                opt = acc.prepare(opt)
                model = acc.prepare_model(model)
        batches = acc.prepare(loader())
        return train(acc, model, opt, batches)

    plain = apart("model first", accelerator())
    orders = ("optimizer made after", "model first", "optimizer first")
    return [e for o in orders for e in differences(o, apart(o, zero_accelerator()), plain, CLOSE)]


@cases.add
def a_state_that_was_saved_goes_on(rank: int) -> list[str]:
    """Full and sharded files: a new accelerator goes on with the numbers of the run that was not interrupted."""
    errors = []
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        with shared_folder() as folder:

            def run(resume: bool, kind: str = kind, folder: Any = folder) -> dict[str, Any]:
                acc = zero_accelerator(fields={"state_dict_type": kind})
                model = net()
                opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
                sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
                model, opt, sched = acc.prepare(model, opt, sched)
                batches = list(acc.prepare(loader()))
                if resume:
                    acc.load_state(str(folder))
                else:
                    train(acc, model, opt, batches[:3], sched)
                    acc.save_state(str(folder))
                return train(acc, model, opt, batches[3:], sched)

            uninterrupted = run(False)
            errors += differences(kind, run(True), uninterrupted, 0.0)
    return errors


@cases.add
def save_model_writes_what_a_plain_model_loads(rank: int) -> list[str]:
    from safetensors.torch import load_file

    acc = zero_accelerator()
    model = net()
    model, opt = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    made = train(acc, model, opt, acc.prepare(loader()))
    with shared_folder() as folder:
        acc.save_model(model, str(folder))
        acc.wait_for_everyone()
        loaded = load_file(folder / "model.safetensors")
    held = acc.get_state_dict(model)
    errors = differences("saved", loaded, made["weights"], 0.0)
    errors += differences("get_state_dict", held, made["weights"], 0.0) if rank == 0 else []
    if acc.unwrap_model(model) is not model or type(acc.unwrap_model(model)).__name__ != "Sequential":
        errors.append(f"unwrap_model returns {type(acc.unwrap_model(model))}")
    return errors


@cases.add
def what_one_rank_saves_alone_is_refused(rank: int) -> list[str]:
    """Instead of waiting for the timeout of the process group."""
    acc, errors = zero_accelerator(), []
    model = acc.prepare(net())
    for call, save in (
        ("Accelerator.get_state_dict()", lambda: acc.save_model(model, "nowhere")),
        ("Accelerator.save_state()", lambda: acc.save_state("nowhere")),
    ):
        errors += one_rank_alone(call, save, lambda: model(torch.zeros(2, 8)))
    return errors + (["a folder was made"] if os.path.exists("nowhere") else [])


@cases.add
def one_rank_saves_what_is_gathered(rank: int) -> list[str]:
    """Inside ``zero.gathered`` a rank has all of a model and may save alone; of another model it may not."""
    acc, other = zero_accelerator(), zero_accelerator()
    whole, rows = acc.prepare(net()), other.prepare(net())
    held, errors = {k: v.clone() for k, v in acc.get_state_dict(whole).items()}, []
    with shared_folder() as folder:
        with zero.gathered(whole):
            if rank == 0:
                acc.save_model(whole, str(folder), safe_serialization=False)
        errors += one_rank_alone(
            "Accelerator.get_state_dict()",
            lambda: other.save_model(rows, "nowhere"),
            lambda: rows(torch.zeros(2, 8)),
        )
        if rank == 0:
            loaded = torch.load(folder / "pytorch_model.bin", weights_only=True)
            errors += differences("saved", dict(loaded), held, 0.0)
    return errors


@cases.add
def an_optimizer_whose_states_are_there_from_the_beginning(rank: int) -> list[str]:
    """Adagrad makes them at its construction, of whole parameters."""

    def run(acc: Any, apart: bool) -> dict[str, Any]:
        model, batches = net(), loader()
        opt = torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.2, eps=1e-4)
        if apart:
            model, batches = acc.prepare(model, batches)
            opt = acc.prepare(opt)
        else:
            model, opt, batches = acc.prepare(model, opt, batches)
        return train(acc, model, opt, batches)

    plain = run(accelerator(), False)
    errors = []
    for apart in (False, True):
        errors += differences(f"apart={apart}", run(zero_accelerator(), apart), plain, CLOSE)
    return errors


@cases.add
def two_models_and_a_frozen_one(rank: int) -> list[str]:
    """A frozen teacher comes first, and two students have an optimizer each; saved and loaded again."""

    def run(acc: Any, folder: Any = None) -> dict[str, Any]:
        teacher, one, two = net(1).requires_grad_(False), net(2), net(3)
        first = torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-4)
        second = torch.optim.SGD(two.parameters(), lr=1e-1)
        if folder is None:
            teacher = teacher.eval()
        else:
            teacher = acc.prepare(teacher)
        one, two, second, first = acc.prepare(one, two, second, first)
        losses = []
        for step, (x, _) in enumerate(acc.prepare(loader())):
            if step == 2 and folder is not None:
                acc.save_state(str(folder))
                for p in [*one.parameters(), *two.parameters(), *teacher.parameters()]:
                    p.detach().mul_(0.5)
                acc.load_state(str(folder))
            with torch.no_grad():
                wanted = teacher(x)
            loss = F.mse_loss(one(x), wanted) + F.mse_loss(two(x), wanted)
            acc.backward(loss)
            for model in (one, two):
                losses.append(number(acc.clip_grad_norm_(model.parameters(), 0.5)))
            for opt in (first, second):
                opt.step()
                opt.zero_grad()
            losses.append(loss.item())
        return {"losses": losses, "one": weights(one), "two": weights(two), "teacher": weights(teacher)}

    with shared_folder() as folder:
        return differences("models", run(zero_accelerator(), folder), run(accelerator()), CLOSE)


@cases.add
def accumulation_sends_gradients_once_unless_told_otherwise(rank: int) -> list[str]:
    from accelerate.utils import GradientAccumulationPlugin

    reduced = {}
    for each in (False, True):
        acc = zero_accelerator(
            fields={"transport": "c10d"},
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4, sync_each_batch=each),
        )
        model = net()
        model, opt = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = list(acc.prepare(loader()))
        train(acc, model, opt, batches[:4])
        before = counters(model)["bytes_reduced"]
        train(acc, model, opt, batches[4:8])
        reduced[each] = counters(model)["bytes_reduced"] - before
    return [] if reduced[True] == 4 * reduced[False] > 0 else [f"bytes reduced: {reduced}"]


@cases.add
def accumulation_sends_each_time_where_whole_gradients_do_not_fit(rank: int) -> list[str]:
    """Under a memory budget the plan says which, and the numbers are the same."""

    def run(acc: Any) -> tuple[dict[str, Any], nn.Module, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 3))
        model, opt = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4))
        batches = list(acc.prepare(loader()))
        said = train(acc, model, opt, batches[:4])
        before = counters(model)["bytes_reduced"] if is_root(model) else 0
        more = train(acc, model, opt, batches[4:8])
        sent = counters(model)["bytes_reduced"] - before if is_root(model) else 0
        return {"losses": said["losses"] + more["losses"], "weights": more["weights"]}, model, sent

    def under(budget: int | None) -> tuple[dict[str, Any], nn.Module, int]:
        fields = {"transport": "c10d", "memory_budget_bytes": budget}
        return run(zero_accelerator(fields=fields, gradient_accumulation_steps=4))

    plain, _, _ = run(accelerator(gradient_accumulation_steps=4))
    free, model, once = under(None)
    memory = zero.inspect(model).memory
    wide, model_wide, sent_wide = under(memory.accumulating_peak)
    tight, model_tight, sent_tight = under(memory.peak + memory.gradients)
    errors = [e for ours in (free, wide, tight) for e in differences("accumulated", ours, plain, CLOSE)]
    if not once == sent_wide == sent_tight / 4:
        errors.append(f"bytes reduced: {once}, {sent_wide}, {sent_tight}")
    for which, text in (
        (model, f"one reduction for all micro-batches; {memory.waiting:,} bytes"),
        (model_wide, f"one reduction for all micro-batches; {memory.waiting:,} bytes"),
        (model_tight, f"one reduction for each micro-batch, of {memory.waiting:,} bytes"),
    ):
        if text not in zero.inspect(which).summary():
            errors.append(f"{text!r} is not in the plan")
    return errors


def scheduled(acc: Any, kind: str, model: Any, opt: Any) -> tuple[Any, Any, Any]:
    """Model, optimizer and a scheduler, which is prepared with them, in a call of its own ("apart"), or never."""
    schedulers = torch.optim.lr_scheduler
    if kind == "sequential":
        parts = [schedulers.LinearLR(opt, 0.5, 1.0, 3), schedulers.ExponentialLR(opt, 0.9)]
        return acc.prepare(model, opt, schedulers.SequentialLR(opt, parts, [3]))
    sched = schedulers.LambdaLR(opt, lambda step: 1 / (1 + step))
    if kind == "together":
        return acc.prepare(model, opt, sched)
    model, opt = acc.prepare(model, opt)
    if kind == "apart":
        return model, opt, acc.prepare(sched)
    acc.register_for_checkpointing(sched)
    return model, opt, sched


@cases.add
def states_in_files_make_the_optimizer_a_zero_optimizer(rank: int) -> list[str]:
    """Whose scheduler goes on after a resume, whatever it is made of and whether accelerate knows it."""
    return [e for kind in ("sequential", "never") for e in in_files(rank, kind)]


@cases.add_thorough
def schedulers_of_a_zero_optimizer(rank: int) -> list[str]:
    return [e for kind in ("together", "apart") for e in in_files(rank, kind)]


def in_files(rank: int, kind: str) -> list[str]:
    with shared_folder() as folder:

        def run(acc: Any, resume: bool = False) -> tuple[dict[str, Any], Any]:
            model = net()
            groups = [
                {"params": list(model[0].parameters())},
                {"params": list(model[2].parameters()), "lr": 3e-3},
            ]
            opt = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, betas=(0.8, 0.9))
            model, opt, sched = scheduled(acc, kind, model, opt)
            batches = list(acc.prepare(loader()))
            if resume:
                acc.load_state(str(folder / "state"))
            else:
                train(acc, model, opt, batches[:4], sched)
                acc.save_state(str(folder / "state"))
            said = train(acc, model, opt, batches[4:], sched)
            return said | {"rates": [group["lr"] for group in opt.param_groups]}, opt.optimizer

        fields = {"offload_optimizer": "nvme", "nvme_dir": str(folder)}
        ours, opt = run(zero_accelerator(fields=fields))
        again, _ = run(zero_accelerator(fields=fields), resume=True)
        (folder / "state").rename(folder / "ours") if rank == 0 else None
        dist.barrier()
        plain, _ = run(accelerator())
    errors = differences(f"{kind} in files", ours, plain, CLOSE)
    errors += differences(f"{kind} resumed", again, ours, 0.0)
    if not isinstance(opt, StreamedOptimizer) or opt.cls is not torch.optim.AdamW:
        errors.append(f"the optimizer is {opt}")
    return errors


def bytes_in_open_files(folder: Any) -> int:
    """Of the files below ``folder`` that this process has open: they have no names any more."""
    nbytes = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the listing
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder)):
                nbytes += os.fstat(int(fd)).st_size
    return nbytes


@cases.add
def bytes_on_each_tier(rank: int) -> list[str]:
    """What the offload fields of a plugin put into files is counted there, lies there, and is in no memory."""
    every = ("offload_params", "offload_grads", "offload_optimizer")
    errors = []
    for away in (("offload_optimizer",), every):
        with shared_folder() as folder:
            acc = zero_accelerator(fields={**dict.fromkeys(away, "nvme"), "nvme_dir": str(folder)})
            model = net()
            model, opt = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            train(acc, model, opt, acc.prepare(loader()))
            memory = zero.inspect(model).memory
            rows = sum(info.layout.bytes_local() for info in sharded_models_of(model)[0].params.values())
            states = 2 * sum(p._local_tensor.nbytes for p in model.parameters())  # without padding
            in_files = states + (2 * rows if away is every else 0)
            at_rest = 0 if away is every else rows
            expected = {
                "parameters": at_rest,
                "gradients": at_rest,
                "optimizer": 0,
                "assumed": 0,
                "files": in_files,
            }
            found = {name: getattr(memory, name) for name in expected}
            if found != expected:
                errors.append(f"{away}: {found} instead of {expected}")
            if (lie := bytes_in_open_files(folder)) < in_files:
                errors.append(f"{away}: {lie} bytes lie in files, of {in_files}")
            dist.barrier()
            del model, opt, acc
    return errors


@cases.add
def what_cannot_be_is_refused(rank: int) -> list[str]:
    def stepped(acc: Any) -> None:
        model = net()
        opt = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 8)).sum().backward()
        opt.step()
        acc.prepare(model, opt)

    def one_optimizer_of_two(acc: Any) -> None:
        one, two = net(), net()
        acc.prepare(one, two, torch.optim.SGD([*one.parameters(), *two.parameters()]))
        acc.save_state("/nowhere")

    def compiled_by_another_mode() -> None:
        """What the plugin for Dynamo says of compiling reaches zero, which has another reason to refuse it here."""
        from accelerate.utils import TorchDynamoPlugin

        plugin = TorchDynamoPlugin(backend="inductor", mode="max-autotune-no-cudagraphs")
        zero_accelerator(dynamo_plugin=plugin).prepare(net())(torch.randn(2, 8))

    wrong = [
        (lambda: zero_accelerator(fields={"param_dtype": "fp16"}, mixed_precision="bf16"), "two dtypes"),
        (lambda: stepped(zero_accelerator()), "has states of the whole"),
        (lambda: zero_accelerator().prepare(torch.compile(net())), "was compiled by torch.compile before"),
        (lambda: one_optimizer_of_two(zero_accelerator()), "one optimizer for one model"),
        (compiled_by_another_mode, "mode is for what Inductor compiles"),
    ]
    errors = []
    for call, said in wrong:
        try:
            call()
        except (ConfigError, IntegrationError) as error:
            errors += [] if said in str(error) else [f"{said!r} is not in {error}"]
        else:
            errors.append(f"{said!r}: nothing was raised")
    return errors


@cases.add
def others_are_left_as_they_are(rank: int) -> list[str]:
    """With the overrides in place an accelerator without the plugin is accelerate's own."""
    import zero_compiler.integrations.accelerate  # noqa: F401

    acc = accelerator()
    model = acc.prepare(net())
    return (
        []
        if isinstance(model, nn.parallel.DistributedDataParallel) and not is_root(model.module)
        else [repr(model)]
    )


def alone(rank: int, world: int) -> list[str]:
    from accelerate import Accelerator

    from zero_compiler.integrations.accelerate import ZeroPlugin

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    plain = script(accelerator_of_one(Accelerator))
    acc = accelerator_of_one(Accelerator, fsdp_plugin=ZeroPlugin(compute="aten"))
    ours = script(acc)
    with tempfile.TemporaryDirectory() as folder:
        acc.save_state(folder)
        acc.load_state(folder)
        acc.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        with pytest.raises(
            IntegrationError, match=r'give ZeroPlugin\(state_dict_type="SHARDED_STATE_DICT"\)'
        ):
            acc.load_state(folder)
    return differences("one process", ours, plain, CLOSE)


def accelerator_of_one(make: Any, **kwargs: Any) -> Any:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return make(**kwargs)


def test_one_process_without_a_launcher():
    (errors,) = run_ranks(alone, 1, group=False)
    assert not errors


@pytest.mark.parametrize("name", cases.names)
def test_accelerate(name):
    cases.check(name)
