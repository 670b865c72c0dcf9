"""What each way to hold less is worth: peak memory and step time with it and without, predicted and measured.

    python benchmarks/without.py DIR --json benchmarks/results/without/HOST.json

One case a way, on a model that shows it; the first row of a case is without:
  weights      linear layers whose weights are gathered and reduced in tiles (`tile_bytes`)
  embedding    the same of an embedding's rows, a few of which each batch reads
  experts      the same of weights stacked for `bmm`
  convolutions the same of convolutions, by output channel
  logits       a vocabulary of 32000: logits, loss and gradient whole, in tiles of tokens (which is the default), and in
               tiles of the vocabulary too, with `tile_bytes` below those of the head's weight
  mlps         a block whose MLP is wider than all else, whole and, under `memory_budget_bytes`, in tiles of tokens
  activations  a GPT on a long sequence: everything saved; half of that by `activation_budget_bytes`; near the least
               that can be, where MLPs go in tiles of tokens; and without a budget in files, as many as the disk hides
  parts        a GPT on 2 x 2 ranks, tensor-parallel over the second dimension: saved whole on both ranks of a pair, in
               parts (Pa of ZeRO-R), and with parts in files too
  hybrid       a GPT on four ranks: all of them shard, and two shard what the other two have as well
Stage 3, fp32, AdamW, one thread a rank, ranks connected by gloo (`transport="c10d"`: shared memory would hold gathered
weights once for all). Every row runs in fresh processes with an allocator that keeps freed pages.

Peak is the largest number of live bytes of torch's CPU allocator in steps after warm-up, and the buffers that files are
written from and read to, of the rank with the most; its batch, which is the caller's and in no plan, is among them.
Time is that of forward and backward of the slowest rank, median of the steps with the 10th and 90th percentile. The
predictions are the plan's. "Apart" is how far the loss after all steps, and the norm of all gradients in the first, lie
from those of the row without, relative. Activations on the host of an accelerator are not measured here: on CPU ranks
everything lies on the host.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import models
import torch
import torch.nn.functional as F
from torch import nn

MIB = 1 << 20
WHOLE = 1 << 40  # tile_bytes that nothing passes
HEAD = 32
ALLOCATOR = "keep"


class Wide(nn.Module):
    """Residual pairs of linear layers, wider than the batch is long."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            x = x + down(F.relu(up(x)))
        return F.mse_loss(x, y)


class Table(nn.Module):
    """An embedding of many rows, and a linear layer."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(rows, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.out(self.table(x)), y)


class Mixed(nn.Module):
    """Experts that each have a queue of the batch."""

    def __init__(self, layers: int, count: int, width: int, hidden: int) -> None:
        super().__init__()
        for name, shape in (("up", (count, width, hidden)), ("down", (count, hidden, width))):
            weights = (torch.randn(shape) * shape[1] ** -0.5 for _ in range(layers))
            self.register_module(name, nn.ParameterList(weights))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for k in range(len(self.up)):
            x = x + torch.bmm(F.relu(torch.bmm(x, self.up[k])), self.down[k])
        return F.mse_loss(x, y)


class Expanded(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inp, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        return F.mse_loss(x + self.down(F.gelu(self.up(x))), y)


class Convolved(nn.Module):
    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return F.mse_loss(x, y)


class Attention(nn.Module):
    """With as many heads as the rows that a tensor-parallel rank has of each weight make."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def separate(layers: int, width: int, vocab: int, length: int) -> models.LM:
    """A GPT whose attention can be cut between tensor-parallel ranks."""
    model = models.gpt(layers, width, vocab, length)
    for block in model.blocks:
        block.attn = Attention(width)
    return model


@dataclass(frozen=True)
class Size:
    """Of the models of all cases."""

    wide: tuple[int, int]  # layers and width
    rows: int
    head: tuple[int, int, int, int]  # layers, width, vocabulary and sequence
    gpt: tuple[int, int, int, int]
    pairs: tuple[int, int, int, int]
    batch: int
    table: tuple[int, int]  # rows and width
    experts: tuple[int, int, int, int]  # layers, experts, width and hidden
    convolutions: tuple[int, int, int]  # layers, channels and side of a picture
    mlps: tuple[int, int, int]  # width, hidden and tokens


