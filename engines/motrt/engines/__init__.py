"""motrt.engines."""
