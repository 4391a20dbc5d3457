"""The rows of drafts that a recurrent drafter computes while a tree grows: they attend to the known tokens and to the drafts that lead to them.

Each level computes the drafts of all levels so far, behind a row that stands for the newest known token: rows lie in a tree as the target's do.
"""

from __future__ import annotations

import torch

from backend.drafters.protocol import DrafterRows, StepDrafter
from kernels import ops
from kernels.request_state import RequestState
from kernels.structs import INDEX, NUM_PAGES, StepSizes


class TreeRows:
    """Of one worker's requests. `begin` once a step, then `extend` for each level."""

    def __init__(
        self, drafter: StepDrafter, table: RequestState, page_table: torch.Tensor, num_computed: int, max_model_len: int, dtype: torch.dtype
    ) -> None:
        """num_computed: drafts that the drafter goes on from, at most."""
        self._drafter, self._table, self._page_table, self._max_model_len, self._dtype = drafter, table, page_table, max_model_len, dtype
        self._most = num_computed
        self._plans: dict[tuple[int, int], ops.StepAttention] = {}
        """On a GPU by batch and rows: graphs hold the addresses of what they read."""

    def begin(self, fields: torch.Tensor, newest: torch.Tensor, states: list[torch.Tensor], sizes: StepSizes) -> torch.Tensor:
        """[B]: the requests whose pages have room for all drafts. The others' trees are of no use.

        newest [B]: token ids, with the states [B, hidden] of one layer or of two: the first one's is what drafts go on from, in the last layer.
        """
        device, state = fields.device, states[0]
        self._num_layers = len(states)
        self._indices, self._sizes, num_pages = fields[INDEX], sizes, fields[NUM_PAGES].long()
        indices, self._known = self._indices.long(), self._table.num_tokens[self._indices.long()].long()
        is_fitting = self._known + self._most <= (num_pages * sizes.page_size).clamp(max=self._max_model_len)
        self._known = torch.where(is_fitting, self._known, 1)  # they compute on the scratch page
        numbers = self._known[:, None] + torch.arange(self._most, device=device)
        pages = self._page_table[indices[:, None], (numbers // sizes.page_size).clamp(max=self._page_table.shape[1] - 1)].long()
        pages = torch.where(is_fitting[:, None], pages, sizes.scratch_page)
        scratch = torch.full((len(indices), 1), sizes.scratch_page * sizes.drafter_stride, device=device)
        self._slots = torch.cat([scratch, pages * sizes.drafter_stride + numbers % sizes.page_size], dim=1)
        """Of all rows: the first one's keys and values are there already."""
        self._token_ids, self._states = newest.long()[:, None], state[:, None]
        """[B, rows so far], [B, 1 + rows before the last level, hidden]: the newest token's state, then the drafts'."""
        self._before = torch.zeros_like(self._token_ids)
        """[B, rows so far]: of each row the row before it."""
        self._depths, self._seen = torch.zeros_like(self._token_ids), torch.ones_like(self._token_ids)
        self._numbers = torch.full_like(self._token_ids, -1)
        return is_fitting

    def extend(self, token_ids: torch.Tensor, parents: torch.Tensor, numbers: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """States [B * m, hidden] of drafts [B, m] of one level; parents and numbers [B, m]: as trees number their drafts."""
        batch, count = token_ids.shape
        before = (self._numbers[:, None, :] == parents[:, :, None]).int().argmax(dim=2)
        first = self._token_ids.shape[1]
        own = torch.ones((), dtype=torch.long, device=token_ids.device) << torch.arange(first, first + count, device=token_ids.device)
        seen = self._seen.gather(1, before) | own
        self._token_ids, self._before, self._seen, self._numbers = (
            torch.cat(pair, dim=1) for pair in ((self._token_ids, token_ids), (self._before, before), (self._seen, seen), (self._numbers, numbers))
        )
        self._depths = torch.cat([self._depths, torch.full_like(token_ids, depth)], dim=1)
        num_rows = first + count
        previous = self._states.gather(1, self._before[:, :, None].expand(-1, -1, self._states.shape[2]))
        positions, slots = (self._known - 1)[:, None] + self._depths, self._slots[:, :num_rows]
        lists = (self._token_ids.flatten(), positions.flatten(), slots.flatten())
        rows = DrafterRows(*lists, lists[2], lists[2], self._plan(num_rows))
        made = self._drafter.extend(rows, [previous.flatten(0, 1)] * self._num_layers, depth)[-1].view(batch, num_rows, -1)
        self._states = torch.cat([self._states[:, :1], made[:, 1:]], dim=1)
        return [made[:, first:].flatten(0, 1)] * self._num_layers

    def _plan(self, num_rows: int) -> ops.StepAttention:
        batch, device, heads = len(self._indices), self._indices.device, self._drafter.heads
        assert heads is not None
        ends, plan = (self._known + num_rows - 1).int(), self._plans.get((batch, num_rows))
        if plan is not None and plan.seen is not None:
            for target, value in ((plan.seq_lens, ends), (plan.request_indices, self._indices), (plan.seen, self._seen.flatten())):
                target.copy_(value)
        else:
            plan = ops.StepAttention(
                cu_query_lens=torch.arange(0, num_rows * batch + 1, num_rows, dtype=torch.int32, device=device),
                seq_lens=ends,
                request_indices=self._indices.clone(),
                page_table=self._page_table,
                max_query_len=num_rows,
                max_seq_len=self._max_model_len,
                page_size=self._sizes.page_size,
                heads=heads,
                dtype=self._dtype,
                seen=self._seen.flatten(),
            )
            if device.type == "cuda":
                self._plans[batch, num_rows] = plan
        plan.refresh()
        return plan
