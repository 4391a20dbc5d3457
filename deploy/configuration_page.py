"""Writes docs/configuration.md from the configuration's dataclasses: their fields, defaults and docstrings. `make docs` runs it."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
import typing
from pathlib import Path

from backend.config import BUNDLED_MODEL, EngineConfig, ParallelConfig
from backend.disaggregation_config import DisaggregationConfig
from backend.quantization_config import QuantizationConfig
from backend.section import Section
from backend.speculative_config import SpeculativeConfig
from deploy.options import ServeConfig, add_arguments

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

*Written by `make docs` from the dataclasses in `backend/config.py`, `backend/disaggregation_config.py`,
`backend/quantization_config.py` and `deploy/options.py`; change it there.*

`.venv/bin/foretoken serve --config FILE.yaml` takes the keys below; those with a flag can be given on the command line too, and flags win. In a model
repository that is written by hand they are `parameters` of `decode`'s `config.pbtxt` (objects as JSON). Unknown keys, wrong types and values out of
range are errors that name the key, the value and what is allowed; so are keys that would have no effect, such as those of a method that is
not loaded.

    model: /models/mine
    max_batch_size: 64
    speculative_config: {method: mtp, model: /models/mine-drafter, num_speculative_tokens: 3}
    http_port: 9000
"""
SECTIONS: tuple[tuple[type[Section], str, str], ...] = (
    (EngineConfig, "The engine", "Keys of the file, and of `LLM(...)` in Python."),
    (SpeculativeConfig, "speculative_config", "An object. What the methods are, and when each pays: [methods](methods.md)."),
    (ParallelConfig, "parallel_config", "An object."),
    (QuantizationConfig, "quantization", "As an object. What each type is, and what is read: [quantization](quantization.md)."),
    (DisaggregationConfig, "disaggregation", "An object. What the nodes do for each other: [disaggregation](disaggregation.md)."),
    (ServeConfig, "The server", "Keys of `foretoken serve` alone."),
)


def read_docstrings(section: type[Section]) -> dict[str, str]:
    """The string under each field. Raises ValueError for a field that has none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node, after in zip(tree.body, [*tree.body[1:], None]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation):
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)):
                raise ValueError(f"{section.__name__}.{node.target.id} has no docstring: say what it is, for docs/configuration.md")
            found[node.target.id] = " ".join(after.value.value.split())
    return found


def read_flags() -> dict[str, str]:
    """The longest option of `foretoken serve` by key."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}


def describe_type(hint: object) -> str:
    options = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is tuple:
        return "list of " + describe_type(options[0])
    names = [o.__name__ for o in options if isinstance(o, type) and o is not type(None)]
    return " or ".join({"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(n, "object") for n in names)


def describe_default(field: dataclasses.Field[object]) -> str:
    if field.default is dataclasses.MISSING or field.default is None or field.default == ():
        return ""
    return (
        "the bundled model" if field.default == str(BUNDLED_MODEL) else f"`{str(field.default).lower() if field.type == 'bool' else field.default}`"
    )


def make_table(section: type[Section], flags: dict[str, str]) -> str:
    docstrings, hints = read_docstrings(section), typing.get_type_hints(section)
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        flag = f"<br>`{flags[field.name]}`" if field.name in flags else ""
        aliases = [f"`{alias}`" for alias, name in section.aliases.items() if name == field.name]
        text = docstrings[field.name] + (f" Also accepted: {', '.join(aliases)}." if aliases else "")
        lines.append(f"| `{field.name}`{flag} | {describe_type(hints[field.name])} | {describe_default(field)} | {text} |".replace("  ", " "))
    return "\n".join(lines)


def make_page() -> str:
    flags = read_flags()
    parts = [INTRODUCTION]
    for section, title, text in SECTIONS:
        own = flags if section in (EngineConfig, DisaggregationConfig, ServeConfig) else {}
        parts.append(f"## {title}\n{text}\n\n{make_table(section, own)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(make_page(), "utf-8")
