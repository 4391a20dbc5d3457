"""What must hold when nobody asks anything, and at the end."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

from deploy.supervision.processes import REGION, SHARED_MEMORY_FOLDER, is_running, read_state
from tests.soak.book import Book
from tests.soak.system import KINDS, MODELS, System

IDLE_SECONDS = 45.0
"""Longer than the gateway waits for half a body, or for a reader that takes nothing."""
GAUGES = ("kv_pages_held", "requests_running", "requests_waiting")
STOP_SECONDS = 60.0
STUB = "triton_python_backend_stub"
"""Of those killed, tritonserver leaves the status of some unread until it ends itself (release 24.10): these zombies are let be until then."""
MAX_GROWTH = {"decode": 64, "engine": 256, "tokenizer": 64, "mtp_drafter": 480, "tritonserver": 256, "gateway": 128, "supervisor": 32}
"""MiB that a process may have beyond what it had after the warm-up, which was a storm too and had touched every KV page. engine, mtp_drafter: what
libc keeps of freed tensors, by thread, and oneDNN of products, by their shapes (RESULTS.md); suffix trees of 500 answers. tritonserver: it keeps some
kB of each request on a gRPC stream that it refuses itself (docs/operations.md). gateway: buffers of as many bodies of 4 MB as came at once."""


def read_rss(pid: int) -> int:
    """MiB resident. 0: there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS")), 0)


def read_name(pid: int) -> str:
    """Of a process, a zombie too."""
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


class Checks:
    def __init__(self, system: System, book: Book) -> None:
        self._system, self._book = system, book
        self._pids: dict[str, int] = {}
        self._seen: dict[int, str] = {}
        self._regions: set[str] = set()
        self._warm: dict[str, int] = {}
        self.memory: list[tuple[str, dict[str, int]]] = []
        """MiB by kind of process, and when."""

    def note_processes(self) -> None:
        """Those that must be gone at the end."""
        stubs = self._system.stubs()
        self._regions |= {stub.region for stub in stubs}
        self._seen |= {pid: kind for kind, pid in self._system.processes().items()}

    def note_memory(self, when: str) -> dict[str, int]:
        self.memory.append((when, {kind: read_rss(pid) for kind, pid in self._system.processes().items()}))
        print(f"[soak] MiB resident, {when}: {self.memory[-1][1]}", flush=True)
        return self.memory[-1][1]

    def in_quiet(self, when: str) -> None:
        """Pages come back, all processes are there and no zombies, memory has not grown."""
        # tritonserver may abort a second after a model's process was killed, when all looked well again (a lock of boost's that went with it).
        if not self._system.wait_until_well(IDLE_SECONDS):
            self._book.add_fault(f"{when}: not well {IDLE_SECONDS:g} s after the last disturbance: {self._system.health()}")
            return
        self.note_processes()
        ending = time.monotonic() + IDLE_SECONDS
        while any(held := {g: self._system.server.metric(f"foretoken_{g}") for g in GAUGES}.values()):
            if time.monotonic() > ending:
                self._book.add_fault(f"nobody asks anything for {IDLE_SECONDS:g} s, and there are still {held}")
                break
            time.sleep(0.2)
        processes = self._system.processes()
        if missing := set(KINDS) - set(processes):
            self._book.add_fault(f"no process of {missing}")
            return
        if processes["decode"] != self._pids.get("decode"):
            self._system.touch_pages()
        self._pids = processes
        family = set(processes.values())
        states = {int(p.name): read_state(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
        zombies = [pid for pid, (state, parent) in states.items() if state == "Z" and parent in family]
        if others := [z for z in zombies if not (states[z][1] == processes["tritonserver"] and read_name(z) in STUB)]:
            self._book.add_fault(f"zombies: {others}, children of {[states[z][1] for z in others]} in {processes}")
        now = self.note_memory(when)
        self._warm = self._warm or now
        for kind, size in now.items():
            if (growth := size - self._warm[kind]) > MAX_GROWTH[kind]:
                self._book.add_fault(f"{kind} has {size} MiB, {growth} more than after the warm-up; the bound is {MAX_GROWTH[kind]}")

    def at_the_end(self) -> None:
        """Both end in order when told to, and nothing is left."""
        for name, process in (("gateway", self._system.gateway_process), ("server", self._system.server.process)):
            process.send_signal(signal.SIGTERM)
            try:
                if status := process.wait(STOP_SECONDS):
                    self._book.add_fault(f"the {name} ended with status {status}")
            except subprocess.TimeoutExpired:
                self._book.add_fault(f"the {name} has not ended {STOP_SECONDS:g} s after SIGTERM")
        time.sleep(1)
        for pid, kind in self._seen.items():
            if is_running(pid) and self._is_ours(pid):
                self._book.add_fault(f"{kind}, process {pid}, is left at the end")
        if left := [r for r in self._regions if r.startswith(REGION) and (SHARED_MEMORY_FOLDER / r).exists()]:
            self._book.add_fault(f"shared memory is left at the end: {left}")

    def _is_ours(self, pid: int) -> bool:
        """Process ids come again."""
        try:
            return str(self._system.server.repository).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    def memory_table(self) -> str:
        lines = [" ".join([f"{'MiB resident':24}", *(f"{kind:>12}" for kind in KINDS)])]
        lines += [" ".join([f"{when:24}", *(f"{sizes.get(kind, 0):12}" for kind in KINDS)]) for when, sizes in self.memory]
        return "\n".join(lines)

    def logged(self) -> str:
        """What the logs hold of exceptions that nobody expected."""
        counts = {log.name: log.read_text("utf-8", "replace").count("Traceback (") for log in (self._system.server.log, self._system.gateway_log)}
        return ", ".join(f"{count} tracebacks in {name}" for name, count in counts.items())

    def unexpected_restarts(self, before: dict[str, int]) -> None:
        """Between disturbances nothing goes down by itself. before: what `restarts` said when all was well."""
        if (now := self.restarts()) != before:
            self._book.add_fault(f"restarts while nothing was disturbed: {before}, then {now}")

    def restarts(self) -> dict[str, int]:
        health = self._system.health()
        return {"server": health.get("server_restarts", -1)} | {m: health.get("models", {}).get(m, {}).get("restarts", -1) for m in MODELS}
