"""The server's model processes, as /proc shows them, and the shared memory that they leave when they are killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY_FOLDER = Path("/dev/shm")
REGION = "triton_python_backend_shm_region_"
"""How the names of the regions begin; nothing else is removed."""
REGIONS_FILE = ".regions"
"""In the repository's folder: a supervisor that is killed removes nothing, and the next one on the folder reads here what is left."""

ENGINE_MODULES = {b"backend.engine_process.main", b"backend.follower"}
"""On the command line of what computes for a model's process, which starts it: an engine, or another rank."""
DUMP_SECONDS = 0.5
"""For processes to say where their threads stand."""
STOPPED_SECONDS = 2.5
"""Of a process that other ranks wait for: clients of all of them are to know within 5 s."""


@dataclass(frozen=True, slots=True)
class Stub:
    """The process of one instance of a model that the server has."""

    pid: int
    model: str
    region: str
    """Of shared memory."""
    control: int
    """Where in it the block lies by which the server and the process know each other's state."""


def parse_stub(command: bytes, pid: int) -> Stub | None:
    """From a process's command line: stub, model.py, region, two sizes, the server's pid, folder, offset, instance, runtime.

    None for other processes, and for the one that only completes a configuration before the load: its instance has no numbers.
    """
    words = command.decode("utf-8", "replace").split("\0")
    if len(words) < 9 or not words[0].endswith("triton_python_backend_stub"):
        return None
    instance = re.fullmatch(r"(.+)_\d+_\d+", words[8])
    return Stub(pid, instance[1], words[2], int(words[7])) if instance and words[7].isdecimal() else None


def read_state(pid: int) -> tuple[str, int]:
    """State letter and parent of a process; ("X", 0): there is none. In a fraction of psutil's time, for what is looked at all the time."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return "X", 0
    return words[0].decode(), int(words[1])


def is_running(pid: int) -> bool:
    return read_state(pid)[0] not in "XZ"


class StoppedProcesses:
    """Which of some processes is stopped (SIGSTOP) for so long that nobody waits for it any more. Not one that a debugger has stopped."""

    def __init__(self, limit: float) -> None:
        """limit: seconds; infinity: they are waited for, whatever."""
        self._limit = limit
        self._since: dict[int, float] = {}
        self._looked = 0.0

    def find(self, pids: Iterable[int], now: float) -> int | None:
        """One that was at every look for as long as the limit. Looks that are further apart begin anew: this process was stopped too, then."""
        if now - self._looked > self._limit:
            self._since = {}
        self._looked = now
        self._since = {pid: self._since.get(pid, now) for pid in pids if read_state(pid)[0] == "T"}
        return next((pid for pid, since in self._since.items() if now - since >= self._limit), None)


def find_stubs(server_pid: int) -> list[Stub]:
    """The running model processes of a server."""
    found = []
    for child in _find_children(server_pid):
        with contextlib.suppress(psutil.Error):
            stub = parse_stub(os.fsencode("\0".join(child.cmdline())), child.pid)
            if stub is not None and is_running(stub.pid):
                found.append(stub)
    return found


def find_engine(stub_pid: int) -> int | None:
    """The process that computes for an instance, where it has one. Both end together."""
    for child in _find_children(stub_pid):
        with contextlib.suppress(psutil.Error):
            if not ENGINE_MODULES.isdisjoint(map(os.fsencode, child.cmdline())):
                return child.pid
    return None


def _find_children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.Error:  # it has ended
        return []


def dump_threads(pids: Iterable[int]) -> None:
    """Has models' processes that run and do not answer write to the server's log where each of their threads stands (backend/own_process.py)."""
    known = list(pids)
    for pid in known:  # one after the other: they write to one log
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(DUMP_SECONDS / len(known))


def find_regions(server_pid: int) -> set[str]:
    """Shared memory that a server has mapped, of models too whose processes are yet to be started."""
    try:
        maps = Path(f"/proc/{server_pid}/maps").read_text("utf-8", "replace")
    except OSError:
        return set()
    return set(re.findall(rf"{SHARED_MEMORY_FOLDER}/({REGION}\S+)", maps))


def find_ended(pid: int) -> list[int]:
    """Children of a process that have ended, and that it has not asked for: what they were nobody can tell any more."""
    return [child.pid for child in _find_children(pid) if read_state(child.pid)[0] == "Z"]


def has_children(pid: int) -> bool:
    return bool(_find_children(pid))


def read_memory(pid: int) -> int:
    """Bytes of memory that a process has for itself: not what it shares with others, nor files. 0 when it cannot be told."""
    try:
        match = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def hide_argument(pid: int, secret: str) -> bool:
    """Overwrites a secret on a child's command line, which every user of the machine can read. False when this system does not allow it.

    For when the child has read its arguments: it sees the change too.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            line = memory.read(end - start)
            memory.seek(start)
            memory.write(line.replace(secret.encode(), b"*" * len(secret)))
        return secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError, OverflowError):
        return False


def note_regions(repository: Path, names: Iterable[str]) -> None:
    """The shared memory of the server that runs on this repository."""
    with contextlib.suppress(OSError):  # a full disk costs the tidying up, and nothing else
        (repository / REGIONS_FILE).write_text("".join(f"{name}\n" for name in names))


def remove_regions(repository: Path, names: Iterable[str] = ()) -> None:
    """What a server that was killed has left of its shared memory: those names, and what was noted. For who owns the folder, while no server
    runs on it."""
    noted = ""
    with contextlib.suppress(OSError):
        noted = (repository / REGIONS_FILE).read_text("utf-8", "replace")
    for name in {*names, *noted.split()}:
        if name.startswith(REGION) and "/" not in name:
            with contextlib.suppress(OSError):
                (SHARED_MEMORY_FOLDER / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (repository / REGIONS_FILE).unlink(missing_ok=True)
