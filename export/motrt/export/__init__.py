"""motrt.export."""
