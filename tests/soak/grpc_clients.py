"""Clients of Triton's gRPC stream."""

from __future__ import annotations

import random
import re
import time
import uuid
from typing import Any

from client import Chunk, Client, GenerateError
from client.messages import collect
from tests.soak import nonsense
from tests.soak.book import ANSWER_SECONDS, Exchange, Hung, Lost, WrongAnswer
from tests.soak.questions import Question
from tests.soak.wire import Stream, make_request, open_channel, pack

LONG = {"text_input": "def count(", "max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}
"""Something to cancel."""
SLOW_SECONDS = 60.0
CANCEL_SECONDS = 5.0


def lost_or_hung(error: GenerateError) -> Exception:
    """A refusal of what is valid is no loss."""
    if error.code == "TIMEOUT":
        return Hung(str(error))
    return WrongAnswer(str(error)) if error.code == "INVALID_ARG" else Lost(f"[{error.code}] {error}")


def check_refusal(message: str, must_refuse: bool) -> None:
    """An error is right for nonsense, when it says whose fault it is."""
    if "[INTERNAL]" in message or "[UNAVAILABLE]" in message or "not healthy" in message:
        raise Lost(message)
    if not must_refuse and "[INVALID_ARG]" in message:
        raise WrongAnswer(f"refused, though it may be asked: {message}")


class GrpcClients:
    """One worker's. `kinds` has what they do, with how often."""

    def __init__(self, address: str, questions: list[Question]) -> None:
        self._address = address
        self._questions = questions
        self._client = Client(address, inactivity_timeout=ANSWER_SECONDS)
        self._channel = open_channel(address)
        self.kinds = {
            "grpc one": (self.one, 4), "grpc several": (self.several, 4), "grpc ensemble": (self.ensemble, 2), "grpc nonsense": (self.nonsense, 4),
            "grpc broken": (self.broken, 3), "grpc cancelled": (self.cancelled, 2), "grpc ended by id": (self.ended_by_id, 1.5),
            "grpc hang-up": (self.hang_up, 1), "grpc slow reader": (self.slow_reader, 0.3),
        }  # fmt: skip

    def close(self) -> None:
        self._client.close()
        self._channel.close()

    def one(self, rng: random.Random, exchange: Exchange) -> None:
        """The product's own client: a stream for each request."""
        question = rng.choice(self._questions)
        values = {**question.values(rng), "stream": rng.random() < 0.8}
        exchange.note(values)
        try:
            question.check_completions(self._client.generate(**values))
        except GenerateError as error:
            raise lost_or_hung(error) from None

    def several(self, rng: random.Random, exchange: Exchange, model: str = "decode") -> None:
        """A stream of one model, with nonsense among what is valid."""
        asked: dict[str, tuple[Question | None, bool]] = {}
        chunks: dict[str, list[Chunk]] = {}
        errors: dict[str, str] = {}
        with Stream(self._channel) as stream:
            for _ in range(rng.randint(2, 6)):
                name = uuid.UUID(int=rng.getrandbits(128)).hex
                if rng.random() < 0.75:
                    question, must_refuse = rng.choice(self._questions), False
                    values = question.values(rng)
                    if model == "generate":
                        values.pop("input_ids", None)
                        values["text_input"] = question.prompt
                else:
                    question, (_, values, must_refuse) = None, nonsense.choose_values(rng)
                    if model == "generate" and not {"text_input"} <= set(values) <= set(LONG) | {"n", "stop", "speculative", "top_p"}:
                        continue
                asked[name] = question, must_refuse
                exchange.note({"model": model, **values})
                stream.send(make_request(model, pack(values), name))
            open_names = set(asked)
            for request_id, some, is_last, error in stream.responses() if asked else ():
                found = re.search(r"request '(\w+)'", error)
                name = request_id or (found[1] if found else "")
                if name not in open_names:
                    raise Lost(f"a response to none of the stream's open requests: {name!r} {error}")
                if error:
                    errors[name] = error
                else:
                    chunks.setdefault(name, []).extend(some)
                    if is_last and not any(c.finish_reason for c in chunks[name]):
                        raise Lost(f"request {name} ended without an answer")
                if is_last:
                    open_names.remove(name)
                    if not open_names:
                        break
            if open_names:
                raise Lost(f"the stream ended with {len(open_names)} requests open")
            stream.finish()
        for name, (question, must_refuse) in asked.items():
            if question is None:
                if name in errors:
                    check_refusal(errors[name], must_refuse)
                elif must_refuse:
                    raise WrongAnswer(f"answered, though it must be refused: {collect(chunks[name])}")
            elif name in errors:
                raise Lost(errors[name]) if "[INVALID_ARG]" not in errors[name] else WrongAnswer(errors[name])
            else:
                question.check_completions(collect(chunks[name]))

    def ensemble(self, rng: random.Random, exchange: Exchange) -> None:
        self.several(rng, exchange, "generate")

    def nonsense(self, rng: random.Random, exchange: Exchange) -> None:
        what, values, must_refuse = nonsense.choose_values(rng)
        exchange.note({"what": what, **values})
        self._expect_refusal(make_request("decode", pack(values), rng.choice(("", "x", "é" * 100, "a\nb"))), must_refuse, exchange)

    def broken(self, rng: random.Random, exchange: Exchange) -> None:
        what, model, tensors, version = nonsense.break_tensors(rng)
        exchange.note((what, model, version, tensors))
        self._expect_refusal(make_request(model, tensors, "broken", version), True, exchange)

    def _expect_refusal(self, request: Any, must_refuse: bool, exchange: Exchange) -> None:
        with Stream(self._channel) as stream:
            stream.send(request)
            for _, chunks, is_last, error in stream.responses():
                if error:
                    check_refusal(error, must_refuse)
                    exchange.outcome = "refused"
                    break
                if is_last:
                    if must_refuse:
                        raise WrongAnswer(f"answered, though it must be refused: {chunks}")
                    break
            else:
                raise Lost("the stream ended without an answer")
            stream.finish()

    def cancelled(self, rng: random.Random, exchange: Exchange) -> None:
        """Leaves the product's client in the middle, which cancels; of the ensemble too, for which it sends a request to end it."""
        values = {**LONG, "n": rng.choice((1, 1, 3)), "temperature": 1.0}
        model = rng.choice(("decode", "decode", "generate"))
        exchange.note({"model": model, **values})
        exchange.outcome = "cancelled"
        stop_after, started = rng.choice((0, 1, 3, 10)), time.monotonic()
        try:
            chunks = self._client.stream(**values, model=model)
            for count, _ in enumerate(chunks):
                if count >= stop_after:
                    break
            chunks.close()
        except GenerateError as error:
            raise lost_or_hung(error) from None
        if time.monotonic() - started > ANSWER_SECONDS:
            raise Hung("cancelling it took so long")

    def ended_by_id(self, rng: random.Random, exchange: Exchange) -> None:
        name = uuid.UUID(int=rng.getrandbits(128)).hex
        exchange.note({**LONG, "id": name}, 2)
        exchange.outcome = "cancelled"
        with Stream(self._channel) as stream:
            stream.send(make_request("decode", pack(LONG), name))
            time.sleep(rng.choice((0.0, 0.02, 0.3)))
            try:
                # It may overtake the request, which would go on then for as long as it likes.
                while not (was_open := self._client.cancel(name)) and time.monotonic() < exchange.started + CANCEL_SECONDS:
                    time.sleep(0.1)
            except GenerateError as error:
                raise lost_or_hung(error) from None
            reasons = [c.finish_reason for _, chunks, _, _ in self._read_one(stream) for c in chunks if c.finish_reason]
        if was_open and reasons != ["cancelled"]:
            raise WrongAnswer(f"its end was asked for and confirmed, and it ended with {reasons}")

    @staticmethod
    def _read_one(stream: Stream) -> list[Any]:
        found = []
        for response in stream.responses():
            found.append(response)
            if response[3]:
                raise Lost(response[3])
            if response[2]:
                stream.finish()
                return found
        raise Lost("the stream ended without an answer")

    def hang_up(self, rng: random.Random, exchange: Exchange) -> None:
        """The whole connection goes, with some requests on it."""
        exchange.outcome = "hung up"
        channel = open_channel(self._address)
        stream = Stream(channel)
        for _ in range(rng.randint(1, 4)):
            exchange.note(LONG)
            stream.send(make_request("decode", pack(LONG), ""))
        time.sleep(rng.choice((0.0, 0.05, 0.5)))
        channel.close()
        stream.cancel()

    def slow_reader(self, rng: random.Random, exchange: Exchange) -> None:
        """Takes its time over a large answer: more than the buffers between hold."""
        values = {"text_input": "import os\n", "max_tokens": 120, "n": 4, "temperature": 1.0, "seed": 1, "logprobs": 20, "ignore_eos": True}
        exchange.note(values)
        with Stream(self._channel, SLOW_SECONDS) as stream:
            stream.send(make_request("decode", pack(values), ""))
            for count, (_, _, is_last, error) in enumerate(stream.responses()):
                if error:
                    raise Lost(error)
                if is_last:
                    break
                if count < 100:
                    time.sleep(0.1)
            else:
                raise Lost("the stream ended without an answer")
