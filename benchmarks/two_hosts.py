"""Step times of ranks on two hosts: network namespaces of this machine, connected by a link of a given rate and delay.

    sudo python benchmarks/two_hosts.py --rate 1gbit,5gbit --json benchmarks/results/two_hosts/HOST.json

Between real hosts a rank waits for the network; on one host over loopback the same transfers are work of its cores, and
nothing can overlap with them. Here they wait as between hosts, so that two cores show what a schedule is worth.

The machine is calibrated once (unless --hardware names a file), and what is between the hosts for each link, by all
ranks. Then all modes train in one process group and take turns at every step; ratios are of the steps of one turn, and
times are those of the slowest rank. "sent" is what a host gives its link in a step, by the kernel's count. "predicted"
is what our plan says for forward and backward before the first step; an update is the user's optimizer's, and no part
of a plan. ``zero3@0.5`` is planned with a link of half the rate that was found, to show what a wrong one costs.

"limit" is what forward and backward take at least with the bytes that the mode sends in each: the longer of the link's
time for them, at the rate measured, and the processor's. That is plain compute, compiled, without communication (all
ranks at once), and what the sockets of those bytes take of a core, measured alone. Where ranks share cores, the
processor's work of all of them counts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import common
import modes
import torch
from bench import TOLERANCE, _list, numel_of
from models import MODELS

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from dist.two_hosts import can_have_hosts, environment, torchrun, two_hosts

ALONE = "local-compiled"  # trains without communication: what limits are made of
DEFAULT = [ALONE, "ddp-compiled", "fsdp2", "fsdp2-compiled", "deepspeed3", "zero2", "zero3"]
DEFAULT += ["zero3:gather_dtype=int8"]
HEAD = [
    "mode",
    "step ms (p10-p90)",
    "of DDP (p10-p90)",
    "sent MB",
    "forward + backward ms",
    "limit ms",
    "of it",
]
HEAD += ["predicted ms", "off by"]
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
_PROBE_BYTES = 16 << 20


def main() -> None:
    call = common.called()
    if call is not None:
        answer = str(Path(call["folder"], os.environ["RANK"]))
        common.answer({"answer": answer}, measure(call))
    args = arguments()
    if not can_have_hosts():
        sys.exit("needs root, ip, tc and unshare: network namespaces")
    machine = common.machine()
    print(common.machine_text(machine), flush=True)
    local = common.hardware(args.hardware, args.per_host, "keep")
    found, text = [], common.heading("Two hosts", machine)
    for rate in args.rate:
        ranks = on_link(args, rate, local)
        between = ranks[0]["between"]
        title = (
            f"{args.model}, {args.dtype}, {args.per_host} a host, {rate}, {args.delay_ms:g} ms of delay; measured "
            f"{between['host_bytes_per_us']:.0f} MB/s and {between['latency_us']:.0f} us"
        )
        table = table_of(args.modes, ranks, args.per_host)
        common.print_table(title, HEAD, table)
        text += common.table(title, HEAD, table)
        found.append({"rate": rate, "delay_ms": args.delay_ms, "per_host": args.per_host, "ranks": ranks})
    if args.json:
        common.save(args.json, {"machine": machine, "links": found}, text)


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt-6x512")
    parser.add_argument("--modes", type=_list, default=DEFAULT, help=f"of {', '.join(modes.MODES)}")
    parser.add_argument(
        "--rate", type=_list, default=["1gbit", "2gbit", "5gbit"], help="of the link, as tc has it"
    )
    parser.add_argument(
        "--delay-ms",
        type=float,
        default=0.0,
        help="of each packet; a process carries them, which takes part of a core",
    )
    parser.add_argument("--per-host", type=int, default=1, help="ranks of one thread on each host")
    parser.add_argument("--dtype", choices=TOLERANCE, default="fp32")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--hardware", help="of one host, for our plans; default: calibrate first")
    parser.add_argument("--json", help="write results here, and Markdown beside it")
    args = parser.parse_args()
    try:
        for name in args.modes:
            modes.check(_planned_as(name)[0])
    except ValueError as error:
        parser.error(str(error))
    if ALONE not in args.modes:
        args.modes = [ALONE, *args.modes]
    world = 2 * args.per_host
    at_rest = sum(
        modes.bytes_at_rest(_planned_as(name)[0], numel_of(args.model), world) for name in args.modes
    )
    if world * at_rest > 0.8 * common.available_bytes():
        parser.error(
            f"--modes: all of them train in turn, and {world} ranks of these take {world * at_rest / 2**30:.1f} GiB at "
            f"rest, of {common.available_bytes() / 2**30:.1f} GiB that are free; name fewer"
        )
    return args


def _planned_as(name: str) -> tuple[str, float]:
    """The mode that a name says, and of the link's rate what it is planned with."""
    mode, _, factor = name.partition("@")
    return mode, float(factor or 1.0)


