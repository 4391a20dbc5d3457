"""The supervisor on a real server under load: processes of models killed and stopped, the server killed, orderly and hasty ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from backend import LLM
from backend.core import Delta
from backend.errors import EngineError
from client import AsyncClient, Client, GenerateError, HttpClient
from deploy.demo import free_ports, running_gateway
from deploy.launcher import RESTRICTED_APIS
from deploy.supervision import patience, probe, processes, watch
from deploy.supervision.probe import Probe, ServerApi, progress_pattern
from deploy.supervision.processes import (
    REGION,
    REGIONS_FILE,
    SHARED_MEMORY_FOLDER,
    STOPPED_SECONDS,
    StoppedProcesses,
    Stub,
    find_stubs,
    has_children,
    hide_argument,
    is_running,
    parse_stub,
    read_memory,
    read_state,
    remove_regions,
)
from deploy.supervision.status import serve_status
from deploy.supervision.supervisor import Supervisor
from deploy.supervision.watch import Backoff, ModelState, ModelWatch, RestartBudget
from tests.conftest import greedy
from tests.servers import RunningServer, serve, wait_until
from tests.supervised import (
    LONG,
    MODELS,
    SHORT,
    SPECULATIVE,
    Gateway,
    Stream,
    Supervised,
    assert_serves,
    assert_told,
    open_streams,
    start,
    wait_for,
)

# -- the parts ------------------------------------------------------------------------------------------------------------------


def test_attempts_are_spaced_and_end() -> None:
    backoff = Backoff(limit=4)
    assert [backoff.next(0.0) for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, None]
    assert backoff.next(watch.STABLE_SECONDS) == 0.0, "what was up for long starts afresh"
    assert Backoff(limit=0).next(1e9) is None
    patient = Backoff(limit=100)
    assert max(filter(None, (patient.next(1.0) for _ in range(99)))) == watch.MAX_DELAY


def test_restarts_are_spaced_and_never_end() -> None:
    """A server that is crashed again and again is back within half a minute, however often."""
    now = 0.0
    budget = RestartBudget(3, clock=lambda: now)
    waits = []
    for _ in range(1000):
        wait = budget.next()
        assert wait is not None
        waits.append(wait)
        now += wait + 0.5  # it comes up, and is crashed
    assert waits[:3] == [0.0, 0.0, 0.0], "some at once"
    assert min(waits[3:]) > 0 and max(waits) <= watch.REFILL_SECONDS
    assert now / 1000 > watch.REFILL_SECONDS * 0.9, "then one each half minute"
    now += 3 * watch.REFILL_SECONDS
    assert [budget.next() for _ in range(3)] == [0.0] * 3, "what was up for long starts afresh"
    assert RestartBudget(0).next() is None


SLEEPER = "import sys, subprocess, time; child = subprocess.Popen(['sleep', '60']); print(sys.argv[1], flush=True); input(); print(sys.argv[1])"


def test_a_secret_leaves_the_command_line() -> None:
    """As every user of the machine reads it; the process has its own copy."""
    command = [sys.executable, "-c", SLEEPER, "--key=s3cret-s3cret", "--more"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "--key=s3cret-s3cret\n"
            line = Path(f"/proc/{process.pid}/cmdline")
            assert has_children(process.pid) and b"s3cret" in line.read_bytes()
            assert hide_argument(process.pid, "s3cret-s3cret")
            assert line.read_bytes().split(b"\0")[3:5] == [b"--key=" + b"*" * 13, b"--more"]
            assert read_memory(process.pid) > 0
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert not hide_argument(process.pid, "s3cret") and read_memory(process.pid) == 0 and not has_children(process.pid)


def test_a_models_process_is_known_by_its_command_line() -> None:
    def line(instance: str) -> bytes:
        region = "triton_python_backend_shm_region_1"
        words = [
            "/opt/backends/python/triton_python_backend_stub",
            "/r/mtp_drafter/1/model.py",
            region,
            "1",
            "1",
            "7",
            "/b",
            "336",
            instance,
            "DEFAULT",
            "",
        ]
        return "\0".join(words).encode()

    assert parse_stub(line("mtp_drafter_0_0"), 5) == Stub(5, "mtp_drafter", "triton_python_backend_shm_region_1", 336)
    assert parse_stub(line("mtp_drafter"), 5) is None, "the one that completes a configuration ends by itself"
    assert parse_stub(b"/usr/bin/vim\0triton_python_backend_stub\0", 5) is None and parse_stub(b"", 5) is None


def control_block(flags: bytes, *queues: int) -> bytes:
    """A region of shared memory with one, as release 24.10 lays it out on this kind of machine."""
    return bytes(SIGN) + flags + b"\x7f" * (patience.QUEUES_PLACES[platform.machine()] - len(flags)) + struct.pack("<2q", *queues) + bytes(16384)


@pytest.fixture
def stub() -> Iterator[Stub]:
    """This process, as if it were a model's: its shared memory has the flags of one that the server has just asked for a sign of life."""
    name = f"{REGION}{os.getpid()}-signs"
    memory = SHARED_MEMORY_FOLDER / name
    memory.write_bytes(control_block(b"\0\0\0\1", 496, 8688))
    yield Stub(os.getpid(), "decode", name, SIGN - patience.OWNERSHIP_BYTES)
    memory.unlink()


