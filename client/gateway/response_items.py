"""What an answer of /v1/responses consists of: its items, and the events that write them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

Event = Callable[..., bytes]
"""(kind, **values) -> one server-sent event."""


class OutputItem:
    """One item, which grows."""

    def __init__(self, kind: str, item_id: str, place: int, name: str = "", call_id: str = "") -> None:
        """kind: message, reasoning or function_call; place: in the output; name, call_id: of a call."""
        self.kind, self._id, self._place, self._name, self._call_id = kind, item_id, place, name, call_id
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        """Of a message's tokens, where they are asked for."""

    def body(self, status: str) -> dict[str, Any]:
        """As it is now; without its text while it is in progress."""
        head = {"id": self._id, "type": self.kind, "status": status}
        is_whole = status != "in_progress"
        if self.kind == "function_call":
            return {**head, "call_id": self._call_id, "name": self._name, "arguments": self.text}
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": [self._part()] if is_whole else []}
        return {**head, "role": "assistant", "content": [self._part()] if is_whole else []}

    def _part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    # -- its events ---------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._place, **({} if self.kind == "function_call" else {"content_index": 0})}

    def open(self, event: Event) -> bytes:
        data = event("response.output_item.added", output_index=self._place, item=self.body("in_progress"))
        return data if self.kind == "function_call" else data + event("response.content_part.added", **self._where, part=self._part())

    def add(self, event: Event, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        self.text += text
        self.logprobs += logprobs
        more = {"logprobs": logprobs} if self.kind == "message" else {}
        return event(f"response.{_STREAMS[self.kind]}.delta", **self._where, delta=text, **more) if text else b""

    def close(self, event: Event, status: str) -> bytes:
        done = f"response.{_STREAMS[self.kind]}.done"
        if self.kind == "function_call":
            data = event(done, **self._where, name=self._name, arguments=self.text)
        else:
            data = event(done, **self._where, text=self.text, **({"logprobs": self.logprobs} if self.kind == "message" else {}))
            data += event("response.content_part.done", **self._where, part=self._part())
        return data + event("response.output_item.done", output_index=self._place, item=self.body(status))


_STREAMS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


class Output:
    """All items of one answer: what was thought, what is said, and calls, in the order in which they begin."""

    def __init__(self, request_id: str, event: Event) -> None:
        self._request_id, self._event = request_id, event
        self.items: list[OutputItem] = []
        self._is_open = False
        self._call = -1
        self._blank = ""
        """White space that may be the beginning of what is said, or stand before a call."""
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text is still to come."""
        self._is_behind = False
        """Some of them may close what was thought, or a call: they are not of what is said next."""

    def add(self, message: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """A chat's message, or a piece of it -> the events that tell of it. logprobs: of its tokens; those of thoughts and calls are left out."""
        data = b""
        calls = [(call.get("index", number), call) for number, call in enumerate(message.get("tool_calls") or ())]
        new_calls = [(index, call) for index, call in calls if index != self._call]
        thought = message.get("reasoning_content")
        self._logprobs += logprobs
        self._is_behind |= bool(thought or calls)
        if len(new_calls) < len(calls):  # the open one goes on: what is said in the same piece comes behind it
            data += self.items[-1].add(self._event, calls[0][1]["function"]["arguments"])
        if thought:
            data += self._go_to("reasoning") + self.items[-1].add(self._event, thought)
        content = message.get("content") or ""
        places = [*(call.get("place", len(content)) for _, call in new_calls), len(content)]
        data += self._say(content[: places[0]], has_end=bool(thought or new_calls), own=logprobs if thought or calls else None)
        for (index, call), begin, end in zip(new_calls, places, places[1:]):
            self._call, self._blank, self._is_behind = index, "", True
            data += self._open("function_call", call["function"]["name"], call["id"])
            data += self.items[-1].add(self._event, call["function"]["arguments"])
            if begin < end:
                self._logprobs = list(logprobs)
                data += self._say(content[begin:end], has_end=end < len(content))
        return data

    def _say(self, text: str, has_end: bool, own: Sequence[dict[str, Any]] | None = None) -> bytes:
        """The events of more text, unless there is none, or it is white space and may stand before a call.

        has_end: a call follows, or a thought went before; own: of the text that is to come, those that may be so far; None: all that are held.
        """
        text = self._blank + text
        is_said = bool(text) and (not text.isspace() or (self._is_open and self.items[-1].kind == "message"))
        self._blank = "" if is_said else text
        if not is_said:
            self._logprobs = self._logprobs if own is None else list(own)
            return b""
        found = _find(text, self._logprobs, has_end) if self._is_behind else self._logprobs
        data = self._go_to("message") + self.items[-1].add(self._event, text, found)
        self._logprobs, self._is_behind = [], False
        return data

    def end(self, status: str) -> bytes:
        """status: of the last item. An answer has one at least."""
        data = b"" if self.items else self._open("message") + self.items[-1].add(self._event, self._blank)
        if self._is_open and self.items[-1].kind == "message":  # of the token that ended it, which has no text
            self.items[-1].logprobs += self._logprobs
        return data + self._close(status)

    def bodies(self, status: str) -> list[dict[str, Any]]:
        return [item.body("completed" if item is not self.items[-1] else status) for item in self.items]

    def _go_to(self, kind: str) -> bytes:
        return b"" if self._is_open and self.items[-1].kind == kind else self._open(kind)

    def _open(self, kind: str, name: str = "", call_id: str = "") -> bytes:
        data = self._close("completed")
        place = len(self.items)
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self.items.append(OutputItem(kind, f"{prefix}_{self._request_id}" + (f"_{place}" if place else ""), place, name, call_id))
        self._is_open = True
        return data + self.items[-1].open(self._event)

    def _close(self, status: str) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return self.items[-1].close(self._event, status)


def _find(text: str, logprobs: Sequence[dict[str, Any]], has_end: bool) -> Sequence[dict[str, Any]]:
    """Log-probabilities of tokens, by their bytes, from the one on that begins a text; with `has_end` as far as the one that ends it."""
    written = text.encode()
    begin = b"".join(bytes(entry["bytes"]) for entry in logprobs).rfind(written)
    ends = list(accumulate(len(entry["bytes"]) for entry in logprobs))
    first = bisect_right(ends, begin) if begin >= 0 else len(ends)
    return logprobs[first : bisect_left(ends, begin + len(written)) + 1 if has_end else None]
