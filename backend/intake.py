"""What a caller asks for -> the engine's requests, checked. Safe from any thread."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from backend.config import EngineConfig
from backend.core import Request, SamplingParams
from backend.errors import RequestError
from backend.text import Tokenizer

MAX_CHARACTERS_PER_TOKEN = 64
"""No real text is longer in its context: what is, is refused before megabytes are tokenized."""


class Intake:
    """Makes requests for one model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, max_model_len: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def make(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        speculative: dict[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[Request]:
        """One request for each of params.n completions. timeout: seconds from now. Raises RequestError, ConfigError (both the request's fault)."""
        speculation = self._config.speculative_config.resolve(speculative)
        token_ids = self._read_prompt(prompt)
        self._check_vocabulary(params)
        if timeout is not None and not 0 < timeout < 1e9:
            raise RequestError(f"timeout must be above 0 seconds, got {timeout!r}")
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._eos_token_ids
        bad_words = tuple(ids for word in params.bad_words for ids in self._tokenizer.encode_bad_word(word))
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        deadline = None if timeout is None else time.monotonic() + timeout
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{i}",
                prompt_token_ids=token_ids,
                params=params,
                speculation=speculation,
                seed=seed + i,
                index=i,
                group_id=request_id,
                priority=priority,
                deadline=deadline,
                stop_ids=stop_ids,
                bad_word_ids=bad_words,
            )
            for i in range(params.n)
        ]

    def _read_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            limit = self._max_model_len * MAX_CHARACTERS_PER_TOKEN
            if len(prompt) > limit:
                raise RequestError(
                    f"the prompt has {len(prompt)} characters; at most {limit} are looked at for a context of {self._max_model_len} tokens"
                )
            if not prompt:
                raise RequestError("the prompt is empty")
            token_ids = self._tokenizer.encode(prompt)
        else:
            token_ids = list(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty: it has no tokens")
        if isinstance(prompt, str):
            return token_ids
        for place, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise RequestError(f"input_ids[{place}] is {token_id!r:.50}; the vocabulary has ids 0 to {self._vocab_size - 1}")
        return token_ids

    def _check_vocabulary(self, params: SamplingParams) -> None:
        for key in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(params, key):
                if not 0 <= token_id < self._vocab_size:
                    raise RequestError(f"{key} names token {token_id}; the vocabulary has ids 0 to {self._vocab_size - 1}")
