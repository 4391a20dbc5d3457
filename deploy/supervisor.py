"""Keeps a tritonserver and its models' processes alive.

The server never restarts a Python model's process that died: its streams stay open for ever without a word, while the server goes on
calling itself ready (measured, release 24.10). So each model is asked once a second for a real answer, and what has died or hangs is
brought back:

- `tokenizer`, `mtp_drafter`: loaded again through the server's repository API; running answers go on.
- `decode`: the server is ended and started anew. Every open stream is of this model, and no unloading ends one whose process is gone;
  a closed connection does, at once and for every kind of client.
- what does not come back after `max_restarts` attempts ends this process with status 1, so that whoever runs it can decide.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import logging
import math
import os
import queue
import re
import select
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import prometheus_client

logger = logging.getLogger(__name__)

DECODE = "decode"
NEEDED = (DECODE, "tokenizer")
"""Without a drafter answers only take longer."""
KEY_HEADER = "foretoken-key"
DRAIN_FILE = "drain"
"""What backend/adapters/decode.py looks for in its version folder."""
LOOK_SECONDS = 0.1
PROBE_SECONDS = 1.0
ASK_AGAIN_SECONDS = 2.0
JOIN_SECONDS = 5.0
CONNECT_SECONDS = 1.0
MAX_ERRORS = 3
"""Probes in a row that are answered with an error before a model whose process lives counts as down."""
STABLE_SECONDS = 300.0
"""What was up for this long starts afresh with its attempts."""
MAX_DELAY = 30.0
DRAIN_SLACK_SECONDS = 5.0
SAVE_SECONDS = 60
"""For decode to end after the last request: the suffix cache is written then."""
LINGER_SECONDS = 2.0
"""For the server to end after that: it waits for models whose processes died, for as long as it may."""
SHARED_MEMORY = "triton_python_backend_shm_region_"


def _tensor(name: str, datatype: str, shape: list[int], data: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


_DRAFTER_CALL = {
    "inputs": [
        _tensor("session", "INT64", [4], [0, 0, 0, 1]),
        _tensor("tokens", "INT32", [1], [0]),
        _tensor("hidden", "FP32", [1, 1], [0]),
        _tensor("requests", "INT64", [1, 7], [1, 1, 1, 1, 0, 0, 0]),
        _tensor("filters", "FP32", [1, 3], [0, 0, 0]),
        _tensor("pages", "INT32", [1], [0]),
        _tensor("fresh_pages", "INT32", [0], []),
    ]
}


def probe_request(model: str) -> tuple[str, dict[str, Any], str]:
    """The cheapest request that needs all of a model's process to be answered: verb, body, and what the answer of a living one holds."""
    if model == DECODE:  # answered by the engine's thread, between two steps; counted in none of its metrics
        return "generate", {"cancel": uuid.uuid4().hex}, '"finish_reason"'
    if model == "tokenizer":
        return "generate", {"text_input": "a"}, '"input_ids"'
    return "infer", _DRAFTER_CALL, "ValueError: pages"  # refused when it is read, so that the decode model's session goes on


def progress_pattern(model: str) -> str:
    """The line of the server's metrics that grows while a model works, though it may be too busy to come to a probe."""
    return r"^foretoken_steps_total\{.*?\} (\S+)$" if model == DECODE else rf'^nv_inference_exec_count\{{model="{model}".*?\}} (\S+)$'


@dataclass
class Backoff:
    """How soon to try again, and when to stop trying."""

    limit: int
    count: int = 0

    def next(self, up_seconds: float) -> float | None:
        """Seconds to wait before the next attempt, after what failed was up for so long: 0, 1, 2, 4, ...; None: no more attempts."""
        self.count = 1 if up_seconds >= STABLE_SECONDS else self.count + 1
        if self.count > self.limit:
            return None
        return 0.0 if self.count == 1 else min(2.0 ** (self.count - 2), MAX_DELAY)


@dataclass(frozen=True, slots=True)
class Stub:
    """The process of one instance of a model."""

    pid: int
    model: str
    region: str
    """Of shared memory."""


