"""The text of an answer, told apart as it comes: what is said, what was thought before, and calls of tools in any family's notation.

Hermes (Qwen, ERNIE), Llama 3, Mistral, DeepSeek, GLM-4.5 and Qwen3-Coder begin calls with marks of their own, so nobody has to say which family
it is. What turns out to be no call is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from client.gateway.keyed_calls import GLM, QWEN, KeyedArguments, pending

_DEEPSEEK = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>")
_FUNCTION = "<function="
"""Of Qwen3-Coder's, which leaves out the mark before it now and then."""
_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", *_DEEPSEEK)
_LEADS = (*_MARKS, _FUNCTION)
_THINK, _THOUGHT = "<think>", "</think>"
_RESPONSE, _RESPONSE_ENDS = "<response>", ("\n</response>", "</response>")
"""Around what ERNIE says, behind its thoughts."""
_HEAD = re.compile(
    r'\s*(?:[\[,;]\s*)*(?:\{\s*"name"\s*:\s*"(?P<quoted>[A-Za-z0-9_.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    r"|(?P<plain>[A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?\[ARGS\]\s*"
    r"|(?:<\uff5ctool\u2581call\u2581begin\uff5c>)?(?:function<\uff5ctool\u2581sep\uff5c>)?(?P<deep>[A-Za-z0-9_.-]{1,64})"
    r"(?:<\uff5ctool\u2581sep\uff5c>|\n```json\n)\s*)(?=[{\[])"
)
"""Before a call's arguments, behind its lead or behind the call before it."""
_KEYED_HEAD = re.compile(
    rf"\s*(?:{_FUNCTION}(?P<qwen>[A-Za-z0-9_.-]{{1,64}})>\s*(?=(?P<json>\{{)|<parameter=|</function>)|(?P<glm>[A-Za-z0-9_.-]{{1,64}})\s*(?=(?P<key><arg_key>)|</tool_call>))"
)
"""Before arguments that come key by key, or a call that has none; Llama writes an object behind the second mark, if asked to."""
_OTHER_ORDER = re.compile(
    r'\s*(?:[\[,;]\s*)*(?=\{\s*(?:"(?:arguments|parameters|function)"\s*:|"type"\s*:\s*"function"|'
    r'"name"\s*:\s*"[A-Za-z0-9_.-]{1,64}"\s*,\s*"(?:arguments|parameters)"\s*:\s*"|'
    r'(?P<led>"id"\s*:|"name"\s*:\s*"[A-Za-z0-9_.-]{1,64}"\s*(?:\}|,\s*"(?:arguments|parameters)"\s*:\s*null))))'
)
"""Before a call whose object is read whole: it does not begin with its name (Hermes 2 Pro's end with it, Llama's may begin with a type), its
arguments are JSON within a text, or there are none. Many objects that are no calls have ids, or a name alone: one may be a call behind a lead or a
call alone."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MORE_KEYS = re.compile(r',\s*"[^"\\]*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[^\s",{}\[\]]+)\s*(?=[,}])')
"""Behind a call's arguments: a key that nobody reads, such as an id."""
_KEY_BEGINS = re.compile(r',\s*(?:"|$)')
_TAILS = ("```", "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>", "}", "]", "</function>", "</tool_call>")
"""Behind a call's arguments; nobody reads them."""
MAX_HEAD = 512
"""Characters that may turn out to begin a call are held back no longer than this."""
MAX_OBJECT = 65_536
"""The same for a call that is known when its object is whole."""


@dataclass(slots=True)
class Part:
    """What a piece of text adds."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's deltas: index, with id, type and name at a call's beginning, and more of its arguments."""
    places: list[int] = field(default_factory=list)
    """For each of `calls` how many characters of `content` stand before it."""


