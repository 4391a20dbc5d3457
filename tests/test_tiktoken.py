"""Folders whose only tokenizer is a file of ranks, against tiktoken itself, and against the vocabulary that the ranks were taken from."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from backend import tiktoken_file
from backend.config import BUNDLED_MODEL
from backend.detokenizer import Detokenizer
from backend.errors import ModelError
from backend.model_sources import find_model
from backend.text import Tokenizer
from backend.vocabularies import PRE_TOKENIZERS
from tests.test_sentencepiece import TEXTS
from training.heldout import read_heldout

BUNDLED = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
CHARACTERS = {c: byte for byte, c in enumerate(tiktoken_file._CHARACTERS)}
RANKS = [bytes(map(CHARACTERS.get, token)) for token in list(BUNDLED["model"]["vocab"])[2:]]  # type: ignore[arg-type]
CODE = [text[start : start + 400] for text in list(read_heldout().values())[:4] for start in (0, 900)]
HARD = [
    *TEXTS, *CODE, "it's  WE'LL I'd 12345 6789.0", "line\r\n\r\n\n  \n\tx", "你好 world中文ABC ñandú ÀÉÎ", "🙂👩‍👩‍👧", "x" * 300,
    " " * 70 + "y", "aaaaaaaaaaa", "<|endoftext", "\x00\x01\ufffd", "e\u0301 Ⅷ ² ½",
]  # fmt: skip
END = {"content": "<|end|>", "special": True}
FAMILIES: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "Qwen": ("qwen.tiktoken", {"tokenizer_class": "QWenTokenizer"}, "qwen2", []),
    "GLM-4": (
        "tokenizer.model",
        {
            "tokenizer_class": "ChatGLM4Tokenizer",
            "added_tokens_decoder": {"4094": {"content": "[gMASK]", "special": True}, "4096": {"content": "<sop>"}},
        },
        "glm4",
        ["[gMASK]", "<sop>"],
    ),
    "Kimi": ("tiktoken.model", {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"4095": END}}, "kimi-k2", []),
    "Llama 3": (
        "tokenizer.model",
        {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"4094": {"content": "<|begin_of_text|>", "special": True}}},
        "llama3",
        ["<|begin_of_text|>"],
    ),
}
"""The file, what tokenizer_config.json says, how text is cut, and what comes before it."""


def write(folder: Path, file: str, settings: dict[str, Any], ranks: list[bytes] = RANKS) -> Path:
    shutil.copytree(BUNDLED_MODEL, folder, ignore=shutil.ignore_patterns("tokenizer*", "*.py", "__pycache__"))
    (folder / file).write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_tiktoken_and_of_the_original(tmp_path: Path, family: str) -> None:
    file, settings, pre, before = FAMILIES[family]
    own = Tokenizer(find_model(write(tmp_path / "own", file, settings)))
    rules = PRE_TOKENIZERS[pre]
    theirs = tiktoken.Encoding("x", pat_str=rules.patterns[0], mergeable_ranks={t: i for i, t in enumerate(RANKS)}, special_tokens={})
    # The vocabulary with the merges that it was trained with, and the family's rules.
    cuts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in rules.patterns]
    original = tokenizers.Tokenizer.from_str(json.dumps({**BUNDLED, "added_tokens": [], "post_processor": None}))
    original.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cuts, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    original.normalizer = tokenizers.normalizers.NFC() if rules.is_composed else None
    head = [own.special_ids.get(name, own.inner.token_to_id(name)) for name in before]
    for text in HARD:
        found = own.encode(text)
        assert found[: len(head)] == head
        found = found[len(head) :]
        composed = tokenizers.normalizers.NFC().normalize_str(text) if rules.is_composed else text
        assert found == theirs.encode_ordinary(composed), text
        assert found == [i - 2 for i in original.encode(text).ids], text
        assert own.decode(found) == composed


def test_special_tokens(tmp_path: Path) -> None:
    for number, (family, text, token_id) in enumerate(
        [("Qwen", "<|im_end|>", 4096), ("Kimi", "<|end|>", 4095), ("Kimi", "<|reserved_token_4094|>", 4094), ("GLM-4", "<sop>", 4096)]
    ):
        file, settings, *_ = FAMILIES[family]
        own = Tokenizer(find_model(write(tmp_path / str(number), file, settings)))
        assert own.encode(f"x{text}y")[-2] == token_id and own.token_bytes(token_id) == text.encode()
    assert own.decode([4094, 4096]) == "<sop>", "which is not special"
    plain = Tokenizer(find_model(write(tmp_path / "plain", file, {**settings, "add_bos_token": False})))
    assert plain.encode("x") == own.encode("x")[2:]


def test_llama_3_without_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is published: told by its number of ranks."""
    monkeypatch.setattr(tiktoken_file, "LLAMA3_RANKS", len(RANKS))
    own = Tokenizer(find_model(write(tmp_path / "own", "tokenizer.model", {})))
    assert own.encode("x")[0] == 4094 and own.special_ids["<|eot_id|>"] == 4094 + 9 and len(own.special_ids) == 256


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write(tmp_path_factory.mktemp("models") / "own", *FAMILIES["Qwen"][:2])
    (folder / "tokenizer.json").write_text(json.dumps(tiktoken_file.convert_tiktoken(folder / "qwen.tiktoken")))
    return Tokenizer(folder)


@given(st.lists(st.integers(0, 4100), max_size=30))
def test_text_token_by_token(shared: Tokenizer, token_ids: list[int]) -> None:
    stream = Detokenizer(shared.decoding)
    assert "".join(map(stream.push, token_ids)) + stream.flush() == shared.decode(token_ids)


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"tokenizer_class": "MyTokenizer"}, RANKS, "tokenizer_class 'MyTokenizer' in tokenizer_config.json is not known (known: QWenTokenizer"),
        ({}, RANKS, "put the model's tokenizer.json into the folder"),
        ({"tokenizer_class": "QWenTokenizer"}, RANKS[1:], "no token is the byte 33: a vocabulary has all 256"),
        ({"tokenizer_class": "QWenTokenizer"}, [*RANKS, RANKS[5]], "token 4094 is"),
        ({"tokenizer_class": "QWenTokenizer", "added_tokens_decoder": {"7": END}}, RANKS, "it must be an id behind the 4094 ranks"),
        ({"tokenizer_class": "QWenTokenizer", "added_tokens_decoder": {"4096000": END}}, RANKS, "it must be an id behind the 4094 ranks"),
        ({"tokenizer_class": "QWenTokenizer", "added_tokens_decoder": [1]}, RANKS, "added_tokens_decoder is [1]; it must be an object"),
    ],
)
def test_what_cannot_be_converted(tmp_path: Path, settings: dict[str, Any], ranks: list[bytes], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_model(write(tmp_path / "own", "x.tiktoken", settings, ranks))
    assert (message in str(caught.value) and "x.tiktoken" in str(caught.value)) or "tokenizer_config.json" in str(caught.value)


def test_damaged_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "own", "x.tiktoken", {"tokenizer_class": "QWenTokenizer"})
    whole = (folder / "x.tiktoken").read_bytes()
    lines = whole.splitlines(keepends=True)
    for data, message in (
        (whole[:-9], f"line {len(lines)} is no token in base64 and its rank"),
        (b"".join(lines[:1000] + lines[1001:]), "no line has rank 1000"),
        (whole + lines[7], "has rank 7, and so has a line before"),
        (lines[0] + b"\xff\xff 1\n", "line 2 is no token"),
    ):
        (folder / "x.tiktoken").write_bytes(data)
        with pytest.raises(ModelError, match=message):
            find_model(folder)
