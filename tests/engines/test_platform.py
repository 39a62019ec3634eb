import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from motrt.engines import backend_probe, host, platform
from motrt.engines._tensorrt import tensorrt
from motrt.engines.backend_probe import Backend, probe_onnxruntime, probe_tensorrt
from motrt.engines.capabilities import gpu_precisions, lowering_fit, rtx_refusal
from motrt.engines.errors import MissingDependencyError
from motrt.engines.host import parse_capability, probe_gpus, probe_memory
from motrt.engines.jetson import probe_jetson
from motrt.engines.platform import probe_platform
from motrt.export.cli import run

NOTHING = Backend(None, (), "not installed")
ORT = Backend("1.32.0", ("CPUExecutionProvider",), None)


def board(root: Path, model: str | None, release: str | None) -> Path:
    if model is not None:
        (root / "proc/device-tree").mkdir(parents=True)
        (root / "proc/device-tree/model").write_bytes(model.encode() + b"\0")
    if release is not None:
        (root / "etc").mkdir(parents=True)
        (root / "etc/nv_tegra_release").write_text(release)
    return root


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


@pytest.fixture
def no_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def use_backends(monkeypatch: pytest.MonkeyPatch, **found: Backend) -> None:
    monkeypatch.setattr(platform, "probe_onnxruntime", lambda: found.get("onnxruntime", NOTHING))
    monkeypatch.setattr(
        platform, "probe_tensorrt", lambda name: found.get(name.replace("-", "_"), NOTHING)
    )


@pytest.mark.parametrize(
    ("model", "release", "l4t", "jetpack", "capability"),
    [
        (
            "NVIDIA Jetson AGX Orin Developer Kit",
            "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64",
            "36.4.3",
            "6.2",
            (8, 7),
        ),
        (
            "NVIDIA Jetson AGX Thor Developer Kit",
            "# R38 (release), REVISION: 2.1, GCID: 41844464, BOARD: generic, EABI: aarch64",
            "38.2.1",
            "7.0",
            (11, 0),
        ),
        ("NVIDIA Orin NX Developer Kit", None, None, None, (8, 7)),
        (None, "# R36 (release), REVISION: 9.9, GCID: 1", "36.9.9", "6.x", None),
        ("NVIDIA Jetson Orin Nano", "# R99 (release), REVISION: 1.0", "99.1.0", None, (8, 7)),
    ],
)
def test_a_board_is_recognized(
    tmp_path: Path,
    model: str | None,
    release: str | None,
    l4t: str | None,
    jetpack: str | None,
    capability: tuple[int, int] | None,
) -> None:
    found = probe_jetson(board(tmp_path, model, release))
    assert found is not None
    assert (found.model, found.l4t, found.jetpack) == (model, l4t, jetpack)
    assert found.compute_capability == capability


@pytest.mark.parametrize("model", [None, "Raspberry Pi 5 Model B Rev 1.0", ""])
def test_another_machine_is_no_board(tmp_path: Path, model: str | None) -> None:
    assert probe_jetson(board(tmp_path, model, None)) is None


def test_a_board_without_nvidia_smi_still_has_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_smi: None
) -> None:
    use_backends(monkeypatch, onnxruntime=ORT)
    release = "# R36 (release), REVISION: 4.3, GCID: 38968081"
    machine = probe_platform(board(tmp_path, "NVIDIA Jetson AGX Orin", release))
    (gpu,) = machine.gpus
    assert gpu.compute_capability == (8, 7)
    assert gpu.memory_bytes is None
    assert "8.7" in str(gpu.rtx_refusal)
    fits = {f.precision: f.fits for f in machine.precisions if f.device == gpu.name}
    assert fits["bf16"]
    assert fits["int4"]
    assert not fits["fp8"]
    assert not fits["nvfp4"]


def test_on_a_board_tensorrt_comes_with_jetpack_and_rtx_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_smi: None
) -> None:
    use_backends(monkeypatch, onnxruntime=ORT)
    missing = probe_platform(board(tmp_path, "NVIDIA Jetson AGX Thor", None)).missing
    fixes = {item.what: item.fix for item in missing}
    assert "JetPack" in fixes["tensorrt"]
    assert "tensorrt-rtx" not in fixes
    assert "onnxruntime-gpu" not in fixes


