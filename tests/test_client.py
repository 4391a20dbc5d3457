"""What the clients do before and beside the server: proxies, and text that is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from client import AsyncClient, Client, GenerateError, Tls, silence, sync
from client.http import HttpClient
from client.loopback import is_loopback, without_proxy
from client.messages import CHANNEL_OPTIONS, CUT_SECONDS, INACTIVITY_SECONDS, count_bytes, make_inputs, prompt_values, read_error
from client.silence import SignsOfLife, Watch, listening_time
from tests.certificates import make_certificates

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy in the environment that answers nothing, and no exception from it."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in PROXIES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield


class _Ready(service_pb2_grpc.GRPCInferenceServiceServicer):
    def ServerReady(self, request, context):
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=True)


@contextlib.contextmanager
def serving(servicer: service_pb2_grpc.GRPCInferenceServiceServicer) -> Iterator[int]:
    """Its port."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0).wait()


@pytest.fixture
def ready_port() -> Iterator[int]:
    with serving(_Ready()) as port:
        yield port


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8001", True), ("localhost:8001", True), ("LOCALHOST", True), ("[::1]:8001", True), ("127.9.9.9:1", True),
        ("http://127.0.0.1:8080/v1", True), ("http://[::1]/x", True), ("http://localhost/127.0.0.1", True),
        ("10.0.0.1:8001", False), ("example.com:8001", False), ("http://example.com/127.0.0.1", False), ("localhost.example.com:1", False),
        ("grpcs://127.0.0.1:8001", True), ("grpcs://10.0.0.1:8001", False), ("[::2]:8001", False), ("", False), ("127.0.0.1.example.com:1", False),
    ],
)  # fmt: skip
def test_what_is_this_machine(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected
    assert (("grpc.enable_http_proxy", 0) in without_proxy(CHANNEL_OPTIONS, url)) is expected


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_for_loopback(no_proxy: None, ready_port: int, host: str) -> None:
    """In a process of its own: gRPC reads the environment when it starts."""
    code = f"from client import Client\nprint(Client('{host}:{ready_port}', inactivity_timeout=10).is_ready())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "True\n", result.stderr


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)


def test_a_server_that_is_long_in_answering_is_reached(ready_port: int) -> None:
    """On another continent, or busy: gRPC gave attempts to connect no longer than the least pause between them."""
    with (
        socket.create_server(("127.0.0.1", 0)) as slow,
        futures.ThreadPoolExecutor(3) as pool,
        Client(f"127.0.0.1:{slow.getsockname()[1]}") as client,
    ):
        answer = pool.submit(client.is_ready)
        near, _ = slow.accept()
        time.sleep(1.5)
        with near, socket.create_connection(("127.0.0.1", ready_port)) as far:
            pool.submit(_copy, near, far)
            pool.submit(_copy, far, near)
            assert answer.result(30)
            client.close()
            near.shutdown(socket.SHUT_RDWR)
            far.shutdown(socket.SHUT_RDWR)


def test_a_connection_through_which_nothing_goes_ends(ready_port: int) -> None:
    """Of a network that is cut. TCP by itself tried again less and less often: after a minute's cut nobody had an answer for another one."""
    with Client(f"127.0.0.1:{ready_port}") as client:
        assert client.is_ready()
        (own,) = [found for found in psutil.Process().net_connections("tcp") if found.raddr and found.raddr.port == ready_port]
        with socket.socket(fileno=os.dup(own.fd)) as connection:
            limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit == 1000 * CUT_SECONDS and INACTIVITY_SECONDS < CUT_SECONDS <= 5, "in milliseconds; streams that wait are told before"


