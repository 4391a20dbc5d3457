"""Text in and out with the bundled tokenizer: nothing is broken, lost or said too early, however the tokens cut the text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.config import BUNDLED_MODEL
from backend.errors import InternalError, ModelError, RequestError
from backend.text import TextStream, Tokenizer

TOKENIZER = Tokenizer(BUNDLED_MODEL)
VOCAB_SIZE = TOKENIZER.inner.get_vocab_size()
BROKEN = "\ufffd"
SPECIAL = "<|endoftext|>"

CHUNKS = ["def ", "f(x)", "\n    ", "é", "€", "🙂", "👩‍👩‍👧", "日本", " ", "\u0301", "\x00", BROKEN, "ß", "\r\n", "ﷺ", "\U0001d518"]
TEXTS = st.text(max_size=60) | st.lists(st.sampled_from(CHUNKS), max_size=20).map("".join)


def stream(token_ids: Sequence[int], stop: Sequence[str] = (), include_stop: bool = False, may_stop: int = 0) -> tuple[list[str], bool]:
    """The pieces that a completion's tokens give, flushed at the end; tokens before number `may_stop` may not stop it."""
    text_stream = TextStream(TOKENIZER, stop, include_stop)
    pieces = []
    for number, token_id in enumerate(token_ids):
        piece, is_stopped = text_stream.append(token_id, number >= may_stop)
        pieces.append(piece)
        if is_stopped:
            assert text_stream.flush() == "", "nothing follows a stop string"
            return pieces, True
    pieces.append(text_stream.flush())
    assert text_stream.flush() == "", "what is flushed is flushed once"
    return pieces, False


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def single(text: str) -> list[int]:
    """One token per byte at most: the most borders that a text can have."""
    vocabulary = TOKENIZER.inner.get_vocab()
    symbols = TOKENIZER.inner.pre_tokenizer.pre_tokenize_str(text) if text else []
    return [vocabulary[c] for word, _ in symbols for c in word]


# -- a stream of text -----------------------------------------------------------------------------------------------------------


@given(text=TEXTS)
@example("")
@example("🙂")
@example("a" + BROKEN)
@example(BROKEN * 3 + "x")
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_piece_by_piece(text: str) -> None:
    for token_ids in (encode(text), single(text)):
        assert TOKENIZER.decode(token_ids) == text
        pieces, is_stopped = stream(token_ids)
        assert "".join(pieces) == text
        assert not is_stopped
        if BROKEN not in text:
            assert not any(BROKEN in piece for piece in pieces), f"half a character: {pieces}"


@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1) | st.integers(0, 260), max_size=40))
@example([0])
@example([0, 0, 1])
@example([300, VOCAB_SIZE + 3, 301])  # a model's vocabulary may be padded past the tokenizer's
@settings(max_examples=400, deadline=None)
def test_any_tokens_give_what_decode_gives(token_ids: list[int]) -> None:
    """A model may emit any ids, special ones and halves of characters among them."""
    pieces, _ = stream(token_ids)
    assert "".join(pieces) == TOKENIZER.decode(token_ids)


def test_a_character_comes_with_its_last_byte() -> None:
    token_ids = single("a🙂b")
    assert len(token_ids) == 6
    assert stream(token_ids)[0] == ["a", "", "", "", "🙂", "b", ""]


def test_a_truncated_character_is_flushed_as_decode_writes_it() -> None:
    token_ids = single("a🙂")[:-1]
    pieces, _ = stream(token_ids)
    assert pieces[:-1] == ["a", "", "", ""]
    assert pieces[-1] == TOKENIZER.decode(token_ids)[1:]
    assert set(pieces[-1]) == {BROKEN}


def test_a_truncated_character_follows_held_text() -> None:
    """Both are held for different reasons, and come in their order."""
    token_ids = [*single("a<en"), *single("é")[:1]]
    pieces, is_stopped = stream(token_ids, ["<end>"])
    assert "".join(pieces) == TOKENIZER.decode(token_ids) == "a<en" + BROKEN
    assert not is_stopped


def test_special_tokens_are_not_text() -> None:
    (special,) = encode(SPECIAL)
    token_ids = [*encode("ab"), special, *encode("cd"), special]
    assert "".join(stream(token_ids)[0]) == "abcd"
    assert TOKENIZER.decode(token_ids) == "abcd"
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == f"ab{SPECIAL}cd{SPECIAL}"


