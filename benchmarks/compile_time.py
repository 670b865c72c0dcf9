"""Compile time against depth, each mode and depth in a fresh process with empty caches.

    python benchmarks/compile_time.py --layers 4,8,16,32,64,96

Compile time is the time of the first two steps less that of two later ones. GPT blocks of width 256, sequence 64,
batch 2, one rank.

"ours" is all that we do between capture and the compilation of segments: every pass with the verifier after
it, emission, packing, the search for prefetch, the simulation. "passes" is the part of it inside of passes. "torch's"
is what its own functions take in between: Inductor's joint passes and the min-cut that finds what backward saves.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

import common
import modes
from bench import _list
from models import Spec, gpt

MODES = ["local-compiled", "fsdp2-compiled", "zero3"]
PARTS = {"ours": "ours_s", "passes": "passes_s", "torch's": "torch_s"}


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("--modes", type=_list, default=MODES)
    parser.add_argument("--layers", type=_list, default=["4", "8", "16", "32", "64", "96"])
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    rows: list[dict[str, Any]] = []
    for layers in map(int, args.layers):
        for mode in args.modes:
            with tempfile.TemporaryDirectory(prefix="zero-compile-") as cache:
                env = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
                call = {"mode": mode, "layers": layers}
                (row,) = common.run_ranks(os.path.abspath(__file__), call, 1, "default", env)
            rows.append({"mode": mode, "layers": layers, **row})
            print(f"  {layers} layers, {mode}: {row['compile_s']:.1f} s", flush=True)
    shares = [text for part in PARTS for text in (part, "share")]
    head = ["layers", *args.modes, *shares, "segments", "compiled"]
    table = []
    for layers in map(int, args.layers):
        of = {r["mode"]: r for r in rows if r["layers"] == layers}
        ours = next((r for k, r in of.items() if k.startswith("zero")), None)
        extra: list[str] = []
        if ours:
            for part in PARTS.values():
                extra += [f"{ours[part]:.2f}", f"{ours[part] / ours['compile_s']:.1%}"]
            extra += [str(ours["segments"]), str(ours["compiled"])]
        table.append([layers, *(f"{of[k]['compile_s']:.1f}" for k in args.modes), *extra])
    common.print_table("Compile time, seconds", head, table)
    if args.json:
        text = common.heading("Compile time", m) + common.table("Compile time, seconds", head, table)
        common.save(args.json, {"machine": m, "rows": rows}, text)


def measure(call: dict[str, Any]) -> dict[str, Any]:
    common.init_group()
    spec = Spec("", lambda: gpt(call["layers"], 256, 512, 64), 512, 64, 2)
    spent = clocked() if call["mode"].startswith("zero") else {}
    trainer = modes.build(call["mode"], spec, "fp32")
    seconds = []
    for i in range(7):
        batch = spec.data(i, 0)
        start = time.perf_counter()
        trainer.step(*batch)
        seconds.append(time.perf_counter() - start)
    steady = statistics.median(seconds[2:])
    row = {"compile_s": sum(seconds[:2]) - 2 * steady, "step_s": steady}
    if call["mode"].startswith("zero"):
        sharded_model = trainer.model._zero.sharded_model
        row["torch_s"] = spent["_inductor_joint_passes"] + spent["min_cut_rematerialization_partition"]
        row["ours_s"] = spent["partition"] + spent["_phase"] - spent["compile_segments"] - row["torch_s"]
        row["passes_s"] = sum(f.trace.seconds for f in sharded_model.frames)
        row["segments"] = sum(len(p.structures) for f in sharded_model.frames for p in f.programs.values())
        row["compiled"] = sum(c.compiled for c in sharded_model.compilers.values())
    return row


def clocked() -> dict[str, float]:
    """Seconds spent in parts of a frame's compilation, from now on."""
    from zero_compiler.compile import backend, budget_search

    parts = {
        "partition": backend._FrameCompiler,
        "_phase": backend._FrameCompiler,
        "compile_segments": backend,
        "_inductor_joint_passes": backend,
        "min_cut_rematerialization_partition": budget_search,
    }
    spent = dict.fromkeys(parts, 0.0)

    def watch(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        setattr(owner, name, timed)

    for name, owner in parts.items():
        watch(owner, name)
    return spent


if __name__ == "__main__":
    main()
