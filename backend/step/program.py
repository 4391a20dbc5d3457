"""The step: forward, decide, draft. Each phase is one function of a step's tensors, run eagerly or captured as a graph.

What one phase leaves to the next lies in the request table, the paged memory and the step's tensors, never on the host.
"""

from __future__ import annotations

import time

import torch

from backend.drafters.protocol import ATTENTION as DRAFTER_ATTENTION
from backend.drafters.protocol import HIDDEN, DrafterRows, StepDrafter
from backend.kv_store import KvStore
from backend.models import ATTENTION, Model, Wanted
from backend.speculative_config import SpeculativeConfig
from backend.step.bad_words import BadWords
from backend.step.block import BlockForward
from backend.step.distributions import Distributions
from backend.step.draft_masks import Grammars, mask_draft
from backend.step.options import Options
from backend.step.scores import score_emitted, score_prompt, score_width
from backend.step.tensors import REPORT_HEAD, StepShape, StepTensors, select_drafting
from backend.step.trees import TreeForward
from kernels import ops, step_rows
from kernels.request_table import RequestTable
from kernels.structs import (
    IS_REJECTION,
    LOOKUP_ALONE,
    LOOKUP_LIMIT,
    MASK,
    MAX_DEPTH,
    PREFIX_GROUP,
    PREFIX_LEN,
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
        self._drafter, self._max_model_len, self.dtype = drafter, max_model_len, dtype
        block = drafter.block if drafter is not None else None
        self._block = BlockForward(block, table, page_table, max_model_len, dtype) if block is not None else None
        self._tree: TreeForward | None = None
        if drafter is not None and config.tree is not None:
            self._tree = TreeForward(config, drafter, table, page_table, max_model_len, dtype)
        self.is_e4m3 = store.specs[ATTENTION].dtype == ops.E4M3
        """Whether the target's keys and values are."""
        planes = store.planes(ATTENTION)
        count = len(planes) // model.num_layers
        self._cache: list[tuple[torch.Tensor, ...]] = [tuple(planes[i : i + count]) for i in range(0, len(planes), count)]
        self._tap = store.rows(HIDDEN) if HIDDEN in store.specs else None
        self._policy = {"accept_all": Policy.ACCEPT_ALL, "reject_all": Policy.REJECT_ALL}.get(config.accept_policy, Policy.NORMAL)
        most = (config.num_model_steps or 1) if drafter is not None and config.tree is None else 0
        self.distributions = Distributions(table, config, most)
        self.bad_words = BadWords(table)
        self.rounds_prompts = False
        """Whether prompts' activations are rounded to 8 bits."""
        reports_chances = drafter is not None and table.device.type == "cpu" and config.tree is None
        self._chances = torch.zeros(table.size, table.max_drafts) if reports_chances else None
        self.masks = torch.empty(0, 0, dtype=torch.int32)
        """[M, V / 32] int32: the tokens that positions may choose, where the step has such rows. On a GPU graphs hold the address."""
        self.grammars: Grammars = {}
        """That the model drafter's drafts are to follow."""

    def run(self, step: StepTensors) -> list[float]:
        """All phases one after the other, on CPU -> when each of them began, and the last one ended."""
        times = [time.perf_counter()]
        self.forward(step)
        assert step.rows is not None
        # Nothing is left to compute where every request ended in the step before, whose tokens the host had not seen yet.
        phases = (self.decide, self.draft) if step.rows.packed.shape[1] else ()
        for phase in phases:
            times.append(time.perf_counter())
            phase(step)
        return [*times, time.perf_counter()]

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
    def attention_kinds(self) -> frozenset[tuple[int | None, float | None]]:
        """Windows and caps of scores that the target's layers have."""
        return self._model.attention_kinds

    # -- tensors ------------------------------------------------------------------------------------------------------

    def make_tensors(self, shape: StepShape, fields: torch.Tensor, rows: step_rows.StepRows | None = None) -> StepTensors:
        """fields: [NUM_FIELDS, B], where the plan's will be when the phases run; rows: to be shared with other phases' graphs."""
        table, store, batch = self._table, self._store, shape.batch
        prompt_rows, num_decoding = sum(shape.prompt_lens), batch - shape.num_prompts
        num_rows = prompt_rows + num_decoding * shape.num_queries
        sizes = StepSizes(
            batch=batch,
            num_prompts=shape.num_prompts,
            prompt_rows=prompt_rows,
            rows=num_rows,
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
        device = fields.device
        results = torch.zeros(batch, RESULT_HEAD + table.max_drafts + 1, dtype=torch.int32, device=device)
        step = StepTensors(shape, sizes, fields, results)
        if Options.LOGPROBS in shape.options:
            step.scores = results.new_zeros(batch, shape.num_queries, score_width(table.vocab_size))
        if shape.num_model_drafts:
            step.draft_packed = torch.zeros(3, batch, dtype=torch.long, device=device)
            step.draft_lens = results.new_zeros(batch)
        if shape.reports_drafts:
            step.report = results.new_zeros(batch, REPORT_HEAD + table.drafts.shape[1] * (1 + table.has_trees))
            step.chances = self._chances
        if device.type == "cuda":
            step.rows = rows or step_rows.StepRows.make(sizes, shape.num_prompts + num_decoding * shape.num_queries, device)
            self._plan_target(step, step.rows)
            if self._drafter is not None and self._drafts_with_model(shape):
                drafter_rows = sum(shape.drafter_counts) + num_decoding * self._count_known(shape)
                step.drafter_rows = step_rows.DrafterRows.make(sizes, drafter_rows, device)
                self._plan_drafter(step, step.drafter_rows)
                self._plan_drafts(step)
        return step

    @property
    def tree_widths(self) -> list[tuple[ops.Heads, tuple[int, ...]]]:
        """Of attention where queries are trees that the drafter computes: its heads, and how many queries a request has."""
        if self._tree is None or self._drafter is None or self._drafter.heads is None:
            return []
        return [(self._drafter.heads, self._tree.row_counts)]

    def _count_known(self, shape: StepShape) -> int:
        """Tokens of a decoding row that the model drafter may have to compute."""
        return shape.num_queries if self._tree is None or not shape.has_trees else min(shape.num_queries, 1 + self._tree.depth)

    @staticmethod
    def _drafts_with_model(shape: StepShape) -> bool:
        return shape.num_model_drafts > 0 or any(shape.drafter_counts)

    def _attend(
        self,
        step: StepTensors,
        cu_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_lens: tuple[int, ...],
        prompt_seq_lens: tuple[int, ...],
        heads: ops.Heads,
        num_queries: int | None = None,
        seen: torch.Tensor | None = None,
        *,
        is_e4m3: bool = False,
    ) -> ops.StepAttention:
        has_prefixes = step.shape.has_prefixes and heads == self._model.heads and num_queries is None
        if not any(prompt_lens):  # of prompts that are not the drafter's business: rows without queries
            prompt_lens = prompt_seq_lens = ()
        return ops.StepAttention(
            cu_query_lens=cu_rows,
            seq_lens=seq_lens,
            request_indices=step.indices,
            page_table=self._page_table,
            num_prompts=len(prompt_lens),
            num_prompt_rows=sum(prompt_lens),
            max_prompt_query_len=max(prompt_lens, default=0),
            max_prompt_seq_len=max(prompt_seq_lens, default=0),
            num_prompt_keys=sum(prompt_seq_lens),
            max_query_len=num_queries or step.shape.num_queries,
            max_seq_len=self._max_model_len,
            page_size=self._store.page_size,
            heads=heads,
            dtype=self.dtype,
            prefix_group=step.fields[PREFIX_GROUP] if has_prefixes else None,
            prefix_len=step.fields[PREFIX_LEN] if has_prefixes else None,
            seen=seen,
            is_e4m3=is_e4m3,
        )

    def _plan_target(self, step: StepTensors, rows: step_rows.StepRows) -> None:
        shape, lists = step.shape, (rows.cu_query_lens, rows.seq_lens)
        lens = shape.prompt_lens, shape.prompt_seq_lens
        step.attention = self._attend(step, *lists, *lens, self._model.heads, seen=rows.seen, is_e4m3=self.is_e4m3)

    def _plan_drafter(self, step: StepTensors, rows: step_rows.DrafterRows) -> None:
        assert self._drafter is not None
        shape, heads = step.shape, self._drafter.heads
        if heads is not None:
            width = 1 + MAX_DEPTH if shape.has_trees else None  # one that kernels are compiled for
            lists = (rows.cu_rows, rows.seq_lens, shape.drafter_counts, shape.drafter_seq_lens)
            step.drafter_attention = self._attend(step, *lists, heads, width)

    def _plan_drafts(self, step: StepTensors) -> None:
        """Of the forwards that make one draft more for each request."""
        if step.draft_lens is None or self._drafter is None or self._drafter.heads is None or self._block is not None or self._tree is not None:
            return
        ones = torch.arange(step.shape.batch + 1, dtype=torch.int32, device=step.fields.device)
        step.draft_attention = self._attend(step, ones, step.draft_lens, (), (), self._drafter.heads, 1)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, step: StepTensors) -> None:
        """The target's states of all rows; what is kept of the rows' tokens goes to their slots."""
        rows = step.rows = ops.prepare_step(self._table, step.fields, self._page_table, step.sizes, step.rows)
        if not rows.packed.shape[1]:
            return
        if step.attention is None:
            self._plan_target(step, rows)
        assert step.attention is not None
        step.attention.refresh()
        token_ids, positions, slots, tap_slots = rows.packed
        wanted = None
        if self._wants_few(step.shape):
            seen = None if rows.seen is None else rows.seen[rows.logit_rows]
            lists = (rows.cu_logit_rows, rows.seq_lens, (), ())
            step.wanted_attention = self._attend(step, *lists, self._model.heads, seen=seen, is_e4m3=self.is_e4m3)
            step.wanted_attention.refresh()
            wanted = Wanted(rows.logit_rows, step.wanted_attention)
        entering = dict.fromkeys(self._drafter.tapped_layers, slots) if self._drafter is not None else {}
        with ops.rounding_prompts(sum(step.shape.prompt_lens) if self.rounds_prompts else 0, len(token_ids)):
            step.hidden = self._model.forward(token_ids, positions, slots, self._cache, step.attention, wanted, entering)
        if self._tap is not None:
            kept = step.hidden if self._drafter is None else self._drafter.tap(step.hidden, entering)
            self._tap.index_copy_(0, tap_slots, kept)
        if self._drafter is not None and self._drafter.keeper is not None:
            own, drafter = step.sizes.page_stride, step.sizes.drafter_stride
            self._drafter.keeper.keep(entering, positions, slots // own * drafter + slots % own)

    def _wants_few(self, shape: StepShape) -> bool:
        """Whether the states of most rows are of no use: those of prompts but for the last, unless a drafter or scores read them."""
        is_read = self._drafter is not None and self._model.num_layers in self._drafter.tapped_layers
        return bool(shape.num_prompts) and self._tap is None and not is_read and not shape.scored

    # -- decide -------------------------------------------------------------------------------------------------------

    def decide(self, step: StepTensors) -> None:
        """What each request emits, by its parameters and strategy; it is in the request table afterwards, and in the results."""
        table, rows, options = self._table, step.rows, step.shape.options
        assert rows is not None
        indices, cu = step.indices, rows.cu_logit_rows
        is_all = not step.shape.num_prompts or self._wants_few(step.shape)
        logits = self._model.logits(step.hidden if is_all else step.hidden[rows.logit_rows])
        if Options.FLOAT32 in options:
            logits = logits.float()
        raw = logits.clone() if Options.LOGPROBS in options else logits
        if self._drafter is not None and self._drafter.memory is not None:
            self._drafter.memory.learn(rows.packed[0][rows.logit_rows], logits)
        if Options.MASKS in options:
            ops.mask_logits(logits, self.masks, step.fields[MASK], cu)
        if Options.BAD_WORDS in options:
            self.bad_words.ban(logits, indices, cu, step.shape.num_queries)
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

    def draft(self, step: StepTensors) -> None:
        """The drafts for the next step: a lookup's alone where it promises more, else the model's, lengthened by the lookup."""
        shape, table, fields = step.shape, self._table, step.fields
        is_alone = scores = None
        if shape.has_lookup_alone:
            scores = torch.zeros_like(step.indices)
            self._look_up(step, fields[LOOKUP_LIMIT], min_scores=fields[LOOKUP_ALONE], scores=scores)
            is_alone = ((scores >= fields[LOOKUP_ALONE]) & (fields[LOOKUP_LIMIT] >= 0)).int()
        if self._drafter is not None and self._drafts_with_model(shape):
            self._draft_with_model(step, is_alone)
        # Where a lookup was asked for its score already, only drafts of the model are left to lengthen.
        if shape.has_lookup and (is_alone is None or shape.num_model_drafts):
            limits, given = fields[LOOKUP_LIMIT], table.num_drafts[step.indices.long()]
            if is_alone is not None:
                limits = torch.where(is_alone != 0, -1, limits)
            self._look_up(step, limits, num_given=given)
        if step.report is not None:
            own = step.indices.long()
            step.report[:, 0] = table.num_drafter_tokens[own]
            step.report[:, 1] = 0 if scores is None else scores
            step.report[:, 2] = table.num_drafts[own]
            step.report[:, REPORT_HEAD:] = torch.cat([table.drafts[own], table.parents[own]], dim=1) if table.has_trees else table.drafts[own]

    def _look_up(
        self,
        step: StepTensors,
        limits: torch.Tensor,
        *,
        num_given: torch.Tensor | None = None,
        min_scores: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ) -> None:
        largest, least = self._config.max_ngram_size, self._config.min_ngram_size
        assert least is not None
        ops.draft_ngram(self._table, step.indices, limits, largest, least, num_given, min_scores, scores)

    def _draft_with_model(self, step: StepTensors, is_alone: torch.Tensor | None) -> None:
        table, drafter = self._table, self._drafter
        if step.fields.device.type == "cpu":
            # Nothing is captured here: the model is spared the requests that do not ask it, and catches up when they do.
            step, is_alone = select_drafting(step, is_alone), None
            if not step.shape.batch:
                return
        sizes, shape, fields = step.sizes, step.shape, step.fields
        assert drafter is not None and step.rows is not None
        known = step.drafter_rows = ops.prepare_drafter(table, fields, step.rows, self._page_table, sizes, step.drafter_rows)
        if not known.packed.shape[1]:  # they all ended in the step before, whose tokens the host had not seen yet
            return
        if step.drafter_attention is None:
            self._plan_drafter(step, known)
        if step.drafter_attention is not None:
            step.drafter_attention.refresh()
        states = drafter.advance(_rows_of(known.packed, step.drafter_attention), known.last_rows)
        if not shape.num_model_drafts:
            return
        if self._tree is not None:
            self._tree.draft(fields, known.packed[0][known.last_rows], states, shape.num_model_drafts, sizes)
            return
        if self._block is not None:
            newest = known.packed[0][known.last_rows]
            states = self._block.run(fields, newest, states, shape.num_model_drafts, sizes, is_alone)
        elif step.draft_attention is None:
            self._plan_drafts(step)
        packed, lengths = step.draft_packed, step.draft_lens
        assert packed is not None and lengths is not None
        is_ended, least = is_alone, self._config.min_draft_confidence
        chances, together = step.chances, torch.ones(len(step.indices) if step.chances is not None else 0)
        if chances is not None:
            chances[step.indices.long()] = 0
        for number in range(shape.num_model_drafts):
            if self._block is not None and least:
                is_ended = self._block.end(states, number, least, is_ended)
            logits = drafter.logits(states, number)
            if self.grammars:
                logits = mask_draft(logits, table, step.indices, number, self.grammars)
            if chances is not None:
                own = greatest_probability(logits)
                chances[step.indices.long(), number] = own
                together *= own
            chosen = self._choose_draft(step, logits, number)
            ops.append_draft(packed, lengths, table, fields, chosen, self._page_table, sizes, number, is_ended)
            if chances is not None and float(together.sum()) < shape.least_standing:
                break
            if number + 1 < shape.num_model_drafts:
                if step.draft_attention is not None:
                    step.draft_attention.refresh()
                # Layers' states are kept of known tokens alone, so drafts need no slots for them.
                rows = DrafterRows(packed[0], packed[1], packed[2], packed[2], packed[2], step.draft_attention)
                states = drafter.extend(rows, states, number + 1)
        if Options.REJECTION in shape.options:
            self.distributions.note_drawn(step.indices, is_alone)

    def _choose_draft(self, step: StepTensors, logits: torch.Tensor, number: int) -> torch.Tensor:
        """Draft `number` of each request [B] int32, of logits [B, V]."""
        table, options = self._table, step.shape.options
        if self._config.draft_sampling == "greedy":
            chosen = ops.argmax(logits).int()
        else:  # with the noise that the target will draw with at that place
            ones = torch.arange(len(logits) + 1, dtype=torch.int32, device=logits.device)
            chosen, _ = ops.choose(logits, table, step.indices, ones, ahead=number)
        if options & (Options.REJECTION | Options.TOP_P):
            chosen = self.distributions.draw(logits, step.indices, chosen, number, options)
        return chosen


def greatest_probability(logits: torch.Tensor) -> torch.Tensor:
    """[B, V] -> [B] float32, above 0."""
    return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).float().exp_().clamp_(min=1e-6)


def _rows_of(packed: torch.Tensor, attention: ops.StepAttention | None) -> DrafterRows:
    token_ids, positions, kv_slots, state_slots, before_slots = packed
    return DrafterRows(token_ids, positions, kv_slots, state_slots, before_slots, attention)