def parse_stub(command: bytes, pid: int) -> Stub | None:
    """From a process's command line: stub, model.py, region, two sizes, the server's pid, folder, offset, instance, runtime.

    None for other processes, and for the one that only completes a configuration before the load: its instance has no numbers.
    """
    words = command.decode("utf-8", "replace").split("\0")
    if len(words) < 9 or not words[0].endswith("triton_python_backend_stub"):
        return None
    instance = re.fullmatch(r"(.+)_\d+_\d+", words[8])
    return Stub(pid, instance[1], words[2]) if instance else None


def read_state(pid: int) -> tuple[str, int]:
    """State letter and parent of a process; ("X", 0): there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return words[0], int(words[1])


def is_running(pid: int) -> bool:
    return read_state(pid)[0] not in "XZ"


def find_stubs(server_pid: int) -> list[Stub]:
    """The running model processes of a server."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stub = parse_stub((entry / "cmdline").read_bytes(), int(entry.name))
                if stub is not None and read_state(stub.pid)[1] == server_pid and is_running(stub.pid):
                    found.append(stub)
    return found


@dataclass
class ModelState:
    """What is known of one model. state: loading, up or down."""

    name: str
    state: str = "loading"
    detail: str = ""
    """Why it went down last."""
    num_restarts: int = 0
    """Times it was up and went down."""
    since: float = field(default_factory=time.monotonic)
    _up_before: float = 0.0

    def set(self, state: str, detail: str | None = None) -> None:
        self.num_restarts += self.state == "up" and state == "down"
        self._up_before = self.up_seconds if state == "down" else 0.0
        self.state, self.since = state, time.monotonic()
        self.detail = self.detail if detail is None else detail

    @property
    def seconds(self) -> float:
        """Since the last change."""
        return time.monotonic() - self.since

    @property
    def up_seconds(self) -> float:
        """How long it is up; of one that went down: how long it was."""
        return self.seconds if self.state == "up" else self._up_before


