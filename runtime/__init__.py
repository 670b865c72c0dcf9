"""What runs a Program: the session, tier copies, the autograd bridge and the reference executor. It decides nothing."""

from zero_compiler.engine_build import ENGINE, check_installed

check_installed(ENGINE)  # before anything here loads it
