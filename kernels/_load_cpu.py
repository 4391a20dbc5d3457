"""Compiles the project's C++ sources for this machine's processor, keeps what it made on disk, and loads it: for float32 steps on CPU.

Where there is no compiler, the twins in torch compute instead: slower, not wrong.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels._load import cache_folder
from kernels.toolchain import KernelError, find_cxx

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
BUILT = SOURCES / "built"
"""What setup compiles."""
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-Wall")
LEVELS = {
    "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "any": (),
}
"""What is compiled for, and its options: x86-64's levels 4 and 3, and what every processor has. Not the very processor at hand: an image is built
on one and runs on others."""


def parse_flags(cpuinfo: str) -> frozenset[str]:
    """What the first processor of a /proc/cpuinfo has."""
    return frozenset(next((line.partition(":")[2] for line in cpuinfo.splitlines() if line.startswith("flags")), "").split())


def level_of(flags: frozenset[str]) -> str:
    """The best of LEVELS that a processor with these flags runs."""
    return next(name for name, options in LEVELS.items() if all(option[2:] in flags for option in options))


@functools.cache
def own_level() -> str:
    try:
        return level_of(parse_flags(Path("/proc/cpuinfo").read_text()))
    except OSError:
        return "any"


def compile_sources(level: str, folder: Path | None = None) -> Path:
    """The library of cpu/*.cpp for one of LEVELS, compiled unless an equal one is on disk.

    folder: where that is; None: where setup or an earlier start left it. Raises KernelError with the compiler's message.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    options = [*FLAGS, *LEVELS[level]]
    parts = [*(path.read_bytes() for path in (*sources, *sorted(SOURCES.glob("*.h")))), " ".join(options).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    file = f"cpu-{platform.machine()}-{level}-{key}.so"
    for place in (BUILT, cache_folder()) if folder is None else (folder,):
        if (path := place / file).is_file():
            return path
    logger.info("compiling kernels/cpu for %s ...", level)
    cxx = find_cxx()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:
            made = Path(own) / "out.so"
            command = [cxx, *options, "-o", str(made), *map(str, sources)]
            result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
            if result.returncode:
                raise KernelError(f"{cxx} could not compile kernels/cpu for {level}:\n{result.stderr.strip()}")
            made.replace(path)  # whole or not at all: several processes may compile at once
    except OSError as error:
        raise KernelError(f"{path.parent}, where compiled kernels are kept, cannot be written: {error}") from None
    return path


@functools.cache
def _find() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(compile_sources(own_level())))
    except (KernelError, OSError) as error:
        logger.warning("steps on CPU run by torch alone, which takes two to three times as long: %s", error)
        return None


def find_library() -> ctypes.CDLL | None:
    """None where it cannot be made, or FORETOKEN_CPU_KERNELS is 0; the reason is logged, once."""
    return None if os.environ.get("FORETOKEN_CPU_KERNELS") == "0" else _find()


if __name__ == "__main__":
    # For this machine's processor, or for all that an image may run on.
    is_for_all = sys.argv[1:] == ["--all"] and platform.machine() in ("x86_64", "AMD64")
    for level in LEVELS if is_for_all else [own_level()]:
        compile_sources(level, BUILT)
