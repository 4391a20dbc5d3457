"""Chat templates: messages to a prompt, as transformers writes it, within limits of time, memory and length.

A template is a program that came with the weights. Jinja's sandbox keeps it from the interpreter's insides, and from
nothing else: it may loop for ever, or ask for any amount of memory in one operation, which no check inside the interpreter
ends. So templates run in a process of their own (`limited_process`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from backend.errors import CapacityError, LengthError, ModelError, RequestError
from backend.limited_process import Busy, LimitedProcess, Lost, serve

logger = logging.getLogger(__name__)

MAX_TEMPLATE_CHARACTERS = 1_000_000
MAX_CHARACTERS = 8_000_000
"""Of the messages, and of the prompt that is made of them, where the caller has no lower limit."""
RENDER_SECONDS = 2.0
"""Processor time of one rendering. Real templates take milliseconds for their context's worth of messages."""
ANSWER_SECONDS = 20.0
"""Until the process is taken for lost: ten times as long, since other work may hold the processor."""
QUEUE_SECONDS = 10.0
"""How long a request waits for others to be rendered."""
MAX_MEMORY_BYTES = 1 << 30
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the first of which templates read."""


# -- in the process that renders ----------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what the assistant wrote, for those who train on it; here its content is written as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"names of a namespace must not begin with an underscore, got {name!r:.100}")


class _Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore, which lead to the interpreter's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` is a template's right
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict`, without the type that it is."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates find, as transformers gives it to them."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # jinja's own escapes HTML, and sorts keys
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals |= {"dict": _Dict(), "namespace": _Namespace}
    return environment


def _render(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> dict[str, str]:
    pieces, count = [], 0
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            count += len(piece)
            if count > max_characters:
                return {"too_long": f"the prompt that it writes has more than {max_characters} characters, the limit"}
        return {"text": "".join(pieces)}
    except MemoryError:
        pieces.clear()
        return {"error": f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory, the limit"}
    except Exception as error:  # a template may fail in any way
        return {"error": f"{error}"[:1000]}


def main() -> None:
    """Serves one template: its source comes first, then what it is to be rendered with."""
    template: jinja2.Template | None = None

    def work(request: dict[str, Any]) -> dict[str, str]:
        nonlocal template
        if template is not None:
            return _render(template, request["variables"], request["max_characters"])
        try:
            template = make_environment().from_string(request["source"])
        except (Exception, MemoryError) as error:
            return {"error": f"{error}"[:1000]}
        return {"text": ""}

    serve(work, RENDER_SECONDS, MAX_MEMORY_BYTES)


# -- in the server's process --------------------------------------------------------------------------------------------


class ChatTemplate:
    """A model's chat template. Thread-safe; its process is started by the first request."""

    def __init__(self, source: str, where: str) -> None:
        """where: said in errors. Raises ModelError for what is no template."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            message = f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARACTERS}"
            raise ModelError(f"{where}: {message}")
        try:  # no more than its syntax: to compile it computes what is constant in it, which may take for ever
            syntax = make_environment().parse(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise ModelError(f"{where}: the chat template is not valid: {error}") from None
        self.source = source
        self.variables = tuple(name for name in find_variables(syntax) if not name.endswith("_token"))
        """What it reads that is given to it, special tokens apart."""
        self.takes_tools = reads(syntax, "tools")
        """It reads them as a variable: Phi-4-mini's has them as a key of the system's message, which no request brings."""
        self._process = LimitedProcess("backend.chat_template", {"source": source}, RENDER_SECONDS)

    def render(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any], max_characters: int) -> str:
        """Raises RequestError where the template refuses or fails, LengthError beyond max_characters, CapacityError when too many wait for it."""
        if (count := count_characters(messages, max_characters)) > max_characters:
            raise LengthError(f"messages has {count} characters or more; the limit is {max_characters}")
        variables = {**variables, "messages": [_name_reasoning(m) for m in messages]}
        request = {"variables": variables, "max_characters": max_characters}
        try:
            answer = self._process.ask(request, ANSWER_SECONDS, QUEUE_SECONDS)
        except Busy as error:
            raise CapacityError(f"the chat template was {error}: retry later") from None
        except Lost as error:
            answer = {"error": str(error)}
        except (TypeError, ValueError, RecursionError) as error:
            answer = {"error": f"they cannot be written as JSON: {error}"}
        if "too_long" in answer:
            raise LengthError(f"the chat template refused the messages: {answer['too_long']}")
        if "error" in answer:
            raise RequestError(f"the chat template refused the messages: {answer['error']}")
        return answer["text"]


def find_variables(syntax: jinja2.nodes.Template) -> list[str]:
    """Names that a template reads before it sets them itself, in their order: jinja's own `meta` would compute what is constant."""
    found: dict[str, None] = {}
    own = {*make_environment().globals, "loop", "caller", "self", "varargs", "kwargs"}
    left: list[jinja2.nodes.Node] = [syntax]
    while left:
        node = left.pop()
        if isinstance(node, jinja2.nodes.Name):
            if node.ctx != "load":
                own.add(node.name)
            elif node.name not in own:
                found[node.name] = None
        elif isinstance(node, jinja2.nodes.Macro):
            own.add(node.name)
        parts = list(node.iter_child_nodes())
        # `{% set x = x | default(1) %}` reads first; all else comes in the order of its parts.
        left += parts if isinstance(node, jinja2.nodes.Assign) else reversed(parts)
    return list(found)


def reads(syntax: jinja2.nodes.Template, name: str) -> bool:
    """Whether a template reads a variable, be it one that it may have set itself, as Llama 3.1's sets `tools`."""
    left: list[jinja2.nodes.Node] = [syntax]
    while left:
        node = left.pop()
        if isinstance(node, jinja2.nodes.Name) and node.name == name and node.ctx == "load":
            return True
        left += node.iter_child_nodes()
    return False


def _name_reasoning(message: Any) -> Any:
    """A message whose reasoning has every name that templates know it by, as transformers has it."""
    if not isinstance(message, dict):
        return message
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def count_characters(value: Any, limit: int) -> int:
    """Of all texts in the messages, keys too; counting ends beyond the limit."""
    count, left = 0, [value]
    while left and count <= limit:
        item = left.pop()
        if isinstance(item, str):
            count += len(item)
        elif isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            left += item
    return count
