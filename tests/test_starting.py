"""Models whose load does not get on, under the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backend.errors import ConfigError
from deploy.options import ServeConfig
from deploy.supervision.processes import find_stubs
from deploy.supervision.starting import SAMPLE_SECONDS, Effort, Loads
from deploy.supervision.watch import ModelState
from tests.supervised import SHORT, start, wait_for

STUB = "triton_python_backend_stub"
SERVER = f"""
import os, subprocess, sys
held, children = [], []
for line in sys.stdin:
    if line.strip() == "grow":
        held.append(b"x" * 2**22)
    elif line.strip() == "work":
        begun = os.times().user
        while os.times().user < begun + 0.3:
            pass
    elif line.startswith("stub"):
        words = ["region", "1", "1", "7", "/b", "336", line.split()[1] + "_0_0", "DEFAULT"]
        name = sys.argv[1] + "/{STUB}"
        children.append(subprocess.Popen([name, sys.argv[1] + "/idle.py", *words], executable=sys.executable, stdin=subprocess.PIPE))
        print(children[-1].pid, flush=True)
        continue
    elif line.strip() == "kill":
        children[-1].kill()
        os.waitid(os.P_PID, children[-1].pid, os.WEXITED | os.WNOWAIT)
    print(flush=True)
"""


class Parent:
    """A process that has children as a server has."""

    def __init__(self, folder: Path) -> None:
        (folder / "idle.py").write_text("import sys\nsys.stdin.read()\n")
        command = [sys.executable, "-c", SERVER, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.pid = self.process.pid
        self.now = 0.0

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def look(self, loads: Loads, states: list[ModelState], seconds: float) -> str | None:
        """What is found within so many seconds, as if they had passed."""
        ending = self.now + seconds
        while self.now < ending:
            self.now += SAMPLE_SECONDS
            if (found := loads.find(states, self.now)) is not None:
                return found
        return None


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    found = Parent(tmp_path)
    try:
        assert found.ask("") == ""
        yield found
    finally:
        os.killpg(found.pid, signal.SIGKILL)
        found.process.communicate()


def settle(parent: Parent, loads: Loads, states: list[ModelState]) -> None:
    """Until what a process does at its beginning is over."""
    wait_for(lambda: parent.look(loads, states, SAMPLE_SECONDS) is None and loads._loads[states[0].name].idle_seconds > 0, "idleness")


def test_what_counts_as_work() -> None:
    before = Effort(10.0, 2**30, 2**30)
    assert not Effort(10.03, 2**30 + 1000, 2**30 + 1000).is_more(before, 2.0)
    for more in (Effort(10.05, 2**30, 2**30), Effort(10.0, 2**30 + 2**20, 2**30), Effort(10.0, 2**30, 2**30 + 2**20), Effort(5.0, 2**30, 2**30)):
        assert more.is_more(before, 2.0)


def test_a_load_that_stands_still_has_a_limit_and_one_that_gets_on_has_none(parent: Parent) -> None:
    states, loads = [ModelState("decode"), ModelState("tokenizer", "up")], Loads(parent.pid, 100.0, 10.0)
    assert loads.find([ModelState("decode", "up")], 0.0) is None, "nothing is being loaded"
    settle(parent, loads, states)
    for what in ("grow", "work"):
        for _ in range(3):
            assert parent.look(loads, states, 80.0) is None
            parent.ask(what)
    found = parent.look(loads, states, 110.0)
    assert found is not None and found.startswith("decode: it is being loaded, and the server has neither computed nor read anything for 100 s")
    assert "--start-seconds" in found
    states[0].set("loading")
    assert parent.look(loads, states, 98.0) is None, "another load"
    endless = Loads(parent.pid, float("inf"), 10.0)
    assert parent.look(endless, states, 1000.0) is None


def test_a_process_that_lives_is_waited_for_and_its_work_counts_alone(parent: Parent) -> None:
    """A server that answers for other models works, too."""
    states, loads = [ModelState("decode")], Loads(parent.pid, 50.0, 10.0)
    pid = parent.ask("stub decode")
    wait_for(lambda: [stub.model for stub in find_stubs(parent.pid)] == ["decode"], "the process")
    settle(parent, loads, states)
    assert parent.look(loads, states, 30.0) is None
    parent.ask("work")
    found = parent.look(loads, states, 20.0)
    assert found is not None and f"decode: it is being loaded, and its process {pid} has neither computed nor read anything for 50 s" in found


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_process_that_has_ended_is_not_waited_for(parent: Parent, is_seen: bool) -> None:
    """Nor one that had ended before it was seen, whose name is known to nobody."""
    states, loads = [ModelState("decode")], Loads(parent.pid, 1000.0, 10.0)
    pid = parent.ask("stub decode")
    wait_for(lambda: [stub.model for stub in find_stubs(parent.pid)] == ["decode"], "the process")
    if is_seen:
        settle(parent, loads, states)
    parent.ask("kill")
    parent.look(loads, states, SAMPLE_SECONDS)
    found = parent.look(loads, states, 20.0)
    assert found == f"decode: it is being loaded, and its process {pid} has ended; nothing has come of it for 10 s (hang_seconds)"


def test_time_in_which_the_machine_stood_still_does_not_count(parent: Parent) -> None:
    states, loads = [ModelState("decode")], Loads(parent.pid, 100.0, 10.0)
    settle(parent, loads, states)
    parent.now += 10_000.0
    assert loads.find(states, parent.now) is None


def test_the_limit_is_checked() -> None:
    assert ServeConfig().start_seconds == 3600.0 and ServeConfig(start_seconds=None).start_seconds is None
    with pytest.raises(ConfigError, match="start_seconds must be from 10 to 604800, or null for no limit, got 9"):
        ServeConfig(start_seconds=9)


@pytest.mark.serving
def test_a_process_that_is_killed_before_the_server_knows_it(tmp_path: Path) -> None:
    """The server waits for it for ever: it is ended, which is said, and started again."""
    killed: list[int] = []

    def kill() -> None:
        """The first process of the model, as soon as there is one."""
        while not killed:
            for child in psutil.Process().children(recursive=True):
                for stub in find_stubs(child.pid):
                    if stub.model == "decode" and not killed:
                        os.kill(stub.pid, signal.SIGKILL)
                        killed.append(stub.pid)

    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    try:
        with start(tmp_path, "--hang-seconds=5") as supervised:
            assert supervised.counts()["server"] == 1
            status, text = supervised.server.post("/v2/models/decode/generate", {"text_input": "x = ", **{**SHORT, "stream": False}})
            assert status == 200, text
    finally:
        killed = killed or [0]
        killing.join()
    said = f"decode: it is being loaded, and its process {killed[0]} has ended; nothing has come of it for 5 s (hang_seconds) before it could answer"
    assert f"{said}; the server is started once more" in (tmp_path / "log").read_text("utf-8", "replace")
