"""How many CPUs this process may use: those that it may run on, and no more than its control group's share of time (cgroups, v1 and v2)."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def count_cpus(groups: Path = GROUPS, own: Path = OWN) -> int:
    """At least 1. A container with `--cpus 2` on 64 cores has 2: threads beyond a share only wait for each other while none may run.

    groups: where control groups are mounted; own: which of them are this process's.
    """
    shares = [len(os.sched_getaffinity(0)), *map(math.ceil, _find_shares(groups, own))]
    return max(1, min(shares))


def _find_shares(groups: Path, own: Path) -> Iterator[float]:
    """CPUs by the limits of the process's groups and of those that they are in. A container may see its own group as the root."""
    try:
        lines = own.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        place = PurePosixPath(path)
        for folder in (groups / ("cpu" if controllers else "") / str(p).lstrip("/") for p in (place, *place.parents)):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if controllers:
                    quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
                else:
                    words = (folder / "cpu.max").read_text().split()
                    quota, period = (-1 if words[0] == "max" else int(words[0])), int(words[1])
                if quota > 0 and period > 0:
                    yield quota / period
