"""Configuration, sampling parameters and the launcher: what is wrong is refused before anything runs, and the message says what and why."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import errno
import importlib.util
import itertools
import json
import logging
import math
import os
import py_compile
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import tritonclient.grpc.model_config_pb2 as model_config
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from backend import LLM
from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, DEFAULT_DRAFTER, REPOSITORY, EngineConfig, ParallelConfig, parse_bytes
from backend.errors import ConfigError, ModelError
from backend.request_speculation import resolve
from backend.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from backend.speculative_config import METHODS, MODEL_METHODS, SpeculativeConfig, normalize_method
from backend.structured_outputs import MAX_CHARACTERS as MAX_STRUCTURE
from backend.structured_outputs import MAX_CHOICES, MAX_PATTERN_CHARACTERS, StructuredOutputs
from deploy import launcher, options, rendering, served_model, server
from deploy.bundled import DEFAULT_SPECULATION
from deploy.cli import main, make_parser
from deploy.config_file import read_yaml
from deploy.server import LaunchError, free_ports
from deploy.supervision import processes
from deploy.together import FORETOKEN
from tests.conftest import fake_server
from tests.small import SMALL_MODEL

NAN, INF = math.nan, math.inf
HUGE = 10**400  # an integer that no float can hold

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


def field_names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]


# -- sections -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_batchsize": 4}, "unknown key 'max_batchsize'; did you mean \"max_batch_size\"?"),
        ({"tensor_parallel": 2}, "unknown key 'tensor_parallel'"),
        ({"qqqq": 1}, "unknown key 'qqqq'; known keys: activations, async_scheduling, cascade_attention, cpu_kernels, device, disaggregation, "),
        ({5: 1}, "unknown key 5"),
        ({"speculative_config": {"num_speculative_token": 3}}, 'did you mean "num_speculative_tokens"?'),
        ({"parallel_config": {"expert_parallel": 2}}, "parallel_config.expert_parallel must be bool, got 2"),
        ({"parallel_config": {"tensor_parallel_sise": 1}}, 'did you mean "tensor_parallel_size"?'),
    ],
)
def test_unknown_keys_name_the_nearest(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dict(values)
    assert message in str(caught.value)
    if isinstance(next(iter(values.values())), dict):
        assert next(iter(values)) in str(caught.value), "the section is named too"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable_prefix_caching", "False"),
        ("enable_prefix_caching", 0),
        ("enable_prefix_caching", None),
        ("max_batch_size", "8"),
        ("max_batch_size", 8.0),
        ("max_batch_size", True),
        ("max_batch_size", None),
        ("max_model_len", "2048"),
        ("num_threads", 1.5),
        ("num_threads", False),
        ("model", 5),
        ("model", None),
        ("dtype", None),
        ("device", 0),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", True),
        ("gpu_memory_utilization", HUGE),
        ("kv_cache_memory", 1.5),
        ("kv_cache_memory", True),
        ("kv_cache_memory", [1]),
        ("speculative_config", "ngram"),
        ("speculative_config", None),
        ("speculative_config", []),
        ("parallel_config", 2),
    ],
)
def test_wrong_types_are_refused(key: str, value: object) -> None:
    """A string "False" is true to Python: a wrong type must be an error, and never a guess."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dict({key: value})
    message = str(caught.value)
    assert message.startswith(f"{key} must be "), message
    assert repr(value)[:80] in message


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("dtype", ["float64", "FLOAT32", ""], ["auto", "float32", "bfloat16", "float16"]),
        ("device", ["gpu", "cuda:", "cuda:x", "cpu:0", ""], ["auto", "cpu", "cuda", "cuda:0", "cuda:11"]),
        ("unknown_tokens", ["warn", ""], ["error", "refuse"]),
        ("cpu_kernels", ["0", "AVX2", "sse", ""], ["auto", "none", "any", "avx2", "avx512", "amx"]),
        ("max_batch_size", [0, -1, 257], [1, 256]),
        ("max_waiting", [-1], [0, 10**6]),
        ("max_model_len", [-1, 0, 1], [2, None]),
        ("max_num_batched_tokens", [0, 255], [256, 10**6, None]),
        ("max_step_ms", [-1.0, NAN], [0, 0.5, 30, None]),
        ("page_size", [0, -16, 3, 24, 2048], [1, 16, 1024]),
        ("gpu_memory_utilization", [0.0, -0.5, 1.01, 2, NAN, INF], [0.01, 1, 1.0]),
        ("num_threads", [0, -1, 1025], [1, 1024, None]),
        ("kv_cache_memory", [0, -1, "0", "-2GiB", "", "GiB", "2 XB", "two", "nan", "inf", "1e999"], [1, "1", "2GiB", None]),
        (
            "parallel_config",
            [{"tensor_parallel_size": 65}, {"nnodes": 0}, {"nnodes": 2}, {"node_rank": 1}, {"master": "a:1"}, {"ranks": "threads"}],
            [{}, {"tensor_parallel_size": 1}, {"tensor_parallel_size": 64}, {"expert_parallel": True}, {"ranks": "instances"}],
        ),
    ],
)
def test_ranges(key: str, bad: list[Any], good: list[Any]) -> None:
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_dict({key: value})
        named = next(iter(value)) if isinstance(value, dict) else key
        assert named in str(caught.value), f"{key}={value!r}: {caught.value}"
    for value in good:
        EngineConfig.from_dict({key: value})


def test_the_token_budget_covers_the_batch() -> None:
    EngineConfig.from_dict({"max_batch_size": 4, "max_num_batched_tokens": 4})
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens must be >= max_batch_size \(5\), got 4"):
        EngineConfig.from_dict({"max_batch_size": 5, "max_num_batched_tokens": 4})


@pytest.mark.parametrize("values", [None, [], "x", 3, [("model", "x")]])
def test_a_section_is_built_from_a_mapping(values: object) -> None:
    with pytest.raises(ConfigError, match="EngineConfig must be an object of keys and values"):
        EngineConfig.from_dict(values)


@given(
    values=st.dictionaries(st.sampled_from(field_names(EngineConfig)) | st.text(max_size=6), JSON_VALUES, max_size=3)
    | st.fixed_dictionaries({"speculative_config": st.dictionaries(st.sampled_from([*field_names(SpeculativeConfig), "x"]), JSON_VALUES, max_size=3)})
)
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_configuration_or_a_configuration_error(values: dict[str, Any]) -> None:
    try:
        config = EngineConfig.from_dict(values)
    except ConfigError as error:
        assert str(error)
    else:
        assert EngineConfig.from_dict(json.loads(config.as_json())) == config


def test_sections_are_frozen_and_convert_what_is_harmless() -> None:
    config = EngineConfig.from_dict({"gpu_memory_utilization": 1, "speculative_config": SpeculativeConfig(method="ngram")})
    assert config.gpu_memory_utilization == 1.0 and isinstance(config.gpu_memory_utilization, float)
    assert config.speculative_config == SpeculativeConfig(method="ngram")
    assert config.parallel_config == ParallelConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_batch_size = 3  # type: ignore[misc]


def test_the_resolved_configuration_is_one_line_of_json() -> None:
    config = EngineConfig.from_dict({"kv_cache_memory": "2GiB", "speculative_config": {"method": "NGRAM", "num_speculative_tokens": 3}})
    line = config.as_json()
    assert "\n" not in line
    assert json.loads(line)["kv_cache_memory"] == 2 * 2**30
    assert EngineConfig.from_dict(json.loads(line)) == config


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2 GiB", 2 * 2**30),
        (" 2gib ", 2 * 2**30),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("3MB", 3 * 10**6),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("1k", 1024),
        ("2m", 2 * 2**20),
        ("2G", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("100b", 100),
    ],
)
def test_parse_bytes(value: int | str, expected: int) -> None:
    assert parse_bytes("kv_cache_memory", value) == expected


# -- speculation ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [
        (None, "none"),
        ("none", "none"),
        ("None", "none"),
        ("Naive", "naive"),
        ("NGRAM", "ngram"),
        ("ngram_match", "ngram"),
        ("Inference_With_Reference", "ngram"),
        ("Suffix", "suffix"),
        ("MTP", "mtp"),
        ("deepseek_mtp", "mtp"),
        ("Ernie_MTP", "mtp"),
        ("glm4_moe_lite_mtp", "mtp"),
        ("ngram_gpu", "ngram"),
    ],
)
def test_methods_have_one_name_and_many_spellings(given_name: str | None, expected: str) -> None:
    assert normalize_method(given_name) == expected
    assert SpeculativeConfig.from_dict({"method": given_name}).method == expected
    methods = {"method": "none", "request_methods": [given_name] if given_name else []}
    assert SpeculativeConfig.from_dict(methods).request_methods == ((expected,) if given_name else ())
    assert resolve(SpeculativeConfig(method="mtp", request_methods=("suffix",)), {"method": given_name}).method == expected


def test_unknown_methods_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"method 'n-gram' is not one of none, naive, ngram, suffix, mtp, .*did you mean \"ngram\"\?"):
        SpeculativeConfig.from_dict({"method": "n-gram"})
    with pytest.raises(ConfigError, match=r"method 'best' is not one of none, naive, ngram, suffix, mtp, .* \(case-insensitive\)$"):
        SpeculativeConfig.from_dict({"method": "best"})
    with pytest.raises(ConfigError, match="method must be"):
        SpeculativeConfig.from_dict({"method": 5})


def test_keys_of_other_engines_are_taken() -> None:
    config = SpeculativeConfig.from_dict({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2})
    assert (config.max_ngram_size, config.min_ngram_size) == (4, 2)
    with pytest.raises(ConfigError, match="max_ngram_size is given twice"):
        SpeculativeConfig.from_dict({"method": "ngram", "prompt_lookup_max": 4, "max_ngram_size": 4})
    with pytest.raises(ConfigError, match="min_ngram_size must be int or null, got '2'"):
        SpeculativeConfig.from_dict({"method": "ngram", "prompt_lookup_min": "2"})


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"quantization": "other"}, "quantization"),
        ({"quantization": {"moe_quant_type": "other"}}, "quantization.moe_quant_type"),
        ({"speculative_config": {"method": "mtp", "quantization": "other"}}, "speculative_config.quantization"),
        ({"speculative_config": {"method": "mtp", "quantization": {"quantization": "other"}}}, "speculative_config.quantization.quantization"),
        ({"speculative_config": {"method": "mtp", "model": ""}}, "speculative_config.model"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 17}}, "speculative_config.num_speculative_tokens"),
        ({"parallel_config": {"ranks": "other"}}, "parallel_config.ranks"),
        ({"disaggregation": {"role": "other"}}, "disaggregation.role"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_section(values: dict[str, Any], key: str) -> None:
    """Whole: the engine and its drafter both have a quantization and a model."""
    for where in ("", "decode: "):
        with pytest.raises(ConfigError, match=f"^{where}{re.escape(key)} must be "):
            EngineConfig.from_dict(values, where)


@pytest.mark.parametrize("method", [{}, {"method": None}], ids=["omitted", "null"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_speculative_tokens": 5},
            r"method must be given with other keys \(num_speculative_tokens\): one of none, naive, ngram, .*mlp_speculator, token_recycling, auto$",
        ),
        ({"prompt_lookup_max": 4}, r".* other keys \(prompt_lookup_max\): .*; prompt_lookup_max is a key of ngram$"),
        ({"adaptive": False, "model": "/drafter"}, r".* other keys \(adaptive, model\): .*; model is a key of mtp, draft_model, .*"),
        ({"request_methods": ["mtp"]}, r".* other keys \(request_methods\)"),
    ],
)
def test_a_method_is_not_guessed(values: dict[str, Any], message: str, method: dict[str, Any]) -> None:
    """It meant none, and the other keys were lost without a word."""
    with pytest.raises(ConfigError, match=f"^speculative_config.{message}"):
        EngineConfig.from_dict({"speculative_config": values | method})
    assert SpeculativeConfig.from_dict(method).method == "none", "nothing else is asked for"


