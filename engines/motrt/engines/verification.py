"""Reading all that a bundle points at: every weight, and every pointer of its graphs.

Opening a bundle compares hashes of the small files and of the weight files' headers. The tensors'
own bytes are looked at here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import BundleError, CheckpointError
from motrt.engines.finite import check_finite
from motrt.engines.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from motrt.engines.bundle import Bundle
    from motrt.engines.store import WeightEntry

_AGAIN = "Copy the bundle again, or export the checkpoint again."


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read and found sound.

    Attributes:
        tensors: Number of tensors.
        nbytes: Their bytes.
        graphs: Number of pointers into weight files that each graph has.
        graphs_skipped: Why no graph was looked at, or None.
    """

    tensors: int
    nbytes: int
    graphs: dict[str, int]
    graphs_skipped: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: ``tensors``, ``bytes``, ``graphs``, ``graphs_skipped``."""
        return {
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "graphs": self.graphs,
            "graphs_skipped": self.graphs_skipped,
        }


def verify_bundle(bundle: Bundle, *, progress: Progress = silent) -> Verification:
    """Read every tensor, and compare the graphs' external data with the manifest.

    Args:
        bundle: An opened bundle.
        progress: Told the stage, the bytes done and their total.

    Raises:
        BundleError: A tensor holds NaN or infinity, or a graph points elsewhere.
    """
    stores = [bundle.weights(part) for part in bundle.manifest.weights]
    # The cheap half first: a graph that points elsewhere makes reading 100 GB pointless.
    graphs, skipped = _verify_graphs(bundle)
    total, done = sum(store.nbytes for store in stores), 0

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        progress("verify", done, total)

    try:
        for store in stores:
            check_finite(store, advance)
    except CheckpointError as err:
        raise BundleError(err.message, got=err.got, expected=err.expected, fix=_AGAIN) from err
    return Verification(sum(len(store) for store in stores), done, graphs, skipped)


def _verify_graphs(bundle: Bundle) -> tuple[dict[str, int], str | None]:
    try:
        onnx = importlib.import_module("onnx")
    except ImportError as err:
        return {}, f"needs the onnx package, from pip install 'motrt[export]' ({err})"
    weights = bundle.manifest.weights
    parts = {
        graph: name
        for name, component in bundle.manifest.components.items()
        for graph in component.get("graphs", {}).values()
    }
    return {
        graph: _verify_graph(onnx, bundle, graph, weights.get(parts.get(graph, "transformer"), {}))
        for graph in bundle.graphs
    }, None


def _verify_graph(
    onnx: Any, bundle: Bundle, graph: str, weights: Mapping[str, WeightEntry]
) -> int:
    try:
        model = onnx.load(str(bundle.path(graph)), load_external_data=False)
    except (OSError, ValueError, _decode_error()) as err:
        raise BundleError(f"{graph} is not an ONNX graph", got=err, fix=_AGAIN) from err
    count = 0
    nodes = [node for function in model.functions for node in function.node]
    for tensor in (*_tensors(model.graph), *_node_tensors(nodes)):
        # One that lies in the graph itself is none of ours, unless it bears a weight's name.
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.name not in weights:
            continue
        count += 1
        have, want = _place(tensor), _recorded(weights.get(tensor.name))
        if have != want:
            raise BundleError(
                f"{graph} does not read tensor {tensor.name} where the manifest has it",
                got=have,
                expected=want,
                fix=_AGAIN,
            )
    return count


def _place(tensor: Any) -> str:
    data = {item.key: item.value for item in tensor.external_data}
    return (
        f"file {data.get('location')}, offset {data.get('offset', '0')}, "
        f"{data.get('length')} bytes, type {tensor.data_type}, shape {list(tensor.dims)}"
    )


def _recorded(entry: WeightEntry | None) -> str:
    if entry is None:
        return "no tensor of that name"
    return (
        f"file {entry.file}, offset {entry.offset}, "
        f"{entry.nbytes} bytes, type {entry.dtype.onnx}, shape {list(entry.shape)}"
    )


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _tensors(subgraph)


def _decode_error() -> type[Exception]:
    error = importlib.import_module("google.protobuf.message").DecodeError
    return error if isinstance(error, type) and issubclass(error, Exception) else ValueError
