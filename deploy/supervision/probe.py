"""Asks a model a real question: the way to the server, what to ask, and the wait for the answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENGINES = ("decode", "prefill")
"""Models that have an engine, of which a repository has one: one of a prefill node answers clients as well."""
KEY_HEADER = "foretoken-key"
LOOK_SECONDS = 0.1
CONNECT_SECONDS = 1.0
MAX_LOOK_SECONDS = 1.5
"""Between two looks at a probe, its waits and a look at the metrics included. What is beyond that, this process did not run: nor did the server,
where the machine stood still (a virtual one that is moved, a container that is paused), so that its silence says nothing."""
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0)]
"""The server is on this machine, whatever its address: gRPC would take the way that http_proxy names even so."""


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
    if model in ENGINES:  # answered by the engine's thread, between two steps; counted in none of its metrics
        return "generate", {"cancel": uuid.uuid4().hex}, '"finish_reason"'
    if model == "tokenizer":
        return "generate", {"text_input": "a"}, '"input_ids"'
    return "infer", _DRAFTER_CALL, "ValueError: pages"  # refused when it is read, so that the decode model's session goes on


def progress_pattern(model: str) -> str:
    """The lines of the server's metrics that grow while a model works, though it may be too busy to come to a probe.

    An engine: its steps, or what is sent of those that are over, or requests refused before they come to one.
    """
    if model in ENGINES:
        return r"^foretoken_(?:steps|responses|request_errors)_total\{.*?\} (\S+)$"
    return rf'^nv_inference_exec_count\{{model="{model}".*?\}} (\S+)$'


@dataclass(frozen=True)
class ServerApi:
    """The way to the server."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    key: str
    metrics_host: str | None = None
    """Of the metrics port; None: as the others'."""
    has_grpc_tls: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    """That clients send, where the server's interfaces are restricted."""

    @property
    def secrets(self) -> tuple[str, ...]:
        return self.key, *self.headers.values()

    def ask(self, port: int, path: str, body: object = None, *, is_restricted: bool = False) -> http.client.HTTPConnection:
        """Sends a request; its answer can be read from the connection. is_restricted: it wants the key. Raises OSError."""
        host = self.metrics_host or self.host if port == self.metrics_port else self.host
        connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        own = {} if port == self.metrics_port else self.headers
        headers = {"Content-Type": "application/json", **own, **({KEY_HEADER: self.key} if is_restricted else {})}
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        return connection

    def load(self, model: str) -> str:
        """Loads a model, in the place of one that is loaded. Returns why it failed, or "".

        Over gRPC: the HTTP thread that loads a model says nothing to its other clients meanwhile. Where gRPC speaks TLS, which may want a certificate
        of its clients that nobody gave this one, over HTTP all the same.
        """
        if self.has_grpc_tls:
            return self._load_over_http(model)
        import tritonclient.grpc as triton_grpc
        from tritonclient.utils import InferenceServerException

        host = f"[{self.host}]" if ":" in self.host else self.host
        try:
            with triton_grpc.InferenceServerClient(f"{host}:{self.grpc_port}", channel_args=CHANNEL_OPTIONS) as client:
                client.load_model(model, headers={f"triton-grpc-protocol-{KEY_HEADER}": self.key})
        except InferenceServerException as error:
            return str(error)
        return ""

    def _load_over_http(self, model: str) -> str:
        try:
            with contextlib.closing(self.ask(self.http_port, f"/v2/repository/models/{model}/load", {}, is_restricted=True)) as connection:
                connection.sock.settimeout(None)
                response = connection.getresponse()
                text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            return str(error)
        return "" if response.status == 200 else text

    def read_progress(self, model: str) -> list[str]:
        """What those lines say; nothing while they cannot be read."""
        try:
            with contextlib.closing(self.ask(self.metrics_port, "/metrics")) as connection:
                page = connection.getresponse().read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            return []
        return re.findall(progress_pattern(model), page, re.MULTILINE)


class Probe:
    """One question to a model, and the wait for its answer."""

    def __init__(self, api: ServerApi, model: str) -> None:
        self._api = api
        self._model = model
        self._connection: http.client.HTTPConnection | None = None
        self._sign = ""
        self.since = self._sampled = self._looked = time.monotonic()
        self._progress: list[str] = []

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
        """False when there has been neither an answer nor any progress for so long, as far as this process ran to see it."""
        now = time.monotonic()
        self.since += max(now - self._looked - MAX_LOOK_SECONDS, 0.0)
        self._looked = now
        if now - self._sampled > seconds / 4:
            progress = self._api.read_progress(self._model)
            if progress and self._progress and progress != self._progress:
                self.since = now
            self._progress, self._sampled = progress, now
        return now - self.since < seconds

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
