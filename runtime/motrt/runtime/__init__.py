"""motrt.runtime."""
