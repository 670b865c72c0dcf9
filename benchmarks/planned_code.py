"""How far a plan, which counts operators one by one, lies from the code that Inductor writes for the same model.

    python benchmarks/planned_code.py [MODEL ...]

The code is written for the CPU, compiled and not run: for an accelerator nothing can be compiled where there is none,
and its plans count in the same way. MODEL is what `zero-compiler plan` takes; models of tokens get 4 rows of 256.
"""

from __future__ import annotations

import sys

import common
import torch

from zero_compiler.compile.loader import PlanLoader
from zero_compiler.tools import planning
from zero_compiler.tools.model_source import model_source

RANKS = 8
MODELS = (
    "examples.gpt:planned",
    "LlamaConfig(hidden_size=512, num_hidden_layers=4, intermediate_size=1376, num_attention_heads=8, vocab_size=8000)",
    "GPT2Config(n_embd=512, n_layer=4, n_head=8, vocab_size=8000)",
    "MixtralConfig(hidden_size=256, num_hidden_layers=2, intermediate_size=512, num_attention_heads=8, "
    "num_local_experts=4, vocab_size=8000)",
    "planned_code:convolutions",
    "planned_code:convolutions(mean=True)",
)


class CompilingLoader(PlanLoader):
    """Plans, with the segments compiled."""

    compute = None


class Convolutions(torch.nn.Sequential):
    """Six layers of convolution, normalisation and ReLU, each half as large as the one before."""

    def __init__(self, mean: bool) -> None:
        layers: list[torch.nn.Module] = []
        for k in range(6):
            inner, outer = (3 if k == 0 else 32 << k // 2), 32 << (k + 1) // 2
            layers += [
                torch.nn.Conv2d(inner, outer, 3, stride=1 + k % 2, padding=1, bias=False),
                torch.nn.GroupNorm(8, outer) if mean else torch.nn.BatchNorm2d(outer),
                torch.nn.ReLU(),
            ]
        super().__init__(
            *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, 1000)
        )


def convolutions(mean: bool = False) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """A network of convolutions and its pictures."""
    return Convolutions(mean), (torch.empty(16, 3, 64, 64),)


def added_bytes(text: str, loader: type[PlanLoader]) -> int:
    """What a step adds at most to what rests, without weights that are kept."""
    torch._dynamo.reset()
    planning.PlanLoader = loader  # type: ignore[misc, attr-defined]
    sizes = (4, 256) if text.partition("(")[0].endswith("Config") else (None, None)
    source = model_source(text, *sizes)
    memory = planning.report(source.model, source.inputs(source.batch), RANKS, hardware="dgx-h100").memory
    return memory.programs


def main() -> None:
    print(common.machine_text(common.machine()), flush=True)
    print(f"{'model':40s} {'planned':>13s} {'compiled':>13s}", flush=True)
    for text in sys.argv[1:] or MODELS:
        planned, compiled = added_bytes(text, PlanLoader), added_bytes(text, CompilingLoader)
        print(f"{text[:40]:40s} {planned:13,} {compiled:13,} {planned / compiled - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
