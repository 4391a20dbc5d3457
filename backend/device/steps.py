"""Steps of requests that decode, on state that stays on the device.

A step is launched with what the host knows when the step before it still runs: which requests, which pages they may fill, how many drafts at
most. What they emit is read one step later (asynchronous scheduling, as in vLLM and SGLang). Tokens do not depend on it: sampling
depends on (seed, position, token) alone.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.config import MAX_SPECULATIVE_TOKENS, EngineConfig
from backend.core import Draft, Request, Scheduled, Verdict
from backend.device.bad_words import BadWords
from backend.device.extras import Extras, extras_of, read_scores
from backend.device.graphs import Landed, StepGraphs, StepShape
from backend.device.slots import MANY_SHARED_TOKENS, MIN_SHARED_TOKENS, Slot, Slots, Updates
from backend.drafters import Drafters
from backend.sampling import is_deterministic
from kernels.attention import MAX_PREFIX_ROWS
from kernels.state import Admission
from kernels.step import LOOKUP_LIMIT, MODEL_LIMIT, RESULT_HEAD

if TYPE_CHECKING:
    from backend.drafters.mtp import MtpDrafter
    from backend.drafters.mtp_service import MtpService
    from backend.runner import Runner


@dataclass(slots=True)
class Flight:
    """A step that was launched."""

    entries: list[Scheduled]
    draft_sources: list[list[str]]
    """[B]: of the most drafts that each entry verifies."""
    drafted: list[Request]
    """Requests that the model drafter follows to their newest token."""
    read: Callable[[], Landed]
    """Waits for the step."""


class DeviceSteps:
    """Launches and reads steps. Called by the engine thread only."""

    def __init__(self, config: EngineConfig, runner: Runner, mtp: MtpDrafter | None, service: MtpService | None) -> None:
        """mtp: the model drafter; service: what runs it, when that is this process."""
        self._graphs = StepGraphs(config, runner, service)
        self._mtp = mtp if service is not None else None
        self._speculation = config.speculative_config.resolve(None)
        self._policy = config.speculative_config.accept_policy
        self._is_cascade = config.cascade_attention
        self._max_model_len = runner.max_model_len
        self._slots = Slots(config.max_batch_size)
        self._device_methods = {"none", "naive", "ngram", *(["mtp"] if service is not None else [])}

    def warm_up(self) -> None:
        """Captures the steps that requests with the server's own method will need."""
        own = self._speculation
        is_model = own.method == "mtp" and "mtp" in self._device_methods
        num_model = own.num_model_steps if is_model else 0
        is_lookup = own.method == "ngram" or (is_model and own.mtp_strategy == "with_ngram")
        most = own.num_speculative_tokens if is_lookup else num_model
        # Fewer drafts than the most are for large batches and the ends of requests: there a step may be a little wider than it has to be.
        counts = sorted({count for count in (1, 2, 3, 5, 7, 11) if count < most} | {most})
        kinds = [(1, 0, False), (1, num_model, is_lookup), *((1 + n, min(n, num_model), is_lookup) for n in counts)]
        self._graphs.warm_up(list(dict.fromkeys(kinds)))

    # -- which requests -------------------------------------------------------------------------------------------------

    def takes(self, entry: Scheduled) -> bool:
        """Whether an entry decodes in these steps: not prompts, and not what the device cannot do."""
        request = entry.request
        if entry.num_tokens != 1:
            return False
        return self._slots.get(request) is not None or (entry.emits and request.num_output_tokens > 0 and self._is_able(request))

    def _is_able(self, request: Request) -> bool:
        return self._policy in ("normal", "simulated") and BadWords.fits(request.bad_word_ids)

    def is_ready(self, request: Request, wants_drafts: bool) -> bool:
        """Whether the next step can be launched before the one under way is read."""
        slot = self._slots.get(request)
        return request.num_steps_ahead == 0 or (slot is not None and self._is_current(request, slot, wants_drafts))

    def _is_current(self, request: Request, slot: Slot, wants_drafts: bool) -> bool:
        if not wants_drafts:
            return slot.has_tokens
        return slot.has_tokens and slot.is_followed and self._drafts_itself(request)

    def _drafts_itself(self, request: Request) -> bool:
        """Whether the device drafts for the request, without the host."""
        return request.speculation.method in self._device_methods and request.speculation.mtp_strategy != "with_suffix"

    # -- one step -------------------------------------------------------------------------------------------------------

    def launch(self, entries: list[Scheduled], drafters: Drafters) -> Flight:
        """Starts a step of these entries. Those that the device does not know yet are drafted for by `drafters` first."""
        slots = [self._slots.take(e.request) for e in entries]
        joining = [b for b, e in enumerate(entries) if not self._is_current(e.request, slots[b], e.max_drafts > 0)]
        shape_rows = self._graphs.rows_for(len(entries))
        updates = Updates(shape_rows, self._graphs.dummy_slot)
        if joining:
            self._join([entries[b] for b in joining], [slots[b] for b in joining], drafters, updates)
        sources = [slot.draft_sources[: entry.max_drafts] for entry, slot in zip(entries, slots)]
        rows = [self._describe(entry, slot, len(own), updates) for entry, slot, own in zip(entries, slots, sources)]
        updates.put_rows(rows)
        drafted = [entry.request for entry, row in zip(entries, rows) if row[MODEL_LIMIT] > 0]
        num_queries, num_model = 1 + max(map(len, sources)), max(row[MODEL_LIMIT] for row in rows)
        has_prefixes = self._is_cascade and self._put_prefixes(entries, num_queries, updates)
        extras = Extras(functools.reduce(operator.or_, [slot.extras for slot in slots]))
        has_lookup = any(row[LOOKUP_LIMIT] > 0 for row in rows)
        shape = self._graphs.shape_for(StepShape(shape_rows, num_queries, num_model, has_lookup, has_prefixes, extras))
        return Flight(entries, sources, drafted, self._graphs.launch(shape, updates))

    def _put_prefixes(self, entries: list[Scheduled], num_queries: int, updates: Updates) -> bool:
        num_query_heads, num_kv_heads, _ = self._graphs.heads
        has_few_rows = num_queries * num_query_heads // num_kv_heads <= MAX_PREFIX_ROWS
        return updates.put_prefixes([e.request for e in entries], self._graphs.page_size, MIN_SHARED_TOKENS if has_few_rows else MANY_SHARED_TOKENS)

    def _join(self, entries: list[Scheduled], slots: list[Slot], drafters: Drafters, updates: Updates) -> None:
        """Tells the device what it does not know of these requests, and which drafts to verify first."""
        assert all(e.request.num_steps_ahead == 0 for e in entries), "a request joins while a step of it is under way"
        for entry, slot in zip(entries, slots):
            slot.extras = extras_of(entry.request, self._policy).value
            if not slot.has_tokens:
                self._graphs.bad_words.put(slot.number, entry.request.bad_word_ids)
        self._graphs.admit([self._admission(e.request, slot) for e, slot in zip(entries, slots) if not slot.has_tokens])
        draft = drafters.propose(entries)
        for b, (entry, slot, token_ids, sources) in enumerate(zip(entries, slots, draft.token_ids, draft.sources, strict=True)):
            if slot.extras & Extras.REJECTION:
                self._graphs.distributions.put(slot.number, draft.probs.get(b))
            updates.put_drafts(slot, token_ids, MAX_SPECULATIVE_TOKENS)
            slot.draft_sources = list(sources)
            slot.has_tokens = True
            slot.is_followed = self._mtp is None or entry.request.speculation.method != "mtp" or not self._mtp.is_behind(entry.request)

    def _admission(self, request: Request, slot: Slot) -> Admission:
        params, extras = request.params, slot.extras
        return Admission(
            slot=slot.number,
            token_ids=request.token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_total_tokens=self._end_of(request),
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
            is_rejection=bool(extras & Extras.REJECTION),
            is_top_p=bool(extras & Extras.TOP_P),
        )

    def _end_of(self, request: Request) -> int:
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self._max_model_len)

    def _describe(self, entry: Scheduled, slot: Slot, num_verified: int, updates: Updates) -> tuple[int, ...]:
        """One row's fields SLOT to LOOKUP_LIMIT. Notes what the device will have drafted for the request at the step's end."""
        request = entry.request
        speculation, page_ids = request.speculation, request.page_ids
        updates.put_pages(slot, page_ids, self._graphs.table_width)
        num_model, lookup_limit = 0, -1
        if entry.max_drafts and self._drafts_itself(request):
            if speculation.method == "mtp" and slot.is_followed:
                num_model = min(entry.max_drafts, speculation.num_model_steps)
            if entry.max_drafts > num_model and (speculation.method == "ngram" or speculation.mtp_strategy == "with_ngram"):
                lookup_limit = entry.max_drafts
        slot.draft_sources = ["mtp"] * num_model + ["ngram"] * (lookup_limit - num_model)
        if speculation.method == "mtp":
            slot.is_followed = num_model > 0
        if num_model:
            assert self._mtp is not None
            self._mtp.hand_over(request)
        return slot.number, len(page_ids), self._end_of(request), num_verified, num_model, lookup_limit

    def land(self, flight: Flight) -> tuple[Draft, Verdict, float]:
        """Waits for a step and reads what it decided; seconds are the device's."""
        landed = flight.read()
        draft = Draft([], [])
        verdict = Verdict([], [], [None] * len(flight.entries), [])
        for row, sources in zip(landed.rows, flight.draft_sources):
            num_emitted, num_accepted, num_drafts, is_broken = row[:RESULT_HEAD]
            # What was drafted and not accepted is known to the device alone, and nobody asks for it.
            draft.token_ids.append(row[RESULT_HEAD : RESULT_HEAD + num_accepted] + [-1] * (num_drafts - num_accepted))
            draft.sources.append(sources[:num_drafts])
            verdict.token_ids.append(row[RESULT_HEAD : RESULT_HEAD + num_emitted])
            verdict.num_accepted.append(num_accepted)
            verdict.is_broken.append(bool(is_broken))
        if landed.scores is not None:
            for b, entry in enumerate(flight.entries):
                if entry.request.params.logprobs is not None:
                    verdict.logprobs[b] = read_scores(landed.scores[b], verdict.token_ids[b], entry.request.params.logprobs)
        return draft, verdict, landed.seconds

    def follow(self, flight: Flight, is_open: Callable[[Request], bool]) -> None:
        """After a landed step's tokens are booked: what pages the requests kept, and what their drafter has seen."""
        for entry in flight.entries:
            slot = self._slots.get(entry.request)
            if slot is not None and is_open(entry.request):
                slot.num_pages = min(slot.num_pages, len(entry.request.page_ids))
        for request in flight.drafted:
            if self._mtp is not None and is_open(request):
                self._mtp.follow(request)

    def stop(self, request: Request) -> None:
        """A request ended, or gave its pages back."""
        self._slots.release(request)
