"""motrt.calibration."""
