"""When a lookup in the step drafts alone, and the model drafter is not asked: by the score of its match, from what was right before.

Where text repeats itself a lookup brings more drafts than the model, for nothing; elsewhere the model brings more. Which score tells
the one from the other is measured, for all requests and for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels.structs import MAX_SCORE_PAST

SMOOTHING, OWN_SMOOTHING = 0.05, 0.25
"""Share of the newest measurement in the averages: of all requests, and of one, which begin where those of all are."""
PRIOR_MODEL, PRIOR_SCORE_SHARE, MAX_PRIOR = 1.5, 0.5, 4.0
"""Drafts that are right before anything is measured: of the model's, and as a share of the lookup's score."""
PRIOR_COST = 0.2
"""Before it is measured: the model drafter's time over the rest of a step."""
MODEL = 0
"""The key of the model's drafts among the scores."""
TRY_EVERY = 16
"""Steps between trials of the least score, and of the model alone: what is never tried cannot be known to have become better."""
NEVER = 1 << 20
"""A score that no lookup reaches."""


@dataclass(slots=True)
class _Watched:
    right: dict[int, float] = field(default_factory=dict)
    num_steps: int = 0


class LookupChoice:
    """Called by the engine thread only."""

    def __init__(self) -> None:
        self._right: dict[int, float] = {}
        self._watched: dict[str, _Watched] = {}
        self._cost = PRIOR_COST

    def stop(self, request_id: str) -> None:
        self._watched.pop(request_id, None)

    def threshold(self, request_id: str) -> int:
        """The least score from which the lookup drafts alone in this request's next step."""
        watched = self._watched.setdefault(request_id, _Watched())
        watched.num_steps += 1
        if watched.num_steps % TRY_EVERY == 0:
            return 1 if watched.num_steps // TRY_EVERY % 2 else NEVER
        wanted = 1 + self._expect(watched, MODEL)
        scores = range(1, MAX_SCORE_PAST + 1)
        return next((score for score in scores if (1 + self._expect(watched, score)) * (1 + self._cost) >= wanted), NEVER)

    def learn(self, request_id: str, score: int, num_right: int) -> None:
        """So many drafts were right; score: of the lookup that made them alone, or MODEL."""
        watched = self._watched.get(request_id)
        if watched is None:
            return
        key = min(score, MAX_SCORE_PAST)
        own = self._expect(watched, key)
        watched.right[key] = own + OWN_SMOOTHING * (num_right - own)
        self._right[key] += SMOOTHING * (num_right - self._right[key])

    def observe_cost(self, model_seconds: float, rest_seconds: float) -> None:
        """Of a step in which the model drafter ran."""
        share = min(2.0, model_seconds / max(rest_seconds, 1e-6))
        self._cost += SMOOTHING * (share - self._cost)

    def _expect(self, watched: _Watched, key: int) -> float:
        if key not in watched.right:
            prior = PRIOR_MODEL if key == MODEL else min(MAX_PRIOR, PRIOR_SCORE_SHARE * key)
            watched.right[key] = self._right.setdefault(key, prior)
        return watched.right[key]
