"""Texts of the user's own: drafted from in the first answer of a server, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend import LLM, SamplingParams
from backend.config import EngineConfig
from backend.drafters import corpus
from backend.drafters.corpus import encode_corpus, read_corpus
from backend.errors import ConfigError
from deploy.served_model import model_parameters
from tests.families import Case, make_model, random_tokens
from tests.test_suffix import settle


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("ab\nc")
    lines = ['"d\u2028e"', "[1, 2]", '{"text": "f"}', "", '{"token_ids": [3], "text": "no"}', "[]", '{"text": "\u00ff"}']
    (tmp_path / "lines.jsonl").write_text("\n".join(lines), "utf-8-sig")  # with a mark of the byte order
    found = read_corpus([str(tmp_path / "plain.txt"), str(tmp_path / "lines.jsonl")], encode, vocab_size=200)
    assert [list(token_ids) for token_ids in found] == [[97, 98, 10, 99], [100, 101], [1, 2], [102], [3]], "ÿ and U+2028 are beyond the vocabulary"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"foo": 1}', r"corpus\.jsonl:1 must be a text, a list of token ids, or an object with `text` or `token_ids`; got \{'foo': 1\}"),
        ("5", r"corpus\.jsonl:1 must be a text, a list of token ids, or an object with `text` or `token_ids`; got 5"),
        ('"a"\n{"prompt": "b"}', r"corpus\.jsonl:2 must be a text"),
        ("[1, 200]", r"corpus\.jsonl:1 has token 200; the vocabulary has ids 0 to 199"),
        ("[1, true]", "has token True"),
        ('["a"]', "has token 'a'"),
        ("{", r"corpus\.jsonl:1 is not valid JSON"),
        ('"\\ud800"', r"corpus\.jsonl:1 is not valid Unicode"),
        ('"abcde"\n"abcdef"', r"with .*:2 the files have 11 tokens; the limit is 10"),
    ],
)
def test_what_is_refused(content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_TOKENS", 10)
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_corpus([str(tmp_path / "corpus.jsonl")], encode, vocab_size=200)


def test_a_long_text_is_tokenized_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no further than the limit."""
    pieces: list[str] = []

    def watched(text: str) -> list[int]:
        pieces.append(text)
        return encode(text)

    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 4)
    (tmp_path / "text").write_text("a\nbc\ndefghi\n")
    (found,) = read_corpus([str(tmp_path / "text")], watched, vocab_size=200)
    assert pieces == ["a\n", "bc\n", "defg", "hi\n"] and list(found) == encode("".join(pieces))
    monkeypatch.setattr(corpus, "MAX_TOKENS", 4)
    with pytest.raises(ConfigError, match="text has more than 4 tokens, the limit of all texts together"):
        read_corpus([str(tmp_path / "text")], watched, vocab_size=200)
    assert len(pieces) == 6


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    for path, message in (
        (tmp_path / "none.txt", "is missing"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "binary.txt", "codec can't decode"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_corpus([str(path)], encode, vocab_size=200)
    monkeypatch.setattr(corpus, "MAX_BYTES", 1)
    with pytest.raises(ConfigError, match="has 2 bytes; the limit is 1"):
        read_corpus([str(tmp_path / "binary.txt")], encode, vocab_size=200)


def test_the_server_gets_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("x")
    values: dict[str, Any] = {"speculative_config": {"method": "suffix", "suffix_decoding_corpus": ["mine.txt"]}}
    config = EngineConfig.from_dict(values)
    found = model_parameters(values, config, Path(config.model))["decode"]["speculative_config"]
    assert found["suffix_decoding_corpus"] == [str(tmp_path / "mine.txt")]


def test_elements_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    found = encode_corpus(["ab", [1, 2], "", {"text": "c"}, []], encode, vocab_size=200)
    assert [list(token_ids) for token_ids in found] == [[97, 98], [1, 2], [99]]
    with pytest.raises(ConfigError, match=r"^suffix_corpus: element 1 has token 200; the vocabulary has ids 0 to 199"):
        encode_corpus(["ab", [200]], encode, vocab_size=200)


@pytest.mark.parametrize("max_cached_requests", [0, 1])
def test_the_first_answer_is_drafted_from_it(max_cached_requests: int, tmp_path: Path) -> None:
    """And the thousandth: answers make no room for themselves there. Half of the texts are a file's, half come by a call."""
    make_model(Case("llama"), tmp_path / "model")
    prompts = [{"prompt_token_ids": random_tokens(12, seed)} for seed in range(4)]
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "4MiB"}
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    plain = LLM(str(tmp_path / "model"), **options)
    expected = [r.outputs[0].token_ids for r in plain.generate(prompts, params, use_tqdm=False)]
    texts = [p["prompt_token_ids"] + answer for p, answer in zip(prompts, expected)]
    known = tmp_path / "known.jsonl"
    known.write_text("\n".join(map(json.dumps, texts[:2])))
    config = {"method": "suffix", "num_speculative_tokens": 8, "adaptive": False, "suffix_decoding_max_cached_requests": max_cached_requests}
    llm = LLM(str(tmp_path / "model"), **options, speculative_config={**config, "suffix_decoding_corpus": [str(known)]})
    assert llm.engine.drafters.add_corpus(texts[2:]) == (2, 64, 128, corpus.MAX_TOKENS)
    settle(llm.engine.drafters._host["suffix"]._lookup)  # type: ignore[attr-defined]
    for prompt, answer in zip(prompts * 2, expected * 2):
        (result,) = llm.generate([prompt], params, use_tqdm=False)
        assert result.outputs[0].token_ids == answer
        assert result.outputs[0].stats.accepted >= 12
