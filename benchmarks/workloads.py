"""Prompts for measurements, made from the held-out standard-library modules."""

from __future__ import annotations

import ast
import itertools
import keyword
import random
import re
from collections import Counter

from training.heldout import read_heldout


def completion_prompts(count: int, characters: tuple[int, int] = (200, 1600), seed: int = 0) -> list[str]:
    """Stretches of code cut at the end of a line."""
    rng = random.Random(seed)
    texts = [t for t in read_heldout().values() if len(t) > 2 * characters[1]]
    prompts = []
    for _ in range(count):
        text = rng.choice(texts)
        start = text.index("\n", rng.randrange(len(text) - 2 * characters[1])) + 1
        prompts.append(text[start : start + rng.randint(*characters)].rpartition("\n")[0])
    return prompts


def editing_prompts(count: int, lines: tuple[int, int] = (18, 45), seed: int = 0) -> list[tuple[str, str]]:
    """(prompt, the rest of the right answer): a function or class, and the beginning of its copy with one name changed."""
    rng = random.Random(seed)
    blocks = []
    for text in read_heldout().values():
        source = text.split("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and lines[0] <= node.end_lineno - node.lineno <= lines[1]:
                block = "\n".join(source[node.lineno - 1 : node.end_lineno])
                names = Counter(n for n in re.findall(r"\b[a-z_]{3,}\b", block) if not keyword.iskeyword(n) and n != "self")
                if names and names.most_common(1)[0][1] >= 3:
                    blocks.append((block, names.most_common(1)[0][0]))
    rng.shuffle(blocks)
    prompts = []
    for block, name in blocks[:count]:
        changed = re.sub(rf"\b{name}\b", f"new_{name}", block)
        head = "\n".join(changed.split("\n")[:3])
        prompts.append((f"{block}\n\n\n# The same, with {name} renamed to new_{name}.\n{head}", changed[len(head) :]))
    assert len(prompts) == count, f"{len(prompts)} blocks found, {count} wanted"
    return prompts


Requests = list[tuple[str, int]]
"""Prompts, and how many tokens to ask for."""


def completion_requests(count: int) -> Requests:
    """Code to go on with: 64 tokens each."""
    return [(prompt, 64) for prompt in completion_prompts(count, (200, 800), seed=2)]


def editing_requests(count: int) -> Requests:
    """Functions to write again with one name changed, at most 96 tokens of each (about 3 characters a token)."""
    prompts = editing_prompts(min(count, 24))
    return [(prompt, min(96, max(16, len(rest) // 3))) for prompt, rest in itertools.islice(itertools.cycle(prompts), count)]


def chat_requests(count: int) -> Requests:
    """Prose that hardly repeats itself: docstrings to go on with, 64 tokens each."""
    found = []
    for text in read_heldout().values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and len(own := ast.get_docstring(node) or "") >= 400:
                found.append(f'"""{own[:300].rpartition(" ")[0]}')
    random.Random(7).shuffle(found)
    return [(prompt, 64) for prompt in (found * (1 + count // len(found)))[:count]]


def agent_rounds(count: int) -> Requests:
    """One round of an agent's loop: the same tasks, in the same words, each time."""
    return [(f"# Task {i}: continue the module.\n{prompt}", 96) for i, prompt in enumerate(completion_prompts(count, (300, 600), seed=5))]
