"""Calibration: what this machine, and what lies between the hosts of a job, can do."""
