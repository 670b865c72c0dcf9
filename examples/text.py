"""Real text that every machine has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

# Not part of what every installation has, or not written by hand.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


class Text:
    """Bytes of one split, and windows of them as model inputs."""

    def __init__(self, files: list[Path]) -> None:
        # frombuffer shares the bytes: the text does not count as tensor memory.
        self.data = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self.files = len(files)

    def __len__(self) -> int:
        return self.data.numel()

    def windows(self, starts: list[int], context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and the bytes that follow them, each ``[len(starts), context]``."""
        rows = torch.stack([self.data[s : s + context + 1] for s in starts]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def random_starts(self, count: int, context: int, generator: torch.Generator) -> list[int]:
        return torch.randint(len(self) - context, (count,), generator=generator).tolist()

    def even_starts(self, count: int, context: int) -> list[int]:
        """``count`` starts spread evenly over the text: the same on every call."""
        return [i * (len(self) - context - 1) // max(count - 1, 1) for i in range(count)]


def standard_library() -> tuple[Text, Text]:
    """Training and validation text; one file in twenty, by a digest of its path, is for validation.

    Raises:
        FileNotFoundError: this Python keeps its standard library elsewhere, as in a zip archive.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        f for f in root.rglob("*.py") if not _LEFT_OUT.intersection(f.relative_to(root).parts) and f.is_file()
    )
    held_out = [f for f in files if _digest(f.relative_to(root)) % 20 == 0]
    kept = [f for f in files if _digest(f.relative_to(root)) % 20]
    if len(held_out) < 5 or len(kept) < 100:
        raise FileNotFoundError(
            f"found only {len(files)} Python files below {root}: not enough text to train on"
        )
    return Text(kept), Text(held_out)


def _digest(path: Path) -> int:
    return int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:4], "big")
