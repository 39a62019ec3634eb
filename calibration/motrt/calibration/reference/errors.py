"""What a reference run refuses; the class name is the ``type`` in ``result.json``."""

from __future__ import annotations


class ReferenceRunError(Exception):
    """Root of the refusals below; anything else in ``result.json`` is an accident, not a decision."""


class RequestError(ReferenceRunError):
    """``request.json`` or ``arrays.npz`` asks for something that is not defined."""


class CheckpointError(ReferenceRunError):
    """The checkpoint has missing, unexpected or misshapen tensors."""


class ReferenceTooLarge(ReferenceRunError):  # noqa: N818 - the name is part of the protocol
    """The weights in the compute dtype do not fit into this machine's free memory."""


class NonFiniteReference(ReferenceRunError):  # noqa: N818 - the name is part of the protocol
    """A reference output holds NaN or infinity, so nothing can be compared with it."""


class UnavailableError(ReferenceRunError):
    """The checkpoint lacks a part, or no public class can use it: its cases are skipped, and said so."""
