"""The command line: ``zero-compiler`` (also ``python -m zero_compiler``)."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import torch_versions
from ..cost import hardware
from ..cost.cost import ONEDNN_GAIN
from ..errors import ConfigError, MemoryBudgetError, ZeroError
from .flags import with_config
from .kept_files import kept_files
from .limits import MOST_RANKS, MOST_TOKENS

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # its boxes cut the names of options short
    help="ZeRO as an ahead-of-time compiler for PyTorch.",
)
console = Console(soft_wrap=True)
DOES_NOT_FIT = 3  # exit status of a plan that is more than the hardware, or a budget, has
NO_ANSWER = 1  # exit status of a search that was ended before anything was known
MODEL_HELP = (
    "module:function that returns (model, example_inputs), with arguments where it takes some, 'my:make(layers=4)'; "
    "or a transformers configuration: config.json, a folder with one, or 'LlamaConfig(hidden_size=4096)'"
)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows what is being done, and for how long: on a terminal in place, else a line for each, on standard error."""
    shown = Console(stderr=True, soft_wrap=True)
    if not shown.is_terminal:
        yield lambda line: shown.print(line, highlight=False, markup=False)
        return
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=shown, transient=True
    )
    with bar:
        task = bar.add_task("")
        yield lambda line: bar.update(task, description=escape(line))


@app.command()
def doctor(
    nvme_dir: Annotated[
        list[Path] | None, typer.Option(help="also list the files that runs have left in this directory")
    ] = None,
) -> None:
    """Say what of this installation works, what a run would use, and which files earlier runs have left."""
    rows: list[tuple[str, str, bool]] = []

    def row(what: str, found: str, good: bool = True) -> None:
        rows.append((what, found, good))

    row("python", platform.python_version(), sys.version_info >= (3, 11))
    row(
        "torch",
        torch.__version__,
        torch_versions.supported(),
    )
    try:
        from ..runtime import _C

        _C.Engine(None, 0, 1).close()
        row("engine", "loads and runs")
    except Exception as error:  # any failure to load is the answer to the question that was asked
        row("engine", f"does not load: {error}; install again with --no-build-isolation", False)
    try:
        from ..storage import aio

        aio.Engine(backend="threads").close()
        refusal = aio.uring_refusal()
        row("file I/O", "io_uring" if refusal is None else f"threads; no io_uring: {refusal}")
    except Exception as error:
        row("file I/O", f"does not load: {error}; install again with --no-build-isolation", False)
    named = "zero" in torch._dynamo.list_backends(exclude_tags=())
    row('backend "zero"', "found by entry point" if named else "not found; is the package installed?", named)
    row("process groups", ", ".join(b for b in ("gloo", "nccl", "mpi") if _has(b)) or "none", _has("gloo"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    row("accelerator", str(accelerator) if accelerator is not None else "none: compute runs on the CPU")
    try:
        spec = hardware.load()
        preset = " (preset)" if hardware.is_assumed(None) else ""
        row("hardware", f"{spec.name} of {spec.date}{preset}")
    except ConfigError as error:
        row("hardware", str(error), False)
    table = Table(box=None, show_header=False)
    for what, found, good in rows:
        table.add_row(what, "ok" if good else "WRONG", found)
    console.print(table)
    for directory in nvme_dir or []:
        _list_kept(directory)
    if not all(good for _, _, good in rows):
        raise typer.Exit(1)


def _list_kept(directory: Path) -> None:
    """What runs have left in ``directory``, and how to remove what no run uses any more."""
    try:
        found = list(kept_files(str(directory)))
    except OSError as error:
        raise ConfigError(f"--nvme-dir {str(directory)!r} cannot be listed: {error.strerror}") from None
    left = [kept for kept in found if not kept.in_use]
    console.print(f"files of runs in {directory}: {len(found)}", highlight=False, markup=False)
    for kept in found:
        state = (
            f"in use by process {kept.pid}" if kept.in_use else f"left by process {kept.pid}, which has ended"
        )
        console.print(f"  {kept.path}: {kept.nbytes:,} bytes, {state}", highlight=False, markup=False)
    if left:
        total = sum(kept.nbytes for kept in left)
        paths = " ".join(shlex.quote(kept.path) for kept in left)
        console.print(f"{total:,} bytes are freed by: rm -- {paths}", highlight=False, markup=False)


def _has(backend: str) -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_backend_available(backend)


# Options that several commands have.
_Sequence = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST_TOKENS, help="tokens of a row; default: 2,048, or as many as the model has positions"
    ),
]
_Device = Annotated[
    str, typer.Option(help="kind of device that computes: cpu or cuda, which need not be here")
]


