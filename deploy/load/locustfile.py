"""Locust users for Triton's gRPC stream and for the OpenAI endpoint.

    locust -f deploy/load/locustfile.py --headless -u 32 -r 8 -t 2m GrpcUser OpenAIUser

Every answer is checked, and fails when it is wrong: without an end, with other tokens than it says or than were asked for, or other than the
first answer to the same prompt (greedy decoding gives the same text each time, over either protocol, in any batch, with or without speculation).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import grpc.experimental.gevent as grpc_gevent
import psutil
import requests
from locust import LoadTestShape, User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from client import Client, GenerateError
from client.bench.dataset import DatasetError, Prompt, read_prompts
from client.headers import add_header_arguments, read_headers
from client.loopback import is_loopback
from client.tls import add_tls_arguments, read_tls
from deploy.load.answers import Answer, Answers, WrongAnswer
from training.heldout import list_heldout

grpc_gevent.init_gevent()  # before any channel, or the first call blocks every user

SHAPES = {
    "steady": lambda x: 1.0,
    "ramp": lambda x: x,
    "stairs": lambda x: (1 + math.floor(5 * x)) / 5,
    "spike": lambda x: 1.0 if 0.4 <= x < 0.6 else 0.2,
    "waves": lambda x: 0.6 - 0.4 * math.cos(6 * math.pi * x),
}
"""Share of --users by share of --run-time."""


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    parser.add_argument("--grpc-url", default="127.0.0.1:8001", help="Triton's gRPC address, by TLS grpcs://HOST:PORT")
    parser.add_argument("--openai-url", default="http://127.0.0.1:8080", help="the gateway's address; OPENAI_API_KEY holds the key")
    add_tls_arguments(parser, has_http=True)
    add_header_arguments(parser)
    parser.add_argument("--dataset-path", nargs="+", default=[], help="text files or folders (default: code of Python's standard library)")
    parser.add_argument("--num-prompts", type=int, default=64, help="different prompts")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to ask for")
    parser.add_argument("--speculative", default="", help="the requests' own, as JSON")
    parser.add_argument("--load-shape", choices=tuple(SHAPES), default="steady", help="how the number of users moves during --run-time")
    parser.add_argument(
        "--answers", default="", help="file of right answers; written at the end when there is none, such as by a run without speculation"
    )
    parser.add_argument("--any-answer", action="store_true", help="do not compare answers (bfloat16: near-ties may fall either way)")


class Task:
    """What all users ask, and what was answered. Set once the options are known."""

    prompts: Iterator[Prompt]
    """All in turn, so that none is left out before the others come again; in any order, lest processes ask the same at the same time."""
    answers: Answers


@events.init.add_listener
def prepare(environment: Environment, **_: Any) -> None:
    """What is wrong is said before the load, not after it."""
    try:
        _read(environment)
    except ValueError as error:
        if isinstance(environment.runner, MasterRunner):
            # Of --processes: one that has not reached its master yet would try to for minutes, and Locust waits for it.
            for worker in psutil.Process().children():
                worker.terminate()
        sys.exit(str(error))


def _read(environment: Environment) -> None:
    """Raises ValueError."""
    options = environment.parsed_options
    assert options is not None
    for option, number in (("--num-prompts", options.num_prompts), ("--output-len", options.output_len)):
        if number < 1:
            raise ValueError(f"{option} must be at least 1, got {number}")
    read_tls(options).check_use([options.grpc_url, options.openai_url])
    read_headers(options)
    paths = [Path(p) for p in options.dataset_path] or list(list_heldout().values())
    try:
        prompts = read_prompts(paths, options.num_prompts, (200, 1600), (options.output_len, options.output_len), seed=0)
    except (DatasetError, OSError) as error:
        raise ValueError(f"--dataset-path: {error}") from None
    Task.prompts = itertools.cycle(random.sample(prompts, len(prompts)))
    Task.answers = Answers()
    answers = Path(options.answers) if options.answers else None
    if answers is None:
        return
    if answers.exists():
        try:
            Task.answers = Answers.read(answers)
        except (OSError, ValueError) as error:
            raise ValueError(f"--answers {answers}: {error}") from None
    elif isinstance(environment.runner, (MasterRunner, WorkerRunner)):
        raise ValueError(f"--answers {answers}: there is no such file, and of several processes none has them all: make it by a run of one process")
    elif not os.access(answers.parent, os.W_OK):
        raise ValueError(f"--answers {answers}: cannot be written")


@events.test_stop.add_listener
def keep_answers(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    if options is not None and options.answers and Task.answers.texts and not Path(options.answers).is_file():
        Task.answers.write(Path(options.answers))


@events.quitting.add_listener
def fail_unanswered(environment: Environment, **_: Any) -> None:
    """A run in which nothing was answered has shown nothing: Locust's own status is that of failures, and what hangs does not fail."""
    if isinstance(environment.runner, WorkerRunner):
        return  # whose master knows what all were answered
    answered = sum(own.num_requests - own.num_failures for (name, _), own in environment.stats.entries.items() if name == "request")
    if not answered:
        print("no request was answered", file=sys.stderr)
        environment.process_exit_code = 1


