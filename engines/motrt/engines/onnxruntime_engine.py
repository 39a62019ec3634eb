"""One graph on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from motrt.engines._onnxruntime import onnxruntime
from motrt.engines.errors import ExecutionError
from motrt.engines.tensors import Array, check_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from motrt.engines.contract import EngineContract


class OnnxRuntimeEngine:
    """A session that checks what it is fed against the contract.

    Args:
        contract: The graph's inputs and outputs.
        model: The graph's file, or its bytes.
        folder: Where the graph's weights are found; needed with bytes.
        providers: Execution providers, in order. All must be there.
        threads: Threads inside an operator; ONNX Runtime's default if None.

    Raises:
        ExecutionError: A provider is absent, or the graph does not load.
        MissingDependencyError: ONNX Runtime is not installed.
    """

    def __init__(
        self,
        contract: EngineContract,
        model: Path | bytes,
        *,
        folder: Path | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        threads: int | None = None,
    ) -> None:
        ort = onnxruntime()
        self.contract = contract
        absent = [name for name in providers if name not in ort.get_available_providers()]
        if absent:
            raise ExecutionError(
                "an execution provider is not there",
                got=", ".join(absent),
                expected=f"among {', '.join(ort.get_available_providers())}",
                fix="Install the ONNX Runtime package that has it, or choose another provider.",
            )
        options = ort.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        source: str | bytes = str(model) if isinstance(model, Path) else model
        if folder is not None:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(folder)
            )
        try:
            self._session: Any = ort.InferenceSession(source, options, providers=list(providers))
        except Exception as err:  # ONNX Runtime's exceptions share no base class but Exception
            raise ExecutionError(
                f"ONNX Runtime does not load the {contract.name}", got=_first_line(err)
            ) from err

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Args:
            feeds: An array for each input of the contract.

        Returns:
            An array for each output; they belong to the caller.

        Raises:
            ContractError: A feed is missing, unknown, or of the wrong type or shape.
            ExecutionError: ONNX Runtime refused the run.
        """
        check_arrays(self.contract.inputs, feeds, engine=self.contract.name)
        names = [spec.name for spec in self.contract.outputs]
        try:
            outputs = self._session.run(names, dict(feeds))
        except Exception as err:  # see above
            raise ExecutionError(
                f"ONNX Runtime could not run the {self.contract.name}", got=_first_line(err)
            ) from err
        return dict(zip(names, outputs, strict=True))


def _first_line(err: Exception) -> str:
    lines = str(err).strip().splitlines()
    return lines[0] if lines else type(err).__name__