def test_a_client_that_stood_still_blames_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came meanwhile is not read yet when it goes on: a machine that slept, or that lets a process wait for seconds."""
    now, waits = 100.0, [60.0, 1.0, 60.0, 0.1]

    class Received:
        def get(self, timeout: float) -> None:
            nonlocal now
            now += timeout + waits.pop(0)
            if waits:
                raise queue.Empty

    monkeypatch.setattr(sync, "time", SimpleNamespace(monotonic=lambda: now))
    assert sync.get_in_time(Received(), 4.0, lambda silence: 4.0 - silence) is None  # type: ignore[arg-type]
    waits = [60.0, 0.1, 0.1]
    with pytest.raises(queue.Empty):
        sync.get_in_time(Received(), 4.0, lambda silence: 4.0 - silence)  # type: ignore[arg-type]
    assert waits == [0.1]
    waits = [0.1, 0.1, 0.1]  # the server sends to others: 3 s are left, then none
    more = iter((3.0, 0.0))
    with pytest.raises(queue.Empty):
        sync.get_in_time(Received(), 4.0, lambda silence: next(more))  # type: ignore[arg-type]
    assert waits == [0.1]


def test_how_long_silence_lasts() -> None:
    """Limit 4 s: after the server's last word to anybody, and 60 s after that to this stream at the latest; another model's words are not its own."""
    now = 100.0
    signs = SignsOfLife(lambda: now)
    assert signs.seconds_left("decode", 0.0, 4.0) == 4.0 and signs.seconds_left("decode", 4.5, 4.0) == -0.5
    signs.note("tokenizer")
    assert signs.seconds_left("decode", 4.0, 4.0) == 0.0
    signs.note("decode")
    now = 103.0
    assert signs.seconds_left("decode", 30.0, 4.0) == 1.0
    assert signs.seconds_left("decode", 1.0, 4.0) == 3.0
    assert signs.seconds_left("decode", 59.5, 4.0) == 0.5
    assert signs.seconds_left("decode", 61.0, 4.0) == -1.0
    assert signs.seconds_left("decode", 100.0, 600.0) == 500.0


def test_a_loop_that_is_busy_does_not_hear() -> None:
    """2,300 requests at once kept a gateway busy in turns of up to 3 s, and all of them had an error. When it is not, the limit is the limit."""

    async def check() -> None:
        fired = asyncio.Event()
        watch = Watch(1.0, fired.set)
        watch.resume()
        for _ in range(6):
            time.sleep(0.3)
            await asyncio.sleep(0)
        began = listening_time()
        assert not fired.is_set()
        await asyncio.wait_for(fired.wait(), 30)
        assert listening_time() - began < 1.0 <= watch.silence
        watch.stop()
        watch.stop()
        stopped = listening_time()
        await asyncio.sleep(0.4)
        assert listening_time() - stopped < 0.2  # nothing ticks while nobody looks
        other = Watch(0.1, fired.set)
        assert listening_time() >= stopped
        other.stop()

    asyncio.run(check())


class _OneAfterTheOther(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Sends to the request `busy` every tenth of a second, for 2.5 s; answers `late` when that is over, and `lost` never."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def ModelStreamInfer(self, request_iterator, context):
        request = next(iter(request_iterator))
        if request.id == "busy":
            for _ in range(25):
                yield service_pb2.ModelStreamInferResponse(infer_response=service_pb2.ModelInferResponse(id=request.id))
                time.sleep(0.1)
            self.is_over.set()
        elif request.id != "late" or not self.is_over.wait(30):
            threading.Event().wait(3)
        yield _whole(request.id)


def _whole(request_id: str) -> service_pb2.ModelStreamInferResponse:
    response = service_pb2.ModelInferResponse(id=request_id)
    response.parameters["triton_final_response"].bool_param = True
    response.outputs.add(name="finish_reason", datatype="BYTES", shape=[1])
    response.raw_output_contents.append(b"\4\0\0\0stop")
    return service_pb2.ModelStreamInferResponse(infer_response=response)


@pytest.fixture
def turns() -> Iterator[str]:
    with serving(_OneAfterTheOther()) as port:
        yield f"127.0.0.1:{port}"


def test_a_server_that_sends_to_others_is_not_silent(turns: str) -> None:
    """1,000 requests at once: the server gives its signs of life one after the other, and some had theirs after more than the limit."""
    with Client(turns, inactivity_timeout=1.0) as client, futures.ThreadPoolExecutor(2) as pool:
        busy, late = (pool.submit(client.generate, "x", request_id=name) for name in ("busy", "late"))
        assert busy.result(30)[0].finish_reason == late.result(30)[0].finish_reason == "stop"
        with pytest.raises(GenerateError, match="'lost': the server sent nothing for 1 s, the limit"):
            client.generate("x", request_id="lost")


def test_a_server_that_sends_to_others_is_not_silent_to_an_asynchronous_client(turns: str) -> None:
    async def ask() -> None:
        async with AsyncClient(turns, inactivity_timeout=1.0) as client:
            answers = await asyncio.gather(*(client.generate("x", request_id=name) for name in ("busy", "late")))
            assert [a[0].finish_reason for a in answers] == ["stop", "stop"]
            with pytest.raises(GenerateError, match="'lost': the server sent nothing for 1 s, the limit"):
                await client.generate("x", request_id="lost")

    asyncio.run(ask())


class _SilentAtFirst(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers the request `far` after 2.5 s; to `begun` it has said at once that it lives."""

    def ModelStreamInfer(self, request_iterator, context):
        request = next(iter(request_iterator))
        if request.id == "begun":
            yield service_pb2.ModelStreamInferResponse(infer_response=service_pb2.ModelInferResponse(id=request.id))
        threading.Event().wait(2.5)
        yield _whole(request.id)


