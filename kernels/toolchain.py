"""Compilers on this machine: CUDA's, and one for C++. No torch: the launcher looks for them too."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


class KernelError(RuntimeError):
    """A kernel cannot be compiled or run on this machine; says what is missing."""


def find_nvcc() -> str:
    """Path of nvcc: CUDA's own installation, or what `nvidia-cuda-nvcc` has brought into this environment. Raises KernelError when there is none."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home and (nvcc := Path(home) / "bin" / "nvcc").is_file():
            return str(nvcc)
    if path := shutil.which("nvcc"):
        return path
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if found := sorted(Path(folder).glob("cu*/bin/nvcc")):
            return str(found[-1])
    raise KernelError(
        "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: install CUDA's compiler (pip install -e '.[gpu]' in the project's folder), "
        "or use --device cpu"
    )


def find_cxx() -> str:
    """Path of a C++ compiler that takes g++'s options: the one that CXX names, or g++, or clang++. Raises KernelError when there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise KernelError("no C++ compiler on PATH, and CXX names none: install one (apt-get install g++)")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """By a file or folder that is there: one thread of one process at a time, so that ranks that start at once compile a kernel once."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: each compiles it, and the last one's stays
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
