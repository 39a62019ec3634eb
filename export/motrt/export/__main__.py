"""``python -m motrt.export`` is ``motrt``."""

from motrt.export.entry import main

main()
