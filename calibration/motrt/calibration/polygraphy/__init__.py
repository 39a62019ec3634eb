"""A bundle as files and commands for NVIDIA's Polygraphy."""

from motrt.calibration.polygraphy.emit import Emission, emit_polygraphy

__all__ = ["Emission", "emit_polygraphy"]