def on_link(args: argparse.Namespace, rate: str, local: str) -> list[dict[str, Any]]:
    """What each rank measured on two hosts that such a link connects."""
    with (
        tempfile.TemporaryDirectory(prefix="zero-bench-") as folder,
        two_hosts(rate, args.delay_ms / 1e3) as hosts,
    ):
        call = {k: getattr(args, k) for k in ("model", "modes", "dtype", "steps", "warmup")}
        call |= {"folder": folder, "local": local}
        env = environment(
            **common.ALLOCATORS["keep"],
            **{common.RANK_CALL: json.dumps(call), "GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu"},
        )
        running = [
            subprocess.Popen([*host, *torchrun(i, args.per_host), os.path.abspath(__file__)], env=env)
            for i, host in enumerate(hosts)
        ]
        try:
            if any([p.wait() for p in running]):
                raise RuntimeError("a rank failed; what it said is above")
        finally:
            for p in running:
                p.kill()
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2 * args.per_host)]


# In a rank --------------------------------------------------------------------------------------------------------


def measure(call: dict[str, Any]) -> dict[str, Any]:
    """What is between the hosts, what its sockets take of a core, then every mode."""
    from zero_compiler.cost import hardware
    from zero_compiler.tools.calibration.measure_hosts import job, together

    torch.set_num_threads(1)
    with job() as of:
        spec = together(of, lambda: hardware.load(call["local"]), lambda line: None)
        assert spec.between_hosts is not None
        found = {
            "between": dataclasses.asdict(spec.between_hosts),
            "socket_us_per_byte": _socket_cost(of.rank),
        }
        with mock.patch.dict(os.environ):
            return found | {"modes": _trained_in_turn(call, spec, of.rank)}


def _socket_cost(rank: int) -> float:
    """Microseconds of a core for a byte that a rank sends to one on the other host, and one that it gets from there."""
    import torch.distributed as dist

    half = dist.get_world_size() // 2
    peer = (rank + half) % (2 * half)
    given, got = torch.ones(_PROBE_BYTES // 4), torch.empty(_PROBE_BYTES // 4)
    shares = []
    for _ in range(4):
        dist.barrier()
        start = time.process_time()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, given, peer), dist.P2POp(dist.irecv, got, peer)]
        ):
            work.wait()
        shares.append((time.process_time() - start) * 1e6 / _PROBE_BYTES)
    return statistics.median(shares[1:])


@contextlib.contextmanager
def _timed(row: dict[str, list[float]], phase: str) -> Iterator[None]:
    start, sent = time.perf_counter(), int(_SENT.read_text())
    yield
    row[phase].append(time.perf_counter() - start)
    row[f"{phase} sent"].append(int(_SENT.read_text()) - sent)


def _trained_in_turn(call: Mapping[str, Any], spec: Any, rank: int) -> dict[str, Any]:
    """Of each mode the seconds of each phase and the bytes that its host sent meanwhile, and what was predicted."""
    import torch.distributed as dist

    model = MODELS[call["model"]]
    rows: dict[str, Any] = {}
    trainers: dict[str, modes.Trainer] = {}
    for name in call["modes"]:
        mode, factor = _planned_as(name)
        os.environ[common.HARDWARE] = _hardware_file(call["folder"], spec, factor, rank)
        try:
            trainers[name] = modes.build(mode, model, call["dtype"])
        except modes.Skip as why:
            rows[name] = {"skipped": str(why)}
            continue
        for step in range(call["warmup"]):
            trainers[name].step(*model.data(step, rank))
        rows[name] = {f"{phase}{what}": [] for phase in PHASES for what in ("", " sent")}
        rows[name]["predicted_s"] = _predicted(trainers[name].model) if mode.startswith("zero") else None
        if rank == 0:
            print(f"  {name}: ready", flush=True)
    gc.collect()
    for step in range(call["steps"]):
        batch = model.data(call["warmup"] + step, rank)
        for name, trainer in trainers.items():
            row = rows[name]
            dist.barrier()
            with _timed(row, "forward"):
                loss = trainer.forward(*batch)
            with _timed(row, "backward"):
                trainer.backward(loss)
            with _timed(row, "update"):
                trainer.update()
            del loss
    return rows