# -- stop strings ---------------------------------------------------------------------------------------------------------------


def test_a_stop_string_across_token_borders() -> None:
    for text in ("one two END three", "one twoEND"):
        for token_ids in (encode(text), single(text)):
            pieces, is_stopped = stream(token_ids, ["END"])
            assert "".join(pieces) == text.partition("END")[0]
            assert is_stopped


def test_include_stop_keeps_the_string_and_nothing_after_it() -> None:
    for token_ids in (encode("one two END three"), single("one two END three")):
        pieces, is_stopped = stream(token_ids, ["END"], include_stop=True)
        assert "".join(pieces) == "one two END"
        assert is_stopped


def test_the_token_that_completes_it_stops_it() -> None:
    """Tokens after a stop string were never emitted: the stream must say so at the first token that may."""
    text_stream = TextStream(TOKENIZER, ["b"])
    assert text_stream.append(single("a")[0]) == ("a", False)
    assert text_stream.append(single("b")[0]) == ("", True)


def test_the_earliest_of_several_stop_strings() -> None:
    assert "".join(stream(single("abcdef"), ["ef", "cd", "zz"])[0]) == "ab"
    # Both are complete within one token; the one that begins first counts, wherever it stands in the list.
    (token_id,) = encode("return")
    for stop in (["urn", "et"], ["et", "urn"]):
        assert stream([token_id], stop) == (["r"], True)
    assert stream([token_id], ["turn", "tur"], include_stop=True) == (["retur"], True)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    text_stream = TextStream(TOKENIZER, ["abc", "bcd"])
    assert [text_stream.append(token_id)[0] for token_id in single("xab")] == ["x", "", ""]
    assert text_stream.append(single("x")[0]) == ("abx", False)
    assert [text_stream.append(token_id)[0] for token_id in single("aab")] == ["", "a", ""]
    assert text_stream.flush() == "ab"


def test_overlapping_beginnings_are_not_missed() -> None:
    for text, stop, before in (("aaab", "aab", "a"), ("ababac", "abac", "ab"), ("--->", "-->", "-"), ("\n\n\n#", "\n\n#", "\n")):
        pieces, is_stopped = stream(single(text), [stop])
        assert ("".join(pieces), is_stopped) == (before, True)


def test_may_stop_false_holds_stop_strings_off() -> None:
    """min_tokens: a stop string that is complete before then is text like any other, and none of it is held back."""
    text = "aENDbENDc"
    pieces, is_stopped = stream(single(text), ["END"], may_stop=4)
    assert pieces[:4] == ["a", "E", "N", "D"]
    assert ("".join(pieces), is_stopped) == ("aENDb", True)
    assert stream(single(text), ["END"], may_stop=99) == ([*text, ""], False)


def test_stop_strings_of_whole_characters() -> None:
    pieces, is_stopped = stream(single("a🙂b€c"), ["€"])
    assert ("".join(pieces), is_stopped) == ("a🙂b", True)
    # A stop string is not half found in another character's first bytes.
    assert stream(single("a🙃"), ["🙂"])[1] is False


