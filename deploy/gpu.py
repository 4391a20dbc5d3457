"""What a GPU needs beside itself, looked at before anything is started: all that lacks is said at once. No torch is imported."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from deploy.server import LaunchError
from kernels.toolchain import KernelError, find_nvcc

DRIVER_FILE = Path("/dev/nvidiactl")


def is_hidden() -> bool:
    """Whether the machine's GPUs are taken from this process, by CUDA's own variable."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def check_gpu(device: str) -> None:
    """Raises LaunchError when a GPU is asked for that is not there, and when one is to be used and something that it needs is missing.

    auto is the GPU of a machine that has one. One that cannot be used is an error then too: answers from the CPU are many times slower.
    """
    if device == "cpu" or (device == "auto" and (is_hidden() or not DRIVER_FILE.exists())):
        return
    if not DRIVER_FILE.exists():
        raise LaunchError(f"device {device}: this machine has no NVIDIA GPU (no {DRIVER_FILE}); use --device cpu")
    if is_hidden():
        hidden = os.environ["CUDA_VISIBLE_DEVICES"]
        raise LaunchError(f"device {device}: CUDA_VISIBLE_DEVICES is {hidden!r}, which hides this machine's GPUs; unset it, or use --device cpu")
    if missing := list_missing():
        raise LaunchError(f"device {device}: this machine has a GPU, and lacks {'; '.join(missing)}. Or use --device cpu")


def list_missing() -> list[str]:
    """What is to be done about each, in words."""
    found = []
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        found.append(f"the driver's library ({error}): in a container, start it with --gpus=all")
    version = importlib.metadata.version("torch") if importlib.util.find_spec("torch") is not None else ""
    if version.endswith("+cpu"):
        found.append(f"a torch for CUDA (torch {version} is for CPUs): pip install --force-reinstall torch, from an index that has those for CUDA")
    if importlib.util.find_spec("pycuda") is None:
        found.append("PyCUDA: pip install -e '.[gpu]' in the project's folder, with CUDA's compiler on PATH")
    try:
        find_nvcc()
    except KernelError as error:
        found.append(str(error).removesuffix(", or use --device cpu"))
    return found