# Long: one argument for each option.
@app.command()
@with_config
def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    world: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="number of ranks to plan for")] = 1,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_TOKENS,
            help="rows of tokens a rank, for a model that comes without inputs; default: 1",
        ),
    ] = None,
    sequence: _Sequence = None,
    device: _Device = "cpu",
    replicas: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="of the model, each on its part of the ranks")
    ] = 1,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, help="calls of the model in a step, each with --batch rows")
    ] = 1,
    what_helps: Annotated[
        bool, typer.Option("--what-helps", help="also plan what would shorten the step; Ctrl-C ends that")
    ] = False,
    brief: Annotated[bool, typer.Option(help="bytes and times only, no instructions")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write all of the plan here")] = None,
    html: Annotated[Path | None, typer.Option(help="also draw it: a page that needs nothing else")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="also write the timeline, for Perfetto or chrome://tracing")
    ] = None,
    **fields: object,
) -> None:
    """Plan a model for any number of ranks, on this machine: nothing is run and nothing of it is allocated.

    The first line says whether it fits the hardware, and if not, the least change that does; so does the exit status: 0
    where it fits, 3 where it does not, 2 where what is asked is wrong. Unless --memory-budget-bytes is given, the
    budget is what the device has less the reserve that its hardware file states.
    """
    from .fitting_plan import Asked, fitting_report
    from .model_source import model_source
    from .what_helps import with_help

    for option, path in (("--json", json_path), ("--html", html), ("--trace", trace)):
        _check_folder(option, path)
    with _progress() as say:
        say(f"building {model}")
        source = model_source(model, batch, sequence)
        asked = Asked(source, world, device, fields, source.batch, replicas, gradient_accumulation_steps)
        made = fitting_report(asked, say)
        if what_helps:
            made = with_help(asked, made, say)
    console.print(made.summary() if brief else str(made), highlight=False, markup=False)
    for path, save in ((json_path, made.save_json), (html, made.save_html), (trace, made.save_trace)):
        if path is not None:
            save(str(path))
            console.print(f"written: {path}")
    if made.verdict is not None and made.verdict.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


@app.command()
def explain(
    output: Annotated[Path, typer.Option(help="the page; it needs nothing else")] = Path("iteration.html"),
) -> None:
    """Explain one iteration: a page on which two small models train on two ranks, step by step, at every stage and with
    files: which bytes lie where, what moves, and what is freed."""
    from .explain import page, stories

    _check_folder("--output", output)
    with _progress() as say:
        made = page(stories(say))
    output.write_text(made, encoding="utf-8")
    console.print(f"written: {output}", highlight=False, markup=False)


@app.command()
def figures(
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="figures to make, by name; default: all of them")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="also write them here, as a page")] = None,
) -> None:
    """Plan anew what the papers on ZeRO and ZeRO-Infinity report, and show each number beside theirs, with the
    deviation and its reason. Nothing is run and nothing is allocated.

    Takes some minutes; each figure is shown when it is done, and Ctrl-C ends it. Names: states, volume, largest, nodes,
    placement, wide-layer, throughput, scaling, overlap.
    """
    from .figures import catalogue, page

    _check_folder("--markdown", markdown)
    catalogue.check(only or ())
    done = []
    with _progress() as say:
        try:
            for figure in catalogue.made(only or (), say):
                done.append(figure)
                console.print(figure.markdown(), "\n", highlight=False, markup=False)
        except KeyboardInterrupt:
            console.print("interrupted: the figures that follow were not made")
            raise typer.Exit(NO_ANSWER) from None
    if markdown is not None:
        markdown.write_text(page.page(done), encoding="utf-8")
        console.print(f"written: {markdown}", highlight=False, markup=False)


@app.command()
@with_config
def fit(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{MODEL_HELP}; of an argument that is ?, 'my:make(layers=?)', the largest that fits"
        ),
    ],
    world: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="number of ranks; default: as few as do")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_TOKENS, help="rows of tokens a rank; default: as many as suit best"),
    ] = None,
    sequence: _Sequence = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_TOKENS, help="rows of a step on all ranks, in as many micro-batches as that takes"
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="at least so many, each on its part of the ranks")
    ] = 1,
    device: _Device = "cpu",
    seconds: Annotated[
        float, typer.Option(min=1, help="to look for an answer: then the best so far is shown")
    ] = 60,
    **fields: object,
) -> None:
    """Say what to set so that a model trains on a machine, and how fast that is: stage, replicas, what rests where,
    what is made again, rows of a rank. Nothing is run and nothing of it is allocated.

    Shows the settings than which none is both faster and smaller, and the best of them as lines to paste. Ctrl-C shows
    the best so far. Exit status: 0 where something fits, 3 where nothing does, 2 where what is asked is wrong, 1 where
    the time was over before anything was known.
    """
    from .fit.question import Question, answer

    asked = Question(model, fields, world, batch, sequence, device, replicas, global_batch, seconds)
    with _progress() as say:
        found = answer(asked, say)
    console.print(found.text(), highlight=False, markup=False)
    if not found.fits:
        raise typer.Exit(DOES_NOT_FIT if found.known else NO_ANSWER)