@given(text=st.text(alphabet="ab\n é🙂", max_size=30), stops=st.lists(st.text(alphabet="ab\n é🙂", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_streaming_stops_where_searching_the_whole_text_does(text: str, stops: list[str]) -> None:
    """Against a plain statement: the text up to the first moment at which some stop string is complete."""
    token_ids = single(text)
    for include_stop in (False, True):
        pieces, is_stopped = stream(token_ids, stops, include_stop)
        ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
        assert is_stopped == bool(ends)
        if not ends:
            assert "".join(pieces) == text
            continue
        # One token is at most one character here, so the stop strings that are complete now are suffixes of this text.
        complete = [stop for stop in stops if text[: ends[0]].endswith(stop)]
        begin = ends[0] - max(map(len, complete))
        assert "".join(pieces) == (text[: ends[0]] if include_stop else text[:begin])


@given(text=TEXTS, stops=st.lists(st.text(min_size=1, max_size=5), max_size=3), cut=st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_nothing_of_a_stop_string_is_ever_said(text: str, stops: list[str], cut: int) -> None:
    """With the bundled tokenizer's own borders: what was said is a beginning of the text, and holds no stop string."""
    stops = [*stops, text[cut : cut + 3] or "x"]
    pieces, is_stopped = stream(encode(text), stops)
    said = "".join(pieces)
    assert text.startswith(said)
    if BROKEN not in text:  # such a text ends undecided, and what is undecided is flushed unsearched
        assert not any(stop in said for stop in stops)
        assert is_stopped == any(stop in text for stop in stops)


# -- the tokenizer --------------------------------------------------------------------------------------------------------------


class PanicException(BaseException):
    """As the library's, which it has no name for."""


def test_a_tokenizer_that_panics_fails_one_request() -> None:
    """One that could start no threads, for one: it ended the thread that tokenizes, and nobody was answered any more."""

    def panic(*_: object, **__: object) -> None:
        raise PanicException("The global thread pool has not been initialized")

    tokenizer = Tokenizer(BUNDLED_MODEL)
    tokenizer.inner = SimpleNamespace(encode_batch_fast=panic)
    with pytest.raises(InternalError, match="the tokenizer failed on a text of 3 characters: The global thread pool"):
        tokenizer.encode("abc")


def test_special_tokens_are_added_unless_told() -> None:
    plain = TOKENIZER.encode("def f():", add_special_tokens=False)
    assert TOKENIZER.encode("def f():") == [0, *plain]


@given(TEXTS)
def test_the_bytes_of_tokens_make_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == text
    assert TOKENIZER.token_bytes(0) == SPECIAL.encode()


def test_every_token_has_bytes() -> None:
    assert all(TOKENIZER.token_bytes(i) for i in range(VOCAB_SIZE))
    for token_id in (-1, VOCAB_SIZE):
        with pytest.raises(RequestError, match=f"token {token_id} is not in the vocabulary of {VOCAB_SIZE} tokens"):
            TOKENIZER.token_bytes(token_id)


def test_bytes_of_a_vocabulary_of_text(tmp_path: Path) -> None:
    """As SentencePiece has it: spaces are shown as ▁, and bytes stand for what has no token."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    inner = Inner(models.BPE({"<s>": 0, "▁def": 1, "<0xC3>": 2, "<0xA9>": 3, "x": 4}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert b"".join(map(tokenizer.token_bytes, [1, 2, 3, 4])) == " deféx".encode()


def test_long_texts_are_not_truncated() -> None:
    assert len(encode("x y " * 5000)) >= 10_000


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    """Some folders ship a tokenizer.json that cuts at 512: a server that cut prompts silently would answer another question."""
    values = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    values["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    text = "import os, sys, re, json"
    assert Tokenizer(tmp_path).encode(text) == TOKENIZER.encode(text)


def test_bad_words_are_banned_at_the_start_of_a_word_and_inside_one() -> None:
    found = TOKENIZER.encode_bad_word("import")
    assert {TOKENIZER.decode(ids) for ids in found} == {"import", " import"}
    assert set(TOKENIZER.encode_bad_word(" import")) == {tuple(encode(" import"))}
    assert all(found) and TOKENIZER.encode_bad_word("\u00e9")


@pytest.mark.parametrize("word", ["\n", "\n\n", "\t", "    ", "\nreturn"])
def test_bad_words_that_begin_with_white_space_ban_nothing_else(word: str) -> None:
    """A line break that must not come leaves spaces, and words after spaces, alone."""
    assert all(word in TOKENIZER.decode(ids) for ids in TOKENIZER.encode_bad_word(word))


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": "1.0"}', b"\xff\xfe", b"null"])
def test_broken_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "cannot be read"), (b"\xff", "cannot be read"), (b"[]", "must hold a JSON object, got list")]
)
def test_broken_tokenizer_config(tmp_path: Path, content: bytes, message: str) -> None:
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer_config.json") in str(caught.value)


# -- chat templates -------------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def with_template(folder: Path, template: Any, **settings_: Any) -> Tokenizer:
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **settings_}))
    return Tokenizer(folder)


def test_the_bundled_template() -> None:
    prompt = TOKENIZER.render_chat(MESSAGES)
    assert prompt == "# system: Be brief.\n# user: Why?\n\n"


def test_templates_see_what_hugging_face_gives_them(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    template += "{{ eos_token }}{{ unk_token }}{% if add_generation_prompt %}>{% endif %}{{ extra }}"
    tokenizer = with_template(tmp_path, template, bos_token={"content": "<s>"}, eos_token="</s>", unk_token=None)
    assert tokenizer.render_chat(MESSAGES, extra=5) == tokenizer.render_chat(MESSAGES, own={"extra": 5}) == "<s>Why?</s>>5"
    with pytest.raises(RequestError, match="chat_template_kwargs has 'tools': messages and tools are given"):
        tokenizer.render_chat(MESSAGES, own={"tools": []})


@pytest.mark.parametrize("inner", ["{{ m.content }}", "{{ m.content | trim }}", "{{ m.content.split('</think>')[-1] }}"])
def test_the_final_message_is_left_open_as_transformers_has_it(tmp_path: Path, inner: str) -> None:
    from transformers import PreTrainedTokenizerFast

    template = "{% for m in messages %}<{{ m.role }}>" + inner + "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = with_template(tmp_path, template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=template)
    for text in ("Because", " Because\n- a\n- ", "Why?"):
        messages = [*MESSAGES, {"role": "assistant", "content": text}]
        for own in ({"continue_final_message": True}, {"add_generation_prompt": False}, {}):
            expected = theirs.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": not own, **own})
            assert tokenizer.render_chat(messages, own=own) == tokenizer.render_chat(messages, **own) == expected, (text, own)


def test_what_a_template_leaves_out_of_the_final_message_is_left_out(tmp_path: Path) -> None:
    """Where transformers refuses: Qwen 3's leaves out what was thought, and the bundled one writes lines as comments."""
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nBecause\nof "}]
    tokenizer = with_template(tmp_path, "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\n') }}</s>{% endfor %}")
    assert tokenizer.render_chat(messages, own={"continue_final_message": True}) == "Be brief.</s>Why?</s>Because\nof "
    assert TOKENIZER.render_chat(messages, own={"continue_final_message": True}).endswith("# \n# Because\n# of ")


def test_a_final_message_that_is_written_twice_or_in_parts(tmp_path: Path) -> None:
    tokenizer = with_template(
        tmp_path, "{% set last = messages[-1].content %}{{ last }}|{{ last | trim }}>{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "Because "}]
    assert tokenizer.render_chat(messages, own={"continue_final_message": True}) == "Because |Because >Because "
    tokenizer = with_template(tmp_path, "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}")
    messages = [{"role": "assistant", "content": [{"type": "text", "text": text} for text in ("Because", "it")]}]
    assert tokenizer.render_chat(messages, own={"continue_final_message": True}) == "Because;it"
    assert messages[0]["content"][1] == {"type": "text", "text": "it"}


@pytest.mark.parametrize(
    ("last", "own", "message"),
    [
        ({"content": "x"}, {"add_generation_prompt": True}, "continue_final_message and add_generation_prompt are both true"),
        ({"content": "x"}, {"continue_final_message": 1}, "continue_final_message must be true or false, got 1"),
        ({"content": "x"}, {"add_generation_prompt": "no"}, "add_generation_prompt must be true or false, got 'no'"),
        ({"content": " "}, {}, "continue_final_message: the final message has no text"),
        ({"content": [{"type": "text"}]}, {}, "continue_final_message: the final message has no text"),
        ({"content": "x", "tool_calls": CALLS}, {}, "continue_final_message: the final message calls tools"),
        ({"content": "left out"}, {}, "continue_final_message: the chat template does not write what the final message says"),
    ],
)
def test_final_messages_that_cannot_be_left_open(tmp_path: Path, last: dict[str, Any], own: dict[str, Any], message: str) -> None:
    tokenizer = with_template(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match=message):
        tokenizer.render_chat([*MESSAGES, {"role": "assistant", **last}], own={"continue_final_message": True, **own})


def test_lines_of_blocks_alone_leave_nothing(tmp_path: Path) -> None:
    """As Hugging Face renders them (trim_blocks, lstrip_blocks): another space in a prompt is another prompt."""
    template = "{% for m in messages %}\n  {% if true %}\n{{ m.role }}:\n  {% endif %}\n{% endfor %}\nend"
    assert with_template(tmp_path, template).render_chat(MESSAGES) == "system:\nuser:\nend"


def test_several_templates_have_a_default(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}])
    assert tokenizer.render_chat(MESSAGES) == "plain" and tokenizer.chat_template == "plain"


def test_chats_with_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    """As transformers chooses: Hermes 2 Pro has two in its configuration, others a file beside."""
    tool_use = "{{ tools | length }} tools"
    in_files = tmp_path / "files"
    (in_files / "additional_chat_templates").mkdir(parents=True)
    (in_files / "chat_template.jinja").write_text("plain")
    (in_files / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    for tokenizer in (
        with_template(tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": tool_use}]),
        with_template(in_files, "settings"),
    ):
        assert tokenizer.render_chat(MESSAGES) == "plain" and tokenizer.chat_template == "plain"
        assert tokenizer.render_chat(MESSAGES, tools=[{}, {}]) == "2 tools" and tokenizer.tool_template == tool_use
    assert with_template(tmp_path, "{{ tools }}").tool_template == "{{ tools }}"


def test_tools_that_a_template_takes_as_a_variable_alone(tmp_path: Path) -> None:
    """Phi-4-mini's reads them from the system's message, where no request has them: the model would not know what it may call."""
    phi = "{% for message in messages %}{% if 'tools' in message %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}{{ message.tools }}{% endfor %}"
    llama = "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{% if tools is defined %}{{ tools }}{% endif %}"
    assert with_template(tmp_path, phi).tool_template is None
    assert with_template(tmp_path, llama).tool_template == llama


def history(*calls: dict[str, Any], content: str | None = None) -> list[dict[str, Any]]:
    called = [{"id": "call_0123456789abcdef0", "type": "function", "function": call} for call in calls]
    output = {"role": "tool", "content": "5", "tool_call_id": "call_0123456789abcdef0"}
    return [MESSAGES[1], {"role": "assistant", "content": content, "tool_calls": called}, output]


@pytest.mark.parametrize("content", [None, ""])
def test_calls_that_a_template_tells_by_their_content(tmp_path: Path, content: str | None) -> None:
    """As DeepSeek's first templates: calls are what has null for a content, and their arguments are text. Else they are left out without a word."""
    template = "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{% for call in m['tool_calls'] %}"
    template += (
        "{{ '<' + call['function']['name'] + call['function']['arguments'] + '>' }}{% endfor %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    tokenizer = with_template(tmp_path, template)
    messages = history({"name": "f", "arguments": '{"a":  1}'}, {"name": "g", "arguments": {"b": 2}}, {"name": "h"}, content=content)
    assert tokenizer.render_chat(messages) == 'Why?<f{"a":  1}><g{"b": 2}><h{}>5'
    messages[1]["content"] = "Let me see."
    assert tokenizer.render_chat(messages) == "Why?Let me see.5", "what is said beside calls stays"
    for joined in ("call.function.arguments + '.'", "'.' + call.function.arguments", "call['function'].arguments + '.'"):
        source = "{% for call in messages[1].tool_calls %}{{ " + joined + " }}{% endfor %}"
        assert "{" in with_template(tmp_path, source).render_chat(messages), "however it joins them"
    inner = "{% for call in messages[1].tool_calls %}{% set call = call.function %}{{ '' + call.arguments + '' }}{% endfor %}"
    assert with_template(tmp_path, inner).render_chat(messages) == '{"a":  1}{"b": 2}{}'
    both = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
    messages[1]["content"] = content
    assert with_template(tmp_path, both).render_chat(messages[:2]) == "Why?1", "others are given a text, and objects"


def test_a_template_that_looks_into_contents_before_it_asks_for_one(tmp_path: Path) -> None:
    """DeepSeek-R1-0528's refused every history with calls."""
    template = "{% for m in messages %}{% set content = m['content'] %}{% if '</think>' in content %}{% set content = '' %}{% endif %}"
    template += "{% if content is none %}none{% else %}{{ content }}{% endif %}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"
    tokenizer = with_template(tmp_path, template + "{% endfor %}")
    assert tokenizer.render_chat(history({"name": "f"})) == tokenizer.render_chat(history({"name": "f"}, content="")) == "Why?<f>5"
    with pytest.raises(RequestError, match="refused the messages: no"):
        with_template(tmp_path, template + "{% endfor %}{{ raise_exception('no') }}").render_chat(history({"name": "f"}))


def test_arguments_that_a_template_writes_as_they_are(tmp_path: Path) -> None:
    messages = history({"name": "f", "arguments": '{"a": true}'})
    loop = "{%% for call in messages[1].tool_calls %%}%s{%% endfor %%}"
    written = "{{- call['function'].arguments -}}"
    assert with_template(tmp_path, loop % written).render_chat(messages) == '{"a": true}'
    both = "{% if call.function.arguments is string %}" + written + "{% else %}{{ call.function.arguments.a }}{% endif %}"
    assert with_template(tmp_path, loop % both).render_chat(messages) == "True", "one that tells them apart is given objects"


def test_fields_that_are_null_are_none(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.name is defined }}{{ m.tool_calls is defined }}{{ m.content }}{% endfor %}"
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": None, "refusal": None}
    assert with_template(tmp_path, template).render_chat([message, message | {"name": "", "content": "x"}]) == "FalseFalseTrueFalsex"


@pytest.mark.parametrize("rule", ["!= 9", "< 9"])
def test_ids_that_a_template_refuses(tmp_path: Path, rule: str) -> None:
    """Mistral's want nine letters and digits, where ours and OpenAI's are longer, and those of some clients shorter."""
    check = "{% if ID|length " + rule + " %}{{ raise_exception('nine') }}{% endif %}{{ ID }} "
    template = "{% for m in messages %}{% for call in m.tool_calls or [] %}" + check.replace("ID", "call.id") + "{% endfor %}"
    template += "{% if m.role == 'tool' %}" + check.replace("ID", "m.tool_call_id") + "{% endif %}{% endfor %}"
    tokenizer = with_template(tmp_path, template)
    for own, kept in (("call_0123456789abcdef0", False), ("1", False), ("aB3456789", True), ("call_1234", False)):
        messages = history({"name": "f", "arguments": "{}"})
        messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = own
        call, output = tokenizer.render_chat(messages).split()
        assert call == output and len(call) == 9 and call.isalnum() and (call == own) == kept
    plain = "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.id }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    assert with_template(tmp_path, plain).render_chat(history({"name": "f"})) == 2 * "call_0123456789abcdef0", "where it is not asked for, they stay"


def test_a_role_that_templates_do_not_know(tmp_path: Path) -> None:
    """OpenAI's clients say developer for system: most templates would leave the instructions out without a word."""
    template = "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% endif %}{% endfor %}"
    messages = [{"role": "developer", "content": "Be brief."}, MESSAGES[1]]
    assert with_template(tmp_path, template).render_chat(messages) == "[Be brief.]"
    assert with_template(tmp_path, template.replace("system", "developer")).render_chat(messages) == "[Be brief.]", "one that knows it has it"


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }} é", "utf-8")
    assert with_template(tmp_path, "settings").render_chat(MESSAGES) == "file: Be brief. é"


def test_no_template(tmp_path: Path) -> None:
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", tmp_path)
    with pytest.raises(RequestError, match="no chat template: send text_input or input_ids"):
        Tokenizer(tmp_path).render_chat(MESSAGES)


def test_a_template_may_refuse(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}")
    with pytest.raises(RequestError, match="refused the messages: no system role"):
        tokenizer.render_chat(MESSAGES)
    assert tokenizer.render_chat(MESSAGES[1:]) == ""


def test_a_template_that_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the chat template is not valid") as caught:
        with_template(tmp_path, "{% for %}")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ raise_exception.__globals__.os.system('true') }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].clear() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content + 5 }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_run_in_a_sandbox(tmp_path: Path, template: str) -> None:
    """A template comes with weights from anywhere. What it may not do, and what fails in it, is an error of the request."""
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(RequestError, match="the chat template refused the messages"):
        with_template(tmp_path, template).render_chat(messages)
    assert messages == MESSAGES


def test_hidden_attributes_have_no_text(tmp_path: Path) -> None:
    """Printed alone they are undefined, which jinja writes as nothing."""
    for expression in ("''.__class__", "messages.__class__", "raise_exception.__globals__", "''|attr('__class__')|attr('__mro__')"):
        assert with_template(tmp_path, f"<{{{{ {expression} }}}}>").render_chat(MESSAGES) == "<>"
