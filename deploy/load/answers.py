"""What a right answer is: whole, counted right, and with greedy decoding the same every time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


class WrongAnswer(Exception):
    """An answer that came in time and is not what was asked for."""


@dataclass(slots=True)
class Answer:
    """What the responses to one request brought."""

    text: str = ""
    num_tokens: int | None = None
    """As counted from the responses; None where the protocol does not say."""
    usage: dict[str, int] | None = None
    finish_reason: str | None = None

    def check(self, max_tokens: int) -> None:
        """Raises WrongAnswer for one that has no end, or not the tokens that it says or that were asked for."""
        if self.finish_reason is None:
            raise WrongAnswer("no final response: the stream ended without a finish reason")
        if self.usage is None:
            raise WrongAnswer("the final response has no usage")
        total = self.usage["completion_tokens"]
        if self.num_tokens is not None and self.num_tokens != total:
            raise WrongAnswer(f"{self.num_tokens} tokens came, usage says {total}")
        if total > max_tokens or (self.finish_reason == "length" and total != max_tokens):
            raise WrongAnswer(f"{max_tokens} tokens were asked for, {total} came, finish reason {self.finish_reason}")
        if self.finish_reason not in ("length", "stop"):
            raise WrongAnswer(f"nothing limits the answer, but its finish reason is {self.finish_reason}")


@dataclass
class Answers:
    """The first answer to each prompt. Later ones must be the same, through whichever door they came."""

    texts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Answers:
        """Raises OSError, and ValueError for a file with no answers: all would be the same as those."""
        texts = json.loads(path.read_text("utf-8"))
        if not isinstance(texts, dict) or not texts:
            raise ValueError("there are no answers in it")
        return cls(texts)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.texts, indent=1) + "\n", "utf-8")

    def compare(self, prompt: str, text: str) -> None:
        """Raises WrongAnswer, with the place where the two part."""
        expected = self.texts.setdefault(prompt, text)
        if text != expected:
            same = next((i for i, (a, b) in enumerate(zip(text, expected)) if a != b), min(len(text), len(expected)))
            seen, known = text[same : same + 20], expected[same : same + 20]
            raise WrongAnswer(f"not the first answer to this prompt: at character {same} {seen!r}, not {known!r}")
