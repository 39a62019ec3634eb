"""Verbs of the command line that drive this package."""
