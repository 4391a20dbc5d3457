"""The drafts that a planned step verifies: those that host drafters, another node or the last step made, as grammars want them, and as many
of them as are worth it; and what came of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from backend.budget.observing import StepSeen
from backend.budget.padded import PaddedStep
from backend.core import Draft, HandOff, Outcome, Request, Scheduled
from backend.drafters import Drafters
from backend.grammar import fit_drafts
from backend.planned import Drafted, Known, PlannedStep
from backend.step.options import Options
from backend.step.plan import StepPlan
from backend.step.times import StepTimes

REJECTION = Options.REJECTION.value
"""As an integer: to ask a flag takes ten times as long, and every request of a step is asked."""


class StepDrafting:
    """A part of the planner."""

    def __init__(self, drafters: Drafters, max_drafts: int, max_masked_drafts: int, drafts_forced: bool, is_layout_exact: bool) -> None:
        """max_drafts: of a request, that the workers have room for; max_masked_drafts: of one with a grammar; drafts_forced: tokens that a grammar
        forces are drafted; is_layout_exact: see `Planner`."""
        self._drafters, self._budget = drafters, drafters.budget
        self._max_drafts, self._max_masked_drafts, self._drafts_forced = max_drafts, max_masked_drafts, drafts_forced
        self._is_exact = is_layout_exact

    def put(self, step: PlannedStep, decoding: Sequence[Scheduled], known: dict[int, Known]) -> None:
        """Writes the drafts of decoding requests that the workers lack, and lowers `max_drafts` to what is worth it. known: by id of the entry."""
        handed = [(e, h, known[id(e)]) for e in decoding if (h := e.request.hand_off) is not None] if step.plan.admissions else []
        for entry, hand_off, own in handed:
            self._take_handed(step, entry, hand_off, own)
        self._ask_host(step, decoding, known)
        if self._budget.listens:
            self._listen(step, decoding, known)
        self._fit_made(step, decoding, known)
        for _, hand_off, own in handed:
            self._take_handed_probs(step, hand_off, own)
        step.limits = [entry.max_drafts for entry in step.entries]
        if not self._is_exact:
            return  # one limit holds for all
        ready = ((e, known[id(e)]) for e in decoding if e.max_drafts and not e.request.num_steps_ahead)
        self._allot([(entry, own) for entry, own in ready if own.drafted.parents or not entry.request.speculation.num_nodes], len(decoding))

    def foresee(self, step: PlannedStep, prompts: Sequence[Scheduled], known: dict[int, Known]) -> None:
        """What the host's lookups promise at the ends of prompts, where a model drafter may be spared them."""
        started = time.perf_counter()
        for entry in prompts:
            place = known[id(entry)].place
            if place.has_model and place.host:
                self._drafters.foresee(entry.request)
        step.host_seconds += time.perf_counter() - started

    def _allot(self, ready: Sequence[tuple[Scheduled, Known]], num_decoding: int) -> None:
        """Of requests whose drafts are known. Rows of prompts in the step do not count: they take as long in whatever step they come, and bring no
        tokens that drafts could be held against."""
        lookup, model = self._drafters.lookup_name, self._drafters.model_name
        chains, num_drawn, parents = [], [], []
        for entry, own in ready:
            drafted = own.drafted
            is_certain = drafted.evidence is not None or drafted.token_ids is not None
            count = min(len(drafted.sources), entry.max_drafts)
            chain = drafted.judge(count if is_certain else min(count, len(own.next_drafts)), model, lookup)
            chains.append(chain)
            parents.append(drafted.parents)
            is_drawn = bool(own.options & REJECTION)
            num_drawn.append(sum(evidence.source == model for evidence in chain) if is_drawn else 0)
        counts = self._budget.allot([entry.request for entry, _ in ready], chains, num_drawn, num_decoding, parents)
        for (entry, _), chain, count in zip(ready, chains, counts):
            if count < len(chain):
                entry.max_drafts = count

    def _ask_host(self, step: PlannedStep, decoding: Sequence[Scheduled], known: dict[int, Known]) -> None:
        """Drafts of the host for this step; only of requests all of whose tokens it knows, and what the last step drafted, if it does that."""
        asking = [e for e in decoding if e.max_drafts and known[id(e)].place.host and not e.request.num_steps_ahead and known[id(e)].may_ask_host]
        if not asking:
            return
        started = time.perf_counter()
        for entry in asking:
            own = known[id(entry)]
            if own.has_own_drafts and own.drafted.sources and entry.request.hand_off is None:  # what another node drafted is there
                self._show(entry.request, own)
        draft: Draft = self._drafters.propose(asking)
        step.host_seconds += time.perf_counter() - started
        plan = step.plan
        for b, entry in enumerate(asking):
            own, token_ids, sources, probs = known[id(entry)], draft.token_ids[b], list(draft.sources[b]), draft.probs.get(b)
            num_model = self.count_model(sources)
            is_asked = bool(own.drafted.sources) and own.drafted.sources[0] == self._drafters.model_name
            has_step = bool(own.drafted.sources)
            own.drafted = Drafted(sources, evidence=draft.evidence[b], num_model=num_model, is_beside=is_asked, has_step=has_step)
            if entry.request.grammar is not None:
                num_drawn = num_model if own.place.has_model else 0 if probs is None else len(probs)
                token_ids, own.drafted, num_drawn = self._fit(entry, own, token_ids, num_drawn)
                probs = None if probs is None else probs[:num_drawn]
            self._put_drafts(plan, own, token_ids)
            if own.options & REJECTION and (probs is not None or not own.place.has_model or not num_model):
                plan.num_drawn_writes += (own.index, 0 if probs is None else len(probs))
            if probs is not None and own.options & REJECTION:
                step.host_probs.append((own.index, probs))

    def _show(self, request: Request, known: Known) -> None:
        """What the last step drafted, to drafters of the host."""
        drafts, drafted, model, lookup = known.next_drafts, known.drafted, self._drafters.model_name, self._drafters.lookup_name
        if drafts:
            self._drafters.put_step_drafts(request, drafts, drafted.who(len(drafts), lookup), drafted.judge(len(drafts), model, lookup))
        else:
            self._drafters.put_step_drafts(request, [], [], ())

    def _listen(self, step: PlannedStep, decoding: Sequence[Scheduled], known: dict[int, Known]) -> None:
        """What the host's lookups would draft for the oldest request that does not wait for them."""
        started = time.perf_counter()
        for entry in decoding:
            place = known[id(entry)].place
            if place.host and not place.waits and entry.max_drafts and entry.request.num_steps_ahead:
                self._drafters.listen(entry.request)
                break
        step.host_seconds += time.perf_counter() - started

    def _put_drafts(self, plan: StepPlan, known: Known, token_ids: Sequence[int], first: int = 0) -> None:
        """Those from number `first` on; the workers have the others."""
        begin = known.index * self._max_drafts
        plan.draft_writes += [word for number in range(first, len(token_ids)) for word in (begin + number, token_ids[number])]
        plan.num_draft_writes += (known.index, len(token_ids))

    # -- what grammars allow ------------------------------------------------------------------------------------------

    def _fit(self, entry: Scheduled, known: Known, token_ids: Sequence[int], num_drawn: int) -> tuple[list[int], Drafted, int]:
        """Drafts as the request's grammar wants them, and how many of them were drawn from a distribution."""
        sources = known.drafted.who(len(token_ids), self._drafters.lookup_name)
        limit = min(entry.max_drafts, self._max_masked_drafts)
        num_drawn = num_drawn if known.options & REJECTION else 0
        fitted, sources, num_drawn = fit_drafts(entry.request.grammar, token_ids, sources, num_drawn, limit, self._drafts_forced)
        return fitted, Drafted(sources, known.drafted.alone_score, known.drafted.score, fitted, num_model=self.count_model(sources)), num_drawn

    def count_model(self, sources: Sequence[str]) -> int:
        """Leading drafts that the model drafter made."""
        return next((i for i, who in enumerate(sources) if who != self._drafters.model_name), len(sources))

    def _fit_made(self, step: PlannedStep, decoding: Sequence[Scheduled], known: dict[int, Known]) -> None:
        """Of requests with a grammar whose drafts, if any, the last step made, if that was read."""
        for entry in decoding:
            own = known[id(entry)]
            if entry.request.grammar is None or entry.request.num_steps_ahead or own.drafted.token_ids is not None:
                continue
            made = own.next_drafts[: entry.max_drafts]
            sources = own.drafted.who(len(made), self._drafters.lookup_name)
            token_ids, own.drafted, _ = self._fit(entry, own, made, self.count_model(sources))
            same = next((i for i, (old, new) in enumerate(zip(made, token_ids)) if old != new), min(len(made), len(token_ids)))
            if len(token_ids) > same:
                self._put_drafts(step.plan, own, token_ids, same)

    # -- prompts that another node has computed -----------------------------------------------------------------------

    def _take_handed(self, step: PlannedStep, entry: Scheduled, hand_off: HandOff, known: Known) -> None:
        """The drafts that came with a prompt: those of the host's drafters that lengthen them come over them."""
        token_ids = hand_off.outcome.next_drafts[: entry.max_drafts]
        if known.place.host:
            if known.place.has_model:
                sources = hand_off.sources[: len(token_ids)]
                drafted = Drafted(sources, num_model=self.count_model(sources))
                chain = drafted.judge(len(token_ids), self._drafters.model_name, self._drafters.lookup_name)
                self._drafters.put_step_drafts(entry.request, token_ids, sources, chain)
                known.knows_drafts = True
            return
        sources = hand_off.sources[: len(token_ids)]
        known.drafted = Drafted(sources, token_ids=token_ids, num_model=self.count_model(sources))
        if entry.request.grammar is not None:  # the other node may have drafted without it, as a GPU does
            token_ids, known.drafted, _ = self._fit(entry, known, token_ids, self.count_model(known.drafted.sources))
        self._put_drafts(step.plan, known, token_ids)
        for number, parent in enumerate(hand_off.outcome.next_parents[: len(token_ids)]):
            step.plan.parent_writes += (known.index * self._max_drafts + number, parent)

    def _take_handed_probs(self, step: PlannedStep, hand_off: HandOff, known: Known) -> None:
        """What they were drawn from, of those that the host's drafters kept."""
        if not known.options & REJECTION:
            return
        sources, probs = known.drafted.sources, hand_off.draft_probs
        count = 0 if probs is None else min(self.count_model(sources), len(probs))
        if count or not known.place.host:  # with the host's own they are written
            step.plan.num_drawn_writes += (known.index, count)
        if probs is not None and count:
            step.host_probs.append((known.index, probs[:count]))

    # -- what came of them --------------------------------------------------------------------------------------------

    def observe(self, step: PlannedStep, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Tells the planner of drafts what came of a step, after its rows were read."""
        plan, is_exact, num_drafts = step.plan, self._is_exact, 0
        limits: list[tuple[Request, int, bool]] = []
        verified: list[tuple[int, int]] = []
        asked_host: list[bool] = []
        for entry, limit, drafted, outcome in zip(step.entries, step.limits, step.verified, outcomes):
            if not limit:
                continue
            num_drafts += outcome.num_drafts
            verified.append((outcome.num_drafts, outcome.num_accepted))
            if is_exact:
                limits.append((entry.request, limit, drafted.has_model))
                continue
            is_asked, most = drafted.evidence is not None, len(drafted.sources)
            asked_host.append(is_asked)
            # Where the host was not asked they were made in the step before, under its limit.
            limits.append((entry.request, limit if is_asked or limit < most else most, drafted.has_model or drafted.is_beside))
        num_model, num_asked = self._count_made(step, outcomes)
        padded = None
        if not is_exact:
            is_behind = plan.num_prompts > 0 and all(entry.is_decoding for entry in step.entries)
            padded = PaddedStep(plan.num_queries - 1, step.is_waited_for, is_behind, asked_host)
        seen = StepSeen(
            num_requests=len(step.entries),
            num_rows=len(step.entries) + num_drafts if padded is None else plan.num_tokens,
            num_keys=sum(len(entry.request.token_ids) for entry in step.entries),
            verify_seconds=times.forward + times.decide,
            draft_seconds=times.draft + (step.host_seconds if is_exact else 0.0),  # a device does not wait for the host's
            num_model=num_model,
            num_asked=num_asked,
            num_prompts=plan.num_prompts,
            num_prompt_rows=plan.prompt_rows,
            draft_ends=times.drafts,
            is_catching_up=step.is_catching_up,
            padded=padded,
            is_first=times.is_first,
        )
        self._budget.observe(limits, verified, seen)

    def _count_made(self, step: PlannedStep, outcomes: Sequence[Outcome]) -> tuple[int, int]:
        """Most drafts that the model drafter made for a request, in the step or when it was planned, and for how many requests."""
        model, most, number = self._drafters.model_name, 0, 0
        for made, verified, outcome in zip(step.made, step.verified, outcomes):
            if made is verified:  # a plain row
                continue
            count = 0
            if not made.is_alone and (outcome.next_drafts or not self._is_exact):
                count = min(made.num_model, len(outcome.next_drafts)) if outcome.next_drafts else made.num_model
            if not made.sources and verified.evidence and verified.evidence[0].source == model:
                count = sum(evidence.source == model for evidence in verified.evidence)  # of one that is asked by the host
            most, number = max(most, count), number + (count > 0)
        return most, number
