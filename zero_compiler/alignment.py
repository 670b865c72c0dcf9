"""How sizes are rounded up: to whole blocks of a file, and to the alignment of buffers in an arena."""

BLOCK_BYTES = 4096  # what direct transfers are multiples of, in the file and in memory
ARENA_BYTES = 512  # what offsets in an arena are multiples of


def block_aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to whole blocks of a file."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def arena_aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to the alignment of buffers in an arena."""
    return -(-nbytes // ARENA_BYTES) * ARENA_BYTES
