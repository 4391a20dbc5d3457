"""What one request asks of an answer, and the limits of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from backend.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 64
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 8192
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 256, 16384
MAX_BAD_WORD_TOKENS = 128
"""Of one of them: in a step each one of each request takes as much room as the longest."""
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_SEED = 2**64 - 1
MIN_REPETITION_PENALTY = 1e-3
"""Scores divided by less may overflow, and would be taken for a damaged model's."""
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would leave one token anyway, or overflow."""


def _check(key: str, value: object, kind: type | tuple[type, ...], is_good: bool, rule: str) -> None:
    """Raises ValueError unless `value` is of `kind` (a bool is no number) and `is_good`."""
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind) or not is_good:
        raise ValueError(f"{key} must be {rule}, got {value!r:.200}")


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Raises ValueError naming the key, the rule and the value seen.

    All of these act per draft position, with the earlier drafts of the step in the history.
    """

    max_tokens: int = 128
    """Tokens to emit at most; the context's end may come first. 0 with `echo`: the prompt alone is answered."""
    min_tokens: int = 0
    """End-of-text, stop ids and stop strings are held off until this many tokens are out."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    """Drops tokens less likely than min_p times the likeliest."""
    repetition_penalty: float = 1.0
    """Over prompt and output, as in Hugging Face: positive logits are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Presence and frequency act over the output only, as in OpenAI's interface."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """Same seed, same tokens: alone, in any batch, with or without speculation. None draws one."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop: bool = False
    """Keep what ends the completion in the text: the stop string, or the text of the token, be it one of stop_token_ids or the end of text."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """False: they are text like others."""
    logprobs: int | None = None
    """Log-probabilities of the emitted token and of this many likeliest ones, before any parameter acts. With `echo`, of the prompt's tokens
    too, from the second on."""
    echo: bool = False
    """Repeat the prompt's text and ids in the first answer."""
    n: int = 1
    """Independent completions; completion i uses seed + i."""
    structured_outputs: StructuredOutputs | None = None
    """What the text has to be; also as a mapping of that class's keys."""

    def __post_init__(self) -> None:
        for key in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, key)
            if isinstance(value, str) and key != "stop_token_ids":
                value = (value,)
            _check(key, value, (list, tuple), True, "a list")
            object.__setattr__(self, key, tuple(value))
        number = (int, float)
        least, rule = (0, "an integer >= 0") if self.echo is True else (1, "an integer >= 1")
        _check("max_tokens", self.max_tokens, int, isinstance(self.max_tokens, int) and self.max_tokens >= least, rule)
        good = isinstance(self.min_tokens, int) and 0 <= self.min_tokens <= self.max_tokens
        _check("min_tokens", self.min_tokens, int, good, f"an integer from 0 to max_tokens ({self.max_tokens})")
        _check("temperature", self.temperature, number, _is_number(self.temperature) and self.temperature >= 0, "a finite number >= 0")
        _check("top_p", self.top_p, number, _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1")
        _check("top_k", self.top_k, int, isinstance(self.top_k, int) and self.top_k >= -1, "an integer >= 1, or 0 or -1 for off")
        _check("min_p", self.min_p, number, _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1")
        good = _is_number(self.repetition_penalty) and MIN_REPETITION_PENALTY <= self.repetition_penalty <= 10
        _check("repetition_penalty", self.repetition_penalty, number, good, f"a number from {MIN_REPETITION_PENALTY} to 10")
        for key in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, key)
            _check(key, value, number, _is_number(value) and -2 <= value <= 2, "a number from -2 to 2")
        _check("logit_bias", self.logit_bias, Mapping, True, "a mapping of token id to bias")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIASES}")
        for token_id, bias in self.logit_bias.items():
            _check("logit_bias's keys", token_id, int, True, "token ids")
            _check(f"logit_bias[{token_id}]", bias, number, _is_number(bias) and -100 <= bias <= 100, "a number from -100 to 100")
        if self.seed is not None:
            _check("seed", self.seed, int, isinstance(self.seed, int) and -(2**63) <= self.seed <= MAX_SEED, "an integer of 64 bits")
        self._check_strings("stop", MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        self._check_strings("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} entries; the limit is {MAX_STOP_TOKEN_IDS}")
        for token_id in self.stop_token_ids:
            _check("stop_token_ids", token_id, int, True, "token ids")
        for key in ("include_stop", "ignore_eos", "skip_special_tokens", "echo"):
            _check(key, getattr(self, key), bool, True, "true or false")
        if self.logprobs is not None:
            good = isinstance(self.logprobs, int) and 0 <= self.logprobs <= MAX_LOGPROBS
            _check("logprobs", self.logprobs, int, good, f"an integer from 0 to {MAX_LOGPROBS}")
        _check("n", self.n, int, isinstance(self.n, int) and 1 <= self.n <= MAX_COMPLETIONS, f"an integer from 1 to {MAX_COMPLETIONS}")
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_value(self.structured_outputs))

    def _check_strings(self, key: str, max_count: int, max_characters: int) -> None:
        strings = getattr(self, key)
        if len(strings) > max_count:
            raise ValueError(f"{key} has {len(strings)} strings; the limit is {max_count}")
        for string in strings:
            _check(key, string, str, bool(string), "non-empty strings")
        if (total := sum(map(len, strings))) > max_characters:
            raise ValueError(f"{key} has {total} characters in all; the limit is {max_characters}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