SIZES = {
    "small": Size(
        wide=(3, 1536),
        rows=64,
        head=(2, 256, 32000, 128),
        gpt=(4, 256, 512, 512),
        pairs=(4, 256, 512, 256),
        batch=4,
        table=(65536, 512),
        experts=(3, 8, 768, 1536),
        convolutions=(3, 1024, 4),
        mlps=(256, 4096, 2048),
    ),
    "tiny": Size(
        wide=(2, 128),
        rows=8,
        head=(1, 64, 512, 32),
        gpt=(2, 64, 64, 64),
        pairs=(2, 64, 64, 64),
        batch=2,
        table=(1024, 32),
        experts=(2, 4, 32, 64),
        convolutions=(2, 32, 4),
        mlps=(32, 256, 512),
    ),
}


@dataclass(frozen=True)
class Case:
    """Ways to train one model: fields of `zero.shard` by the name of the row, that without first.

    A field that is a name of :data:`SHARES` and a number is that share of what the name stands for. ``mesh`` is a
    function that makes it of the model.
    """

    about: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[torch.Tensor, ...]]
    ways: dict[str, dict[str, Any]]
    ranks: int = 2
    alike: int = 1  # ranks beside each other with one batch


# What backward holds in the first row; the least that it can; the peak planned for the first row.
SHARES = ("held", "least", "predicted_peak")


