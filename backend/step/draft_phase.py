"""The step's third phase: the drafts for the next one, by its model drafter, by its lookup, or by both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from backend.drafters.protocol import DrafterRows, StepDrafter
from backend.models.decoder_layer import AttentionKinds
from backend.speculative_config import SpeculativeConfig
from backend.step.attending import Attending
from backend.step.block import BlockForward
from backend.step.distributions import Distributions
from backend.step.draft_masks import Grammars, mask_draft
from backend.step.options import Options
from backend.step.standing import Standing
from backend.step.tapes import Tapes
from backend.step.tensors import REPORT_HEAD, Advanced, StepShape, StepTensors, select_drafting
from backend.step.trees import TreeForward
from kernels import ops, step_rows
from kernels.cpu_drafts import note_time
from kernels.request_table import RequestTable
from kernels.structs import LOOKUP_ALONE, LOOKUP_LIMIT, MAX_DEPTH
from kernels.tape import is_recording

Outputs = tuple[torch.Tensor, torch.Tensor]
"""Bounds and what drafts have together: see `Standing`."""


class DraftPhase:
    """Of one worker. What it leaves to the next step lies in the request table and in the drafter's memory."""

    def __init__(
        self,
        config: SpeculativeConfig,
        table: RequestTable,
        drafter: StepDrafter | None,
        attending: Attending,
        distributions: Distributions,
        tapes: Tapes | None = None,
    ) -> None:
        self._config, self._table, self._drafter, self._attending, self._distributions = config, table, drafter, attending, distributions
        self._page_table = attending.page_table
        sizes = attending.page_table, attending.max_model_len, attending.dtype
        block = drafter.block if drafter is not None else None
        self._block = BlockForward(block, table, *sizes) if block is not None else None
        self._tree = TreeForward(config, drafter, table, *sizes) if drafter is not None and config.tree is not None else None
        is_recurrent = drafter is not None and drafter.heads is not None and drafter.block is None
        self._tapes = tapes if is_recurrent else None
        self.grammars: Grammars = {}
        """That the model drafter's drafts are to follow."""

    @property
    def tree_widths(self) -> list[tuple[ops.Heads, tuple[int, ...]]]:
        """Of attention where queries are trees that the drafter computes: its heads, and how many queries a request has."""
        if self._tree is None or self._drafter is None or self._drafter.heads is None:
            return []
        return [(self._drafter.heads, self._tree.row_counts)]

    def block_attention(self, counts: Iterable[int]) -> list[tuple[ops.Heads, int, int, bool]]:
        """Of blocks of so many drafts: heads, queries of a row, rows of a request, and whether queries see those after them."""
        if self._drafter is None or self._block is None or self._drafter.block is None:
            return []
        sizes = sorted({own for count in counts if count for own in self._block.attention_sizes(count)})
        return [(self._drafter.block.block_heads, width, rows, is_whole) for width, rows, is_whole in sizes if width and rows]

    @property
    def block_kinds(self) -> AttentionKinds:
        """Windows and caps of scores that layers of blocks have."""
        return frozenset() if self._drafter is None or self._drafter.block is None else self._drafter.block.block_kinds

    @property
    def most_at_once(self) -> int:
        """Drafts that one forward makes at most, where a step decides how many; 0: where none does."""
        return self._drafter.max_drafts if self._drafter is not None and self._block is not None and self._block.varies else 0

    def asks_model(self, shape: StepShape) -> bool:
        """Whether the step's drafter has anything to compute."""
        return self._drafter is not None and shape.asks_model

    def count_known(self, shape: StepShape) -> int:
        """Tokens of a decoding row that the model drafter may have to compute."""
        return shape.num_queries if self._tree is None or not shape.has_trees else min(shape.num_queries, 1 + self._tree.depth)

    def plan_drafter(self, step: StepTensors, rows: step_rows.DrafterRows) -> None:
        assert self._drafter is not None
        shape, heads = step.shape, self._drafter.heads
        if heads is not None:
            width = 1 + MAX_DEPTH if shape.has_trees else None  # one that kernels are compiled for
            lists = (rows.cu_rows, rows.seq_lens, shape.drafter_counts, shape.drafter_seq_lens)
            step.drafter_attention = self._attending.plan(step, *lists, heads, width)

    def plan_drafts(self, step: StepTensors) -> None:
        """Of the forwards that make one draft more for each request."""
        if step.draft_lens is None or self._drafter is None or self._drafter.heads is None or self._block is not None or self._tree is not None:
            return
        ones = torch.arange(step.shape.batch + 1, dtype=torch.int32, device=step.fields.device)
        step.draft_attention = self._attending.plan(step, ones, step.draft_lens, (), (), self._drafter.heads, 1)

    def advance(self, step: StepTensors) -> None:
        """Has the model drafter compute the tokens that are known now; what drafts go on from is in `step.advanced`, if there is anything."""
        known = self.lay_out(step)
        if not known.packed.shape[1]:  # they all ended in the step before, whose tokens the host had not seen yet
            return
        if step.drafter_attention is None:
            self.plan_drafter(step, known)
        made = self.compute(known.packed, known.last_rows, step.drafter_attention)
        if step.advanced is None:
            step.advanced = made
        else:
            step.advanced.take(made)

    def lay_out(self, step: StepTensors) -> step_rows.DrafterRows:
        """The tokens that are known now, in `step.drafter_rows`."""
        assert step.rows is not None
        step.drafter_rows = ops.prepare_drafter(self._table, step.fields, step.rows, self._page_table, step.sizes, step.drafter_rows)
        return step.drafter_rows

    def compute(self, packed: torch.Tensor, last_rows: torch.Tensor, attention: ops.StepAttention | ops.SplitAttention | None) -> Advanced:
        """packed, last_rows: see `step_rows.DrafterRows`."""
        drafter = self._drafter
        assert drafter is not None
        if attention is not None:
            attention.refresh()
        states = self._advance(drafter, packed, last_rows, attention)
        is_asked = self._tree is not None or self._block is not None
        return Advanced(states, packed[0][last_rows] if is_asked else None)

    def _advance(
        self, drafter: StepDrafter, packed: torch.Tensor, last_rows: torch.Tensor, attention: ops.StepAttention | ops.SplitAttention | None
    ) -> list[torch.Tensor]:
        if self._tapes is None:
            return drafter.advance(_rows_of(packed, attention), last_rows)

        def bind(inputs: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
            return lambda: drafter.advance(_rows_of(inputs[0], attention), inputs[1])

        return list(self._tapes.run("advance", bind, [packed, last_rows], packed.shape[1], attention))

    def _extend(
        self, drafter: StepDrafter, packed: torch.Tensor, states: list[torch.Tensor], number: int, attention: ops.StepAttention | None
    ) -> list[torch.Tensor]:
        """States at the newest drafts, of which draft `number` is made."""
        if attention is not None and not is_recording():
            attention.refresh()

        def bind(inputs: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
            # Layers' states are kept of known tokens alone, so drafts need no slots for them.
            token_ids, positions, slots = inputs[0]
            return lambda: drafter.extend(DrafterRows(token_ids, positions, slots, slots, slots, attention), inputs[1:], number)

        inputs = [packed, *states]
        return list(bind(inputs)() if self._tapes is None else self._tapes.run(("extend", number), bind, inputs, packed.shape[1], attention))

    def _logits(self, drafter: StepDrafter, states: list[torch.Tensor], number: int) -> torch.Tensor:
        if self._tapes is None:
            return drafter.logits(states, number)
        (logits,) = self._tapes.run(("logits", number), lambda inputs: lambda: [drafter.logits(inputs, number)], states, len(states[0]))
        return logits

    def run(self, step: StepTensors) -> None:
        """The drafts for the next step: a lookup's alone where it promises more, else the model's, lengthened by the lookup. On a GPU the model
        drafter has come to the known tokens before, by `advance`."""
        shape, table, fields = step.shape, self._table, step.fields
        is_alone = scores = None
        if shape.has_lookup_alone:
            scores = torch.zeros_like(step.indices)
            self._look_up(step, fields[LOOKUP_LIMIT], min_scores=fields[LOOKUP_ALONE], scores=scores)
            is_alone = ((scores >= fields[LOOKUP_ALONE]) & (fields[LOOKUP_LIMIT] >= 0)).int()
        if self.asks_model(shape):
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
            self.advance(step)
        sizes, shape, fields, advanced = step.sizes, step.shape, step.fields, step.advanced
        if advanced is None or not shape.num_model_drafts:
            return
        assert drafter is not None
        states, newest = advanced.states, advanced.newest
        if self._tree is not None:
            assert newest is not None
            self._tree.draft(fields, newest, states, shape.num_model_drafts, sizes, step.chances)
            return
        if self._block is not None:
            assert newest is not None
            states = self._block.run(fields, newest, states, shape.num_model_drafts, sizes, is_alone)
        own = self._outputs_of(step)
        # On CPU what is chosen and how likely it is come from one pass over the logits, where nothing else is asked of them.
        is_likeliest = own is not None and (self._config.draft_sampling == "greedy" or table.are_greedy(step.indices))
        if own is not None and is_likeliest and not self.grammars and not shape.options & (Options.REJECTION | Options.TOP_P):
            self._chain_recorded(step, states, own)
        else:
            if step.draft_attention is None:
                self.plan_drafts(step)
            self._chain(step, states, is_alone, own, is_likeliest=is_likeliest)
        if Options.REJECTION in shape.options:
            self._distributions.note_drawn(step.indices, is_alone)

    def _chain_recorded(self, step: StepTensors, states: list[torch.Tensor], outputs: Outputs) -> None:
        """On CPU: `_chain`, of requests that get the likeliest drafts."""

        def bind(inputs: list[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
            (fields, packed, lengths, bounds, together), before = inputs[:5], inputs[5:]
            # A tape keeps it: nothing of this step is in it beyond what a chain reads.
            own = StepTensors(step.shape, step.sizes, fields, step.results, draft_packed=packed, draft_lens=lengths, chances=step.chances)
            own.draft_ends = step.draft_ends
            self.plan_drafts(own)
            if own.draft_attention is not None:
                own.draft_attention.refresh()

            def run() -> list[torch.Tensor]:
                self._chain(own, before, None, (bounds, together), is_likeliest=True)
                return [packed, lengths, together]

            return run

        assert step.draft_packed is not None and step.draft_lens is not None
        inputs = [step.fields, step.draft_packed, step.draft_lens, *outputs, *states]
        if self._tapes is None:
            bind(inputs)()
        else:
            self._tapes.run(("chain", step.shape.num_model_drafts), bind, inputs, step.shape.batch, ends=step.draft_ends)

    @staticmethod
    def _outputs_of(step: StepTensors) -> Outputs | None:
        """On CPU, of a drafter whose word is looked at: see `Standing`."""
        if step.chances is None:
            return None
        return torch.tensor([step.shape.trust, step.shape.least_standing]), torch.ones(step.shape.batch)

    def _chain(
        self, step: StepTensors, states: list[torch.Tensor], is_ended: torch.Tensor | None, outputs: Outputs | None, *, is_likeliest: bool
    ) -> None:
        """Draft after draft. is_ended [B] int32: where it is not 0 there are none."""
        table, drafter, shape, least = self._table, self._drafter, step.shape, self._config.min_draft_confidence
        packed, lengths = step.draft_packed, step.draft_lens
        assert drafter is not None and packed is not None and lengths is not None
        standing = None if step.chances is None or outputs is None else Standing(step.chances, step.indices, *outputs)
        is_drawn = self._config.draft_sampling != "greedy" and not (standing is not None and is_likeliest)
        ones = torch.arange(shape.batch + 1, dtype=torch.int32, device=packed.device) if is_drawn else None
        for number in range(shape.num_model_drafts):
            judged = self._block.judge(states, number) if self._block is not None and (least or standing is not None) else None
            if judged is not None and least:
                is_low = (judged < least).int()
                is_ended = is_low if is_ended is None else torch.maximum(is_ended, is_low)
            logits = self._logits(drafter, states, number)
            if self.grammars:
                logits = mask_draft(logits, table, step.indices, number, self.grammars)
            chosen = None
            if standing is not None:
                likeliest, own = ops.likeliest(logits)
                standing.note(number, own if judged is None else judged, is_ended)
                chosen = likeliest if is_likeliest else None
            chosen = self._choose_draft(step, logits, number, chosen, ones)
            ops.append_draft(packed, lengths, table, step.fields, chosen, self._page_table, step.sizes, number, is_ended)
            if step.fields.device.type == "cpu":
                note_time(step.draft_ends)
            if standing is not None and standing.is_enough():
                break
            if number + 1 < shape.num_model_drafts:
                states = self._extend(drafter, packed, states, number + 1, step.draft_attention)

    def _choose_draft(
        self, step: StepTensors, logits: torch.Tensor, number: int, chosen: torch.Tensor | None, ones: torch.Tensor | None
    ) -> torch.Tensor:
        """Draft `number` of each request [B] int32, of logits [B, V]. chosen: what is known to be the target's rule's; ones: where each request's row
        of logits begins, unless drafts are the likeliest anyway."""
        table, options = self._table, step.shape.options
        if chosen is None and ones is None:
            chosen = ops.argmax(logits).int()
        elif chosen is None:  # with the noise that the target will draw with at that place
            assert ones is not None
            chosen, _ = ops.choose(logits, table, step.indices, ones, ahead=number)
        if options & (Options.REJECTION | Options.TOP_P):
            chosen = self._distributions.draw(logits, step.indices, chosen, number, options)
        return chosen


def _rows_of(packed: torch.Tensor, attention: ops.StepAttention | ops.SplitAttention | None) -> DrafterRows:
    token_ids, positions, kv_slots, state_slots, before_slots = packed
    return DrafterRows(token_ids, positions, kv_slots, state_slots, before_slots, attention)
