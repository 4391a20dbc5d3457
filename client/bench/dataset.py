"""Prompts of real text. Random tokens would be drafted, cached and accepted as no text is."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = (".py", ".md", ".rst", ".txt", ".c", ".h", ".cc", ".cpp", ".cu", ".js", ".ts", ".go", ".rs", ".java")


class DatasetError(ValueError):
    """A data set that cannot be used; the message names the file."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks."""

    text: str
    output_len: int
    """Tokens to ask for."""


def list_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and the text files under the folders named. Raises DatasetError."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise DatasetError(f"{path}: there is no such file or folder")
    if not files:
        raise DatasetError(f"no text files under {', '.join(map(str, paths))}; their names end in {' '.join(TEXT_SUFFIXES)} or .jsonl")
    return files


def read_lines(path: Path, output_len: tuple[int, int], rng: random.Random) -> list[Prompt]:
    """The prompts of a JSON Lines file: objects with `prompt` and, where a request asks for its own number, `output_tokens`. Raises DatasetError."""
    prompts = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            text, count = value["prompt"], value.get("output_tokens", rng.randint(*output_len))
            if not (isinstance(text, str) and text and isinstance(count, int) and count > 0):
                raise TypeError("`prompt` must be text, `output_tokens` a number above 0")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(f"{path}:{number}: not an object with `prompt`: {error}") from None
        prompts.append(Prompt(text, count))
    if not prompts:
        raise DatasetError(f"{path} has no prompts")
    return prompts


def cut_prompts(texts: Sequence[str], count: int, characters: tuple[int, int], output_len: tuple[int, int], rng: random.Random) -> list[Prompt]:
    """Stretches of the texts, from the start of a line to the end of one, of a length between the two (when the text is as long)."""
    prompts: list[Prompt] = []
    while len(prompts) < count:
        text = rng.choice(texts)
        start = text.rfind("\n", 0, rng.randrange(max(1, len(text) - characters[1])) + 1) + 1
        piece = text[start : start + rng.randint(*characters)]
        piece = piece.rpartition("\n")[0] or piece
        if piece.strip():
            prompts.append(Prompt(piece, rng.randint(*output_len)))
    return prompts


def read_prompts(paths: Sequence[Path], count: int, characters: tuple[int, int], output_len: tuple[int, int], seed: int) -> list[Prompt]:
    """`count` prompts; the same ones for the same seed and files. One `.jsonl` file gives its own (again from the first when they are
    fewer), any others are cut into stretches of `characters` length. Raises DatasetError."""
    rng = random.Random(seed)
    files = list_files(paths)
    try:
        if files[0].suffix == ".jsonl":
            if len(files) > 1:
                raise DatasetError(f"{files[0]}: give a .jsonl file alone")
            lines = read_lines(files[0], output_len, rng)
            return [lines[i % len(lines)] for i in range(count)]
        texts = [t for t in (f.read_text("utf-8") for f in files) if t.strip()]
    except UnicodeDecodeError as error:
        raise DatasetError(f"a file of the data set is not UTF-8: {error}") from None
    if not texts:
        raise DatasetError(f"{', '.join(map(str, paths))}: nothing but empty files")
    return cut_prompts(texts, count, characters, output_len, rng)
