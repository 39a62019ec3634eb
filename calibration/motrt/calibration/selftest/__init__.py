"""``motrt doctor --selftest``: everything that a machine can do with an engine, tried."""

from motrt.calibration.selftest.run import Check, run_selftest

__all__ = ["Check", "run_selftest"]
