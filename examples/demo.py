"""Trains a small byte-level GPT on the source of Python's standard library, sharded over ranks.

make demo                                                          two ranks
python examples/demo.py                                            one process
python examples/demo.py --ranks 2                                  starts two ranks itself
torchrun --standalone --nproc-per-node 2 examples/demo.py          the same, by torchrun
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

DUMP = Path(".zero") / "demo"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    def positive(text: str) -> int:
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
        return value

    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=positive, default=320, help="optimizer steps")
    parser.add_argument("--batch", type=positive, default=8, help="sequences a rank and step")
    parser.add_argument("--context", type=positive, default=128, help="bytes a sequence")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=128, help="width of the model, a multiple of 32")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage")
    parser.add_argument("--compute", choices=("inductor", "aten"), default="inductor")
    parser.add_argument("--device", default="auto", help="cpu, or an accelerator as torch names it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=positive, help="start this many ranks on this machine")
    args = parser.parse_args(given)
    if args.width % 32:
        parser.error(f"argument --width: must be a multiple of 32 (heads are 32 wide), not {args.width}")
    if args.lr <= 0:
        parser.error(f"argument --lr: must be above 0, not {args.lr}")
    if args.ranks and "RANK" in os.environ:
        parser.error("argument --ranks: torchrun started the ranks already; leave it out")
    return args


def start_ranks(args: argparse.Namespace) -> int:
    """What torchrun does, with an interrupt that is no error."""
    ranks = args.ranks
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    pick_device(args.device, ranks)
    logging.disable(logging.ERROR)  # torchrun's own words: what a rank has to say, it says itself
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    mine = sys.argv[1:]
    for i, a in enumerate(mine):
        if a == "--ranks":
            del mine[i : i + 2]
            break
        if a.startswith("--ranks="):
            del mine[i]
            break
    try:
        run.run(run.parse_args(["--standalone", "--nproc-per-node", str(ranks), __file__, *mine]))
    except SignalException as e:
        return 128 + int(e.sigval)
    except ChildFailedError as e:
        # The rank has said what went wrong.
        return max(1, next(iter(e.failures.values())).exitcode)
    return 0


class Interrupts:
    """Ctrl-C: inside :meth:`deferred` it is noted, and all ranks stop after the same step; elsewhere it ends the rank.

    No exception is raised where it comes: compilers and collectives call Python from C++ that expects none.
    """

    def __init__(self, patience_s: float = 5.0) -> None:
        self.seen = False
        self._deferred = False
        self._patience_s = patience_s
        # A handler would wait while this thread is in a collective whose peer may be gone: a watcher hears at once.
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)
        threading.Thread(target=self._watch, args=(heard,), daemon=True).start()
        signal.signal(signal.SIGINT, lambda signum, frame: None)

    def _watch(self, heard: int) -> None:
        while os.read(heard, 1)[0] != signal.SIGINT:
            pass
        self.seen = True
        if self._deferred:
            time.sleep(self._patience_s)
        say_interrupted()
        os._exit(130)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


class Meter:
    """Tensor memory of this rank on the compute device: exact on CPU, the caching allocator's count elsewhere."""

    def __init__(self, device: Any) -> None:
        import torch

        self.accelerator = torch.accelerator if device.type != "cpu" else None
        if self.accelerator is None:
            from zero_compiler.runtime import _C

            self.cpu = _C
            _C.meter_install()

    def now(self) -> int:
        return self.accelerator.memory_allocated() if self.accelerator else self.cpu.meter_current()

    def peak(self) -> int:
        return self.accelerator.max_memory_allocated() if self.accelerator else self.cpu.meter_peak()

    def reset(self) -> None:
        if self.accelerator:
            self.accelerator.reset_peak_memory_stats()
        else:
            self.cpu.meter_reset_peak()

    @staticmethod
    def resident() -> int:
        """Bytes of this process in memory, whatever they are for; 0 where /proc is not there."""
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except (OSError, ValueError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")


class Screen:
    """Rank 0's output: a live line on a terminal, a line now and then in a log."""

    def __init__(self, rank: int, steps: int) -> None:
        from rich.console import Console

        self.rank, self.steps = rank, steps
        self.console = Console(highlight=False)
        self.every = max(1, steps // 12)
        self.live = None
        if rank == 0 and self.console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.live = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self.console,
                transient=True,
            )

    def say(self, text: str = "") -> None:
        if self.rank == 0:
            (self.live.console if self.live else self.console).print(text, markup=False, soft_wrap=True)
            sys.stdout.flush()

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[int, str], None]]:
        if self.live is None:

            def line(step: int, text: str) -> None:
                if step == 1 or step % self.every == 0 or step == self.steps:
                    self.say(f"step {step:>4} of {self.steps}  {text}")

            yield line
        else:
            with self.live:
                task = self.live.add_task("", total=self.steps)
                yield lambda step, text: self.live.update(task, completed=step, description=text)


