"""Clients of Triton's HTTP interface and of the gateway, over plain connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

from client.messages import Chunk, collect, read_event
from tests.soak import nonsense
from tests.soak.book import ANSWER_SECONDS, Exchange, Hung, Lost, WrongAnswer
from tests.soak.questions import Outcome, Question
from tests.soak.wire import JSON_INPUTS

JSON_HEADERS = {"Content-Type": "application/json"}
LONG = {"max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}
SLOW_SECONDS = 10.0
IDLE_SECONDS = 10.0


@contextlib.contextmanager
def closing_in_time(exchange: Exchange) -> Iterator[None]:
    """Turns what can happen to a connection into Lost and Hung."""
    try:
        yield
    except TimeoutError as error:
        raise Hung(f"nothing for {ANSWER_SECONDS:g} s: {error!r}") from None
    except (OSError, http.client.HTTPException) as error:
        raise Lost(repr(error)) from None
    if time.monotonic() > exchange.deadline:
        raise Hung("it was not answered whole in time")


def read_events(response: http.client.HTTPResponse, exchange: Exchange) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if time.monotonic() > exchange.deadline:
            raise Hung("the stream was not over in time")
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            yield json.loads(line[5:])


class HttpClients:
    """One worker's. `kinds` has what they do, with how often."""

    def __init__(self, http: str, gateway: str, questions: list[Question]) -> None:
        self._http, self._gateway = http, gateway
        self._questions = questions
        self.kinds = {
            "http": (self.triton, 3), "http nonsense": (self.triton_nonsense, 4), "gateway": (self.gateway, 4), "gateway chat": (self.chat, 2),
            "gateway nonsense": (self.gateway_nonsense, 4), "gateway tokens": (self.tokens, 1), "http hang-up": (self.hang_up, 2),
            "http slow reader": (self.slow_reader, 0.3), "idle connection": (self.idle, 0.2),
        }  # fmt: skip

    @contextlib.contextmanager
    def _post(self, address: str, path: str, body: bytes, exchange: Exchange) -> Iterator[http.client.HTTPResponse]:
        with closing_in_time(exchange), contextlib.closing(http.client.HTTPConnection(address, timeout=ANSWER_SECONDS)) as connection:
            connection.request("POST", path, body, JSON_HEADERS)
            yield connection.getresponse()

    def triton(self, rng: random.Random, exchange: Exchange) -> None:
        """generate_stream, or generate with the whole answer."""
        question = rng.choice(self._questions)
        values = question.values(rng)
        verb = rng.choice(("generate_stream", "generate_stream", "generate"))
        values |= {"stream": verb == "generate_stream"}
        body = {k: json.dumps(v) if k in JSON_INPUTS else v for k, v in values.items()}
        exchange.note((verb, body))
        chunks: list[Chunk] = []
        with self._post(self._http, f"/v2/models/decode/{verb}", json.dumps(body).encode(), exchange) as response:
            events = read_events(response, exchange) if verb == "generate_stream" else [json.loads(response.read() or b"{}")]
            for event in events:
                if "error" in event or response.status != 200:
                    raise WrongAnswer(event["error"]) if "[INVALID_ARG]" in event.get("error", "") else Lost(f"{response.status} {event}")
                chunks += read_event(event)
        if not chunks or not all(c.finish_reason for c in collect(chunks)):
            raise Lost("the stream ended before its answer did")
        question.check_completions(collect(chunks))

    def triton_nonsense(self, rng: random.Random, exchange: Exchange) -> None:
        verb = rng.choice(("generate_stream", "generate", "infer"))
        model = rng.choice(("decode", "decode", "decode", "tokenizer", "generate", "bogus"))
        body = rng.choice(nonsense.BAD_BODIES) if rng.random() < 0.3 else nonsense.to_json({"stream": False, **nonsense.choose_values(rng)[1]}, rng)
        exchange.note((model, verb, body))
        with self._post(self._http, f"/v2/models/{model}/{verb}", body, exchange) as response:
            text = response.read().decode("utf-8", "replace")
        exchange.outcome = "answered" if response.status == 200 and '"error"' not in text else "refused"
        if "[INTERNAL]" in text or "[UNAVAILABLE]" in text or "not healthy" in text or "Traceback" in text:
            raise Lost(f"{response.status} {text}")

    # -- the gateway ------------------------------------------------------------------------------------------------------------

    def gateway(self, rng: random.Random, exchange: Exchange) -> None:
        question = rng.choice(self._questions)
        values = question.values(rng)
        prompt = values.pop("text_input", None) or values.pop("input_ids")
        self._ask_gateway("/v1/completions", {"prompt": prompt, **values}, question, rng, exchange)

    def chat(self, rng: random.Random, exchange: Exchange) -> None:
        """The template writes what is in the messages, so that the answer is known."""
        question = rng.choice(self._questions)
        values = question.values(rng)
        values.pop("input_ids", None)
        values.pop("text_input", None)
        if values.pop("logprobs", None):
            values |= {"logprobs": True, "top_logprobs": 2}
        middle = rng.randrange(len(question.prompt))
        parts = [p for p in (question.prompt[:middle], question.prompt[middle:]) if p]
        messages = [{"role": rng.choice(("user", "system", "assistant")), "content": p} for p in parts]
        prompt = {"messages": messages} if rng.random() < 0.8 else {"text": question.prompt}
        self._ask_gateway("/v1/chat/completions", {**prompt, **values}, question, rng, exchange)

    def _ask_gateway(self, path: str, body: dict[str, Any], question: Question, rng: random.Random, exchange: Exchange) -> None:
        body |= {"stream": rng.random() < 0.6, "return_tokens": True}
        exchange.note((path, body))
        texts: dict[int, str] = {}
        ids: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        with self._post(self._gateway, path, json.dumps(body).encode(), exchange) as response:
            if response.status != 200:
                text = response.read().decode("utf-8", "replace")
                raise WrongAnswer(f"{response.status} {text}") if response.status < 500 else Lost(f"{response.status} {text}")
            for event in read_events(response, exchange) if body["stream"] else [json.loads(response.read())]:
                if "error" in event:
                    raise Lost(str(event))
                for choice in event["choices"]:
                    index = choice["index"]
                    content = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
                    texts[index] = texts.get(index, "") + (content["content"] or "")
                    ids.setdefault(index, []).extend(choice["token_ids"])
                    if choice["finish_reason"]:
                        reasons[index] = choice["finish_reason"]
        if not texts or len(reasons) < len(texts):
            raise Lost("the stream ended before its answer did")
        found: dict[int, Outcome] = {i: (texts[i], tuple(ids[i]), reasons[i]) for i in texts}
        question.check(found)

    def gateway_nonsense(self, rng: random.Random, exchange: Exchange) -> None:
        """Must be told whose fault it is: an error of the server (5xx) is none of nonsense."""
        _, values, must_refuse = nonsense.choose_values(rng)
        path, body, is_changed = nonsense.to_openai(values, rng)
        if rng.random() < 0.2:
            body, must_refuse, is_changed = rng.choice(nonsense.BAD_BODIES), False, True
        exchange.note((path, body))
        with self._post(self._gateway, path, body, exchange) as response:
            text = response.read().decode("utf-8", "replace")
        is_late = response.status == 504 and '"timeout_ms"' in text  # its own short time
        exchange.outcome = "answered" if response.status == 200 else "refused"
        if response.status >= 500 and not is_late:
            raise Lost(f"{response.status} {text}")
        if response.status == 200 and must_refuse and not is_changed and '"error"' not in text:
            raise WrongAnswer(f"answered, though it must be refused: {text}")

    def tokens(self, rng: random.Random, exchange: Exchange) -> None:
        question = rng.choice(self._questions)
        exchange.note(("/tokenize", question.prompt))
        with self._post(self._gateway, "/tokenize", json.dumps({"prompt": question.prompt}).encode(), exchange) as response:
            answer = json.loads(response.read())
        if response.status != 200:
            raise Lost(f"{response.status} {answer}")
        if answer["tokens"] != question.token_ids:
            raise WrongAnswer(f"got {answer}\nwant {question.token_ids}")

    # -- bad manners --------------------------------------------------------------------------------------------------------------

    def _connect(self, rng: random.Random, exchange: Exchange) -> tuple[socket.socket, bytes]:
        """A connection to one of the two, and a long streamed request for it."""
        address, path, prompt = rng.choice(
            ((self._http, "/v2/models/decode/generate_stream", "text_input"), (self._gateway, "/v1/completions", "prompt"))
        )
        body = json.dumps({prompt: "def count(", "stream": True, **LONG}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        host, _, port = address.partition(":")
        exchange.note((address, head, body))
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(ANSWER_SECONDS)
        connection.connect((host, int(port)))
        return connection, head.encode() + body

    def hang_up(self, rng: random.Random, exchange: Exchange) -> None:
        """In the middle of the request, or of its answer."""
        exchange.outcome = "hung up"
        with closing_in_time(exchange):
            connection, request = self._connect(rng, exchange)
            with connection:
                connection.sendall(request if rng.random() < 0.7 else request[: rng.randrange(len(request))])
                if rng.random() < 0.5:
                    connection.settimeout(rng.choice((0.05, 1.0)))
                    with contextlib.suppress(TimeoutError):
                        connection.recv(200)

    def slow_reader(self, rng: random.Random, exchange: Exchange) -> None:
        """Takes a few bytes at a time for a while, then goes."""
        exchange.outcome = "hung up"
        with closing_in_time(exchange):
            connection, request = self._connect(rng, exchange)
            with connection:
                connection.sendall(request)
                while time.monotonic() < exchange.started + SLOW_SECONDS and connection.recv(rng.randint(1, 400)):
                    time.sleep(0.2)

    def idle(self, rng: random.Random, exchange: Exchange) -> None:
        """Says nothing, or half of something."""
        exchange.outcome = "hung up"
        with closing_in_time(exchange):
            connection, request = self._connect(rng, exchange)
            with connection:
                connection.sendall(request[: rng.choice((0, 10, len(request) - 5))])
                time.sleep(IDLE_SECONDS)
