"""The captured step: target forward, sampling, verification, the state's update and drafting as one CUDA graph per shape.

On CPU tensors the same operations run one after the other, as their twins in pure torch: that is how this path is tested without a GPU.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from backend.config import MAX_SPECULATIVE_TOKENS as MAX_DRAFTS
from backend.config import EngineConfig
from backend.device.bad_words import BadWords
from backend.device.extras import Distributions, Extras, score_emitted, score_width
from backend.device.slots import MIN_SHARERS, Updates
from backend.drafters.mtp_service import MtpService, Rows
from backend.runner import Runner
from kernels import distribution, ops
from kernels._load import rehearsing
from kernels.attention import AttentionPlan
from kernels.state import Admission, SlotTable
from kernels.step import LOOKUP_LIMIT, NUM_FIELDS, PREFIX_GROUP, PREFIX_LEN, RESULT_HEAD, SLOT, StepSizes

logger = logging.getLogger(__name__)

RESULT_WIDTH = RESULT_HEAD + MAX_DRAFTS + 1
NUM_BUFFERS = 3
"""Host buffers in turn: one is written while another's copy may be under way."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for."""

    batch: int
    num_queries: int
    """Most tokens of a request: its drafts and one more."""
    num_model_drafts: int
    has_lookup: bool
    has_prefixes: bool = False
    """Some rows share the beginning of their context, whose keys are read once."""
    extras: Extras = Extras.NONE


@dataclass(frozen=True, slots=True)
class Landed:
    """What the host reads of a step."""

    rows: list[list[int]]
    """[B] of results: see `kernels.step.pack_results`."""
    scores: np.ndarray | None
    """[B, W, 1 + 2 N] int32: see `backend.device.extras.score_emitted`; None when the step was made without."""
    seconds: float
    """Of the device."""


