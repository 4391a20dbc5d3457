"""Turns a batch into the step plan that every worker runs, and reads a step's outcome back. Integers only; rank 0 alone has one.

It knows of each running request what the workers know: its place in the request table, the pages and drafts that they have, how far
the step's model drafter has come.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from backend.core import NEVER, Batch, Branches, HandOff, Outcome, Request, Scheduled
from backend.drafters import Drafters
from backend.grammar import SOURCE
from backend.pages import SeenPages
from backend.planned import Drafted, Known, PlannedStep, follow
from backend.prefixes import find_shared
from backend.speculative_config import MAX_SPECULATIVE_TOKENS as MAX_DRAFTS
from backend.speculative_config import SpeculativeConfig
from backend.step.options import Options, is_deterministic, options_of
from backend.step.plan import MILLION, Arrival, StepPlan
from backend.step.times import StepTimes
from backend.step_drafting import StepDrafting
from backend.step_grammars import StepGrammars
from kernels.request_state import Admission
from kernels.structs import DRAFTER_COUNT, NUM_FIELDS, PREFIX_GROUP, PREFIX_LEN

MAX_LAG = 512
"""Tokens of a prompt that a model drafter may be spared, to catch up in one step if it is asked after all."""

NO_PREFIX_NO_MASKS = (-1, 0, -1)
"""The fields after LOOKUP_ALONE, before prefixes and masks are put."""
PLAIN_ROW = (-1, 1, 1, 0, 0, 0, -1, NEVER, *NO_PREFIX_NO_MASKS)
"""Of a row that decodes one token and drafts nothing, the fields from FIRST on."""


class Planner:
    """Called by the engine thread only."""

    def __init__(
        self,
        config: SpeculativeConfig,
        drafters: Drafters,
        *,
        max_batch_size: int,
        max_model_len: int,
        num_pages: int,
        page_size: int,
        max_drafter_tokens: int,
        has_step_drafter: bool,
        has_state_keeper: bool = False,
        is_layout_exact: bool,
        cascade_heads: tuple[int, int] | None = None,
        max_masked_drafts: int = MAX_DRAFTS,
        drafts_forced: bool = True,
        max_model_drafts: int = MAX_DRAFTS,
        num_block_rows: int = 0,
    ) -> None:
        """has_state_keeper: the step's drafter keeps what it needs of a token when the target computes that; max_drafter_tokens: that the model
        drafter catches up on in one step; is_layout_exact: workers lay rows out by what they hold, so that the drafter may catch up beside
        drafts (on CPU); cascade_heads: query and KV heads, if shared prefixes are to be read once; max_masked_drafts: of a request with a
        grammar; drafts_forced: tokens that a grammar forces are drafted; max_model_drafts: that the step's model drafter can make in a step;
        num_block_rows: of its block from the newest token on, which all need a place; 0: there is none."""
        self._config, self._drafters, self._budget = config, drafters, drafters.budget
        self._max_model_len, self._page_size = max_model_len, page_size
        self._table_width, self._max_drafts, self._has_trees = -(-max_model_len // page_size), config.max_drafts, config.tree is not None
        self._max_drafter_tokens, self._is_exact = max_drafter_tokens, is_layout_exact
        self._cascade_heads, self._max_model_drafts, self._num_block_rows = cascade_heads, max_model_drafts, num_block_rows
        self._drafting = StepDrafting(drafters, self._max_drafts, max_masked_drafts, drafts_forced, is_layout_exact)
        self._grammars = StepGrammars(config, max_masked_drafts, drafts_forced)
        self._seen = SeenPages(num_pages if has_step_drafter else 0, page_size, is_complete=has_state_keeper)
        self._has_step_drafter = has_step_drafter
        self._free = list(range(max_batch_size - 1, -1, -1))
        self._known: dict[str, Known] = {}
        self._made: dict[tuple[int, int], tuple[str, ...]] = {}

    # -- requests -----------------------------------------------------------------------------------------------------

    def stop(self, request: Request) -> None:
        """A request ended, or gave its pages back."""
        known = self._known.pop(request.request_id, None)
        if known is not None:
            self._free.append(known.index)

    def is_held(self, request: Request) -> bool:
        """Whether a request has to sit the next step out, since the host must see what a step under way emits first."""
        if not request.num_steps_ahead:
            return False
        known = self._known.get(request.request_id)
        if known is None:
            return request.grammar is not None
        if known.is_plain:
            return False
        if request.grammar is not None and not self._grammars.may_follow(request, known, self._budget.limit(request)):
            return True
        waits = bool(known.place.host) and (known.place.waits or self._budget.waits(request))
        return (waits or self._is_behind(request, known)) and self._budget.limit(request) > 0

    def _is_behind(self, request: Request, known: Known) -> bool:
        """Its drafts are wanted of a model drafter that has to catch up first: of rows that the host names, where workers do not look themselves."""
        return known.place.has_model and not known.is_followed and not self._is_exact and self._budget.may_ask(request)

    # -- one step -----------------------------------------------------------------------------------------------------

    def plan(self, batch: Batch) -> PlannedStep:
        """The plan of a batch whose pages are held."""
        if self._has_step_drafter:
            self._seen.reset(batch.fresh_pages)
            self._seen.copy(batch.page_copies)
        plan = StepPlan(page_copies=batch.page_copies, cleared_pages=batch.fresh_pages)
        known: dict[int, Known] = {}
        prompts: list[Scheduled] = []
        decoding: list[Scheduled] = []
        for entry in batch.entries:
            own = known[id(entry)] = self._known.get(entry.request.request_id) or self._take(entry, plan)
            is_decoding = entry.is_decoding and own.is_admitted and (own.is_plain or not self._is_behind(entry.request, own))
            (decoding if is_decoding else prompts).append(entry)
        entries = [*prompts, *decoding]
        step = PlannedStep(plan, entries, [], [], is_waited_for=bool(decoding) and not any(e.request.num_steps_ahead for e in decoding))
        self._drafting.put(step, decoding, known)
        if self._is_exact and prompts:
            self._drafting.foresee(step, prompts, known)
        for entry in batch.entries if plan.admissions else ():
            entry.request.hand_off = None  # its drafts are for the step that admits it, or for none
        rows: list[tuple[int, ...]] = []
        for number, entry in enumerate(entries):
            own, num_pages = known[id(entry)], len(entry.request.page_ids)
            if own.num_pages != num_pages:
                self._put_pages(plan, own, entry.request)
            plan.options |= own.options
            is_prompt = number < len(prompts)
            if own.is_plain and not is_prompt:
                step.verified.append(own.drafted)
                step.made.append(own.drafted)
                rows.append((own.index, num_pages, own.end, *PLAIN_ROW))
            else:
                rows.append(self._row(step, entry, own, is_prompt))
        plan.least_standing, plan.trust = int(self._budget.least_standing() * MILLION), int(self._budget.trust * MILLION)
        self._budget.expect_drafts(plan.num_model_drafts, step.num_asked)
        plan.fields = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32).reshape(len(rows), NUM_FIELDS).T.copy()
        plan.num_prompts = len(prompts)
        plan.drafter_counts = plan.fields[DRAFTER_COUNT, : len(prompts)].tolist()
        plan.num_queries = 1 + max((len(v.sources) for v in step.verified[len(prompts) :]), default=0)
        # A step that drafts nothing, and computes no prompts, has no third phase.
        drafts = plan.num_model_drafts > 0 or plan.has_lookup or plan.num_prompts > 0
        plan.reports_drafts &= drafts
        self._grammars.put(step, self._known)
        if self._cascade_heads is not None and not prompts:
            self._put_prefixes(plan, entries)
        return step

    def _take(self, entry: Scheduled, plan: StepPlan) -> Known:
        """What is known of an entry's request, which is new and enters the request table in this step."""
        request = entry.request
        known = Known(self._free.pop(), self._drafters.place(request), self._end_of(request))
        self._known[request.request_id] = known
        has_lookup = known.place.has_lookup and (self._is_exact or request.grammar is not None)
        known.is_reported = request.is_prefill_only or has_lookup or (known.place.has_model and self._is_exact)
        has_drafter = known.place.has_model or known.place.has_lookup or bool(known.place.host) or request.speculation.max_drafts > 0
        known.is_plain = not has_drafter and request.grammar is None and not request.is_prefill_only
        known.options = options_of(request, self._config.accept_policy).value
        # After a hand-off the drafter has seen the newest token too, at the end of the step that emitted it.
        is_handed = request.hand_off is not None
        if known.place.has_model:
            known.num_drafter_tokens = self._seen.count(request.page_ids, entry.begin + is_handed)
            known.is_followed = not is_handed or known.num_drafter_tokens > entry.begin
        known.is_admitted = is_handed
        plan.admissions.append(Arrival(self._admission(request, known), request.bad_word_ids))
        return known

    def _admission(self, request: Request, known: Known) -> Admission:
        params, options = request.params, known.options
        return Admission(
            index=known.index,
            token_ids=request.token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_total_tokens=known.end,
            is_greedy=is_deterministic(request),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=request.signed_seed,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            logit_bias=params.logit_bias,
            banned_ids=sorted(request.stop_ids),
            min_known=len(request.prompt_token_ids) + params.min_tokens,
            is_rejection=bool(options & Options.REJECTION),
            is_top_p=bool(options & Options.TOP_P),
            num_drafter_tokens=known.num_drafter_tokens,
        )

    def _end_of(self, request: Request) -> int:
        """The prompt's end is a step even where nothing is to follow it."""
        return min(len(request.prompt_token_ids) + max(1, request.params.max_tokens), self._max_model_len)

    def _put_pages(self, plan: StepPlan, known: Known, request: Request) -> None:
        """The pages that the workers' page table lacks."""
        begin = known.index * self._table_width
        for number in range(known.num_pages, len(request.page_ids)):
            plan.page_writes += (begin + number, request.page_ids[number])
        known.num_pages = len(request.page_ids)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _row(self, step: PlannedStep, entry: Scheduled, known: Known, is_prompt: bool) -> tuple[int, ...]:
        """One row's fields. Notes what the step will have drafted for the request at its end."""
        request, plan, place, budget = entry.request, step.plan, known.place, self._budget
        verified = Drafted() if is_prompt else known.drafted
        if verified.sources:
            verified.has_model = verified.sources[0] == self._drafters.model_name
            if len(verified.sources) > entry.max_drafts:
                verified.cut(entry.max_drafts)
            plan.has_trees |= request.speculation.num_nodes > 0 and bool(verified.sources)
        known.is_admitted = True
        model_limit, lookup_limit, alone = 0, -1, NEVER
        end, drafter_count, drafter_end = entry.begin + entry.num_tokens, 0, known.num_drafter_tokens
        num_model = budget.num_model(request) if place.has_model else 0
        if num_model or (place.has_model and (is_prompt or known.is_followed)):  # else the model has nothing to do, as before
            drafter_count, drafter_end = self._count_drafter(entry, known, is_prompt, end, num_model)
            most = self._num_drafts_held(request, num_model) if entry.is_short else num_model
            if drafter_count < 0 and not most:  # it keeps up, which a step does that drafts
                plan.num_model_drafts = max(plan.num_model_drafts, 1)
            is_current = drafter_count < 0 or (is_prompt and drafter_end == end + entry.emits)
            if most and is_current and entry.emits:
                model_limit = most
                plan.num_model_drafts = max(plan.num_model_drafts, model_limit)
                step.num_asked += 1
                step.is_catching_up |= len(request.token_ids) - known.num_drafter_tokens > 1 + MAX_DRAFTS
        is_left_out = place.has_lookup and bool(place.host) and not budget.settle_lookup(request)
        if place.has_lookup and not is_left_out and entry.emits and (limit := min(budget.limit(request), MAX_DRAFTS)):
            lookup_limit = limit
            if model_limit or self._is_exact:  # else there is nothing in the place of which it would draft
                alone = budget.alone_score(request, model_limit, limit)
                if drafter_count > MAX_LAG and self._is_exact:
                    alone = NEVER  # the model follows so much whatever the lookup finds
            plan.has_lookup = True
            plan.has_lookup_alone |= alone < NEVER
        known.drafted = Drafted(self._sources(model_limit, lookup_limit), alone, num_model=model_limit)
        # To copy and read it takes the host as long as to plan a row does.
        if not plan.reports_drafts:
            plan.reports_drafts = known.is_reported or drafter_count != 0 or model_limit > 0 or (not is_left_out and self._joins_host(request, known))
        step.verified.append(verified)
        step.made.append(known.drafted)
        first, count = (entry.begin, entry.num_tokens) if is_prompt else (-1, 1)
        if is_prompt:
            plan.prompt_seq_lens.append(end)
            plan.drafter_seq_lens.append(drafter_end if drafter_count else 0)
            last = len(request.prompt_token_ids) - 1
            if request.scores_prompt and entry.begin < last:
                plan.scored.append((len(plan.prompt_seq_lens) - 1, min(end, last) - entry.begin))
        head = (known.index, len(request.page_ids), known.end, first, count, int(entry.emits), len(verified.sources))
        return (*head, drafter_count, model_limit, lookup_limit, alone, *NO_PREFIX_NO_MASKS)

    def _sources(self, model_limit: int, lookup_limit: int) -> tuple[str, ...]:
        """Who makes each of a row's drafts."""
        found = self._made.get((model_limit, lookup_limit))
        if found is None:
            model, lookup = (self._drafters.model_name,) * model_limit, (self._drafters.lookup_name,) * (lookup_limit - model_limit)
            found = self._made[model_limit, lookup_limit] = model + lookup
        return found

    def _joins_host(self, request: Request, known: Known) -> bool:
        """Drafters of the host are to see what the step drafts, and may lengthen or replace it."""
        place = known.place
        return bool(place.host) and known.has_own_drafts and (place.waits or self._budget.waits(request))

    def _num_drafts_held(self, request: Request, num_model: int) -> int:
        """Of a request whose pages hold its newest token, and maybe no more: of a block's rows none may lack a place."""
        end = request.num_computed_tokens + request.num_tokens_ahead + 1 + self._num_block_rows
        return min(num_model, 1) if not self._num_block_rows or end <= len(request.page_ids) * self._page_size else 0

    def _count_drafter(self, entry: Scheduled, known: Known, is_prompt: bool, end: int, num_model: int) -> tuple[int, int]:
        """DRAFTER_COUNT of a row, and the tokens that the model drafter has computed after it where the host names them."""
        request = entry.request
        if not request.speculation.num_speculative_tokens:
            return 0, known.num_drafter_tokens
        if is_prompt:
            wanted = end + entry.emits
            count = min(wanted - known.num_drafter_tokens, self._max_drafter_tokens)
            is_spared = entry.is_decoding or self._budget.leaves_model(request) or (self._is_exact and wanted - known.num_drafter_tokens <= MAX_LAG)
            if not num_model and is_spared:
                count = 0  # it may not be worth its time for as long as the request runs, and catches up where it is
            begin, after = known.num_drafter_tokens, known.num_drafter_tokens + count
            known.is_followed = after == wanted
            if not (self._is_exact and entry.emits):  # there the step may spare the model what its lookup drafts alone: its outcome says
                known.num_drafter_tokens = after
                self._seen.note(request.page_ids, begin, after)
            return count, after
        if not num_model and self._budget.keeps_up and known.is_followed:
            return -1, known.num_drafter_tokens
        known.is_followed = num_model > 0 and (known.is_followed or self._is_exact)
        return (-1 if known.is_followed else 0), known.num_drafter_tokens

    def _put_prefixes(self, plan: StepPlan, entries: Sequence[Scheduled]) -> None:
        assert self._cascade_heads is not None
        groups = find_shared([e.request for e in entries], self._page_size, plan.num_queries, self._cascade_heads)
        for members, length in groups:
            plan.fields[PREFIX_GROUP, members], plan.fields[PREFIX_LEN, members] = members[0], length
        plan.has_prefixes = bool(groups)

    def late_masks(self, step: PlannedStep) -> np.ndarray:
        """Those that a plan awaits [M, W] int32, once the step before it was booked."""
        return self._grammars.fill(step, self._known)

    # -- its outcome --------------------------------------------------------------------------------------------------

    def read(self, step: PlannedStep, number: int, outcome: Outcome) -> list[str]:
        """Notes one row's outcome, before its tokens are booked -> who made each of the drafts that it verified."""
        entry = step.entries[number]
        request, verified, made = entry.request, step.verified[number], step.made[number]
        if made is verified:
            return []  # a plain row
        model, lookup = self._drafters.model_name, self._drafters.lookup_name
        if outcome.lookup_score or outcome.draft_chances is not None:
            made.note(outcome.lookup_score, outcome.draft_chances, model, lookup)
        who = verified.who(outcome.num_drafts, lookup)
        known = self._known.get(request.request_id)
        if known is None:
            return who
        drafts, known.next_drafts = known.next_drafts, outcome.next_drafts
        known.knows_drafts = step.plan.reports_drafts or not made.sources or not (step.plan.num_model_drafts or step.plan.has_lookup)
        if request.grammar is not None and verified.token_ids is not None and outcome.token_ids:
            self._grammars.note(known, who[: outcome.num_accepted].count(SOURCE), len(outcome.token_ids))
        if request.speculation.num_nodes and len(outcome.draft_chances or ()) >= len(outcome.next_drafts):
            made.parents = outcome.next_parents or list(range(-1, len(outcome.next_drafts) - 1))
        if known.place.has_model and entry.emits and outcome.num_drafter_tokens:
            self._note_drafter(request, known, outcome)
        can_learn = entry.is_decoding and (bool(verified.parents) or not request.speculation.num_nodes)
        if can_learn and self._budget.note_verified(request, len(who)):
            chain, tree = verified.judge(len(who), model, lookup), None
            if verified.parents:
                path = follow(drafts[: len(chain)], verified.parents, outcome.token_ids[: outcome.num_accepted])
                tree = Branches(verified.parents[: len(chain)], path)
            is_alone = verified.has_model and verified.is_alone
            has_model = verified.has_model and not is_alone
            more = {"is_alone": is_alone, "asked_host": verified.evidence is not None, "has_step": verified.has_step}
            self._budget.learn(request, chain, outcome.num_accepted, has_model, tree, matched=verified.score, **more)
        return who

    def observe(self, step: PlannedStep, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """After a step's rows were read."""
        self._drafting.observe(step, outcomes, times)

    def _note_drafter(self, request: Request, known: Known, outcome: Outcome) -> None:
        after = min(outcome.num_drafter_tokens, len(request.token_ids) + len(outcome.token_ids))
        if after > known.num_drafter_tokens:
            self._seen.note(request.page_ids, known.num_drafter_tokens, after)
            known.num_drafter_tokens = after

    # -- prompts that another node computes, or that are computed for one --------------------------------------------

    def count_usable(self, request: Request, page_ids: Sequence[int]) -> int:
        """Leading pages, of those that hold the beginning of a prompt, whose drafter's memory is right as well, where the request needs it."""
        if not self._drafters.place(request).has_model:
            return len(page_ids)
        return self._seen.count(page_ids, len(page_ids) * self._page_size) // self._page_size

    def take(self, request: Request, first_page: int, hand_off: HandOff) -> None:
        """Pages from first_page on are another node's, and so are the drafts of the request's first step here."""
        request.hand_off = hand_off
        if self._has_step_drafter:
            self._seen.reset(request.page_ids[first_page:])
            self._seen.note(request.page_ids, first_page * self._page_size, hand_off.outcome.num_drafter_tokens)

    def count_covered(self, step: PlannedStep, number: int) -> int:
        """Leading tokens of a prompt whose pages hold all that the request will need of them, once the step was read."""
        entry = step.entries[number]
        end = entry.begin + entry.num_tokens
        if not self._drafters.place(entry.request).has_model or not entry.request.speculation.num_speculative_tokens:
            return end
        return min(end, step.plan.drafter_seq_lens[number])

    def hand_off(self, step: PlannedStep, number: int, outcome: Outcome) -> tuple[list[str], int]:
        """Who made the drafts that a prompt's last step left, and the request's index where some were drawn from a distribution (else -1)."""
        request = step.entries[number].request
        known = self._known[request.request_id]
        is_drawn = bool(known.options & Options.REJECTION) and known.place.has_model
        return step.made[number].who(len(outcome.next_drafts), self._drafters.lookup_name), known.index if is_drawn else -1

    def keep_pages(self, entries: Sequence[Scheduled]) -> None:
        """After an outcome was booked: requests may have given pages back."""
        for entry in entries:
            request = entry.request
            known = self._known.get(request.request_id)
            if known is not None and known.num_pages > len(request.page_ids):
                known.num_pages = len(request.page_ids)
