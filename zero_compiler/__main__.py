"""``python -m zero_compiler``."""

from .tools.cli import main

main()
