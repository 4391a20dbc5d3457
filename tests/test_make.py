"""A server and its gateway start and end together, with programs in their place that end or stay as a test wants; and `make serve` is that."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import psutil
import pytest

from backend.config import BUNDLED_MODEL
from client.loopback import open_url
from deploy.cli import make_parser
from deploy.server import free_ports
from deploy.supervision.processes import is_running
from tests.servers import wait_until

STAY = "trap 'echo {name} ended; exit 0' TERM; echo {name} runs as $$; while :; do sleep 0.1; done"
BOTH = """
import sys
from deploy.together import run_together
sys.exit(run_together(["sh", "-c", sys.argv[1]], ["sh", "-c", sys.argv[2]]))
"""


def run_both(folder: Path, gateway: str, server: str) -> subprocess.Popen[bytes]:
    """Their output is in the file `log`."""
    command = [sys.executable, "-c", textwrap.dedent(BOTH), gateway, server]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.fixture
def log(tmp_path: Path):
    return lambda: (tmp_path / "log").read_text()


@pytest.mark.parametrize("status", [0, 1])
def test_a_gateway_that_ends_takes_the_server_with_it(tmp_path: Path, log, status: int) -> None:
    """Its port is taken, for one: a server that nobody reaches would look as if all were well."""
    process = run_both(tmp_path, f"sleep 0.5; echo gateway: port 8080 is taken; exit {status}", STAY.format(name="server"))
    assert process.wait(30) == 1
    assert "server runs" in log() and "server ended" in log() and "port 8080 is taken" in log()
    assert "foretoken serve: the gateway ended; stopping the server" in log()


def test_a_server_that_ends_takes_the_gateway_with_it(tmp_path: Path, log) -> None:
    assert run_both(tmp_path, STAY.format(name="gateway"), "sleep 0.5; exit 3").wait(30) == 3
    assert "gateway ended" in log() and "foretoken serve: the server ended; stopping the gateway" in log()


def both_run(log) -> bool:
    return "gateway runs" in log() and "server runs" in log()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_both_end_when_told_to(tmp_path: Path, log, sent: signal.Signals) -> None:
    process = run_both(tmp_path, STAY.format(name="gateway"), STAY.format(name="server"))
    assert wait_until(lambda: both_run(log))
    os.killpg(process.pid, sent)  # as a terminal sends it
    assert process.wait(30) == 0
    assert log().count("gateway ended") == log().count("server ended") == 1 and "stopping" not in log()


def test_a_signal_while_they_are_started_ends_both(tmp_path: Path) -> None:
    """It came before the server was there, which was never told then, and went on."""
    early = BOTH.replace(
        "sys.exit",
        """
import os, signal, subprocess
start = subprocess.Popen
def interrupt(command, **options):
    if command[-1] == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGTERM)
    return start(command, **options)
subprocess.Popen = interrupt
sys.exit""",
    )
    command = [sys.executable, "-c", early, STAY.format(name="gateway"), STAY.format(name="server")]
    with (tmp_path / "log").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        assert process.wait(30) in (0, 128 + signal.SIGTERM)  # of a shell that did not listen yet
    finally:
        process.kill()


def test_a_command_that_is_interrupted_while_it_starts_says_nothing() -> None:
    program = "import os, signal; from deploy import cli; cli.make_parser = lambda _: os.kill(os.getpid(), signal.SIGINT); cli.main(['complete'])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert ended.returncode == -signal.SIGINT and not ended.stderr


def test_neither_outlives_the_one_that_started_them(tmp_path: Path, log) -> None:
    process = run_both(tmp_path, STAY.format(name="gateway"), STAY.format(name="server"))
    assert wait_until(lambda: both_run(log))
    process.kill()
    process.wait(30)
    assert wait_until(lambda: "gateway ended" in log() and "server ended" in log())


def test_what_does_not_end_is_killed_by_the_second_signal(tmp_path: Path, log) -> None:
    """As the server's own supervisor does: the first one lets requests end."""
    deaf = "trap 'echo told' TERM; echo {name} runs as $$; while :; do sleep 0.1; done"
    process = run_both(tmp_path, STAY.format(name="gateway"), deaf.format(name="server"))
    assert wait_until(lambda: both_run(log))
    process.terminate()
    assert wait_until(lambda: "told" in log() and "gateway ended" in log())
    process.terminate()
    assert process.wait(30) != 0
    found = re.search(r"server runs as (\d+)", log())
    assert found is not None and not is_running(int(found[1]))


def test_a_terminal_that_closes_asks_once(tmp_path: Path, log) -> None:
    """By two signals, of its shell and of the kernel; with nohup it asks nothing."""
    slow = "trap 'echo told; sleep 1; echo {name} ended; exit 0' TERM; echo {name} runs as $$; while :; do sleep 0.1; done"
    process = run_both(tmp_path, STAY.format(name="gateway"), slow.format(name="server"))
    assert wait_until(lambda: both_run(log))
    process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: "told" in log())
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 0 and "server ended" in log()
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {BOTH}"
    ended = subprocess.run([sys.executable, "-c", ignoring, "sleep 60", "kill -HUP $PPID; sleep 0.5; exit 3"], stderr=subprocess.PIPE)
    assert ended.returncode == 3 and b"the server ended" in ended.stderr


def test_make_serve_is_a_command_of_this_version(root: Path) -> None:
    (line,) = [line for line in (root / "Makefile").read_text().splitlines() if "foretoken serve" in line]
    args = make_parser().parse_args(line.partition("foretoken ")[2].split())
    assert (args.port, args.http_port, args.grpc_port, args.metrics_port, args.status_port) == (8080, 8000, 8001, 8002, 8003)