class Ramp(LoadTestShape):
    """--load-shape over --users, --spawn-rate and --run-time (default 60 s)."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        assert options is not None
        share = self.get_run_time() / (options.run_time or 60)
        if share >= 1:
            return None
        return max(1, round((options.num_users or 1) * SHAPES[options.load_shape](share))), options.spawn_rate or 1


class StreamingUser(User):
    """Asks one prompt after the other. Times: `request` is the whole answer, `first token`, and `time per token` after the first."""

    abstract = True
    wait_time = constant(0)
    protocol = ""

    def stream(self, prompt: Prompt, answer: Answer) -> Iterator[int]:
        """Adds responses to the answer as they come, and yields whenever one brought tokens. Raises GenerateError."""
        raise NotImplementedError

    @task
    def complete(self) -> None:
        options = self.environment.parsed_options
        prompt, answer, error = next(Task.prompts), Answer(), None
        started, arrivals = time.perf_counter(), []
        try:
            for _ in self.stream(prompt, answer):
                arrivals.append(time.perf_counter())
            answer.check(prompt.output_len)
            if not options.any_answer:
                Task.answers.compare(prompt.text, answer.text)
        except (GenerateError, WrongAnswer) as raised:
            error = raised
        total = (answer.usage or {}).get("completion_tokens", 0)
        self._report("request", time.perf_counter() - started, total, error)
        if error is not None:
            gevent.sleep(1)  # a server that refuses is not to be asked thousands of times a second
        if arrivals:
            self._report("first token", arrivals[0] - started, 1)
        if total > 1 and error is None:
            self._report("time per token", (arrivals[-1] - arrivals[0]) / (total - 1), total - 1)

    def _report(self, name: str, seconds: float, num_tokens: int, error: Exception | None = None) -> None:
        """One line of Locust's statistics; the length of a response is its tokens."""
        self.environment.events.request.fire(
            request_type=self.protocol, name=name, response_time=1e3 * seconds, response_length=num_tokens, exception=error, context={}
        )


class GrpcUser(StreamingUser):
    """A user of Triton's gRPC stream."""

    protocol = "grpc"

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.client = Client(options.grpc_url, tls=read_tls(options).at(options.grpc_url), headers=read_headers(options))

    def on_stop(self) -> None:
        self.client.close()

    def stream(self, prompt: Prompt, answer: Answer) -> Iterator[int]:
        speculative = self.environment.parsed_options.speculative or None
        answer.num_tokens = 0
        for chunk in self.client.stream(prompt.text, max_tokens=prompt.output_len, temperature=0.0, speculative=speculative):
            answer.text += chunk.text
            answer.num_tokens += len(chunk.token_ids)
            answer.usage, answer.finish_reason = chunk.usage or answer.usage, chunk.finish_reason or answer.finish_reason
            if chunk.token_ids:
                yield len(chunk.token_ids)


class OpenAIUser(StreamingUser):
    """A user of the gateway's `/v1/completions`."""

    protocol = "openai"

    def on_start(self) -> None:
        self.session = requests.Session()
        options = self.environment.parsed_options
        self.session.trust_env = not is_loopback(options.openai_url)
        tls = read_tls(options)
        self.session.verify = not tls.insecure and (tls.root_certificates or True)
        if tls.certificate_chain is not None and tls.private_key is not None:
            self.session.cert = tls.certificate_chain, tls.private_key
        if key := os.environ.get("OPENAI_API_KEY"):
            self.session.headers["Authorization"] = f"Bearer {key}"
        try:
            models = self.session.get(f"{options.openai_url}/v1/models", timeout=30)
            models.raise_for_status()
            self.model = models.json()["data"][0]["id"]
        except (requests.RequestException, ValueError, LookupError) as error:
            self._report("models", 0.0, 0, error)
            self.model = ""  # every request will say so too

    def on_stop(self) -> None:
        self.session.close()

    def stream(self, prompt: Prompt, answer: Answer) -> Iterator[int]:
        options = self.environment.parsed_options
        body = {"model": self.model, "prompt": prompt.text, "max_tokens": prompt.output_len, "temperature": 0.0, "stream": True}
        body |= {"stream_options": {"include_usage": True}} | ({"speculative": json.loads(options.speculative)} if options.speculative else {})
        try:
            with self.session.post(f"{options.openai_url}/v1/completions", json=body, stream=True, timeout=60) as response:
                if response.status_code != 200:
                    raise GenerateError(f"status {response.status_code}: {response.text:.300}")
                for line in response.iter_lines(chunk_size=None):  # type: ignore[call-overload]  # None: as it comes
                    if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise GenerateError(str(event["error"]))
                    choice = (event.get("choices") or [{}])[0]
                    answer.text += choice.get("text") or ""
                    answer.usage = event.get("usage") or answer.usage
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    if choice.get("text"):
                        yield len(choice["text"])
        except (requests.RequestException, ValueError, LookupError) as error:
            raise GenerateError(f"{type(error).__name__}: {error}") from None
