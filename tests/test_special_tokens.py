"""What files beside a tokenizer say of its tokens: as transformers reads it, or a word that it is not so. Tokenizers that are no model's."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from backend.config import BUNDLED_MODEL, EngineConfig
from backend.errors import ModelError
from backend.intake import Intake
from backend.model_checks import check_model
from backend.sampling_params import SamplingParams
from backend.text import Tokenizer
from backend.tokenizer_checks import check_tokenizer, check_vocabulary

CHAT = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ messages[0].content }}"
TEXT = "def f <new> <more> x"
NEXT = 4096
"""The bundled tokenizer's first free id."""


def write(folder: Path, files: dict[str, Any]) -> Path:
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, values in {"tokenizer_config.json": {}, **files}.items():
        (folder / name).write_text(json.dumps({"chat_template": CHAT, **values} if name == "tokenizer_config.json" else values))
    return folder


def check_before_launch(folder: Path) -> None:
    check_tokenizer(folder, check_model(BUNDLED_MODEL), "error")


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True, **flags}


@pytest.mark.parametrize(
    "files",
    [
        {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, "tokenizer_config.json": {"bos_token": "<b>"}},
        {"special_tokens_map.json": {"bos_token": "<s>"}, "tokenizer_config.json": {"bos_token": "<b>", "added_tokens_decoder": {}}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"4097": token("<more>", special=False, lstrip=True), "4096": token("<new>")}}},
        {"added_tokens.json": {"<more>": 4097, "<new>": 4096}, "tokenizer_config.json": {"eos_token": "<more>"}},
        {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<i>"}, "eos_token": "def"}},
        {"tokenizer_config.json": {"additional_special_tokens": ["def"]}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"318": token("def", lstrip=True), "4096": token("<new>", rstrip=True, special=False)}}},
    ],
    ids=["names apart", "names apart count no more", "added", "added, apart", "others by name", "others", "flags"],
)  # fmt: skip
def test_as_transformers_reads_them(files: dict[str, Any], tmp_path: Path) -> None:
    folder, chat = write(tmp_path, files), [{"role": "user", "content": TEXT}]
    own, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    token_ids = theirs.encode(TEXT)
    assert own.encode(TEXT) == token_ids
    assert own.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
    assert own.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer"])
def test_a_first_token_that_the_settings_ask_for(name: str, tmp_path: Path) -> None:
    """DeepSeek's tokenizer.json has none: the class that its settings name puts it there."""
    asked = {"tokenizer_class": name, "bos_token": "<s>", "add_bos_token": True, "added_tokens_decoder": {str(NEXT): token("<s>")}}
    inner = tokenizers.Tokenizer.from_file(str(write(tmp_path, {"tokenizer_config.json": asked}) / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    inner.save(str(tmp_path / "tokenizer.json"))
    plain, first = inner.encode("def f").ids, [NEXT] if name.startswith("Llama") else []
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("def f") == first + plain and tokenizer.encode("def f", add_special_tokens=False) == plain
    assert tokenizer.encode("def f", max_tokens=len(first) + 1) == [*first, plain[-1]]
    assert (tokenizer.fingerprint == Tokenizer(tmp_path).fingerprint) and tokenizer.fingerprint != Tokenizer(BUNDLED_MODEL).fingerprint


@pytest.mark.parametrize("before", [[], ["<|pad|>"]])
def test_a_first_token_in_place_of_the_files_rules(before: list[str], tmp_path: Path) -> None:
    """As transformers 4 has it: rules behind rules would take what the first put for a second text, or find more than two."""
    asked = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": True}
    for adds_end in (False, True):
        folder = tmp_path / str(adds_end)
        folder.mkdir()
        added = {"added_tokens_decoder": {str(NEXT): token("<s>")}, "add_eos_token": adds_end}
        inner = tokenizers.Tokenizer.from_file(str(write(folder, {"tokenizer_config.json": asked | added}) / "tokenizer.json"))
        plain, names = inner.encode("def f", add_special_tokens=False).ids, [*before, "$A", "<|endoftext|>"]
        known = [(name, inner.token_to_id(name)) for name in ("<|pad|>", "<|endoftext|>")]
        inner.post_processor = tokenizers.processors.TemplateProcessing(single=names, pair=[*names, "$B"], special_tokens=known)
        inner.save(str(folder / "tokenizer.json"))
        assert Tokenizer(folder).encode("def f") == [NEXT, *plain, *([0] if adds_end else [])]


def test_rules_that_no_text_can_be_read_by(tmp_path: Path) -> None:
    """An id beyond the embedding in them, which the vocabulary does not have; and rules behind rules, of which the library panics."""
    values = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    rules = {"type": "TemplateProcessing", "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [NEXT], "tokens": ["<s>"]}}}
    first, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    (write(tmp_path, {}) / "tokenizer.json").write_text(json.dumps(values | {"post_processor": {**rules, "single": [first, text]}}))
    with pytest.raises(ModelError, match=r"a token beyond the model's embedding \(vocab_size 4096\), 4096 \('<s>'\) the first"):
        check_vocabulary(Tokenizer(tmp_path).tokens, check_model(BUNDLED_MODEL), "error")
    several = {"type": "Sequence", "processors": [{**rules, "single": [first, text, first]}] * 2}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | {"post_processor": several}))
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be used: what it puts around a text fails"):
        Tokenizer(tmp_path)


def test_a_token_that_there_is_no_room_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Tokenizer(write(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": {"5000": token("<new>"), "4096": token("<more>")}}}))
    assert own.encode("<more>")[-1] == NEXT and own.encode("<new>")[-1] != 5000
    assert "the added token '<new>' has id 5000; tokenizer.json has no such token, and its next id is 4097: it is left out" in caplog.text


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("added_tokens.json", [1], "must hold a JSON object, got list"),
        ("special_tokens_map.json", 5, "must hold a JSON object, got int"),
        ("added_tokens.json", {"<new>": -1}, "an added token is -1"),
        ("added_tokens.json", {"": NEXT}, "an added token is 4096"),
        ("added_tokens.json", {"<new>": [NEXT]}, "an added token is [4096]"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder is [1]; it must be an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": token("<new>")}}, "an added token is 'x'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"4096": "<new>"}}, "an added token is '4096': '<new>'; it must be an id, and a text"),
    ],
)
def test_files_that_are_wrong(name: str, values: Any, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {name: values})
    for read in (Tokenizer, check_before_launch):
        with pytest.raises(ModelError) as caught:
            read(folder)
        assert message in str(caught.value) and str(folder / name) in str(caught.value)


