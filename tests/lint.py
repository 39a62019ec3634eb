"""Run the checkers and compare what each has seen with what git tracks.

A checker that reports no errors may have looked at nothing: mypy sees one root of a namespace
package unless it is told about all four.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def main() -> int:
    """Return the number of checkers that failed or saw too little."""
    tracked = len(_run("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py")[1])
    failures = 0
    for name, arguments in (
        ("ruff", ("check", ".")),
        ("ruff", ("format", "--check", ".")),
        ("mypy", ()),
        ("lint-imports", ()),
    ):
        code, lines = _run(str(BIN / name), *arguments)
        print(f"{name} {' '.join(arguments)}: {lines[-1] if lines else ''}")
        if code != 0:
            print("\n".join(lines))
            failures += 1
        if name == "mypy":
            failures += _differs(name, lines, r"(\d+) source files", tracked)
    seen = len(_run(str(BIN / "ruff"), "check", "--show-files", ".")[1])
    failures += _differs("ruff", [f"{seen} files"], r"(\d+) files", tracked + 1)  # pyproject.toml
    return failures


def _run(*command: str) -> tuple[int, list[str]]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


def _differs(name: str, lines: list[str], pattern: str, expected: int) -> int:
    found = re.search(pattern, lines[-1] if lines else "")
    seen = int(found[1]) if found else 0
    print(f"{name} saw {seen} files, {expected} are there")
    return int(seen != expected)


if __name__ == "__main__":
    sys.exit(main())