SIGN = 336


def test_a_sign_of_life_is_given_for_a_process_that_lives(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for one that is stopped, until its time is over; nothing else of the memory is touched."""
    memory, voucher = SHARED_MEMORY_FOLDER / stub.region, patience.Voucher(os.getpid(), hang_seconds=3.0)
    cleared, states = memory.read_bytes(), {stub.pid: "S"}
    monkeypatch.setattr(patience, "is_running", lambda pid: states[pid] not in "XZ")
    monkeypatch.setattr(processes, "read_state", lambda pid: (states[pid], 1))
    voucher._follow([stub])

    def is_vouched(state: str, now: float) -> bool:
        states[stub.pid] = state
        memory.write_bytes(cleared)
        voucher._vouch(now)
        after = memory.read_bytes()
        assert after[:SIGN] + b"\0" + after[SIGN + 1 :] == cleared
        return after[SIGN] == 1

    assert is_vouched("S", 0.0) and is_vouched("T", 1.0)
    assert all(is_vouched("T", 1.0 + 0.5 * i) for i in range(16)) and not is_vouched("T", 9.0)
    assert is_vouched("R", 9.5) and not is_vouched("Z", 10.0)
    voucher._follow([])
    assert not is_vouched("S", 11.0), "it is not this server's any more"
    voucher._follow([stub])
    assert is_vouched("S", 12.0)
    voucher.give_up(stub)
    assert not is_vouched("S", 13.0), "it is about to be ended"


@pytest.mark.parametrize(
    ("flags", "queues", "message"),
    [
        (b"\0\7\0\1", (496, 8688), "the flags at 336 of decode's shared memory have the values [7]; they must be 0 or 1"),
        (
            b"\0\1\0\1",
            (496, 1 << 40),
            "the control block at 336 of decode's shared memory has queues at (496, 1099511627776); they must lie behind it",
        ),
        (b"\0\0\0\0", (0, 0), "has queues at (0, 0)"),
    ],
)
def test_memory_that_is_not_as_known_is_left_alone(
    flags: bytes, queues: tuple[int, int], message: str, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    memory, voucher = SHARED_MEMORY_FOLDER / stub.region, patience.Voucher(os.getpid(), hang_seconds=3.0)
    other = control_block(flags, *queues)
    memory.write_bytes(other)
    for _ in range(2):
        voucher._follow([stub])
        voucher._vouch(0.0)
    (record,) = caplog.records
    assert message in record.getMessage()
    assert memory.read_bytes() == other
    gone = dataclasses.replace(stub, region=f"{REGION}none")
    voucher._follow([gone])
    voucher._vouch(0.0)
    assert len(caplog.records) == 1, "a process that ends is nobody's business"


def test_processes_are_read() -> None:
    assert read_state(os.getpid())[1] == os.getppid() and is_running(os.getpid())
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not is_running(child), "it has ended, though nobody has asked for its status"
    os.waitpid(child, 0)
    assert read_state(child) == ("X", 0)


def test_a_process_that_is_stopped_is_found() -> None:
    """When it was at every look for so long; a debugger's are not looked for."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            pids, stopped = [os.getpid(), process.pid], StoppedProcesses(STOPPED_SECONDS)
            assert stopped.find(pids, 0.0) is None
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            looks = [(1.0, None), (2.0, None), (1.0 + STOPPED_SECONDS, process.pid), (9.0, None), (10.0, None), (9.0 + STOPPED_SECONDS, process.pid)]
            assert [(now, stopped.find(pids, now)) for now, _ in looks] == looks, "between 4 and 9 nobody looked"
            patient = StoppedProcesses(math.inf)
            assert [patient.find(pids, now) for now, _ in looks] == [None] * len(looks), "who is alone may be let go on"
            process.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
            assert stopped.find(pids, 12.0) is None
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert [stopped.find(pids, now) for now in (13.0, 14.0)] == [None, None]
        finally:
            process.kill()


def test_silence_while_the_machine_stood_still_is_no_hang(monkeypatch) -> None:
    """A virtual machine that is moved, a container that is paused: the server could not answer, and this process could not look."""
    now = 100.0
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: now))
    api = ServerApi("127.0.0.1", *free_ports(3), "key")

    def hangs_after(*gaps: float) -> bool:
        nonlocal now
        asked = Probe(api, "decode")
        for gap in gaps:
            now += gap
            is_waited_for = asked.wait_longer(3.0)
        return not is_waited_for

    assert not hangs_after(*[0.2] * 14) and hangs_after(*[0.2] * 16), "looks that follow each other"
    assert not hangs_after(60.0) and not hangs_after(0.2, 60.0, 1.0), "what was not looked at counts as one slow look"
    assert hangs_after(60.0, 1.0, 1.0) and hangs_after(0.2, 60.0, 1.4), "then it is waited for as ever"