@pytest.mark.parametrize(
    ("values", "key", "method"),
    [
        ({"method": "mtp", "suffix_decoding_max_tree_depth": 32}, "suffix_decoding_max_tree_depth", "suffix"),
        ({"method": "ngram", "suffix_decoding_cache_path": "/x.npz"}, "suffix_decoding_cache_path", "suffix"),
        ({"method": "ngram", "num_speculative_tokens": 2, "num_model_steps": 3}, "num_model_steps", "mtp"),
        ({"method": "suffix", "mtp_strategy": "with_suffix"}, "mtp_strategy", "mtp"),
        ({"method": "suffix", "model": "/drafter"}, "model", "mtp"),
        ({"method": "ngram", "quantization": "wint8"}, "quantization", "mtp"),
        ({"method": "none", "prompt_lookup_max": 4}, "prompt_lookup_max", "ngram"),
    ],
)
def test_keys_of_methods_that_are_not_loaded_are_refused(values: dict[str, Any], key: str, method: str) -> None:
    """They would do nothing. A request that may choose the method makes them good."""
    owners, choice = (", ".join(MODEL_METHODS), "one of them") if method == "mtp" else (method, "that method")
    message = f"speculative_config.{key} has no effect with method {values['method']}: it is a key of {owners}; choose {choice}, or name it in"
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig.from_dict({"speculative_config": values})
    SpeculativeConfig.from_dict(values | {"request_methods": [method]})


def test_keys_of_both_parts_of_a_hybrid_are_good() -> None:
    values = {"method": "mtp", "mtp_strategy": "with_suffix", "suffix_decoding_max_tree_depth": 32, "max_ngram_size": 7}
    assert SpeculativeConfig.from_dict(values).suffix_decoding_max_tree_depth == 32
    with pytest.raises(ConfigError, match=r"or take mtp_strategy with_suffix$"):
        SpeculativeConfig.from_dict(values | {"mtp_strategy": "with_ngram"})


def test_a_rate_of_acceptance_is_for_simulation_alone() -> None:
    values = {"method": "ngram", "simulated_acceptance_rate": 0.5}
    with pytest.raises(ConfigError, match=r"simulated_acceptance_rate must be left out unless accept_policy is simulated \(it is normal\), got 0.5"):
        SpeculativeConfig.from_dict(values)
    assert SpeculativeConfig.from_dict(values | {"accept_policy": "simulated"}).simulated_acceptance_rate == 0.5


COUNTS = [0, 17, 10**30, "5", True, 1.0]
BAD_SPECULATIVE: dict[str, tuple[list[Any], str]] = {
    "method": (["n-gram", "", 5, True, ["mtp"]], "none, naive, ngram, suffix, mtp"),
    "num_speculative_tokens": (COUNTS, "from 1 to 16"),
    "adaptive": (["False", "true", 0, 1, None], "bool"),
    "request_methods": ([["n-gram"], [""], [5], [None], "suffix", None, {"suffix": 1}], "none, naive, ngram, suffix, mtp"),
    "verify_strategy": (["fastest", "", None, 5], "target_match, greedy, rejection, topp"),
    "accept_policy": (["all", "", None, 5], "normal, accept_all, reject_all"),
    "max_candidate_len": ([0, -1, 65, "5", True, None], "from 1 to 64"),
    "verify_window": ([0, -1, 17, "2", True, None], "from 1 to 16"),
    "max_ngram_size": ([0, -1, "5", True, None], ">= min_ngram_size (1)"),
    "min_ngram_size": ([0, -1, "1", True], ">= 1"),
    "model": (["", 5, True, ["x"]], "a path"),
    "num_model_steps": (COUNTS, "from 1 to 16"),
    "mtp_strategy": (["ngram", "with_mtp", "", None, 5], "default, with_ngram, with_suffix"),
    "parallel_drafting": (["true", "", 0, 1, "auto"], "bool"),
    "draft_vocabulary": (["other", "", None, 5], "same, shared"),
    "draft_token_map": (["", 5, True, ["x"]], "a path"),
    "min_draft_confidence": ([-0.1, 1.1, "0.5", True, None], "from 0 to 1"),
    "placement": (["triton", "", None, 5], "auto, in_process, bls"),
    "tree_nodes": ([0, -1, 64, "8", True], "from 1 to 63"),
    "tree_top_k": ([0, -1, 33, "8", True], "from 1 to 32"),
    "tree_paths": (["[[0]]", "", 5, True], "a list"),
    "draft_sampling": (["random", "", None, 5], "shared_noise, greedy"),
    "quantization": (["int8", "wint2", "", 8], "wint8, wint4, fp8, block_wise_fp8"),
    "draft_tensor_parallel_size": ([0, -1, "1", True, None], ">= 1"),
    "suffix_decoding_max_tree_depth": ([0, -1, 10**6 + 1, 2**40, "64", True, None], "from 1 to 1000000"),
    "suffix_decoding_max_cached_requests": ([-2, "0", True, None], ">= 0, or -1"),
    "suffix_decoding_max_spec_factor": ([-0.1, NAN, INF, 1e7, HUGE, "1", True, None], "from 0 to 1000000"),
    "simulated_acceptance_rate": ([-0.1, 1.1, 2, NAN, INF, HUGE, "0.1", True, None], "from 0 to 1"),
    "suffix_decoding_min_token_prob": ([-0.1, 1.1, 2, NAN, INF, HUGE, "0.1", True, None], "from 0 to 1"),
    "suffix_decoding_cache_path": (["", 5, True], "a path"),
    "suffix_decoding_corpus": (["file", 5, None], "a list"),
}
"""By key: what must be refused, and the rule that a value of the right type is told."""
GOOD_SPECULATIVE: dict[str, list[Any]] = {
    "method": ["mtp"],
    "num_speculative_tokens": [1, 16, None],
    "adaptive": [True, False],
    "request_methods": [(), ("suffix",), ("suffix", "ngram", "naive", "none", "mtp")],
    "verify_strategy": ["target_match", "greedy", "rejection", "topp"],
    "accept_policy": ["normal", "accept_all", "reject_all"],
    "max_candidate_len": [1, 64],
    "verify_window": [1, 16],
    "max_ngram_size": [1, 10**6],
    "min_ngram_size": [1, 5],
    "model": [None, "/models/drafter"],
    "num_model_steps": [1, 16],
    "mtp_strategy": ["default", "with_ngram", "with_suffix"],
    "parallel_drafting": [None, True, False],
    "draft_vocabulary": ["same", "shared"],
    "draft_token_map": [None, "/models/tokens.json"],
    "min_draft_confidence": [0.0, 0.5, 1],
    "placement": ["auto", "in_process", "bls"],
    "tree_nodes": [None, 1, 63],
    "tree_top_k": [None, 1, 32],
    "tree_paths": [None, ((0,), (1,), (0, 0), (1, 31))],
    "draft_sampling": ["shared_noise", "greedy"],
    "quantization": [None, "wint8", "wint4", "fp8"],
    "draft_tensor_parallel_size": [1, 8],
    "suffix_decoding_max_tree_depth": [1, 64, 10**6],
    "suffix_decoding_max_cached_requests": [-1, 0, 10**9],
    "suffix_decoding_max_spec_factor": [0.0, 0.5, 1e6],
    "simulated_acceptance_rate": [0.0, 0.5, 1],
    "suffix_decoding_min_token_prob": [0.0, 1.0],
    "suffix_decoding_cache_path": [None, "/var/cache/suffix.npz"],
    "suffix_decoding_corpus": [(), ("/data/code.jsonl", "notes.txt")],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(key, value, id=f"{key}={str(value)[:20]}") for key, values in table.items() for value in values]


def test_every_speculative_key_has_its_cases() -> None:
    assert set(BAD_SPECULATIVE) == set(GOOD_SPECULATIVE) == set(field_names(SpeculativeConfig))


@pytest.mark.parametrize(("key", "value"), cases({key: values for key, (values, _) in BAD_SPECULATIVE.items()}))
def test_bad_speculative_values_are_refused(key: str, value: Any) -> None:
    """The key, the rule or the type, and the value seen; whatever the method, or wherever it is given."""
    rule = BAD_SPECULATIVE[key][1]
    for method in ("mtp", "suffix", "ngram"):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_dict({"speculative_config": {"method": method, key: value}})
        message = str(caught.value)
        seen = value[0] if key == "request_methods" and isinstance(value, list) else value
        assert key in message and repr(seen)[:80] in message and len(message) < 400, message
        assert rule in message or re.search(r"must be (str|int|float|bool|a list)( or an object)?( or null)?, got", message), message