class _SilentAtFirstByHttp(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        is_begun = json.loads(self.rfile.read(int(self.headers["content-length"])))["id"] == "begun"
        for text in [b'data: {"text_output": ""}\n\n'] * is_begun + [b'data: {"finish_reason": "stop"}\n\n']:
            if b"stop" in text:
                time.sleep(2.5)
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" * (not is_begun or b"stop" not in text) + text)
                self.wfile.flush()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 10 bytes a second, to all servers."""
    monkeypatch.setattr(silence, "is_loopback", lambda address: False)
    monkeypatch.setattr(silence, "LEAST_RATE", 10)


ON_ITS_WAY = "x" * 300
TOO_LONG = r"'begun': the server sent nothing for 1 s, the limit \(inactivity_timeout\)$"


def test_a_request_on_its_way_is_not_the_servers_silence(slow_way: None) -> None:
    """A prompt of 80 kB over 10 kB/s takes 8 s: for 4 the server had said nothing. Once it has, the limit is the same for all."""
    with serving(_SilentAtFirst()) as port, Client(f"127.0.0.1:{port}", inactivity_timeout=1.0) as client:
        assert client.generate(ON_ITS_WAY, request_id="far")[0].finish_reason == "stop"
        with pytest.raises(GenerateError, match=TOO_LONG):
            client.generate(ON_ITS_WAY, request_id="begun")
        with pytest.raises(GenerateError, match=r"'far': the server sent nothing for 1 s, .* and 0\.5 s for the request to get there"):
            client.generate("x" * 5, request_id="far")


def test_a_request_of_an_asynchronous_client_on_its_way(slow_way: None) -> None:
    async def ask(port: int) -> None:
        async with AsyncClient(f"127.0.0.1:{port}", inactivity_timeout=1.0) as client:
            assert (await client.generate(ON_ITS_WAY, request_id="far"))[0].finish_reason == "stop"
            with pytest.raises(GenerateError, match=TOO_LONG):
                await client.generate(ON_ITS_WAY, request_id="begun")

    with serving(_SilentAtFirst()) as port:
        asyncio.run(ask(port))


def test_a_request_by_http_on_its_way(slow_way: None) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _SilentAtFirstByHttp)
    threading.Thread(target=server.serve_forever).start()
    client = HttpClient(f"127.0.0.1:{server.server_port}", inactivity_timeout=1.0)
    try:
        assert client.generate(ON_ITS_WAY, request_id="far")[0].finish_reason == "stop"
        with pytest.raises(GenerateError, match=TOO_LONG):
            client.generate(ON_ITS_WAY, request_id="begun")
    finally:
        server.shutdown()
        server.server_close()


def test_how_long_a_request_is_on_its_way() -> None:
    assert silence.sending_seconds(80_000, "10.0.0.1:8001") == silence.sending_seconds(80_000, "grpcs://models.example:443") == 8.0
    assert silence.sending_seconds(80_000, "127.0.0.1:8001") == 0.0
    assert count_bytes({"text_input": "é" * 50, "input_ids": [1, 2, 3], "max_tokens": 4, "speculative": b"{}"}) == 114


class _Holds(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers the request `quick`, and no other before its client is gone."""

    def __init__(self) -> None:
        self.held = threading.Semaphore(0)

    def _hold(self, context: grpc.ServicerContext) -> None:
        is_gone = threading.Event()
        if context.add_callback(is_gone.set):
            self.held.release()
            is_gone.wait(30)

    def ModelStreamInfer(self, request_iterator, context):
        request = next(iter(request_iterator))
        if request.id != "quick":
            self._hold(context)
        yield _whole(request.id)

    def ModelInfer(self, request, context):
        self._hold(context)
        return service_pb2.ModelInferResponse()


def test_what_waits_when_a_client_is_closed_is_told() -> None:
    """Not by a CancelledError of what nobody cancelled: that ends a task in silence, and a gateway's request with no answer."""
    holds = _Holds()

    async def check(client: AsyncClient) -> None:
        waiting = [asyncio.create_task(client.generate("x")), asyncio.create_task(client.infer("tokenizer", text_input="x"))]
        cancelled = asyncio.create_task(client.generate("x"))
        for _ in range(3):
            assert await asyncio.to_thread(holds.held.acquire, timeout=30)
        cancelled.cancel()
        await client.close()
        for found in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(found, GenerateError) and "the client was closed before the answer was whole" in str(found), found
        if sys.version_info >= (3, 11):  # before, Python does not tell who was cancelled
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        for late in (client.generate("x"), client.infer("tokenizer", text_input="x"), client.describe()):
            with pytest.raises(GenerateError, match="the client is closed"):
                await late

    with serving(holds) as port:
        asyncio.run(check(AsyncClient(f"127.0.0.1:{port}")))


def test_an_asynchronous_client_is_of_the_first_loop_that_asks() -> None:
    """Also one that was made before there was a loop."""
    with serving(_Holds()) as port:
        client = AsyncClient(f"127.0.0.1:{port}")

        async def ask() -> str | None:
            return (await client.generate("x", request_id="quick"))[0].finish_reason

        assert asyncio.run(ask()) == "stop"
        with pytest.raises(RuntimeError, match="in another loop, make another client"):
            asyncio.run(ask())
        asyncio.run(client.close())


def test_a_connection_in_use_is_closed_behind_its_client() -> None:
    with serving(_Holds()) as port:
        client = Client(f"127.0.0.1:{port}")
        chunks = client.stream("x", request_id="quick")
        next(chunks)
        client.close()
        assert list(chunks) == [] and not client._idle


class _OneAfterTheOtherByHttp(BaseHTTPRequestHandler):
    is_over = threading.Event()

    def do_POST(self) -> None:
        name = json.loads(self.rfile.read(int(self.headers["content-length"])))["id"]
        self.send_response(200)
        self.end_headers()
        if name == "busy":
            for _ in range(25):
                self._send({"text_output": ""})
                time.sleep(0.1)
            self.is_over.set()
        elif name != "late" or not self.is_over.wait(30):
            time.sleep(3)
        with contextlib.suppress(OSError):
            self._send({"finish_reason": "stop"})

    def _send(self, event: dict[str, str]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("scheme", ["", "https://"])
def test_a_server_that_sends_to_others_is_not_silent_by_http(tmp_path: Path, scheme: str) -> None:
    server, tls = ThreadingHTTPServer(("127.0.0.1", 0), _OneAfterTheOtherByHttp), Tls()
    if scheme:
        made, context = make_certificates(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.server, made.server_key)
        server.socket, tls = context.wrap_socket(server.socket, server_side=True), Tls(made.ca)
    threading.Thread(target=server.serve_forever).start()
    client = HttpClient(f"{scheme}127.0.0.1:{server.server_port}", inactivity_timeout=1.0, tls=tls)
    try:
        with futures.ThreadPoolExecutor(2) as pool:
            busy, late = (pool.submit(client.generate, "x", request_id=name) for name in ("busy", "late"))
            assert busy.result(30)[0].finish_reason == late.result(30)[0].finish_reason == "stop"
        with pytest.raises(GenerateError, match="'lost': the server sent nothing for 1 s, the limit"):
            client.generate("x", request_id="lost")
    finally:
        server.shutdown()
        server.server_close()


def test_no_proxy_for_the_servers_metrics(no_proxy: None) -> None:
    from client.bench.speculation import read_counters

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'# TYPE foretoken_spec_decode_num_drafts counter\nforetoken_spec_decode_num_drafts_total{method="mtp"} 3\n')

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert read_counters(f"http://127.0.0.1:{server.server_port}/metrics") == {("drafts", "mtp", -1): 3.0}
    finally:
        server.shutdown()
        server.server_close()


HALF = "x\ud800"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"text_input": HALF}, "text_input"),
        ({"messages": [{"role": "user", "content": HALF}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", HALF: 1}]}, "messages"),
        ({"stop": ["a", HALF]}, "stop"),
        ({"speculative": {HALF: 1}}, "speculative"),
    ],
)
def test_half_a_surrogate_pair_is_the_callers_fault(values: dict, name: str) -> None:
    """Inside JSON too, in which it could be written: the server would take it for text, and its tokenizer not."""
    with pytest.raises(GenerateError, match=rf"{name} is not valid Unicode: '\\ud800' at ") as caught:
        make_inputs(prompt_values(None, values))
    assert caught.value.code == "INVALID_ARG"
    with pytest.raises(GenerateError, match=r"the request is not valid Unicode: '\\ud800' at ") as caught:
        HttpClient("127.0.0.1:1").generate(**values)
    assert caught.value.code == "INVALID_ARG"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_tokens", 2**32 + 5, "an integer from -2147483648 to 2147483647"),
        ("seed", 2**70, "an integer from -9223372036854775808 to 9223372036854775807"),
        ("stop_token_ids", [1, 2**31], "an integer from"),
        ("top_k", 2.5, "an integer from"),
        ("temperature", "0.5", "a number"),
        ("frequency_penalty", -1e39, "a number that float32 holds, up to 3.403e+38, got -1e+39"),
        ("ignore_eos", "false", "true or false"),
        ("input_ids", [[1], [2, 3]], "an integer from"),
        ("input_ids", [1, 2**32 + 5], "an integer from"),
        ("input_ids", [1.5], "an integer from"),
    ],
)
def test_numbers_that_a_tensor_would_hold_as_others(name: str, value: object, rule: str) -> None:
    for client in (Client("127.0.0.1:1"), HttpClient("127.0.0.1:1")):
        with pytest.raises(GenerateError, match=re.escape(f"{name} must be {rule}")) as caught:
            client.generate(value) if name == "input_ids" else client.generate("x", **{name: value})
        assert caught.value.code == "INVALID_ARG"
    kept = prompt_values(None, {"input_ids": np.array([1, 2]), "stop_token_ids": [], "seed": -(2**63), "top_p": 1, "stream": False})
    assert [i.shape() for i in make_inputs(kept)] == [[2], [0], [1], [1], [1]]


