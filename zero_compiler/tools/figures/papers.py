"""What the papers say: numbers, and where each stands.

Of a number that a document shows in a picture only, nothing is known here but that it is there.
"""

from __future__ import annotations

from collections.abc import Mapping

from .table import Fact, between, exactly, over, pictured

ZERO = "ZeRO (arXiv 1910.02054)"
INFINITY = "ZeRO-Infinity (arXiv 2104.07857)"
ZERO_3_POST = "DeepSpeed's post on ZeRO-3 Offload of 2021-03-08"

# Bytes of model states, 7.5 billion parameters on 64 ranks, by stage.
STATES: Mapping[int, Fact] = {
    0: exactly(120e9, "120 GB", f"{ZERO}, figure 1"),
    1: exactly(31.4e9, "31.4 GB", f"{ZERO}, figure 1 and table 1"),
    2: exactly(16.6e9, "16.6 GB", f"{ZERO}, figure 1 and table 1"),
    3: between(1.88e9, 1.9e9, "1.9 GB", f"{ZERO}, figure 1; table 1: 1.88"),
}

# Elements that a rank sends in a step, by parameters of the model.
VOLUME: Mapping[int, Fact] = {
    0: exactly(2, "2 (1x)", f"{ZERO}, section 7.1"),
    1: exactly(2, "2 (1x)", f"{ZERO}, section 7.2"),
    2: exactly(2, "2 (1x)", f"{ZERO}, section 7.2"),
    3: exactly(3, "3 (1.5x)", f"{ZERO}, section 7.2"),
}

# Largest models on V100 of 32 GB without model parallelism.
LARGEST_PLAIN = exactly(1.4e9, "1.4B", f"{ZERO}, section 1; table 2: 1.3B measured, 2B by states alone")
LARGEST_STAGE_1 = exactly(6.2e9, "6.2B", f"{ZERO}, table 2, measured on 64; 7.6B by states alone")
LARGEST_STAGE_2 = exactly(13e9, "13B", f"{ZERO}, section 10.4, on 128; table 2: 14.4B by states alone, on 64")
LARGEST_SLICED = exactly(170e9, "170B", f"{ZERO}, section 10.1 and table 4")

# ZeRO-Infinity: bytes of a parameter. Table in figure 2a: 1.01 trillion parameters take 18.31 TB (binary).
INFINITY_STATE_BYTES = 20
USABLE_FILES_BYTES = 20e12  # of a DGX-2 node
NODE_HOST_BYTES = 1.5e12

LARGEST_ON_NODES: Mapping[int, Fact] = {
    1: over(1e12, "over 1T", f"{INFINITY}, abstract, and section 8.4"),
    2: pictured(f"{INFINITY}, figure 1"),
    4: pictured(f"{INFINITY}, figure 1"),
    8: pictured(f"{INFINITY}, figure 1"),
    16: pictured(f"{INFINITY}, figure 1"),
    32: exactly(32e12, "32T", f"{INFINITY}, section 8.2"),
    128: over(100e12, "over 100T on 100, projected", f"{INFINITY}, section 5.1; 128 in figure 1"),
}

PLACED_ON_DEVICES = pictured(f"{INFINITY}, figure 6a, for table 2's ZeRO-3")
PLACED_ON_HOST = pictured(f"{INFINITY}, figure 6a, for table 2's ZeRO-Inf-CPU")
PLACED_IN_FILES = over(1e12, "over 1T", f"{INFINITY}, section 8.4")
ONE_DEVICE_IN_FILES = over(1e12, "over 1T", "DeepSpeed's post on ZeRO-Infinity of 2021-04-19")
ONE_DEVICE_ON_HOST = over(40e9, "over 40B", ZERO_3_POST)
HOST_OF_16_NODES = exactly(1e12, "1T", f"{ZERO_3_POST}: 256 GPUs")
HOST_OF_32_NODES = exactly(2e12, "2T", f"{ZERO_3_POST}: 512 GPUs")

WIDE_BOTH = over(64e9, "over 64 GB", f"{INFINITY}, section 3")
WIDE_EACH = over(32e9, "over 32 GB, twice", f"{INFINITY}, section 3")
WIDE_TILED = exactly(16, "16 tiles", f"{INFINITY}, section 8.5: at most 2 GB in one piece")

# TFLOP/s of a V100, 512 of them.
THROUGHPUT = between(34, 50, "34 to 50", f"{INFINITY}, section 8.2 (34 to 49), and the posts (37 to 50)")
THROUGHPUT_1T = exactly(49, "49", ZERO_3_POST)
SCALING: Mapping[int, Fact] = {
    4: exactly(44, "44", f"{INFINITY}, section 8.3: 2.8 petaflops"),
    8: pictured(f"{INFINITY}, figure 5b"),
    16: pictured(f"{INFINITY}, figure 5b"),
    32: pictured(f"{INFINITY}, figure 5b"),
}
OVERLAP = pictured(f"{INFINITY}, figure 6d: 8B on 64 GPUs")
