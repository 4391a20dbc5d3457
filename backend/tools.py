"""Tools: what a request offers, how the model's family writes calls, and the grammar of answers that have to call.

Families are told apart by their templates: Hermes (Qwen, ERNIE 4.5), Llama 3, Mistral (with a list, and since v11 one by one), DeepSeek (V3, V3.1),
and those that write arguments key by key: GLM-4.5 and Qwen3-Coder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.errors import RequestError
from backend.keyed_calls import KeyMarks, write_arguments
from backend.schema_numbers import settle_numbers
from backend.structured_outputs import StructuredOutputs

MAX_TOOLS = 256
ID_CHARACTERS = 9
"""Of a call's id, where a template says so."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ONE_CALL = re.compile(r"\btool_calls\s*\|\s*length\s*(?:==|!=|>)\s*1\b")
_NO_TEXT = re.compile("image|audio|video|file")
"""In types of a content's parts."""
CHOICES = ("none", "auto", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls: begin, then for each `before` NAME `between` ARGUMENTS `after`, with `separator` between two, then `end`."""

    markers: tuple[str, ...]
    """What its templates have, all of them."""
    lead: str
    """What calls begin with, whatever is called; "": nothing that other text may not begin with."""
    before: str
    between: str
    after: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    marks: KeyMarks | None = None
    """Of arguments that are no object, but come key by key."""


_BEGIN, _CALL, _SEP, _CALL_END, _END = (
    "<\uff5ctool\u2581" + name + "\uff5c>" for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
"""DeepSeek's."""
_HERMES = ToolFormat(("<tool_call>",), "<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")
_GLM = KeyMarks("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>")
_GLM_TIGHT = KeyMarks("<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</arg_value>")
_QWEN = KeyMarks("<parameter=", ">\n", "\n</parameter>\n", "</parameter>")
FORMATS = (
    ToolFormat((_BEGIN, "```json"), _BEGIN, f"{_CALL}function{_SEP}", "\n```json\n", f"\n```{_CALL_END}", _BEGIN, "\n", _END),
    ToolFormat((_BEGIN,), _BEGIN, _CALL, _SEP, _CALL_END, _BEGIN, "", _END),
    ToolFormat(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", ""),
    ToolFormat(("[TOOL_CALLS]",), "[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]"),
    ToolFormat(("</arg_key><arg_value>",), "<tool_call>", "<tool_call>", "", "</tool_call>", marks=_GLM_TIGHT),
    ToolFormat(("<arg_key>",), "<tool_call>", "<tool_call>", "\n", "</tool_call>", separator="\n", marks=_GLM),
    ToolFormat(
        ("<function=", "<parameter="), "<tool_call>", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", separator="\n", marks=_QWEN
    ),
    _HERMES,
    ToolFormat(('"parameters":',), "", '{"name": "', '", "parameters": ', "}", separator="; "),
)
"""The first whose markers a template has. Another template that takes tools is taken for Hermes'."""
CALL_TOKENS = frozenset(
    {_BEGIN, _CALL, _SEP, _CALL_END, _END, "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<tool_call>", "</tool_call>", "<|python_tag|>"}
    | {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}
)
"""Where they are special tokens they are a part of the text all the same, for an answer that may call."""


def find_format(template: str | None) -> ToolFormat:
    """Raises RequestError for a template that takes no tools."""
    if template is None or "tools" not in template:
        raise RequestError("tools: this model's chat template takes none")
    return next((f for f in FORMATS if all(marker in template for marker in f.markers)), _HERMES)


def takes_one_call(template: str | None) -> bool:
    """Whether it refuses a history with several calls in one answer, as Llama 3's: an answer that has to call must not have more."""
    return _ONE_CALL.search(template or "") is not None


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request may call. Raises RequestError naming the tool and the rule."""

    tools: tuple[Mapping[str, Any], ...]
    """As OpenAI's clients write them."""
    choice: str = "auto"
    """none, auto or required."""
    is_parallel: bool = True
    """More than one call in an answer."""
    allowed: tuple[str, ...] = ()
    """Names of those that may be called, where not all may: the prompt has the others too, so that it begins as other prompts do."""

    @classmethod
    def from_values(cls, tools: object, choice: object = None, is_parallel: bool = True) -> Tools:
        if not isinstance(tools, list) or not tools:
            raise RequestError(f"tools must be a list of functions, got {tools!r:.80}")
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"tools has {len(tools)} functions; the limit is {MAX_TOOLS}")
        names = [_check_tool(number, tool) for number, tool in enumerate(tools)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RequestError(f"tools: {twice[0]!r} is there twice")
        if isinstance(choice, dict):
            if choice.get("type") == "allowed_tools":
                mode, allowed = _read_allowed(choice, names)
                return cls(tuple(tools), mode, is_parallel, allowed)
            if (name := _read_name(choice)) not in names:
                raise RequestError(f"tool_choice must name one of the tools ({', '.join(names):.200}), got {choice!r:.100}")
            return cls(tuple(tools), "required", False, (str(name),))
        if choice is not None and choice not in CHOICES:
            raise RequestError(f"tool_choice must be one of {', '.join(CHOICES)}, name a function, or be of type allowed_tools, got {choice!r:.80}")
        return cls(tuple(tools), str(choice or "auto"), is_parallel)

    def form(self, format: ToolFormat, marks: Mapping[str, int], answer: StructuredOutputs | None = None) -> StructuredOutputs | None:
        """What the answer has to be; None: any text. marks: `Tokenizer.mark_ids`; answer: what it is where it calls nothing.

        Raises RequestError for an answer that no rule beside calls can be made of.
        """
        functions = [tool["function"] for tool in self.tools if not self.allowed or tool["function"]["name"] in self.allowed]
        if self.choice == "none":
            return answer
        is_free = self.choice == "auto" and self.is_parallel and not self.allowed and not any(f.get("strict") for f in functions)
        if is_free and answer is None:
            return None
        write = _Writer(marks)
        separated = f"({write(format.separator)} call)*" if format.separator else "call*"
        tail = f"{separated if self.is_parallel else ''} {write(format.end)}"
        rules = [_write_calls("call", format, format.before, functions, write)]
        if self.choice != "auto":  # then no answer is without calls
            start = f"start: {write(format.begin)} call {tail}"
        elif answer is not None:
            if not format.lead and answer.form != "choice":
                raise RequestError(
                    "structured_outputs (response_format): JSON cannot stand beside tools that may be called, since this model's calls are JSON "
                    "themselves: tool_choice has to be none, required or a function"
                )
            start = f"start: {write(format.begin)} call {tail} | answer"
            rules.append(f"answer: {_write_answer(answer)}")
        elif not format.lead:  # then calls are the whole answer
            start = f"start: call {tail} | FREE\nFREE: /([^{{](.|\\n)*)?/"
        else:
            lead = write(format.lead)
            if lead.startswith("<["):  # in pieces it is the same text, which whoever reads it takes for a call
                rules.append(f"lead: TEXT {lead} | spelled\nspelled[lazy]: TEXT {json.dumps(format.lead, ensure_ascii=False)}")
            else:
                rules.append(f"lead[lazy]: TEXT {lead}")
            rules.append("TEXT: /(.|\\n)*/")
            if format.begin:
                start = f"start: TEXT | lead {write(format.begin[len(format.lead) :])} call {tail} TEXT"
            else:
                rules.append(_write_calls("rest", format, format.before[len(format.lead) :], functions, write))
                start = "start: (lead rest)* TEXT" if self.is_parallel else "start: TEXT | lead rest"
        return StructuredOutputs(grammar="\n".join([start, *rules]))


class _Writer:
    """Texts in Lark's notation, marks by their ids."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        self._marks = {text: token_id for text, token_id in marks.items() if text in CALL_TOKENS}
        self._pattern = re.compile("(" + "|".join(map(re.escape, sorted(self._marks, key=len, reverse=True))) + ")")

    def __call__(self, text: str) -> str:
        pieces = self._pattern.split(text) if self._marks else [text]
        return " ".join(f"<[{self._marks[p]}]>" if p in self._marks else json.dumps(p, ensure_ascii=False) for p in pieces if p)


def _write_calls(name: str, format: ToolFormat, before: str, functions: Sequence[Mapping[str, Any]], write: _Writer) -> str:
    """A rule: a call of any of the functions."""
    rules = [f"{name}: {' | '.join(f'{name}_{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        own = f"{name}_{i}"
        arguments = f"%json {_write_schema(function)}" if format.marks is None else f"{own}_arguments"
        rules.append(f"{own}: {write(before + function['name'] + format.between)} {arguments} {write(format.after)}")
        if format.marks is not None:
            settled = {**function, "parameters": _settle_parameters(function)}
            rules.append(write_arguments(f"{own}_arguments", format.marks, settled, write))
    return "\n".join(rules)


def _write_answer(answer: StructuredOutputs) -> str:
    if answer.form == "choice":
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in answer.choice)
    if answer.form == "json_object":
        return '%json {"type": "object"}'
    try:
        asked = answer.schema
    except ValueError as error:
        raise RequestError(str(error)) from None
    if not isinstance(asked, Mapping):
        raise RequestError(
            f"structured_outputs.{answer.form} cannot stand beside tools, of which an answer may call one or none: json (an object), json_object and "
            "choice can; or tool_choice has to be none"
        )
    schema = _settle(asked, answer.is_lenient, "structured_outputs.json")
    return "%json " + json.dumps({**schema, "x-guidance": {"coerce_one_of": True, "lenient": answer.is_lenient}})


def _settle(schema: Mapping[str, Any], is_lenient: bool, what: str) -> dict[str, Any]:
    """As the compiler has to be given it. what: said in errors. Raises RequestError."""
    try:
        return settle_numbers(schema, is_lenient)
    except ValueError as error:
        raise RequestError(f"{what}: {error}") from None


def _write_schema(function: Mapping[str, Any]) -> str:
    """Of the arguments. With `strict` what cannot be enforced is an error; a function without `parameters` has none, as OpenAI has it."""
    return json.dumps({**_settle_parameters(function), "x-guidance": {"coerce_one_of": True, "lenient": not function.get("strict")}})


def _settle_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters")
    schema = _NO_PARAMETERS if schema is None else schema or {"type": "object"}
    return _settle(schema, not function.get("strict"), f"tools: the parameters of {function['name']!r}")


def _check_tool(number: int, tool: object) -> str:
    """Its name."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise RequestError(f'tools[{number}] must be {{"type": "function", "function": {{...}}}}, got {tool!r:.100}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"tools[{number}].function.name must be 1 to 64 letters, digits, dots, dashes and underscores, got {name!r:.80}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"tools[{number}].function.parameters must be a JSON schema, got {parameters!r:.80}")
    if not isinstance(strict := function.get("strict"), bool | None):
        raise RequestError(f"tools[{number}].function.strict must be true or false, got {strict!r:.80}")
    if not isinstance(description := function.get("description"), str | None):
        raise RequestError(f"tools[{number}].function.description must be a text, got {description!r:.80}")
    return name


def _read_name(choice: object) -> object:
    """Of {"type": "function", "function": {"name"}}; None for anything else."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    return function.get("name") if isinstance(function, dict) else None


def _read_allowed(choice: Mapping[str, Any], names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """OpenAI's {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}} -> auto or required, and names."""
    key, own, known = "tool_choice.allowed_tools", choice.get("allowed_tools"), f"{', '.join(names):.200}"
    if not isinstance(own, dict):
        raise RequestError(f"{key} must be an object with mode and tools, got {own!r:.80}")
    if unknown := [name for name in own if name not in ("mode", "tools")]:
        raise RequestError(f"{key} has mode and tools, got {unknown[0]!r:.80} too")
    if (mode := own.get("mode")) not in ("auto", "required"):
        raise RequestError(f"{key}.mode must be auto or required, got {mode!r:.80}")
    if not isinstance(tools := own.get("tools"), list) or not tools:
        raise RequestError(f"{key}.tools must be a list with one at least of the tools ({known}), got {tools!r:.80}")
    for number, tool in enumerate(tools):
        if _read_name(tool) not in names:
            raise RequestError(f"{key}.tools[{number}] must name one of the tools ({known}), got {tool!r:.100}")
    return mode, tuple(dict.fromkeys(str(_read_name(tool)) for tool in tools))


def read_history(messages: Sequence[Mapping[str, Any]], has_nulls: bool = False, has_texts: bool = False) -> list[dict[str, Any]]:
    """Messages as templates want them: a content that is null is "", and the arguments of calls are objects. Raises RequestError.

    has_nulls: calls that no text comes with have null for a content; has_texts: arguments are JSON's text, as clients send them.
    """
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{number}] must be an object with role and content, got {message!r:.80}")
        # What is null is left out, as transformers does: clients send answers back with all fields that answers have.
        own = {key: value for key, value in message.items() if value is not None} | {"content": message.get("content") or ""}
        _check_parts(number, own["content"])
        calls = own.get("tool_calls")
        if calls is not None:
            if not isinstance(calls, list):
                raise RequestError(f"messages[{number}].tool_calls must be a list, got {calls!r:.80}")
            own["tool_calls"] = [_read_call(f"messages[{number}].tool_calls[{i}]", call, has_texts) for i, call in enumerate(calls)]
            if has_nulls and calls and not own["content"]:
                own["content"] = None
        found.append(own)
    return found


def _check_parts(number: int, content: Any) -> None:
    """Raises RequestError for what is no text: templates leave it out, or write a token for it that nothing stands behind."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and _NO_TEXT.search(kind):
            raise RequestError(f"messages[{number}].content: a part of type {kind!r:.40}: models of text alone are served")


def shorten_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A history as Mistral's templates want it: ids of calls have nine letters and digits. Others are exchanged, each for one of its own."""
    found = [dict(message) for message in messages]
    for own in found:
        if "tool_call_id" in own:
            own["tool_call_id"] = _shorten(own["tool_call_id"])
        if calls := own.get("tool_calls"):
            own["tool_calls"] = [{**call, "id": _shorten(call["id"])} if "id" in call else call for call in calls]
    return found


def _shorten(call_id: object) -> object:
    if not isinstance(call_id, str) or (len(call_id) == ID_CHARACTERS and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace")).hexdigest()[:ID_CHARACTERS]


def _read_call(where: str, call: object, has_texts: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have a function with name and arguments, got {call!r:.80}")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}.function.arguments is not valid JSON: {error}") from None
    if has_texts:
        sent = function.get("arguments")
        arguments = sent if isinstance(sent, str) and sent else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
