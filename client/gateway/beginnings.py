"""Which server has seen the beginning of a prompt lately, and so has it in its prefix cache."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

PIECE_CHARACTERS, PIECE_TOKENS = 128, 32
"""What beginnings are compared by: less is little to compute again."""
MAX_PIECES = 64
MAX_KNOWN = 100_000
"""Pieces that are remembered, some 200 bytes each."""
MAX_SERVERS = 4
"""That are remembered of one piece: those that had it last."""


def cut(parameters: dict[str, Any]) -> list[bytes]:
    """A hash for each whole piece of a request's prompt, of all up to its end; chats are cut as they are written, before their template.

    Tools are one piece, before all others: templates write them at the prompt's beginning.
    """
    pieces: list[bytes]
    tools = parameters.get("tools")
    if (ids := parameters.get("input_ids")) is not None:
        ends = range(PIECE_TOKENS, min(len(ids), PIECE_TOKENS * MAX_PIECES) + 1, PIECE_TOKENS)
        pieces = [json.dumps(ids[end - PIECE_TOKENS : end]).encode() for end in ends]
    else:
        text = parameters.get("text_input")
        if text is None:
            text = "\0".join(_write(message) for message in parameters.get("messages", ()))
        ends = range(PIECE_CHARACTERS, min(len(text), PIECE_CHARACTERS * MAX_PIECES) + 1, PIECE_CHARACTERS)
        pieces = [text[end - PIECE_CHARACTERS : end].encode("utf-8", "replace") for end in ends]
    found, last = [], b""
    for piece in [json.dumps(tools).encode(), *pieces] if tools else pieces:
        last = hashlib.blake2b(last + piece, digest_size=16).digest()
        found.append(last)
    return found


def _write(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return f"{message.get('role')}\0{message.get('content')}" + (f"\0{json.dumps(calls)}" if calls else "")


class Beginnings:
    """Servers by the pieces that they were given, those used last."""

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._servers: OrderedDict[bytes, list[str]] = OrderedDict()

    def find(self, pieces: list[bytes], servers: Collection[str]) -> list[str]:
        """Of these servers, those that have the longest beginning; none where nobody has any."""
        for piece in reversed(pieces):
            if found := [server for server in self._servers.get(piece, ()) if server in servers]:
                return found
        return []

    def note(self, pieces: list[bytes], server: str) -> None:
        """This server has them from now on."""
        for piece in pieces:
            others = [s for s in self._servers.get(piece, ()) if s != server]
            self._servers[piece] = [server, *others[: MAX_SERVERS - 1]]
            self._servers.move_to_end(piece)
        while len(self._servers) > self._max_known:
            self._servers.popitem(last=False)

    def forget(self, server: str) -> None:
        """It has lost its cache."""
        for piece in [p for p, servers in self._servers.items() if server in servers]:
            self._servers[piece].remove(server)
