"""What both engines of a process share: TensorRT, the device with its stream, the activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from motrt.engines._cuda import Cuda
from motrt.engines._tensorrt import tensorrt
from motrt.engines.errors import ExecutionError
from motrt.engines.plans.callbacks import Messages, make_logger
from motrt.engines.plans.identity import PlanHost
from motrt.engines.tensorrt_backend.memory import Arena

if TYPE_CHECKING:
    from motrt.engines._tensorrt import Flavour


class Device:
    """TensorRT on a GPU.

    Attributes:
        trt: The module.
        cuda: The GPU, with the one stream on which everything runs.
        arena: Activations of whichever engine runs.
        host: What a plan must have been built for.
        uses_graphs: Whether steps that repeat are captured as CUDA graphs.

    Args:
        flavour: Which TensorRT.
        uses_graphs: See above.

    Raises:
        ExecutionError: There is no GPU, or no driver for it.
        MissingDependencyError: TensorRT or CUDA's bindings are not installed.
    """

    def __init__(self, flavour: Flavour, *, uses_graphs: bool = True) -> None:
        self.trt: Any = tensorrt(flavour)
        self.cuda = Cuda()
        self.arena = Arena(self.cuda)
        self.host = PlanHost.here(flavour, str(self.trt.__version__), self.cuda.capability())
        self.uses_graphs = uses_graphs
        self.messages = Messages()
        self.logger = make_logger(self.trt, self.messages)
        self.runtime = self.trt.Runtime(self.logger)

    def refused(self, message: str, fix: str | None = None) -> ExecutionError:
        """Return an error with TensorRT's last words."""
        said = self.messages.errors
        return ExecutionError(message, got=said[-1] if said else "no reason given", fix=fix)
