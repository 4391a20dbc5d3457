"""The gateway on a real server, through OpenAI's own client, and through sockets where a client would be too polite."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import openai
import psutil
import pytest
import torch
import uvicorn

from backend.config import BUNDLED_MODEL
from backend.text import Tokenizer
from backend.version import VERSION
from client import AsyncClient, Client, GenerateError
from client.gateway import answers, cli, entrance, protocol
from client.gateway import log as gateway_log
from client.gateway.app import Settings, create_app
from client.gateway.protocol import LimitedHeadProtocol
from client.gateway.upstream import FRESH_SECONDS
from deploy.demo import free_ports, running_gateway
from deploy.together import FORETOKEN
from tests.servers import serve, wait_until

PROMPT = "import os\n\n\ndef read_lines(path):"
LOOPS = "for i in range(3):\n    print(i)\n\nfor i in range(3):\n    print(i)\n\nfor i"
HEAD = "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
LONG = {"max_tokens": 1900, "temperature": 0, "ignore_eos": True, "speculative": {"num_speculative_tokens": 0}}
WORDY = {**LONG, "prompt": PROMPT, "stream": True, "n": 8, "max_tokens": 600, "return_tokens": True, "logprobs": 20}


@pytest.fixture(scope="module")
def server(servers):
    return servers.get()


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("gateway") / "log"


@pytest.fixture(scope="module")
def running(server, log):
    with running_gateway(log, server.grpc) as (address, process):
        yield address, process


@pytest.fixture(scope="module")
def address(running):
    return running[0]


def open_client(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def api(address):
    with open_client(address) as client:
        yield client


@pytest.fixture(scope="module")
def direct(server):
    with Client(server.grpc) as client:
        yield client


def complete(api: openai.OpenAI, prompt=PROMPT, **parameters):
    return api.completions.create(**{"model": "foretoken", "prompt": prompt, "max_tokens": 12, "temperature": 0, **parameters})


def converse(api: openai.OpenAI, content="read a file", **parameters):
    messages = [{"role": "user", "content": content}]
    return api.chat.completions.create(**{"model": "foretoken", "messages": messages, "max_tokens": 12, "temperature": 0, **parameters})


def ask(address: str, path: str, body: object = None, headers: dict[str, str] | None = None, method: str | None = None):
    """(status, headers, body) of one HTTP request."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}{path}", data, {"content-type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def read_metric(address: str, name: str, **labels: str) -> float:
    text = ask(address, "/metrics")[2].decode()
    found = [line.rpartition(" ") for line in text.splitlines() if re.match(rf"foretoken_gateway_{name}(_total)?[{{ ]", line)]
    return sum(float(value) for series, _, value in found if all(f'{k}="{v}"' in series for k, v in labels.items()))


def send_request(address: str, body: dict, path: str = "/v1/completions", receive_buffer: int = 0, connection: str = "close") -> socket.socket:
    """Sends a request and reads nothing of the answer."""
    host, _, port = address.removeprefix("http://").partition(":")
    own = socket.socket()
    if receive_buffer:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    own.settimeout(60)
    own.connect((host, int(port)))
    data = json.dumps(body).encode()
    own.sendall(HEAD.format(path=path, length=len(data)).replace("connection: close", f"connection: {connection}").encode() + data)
    return own


def read_events(raw: bytes) -> list[str]:
    """The data of server-sent events."""
    return [event.removeprefix("data: ") for event in raw.decode().split("\n\n") if event.startswith("data: ")]


class TestCompletions:
    def test_the_same_tokens_as_without_the_gateway(self, api, direct):
        expected = direct.generate(PROMPT, max_tokens=400, temperature=0.0)[0]
        whole = complete(api, max_tokens=400)
        assert whole.object == "text_completion" and whole.model == "foretoken" and whole.id.startswith("cmpl-")
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, expected.finish_reason)
        assert whole.usage.completion_tokens == len(expected.token_ids) == 400
        assert whole.usage.prompt_tokens == expected.usage["prompt_tokens"] and whole.usage.total_tokens == whole.usage.prompt_tokens + 400
        parts = list(complete(api, max_tokens=400, stream=True))
        assert len(parts) > 5, "tokens must come step by step"
        assert "".join(p.choices[0].text for p in parts) == expected.text
        assert [p.choices[0].finish_reason for p in parts] == [None] * (len(parts) - 1) + ["length"]
        assert len({p.id for p in parts}) == 1 and all(p.usage is None for p in parts)

    def test_usage_in_a_stream(self, api):
        *parts, last = complete(api, stream=True, n=2, temperature=1, seed=3, stream_options={"include_usage": True})
        assert all(p.usage is None and len(p.choices) == 1 for p in parts)
        assert last.choices == [] and last.usage.completion_tokens == 24 and last.usage.prompt_tokens == complete(api).usage.prompt_tokens

    def test_n_seed_and_several_prompts(self, api, direct):
        expected = direct.generate(PROMPT, max_tokens=12, temperature=1.0, seed=5, n=3)
        whole = complete(api, temperature=1, seed=5, n=3)
        assert [c.text for c in whole.choices] == [c.text for c in expected] and [c.index for c in whole.choices] == [0, 1, 2]
        texts = ["", "", "", ""]
        for part in complete(api, [PROMPT, LOOPS], temperature=1, seed=5, n=2, stream=True):
            texts[part.choices[0].index] += part.choices[0].text
        assert texts == [c.text for p in (PROMPT, LOOPS) for c in direct.generate(p, max_tokens=12, temperature=1.0, seed=5, n=2)]
        both = complete(api, [PROMPT, LOOPS])
        assert both.usage.prompt_tokens == sum(complete(api, p).usage.prompt_tokens for p in (PROMPT, LOOPS)) and both.usage.completion_tokens == 24

    def test_token_ids_as_prompt(self, api, address):
        ids = json.loads(ask(address, "/tokenize", {"prompt": PROMPT})[2])["tokens"]
        assert complete(api, ids).choices[0].text == complete(api, [ids]).choices[0].text == complete(api).choices[0].text

    @pytest.mark.parametrize("stream", [False, True])
    def test_logprobs_and_echo(self, api, direct, stream):
        prompt = "x = 'é€🙂'\ny = "
        expected = direct.generate(prompt, max_tokens=12, temperature=0.0, logprobs=3, echo=True)[0]
        answer = complete(api, prompt, logprobs=3, echo=True, stream=stream)
        choices = [p.choices[0] for p in answer] if stream else answer.choices
        text = "".join(c.text for c in choices)
        tokens, scores, tops, offsets = (
            [v for c in choices for v in getattr(c.logprobs, k)] for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        assert text == expected.text and text.startswith(prompt) and len(tokens) == len(expected.token_ids)
        assert scores[0] is tops[0] is None
        assert scores[1:] == pytest.approx([e["logprob"] for e in expected.logprobs], abs=1e-4)
        likely = [{e["id"], *(top["id"] for top in e["top"])} for e in expected.logprobs]
        assert [len(t) for t in tops[1:]] == list(map(len, likely)) and {3, 4} == set(map(len, likely)), "the token itself, likely or not"
        assert all(t in top for t, top in zip(tokens[1:], tops[1:]))
        assert tokens[0] == "<|endoftext|>" and any(t.startswith("bytes:\\xf0") or t.startswith("bytes:\\x") for t in tokens), "part of a character"
        for token, offset in list(zip(tokens, offsets))[1:]:
            assert token.startswith("bytes:") or text[offset : offset + len(token)] == token

    @pytest.mark.parametrize("stream", [False, True])
    def test_offsets_behind_half_a_character(self, api, address, stream):
        half = json.loads(ask(address, "/tokenize", {"prompt": "x = 'é🙂"})[2])["tokens"][:-1]
        answer = complete(api, half, logprobs=0, echo=True, stream=stream)
        choices = [p.choices[0] for p in answer] if stream else answer.choices
        text = "".join(c.text for c in choices)
        tokens, offsets = ([v for c in choices for v in getattr(c.logprobs, k)] for k in ("tokens", "text_offset"))
        assert text.startswith("x = 'é\ufffd") and tokens[len(half) - 1].startswith("bytes:") and not tokens[len(half)].startswith("bytes:")
        for token, offset in list(zip(tokens, offsets, strict=True))[1:]:
            assert token.startswith("bytes:") or text[offset : offset + len(token)] == token

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("skips", [True, False])
    def test_offsets_behind_special_tokens(self, api, skips, stream):
        """Which `ignore_eos` lets into an answer, and its text leaves out."""
        sampling = {"logit_bias": {"0": 100, "318": 100}, "frequency_penalty": 2, "max_tokens": 16}  # now one of the two, now the other
        extra = {"ignore_eos": True, "skip_special_tokens": skips}
        answer = complete(api, logprobs=0, stream=stream, extra_body=extra, **sampling)
        choices = [p.choices[0] for p in answer] if stream else answer.choices
        text = "".join(c.text for c in choices)
        tokens, offsets = ([v for c in choices for v in getattr(c.logprobs, k)] for k in ("tokens", "text_offset"))
        assert "def" in tokens[tokens.index("<|endoftext|>") :] and ("<|endoftext|>" in text) != skips
        for token, offset in zip(tokens, offsets, strict=True):
            assert text.startswith("" if skips and token == "<|endoftext|>" else token, offset)
        assert offsets[-1] <= len(text)

    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_prompts_are_scored_as_harnesses_ask(self, api, address, hf_model, max_tokens):
        """Several prompts of token ids, known to the prefix cache, as lm-evaluation-harness sends them."""
        asked = [json.loads(ask(address, "/tokenize", {"prompt": text})[2])["tokens"] for text in (PROMPT, LOOPS)]
        complete(api, asked)
        whole = complete(api, asked, max_tokens=max_tokens, logprobs=1, echo=True)
        assert whole.usage.completion_tokens == max_tokens * 2
        for ids, choice in zip(asked, whole.choices, strict=True):
            with torch.inference_mode():
                expected = hf_model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            scores = choice.logprobs.token_logprobs[: len(ids)]
            assert scores[1:] == pytest.approx([row[i].item() for row, i in zip(expected, ids[1:])], abs=1e-3)
            best = [max(top.values()) for top in choice.logprobs.top_logprobs[1 : len(ids)]]
            assert best == pytest.approx(expected.max(-1).values.tolist(), abs=1e-3)

    def test_parameters_reach_the_engine(self, api, direct):
        values = {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 77, "stop": ["\n\n\n"], "temperature": 0.75, "n": 2}
        extra = {
            "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.25, "min_tokens": 4, "ignore_eos": True, "stop_token_ids": [441],
            "bad_words": ["import"], "include_stop": True, "priority": 3, "timeout_ms": 60000,
        }  # fmt: skip
        expected = direct.generate(PROMPT, max_tokens=30, logit_bias={300: 1.5}, **values, **extra)
        whole = complete(api, max_tokens=30, logit_bias={"300": 1.5}, extra_body=extra, **values)
        assert [(c.text, c.finish_reason) for c in whole.choices] == [(c.text, c.finish_reason) for c in expected]

    def test_stop_and_logit_bias(self, api):
        assert complete(api, stop="return", max_tokens=40).choices[0].text == complete(api, max_tokens=40).choices[0].text.partition("return")[0]
        assert complete(api, logit_bias={"300": 100}, extra_body={"return_tokens": True}).choices[0].token_ids == [300] * 12

    @pytest.mark.parametrize("stream", [False, True])
    def test_speculation_and_sources(self, api, stream):
        def run(**extra):
            answer = complete(api, LOOPS, max_tokens=40, stream=stream, extra_body={"return_tokens": True, "ignore_eos": True, **extra})
            choices = [p.choices[0] for p in answer] if stream else answer.choices
            joined = {k: [v for c in choices for v in getattr(c, k)] for k in ("token_ids", "tokens", "token_sources")}
            return "".join(c.text for c in choices), joined, choices[-1].speculation

        text, joined, statistics = run(speculative={"adaptive": False})
        plain_text, plain, plain_statistics = run(speculative={"num_speculative_tokens": 0})
        assert text == plain_text == "".join(joined["tokens"]) and joined["token_ids"] == plain["token_ids"]
        assert statistics["accepted"] == 40 - joined["token_sources"].count("target") > 0 and statistics["emitted"] == 40
        assert plain["token_sources"] == ["target"] * 40 and plain_statistics["drafted"] == 0
        assert not hasattr(complete(api).choices[0], "tokens")

    def test_text_is_the_prompt_of_paddlenlp(self, address, api):
        body = {"text": PROMPT, "model": "default", "max_tokens": 12, "temperature": 0}
        wanted = complete(api).choices[0].text
        assert json.loads(ask(address, "/v1/completions", body)[2])["choices"][0]["text"] == wanted
        assert json.loads(ask(address, "/v1/chat/completions", body)[2])["choices"][0]["message"]["content"] == wanted


class TestChat:
    def test_the_final_message_goes_on(self, address, api):
        """vLLM's: the prompt ends where its text does."""
        messages = [{"role": "user", "content": "read a file"}, {"role": "assistant", "content": [{"type": "text", "text": "with open("}]}]
        open_ = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        prompt = "# user: read a file\n# assistant: with open("
        tokens = json.loads(ask(address, "/tokenize", open_)[2])["tokens"]
        assert tokens == Tokenizer(BUNDLED_MODEL).encode(prompt, add_special_tokens=False)
        expected = api.completions.create(model="default", prompt=tokens, max_tokens=12, temperature=0).choices[0].text
        assert converse(api, messages=messages, extra_body={"continue_final_message": True}).choices[0].message.content == expected
        closed = ask(address, "/tokenize", {"messages": messages, "add_generation_prompt": False})
        assert json.loads(closed[2])["tokens"] == [*tokens, *Tokenizer(BUNDLED_MODEL).encode("\n", add_special_tokens=False)]
        for wrong, message in (
            ({"add_generation_prompt": True}, "continue_final_message and add_generation_prompt are both true"),
            ({"messages": [{"role": "assistant", "content": None}]}, "continue_final_message: the final message has no text"),
            ({"continue_final_message": 1}, "continue_final_message: Input should be a valid boolean"),
        ):
            status, _, raw = ask(address, "/v1/chat/completions", {**open_, **wrong})
            assert status == 400 and message in raw.decode()

    def test_whole_and_streamed(self, api, direct):
        expected = direct.generate(messages=[{"role": "user", "content": "read a file"}], max_tokens=12, temperature=0.0)[0]
        whole = converse(api)
        assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-")
        assert whole.choices[0].message.role == "assistant" and whole.choices[0].message.content == expected.text
        assert whole.choices[0].finish_reason == expected.finish_reason and whole.usage.completion_tokens == 12
        *parts, last = converse(api, stream=True, stream_options={"include_usage": True})
        assert "".join(p.choices[0].delta.content for p in parts) == expected.text and last.usage == whole.usage
        own = {"include_usage": True, "continuous_usage_stats": True}
        # So long that no sender is held up for all of it.
        *counted, last = converse(api, stream=True, max_tokens=400, stream_options=own, extra_body={"ignore_eos": True})
        counts = [p.usage.completion_tokens for p in counted]
        assert counts == sorted(counts) and 0 < counts[0] < counts[-1] == 400 and last.usage == counted[-1].usage
        assert {p.usage.prompt_tokens for p in counted} == {whole.usage.prompt_tokens}
        assert [p.choices[0].delta.role for p in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert {p.object for p in [*parts, last]} == {"chat.completion.chunk"}
        in_parts = converse(api, [{"type": "text", "text": "read "}, {"type": "text", "text": "a file"}], max_tokens=None, max_completion_tokens=5)
        assert expected.text.startswith(in_parts.choices[0].message.content) and in_parts.usage.completion_tokens == 5

    def test_logprobs(self, api, direct):
        expected = direct.generate(messages=[{"role": "user", "content": "é🙂"}], max_tokens=12, temperature=0.0, logprobs=2)[0]
        content = converse(api, "é🙂", logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert [e.logprob for e in content] == pytest.approx([e["logprob"] for e in expected.logprobs], abs=1e-4)
        assert b"".join(bytes(e.bytes) for e in content).decode() == expected.text
        assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].token == e.token for e in content), "greedy: the likeliest is the one"
        assert converse(api, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
        assert converse(api, logprobs=False, top_logprobs=0).choices[0].logprobs is None  # as vLLM takes it
        assert converse(api).choices[0].logprobs is None


NO_OPS = {
    "suffix": "", "best_of": 1, "service_tier": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}, "tools": [],
    "skip_special_tokens": True, "use_beam_search": False, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "prediction": {"type": "content", "content": "x"}, "prompt_cache_key": "k", "tool_choice": "none", "length_penalty": 1.0,
}  # fmt: skip


class TestPrediction:
    def test_drafts_are_looked_up_there(self, address, api):
        """The answer is the same; who drafted its tokens is not. (Not adaptive: whether drafts pay is a matter of the machine.)"""
        plain = complete(api, max_tokens=32).choices[0].text
        for content in (plain, [{"type": "text", "text": plain[:5]}, {"type": "text", "text": plain[5:]}]):
            body = {
                "prompt": PROMPT,
                "max_tokens": 32,
                "temperature": 0,
                "return_tokens": True,
                "speculative": {"adaptive": False},
                "prediction": {"type": "content", "content": content},
            }
            status, _, raw = ask(address, "/v1/completions", body)
            answer = json.loads(raw)
            choice = answer["choices"][0]
            num_predicted = choice["token_sources"].count("prediction")
            assert status == 200 and choice["text"] == plain and num_predicted > 8
            drafted = answer["metrics"]["speculative_decoding"]
            refused = drafted["num_draft_tokens"] - drafted["num_accepted_draft_tokens"]
            told = answer["usage"]["completion_tokens_details"]
            assert told["accepted_prediction_tokens"] == num_predicted and 0 <= told["rejected_prediction_tokens"] <= refused and len(told) == 2

    def test_drafts_that_do_not_stand_are_told(self, address, api):
        """Each token of the answer is in the prediction, with another text after it."""
        plain = complete(api, max_tokens=24).choices[0].text
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "speculative": {"method": "ngram", "adaptive": False}}
        status, _, raw = ask(address, "/v1/completions", body | {"prediction": {"type": "content", "content": " x x x x".join(plain)}})
        answer = json.loads(raw)
        drafted = answer["metrics"]["speculative_decoding"]
        refused = drafted["num_draft_tokens"] - drafted["num_accepted_draft_tokens"]
        assert status == 200 and answer["choices"][0]["text"] == plain
        assert answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == refused > 0

    @pytest.mark.parametrize("value", [{"type": "other", "content": "x"}, {"type": "content"}, "x", {"type": "content", "content": 5}])
    def test_other_forms_are_refused(self, address, value):
        status, _, raw = ask(address, "/v1/completions", {"prompt": "x", "max_tokens": 1, "prediction": value})
        assert status == 400 and "prediction" in raw.decode()


