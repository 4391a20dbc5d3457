"""Folders whose only tokenizer is SentencePiece's, against that package; and their text token by token."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import sentencepiece
import transformers
from hypothesis import given
from hypothesis import strategies as st

from backend.config import BUNDLED_MODEL
from backend.detokenizer import Detokenizer
from backend.errors import ModelError
from backend.model_sources import find_model
from backend.text import Tokenizer
from training.heldout import read_heldout

TEXTS = ["def main(argv=None):\n    return 0\n", "naïve ünï—😀", "  two  spaces ", "", "a\tb", "<0x41> ▁"]


def train(folder: Path, **options: object) -> Path:
    """A folder with the bundled model's weights and a vocabulary of 700 pieces, as Llama's is made."""
    shutil.copytree(BUNDLED_MODEL, folder, ignore=shutil.ignore_patterns("tokenizer*", "*.py", "__pycache__"))
    (folder / "text").write_text(next(iter(read_heldout().values())))
    values: dict[str, object] = {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "normalization_rule_name": "identity"}
    values |= {"remove_extra_whitespaces": False, "split_digits": True, "character_coverage": 0.999, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), **values)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("models") / "own")


@pytest.fixture(scope="module")
def tokenizer(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        found = find_model(folder)
        assert find_model(folder) == found != folder and (found / "model.safetensors").samefile(folder / "model.safetensors")
        return Tokenizer(found)


def test_tokens_are_those_of_the_package(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    texts = [*TEXTS, *(text[start : start + 300] for text in list(read_heldout().values())[:5] for start in (0, 1000))]
    for text in texts:
        assert tokenizer.encode(text) == [theirs.bos_id(), *theirs.encode(text)], text
        assert tokenizer.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))


def test_transformers_reads_it_alike(tokenizer: Tokenizer) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner)
    assert all(theirs(text).input_ids == tokenizer.encode(text) for text in TEXTS)


@given(st.lists(st.integers(0, 710), max_size=40))
def test_text_token_by_token(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    """Bytes that are broken, unknown ids, spaces at the beginning: what all of them write together."""
    stream = Detokenizer(tokenizer.decoding)
    assert "".join(map(stream.push, token_ids)) + stream.flush() == tokenizer.decode(token_ids)


def test_tokens_that_are_added(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(folder, own := tmp_path / "own")
    end = {"content": "<|end|>", "special": True}
    (own / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "added_tokens_decoder": {"700": end}, "chat_template": "{{ 1 }}"}))
    tokenizer = Tokenizer(find_model(own))
    assert tokenizer.encode("x<|end|>")[-1] == 700 and tokenizer.encode("x")[0] != 1 and tokenizer.has_chat_template
    assert tokenizer.special_ids["<|end|>"] == 700
    for added, message in (
        ({"702": end}, "it must be the next id (700)"),
        ({"5": end}, "makes token 5 '<|end|>'; in tokenizer.model it is '<0x02>'"),
    ):
        (own / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        with pytest.raises(ModelError) as caught:
            find_model(own)
        assert message in str(caught.value)


def test_tokens_that_settings_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ERNIE 4.5's folders have them: special ones among the pieces, others in a file of their own, and none put before a text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    piece = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).id_to_piece(400).strip("▁")
    shutil.copytree(folder, own := tmp_path / "own")
    settings = {"tokenizer_class": "Ernie4_5_Tokenizer", "bos_token": "<s>", "cls_token": piece, "additional_special_tokens": None}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    (own / "added_tokens.json").write_text(json.dumps({"<|LOC_0|>": 702}))  # no token has the ids before
    tokenizer = Tokenizer(find_model(own))
    token_ids = tokenizer.encode(f"x{piece}<|LOC_0|>")
    assert token_ids[0] != 1 and token_ids[-1] == 702 and tokenizer.inner.token_to_id(piece) == tokenizer.special_ids[piece] == token_ids[-2]
    assert tokenizer.decode(token_ids) == "x<|LOC_0|>"
    (own / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    assert Tokenizer(find_model(own)).encode("x")[0] == 1


def test_a_space_before_texts_alone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`legacy` false: what stands behind a special token has none put before it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(folder, own := tmp_path / "own")
    (own / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    tokenizer = Tokenizer(find_model(own))
    model = json.loads(tokenizer.inner.to_str())["model"]
    theirs = transformers.LlamaTokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]], legacy=False)
    for text in (*TEXTS, "<s>def</s> x", "def<s>def", "</s>"):
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text


def test_files_that_are_wrong(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"is no SentencePiece model of pairs \(BPE\)"):
        find_model(train(tmp_path / "unigram", model_type="unigram"))
    with pytest.raises(ModelError, match=r"rewrites texts before it cuts them \(nmt_nfkc\)"):
        find_model(train(tmp_path / "rewrites", normalization_rule_name="nmt_nfkc"))
    with pytest.raises(ModelError, match=r"spaces behind words \(treat_whitespace_as_suffix\), which is not supported"):
        find_model(train(tmp_path / "behind", treat_whitespace_as_suffix=True))
    data = bytearray((folder / "tokenizer.model").read_bytes())
    shutil.copytree(folder, own := tmp_path / "own")
    numbers = random.Random(0)
    for damaged in (bytes(data[:-7]), b"", bytes(numbers.randbytes(500))):
        (own / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(ModelError, match=r"tokenizer.model"):
            find_model(own)
    assert not [path for path in (tmp_path / "cache/foretoken/models").iterdir() if path.is_dir()]
