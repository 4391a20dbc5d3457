"""Tokens to text, piece by piece, for every kind of decoder that the tokenizers library has: always what its `decode` writes of all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models

from backend.detokenizer import Decoding, Detokenizer
from backend.joiners import BROKEN
from backend.text import TextStream, Tokenizer

BYTES = [f"<0x{b:02X}>" for b in (*b"\n Aab", *"é日🙂".encode(), 0xFF, 0xED, 0xA0, 0x80, 0xC0)]
WORDS = [
    *dict.fromkeys(BYTES), "<0x4a>", "<0x+5>", "<0x+>", "<0xZZ>", "<0xé>",
    "a", "b", " ", "  ", ",", "é", "日", BROKEN, "▁", "▁▁", "▁a", " a ", "##a", "##", "#", " .", " n't", " do not",
    "the</w>", "</w>x</w>", "</w>", "<pad>", "|", "|a", "Ġ", "ĠĊ", "Ã", "©", "âĤ¬", "ðŁ", "ĺĤ", "ÿ", "",
]  # fmt: skip
SPECIAL = ["<s>", "|a"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]

STREAMED: dict[str, decoders.Decoder | None] = {
    "none": None,
    "byte-level": decoders.ByteLevel(),
    "byte-fallback": decoders.ByteFallback(),
    "Gemma": decoders.Sequence(LLAMA),
    "Llama-2": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "three spaces": decoders.Sequence([*LLAMA, decoders.Strip(" ", 3, 0)]),
    "Metaspace": decoders.Metaspace(),
    "Metaspace, first": decoders.Metaspace(prepend_scheme="first"),
    "Metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "WordPiece": decoders.WordPiece(),
    "WordPiece, as it is": decoders.WordPiece(prefix="", cleanup=False),
    "BPE with suffixes": decoders.BPEDecoder(),
    "CTC": decoders.CTC(),
    "CTC, as it is": decoders.CTC(cleanup=False),
    "Fuse": decoders.Fuse(),
    "Strip": decoders.Strip(" ", 1, 0),
    "a pattern": decoders.Replace(Regex("[ab]+"), "-"),
    "an empty sequence": decoders.Sequence([]),
    "sequences in one another": decoders.Sequence([decoders.Sequence([decoders.Fuse()]), decoders.Strip("a", 1, 0)]),
}
WHOLE: dict[str, decoders.Decoder | None] = {
    "byte-fallback, then Metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "a pattern over all": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "")]),
    "bytes of all": decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
}
"""Whose text is not certain before the end."""
STRIPPED: dict[str, decoders.Decoder | None] = {
    "two at the end": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 2)]),
    "bytes, one at the end": decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 0, 1)]),
    "suffixes, one at the end": decoders.Sequence([decoders.BPEDecoder(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
}
"""The library's `decode` panics where their text is shorter than what is stripped."""
KINDS = {**STREAMED, **WHOLE, **STRIPPED}


def make_tokenizer(kind: str) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "a"))
    if KINDS[kind] is not None:
        inner.decoder = KINDS[kind]
    inner.add_special_tokens(SPECIAL)
    inner.add_tokens(["<added é>", "▁added▁"])
    return inner


INNER = {kind: make_tokenizer(kind) for kind in KINDS}
DECODINGS = {kind: Decoding(inner) for kind, inner in INNER.items()}
NUM_BYTES = len(dict.fromkeys(BYTES))
VOCAB_SIZE = INNER["none"].get_vocab_size()
IDS = st.lists(st.integers(0, VOCAB_SIZE + 2) | st.integers(0, NUM_BYTES - 1) | st.sampled_from([-1, 2**31, 2**32, 2**40]), max_size=24)


def ids_of(*words: str) -> list[int]:
    return [INNER["none"].token_to_id(word) for word in words]


def decode(kind: str, token_ids: Sequence[int]) -> str:
    return INNER[kind].decode([i for i in token_ids if 0 <= i < 2**32])


