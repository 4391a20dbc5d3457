"""Texts for `benchmarks.drafters`, of what the running interpreter comes with, so that no third-party text is in the repository.

    python -m benchmarks.drafter_data OUT

code.jsonl: modules of the standard library; code-heldout.jsonl: those that the bundled model has not seen. chats.jsonl, chats-heldout.jsonl:
questions for a chat model, about paragraphs of the language reference, the documentation of functions and places of the time zone database; none of
these is in both.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import warnings
import zoneinfo
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from training.heldout import list_heldout, read_heldout

CODE_CHARACTERS = 600_000
HELDOUT_SHARE = 10
"""One in so many paragraphs and places is kept out."""
ABOUT_TEXTS = (
    "Explain this text to a beginner:",
    "Summarize this text in two sentences:",
    "Write three questions that this text answers, with their answers:",
    "Rewrite this text in simpler words:",
)
ABOUT_FUNCTIONS = (
    "Explain to a beginner what this function of Python does. Its documentation says:",
    "Write an example that uses the Python function of this documentation:",
    "Summarize this documentation in one sentence:",
    "Say in your own words:",
)
ABOUT_CITIES = (
    "Tell me about {}.",
    "I have two days in {}. What should I see?",
    "Write a short story that takes place in {}.",
    "Write an email to a friend in which you describe a trip to {}.",
)
REGIONS = ("Africa", "America", "Asia", "Australia", "Europe")
PARAGRAPH = (200, 600)
"""Characters."""


def list_code() -> list[Path]:
    """Modules of the standard library that are not held out."""
    root, held = Path(sysconfig.get_paths()["stdlib"]), set(list_heldout().values())
    return sorted(path for path in root.rglob("*.py") if path not in held and not {"test", "tests", "site-packages", "idlelib"} & set(path.parts))


def read_code() -> list[str]:
    files = list_code()
    random.Random(0).shuffle(files)
    texts, count = [], 0
    while count < CODE_CHARACTERS:
        texts.append(files.pop().read_text("utf-8", errors="ignore"))
        count += len(texts[-1])
    return texts


def read_documentation() -> list[str]:
    """Of functions and methods, as long as paragraphs are."""
    found = set()
    for path in list_code():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            try:
                tree = ast.parse(path.read_text("utf-8", errors="ignore"))
            except SyntaxError:
                continue  # templates of other tools
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(" ".join((ast.get_docstring(node) or "").split()))
    return sorted(text for text in found if PARAGRAPH[0] <= len(text) <= PARAGRAPH[1])


def make_questions() -> tuple[list[str], list[str]]:
    """Every question about each paragraph and place, and one about each of those that are kept out."""
    low, high = PARAGRAPH
    paragraphs = [" ".join(part.split()) for _, text in sorted(topics.items()) for part in text.split("\n\n")]
    texts = sorted({part for part in paragraphs if low <= len(part) <= high and part[0].isalpha()})
    cities = sorted({name.split("/")[-1].replace("_", " ") for name in zoneinfo.available_timezones() if name.split("/")[0] in REGIONS})
    about = [[f"{words}\n\n{text}" for words in ABOUT_TEXTS] for text in texts] + [[words.format(city) for words in ABOUT_CITIES] for city in cities]
    about += [[f"{words}\n\n{text}" for words in ABOUT_FUNCTIONS] for text in read_documentation()]
    draw = random.Random(0)
    draw.shuffle(about)
    count = len(about) // HELDOUT_SHARE
    questions = [question for group in about[count:] for question in group]
    draw.shuffle(questions)
    return questions, [group[i % len(group)] for i, group in enumerate(about[:count])]


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder that they are written to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write(out / "code.jsonl", ({"text": text} for text in read_code()))
    write(out / "code-heldout.jsonl", ({"text": text} for text in read_heldout().values()))
    for name, questions in zip(("chats", "chats-heldout"), make_questions(), strict=True):
        write(out / f"{name}.jsonl", ({"messages": [{"role": "user", "content": question}]} for question in questions))


if __name__ == "__main__":
    main()
