"""What every request passes before the routes: its id, log line and counts; its key; the size of its body."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.gateway.errors import ApiError
from client.gateway.metrics import Metrics

logger = logging.getLogger("foretoken.gateway")

BODY_SECONDS = 30.0
"""A body must arrive whole within this time."""
MAX_COMMAS = MAX_BRACKETS = 2**20
"""Of a body, and brackets that open a list or an object: its values are at most one more than both, token ids among them. They are read with nobody
else's requests going on (4 MB on one core: a million numbers 65 ms, texts 20, objects of one key 115, 380,000 keys of one object 180, a million
lists of one number 125); texts with as many would be prompts of as many tokens."""
PATHS = frozenset(
    (
        "/", "/health", "/metrics", "/version", "/tokenize", "/detokenize", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses",
        "/v1/responses/input_tokens", "/v1/suffix_corpus",
    )
)  # fmt: skip
"""By their names in metrics; all others are `other`."""
OPEN_PATHS = ("/", "/health", "/metrics", "/page/")
"""Need no key: the page is the same for all, and asks for the key itself; probes and Prometheus have none."""
PROBED_PATHS = ("/health", "/metrics")
"""Asked every few seconds for as long as a gateway runs: the log has those answers alone that were not 200."""
ADMIN_PATHS = ("/v1/suffix_corpus",)
"""Change the server for everybody: they need a key of their own, also where other requests need none."""
HUNG_UP = 499
ERROR_CODE = "error_code"
"""Where in a request's state the code of its error is, to be counted."""


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request whose body nobody has read."""
    scope["state"][ERROR_CODE] = error.code
    response = error.response()
    if Headers(scope=scope).get("expect", "").lower() == "100-continue":  # the body waits to be asked for, as large ones of curl do
        response.headers["connection"] = "close"
    else:
        await _discard(receive)
    await response(scope, receive, send)


async def _discard(receive: Receive) -> None:
    """Takes in the rest of a body, for a while: a connection closed on a client that still sends is reset, and the answer with it."""

    async def read() -> None:
        while (await receive()).get("more_body", False):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), BODY_SECONDS)


class OtherPaths:
    """Takes the paths of clients whose `base_url` is the gateway's bare address, ends with a slash, or with a route, as PaddleNLP's examples have it.
    Slashes too many are left out: many clients do not follow a redirection with what they posted."""

    _BASES = ("/v1/chat/completions", "/v1/completions", "/v1", "")
    _ROUTES = ("/chat/completions", "/completions", "/responses", "/responses/input_tokens", "/models")

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._paths = {base + route: "/v1" + route for base in self._BASES for route in self._ROUTES if base != "/v1"}
        for path in self._paths.keys() & PATHS:
            del self._paths[path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            plain = re.sub("/+", "/", f"/{scope['path'].strip('/')}")
            path = self._paths.get(plain, plain)
            if path != scope["path"] and path in PATHS:
                scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


class RequestLog:
    """Gives each request an id (the client's own, if it is a plain one), answers what nobody else did, logs and counts."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, is_whole, is_gone = time.perf_counter(), HUNG_UP, False, False
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if re.fullmatch(r"[\w.:-]{1,64}", given, re.ASCII) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def receive_and_look() -> Message:
            nonlocal is_gone
            message = await receive()
            is_gone = is_gone or (message["type"] == "http.disconnect" and status == HUNG_UP)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                if not is_gone:  # amid its body: what is said of that is told to nobody
                    status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            elif not message.get("more_body"):
                is_whole = True
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive_and_look, send_with_id)
        except Exception as error:
            logger.exception("%s failed", request_id, exc_info=error)
            if status != HUNG_UP:
                raise
            failure = ApiError(500, "the gateway failed; its log says how", "internal_error")
            scope["state"][ERROR_CODE] = failure.code
            await failure.response()(scope, receive, send_with_id)
        finally:
            self._metrics.in_flight.dec()
            shown = status if is_whole else HUNG_UP
            if shown != HUNG_UP and (code := scope["state"].get(ERROR_CODE)):
                self._metrics.errors.labels(code).inc()
            path = scope["path"]
            self._metrics.requests.labels(path if path in PATHS else "other", shown).inc()
            level = logging.DEBUG if path in PROBED_PATHS and shown == 200 else logging.INFO
            logger.log(
                level, "%s %s %s %d %.3f s", request_id, scope["method"], path.encode("unicode_escape").decode(), shown, time.perf_counter() - started
            )