def cases(size: Size, folder: str) -> dict[str, Case]:
    files = {"offload_activations": "nvme", "nvme_dir": folder}
    layers, width = size.wide
    tile = 4 * width * width * 4 // 8

    def numbers(*shape: int) -> Callable[[int, int], tuple[torch.Tensor, ...]]:
        """Two tensors of random numbers."""

        def batch(step: int, rank: int) -> tuple[torch.Tensor, ...]:
            draw = torch.Generator().manual_seed(1000 * step + rank)
            return tuple(torch.randn(shape, generator=draw) for _ in range(2))

        return batch

    def looked_up(step: int, rank: int) -> tuple[torch.Tensor, ...]:
        draw = torch.Generator().manual_seed(1000 * step + rank)
        rows, width = size.table
        return torch.randint(0, rows, (size.rows,), generator=draw), torch.randn(
            size.rows, width, generator=draw
        )

    def lm(shape: tuple[int, int, int, int], make: Any = models.gpt) -> tuple[str, Any, Any]:
        spec = models.Spec("", lambda: make(*shape), shape[2], shape[3], size.batch)
        about = (
            "GPT, {} layers, width {}, vocabulary {}, sequence {}".format(*shape) + f", batch {size.batch}"
        )
        return about, spec.build, spec.data

    def tiled(nbytes: int) -> dict[str, dict[str, Any]]:
        name = f"tiles of {nbytes >> 10} KiB" if nbytes >= 1 << 10 else f"tiles of {nbytes} bytes"
        return {"whole": {"tile_bytes": WHOLE}, name: {"tile_bytes": nbytes}}

    experts, (count, channels, side), (narrow, hidden, tokens) = size.experts, size.convolutions, size.mlps
    return {
        "weights": Case(
            f"{layers} pairs of linear layers, {width} to {4 * width} and back, batch {size.rows}",
            lambda: Wide(layers, width),
            numbers(size.rows, width),
            tiled(tile),
        ),
        "embedding": Case(
            "an embedding of {} rows of {}".format(*size.table) + f", batch {size.rows}",
            lambda: Table(*size.table),
            looked_up,
            tiled(size.table[0] * size.table[1] * 4 // 8),
        ),
        "experts": Case(
            "{} layers of {} experts, {} to {} and back".format(*experts) + f", {size.rows // 4} rows each",
            lambda: Mixed(*experts),
            numbers(experts[1], size.rows // 4, experts[2]),
            tiled(experts[1] * experts[2] * experts[3] * 4 // 8),
        ),
        "convolutions": Case(
            f"{count} convolutions of 3 x 3, {channels} channels, pictures of {side} x {side}, batch {size.batch}",
            lambda: Convolved(count, channels),
            numbers(size.batch, channels, side, side),
            tiled(channels * channels * 9 * 4 // 8),
        ),
        "logits": Case(
            *lm(size.head),
            {
                "whole": {"tile_bytes": WHOLE},
                "tiles of tokens": {},
                "the head's weight in tiles too": {"tile_bytes": 8 * MIB},
            },
        ),
        "mlps": Case(
            f"an MLP, {narrow} to {hidden} and back, {tokens} tokens",
            lambda: Expanded(narrow, hidden),
            numbers(1, tokens, narrow),
            {"whole": {}, "a budget of half": {"memory_budget_bytes": ("predicted_peak", 0.5)}},
        ),
        "activations": Case(
            *lm(size.gpt),
            {
                "all saved": {},
                "a budget of half": {"activation_budget_bytes": ("held", 0.5)},
                "the least, and a tenth": {"activation_budget_bytes": ("least", 1.1)},
                "in files": files,
            },
        ),
        "parts": Case(
            *lm(size.pairs, separate),
            {
                "whole on both": {"mesh": pairs},
                "in parts": {"mesh": pairs, "partition_activations": True},
                "in parts, and in files": {"mesh": pairs, "partition_activations": True, **files},
            },
            ranks=4,
            alike=2,
        ),
        "hybrid": Case(
            *lm(size.pairs),
            {"all four shard": {}, "two shard, two replicate": {"mesh": hybrid}},
            ranks=4,
        ),
    }


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("dir", help="a folder on the disk that files go to")
    parser.add_argument("--cases", type=lambda s: s.split(","), default=list(cases(SIZES["tiny"], "")))
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--compute", choices=("inductor", "aten"), default="inductor")
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    result: dict[str, Any] = {"machine": m, "cases": []}
    pages = []
    machines: dict[int, str] = {}  # by ranks
    for name in args.cases:
        case = cases(SIZES[args.size], args.dir)[name]
        if case.ranks not in machines:
            machines[case.ranks] = common.hardware(args.hardware, case.ranks, ALLOCATOR, args.dir)
        os.environ[common.HARDWARE] = machines[case.ranks]
        rows = {}
        for way in case.ways:
            rows[way] = run(args, name, case, way, rows)
            print(f"  {name}, {way}: {_mib(rows[way]['peak'])} MiB", flush=True)
        result["cases"].append({"case": name, "about": case.about, "ways": rows})
        pages.append(report(name, case, rows))
        print(pages[-1], flush=True)
        if args.json:
            text = common.heading("With and without", m) + "\n".join(pages)
            common.save(args.json, result, text)


def run(args: Any, name: str, case: Case, way: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One row: the most that a rank took, and the time of the slowest."""
    call = {k: getattr(args, k) for k in ("dir", "size", "steps", "warmup", "compute")}
    call |= {"case": name, "way": way, "budget": None}
    for of, share in (v for v in case.ways[way].values() if isinstance(v, tuple)):
        if of == "least":
            known = least(
                case, {k: v for k, v in case.ways[way].items() if not isinstance(v, tuple)}, args.compute
            )
        else:
            known = rows[next(iter(case.ways))][of]
        call["budget"] = math.ceil(known * share)
    found = common.run_ranks(os.path.abspath(__file__), call, case.ranks, ALLOCATOR)
    return {
        "budget": call["budget"],
        "seconds": [max(each) for each in zip(*(f["seconds"] for f in found))],
        **{k: max(f[k] for f in found) for k in ("peak", "predicted_peak", "predicted_s", "held")},
        **{k: found[0][k] for k in ("loss", "norm", "plan")},
    }


def least(case: Case, fields: dict[str, Any], compute: str) -> int:
    """Fewest bytes of activations with which a plan can be made."""
    from zero_compiler.errors import MemoryBudgetError
    from zero_compiler.tools.planning import plan

    with torch.device("meta"):
        model = case.model()
    fields = {"hardware": os.environ[common.HARDWARE], "compute": compute, **fields}
    try:
        plan(model, case.batch(0, 0), case.ranks, activation_budget_bytes=1, **fields)
    except MemoryBudgetError as error:
        return error.least_bytes or 1
    raise RuntimeError("one byte of activations is enough")


def measure(call: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    import zero_compiler as zero
    from zero_compiler.runtime import _C
    from zero_compiler.storage import aio

    rank, _ = common.init_group()
    case = cases(SIZES[call["size"]], call["dir"])[call["case"]]
    fields = {k: call["budget"] if isinstance(v, tuple) else v for k, v in case.ways[call["way"]].items()}
    _C.meter_install()
    torch.manual_seed(0)
    model = case.model()
    if "mesh" in fields:
        fields["mesh"] = fields["mesh"](model)
    model = zero.shard(model, stage=3, transport="c10d", hardware=os.environ[common.HARDWARE], **fields)
    compiled = torch.compile(model, backend="zero", options={"compute": call["compute"]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for i in range(call["warmup"] + call["steps"]):
        batch = case.batch(i, rank // case.alike)
        if i == call["warmup"]:
            gc.collect()
            _C.meter_reset_peak()
        dist.barrier()
        begin = time.perf_counter()
        loss = compiled(*batch)
        loss.backward()
        seconds.append(time.perf_counter() - begin)
        if i == 0:
            squares = [p.grad.full_tensor().double().square().sum() for p in model.parameters()]
            norm = float(sum(squares)) ** 0.5
        optimizer.step()
        optimizer.zero_grad()
    peak = _C.meter_peak() + aio.live_bytes()
    told = zero.inspect(model)
    (frame,) = told.frames
    us = sum(t.total_us for phase, t in frame.timelines.items() if phase != "inference")
    return {
        "seconds": seconds[call["warmup"] :],
        "peak": peak,
        "predicted_peak": told.memory.peak,
        "predicted_s": us / 1e6,
        "held": frame.held_bytes,
        "plan": planned(frame),
        "loss": loss.item(),
        "norm": norm,
    }


def pairs(model: Any) -> Any:
    """Tensor parallelism over the second dimension of 2 x 2 ranks (Shoeybi et al. 2019); the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attn.[qkv]": ColwiseParallel(),
        "blocks.*.attn.o": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    return mesh


def hybrid(_model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def planned(frame: Any) -> dict[str, int]:
    """What the plan does of each kind."""
    programs = list(frame.programs.values())
    notes = [n for p in programs for n in p.notes]
    return {
        "tiles of weights gathered": sum(bool(g.tile) for p in programs for g in p.gathers),
        "logits in tiles": sum("tiled: logits" in n for n in notes),
        "MLPs in tiles": sum("tiled: intermediate" in n for n in notes),
        "made again": len(frame.remade),
        "in parts": sum("bytes are saved: one part" in n for n in notes),
        "in files": len(frame.offloaded),
    }


def report(name: str, case: Case, rows: dict[str, dict[str, Any]]) -> str:
    head = [
        "",
        "peak MiB",
        "predicted",
        "off by",
        "ms",
        "predicted",
        "peak, with / without",
        "ms",
        "loss, norm apart",
        "the plan has",
    ]
    first = next(iter(rows.values()))
    table = []
    for way, r in rows.items():
        s = common.spread(r["seconds"])
        beside = [""] * 3
        if r is not first:
            base = common.spread(first["seconds"])["median"]
            apart = [f"{abs(r[name] / first[name] - 1):.0e}" for name in ("loss", "norm")]
            beside = [f"{r['peak'] / first['peak']:.2f}", f"{s['median'] / base:.2f}", ", ".join(apart)]
        table.append(
            [
                f"{way} ({_mib(r['budget'])} MiB)" if r["budget"] else way,
                _mib(r["peak"]),
                _mib(r["predicted_peak"]),
                f"{r['predicted_peak'] / r['peak'] - 1:+.1%}",
                common.show(s, 0, 1e3),
                f"{r['predicted_s'] * 1e3:.0f}",
                *beside,
                ", ".join(f"{n} {what}" for what, n in r["plan"].items() if n),
            ]
        )
    return common.table(f"{name}: {case.about}; {case.ranks} ranks", head, table)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.1f}"


if __name__ == "__main__":
    main()