@pytest.mark.parametrize(("key", "value"), cases(GOOD_SPECULATIVE))
def test_good_speculative_values_are_taken(key: str, value: Any) -> None:
    owner = {"parallel_drafting": "eagle3", "min_draft_confidence": "dspark", "draft_vocabulary": "draft_model"}.get(key)
    others: dict[str, Any] = {"method": "mtp"} if owner is None else {"method": owner, "model": "drafter"}
    if key.startswith("suffix"):
        others["request_methods"] = ["suffix"]
    if key == "simulated_acceptance_rate":
        others["accept_policy"] = "simulated"
    if key == "tree_top_k" and value:
        others["tree_nodes"] = 8
    config = SpeculativeConfig.from_dict({**others, key: list(value) if isinstance(value, tuple) else value})
    assert getattr(config, key) == (1 if key == "num_speculative_tokens" and value is None else value)
    if isinstance(value, str) and key not in ("model", "draft_token_map", "suffix_decoding_cache_path"):
        assert getattr(SpeculativeConfig.from_dict({**others, key: value.upper()}), key) == value, "in any case"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 16, got 0"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens must be from 1 to 16, got 17"),
        ({"num_speculative_tokens": -3}, "num_speculative_tokens must be >= 0, got -3"),
        ({"num_speculative_tokens": "5"}, "num_speculative_tokens must be int or null, got '5'"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be int or null, got True"),
        ({"min_ngram_size": 0}, "min_ngram_size must be >= 1, got 0"),
        ({"min_ngram_size": 3, "max_ngram_size": 2}, r"max_ngram_size must be >= min_ngram_size \(3\), got 2"),
        ({"mtp_strategy": "with_ngram", "max_ngram_size": 1}, r"max_ngram_size must be >= min_ngram_size \(2\), got 1"),
        ({"verify_strategy": "fastest"}, "verify_strategy must be one of .*target_match.*, got 'fastest'"),
        ({"verify_strategy": None}, "verify_strategy must be str"),
        ({"request_methods": "suffix"}, "request_methods must be a list, got 'suffix'"),
        ({"request_methods": ["suffix", 5]}, r"request_methods\[1\] must be str, got 5"),
        ({"request_methods": ["suffx"]}, "request_methods 'suffx' is not one of .*did you mean \"suffix\""),
        ({"adaptive": "False"}, "adaptive must be bool, got 'False'"),
    ],
)
def test_speculative_ranges(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict({"method": "ngram", **values})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("num_model_step", "num_model_steps"),
        ("num_nextn_predict_steps", None),
        ("quantisation", "quantization"),
        ("mtp_stategy", "mtp_strategy"),
        ("request_method", "request_methods"),
        ("suffix_decoding_max_tree_dept", "suffix_decoding_max_tree_depth"),
        ("draft_tensor_parallel", "draft_tensor_parallel_size"),
        ("prompt_lookup_maximum", "prompt_lookup_max"),
        ("Adaptive", "adaptive"),
    ],
)
def test_unknown_speculative_keys_name_the_nearest(key: str, nearest: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dict({"speculative_config": {"method": "mtp", key: 1}})
    assert f"speculative_config: unknown key {key!r}" in str(caught.value)
    assert nearest is None or f'did you mean "{nearest}"?' in str(caught.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"nnodes": 3}, "nnodes must be a divisor of tensor_parallel_size (4): as many ranks on each host, got 3"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank must be from 0 to 1 (nnodes is 2), got 2"),
        ({"nnodes": 2}, "master must be HOST:PORT, by which other hosts reach the first one, where nnodes is 2, got None"),
        ({"nnodes": 2, "master": "host"}, "master must be HOST:PORT"),
        *(({"nnodes": 2, "master": m}, "master must be HOST:PORT") for m in ("host:0", "http://host:1", "host:\u00b2", "::1:29500", "0.0.0.0:29500")),
    ],
)
def test_ranks_on_several_hosts(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        EngineConfig.from_dict({"parallel_config": {"tensor_parallel_size": 4, **values}})
    good = {"tensor_parallel_size": 4, "nnodes": 2, "node_rank": 1, "master": "[::1]:29500"}
    config = EngineConfig.from_dict({"parallel_config": good}).parallel_config
    assert (config.host_size, config.first_rank, config.meeting_place) == (2, 2, ("::1", 29500))


def test_a_drafters_tensor_parallelism_is_one_or_the_targets() -> None:
    assert (
        EngineConfig.from_dict(
            {"speculative_config": {"method": "mtp", "draft_tensor_parallel_size": 1}}
        ).speculative_config.draft_tensor_parallel_size
        == 1
    )
    with pytest.raises(ConfigError, match=r"draft_tensor_parallel_size must be 1 or the target's tensor_parallel_size \(1\), got 2"):
        EngineConfig.from_dict({"speculative_config": {"method": "mtp", "draft_tensor_parallel_size": 2}})


def counts(**values: Any) -> tuple[int | None, int | None]:
    config = SpeculativeConfig.from_dict(values)
    return config.num_speculative_tokens, config.num_model_steps


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "ngram"}, (1, 1)),
        ({"method": "mtp"}, (1, 1)),
        ({"method": "mtp", "num_speculative_tokens": 4}, (4, 4)),
        ({"method": "mtp", "num_speculative_tokens": 4, "num_model_steps": 2}, (4, 2)),
        ({"method": "mtp", "num_model_steps": 3}, (3, 3)),
        ({"method": "mtp", "num_speculative_tokens": 6, "mtp_strategy": "with_ngram"}, (6, 1)),
        ({"method": "mtp", "num_speculative_tokens": 6, "mtp_strategy": "with_suffix"}, (6, 1)),
        ({"method": "mtp", "num_speculative_tokens": 6, "mtp_strategy": "with_ngram", "num_model_steps": 2}, (6, 2)),
        ({"method": "suffix"}, (16, 16)),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 5}, (5, 5)),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 16}, (16, 16)),
        ({"method": "suffix", "num_speculative_tokens": 3}, (3, 3)),
        ({"method": "none"}, (0, 1)),
        ({"method": "none", "request_methods": ["mtp"], "num_model_steps": 4}, (0, 4)),
    ],
)
def test_counts_that_are_not_given(values: dict[str, Any], expected: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert counts(**values) == expected
    assert not caplog.records, "nothing that was given is overridden"


def test_drafts_are_raised_to_the_models_steps_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert counts(method="mtp", num_speculative_tokens=2, num_model_steps=3) == (3, 3)
    assert "num_speculative_tokens 2 is raised to num_model_steps 3" in caplog.text
    caplog.clear()
    assert counts(method="ngram", num_speculative_tokens=2, num_model_steps=3, request_methods=["mtp"]) == (2, 3), "its own drafts are no model's"
    assert not caplog.records


@pytest.mark.parametrize(("strategy", "smallest"), [("default", 1), ("with_ngram", 2), ("with_suffix", 1)])
def test_the_smallest_ngram_follows_the_strategy(strategy: str, smallest: int) -> None:
    values = {"method": "mtp", "mtp_strategy": strategy}
    assert SpeculativeConfig.from_dict(values).min_ngram_size == smallest
    assert SpeculativeConfig.from_dict(values | {"min_ngram_size": 1}).min_ngram_size == 1
    assert SpeculativeConfig.from_dict(values | {"prompt_lookup_min": 3}).min_ngram_size == 3


@given(
    values=st.fixed_dictionaries(
        {}, optional={key: st.sampled_from(good) for key, good in GOOD_SPECULATIVE.items()} | {"method": st.sampled_from(METHODS)}
    )
)
@settings(max_examples=200, deadline=None)
def test_settled_values_stay_as_they_are(values: dict[str, Any]) -> None:
    """The launcher reads a configuration, and the server reads it again."""
    try:
        config = SpeculativeConfig.from_dict(values)
    except ConfigError as error:
        depends = ("ngram_size", "has no effect", "method must be given", "unless accept_policy", "model must be", "placement must", "second model")
        depends += ("heads are not split", "draft_vocabulary shared", "with tree_", "without tree_nodes", "all drafts of a chain at once")
        assert any(words in str(error) for words in depends), "each value is good by itself; only these depend on others"
        return
    assert dataclasses.replace(config) == config == SpeculativeConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config))))
    count, steps = config.num_speculative_tokens, config.num_model_steps
    assert count is not None and 0 <= count <= 16 and (count == 0) == (config.method in ("none", "naive"))
    assert steps is not None and 1 <= steps <= 16 and (config.method not in MODEL_METHODS or steps <= count)


def test_verify_strategy_in_any_case() -> None:
    assert SpeculativeConfig.from_dict({"method": "none", "verify_strategy": "Target_Match"}).verify_strategy == "target_match"


@pytest.mark.parametrize("method", ["none", "naive"])
def test_what_drafts_nothing_says_so(caplog: pytest.LogCaptureFixture, method: str) -> None:
    with caplog.at_level(logging.WARNING):
        config = SpeculativeConfig.from_dict({"method": method, "num_speculative_tokens": 5})
    assert config.num_speculative_tokens == 0
    assert method in caplog.text and "num_speculative_tokens 5 is set to 0" in caplog.text
    caplog.clear()
    with pytest.raises(ConfigError, match="method must be given"):
        SpeculativeConfig.from_dict({"num_speculative_tokens": 5})
    assert not caplog.records, "of what is refused, that alone is said"


def test_nothing_is_said_when_nothing_is_overridden(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert SpeculativeConfig.from_dict({"method": "naive"}).num_speculative_tokens == 0
        assert SpeculativeConfig.from_dict({"method": "none"}).num_speculative_tokens == 0
        assert SpeculativeConfig.from_dict({"method": "naive", "num_speculative_tokens": 0}).num_speculative_tokens == 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("none", "naive")),
        ({"method": "none"}, ("none", "naive")),
        ({"method": "none", "request_methods": ["none"]}, ("none", "naive")),
        ({"method": "naive"}, ("naive", "ngram", "none")),
        ({"method": "ngram"}, ("ngram", "none", "naive")),
        ({"method": "suffix"}, ("suffix", "ngram", "none", "naive")),
        ({"method": "mtp"}, ("mtp", "ngram", "none", "naive")),
        ({"method": "mtp", "mtp_strategy": "with_ngram"}, ("mtp", "ngram", "none", "naive")),
        ({"method": "mtp", "mtp_strategy": "with_suffix"}, ("mtp", "suffix", "ngram", "none", "naive")),
        ({"method": "mtp", "request_methods": ["Suffix", "deepseek_mtp"]}, ("mtp", "suffix", "ngram", "none", "naive")),
        ({"method": "none", "request_methods": ["mtp"]}, ("none", "mtp", "ngram", "naive")),
    ],
)
def test_loaded_methods(values: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert SpeculativeConfig.from_dict(values).loaded_methods == expected


NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=5)


@pytest.mark.parametrize(
    ("config", "choice", "expected"),
    [
        (NGRAM, None, ("ngram", 5, "target_match")),
        (NGRAM, {}, ("ngram", 5, "target_match")),
        (NGRAM, {"num_speculative_tokens": 0}, ("ngram", 0, "target_match")),
        (NGRAM, {"num_speculative_tokens": 16}, ("ngram", 16, "target_match")),
        (NGRAM, {"method": None}, ("none", 0, "target_match")),
        (NGRAM, {"method": "None", "num_speculative_tokens": 3}, ("none", 0, "target_match")),
        (NGRAM, {"method": "naive"}, ("naive", 0, "target_match")),
        (NGRAM, {"method": "ngram_match"}, ("ngram", 5, "target_match")),
        (NGRAM, {"verify_strategy": "GREEDY"}, ("ngram", 5, "greedy")),
        (SpeculativeConfig(method="ngram", verify_strategy="greedy"), None, ("ngram", 1, "greedy")),
        (SpeculativeConfig(), None, ("none", 0, "target_match")),
        (SpeculativeConfig(), {"num_speculative_tokens": 4}, ("none", 0, "target_match")),
        (SpeculativeConfig(), {"method": "naive"}, ("naive", 0, "target_match")),
        (SpeculativeConfig(method="suffix"), {"method": "ngram"}, ("ngram", 16, "target_match")),
        (SpeculativeConfig(method="suffix"), {"num_speculative_tokens": 3}, ("suffix", 3, "target_match")),
        (SpeculativeConfig(request_methods=("suffix",)), {"method": "suffix"}, ("suffix", 1, "target_match")),
        (SpeculativeConfig(request_methods=("suffix",)), {"method": "suffix", "num_speculative_tokens": 9}, ("suffix", 9, "target_match")),
        (SpeculativeConfig(method="naive"), {"method": "ngram"}, ("ngram", 1, "target_match")),
    ],
)
def test_a_request_may_choose(config: SpeculativeConfig, choice: object, expected: tuple[str, int, str]) -> None:
    found = resolve(config, choice)
    assert (found.method, found.num_speculative_tokens, found.verify_strategy) == expected
    assert found.mtp_strategy == "default"


MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
HYBRID = SpeculativeConfig(method="mtp", num_speculative_tokens=6, mtp_strategy="with_ngram", num_model_steps=2)


@pytest.mark.parametrize(
    ("config", "choice", "expected"),
    [
        (MTP, None, (3, 3, "default")),
        (MTP, {"num_speculative_tokens": 2}, (2, 2, "default")),
        (MTP, {"num_speculative_tokens": 5}, (5, 5, "default")),
        (MTP, {"num_speculative_tokens": 0}, (0, 0, "default")),
        (MTP, {"mtp_strategy": "default"}, (3, 3, "default")),
        (MTP, {"mtp_strategy": "With_Ngram"}, (3, 3, "with_ngram")),
        (MTP, {"mtp_strategy": "with_ngram", "num_speculative_tokens": 8}, (8, 3, "with_ngram")),
        (MTP, {"mtp_strategy": "with_ngram", "num_speculative_tokens": 1}, (1, 1, "with_ngram")),
        (SpeculativeConfig(method="mtp", num_speculative_tokens=5, num_model_steps=2), None, (5, 2, "default")),
        (HYBRID, None, (6, 2, "with_ngram")),
        (HYBRID, {}, (6, 2, "with_ngram")),
        (HYBRID, {"num_speculative_tokens": 10}, (10, 2, "with_ngram")),
        (HYBRID, {"num_speculative_tokens": 1}, (1, 1, "with_ngram")),
        (HYBRID, {"mtp_strategy": "default"}, (6, 6, "default")),
        (HYBRID, {"mtp_strategy": "default", "num_speculative_tokens": 4}, (4, 4, "default")),
        (SpeculativeConfig(method="mtp", request_methods=("suffix",)), {"mtp_strategy": "with_suffix"}, (1, 1, "with_suffix")),
        (SpeculativeConfig(request_methods=("mtp",)), {"method": "ernie_mtp"}, (1, 1, "default")),
        (SpeculativeConfig(request_methods=("mtp",)), {"method": "mtp", "num_speculative_tokens": 4}, (4, 4, "default")),
        (SpeculativeConfig(method="ngram", num_speculative_tokens=4, request_methods=("mtp",)), {"method": "mtp"}, (4, 4, "default")),
    ],
)
def test_a_request_may_choose_how_the_model_drafts(config: SpeculativeConfig, choice: object, expected: tuple[int, int, str]) -> None:
    """Drafts, those of them that the model makes, and what lengthens them."""
    found = resolve(config, choice)
    assert found.method == "mtp"
    assert (found.num_speculative_tokens, found.num_model_steps, found.mtp_strategy) == expected


