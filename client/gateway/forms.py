"""Chunks of the decode model as the choices that OpenAI's clients expect."""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from client.gateway.openai import ChatRequest, CompletionRequest
from client.gateway.tool_calls import AnswerParser, Part
from client.messages import Chunk

TokenBytes = Mapping[int, bytes]
_Utf8 = codecs.getincrementaldecoder("utf-8")


class SpecialToken(bytes):
    """What a token writes that texts leave out, unless `skip_special_tokens` is false."""


def show(token: bytes) -> str:
    """A token as OpenAI writes it: its text, or its bytes where it is part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in token)


@dataclass(slots=True)
class _Written:
    """What of one choice has been written."""

    num_characters: int = 0
    """By its tokens, which may be ahead of its text: the server holds back what may begin a stop string."""
    characters: Any = field(default_factory=lambda: _Utf8("replace"))
    """The tokens' text, character by whole character."""


class Form:
    """One endpoint's choices. A streamed choice is written in several parts, and one that is not in a single part."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(self, request: CompletionRequest | ChatRequest) -> None:
        self.has_logprobs = request.parameters()["logprobs"] is not None
        self.has_tokens, self.has_ids = request.return_tokens, request.return_token_ids
        self._are_ids_shown = request.return_tokens_as_token_ids
        self._written: dict[int, _Written] = {}

    def _show(self, token_id: int, tokens: TokenBytes) -> str:
        return f"token_id:{token_id}" if self._are_ids_shown else show(tokens[token_id])

    def tokens_of(self, chunk: Chunk) -> list[int]:
        """The tokens whose bytes `write` wants."""
        if not self.has_logprobs:
            return chunk.token_ids if self.has_tokens else []
        return [*chunk.token_ids, *(top["id"] for entry in chunk.logprobs or () for top in entry["top"])]

    def write(self, index: int, chunk: Chunk, tokens: TokenBytes, is_streamed: bool) -> dict[str, Any]:
        """A choice, or with `is_streamed` its next part."""
        is_first = index not in self._written
        if is_first:
            self._written[index] = _Written()
        written = self._written[index]
        choice: dict[str, Any] = {"index": index, **self._content(index, chunk, is_first, is_streamed)}
        pieces = [written.characters.decode(tokens[i]) for i in chunk.token_ids] if tokens else []
        choice["logprobs"] = self._logprobs(chunk, tokens, pieces, written) if self.has_logprobs else None
        choice["finish_reason"] = self._finish_reason(index, chunk)
        if self.has_ids:  # with echo the prompt's are told apart
            choice["token_ids"] = [i for i, source in zip(chunk.token_ids, chunk.sources) if source != "prompt"]
        if self.has_tokens:
            choice["token_ids"] = chunk.token_ids
            choice["tokens"] = pieces
            choice["token_sources"] = chunk.sources
        if chunk.speculation is not None:
            choice["speculation"] = chunk.speculation
        return choice

    def _content(self, index: int, chunk: Chunk, is_first: bool, is_streamed: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _finish_reason(self, index: int, chunk: Chunk) -> str | None:
        return chunk.finish_reason

    def _logprobs(self, chunk: Chunk, tokens: TokenBytes, pieces: list[str], written: _Written) -> dict[str, Any]:
        raise NotImplementedError


class CompletionForm(Form):
    """Of /v1/completions."""

    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request)
        self._has_special = request.skip_special_tokens is False

    def _content(self, index: int, chunk: Chunk, is_first: bool, is_streamed: bool) -> dict[str, Any]:
        return {"text": chunk.text}

    def _logprobs(self, chunk: Chunk, tokens: TokenBytes, pieces: list[str], written: _Written) -> dict[str, Any]:
        """With echo, the prompt's first token has none."""
        entries = chunk.logprobs or []
        # The token too, as OpenAI has it.
        tops = [{self._show(top["id"], tokens): top["logprob"] for top in (entry, *entry["top"])} for entry in entries]
        unscored = [None] * (len(chunk.token_ids) - len(entries))
        offsets = []
        for place, piece in enumerate(pieces):
            own = show(tokens[chunk.token_ids[place]])
            # Before it the piece has what bytes of earlier tokens became that are no character.
            offsets.append(written.num_characters + (len(piece) - len(own) if piece.endswith(own) else 0))
            if chunk.sources[place] == "prompt":
                is_in_text = chunk.text.startswith(piece, written.num_characters)
            else:  # not by the text, which may come later
                is_in_text = self._has_special or not isinstance(tokens[chunk.token_ids[place]], SpecialToken)
            written.num_characters += len(piece) if is_in_text else 0
        return {
            "tokens": [self._show(i, tokens) for i in chunk.token_ids],
            "token_logprobs": [*unscored, *(entry["logprob"] for entry in entries)],
            "top_logprobs": [*unscored, *tops],
            "text_offset": offsets,
        }


class ChatForm(Form):
    """Of /v1/chat/completions."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request)
        self._request, self._may_call = request, request.may_call
        self._parsers: dict[int, AnswerParser] = {}

    def _content(self, index: int, chunk: Chunk, is_first: bool, is_streamed: bool) -> dict[str, Any]:
        parser = self._parsers.get(index)
        if parser is None:
            begins_thinking = bool((chunk.usage or {}).get("begins_thinking"))  # a choice's first chunk has its usage
            parser = self._parsers[index] = AnswerParser(
                uuid.uuid4().hex[:16],
                has_tools=self._may_call,
                is_parallel=self._request.parallel_tool_calls is not False,
                begins_thinking=begins_thinking,
                allowed=self._request.allowed_tools if self._may_call else None,
                tools=self._request.tools or () if self._may_call else (),
            )
        part = parser.feed(chunk.text, chunk.finish_reason is not None)
        if self._request.must_call:  # what is no call is a call's beginning, which max_tokens cut, or white space beside it
            part.content = ""
        own: dict[str, Any] = {"reasoning_content": part.reasoning} if part.reasoning else {}
        if not is_streamed:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in part.calls]
            content = None if calls and not part.content.strip() else part.content
            return {"message": {"role": "assistant", "content": content, "refusal": None, **own, **({"tool_calls": calls} if calls else {})}}
        if part.calls:
            own["tool_calls"] = self._calls(part)
        if part.content or not (own or self._may_call):
            own["content"] = part.content
        return {"delta": {"role": "assistant", "content": None if self._may_call else "", **own} if is_first else own}

    def _calls(self, part: Part) -> list[dict[str, Any]]:
        """What a piece of a stream adds to calls."""
        return part.calls

    def _finish_reason(self, index: int, chunk: Chunk) -> str | None:
        return "tool_calls" if chunk.finish_reason == "stop" and self._parsers[index].has_calls else chunk.finish_reason

    def _logprobs(self, chunk: Chunk, tokens: TokenBytes, pieces: list[str], written: _Written) -> dict[str, Any]:
        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            return {"token": self._show(token_id, tokens), "logprob": logprob, "bytes": list(tokens[token_id])}

        content = [
            {**entry(e["id"], e["logprob"]), "top_logprobs": [entry(top["id"], top["logprob"]) for top in e["top"]]} for e in chunk.logprobs or ()
        ]
        return {"content": content, "refusal": None}


class ResponseForm(ChatForm):
    """Of /v1/responses, piece by piece: each piece of a call says how many characters of the piece's text stand before it (`place`)."""

    def _calls(self, part: Part) -> list[dict[str, Any]]:
        return [{**call, "place": place} for call, place in zip(part.calls, part.places)]
