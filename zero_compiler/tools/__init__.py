"""Tools: the command line, plans without ranks, calibration and benchmarks of a disk."""
