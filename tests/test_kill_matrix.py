"""Every process of a supervised server with a gateway before it is killed, stopped or told to end, with streams of every kind open: each
client has an answer, an error or a closed connection in time, the service comes back, and nothing outlives it. What only the supervisor is
about is in test_supervision; `make soak` does the same under a storm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from client import Client, GenerateError, HttpClient
from deploy.demo import FORETOKEN, free_ports, stop_server
from deploy.supervision.processes import REGIONS_FILE, SHARED_MEMORY_FOLDER, find_stubs, is_running
from tests.supervised import MODELS, SHORT, Gateway, Stream, Supervised, assert_serves, assert_told, open_streams, start, wait_for

pytestmark = pytest.mark.serving

END_SECONDS = 30.0
"""Within which whoever has asked knows."""
HOLD_SECONDS = 0.3
"""Shorter than anything is taken for hung after: tritonserver looks at its models' signs of life about once a second."""
HANG_SECONDS = 8.0
PATIENCE_SECONDS = 2.2
"""The server waits for a process for two seconds at most that gives no sign of life."""


@dataclass
class Service:
    server: Supervised
    log: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def gateway(self) -> Gateway:
        return Gateway(f"http://127.0.0.1:{self.port}")

    def start_gateway(self) -> None:
        command = [*FORETOKEN, "gateway", f"--url={self.server.server.grpc}", f"--port={self.port}"]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        wait_for(lambda: self.gateway_health() == 200, "the gateway")

    def gateway_health(self) -> int:
        """Status of its /health; 0: it does not answer."""
        try:
            return urllib.request.urlopen(f"{self.gateway.address}/health", timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def pid_of(self, victim: str) -> int:
        own = {"gateway": lambda: self.process.pid, "supervisor": lambda: self.server.server.process.pid, "tritonserver": lambda: self.server.pid}
        return own[victim]() if victim in own else self.server.process(victim)

    def open_streams(self, **values: object) -> list[Stream]:
        """gRPC, HTTP, each to decode and to the ensemble; the first is the gateway's."""
        return open_streams(self.server.server, self.gateway, **values)

    def assert_well(self) -> None:
        """Every way to it works, and it holds nothing of what was."""
        self.server.await_ready()
        assert_serves(self.server.server)
        wait_for(lambda: self.gateway_health() == 200, "the gateway's answer")
        assert sum(len(chunk.token_ids) for chunk in self.gateway.stream("x = ", **SHORT)) == 8
        for gauge in ("kv_pages_held", "requests_running", "requests_waiting"):
            wait_for(lambda g=gauge: not self.server.server.metric(f"foretoken_{g}"), f"the end of {gauge}", END_SECONDS)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("matrix")
    with start(folder, f"--hang-seconds={HANG_SECONDS:g}", "--max-restarts=20", "--drain-seconds=5") as server:
        (port,) = free_ports(1)
        service = Service(server, folder / "gateway", port, server.server.process)
        service.start_gateway()
        try:
            yield service
        finally:
            stop_server(service.process)


def await_end(streams: list[Stream]) -> None:
    ending = time.monotonic() + END_SECONDS
    for stream in streams:
        stream.thread.join(max(0.0, ending - time.monotonic()))
        assert stream.ended, "a client still waits"


def assert_answered(streams: list[Stream]) -> None:
    """All the same, as nothing had been."""
    for stream in streams:
        stream.thread.join(2 * END_SECONDS)
        assert stream.ended and stream.error is None, stream.error
    assert all(stream.token_ids == streams[0].token_ids for stream in streams)
    assert streams[0].num_tokens == streams[0].values["max_tokens"]


def test_nothing_is_lost_while_a_process_is_held_for_a_moment(service: Service) -> None:
    before = service.server.counts()
    streams = service.open_streams(max_tokens=400)

    def hold(victim: str) -> None:
        pid = service.pid_of(victim)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(HOLD_SECONDS)
        os.kill(pid, signal.SIGCONT)

    hold("engine")
    with service.server.server.slowed():
        for victim in (*MODELS, "tritonserver", "gateway", "supervisor"):
            hold(victim)
            time.sleep(0.2)
    assert_answered(streams)
    service.assert_well()
    assert service.server.counts() == before


def test_nothing_is_lost_while_models_with_requests_in_hand_do_not_run(service: Service) -> None:
    """For longer than the server itself has patience: what it gives up they would read all the same, and die of it."""
    before, server = service.server.counts(), service.server.server
    streams = service.open_streams(max_tokens=400)
    pids = [service.pid_of(model) for model in MODELS]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        streams += [Stream(client, streams[0].values) for client in (Client(server.grpc), HttpClient(server.http, model="generate"))]
        time.sleep(PATIENCE_SECONDS)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert_answered(streams)
    service.assert_well()
    assert service.server.counts() == before


def test_models_leave_sigterm_to_the_server(service: Service) -> None:
    """Whoever sends it to all processes of a container would otherwise end them before their requests."""
    before = service.server.counts()
    streams = service.open_streams(max_tokens=200)
    for model in MODELS:
        os.kill(service.pid_of(model), signal.SIGTERM)
    assert_answered(streams)
    service.assert_well()
    assert service.server.counts() == before


def test_the_gateway_is_killed(service: Service) -> None:
    """Its clients' connections are closed, the server drops their requests, and those of others go on."""
    with service.server.server.slowed():
        theirs, *others = service.open_streams(max_tokens=200)
        more = [Stream(service.gateway, {**theirs.values, "max_tokens": 1900}) for _ in range(3)]
        assert all(stream.has_begun.wait(END_SECONDS) for stream in more)
        service.process.kill()
        service.process.wait()
    await_end([theirs, *more])
    assert all(stream.error is not None for stream in more)
    assert_answered(others)
    wait_for(lambda: service.server.server.metric("foretoken_requests_running") == 0, "the end of what nobody waits for", END_SECONDS)
    service.start_gateway()
    service.assert_well()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
def test_tritonserver_goes(service: Service, how: signal.Signals) -> None:
    """By whomever: the supervisor starts it again, and the gateway finds it."""
    before = service.server.counts()
    with service.server.server.slowed():
        streams = service.open_streams()
        os.kill(service.pid_of("tritonserver"), how)
        if how == signal.SIGKILL:
            assert_told(streams, time.monotonic())
        else:  # it lets them go on for some seconds
            await_end(streams)
            assert all(stream.error is not None for stream in streams)
    wait_for(lambda: service.server.counts()["server"] == before["server"] + 1, "the news of it")
    service.assert_well()


def test_the_tokenizer_hangs(service: Service) -> None:
    """What has its ids goes on, what waits for them has an error; at the gateway those that ask for each token's bytes too."""
    before = service.server.counts()
    theirs, *others = service.open_streams(max_tokens=400)
    os.kill(service.pid_of("tokenizer"), signal.SIGSTOP)
    waiting = Stream(Client(service.server.server.grpc, model="generate"), SHORT)
    request = urllib.request.Request(f"{service.gateway.address}/tokenize", b'{"prompt": "x = "}', {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=END_SECONDS)
    assert refused.value.code in (503, 504)
    await_end([waiting, theirs])
    assert waiting.error is not None
    assert_answered(others)
    wait_for(lambda: service.server.counts()["tokenizer"] == before["tokenizer"] + 1, "the news of it")
    service.assert_well()
    assert service.server.counts()["server"] == before["server"]


def test_decode_dies_while_the_supervisor_is_held(service: Service) -> None:
    """Nobody acts, and still clients learn of it."""
    before = service.server.counts()
    streams = service.open_streams()
    supervisor = service.pid_of("supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(service.pid_of("decode"), signal.SIGKILL)
        await_end(streams)
        assert all(stream.error is not None for stream in streams) and service.gateway_health() == 503
        with pytest.raises(GenerateError):
            Client(service.server.server.grpc, inactivity_timeout=END_SECONDS).generate("x = ", **SHORT)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    wait_for(lambda: service.server.counts()["server"] == before["server"] + 1, "the news of it")
    service.assert_well()


def test_nothing_outlives_the_supervisor_and_the_gateway_says_so(service: Service) -> None:
    """Not even a model in the middle of an answer. The last of this file."""
    stubs = find_stubs(service.server.pid)
    pids, regions = (
        [service.server.pid, service.pid_of("engine"), *(stub.pid for stub in stubs)],
        [SHARED_MEMORY_FOLDER / stub.region for stub in stubs],
    )
    streams = service.open_streams()
    os.kill(service.pid_of("supervisor"), signal.SIGKILL)
    assert_told(streams, time.monotonic())
    wait_for(lambda: not any(map(is_running, pids)), "the end of all its processes", END_SECONDS)
    wait_for(lambda: service.gateway_health() == 503, "the gateway's word")  # an answer of the last second is a sign of life
    with pytest.raises(GenerateError, match="503"):
        list(service.gateway.stream("x = ", **SHORT))
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(END_SECONDS) == 0
    assert len(regions) == len(MODELS) and all(region.exists() for region in regions), "nobody was left to remove them"
    repository = service.server.server.repository
    assert (repository / REGIONS_FILE).read_text().split() == sorted(region.name for region in regions)
    assert subprocess.run([*FORETOKEN, "serve", "--dry-run", f"--repository={repository}"], capture_output=True).returncode == 0
    assert not any(region.exists() for region in regions), "the next server on this folder removes them"
