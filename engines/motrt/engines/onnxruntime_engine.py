"""One graph on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from motrt.engines._onnxruntime import onnxruntime
from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError, ExecutionError
from motrt.engines.tensors import Array, check_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from motrt.engines.contract import EngineContract
    from motrt.engines.store import WeightStore

MAX_THREADS = 1024
"""More cores than any machine has; ten times as many threads can take one down."""


class OnnxRuntimeEngine:
    """A session that checks what it is fed against the contract.

    Attributes:
        contract: The graph's inputs and outputs.
        session: The ``InferenceSession``, for engines that bind its inputs themselves.

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
        self.contract = contract
        options = session_options(threads)
        source: str | bytes = str(model) if isinstance(model, Path) else model
        if folder is not None:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(folder)
            )
        self.session: Any = open_session(contract.name, source, options, providers)

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
            outputs = self.session.run(names, dict(feeds))
        except Exception as err:  # ONNX Runtime's exceptions share no base class but Exception
            raise _refused(self.contract.name, err) from err
        return dict(zip(names, outputs, strict=True))


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that would take the machine down, or none.

    Raises:
        ConfigError: It is not 1 to :data:`MAX_THREADS`.
    """
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise ConfigError(
            "the number of threads makes no sense", got=threads, expected=f"1 to {MAX_THREADS}"
        )


def session_options(threads: int | None) -> Any:
    """Return options of a session.

    Args:
        threads: Threads inside an operator; ONNX Runtime's default if None.

    Raises:
        ConfigError: See :func:`check_threads`.
        MissingDependencyError: ONNX Runtime is not installed.
    """
    check_threads(threads)
    options = onnxruntime().SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def ort_value(ort: Any, store: WeightStore, name: str) -> Any:
    """Return a tensor as an OrtValue over the store's memory, which must outlive it."""
    array, dtype = store[name], store.entries[name].dtype
    if dtype is DType.BFLOAT16:
        value = array.view("uint16")
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, dtype.onnx)
    return ort.OrtValue.ortvalue_from_numpy(array)


def open_session(name: str, source: str | bytes, options: Any, providers: Sequence[str]) -> Any:
    """Open an ``InferenceSession``; never another provider than those asked for.

    Raises:
        ExecutionError: A provider is absent, or the graph does not load.
    """
    check_providers(providers)
    # Threads that spin while they wait (for a millisecond by default) take the cores from others:
    # beside one busy process a token took twice as long. docs/performance.md has the numbers.
    options.add_session_config_entry("session.intra_op.spin_duration_us", "20")
    try:
        session = onnxruntime().InferenceSession(source, options, providers=list(providers))
    except Exception as err:  # see above
        raise ExecutionError(
            f"ONNX Runtime does not load the {name}",
            got=_first_line(err),
            fix="The native lowering needs ONNX Runtime 1.32; export with --lowering portable.",
        ) from err
    # A provider whose libraries do not load is dropped with a log line: that is no answer.
    dropped = [provider for provider in providers if provider not in session.get_providers()]
    if dropped:
        raise ExecutionError(
            "an execution provider does not work here",
            got=", ".join(dropped),
            expected=f"among {', '.join(session.get_providers())}",
            fix="Run motrt doctor, and install the driver and libraries that the provider needs.",
        )
    return session


def check_providers(providers: Sequence[str]) -> None:
    """Refuse execution providers that are not there.

    Raises:
        ExecutionError: One is absent.
    """
    available = onnxruntime().get_available_providers()
    absent = [provider for provider in providers if provider not in available]
    if absent:
        raise ExecutionError(
            "an execution provider is not there",
            got=", ".join(absent),
            expected=f"among {', '.join(available)}",
            fix="Install the ONNX Runtime package that has it, or choose another provider.",
        )


def run_binding(session: Any, binding: Any, outputs: list[str], name: str) -> dict[str, Any]:
    """Run a session on its bindings.

    Args:
        session: The session.
        binding: Its binding.
        outputs: Names of the outputs in the order in which they were bound: ONNX Runtime returns
            them in that order, not in the session's. None of them if the caller bound buffers of
            its own and reads those: making the OrtValues costs a decode 2 % of its time.
        name: Name for messages.

    Returns:
        OrtValues by output name; they are overwritten by the next run.

    Raises:
        ExecutionError: ONNX Runtime refused.
    """
    try:
        session.run_with_iobinding(binding)
    except Exception as err:  # see above
        raise _refused(name, err) from err
    return dict(zip(outputs, binding.get_outputs(), strict=True)) if outputs else {}


def run_once(session: Any, name: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run a session on plain arrays.

    Raises:
        ExecutionError: ONNX Runtime refused.
    """
    outputs = [output.name for output in session.get_outputs()]
    try:
        return dict(zip(outputs, session.run(outputs, dict(feeds)), strict=True))
    except Exception as err:  # see above
        raise _refused(name, err) from err


def _refused(name: str, err: Exception) -> ExecutionError:
    return ExecutionError(f"ONNX Runtime could not run the {name}", got=_first_line(err))


def _first_line(err: Exception) -> str:
    lines = str(err).strip().splitlines()
    return lines[0] if lines else type(err).__name__
