"""Write one fixture: ``python tests/omni_fixtures KIND DIRECTORY``."""

import argparse
import sys
from pathlib import Path

_SPARSE = ("sparse-edge", "sparse-nano", "sparse-super")
_KINDS = ("nano-like", "edge-like", "super-like", "shared", *_SPARSE)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/omni_fixtures",
        description="Build a checkpoint of random weights from public classes.",
        epilog="example: python tests/omni_fixtures nano-like /tmp/nano --dtype bfloat16",
    )
    parser.add_argument("kind", metavar="KIND", choices=_KINDS, help=", ".join(_KINDS))
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="new or empty folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of every weight (default: float32; sparse-*: always bfloat16)",
    )
    parser.add_argument("--seed", type=int, help="of every random value (default: 0)")
    options = parser.parse_args(arguments)
    if options.kind in _SPARSE and (options.dtype or options.seed is not None):
        parser.error(f"{options.kind} is bfloat16 holes: --dtype and --seed do not apply")
    directory: Path = options.directory
    try:
        # Checked before the slow imports, and never mixed with files of another checkpoint.
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            parser.error(f"{directory} is not empty; name a new or empty folder")
        _build(options.kind, directory, options.dtype or "float32", options.seed or 0)
    except OSError as error:
        print(f"error: cannot write {directory}: {error}", file=sys.stderr)
        return 1
    print(directory)
    return 0


def _build(kind: str, directory: Path, dtype: str, seed: int) -> None:
    if kind in _SPARSE:
        from omni_fixtures.sparse import build_sparse

        build_sparse(kind.removeprefix("sparse-"), directory)
        return
    from omni_fixtures.checkpoints import build_pipeline, build_shared

    if kind == "shared":
        build_shared(directory, seed=seed, dtype=dtype)
    else:
        build_pipeline(directory, kind, seed=seed, dtype=dtype)


if __name__ == "__main__":
    # Run as a folder, Python puts the folder itself on the path, not the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.exit(main())
