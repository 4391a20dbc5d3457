"""Requests that no server should trip over: wrong types and sizes, missing and unknown inputs, ids and bytes from nowhere."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.soak.wire import JSON_INPUTS, Tensor, pack

VOCABULARY = 4096
CONTEXT = 2048
"""Tokens, of the bundled model."""
HALF = "a\ud83d"
"""Half a surrogate pair."""
INT32 = 2**31 - 1

Values = dict[str, Any]


def _deep(depth: int) -> str:
    return "[" * depth + "]" * depth


BAD_VALUES: dict[str, Callable[[random.Random], Values]] = {
    "max_tokens": lambda r: {"max_tokens": r.choice((0, -1, -(2**31)))},
    "min above max": lambda r: {"min_tokens": 9, "max_tokens": 8},
    "temperature": lambda r: {"temperature": r.choice((-1.0, math.nan, math.inf))},
    "top_p": lambda r: {"top_p": r.choice((0.0, -0.5, 1.5, math.nan))},
    "top_k": lambda r: {"top_k": r.choice((-2, -(2**31)))},
    "min_p": lambda r: {"min_p": r.choice((-0.1, 1.1, math.nan))},
    "penalties": lambda r: {r.choice(("presence_penalty", "frequency_penalty", "repetition_penalty")): r.choice((-3.0, 11.0, math.nan, math.inf))},
    "n": lambda r: {"n": r.choice((0, -1, 65, INT32))},
    "logprobs": lambda r: {"logprobs": r.choice((-1, 21, INT32))},
    "too many stops": lambda r: {"stop": ["x"] * r.randint(65, 2000)},
    "long stops": lambda r: {"stop": ["y" * r.randint(8193, 60000)]},
    "half a pair in stop": lambda r: {"stop": [HALF]},
    "too many bad words": lambda r: {"bad_words": [f"w{i}" for i in range(r.randint(257, 5000))]},
    "long bad words": lambda r: {"bad_words": ["z" * r.randint(16385, 80000)]},
    "half a pair in bad words": lambda r: {"bad_words": ["ok", HALF]},
    "too many stop tokens": lambda r: {"stop_token_ids": list(range(r.randint(257, 4000)))},
    "biases": lambda r: {"logit_bias": r.choice(({"x": 1.0}, {"1": 101.0}, {"1": "a"}, {"99999999999": 1.0}, {str(VOCABULARY): 1.0}, [1], 5))},
    "too many biases": lambda r: {"logit_bias": {str(i): 1.0 for i in range(1025)}},
    "no JSON": lambda r: {"speculative": r.choice(("{", "nul", "{'a': 1}", HALF, _deep(r.choice((50, 5000)))))},
    "speculative keys": lambda r: {"speculative": r.choice(({"k": 3}, {"Method": "ngram"}, {"method": "ngram", "": 0}, {"\u0000": 1}))},
    "speculative method": lambda r: {"speculative": {"method": r.choice(("best", 3, [], {"a": 1}, "m" * 5000))}},
    "speculative count": lambda r: {"speculative": {"num_speculative_tokens": r.choice((-1, 17, 2.5, True, "3", None, 10**30))}},
    "speculative strategy": lambda r: {"speculative": {"verify_strategy": r.choice(("", "target", 1, None))}},
    "forms": lambda r: {
        "structured_outputs": r.choice(
            (
                {},
                [],
                {"regex": "("},
                {"regex": "a" * r.randint(131_073, 300_000)},
                {"json": {"type": "thing"}},
                {"json": {"$ref": "#/nowhere"}},
                {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "regex": "a"},
                {"choice": []},
                {"choice": [3]},
                {"grammar": "start: nothing"},
                {"grammar": "start: start"},
                {"json": "{" * 100},
                {"Json": {}},
                {"json": {"enum": []}},
                _deep(4000),
            )
        )
    },
    "a prediction": lambda r: {
        "speculative": {"prediction": r.choice((5, [1, -1], [VOCABULARY], [True], "a" * 200_000, [1] * 5000, {"a": 1}, HALF))}
    },
    "tools": lambda r: {
        "text_input": None,
        "messages": [{"role": "user", "content": "a"}],
        "tools": r.choice(({"a": 1}, "x", [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}], [1], _deep(2000))),
    },
    "a choice without tools": lambda r: {"tool_choice": r.choice(("required", {"type": "function"}))},
    "empty prompt": lambda r: {"text_input": ""},
    "half a pair in the prompt": lambda r: {"text_input": f"def {HALF}"},
    "long prompt": lambda r: {"text_input": r.choice(("é", "a b ", "\n")) * r.randint(CONTEXT * 8, CONTEXT * 70)},
    "ids from nowhere": lambda r: {"text_input": None, "input_ids": [1, 2, r.choice((-1, VOCABULARY, VOCABULARY + 7, INT32, -(2**31)))]},
    "too many ids": lambda r: {"text_input": None, "input_ids": [5] * r.randint(CONTEXT, 40 * CONTEXT)},
    "no ids": lambda r: {"text_input": None, "input_ids": []},
    "no prompt": lambda r: {"text_input": None},
    "two prompts": lambda r: {"input_ids": [1, 2]},
    "messages that are none": lambda r: {"text_input": None, "messages": r.choice(([], {}, "x", [1], [{"role": "user"}], [[]], None, _deep(3000)))},
    "long messages": lambda r: {"text_input": None, "messages": [{"role": "user", "content": "word " * r.randint(30_000, 300_000)}]},
    "half a pair in messages": lambda r: {"text_input": None, "messages": '[{"role": "user", "content": "a\\ud83d"}]'},
    "a template without end": lambda r: {"text_input": None, "messages": [{"role": "user", "content": "a", "spin": 100_000}]},
    "a template too long": lambda r: {"text_input": None, "messages": [{"role": "user", "content": "ab" * 200, "repeat": 90_000}]},
    "timeout": lambda r: {"timeout_ms": r.choice((0, -5, -(2**63)))},
}
"""What decode must refuse; None takes an input away."""

ODD_VALUES: dict[str, Callable[[random.Random], Values]] = {
    "priority": lambda r: {"priority": r.choice((-(2**31), INT32))},
    "a short time": lambda r: {"timeout_ms": r.randint(1, 60), "max_tokens": 200},
    "odd text": lambda r: {"text_input": "".join(chr(r.choice((0, 7, 0x301, 0x202E, 0xFFFF, 0x1F600, 0x10FFFF))) for _ in range(30))},
    "any ids": lambda r: {"text_input": None, "input_ids": [r.randrange(VOCABULARY) for _ in range(r.randint(1, 400))]},
    "a full context": lambda r: {"text_input": None, "input_ids": [r.randrange(2, 500)] * (CONTEXT - 1), "max_tokens": 5},
    "many of them": lambda r: {"n": r.randint(3, 12), "temperature": 1.0},
    "hot": lambda r: {"temperature": 1e30},
    "other rules": lambda r: {
        "temperature": 1.0,
        "speculative": {"method": r.choice(("mtp", "suffix", "ngram")), "verify_strategy": r.choice(("rejection", "topp"))},
    },
    "empty lists": lambda r: {"stop": [], "bad_words": [], "stop_token_ids": []},
    "echo": lambda r: {"echo": True, "logprobs": r.randint(0, 20)},
}
"""What is answered, with whatever it may be."""

RARE = ("a template without end", "a template too long", "long messages", "a full context")
"""They cost seconds of a core."""


def choose_values(rng: random.Random) -> tuple[str, Values, bool]:
    """A name, decode's inputs, and whether they must be refused."""
    while True:
        bad = rng.random() < 0.8
        name = rng.choice(list(BAD_VALUES if bad else ODD_VALUES))
        if name not in RARE or rng.random() < 0.15:
            break
    values = {"text_input": "def f(x):", "max_tokens": 4, **(BAD_VALUES if bad else ODD_VALUES)[name](rng)}
    return name, {k: v for k, v in values.items() if v is not None}, bad


