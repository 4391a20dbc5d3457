"""Prompt lookup: the last n tokens are searched for earlier in the request, and what followed them there is proposed.

As `ngram` in FastDeploy and vLLM, `inference_with_reference` in PaddleNLP (Yang et al. 2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from backend.budget import Chain, by_match
from backend.core import Request

TOKEN_BYTES = 4
MAX_SCORE = 16


class NgramLookup:
    """Longest n first, earliest place first (so the prompt comes before the output)."""

    name = "ngram"

    def __init__(self, max_size: int, min_size: int) -> None:
        self.max_size = max_size
        self.min_size = min_size
        self._texts: dict[str, bytearray] = {}  # each request's token ids as bytes: the search is then the C library's

    def start(self, request: Request, is_soon: bool = True) -> None:
        self._texts[request.request_id] = bytearray(array("i", [*self._before(request), *request.token_ids]).tobytes())

    def _before(self, request: Request) -> Sequence[int]:
        """What is searched before the request's own tokens."""
        return ()

    def lookup(self, request: Request, drafts: Sequence[int], count: int) -> list[int]:
        return self._look_up(request, drafts, count)[0]

    def lookup_judged(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[list[int], Chain]]:
        found = [self._look_up(request, (), count) for request, count in zip(requests, counts)]
        return [(token_ids, by_match(self.name, num_matched, len(token_ids))) for token_ids, num_matched in found]

    def _look_up(self, request: Request, drafts: Sequence[int], count: int) -> tuple[list[int], int]:
        """Tokens, and how many matched before them, counted on past max_size."""
        text = self._texts[request.request_id]
        known = len(text) // TOKEN_BYTES - len(self._before(request))
        if known < len(request.token_ids):
            text += array("i", request.token_ids[known:]).tobytes()
        if drafts:
            text = text + array("i", drafts).tobytes()
        end = len(text)
        for size in range(min(self.max_size, end // TOKEN_BYTES - 1), self.min_size - 1, -1):
            pattern = bytes(text[end - size * TOKEN_BYTES :])
            at = text.find(pattern, 0, end - 1)  # not the pattern itself
            while at >= 0 and at % TOKEN_BYTES:  # bytes that match across token borders
                at = text.find(pattern, at + 1, end - 1)
            if at >= 0:
                follow = at + len(pattern)
                found = array("i", bytes(text[follow : follow + count * TOKEN_BYTES])).tolist()
                return found, size + self._match_back(text, at, end - len(pattern))
        return [], 0

    @staticmethod
    def _match_back(text: bytearray, first: int, second: int) -> int:
        """Tokens before two places that agree, as far as scores need to know."""
        count = 0
        while count < MAX_SCORE and first >= TOKEN_BYTES and text[first - TOKEN_BYTES : first] == text[second - TOKEN_BYTES : second]:
            first, second, count = first - TOKEN_BYTES, second - TOKEN_BYTES, count + 1
        return count

    def stop(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)

    def close(self) -> None:
        pass


BORDER = -1
"""Between a prediction and the request's own tokens: no text has it."""
PREDICTION_SIZE = 16
"""Longest pattern: a prediction that repeats itself is followed at the right place."""


class PredictionLookup(NgramLookup):
    """The same in what the answer is expected to be like ("predicted outputs" in OpenAI's interface), then in the request itself."""

    name = "prediction"

    def __init__(self, max_size: int) -> None:
        super().__init__(max(max_size, PREDICTION_SIZE), 1)
        self._predictions: dict[str, tuple[int, ...]] = {}

    def start(self, request: Request, is_soon: bool = True) -> None:
        self._predictions[request.request_id] = (*request.prediction_ids, BORDER)
        super().start(request, is_soon)

    def _before(self, request: Request) -> Sequence[int]:
        return self._predictions[request.request_id]

    def _look_up(self, request: Request, drafts: Sequence[int], count: int) -> tuple[list[int], int]:
        found, num_matched = super()._look_up(request, drafts, count)
        return (found[: found.index(BORDER)] if BORDER in found else found), num_matched

    def stop(self, request: Request) -> None:
        super().stop(request)
        self._predictions.pop(request.request_id, None)