class _Json:
    """Finds the end of a JSON value that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped, self.is_done = 0, False, False, False

    def read(self, text: str) -> int:
        """How many characters of the text belong to it."""
        for place, c in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif c == "\\":
                    self._is_escaped = True
                elif c == '"':
                    self._in_string = False
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
            if not self._depth and not self._in_string:
                self.is_done = True
                return place + 1
        return len(text)


class AnswerParser:
    """One choice's text. Feed it, then end it."""

    def __init__(
        self,
        prefix: str,
        *,
        has_tools: bool,
        is_parallel: bool = True,
        begins_thinking: bool = False,
        allowed: Collection[str] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """prefix: of the ids of calls; has_tools: else all is text, but for what was thought; begins_thinking: the prompt ends with `<think>`.

        allowed: names that may be called; None: any. What would be a call of another, in the notation of a family that is not the model's, is text.
        tools: as the client sent them; their schemas say what arguments are that come key by key.
        """
        self._prefix, self._has_tools, self._is_parallel, self._begins_thinking = prefix, has_tools, is_parallel, begins_thinking
        self._allowed = allowed
        self._state = "begin"
        self._held = ""
        self._lead = ""
        self._arguments = _Json()
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._keyed = KeyedArguments(GLM, None)
        self._num_read = 0
        """Of what is held of a call that is known when its object is whole."""
        self._is_closed = False
        """A mark behind the arguments has come: no key of the call's follows."""
        self._skips_breaks = False
        self._is_thought = False
        """What was thought is over."""
        self._is_wrapped = False
        self.num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether there are any, and the last one's arguments are whole: a stop string may have cut them."""
        return self.num_calls > 0 and self._state not in ("call", "keyed_arguments")

    def feed(self, text: str, is_last: bool = False) -> Part:
        """is_last: nothing follows, so nothing is held back."""
        part = Part()
        self._held += text
        while getattr(self, f"_{self._state}")(part, is_last):
            pass
        return part

    @property
    def _is_led(self) -> bool:
        """What comes is behind a lead or another call."""
        return self._lead.startswith(_LEADS) or self.num_calls > 0

    def _skip_breaks(self) -> None:
        """Line breaks around what was thought belong to its marks."""
        if self._skips_breaks:
            self._held = self._held.lstrip("\n")
            self._skips_breaks = not self._held

    # Each state reads from what is held, and says whether there is more to do.

    def _begin(self, part: Part, is_last: bool) -> bool:
        bare = self._held.lstrip()
        if self._is_thought:
            pass
        elif bare.startswith(_THINK):  # where the prompt has the mark too, some models write it again
            self._held, self._state, self._skips_breaks = bare[len(_THINK) :], "thinking", True
            return True
        elif not is_last and len(bare) < len(_THINK) and _THINK.startswith(bare):
            return False
        if self._is_thought and self._has_tools and not self._is_wrapped:
            if bare.startswith(_RESPONSE):
                self._held, self._is_wrapped, self._skips_breaks = bare[len(_RESPONSE) :], True, True
                return True
            if not is_last and _RESPONSE.startswith(bare):
                return False
        if self._begins_thinking and not self._is_thought:
            self._state, self._skips_breaks = "thinking", True
        elif self._has_tools and bare.startswith("{"):  # Llama's calls are bare
            self._state = "head"
        elif self._has_tools and not bare and not is_last:
            return False
        else:
            self._state = "text"
        return True

    def _thinking(self, part: Part, is_last: bool) -> bool:
        self._skip_breaks()
        place = self._held.find(_THOUGHT)
        if place >= 0:
            part.reasoning += self._held[:place]
            self._held, self._state, self._skips_breaks, self._is_thought = self._held[place + len(_THOUGHT) :], "begin", True, True
            return True
        keep = 0 if is_last else pending(self._held, (_THOUGHT,))
        part.reasoning += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return False

    def _text(self, part: Part, is_last: bool) -> bool:
        self._skip_breaks()
        if not self._has_tools:
            part.content += self._held
            self._held = ""
            return False
        marks = (*_LEADS, *_RESPONSE_ENDS) if self._is_wrapped else _LEADS
        found = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            part.content += self._held[:place]
            self._held = self._held[place + len(mark) :]
            if mark in _LEADS:
                self._held = (mark if mark == _FUNCTION else "") + self._held
                self._lead, self._state = mark, "head"
            else:
                self._is_wrapped, self._skips_breaks = False, True
            return True
        keep = 0 if is_last else pending(self._held, marks)
        part.content += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return False

    def _head(self, part: Part, is_last: bool) -> bool:
        match = _HEAD.match(self._held)
        name = match and (match["quoted"] or match["plain"] or match["deep"])
        if match is None and self._lead and self._read_keyed_head(part):
            return True
        if match is None or (self._allowed is not None and name not in self._allowed):
            if (rest := self._held.lstrip("[,; \n")).startswith(_MARKS):  # two marks in a row
                self._held, self._state = rest, "text"
                return True
            if match is None and (before := _OTHER_ORDER.match(self._held)) and (self._is_led or not before["led"]):
                self._lead += before[0]
                self._held, self._state, self._arguments, self._num_read = self._held[before.end() :], "object", _Json(), 0
                return True
            if match is None and not is_last and len(self._held) < MAX_HEAD:
                return False
            return self._take_for_text(part)
        self._held, self._state, self._arguments = self._held[match.end() :], "call", _Json()
        self._begin_call(part, name or "")
        return True

    def _read_keyed_head(self, part: Part) -> bool:
        """Whether a call whose arguments come key by key begins here. A word between marks is one only where it names a tool."""
        match = _KEYED_HEAD.match(self._held)
        name = match and (match["qwen"] or match["glm"])
        if match is None or name is None or (self._allowed is not None and name not in self._allowed):
            return False
        if name not in self._schemas and not match["key"] and not (match["qwen"] and self._lead != _FUNCTION):
            return False
        self._keyed, self._arguments = KeyedArguments(QWEN if match["qwen"] else GLM, self._schemas.get(name)), _Json()
        self._held, self._state = self._held[match.end() :], "call" if match["json"] else "keyed_arguments"
        self._begin_call(part, name)
        return True

    def _take_for_text(self, part: Part) -> bool:
        if self._lead == _FUNCTION:  # which is held as well
            self._held = self._held.removeprefix(_FUNCTION)
        part.content += self._lead
        self._lead, self._state = "", "text"
        return True

    def _begin_call(self, part: Part, name: str, arguments: str = "") -> None:
        self._add(part, {"id": f"call_{self._prefix}{self.num_calls}", "type": "function", "function": {"name": name, "arguments": arguments}})
        self.num_calls += 1
        self._is_closed = False

    def _object(self, part: Part, is_last: bool) -> bool:
        self._num_read += self._arguments.read(self._held[self._num_read :])
        if not self._arguments.is_done:
            is_cut = is_last or self._num_read >= MAX_OBJECT
            return self._take_for_text(part) if is_cut else False
        call = _read_call(self._held[: self._num_read], self._is_led)
        if call is None or (self._allowed is not None and call[0] not in self._allowed):
            return self._take_for_text(part)
        self._held, self._state = self._held[self._num_read :], "tail"
        self._begin_call(part, *call)
        return True

    def _call(self, part: Part, is_last: bool) -> bool:
        count = self._arguments.read(self._held)
        if count:
            self.num_calls -= 1
            self._add(part, {"function": {"arguments": self._held[:count]}})
            self.num_calls += 1
        self._held = self._held[count:]
        if self._arguments.is_done:
            self._state = "tail"
        return self._arguments.is_done

    def _keyed_arguments(self, part: Part, is_last: bool) -> bool:
        more, self._held = self._keyed.read(self._held, is_last)
        if more:
            self.num_calls -= 1
            self._add(part, {"function": {"arguments": more}})
            self.num_calls += 1
        if self._keyed.is_done:
            self._state = "tail"
        return self._keyed.is_done

    def _tail(self, part: Part, is_last: bool) -> bool:
        rest = self._held.lstrip()
        while not self._is_closed and (more := _MORE_KEYS.match(rest)):
            rest = rest[more.end() :]
        if not self._is_closed and _KEY_BEGINS.match(rest) and not is_last and len(rest) < MAX_HEAD:
            self._held = rest
            return False
        while mark := next((mark for mark in _TAILS if rest.startswith(mark)), None):
            rest, self._is_closed = rest[len(mark) :].lstrip(), True
        if any(mark.startswith(rest) for mark in _TAILS):
            self._held = "" if is_last else rest  # a mark that max_tokens cut is no text
            return False
        self._held = rest
        self._lead, self._state = "", "head" if rest[:1] in (",", ";") else "text"
        return bool(rest)

    def _add(self, part: Part, delta: dict[str, Any]) -> None:
        """Joins what one piece of text adds to one call."""
        if self.num_calls and not self._is_parallel:
            return
        own = next((call for call in part.calls if call["index"] == self.num_calls), None)
        if own is None:
            part.calls.append({"index": self.num_calls, **delta})
            part.places.append(len(part.content))
        else:
            own["function"]["arguments"] += delta["function"]["arguments"]


def _read_call(text: str, may_lack: bool) -> tuple[str, str] | None:
    """The name and the arguments of a call that is an object, in whatever order; None: it is none.

    may_lack: its arguments, as those of a function that takes none.
    """
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(inner := call.get("function"), dict):
        call = inner
    name = call.get("name", inner if isinstance(inner, str) else None)
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None and may_lack:
        arguments = {}
    if not isinstance(name, str) or not _NAME.fullmatch(name) or arguments is None:
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
