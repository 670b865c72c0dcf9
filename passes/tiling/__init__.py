"""Tiling: operators and weights that are too large are computed, gathered and reduced in tiles."""
