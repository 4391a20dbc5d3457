"""A model and lookups together: the model drafts and a lookup goes on from there, or a lookup drafts alone.

FastDeploy's MTP + ngram does the first only, and pays for the model where copied text needs none. What a request gets is chosen by the
planner of drafts (`backend.budget`): lookups cost next to nothing, so all are made at every step, and the text that follows tells how much of
each was right, used or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backend.budget import Chain, DraftBudget
from backend.core import Batch, Draft, DraftFaults, Request, Scheduled
from backend.drafters.lookup import judge_longer, judge_model
from backend.drafters.protocol import HostDrafter, Lookup
from backend.kv_store import KvStore

_Found = list[tuple[list[int], Chain, str]]
"""Tokens, what is known of them, and the lookup's name."""


class HybridDrafter:
    """A HostDrafter over a model drafter and lookups."""

    def __init__(
        self, model: HostDrafter | None, lookups: Mapping[str, Sequence[Lookup]], budget: DraftBudget, model_name: str, *, asks: bool
    ) -> None:
        """lookups: by the request's mtp_strategy, where others have none; model_name: as in `token_sources`; asks: the model computes when it is
        called, so that those requests alone are shown to it that are worth it."""
        self._model, self._lookups, self._budget, self._model_name, self._asks = model, lookups, budget, model_name, asks

    def attach(self, store: KvStore) -> None:
        if self._model is not None:
            self._model.attach(store)

    def start(self, request: Request) -> None:
        if self._model is not None:
            self._model.start(request)
        is_soon = self._budget.asks_soon(request)
        for lookup in self._of(request):
            lookup.start(request, is_soon)

    def _of(self, request: Request) -> Sequence[Lookup]:
        return self._lookups.get(request.speculation.mtp_strategy, ())

    def begin_step(self, batch: Batch) -> None:
        if self._model is not None:
            self._model.begin_step(batch)

    def foresee(self, request: Request) -> None:
        """At a prompt's end, before its first token is known: what lookups promise there says whether the model is to be asked."""
        count = request.speculation.num_speculative_tokens
        self._budget.foresee(request, [lookup.lookup_judged([request], [count])[0][1] for lookup in self._of(request)])

    def listen(self, request: Request) -> None:
        """What lookups find for a request that does not wait for them: the text that follows tells what they would have brought."""
        (found,) = self._look_up([request], [request.speculation.num_speculative_tokens])
        token_ids, chain, _ = found[0] if found else ([], (), "")
        self._budget.watch(request, token_ids, chain)

    def propose(self, entries: Sequence[Scheduled], faults: DraftFaults) -> Draft:
        budget = self._budget
        found = self._look_up([entry.request for entry in entries], [entry.max_drafts for entry in entries])
        draft = Draft([[] for _ in entries], [[] for _ in entries], [() for _ in entries])
        asked = range(len(entries)) if self._model is not None else []
        if self._asks:
            asked = [b for b, entry in enumerate(entries) if budget.asks_model(entry.request, [chain for _, chain, _ in found[b]])]
        part = self._model.propose([entries[b] for b in asked], faults) if self._model is not None and asked else Draft([], [])
        for i, b in enumerate(asked):
            token_ids, sources, judged = part.token_ids[i], part.sources[i], None
            chain = part.evidence[i] if part.evidence else judge_model(sources[0], len(sources), ()) if sources else ()
            if sources and sources[0] == self._model_name:  # a lookup's, of the step, are as long as it found
                judged = self._judge_drawn(entries[b], chain)
                longer, name = self._lengthen(entries[b], token_ids)
                token_ids, sources = token_ids + longer, sources + [name] * len(longer)
                chain = [*chain, *judge_longer(name, len(chain), len(longer))]
            draft.token_ids[b], draft.sources[b], draft.evidence[b] = token_ids, sources, chain
            if i in part.probs:
                draft.probs[b] = part.probs[i]
            self._pick(b, entries[b].request, found[b], draft, judged)
        for b in sorted({*range(len(entries))} - {*asked}):
            self._pick(b, entries[b].request, found[b], draft, None)
        return draft

    def _judge_drawn(self, entry: Scheduled, chain: Chain) -> Chain | None:
        """What may be judged of drafts that were drawn: the first one alone was known before any was. Those behind it, the model's and a lookup's,
        depend on what it is, and must not decide whether it is verified. None: all, for nothing was drawn."""
        speculation = entry.request.speculation
        if speculation.verify_strategy != "rejection" or not chain or chain[0].source != self._model_name:
            return None
        return [chain[0]] * min(speculation.num_model_steps, entry.max_drafts)

    def _look_up(self, requests: Sequence[Request], counts: Sequence[int]) -> list[_Found]:
        """Of each lookup that finds something for a request, at most so many tokens."""
        found: list[_Found] = [[] for _ in requests]
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(request.speculation.mtp_strategy, []).append(number)
        for strategy, numbers in alike.items():
            lookups, some = self._lookups.get(strategy, ()), [requests[number] for number in numbers]
            if lookups:
                for request in some:
                    self._budget.compare(request)
            for lookup in lookups:
                made = lookup.lookup_judged(some, [counts[number] for number in numbers])
                for number, (token_ids, chain) in zip(numbers, made):
                    if token_ids:
                        found[number].append((token_ids, chain, lookup.name))
        return found

    def _pick(self, b: int, request: Request, found: _Found, draft: Draft, judged: Chain | None) -> None:
        """Leaves the model's drafts, or puts a lookup's in their place; judged: what may be judged of the model's, where not all may."""
        own: Chain = draft.evidence[b] if judged is None else judged
        best = self._budget.pick(request, [own, *(chain for _, chain, _ in found)])
        if best:
            self._budget.watch_step(request, draft.token_ids[b], draft.evidence[b])
        for number, (token_ids, chain, name) in enumerate(found, 1):
            if number == best:
                draft.token_ids[b], draft.sources[b], draft.evidence[b] = token_ids, [name] * len(token_ids), chain
                draft.probs.pop(b, None)
            else:
                self._budget.watch(request, token_ids, chain)

    def _lengthen(self, entry: Scheduled, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The pattern ends in the model's drafts: what follows a wrong one is rejected with it."""
        room = entry.max_drafts - len(token_ids)
        if room > 0 and token_ids:
            for lookup in self._of(entry.request):
                if found := lookup.lookup(entry.request, token_ids, room):
                    return found, lookup.name
        return [], ""

    def stop(self, request: Request) -> None:
        if self._model is not None:
            self._model.stop(request)
        for lookup in self._of(request):
            lookup.stop(request)

    def close(self) -> None:
        if self._model is not None:
            self._model.close()  # the lookups are loaded as methods of their own, and closed there
