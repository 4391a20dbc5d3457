"""What the launcher asks of a machine before a GPU is used, on one that has none: files and modules stand in for the driver's."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from deploy import gpu
from deploy.server import LaunchError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a GPU, whose driver's library, torch, PyCUDA and compiler are missing."""
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(gpu, "DRIVER_FILE", driver)
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in ("pycuda", "nvidia") else find(name, *rest))
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu" if name == "torch" else version(name))
    return tmp_path


def test_all_that_lacks_is_said_at_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine))
    monkeypatch.setattr("kernels.toolchain.Path.is_file", lambda self: False)
    for device in ("auto", "cuda", "cuda:1"):
        with pytest.raises(LaunchError) as caught:
            gpu.check_gpu(device)
        message = str(caught.value)
        assert message.startswith(f"device {device}: this machine has a GPU, and lacks ") and message.endswith(". Or use --device cpu")
        for part in ("--gpus=all", "torch 2.13.0+cpu is for CPUs", "PyCUDA: pip install -e '.[gpu]'", "no nvcc on PATH"):
            assert part in message
        assert message.count("--device cpu") == 1


def test_the_cpu_is_used_where_it_is_asked_for_or_all_there_is(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.check_gpu("cpu")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        gpu.check_gpu("auto")
        with pytest.raises(LaunchError, match=f"device cuda:0: CUDA_VISIBLE_DEVICES is '{hidden}', which hides"):
            gpu.check_gpu("cuda:0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpu, "DRIVER_FILE", machine / "none")
    gpu.check_gpu("auto")
    with pytest.raises(LaunchError, match="device cuda: this machine has no NVIDIA GPU"):
        gpu.check_gpu("cuda")