@app.command()
def calibrate(
    world: Annotated[
        list[int] | None, typer.Option(min=1, help="numbers of ranks to measure collectives with")
    ] = None,
    directory: Annotated[Path | None, typer.Option(help="measure the disk under this directory")] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="of each rank; default: OMP_NUM_THREADS, else one, as torchrun sets it, or all cores for one rank",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="write here instead of this machine's cache file")
    ] = None,
) -> None:
    """Measure this machine once; later compiles plan with the result.

    Started by torchrun, it measures the hosts on which the ranks are and what is between them: rank 0 measures its
    host, then all ranks together. Rank 0 writes --output; without it the first rank of each host keeps the result in
    that host's cache file.
    """
    from .calibration.calibrate import calibrate as measure
    from .calibration.measure_hosts import job, started_together, together

    where = str(directory) if directory else None
    with _progress() as say:
        if started_together():
            with job() as of:
                worlds = world or [len(of.hosts[0])]
                spec = together(
                    of, lambda: measure(worlds, where, say, threads), say if of.rank == 0 else _silent
                )
                keeps = of.rank == 0 or (output is None and of.place == 0)
                shows = of.rank == 0
        else:
            spec, keeps, shows = measure(world or [2], where, say, threads), True, True
    path = output or hardware.cache_path()
    if keeps:
        _keep(spec, path)
    if shows:
        _show(spec, directory is not None)
        console.print(f"kept in {path}")


def _silent(line: str) -> None:
    """Of the ranks but the first: one tells how far calibration is."""


