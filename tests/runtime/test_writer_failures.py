"""What fails leaves no half file, keeps the old one, and says why; wrong wishes fail early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motrt.engines.errors import ConfigError, ExportError, MissingDependencyError
from motrt.runtime import _media_libraries
from motrt.runtime._frame_writer import FrameWriter
from motrt.runtime.writers import GifWriter, Mp4Writer, PngWriter, open_writer

pytest.importorskip("PIL.Image")
pytest.importorskip("av")

KINDS = ("clip.mp4", "clip.gif", "clip.npz", "frames/")


def _clip(frames: int) -> Any:
    """Noise, which no codec makes small."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (frames, 64, 96, 3), dtype=np.uint8)


def _write(writer: FrameWriter, clip: Any) -> None:
    with writer:
        for frame in clip:
            writer.write(frame)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _write_and_stop(writer: FrameWriter, stop: type[BaseException]) -> None:
    with writer:
        writer.write(_clip(5))
        raise stop


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt, OSError, SystemExit])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_leaves_what_was_there(
    tmp_path: Path, kind: str, stop: type[BaseException]
) -> None:
    for old in (False, True):
        if old:
            _write(open_writer(f"{tmp_path}/{kind}"), _clip(2))
        before = _contents(tmp_path)
        with pytest.raises(stop):
            _write_and_stop(open_writer(f"{tmp_path}/{kind}"), stop)
        assert _contents(tmp_path) == before
        assert len(os.listdir(tmp_path)) == old


@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_at_the_end_leaves_what_was_there(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(open_writer(f"{tmp_path}/{kind}"), _clip(2))
    before = _contents(tmp_path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("replace", "rename"):
        monkeypatch.setattr(Path, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        _write(open_writer(f"{tmp_path}/{kind}"), _clip(3))
    assert _contents(tmp_path) == before
    assert len(os.listdir(tmp_path)) == 1


FULL_DISK = """
import resource, sys
import numpy as np
from pathlib import Path
from motrt.engines.errors import ExportError
from motrt.runtime.writers import open_writer
name, limits = sys.argv[1], map(int, sys.argv[2:])
clip = np.random.default_rng(0).integers(0, 256, (6, 64, 96, 3), dtype=np.uint8)
for limit in limits:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
    try:
        with open_writer(name) as writer:
            for frame in clip:
                writer.write(frame)
    except ExportError as err:
        print(len(list(Path(name).parent.iterdir())), err)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_a_typed_error(tmp_path: Path, kind: str) -> None:
    name = f"{tmp_path}/{kind}"
    _write(open_writer(name), _clip(6))
    before = _contents(tmp_path)
    whole = max(map(len, before.values()))
    # At the first byte, in the middle, and in what the end of the file needs.
    limits = [str(limit) for limit in (1, whole // 2, whole - 20)]
    done = subprocess.run(
        [sys.executable, "-B", "-c", FULL_DISK, name, *limits],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(limits)
    for line in lines:
        assert line.startswith("1 cannot write")  # one name in the folder: the old one
        assert "File too large" in line
    assert _contents(tmp_path) == before


CTRL_C = """
import sys, time
import numpy as np
from motrt.runtime.writers import open_writer
with open_writer(sys.argv[1]) as writer:
    while True:
        writer.write(np.zeros((4, 64, 96, 3), np.uint8))
        print("wrote", flush=True)
"""


@pytest.mark.parametrize("kind", ["clip.mp4", "frames/"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, kind: str) -> None:
    arguments = [sys.executable, "-c", CTRL_C, f"{tmp_path}/{kind}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "wrote\n"
        assert len(os.listdir(tmp_path)) == 1  # the temporary name
        process.send_signal(signal.SIGINT)
        process.stdout.close()  # nobody reads on; a full pipe would block the child
        assert "KeyboardInterrupt" in process.stderr.read() or process.wait()
    assert os.listdir(tmp_path) == []


def test_a_writer_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    for kind in KINDS:
        writer = open_writer(f"{tmp_path}/{kind}")
        assert len(os.listdir(tmp_path)) == 1
        del writer
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["clip.avi", "clip", ".mp4", "clip.mp4.bak", ""])
def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.mp4, \.gif, \.npz, or a folder"):
        open_writer(str(tmp_path / "x" / name).removesuffix("/") if name else "")


def _refused(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.png").touch()
    (tmp_path / "file").touch()
    return {
        "is no file": lambda: Mp4Writer(tmp_path / "folder.mp4", fps=24),
        "got holiday.png": lambda: open_writer(tmp_path / "photos"),
        "got not a folder": lambda: open_writer(f"{tmp_path}/file/"),
        "only an MP4 has a crf": lambda: open_writer(tmp_path / "a.gif", crf=20),
        "crf is out of range": lambda: open_writer(tmp_path / "a.mp4", crf=52),
        "got 60 fps; expected at most 50": lambda: GifWriter(tmp_path / "a.gif", fps=60),
        "no such codec": lambda: Mp4Writer(tmp_path / "a.mp4", fps=24, codec="libx265"),
        "is no file.*null": lambda: FrameWriter(os.devnull),
    }


def test_wrong_settings_are_refused_before_the_work(tmp_path: Path) -> None:
    for message, attempt in _refused(tmp_path).items():
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(ConfigError, match=message):
            attempt()
        assert sorted(os.listdir(tmp_path)) == before
    for fps in (0, -1, float("nan"), float("inf"), 1001, "fast"):
        with pytest.raises(ConfigError, match="out of range"):
            open_writer(tmp_path / "a.mp4", fps=fps)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"cannot write .*; got No such file"):
        open_writer(tmp_path / "absent" / "a.mp4")


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_frames_are_refused(tmp_path: Path, kind: str) -> None:
    good = _clip(1)
    for bad in (good[..., :1], good[0, 0], good[:0], good[:, :32]):
        with pytest.raises(ConfigError, match="wrong shape"):
            _write_both(f"{tmp_path}/{kind}", good, bad)
    for bad in (good.astype(np.int32), good * 1.0):
        with pytest.raises(ConfigError):
            _write_both(f"{tmp_path}/{kind}", good, bad)
    with pytest.raises(ConfigError, match="0 frames"), open_writer(f"{tmp_path}/{kind}"):
        pass
    assert os.listdir(tmp_path) == []


def _write_both(name: str, good: Any, bad: Any) -> None:
    with open_writer(name) as writer:
        writer.write(good)
        writer.write(bad)


def test_a_missing_library_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    _media_libraries.pyav.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"motrt\[media\]"):
        open_writer(tmp_path / "a.mp4")
    assert os.listdir(tmp_path) == []
    _write(PngWriter(tmp_path / "a.png"), _clip(1))  # needs no PyAV
