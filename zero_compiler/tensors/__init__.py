"""Tensors: full weights and shards as tensors, and what torch's kernels, lists and transforms make of them."""