def test_what_a_boards_smi_does_not_know_is_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backends(monkeypatch)
    fake_smi(tmp_path, monkeypatch, "echo 'Orin (nvgpu), [N/A], [N/A], 540.4.0'")
    (gpu,) = probe_platform(board(tmp_path, "NVIDIA Jetson AGX Orin", None)).gpus
    assert (gpu.name, gpu.driver, gpu.compute_capability) == ("Orin (nvgpu)", "540.4.0", (8, 7))


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(
        tmp_path,
        monkeypatch,
        'test "$1" = "--query-gpu=name,compute_cap,memory.total,driver_version" || exit 9\n'
        'test "$2" = "--format=csv,noheader" || exit 9\n'
        "echo 'NVIDIA H200, 9.0, 143771 MiB, 580.65.06'\n"
        "echo 'NVIDIA GeForce RTX 4090, 8.9, 24564 MiB, 580.65.06'",
    )
    (h200, ada), why = probe_gpus()
    assert why is None
    assert (h200.name, h200.compute_capability) == ("NVIDIA H200", (9, 0))
    assert h200.memory_bytes == 143771 << 20
    assert h200.driver == "580.65.06"
    assert "9.0" in str(h200.rtx_refusal)
    assert ada.rtx_refusal is None


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'no driver is loaded' >&2; exit 9", "no driver is loaded"),
        ("exit 6", "exit code 6"),
        ("exit 0", "lists no GPU"),
        ("echo 'three, fields, only'", "lists no GPU"),
        ("printf '\\377\\376\\n'", "lists no GPU"),
        ("exec /bin/sleep 20", "did not answer"),
    ],
)
def test_a_useless_nvidia_smi_is_a_reason_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setattr(host, "_SMI_SECONDS", 0.5)
    fake_smi(tmp_path, monkeypatch, script)
    gpus, reason = probe_gpus()
    assert gpus == ()
    assert why in str(reason)


def test_an_nvidia_smi_that_does_not_start_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, monkeypatch, "")
    (tmp_path / "bin/nvidia-smi").write_text("#!/no/such/interpreter\n")
    assert "does not start" in str(probe_gpus()[1])


def test_no_nvidia_smi_is_a_reason(no_smi: None) -> None:
    assert probe_gpus() == ((), "nvidia-smi is not on PATH")


@pytest.mark.parametrize(
    ("text", "value"), [("8.9", (8, 9)), ("12.0", (12, 0)), ("[N/A]", None), ("", None)]
)
def test_compute_capabilities_are_read(text: str, value: tuple[int, int] | None) -> None:
    assert parse_capability(text) == value


@pytest.mark.parametrize(
    ("capability", "lacks"),
    [
        ((7, 5), {"bf16", "fp8", "nvfp4"}),
        ((8, 0), {"fp8", "nvfp4"}),
        ((8, 9), {"nvfp4"}),
        ((9, 0), {"nvfp4"}),
        ((10, 0), set()),
        ((11, 0), set()),
        ((12, 1), set()),
    ],
)
def test_precisions_follow_the_compute_capability(
    capability: tuple[int, int], lacks: set[str]
) -> None:
    fits = gpu_precisions("gpu", capability)
    assert {fit.precision for fit in fits if not fit.fits} == lacks
    assert all(bool(fit.reason) is not fit.fits for fit in fits)


def test_an_unknown_capability_is_neither_yes_nor_no() -> None:
    assert {fit.fits for fit in gpu_precisions("gpu", None)} == {None}
    assert rtx_refusal(None) is not None


@pytest.mark.parametrize(
    ("backend", "version", "lowering"),
    [
        ("tensorrt", "10.3.0", "portable"),
        ("tensorrt", "10.13.3.9", "portable"),
        ("tensorrt", "10.15.1", "native"),
        ("tensorrt", "11.4.1", "native"),
        ("tensorrt-rtx", "1.7.1.116", "native"),
        ("onnxruntime", "1.32.0", "native"),
        ("onnxruntime", "1.31.2", "portable"),
        ("onnxruntime", "1.9", "portable"),
        ("onnxruntime", "custom build", "portable"),
    ],
)
def test_the_lowering_follows_the_version(backend: str, version: str, lowering: str) -> None:
    fit = lowering_fit(backend, version)
    assert fit.lowering == lowering
    assert fit.reason


def memory_tree(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        "MemTotal:       8000000 kB\nMemFree:  1 kB\nMemAvailable:   6000000 kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "limit"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, None),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "1048576\n"}, 1048576),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "99999999999999\n"}, None),
        (
            "0::/a/b\n",
            {"sys/fs/cgroup/a/memory.max": "4096\n", "sys/fs/cgroup/a/b/memory.max": "8192\n"},
            4096,
        ),
        (
            "4:cpu,memory:/job\n0::/\n",
            {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "12288\n"},
            12288,
        ),
        ("nonsense", {}, None),
    ],
)
def test_a_containers_limit_is_found(
    tmp_path: Path, cgroup: str, limits: dict[str, str], limit: int | None
) -> None:
    memory = probe_memory(memory_tree(tmp_path, cgroup, limits))
    assert memory.total_bytes == 8000000 * 1024
    assert memory.available_bytes == 6000000 * 1024
    assert memory.limit_bytes == limit