@pytest.mark.parametrize("target", ["serve", "demo"])
def test_what_make_started_ends_with_it(root: Path, tmp_path: Path, target: str, log) -> None:
    """Though it was killed, and could tell nobody; with programs in the place of ours that stay."""
    for name, text in (("deploy/setup.sh", ""), (".venv/bin/python", ""), (".venv/bin/foretoken", STAY.format(name="server"))):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    with (tmp_path / "log").open("w") as out:
        process = subprocess.Popen(["make", "-f", root / "Makefile", target], cwd=tmp_path, stdout=out, stderr=out, start_new_session=True)
    assert wait_until(lambda: "server runs as" in log())
    process.kill()
    process.wait()
    found = re.search(r"server runs as (\d+)", log())
    assert found is not None and wait_until(lambda: not is_running(int(found[1]))) and "server ended" in log()


def test_make_uses_no_modules_of_other_projects(root: Path, tmp_path: Path) -> None:
    """A folder named `client` in PYTHONPATH was imported in the place of this project's."""
    for name, text in (("deploy/setup.sh", ""), (".venv/bin/foretoken", 'printf "<%s%s>" "$PYTHONPATH" "$PYTHONHOME"')):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONHOME": str(tmp_path)}
    command = ["make", "--no-print-directory", "-f", str(root / "Makefile"), "demo"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout == "<>"


def test_make_serve_takes_a_path_with_spaces(root: Path, tmp_path: Path) -> None:
    for name, text in (("deploy/setup.sh", ""), (".venv/bin/python", 'printf %s "$3"'), (".venv/bin/foretoken", "printf '<%s>' \"$@\"")):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    for model, expected in (("/my models/7B", "<serve></my models/7B><--speculative-config>"), ("", "<serve><--port><8080>")):
        command = ["make", "--no-print-directory", "-f", str(root / "Makefile"), "serve", f"MODEL={model}"]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert said.startswith(expected)
        assert not model or "<--served-model-name></my models/7B><foretoken><--port>" in said


HALF_MADE = """\
#!/bin/sh
case "$*" in
  "-m venv .venv") echo made >>made; mkdir -p .venv/bin; cp "$0" .venv/bin/python; sleep 0.3; [ -e installed ] && touch .venv/pip ;;
  "-m pip"*) [ -e .venv/pip ] ;;
esac
"""
"""A Python that leaves a venv without pip until python3-venv is installed."""


def test_setup_makes_a_whole_venv_once(root: Path, tmp_path: Path) -> None:
    """After half a one was left, too, on which every later try failed; and of two at once one waits for the other."""
    for name in ("deploy/setup.sh", "pyproject.toml", "constraints.txt"):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((root / name).read_bytes())
    (python := tmp_path / "python").write_text(HALF_MADE)
    python.chmod(0o755)

    def start() -> subprocess.Popen[bytes]:
        command = ["bash", str(tmp_path / "deploy/setup.sh"), "serve"]
        return subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHON": str(python)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    with start() as process:
        assert b"apt-get install python3-venv" in process.communicate(timeout=60)[1] and process.returncode == 1
    (tmp_path / "installed").touch()
    with start() as first, start() as second:
        assert (first.wait(60), second.wait(60)) == (0, 0)
    assert (tmp_path / "made").read_text().count("made") == 2 and (tmp_path / ".venv/.installed-serve").exists()


def test_setup_works_in_its_own_folder_alone(root: Path, tmp_path: Path) -> None:
    """CDPATH led it to another one; and of a .venv that was moved or copied the scripts are another folder's."""
    (script := tmp_path / "own/deploy/setup.sh").parent.mkdir(parents=True)
    script.write_bytes((root / "deploy/setup.sh").read_bytes())
    (tmp_path / "other/deploy").mkdir(parents=True)
    (command := tmp_path / "own/.venv/bin/foretoken").parent.mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", ".venv/.installed-serve"):
        (tmp_path / "own" / name).touch()

    def run() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "CDPATH": str(tmp_path / "other")}
        return subprocess.run(["bash", "deploy/setup.sh"], cwd=tmp_path / "own", env=environment, capture_output=True, text=True, timeout=60)

    for line, status in ((f"#!{tmp_path}/own/.venv/bin/python3", 0), (f"#!{tmp_path}/other/.venv/bin/python3", 1)):
        command.write_text(f"{line}\n")
        done = run()
        assert (done.returncode, done.stdout) == (status, "") and ("make clean" in done.stderr) == bool(status), done.stderr


def test_one_port_for_everything(tmp_path: Path) -> None:
    """What is not for clients is on free ports of this machine alone."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "deploy.cli", "serve", str(BUNDLED_MODEL), f"--port={port}", "--served-model-name", "a", "b", "--vllm-metrics"]
    command += [f"--repository={tmp_path / 'repository'}", "--drain-seconds=5"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        with contextlib.suppress(OSError), open_url(f"{address}/health", 5) as response:
            return response.status == 200
        return False

    try:
        assert wait_until(answers, 90)
        body = json.dumps({"model": "b", "prompt": "x = ", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.loads(response.read())["model"] == "b"
        with open_url(f"{address}/v1/models", 5) as response:
            assert [m["id"] for m in json.loads(response.read())["data"]] == ["a", "b"]
        with open_url(f"{address}/metrics", 5) as response:
            text = response.read().decode()
        for name in ("foretoken_gateway_requests_total", "foretoken_steps_total", "foretoken_server_restarts_total", "vllm:num_requests_running"):
            assert f"\n{name}{{" in text or f"\n{name} " in text, name
        assert 'model_name="a"' in text
        listening = {c.laddr.ip for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in family(process.pid)}
        assert listening and listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    finally:
        process.terminate()
        assert process.wait(60) == 0


def family(pid: int) -> set[int]:
    return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
