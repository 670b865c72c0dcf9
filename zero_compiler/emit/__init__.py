"""Emission: from a scheduled graph to a Program with its segments, transfers and byte offsets."""
