"""A server with a gateway before it: two processes that start, stop and end together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.endings import hear_endings

LOOK_SECONDS = 0.1
PR_SET_PDEATHSIG = 1

FOLDER = str(Path(__file__).parents[1])
FORETOKEN = (sys.executable, "-c", f"import sys; sys.path[:] = [{FOLDER!r}, *filter(None, sys.path)]; from deploy.cli import main; sys.exit(main())")
"""This program as a process of its own. By `-m` it would look for modules in the folder that it runs in first, whose `backend` may be another."""

_libc = ctypes.CDLL(None)


def end_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """For `preexec_fn`: the child gets this signal when its parent has ended, however that came about."""
    parent = os.getpid()

    def tie() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it has ended already
            os._exit(1)

    return tie


def run_together(gateway: Sequence[str], server: Sequence[str]) -> int:
    """Runs both commands until a signal, or the end of either, ends them. Returns the exit status: half a service that ended well is no success."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    told: list[int] = []
    # Only noted here: one that comes while a process is being started is for that process too.
    before = hear_endings(told.append)
    try:
        for name, command in (("gateway", gateway), ("server", server)):
            # Of their own sessions: Ctrl-C in a terminal is for this process to pass on, once.
            processes[name] = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent())
        while all(process.poll() is None for process in processes.values()) and not told:
            time.sleep(LOOK_SECONDS)
        ended = [name for name, process in processes.items() if process.poll() is not None]
        status = 0
        if not told:
            other = "gateway" if ended[0] == "server" else "server"
            print(f"foretoken serve: the {ended[0]} ended; stopping the {other}", file=sys.stderr, flush=True)
            status = _status(processes[ended[0]].returncode) or 1
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        while any(process.poll() is None for process in processes.values()) and len(told) < 2:
            time.sleep(LOOK_SECONDS)
    finally:  # told twice, whatever they still wait for
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status or not told else max(_status(process.returncode) for process in processes.values())


def _status(code: int) -> int:
    """As a shell has it."""
    return 128 - code if code < 0 else code