def test_unreadable_memory_sizes_are_a_reason(tmp_path: Path) -> None:
    assert "meminfo" in str(probe_memory(tmp_path).reason)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def write(module: str, text: str) -> None:
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "site")

    tensorrt.cache_clear()
    return write


def test_a_backend_is_imported_by_a_child(install: Callable[[str, str], None]) -> None:
    install("tensorrt", "print('welcome')\n__version__ = '10.16.2'\n")
    assert probe_tensorrt("tensorrt") == Backend("10.16.2", (), None)
    assert "tensorrt" not in sys.modules


def test_onnxruntimes_providers_are_reported(install: Callable[[str, str], None]) -> None:
    install(
        "onnxruntime",
        "__version__ = '1.20.0'\n"
        "def set_default_logger_severity(level): pass\n"
        "def get_available_providers(): return ['CUDAExecutionProvider']\n",
    )
    assert probe_onnxruntime() == Backend("1.20.0", ("CUDAExecutionProvider",), None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ImportError('libnvinfer.so.10: no such file')", "libnvinfer.so.10"),
        ("raise OSError('libcudart.so.13 is missing')", "libcudart.so.13"),
        ("raise AttributeError('numpy has no bool')", "numpy has no bool"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import sys; sys.exit(3)", "no message"),
        ("__version__ = '8.6.1'", "too old"),
        ("", "too old"),
    ],
)
def test_a_broken_backend_is_a_reason_and_no_crash(
    install: Callable[[str, str], None], text: str, why: str
) -> None:
    install("tensorrt", text)
    found = probe_tensorrt("tensorrt")
    assert found.version is None
    assert why in str(found.reason)


def test_a_backend_that_does_not_answer_is_a_reason(
    install: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_probe, "_IMPORT_SECONDS", 0.5)
    install("tensorrt_rtx", "import time; time.sleep(20)")
    assert "longer than" in str(probe_tensorrt("tensorrt-rtx").reason)


def test_an_absent_backend_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a child was started"))
    assert probe_tensorrt("tensorrt") == NOTHING


def test_the_access_module_names_the_extra(install: Callable[[str, str], None]) -> None:
    install("tensorrt_rtx", "raise ImportError('gone')")
    sys.modules.pop("tensorrt_rtx", None)
    with pytest.raises(MissingDependencyError, match=r"motrt\[rtx\]"):
        tensorrt("tensorrt-rtx")


def test_missing_packages_come_with_their_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_smi: None
) -> None:
    use_backends(monkeypatch)
    have = {"motrt": "0.1.0", "torch": "2.1.0", "onnx": "1.23.0+local"}
    monkeypatch.setattr(platform, "package_version", have.get)
    machine = probe_platform(tmp_path)
    fixes = {item.what: item.fix for item in machine.missing}
    assert fixes["onnxruntime"] == "pip install 'motrt[cpu]'"
    assert fixes["tensorrt"] == "pip install 'motrt[tensorrt]'"
    assert fixes["tensorrt-rtx"] == "pip install 'motrt[rtx]'"
    assert fixes["diffusers"] == "pip install 'motrt[export]'"
    assert "onnx" not in fixes
    assert machine.packages == {
        "torch": "2.1.0",
        "onnx": "1.23.0+local",
        "onnx-ir": None,
        "diffusers": None,
        "transformers": None,
    }
    (old,) = (what for what in fixes if what.startswith("torch"))
    assert "have 2.1.0" in old
    assert machine.lowerings == ()


def test_with_a_gpu_a_cpu_only_onnxruntime_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backends(monkeypatch, onnxruntime=ORT)
    fake_smi(tmp_path, monkeypatch, "echo 'NVIDIA L4, 8.9, 23034 MiB, 570.1'")
    fixes = {item.what: item.fix for item in probe_platform(tmp_path / "root").missing}
    assert "motrt[gpu]" in fixes["onnxruntime-gpu"]


def test_doctor_prints_one_json_object_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_smi: None
) -> None:
    use_backends(monkeypatch, onnxruntime=ORT)
    assert run(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["onnxruntime"] == {
        "version": "1.32.0",
        "providers": ["CPUExecutionProvider"],
        "reason": None,
    }
    assert data["lowerings"][0]["lowering"] == "native"
    assert {"what", "needed_for", "fix"} == data["missing"][0].keys()
    assert data["gpu_reason"] == "nvidia-smi is not on PATH"
    assert data["jetson"] is None


def test_doctors_table_keeps_brackets_and_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_smi: None
) -> None:
    use_backends(monkeypatch, onnxruntime=ORT)
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "pip install 'motrt[tensorrt]'" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_probing_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from motrt.engines.platform import probe_platform\n"
        "probe_platform()\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'tensorrt', 'tensorrt_rtx', 'diffusers',\n"
        "         'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
