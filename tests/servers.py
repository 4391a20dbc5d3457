"""Real servers for tests: started by the launcher, on loopback ports, stopped afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import STDOUT, Popen

from client.headers import NO_HEADERS, Headers
from client.loopback import open_url
from deploy.demo import FORETOKEN, free_ports, running_server, stop_server
from deploy.rendering import KEY_FILE
from deploy.supervision.patience import Voucher
from deploy.supervision.probe import KEY_HEADER
from deploy.supervision.processes import find_engine, find_stubs, is_running, read_state
from tests.small import small_options


def wait_until(is_true: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it came about. Nothing is measured by the time: a busy machine lets a process stand still for seconds."""
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """This thread runs as soon as it wakes, where the system permits it (root, RLIMIT_RTPRIO).

    A thread that slept for 10 ms was seen to wake after 2 s: on a busy machine Linux shares the cores by session first, and a server is one alone."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@dataclass
class RunningServer:
    http: str
    grpc: str
    metrics: str
    log: Path
    process: Popen
    repository: Path
    _pace: threading.RLock = field(default_factory=threading.RLock)
    """Held by whoever lets the process that computes run, or stops it."""

    @property
    def key(self) -> str:
        """Of the APIs that are not for clients."""
        return (self.repository / KEY_FILE).read_text().strip()

    @property
    def pid(self) -> int:
        """Of tritonserver, which the launcher has started, or has become."""
        own = self.process.pid
        running = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and is_running(int(p.name))]
        family = [own, *(pid for pid in running if read_state(pid)[1] == own)]
        (found,) = (pid for pid in family if b"tritonserver" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])
        return found

    def wait_until_ready(self, seconds: float = 60) -> None:
        """For tests after others that cancel streams, which can end this Triton (CVE-2025-23322, docs/operations.md): it is started again."""
        ending = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                if self.get("/v2/health/ready")[0] == 200:
                    return
            assert time.monotonic() < ending, "the server is not ready"
            time.sleep(0.1)

    def get(self, path: str) -> tuple[int, str]:
        return self._ask(urllib.request.Request(f"http://{self.http}{path}"))

    def post(self, path: str, body: object) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._ask(urllib.request.Request(f"http://{self.http}{path}", data, {"Content-Type": "application/json"}))

    def administer(self, path: str) -> tuple[int, str]:
        """Asks one of the APIs that are not for clients."""
        headers = {"Content-Type": "application/json", KEY_HEADER: self.key}
        return self._ask(urllib.request.Request(f"http://{self.http}{path}", b"{}", headers))

    @staticmethod
    def _ask(request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode("utf-8", "replace")

    def metrics_text(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as response:
            return response.read().decode()

    def settle(self, names: str = "foretoken_") -> None:
        """Returns once what was asked before is counted: a server tells its counts some time after their events, and an idle one's stand still.

        names: how the counts begin that are looked at. One behind a gateway is never idle: it is asked how it is."""
        for _ in range(2):  # the first time counts may be told that were begun to be told before
            told = self.metric("foretoken_responses_total")
            assert self.post("/v2/models/decode/generate", {"cancel": "nobody"})[0] == 200  # the engine answers after all that came before
            assert wait_until(lambda: self.metric("foretoken_responses_total") > told), "the server tells no counts"  # noqa: B023
        deadline, seen, same = time.monotonic() + 60, "", 0
        while same < 4:
            assert time.monotonic() < deadline, "the server is not idle"
            text = "\n".join(line for line in self.metrics_text().splitlines() if line.startswith(names))
            seen, same = text, same + 1 if text == seen else 0
            time.sleep(0.15)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's series that carry the labels; 0 when there is none."""
        total = 0.0
        for line in self.metrics_text().splitlines():
            match = re.match(rf"{name}(?:{{(.*)}})? ([-+.\deE]+)$", line)
            if match and all(f'{k}="{v}"' in (match[1] or "") for k, v in labels.items()):
                total += float(match[2])
        return total

    @contextlib.contextmanager
    def held_counting(self, name: str) -> Iterator[float]:
        """The engine stands still, and with it a count of its work: yields that, of which at most a short slot of time is not told yet.

        Within `cancels` or `slowed`, once it works. How long a slot is depends on who else wants the machine, so a short one is waited for."""
        pids = self._engine_pids()
        with self._pace:
            told = self._at_rest(name)
            for _ in range(30):
                before, given = told, self._give_slot(pids)
                told = self._at_rest(name)
                if told > before and given < 0.025:
                    break
            else:
                raise AssertionError(f"{name} is {told:g}, and it was not told of in a short slot")
            with self.engine_held():
                yield told

    def _at_rest(self, name: str) -> float:
        """A count while the engine is held, once it stands still: what was told before that may be published later on a busy machine."""
        seen, same = self.metric(name), 0
        while same < 5:
            time.sleep(0.1)
            now = self.metric(name)
            seen, same = now, same + 1 if now == seen else 0
        return seen

    def is_idle(self) -> bool:
        return self.metric("foretoken_requests_running") == 0 == self.metric("foretoken_kv_pages_held")

    @contextlib.contextmanager
    def cancels(self, count: int = 1) -> Iterator[None]:
        """So many completions that begin within are cancelled, not answered to their end, and their pages come back: by the server's own counts,
        for how long it took says as much of the machine. They are slowed, so that a cancel that comes late finds them open."""
        read = lambda: self.metric("foretoken_requests_finished_total", finish_reason="cancelled")  # noqa: E731
        assert wait_until(self.is_idle), "others' requests go on"
        before = read()
        with self.slowed():
            yield
            assert wait_until(lambda: read() - before >= count), f"{read() - before:.0f} were cancelled"
        assert wait_until(self.is_idle), "pages are held"

    @contextlib.contextmanager
    def held_amid(self, count: int) -> Iterator[None]:
        """The engine stands still once so many completions have some tokens, and are far from their end: however long a browser takes.

        Within `cancels` or `slowed`, from before they are asked for: counts come late on a busy machine, tokens do not."""
        pids = self._engine_pids()

        def reaches(is_true: Callable[[], bool]) -> bool:
            """A look, and a slot, a tenth of the time: while counts are late the engine does not run on, which ends 1,500 tokens in a second."""

            def look() -> bool:
                if is_true():
                    return True
                time.sleep(min(9 * self._give_slot(pids), 1.0))
                return False

            return wait_until(look)

        with self._pace:
            running = lambda: self.metric("foretoken_requests_running")  # noqa: E731
            assert reaches(lambda: running() == count), f"{running():.0f} requests run, not {count}"
            begun = self.metric("foretoken_steps_total")
            assert reaches(lambda: self.metric("foretoken_steps_total") >= begun + 20), "no step is taken"
            with self.engine_held():
                yield

    @contextlib.contextmanager
    def slowed(self) -> Iterator[None]:
        """The processes that compute get a tenth of the time, and none while they are held: what is asked for within is not over before the test has
        done with it what it means to, however quick the machine and slow the test. Not for tests that stop such a process themselves."""
        pids, is_over = self._engine_pids(), threading.Event()

        def pace() -> None:
            given = 0.01
            while not is_over.wait(min(9 * given, 1.0)):
                with self._pace:
                    given = self._give_slot(pids)
            self._send(pids, signal.SIGCONT)

        self._send(pids, signal.SIGSTOP)
        thread = threading.Thread(target=pace)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _give_slot(self, pids: list[int]) -> float:
        """A hundredth of a second to processes that are stopped; how long it was, on a machine that lets this one wait, too."""
        with at_once():
            begun = time.monotonic()
            self._send(pids, signal.SIGCONT)
            time.sleep(0.01)
            self._send(pids, signal.SIGSTOP)
            return time.monotonic() - begun

    @staticmethod
    def _send(pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @contextlib.contextmanager
    def engine_held(self) -> Iterator[None]:
        """Stops the process that computes: what a test does meanwhile takes no step, however long it takes."""
        pid = self.engine_pid
        with self._pace:
            os.kill(pid, signal.SIGSTOP)
            try:
                assert wait_until(lambda: read_state(pid)[0] == "T")
                yield
            finally:
                os.kill(pid, signal.SIGCONT)

    @property
    def engine_pid(self) -> int:
        """Of the process that computes."""
        (pid,) = self._engine_pids()
        return pid

    def _engine_pids(self) -> list[int]:
        """Of each instance."""
        pids = [pid for stub in find_stubs(self.pid) if stub.model == "decode" if (pid := find_engine(stub.pid)) is not None]
        assert pids
        return pids


@contextlib.contextmanager
def serve(
    log: Path,
    *options: str,
    ports: tuple[int, int, int] | None = None,
    program: Sequence[str] = FORETOKEN,
    host: str = "127.0.0.1",
    headers: Headers = NO_HEADERS,
) -> Iterator[RunningServer]:
    http, grpc, metrics = ports or free_ports(3)
    repository, is_supervised = log.parent / f"repository-{http}", "--no-supervise" not in options
    own = (f"--repository={repository}", *small_options(options))
    with contextlib.ExitStack() as stack:
        try:
            process = stack.enter_context(running_server(http, grpc, metrics, log, *own, program=program, host=host, headers=headers))
        except RuntimeError as error:
            if is_supervised or ABORTED not in str(error):
                raise
            process = stack.enter_context(running_server(http, grpc, metrics, log, *own, program=program, host=host, headers=headers))
        server = RunningServer(f"{host}:{http}", f"{host}:{grpc}", f"{host}:{metrics}", log, process, repository)
        if not is_supervised:
            stack.enter_context(vouched(server.pid))
        yield server


ABORTED = "(exit status -6)"


@contextlib.contextmanager
def vouched(pid: int) -> Iterator[None]:
    """What a supervisor does for a server whose models' processes a busy machine does not let run: it would give them up after a second, and abort.
    While they load that may happen even so, once: a supervisor starts such a one once more."""
    voucher = Voucher(pid, hang_seconds=30.0)
    voucher.start()
    try:
        yield
    finally:
        voucher.stop()


@contextlib.contextmanager
def plain_server(command: Sequence[str], environment: Mapping[str, str], log: Path, http: int) -> Iterator[Popen]:
    """tritonserver itself, without the launcher, once it is ready."""
    for is_last in (False, True):
        with log.open("wb") as out:
            process = Popen(command, env=environment, stdout=out, stderr=STDOUT, start_new_session=True)
        try:
            with vouched(process.pid):
                assert wait_until(lambda: process.poll() is not None or is_ready(http), 120), "it is not ready"  # noqa: B023
                if process.poll() == -signal.SIGABRT and not is_last:
                    continue
                assert process.poll() is None, log.read_text("utf-8", "replace")[-3000:]
                yield process
                return
        finally:
            stop_server(process)


def is_ready(http: int) -> bool:
    with contextlib.suppress(OSError), open_url(f"http://127.0.0.1:{http}/v2/health/ready", 5) as response:
        return response.status == 200
    return False


class ServerPool:
    """Servers that several modules ask: one for each choice of options, from the first who wants it to the end of all tests.

    For tests that leave a server as they found it. Who kills it, drains it or changes its models starts one of its own with `serve`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stacks: list[contextlib.ExitStack] = []
        self._running: dict[tuple[str, ...], RunningServer] = {}

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor(8) as stopping:  # each waits for three seconds
            for each in [stopping.submit(stack.close) for stack in self._stacks]:
                each.result()

    def get(self, *options: str) -> RunningServer:
        if options not in self._running:
            log = self._folder / str(len(self._running)) / "log"
            stack = contextlib.ExitStack()
            self._running[options] = stack.enter_context(serve(log, "--drain-seconds=5", *options))
            self._stacks.append(stack)
        return self._running[options]