def pieces_of(kind: str, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(DECODINGS[kind])
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


def stream_of(kind: str, stop: Sequence[str], include_stop: bool = False) -> TextStream:
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer.inner = INNER[kind]
    return TextStream(tokenizer, stop, include_stop)


# -- pieces make what `decode` makes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*STREAMED, *WHOLE])
@given(token_ids=IDS)
@example(token_ids=ids_of("<0x0A>", "<0xE6>", ","))  # with the library's DecodeStream: "Invalid prefix encountered"
@example(token_ids=ids_of("<0xE6>", "<0x97>"))
@example(token_ids=ids_of(" ", "  ", "▁a", "<s>", "▁a"))
@settings(max_examples=150, deadline=None)
def test_any_tokens_give_what_decode_gives(kind: str, token_ids: list[int]) -> None:
    assert "".join(pieces_of(kind, token_ids)) == decode(kind, token_ids)


@pytest.mark.parametrize("kind", [*STREAMED, *WHOLE])
@pytest.mark.parametrize("kept", [SPECIAL, SPECIAL[:1]])
def test_special_tokens_that_are_kept_are_text(kind: str, kept: list[str]) -> None:
    token_ids, detokenizer = ids_of("a", "<s>", "|a", "b", "<s>"), Detokenizer(Decoding(INNER[kind], kept))
    expected = INNER[kind].decode([i for i in token_ids if kept == SPECIAL or i not in ids_of("|a")], skip_special_tokens=False)
    assert detokenizer.extend(token_ids) + detokenizer.flush() == expected


@pytest.mark.parametrize("kind", STRIPPED)
@given(token_ids=IDS)
@settings(max_examples=150, deadline=None)
def test_what_is_stripped_at_the_end(kind: str, token_ids: list[int]) -> None:
    token_ids = [*ids_of("b", "b", "b"), *token_ids]
    assert "".join(pieces_of(kind, token_ids)) == decode(kind, token_ids)


@pytest.mark.parametrize("kind", STRIPPED)
def test_a_text_shorter_than_what_is_stripped(kind: str, tmp_path: Path) -> None:
    INNER[kind].save(str(tmp_path / "tokenizer.json"))
    for token_ids in ([], ids_of("<s>"), ids_of(" "), ids_of("a")):
        assert len(Tokenizer(tmp_path).decode(token_ids)) <= 1 and len("".join(pieces_of(kind, token_ids))) <= 1


@pytest.mark.parametrize("kind", KINDS)
@given(token_ids=IDS, cut=st.integers(0, 24))
@settings(max_examples=60, deadline=None)
def test_what_was_given_out_is_never_taken_back(kind: str, token_ids: list[int], cut: int) -> None:
    """Text before any token is a beginning of the text with that token, whichever it is."""
    before = "".join(pieces_of(kind, token_ids[:cut])[:-1])
    assert "".join(pieces_of(kind, token_ids)).startswith(before)


@pytest.mark.parametrize("kind", KINDS)
@given(token_ids=IDS, cut=st.integers(0, 24))
@settings(max_examples=60, deadline=None)
def test_several_tokens_at_once_are_what_they_are_one_by_one(kind: str, token_ids: list[int], cut: int) -> None:
    stream = stream_of(kind, ())
    first = stream.extend(token_ids[:cut])
    assert first == "".join(pieces_of(kind, token_ids[:cut])[:-1])
    assert first + stream.extend(token_ids[cut:]) + stream.flush() == "".join(pieces_of(kind, token_ids))


def test_the_bundled_tokenizer_and_ids_that_no_tokenizer_has() -> None:
    from backend.config import BUNDLED_MODEL

    tokenizer = Tokenizer(BUNDLED_MODEL)
    stream = TextStream(tokenizer)
    token_ids = [-5, *tokenizer.encode("x = 1"), 2**70, 2**32]
    assert "".join(stream.append(i)[0] for i in token_ids) + stream.flush() == tokenizer.decode(token_ids) == "x = 1"


# -- when it comes --------------------------------------------------------------------------------------------------------------


def test_text_comes_as_soon_as_it_is_certain() -> None:
    assert pieces_of("byte-level", ids_of("a", "âĤ¬", "ðŁ", "ĺĤ", "Ã", "a")) == ["a", "€", "", "😂", "", BROKEN + "a", ""]
    assert pieces_of("Llama-2", ids_of("▁a", "▁a", "<0xC3>", "<0xA9>", "b")) == ["a", " a", "", "", "éb", ""]
    # A later byte may spoil all of its run, so that none of it is certain before the run's end.
    assert pieces_of("Llama-2", ids_of("a", "<0x0A>", "<0xE6>", ",")) == ["a", "", "", BROKEN * 2 + ",", ""]
    assert pieces_of("BPE with suffixes", ids_of("the</w>", "a", "the</w>")) == ["", "the ", "a", "the"]
    assert all(DECODINGS[kind].is_streamed for kind in (*STREAMED, *STRIPPED))


def test_the_others_come_whole_and_are_warned_of(caplog) -> None:
    for kind in WHOLE:
        assert not Decoding(INNER[kind]).is_streamed and "text comes at a completion's end only" in caplog.text
        assert pieces_of(kind, ids_of("a", "b", "a")) == ["", "", "", decode(kind, ids_of("a", "b", "a"))]


@pytest.mark.parametrize("kind", STREAMED)
def test_a_token_costs_the_same_in_any_context(kind: str) -> None:
    """Counted in calls, not in seconds: those that the interpreter makes for the last of 100 tokens, and of 3,000."""

    def count_calls(detokenizer: Detokenizer, token_ids: list[int]) -> int:
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            for token_id in token_ids:
                detokenizer.push(token_id)
        finally:
            sys.setprofile(None)
        return count

    token_ids = ids_of("▁a", "<0xC3>", "<0xA9>", "b", "the</w>", "Ã", "©", "##a", ",")
    detokenizer = Detokenizer(DECODINGS[kind])
    counts = [count_calls(detokenizer, token_ids) for _ in range(300)]
    assert max(counts[2:]) <= counts[1]


# -- stop strings ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*STREAMED, *STRIPPED])
@given(token_ids=IDS, stop=st.lists(st.text("ab \né日,", min_size=1, max_size=3), min_size=1, max_size=3))
@example(token_ids=ids_of("a", "<0x0A>", "<0x0A>", "b"), stop=["\n"])
@example(token_ids=ids_of("<0x0A>", "<0xE6>", ","), stop=["\n"])
@example(token_ids=ids_of("<0x20>", "<0x61>", "<0x62>", "<0x61>"), stop=["ab", "ba"])
@settings(max_examples=150, deadline=None)
def test_a_completion_ends_with_the_first_token_that_completes_a_stop_string(kind: str, token_ids: list[int], stop: list[str]) -> None:
    """Against `decode` of each number of tokens, in which no stop string may be but at the end."""
    token_ids = [*ids_of("é", "é", "é"), *token_ids] if kind in STRIPPED else token_ids
    for include_stop in (False, True):
        stream = stream_of(kind, stop, include_stop)
        said, is_stopped, num_tokens = "", False, 0
        for token_id in token_ids:
            piece, is_stopped = stream.append(token_id)
            said, num_tokens = said + piece, num_tokens + 1
            if is_stopped:
                break
        said += stream.flush()
        text = decode(kind, token_ids[:num_tokens])
        found = sorted((at, s) for s in stop if (at := text.find(s)) >= 0)
        if is_stopped:
            at, first = found[0]
            assert said == (text[: at + len(first)] if include_stop else text[:at])
            assert stream.flush() == ""
        else:
            assert said == text
            # Only what is broken, or stripped, at the very end may show one that was not there before.
            assert not found or BROKEN in text or kind in STRIPPED
        for count in range(1, num_tokens):
            before = decode(kind, token_ids[:count])
            assert BROKEN in before or kind in STRIPPED or not any(s in before for s in stop)


def test_a_stop_string_of_bytes_ends_the_completion_at_once() -> None:
    """Models with byte fallback write a line's end as a byte, which waits for the next token: its stop string does not."""
    stream = stream_of("Llama-2", ["\n"])
    assert [stream.append(i) for i in ids_of("▁a", "b", "<0x0A>")] == [("a", False), ("b", False), ("", True)]
    stream = stream_of("Llama-2", ["\n\n"], include_stop=True)
    assert [stream.append(i) for i in ids_of("a", "<0x0A>", "<0x0A>")] == [("a", False), ("", False), ("\n\n", True)]
    stream = stream_of("Llama-2", ["b\n"])  # half in a token of text
    assert [stream.append(i) for i in ids_of("a", "b", "<0x0A>")] == [("a", False), ("", False), ("", True)]


def test_bytes_of_tokens_that_may_not_stop() -> None:
    """min_tokens: what they complete is text like any other, though it waits among bytes that may."""
    stream = stream_of("Llama-2", ["\n"])
    newline, a = ids_of("<0x0A>", "a")
    assert [stream.append(newline, may_stop=False), stream.append(a)] == [("", False), ("\na", False)]
    assert [stream.append(newline, may_stop=False), stream.append(newline)] == [("", False), ("\n", True)]
    stream = stream_of("Llama-2", ["b"])  # a space that the text's beginning loses is none of it
    assert [stream.append(i, may_stop=False) for i in ids_of("<0x20>", "<0x0A>")] == [("", False)] * 2
    assert stream.append(ids_of("b")[0]) == ("\n", True)


def test_what_is_stripped_ends_nothing() -> None:
    stream = stream_of("three spaces", [" "])
    assert [stream.append(i) for i in ids_of("<0x20>", "<0x20>", "<0x20>", "b")] == [("", False)] * 3 + [("b", False)]


def test_a_long_run_of_bytes_is_searched_to_its_end() -> None:
    stream = stream_of("Gemma", ["日é"])
    run = ids_of(*[f"<0x{b:02X}>" for b in ("é日" * 40).encode()])
    pieces = [stream.append(i) for i in run[:-3]]
    assert pieces.index(("é", True)) == len("é日é".encode()) - 1
    stream = stream_of("Gemma", ["日日"])
    assert not any(stopped for _, stopped in map(stream.append, run))
    assert stream.append(ids_of("日")[0]) == ("é日" * 39 + "é", True)


def test_text_that_comes_whole_is_cut_at_a_stop_string() -> None:
    stream = stream_of("byte-fallback, then Metaspace", ["b"])
    assert [stream.append(i) for i in ids_of("a", "b", "a")] == [("", False)] * 3 and stream.flush() == "a"