@dataclass(frozen=True)
class ServerApi:
    """The way to the server."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    key: str

    def ask(self, port: int, path: str, body: object = None) -> http.client.HTTPConnection:
        """Sends a request; its answer can be read from the connection. Raises OSError."""
        connection = http.client.HTTPConnection(self.host, port, timeout=CONNECT_SECONDS)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def load(self, model: str) -> str:
        """Loads a model, in the place of one that is loaded. Returns why it failed, or "".

        Over gRPC: the HTTP thread that loads a model says nothing to its other clients meanwhile.
        """
        import tritonclient.grpc as triton_grpc
        from tritonclient.utils import InferenceServerException

        try:
            with triton_grpc.InferenceServerClient(f"{self.host}:{self.grpc_port}") as client:
                client.load_model(model, headers={f"triton-grpc-protocol-{KEY_HEADER}": self.key})
        except InferenceServerException as error:
            return str(error)
        return ""

    def read_progress(self, model: str) -> str | None:
        try:
            with contextlib.closing(self.ask(self.metrics_port, "/metrics")) as connection:
                found = re.search(progress_pattern(model), connection.getresponse().read().decode("utf-8", "replace"), re.MULTILINE)
        except (OSError, http.client.HTTPException):
            return None
        return found[1] if found else None


class Probe:
    """One question to a model, and the wait for its answer."""

    def __init__(self, api: ServerApi, model: str) -> None:
        self._api = api
        self._model = model
        self._connection: http.client.HTTPConnection | None = None
        self._sign = ""
        self.since = self._sampled = time.monotonic()
        self._progress: str | None = None

    def poll(self) -> str | None:
        """None: no answer yet; "": the model lives; else what it answered."""
        try:
            if self._connection is None:
                verb, body, self._sign = probe_request(self._model)
                self._connection = self._api.ask(self._api.http_port, f"/v2/models/{self._model}/{verb}", body)
            if not select.select([self._connection.sock], [], [], LOOK_SECONDS)[0]:
                return None
            text = self._connection.getresponse().read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):  # asked again at the next call
            self.close()
            return None
        self.close()
        return "" if self._sign in text else text[:300] or "nothing"

    def wait_longer(self, seconds: float) -> bool:
        """False when there has been neither an answer nor any progress for so long."""
        now = time.monotonic()
        if now - self._sampled > seconds / 4:
            progress = self._api.read_progress(self._model)
            if progress is not None and self._progress is not None and progress != self._progress:
                self.since = now
            self._progress, self._sampled = progress, now
        return now - self.since < seconds

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ModelWatch(threading.Thread):
    """Watches one model during one life of the server, and brings it back where that can be done alone."""

    def __init__(
        self,
        state: ModelState,
        api: ServerApi,
        repository: Path,
        server_pid: int,
        hang_seconds: float,
        max_restarts: int,
        on_failure: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"watch {state.name}", daemon=True)
        self.state = state
        self.regions: set[str] = set()
        self._api = api
        self._repository = repository
        self._server_pid = server_pid
        self._hang_seconds = hang_seconds
        self._backoff = Backoff(max_restarts)
        self._on_failure = on_failure
        self._is_over = threading.Event()

    def stop(self) -> None:
        self._is_over.set()

    def run(self) -> None:
        model, limit = self.state.name, math.inf
        while self._await_answer(limit):
            logger.info("%s is up after %.1f s", model, self.state.seconds)
            self.state.set("up")
            stubs = self._find_stubs()
            reason = self._watch(stubs)
            if reason is None:
                return
            self.state.set("down", reason)
            logger.error("%s is down: %s", model, reason)
            if model == DECODE or not self._reload(stubs):
                self._on_failure(f"{model}: {reason}")
                return
            limit = self._hang_seconds
        if not self._is_over.is_set():
            self._on_failure(f"{model}: it was loaded, and has answered nothing for {limit:g} s")

    def _find_stubs(self) -> list[Stub]:
        stubs = [s for s in find_stubs(self._server_pid) if s.model == self.state.name]
        self.regions.update(s.region for s in stubs)
        return stubs

    def _await_answer(self, limit: float) -> bool:
        """False when told to stop, or when there is none for so long."""
        started = time.monotonic()
        probe = Probe(self._api, self.state.name)
        while (answer := probe.poll()) != "" and time.monotonic() - started < limit and not self._is_over.wait(LOOK_SECONDS):
            if time.monotonic() - probe.since > ASK_AGAIN_SECONDS:  # it may have reached the process that died
                probe.close()
                probe = Probe(self._api, self.state.name)
        probe.close()
        return answer == ""

    def _watch(self, stubs: list[Stub]) -> str | None:
        """Returns why the model is down, or None when told to stop."""
        probe: Probe | None = None
        due, num_errors = time.monotonic(), 0
        while not self._is_over.wait(LOOK_SECONDS):
            if dead := [s.pid for s in stubs if not is_running(s.pid)]:
                return f"its process {dead[0]} died"
            now = time.monotonic()
            if probe is None:
                probe = Probe(self._api, self.state.name) if now >= due else None
                continue
            answer = probe.poll()
            if answer is None:
                if not probe.wait_longer(self._hang_seconds):
                    probe.close()
                    return f"it has answered nothing for {self._hang_seconds:g} s, the limit (hang_seconds)"
                continue
            num_errors = num_errors + 1 if answer else 0
            if num_errors == MAX_ERRORS:
                return f"it answers with an error: {answer}"
            probe, due = None, now + PROBE_SECONDS
        return None

    def _reload(self, stubs: list[Stub]) -> bool:
        """False when it could not be loaded, often enough to stop trying."""
        for stub in set(stubs) & set(find_stubs(self._server_pid)):  # one that hangs would keep its memory
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)
        while (delay := self._backoff.next(self.state.up_seconds)) is not None and not self._is_over.wait(delay):
            self.state.set("loading")
            os.utime(self._repository / self.state.name / "1" / "model.py")  # what has not changed is not loaded again
            failure = self._api.load(self.state.name)
            if not failure or self._is_over.is_set():
                return not failure
            self.state.set("down", failure)
            logger.error("%s could not be loaded: %s", self.state.name, failure)
        return False


_libc = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


class Supervisor:
    """Runs a server until it is told to stop by SIGTERM or SIGINT; the second one ends it at once."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        repository: Path,
        models: Sequence[str],
        api: ServerApi,
        *,
        drain_seconds: float,
        hang_seconds: float,
        max_restarts: int,
    ) -> None:
        """models: those with a process."""
        self.states = [ModelState(name) for name in models]
        self.is_draining = False
        self.num_server_restarts = 0
        self._command = list(command)
        self._environment = dict(environment)
        self._repository = repository
        self._drain_file = repository / DECODE / "1" / DRAIN_FILE
        self._api = api
        self._drain_seconds = drain_seconds
        self._hang_seconds = hang_seconds
        self._max_restarts = max_restarts
        self._backoff = Backoff(max_restarts)
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._watches: list[ModelWatch] = []
        self._num_signals = 0
        self._process: subprocess.Popen[bytes] | None = None

    # -- what others are told ---------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """ready, loading, draining or down."""
        needed = [s.state for s in self.states if s.name in NEEDED]
        if self.is_draining:
            return "draining"
        return "ready" if all(s == "up" for s in needed) else "down" if "down" in needed else "loading"

    def describe(self) -> dict[str, Any]:
        models = {s.name: {"state": s.state, "seconds": round(s.seconds, 1), "restarts": s.num_restarts, "detail": s.detail} for s in self.states}
        return {"status": self.status, "server_restarts": self.num_server_restarts, "models": models}

    # -- the server's life ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Returns the exit status: 0 after a signal and an orderly end."""
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            return self._keep_running()
        finally:
            self._end()

    def _keep_running(self) -> int:
        was_up = False
        while True:
            self._start()
            failure = self._attend()
            if failure is None:
                return self._drain()
            was_up = was_up or any(s.state != "loading" for s in self.states)
            up_seconds = min(s.up_seconds for s in self.states)
            exit_status = self._end()
            for state in self.states:
                state.set("loading")
            if not was_up:
                logger.error("%s before it could answer", failure)
                return exit_status
            delay = self._backoff.next(up_seconds)
            if delay is None:
                logger.error("%s; not started again: %d attempts have failed (max_restarts)", failure, self._max_restarts)
                return 1
            logger.error("%s; the server is started again%s", failure, f" in {delay:g} s" if delay else "")
            self.num_server_restarts += 1
            ending = time.monotonic() + delay
            while time.monotonic() < ending:
                if self._num_signals:
                    return 0
                time.sleep(LOOK_SECONDS)

    def _on_signal(self, number: int, frame: object) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            os._exit(128 + number)

    def _start(self) -> None:
        self._failures = queue.SimpleQueue()
        # Of its own session: Ctrl-C in a terminal is for this process to pass on.
        self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True, preexec_fn=_die_with_parent)
        self._watches = [
            ModelWatch(s, self._api, self._repository, self._process.pid, self._hang_seconds, self._max_restarts, self._failures.put)
            for s in self.states
        ]
        for watch in self._watches:
            watch.start()

    @property
    def _exit_status(self) -> int | None:
        """Of the server; None while it runs. Orphans of it that became this process's children are reaped by the way."""
        assert self._process is not None
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._process.pid:
                    code = os.waitstatus_to_exitcode(found[1])
                    self._process.returncode = code if code >= 0 else 128 - code
        return self._process.returncode

    def _attend(self) -> str | None:
        """Returns why the server must be started anew, or None after a signal."""
        while not self._num_signals:
            if (status := self._exit_status) is not None:
                return f"the server ended (exit status {status})"
            with contextlib.suppress(queue.Empty):
                return self._failures.get_nowait()
            time.sleep(LOOK_SECONDS)  # a signal during a SimpleQueue's timed get can make it wait for ever (CPython 3.11)
        return None

    def _wait(self, seconds: float) -> Iterator[None]:
        """Looks until the server has ended, or for so long."""
        ending = time.monotonic() + seconds
        while self._exit_status is None and time.monotonic() < ending:
            yield
            time.sleep(LOOK_SECONDS)

    def _drain(self) -> int:
        """Lets open requests end, then the models, then the server."""
        assert self._process is not None
        self.is_draining = True
        is_up = any(s.name == DECODE and s.state == "up" for s in self.states)
        for watch in self._watches:
            watch.stop()
        if not is_up:  # nothing is open, and a server that loads its models does not listen to signals
            return 0
        logger.info("shutting down: open requests have %g s; a second signal ends them at once", self._drain_seconds)
        fresh = self._drain_file.with_suffix(".new")
        fresh.write_text(str(self._drain_seconds))
        fresh.replace(self._drain_file)
        for _ in self._wait(self._drain_seconds + DRAIN_SLACK_SECONDS):
            if not self._drain_file.exists() or not self._has_decode():
                break
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        last_seen = time.monotonic()
        for _ in self._wait(SAVE_SECONDS):
            if self._has_decode():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > LINGER_SECONDS:
                break
        if self._has_decode():
            logger.error("%s did not end within %d s and is killed", DECODE, SAVE_SECONDS)
            return 1
        logger.info("shut down")
        return 0

    def _has_decode(self) -> bool:
        assert self._process is not None
        return any(s.model == DECODE for s in find_stubs(self._process.pid))

    def _end(self) -> int:
        """Kills whatever is left of the server. Returns its exit status."""
        if self._process is None:
            return 1
        for watch in self._watches:
            watch.stop()
        regions = {r for w in self._watches for r in w.regions}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        while (status := self._exit_status) is None:
            time.sleep(LOOK_SECONDS)
        for region in regions:  # which a killed server leaves
            if region.startswith(SHARED_MEMORY):
                Path("/dev/shm", region).unlink(missing_ok=True)
        for watch in self._watches:  # their calls end with the server
            watch.join(JOIN_SECONDS)
        self._process = None
        return status or 1


