"""Whether a chat's prompt opens the assistant's turn, or leaves its final message open, for the answer to go on with: by the names and rules of
transformers (`apply_chat_template`)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from backend.errors import RequestError

ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE = "add_generation_prompt", "continue_final_message"


def read_turn(own: Mapping[str, Any]) -> tuple[bool, bool]:
    """What a request says of ADD_GENERATION_PROMPT and CONTINUE_FINAL_MESSAGE. Raises RequestError."""
    for name in (ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE):
        if not isinstance(own.get(name, False), bool):
            raise RequestError(f"{name} must be true or false, got {own[name]!r:.80}")
    continues = own.get(CONTINUE_FINAL_MESSAGE, False)
    adds = own.get(ADD_GENERATION_PROMPT, not continues)
    if adds and continues:
        raise RequestError(f"{CONTINUE_FINAL_MESSAGE} and {ADD_GENERATION_PROMPT} are both true: the final message goes on, or an answer begins")
    return adds, continues


def mark_end(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark behind the final one's content, and the mark, which is like nothing that is there. Raises RequestError."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    parts = content if isinstance(content, list) else []  # which some templates read
    part = next((p for p in reversed(parts) if isinstance(p, dict) and "text" in p), {"text": content})
    own = part["text"]
    if not isinstance(own, str) or not own.strip() or last.get("tool_calls"):
        what = "calls tools" if last.get("tool_calls") else "has no text"
        raise RequestError(f"{CONTINUE_FINAL_MESSAGE}: the final message {what}: there is nothing to go on with")
    mark = secrets.token_hex(16)
    marked = {"text": f"{own}{mark} "}
    content = [{**p, **marked} if p is part else p for p in parts] or marked["text"]
    return [*messages[:-1], {**last, "content": content}], mark


def cut_at(text: str, mark: str) -> str:
    """A prompt that ends where `mark_end`'s mark begins, the last time that a template writes it; spaces before that are left out where the template
    trims contents, as transformers has it. Raises RequestError."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise RequestError(f"{CONTINUE_FINAL_MESSAGE}: the chat template does not write what the final message says")
    before = before.replace(f"{mark} ", "").replace(mark, "")  # of a template that writes it twice
    return before if after.startswith(" ") else before.rstrip()