def batch_sizes(max_batch_size: int) -> list[int]:
    """Rows that steps are captured for: few enough to capture, and near enough to one another that few rows are idle."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, *range(40, 129, 8), *range(144, max_batch_size, 16)]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


class _Step:
    """One shape's tensors, whose addresses its graph holds."""

    def __init__(self, shape: StepShape, owner: StepGraphs) -> None:
        device, batch, rows = owner.device, shape.batch, shape.batch * shape.num_queries
        self.shape = shape
        self.sizes = StepSizes(
            batch=batch,
            rows=rows,
            max_tokens=owner.table.max_len,
            max_drafts=MAX_DRAFTS,
            table_width=owner.table_width,
            page_size=owner.page_size,
            scratch_page=owner.scratch_page,
            dummy_slot=owner.dummy_slot,
        )
        self.sizes_on_device = self.sizes.to(device)

        def make(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.fields = owner.staged[: NUM_FIELDS * batch].view(NUM_FIELDS, batch)
        self.slots = self.fields[SLOT]
        self.packed = make(3, rows, dtype=torch.long)
        self.cu_query_lens, self.seq_lens, self.num_verified = make(batch + 1), make(batch), make(batch)
        self.results = make(batch, RESULT_WIDTH)
        self.scores: torch.Tensor | None = None
        if Extras.LOGPROBS in shape.extras:
            self.scores = make(batch, shape.num_queries, score_width(owner.table.vocab_size))
            self.pinned_scores = [torch.zeros_like(self.scores, device="cpu", pin_memory=device.type == "cuda") for _ in range(NUM_BUFFERS)]
        if Extras.BAD_WORDS in shape.extras:
            owner.bad_words.reserve()
        if Extras.REJECTION in shape.extras:
            owner.distributions.reserve(max(shape.num_queries - 1, shape.num_model_drafts))
        prefixes = (self.fields[PREFIX_GROUP], self.fields[PREFIX_LEN]) if shape.has_prefixes else (None, None)
        self.plan = owner.plan(self.cu_query_lens, self.seq_lens, self.slots, shape.num_queries, owner.heads, prefixes)
        if shape.num_model_drafts:
            assert owner.service is not None
            heads = owner.service.heads
            self.drafter_packed, self.draft_packed = make(4, rows, dtype=torch.long), make(3, batch, dtype=torch.long)
            self.drafter_lens, self.draft_lens, self.last_rows = make(batch), make(batch), make(batch, dtype=torch.long)
            self.drafter_plan = owner.plan(self.cu_query_lens, self.drafter_lens, self.slots, shape.num_queries, heads)
            self.ones = torch.arange(batch + 1, dtype=torch.int32, device=device)
            self.draft_plan = owner.plan(self.ones, self.draft_lens, self.slots, 1, heads)
        self.graph: torch.cuda.CUDAGraph | None = None


class StepGraphs:
    """The device's state of all requests, and the steps on it. Used by the engine thread only, on the runner's stream."""

    def __init__(self, config: EngineConfig, runner: Runner, service: MtpService | None) -> None:
        """service: the model drafter, when it runs in this process."""
        self._runner = runner
        self.service = service
        if service is not None:
            service.open(runner.num_pages, runner.page_size)
        self._config = config.speculative_config
        self._is_cascade = config.cascade_attention
        self.device, self.page_size = runner.device, runner.page_size
        self.heads = runner.model.heads
        self.dummy_slot, self.scratch_page = config.max_batch_size, runner.num_pages
        self.table_width = -(-runner.max_model_len // self.page_size)
        self._batch_sizes = batch_sizes(config.max_batch_size)
        self.table = SlotTable(config.max_batch_size, runner.max_model_len, MAX_DRAFTS, runner.model.vocab_size, self.device)
        self.distributions = Distributions(self.table, config.speculative_config)
        self.bad_words = BadWords(self.table)
        self.page_table = torch.full((self.dummy_slot + 1, self.table_width), self.scratch_page, dtype=torch.int32, device=self.device)
        # Fields of the widest step, and per request a full table of pages and all drafts: what one launch can bring at most.
        most = config.max_batch_size * (NUM_FIELDS + 2 * (self.table_width + MAX_DRAFTS + 1))
        self.staged = torch.zeros(most, dtype=torch.int32, device=self.device)
        is_cuda = self.device.type == "cuda"
        self._pinned = [torch.zeros(most, dtype=torch.int32, pin_memory=is_cuda) for _ in range(NUM_BUFFERS)]
        self._results = [torch.zeros(config.max_batch_size, RESULT_WIDTH, dtype=torch.int32, pin_memory=is_cuda) for _ in range(NUM_BUFFERS)]
        self._turn = 0
        self._steps: dict[StepShape, _Step] = {}
        self._kinds: list[tuple[int, int, bool]] = []
        self._pool = torch.cuda.graph_pool_handle() if is_cuda else None

    def rows_for(self, num_requests: int) -> int:
        return next(size for size in self._batch_sizes if size >= num_requests)

    def shape_for(self, wanted: StepShape) -> StepShape:
        """The least of the kinds made in advance that such a step fits in, or its own; shared prefixes and extras have shapes of their own."""
        num_queries, num_model_drafts, has_lookup = wanted.num_queries, wanted.num_model_drafts, wanted.has_lookup
        fitting = [kind for kind in self._kinds if kind[0] >= num_queries and kind[1] >= num_model_drafts and kind[2] >= has_lookup]
        return StepShape(wanted.batch, *min(fitting), wanted.has_prefixes, wanted.extras) if fitting else wanted

    def plan(
        self,
        cu: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        num_queries: int,
        heads: tuple[int, int, int],
        prefixes: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ) -> AttentionPlan:
        """prefixes: the fields PREFIX_GROUP and PREFIX_LEN, when rows share beginnings."""
        num_query_heads, num_kv_heads, head_dim = heads
        return AttentionPlan(
            cu_query_lens=cu,
            seq_lens=lengths,
            page_table=self.page_table,
            table_rows=slots,
            max_query_len=num_queries,
            max_seq_len=self._runner.max_model_len,
            page_size=self.page_size,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=self._runner.dtype,
            prefix_group=prefixes[0],
            prefix_len=prefixes[1],
        )

    # -- launching and reading ------------------------------------------------------------------------------------------

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Fills the slots of new requests; part of the launch that follows."""
        self.table.admit(admissions, self._turn)

    @torch.inference_mode()
    def launch(self, shape: StepShape, updates: Updates) -> Callable[[], Landed]:
        """Starts a step; the result waits for it."""
        step = self._steps.get(shape) or self._make(shape)
        turn, self._turn = self._turn, (self._turn + 1) % NUM_BUFFERS
        words = torch.from_numpy(updates.as_array())
        pinned, results = self._pinned[turn], self._results[turn][: shape.batch]
        pinned[: len(words)] = words
        self.staged[: len(words)].copy_(pinned[: len(words)], non_blocking=True)
        begin = NUM_FIELDS * shape.batch
        for target, pairs in ((self.page_table, updates.pages), (self.table.drafts, updates.drafts), (self.table.num_drafts, updates.num_drafts)):
            ops.write_values(target, self.staged[begin:], len(pairs) // 2)
            begin += len(pairs)
        if step.graph is None:
            started = time.perf_counter()
            self._compute(step)
            landed = Landed(step.results.tolist(), None if step.scores is None else step.scores.numpy().copy(), time.perf_counter() - started)
            return lambda: landed
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step.graph.replay()
        end.record()
        results.copy_(step.results, non_blocking=True)
        scores = None
        if step.scores is not None:
            scores = step.pinned_scores[turn]
            scores.copy_(step.scores, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> Landed:
            copied.synchronize()
            return Landed(results.tolist(), None if scores is None else scores.numpy(), start.elapsed_time(end) / 1000)

        return read

    def _make(self, shape: StepShape) -> _Step:
        """A step's tensors, and on a GPU its graph."""
        step = self._steps[shape] = _Step(shape, self)
        if self.device.type == "cuda":
            step.fields.fill_(-1)
            step.slots.fill_(self.dummy_slot)
            self._compute(step)  # loads kernels, and lets cuBLAS choose
            self._compute(step)
            step.graph = torch.cuda.CUDAGraph()
            step.graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._compute(step)
            step.graph.capture_end()
        return step

    @torch.inference_mode()
    def warm_up(self, kinds: Sequence[tuple[int, int, bool]]) -> None:
        """Captures steps before requests need them, of all batch sizes. kinds: queries, model drafts and lookup of a StepShape.

        Those with extras are captured when requests first ask for them, with kernels that are compiled by then.
        """
        self._kinds = list(kinds)
        if self.device.type != "cuda":
            return
        started = time.perf_counter()
        cascade = [False, True] if self._is_cascade else [False]
        shapes = [
            StepShape(batch, *kind, has_prefixes)
            for batch in reversed(self._batch_sizes)
            for kind in kinds
            for has_prefixes in cascade
            if batch >= MIN_SHARERS or not has_prefixes
        ]
        with rehearsing(self.device):
            for shape in shapes:
                self._compute(_Step(shape, self))
            self._runner.rehearse()
            distribution.rehearse(self.device, self._runner.dtype, self.table.vocab_size)
        self._runner.rehearse()
        for number, shape in enumerate(shapes, 1):
            self._make(shape)
            if number % 32 == 0 or number == len(shapes):
                logger.info("captured %d of %d steps in %.1f s", number, len(shapes), time.perf_counter() - started)

    # -- the step -------------------------------------------------------------------------------------------------------

    def _compute(self, step: _Step) -> None:
        """One step of every row: what is captured."""
        table, cu, slots = self.table, step.cu_query_lens, step.slots
        state = (table.tokens, table.num_tokens, table.drafts, table.num_drafts, self.page_table)
        ops.prepare_step(step.packed, cu, step.seq_lens, step.num_verified, step.fields, *state, step.sizes, step.sizes_on_device)
        step.plan.refresh()
        packed = step.packed
        hidden = self._runner.compute(packed[0], packed[1], packed[2], step.plan)
        logits, extras = self._runner.model.logits(hidden), step.shape.extras
        raw = logits.clone() if Extras.LOGPROBS in extras else logits
        if Extras.BAD_WORDS in extras:
            self.bad_words.ban(logits, slots, cu, step.shape.num_queries)
        chosen, is_broken = ops.process_and_choose(logits, table, slots, cu)
        if self._config.accept_policy == "simulated":
            rate = self._config.simulated_acceptance_rate
            ops.simulate_acceptance(chosen, step.fields, cu, table.drafts, table.num_tokens, step.sizes, step.sizes_on_device, rate)
        emitted, num_emitted, num_accepted = ops.verify_drafts(chosen, table, slots, cu)
        if extras & (Extras.REJECTION | Extras.TOP_P):
            outcome = (emitted, num_emitted, num_accepted)
            self.distributions.verify(logits, slots, cu, step.num_verified, step.shape.num_queries, extras, outcome)
        ops.commit(emitted, num_emitted, table, slots)
        ops.pack_results(step.results, emitted, num_emitted, num_accepted, step.num_verified, is_broken, cu)
        if step.scores is not None:
            score_emitted(step.scores, raw, emitted, cu)
        if step.shape.num_model_drafts:
            self._draft(step, hidden, emitted, num_emitted)
        if step.shape.has_lookup:
            num_given = table.num_drafts[slots.long()]
            assert self._config.min_ngram_size is not None
            ops.draft_ngram(table, slots, step.fields[LOOKUP_LIMIT], self._config.max_ngram_size, self._config.min_ngram_size, num_given)

    def _draft(self, step: _Step, hidden: torch.Tensor, emitted: torch.Tensor, num_emitted: torch.Tensor) -> None:
        """The model's drafts for the next step: it sees what was emitted, then goes on by itself."""
        table, service = self.table, self.service
        assert service is not None
        sizes, on_device, known, rows = step.sizes, step.sizes_on_device, table.num_tokens, step.drafter_packed
        ops.prepare_drafter(
            rows, step.drafter_lens, step.last_rows, step.fields, step.cu_query_lens, emitted, num_emitted, known, self.page_table, sizes, on_device
        )
        step.drafter_plan.refresh()
        states = service.advance(Rows(rows[0], rows[1], rows[2], rows[3], step.drafter_plan), hidden, step.last_rows)
        rows = step.draft_packed
        for number in range(step.shape.num_model_drafts):
            logits = service.logits(states, number)
            if self._config.draft_sampling == "greedy":
                chosen = logits.argmax(dim=-1).int()
            else:  # with the noise that the target will draw with at that place
                later = copy.copy(table)
                later.num_tokens = known + number
                chosen, _ = ops.choose(logits, later, step.slots, step.ones)
            if step.shape.extras & (Extras.REJECTION | Extras.TOP_P):
                chosen = self.distributions.draw(logits, step.slots, chosen, number, step.shape.extras)
            ops.append_draft(
                table.drafts, table.num_drafts, rows, step.draft_lens, step.fields, chosen, known, self.page_table, sizes, on_device, number
            )
            if number + 1 < step.shape.num_model_drafts:
                step.draft_plan.refresh()
                states = service.extend(Rows(rows[0], rows[1], rows[2], rows[2], step.draft_plan), states, number + 1)
        if Extras.REJECTION in step.shape.extras:
            self.distributions.note_drawn(step.slots)
