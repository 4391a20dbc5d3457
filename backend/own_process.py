"""Beginning and end of a process that is the engine's alone: a model's within the server, a rank. Neither does what nobody needs (measured: half a
second of processor time of three and a half)."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from backend.heap import Heap

PARENT_LOOK_SECONDS = 0.5
STUCK_SECONDS = 15.0
"""Nothing that lives keeps Python's lock for so long."""


def begin() -> None:
    """Before torch is imported: none of the thousands of objects that come with it is garbage, and nobody looks for any until `has_begun`."""
    gc.disable()


def has_begun() -> None:
    """Full collections look at what came since alone: they come while requests run, and no step begins meanwhile (100 ms, measured)."""
    gc.freeze()
    gc.enable()


def end_at_exit() -> None:
    """Behind what others do at the interpreter's end, which takes modules apart one by one, and hung one time in five where objects were frozen
    (measured): the system does it at once. To be called before others are imported: the first is done last."""
    atexit.register(end)


def end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_with_parent(parent: int | None = None) -> None:
    """Ends this process when the one that started it has died: a server's stub with requests in hand stays and computes for ever (measured).

    A call to a dead server, such as one that creates a metric, never returns and keeps Python's lock (measured): then no thread of Python
    runs, and a timer of faulthandler's, which needs none, says where each one stands and ends the process.
    SIGUSR1 has it say that alone: the supervisor asks, before it ends a process that no longer answers.
    parent: its process id, where it may have died before this is called.
    """
    parent, heap = os.getppid() if parent is None else parent, Heap()
    faulthandler.register(signal.SIGUSR1)

    def watch() -> None:
        while os.getppid() == parent:
            with contextlib.suppress(RuntimeError):  # its own thread could not be started: next time
                faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
            time.sleep(PARENT_LOOK_SECONDS)
            heap.look()
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def command(module: str) -> list[str]:
    """What runs a module in a process of its own, in any folder; its arguments follow."""
    # Within the server this process is its stub, which embeds the python3 on PATH.
    python = sys.executable if Path(sys.executable or "").name.startswith("python") else shutil.which("python3") or "python3"
    # Modules are looked for where this process found them: not in the folder that it is in, whose `backend` may be another.
    path = [str(Path(__file__).parents[1]), *(place for place in sys.path if place)]
    return [python, "-c", f"import sys; sys.path[:] = {path!r}; from backend.own_process import main; main()", module]


def main() -> None:
    """Runs the module that is named. Where it raises, the interpreter ends as ever, with its status."""
    begin()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    end()
