"""A model and a lookup together: the model drafts and the lookup goes on from there, or the lookup drafts alone.

FastDeploy's MTP + ngram does the first only, and pays for the model where copied text needs none: there the lookup alone is faster.
Which pays is measured. A lookup costs next to nothing, so one is made at every step, and the text that follows tells how much of
it was right, used or not; that is averaged by the score of its match, so that long matches are trusted where short ones are not.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.core import Batch, Draft, DraftFaults, Request, Scheduled
from backend.drafters.protocol import HostDrafter, Lookup
from backend.kv_store import KvStore
from backend.speculative_config import MAX_SPECULATIVE_TOKENS

SMOOTHING, OWN_SMOOTHING = 0.05, 0.25
"""Share of the newest measurement in the averages: of all requests, and of one, which begin where those of all are."""
PRIOR_MODEL, PRIOR_SCORE_SHARE = 1.5, 0.5
"""Drafts that are right before anything is measured: of the model's, and as a share of the lookup's score."""
MAX_PRIOR = 4.0
MODEL = -1
MAX_PENDING, MAX_SCORE = 16, 16
PRIOR_SHARE, PRIOR_CATCH_UP = 0.2, 0.05
"""Before they are measured: the model's time over the rest of a step, and the time of one more token that it has to catch up on over
that of a call."""
AMORTIZED = 8
"""Steps that catching up is worth: the model, once up to date, is cheap for the steps that follow."""


@dataclass(slots=True)
class _Watched:
    """What is awaited of one request."""

    lookups: list[tuple[int, list[int], int]] = field(default_factory=list)
    """(place, tokens, score) of lookups whose text is not all there yet."""
    model_at: int = -1
    """Where the model drafted in the last step, or -1."""
    seen_by_model: int = 0
    """Tokens it was shown"""
    right: dict[int, float] = field(default_factory=dict)
    """Drafts that were right: of lookups by score, and of the model under MODEL."""


class HybridDrafter:
    """A HostDrafter over a model drafter and the lookup that the request's mtp_strategy names; with strategy `default`, the model alone."""

    def __init__(self, model: HostDrafter, lookups: dict[str, Lookup]) -> None:
        """lookups: by mtp_strategy."""
        self._model = model
        self._lookups = lookups
        self._watched: dict[str, _Watched] = {}
        self._right: dict[str, dict[int, float]] = defaultdict(dict)  # as _Watched.right, by strategy
        self._model_share = PRIOR_SHARE
        self._call_seconds = 0.0
        self._catch_up = PRIOR_CATCH_UP
        self._last_call = 0.0
        self._last_end = 0.0

    def attach(self, store: KvStore) -> None:
        self._model.attach(store)

    def start(self, request: Request) -> None:
        self._model.start(request)
        if lookup := self._lookups.get(request.speculation.mtp_strategy):
            lookup.start(request)
            self._watched[request.request_id] = _Watched()

    def begin_step(self, batch: Batch) -> None:
        self._model.begin_step(batch)

    def propose(self, entries: Sequence[Scheduled], faults: DraftFaults) -> Draft:
        """Asks the model for those requests whose lookup does not promise more for its time."""
        began = time.perf_counter()
        if self._last_call and self._last_end:  # the rest of the step that the last model call was part of
            share = min(2.0, self._last_call / max(1e-6, began - self._last_end))
            self._model_share += SMOOTHING * (share - self._model_share)
        draft = Draft([[] for _ in entries], [[] for _ in entries])
        asked = []
        for b, entry in enumerate(entries):
            lookup = self._lookups.get(entry.request.speculation.mtp_strategy)
            if lookup is None or not self._look_up(b, entry, lookup, draft):
                asked.append(b)
        self._last_call = 0.0
        if asked:
            started = time.perf_counter()
            part = self._model.propose([entries[b] for b in asked], faults)
            self._time_call([entries[b].request for b in asked], time.perf_counter() - started)
            for i, b in enumerate(asked):
                draft.token_ids[b], draft.sources[b] = part.token_ids[i], part.sources[i]
                if i in part.probs:
                    draft.probs[b] = part.probs[i]
                self._lengthen(entries[b], draft.token_ids[b], draft.sources[b])
        self._last_end = time.perf_counter()
        return draft

    def _time_call(self, requests: Sequence[Request], seconds: float) -> None:
        backlogs = [len(r.token_ids) - self._watched[r.request_id].seen_by_model for r in requests if r.request_id in self._watched]
        # A request that took part in the last step has no more than these to be shown.
        if all(backlog <= MAX_SPECULATIVE_TOKENS + 1 for backlog in backlogs):
            self._last_call = seconds
            self._call_seconds += SMOOTHING * (seconds - self._call_seconds) if self._call_seconds else seconds
        elif self._call_seconds:
            one = max(0.0, seconds - self._call_seconds) / max(1, sum(backlogs)) / self._call_seconds
            self._catch_up += SMOOTHING * (min(one, 1.0) - self._catch_up)

    def _look_up(self, b: int, entry: Scheduled, lookup: Lookup, draft: Draft) -> bool:
        """Whether the lookup drafts alone; what it found is watched either way."""
        request = entry.request
        strategy, watched = request.speculation.mtp_strategy, self._watched[request.request_id]
        self._learn(strategy, request, watched)
        found, score = lookup.lookup_scored(request, (), entry.max_drafts)
        if not found:
            return False
        bucket = min(round(score), MAX_SCORE)
        watched.lookups.append((len(request.token_ids), found, bucket))
        del watched.lookups[:-MAX_PENDING]
        backlog = len(request.token_ids) - watched.seen_by_model
        cost = self._model_share * (1 + backlog * self._catch_up / AMORTIZED)
        if (1 + self._expect(strategy, watched, bucket)) * (1 + cost) < 1 + self._expect(strategy, watched, MODEL):
            return False
        draft.token_ids[b], draft.sources[b] = found, [lookup.name] * len(found)
        return True

    def _expect(self, strategy: str, watched: _Watched, key: int) -> float:
        """Right drafts of the next lookup with that score, or of the model."""
        if key not in watched.right:
            prior = PRIOR_MODEL if key == MODEL else min(MAX_PRIOR, PRIOR_SCORE_SHARE * key)
            watched.right[key] = self._right[strategy].setdefault(key, prior)
        return watched.right[key]

    def _add(self, strategy: str, watched: _Watched, key: int, right: int) -> None:
        watched.right[key] = self._expect(strategy, watched, key) + OWN_SMOOTHING * (right - watched.right[key])
        self._right[strategy][key] += SMOOTHING * (right - self._right[strategy][key])

    def _learn(self, strategy: str, request: Request, watched: _Watched) -> None:
        """Compares what was drafted before with the text that came."""
        known = request.token_ids
        if watched.model_at >= 0:
            self._add(strategy, watched, MODEL, max(0, len(known) - watched.model_at - 1))
            watched.model_at = -1
        waiting = []
        for place, found, bucket in watched.lookups:
            right = 0
            while right < len(found) and place + right < len(known) and found[right] == known[place + right]:
                right += 1
            if right < len(found) and place + right == len(known):
                waiting.append((place, found, bucket))  # all right so far
            else:
                self._add(strategy, watched, bucket, right)
        watched.lookups = waiting

    def _lengthen(self, entry: Scheduled, token_ids: list[int], sources: list[str]) -> None:
        """The pattern ends in the model's drafts: what follows a wrong one is rejected with it."""
        request = entry.request
        lookup = self._lookups.get(request.speculation.mtp_strategy)
        if lookup is None:
            return
        if token_ids:  # a model that is down says nothing about how good it is
            watched = self._watched[request.request_id]
            watched.model_at = watched.seen_by_model = len(request.token_ids)
        if (room := entry.max_drafts - len(token_ids)) > 0:
            found = lookup.lookup(request, token_ids, room)
            token_ids += found
            sources += [lookup.name] * len(found)

    def stop(self, request: Request) -> None:
        self._model.stop(request)
        self._watched.pop(request.request_id, None)
        if lookup := self._lookups.get(request.speculation.mtp_strategy):
            lookup.stop(request)

    def close(self) -> None:
        self._model.close()  # the lookups are loaded as methods of their own, and closed there
