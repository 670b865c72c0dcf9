"""Writes the plans of models in a canonical form, to show that a change of the code leaves every Program as it was.

    python tests/canonical_plans.py before     # at one commit
    python tests/canonical_plans.py after      # at another
    diff -r before after                       # prints nothing where all Programs are the same

A plan is all that ``zero-compiler plan --json`` and ``zero.inspect(...).save_json`` write: instructions with their
operands, byte offsets, predicted bytes and times, and what was decided. Only the seconds that passes took are left out.
Hardware files are presets and seeds are fixed, so that a plan depends on the code alone. Everything goes through the
public surface, so that one copy of this script runs on both commits: copy it to the older one where that lacks it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
for folder in (TESTS, ROOT / "benchmarks"):
    sys.path.append(str(folder))

MESH_RANKS = 4
INDUCTOR_CASES = ("inductor-budget",)


def benchmark_model(name: str) -> Any:
    """A model of ``benchmarks/models.py`` and its batch."""
    import models as found

    if not hasattr(found, "MODELS"):  # a module of this name stands among the tests as well
        found = _module(ROOT / "benchmarks" / "models.py", "benchmark_models")
    spec = found.MODELS[name]
    import torch

    tokens = torch.zeros(spec.batch, spec.length, dtype=torch.long)
    return spec.make(), (tokens, tokens)


def family_model(name: str) -> Any:
    """A small model of transformers, and its batch."""
    family = _module(TESTS / "models.py", "test_models_of_families").FAMILIES[name]
    import torch

    with torch.device("cpu"):  # a batch is drawn with a generator of the CPU
        batch = family.data(0, 0)
    return family.model(), batch


def _module(path: Path, name: str) -> Any:
    import importlib.util

    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# Each is a factory that `zero-compiler plan canonical_plans:NAME` can call.
gpt_6x512 = functools.partial(benchmark_model, "gpt-6x512")
gpt_12x1024 = functools.partial(benchmark_model, "gpt-12x1024")
llama_vocab = functools.partial(benchmark_model, "llama-vocab")
deep_60 = functools.partial(benchmark_model, "deep-60")
moe = functools.partial(benchmark_model, "moe")
gpt2 = functools.partial(family_model, "gpt2")
llama = functools.partial(family_model, "llama")
bert = functools.partial(family_model, "bert")
t5 = functools.partial(family_model, "t5")
vit = functools.partial(family_model, "vit")
mixtral = functools.partial(family_model, "mixtral")

# The plans that are made in one process: name of the case, its factory, and flags of `zero-compiler plan`.
PLANS: dict[str, tuple[str, str]] = {
    "gpt-6x512": ("gpt_6x512", "--world 2 --hardware laptop"),
    "gpt-6x512-budget": ("gpt_6x512", "--world 2 --hardware laptop --memory-budget-bytes 260000000"),
    "gpt-6x512-activations": ("gpt_6x512", "--world 2 --hardware laptop --activation-budget-bytes 60000000"),
    "gpt-12x1024-stage-2": ("gpt_12x1024", "--world 2 --hardware laptop --stage 2"),
    "gpt-12x1024-files": (
        "gpt_12x1024",
        "--world 16 --hardware dgx-h100 --param-dtype bf16 --offload-params nvme --offload-grads nvme "
        "--offload-optimizer nvme --nvme-dir .",
    ),
    "gpt-12x1024-rest-budget": (
        "gpt_12x1024",
        "--world 4 --hardware dgx-a100 --nvme-dir . --device-rest-bytes 100000000",
    ),
    "llama-vocab-tiles": ("llama_vocab", "--world 2 --hardware laptop --tile-bytes 8000000"),
    "llama-vocab-c10d": ("llama_vocab", "--world 8 --hardware dgx-h100 --param-dtype bf16 --transport c10d"),
    "deep-60": ("deep_60", "--world 2 --hardware laptop"),
    "moe": ("moe", "--world 8 --hardware dgx-2-v100 --reduce-dtype fp32 --param-dtype bf16"),
    "moe-stage-0": ("moe", "--world 2 --hardware laptop --stage 0"),
    "gpt2": ("gpt2", "--world 3 --hardware laptop"),
    "llama": ("llama", "--world 4 --hardware dgx-a100 --bucket-bytes 4096"),
    "bert": ("bert", "--world 2 --hardware laptop --stage 1"),
    "t5": ("t5", "--world 2 --hardware laptop --param-dtype bf16"),
    "vit": ("vit", "--world 2 --hardware laptop --offload-activations nvme --nvme-dir ."),
    "mixtral": ("mixtral", "--world 2 --hardware laptop --tile-bytes 2048"),
}


def hybrid_mesh(rank: int) -> Any:
    """Two replicas of two ranks that shard."""
    from torch.distributed.device_mesh import init_device_mesh

    import zero_compiler as zero

    model, inputs = benchmark_model("tiny")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return zero.shard(model, mesh=mesh, hardware="laptop", compute="aten"), inputs


def tensor_parallel(rank: int) -> Any:
    """Two data ranks of two tensor-parallel ranks each."""
    from torch.distributed.device_mesh import init_device_mesh

    import zero_compiler as zero

    parallel = _module(TESTS / "parallel.py", "test_parallel")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel.by_columns(parallel.Transformer(2), mesh["tp"])
    model = zero.shard(model, mesh=mesh, hardware="laptop", compute="aten")
    return model, (parallel.tokens(rank // 2, 0),)


def c10d_ranks(rank: int) -> Any:
    """Four ranks that share no memory."""
    import zero_compiler as zero

    model, inputs = benchmark_model("tiny-moe")
    return zero.shard(model, hardware="laptop", transport="c10d", compute="aten", param_dtype="bf16"), inputs


# Plans of models that real ranks have sharded.
RANKED: dict[str, Callable[[int], Any]] = {
    "ranks-hybrid-mesh": hybrid_mesh,
    "ranks-tensor-parallel": tensor_parallel,
    "ranks-c10d": c10d_ranks,
}


def canonical(plan: dict[str, Any]) -> str:
    """A plan as text, without what was measured while it was made and where the code stands that it was made of."""
    for name in ("resident_bytes", "resident_parts"):  # of the process that made the plan
        plan.get("memory", {}).pop(name, None)
    for frame in plan["frames"]:
        frame["passes"] = [{"name": p["name"], "nodes": p["nodes"]} for p in frame["passes"]]
        if frame["config"].get("nvme_dir") == os.getcwd():
            frame["config"]["nvme_dir"] = "."
        for program in frame["programs"].values():
            program["segments"] = [_without_places(text) for text in program["segments"]]
    return json.dumps(plan, indent=1, sort_keys=True) + "\n"


def _without_places(code: str) -> str:
    """The code of a segment without its comments, which name the file and line that an operator comes from."""
    return "\n".join(line for line in code.split("\n") if not line.lstrip().startswith("#"))


def write(folder: Path, name: str, path: Path) -> None:
    text = canonical(json.loads(path.read_text()))
    (folder / f"{name}.json").write_text(text)
    print(f"{hashlib.sha256(text.encode()).hexdigest()[:16]}  {name}", flush=True)


def plan_in_one_process(folder: Path, name: str) -> None:
    factory, flags = PLANS[name]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "plan.json")
        command = [sys.executable, "-m", "zero_compiler", "plan", f"canonical_plans:{factory}", "--brief"]
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}", "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            [*command, *flags.split(), "--json", str(path)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not path.exists():
            sys.exit(f"{name}: no plan was made:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        write(folder, name, path)


def _rank(rank: int, scratch: str, names: list[str]) -> None:
    import torch
    import torch.distributed as dist

    import zero_compiler as zero

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/store",
        rank=rank,
        world_size=MESH_RANKS,
        timeout=datetime.timedelta(seconds=120),
    )
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, inputs = RANKED[name](rank)
        report = zero.inspect(model, example_inputs=inputs)
        if rank == 0:
            report.save_json(f"{scratch}/{name}.json")
        dist.barrier()
    dist.destroy_process_group()


def plan_on_ranks(folder: Path, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        start = multiprocessing.get_context("spawn")
        ranks = [start.Process(target=_rank, args=(r, scratch, names)) for r in range(MESH_RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit("a rank failed; its traceback is above")
        for name in names:
            write(folder, name, Path(scratch, f"{name}.json"))


def plan_of_compiled(folder: Path) -> None:
    """A step that has run: bytes that compiled code holds are read from what Inductor wrote."""
    import torch

    import zero_compiler as zero

    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        model, inputs = benchmark_model("tiny")
        model = zero.shard(model, hardware="laptop", device="cpu", memory_budget_bytes=8_000_000)
        step = torch.compile(model, backend="zero")
        step(*inputs).backward()
        path = Path(scratch, "plan.json")
        zero.inspect(step).save_json(str(path))
        write(folder, INDUCTOR_CASES[0], path)


def main() -> None:
    every = [*PLANS, *RANKED, *INDUCTOR_CASES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where one JSON file a plan is written")
    parser.add_argument("--only", nargs="*", choices=every, default=every, help="these plans and no others")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in PLANS:
        if name in args.only:
            plan_in_one_process(args.folder, name)
    ranked = [name for name in RANKED if name in args.only]
    if ranked:
        plan_on_ranks(args.folder, ranked)
    if set(INDUCTOR_CASES) & set(args.only):
        plan_of_compiled(args.folder)


if __name__ == "__main__":
    main()