def test_a_request_id_that_is_no_text() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(GenerateError, match="request_id is not valid Unicode") as caught:
        client.generate("x", request_id=HALF)
    assert caught.value.code == "INVALID_ARG"

    async def ask() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            await client.generate("x", request_id=HALF)

    with pytest.raises(GenerateError, match="request_id is not valid Unicode"):
        asyncio.run(ask())


def test_messages_keep_their_characters() -> None:
    assert prompt_values(None, {"messages": [{"role": "user", "content": "é🙂"}]})["messages"] == '[{"role": "user", "content": "é🙂"}]'


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [
        ("Stream removed (recvmsg:Connection reset by peer (104))", "StatusCode.UNKNOWN", "UNAVAILABLE"),
        ("Stub process 'tokenizer_0_0' is not healthy.", "StatusCode.INTERNAL", "UNAVAILABLE"),
        ("Request for unknown model: 'decode' has no available versions", "StatusCode.UNKNOWN", "UNAVAILABLE"),
        ("failed to connect to all addresses", "StatusCode.UNAVAILABLE", "UNAVAILABLE"),
        ("something else", "StatusCode.UNKNOWN", "INTERNAL"),
    ],
)
def test_a_lost_server_is_unavailable(message: str, status: str, code: str) -> None:
    error = read_error("mine", InferenceServerException(message, status))
    assert (str(error), error.code) == (f"request 'mine': {message}", code)


@pytest.mark.parametrize("status", [None, "StatusCode.INVALID_ARGUMENT"])
def test_what_an_older_server_does_not_know_is_the_requests_fault(status: str | None) -> None:
    """Triton says so itself; to gateways it was an error of the server's."""
    message = "unexpected inference input 'skip_special_tokens' for model 'decode'"
    error = read_error("mine", InferenceServerException(message, status))
    assert (str(error), error.code) == (f"request 'mine': {message}, which the server's version does not have", "INVALID_ARG")


@pytest.mark.parametrize("corpus", ["def main():", {"text": "def main():"}], ids=["text", "object"])
def test_a_corpus_is_a_list(corpus: object) -> None:
    """Of one text alone the list would be one of its letters, which nobody wants drafted."""

    async def add() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            await client.add_suffix_corpus(corpus)  # type: ignore[arg-type]

    with pytest.raises(GenerateError, match=r"suffix_corpus must be a list of texts or of lists of token ids, got "):
        asyncio.run(add())
