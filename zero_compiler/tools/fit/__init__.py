"""``zero-compiler fit``: which settings let a model train on a machine, and which of them are fastest."""