def train(args: argparse.Namespace, interrupts: Interrupts) -> None:
    import torch
    import torch.distributed as dist
    from gpt import GPT, GPTConfig
    from text import standard_library

    import zero_compiler as zero

    world = int(os.environ.get("WORLD_SIZE", "1"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = pick_device(args.device, local_world)
    if world > 1:
        dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timedelta(minutes=5))
    rank = dist.get_rank() if world > 1 else 0
    screen = Screen(rank, args.steps)

    def mean(value: torch.Tensor) -> torch.Tensor:
        if world > 1:
            dist.all_reduce(value)
        return value / world

    if "ZERO_DUMP" not in os.environ:
        os.environ["ZERO_DUMP"] = str(DUMP)
        if rank == 0:
            shutil.rmtree(DUMP, ignore_errors=True)
    dump = Path(os.environ["ZERO_DUMP"])

    training, validation = standard_library()
    screen.say(
        f"text: {training.files} files of Python's standard library for training ({len(training):,} bytes), "
        f"{validation.files} for validation ({len(validation):,} bytes)"
    )
    meter = Meter(device)
    torch.manual_seed(args.seed)
    model = GPT(
        GPTConfig(layers=args.layers, width=args.width, heads=args.width // 32, context=args.context)
    ).to(device)
    count = sum(p.numel() for p in model.parameters())
    screen.say(
        f"model: {args.layers} layers, width {args.width}, {count:,} parameters; "
        f"stage {args.stage} over {world} {'rank' if world == 1 else 'ranks'} on {device.type}"
    )

    model = zero.shard(model, stage=args.stage, device=device)
    compiled = torch.compile(model, backend="zero", options={"compute": args.compute})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )
    warmup = min(40, max(1, args.steps // 5))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(
            (s + 1) / warmup, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(s / args.steps, 1.0)))
        ),
    )
    draws = torch.Generator().manual_seed(args.seed * 1000 + rank)
    held_out = validation.even_starts(world * args.batch * 4, args.context)[rank::world]

    def batch_of(starts: list[int], text: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = text.windows(starts, args.context)
        return x.to(device), y.to(device)

    @torch.no_grad()
    def validate() -> float:
        model.eval()
        parts = [held_out[i : i + args.batch] for i in range(0, len(held_out), args.batch)]
        total = sum(compiled(*batch_of(part, validation)) for part in parts) / len(parts)
        model.train()
        return mean(total).item()

    screen.say("compiling ...")
    start = time.perf_counter()
    seconds = 0.0
    with contextlib.ExitStack() as stack, screen.progress() as show:
        for step in range(1, args.steps + 1):
            begun = time.perf_counter()
            x, y = batch_of(training.random_starts(args.batch, args.context, draws), training)
            loss = compiled(x, y)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            at_rest = meter.now()
            optimizer.zero_grad()
            # One small reduction tells the loss, and whether a rank was interrupted.
            told = mean(
                torch.stack([loss.detach().float(), torch.tensor(float(interrupts.seen), device=device)])
            )
            if told[1] > 0:
                raise KeyboardInterrupt
            if step == 1:
                screen.say(f"compiled and ran the first step in {time.perf_counter() - start:.1f} s")
                stack.enter_context(interrupts.deferred())
                meter.reset()
            else:
                seconds += time.perf_counter() - begun
            rate = world * args.batch * args.context * (step - 1) / seconds if seconds else 0.0
            show(step, f"training loss {told[0]:.3f}  norm {norm.item():.2f}  {rate:,.0f} tokens/s")
    peak = meter.peak()
    screen.say(f"training loss: {told[0]:.4f}")
    screen.say(
        f"tokens/s: {rate:,.0f}  ({world} ranks, {1000 * seconds / max(args.steps - 1, 1):.0f} ms a step)"
    )
    plan = zero.inspect(compiled)
    final = validate()
    row = (rank, at_rest, plan.memory.at_rest, peak, plan.memory.peak, meter.resident())
    rows: list[Any] = [row]
    if world > 1:
        rows = [None] * world
        dist.all_gather_object(rows, row)
    screen.say()
    screen.say("memory, bytes     at rest       planned          peak       planned    process (RSS)")
    for r, *figures in rows:
        screen.say(f"rank {r:<4}" + "".join(f"{n:>14,}" for n in figures[:4]) + f"{figures[4]:>17,}")
    if rank == 0:
        dump.mkdir(parents=True, exist_ok=True)
        plan.save_json(str(dump / "plan.json"))
    if plan.calibration:
        screen.say()
        screen.say(plan.calibration)
    screen.say()
    screen.say(f"the plan lies in {dump}: graphs after every pass (frame*/), all of it as JSON (plan.json)")
    screen.say(f"validation loss: {final:.4f}")


def pick_device(wanted: str, local_world: int) -> Any:
    import torch

    here = torch.accelerator.current_accelerator(check_available=True)
    enough = here is not None and torch.accelerator.device_count() >= local_world
    if wanted == "cpu" or (wanted == "auto" and not enough):
        return torch.device("cpu")
    if here is None or (wanted != "auto" and here.type != wanted):
        raise SystemExit(f"demo: --device {wanted}: torch sees no such device here")
    if not enough:
        raise SystemExit(
            f"demo: {local_world} ranks on this machine, but {torch.accelerator.device_count()} devices"
        )
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(here.type, torch.accelerator.current_device_index())


def main() -> int:
    args = arguments()
    if args.ranks:
        return start_ranks(args)
    interrupts = Interrupts()
    try:
        train(args, interrupts)
    except BaseException:
        if not interrupts.seen:
            raise
        say_interrupted()
        return 130
    finally:
        leave()
    return 0


def say_interrupted() -> None:
    if os.environ.get("RANK", "0") == "0":
        print("\ninterrupted", file=sys.stderr, flush=True)


def leave() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
