"""What a visit to a machine with a GPU should measure, in order of worth, each stage within its own limit of minutes.

    python benchmarks/gpu.py DIR --results FOLDER [--from b] [--only a,d]

`make gpu` builds the engine, runs `tests/gpu` and then this; `make gpu FROM=b` goes on from a stage, so that several
short visits add up. Each stage is a process of its own: one that fails, or has used up its minutes, is ended, keeps the
rows that it has written so far, and the next begins. Results are Markdown and JSON in the folder of `--results`.

  calibrate  rates of this machine, for the plans of all stages; kept in the folder of the results and not made again
  a          a GPT of 1.5 B parameters, bf16, sequence 1024: plain compiled and ours, without and with CUDA graphs;
             FSDP2
  b          the same with gradients and states on the host, beside DeepSpeed ZeRO-Offload where it can be imported, and
             beside the limit
  c          the largest GPT that trains with the host's memory, beside the largest by arithmetic
  d          one linear layer of 65,536 by 65,536, in tiles
  e          the longest sequence of the 1.5 B model, beside FSDP2 with checkpointing and activations on the host
  f          what was predicted beside what was measured, from the results of the stages before

Without a GPU the CPU is the device, at `--small` sizes: that is how this script is tested.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import common
import torch
from one_device import GIB, device, device_text

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Stage:
    name: str
    title: str
    minutes: float
    arguments: Sequence[str]  # of a script of this folder
    small: Sequence[str]  # in their place, without a GPU


def stages(directory: str, hardware: str, results: str) -> list[Stage]:
    device_gib, host_gib = room()
    of_largest = ["--device-gib", f"{device_gib:.0f}", "--host-gib", f"{host_gib:.0f}"]
    tiny = ["--width", "64", "--vocab", "64", "--tokens", "64"]
    with_hardware = ["--hardware", hardware]
    return [
        Stage(
            "a",
            "step time of a GPT of 1.5 B",
            4,
            [
                "device_step_time.py",
                "--model",
                "gpt-1.5b",
                "--steps",
                "15",
                "--cuda-graphs",
                "yes",
                *with_hardware,
            ],
            [
                *(
                    "device_step_time.py",
                    "--model",
                    "tiny",
                    "--dtype",
                    "fp32",
                    "--steps",
                    "2",
                    "--warmup",
                    "2",
                ),
                *with_hardware,
            ],
        ),
        Stage(
            "b",
            "gradients and states on the host",
            4,
            ["states_on_host.py", "--model", "gpt-1.5b", *with_hardware],
            ["states_on_host.py", "--model", "tiny", "--steps", "2", *with_hardware],
        ),
        Stage(
            "c",
            "the largest model",
            4,
            ["largest_model.py", directory, *of_largest, "--width", "5120", "--ways", "3,1", *with_hardware],
            [
                *("largest_model.py", directory, "--device-gib", "1", "--most-blocks", "2", "--ways", "0"),
                *tiny,
                *with_hardware,
            ],
        ),
        Stage(
            "d",
            "one layer of 65,536 by 65,536",
            3,
            ["device_layer.py", "--layer", str(1 << 16), *with_hardware],
            ["device_layer.py", "--layer", "64", *with_hardware],
        ),
        Stage(
            "e",
            "the longest sequence",
            4,
            ["longest_sequence.py", *with_hardware],
            [
                "longest_sequence.py",
                "--layers",
                "1",
                "--width",
                "64",
                "--vocab",
                "64",
                "--first",
                "32",
                "--most",
                "64",
            ]
            + with_hardware,
        ),
        Stage(
            "f", "predicted beside measured", 1, ["gpu_predicted.py", results], ["gpu_predicted.py", results]
        ),
    ]


def room() -> tuple[float, float]:
    """GiB of the device and of the host that the largest model may take."""
    at = device()
    on_device = 1.0
    if at.type != "cpu":
        on_device = torch.get_device_module(at).get_device_properties(at).total_memory / GIB * 0.92
    return on_device, common.available_bytes() / GIB * 0.85


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("directory", help="a folder on the disk that files go to")
    parser.add_argument("--results", default="build/gpu/results", help="the folder that results go to")
    parser.add_argument("--from", dest="first", default="a", choices=list("abcdef"), help="the first stage")
    parser.add_argument("--only", default="", help="these stages, as in a,d")
    parser.add_argument("--small", action="store_true", help="sizes for a test; without a GPU, always")
    args = parser.parse_args()
    results = Path(args.results)
    results.mkdir(parents=True, exist_ok=True)
    small = args.small or device().type == "cpu"
    print(f"device: {device_text()}{'; small sizes' if small else ''}", flush=True)
    hardware = calibrated(results, args.directory)
    made = stages(args.directory, str(hardware), str(results))
    chosen = args.only.split(",") if args.only else [s.name for s in made if s.name >= args.first]
    if unknown := set(chosen) - {s.name for s in made}:
        parser.error(f"--only: there is no stage {', '.join(sorted(unknown))}; there are a to f")
    failed = [s.name for s in made if s.name in chosen and not done(s, results, small)]
    if failed:
        sys.exit(f"not ended as they should: {', '.join(failed)}; what each has found so far is in {results}")


def calibrated(results: Path, directory: str) -> Path:
    """The hardware file that every stage plans for: of an earlier visit to such a device, or measured now."""
    file = results / f"{device_text().split(',')[0].replace(' ', '-')}.json"
    if not file.exists():
        print("calibrate", flush=True)
        shutil.copy(common.hardware(None, 1, directory=directory), file)
    return file.absolute()


def done(stage: Stage, results: Path, small: bool) -> bool:
    """Run a stage; whether it ended well. One that takes longer than it may is ended, with all that it has started."""
    words = [*(stage.small if small else stage.arguments), "--json", str(results / f"{stage.name}.json")]
    print(f"\n{stage.name}: {stage.title}, at most {stage.minutes:g} minutes", flush=True)
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, str(HERE / words[0]), *words[1:]], start_new_session=True)
    try:
        status = process.wait(stage.minutes * 60)
        how = "done" if status == 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired:
        status, how = 1, "ended: its minutes are used up"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"{stage.name}: {how} after {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    notes = results / "stages.json"
    told = json.loads(notes.read_text()) if notes.exists() else {}
    told[stage.name] = {"title": stage.title, "how": how, "seconds": round(time.monotonic() - began, 1)}
    notes.write_text(json.dumps(told, indent=1) + "\n")
    return status == 0


if __name__ == "__main__":
    main()