def test_a_model_that_was_loaded_is_waited_for_while_the_machine_stood_still(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its silence meanwhile says nothing either."""
    now, looks = 100.0, [0.2, 60.0, 0.2]

    class Asked:
        def __init__(self, *_: object) -> None:
            self.since = now

        def poll(self) -> str | None:
            nonlocal now
            now += looks.pop(0) if looks else 0.0
            return None if looks else ""

        def close(self) -> None:
            pass

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(watch, "Probe", Asked)
    tell = lambda *_: None  # noqa: E731
    own = watch.ModelWatch(ModelState("tokenizer"), ServerApi("127.0.0.1", *free_ports(3), "key"), tmp_path, 0, 3.0, math.inf, 5, tell, tell)
    assert own._await_answer(3.0)
    looks = [1.0] * 5
    assert not own._await_answer(3.0) and looks


def test_a_model_whose_folder_is_gone_is_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It cannot be loaded again: nobody watched it any more, and it was said to be loading for ever."""
    monkeypatch.setattr(ModelWatch, "_await_answer", lambda *_: True)
    monkeypatch.setattr(ModelWatch, "_watch", lambda *_: "its process 1 died")
    failures: list[str] = []
    state = ModelState("tokenizer")
    api = ServerApi("127.0.0.1", 1, 1, 1, "key")
    ModelWatch(state, api, tmp_path, os.getpid(), 30.0, math.inf, 1, failures.append, print).run()
    assert failures == ["tokenizer: its process 1 died"] and state.state == "down"
    assert state.detail == f"{tmp_path}/tokenizer/1/model.py: No such file or directory"


def test_a_probe_that_hangs_up_leaves_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Each did, of twenty lines: a busy machine's probes do not wait."""
    (port,) = free_ports(1)
    asked, gone = threading.Event(), threading.Event()

    def describe() -> dict[str, str]:
        asked.set()
        assert gone.wait(10)
        return {}

    serve_status(cast(Supervisor, SimpleNamespace(describe=describe, status="ready")), "127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert asked.wait(10)
    gone.set()
    assert wait_until(lambda: not [t for t in threading.enumerate() if "process_request_thread" in t.name])
    assert capsys.readouterr().err == ""


def test_probes_may_ask_in_other_ways() -> None:
    """Load balancers ask by HEAD, or with a query."""
    (port,) = free_ports(1)
    serve_status(cast(Supervisor, SimpleNamespace(describe=dict, status="loading")), "127.0.0.1", port)
    for method, path, status, body in [("HEAD", "/health", 503, b""), ("HEAD", "/live", 200, b""), ("GET", "/live?probe=1", 200, b"{}")]:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, path)
        response = connection.getresponse()
        assert (response.status, response.read()) == (status, body)
        connection.close()


def test_how_long_a_model_was_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now))
    state = ModelState("decode", since=now)
    assert state.up_seconds == 0.0
    state.set("up")
    now += 50
    assert state.up_seconds == 50
    state.set("down", "why")
    now += 7
    assert state.up_seconds == 50 and state.num_restarts == 1
    state.set("loading")
    assert state.up_seconds == 0.0 and state.detail == "why"
    state.set("down")
    assert state.up_seconds == 0.0 and state.num_restarts == 1, "it was not up between"


