"""Sampling parameters of generation_config.json: for requests that say nothing, and for nobody who says something."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL
from backend.errors import ModelError, RequestError
from backend.sampling_defaults import read_sampling_defaults
from deploy.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copy(BUNDLED_MODEL / name, tmp_path)
    return tmp_path


def recommend(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [0, 1]},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "min_p": None}, {}),
        ({"repetition_penalty": 1.05, "max_new_tokens": 512, "min_p": 0.1}, {"repetition_penalty": 1.05, "max_tokens": 512, "min_p": 0.1}),
    ],
)
def test_what_is_taken(folder: Path, values: dict[str, Any], expected: dict[str, Any]) -> None:
    recommend(folder, **values)
    assert read_sampling_defaults(folder) == expected


@pytest.mark.parametrize(("key", "value"), [("temperature", -1), ("top_p", 2), ("top_k", "many"), ("max_new_tokens", 0), ("temperature", [1])])
def test_what_no_request_could_have_is_an_error(folder: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recommend(folder, **{key: value})
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key} "):
        read_sampling_defaults(folder)
    assert main(["serve", "--dry-run", "--model", str(folder)]) == 2 and f"generation_config.json: {key}" in capsys.readouterr().err


def test_who_says_nothing_has_them(folder: Path, capsys: pytest.CaptureFixture[str], state: Path) -> None:
    recommend(folder, temperature=0.0, max_new_tokens=9)
    llm = LLM(str(folder))
    first, again = llm.generate(["def f(", "def f("], use_tqdm=False)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids and len(first.outputs[0].token_ids) == 9
    (told,) = llm.generate("def f(", SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)
    assert told.outputs[0].token_ids == first.outputs[0].token_ids[:3]
    llm.close()
    assert main(["serve", "--dry-run", "--model", str(folder)]) == 0
    assert "(--generation-config none: not): temperature 0.0, max_tokens 9" in capsys.readouterr().out
    assert main(["serve", "--dry-run", "--model", str(folder), "--generation-config", "vllm"]) == 0
    assert "generation_config" not in capsys.readouterr().out.replace("--generation-config", "")
    plain = LLM(str(folder), generation_config="none")
    assert plain.sampling_defaults == {}
    plain.close()


def test_more_tokens_than_there_is_room_for_are_no_reason_to_refuse(folder: Path) -> None:
    """What is recommended, or taken where nobody says: who asks for so many is told, others have what the context leaves."""
    for recommended in ({"max_new_tokens": 4096}, {}):  # else 128
        recommend(folder, temperature=0.0, eos_token_id=1, **recommended)
        llm = LLM(str(folder), max_model_len=64)
        results = [*llm.generate("def f(", use_tqdm=False), *llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)]
        assert [len(r.prompt_token_ids) + len(r.outputs[0].token_ids) for r in results] == [64, 64]
        with pytest.raises(RequestError, match="max_tokens is 65; the context holds 64 tokens"):
            llm.generate("def f(", SamplingParams(max_tokens=65), use_tqdm=False)
        llm.close()


def test_a_chat_has_what_is_left_of_the_context(folder: Path) -> None:
    """Or of the cache, where that is less: it is no reason to refuse what asked for nothing."""
    llm = LLM(str(folder), kv_cache_memory="1MiB")
    room = llm.engine.scheduler.limits.max_num_tokens
    assert room < llm.engine.scheduler.max_model_len
    (chat,) = llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)
    assert chat.outputs[0].finish_reason == "stop" or len(chat.prompt_token_ids) + len(chat.outputs[0].token_ids) == room
    llm.close()
