"""Cost: what a machine can do, and how long transfers, operators and whole Programs take on it."""
