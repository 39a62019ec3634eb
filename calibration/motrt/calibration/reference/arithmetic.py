"""In which dtype, and in which order of operations, a reference run computes.

Knows torch only; the models are not aware of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv2d, conv3d, linear
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from motrt.calibration.reference.request import DtypeName, Order

DTYPES: Mapping[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


class _ReversedSums(TorchFunctionMode):
    """Add up every matrix product and convolution from the last input channel to the first.

    The sum is the same in exact arithmetic and is rounded as often; only the order differs. Measured with
    torch 2.13 on x86: another thread count alone leaves most outputs bit-identical, so it measures nothing.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is linear:
            args = (args[0].flip(-1), args[1].flip(-1), *args[2:])
        elif func is torch.bmm:
            args = (args[0].flip(-1), args[1].flip(-2), *args[2:])
        elif func in {conv2d, conv3d} and args[1].shape[1] == args[0].shape[1]:  # not grouped
            args = (args[0].flip(1), args[1].flip(1), *args[2:])
        return func(*args, **options)


@contextmanager
def arithmetic(order: Order, threads: int) -> Iterator[None]:
    """Run a block without gradients, in the asked order of operations.

    ``default`` leaves everything to torch with ``threads`` threads. ``other`` computes the same expressions
    with one thread, the unfused attention kernel and reversed sums: the distance between the two is the
    float noise of the reference itself.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads if order == "default" else 1)
    try:
        with torch.inference_mode():
            if order == "default":
                yield
            else:
                with sdpa_kernel([SDPBackend.MATH]), _ReversedSums():
                    yield
    finally:
        torch.set_num_threads(before)


def to_float32(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Return a float32 copy in numpy, whatever the dtype of ``tensor``."""
    array: NDArray[np.float32] = tensor.detach().to(torch.float32).contiguous().numpy()
    return np.array(array, dtype=np.float32)
