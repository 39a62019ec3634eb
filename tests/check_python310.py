"""Check what JetPack 6 has: Python 3.10 and an ONNX Runtime from before opset 24.

Builds the wheel, installs it without extras into a new environment, imports everything that needs
none, and then runs a portable bundle in both modes. Run by ``make check-310``; the bundle comes from
the environment that this script runs in.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
OLD_ONNXRUNTIME = "onnxruntime==1.20.1"
RUN = """
import sys
import numpy as np
from motrt.runtime import GenerationParams, Runtime, SamplingParams
with Runtime.open(sys.argv[1]) as runtime:
    answer = runtime.reason("Hello", SamplingParams(max_new_tokens=8))
    params = GenerationParams(num_frames=5, height=32, width=32, num_inference_steps=2)
    clip = runtime.generate("A red square", params)
    frames = np.stack(list(clip.frames()))
assert len(answer.token_ids) == 8 and frames.shape == (5, 32, 32, 3), frames.shape
print("python", sys.version.split()[0], "token ids", answer.token_ids)
"""


def main() -> int:
    """Return 0 if the wheel installs, imports and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="a Python 3.10")
    python = shutil.which(parser.parse_args().python)
    if python is None:
        print("check-310: no Python 3.10 here, nothing was checked", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="motrt-310-") as name:
        folder = Path(name)
        _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT))
        wheel = next(folder.glob("motrt-*.whl"))
        _run(python, "-m", "venv", str(folder / "env"))
        own = str(folder / "env" / "bin" / "python")
        _run(own, "-m", "pip", "install", "-q", str(wheel))
        _run(own, "-c", "import motrt.runtime, motrt.engines, motrt.export.cli; print('imports')")
        _run(own, "-m", "motrt.export", "doctor", "--json")
        _run(own, "-m", "pip", "install", "-q", OLD_ONNXRUNTIME)
        _run(sys.executable, "tests/omni_fixtures", "edge-like", str(folder / "checkpoint"))
        export = ("export", str(folder / "checkpoint"), "-o", str(folder / "bundle"), "--quiet")
        _run(sys.executable, "-m", "motrt.export", *export, "--lowering", "portable")
        theirs = _run(own, "-c", RUN, str(folder / "bundle"))
        ours = _run(sys.executable, "-c", RUN, str(folder / "bundle"))
        print(theirs.strip(), "|", ours.strip())
        if theirs.split("token ids")[1] != ours.split("token ids")[1]:
            print("check-310: other tokens than with the current ONNX Runtime", file=sys.stderr)
            return 1
    print(f"check-310: the wheel installs and imports; {OLD_ONNXRUNTIME} runs a portable bundle")
    return 0


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[:4])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
