"""Reads off a CUDA source which arguments a kernel takes, so that their types are written once."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from kernels.structs import format_of

TENSOR_MAP = "128s"


def _text_of(path: Path, known: set[Path]) -> str:
    """A source with the project's headers that it includes."""
    known.add(path)
    text = re.sub(r"//[^\n]*", "", path.read_text())
    for name in re.findall(r'#include "([\w.]+)"', text):
        header = path.parent / name
        if header not in known and header.is_file():  # the generated one has no kernels
            text += _text_of(header, known)
    return text


def _format_of(parameter: str) -> str:
    """One parameter's type as in Python's `struct`."""
    words = re.sub(r"\b(const|__grid_constant__|__restrict__)\b", " ", parameter).split()
    c_type = " ".join(words[:-1]) or words[0]
    if "*" in parameter:
        return "P"
    return TENSOR_MAP if c_type == "CUtensorMap" else format_of(c_type)


def kernels_of(source: Path) -> list[str]:
    """Names of a source's kernels, its headers' among them."""
    return list(dict.fromkeys(re.findall(r"__global__[^;{}]*?\b(\w+)\s*\([^()]*\)\s*{", _text_of(source, set()))))


@functools.cache
def formats_of(source: Path, name: str) -> tuple[str, ...]:
    """Of each parameter of the kernel `name` of a source. Raises ValueError when there is none, or one has a type that is not known."""
    found = re.search(rf"__global__[^;{{}}]*?\b{name}\s*\(([^)]*)\)\s*{{", _text_of(source, set()))
    if found is None:
        raise ValueError(f"{source.name} has no kernel {name}")
    try:
        return tuple(_format_of(parameter) for parameter in found[1].split(","))
    except KeyError as error:
        raise ValueError(f"{source.name}: {name} takes a {error.args[0]}, whose layout is not known") from None
