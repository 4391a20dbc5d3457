"""The step: forward, decide, draft. Each phase is one function of a step's tensors, run eagerly or captured as a graph.

What one phase leaves to the next lies in the request table, the paged memory and the step's tensors, never on the host.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

import torch

from backend.drafters.protocol import ATTENTION as DRAFTER_ATTENTION
from backend.drafters.protocol import HIDDEN, StepDrafter
from backend.kv_store import KvStore
from backend.models import ATTENTION, Model, Wanted
from backend.models.decoder_layer import AttentionKinds
from backend.speculative_config import SpeculativeConfig
from backend.step.advancing import Advancing
from backend.step.attending import Attending
from backend.step.bad_words import BadWords
from backend.step.distributions import Distributions
from backend.step.draft_phase import DraftPhase
from backend.step.options import Options
from backend.step.pieces import Pieces
from backend.step.scores import score_emitted, score_prompt, score_width
from backend.step.shared_rows import NEED_ALL, choose_own_rows
from backend.step.tapes import Tapes, find_tapes
from backend.step.tensors import REPORT_HEAD, StepShape, StepTensors
from kernels import ops, step_rows
from kernels.request_table import RequestTable
from kernels.structs import (
    IS_REJECTION,
    MASK,
    RESULT_HEAD,
    Policy,
    StepSizes,
)


class Program:
    """The phases over one worker's model, memory and request table."""

    def __init__(
        self,
        config: SpeculativeConfig,
        model: Model,
        store: KvStore,
        table: RequestTable,
        page_table: torch.Tensor,
        drafter: StepDrafter | None,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        self._config, self._model, self._store, self._table, self._page_table = config, model, store, table, page_table
        self._drafter, self.dtype = drafter, dtype
        self.is_e4m3 = store.specs[ATTENTION].dtype == ops.E4M3
        """Whether the target's keys and values are."""
        planes = store.planes(ATTENTION)
        count = len(planes) // model.num_layers
        self._cache: list[tuple[torch.Tensor, ...]] = [tuple(planes[i : i + count]) for i in range(0, len(planes), count)]
        self._tap = store.rows(HIDDEN) if HIDDEN in store.specs else None
        self._policy = {"accept_all": Policy.ACCEPT_ALL, "reject_all": Policy.REJECT_ALL}.get(config.accept_policy, Policy.NORMAL)
        self.distributions = Distributions(table, config)
        self.bad_words = BadWords(table)
        self._attending = Attending(page_table, store.page_size, max_model_len, dtype, model.heads)
        self._tapes = find_tapes(model, dtype, table.device)
        self.drafting = DraftPhase(config, table, drafter, self._attending, self.distributions, self._tapes)
        self.rounds_activations = False
        """Whether inputs of products with e4m3 weights are rounded to e4m3, too."""
        reports_chances = drafter is not None and table.device.type == "cpu"
        self._chances = torch.zeros(table.size, table.max_drafts) if reports_chances else None
        self.masks = torch.empty(0, 0, dtype=torch.int32)
        """[M, V / 32] int32: the tokens that positions may choose, where the step has such rows. On a GPU graphs hold the address."""

    def finish(self, step: StepTensors) -> list[float]:
        """What follows the forward, on CPU -> when each phase began, and the last one ended."""
        assert step.rows is not None
        times = []
        # Nothing is left to compute where every request ended in the step before, whose tokens the host had not seen yet.
        phases = (self.decide, self.draft) if step.rows.packed.shape[1] else ()
        for phase in phases:
            times.append(time.perf_counter())
            phase(step)
        return [*times, time.perf_counter()]

    def has_recorded(self) -> bool:
        """Whether anything was, or was compared, since this was asked before: see `Tapes`."""
        return self._tapes is not None and self._tapes.take_news()

    @property
    def page_size(self) -> int:
        return self._store.page_size

    @property
    def all_heads(self) -> list[ops.Heads]:
        """Of the target and of the model drafter, where that has attention."""
        drafter = self._drafter
        own = None if drafter is None else drafter.heads if drafter.block is None else drafter.block.block_heads
        return [self._model.heads] + ([own] if own is not None else [])

    @property
    def all_kinds(self) -> list[AttentionKinds]:
        """Windows and caps of scores that layers have, likewise."""
        drafter = self._drafter
        return [self._model.attention_kinds] + ([drafter.attention_kinds] if drafter is not None and len(self.all_heads) > 1 else [])

    def score_nothing(self, count: int) -> None:
        """Scores of so many rows, so that what computes them is there."""
        self._model.logits(torch.zeros(count, self._model.hidden_size, dtype=self.dtype, device=self._table.device))

    # -- tensors ------------------------------------------------------------------------------------------------------

    def make_tensors(self, shape: StepShape, fields: torch.Tensor, rows: step_rows.StepRows | None = None) -> StepTensors:
        """fields: [NUM_FIELDS, B], where the plan's will be when the phases run; rows: to be shared with other phases' graphs."""
        table, batch, device = self._table, shape.batch, fields.device
        results = torch.zeros(batch, RESULT_HEAD + table.max_drafts + 1, dtype=torch.int32, device=device)
        step = StepTensors(shape, self._sizes(shape), fields, results)
        if Options.LOGPROBS in shape.options:
            step.scores = results.new_zeros(batch, shape.num_queries, score_width(table.vocab_size))
        if shape.num_model_drafts:
            step.draft_packed = torch.zeros(3, batch, dtype=torch.long, device=device)
            step.draft_lens = results.new_zeros(batch)
        if shape.reports_drafts:
            step.report = results.new_zeros(batch, REPORT_HEAD + table.drafts.shape[1] * (1 + table.has_trees))
            step.chances = self._chances
        if device.type == "cuda":
            num_logit_rows = shape.num_prompts + (batch - shape.num_prompts) * shape.num_queries
            step.rows = rows or step_rows.StepRows.make(step.sizes, num_logit_rows, device)
            self._plan_target(step, step.rows)
            if self.drafting.asks_model(shape):
                self._plan_drafter(step)
                self.drafting.plan_drafts(step)
        return step

    def make_prompt_tensors(self, shape: StepShape, base: StepTensors, pieces: Pieces | None, advancing: Advancing | None) -> StepTensors:
        """On a GPU, of a step with prompts: lists of requests, and where results go, are those of `base`, of as many requests that decode, whose
        graphs follow. pieces, advancing: captured forwards of the target and of the drafter, where they have room for the step's rows."""
        assert base.rows is not None
        sizes = self._sizes(shape)
        packed = base.rows.packed.new_zeros(4, sizes.rows) if pieces is None else pieces.packed(sizes.rows)
        step = StepTensors(shape, sizes, base.fields, base.results, pieces, dataclasses.replace(base.rows, packed=packed))
        assert step.rows is not None
        step.attention = None if pieces is None else pieces.attention(shape.num_queries)
        if step.attention is None:
            self._plan_target(step, step.rows)
        if self._wants_few(shape):
            if base.wanted_attention is None:
                base.wanted_attention = self._plan_wanted(base, base.rows)
            step.wanted_attention = base.wanted_attention
        if advancing is not None and shape.num_drafter_rows:
            step.drafter_rows = advancing.rows(shape.batch, shape.num_drafter_rows)
        elif self.drafting.asks_model(shape):
            self._plan_drafter(step)
        return step

    def _sizes(self, shape: StepShape) -> StepSizes:
        table, store, prompt_rows = self._table, self._store, sum(shape.prompt_lens)
        return StepSizes(
            batch=shape.batch,
            num_prompts=shape.num_prompts,
            prompt_rows=prompt_rows,
            rows=shape.num_rows or prompt_rows + (shape.batch - shape.num_prompts) * shape.num_queries,
            max_tokens=table.max_len,
            max_drafts=table.drafts.shape[1],
            table_width=self._page_table.shape[1],
            page_size=store.page_size,
            page_stride=store.stride(ATTENTION),
            tap_stride=store.stride(HIDDEN) if self._tap is not None else store.page_size,
            drafter_stride=store.stride(DRAFTER_ATTENTION) if DRAFTER_ATTENTION in store.specs else store.page_size,
            scratch_page=store.scratch_page,
            dummy_index=table.dummy_index,
            has_trees=int(shape.has_trees),
        )

    def _plan_drafter(self, step: StepTensors) -> None:
        shape = step.shape
        num_rows = sum(shape.drafter_counts) + (shape.batch - shape.num_prompts) * self.drafting.count_known(shape)
        step.drafter_rows = step_rows.DrafterRows.make(step.sizes, num_rows, step.fields.device)
        self.drafting.plan_drafter(step, step.drafter_rows)

    def _plan_wanted(self, step: StepTensors, rows: step_rows.StepRows) -> ops.StepAttention:
        """Of the rows alone that logits are wanted of."""
        seen = None if rows.seen is None else rows.seen[rows.logit_rows]
        lists = (rows.cu_logit_rows, rows.seq_lens, (), ())
        return self._attending.plan(step, *lists, self._model.heads, seen=seen, is_e4m3=self.is_e4m3)

    def _plan_target(self, step: StepTensors, rows: step_rows.StepRows) -> None:
        shape, lists = step.shape, (rows.cu_query_lens, rows.seq_lens)
        lens = shape.prompt_lens, shape.prompt_seq_lens
        step.attention = self._attending.plan(step, *lists, *lens, self._model.heads, seen=rows.seen, is_e4m3=self.is_e4m3)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, step: StepTensors) -> None:
        """The target's states of all rows; what is kept of the rows' tokens goes to their slots."""
        rows = step.rows = ops.prepare_step(self._table, step.fields, self._page_table, step.sizes, step.rows)
        if not rows.packed.shape[1]:
            return
        if step.attention is None:
            self._plan_target(step, rows)
        attention, pieces = step.attention, step.pieces
        assert attention is not None
        if pieces is not None and pieces.split is not None:
            ops.split_rows(pieces.split, rows.cu_query_lens, rows.seq_lens, step.indices, step.sizes.num_prompts)
        else:
            attention.refresh()
        token_ids, positions, slots, tap_slots = rows.packed
        wanted = None
        if self._wants_few(step.shape):
            if step.wanted_attention is None:
                step.wanted_attention = self._plan_wanted(step, rows)
            step.wanted_attention.refresh()
            wanted = Wanted(rows.logit_rows, step.wanted_attention)
        entering = dict.fromkeys(self._drafter.tapped_layers, slots) if self._drafter is not None else {}
        with ops.rounding_activations(self.rounds_activations):
            if pieces is not None:
                step.hidden = pieces.forward(step.sizes.rows, attention, wanted, entering)
            elif self._tapes is not None and wanted is None:
                step.hidden = self._forward_recorded(self._tapes, rows.packed, attention, entering)
            else:
                step.hidden = self._model.forward(token_ids, positions, slots, self._cache, attention, wanted, entering)
        if self._tap is not None:
            kept = step.hidden if self._drafter is None else self._drafter.tap(step.hidden, entering)
            self._tap.index_copy_(0, tap_slots, kept)
        if self._drafter is not None and self._drafter.keeper is not None:
            own, drafter = step.sizes.page_stride, step.sizes.drafter_stride
            self._drafter.keeper.keep(entering, positions, slots // own * drafter + slots % own)

    def _forward_recorded(self, tapes: Tapes, packed: torch.Tensor, attention: ops.Plan, entering: dict[int, torch.Tensor]) -> torch.Tensor:
        tapped = tuple(entering)

        def bind(inputs: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
            token_ids, positions, slots, _ = inputs[0]

            def run() -> list[torch.Tensor]:
                own = dict.fromkeys(tapped, token_ids)
                hidden = self._model.forward(token_ids, positions, slots, self._cache, attention, None, own)
                return [hidden, *(own[layer] for layer in tapped)]

            return run

        hidden, *states = tapes.run("forward", bind, [packed], packed.shape[1], attention)
        entering.update(zip(tapped, states))
        return hidden

    def _wants_few(self, shape: StepShape) -> bool:
        """Whether the states of most rows are of no use: those of prompts but for the last, unless a drafter or scores read them."""
        return bool(shape.num_prompts) and not self._are_all_read and not shape.scored

    @property
    def remembers_rows(self) -> bool:
        """Whether what decides looks at the tokens of the rows that it decides on."""
        return self._drafter is not None and self._drafter.memory is not None

    @property
    def _are_all_read(self) -> bool:
        """Whether a drafter reads the states of all rows."""
        return self._tap is not None or (self._drafter is not None and self._model.num_layers in self._drafter.tapped_layers)

    def leave_to(self, step: StepTensors, base: StepTensors) -> None:
        """After a forward with prompts: the states that logits are made of go to where graphs of `base` read them."""
        assert step.rows is not None
        # By a copy: where the forward was captured, its states are in memory that `base` may have a part of since.
        states = step.hidden if self._wants_few(step.shape) else step.hidden[step.rows.logit_rows]
        base.hidden.copy_(states)

    def capture_pieces(self, max_rows: int, pool: tuple[int, int], max_batch: int, widths: Collection[int]) -> Pieces:
        """Forwards with prompts, of up to so many rows, captured in memory of a pool of graphs. widths: most queries of each of up to max_batch
        requests that decode, for which attention is captured with the rest where kernels find their work by themselves."""
        tapped = frozenset() if self._drafter is None else frozenset(self._drafter.tapped_layers)
        pieces = Pieces(self._model, self._cache, tapped, max_rows, self.dtype, self._table.device, pool, has_end=self._are_all_read)
        split = ops.SplitRows.make(max_batch, self._table.device)
        for width in widths:
            sizes = (max_rows, width, self._model.attention_kinds)
            attention = self._attending.split(split, self._model.heads, *sizes, is_e4m3=self.is_e4m3)
            if attention is not None:
                pieces.capture_attention(split, width, attention)
        with ops.rounding_activations(self.rounds_activations):
            pieces.capture_all()
        return pieces

    def capture_advancing(self, counts: Sequence[int], pool: tuple[int, int], max_batch: int, max_queries: int) -> Advancing | None:
        """The same of the model drafter, of these numbers of rows; None: there is none, or its attention cannot be captured."""
        if self._drafter is None or not counts:
            return None
        split, attention = ops.SplitRows.make(max_batch, self._table.device), None
        if self._drafter.heads is not None:
            attention = self._attending.split(split, self._drafter.heads, counts[-1], max_queries, self._drafter.attention_kinds)
            if attention is None:
                return None
        advancing = Advancing(self.drafting, split, attention, counts, pool)
        with ops.rounding_activations(self.rounds_activations):
            advancing.capture_all()
        return advancing

    # -- decide -------------------------------------------------------------------------------------------------------

    def decide(self, step: StepTensors) -> None:
        """What each request emits, by its parameters and strategy; it is in the request table afterwards, and in the results."""
        table, rows, options = self._table, step.rows, step.shape.options
        assert rows is not None
        indices, cu = step.indices, rows.cu_logit_rows
        is_all = not step.shape.num_prompts or self._wants_few(step.shape)
        states = step.hidden if is_all else step.hidden[rows.logit_rows]
        is_shared = not options & NEED_ALL and not self.remembers_rows and self._model.can_share_rows(len(states))
        logits = self._model.own_logits(states) if is_shared else self._model.logits(states)
        if Options.FLOAT32 in options:
            logits = logits.float()
        raw = logits.clone() if Options.LOGPROBS in options else logits
        if self._drafter is not None and self._drafter.memory is not None:
            is_own = torch.arange(len(logits), device=logits.device) < cu[-1]  # a GPU has room for more rows than there are
            self._drafter.memory.learn(rows.packed[0][rows.logit_rows], logits, is_own)
        if Options.MASKS in options:
            ops.mask_logits(logits, self.masks, step.fields[MASK], cu)
        if Options.BAD_WORDS in options:
            self.bad_words.ban(logits, indices, cu, step.shape.num_queries)
        if is_shared:
            chosen, is_broken = choose_own_rows(logits, table, indices, cu, len(states), self._model.ranks)
        else:
            chosen, is_broken = ops.process_and_choose(logits, table, indices, cu)
        if self._config.accept_policy == "simulated":
            ops.simulate_acceptance(chosen, table, indices, cu, self._config.simulated_acceptance_rate)
        path = None
        if table.has_trees:
            emitted, num_emitted, num_accepted, path = ops.verify_tree(chosen, table, indices, cu, self._policy)
        else:
            emitted, num_emitted, num_accepted = ops.verify_drafts(chosen, table, indices, cu, self._policy)
        if options & (Options.REJECTION | Options.TOP_P):
            verified = (emitted, num_emitted, num_accepted)
            self.distributions.verify(logits, indices, cu, rows.num_verified, step.shape.num_queries, options, verified)
            if path is not None:  # these drafts are chains
                is_chain = table.flags[indices.long()] & IS_REJECTION != 0
                path = torch.where(is_chain[:, None], torch.arange(path.shape[1], dtype=path.dtype, device=path.device), path)
        if path is not None and step.shape.has_trees:
            self._store.compact(rows.packed[2], step.sizes.page_stride, rows.cu_query_lens, path, num_accepted)
        ops.commit(emitted, num_emitted, table, indices)
        ops.pack_results(step.results, emitted, num_emitted, num_accepted, rows.num_verified, is_broken, cu)
        if step.scores is not None and len(raw):  # none: chunks of prompts alone
            score_emitted(step.scores, raw, emitted, cu, path)
        self._score_prompts(step)

    def _score_prompts(self, step: StepTensors) -> None:
        begins = [0]
        for count in step.shape.prompt_lens:
            begins.append(begins[-1] + count)
        for row, count in step.shape.scored:
            states = step.hidden[begins[row] : begins[row] + count]
            first = step.shape.prompt_seq_lens[row] - step.shape.prompt_lens[row] + 1
            following = self._table.tokens[step.indices[row].long()][first : first + count]
            step.prompt_scores[row] = score_prompt(states, following, self._model.logits, self._table.vocab_size)

    # -- draft --------------------------------------------------------------------------------------------------------

    def advance(self, step: StepTensors, advancing: Advancing | None = None) -> None:
        """On a GPU, before `draft`: the model drafter comes to the tokens that are known now. advancing: has a graph of so many rows."""
        if advancing is not None:
            advancing.run(step)
            return
        with ops.rounding_activations(self.rounds_activations):
            self.drafting.advance(step)

    def draft(self, step: StepTensors) -> None:
        """The drafts for the next step: a lookup's alone where it promises more, else the model's, lengthened by the lookup."""
        with ops.rounding_activations(self.rounds_activations):
            self.drafting.run(step)