class TestTokenIds:
    """vLLM's `return_token_ids` and `return_tokens_as_token_ids`."""

    BODY: ClassVar[dict[str, Any]] = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}

    def test_completions(self, address):
        prompts = [PROMPT, "x = 1\ny = "]
        body = {**self.BODY, "prompt": prompts, "n": 2}
        whole = json.loads(ask(address, "/v1/completions", body)[2])["choices"]
        expected = [json.loads(ask(address, "/tokenize", {"prompt": p})[2])["tokens"] for p in prompts]
        assert [c["prompt_token_ids"] for c in whole] == [expected[0]] * 2 + [expected[1]] * 2
        assert all(len(c["token_ids"]) == 8 for c in whole) and "tokens" not in whole[0]
        *events, _ = read_events(ask(address, "/v1/completions", {**body, "stream": True})[2])
        parts = [json.loads(event)["choices"][0] for event in events]
        for choice in whole:
            own = [part for part in parts if part["index"] == choice["index"]]
            assert ["prompt_token_ids" in part for part in own] == [True] + [False] * (len(own) - 1)
            assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"] and [i for p in own for i in p["token_ids"]] == choice["token_ids"]
        again = json.loads(ask(address, "/v1/completions", {**self.BODY, "prompt": expected[0]})[2])["choices"][0]
        assert (again["prompt_token_ids"], again["token_ids"]) == (expected[0], whole[0]["token_ids"])

    def test_a_prompt_that_is_repeated(self, address):
        expected = json.loads(ask(address, "/tokenize", {"prompt": PROMPT})[2])["tokens"]
        body = {**self.BODY, "prompt": PROMPT, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
        choice = json.loads(ask(address, "/v1/completions", body)[2])["choices"][0]
        assert choice["prompt_token_ids"] == expected and len(choice["token_ids"]) == 8
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in expected + choice["token_ids"]]
        assert all(key.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"][1:] for key in top)

    def test_chats(self, address):
        messages = [{"role": "user", "content": "hi"}]
        body = {**self.BODY, "messages": messages, "n": 2, "logprobs": True, "return_tokens_as_token_ids": True}
        whole = json.loads(ask(address, "/v1/chat/completions", body)[2])
        assert whole["prompt_token_ids"] == json.loads(ask(address, "/tokenize", {"messages": messages})[2])["tokens"]
        for choice in whole["choices"]:
            assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
            assert "prompt_token_ids" not in choice and len(choice["token_ids"]) == 8
        events = [json.loads(event) for event in read_events(ask(address, "/v1/chat/completions", {**body, "stream": True})[2])[:-1]]
        for choice in whole["choices"]:
            own = [event for event in events if event["choices"][0]["index"] == choice["index"]]
            assert [event.get("prompt_token_ids") for event in own] == [whole["prompt_token_ids"]] + [None] * (len(own) - 1)
            assert [i for event in own for i in event["choices"][0]["token_ids"]] == choice["token_ids"]

    @pytest.mark.parametrize("own", [{"truncation": "auto"}, {"truncate_prompt_tokens": 5}])
    def test_what_the_gateway_cannot_know_is_refused(self, address, own):
        body = {**self.BODY, "messages": [{"role": "user", "content": "hi"}], **own}
        status, _, raw = ask(address, "/v1/chat/completions", body)
        assert status == 400 and f"return_token_ids does not go with {next(iter(own))}" in raw.decode()


class TestAllowedTokens:
    def test_an_answer_is_of_them_alone(self, address):
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_tokens": True}
        status, _, raw = ask(address, "/v1/completions", {**body, "allowed_token_ids": [41, 40, 7]})
        choice = json.loads(raw)["choices"][0]
        assert status == 200 and choice["finish_reason"] == "length" and set(choice["token_ids"]) <= {7, 40, 41} and len(choice["token_ids"]) == 6
        plain = [json.loads(ask(address, "/v1/completions", {**body, **own})[2])["choices"][0]["text"] for own in ({}, {"allowed_token_ids": []})]
        assert plain[0] == plain[1]

    @pytest.mark.parametrize("own", [{"allowed_token_ids": [10**6]}, {"allowed_token_ids": ["1"]}, {"allowed_token_ids": [1], "guided_regex": "x"}])
    def test_others_are_refused_by_name(self, address, own):
        status, _, raw = ask(address, "/v1/completions", {"prompt": "x", "max_tokens": 1, **own})
        assert status == 400 and "allowed_token_ids" in raw.decode() and "structured_outputs" not in raw.decode()


class TestFieldsThatChangeNothing:
    def test_they_are_taken(self, address, api):
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **NO_OPS}
        status, _, raw = ask(address, "/v1/completions", body)
        assert status == 200 and json.loads(raw)["choices"][0]["text"] == complete(api, max_tokens=4).choices[0].text
        chat = {**body, "messages": [{"role": "user", "content": "x"}], "modalities": ["text"], "echo": False, "chat_template_kwargs": {}}
        del chat["prompt"]
        assert ask(address, "/v1/chat/completions", {**chat, "add_special_tokens": False})[0] == 200
        assert ask(address, "/v1/chat/completions", {**chat, "echo": True, "service_tier": "flex"})[0] == 200
        said = ask(address, "/v1/chat/completions", {**chat, "echo": True, "messages": [*chat["messages"], {"role": "assistant", "content": "y"}]})
        assert said[0] == 400 and b"echo: it may be left out, or false" in said[2]
        assert ask(address, "/v1/completions", {"prompt": "x", "max_tokens": 1, "n": None, "add_special_tokens": True})[0] == 200

    def test_special_tokens(self, address):
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "logit_bias": {"0": 100}}
        for skips, text in ((True, ""), (False, "<|endoftext|>" * 2)):
            status, _, raw = ask(address, "/v1/completions", {**body, "skip_special_tokens": skips})
            assert status == 200 and json.loads(raw)["choices"][0]["text"] == text

    def test_parts_of_messages(self, address):
        """By the names of responses, and with hints of caches."""
        found = []
        for part in (
            {"type": "text"},
            {"type": "input_text", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "prompt_cache_breakpoint": {}},
        ):
            messages = [
                {"role": "user", "content": [{**part, "text": "x"}]},
                {"role": "assistant", "content": None},
                {"role": "user", "content": "y"},
            ]
            status, _, raw = ask(address, "/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0})
            assert status == 200, raw
            found.append(json.loads(raw)["choices"][0]["message"])
        assert found[0] == found[1] == found[2]

    @pytest.mark.parametrize(
        ("values", "rule"),
        [
            ({"suffix": "y"}, "'suffix': it may be left out, or ''"),
            ({"best_of": 2}, "'best_of': it may be left out, or n"),
            ({"best_of": 1, "n": 2}, "'best_of': it may be left out, or n"),
            ({"best_of": True}, "'best_of': it may be left out, or n"),
            ({"service_tier": "fast"}, "'service_tier': it may be left out, or 'auto', 'default', 'flex', 'scale' or 'priority'"),
            ({"spaces_between_special_tokens": False}, "'spaces_between_special_tokens': it may be left out, or true"),
            ({"use_beam_search": True}, "'use_beam_search': it may be left out, or false"),
            ({"use_beam_search": 0}, "'use_beam_search': it may be left out, or false"),
            ({"enable_thinking": False}, "'enable_thinking': chats have it in chat_template_kwargs"),
            ({"nonsense": 1}, "unknown or unsupported parameter 'nonsense'"),
        ],
    )
    def test_what_would_change_the_answer_is_named(self, address, values, rule):
        status, _, raw = ask(address, "/v1/completions", {"prompt": "x", "max_tokens": 1, **values})
        assert status == 400 and json.loads(raw)["error"]["message"].endswith(rule) and json.loads(raw)["error"]["param"] == next(iter(values))

    def test_refusals_of_a_history(self, address):
        def ask_after(own: dict) -> str:
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", **own}, {"role": "user", "content": "why?"}]
            status, _, raw = ask(address, "/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0})
            assert status == 200, raw
            return json.loads(raw)["choices"][0]["message"]["content"]

        wanted = ask_after({"content": "I can't."})
        assert ask_after({"content": [{"type": "refusal", "refusal": "I can't."}]}) == wanted
        assert ask_after({"content": None, "refusal": "I can't."}) == wanted

    def test_names_of_other_servers(self, address):
        own = {"prompt": "Is it? ", "max_tokens": 9}
        for forms in ({"regex": "yes|no"}, {"ebnf": 'root ::= "yes" | "no"'}, {"json_schema": '{"enum": ["yes", "no"]}'}):
            assert json.loads(ask(address, "/v1/completions", {**own, **forms})[2])["choices"][0]["text"].strip('"') in ("yes", "no")
        body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": "Read", "include_stop_str_in_output": True}
        assert json.loads(ask(address, "/v1/completions", body)[2])["choices"][0]["text"].endswith("Read")

    @pytest.mark.parametrize("base", ["", "/v1/chat/completions", "/v1/completions"])
    def test_clients_may_have_another_base(self, address, base):
        with openai.OpenAI(base_url=f"{address}{base}", api_key="none", max_retries=0) as api:
            assert complete(api, max_tokens=2).usage.completion_tokens == 2
            assert converse(api, max_tokens=2).usage.completion_tokens == 2
        assert ask(address, "/models")[0] == 200 and ask(address, "/v1/v1/models")[0] == 404


class TestLengthAndSampling:
    def test_a_chat_goes_on_to_the_end_of_the_context(self, api):
        answer = converse(api, "x" * 1900, max_tokens=None, extra_body={"ignore_eos": True})
        assert answer.usage.total_tokens == 2048 and answer.choices[0].finish_reason == "length"

    def test_what_speculation_brought_as_vllm_gives_it(self, api):
        """The sums that aiperf checks before it takes them."""
        always = {"speculative": {"adaptive": False}}  # whether drafts pay is a matter of the machine
        for answer in (complete(api, LOOPS, max_tokens=40, extra_body=always), converse(api, LOOPS, max_tokens=40, extra_body=always)):
            found, own = answer.metrics["speculative_decoding"], answer.choices[0].speculation
            histogram = found["acceptance_histogram"]
            assert len(histogram) == found["num_spec_tokens"] + 1 and min(histogram) >= 0
            assert sum(histogram) == found["num_spec_steps"] == own["drafts"] > 0
            assert sum(j * count for j, count in enumerate(histogram)) == found["num_accepted_draft_tokens"] == own["accepted"] > 0
            assert found["num_draft_tokens"] == own["drafted"] and found["mean_acceptance_length"] == 1 + own["accepted"] / own["drafts"]
        *_, last = complete(api, LOOPS, max_tokens=40, stream=True, stream_options={"include_usage": True}, extra_body=always)
        assert last.usage.completion_tokens == 40 and last.metrics["speculative_decoding"]["num_spec_steps"] > 0
        plain = complete(api, extra_body={"speculative": {"method": "none"}})
        assert not hasattr(plain, "metrics") and not hasattr(complete(api, n=2), "metrics")


class TestOtherRoutes:
    def test_version(self, address):
        assert json.loads(ask(address, "/version")[2]) == {"version": VERSION}

    def test_models(self, api):
        (listed,) = api.models.list()
        model = api.models.retrieve("foretoken")
        assert api.get("/models/", cast_to=object) == api.get("/models", cast_to=object)
        assert listed == model and (model.id, model.object, model.max_model_len, model.has_chat_template) == ("foretoken", "model", 2048, True)
        assert not model.is_bundled and model.template_variables == []
        assert model.root == "foretoken" and model.parent is None, "vLLM's benchmark reads both names where it is told no model"
        assert model.method == "mtp" and {"mtp", "ngram", "none"} <= set(model.methods) and model.sampling_defaults == {}
        with pytest.raises(openai.NotFoundError):
            api.models.retrieve("gpt")

    def test_tokenize_and_detokenize(self, address):
        text = "def f(é):\n    return '🙂'"
        answer = json.loads(ask(address, "/tokenize", {"prompt": text})[2])
        assert answer["count"] == len(answer["tokens"]) > 5 and json.loads(ask(address, "/tokenize", {"text": text})[2]) == answer
        assert json.loads(ask(address, "/detokenize", {"tokens": answer["tokens"]})[2])["prompt"] == "<|endoftext|>" + text
        assert answer["max_model_len"] == 2048
        bare = json.loads(ask(address, "/tokenize", {"prompt": text, "add_special_tokens": False})[2])["tokens"]
        assert bare == answer["tokens"][1:], "as vLLM's benchmark and evaluation harnesses ask for it"
        messages = [{"role": "user", "content": "é"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
        chat = json.loads(ask(address, "/tokenize", {"messages": messages, "return_token_strs": True})[2])
        assert chat["count"] == len(chat["tokens"]) == len(chat["token_strs"]) > 5
        rendered = json.loads(ask(address, "/detokenize", {"tokens": chat["tokens"]})[2])["prompt"]
        assert rendered == Tokenizer(BUNDLED_MODEL).render_chat([{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}])
        tools = [{"type": "function", "function": {"name": "f"}}]
        own = {"messages": messages, "tools": tools}
        _, _, body = ask(address, "/v1/chat/completions", {**own, "max_tokens": 1})
        asked = json.loads(ask(address, "/tokenize", {**own, "tool_choice": "auto", "continue_final_message": False})[2])
        assert asked["count"] == json.loads(body)["usage"]["prompt_tokens"] > chat["count"], "as many as a chat with these tools has"
        for bad, message in (
            ({"prompt": "x", "messages": messages}, "one of them only"),
            ({"messages": messages, "add_special_tokens": True}, "add_special_tokens needs prompt or text"),
            ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt needs messages: text has no template"),
            ({"messages": []}, "messages: List should have at least 1 item"),
            ({"prompt": "x", "tools": tools}, "tools needs messages: text has no template"),
            ({"messages": messages, "tools": [{}]}, "tools[0] must be"),
            ({"text": "x" * 131_073}, "text has 131073 characters"),
        ):
            status, _, body = ask(address, "/tokenize", bad)
            assert status == 400 and message in json.loads(body)["error"]["message"]
        status, _, body = ask(address, "/detokenize", {"tokens": [1] * 1_000_001})
        assert status == 400 and json.loads(body)["error"]["message"] == "tokens has 1000001 tokens; the limit is 1000000"
        status, _, body = ask(address, "/detokenize", {"tokens": [1, 99999]})
        assert status == 400 and "token 99999 is not in the vocabulary of 4096 tokens" in json.loads(body)["error"]["message"]

    def test_the_tokenizer_model_takes_one_input(self, server):
        async def ask_tokenizer(**values):
            async with AsyncClient(server.grpc) as client:
                return await client.infer("tokenizer", **values)

        for values, seen in (({"text_input": "x", "input_ids": [1]}, "text_input and input_ids"), ({}, "none")):
            with pytest.raises(GenerateError, match=f"give one of text_input, messages, input_ids; got {seen}"):
                asyncio.run(ask_tokenizer(**values))
        answer = asyncio.run(ask_tokenizer(input_ids=[318, 297]))
        assert answer == {"text_output": [b"def f"], "tokens": [b"def", b" f"], "is_special": [False, False]}
        assert asyncio.run(ask_tokenizer(input_ids=[0, 318]))["is_special"] == [True, False]

    def test_the_tokenizer_model_refuses_what_no_context_holds(self, server, address):
        status, _, body = ask(address, "/tokenize", {"prompt": "x" * 131_073})
        assert status == 400 and json.loads(body)["error"]["message"] == "prompt has 131073 characters; the limit is 131072"
        assert ask(address, "/tokenize", {"prompt": "x" * 131_072})[0] == 200

    @pytest.mark.parametrize("values", [b'"text_input": ""', b'"input_ids": [99999]'])
    def test_an_id_that_is_no_text_tells_nothing_of_the_tokenizer(self, server, values):
        _, answer = server.post("/v2/models/tokenizer/generate", b'{"id": "\xff", ' + values + b"}")
        assert "Traceback" not in answer and "/" not in answer
        assert server.post("/v2/models/tokenizer/generate", {"text_input": "x"})[0] == 200

    def test_metrics(self, address, api):
        names = ("time_to_first_token_seconds_count", "time_per_output_token_seconds_count", "completion_tokens", "prompt_tokens")
        before = [read_metric(address, n) for n in names]
        requests = read_metric(address, "requests", path="/v1/completions", status="200")
        usage = complete(api).usage
        assert [read_metric(address, n) - b for n, b in zip(names, before)] == [1, 1, 12, usage.prompt_tokens]
        assert wait_until(lambda: read_metric(address, "requests", path="/v1/completions", status="200") == requests + 1)
        assert wait_until(lambda: read_metric(address, "requests_in_flight") == 1), "the one that asks"
        errors = read_metric(address, "errors", code="model_not_found")
        with pytest.raises(openai.NotFoundError):
            complete(api, model="gpt")
        assert wait_until(lambda: read_metric(address, "errors", code="model_not_found") == errors + 1)

    def test_server_timing(self, api):
        with api.completions.with_streaming_response.create(model="foretoken", prompt="x", max_tokens=1, stream=True) as response:
            assert 0 < float(re.fullmatch(r"first-token;dur=(\d+\.\d\d)", response.headers["server-timing"])[1]) < 60_000

    def test_where_it_listens(self, address, log):
        assert f"OpenAI's interface and the page: {address}\n" in log.read_text()

    def test_request_ids(self, address, log):
        _, headers, body = ask(address, "/v1/completions", {"prompt": "x", "max_tokens": 1}, {"x-request-id": "mine-1"})
        assert headers["x-request-id"] == "mine-1" and json.loads(body)["id"] == "cmpl-mine-1"
        assert ask(address, "/health", headers={"x-request-id": "probe"})[0] == ask(address, "/metrics", headers={"x-request-id": "probe"})[0] == 200
        assert ask(address, "/metrics", headers={"x-request-id": "posted"}, method="POST")[0] == 405
        assert wait_until(lambda: re.search(r"mine-1 POST /v1/completions 200", log.read_text()))
        assert wait_until(lambda: "posted POST /metrics 405" in log.read_text()) and " probe " not in log.read_text()
        _, headers, body = ask(address, "/v1/completions", {"prompt": "x", "top_p": 0}, {"x-request-id": "bad\tid" * 50})
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"]) and headers["x-request-id"] in json.loads(body)["error"]["message"]


BAD = [
    ({"prompt": "x", "n": 1000}, "n must be an integer from 1 to 64", "n"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens must be an integer >= 1, got 0", "max_tokens"),
    ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens must be an integer >= 0, got -1", "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**12}, "max_tokens: Input should be less than or equal to 2147483647, got 1000000000000", "max_tokens"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens: Input should be a valid integer, got '5'", "max_tokens"),
    ({"prompt": "x", "temperature": "hot"}, "temperature: Input should be a valid number", "temperature"),
    ({"prompt": "x", "temperature": float("nan")}, "temperature must be a finite number", "temperature"),
    ({"prompt": "x", "logprobs": 99}, "logprobs must be an integer from 0 to 20", "logprobs"),
    ({"prompt": "x", "logit_bias": {"70000": 1}}, "logit_bias names token 70000", "logit_bias"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias's keys must be token ids", "logit_bias"),
    ({"prompt": "x", "speculative": {"methud": "ngram"}}, "did you mean", "speculative"),
    ({"prompt": "x", "stream": "yes"}, "stream: Input should be a valid boolean", "stream"),
    ({"prompt": "x", "suffix": "y"}, "unknown or unsupported parameter 'suffix'", "suffix"),
    ({"prompt": 5}, "prompt: Input should be a valid string; or Input should be a valid list, got 5", "prompt"),
    ({"prompt": ""}, "the prompt is empty", None),
    ({"prompt": []}, "the prompt is empty", None),
    ({"prompt": [1, -1]}, "prompt[1]: Input should be greater than or equal to 0, got -1", "prompt"),
    ({"prompt": "x", "stop": ["a", 5]}, "stop[1]: Input should be a valid string, got 5", "stop"),
    ({"prompt": "x", "stream_options": {"usage": 1}}, "parameter 'stream_options.usage'", "stream_options"),
    ({"prompt": [1, 99999]}, "prompt[1] is 99999", "prompt"),
    ({"prompt": ["x"] * 1000}, "prompt has 1000 prompts; the limit is 256", None),
    ({"prompt": ["x"] * 256, "n": 64}, "n is 64, and prompt has 256 prompts: 16384 completions; the limit is 2048", None),
    ({"prompt": [[[]]] * 100_000}, "prompt[0][0]: Input should be", "prompt"),
    ({"prompt": "x", "text": "y"}, "give prompt, or text, and not both", None),
    ({}, "give prompt, or text", None),
    ([], "the body must be a JSON object", None),
    (b"{", "the body is not valid JSON", None),
    (b'{"prompt": "\\ud800"}', "prompt is not valid Unicode: '\\ud800' at 0", "prompt"),
    (b'{"prompt": "x", "\\ud800": 1}', "a key of the body is not valid Unicode: '\\ud800'", None),
    (b"[" * 100_000, "the body is not valid JSON: it is nested too deeply", None),
    (b'{"prompt": "\xff"}', "the body is not valid JSON: it is not UTF-8 at byte 12", None),
    (b'{"seed": ' + b"9" * 5000 + b"}", "the body is not valid JSON: Exceeds the limit (4300 digits) for integer string conversion", None),
    (b'{"prompt": "x", "prediction": {"type": "content", "content": "\\ud800"}}', "prediction is not valid Unicode: '\\ud800' at", "prediction"),
    ({"prompt": "x", "prediction": {"type": "content", "content": "x" * 200_000}}, ": prediction has 200000 characters; at most", "prediction"),
    (b"", "the body must be a JSON object", None),
    ({"prompt": "x" * 200_000}, "the prompt has 200000 characters", None),
    ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}},
     "response_format.json_schema.schema: Invalid type: strng", "response_format"),
    ({"prompt": "x", "guided_json": "{"}, ": guided_json is not valid JSON", "guided_json"),
    ({"prompt": "x", "regex": 5}, "regex: Input should be a valid string, got 5", "regex"),
    ({"prompt": "x", "json_schema": [5]}, "json_schema: Input should be a valid", "json_schema"),
]  # fmt: skip
BAD_CHATS = [
    ({"messages": []}, "messages: List should have at least 1 item", "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0]: one of role 'user' has no content, and calls no tools", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content: a part of type 'image_url': models of", "messages"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]: Unable to extract tag", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content[0].text: Field required", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}]}, "parameter 'messages[0].content[0].colour'",
     "messages"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0]: function_call: send tool_calls", "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "functions": [{"name": "f"}]}, "or []: send them as tools", "functions"),
    ({"messages": [{"role": "user", "content": "x"}], "web_search_options": {}}, "'web_search_options': no tools run here", "web_search_options"),
    ({"text": "x", "timeout_ms": 2**62}, "timeout_ms must be above 0 and below 1000000000000, got 4611686018427387904", "timeout_ms"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs needs logprobs true", None),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools[0] must be", "tools"),
    ({"text": "x", "max_completion_tokens": 0}, "max_completion_tokens must be an integer >= 1, got 0", "max_completion_tokens"),
    ({"text": "x", "logprobs": True, "top_logprobs": 99}, "top_logprobs must be an integer from 0 to 20, got 99", "top_logprobs"),
    ({"text": "x", "prompt": "y"}, "unknown or unsupported parameter 'prompt'", "prompt"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages is not valid Unicode: '\\ud800' at", "messages"),
    (b'{"messages": [{"role": "user", "content": "x", "a": ["\\udfff"]}]}', "messages is not valid Unicode: '\\udfff' at", "messages"),
    ({"messages": [{"role": "user", "content": "x" * 1_900_000}]}, "characters or more; the limit is 131072", "messages"),
]  # fmt: skip


class TestErrors:
    @pytest.mark.parametrize(
        ("path", "body", "message", "param"),
        [("/v1/completions", *case) for case in BAD] + [("/v1/chat/completions", *case) for case in BAD_CHATS],
        ids=lambda v: v[:30] if isinstance(v, str) else "",
    )
    def test_bad_requests(self, address, path, body, message, param):
        status, headers, answer = ask(address, path, body)
        error = json.loads(answer)["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert message in error["message"] and len(error["message"]) < 1000 and error["code"]
        assert set(error) == {"message", "type", "param", "code"} and headers["x-request-id"]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", b'{"prompt": "x", "max_tokens": 1, "speculative": {"a": %s}}'),
            ("/tokenize", b'{"messages": [{"role": "user", "content": "x", "a": %s}]}'),
        ],
    )
    def test_json_that_can_just_be_read(self, address, path, body):
        """What could not be written again for the server was the gateway's failure."""
        statuses = {ask(address, path, body % (b"[" * depth + b"]" * depth))[0] for depth in range(900, 1000, 3)}
        assert 400 in statuses <= {200, 400}

    def test_what_the_openai_client_raises(self, api):
        with pytest.raises(openai.BadRequestError, match="top_p must be a number above 0") as caught:
            complete(api, top_p=0, stream=True)  # the first part is awaited: a stream has a status too
        assert caught.value.code == "invalid_value" and caught.value.param == "top_p"
        with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist; there is 'foretoken'"):
            complete(api, model="gpt")
        for words in (3000, 100_000, 300_000):
            with pytest.raises(openai.BadRequestError, match=r"prompt has \d+ ") as long:
                complete(api, prompt="x " * words)
            assert long.value.code == "context_length_exceeded", "by which clients know that a shorter prompt would do"
        with pytest.raises(openai.APIStatusError, match="its timeout_ms passed") as late:
            complete(api, max_tokens=1900, extra_body={"timeout_ms": 200, "ignore_eos": True})
        assert late.value.status_code == 504

    def test_an_error_in_the_middle_of_a_stream(self, api, address):
        for timeout_ms in (500, 2000, 5000):  # whoever computes or sends may stand still for as long as the shorter ones
            status, _, raw = ask(address, "/v1/completions", {**LONG, "prompt": PROMPT, "timeout_ms": timeout_ms, "stream": True})
            if status == 200 and len(read_events(raw)) > 5:
                break
        *parts, error, done = read_events(raw)
        assert status == 200 and done == "[DONE]" and len(parts) > 3
        assert json.loads(error)["error"]["code"] == "timeout"
        with pytest.raises(openai.APIError, match="its timeout_ms passed"):
            list(complete(api, stream=True, max_tokens=1900, extra_body={"timeout_ms": 500, "ignore_eos": True}))

    def test_routes_that_are_not_there(self, address):
        for path, method, wanted in (
            ("/v1/nothing", "GET", 404),
            ("/v1/completions", "GET", 405),
            ("/v1/embeddings", "POST", 404),
            ("/", "DELETE", 405),
        ):
            status, headers, answer = ask(address, path, b"{}" if method == "POST" else None, method=method)
            error = json.loads(answer)["error"]
            assert status == wanted and error["type"] == "invalid_request_error" and bool(headers["allow"]) == (status == 405)
            assert status == 405 or "; there is /detokenize, /health, /metrics, /tokenize, /v1/chat/completions, " in error["message"]

        status, _, answer = ask(address, "/v1/responses/resp_1", method="GET")
        assert status == 404 and "no answer is stored" in json.loads(answer)["error"]["message"]

    @pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "/v1//completions", "/completions/"])
    def test_slashes_too_many(self, address, path):
        """Answered where they came: curl, for one, follows no redirection."""
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        connection.request("POST", path, json.dumps({"prompt": PROMPT, "max_tokens": 1}), {"content-type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()

    @pytest.mark.parametrize("is_streamed", [True, False])
    def test_http_1_0(self, address, is_streamed):
        """It has no chunks: their sizes would stand in the text."""
        data = json.dumps({"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": is_streamed}).encode()
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(HEAD.format(path="/v1/completions", length=len(data)).replace("HTTP/1.1", "HTTP/1.0").encode() + data)
            head, _, answer = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        *parts, end = read_events(answer) if is_streamed else (answer, "[DONE]")
        assert end == "[DONE]" and all(len(json.loads(part)["choices"]) == 1 for part in parts)
        assert not is_streamed or (answer.startswith(b"data: ") and answer.count(b"\n\n") == len(parts) + 1)

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_where_cached_tokens_lay(self, address, path):
        """As `sglang.bench_serving --cache-report` asks for it."""
        prompt = {"prompt": LOOPS * 4} if path == "/v1/completions" else {"messages": [{"role": "user", "content": LOOPS * 4}]}
        body = {**prompt, "max_tokens": 2, "return_cached_tokens_details": True}
        assert "sglext" not in json.loads(ask(address, path, {**body, "return_cached_tokens_details": False})[2])
        whole = json.loads(ask(address, path, body)[2])
        cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached and whole["sglext"] == {"cached_tokens_details": {"device": cached, "host": 0}}
        for options, behind in (({}, 0), ({"stream_options": {"include_usage": True}}, 1)):
            *parts, end = read_events(ask(address, path, {**body, "stream": True, **options})[2])
            told = [json.loads(part) for part in parts]
            assert end == "[DONE]" and [i for i, part in enumerate(told) if "sglext" in part] == [len(told) - 1 - behind]
            assert told[-1 - behind]["choices"] == [] and told[-1 - behind]["sglext"] == whole["sglext"]

    @pytest.mark.parametrize("begin", [b"0\r\n", b"0\r\nx: ", b"1;"], ids=["trailers", "one trailer", "extension"])
    def test_what_is_neither_head_nor_body_has_a_limit(self, address, begin):
        """Trailers were kept, without an end, beside what the head had."""
        data = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
        host, _, port = address.removeprefix("http://").partition(":")
        head = HEAD.format(path="/v1/completions", length="").replace("content-length: ", "transfer-encoding: chunked").encode()
        answer = b""
        with socket.create_connection((host, int(port)), timeout=60) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(head + b"%x\r\n%s\r\n" % (len(data), data) + begin)
            with contextlib.suppress(ConnectionError):
                for _ in range(40):
                    connection.sendall(b"x: y\r\n" * 10_000 if begin.endswith(b"0\r\n") else b"x" * 60_000)
                connection.sendall(b"\r\n\r\n" if b"0" in begin else b"\r\n \r\n0\r\n\r\n")
            while part := connection.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 400") and b"longer than 65536 bytes" in answer

    def test_trailers_are_passed_over(self, address):
        """They come when keys and sizes were looked at."""
        data = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
        host, _, port = address.removeprefix("http://").partition(":")
        head = HEAD.format(path="/v1/completions", length="").replace("content-length: ", "transfer-encoding: chunked").encode()
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head + b"%x\r\n%s\r\n0\r\nx-request-id: mine\r\n\r\n" % (len(data), data))
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200") and b"cmpl-mine" not in answer

    @pytest.mark.parametrize("pause", [0, 0.05], ids=["at once", "head first"])
    def test_another_protocol_is_not_spoken(self, address, pause):
        """Java's HttpClient asks for HTTP/2 with its first request, and Spring AI, for one, uses it: the body is the request's nevertheless."""
        data = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
        host, _, port = address.removeprefix("http://").partition(":")
        plain = HEAD.format(path="/v1/completions", length=len(data)).encode()
        more = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(plain.replace(b"connection: close\r\n", more))
            time.sleep(pause)
            connection.sendall(data + plain + data)
            answers = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answers.count(b"HTTP/1.1 200 OK") == 2 and answers.count(b'"finish_reason":"length"') == 2

    @pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models"])
    def test_head(self, address, path):
        """As aiperf asks whether there are metrics."""
        status, headers, answer = ask(address, path, method="HEAD")
        assert status == 200 and headers["content-type"] == ask(address, path)[1]["content-type"] and not answer

    def test_no_other_content_type(self, address):
        """A web page of somebody else may send text/plain with no preflight: CORS would not hold it back."""
        status, _, answer = ask(address, "/v1/completions", {"prompt": "x"}, {"content-type": "text/plain"})
        assert status == 400 and "application/json" in json.loads(answer)["error"]["message"]

    def test_no_content_encoding(self, address):
        status, _, answer = ask(address, "/v1/completions", gzip.compress(b'{"prompt": "x"}'), {"content-encoding": "gzip"})
        assert status == 415 and "content-encoding is 'gzip'" in json.loads(answer)["error"]["message"]
        assert ask(address, "/v1/completions", {"prompt": "x", "max_tokens": 1}, {"content-encoding": "identity"})[0] == 200

    @pytest.mark.parametrize(
        "path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page//etc/passwd", "/page/%2fetc%2fpasswd", "/../app.py"]
    )
    def test_path_traversal(self, address, path):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 404 and b"import" not in response.read()

    def test_huge_bodies(self, address):
        status, _, answer = ask(address, "/v1/completions", b'{"prompt": "' + b"x" * (5 << 20) + b'"}')
        assert status == 413 and "the limit is 4194304" in json.loads(answer)["error"]["message"]
        host = address.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=30)
        connection.request("POST", "/v1/completions", iter([b"x" * 65536] * 65), {"content-type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        name, _, port = host.partition(":")
        with socket.create_connection((name, int(port)), timeout=30) as waiting:  # as curl does, to be asked for it
            waiting.sendall(HEAD.format(path="/v1/completions", length=5 << 20).replace("\r\n\r\n", "\r\nexpect: 100-continue\r\n\r\n").encode())
            assert b"".join(iter(lambda: waiting.recv(4096), b"")).startswith(b"HTTP/1.1 413")

    def test_bodies_of_many_values(self, address):
        """Within the limit of bytes: the gateway answered nobody while it read them."""
        body = b'{"prompt": [' + b"5," * 1_100_000 + b'5], "max_tokens": 1}'
        status, _, answer = ask(address, "/v1/completions", body)
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (413, "request_too_large") and "the body has more than 1048576 commas" in error["message"]
        body = b'{"prompt": "x", "metadata": {"x": [' + b",".join([b"[" * 400 + b"]" * 400] * 3000) + b"]}}"
        status, _, answer = ask(address, "/v1/completions", body)
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (413, "request_too_large") and "more than 1048576 opening brackets" in error["message"]
        status, _, answer = ask(address, "/v1/completions", {"prompt": "x", "stop": ["x"] * 500_000})
        error = json.loads(answer)["error"]
        assert (status, error["message"], error["param"]) == (400, "stop has 500000 strings; the limit is 64", "stop")

    @pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n"], ids=["address", "header", "headers"])
    def test_a_head_without_end(self, running, start):
        """It is not kept, however long it gets."""
        address, process = running
        host, _, port = address.removeprefix("http://").partition(":")
        before = resident_megabytes(process.pid)
        more = b"y" * 10_000 if start[-1:] != b"\n" else b"y: %s\r\n" % (b"y" * 10_000)
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(start)
            with pytest.raises(OSError):
                for _ in range(5000):
                    connection.sendall(more)
        assert resident_megabytes(process.pid) - before < 20

    def test_half_a_request(self, address, api):
        """Neither half a head nor half a body holds anyone back."""
        host, _, port = address.removeprefix("http://").partition(":")
        halves = [socket.create_connection((host, int(port))) for _ in range(2)]
        halves[0].sendall(b"POST /v1/compl")
        halves[1].sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"prompt"')
        assert complete(api, max_tokens=2).usage.completion_tokens == 2
        for half in halves:
            half.close()
        assert wait_until(lambda: read_metric(address, "requests_in_flight") == 1)


class TestHangingUp:
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("prompts", [PROMPT, [PROMPT, LOOPS]], ids=["one", "several"])
    def test_pages_are_freed(self, server, address, stream, prompts):
        abandoned = read_metric(address, "requests", status="499")
        count = 2 if isinstance(prompts, list) else 1
        with server.cancels(count):
            connection = send_request(address, {**LONG, "prompt": prompts, "stream": stream})
            assert wait_until(lambda: server.metric("foretoken_requests_running") == count and server.metric("foretoken_kv_pages_held") > 0)
            with server.held_counting("foretoken_steps_total") as steps:
                connection.close()
                assert wait_until(lambda: read_metric(address, "requests", status="499") == abandoned + 1)
                # On the gateway's connection to the server this comes behind the cancellation.
                assert ask(address, "/tokenize", {"prompt": "x"})[0] == 200
        # A handful of some two thousand.
        assert server.metric("foretoken_steps_total") - steps < 60, "the steps of an answer that nobody reads"

    def test_leaving_the_loop_of_the_openai_client(self, server, api):
        with server.cancels(), complete(api, stream=True, max_tokens=1900, extra_body={"ignore_eos": True}) as parts:
            next(iter(parts))


def resident_megabytes(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


class TestManyClients:
    def test_a_stalled_reader_holds_nobody_back(self, server, running, api):
        address, process = running
        complete(api)
        before = resident_megabytes(process.pid)
        with send_request(address, WORDY, receive_buffer=4096) as stalled:
            for _ in range(4):
                assert complete(api, max_tokens=4).usage.completion_tokens == 4
            assert resident_megabytes(process.pid) - before < 40
            assert b"200 OK" in stalled.recv(4096)

    def test_500_connections(self, address, api):
        host, _, port = address.removeprefix("http://").partition(":")

        async def one(i: int) -> list[str]:
            reader, writer = await asyncio.open_connection(host, int(port))
            data = json.dumps({"prompt": f"x{i} =", "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
            writer.write(HEAD.format(path="/v1/completions", length=len(data)).encode() + data)
            raw = await asyncio.wait_for(reader.read(), 120)
            writer.close()
            assert b"200 OK" in raw, raw
            return [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]

        async def all_at_once():
            return await asyncio.gather(*(one(i) for i in range(500)))

        for events in asyncio.run(all_at_once()):
            assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert wait_until(lambda: read_metric(address, "requests_in_flight") == 1)
        assert complete(api).usage.completion_tokens == 12


class TestKeysAndOrigins:
    @pytest.fixture(scope="class")
    def guarded(self, server, tmp_path_factory):
        folder = tmp_path_factory.mktemp("guarded")
        keys = folder / "keys"
        keys.write_text("# who may come in\nfirst-key\n\n  second-key  \nclà\n", "utf-8")
        admins = folder / "admins"
        admins.write_text("admin-key\n")
        options = (f"--api-keys={keys}", "--cors-origin=http://127.0.0.1:5000", "--max-body-bytes=1000", "--served-model-name=tiny")
        with running_gateway(folder / "log", server.grpc, f"--admin-keys={admins}", *options) as (address, _):
            yield address

    def test_keys(self, guarded):
        for key in ("first-key", "second-key"):
            with open_client(guarded, key) as api:
                assert complete(api, model="tiny").usage.completion_tokens == 12
        for key in ("third-key", "first-ke", "# who may come in", "first-key second-key"):
            with open_client(guarded, key) as api, pytest.raises(openai.AuthenticationError) as caught:
                complete(api, model="tiny")
            assert caught.value.code == "invalid_api_key" and "first-key" not in str(caught.value)
        for path in ("/tokenize", "/v1/models", "/v1/nothing", "/openapi.json"):
            status, headers, _ = ask(guarded, path, {"prompt": "x"} if path == "/tokenize" else None)
            assert status == 401 and headers["www-authenticate"] == "Bearer"
        assert ask(guarded, "/v1/models", headers={"authorization": "Basic first-key"})[0] == 401
        assert ask(guarded, "/v1/models", headers={"authorization": "Bearer clà".encode().decode("latin-1")})[0] == 200, "as a file has it, in UTF-8"
        assert ask(guarded, "/v1/completions", b"x" * 10_000)[0] == 401, "before the body is looked at"
        for path in ("/health", "/metrics", "/", "/page/page.js"):
            assert ask(guarded, path)[0] == 200

    def test_what_is_for_administrators(self, guarded, address):
        def add(address: str, key: str, body: object) -> tuple[int, str]:
            status, _, answer = ask(address, "/v1/suffix_corpus", body, {"authorization": f"Bearer {key}"})
            return status, answer.decode()

        for key in ("first-key", "", "admin-ke"):
            status, answer = add(guarded, key, {"corpus": ["x"]})
            assert status == 401 and "administrator" in answer
        status, answer = add(guarded, "admin-key", {"corpus": ["x = 1", [5, 6]]})
        assert status == 400 and "the method suffix is not loaded" in answer, "this server's own answer"
        assert add(guarded, "admin-key", {"corpus": ["x", [-1]]})[0] == 400
        status, answer = add(address, "admin-key", {"corpus": ["x"]})
        assert status == 403 and "--admin-keys FILE" in answer, "where nobody needs a key"
        with open_client(guarded, "admin-key") as api, pytest.raises(openai.AuthenticationError):
            complete(api, model="tiny")

    def test_the_page_is_of_one_version_and_needs_nothing_from_elsewhere(self, guarded):
        for path in ("/", "/page/page.js", "/page/page.css"):
            headers = ask(guarded, path)[1]
            assert headers["cache-control"] == "no-cache" and headers["content-security-policy"].startswith("default-src 'self';")

    def test_body_limit(self, guarded):
        assert ask(guarded, "/v1/completions", {"prompt": "x" * 2000}, {"authorization": "Bearer first-key"})[0] == 413

    def test_origins(self, guarded, address):
        question = {"origin": "http://127.0.0.1:5000", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        status, headers, _ = ask(guarded, "/v1/completions", headers=question, method="OPTIONS")
        assert status == 200 and headers["access-control-allow-origin"] == "http://127.0.0.1:5000"
        assert ask(guarded, "/v1/models", headers={"origin": "http://127.0.0.1:5000"})[1]["access-control-allow-origin"], "errors too"
        assert ask(guarded, "/health", headers={"origin": "http://127.0.0.1:5001"})[1]["access-control-allow-origin"] is None
        status, headers, _ = ask(address, "/v1/completions", headers=question, method="OPTIONS")
        assert status == 405 and headers["access-control-allow-origin"] is None

    def test_a_key_file_without_keys(self, tmp_path, capsys):
        from deploy.cli import main

        (tmp_path / "keys").write_text("# nobody\n")
        assert main(["gateway", f"--api-keys={tmp_path / 'keys'}"]) == 2 and "has no key" in capsys.readouterr().err
        (tmp_path / "latin").write_bytes("clé".encode("latin-1"))
        for path in (tmp_path / "none", tmp_path, tmp_path / "latin"):
            assert main(["gateway", f"--api-keys={path}"]) == 2 and f"--api-keys {path}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--metrics-url=foo", "must be a URL such as http://127.0.0.1:8002/metrics, got 'foo'"),
        ("--metrics-url=127.0.0.1:8002", "must be a URL"),
        ("--served-model-name=", "a model's name has characters, got ''"),
        ("--metrics-url=http://127.0.0.1:port/metrics", "must be a URL"),
        ("--cors-origin=pages.example", "must be SCHEME://HOST or SCHEME://HOST:PORT with nothing behind it, or *, got 'pages.example'"),
        ("--cors-origin=https://pages.example/", "must be SCHEME://HOST or SCHEME://HOST:PORT with nothing behind it"),
        ("--max-body-bytes=0", "must be a number above 0, got '0'"),
        ("--max-body-bytes=4MiB", "must be a number above 0, got '4MiB'"),
    ],
)
def test_what_would_never_do_is_said_at_the_start(option, message, capsys):
    from deploy.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["gateway", option])
    assert stop.value.code == 2 and f"argument {option.partition('=')[0]}: {message}" in capsys.readouterr().err


@contextlib.contextmanager
def gateway_in_this_process(grpc: str, silence: int = cli.SILENCE_SECONDS) -> Iterator[str]:
    """Its address. Where limits of the application are shortened; with small buffers."""
    listener = cli.listen("127.0.0.1", 0, silence)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # for the connections too
    app = create_app(Settings(grpc))
    gateway = uvicorn.Server(uvicorn.Config(app, http=LimitedHeadProtocol, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=gateway.run, args=([listener],))
    thread.start()
    try:
        assert wait_until(lambda: gateway.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        gateway.should_exit = True
        thread.join(20)


def test_a_log_that_nobody_reads_keeps_nobody_waiting():
    """A pipe takes what it has room for; then whoever wrote a request's line stood still with all other requests, and did not end when told to."""
    (port,) = free_ports(1)
    command = [*FORETOKEN, "gateway", "--url=127.0.0.1:1", f"--port={port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        address = f"http://127.0.0.1:{port}"
        try:
            assert wait_until(lambda: answers_at(port))
            assert [ask(address, "/nothing")[0] for _ in range(100)] == [404] * 100
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
        assert 0 < process.stderr.read().count(b"GET /nothing 404") < 100


def answers_at(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def test_a_log_says_what_it_lost(monkeypatch):
    monkeypatch.setattr(gateway_log, "MAX_LINES", 2)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    lines = gateway_log.WaitingLines(writer)
    for number in range(8):
        lines.handle(logging.makeLogRecord({"msg": f"{number} {'x' * 5000}"}))  # none is written before somebody reads
    with os.fdopen(reader, "rb") as file:
        seen = [file.readline() for _ in range(2)]
        assert seen[0].startswith(b"0 x") and re.fullmatch(rb"[56] lines of this log were lost: it was not read\n", seen[1])
        assert file.readline().startswith(b"1 x")


def test_a_reader_that_stays_stalled_is_dropped(server, monkeypatch):
    monkeypatch.setattr(answers, "STALL_SECONDS", 2.0)
    with gateway_in_this_process(server.grpc) as address, send_request(address, WORDY, receive_buffer=4096), open_client(address) as api:
        while read_metric(address, "stalled_clients") == 0:
            assert complete(api, max_tokens=2).usage.completion_tokens == 2
        assert wait_until(lambda: server.metric("foretoken_requests_running") == 0)


def test_connections_of_clients_that_take_nothing_more_end(server, monkeypatch):
    """That of a stream that was dropped stayed, with what was written to it, until somebody read that; one whose answer was whole, likewise.

    The silence is much longer: a busy machine is to see the stream stall, too, before the system ends its connection."""
    monkeypatch.setattr(answers, "STALL_SECONDS", 0.5)

    def has_any_of(ports: set[int]) -> bool:
        return any(found.raddr and found.raddr.port in ports for found in psutil.Process().net_connections("tcp4") if found.laddr.port == port)

    whole = {**WORDY, "stream": False, "max_tokens": 64}
    with (
        gateway_in_this_process(server.grpc, silence=6) as address,
        send_request(address, WORDY, receive_buffer=4096) as streamed,
        send_request(address, whole, receive_buffer=4096) as unread,
    ):
        port = int(address.rpartition(":")[2])
        own = {client.getsockname()[1] for client in (streamed, unread)}
        assert wait_until(lambda: has_any_of(own))
        assert wait_until(lambda: read_metric(address, "stalled_clients") == 1 and not has_any_of(own)), "they stay"


def test_it_is_asked_whether_clients_that_wait_are_there() -> None:
    """Of one that vanishes without a word while its answer is computed nothing else tells."""
    with cli.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as own:
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, pause, count = (own.getsockopt(socket.IPPROTO_TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT))
        assert idle + count * pause == cli.SILENCE_SECONDS > answers.STALL_SECONDS, "a reader that stalls is counted as one"


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(entrance, "BODY_SECONDS", 1.0)
    with gateway_in_this_process(server.grpc) as address, open_client(address) as api:
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as half:
            half.sendall(HEAD.format(path="/v1/completions", length=100).encode() + b'{"prompt"')
            assert complete(api, max_tokens=300).usage.completion_tokens > 0, "an answer takes as long as it takes"
            raw = b"".join(iter(lambda: half.recv(65536), b""))
        assert raw.startswith(b"HTTP/1.1 408") and b"the body did not arrive within 1 s" in raw
        assert wait_until(lambda: read_metric(address, "errors", code="timeout") == 1)


@pytest.mark.parametrize("begin", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n\r\n\r\n"], ids=["nothing", "half", "breaks"])
def test_a_head_that_does_not_come_is_not_waited_for(server, monkeypatch, begin):
    """From the first one on: what is sent is a byte at a time."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    with gateway_in_this_process(server.grpc) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(begin)
            answer = b""
            with contextlib.suppress(OSError):
                while piece := connection.recv(4096):
                    answer += piece
                    connection.sendall(b"x" if b"200 OK" not in answer else b"\r")
        assert (b"did not arrive within 0.5 s" in answer) == begin.endswith(b"HT")


def test_a_lost_connection_ends_all_that_was_asked_on_it(server, caplog):
    """The one that is answered too, behind which another waits."""
    with gateway_in_this_process(server.grpc) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        data = json.dumps({**LONG, "prompt": PROMPT, "stream": True}).encode()
        head = HEAD.format(path="/v1/completions", length=len(data)).replace("connection: close\r\n", "").encode()
        with server.cancels(), socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(2 * (head + data))
            assert b"200 OK" in connection.recv(4096)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_closes_its_side_gets_its_answer(server, is_streamed):
    """As `nc -N` does, all that it asked on the connection; one that is gone altogether is told from it, and has hung up."""
    body = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0, "stream": is_streamed}
    with gateway_in_this_process(server.grpc) as address:
        for is_last in (True, False):
            with send_request(address, body, connection="close" if is_last else "keep-alive") as connection:
                if not is_last:
                    connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
                raw = b"".join(iter(lambda: connection.recv(65536), b""))
            assert raw.count(b"HTTP/1.1 200 OK") == 2 - is_last and b'"finish_reason":"length"' in raw and (b'"version"' in raw) != is_last
        with server.cancels(8), send_request(address, {**LONG, "prompt": PROMPT, "n": 8, "stream": is_streamed}) as connection:
            assert wait_until(lambda: server.metric("foretoken_requests_running") == 8)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(4096)
            assert server.metric("foretoken_requests_running") == 8


@pytest.mark.parametrize(
    "begin", [b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{", b"GET /he", b""], ids=["body", "head", "none"]
)
def test_a_client_that_closes_its_side_too_early_is_not_waited_for(server, begin):
    with gateway_in_this_process(server.grpc) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(begin)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        counted = float(begin.startswith(b"POST"))
        assert wait_until(lambda: read_metric(address, "requests", status="499") == counted)
        assert read_metric(address, "requests", status="400") == read_metric(address, "errors") == 0, "nobody was told"


def test_clients_of_old_that_close_their_side(server):
    """HTTP/1.0 knows nothing that could be sent before an answer: what comes at once is answered, and a generation ends."""
    with gateway_in_this_process(server.grpc) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            assert b" 200 OK" in b"".join(iter(lambda: connection.recv(4096), b""))
        data = json.dumps({**LONG, "prompt": PROMPT}).encode()
        with server.cancels(), socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(HEAD.format(path="/v1/completions", length=len(data)).replace("1.1", "1.0").encode() + data)
            assert wait_until(lambda: server.metric("foretoken_requests_running") == 1)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""


def test_a_stream_that_waits_is_not_silent(servers, monkeypatch):
    """Comments come while another request holds the only place, before the first token; clients read on as ever, and errors are events then."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_SECONDS", 0.2)
    server = servers.get("--max-batch-size=1")
    with (
        gateway_in_this_process(server.grpc) as address,
        open_client(address) as api,
        contextlib.ExitStack() as slowed,
        send_request(address, {**LONG, "prompt": PROMPT, "stream": True, "n": 8}) as first,  # one after the other
    ):
        slowed.enter_context(server.slowed())
        assert wait_until(lambda: server.metric("foretoken_requests_running") == 1)
        short = {"prompt": LOOPS, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        waiting = [send_request(address, {**short, **more}) for more in ({"stream": True}, {"stream": True, "timeout_ms": 4000}, {})]
        streamed = complete(api, LOOPS, max_tokens=4, stream=True)  # it returns with the first comment
        assert wait_until(lambda: server.metric("foretoken_requests_waiting") >= 2)
        held = waiting[0].recv(65536)
        assert b"200 OK" in held and b"server-timing" not in held
        late = b"".join(iter(lambda: waiting[1].recv(65536), b""))
        assert late.startswith(b"HTTP/1.1 200") and b": keep-alive\n\n" in late and b'"code":"timeout"' in late and b"data: [DONE]" in late
        first.close()
        slowed.close()
        expected = "".join(p.choices[0].text for p in streamed)
        raw, whole = (b"".join(iter(lambda s=s: s.recv(65536), b"")) for s in waiting[::2])
        comments, events = (held + raw).count(b": keep-alive\n\n"), [json.loads(e) for e in re.findall(rb"data: ({.*})\n\n", raw)]
        assert comments >= 1 and raw.index(b"data: ") > 0 and "".join(e["choices"][0]["text"] for e in events) == expected
        assert b"keep-alive\n\n" not in whole and json.loads(whole.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected


def test_health_while_the_server_refuses(tmp_path):
    """A request from before goes on, and says nothing about those that come now."""
    with serve(tmp_path / "log") as server, gateway_in_this_process(server.grpc) as address:
        assert ask(address, "/health")[0] == 200
        folders = list(tmp_path.glob("repository-*/decode/1"))
        assert len(folders) == 1
        with server.slowed(), send_request(address, {**LONG, "prompt": PROMPT, "stream": True, "n": 8}) as stream:  # so that it is not over first
            assert stream.recv(4096)
            (folders[0] / f"drain-{server.pid}").write_text("60")
            chunks, found = threading.Event(), []

            def read() -> None:
                with contextlib.suppress(OSError):  # the test is over
                    while stream.recv(65536):
                        chunks.set()

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            assert wait_until(lambda: ask(address, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 503)
            time.sleep(FRESH_SECONDS)  # an answer from before is good for so long
            while len(found) < 5 and reader.is_alive():
                chunks.clear()
                assert chunks.wait(60)  # so that the stream has had an answer since the last look
                found.append(ask(address, "/health")[0])
            assert set(found) == {503} and len(found) >= 2
        os.killpg(server.process.pid, signal.SIGKILL)  # it was told to drain, and would wait to be told again


def test_a_port_that_is_taken(tmp_path, capsys):
    from deploy.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["gateway", "--host=127.0.0.1", f"--port={port}"]) == 1
    assert f"cannot listen on 127.0.0.1, port {port}: [Errno 98]" in (said := capsys.readouterr().err) and "--port" in said
    assert main(["gateway", "--host=256.1.1.1", "--port=0"]) == main(["gateway", "--host=é..x", "--port=0"]) == main(["gateway", "--port=70000"]) == 1


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_all_addresses_are_those_of_ipv4_too(monkeypatch):
    """As Triton's gRPC and the supervisor's port have it: a health check on 127.0.0.1 found nobody at `--host ::`."""
    import uvicorn

    from deploy.cli import main

    def connect(_, sockets):
        socket.create_connection(("127.0.0.1", sockets[0].getsockname()[1]), timeout=10).close()
        raise SystemExit(9)

    monkeypatch.setattr(uvicorn.Server, "run", connect)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="9"):
        main(["gateway", "--host=::", "--port=0"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_being_told_to_end_lets_requests_end(server, tmp_path, number):
    """By a terminal that closes, too. New connections are refused meanwhile."""
    with running_gateway(tmp_path / "log", server.grpc) as (address, process):
        with send_request(address, {**LONG, "prompt": PROMPT, "stream": True, "max_tokens": 300}) as stream:
            held = stream.recv(4096)
            process.send_signal(number)
            assert wait_until(lambda: not is_accepting(address))
            raw = held + b"".join(iter(lambda: stream.recv(65536), b""))
        assert b'"finish_reason":"length"' in raw and b"data: [DONE]" in raw
        assert process.wait(20) == 0


def is_accepting(address: str) -> bool:
    host, _, port = address.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        return True
    except OSError:
        return False


def test_the_server_restarts_under_the_gateway(tmp_path):
    """Requests in flight get an error, /health tells, and all is well again when the server is back: here with a model that does not converse."""
    ports = free_ports(3)
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, folder, ignore=shutil.ignore_patterns("model.py", "__pycache__"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with contextlib.ExitStack() as stack:
        address, _ = stack.enter_context(running_gateway(tmp_path / "gateway", f"127.0.0.1:{ports[1]}"))
        health = lambda: ask(address, "/health")[0]  # noqa: E731
        api = stack.enter_context(open_client(address))
        assert health() == 503
        with pytest.raises(openai.InternalServerError, match="failed to connect") as caught:
            complete(api)
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"
        assert "127.0.0.1" not in str(caught.value), "where the server is, is nobody's business"
        with serve(tmp_path / "log", ports=ports) as server:
            assert wait_until(lambda: health() == 200)
            with server.slowed():
                streams = [send_request(address, {**LONG, "prompt": f"x{i} = ", "stream": i < 4}) for i in range(6)]
                assert wait_until(lambda: server.metric("foretoken_requests_running") == 6)
                os.killpg(server.process.pid, signal.SIGKILL)
            for i, stream in enumerate(streams):
                raw = b"".join(iter(lambda s=stream: s.recv(65536), b""))
                if i < 4 and b"200 OK" in raw:
                    assert b'"code":"unavailable"' in raw and b"data: [DONE]" in raw
                else:
                    assert b" 503 " in raw.split(b"\r\n")[0] and b'"code":"unavailable"' in raw
            assert health() == 503
        with serve(tmp_path / "log2", f"--model={folder}", ports=ports):
            assert wait_until(lambda: health() == 200)
            assert complete(api).usage.completion_tokens == 12
            with pytest.raises(openai.BadRequestError, match="this model has no chat template"):
                converse(api)


def test_the_interfaces_own_description_names_each_operation_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        operations = [operation for path in create_app(Settings("127.0.0.1:1")).openapi()["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names)) > 10
