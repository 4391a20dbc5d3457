"""How long a checkpoint takes from its files to a rank's memory, and how much of the host's that needs, beside what the disk gives.

    python -m benchmarks.loading [--shape llama-8b] [--folder DIR] [--device cuda] [--turns 2]

The checkpoint is written first, random numbers in bf16. Each turn loads it in a process of its own, once from the disk (its pages are dropped from
the page cache, as far as the system does that) and once from memory, and reads the same files alone before each. Tests of the start as a whole,
with kernels and graphs, are not this one's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from backend.devices import on_stream
from backend.model_checks import check_model
from backend.models import load_model
from backend.models.shards import ShardWriter
from backend.models.spec import WeightList
from backend.parallel.ranks import Ranks
from benchmarks.gpu_step import SHAPES, write_target

BLOCK = 16 * 2**20


def write_weights(folder: Path, device: str) -> int:
    """-> bytes"""
    weights, total = WeightList(), 0
    check_model(folder, has_weights=False).list_weights(weights)
    with ShardWriter(folder) as writer:
        for name, shape in weights.required.items():
            tensor = torch.randn(shape, device=device, dtype=torch.bfloat16).cpu()
            total += tensor.nbytes
            writer.add({name: tensor})
    return total


def drop(files: list[Path]) -> None:
    """From the page cache."""
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> float:
    """Seconds, of one thread that does nothing with it."""
    started, block = time.perf_counter(), bytearray(BLOCK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - started


def most_memory() -> int:
    """Bytes that this process had at most since the last call, what it has mapped of files among them."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    Path("/proc/self/clear_refs").write_text("5")
    return int(found[1]) * 1024


def load(folder: str, device: str) -> None:
    """Prints its seconds, and by how much the process grew at most: this process has done nothing else."""
    own = torch.device(device)
    if own.type == "cuda":
        torch.zeros(1, device=own)
    most_memory()
    before = most_memory()
    with on_stream(own):
        started = time.perf_counter()
        model = load_model(folder, torch.bfloat16, own, Ranks())
        if own.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    del model
    print(json.dumps([seconds, most_memory() - before]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--folder", help="where it is written; default: a temporary one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load, arguments.device)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        target = write_target(arguments.shape, Path(name))
        total = write_weights(target, arguments.device)
        files = sorted(target.glob("*.safetensors"))
        print(f"{total / 1e9:.1f} GB in {len(files)} files\n")
        print("| turn | from | files read alone, s | GB/s | loaded, s | loaded / read | host memory at most, GB |\n|---|---|---|---|---|---|---|")
        for turn in range(arguments.turns):
            for source in ("disk", "memory"):
                if source == "disk":
                    drop(files)
                alone = read(files)
                if source == "disk":
                    drop(files)
                words = [sys.executable, "-m", "benchmarks.loading", f"--load={target}", f"--device={arguments.device}"]
                seconds, grown = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
                speeds = f"{alone:.2f} | {total / alone / 1e9:.1f} | {seconds:.2f} | {seconds / alone:.2f}"
                print(f"| {turn + 1} | {source} | {speeds} | {grown / 1e9:.2f} |", flush=True)


if __name__ == "__main__":
    main()