def break_tensors(rng: random.Random) -> tuple[str, str, list[Tensor], str]:
    """A request that Triton itself should refuse: what is wrong, model, tensors, version."""
    tensors = pack({"text_input": "def f(x):", "max_tokens": 4})
    text, count = tensors
    kinds: dict[str, tuple[str, list[Tensor], str]] = {
        "unknown input": ("decode", [*tensors, Tensor(rng.choice(("bogus", "", "é" * 50)), "INT32", [1], b"\0\0\0\0")], ""),
        "unknown model": (rng.choice(("bogus", "decode ", "d" * 5000, "../decode")), tensors, ""),
        "unknown version": ("decode", tensors, rng.choice(("9", "x", "-1"))),
        "wrong type": ("decode", [text, replace(count, datatype=rng.choice(("FP32", "INT64", "BYTES", "BF16", "XX", "")))], ""),
        "wrong shape": ("decode", [text, replace(count, shape=rng.choice(([2], [1, 1], [], [0], [-1], [2**40], [2**62, 4])))], ""),
        "too few bytes": ("decode", [text, replace(count, raw=count.raw[: rng.randint(0, 3)])], ""),
        "too many bytes": ("decode", [text, replace(count, raw=count.raw * rng.choice((2, 1000)))], ""),
        "lengths that lie": ("decode", [replace(text, raw=rng.choice((b"\xff\xff\xff\xff", b"\x09\0\0\0a", b"\0", b"")))], ""),
        "an input twice": ("decode", [text, text, count], ""),
        "no inputs": (rng.choice(("decode", "tokenizer", "generate")), [], ""),
    }
    what = rng.choice(list(kinds))
    return what, *kinds[what]