@pytest.mark.parametrize(
    ("config", "choice", "message"),
    [
        (NGRAM, "ngram", "speculative must be an object, got 'ngram'"),
        (NGRAM, [], "speculative must be an object"),
        (NGRAM, {"num_speculative_token": 3}, "unknown key 'num_speculative_token'; did you mean \"num_speculative_tokens\""),
        (NGRAM, {"mtp_stategy": "default"}, "unknown key 'mtp_stategy'; did you mean \"mtp_strategy\""),
        (NGRAM, {"max_ngram_size": 3}, "unknown key 'max_ngram_size'"),
        (NGRAM, {3: 3}, "unknown key 3"),
        (NGRAM, {"num_speculative_tokens": 17}, r"speculative.num_speculative_tokens must be from 0 \(off\) to 16, got 17"),
        (NGRAM, {"num_speculative_tokens": -1}, "got -1"),
        (NGRAM, {"num_speculative_tokens": True}, "got True"),
        (NGRAM, {"num_speculative_tokens": "3"}, "got '3'"),
        (NGRAM, {"num_speculative_tokens": None}, "got None"),
        (NGRAM, {"verify_strategy": "fastest"}, "speculative.verify_strategy must be one of"),
        (NGRAM, {"verify_strategy": None}, "speculative.verify_strategy must be one of"),
        (NGRAM, {"method": "mtpp"}, "method 'mtpp' is not one of .*did you mean \"mtp\""),
        (NGRAM, {"method": "mtp"}, "method mtp is not loaded; loaded: naive, ngram, none"),
        (SpeculativeConfig(), {"method": "ngram"}, "method ngram is not loaded; loaded: naive, none"),
        (MTP, {"method": "suffix"}, "method suffix is not loaded; loaded: mtp, naive, ngram, none"),
        (MTP, {"mtp_strategy": "with_suffix"}, "mtp_strategy with_suffix needs method suffix, which is not loaded"),
        (MTP, {"mtp_strategy": "with_mtp"}, "speculative.mtp_strategy must be one of default, with_ngram, with_suffix, got 'with_mtp'"),
        (MTP, {"mtp_strategy": None}, "speculative.mtp_strategy must be one of .*got None"),
        (MTP, {"method": "ngram", "mtp_strategy": "with_ngram"}, "mtp_strategy has no effect with method ngram: it is a key of mtp"),
    ],
)
def test_a_request_may_choose_wrongly(config: SpeculativeConfig, choice: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config, choice)


# -- sampling parameters --------------------------------------------------------------------------------------------------------

BAD_SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.0, "5", "5" * 5000, None, True, NAN],
    "min_tokens": [-1, 129, 1.5, "0", None, False],
    "temperature": [-0.1, NAN, INF, -INF, "1", None, True, HUGE],
    "top_p": [0, 0.0, -0.1, 1.01, NAN, INF, "1", None, True, HUGE],
    "top_k": [-2, 1.0, "5", None, True, NAN],
    "min_p": [-0.01, 1.01, NAN, INF, "0", None, False, HUGE],
    "repetition_penalty": [0, 0.0009, -1.0, 10.1, NAN, INF, "1", None, True, HUGE],
    "presence_penalty": [-2.1, 2.1, NAN, -INF, "0", None, False, HUGE],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, "0", None, False, HUGE],
    "logit_bias": [
        None,
        [(1, 2.0)],
        "1",
        {"1": 2.0},
        {1: "2"},
        {1: NAN},
        {1: INF},
        {1: 100.5},
        {1: -101},
        {1: True},
        {True: 1.0},
        {1.0: 1.0},
        {1: HUGE},
    ],
    "seed": [2**64, -(2**63) - 1, 1.0, "1", True, NAN],
    "stop": [None, 5, True, [""], "", ["a", ""], [5], [None], [b"x"], ["x" * (MAX_STOP_CHARACTERS + 1)], ["x"] * (MAX_STOP_STRINGS + 1)],
    "bad_words": [None, 5, [""], "", [5], [None], ["x" * 200] * 90, ["x"] * (MAX_BAD_WORDS + 1)],
    "stop_token_ids": [None, 5, "1", ["1"], [1.0], [True], [None], list(range(MAX_STOP_TOKEN_IDS + 1))],
    "include_stop": ["False", 0, None],
    "ignore_eos": ["true", 1, None],
    "skip_special_tokens": ["false", 0, None],
    "logprobs": [-1, 21, 1.0, "1", True, False],
    "echo": ["False", 0, None],
    "n": [0, -1, 65, 1.0, "1", None, True],
    "structured_outputs": [
        5,
        "json",
        [],
        {},
        {"json": {}, "regex": "a"},
        {"jsn": {}},
        {"json": 5},
        {"json": {"type": {1}}},
        {"json_object": False},
        {"json_object": 1},
        {"regex": 5},
        {"choice": "abc"},
        {"choice": [1]},
        {"choice": []},
        {"choice": ["x"] * (MAX_CHOICES + 1)},
        {"grammar": ["a"]},
        {"regex": "x" * (MAX_STRUCTURE + 1)},
        {"regex": "a", "disable_any_whitespace": True},
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
        {"json": {}, "whitespace_pattern": " " * (MAX_PATTERN_CHARACTERS + 1)},
        {"json": {}, "is_lenient": "yes"},
    ],
}
GOOD_SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [1, 10**9],
    "min_tokens": [0, 128],
    "temperature": [0, 0.0, 1e-9, 2, 100.0],
    "top_p": [1e-6, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0, 0.0, 1, 1.0],
    "repetition_penalty": [0.001, 1, 10],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2.0, 2.0],
    "logit_bias": [{}, {1: 100, 2: -100.0}, dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0)],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "stop": [(), [], "end", ["a", "b"], ["x" * MAX_STOP_CHARACTERS], ["x"] * MAX_STOP_STRINGS],
    "bad_words": [(), "word", ["a"] * MAX_BAD_WORDS],
    "stop_token_ids": [(), [1, 2], list(range(MAX_STOP_TOKEN_IDS))],
    "include_stop": [True, False],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "logprobs": [None, 0, 20],
    "echo": [True, False],
    "n": [1, 64],
    "structured_outputs": [None, StructuredOutputs(json={"type": "object"}), StructuredOutputs(json=False), StructuredOutputs(choice=("a", "b"))],
}


def test_every_parameter_has_its_cases() -> None:
    assert set(BAD_SAMPLING) == set(GOOD_SAMPLING) == set(field_names(SamplingParams))


@pytest.mark.parametrize(("key", "value"), [pytest.param(k, v, id=f"{k}={str(v)[:20]}") for k, values in BAD_SAMPLING.items() for v in values])
def test_bad_sampling_parameters_are_refused(key: str, value: Any) -> None:
    """Always a ValueError, for that is what becomes INVALID_ARG for this request; always with the key in it."""
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{key: value})
    assert key in str(caught.value)
    assert len(str(caught.value)) < 600, "a huge value must not make a huge message"


@pytest.mark.parametrize(("key", "value"), [pytest.param(k, v, id=f"{k}={str(v)[:20]}") for k, values in GOOD_SAMPLING.items() for v in values])
def test_good_sampling_parameters_are_taken(key: str, value: Any) -> None:
    taken = getattr(SamplingParams(**{key: value}), key)
    expected = tuple([value] if isinstance(value, str) else value) if key in ("stop", "bad_words", "stop_token_ids") else value
    assert taken == expected


def test_too_many_biases() -> None:
    with pytest.raises(ValueError, match=f"logit_bias has {MAX_LOGIT_BIASES + 1} entries; the limit is {MAX_LOGIT_BIASES}"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 0.0))


def test_no_tokens_are_an_answer_with_the_prompt_only() -> None:
    assert SamplingParams(max_tokens=0, echo=True).max_tokens == 0
    for values in ({"max_tokens": 0}, {"max_tokens": -1, "echo": True}):
        with pytest.raises(ValueError, match="max_tokens must be an integer >= "):
            SamplingParams(**values)


def test_min_tokens_is_bounded_by_max_tokens() -> None:
    SamplingParams(max_tokens=5, min_tokens=5)
    with pytest.raises(ValueError, match=r"min_tokens must be an integer from 0 to max_tokens \(5\), got 6"):
        SamplingParams(max_tokens=5, min_tokens=6)


@given(key=st.sampled_from(field_names(SamplingParams)), value=JSON_VALUES)
@settings(max_examples=300, deadline=None)
def test_any_json_is_a_parameter_or_a_value_error(key: str, value: Any) -> None:
    """What a client sends may be anything; nothing but a ValueError may come of it."""
    try:
        SamplingParams(**{key: value})
    except ValueError as error:
        assert key in str(error)


