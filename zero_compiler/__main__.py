"""``python -m zero_compiler``."""

from .cli import main

main()