LOADING = """
import mmap, os, sys, time
region = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.truncate(region, 4096)
own = mmap.mmap(region, 4096)
open(sys.argv[2], "w").close()
time.sleep(60)
"""
SUPERVISOR = """
import os, sys
from pathlib import Path
from deploy.supervision.probe import ServerApi
from deploy.supervision.supervisor import Supervisor
command = [sys.executable, "-c", sys.argv[1], sys.argv[2], sys.argv[3] + "/mapped"]
api = ServerApi("127.0.0.1", *map(int, sys.argv[5:]), "key")
options = {"drain_seconds": 1, "hang_seconds": 30.0, "max_restarts": int(sys.argv[4]), "max_server_memory": None}
sys.exit(Supervisor(command, dict(os.environ), Path(sys.argv[3]), ["decode"], api, **options).run())
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_server_that_ends_while_it_loads(tmp_path: Path, sent: signal.Signals) -> None:
    """Its shared memory is there before the processes of its models are, and before any of them has answered."""
    region = Path(SHARED_MEMORY_FOLDER, f"{REGION}test-{os.getpid()}")
    ports = map(str, free_ports(3))
    try:
        process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, LOADING, str(region), str(tmp_path), "0", *ports])
        wait_for((tmp_path / (REGIONS_FILE if sent == signal.SIGKILL else "mapped")).exists, "the server's memory")
        process.send_signal(sent)
        process.wait(30)
        if sent == signal.SIGKILL:  # the next one on this folder does it
            remove_regions(tmp_path)
        assert not region.exists()
    finally:
        region.unlink(missing_ok=True)


DRAINING = """
import errno, os, shutil, sys
from pathlib import Path
from deploy.supervision.probe import ServerApi
from deploy.supervision.supervisor import Supervisor
folder = Path(sys.argv[2])
(folder / "decode" / "1").mkdir(parents=True)
api = ServerApi("127.0.0.1", 1, 1, 1, "key")
command = [sys.executable, "-c", sys.argv[1], str(folder)]
supervisor = Supervisor(command, dict(os.environ), folder, ["decode"], api, drain_seconds=7.0, hang_seconds=30.0, max_restarts=0)
supervisor._start()
supervisor.states[0].set("up")
supervisor._has_engine = lambda: True
if sys.argv[3] == "gone":
    shutil.rmtree(folder)
