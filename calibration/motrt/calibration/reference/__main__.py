"""``python -m motrt.calibration.reference REQUEST_DIR …``: exit code 0 done, 1 error, 2 usage."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from motrt.calibration.reference.errors import RequestError
from motrt.calibration.reference.request import load_request
from motrt.calibration.reference.results import clear_result, write_error, write_result


def main(arguments: list[str] | None = None) -> int:
    """Run the requests in the given folders, in order; stop at the first that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m motrt.calibration.reference",
        description="Run the public PyTorch implementations on the cases of request folders.",
        epilog="example: python -m motrt.calibration.reference /tmp/request",
    )
    parser.add_argument(
        "request_dirs", type=Path, nargs="+", help="folders with request.json and arrays.npz"
    )
    folders: list[Path] = parser.parse_args(arguments).request_dirs
    return 0 if all(_run(folder) for folder in folders) else 1


def _run(folder: Path) -> bool:
    """Write the folder's result, or its error; return whether it was a result."""
    try:
        if not folder.is_dir():
            raise RequestError(f"{folder} is not a folder")  # noqa: TRY301 - reported like the others
        clear_result(folder)
        request = load_request(folder)
        # Imported here: a missing torch must be reported in result.json as well.
        from motrt.calibration.reference.session import run_request

        arrays, report = run_request(request)
        write_result(folder, arrays, report)
    except Exception as err:
        sys.stderr.write(f"{type(err).__name__}: {err}\n")
        if folder.is_dir():
            write_error(folder, err)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