def test_greedy_and_penalties_are_recognised() -> None:
    assert SamplingParams(temperature=0).is_greedy and SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    assert not SamplingParams().has_penalties
    for key, value in (("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1)):
        assert SamplingParams(**{key: value}).has_penalties


@pytest.mark.parametrize(
    "options", [{"top_k": 2**63}, {"top_p": 1e-46}, {"min_p": 1e-46}, {"temperature": 1e39}, {"temperature": 1e-5}, {"seed": 2**64 - 1}]
)
def test_what_is_taken_can_be_sampled(llm_ngram: LLM, options: dict[str, Any]) -> None:
    """A value is refused, or the engine can work with it: an error inside a step would end every request of the server."""
    try:
        params = SamplingParams(**{"seed": 1, "max_tokens": 4, "min_tokens": 4, **options})
    except ValueError:
        return
    prompt = "def read_lines(path):\n"

    def token_ids(params: SamplingParams) -> list[int]:
        return llm_ngram.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids

    found = token_ids(params)
    assert len(found) == 4 and not set(found) & llm_ngram.engine.worker.model.eos_token_ids, "min_tokens bans the end of text"
    if "top_p" in options:
        assert found == token_ids(SamplingParams(max_tokens=4, min_tokens=4, temperature=0.0)), "so small a top_p leaves the likeliest token"


# -- launcher: keys -------------------------------------------------------------------------------------------------------------


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return parser.parse_args(flags)


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "max_batch_size: 4\nmax-waiting: 7\nhttp-port: 9000\nspeculative_config: {method: ngram, num_speculative_tokens: 2}\n")
    values = options.gather(parse("--config", path, "--max-batch-size", "9", "--grpc-port=9001"))
    assert values == {
        "max_batch_size": 9,
        "max_waiting": 7,
        "http_port": 9000,
        "grpc_port": 9001,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }
    config, engine = options.split_keys(values)
    assert (config.http_port, config.grpc_port, config.metrics_port) == (9000, 9001, 8002)
    assert (engine.max_batch_size, engine.max_waiting, engine.speculative_config.method) == (9, 7, "ngram")


def test_what_is_not_given_is_left_to_the_engine() -> None:
    assert options.gather(parse()) == {}
    assert options.gather(parse("--no-enable-prefix-caching")) == {"enable_prefix_caching": False}
    assert options.gather(parse("--enable-prefix-caching")) == {"enable_prefix_caching": True}


def test_speculative_config_as_json() -> None:
    assert options.gather(parse("--speculative-config", '{"method": "naive"}')) == {"speculative_config": {"method": "naive"}}
    with pytest.raises(ConfigError, match="speculative_config is not valid JSON"):
        options.gather(parse("--speculative-config", "{method: ngram}"))


@pytest.mark.parametrize(
    ("text", "expected"), [("", {}), ("# nothing\n", {}), ("a-b: 1\n", {"a_b": 1}), ("enable_prefix_caching: no\n", {"enable_prefix_caching": False})]
)
def test_read_yaml(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    assert read_yaml(yaml_file(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "is not valid YAML"),
        ("- a\n- b\n", "must hold keys and values, got list"),
        ("5\n", "got int"),
        ("a: !!python/name:os.system\n", "YAML"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, message: str) -> None:
    path = yaml_file(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_yaml(path)
    assert path in str(caught.value)


def test_yaml_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*nothing\.yaml: No such file"):
        read_yaml(str(tmp_path / "nothing.yaml"))
    with pytest.raises(ConfigError, match="--config"):
        read_yaml(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(str(tmp_path / "latin.yaml"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"http_prot": 1}, "unknown key 'http_prot'; did you mean \"http_port\""),
        ({"max_batchsize": 1}, "unknown key 'max_batchsize'; did you mean \"max_batch_size\""),
        ({"http_port": "8000"}, "http_port must be int, got '8000'"),
        ({"http_port": True}, "http_port must be int, got True"),
        ({"enable_prefix_caching": "False"}, "enable_prefix_caching must be bool, got 'False'"),
        ({"host": None}, "host must be str"),
        ({"model_control_mode": "poll"}, "model_control_mode must be one of none, explicit, got 'poll'"),
        ({"model_control_mode": "explicit"}, "add --no-supervise to control models yourself"),
        ({"hang_seconds": 0.5}, "hang_seconds must be from 1 to 3600, got 0.5"),
        ({"max_restarts": -1}, "max_restarts must be from 0 to 1000000, got -1"),
        ({"drain_seconds": -1}, "drain_seconds must be from 0 to 604800, got -1"),
        ({"drain_seconds": 10**400}, "drain_seconds must be from 0 to 604800, got 1000000000"),
        ({"log_verbose": 10**30}, "log_verbose must be from 0 to 100, got 1000000000"),
        ({"max_server_memory": "4"}, "max_server_memory must be 128MiB or more, got 4 bytes"),
        ({"port": 8080, "served_model_name": ["a", " "]}, r"served_model_name must be a name, or names, that have characters, got \('a', ' '\)"),
        ({"port": 70000}, "port must be from 1 to 65535, or 0 for none, got 70000"),
        ({"triton_options": 5}, "triton_options"),
        ({"triton_options": [1]}, "triton_options"),
        ({"grpc_server_cert": "a.pem"}, "grpc_server_cert 'a.pem' has no effect without grpc_server_key"),
        ({"grpc_server_key": "a.pem"}, "grpc_server_key 'a.pem' has no effect without grpc_server_cert"),
        ({"grpc_root_cert": "a.pem"}, "grpc_root_cert 'a.pem' has no effect without grpc_server_cert"),
        ({"grpc_server_cert": "a", "grpc_server_key": "b", "port": 8080}, r"grpc_server_cert is of the gRPC port, which with port \(8080\)"),
        ({"metrics_host": "10.0.0.1"}, r"metrics_host must be host \(127\.0\.0\.1\), 0\.0\.0\.0 or ::, got '10\.0\.0\.1'"),
        ({"max_body_bytes": "8MiB"}, "max_body_bytes is an option of OpenAI's interface, which runs with port: add --port 8080"),
        ({"port": 8080, "max_body_bytes": 0}, "max_body_bytes must be above 0, got 0"),
        ({"cors_origins": ["x"]}, "cors_origins is an option of OpenAI's interface, which runs with port: add --port 8080"),
    ],
)
def test_split_keys_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.split_keys(values)


# -- launcher: the rendered repository ------------------------------------------------------------------------------------------


def read_pbtxt(path: Path) -> Any:
    """A config.pbtxt as the server's own schema has it."""
    return text_format.Parse(path.read_text(), model_config.ModelConfig())


def parameters_of(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


OWN = {"decode": {"model": "/m"}, "tokenizer": {"model": "/m"}}
"""The least that is rendered: the models that every repository has."""
DRAFTER = {"model": "/d", "target": "/m", "num_model_steps": 3}


@pytest.mark.parametrize("others", [{}, {"mtp_drafter": DRAFTER}], ids=["no drafter", "a drafter of its own"])
def test_the_rendered_repository_is_the_checked_in_one_with_other_parameters(tmp_path: Path, others: dict[str, Any]) -> None:
    target = tmp_path / "repository"
    engine = {"max_batch_size": 8, "enable_prefix_caching": False, "kv_cache_memory": "1GiB", "speculative_config": {"method": "ngram"}}
    rendering.render_repository(target, {"decode": {"model": "/m", **engine}, "tokenizer": {"model": "/m"}, **others}, "cpu")
    assert {p.name for p in target.iterdir()} == {"decode", "generate", "tokenizer", *others}
    assert {p.name for p in rendering.REPOSITORY.iterdir()} == {"decode", "generate", "tokenizer", "mtp_drafter"}
    for folder in target.iterdir():
        config, original = read_pbtxt(folder / "config.pbtxt"), read_pbtxt(rendering.REPOSITORY / folder.name / "config.pbtxt")
        assert config.name == folder.name
        assert (folder / "1").is_dir(), "the server loads version folders only"
        parameters = parameters_of(config)
        if folder.name == "decode":
            assert parameters.pop("model") == "/m"
            assert {k: json.loads(v) if k != "kv_cache_memory" else v for k, v in parameters.items()} == engine
        elif folder.name == "tokenizer":
            assert parameters == {"model": "/m"}
        elif folder.name == "mtp_drafter":
            assert parameters == {k: str(v) for k, v in DRAFTER.items()}
        config.ClearField("parameters"), original.ClearField("parameters")
        assert config == original


def test_weights_are_referenced(tmp_path: Path) -> None:
    rendering.render_repository(tmp_path / "r", {**OWN, "mtp_drafter": DRAFTER}, "cpu")
    files = {p.relative_to(tmp_path / "r").as_posix(): p for p in (tmp_path / "r").rglob("*") if p.is_file()}
    wanted = {
        p.relative_to(rendering.REPOSITORY).as_posix() for pattern in ("*/config.pbtxt", "*/1/model.py") for p in rendering.REPOSITORY.glob(pattern)
    }
    kept_out = {name.replace("model.py", "__pycache__") for name in wanted if name.endswith("model.py")}
    assert not any(files.pop(name).stat().st_size for name in kept_out), "files, which are no folders of bytecode"
    assert set(files) == wanted >= {"decode/config.pbtxt", "decode/1/model.py", "generate/config.pbtxt", "tokenizer/1/model.py"}
    assert sum(p.stat().st_size for p in files.values()) < 100_000
    assert not any(p.is_symlink() for p in files.values())
    for name in ("decode/1/model.py", "tokenizer/1/model.py", "mtp_drafter/1/model.py"):
        program = (rendering.REPOSITORY / name).read_text()
        assert rendering.FIND_PROJECT in program, "which is not where the rendered one is"
        assert files[name].read_text() == program.replace(rendering.FIND_PROJECT, f"[Path({str(rendering.REPOSITORY.parents[1])!r})]")


@pytest.mark.parametrize("name", ['with "quotes"', "it's", r"back\slash", "new\nline", "tab\t", "modèle", "]\n}", 'x" } } ] #', "${HOME} %s {0}"])
def test_parameters_are_escaped(tmp_path: Path, name: str) -> None:
    """A folder may have any name; none may end the string that it stands in."""
    parameters = {
        "decode": {"dtype": name, "model": f"/models/{name}"},
        "tokenizer": {"model": f"/models/{name}"},
        "mtp_drafter": {"target": f"/models/{name}"},
    }
    rendering.render_repository(tmp_path / "r", parameters, "cpu")
    for model, wanted in parameters.items():
        assert parameters_of(read_pbtxt(tmp_path / "r" / model / "config.pbtxt")) == wanted


@given(values=st.dictionaries(st.sampled_from(field_names(EngineConfig)), JSON_VALUES, max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_parameters_parse(values: dict[str, Any]) -> None:
    """Values outside Unicode's first plane are left to the server: Python's reader of the text format cannot join surrogates."""
    text = rendering.render_parameters(values)
    if "\\ud" in text.lower():
        return
    found = parameters_of(text_format.Parse(text, model_config.ModelConfig()))
    assert found == {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}


@pytest.mark.parametrize(("device", "gpus"), [("auto", None), ("cpu", None), ("cuda", [0]), ("cuda:3", [3])])
def test_the_instance_group_follows_the_device(tmp_path: Path, device: str, gpus: list[int] | None) -> None:
    rendering.render_repository(tmp_path / "r", {**OWN, "mtp_drafter": DRAFTER}, device)
    for model in ("decode", "mtp_drafter"):
        (group,) = read_pbtxt(tmp_path / "r" / model / "config.pbtxt").instance_group
        assert group.count == 1
        assert list(group.gpus) == (gpus or [])
        assert group.kind == (model_config.ModelInstanceGroup.KIND_CPU if gpus is None else model_config.ModelInstanceGroup.KIND_GPU)
    (group,) = read_pbtxt(tmp_path / "r" / "tokenizer" / "config.pbtxt").instance_group
    assert group.kind == model_config.ModelInstanceGroup.KIND_CPU


@pytest.mark.parametrize(
    ("device", "groups"), [("cpu", [(3, [])]), ("cuda", [(1, [0]), (1, [1]), (1, [2])]), ("cuda:2", [(1, [2]), (1, [3]), (1, [4])])]
)
def test_ranks_that_are_instances(tmp_path: Path, device: str, groups: list[tuple[int, list[int]]]) -> None:
    """On GPUs each has its own."""
    rendering.render_repository(tmp_path / "r", {**OWN, "mtp_drafter": DRAFTER}, device, num_ranks=3)
    found = read_pbtxt(tmp_path / "r" / "decode" / "config.pbtxt").instance_group
    assert [(group.count, list(group.gpus)) for group in found] == groups
    assert len(read_pbtxt(tmp_path / "r" / "mtp_drafter" / "config.pbtxt").instance_group) == 1


def test_rendering_again_leaves_nothing_of_before(tmp_path: Path) -> None:
    before = {"decode": {"model": "/m", "max_batch_size": 3}, "tokenizer": {"model": "/m"}, "mtp_drafter": DRAFTER}
    rendering.render_repository(tmp_path / "r", before, "cuda:1")
    (tmp_path / "r" / "decode" / "2").mkdir()
    rendering.render_repository(tmp_path / "r", OWN, "cpu")
    assert not (tmp_path / "r" / "decode" / "2").exists() and not (tmp_path / "r" / "mtp_drafter").exists()
    assert parameters_of(read_pbtxt(tmp_path / "r" / "decode" / "config.pbtxt")) == {"model": "/m"}


def test_a_folder_of_something_else_survives(tmp_path: Path) -> None:
    """`--repository` may be mistyped: a folder that was not rendered must not be deleted, whatever else happens."""
    precious = tmp_path / "home" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("three years of work")
    with contextlib.suppress(ConfigError, LaunchError):
        rendering.render_repository(precious.parent, OWN, "cpu")
    assert precious.is_file()


@pytest.mark.parametrize("model", ["decode", "mtp_drafter"])
def test_a_repository_that_holds_weights_survives(tmp_path: Path, model: str) -> None:
    """What is rendered holds none, so this is somebody's own: the checked-in repository, to begin with."""
    own = tmp_path / "standalone"
    shutil.copytree(rendering.REPOSITORY, own, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    weights = own / model / "1" / "model.safetensors"
    weights.write_bytes(b"a week of training")
    with contextlib.suppress(ConfigError, LaunchError):
        rendering.render_repository(own, OWN, "cpu")
    assert weights.is_file()


# -- launcher: what each model is told ------------------------------------------------------------------------------------------


def told(values: dict[str, Any], model: Path = BUNDLED_MODEL) -> dict[str, dict[str, Any]]:
    """The models' parameters, as `serve` makes them."""
    return served_model.model_parameters(values, options.split_keys(values)[1], model.resolve())


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model folder that is not the bundled one."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).symlink_to(BUNDLED_MODEL / name)
    return folder


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(BUNDLED_DRAFTER / name)
    return folder


@pytest.mark.parametrize("speculative", [None, {"method": "none"}, {"method": "naive"}, {"method": "ngram", "num_speculative_tokens": 3}])
def test_what_needs_no_drafter_is_passed_on_as_it_is(state: Path, foreign: Path, speculative: dict[str, Any] | None) -> None:
    values = {"model": str(foreign), "max_batch_size": 4, "http_port": 9000, "drain_seconds": 3}
    values |= {} if speculative is None else {"speculative_config": speculative}
    decode = {"model": str(foreign), "max_batch_size": 4} | ({} if speculative is None else {"speculative_config": speculative})
    assert told(values, foreign) == {"decode": decode, "tokenizer": {"model": str(foreign)}}


@pytest.mark.parametrize(
    "speculative",
    [{"method": "mtp"}, {"method": "DeepSeek_MTP", "placement": "bls"}, {"method": "ngram", "request_methods": ["mtp"]}],
)
def test_a_foreign_model_needs_its_own_drafter(foreign: Path, drafter: Path, speculative: dict[str, Any]) -> None:
    """The bundled drafter would draft nonsense for it, or not load."""
    with pytest.raises(ConfigError, match=rf"speculative_config\.model: .*drafter trained for {foreign}: name its folder \(see foretoken train\)"):
        told({"speculative_config": speculative}, foreign)
    assert told({"speculative_config": {**speculative, "model": str(drafter)}}, foreign)["decode"]["speculative_config"]["model"] == str(drafter)
    assert told({"speculative_config": speculative})["decode"]["speculative_config"]["model"] == str(BUNDLED_DRAFTER.resolve())


def test_the_bundled_model_is_known_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout may be reached through a link, and then the folder's resolved name is another one."""
    (tmp_path / "link").symlink_to(rendering.REPOSITORY)
    linked = tmp_path / "link" / "decode" / "1"
    assert launcher.is_bundled(linked) and launcher.is_bundled(BUNDLED_MODEL) and not launcher.is_bundled(tmp_path)
    monkeypatch.setattr(launcher, "BUNDLED_MODEL", linked)
    assert served_model.check_drafter(SpeculativeConfig(method="mtp"), BUNDLED_MODEL.resolve()) == BUNDLED_DRAFTER.resolve()


def test_a_drafter_that_is_not_there(tmp_path: Path, foreign: Path, drafter: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        for placement in ("in_process", "bls"):
            with pytest.raises(ModelError, match=message):
                told({"speculative_config": {"method": "mtp", "model": str(folder), "placement": placement}}, foreign)

    refused(tmp_path / "gone", f"{tmp_path / 'gone'} does not exist")
    (drafter / "model.safetensors").unlink()
    refused(drafter, rf"{drafter} has no \*\.safetensors")
    (drafter / "config.json").unlink()
    refused(drafter, "config.json is missing")
    accents = tmp_path / "modèle"
    shutil.copytree(BUNDLED_DRAFTER, accents)
    refused(accents, "drafter folder .*ASCII paths only")


def test_a_drafters_folder_is_made_absolute(foreign: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server runs elsewhere."""
    monkeypatch.chdir(drafter.parent)
    monkeypatch.setenv("HOME", str(drafter.parent))
    for name in ("drafter", "./drafter/", "~/drafter"):
        parameters = told({"speculative_config": {"method": "mtp", "model": name, "placement": "bls"}}, foreign)
        assert parameters["decode"]["speculative_config"]["model"] == parameters["mtp_drafter"]["model"] == str(drafter)


def test_in_process_renders_no_drafter(foreign: Path, drafter: Path) -> None:
    for placement in ("auto", "in_process"):
        assert set(told({"speculative_config": {"method": "mtp", "model": str(drafter), "placement": placement}}, foreign)) == {"decode", "tokenizer"}
    assert set(told({"speculative_config": {"method": "ngram"}}, foreign)) == {"decode", "tokenizer"}, "nobody would call it"


@pytest.mark.parametrize(
    ("speculative", "engine", "own"),
    [
        ({}, {}, {"num_model_steps": 1}),
        ({"num_speculative_tokens": 4}, {}, {"num_model_steps": 4}),
        ({"num_speculative_tokens": 6, "mtp_strategy": "with_ngram"}, {}, {"num_model_steps": 1}),
        ({"num_speculative_tokens": 6, "num_model_steps": 2, "quantization": "WINT8"}, {}, {"num_model_steps": 2, "quantization": "wint8"}),
        (
            {"quantization": {"dense_quant_type": "fp8"}},
            {"quantization": {"head_quant_type": "WINT8"}},
            {
                "num_model_steps": 1,
                "quantization": {
                    "quantization": None,
                    "dense_quant_type": "fp8",
                    "moe_quant_type": None,
                    "head_quant_type": None,
                    "kv_cache_quant_type": None,
                },
                "target_quantization": {
                    "quantization": None,
                    "dense_quant_type": None,
                    "moe_quant_type": None,
                    "head_quant_type": "wint8",
                    "kv_cache_quant_type": None,
                },
            },
        ),
        (
            {},
            {"dtype": "bfloat16", "device": "cpu", "num_threads": 3, "single_thread_tokens": 5, "max_batch_size": 4, "http_port": 9000},
            {"num_model_steps": 1, "dtype": "bfloat16", "device": "cpu", "num_threads": 3, "single_thread_tokens": 5},
        ),
    ],
)
def test_a_drafter_of_its_own_is_told_what_decode_is(
    tmp_path: Path, foreign: Path, drafter: Path, speculative: dict[str, Any], engine: dict[str, Any], own: dict[str, Any]
) -> None:
    """And nothing else: it refuses what it does not know."""
    values = {**engine, "speculative_config": {"method": "mtp", "placement": "BLS", "model": str(drafter), **speculative}}
    parameters = told(values, foreign)
    assert parameters["mtp_drafter"] == {"model": str(drafter), "target": str(foreign), **own}
    rendering.render_repository(tmp_path / "r", parameters, "cpu")
    rendered = parameters_of(read_pbtxt(tmp_path / "r" / "mtp_drafter" / "config.pbtxt"))
    assert rendered == {key: json.dumps(value) if isinstance(value, dict) else str(value) for key, value in parameters["mtp_drafter"].items()}
    read_back = json.loads(parameters_of(read_pbtxt(tmp_path / "r" / "decode" / "config.pbtxt"))["speculative_config"])
    assert SpeculativeConfig.from_dict(read_back) == SpeculativeConfig.from_dict(values["speculative_config"])


def test_the_suffix_cache_has_a_file_for_each_model(state: Path, foreign: Path, drafter: Path) -> None:
    def path(speculative: dict[str, Any], model: Path) -> str:
        return told({"speculative_config": speculative}, model)["decode"]["speculative_config"]["suffix_decoding_cache_path"]

    own = path({"method": "suffix"}, foreign)
    assert Path(own).parent == state and Path(own).match("suffix-*.npz") and not state.exists()
    assert path({"method": "ngram", "request_methods": ["Suffix"]}, foreign) == own
    assert path({"method": "mtp", "model": str(drafter), "mtp_strategy": "with_suffix"}, foreign) == own
    assert path({"method": "suffix"}, BUNDLED_MODEL) != own, "token ids of another model mean something else"
    assert path({"method": "suffix", "suffix_decoding_cache_path": "/mine.npz"}, foreign) == "/mine.npz"
    values = {"method": "mtp", "model": str(drafter)}
    assert told({"speculative_config": values}, foreign)["decode"]["speculative_config"] == values, "nothing is kept of what is not loaded"


# -- launcher: the server -------------------------------------------------------------------------------------------------------


def test_server_command() -> None:
    config = options.ServeConfig(http_port=1, grpc_port=2, metrics_port=3, host="127.0.0.1", log_verbose=1)
    found = server.Server(Path("/opt/tritonserver"), Path("/state/backends"), ("/lib/a", "/lib/b"))
    command, environment = launcher.server_command(found, config, Path("/repo"), "k")
    assert command[0] == "/opt/tritonserver"
    expected = {"--model-repository=/repo", "--http-port=1", "--grpc-port=2", "--metrics-port=3", "--backend-directory=/state/backends"}
    assert expected <= set(command)
    assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1", "--log-verbose=1"} <= set(command)
    assert {f"--backend-config=python,shm-{what}-byte-size=8388608" for what in ("default", "growth")} <= set(command)
    assert environment["LD_LIBRARY_PATH"].split(":")[:2] == ["/lib/a", "/lib/b"]
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent), "the stub runs the first python3 on PATH"
    assert not any("--backend-directory" in part for part in launcher.server_command(server.Server(Path("/t")), config, Path("/repo"), "k")[0])
    explicit = {"--model-control-mode=explicit", "--load-model=*"}
    assert explicit <= set(command)
    apis = "shared-memory,model-config,model-repository,statistics,trace,logging"
    restricted = {f"--{option}={apis}:foretoken-key=k" for option in ("http-restricted-api", "grpc-restricted-protocol")}
    alone = launcher.server_command(found, options.ServeConfig(supervise=False), Path("/repo"), "k")[0]
    assert restricted <= set(command) and restricted <= set(alone)
    assert not any("--model-control-mode" in part for part in alone) and "--exit-timeout-secs=30" in alone
    assert {f"--{name}={value}" for name, value in launcher.KEEPALIVE.items()} <= set(command), "who vanishes without a word leaves no connection"
    taken = server.Server(Path("/t"), options=frozenset(launcher.KEEPALIVE))
    own = options.ServeConfig(triton_options=("grpc-keepalive-time=9000",))
    times = [part for part in launcher.server_command(taken, own, Path("/repo"), "k")[0] if "keepalive-time=" in part]
    assert times == ["--grpc-keepalive-time=9000"], "who has another wish has it"
    config = options.ServeConfig(supervise=False, model_control_mode="explicit")
    assert explicit <= set(launcher.server_command(found, config, Path("/repo"), "k")[0])


@pytest.mark.parametrize(
    ("host", "http", "grpc"),
    [
        ("::1", "ipv6:::1", r"\[::1]"),
        ("::", "ipv6:::", r"\[::]"),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0"),
        ("localhost", "(ipv6:::1|127.*)", r"(\[::1]|127.*)"),
    ],
)
def test_addresses_as_the_server_takes_them(host: str, http: str, grpc: str) -> None:
    """It listened on 255.255.255.255 for a name and for IPv6, and its gRPC port was said to be in use."""
    command = "\n".join(launcher.server_command(server.Server(Path("/t")), options.ServeConfig(host=host), Path("/repo"), "k")[0])
    assert re.search(f"^--http-address={http}$", command, re.MULTILINE) and re.search(f"^--metrics-address={http}$", command, re.MULTILINE)
    assert re.search(f"^--grpc-address={grpc}$", command, re.MULTILINE)


def test_inputs_are_limited_where_the_server_can() -> None:
    config = options.ServeConfig(max_request_size="2MiB")
    new = server.Server(Path("/t"), options=frozenset(["http-max-input-size"]))
    assert "--http-max-input-size=2097152" in launcher.server_command(new, config, Path("/repo"), "k")[0]
    old = launcher.server_command(server.Server(Path("/t")), config, Path("/repo"), "k")[0]
    assert not any("max-input" in part for part in old), "it would not start"


@pytest.mark.parametrize(
    ("text", "version", "is_old"),
    [
        ("--model-repository <string>", None, True),
        ("--model-repository <string>\n  --http-max-input-size <integer>", None, False),
        ("--model-repository <string>\n  --http-max-input-size <integer>", "2.59.1\n", True),
        ("--model-repository <string>\n  --http-max-input-size <integer>", "2.60.0\n", False),
    ],
)
def test_old_servers_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, version: str | None, is_old: bool
) -> None:
    executable = fake_server(tmp_path / "triton", text, version)
    monkeypatch.setenv("PATH", f"{executable.parent}:/bin")
    found = server.find_server()
    assert (found.executable, found.is_old) == (executable, is_old)
    launcher.warn_of_old_server(found)
    assert capsys.readouterr().err.startswith("foretoken serve: warning: this Triton") == is_old


def test_a_server_that_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="says nothing of --model-repository"):
        server.read_options(server.Server(fake_server(tmp_path / "a", "error while loading shared libraries")))
    (tmp_path / "empty").touch()
    with pytest.raises(LaunchError, match="empty cannot be run"):
        server.read_options(server.Server(tmp_path / "empty"))


def test_options_of_nodes_without_any() -> None:
    assert launcher.why_no_nodes({}) == launcher.why_no_nodes({"disaggregation": {"role": "decode", "scheduler_host": "x"}}) == ""
    assert launcher.why_no_nodes({"disaggregation": {"scheduler_host": "x", "scheduler_name": "redis"}}) == ""
    assert "scheduler_host has no effect" in launcher.why_no_nodes({"disaggregation": {"scheduler_host": "x"}})


def test_the_scheduler_password_is_in_a_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Not in what is rendered for the server, nor on its command line: both name the file at most."""
    status = launcher.serve(parse("--role=prefill", "--scheduler-password=open sesame", f"--repository={tmp_path / 'r'}", "--dry-run"))
    shown = capsys.readouterr()
    assert status == 0 and "open sesame" not in shown.out + shown.err and "use --scheduler-password-file" in shown.err
    path = tmp_path / "r" / rendering.PASSWORD_FILE
    assert path.read_text() == "open sesame\n" and path.stat().st_mode & 0o777 == 0o600
    told = parameters_of(read_pbtxt(tmp_path / "r" / "prefill" / "config.pbtxt"))
    assert json.loads(told["disaggregation"]) == {"role": "prefill", "scheduler_password_file": str(path)}
    assert all("open sesame" not in p.read_text() for p in (tmp_path / "r").rglob("*.pbtxt"))
    with pytest.raises(ConfigError, match="given twice"):
        rendering.put_password({"disaggregation": {"scheduler_password_file": "x"}}, tmp_path / "r", "open sesame")
    for password in ("", " a", "a\n", "a\nb", "\udcff"):
        with pytest.raises(ConfigError, match=r"name that as scheduler_password_variable|scheduler_password is empty"):
            rendering.put_password({}, tmp_path / "r", password)
    with pytest.raises(ConfigError, match="must be a text, got one of type int"):
        rendering.put_password({}, tmp_path / "r", 83)
    rendering.put_password({}, tmp_path / "r", None)
    assert not path.exists(), "a later start without one does not find it"
    (file := tmp_path / "c.yaml").write_text("role: prefill\nscheduler_password: open sesame\n")
    assert launcher.serve(parse(f"--config={file}", f"--repository={tmp_path / 'r'}", "--dry-run")) == 0
    assert path.exists() and "use --scheduler-password-file" not in capsys.readouterr().err, "no other user reads a file"


def test_the_key_is_new_each_time_and_for_this_user_alone(tmp_path: Path) -> None:
    first = rendering.write_key(tmp_path)
    path = tmp_path / rendering.KEY_FILE
    assert path.read_text().strip() == first and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert rendering.write_key(tmp_path) != first and path.stat().st_mode & 0o777 == 0o600


def test_a_folder_has_one_owner(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second server, or a dry run, would remove the tree under the one that runs."""
    target = tmp_path / "mine"
    assert main(["serve", "--dry-run", f"--repository={target}"]) == 0
    marker = target / "decode" / "1" / "marker"
    lock = server.lock_folder(target)
    try:
        marker.touch()
        assert main(["serve", "--dry-run", f"--repository={target}"]) == 2
        message = f"repository {target} is in use by process {os.getpid()} on {socket.gethostname()}: name another folder with --repository"
        assert message in capsys.readouterr().err and marker.exists()
    finally:
        os.close(lock)
    assert main(["serve", "--dry-run", f"--repository={target}"]) == 0 and not marker.exists()


def test_a_start_that_was_killed_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever that was, and whatever was rendered before: the next one renders all of it."""
    parameters = {"decode": {"model": "x"}, "tokenizer": {"model": "x"}}
    rendering.render_repository(tmp_path / "fresh", parameters, "cpu")
    for killed_at in itertools.count():
        steps = itertools.count()

        def die(own: Callable[..., Any], steps: Iterator[int] = steps, killed_at: int = killed_at) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                if next(steps) == killed_at:
                    raise KeyboardInterrupt
                return own(*args, **options)

            return call

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in ("mkdir", "rename", "rmdir", "unlink", "open"):
                patch.setattr(os, name, die(getattr(os, name)))
            rendering.render_repository(tmp_path / "killed", parameters, "cpu")
            break
    assert killed_at > 20
    trees = [{str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).rglob("*")} for name in ("fresh", "killed")]
    assert trees[0] == trees[1] and "decode/config.pbtxt" in trees[0]


def test_what_a_killed_server_left_of_its_shared_memory_is_removed(state: Path, tmp_path: Path) -> None:
    """By the next one on its folder; nothing else is, whatever the folder says."""
    folder = tmp_path / "repository"
    assert main(["serve", "--dry-run", f"--repository={folder}"]) == 0
    own, other = (processes.SHARED_MEMORY_FOLDER / f"{name}{os.getpid()}" for name in (processes.REGION, "of_somebody_else_"))
    beyond = tmp_path / processes.REGION
    for path in (own, other, beyond):
        path.write_bytes(b"x")
    try:
        processes.note_regions(folder, [own.name, other.name, f"{processes.REGION}/../../{beyond}", "", str(beyond)])
        assert main(["serve", "--dry-run", f"--repository={folder}"]) == 0
        assert not own.exists() and other.exists() and beyond.exists()
        assert not (folder / processes.REGIONS_FILE).exists()
    finally:
        for path in (own, other):
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("step", ["deploy.server.os.pwrite", "deploy.launcher.write_key"])
def test_a_full_disk_is_said(step: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(step, fail)
    assert main(["serve", "--dry-run", f"--repository={tmp_path / 'new'}"]) == 2
    assert f"repository {tmp_path / 'new'} cannot be written: No space left on device" in capsys.readouterr().err


def test_a_folder_that_cannot_be_owned(tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot be used"):
        server.lock_folder(tmp_path / "file")
    assert main(["serve", "--dry-run", f"--repository={tmp_path / 'file'}"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "notes.txt").touch()
    assert main(["serve", "--dry-run", f"--repository={tmp_path}"]) == 2
    assert not (tmp_path / server.LOCK_FILE).exists(), "somebody else's folder is left as it is"


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_ports_out_of_range(port: int) -> None:
    with pytest.raises(LaunchError, match=f"grpc_port is {port}; ports go from 1 to 65535"):
        server.check_ports({"grpc_port": port}, "127.0.0.1")


@pytest.mark.parametrize(
    ("held", "wanted"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("127.0.0.1", "localhost")]
)
def test_ports_in_use_and_named_twice(held: str, wanted: str) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((held, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(LaunchError, match=f"http_port {port} cannot be used on {wanted}: Address already in use"):
            server.check_ports({"http_port": port}, wanted)
    server.check_ports({"http_port": port}, wanted)
    with pytest.raises(LaunchError, match=f"http_port and metrics_port are both {port}"):
        server.check_ports({"http_port": port, "metrics_port": port}, wanted)


def test_ports_are_tried_on_the_address_that_is_asked_for() -> None:
    (port,) = server.free_ports(1)  # any that the system gives on the one may be a connection's on the other
    with socket.socket() as holder:
        holder.bind(("127.0.0.2", port))
        holder.listen()
        server.check_ports({"http_port": port}, "127.0.0.1")
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(LaunchError, match=host):
            server.check_ports({"http_port": 8000}, host)


def test_the_server_is_for_this_machine_alone_unless_told() -> None:
    assert options.ServeConfig().host == "127.0.0.1"


@pytest.mark.parametrize("has_metadata", [True, False])
def test_numpy_2_is_refused(has_metadata: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was unpacked where Python finds it, and never installed."""
    server.check_numpy()

    def read_version(name: str) -> str:
        if not has_metadata:
            raise metadata.PackageNotFoundError(name)
        return "2.1.0"

    monkeypatch.setattr(metadata, "version", read_version)
    if not has_metadata:
        server.check_numpy()
        monkeypatch.setattr(numpy, "__version__", "2.1.0")
    with pytest.raises(LaunchError, match=r"NumPy 2\.1\.0 .*NumPy < 2: pip install 'numpy<2'"):
        server.check_numpy()


def refuse_libraries(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def test_libpython_is_looked_for_beside_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ctypes, "CDLL", refuse_libraries)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path / "configured"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    with pytest.raises(LaunchError, match=r"libpython3\.77\.so\.1\.0 is missing.*apt-get install libpython3\.77"):
        server.find_libpython("3.77")
    for folder in ("venv/lib", "base/lib", "configured"):  # each comes before the one that was there
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libpython3.77.so.1.0").touch()
        assert server.find_libpython("3.77") == (str(tmp_path / folder),)


def test_the_systems_libpython_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    assert server.find_libpython("3.77") == ()


def test_shared_memory_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SHM_NEEDED", 2**62)
    with pytest.raises(LaunchError, match=r"/dev/shm has \d+ MiB free.*--shm-size"):
        server.check_shared_memory()


@pytest.mark.parametrize(("num_free", "is_warned"), [(64, True), (1024, False)])
def test_dockers_shared_memory_is_little(num_free: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A container has 64 MiB, all of them free, where nothing was said: the stubs begin, and large requests end them."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=num_free, f_frsize=2**20))
    server.check_shared_memory()
    assert ("64 MiB free" in capsys.readouterr().err) is is_warned


def test_a_limit_of_open_files_that_no_server_can_start_with(tmp_path: Path) -> None:
    """It was waited for, for as long as models may load, while the server filled the disk: 5 MB of log a second."""
    command = [*FORETOKEN, "serve", *(f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics", "status"), server.free_ports(4)))]
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # noqa: E731
    done = subprocess.run(command, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, preexec_fn=limit, capture_output=True, text=True, timeout=120)
    said = "the limit of open files is 64; the server needs 128, and one more for each connection: raise it to 1024 or more (ulimit -Hn; in Docker,"
    assert done.returncode == 2 and f"foretoken serve: {said}" in done.stderr


@pytest.mark.parametrize(("hard", "is_warned"), [(256, True), (1024, False), (resource.RLIM_INFINITY, False)])
def test_few_open_files(hard: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    server.check_file_limit()
    assert ("the limit of open files is 256: beyond some 128 connections" in capsys.readouterr().err) is is_warned


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", "--device", "cuda:1"]) == 2
    assert "device cuda:1: this machine has no NVIDIA GPU" in capsys.readouterr().err
    assert main(["serve", "--dry-run", "--device", "auto"]) == 0


def test_backends_that_lie_beside_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in NVIDIA's archives. The server itself looks into one folder alone, wherever it lies."""
    executable = fake_server(tmp_path / "triton", "--model-repository", None)
    monkeypatch.setenv("PATH", f"{executable.parent}:/bin")
    monkeypatch.setattr(server, "OWN_BACKENDS", tmp_path / "own")
    assert server.find_server().backend_directory is None
    (beside := executable.parent.parent / "backends" / "python").mkdir(parents=True)
    assert server.find_server().backend_directory == beside.parent
    (tmp_path / "own" / "python").mkdir(parents=True)
    assert server.find_server().backend_directory is None


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setitem(sys.modules, "pytriton", None)  # as if it were not installed
    with pytest.raises(LaunchError, match=r"no tritonserver.*pip install --no-deps nvidia-pytriton"):
        server.find_server()
    monkeypatch.setattr(served_model, "find_model", lambda *_: pytest.fail("a model would be fetched for no server"))
    assert main(["serve", "org/model", "--dry-run"]) == 2 and "no tritonserver" in capsys.readouterr().err


def test_the_wheels_server_is_laid_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("pytriton") is None:
        pytest.skip("nvidia-pytriton is not installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = server.find_server()
    assert found.executable.is_file()
    assert found.backend_directory is not None and found.backend_directory.is_relative_to(tmp_path / "state" / "foretoken")
    python = found.backend_directory / "python"
    assert {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"} <= {p.name for p in python.iterdir()}
    stub = python / "triton_python_backend_stub"
    assert stub.resolve().parent.name == f"{sys.version_info.major}.{sys.version_info.minor}"
    right = stub.readlink()
    (tmp_path / "other").touch()
    for wrong in ("gone", "other"):  # links of another environment, to nothing or to what is there too, are set right
        stub.unlink()
        stub.symlink_to(tmp_path / wrong)
        assert server.find_server() == found
        assert stub.readlink() == right


def test_no_half_of_a_modules_bytecode_is_kept(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python keeps one on a disk that is full, and no later start got beyond it (EOFError: marshal data too short), with room on the disk, too."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert main(["serve", "--dry-run"]) == 0
    modules = [path for path in state.rglob("*.py") if path.name in ("model.py", "triton_python_backend_utils.py")]
    assert len(modules) >= 2
    for path in modules:
        (path.parent / "__pycache__").unlink()
        kept = Path(py_compile.compile(str(path), doraise=True))
        kept.write_bytes(kept.read_bytes()[:100])
    assert main(["serve", "--dry-run"]) == 0
    for path in state.rglob("*.py"):
        assert SourceFileLoader(path.stem, str(path)).get_code(path.stem) is not None
        assert not list(path.parent.rglob("*.pyc"))


def test_the_servers_first_start_changes_nothing_in_the_checked_in_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's bytecode would be a change: with --model-control-mode=poll tritonserver loaded every model a second time. Its stubs ignore
    PYTHONDONTWRITEBYTECODE."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    shutil.copytree(rendering.REPOSITORIES, own := tmp_path / "repositories", symlinks=True, ignore=shutil.ignore_patterns("*.safetensors"))
    modules = [path for path in own.rglob("model.py") if not path.parent.parent.is_symlink()]
    assert len(modules) == 6
    before = {path: path.lstat().st_mtime_ns for path in own.rglob("*")}
    for path in modules:
        assert SourceFileLoader(path.stem, str(path)).get_code(path.stem) is not None
    assert {path: path.lstat().st_mtime_ns for path in own.rglob("*")} == before


def test_the_server_may_have_as_many_connections_as_the_system_allows(tmp_path: Path) -> None:
    """With the usual limit of 1,024 files some hundred idle ones made it deaf, and its log as large as the disk."""
    (folder := tmp_path / "bin").mkdir()
    (program := folder / "tritonserver").write_text('#!/bin/sh\n[ "$1" = --help ] && echo --model-repository || ulimit -Sn\n')
    program.chmod(0o755)
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3))]
    command = ["sh", "-c", 'ulimit -Sn 128; exec "$@"', "sh", sys.executable, "-m", "deploy.cli", "serve", "--no-supervise", *ports]
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPOSITORY.parent.parent)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert result.stdout.splitlines()[-1:] == [str(min(hard, 65536))], result.stderr


# -- foretoken serve ------------------------------------------------------------------------------------------------------------


def printed_command(output: str) -> list[str]:
    return shlex.split(output.strip().splitlines()[-1])


def test_dry_run(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", "--http-port=9100", "--max-batch-size", "4"]) == 0
    command = printed_command(capsys.readouterr().out)
    repository = state / "repository-9100"
    assert command[0] == "env"
    assert any(part.endswith("/bin/tritonserver") for part in command)
    assert {f"--model-repository={repository}", "--http-port=9100", "--grpc-port=8001"} <= set(command)
    parameters = parameters_of(read_pbtxt(repository / "decode" / "config.pbtxt"))
    speculative = DEFAULT_SPECULATION
    assert json.loads(parameters.pop("speculative_config")) == speculative, "the bundled model's default"
    assert parameters == {"max_batch_size": "4", "model": str(BUNDLED_MODEL)}
    assert not (repository / "mtp_drafter").exists()
    assert main(["serve", "--dry-run", "--http-port=9100", "--max-batch-size", "4", "--model", str(BUNDLED_MODEL)]) == 0
    assert json.loads(parameters_of(read_pbtxt(repository / "decode" / "config.pbtxt"))["speculative_config"]) == speculative, "named or not"


@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}], ids=["none", "ascii"])
def test_dry_run_in_a_bare_environment(tmp_path: Path, environment: dict[str, str]) -> None:
    """A service without PATH, whose server would not find the shell that it starts models by; a system whose text is not UTF-8."""
    command = [sys.executable, "-m", "deploy.cli", "serve", "--dry-run", f"--repository={tmp_path / 'repository'}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPOSITORY.parent.parent)
    assert result.returncode == 0, result.stderr
    (path,) = (word.removeprefix("PATH=") for word in printed_command(result.stdout) if word.startswith("PATH="))
    assert shutil.which("bash", path=path)


@pytest.mark.parametrize(("role", "name"), [("mixed", "decode"), ("prefill", "prefill"), ("decode", "decode")])
def test_checked_in_repositories_have_the_launchers_defaults(state: Path, role: str, name: str) -> None:
    """Every key: the folders are the same too. The standalone one asks its own mtp_drafter."""
    is_standalone = role == "mixed"
    bls = json.dumps({"method": "mtp", "num_model_steps": 3, "mtp_strategy": "with_ngram", "num_speculative_tokens": 5, "placement": "bls"})
    assert main(["serve", "--dry-run", *((f"--speculative-config={bls}",) if is_standalone else ("--role", role))]) == 0

    def config_of(folder: Path) -> EngineConfig:
        found = {key: read_value(text) for key, text in parameters_of(read_pbtxt(folder / name / "config.pbtxt")).items()}
        speculative = found.pop("speculative_config")
        paths = {"model": found.pop("model", "."), "drafter": speculative.pop("model", "../../mtp_drafter/1")}
        drafter = BUNDLED_DRAFTER if is_standalone else DEFAULT_DRAFTER
        assert [(folder / name / "1" / path).resolve() for path in paths.values()] == [BUNDLED_MODEL.resolve(), drafter.resolve()]
        return EngineConfig.from_dict({**found, "speculative_config": {**speculative, "model": str(drafter)}})

    def read_value(text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    checked_in = rendering.REPOSITORIES / ("standalone" if is_standalone else role)
    rendered = config_of(state / "repository-8000")
    assert config_of(checked_in) == rendered
    assert (checked_in / "mtp_drafter").exists() == is_standalone, "nobody would ask it"
    if is_standalone:
        drafter = parameters_of(read_pbtxt(checked_in / "mtp_drafter" / "config.pbtxt"))
        assert int(drafter["num_model_steps"]) == rendered.speculative_config.num_model_steps


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nodes_with_a_drafter_of_its_own_have_it_beside_them(state: Path, role: str) -> None:
    assert main(["serve", "--dry-run", "--role", role, '--speculative-config={"method": "mtp", "placement": "bls"}']) == 0
    assert parameters_of(read_pbtxt(state / "repository-8000" / "mtp_drafter" / "config.pbtxt"))["model"] == str(BUNDLED_DRAFTER)


@pytest.mark.parametrize(
    ("speculative", "folder"),
    [
        ({"method": "eagle3", "num_speculative_tokens": 2}, DEFAULT_DRAFTER),
        ({"speculative_algorithm": "EAGLE3", "speculative_num_steps": 2}, DEFAULT_DRAFTER),
        ({"decoding_type": "Eagle3", "max_draft_len": 2}, DEFAULT_DRAFTER),
        ({"method": "suffix", "request_methods": ["eagle3"]}, DEFAULT_DRAFTER),
        ({"method": "eagle3", "draft_model_name_or_path": str(BUNDLED_DRAFTER)}, None),
        ({"method": "mtp"}, BUNDLED_DRAFTER),
    ],
)
def test_the_bundled_model_has_its_drafters_at_hand(
    speculative: dict[str, Any], folder: Path | None, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for who names another; None: that is refused."""
    status = main(["serve", "--dry-run", f"--speculative-config={json.dumps(speculative)}"])
    if folder is None:
        assert status == 2 and "foretoken serve: " in capsys.readouterr().err
        return
    assert status == 0
    found = json.loads(parameters_of(read_pbtxt(state / "repository-8000" / "decode" / "config.pbtxt"))["speculative_config"])
    assert found["model"] == str(folder)
    engine = EngineConfig.from_dict({"speculative_config": speculative}).speculative_config
    assert engine.model == (None if engine.model_method == "mtp" else str(folder)), "offline as well"
    assert main(["serve", "--dry-run", "--model", str(SMALL_MODEL), "--speculative-config", '{"method": "eagle3"}']) == 2
    with pytest.raises(ConfigError, match="model must be the folder of the drafter's weights with method eagle3, got None"):
        EngineConfig.from_dict({"model": str(SMALL_MODEL), "speculative_config": {"method": "eagle3"}})


def test_dry_run_with_a_drafter_of_its_own(state: Path) -> None:
    assert main(["serve", "--dry-run", "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 4, "placement": "bls"}']) == 0
    parameters = parameters_of(read_pbtxt(state / "repository-8000" / "mtp_drafter" / "config.pbtxt"))
    assert parameters == {"model": str(BUNDLED_DRAFTER), "target": str(BUNDLED_MODEL), "num_model_steps": "4"}
    assert main(["serve", "--dry-run", "--speculative-config", '{"method": "suffix"}']) == 0
    assert not (state / "repository-8000" / "mtp_drafter").exists()


def test_dry_run_with_everything(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = yaml_file(tmp_path, f"model: {BUNDLED_MODEL}\nmax-batch-size: 2\nrepository: {tmp_path / 'mine'}\nspeculative_config: {{method: none}}\n")
    assert main(["serve", "--dry-run", "--config", path, "--max-batch-size=3", "--kv-cache-memory=64MiB", "--no-enable-prefix-caching"]) == 0
    assert f"--model-repository={tmp_path / 'mine'}" in printed_command(capsys.readouterr().out)
    parameters = parameters_of(read_pbtxt(tmp_path / "mine" / "decode" / "config.pbtxt"))
    assert parameters.pop("model") == str(BUNDLED_MODEL)
    values = {k: json.loads(v) if k != "kv_cache_memory" else v for k, v in parameters.items()}
    assert values == {"max_batch_size": 3, "speculative_config": {"method": "none"}, "kv_cache_memory": "64MiB", "enable_prefix_caching": False}
    assert not state.exists()


def test_another_models_default_is_plain_decoding(state: Path, foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", "--model", str(foreign)]) == 0
    assert parameters_of(read_pbtxt(state / "repository-8000" / "decode" / "config.pbtxt")) == {"model": str(foreign)}
    assert main(["serve", "--dry-run", "--model", str(foreign), "--speculative-config", '{"method": "mtp"}']) == 2
    assert "foretoken serve: speculative_config.model: method mtp needs a drafter trained for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/no/such/model"], "model folder /no/such/model does not exist"),
        (["--max-batch-size", "0"], "max_batch_size must be from 1 to 256, got 0"),
        (["--kv-cache-memory", "lots"], "kv_cache_memory must be bytes or a string"),
        (["--speculative-config", '{"method": "ngrm"}'], 'did you mean "ngram"'),
        (["--speculative-config", "ngram"], "speculative_config is not valid JSON"),
        (["--speculative-config", '{"method": "mtp", "model": "/no/drafter"}'], "model folder /no/drafter does not exist"),
        (
            ["--speculative-config", '{"method": "mtp", "quantization": "int8"}'],
            "quantization must be one of wint8, wint4, fp8, block_wise_fp8, got 'int8'",
        ),
        (["--speculative-config", '{"method": "mtp", "draft_tensor_parallel_size": 2}'], "draft_tensor_parallel_size must be 1 or the target's"),
        (["--quantization", "int3"], "quantization must be one of wint8, wint4, fp8, block_wise_fp8, got 'int3'"),
        (["--quantization", '{"moe_type": "wint4"}'], "quantization: unknown key 'moe_type'; did you mean \"moe_quant_type\"?"),
        (["--quantization", "{"], "quantization is not valid JSON"),
        (["--config", "/no/such/file.yaml"], "--config /no/such/file.yaml: No such file"),
    ],
)
def test_mistakes_end_with_a_message(state: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("foretoken serve: ") and message in captured.err
    assert "Traceback" not in captured.err and not captured.out
    assert not state.exists(), "nothing is rendered"


def test_incomplete_models_are_refused_before_the_server_runs(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, message in (
        ("config.json", "config.json is missing"),
        ("tokenizer.json", "tokenizer.json is missing"),
        ("model.safetensors", "no *.safetensors"),
    ):
        assert main(["serve", "--dry-run", "--model", str(folder)]) == 2
        assert message in capsys.readouterr().err
        (folder / name).symlink_to(BUNDLED_MODEL / name)
    assert main(["serve", "--dry-run", "--model", str(folder)]) == 0


def test_unknown_keys_in_the_file_name_the_nearest(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", "--config", yaml_file(tmp_path, "max_batchsize: 3\n")]) == 2
    assert 'did you mean "max_batch_size"' in capsys.readouterr().err


def test_a_port_in_use_ends_with_a_message(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert main(["serve", f"--http-port={port}"]) == 2
    assert f"http_port {port} cannot be used" in capsys.readouterr().err


def test_check_model_is_about_the_folder(tmp_path: Path) -> None:
    assert served_model.check_model(str(BUNDLED_MODEL)) == BUNDLED_MODEL.resolve()
    with pytest.raises(ModelError, match="does not exist"):
        served_model.check_model(str(tmp_path / "none"))


def test_drafts_of_answers_with_a_form() -> None:
    """Also where requests alone choose methods that draft, and nothing forced is drafted."""
    methods: list[list[str]] = [[], ["ngram"]]
    for request_methods, most in zip(methods, (0, 8)):
        config = EngineConfig.from_dict({"max_forced_tokens": 0, "speculative_config": {"method": "none", "request_methods": request_methods}})
        assert config.max_masked_drafts == most


def test_clients_call_the_model_what_the_command_calls_it() -> None:
    def names(*words: str) -> list[str]:
        values = options.gather(make_parser().parse_args(["serve", "--port=8080", *words]))
        return launcher.served_names(options.split_keys(values)[0], values)

    assert names() == ["foretoken"]
    assert names("Qwen/Qwen3-0.6B") == names("--model=Qwen/Qwen3-0.6B") == ["Qwen/Qwen3-0.6B", "foretoken"], "as after `vllm serve`"
    assert names("/models/a", "--served-model-name", "a") == ["a"] and names("/models/a", "--served-model-name", "a", "b") == ["a", "b"]
