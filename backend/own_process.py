"""Beginning and end of a process that is the engine's alone: a model's within the server, a rank. Neither does what nobody needs (measured: half a
second of processor time of three and a half)."""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import sys


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


def main() -> None:
    """Runs the module that is named. Where it raises, the interpreter ends as ever, with its status."""
    begin()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    end()


if __name__ == "__main__":
    main()
