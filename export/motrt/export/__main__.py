"""``python -m motrt.export`` is ``motrt``."""

from motrt.export.cli import main

main()
