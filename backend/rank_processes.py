"""Ranks as processes: starting and ending them. Imports nothing that computes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from backend import own_process
from backend.errors import ModelError

MEET_SECONDS, LOAD_SECONDS, EXCHANGE_SECONDS = 120.0, 3600.0, 30.0
"""For the ranks to meet; for the slowest to load, which shows signs of life meanwhile; and for a rank to take part in an exchange of a step."""
STOP_SECONDS = 10.0


def start_rank(spec: dict[str, Any], module: str = "backend.follower") -> subprocess.Popen[str]:
    """A process of this host, by what `describe_rank` says; its reports come on its output. module: that it runs."""
    output = subprocess.PIPE if spec["reports"] else None
    child = subprocess.Popen(own_process.command(module), stdin=subprocess.PIPE, stdout=output, text=True)
    assert child.stdin is not None
    child.stdin.write(json.dumps(spec) + "\n")
    child.stdin.flush()
    return child


def end_ranks(children: list[subprocess.Popen[str]]) -> None:
    """Waits for them a while, then kills them."""
    end = time.monotonic() + STOP_SECONDS
    for child in children:
        try:
            child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def read_reports(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What a rank that was started with `reports` says of itself, until it ends: {} that it lives, `ready`, or an `error`."""
    assert child.stdout is not None
    for line in child.stdout:
        report = None
        with contextlib.suppress(ValueError):
            report = json.loads(line)
        yield report if isinstance(report, dict) else {}  # or a library has printed something: it lives


def follow_in_process(spec: dict[str, Any], report: Callable[[dict[str, Any]], None], end: Callable[[str], None]) -> None:
    """As `backend.follower.run_rank`, in a process of its own, until that ends. Raises ModelError where it has not come to an orderly end.

    end: told why this rank cannot go on: rank 0 is gone, or the process is.
    """
    child = start_rank({**spec, "reports": True, "parent": os.getpid()})
    why = ""
    for own in read_reports(child):
        why = own.get("error", why)
        report(own)
    if (status := child.wait()) or why:
        why = why or f"its process has ended with status {status}"
        end(why)
        raise ModelError(why)