class ApiKeys:
    """Asks for one of the keys of a file, if there is one, as `Authorization: Bearer KEY`; on ADMIN_PATHS for one of another file."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._app = app
        self._digests, self._admin_digests = ([_digest(key.encode()) for key in own] for own in (keys, admin_keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_admin = path.rstrip("/") in ADMIN_PATHS
        digests = self._admin_digests if is_admin else self._digests
        if is_admin and not digests and scope["type"] == "http":
            error = ApiError(403, f"{path} is for administrators: start the gateway with --admin-keys FILE", "forbidden")
            await refuse(error, scope, receive, send)
            return
        if digests and scope["type"] == "http" and path not in OPEN_PATHS and not path.startswith("/page/"):
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            given = _digest(key.encode("latin-1").strip())  # the bytes that came
            # Every key is looked at, in constant time: how long a refusal takes tells nothing.
            if sum(hmac.compare_digest(given, digest) for digest in digests) == 0 or scheme.lower() != "bearer":
                kind = "administrator's" if is_admin else "API"
                error = ApiError(401, f"a valid {kind} key is needed, as 'Authorization: Bearer KEY'", "invalid_api_key")
                await refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Refuses bodies that are compressed, too large, or of too many values, as soon as that is known, and those that do not come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            error = ApiError(415, f"the body's content-encoding is {encoding!r:.40}; bodies are read as they are", "unsupported_encoding")
            await refuse(error, scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_bytes:
            await refuse(self._too_large(f"{length} bytes"), scope, receive, send)
            return
        received, num_commas, num_brackets, is_whole, is_late = 0, 0, 0, False, False
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def expire() -> None:
            nonlocal is_late
            is_late = True
            task.cancel()

        timer: asyncio.TimerHandle | None = None

        async def receive_within_limits() -> Message:
            nonlocal received, num_commas, num_brackets, is_whole, timer
            if is_whole:
                return await receive()
            try:
                # Not wait_for: its task would let all that other requests have to do go before a body that is there already.
                timer = timer or loop.call_later(BODY_SECONDS, expire)
                message = await receive()
            except asyncio.CancelledError:
                if not is_late:
                    raise
                raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s", "timeout") from None
            body = message.get("body", b"")
            received, num_commas = received + len(body), num_commas + body.count(b",")
            num_brackets += body.count(b"[") + body.count(b"{")
            is_whole = not message.get("more_body", False)
            error = None
            if received > self._max_bytes:
                error = self._too_large(f"more than {self._max_bytes} bytes")
            elif num_commas > MAX_COMMAS:
                error = ApiError(413, f"the body has more than {MAX_COMMAS} commas, the limit of values (token ids, say) in one", "request_too_large")
            elif num_brackets > MAX_BRACKETS:
                said = f"more than {MAX_BRACKETS} opening brackets, the limit of lists and objects in one"
                error = ApiError(413, f"the body has {said}", "request_too_large")
            if is_whole or error is not None:
                timer.cancel()
            if error is not None:
                if not is_whole:
                    await _discard(receive)
                raise error
            return message

        try:
            await self._app(scope, receive_within_limits, send)
        finally:
            if timer is not None:
                timer.cancel()

    def _too_large(self, seen: str) -> ApiError:
        return ApiError(413, f"the body has {seen}; the limit is {self._max_bytes}", "request_too_large")