def _keep(spec: hardware.HardwareSpec, path: Path) -> None:
    """Write a hardware file, whole or not at all: hosts may have their caches in one folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}")
    made.write_text(spec.to_json() + "\n")
    made.replace(path)


# Long: one line for each number.
def _show(spec: hardware.HardwareSpec, files: bool) -> None:
    """What calibration has found."""
    table = Table(box=None, show_header=False)
    for dtype, rate in spec.matmul_flops_per_us.items():
        table.add_row(f"matrix product, {dtype}", f"{rate / 1e3:,.1f} GFLOP/s")
    for dtype, rate in spec.onednn_flops_per_us.items():
        table.add_row(f"matrix product, {dtype}, by oneDNN", f"{rate / 1e3:,.1f} GFLOP/s")
        faster = rate > ONEDNN_GAIN * spec.matmul_flops_per_us[dtype]
        table.add_row(f"large products, {dtype}, go to", "oneDNN" if faster else "torch's BLAS")
    table.add_row("memory traffic of a product", f"{spec.matmul_traffic:.1f} times beside arithmetic")
    table.add_row("memory", f"{spec.memory_bytes_per_us / 1e3:,.1f} GB/s")
    table.add_row("sums in cache", f"{spec.vector_per_us / 1e3:,.2f} G elements/s")
    table.add_row("special functions in cache", f"{spec.special_per_us / 1e3:,.2f} G elements/s")
    for dtype, share in spec.vector_share.items():
        if dtype != "float32":
            special = f", special functions {spec.special_share[dtype]:.2f}"
            table.add_row(f"in {dtype}", f"sums {share:.2f} of float32's{special}")
    table.add_row("one kernel", f"{spec.kernel_us:,.1f} us")
    for phase, python in (("forward", spec.forward_python), ("backward", spec.backward_python)):
        table.add_row(
            f"Python around a {phase}", f"{python.call_us:,.0f} us + {python.param_us:,.1f} us a parameter"
        )
    for c in spec.collectives:
        table.add_row(
            f"{c.kind}, {c.world} ranks, {c.transport}",
            f"{c.link.latency_us:,.0f} us + {c.link.bytes_per_us / 1e3:,.2f} GB/s",
        )
    if (between := spec.between_hosts) is not None:
        table.add_row(
            f"between hosts of {spec.devices_per_host}, one rank",
            f"{between.latency_us:,.0f} us + {between.bytes_per_us / 1e3:,.3f} GB/s",
        )
        table.add_row(
            f"between hosts of {spec.devices_per_host}, all ranks",
            f"{between.host_bytes_per_us / 1e3:,.3f} GB/s a host",
        )
    table.add_row("host to device", f"{spec.host_device.bytes_per_us / 1e3:,.1f} GB/s")
    if files:
        table.add_row("file read", f"{spec.nvme_read.bytes_per_us / 1e3:,.2f} GB/s")
        table.add_row("file write", f"{spec.nvme_write.bytes_per_us / 1e3:,.2f} GB/s")
    console.print(table)


@app.command("io-bench")
def io_bench(
    directory: Annotated[
        Path, typer.Argument(help="where the file is made, for instance the nvme_dir of a run")
    ],
    nbytes: Annotated[int, typer.Option("--bytes", help="size of the file")] = 1 << 30,
    seconds: Annotated[float, typer.Option(help="time of one measurement")] = 1.0,
    rounds: Annotated[int, typer.Option(help="measurements of the best, in turn with fio")] = 5,
    backend: Annotated[str, typer.Option(help="auto, uring or threads")] = "auto",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write every measurement here")
    ] = None,
) -> None:
    """Measure file I/O under a directory, with fio beside it where fio is installed, and say what suits it best."""
    from .io_bench import bench

    _check_folder("--json", json_path)
    with console.status("measuring") as status:
        made = bench(
            directory, nbytes=nbytes, seconds=seconds, rounds=rounds, backend=backend, progress=status.update
        )
    direct = "O_DIRECT" if made.direct else "no O_DIRECT: through the page cache"
    console.print(f"{made.directory}: {made.backend}, {direct}; fio: {made.fio}")
    table = Table("GB/s", "zero", "blocks x depth", "fio", "blocks x depth", "zero/fio", box=None)
    for row in made.rows:
        beside = ["", "", ""]
        if row.fio and row.fio_block_bytes and row.ratio:
            beside = [
                f"{row.fio / 1e9:.2f}",
                f"{row.fio_block_bytes >> 10} KiB x {row.fio_depth}",
                f"{row.ratio:.2f}",
            ]
        name = "both at once" if row.mode == "both" else row.mode
        table.add_row(name, f"{row.ours / 1e9:.2f}", f"{row.block_bytes >> 10} KiB x {row.depth}", *beside)
    console.print(table)
    if json_path is not None:
        json_path.write_text(made.to_json() + "\n")
        console.print(f"written: {json_path}")


@app.command(
    add_help_option=False,
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
    },
)
def run(ctx: typer.Context) -> None:
    """Start a script on several ranks (flags of torchrun, fields of Config, SCRIPT, its arguments) and train sharded
    what it trains by transformers, TRL, accelerate or Lightning."""
    from .run import main as start

    start(ctx.args)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="folder that torch.distributed.checkpoint has written")],
    out: Annotated[Path, typer.Argument(help="folder for the safetensors files; made where there is none")],
    key: Annotated[
        str | None,
        typer.Option(
            help='under which the weights were saved, such as training.model; "" is the checkpoint itself; default: '
            "model, else the only place that holds weights"
        ),
    ] = None,
    max_file_bytes: Annotated[
        int, typer.Option(min=1, help="bytes of weights in one file, at most")
    ] = 5_000_000_000,
    config: Annotated[
        Path | None,
        typer.Option(
            help="config.json to copy beside them, or the folder that it is in; weights that its model ties are "
            "written once"
        ),
    ] = None,
) -> None:
    """Write the weights of a checkpoint of any number of ranks as files that from_pretrained reads, in one process that
    holds one tensor at a time."""
    from .export import export as write

    with console.status("reading") as status:
        found, count = write(
            checkpoint, out, key=key, max_file_bytes=max_file_bytes, config=config, progress=status.update
        )
    under = f" under {found!r}" if found else ""
    console.print(f"{count} tensors{under} written to {out}", highlight=False, markup=False)


@app.command()
def compare(
    a: Annotated[
        Path,
        typer.Argument(help="JSON file of a plan (`plan --json`, save_json), or its trace (`plan --trace`)"),
    ],
    b: Annotated[
        Path, typer.Argument(help="that of another plan; or the trace that torch.profiler exported")
    ],
    rows: Annotated[int, typer.Option(min=1, help="most rows to print, of traces")] = 40,
) -> None:
    """Lay two plans side by side, and say what differs and which decision makes it differ; or the trace of a plan and
    that of a profile: predicted beside measured for each instruction and lane, largest difference first."""
    from ..report.compare_traces import compare_traces, is_trace
    from . import compare_plans

    if is_trace(a) or is_trace(b):
        console.print(compare_traces(a, b).text(rows), highlight=False, markup=False)
        return
    for line in compare_plans.compare(compare_plans.read(str(a)), compare_plans.read(str(b))):
        console.print(line, highlight=False, markup=False)


def _check_folder(option: str, path: Path | None) -> None:
    """Before what takes long."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(path.parent)!r} to write to", param_hint=option)


def main() -> None:
    """Entry point: errors of this project are printed as one sentence."""
    try:
        app()
    except ZeroError as error:
        console.print(f"error: {error}", style="bold red")
        sys.exit(DOES_NOT_FIT if isinstance(error, MemoryBudgetError) else 2)


if __name__ == "__main__":
    main()
