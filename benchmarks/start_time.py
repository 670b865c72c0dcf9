"""Time to the end of the first step, of a job that starts cold and of the same job when it starts again.

    python benchmarks/start_time.py --models gpt-6x512,llama --modes local-compiled,fsdp2-compiled,zero3

Seconds from before the model is built to the end of its first step, on the rank on which it took longest: with what
a mode builds and compiles on the way, and without starting Python and torch. "cold" finds empty caches; "warm" is the
next start in fresh processes, with what the cold one has left in Inductor's cache folder and in this project's. CPU
seconds are those of one rank, with C++ compilers that it starts itself. FSDP2 compiles block by block.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import common
import models
import modes
import torch
from bench import _list
from models import Spec
from transformers_models import decoder

MODES = ["local-compiled", "fsdp2-compiled", "zero3"]
STARTS = ("cold", "warm")


# Of the decoders of transformers that are started.
SIZES = {"vocab_size": 1024, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


def _spec(about: str, make: Callable[[], Any]) -> Spec:
    return Spec(about, make, 1024, 64, 2)


SPECS: dict[str, Spec] = {
    **models.MODELS,
    "gpt-6": _spec("GPT, 6 layers of 256", lambda: models.gpt(6, 256, 1024, 64)),
    "gpt-24": _spec("GPT, 24 layers of 256", lambda: models.gpt(24, 256, 1024, 64)),
    "llama": _spec(
        "transformers' Llama, 6 layers of 256",
        lambda: decoder("Llama", **SIZES, intermediate_size=704),
    ),
    "mixtral": _spec(
        "transformers' Mixtral, 4 layers of 256, 4 experts",
        lambda: decoder("Mixtral", **SIZES, intermediate_size=512, num_hidden_layers=4, num_local_experts=4),
    ),
}


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("--models", type=_list, default=["gpt-6x512", "gpt-24", "llama", "mixtral"])
    parser.add_argument("--modes", type=_list, default=MODES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--warm", type=int, default=2, help="warm starts, of which the median counts")
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for mode in args.modes:
            with tempfile.TemporaryDirectory(prefix="zero-start-") as cache:
                env = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, "inductor"), "XDG_CACHE_HOME": cache}
                for start in [STARTS[0], *STARTS[1:] * args.warm]:
                    call = {"mode": mode, "model": name}
                    ranks = common.run_ranks(os.path.abspath(__file__), call, args.ranks, "default", env)
                    row = {k: max(r[k] for r in ranks) for k in ranks[0]}
                    rows.append({"model": name, "mode": mode, "start": start, **row})
                    print(
                        f"  {name}, {mode}, {start}: {row['s']:.1f} s, CPU {row['cpu_s']:.1f} s", flush=True
                    )
    head = ["model", "mode", *(f"{start}, {what}" for start in STARTS for what in ("s", "CPU s"))]
    table = []
    for name in args.models:
        for mode in args.modes:
            of = [r for r in rows if (r["model"], r["mode"]) == (name, mode)]
            cells = [
                f"{statistics.median(r[what] for r in of if r['start'] == start):.1f}"
                for start in STARTS
                for what in ("s", "cpu_s")
            ]
            table.append([SPECS[name].about, mode, *cells])
    title = f"Seconds to the end of the first step, {args.ranks} ranks of one thread"
    common.print_table(title, head, table)
    if args.json:
        text = common.heading("Start", m) + common.table(title, head, table)
        common.save(args.json, {"machine": m, "rows": rows}, text)


def measure(call: dict[str, Any]) -> dict[str, float]:
    rank, _ = common.init_group()
    spec = SPECS[call["model"]]
    torch.manual_seed(0)
    begun, cpu = time.perf_counter(), _cpu_s()
    trainer = modes.build(call["mode"], spec, "fp32")
    trainer.step(*spec.data(0, rank))
    return {"s": time.perf_counter() - begun, "cpu_s": _cpu_s() - cpu}


def _cpu_s() -> float:
    """Of this process, and of those that it has started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


if __name__ == "__main__":
    main()
