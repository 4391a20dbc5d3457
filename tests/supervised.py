"""A supervised server under tests that kill and stop its processes, and clients whose streams are open meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from client import Chunk, Client, GenerateError, HttpClient
from client.headers import NO_HEADERS, Headers
from deploy.demo import FORETOKEN, free_ports
from deploy.supervision.processes import find_stubs
from tests.servers import RunningServer, serve

PROMISE_SECONDS = 5.0
SLACK_SECONDS = 1.0
"""For two cores that others use too."""
MODELS = ("decode", "tokenizer", "mtp_drafter")
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 3, "placement": "bls"}
LONG = {"max_tokens": 1900, "temperature": 0.0, "ignore_eos": True, "speculative": {"method": "none"}}
SHORT = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@dataclass
class Supervised:
    server: RunningServer
    status_port: int

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.status_port}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def health(self) -> tuple[int, dict]:
        status, text = self.get("/health")
        return status, json.loads(text)

    def counts(self) -> dict[str, int]:
        """Restarts by model, and the server's."""
        text = self.get("/metrics")[1]
        found = {m[1]: int(float(m[2])) for m in re.finditer(r'^foretoken_model_restarts_total\{model="(\w+)"\} (\S+)$', text, re.MULTILINE)}
        total = re.search(r"^foretoken_server_restarts_total (\S+)$", text, re.MULTILINE)
        assert total is not None
        return {**found, "server": int(float(total[1]))}

    @property
    def pid(self) -> int:
        """Of tritonserver."""
        return self.server.pid

    def process(self, name: str) -> int:
        """A model's, or the engine's."""
        return self.server.engine_pid if name == "engine" else self.stub(name)

    def stub(self, model: str) -> int:
        (stub,) = (s for s in find_stubs(self.pid) if s.model == model)
        return stub.pid

    def assert_went(self, before: dict[str, int], *names: str) -> None:
        """That since those counts() each of these went once and nothing else did; if not, what the supervisor has said."""
        expected = {name: count + (name in names) for name, count in before.items()}
        said = [line for line in self.server.log.read_text("utf-8", "replace").splitlines() if " foretoken: " in line]
        assert self.counts() == expected, "\n".join(said)

    def await_ready(self, seconds: float = 90) -> None:
        wait_for(lambda: self.health()[0] == 200 and all(m["state"] == "up" for m in self.health()[1]["models"].values()), "readiness", seconds)


def wait_for(condition, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about in {seconds} s"
        time.sleep(0.05)


@contextlib.contextmanager
def start(folder: Path, *options: str, program: Sequence[str] = FORETOKEN, headers: Headers = NO_HEADERS) -> Iterator[Supervised]:
    (port,) = free_ports(1)
    own = (f"--status-port={port}", f"--speculative-config={json.dumps(SPECULATIVE)}")
    with serve(folder / "log", *own, *options, program=program, headers=headers) as running:
        supervised = Supervised(running, port)
        supervised.await_ready()
        yield supervised


@dataclass(frozen=True)
class Gateway:
    """A gateway before the server, as its clients see it."""

    address: str

    def health(self) -> int:
        try:
            return urllib.request.urlopen(f"{self.address}/health", timeout=30).status
        except urllib.error.HTTPError as error:
            return error.code

    def stream(self, prompt: str, **values) -> Iterator[Chunk]:
        body = json.dumps({"prompt": prompt, "stream": True, "return_tokens": True, **values}).encode()
        request = urllib.request.Request(f"{self.address}/v1/completions", body, {"content-type": "application/json"})
        is_whole = False
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                for line in response:
                    is_whole |= line == b"data: [DONE]\n"
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise GenerateError(event["error"]["message"], event["error"]["code"])
                        yield Chunk(token_ids=event["choices"][0]["token_ids"])
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise GenerateError(f"the gateway's connection: {error!r}", "UNAVAILABLE") from None
        if not is_whole:
            raise GenerateError("the gateway's connection ended before its stream did", "UNAVAILABLE")


@dataclass
class Stream:
    """One client's stream, in a thread."""

    client: Client | HttpClient | Gateway
    values: dict
    token_ids: list[int] = field(default_factory=list)
    error: GenerateError | None = None
    ended: float = 0.0
    has_begun: threading.Event = field(default_factory=threading.Event)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for chunk in self.client.stream("x = ", **self.values):
                self.token_ids += chunk.token_ids
                self.has_begun.set()
        except GenerateError as error:
            self.error = error
        self.ended = time.monotonic()
        self.has_begun.set()


def open_streams(server: RunningServer, gateway: Gateway | None = None, **values) -> list[Stream]:
    """Two of gRPC, two of HTTP, to decode and to the ensemble, and one through the gateway; all have begun, and none is far.

    Where they have to last for longer than it takes to send a signal, within the server's `slowed`."""
    clients: list[Client | HttpClient | Gateway] = [gateway] if gateway is not None else []
    for model in ("decode", "generate"):
        clients += [Client(server.grpc, model=model), HttpClient(server.http, model=model)]
    with server.slowed():
        streams = [Stream(client, {**LONG, **values}) for client in clients]
        for stream in streams:
            assert stream.has_begun.wait(30) and stream.error is None, stream.error
    return streams


class Witness(threading.Thread):
    """Knows when this process did not run, as where the whole machine stands still: no promise is about such time."""

    LOOK_SECONDS, LATE_SECONDS = 0.05, 0.2

    def __init__(self) -> None:
        super().__init__(name="witness", daemon=True)
        self.looked = time.monotonic()
        self._gaps: list[tuple[float, float]] = []

    def run(self) -> None:
        while True:
            time.sleep(self.LOOK_SECONDS)
            before, now = self.looked, time.monotonic()
            if now - before > self.LATE_SECONDS:
                self._gaps.append((before, now))
            self.looked = now

    def ran(self, begin: float, end: float) -> float:
        """Seconds between the two, without those."""
        while self.looked < end:
            time.sleep(self.LOOK_SECONDS)
        return end - begin - sum(max(0.0, min(end, later) - max(begin, earlier)) for earlier, later in self._gaps)


witness = Witness()
witness.start()


def assert_told(streams: list[Stream], since: float) -> None:
    """Each has its error in time, and it names the request."""
    for stream in streams:
        while not stream.ended and witness.ran(since, time.monotonic()) < PROMISE_SECONDS + SLACK_SECONDS:
            stream.thread.join(0.2)
        assert stream.ended, "a client still waits"
        assert re.match(r"(in ensemble 'generate', )?request '[0-9a-f]{32}': ", str(stream.error)), stream.error
        assert witness.ran(since, stream.ended) < PROMISE_SECONDS + SLACK_SECONDS


def assert_serves(server: RunningServer) -> None:
    wait_for(Client(server.grpc).is_ready, "a connection")  # gRPC tries again once a second
    for model in ("decode", "generate"):
        assert len(Client(server.grpc, model=model).generate("x = ", **SHORT)[0].token_ids) == 8
        assert HttpClient(server.http, model=model).generate("x = ", **SHORT)[0].finish_reason == "length"
