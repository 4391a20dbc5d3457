"""The gateway's routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from client.gateway.aliases import alias
from client.gateway.answers import Answer
from client.gateway.bodies import JsonRoute
from client.gateway.entrance import ERROR_CODE, PATHS, ApiKeys, BodyLimit, OtherPaths, RequestLog
from client.gateway.errors import ApiError, from_server, from_unreadable, from_validation, hide_places
from client.gateway.fleet import Fleet, is_fleet, split_addresses
from client.gateway.forms import show
from client.gateway.metrics import CONTENT_TYPE, Metrics
from client.gateway.openai import ChatRequest, CompletionRequest, DetokenizeRequest, SuffixCorpusRequest, TokenizeRequest
from client.gateway.response_answer import ResponsesAnswer
from client.gateway.responses import ResponsesRequest
from client.gateway.upstream import Servers, Upstream
from client.headers import Headers
from client.loopback import open_url
from client.messages import DEFAULT_GRPC_URL, GenerateError
from client.tls import DEFAULT_TLS, Tls

PAGE = Path(__file__).parent / "page"
ANY_MODEL = "default"
"""What PaddleNLP's and FastDeploy's examples call the model."""
DESCRIBE_SECONDS = 2.0
DESCRIBED: tuple[str, ...] = ("max_model_len", "method", "methods", "num_speculative_tokens")
DESCRIBED += ("has_chat_template", "template_variables", "is_bundled", "sampling_defaults")
"""Of a model, in the list of models."""
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a browser asks whether it has the newest: parts of two versions do not work together
}


@dataclass(frozen=True)
class Settings:
    """A gateway's configuration."""

    url: str = DEFAULT_GRPC_URL
    """The server's gRPC address; of several servers, theirs with commas between, or a name that stands for them."""
    model: str = "decode"
    """The server's model that generates: one that sees cancellation, so no ensemble."""
    served_model_name: str | tuple[str, ...] = "foretoken"
    """What clients call it; of several names the first is shown."""
    api_keys: tuple[str, ...] = ()
    """Empty: anyone may call."""
    admin_keys: tuple[str, ...] = ()
    """For what changes the server for everybody; empty: nobody may."""
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    metrics_urls: tuple[str, ...] = ()
    """Of the server's own metrics, which /metrics then has too."""
    has_vllm_metrics: bool = False
    """/metrics has those of the server once more, by vLLM's names."""
    tls: Tls = DEFAULT_TLS
    """Certificates for grpcs:// addresses and https:// URLs of metrics."""
    headers: Headers = field(default_factory=dict, repr=False)
    """For the servers; metrics have none."""

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.served_model_name,) if isinstance(self.served_model_name, str) else self.served_model_name