PHASES = ("forward", "backward", "update")


def _hardware_file(folder: str, spec: Any, factor: float, rank: int) -> str:
    """Each rank has its own copy, and all are equal."""
    between = spec.between_hosts
    rates = {k: factor * getattr(between, k) for k in ("bytes_per_us", "host_bytes_per_us")}
    file = Path(folder, f"hardware.{factor:g}.{rank}.json")
    file.write_text(dataclasses.replace(spec, between_hosts=dataclasses.replace(between, **rates)).to_json())
    return str(file)


def _predicted(model: Any) -> float:
    import zero_compiler as zero

    frames = zero.inspect(model).frames
    return sum(t.total_us for f in frames for phase, t in f.timelines.items() if phase != "inference") / 1e6


# Tables -----------------------------------------------------------------------------------------------------------


def _slowest(ranks: Sequence[Mapping[str, Any]], name: str, *phases: str) -> list[float]:
    """Seconds of some phases in each step, of the rank that took longest."""
    rows = [rank["modes"][name] for rank in ranks]
    sums = [[sum(parts) for parts in zip(*(row[p] for p in phases), strict=True)] for row in rows]
    return [max(times) for times in zip(*sums, strict=True)]


def _sent(ranks: Sequence[Mapping[str, Any]], name: str, phase: str) -> float:
    """Bytes of the host that sends most; its ranks all read the same counter."""
    return max(statistics.median(rank["modes"][name][f"{phase} sent"]) for rank in ranks)


def limit_s(ranks: Sequence[Mapping[str, Any]], name: str, per_host: int, cores: int) -> float:
    """Seconds of forward and backward that a mode cannot pass, for the bytes that it sends in each."""
    rate = ranks[0]["between"]["host_bytes_per_us"]
    socket = max(rank["socket_us_per_byte"] for rank in ranks)
    crowded = max(1.0, 2 * per_host / cores)  # ranks that share a core: their sockets' work adds up

    def least(phase: str) -> float:
        sent = _sent(ranks, name, phase)
        alone = statistics.median(_slowest(ranks, ALONE, phase))
        return max(sent / rate / 1e6, alone + crowded * socket * sent / per_host / 1e6)

    return least("forward") + least("backward")


def table_of(chosen: Sequence[str], ranks: Sequence[Mapping[str, Any]], per_host: int) -> list[list[str]]:
    """A row for each mode."""
    ddp = next((n for n in chosen if n.startswith("ddp") and "skipped" not in ranks[0]["modes"][n]), None)
    return [_row(name, ranks, per_host, ddp) for name in chosen]


def _row(name: str, ranks: Sequence[Mapping[str, Any]], per_host: int, ddp: str | None) -> list[str]:
    first = ranks[0]["modes"][name]
    if "skipped" in first:
        return [name, first["skipped"], *[""] * (len(HEAD) - 2)]
    step = _slowest(ranks, name, *PHASES)
    share = "" if ddp is None else common.show(_ratios(step, _slowest(ranks, ddp, *PHASES)), 2)
    both = statistics.median(_slowest(ranks, name, "forward", "backward"))
    sent = sum(_sent(ranks, name, phase) for phase in PHASES) / 1e6
    limit = limit_s(ranks, name, per_host, common.cores())
    predicted, off = "", ""
    if first["predicted_s"] is not None:
        seconds = max(rank["modes"][name]["predicted_s"] for rank in ranks)
        predicted, off = f"{seconds * 1e3:.0f}", f"{seconds / both - 1:+.0%}"
    cells = [common.show(common.spread(step), 0, 1e3), share, f"{sent:.0f}", f"{both * 1e3:.0f}"]
    return [name, *cells, f"{limit * 1e3:.0f}", f"{both / limit:.2f}", predicted, off]


def _ratios(times: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    return common.spread([a / b for a, b in zip(times, other, strict=True)])


if __name__ == "__main__":
    main()