@pytest.mark.parametrize("values", [{"eos_token": "\ud800"}, {"added_tokens_decoder": {"4096": token("<\udfff>")}}], ids=list)
def test_half_a_surrogate_pair(values: dict[str, Any], tmp_path: Path) -> None:
    """Which JSON can write."""
    folder = write(tmp_path, {"tokenizer_config.json": values})
    for read in (Tokenizer, check_before_launch):
        with pytest.raises(ModelError, match="is no text: it has half a surrogate pair"):
            read(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {})
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=rf"{name} cannot be read: it is not a regular file"):
        Tokenizer(folder)


def test_a_tokenizer_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    """Of fewer tokens: nothing would be refused, and answers would lack what it does not know."""
    tokenizer, spec = Tokenizer(BUNDLED_MODEL), check_model(BUNDLED_MODEL)
    for size, is_warned in ((4500, False), (NEXT, False), (5000, True)):
        caplog.clear()
        check_vocabulary(tokenizer.tokens, dataclasses.replace(spec, vocab_size=size), "error")
        assert ("the tokenizer has 4096 tokens of the model's vocabulary of 5000: it may be another model's" in caplog.text) == is_warned


def test_tokens_beyond_the_embedding(caplog: pytest.LogCaptureFixture) -> None:
    """Some families publish models with such tokens, for what is no text."""
    tokenizer, spec = Tokenizer(BUNDLED_MODEL), dataclasses.replace(check_model(BUNDLED_MODEL), vocab_size=NEXT - 1)
    (last,) = (token for i, token in tokenizer.tokens.items() if i == NEXT - 1)
    said = rf"has a token beyond the model's embedding \(vocab_size 4095\), 4095 \({re.escape(repr(last))}\) the first"
    with pytest.raises(ModelError, match=said):
        check_vocabulary(tokenizer.tokens, spec, "error")
    check_vocabulary(tokenizer.tokens, spec, "refuse")
    assert re.search(rf"{said}; requests whose text becomes one are refused", caplog.text)
    caplog.clear()
    own = dataclasses.replace(spec, placeholders=frozenset({last, "<other>"}))
    check_vocabulary(tokenizer.tokens, own, "error")
    assert not caplog.text
    with pytest.raises(ModelError, match=r"a token beyond .* 4096 \('<more>'\) the first"):  # not the placeholder
        check_vocabulary({**tokenizer.tokens, 4096: "<more>"}, own, "error")


@pytest.mark.parametrize(("name", "expected"), [("def", {0, 318}), ("<|endoftext|>", {0}), ("<none>", {0}), (None, {0})])
def test_a_tokenizers_own_end(name: str | None, expected: set[int], tmp_path: Path) -> None:
    """Of a model that was trained on as a chat, whose config.json still names the end of texts."""
    tokenizer = Tokenizer(write(tmp_path, {"tokenizer_config.json": {"eos_token": name}}))
    requests = Intake(EngineConfig(), tokenizer, 64, NEXT, frozenset({0})).make("x", SamplingParams(), "own")
    assert [request.stop_ids for request in requests] == [frozenset(expected)]
    (request,) = Intake(EngineConfig(), tokenizer, 64, 300, frozenset({0})).make([1], SamplingParams(), "own")
    assert request.stop_ids == {0}, "not one that the model does not have"
