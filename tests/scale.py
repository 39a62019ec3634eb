"""Export Edge, Nano and Super from checkpoints that are holes on disk, and hold the bars.

The tensor tables are the real ones; the files hold headers and nothing else, so 119 GiB of weights
fit on any disk. What is measured is the product's own claim: an export reads no weight.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_SECONDS = 30.0
MAX_RSS_BYTES = 1 << 30
MAX_GRAPH_BYTES = 20 << 20  # graphs and manifest together


def main() -> int:
    """Print one line an export; return 1 if one is over a bar."""
    worst_seconds, worst_rss, failed = 0.0, 0, 0
    with tempfile.TemporaryDirectory(prefix="motrt-scale-") as name:
        folder = Path(name)
        for model in ("edge", "nano", "super"):
            checkpoint = folder / model
            _run("tests/omni_fixtures", f"sparse-{model}", str(checkpoint))
            for lowering in ("native", "portable"):
                bundle = folder / f"{model}-{lowering}"
                report = json.loads(
                    _run(
                        "-m", "motrt.export", "export", str(checkpoint), "-o", str(bundle),
                        "--precision", "bf16", "--lowering", lowering, "--json",
                    )
                )  # fmt: skip
                small = sum(p.stat().st_size for p in bundle.glob("*") if p.is_file())
                seconds, rss = report["seconds"], report["peak_rss_bytes"]
                ok = seconds <= MAX_SECONDS and rss <= MAX_RSS_BYTES and small <= MAX_GRAPH_BYTES
                failed += not ok
                worst_seconds, worst_rss = max(worst_seconds, seconds), max(worst_rss, rss)
                print(
                    f"{model:6}{lowering:9}{report['weights']['tensor_bytes'] / 2**30:7.1f} GiB of "
                    f"weights  {seconds:5.1f} s  {rss / 2**20:5.0f} MiB  graphs and manifest "
                    f"{small / 2**20:4.1f} MiB  {'ok' if ok else 'OVER THE BAR'}",
                    flush=True,
                )
    print(
        f"scale: slowest export {worst_seconds:.1f} s (bar {MAX_SECONDS:.0f}), "
        f"peak memory {worst_rss / 2**20:.0f} MiB (bar {MAX_RSS_BYTES / 2**20:.0f})"
    )
    return int(failed > 0)


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stderr or done.stdout)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
