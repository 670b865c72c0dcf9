"""What runs a Program: the session, tier copies, the autograd bridge and the reference executor. It decides nothing."""

from .engine_build import check_installed

check_installed()  # before anything here loads the engine