class PageFiles(StaticFiles):
    """The page's scripts and styles."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(PAGE_HEADERS)
        return response


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application. It starts, and says so on /health, whether or not the server is there."""
    metrics = Metrics()
    upstream: Servers
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal upstream
        if is_fleet(settings.url):
            upstream = Fleet(split_addresses(settings.url), settings.model, metrics, settings.tls, settings.headers)
        else:
            upstream = Upstream(settings.url, settings.model, settings.tls.at(settings.url), settings.headers)
        await upstream.start()
        yield
        await upstream.close()

    app = FastAPI(title="Foretoken", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.route_class = JsonRoute
    # The last one added is the first to be passed.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(ApiKeys, keys=settings.api_keys, admin_keys=settings.admin_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestLog, metrics=metrics)
    app.add_middleware(OtherPaths)
    _add_error_handlers(app)

    def check_model(name: str | None) -> str:
        names = settings.model_names
        if name not in (None, "", ANY_MODEL, *names):
            known = ", ".join(map(repr, names))
            raise ApiError(404, f"the model {name!r:.100} does not exist; there is {known}", "model_not_found", "model")
        return name if name in names else names[0]

    def answer(request: Request, body: CompletionRequest | ChatRequest) -> Answer:
        return Answer(upstream, metrics, check_model(body.model), request.state.request_id, body)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionRequest) -> Response:
        return answer(request, body)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        return answer(request, body)

    @app.post("/v1/responses")
    async def respond(request: Request, body: ResponsesRequest) -> Response:
        return ResponsesAnswer(upstream, metrics, check_model(body.model), request.state.request_id, body)

    @app.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        check_model(body.model)
        try:
            tokens = await upstream.tokenize(body.as_chat().prompt_value())
        except GenerateError as error:
            raise from_server(error, body.server_names()) from None
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        more = await describe()
        return {"object": "list", "data": [describe_model(name, more) for name in settings.model_names]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        return describe_model(check_model(name), await describe())

    async def describe() -> dict[str, Any]:
        """What the server says that clients may want to know; nothing while there is none: the list of models stays."""
        try:
            found = await upstream.describe(DESCRIBE_SECONDS)
        except GenerateError:
            return {}
        return {key: found[key] for key in DESCRIBED if key in found}

    def describe_model(name: str, more: dict[str, Any]) -> dict[str, Any]:
        # root: where vLLM's benchmark looks for the tokenizer, unless it is told.
        return {"id": name, "object": "model", "created": created, "owned_by": "foretoken", "root": settings.model_names[0], "parent": None, **more}

    @app.get("/version")
    async def show_version() -> dict[str, Any]:
        return {"version": (await upstream.describe(DESCRIBE_SECONDS))["version"]}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        check_model(body.model)
        try:
            tokens = await upstream.tokenize(body.prompt_value())
        except GenerateError as error:
            raise from_server(error, body.server_names()) from None
        answer = {"tokens": tokens, "count": len(tokens), **{k: v for k, v in (await describe()).items() if k == "max_model_len"}}
        if body.return_token_strs:
            answer["token_strs"] = [show(token) for token in await upstream.token_bytes(tokens)]
        return answer

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        check_model(body.model)
        try:
            return {"prompt": await upstream.detokenize(body.tokens) if body.tokens else ""}
        except GenerateError as error:
            raise from_server(error, {"input_ids": "tokens"}) from None

    @app.post("/v1/suffix_corpus")
    async def add_suffix_corpus(request: Request, body: SuffixCorpusRequest) -> dict[str, int]:
        return await upstream.add_suffix_corpus(request.state.request_id, body.corpus)

    @app.get("/health")
    async def health() -> Response:
        try:
            await upstream.check()
        except GenerateError as error:
            return JSONResponse({"status": "unavailable", "error": hide_places(str(error))}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        others = await asyncio.gather(*(asyncio.to_thread(read_metrics, url, settings.tls) for url in settings.metrics_urls))
        if settings.has_vllm_metrics:
            others.append(alias(b"".join(others).decode("utf-8", "replace"), settings.model_names).encode())
        return Response(b"".join([metrics.render(), *others]), media_type=CONTENT_TYPE)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.openapi()  # kept: made later, HEAD beside GET would be two operations of one name, which generators of clients refuse
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")  # by which load generators look whether there are metrics
    app.mount("/page", PageFiles(directory=PAGE))
    return app


def read_metrics(url: str, tls: Tls) -> bytes:
    """The server's own metrics, as they are; none while it does not answer, or cannot be asked for want of a file that was there."""
    try:
        with open_url(url, DESCRIBE_SECONDS, tls.context_of(url)) as response:
            return response.read()
    except (OSError, ValueError):
        return b""


def _add_error_handlers(app: FastAPI) -> None:
    def respond(request: Request, error: ApiError) -> Response:
        setattr(request.state, ERROR_CODE, error.code)
        return error.response()

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return respond(request, error)

    @app.exception_handler(GenerateError)
    async def on_server_error(request: Request, error: GenerateError) -> Response:
        return respond(request, from_server(error))

    @app.exception_handler(RequestValidationError)
    async def on_bad_body(request: Request, error: RequestValidationError) -> Response:
        return respond(request, from_validation(error))

    @app.exception_handler(RecursionError)
    async def on_depth(request: Request, error: RecursionError) -> Response:
        """Of a body that could just be read, and cannot be written or looked through."""
        return respond(request, from_unreadable(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400 and error.__cause__ is not None:
            return respond(request, from_unreadable(error.__cause__))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
        there = f"; there is {', '.join(sorted(PATHS - {'/'}))}" if error.status_code == 404 else ""
        if request.url.path.startswith("/v1/responses/") and request.url.path not in PATHS:
            there = "; no answer is stored, so none can be asked for, cancelled or deleted by its id"
        response = respond(request, ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}{there}", code))
        response.headers.update(error.headers or {})  # of a 405, what is allowed
        return response
