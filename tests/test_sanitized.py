"""Parts of kernels/cpu that are soon compiled, with sanitizers: reads past an end, what is undefined, races, and memory that ends amid a call."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernels._load_cpu import SOURCES
from kernels.toolchain import KernelError, find_cxx

OWN = Path(__file__).parent / "sanitized"
ADDRESSES = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
RACES = ("-fsanitize=thread",)


def run(path: Path, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """With nobody's options for sanitizers, and addresses that they can work with: of many bits some are not free for their own tables."""
    env = {name: value for name, value in os.environ.items() if not name.endswith("SAN_OPTIONS")}
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    return subprocess.run([*fixed, str(path), *arguments], env=env, capture_output=True, text=True, timeout=600)


def build(made: Path, flags: Sequence[str], *sources: Path) -> Path:
    """Skips where there is no compiler, or it has no such sanitizer that runs here."""
    try:
        command = [find_cxx(), "-O1", "-g", "-std=c++17", "-pthread", *flags]
    except KernelError as error:
        pytest.skip(str(error))
    probe = made.with_suffix(".probe")
    (text := made.with_suffix(".probe.cpp")).write_text("int main() {}\n")
    if subprocess.run([*command, "-o", str(probe), str(text)], capture_output=True).returncode or run(probe).returncode:
        pytest.skip(f"no sanitizer by {flags[0]}")
    result = subprocess.run([*command, "-o", str(made), *map(str, sources)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return made


def test_texts(tmp_path: Path) -> None:
    """Suffix's index and prompt lookup, at random; where an allocation fails the index is as it was before. Searches read past texts' ends then."""
    program = build(tmp_path / "texts", ADDRESSES, OWN / "texts.cpp")
    for seed in ("1", "2"):
        result = run(program, [seed])
        assert result.returncode == 0, result.stderr
        num_failed, num_taken, num_found = map(int, result.stdout.split())
        assert num_failed > 500 and num_taken > 10_000 and num_found > 5_000


def test_threads(tmp_path: Path) -> None:
    """Two that share out work among the same helpers, and three ranks that exchange in one memory."""
    result = run(build(tmp_path / "threads", RACES, OWN / "threads.cpp", SOURCES / "pool.cpp"))
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
