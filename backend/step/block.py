"""The forward of a block drafter: so many rows of each request at once, some of them of a mask token, after what its tokens left behind.

Shapes depend on the step's alone, and nothing comes to the host, so that it can be captured.
"""

from __future__ import annotations

import torch

from backend.drafters.protocol import BlockPass, DrafterRows
from backend.models.spec import BlockView
from backend.step.captured_shapes import WIDTHS
from kernels import ops
from kernels._load import is_compiling
from kernels.request_state import RequestState
from kernels.structs import DRAFTER_COUNT, INDEX, MODEL_LIMIT, NUM_PAGES, StepSizes


class BlockForward:
    """Lays a block's rows out over one worker's request table and pages, and runs them."""

    def __init__(self, block: BlockPass, table: RequestState, page_table: torch.Tensor, max_model_len: int, dtype: torch.dtype) -> None:
        self._block, self._table, self._page_table = block, table, page_table
        self._max_model_len, self._dtype = max_model_len, dtype
        self.varies = block.count_rows(1) != block.count_rows(2)
        """How many rows a block has goes by the drafts that a step makes."""
        self._plans: dict[tuple[int, int, BlockView], ops.StepAttention] = {}
        """On a GPU by batch, rows, and what these see: graphs hold the addresses of what they read."""

    def run(
        self,
        fields: torch.Tensor,
        newest: torch.Tensor,
        states: list[torch.Tensor],
        num_drafts: int,
        sizes: StepSizes,
        is_skipped: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """The states that drafts are chosen from. fields [NUM_FIELDS, B]; newest [B]: token ids; is_skipped [B]: other than 0: wants no drafts."""
        block = self._block
        count = block.count_rows(num_drafts)
        if not count:
            return block.compute(None, states, num_drafts)
        batch = fields.shape[1]
        positions, slots, ends = self._place(fields, count, sizes, is_skipped)
        token_ids = torch.full((batch, count), block.mask_token_id, dtype=torch.long, device=fields.device)
        if block.first == 0:
            token_ids[:, 0] = newest
        plans = {view: self._plan(fields[INDEX], ends, count, sizes, view) for view in block.views}
        token_ids, positions, slots = token_ids.flatten(), positions.flatten(), slots.flatten()
        # Nothing is kept of these rows, so they need no slots for states.
        rows = DrafterRows(token_ids, positions, slots, slots, slots, plans.get(BlockView.CAUSAL), plans)
        return block.compute(rows, states, num_drafts)

    def attention_sizes(self, num_drafts: int) -> set[tuple[int, int, bool]]:
        """Most queries of a row of the block's attention, rows of a request, and whether queries see those after them. A block is a request's last
        queries; but where each sees all of them without windows of their own, each is one that asks alone."""
        count = self._block.count_rows(num_drafts)
        return {(1, count, False) if view == BlockView.SHARED else (self._widen(count), 1, view == BlockView.WHOLE) for view in self._block.views}

    def _widen(self, count: int) -> int:
        """Most queries of rows that are no more: of what kernels are compiled for, as a request may choose how many drafts it has."""
        return next(width for width in WIDTHS if width >= count) if count and self.varies else count

    def judge(self, states: list[torch.Tensor], step: int) -> torch.Tensor | None:
        """See `BlockDrafter.judge`."""
        return self._block.judge(states, step)

    def _place(
        self, fields: torch.Tensor, count: int, sizes: StepSizes, is_skipped: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions and KV slots [B, N], and how many tokens the last row sees [B] int32.

        Requests that want no drafts compute on the scratch page, and so do rows past a request's pages or the context's end.
        """
        indices = fields[INDEX].long()
        known = self._table.num_tokens[indices].long()
        is_wanted = (indices != sizes.dummy_index) & (fields[DRAFTER_COUNT] != 0) & (fields[MODEL_LIMIT] > 0)
        if is_skipped is not None:
            is_wanted &= is_skipped == 0
        begins = torch.where(is_wanted, known - 1 + self._block.first, 0)
        places = begins[:, None] + torch.arange(count, device=fields.device)
        pages = places // sizes.page_size
        is_own = is_wanted[:, None] & (pages < fields[NUM_PAGES][:, None]) & (places < self._max_model_len)
        ids = self._page_table[indices[:, None], pages.clamp_(max=sizes.table_width - 1)]
        slots = torch.where(is_own, ids, sizes.scratch_page) * sizes.drafter_stride + places % sizes.page_size
        ends = (begins + count).clamp_(min=count, max=self._max_model_len)
        return places.clamp_(max=self._max_model_len - 1), slots, ends.int()

    def _plan(self, indices: torch.Tensor, ends: torch.Tensor, count: int, sizes: StepSizes, view: BlockView) -> ops.StepAttention:
        """Each of the rows that ask alone is at the end of them all."""
        block, device, key, is_alone = self._block, ends.device, (len(ends), count, view), view == BlockView.SHARED
        if is_alone:
            ends, indices = ends.repeat_interleave(count), indices.repeat_interleave(count)
        plan = self._plans.get(key)
        if plan is not None:
            plan.seq_lens.copy_(ends)
            plan.request_indices.copy_(indices)
        else:
            width = 1 if is_alone else count
            plan = ops.StepAttention(
                cu_query_lens=torch.arange(0, width * len(ends) + 1, width, dtype=torch.int32, device=device),
                seq_lens=ends,
                request_indices=indices.clone(),
                page_table=self._page_table,
                max_query_len=self._widen(width),
                max_seq_len=self._max_model_len,
                page_size=sizes.page_size,
                heads=block.block_heads,
                dtype=self._dtype,
                is_whole=view == BlockView.WHOLE,
            )
            if device.type == "cuda" and not is_compiling():  # else its kernels do nothing
                self._plans[key] = plan
        plan.refresh()
        return plan
