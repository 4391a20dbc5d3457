"""Valid requests whose answers are known: whatever method, number of drafts and strategy is chosen, and whoever else is served."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from client import Client, Completion
from tests.soak.book import WrongAnswer
from training.heldout import read_heldout

METHODS = ("none", "naive", "ngram", "mtp", "suffix")
MTP_STRATEGIES = ("default", "with_ngram", "with_suffix")
MAX_DRAFTS = 16
NUM_QUESTIONS = 52
FORM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}, "is_open": {"type": "boolean"}},
    "required": ["name", "size", "is_open"],
    "additionalProperties": False,
}
_WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.0, "stop": ["\n\n", "return"], "include_stop": True},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 4},
    {"temperature": 0.0, "bad_words": ["self", " self", "def"], "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {"5": 4.0, "77": -50.0}, "frequency_penalty": 0.5},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "n": 2},
    {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.4},
    {"temperature": 1.2, "min_p": 0.05, "stop_token_ids": [13, 14]},
    {"temperature": 0.0, "structured_outputs": {"regex": "[a-z_]{1,12} = [0-9]{1,6}(\\n[a-z_]{1,12} = [0-9]{1,6}){0,3}"}},
    {"temperature": 0.9, "structured_outputs": {"json": FORM}},
    {"temperature": 0.6, "structured_outputs": {"choice": ["return None", "return self", "raise ValueError"]}},
)
"""How to sample. Those that are not greedy get a seed."""

Outcome = tuple[str, tuple[int, ...], str | None]
"""Text, token ids, finish reason."""


@dataclass
class Question:
    prompt: str
    token_ids: list[int]
    """The prompt's."""
    way: dict[str, Any]
    answers: dict[int, Outcome] = field(default_factory=dict)
    """By the completion's index."""

    def values(self, rng: random.Random) -> dict[str, Any]:
        """decode's inputs for it: each time another way to ask for the same."""
        prompt = {"text_input": self.prompt} if rng.random() < 0.7 else {"input_ids": self.token_ids}
        return {**prompt, **self.way, **choose_speculation(rng, self.way["temperature"] == 0, self.answers[0][0])}

    def check(self, completions: dict[int, Outcome]) -> None:
        """Raises WrongAnswer."""
        if completions != self.answers:
            raise WrongAnswer(f"got {completions}\nwant {self.answers}")

    def check_completions(self, completions: list[Completion]) -> None:
        self.check({c.index: (c.text, tuple(c.token_ids), c.finish_reason) for c in completions})


def choose_speculation(rng: random.Random, is_greedy: bool, answer: str) -> dict[str, Any]:
    """None of the choices changes an answer: not even one that is predicted."""
    if rng.random() < 0.3:
        return {}
    choice: dict[str, Any] = {"method": rng.choice(METHODS)}
    if rng.random() < 0.7:
        choice["num_speculative_tokens"] = rng.randint(0, MAX_DRAFTS)
    if rng.random() < 0.5:
        choice["verify_strategy"] = rng.choice(("target_match", "greedy")) if is_greedy else "target_match"
    if choice["method"] == "mtp" and rng.random() < 0.7:
        choice["mtp_strategy"] = rng.choice(MTP_STRATEGIES)
    if choice["method"] in ("ngram", "suffix", "mtp") and choice.get("num_speculative_tokens") != 0 and rng.random() < 0.3:
        choice["prediction"] = answer[rng.randrange(len(answer) + 1) :] + rng.choice(("", "self.", answer))
    return {"speculative": choice}


def ask_all(client: Client, tokenize: Any, rng: random.Random) -> list[Question]:
    """Makes the questions, and asks each once, without speculation. tokenize: a prompt's ids."""
    texts = list(read_heldout().values())
    questions = []
    for number in range(NUM_QUESTIONS):
        text = texts[number % 12]  # some begin alike, and share pages
        begin = rng.choice((0, 0, rng.randrange(0, len(text) // 2)))
        length = rng.choice((40, 200, 200, 600, 1500))
        way = dict(_WAYS[number % len(_WAYS)], max_tokens=rng.randint(2, 40))
        way["min_tokens"] = min(way.get("min_tokens", 0), way["max_tokens"])
        if way["temperature"]:
            way["seed"] = rng.randrange(-(2**40), 2**40)
        prompt = text[begin : begin + length]
        question = Question(prompt, tokenize(prompt), way)
        found = client.generate(prompt, **way, speculative={"method": "none"})
        question.answers = {c.index: (c.text, tuple(c.token_ids), c.finish_reason) for c in found}
        questions.append(question)
    return questions