def to_json(values: Values, rng: random.Random) -> bytes:
    """Inputs as a body of Triton's generate extension or of the gateway, with some things that only JSON can say."""
    values = dict(values)
    for name in JSON_INPUTS:
        if name in values and not isinstance(values[name], str):
            values[name] = json.dumps(values[name])
    if rng.random() < 0.3:
        name = rng.choice(("max_tokens", "text_input", "stop", "stream", "n", "id", "unknown_key"))
        values[name] = rng.choice((None, True, -1, 1.5, 2**70, "x", [], [[]], {}, {"a": []}, [1, "a"], HALF, "\0"))
    return json.dumps(values).encode()


def to_openai(values: Values, rng: random.Random) -> tuple[str, bytes, bool]:
    """Path, body, and whether something was changed beyond the values."""
    names = {"text_input": "prompt", "input_ids": "prompt"}
    body: dict[str, Any] = {names.get(k, k): v for k, v in values.items()}
    for name in JSON_INPUTS:
        if isinstance(body.get(name), str):
            with contextlib.suppress(ValueError, RecursionError):
                body[name] = json.loads(body[name])
    path = "/v1/chat/completions" if "messages" in body or rng.random() < 0.2 else "/v1/completions"
    if path == "/v1/chat/completions" and "messages" not in body:
        body["messages"] = [{"role": "user", "content": str(body.pop("prompt", "a"))}]
        body.pop("echo", None)
        return path, json.dumps(body).encode(), True
    is_changed = {"text_input", "input_ids"} <= set(values)  # both are its prompt
    if rng.random() < 0.4:
        is_changed = True
        name = rng.choice(("prompt", "messages", "model", "stream", "stream_options", "stop", "user", "functions", "n", "logprobs"))
        body[name] = rng.choice((None, True, -1, 1.5, 2**70, "x", [], [[]], {}, {"a": []}, [1, "a"], HALF, "\0", ["a"] * 300, [[1], "a"]))
    return path, json.dumps(body).encode(), is_changed


BAD_BODIES: tuple[bytes, ...] = (
    b"", b"{", b"null", b"[]", b'"x"', b"{}", b"\xff\xfe{}", b'{"prompt": "\xff"}', b'{"text_input": "\\ud83d"}',
    b'{"id": "\xff", "text_input": "a"}', b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', b'{"text_input": 1e999}',
    b"[" * 300 + b"]" * 300, b'{"a":' * 200 + b"1" + b"}" * 200, b"\0" * 1000,
)  # fmt: skip
"""Of either HTTP interface."""
