"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import ctypes, time
from pathlib import Path
from backend import heap
from backend.devices import keep_temporaries_on_heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20

keep_temporaries_on_heap()
own = heap.Heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(2**20) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)
for block in blocks[:-1]:
    libc.free(block)
kept = resident()
assert not own.look(), "it has done nothing for long enough yet"
end = time.process_time() + heap.MIN_BUSY_SECONDS
while time.process_time() < end:
    pass
assert not own.look(), "it is busy"
own._trimmed -= heap.TRIM_SECONDS
time.sleep(0.1)
assert own.look() and not own.look(), "once"
print(kept, resident())
"""


def test_freed_memory_is_given_back_when_there_is_little_to_do() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    kept, left = map(int, result.stdout.split())
    assert kept - left > 150, f"{kept} MiB resident before, {left} after"
