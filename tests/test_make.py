"""The Makefile's recipes, with programs in the place of the project's that end or stay as a test wants."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.test_server import wait_until

STAY = "trap 'echo {name} ended; exit 0' TERM; echo {name} runs; while :; do sleep 0.1; done"


def make_serve(folder: Path, root: Path, gateway: str, server: str) -> subprocess.Popen[str]:
    """`make serve` in a folder of its own, in which nothing is to be installed; its output in the file `log`."""
    shutil.copy(root / "Makefile", folder)
    (folder / "deploy").mkdir()
    shutil.copy(root / "deploy/serve_both.sh", folder / "deploy")
    program = f'#!/bin/sh\ncase "$1" in\ngateway) {gateway};;\nserve) {server};;\nesac\n'
    for path, text in (("deploy/setup.sh", "#!/bin/sh\n"), (".venv/bin/foretoken", program)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    with (folder / "log").open("w") as log:
        return subprocess.Popen(["make", "serve"], cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.mark.parametrize("status", [0, 1])
def test_a_gateway_that_ends_takes_the_server_with_it(tmp_path: Path, root: Path, status: int) -> None:
    """Its port is taken, for one: a server that nobody reaches would look as if all were well."""
    gateway = f"sleep 0.5; echo gateway: port 8080 is taken; exit {status}"
    process = make_serve(tmp_path, root, gateway, STAY.format(name="server"))
    assert process.wait(30) != 0
    log = (tmp_path / "log").read_text()
    assert "server runs" in log and "server ended" in log and "port 8080 is taken" in log
    assert "make serve: the gateway ended; stopping the server" in log


def test_a_server_that_ends_takes_the_gateway_with_it(tmp_path: Path, root: Path) -> None:
    process = make_serve(tmp_path, root, STAY.format(name="gateway"), "sleep 0.5; exit 3")
    assert process.wait(30) != 0
    log = (tmp_path / "log").read_text()
    assert "gateway ended" in log and "make serve: the server ended; stopping the gateway" in log


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="it needs util-linux's setpriv")
def test_neither_outlives_a_script_that_is_killed(tmp_path: Path, root: Path) -> None:
    process = make_serve(tmp_path, root, STAY.format(name="gateway"), STAY.format(name="server"))
    log = tmp_path / "log"
    assert wait_until(lambda: "gateway runs" in log.read_text() and "server runs" in log.read_text())
    (script,) = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["kill", "-KILL", script], check=True)
    assert process.wait(30) != 0
    assert wait_until(lambda: "gateway ended" in log.read_text() and "server ended" in log.read_text())


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_both_end_when_told_to(tmp_path: Path, root: Path, sent: signal.Signals) -> None:
    process = make_serve(tmp_path, root, STAY.format(name="gateway"), STAY.format(name="server"))
    log = tmp_path / "log"
    assert wait_until(lambda: "gateway runs" in log.read_text() and "server runs" in log.read_text())
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
    process.send_signal(sent)
    for child in children:  # as a terminal sends it to all
        subprocess.run(["kill", f"-{sent.value}", child], check=False)
    process.wait(30)
    assert wait_until(lambda: "gateway ended" in log.read_text() and "server ended" in log.read_text())