def write(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")
Path.write_text = write
sys.exit(supervisor._drain())
"""
DRAINED = """
import os, sys, time
path = sys.argv[1] + f"/decode/1/drain-{os.getpid()}"
while not os.path.exists(path):
    time.sleep(0.05)
print("told", open(path).read(), flush=True)
os.remove(path)
time.sleep(60)
"""


@pytest.mark.parametrize(("what", "told", "said"), [("full", "told 7.0", ""), ("gone", "", "cannot be written: ")])
def test_what_drains_where_nothing_can_be_written(tmp_path: Path, what: str, told: str, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", DRAINING, DRAINED, str(tmp_path / "r"), what], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.strip() == told, ended.stderr
    assert said in ended.stderr and "Traceback" not in ended.stderr


ENDING = "import os, sys; open(sys.argv[2], 'a').write('.'); {}"
CRASH = "os.kill(os.getpid(), 6)"


@pytest.mark.parametrize(
    ("what", "max_restarts", "num_starts", "status"),
    [(CRASH, 5, 2, 134), (CRASH, 0, 1, 134), ("sys.exit(1)", 5, 1, 1)],
    ids=["crashed", "no restarts", "refused"],
)
def test_a_server_that_ends_before_it_could_answer(tmp_path: Path, what: str, max_restarts: int, num_starts: int, status: int) -> None:
    """One that crashed is started once more; one that refused to start is not."""
    command = [sys.executable, "-c", SUPERVISOR, ENDING.format(what), "", str(tmp_path), str(max_restarts), *map(str, free_ports(3))]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == status and (tmp_path / "mapped").read_text() == "." * num_starts
    said = f"the server ended (exit status {status}) before it could answer"
    assert ended.stderr.splitlines() == [f"{said}; it crashed, and is started once more"] * (num_starts - 1) + [said]


def test_progress_is_read_from_the_servers_metrics() -> None:
    lines = ('nv_inference_exec_count{model="tokenizer",version="1"} 12', 'foretoken_steps_total{model="decode"} 345')
    lines += ('foretoken_responses_total{model="decode"} 6', 'foretoken_request_errors_total{code="INVALID_ARG",model="decode"} 7')
    page = "\n".join((*lines, ""))
    assert [re.findall(progress_pattern(model), page, re.MULTILINE) for model in MODELS] == [["345", "6", "7"], ["12"], []]


def test_the_engine_refuses_ends_and_answers() -> None:
    """What draining and the decode model's probe stand on."""
    engine = LLM(speculative_config={"method": "none"}).engine
    deltas: list[Delta] = []
    engine.submit("x = ", greedy(20), deltas.append, request_id="open")
    engine.step()
    engine.refuse()
    with pytest.raises(EngineError, match="the server is shutting down"):
        engine.submit("y = ", greedy(2), deltas.append, request_id="late")
    engine.step()
    assert deltas[-1].token_ids and not deltas[-1].is_final, "what is open goes on"
    seen: list[str] = []
    engine.call(lambda: seen.append("called"))
    engine.call(lambda: engine.end_all(EngineError("over")))
    assert not seen
    engine.step()
    assert seen == ["called"] and str(deltas[-1].error) == "over" and deltas[-1].is_final
    assert engine.scheduler.pool.num_held == 0
    engine.shutdown()
    with pytest.raises(EngineError):
        engine.call(lambda: None)


# -- on a server ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def supervised(tmp_path_factory) -> Iterator[Supervised]:
    with start(tmp_path_factory.mktemp("supervision"), "--hang-seconds=3", "--max-restarts=20") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(supervised, tmp_path_factory) -> Iterator[Gateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway") / "log", supervised.server.grpc) as (address, _):
        yield Gateway(address)


def test_health_and_metrics_tell_the_truth_of_a_healthy_server(supervised):
    assert supervised.get("/live")[0] == 200 and supervised.get("/nothing")[0] == 404
    status, health = supervised.health()
    assert status == 200 and health["status"] == "ready" and set(health["models"]) == set(MODELS)
    text = supervised.get("/metrics")[1]
    assert all(f'foretoken_model_up{{model="{model}"}} 1.0' in text for model in MODELS)
    # One that crashes while it loads, as this Triton may where a process does not come to run for a second, is started once more, and says so.
    num_crashes = supervised.server.log.read_text("utf-8", "replace").count("it crashed, and is started once more")
    assert supervised.counts() == {**dict.fromkeys(MODELS, 0), "server": num_crashes}
    supervised.server.settle()
    steps = supervised.server.metric("foretoken_steps_total")
    time.sleep(2.5)  # two probes of each model
    assert supervised.server.metric("foretoken_steps_total") == steps, "watching is not work"
    assert supervised.server.metric("foretoken_spec_decode_num_drafter_failures_total") == 0, "nor does it disturb the drafter"


@pytest.mark.parametrize("pause", [asyncio.sleep, lambda seconds: asyncio.sleep(0, time.sleep(seconds))], ids=["slow reader", "busy loop"])
def test_a_client_that_is_slow_itself_does_not_blame_the_server(supervised, pause):
    async def run() -> int:
        async with AsyncClient(supervised.server.grpc, inactivity_timeout=3.0) as client:
            count = 0
            async for chunk in client.stream("x = ", **{**LONG, "max_tokens": 100}):
                if not count:
                    await pause(3.8)
                count += len(chunk.token_ids)
            return count

    assert asyncio.run(run()) == 100


def test_the_repository_api_is_closed_to_others(supervised):
    for path in ("models/decode/unload", "models/decode/load", "index"):
        status, text = supervised.server.post(f"/v2/repository/{path}", {})
        assert status == 403 and "restricted" in text
    assert supervised.server.get("/v2/logging")[0] == 403
    assert f"restricted-api={RESTRICTED_APIS}:foretoken-key=SECRET" in supervised.server.log.read_text("utf-8", "replace")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", ["decode", "engine"])
def test_decode_goes_under_load(supervised, gateway, victim, how):
    """Its streams end in time with an error, whatever the client; the server is started anew and answers as before."""
    streams, before = open_streams(supervised.server, gateway), supervised.counts()
    os.kill(supervised.process(victim), how)
    since = time.monotonic()
    assert_told(streams, since)
    wait_for(lambda: supervised.health()[0] == gateway.health() == 503, "the news of it", 10)
    assert supervised.health()[1]["models"]["decode"]["state"] != "up"
    assert "died" in supervised.health()[1]["models"]["decode"]["detail"] or how is signal.SIGSTOP
    supervised.await_ready()
    assert_serves(supervised.server)
    wait_for(lambda: gateway.health() == 200, "the good news at the gateway")
    supervised.assert_went(before, "decode", "server")


def test_the_process_that_answers_does_not_compute(supervised):
    """It has not even loaded what computes: nothing of the kind shares Python's lock with it."""
    maps = [Path(f"/proc/{pid}/maps").read_text("utf-8", "replace") for pid in (supervised.stub("decode"), supervised.server.engine_pid)]
    assert ["libtorch" in text for text in maps] == [False, True]


_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_CONT, PTRACE_SEIZE, PTRACE_INTERRUPT = 7, 0x4206, 0x4207
WAIT_FOR_THREADS = 0x40000000


def trace(what: int, thread: int) -> None:
    """Raises OSError, such as where a container forbids it."""
    if _ptrace(what, thread, None, None) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace {what:#x}")


def busiest_thread(pid: int) -> int:
    def ticks() -> dict[int, int]:
        stats = {}
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                stats[int(thread.name)] = (thread / "stat").read_text().rpartition(")")[2].split()
        return {thread: int(fields[11]) + int(fields[12]) for thread, fields in stats.items()}

    before = ticks()
    time.sleep(1.0)
    return max((count - before.get(thread, 0), thread) for thread, count in ticks().items())[1]


@contextlib.contextmanager
def stopped(server: RunningServer, thread: int) -> Iterator[None]:
    """Stops the thread of an engine's process that steps, and no other, as a device that never answers would: Python's lock is not in its hands."""
    try:
        trace(PTRACE_SEIZE, thread)
    except OSError as error:
        pytest.skip(f"a thread cannot be stopped here: {error}")
    for _ in range(100):
        trace(PTRACE_INTERRUPT, thread)
        os.waitpid(thread, WAIT_FOR_THREADS)
        with pytest.raises(GenerateError) as refused:  # by the threads that take requests
            Client(server.grpc, inactivity_timeout=0.5).generate([10**6], max_tokens=1)
        if refused.value.code == "INVALID_ARG":
            break
        trace(PTRACE_CONT, thread)
        time.sleep(0.01)
    else:
        raise AssertionError("whenever the thread was stopped, it had Python's lock")
    yield
    with contextlib.suppress(ChildProcessError):
        os.waitpid(thread, WAIT_FOR_THREADS)


def test_the_engine_hangs_in_a_process_that_lives(supervised, gateway):
    """The process goes on taking requests and telling clients that it lives. The engine's silence is noticed, by the gateway's /health first."""
    server, before = supervised.server, supervised.counts()
    assert gateway.health() == 200
    with server.slowed():
        streams, said = open_streams(server, gateway), server.log.stat().st_size
        thread = busiest_thread(server.engine_pid)
    with stopped(server, thread):
        wait_for(lambda: gateway.health() == 503, "the news of it at the gateway", 10)
        wait_for(lambda: supervised.counts()["decode"] == before["decode"] + 1, "the news of it", 30)
        assert "it has answered nothing for 3 s" in supervised.health()[1]["models"]["decode"]["detail"]
        assert_told(streams, time.monotonic())
    supervised.await_ready()
    assert re.search(rb'backend/engine.py", line \d+ in run', server.log.read_bytes()[said:]), "where its threads stood"
    assert_serves(server)
    wait_for(lambda: gateway.health() == 200, "the good news at the gateway")
    supervised.assert_went(before, "decode", "server")


def test_the_tokenizer_is_killed_under_load(supervised):
    """Streams that have their ids go on, those that wait for them have an error in time."""
    server, before, generation = supervised.server, supervised.counts(), supervised.pid
    streams = open_streams(server, max_tokens=400)
    stub = supervised.stub("tokenizer")
    os.kill(stub, signal.SIGSTOP)  # so that these are in its hands when it dies
    waiting = [Stream(client, SHORT) for client in (Client(server.grpc, model="generate"), HttpClient(server.http, model="generate"))]
    time.sleep(0.3)
    os.kill(stub, signal.SIGKILL)
    assert_told(waiting, time.monotonic())
    wait_for(lambda: supervised.counts()["tokenizer"] == before["tokenizer"] + 1, "the news of it", 10)
    supervised.await_ready()
    for stream in streams:
        stream.thread.join(60)
        assert stream.error is None and stream.num_tokens == 400
    assert_serves(server)
    supervised.assert_went(before, "tokenizer")
    assert supervised.pid == generation


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_drafter_goes_under_load(supervised, how):
    """Nobody has an error: decoding goes on plainly, then with drafts again."""
    server, before, generation = supervised.server, supervised.counts(), supervised.pid
    stub, said = supervised.stub("mtp_drafter"), server.log.stat().st_size
    # With calls in its hands, but between two of them: one that goes while it holds a lock of the shared memory can take the server along.
    os.kill(stub, signal.SIGSTOP)
    streams = open_streams(server, max_tokens=200, speculative=None)
    os.kill(stub, how)
    wait_for(lambda: supervised.counts()["mtp_drafter"] == before["mtp_drafter"] + 1, "the news of it", 20)
    assert supervised.health()[0] == 200, "it answers without a drafter too"
    for stream in streams:
        stream.thread.join(60)
        assert stream.error is None and stream.num_tokens == 200
    supervised.await_ready()
    if how is signal.SIGSTOP and b"boost::interprocess::lock_exception" in server.log.read_bytes()[said:]:
        # A lock was held even so, and Triton threw when the drafter was loaded again: see docs/operations.md.
        assert supervised.counts()["server"] == before["server"] + 1 and supervised.pid != generation
    else:
        supervised.assert_went(before, "mtp_drafter")
        assert supervised.pid == generation

    def drafts() -> bool:
        return Client(server.grpc).generate("x = [1, 2, 3, 4, 5, 6, ", **SHORT)[0].speculation["drafted"] > 0

    wait_for(drafts, "a draft of the drafter that came back")


def test_a_server_that_is_stopped_whole(supervised):
    """Not even a connection is answered: clients notice by themselves, and whoever has sent and heard nothing as well."""
    server, before = supervised.server, supervised.counts()
    streams = open_streams(server)
    os.kill(supervised.pid, signal.SIGSTOP)
    since = time.monotonic()
    late = [Stream(client, SHORT) for client in (Client(server.grpc), Client(server.grpc, model="generate"), HttpClient(server.http))]
    assert_told([*streams, *late], since)
    wait_for(lambda: supervised.counts()["server"] == before["server"] + 1, "the news of it", 20)
    supervised.await_ready()
    assert_serves(server)


def is_refused(client: Client) -> bool:
    try:
        client.generate("y = ", **SHORT)
    except GenerateError as error:
        return "the server is shutting down" in str(error)
    return False


def test_sigterm_drains(tmp_path):
    """New requests are refused, running ones finish up to the limit, those beyond it have an error, the suffix cache is saved."""
    path = tmp_path / "suffix.npz"
    speculative = {**SPECULATIVE, "request_methods": ["suffix"], "suffix_decoding_cache_path": str(path)}
    with start(tmp_path, "--drain-seconds=5", f"--speculative-config={json.dumps(speculative)}") as supervised:
        server = supervised.server
        Client(server.grpc).generate("x = ", **SHORT, speculative={"method": "suffix"})
        known = Client(server.grpc)
        regions = {s.region for s in find_stubs(supervised.pid)}
        with server.slowed():
            long, short = open_streams(server), open_streams(server, max_tokens=20)
            os.kill(supervised.server.process.pid, signal.SIGTERM)
            wait_for(lambda: supervised.health()[1]["status"] == "draining", "draining")
            assert supervised.health()[0] == 503
            wait_for(lambda: is_refused(known), "refusals")  # the model sees the drain a little later than the supervisor tells of it
            for client in (known, Client(server.grpc, model="generate"), HttpClient(server.http)):
                with pytest.raises(GenerateError, match="the server is shutting down"):
                    client.generate("y = ", **SHORT)
            for stream in short:
                stream.thread.join(30)
                assert stream.error is None and stream.num_tokens == 20
            for stream in long:
                stream.thread.join(30)
                assert "the server is shutting down, and the time for open requests is over" in str(stream.error)
                assert 0 < stream.num_tokens < 1900
        assert server.process.wait(30) == 0
        assert path.is_file()
        assert not any(Path("/dev/shm", region).exists() for region in regions)


def test_a_stream_that_was_left_at_its_end_does_not_keep_the_server(tmp_path, monkeypatch):
    """The server's gRPC front end holds the model for ever once a stream is cancelled while the answer's end is written, here for long."""
    monkeypatch.setenv("TRITONSERVER_DELAY_GRPC_RESPONSE", "500")
    path = tmp_path / "suffix.npz"
    speculative = {"method": "suffix", "suffix_decoding_cache_path": str(path)}

    async def leave(address: str) -> None:
        async with AsyncClient(address) as client:
            task = asyncio.create_task(client.generate([5, 6, 7], max_tokens=1))
            await asyncio.sleep(0.25)
            task.cancel()

    with serve(tmp_path / "log", f"--speculative-config={json.dumps(speculative)}") as server:
        Client(server.grpc).generate("x = ", max_tokens=2)
        asyncio.run(leave(server.grpc))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.log.read_text("utf-8", "replace")[-3000:]
        assert path.is_file()


def test_a_server_that_is_crashed_again_and_again_comes_back(tmp_path):
    """More often than there are restarts at once. One more is earned in 8 seconds, here."""
    program = "import sys; from deploy import cli; from deploy.supervision import watch; watch.REFILL_SECONDS = 8.0; sys.exit(cli.main())"
    with start(tmp_path, "--max-restarts=1", program=(sys.executable, "-c", program)) as supervised:
        for _ in range(2):
            before = supervised.counts()["server"]
            os.kill(supervised.pid, signal.SIGKILL)
            wait_for(lambda n=before + 1: supervised.counts()["server"] == n, "the news of it", 20)
            supervised.await_ready()
            assert_serves(supervised.server)


def test_the_end_of_another_server_is_not_this_ones(tmp_path):
    """What drains is named by the server's process; and a model that refuses its requests does not count as up."""
    with start(tmp_path, "--max-restarts=5", "--drain-seconds=1") as supervised:
        version = Path(next(p for p in tmp_path.glob("repository-*"))) / "decode" / "1"
        for name in ("drain", "drain-1", f"drain-{supervised.server.process.pid}"):
            (version / name).write_text("0")
        for _ in range(3):
            time.sleep(0.3)
            assert_serves(supervised.server)
        before = supervised.counts()
        with supervised.server.slowed():
            streams = open_streams(supervised.server)  # they keep the engine open, which refuses what is new
            (version / f"drain-{supervised.pid}").write_text("1800")
            wait_for(lambda: supervised.health()[0] == 503, "the news that it refuses", 20)
            assert_told(streams, time.monotonic() + 10)
        supervised.await_ready()
        assert supervised.counts()["server"] == before["server"] + 1
        assert_serves(supervised.server)


@contextlib.contextmanager
def held_upload(address: str, size: int) -> Iterator[None]:
    """An HTTP request that has sent so many bytes of its body and does not go on: the server keeps them."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"POST /v2/models/decode/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {2 * size}\r\n\r\n".encode())
        piece = b"x" * 2**20
        for _ in range(size // len(piece)):
            connection.sendall(piece)
        yield


def test_a_server_that_grows_is_drained_and_started_again(tmp_path):
    """What was open has its answer first."""
    limit = 150 * 2**20
    with start(tmp_path, f"--max-server-memory={limit}", "--drain-seconds=60") as supervised:
        before, generation = supervised.counts(), supervised.pid
        assert 0 < supervised.health()[1]["server_memory"] < limit
        with supervised.server.slowed():
            answers = open_streams(supervised.server, max_tokens=300)
            with held_upload(supervised.server.http, limit + 2**26):
                wait_for(lambda: supervised.health()[1]["status"] == "draining", "draining", 20)
        for answer in answers:
            answer.thread.join(100)
            assert answer.error is None and answer.num_tokens == 300
        wait_for(lambda: supervised.counts()["server"] == before["server"] + 1, "the news of it", 30)
        supervised.await_ready()
        assert supervised.pid != generation and supervised.health()[1]["server_memory"] < limit
        assert_serves(supervised.server)
        assert f"the limit is {limit} (max_server_memory): it is drained" in supervised.server.log.read_text("utf-8", "replace")


def test_giving_up_ends_with_an_error_and_leaves_nothing(tmp_path):
    with start(tmp_path, "--max-restarts=0") as supervised:
        streams, pids = open_streams(supervised.server), [supervised.pid, supervised.server.engine_pid, *(s.pid for s in find_stubs(supervised.pid))]
        os.kill(supervised.pid, signal.SIGKILL)
        assert_told(streams, time.monotonic())
        assert supervised.server.process.wait(20) == 1
        log = supervised.server.log.read_text("utf-8", "replace")
        assert "the server ended (exit status 137); not started again (max_restarts is 0)" in log
        wait_for(lambda: not any(map(is_running, pids)), "the end of all its processes")


def test_a_second_signal_ends_it_at_once(supervised):
    """The last of this file: it ends the server that the others share."""
    pid, process = supervised.pid, supervised.server.process
    with supervised.server.slowed():
        streams = open_streams(supervised.server)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: supervised.health()[1]["status"] == "draining", "draining")
        time.sleep(0.5)
        assert process.poll() is None, "open requests go on"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGINT
    wait_for(lambda: not is_running(pid), "the server's end")
    assert_told(streams, time.monotonic())
