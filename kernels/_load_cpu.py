"""Compiles the project's C++ sources for this machine's processor, keeps what it made on disk, and loads it: for float32 steps on CPU, and for what
ranks exchange there.

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
from kernels.toolchain import KernelError, find_cxx, locked

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
BUILT = SOURCES / "built"
"""What setup compiles."""
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-Wall")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
LEVELS = {"amx": (*_AVX512, "-mamx-tile", "-mamx-bf16"), "avx512": _AVX512, "avx2": _AVX2, "any": ()}
"""What is compiled for, and its options, the best one first: a matrix unit, x86-64's levels 4 and 3, and what every processor has. Not the very
processor at hand: an image is built on one and runs on others."""

SEAL_BYTES = 32
"""At the end of a library: the hash of what is before it. Loaders do not look beyond what a library says it has."""
NONE = "none"
"""No level: torch computes all."""


def parse_flags(cpuinfo: str) -> frozenset[str]:
    """What the first processor of a /proc/cpuinfo has."""
    return frozenset(next((line.partition(":")[2] for line in cpuinfo.splitlines() if line.startswith("flags")), "").split())


def level_of(flags: frozenset[str]) -> str:
    """The best of LEVELS that a processor with these flags runs."""
    return next(name for name, options in LEVELS.items() if all(option[2:].replace("-", "_") in flags for option in options))


def _is_given_tiles() -> bool:
    """Whether the kernel lets this process use the matrix unit's registers: it is to be asked (Linux, Documentation/arch/x86/xstate.rst)."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@functools.cache
def machine_level() -> str:
    """The best of LEVELS that this process could use."""
    try:
        flags = parse_flags(Path("/proc/cpuinfo").read_text())
    except OSError:
        return "any"
    level = level_of(flags)
    if level == "amx" and not _is_given_tiles():
        level = level_of(flags - {"amx_tile"})
    return level


class _Choice:
    """Of this process: kernels are loaded once, and the last bits of sums are theirs."""

    most: str | None = None
    """Of LEVELS, or NONE; None: whatever there is."""
    is_made = False
    """Some kernel was asked for."""


def use_at_most(level: str) -> None:
    """Of LEVELS, or NONE: for this process, before the first kernel is asked for. Raises KernelError when that was with another."""
    before = own_level()
    old, _Choice.most = _Choice.most, level
    if _Choice.is_made and own_level() != before:
        _Choice.most = old
        raise KernelError(f"this process computes with {before} already")


def own_level() -> str:
    """The best of LEVELS that this process uses; or NONE."""
    level, most = machine_level(), _Choice.most
    return level if most is None else max(level, most, key=[*LEVELS, NONE].index)


def compile_sources(level: str, folder: Path | None = None) -> Path:
    """The library of cpu/*.cpp for one of LEVELS, compiled unless an equal one is on disk.

    folder: where that is; None: where setup or an earlier start left it. Raises KernelError with the compiler's message.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    options = [*FLAGS, *LEVELS[level]]
    parts = [*(path.read_bytes() for path in (*sources, *sorted(SOURCES.glob("*.h")))), " ".join(options).encode()]
    key = hashlib.sha256(b"\0".join([*parts, b"sealed"])).hexdigest()[:24]
    file = f"cpu-{platform.machine()}-{level}-{key}.so"
    for place in (BUILT, cache_folder()) if folder is None else (folder,):
        if _is_whole(path := place / file):
            return path
    cxx = find_cxx()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            if not _is_whole(path):  # others may have compiled it meanwhile
                _compile(cxx, level, [*options, *map(str, sources)], path)
    except OSError as error:
        said = f"{path.parent}, where compiled kernels are kept, cannot be written: {error}"
        raise KernelError(f"{said}; set XDG_CACHE_HOME to another folder") from None
    return path


def _compile(cxx: str, level: str, arguments: list[str], path: Path) -> None:
    """Raises KernelError, OSError."""
    logger.info("compiling kernels/cpu for %s ...", level)
    with tempfile.TemporaryDirectory(dir=path.parent) as own:
        made = Path(own) / "out.so"
        result = subprocess.run([cxx, "-o", str(made), *arguments], capture_output=True, encoding="utf-8", errors="replace")
        if result.returncode:
            raise KernelError(f"{cxx} could not compile kernels/cpu for {level}:\n{result.stderr.strip()}")
        content = made.read_bytes()
        with made.open("ab") as file:
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)  # whole or not at all


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was compiled: of one that is cut, or has zeros, as a machine without power leaves files, loading ends the
    process by a signal."""
    try:
        content = path.read_bytes()
    except OSError:  # whoever writes there says more
        return False
    if hashlib.sha256(content[:-SEAL_BYTES]).digest() == content[-SEAL_BYTES:]:
        return True
    logger.warning("%s is damaged, and is not used", path)
    return False


def compile_for(level: str, folder: Path | None = None) -> Path:
    """As compile_sources; by a compiler that knows of no matrix unit (GCC before 11) without one. Raises KernelError."""
    try:
        return compile_sources(level, folder)
    except KernelError as error:
        if level != "amx":
            raise
        logger.warning("steps on CPU do without the processor's matrix unit: %s", error)
        return compile_sources("avx512", folder)


@functools.cache
def _find(level: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(compile_for(level)))
    except (KernelError, OSError) as error:
        logger.warning("steps on CPU run by torch alone, which takes two to three times as long: %s", error)
        return None


def find_library() -> ctypes.CDLL | None:
    """None where it cannot be made, the reason of which is logged once, or is not to be used."""
    _Choice.is_made = True
    level = own_level()
    return None if level == NONE else _find(level)


if __name__ == "__main__":
    # For this machine's processor, or for all that an image may run on.
    is_for_all = sys.argv[1:] == ["--all"] and platform.machine() in ("x86_64", "AMD64")
    for level in LEVELS if is_for_all else [machine_level()]:
        compile_for(level, BUILT)