def make_metrics(supervisor: Supervisor) -> prometheus_client.CollectorRegistry:
    """Per model: whether it is up and how often it went down; how often the server was started anew."""
    registry = prometheus_client.CollectorRegistry()

    class Collector:
        def collect(self) -> Iterator[prometheus_client.Metric]:
            families = prometheus_client.metrics_core
            up = families.GaugeMetricFamily("foretoken_model_up", "1: the model answers; 0: it is loading or down", labels=["model"])
            restarts = families.CounterMetricFamily("foretoken_model_restarts", "Times a model that was up went down", labels=["model"])
            for state in supervisor.states:
                up.add_metric([state.name], float(state.state == "up"))
                restarts.add_metric([state.name], state.num_restarts)
            yield up
            yield restarts
            yield families.CounterMetricFamily("foretoken_server_restarts", "Times the server was started anew", value=supervisor.num_server_restarts)

    registry.register(Collector())  # type: ignore[arg-type]
    return registry


def serve_status(supervisor: Supervisor, host: str, port: int) -> None:
    """`/health` (200 while requests are answered, else 503; JSON), `/live` (200 while this process runs) and `/metrics`, in threads."""
    registry = make_metrics(supervisor)

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            kind, status = "application/json", 200
            if self.path == "/health":
                body = json.dumps(supervisor.describe()).encode()
                status = 200 if supervisor.status == "ready" else 503
            elif self.path == "/live":
                body = b"{}"
            elif self.path == "/metrics":
                kind, body = prometheus_client.CONTENT_TYPE_LATEST, prometheus_client.generate_latest(registry)
            else:
                status, body = 404, json.dumps({"error": "known paths: /health, /live, /metrics"}).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class StatusServer(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = StatusServer((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="status", daemon=True).start()
