"""Attention of rows that decode in torch's own operations, for what no kernel computes: odd sizes of heads, windows, capped scores, float32 latents.

Shapes depend on the bounds of a step alone, so that it is captured as kernels are; every key up to the longest context is looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.reference.attention import token_rows
from kernels.reference.e4m3 import read_rows
from kernels.structs import MAX_NODES

ROWS, KEYS = 64, 16384
"""Rows, and keys of all of them, that are looked at together."""

Fetch = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Pages and places in them [t, S] -> keys [t, S, Hkv, D] and values [t, S, Hkv, V]."""


class PlainAttention:
    """Rows of a step as `kernels.step_attention.StepAttention` has them, of requests from `first` on."""

    def __init__(
        self,
        cu_query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        request_indices: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        max_seq_len: int,
        seen: torch.Tensor | None = None,
        ahead: int = 0,
    ) -> None:
        """seen [T] int64: see `kernels.step_rows.StepRows`; ahead: queries of a request at most, where each sees all of them; 0: they see those up to
        their own."""
        self._cu, self._seq_lens, self._indices, self._table = cu_query_lens, seq_lens, request_indices, page_table
        self._page_size, self._max_seq_len, self._seen, self._ahead = page_size, max_seq_len, seen, ahead
        self._rows: tuple[int, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._trees: _Trees | None = None

    def refresh(self) -> None:
        """The lengths that the tensors hold are others now."""
        self._rows = None

    def _locate(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of packed rows from `first` on: places in the page table [T], of the last key that each sees [T], and of each row itself [T]."""
        if self._rows is None or self._rows[0] != count:
            rows = torch.arange(first, first + count, dtype=torch.int32, device=self._cu.device)
            owners = torch.searchsorted(self._cu[1:], rows, right=True).clamp_(max=len(self._seq_lens) - 1)
            own = self._seq_lens[owners] - (self._cu[owners + 1] - rows)
            self._rows = (count, self._indices[owners].long(), self._seq_lens[owners] - 1 if self._ahead else own, own)
            if self._seen is not None:
                self._trees = _Trees(self._seen[first : first + count], self._cu[owners] - first, self._seq_lens[owners] - self._cu.diff()[owners])
        return self._rows[1:]

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        first: int,
        window: int | None,
        cap: float | None,
    ) -> torch.Tensor:
        """query [T, H, D], the packed rows from `first` on, over planes [P, page, Hkv, D] -> [T, H, D]."""
        num_kv, size = key_pages.shape[-2:]

        def fetch(pages: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._read(key_pages, pages, places, num_kv), self._read(value_pages, pages, places, num_kv)

        return self._attend(query, fetch, num_kv, size, first, size**-0.5, window, cap)

    def attend_latents(self, query: torch.Tensor, pages: torch.Tensor, rank: int, first: int, scale: float) -> torch.Tensor:
        """Absorbed queries [T, H, R + D] over pages [P, page, 1, R + D] -> weighted sums of latents [T, H, R]."""

        def fetch(numbers: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            latents = self._read(pages, numbers, places, 1)
            return latents, latents[..., :rank]

        return self._attend(query, fetch, 1, rank, first, scale, None, None)

    @staticmethod
    def _read(plane: torch.Tensor, pages: torch.Tensor, places: torch.Tensor, num_kv: int) -> torch.Tensor:
        rows = token_rows(plane)
        stride = plane.stride(0) // rows.shape[1]
        slots = (pages * stride + places).clamp_(0, len(rows) - 1)
        return read_rows(rows, slots, torch.float32).unflatten(-1, (num_kv, -1)).float()

    def _attend(
        self,
        query: torch.Tensor,
        fetch: Fetch,
        num_kv: int,
        value_size: int,
        first: int,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> torch.Tensor:
        num_rows, num_heads, _ = query.shape
        indices, lasts, places = self._locate(first, num_rows)
        out = query.new_empty(num_rows, num_heads, value_size)
        width, span = self._table.shape[1], self._max_seq_len if window is None else min(window, self._max_seq_len)
        trees = self._trees
        if trees is not None and window is not None:  # slots go on further than positions do
            span = min(span + MAX_NODES, self._max_seq_len)
        if window is not None:
            span = min(span + self._ahead, self._max_seq_len)
        for begin in range(0, num_rows, ROWS):
            rows = slice(begin, begin + ROWS)
            q, last = query[rows].float().unflatten(1, (num_kv, -1)), lasts[rows, None]
            table = self._table[indices[rows]].long()
            peak = q.new_full(q.shape[:-1], float("-inf"))
            total, sums = torch.zeros_like(peak), q.new_zeros(*q.shape[:-1], value_size)
            newest = places[rows, None] if trees is None else trees.positions[rows, None]
            low = torch.zeros_like(last) if window is None else (newest - window + 1).clamp_(min=0)  # the first key that each row sees
            count = min(KEYS // len(last), span)
            for start in range(0, span, count):
                numbers = low + torch.arange(start, start + count, device=query.device)
                pages = table.gather(1, (numbers // self._page_size).clamp_(max=width - 1))
                is_hidden = numbers > last
                if trees is not None:
                    is_hidden |= trees.hide(rows, numbers, window)
                keys, values = fetch(pages, numbers % self._page_size)
                values = values.masked_fill(is_hidden[..., None, None], 0)  # it may be no number
                scores = torch.einsum("tkgd,tskd->tkgs", q, keys) * scale
                if cap is not None:
                    scores = cap * (scores / cap).tanh()
                scores = scores.masked_fill(is_hidden[:, None, None], float("-inf"))
                larger = torch.maximum(peak, scores.amax(dim=-1))
                reference = torch.where(larger == float("-inf"), 0, larger)
                old, shares = (peak - reference).exp(), (scores - reference[..., None]).exp()
                total, peak = total * old + shares.sum(dim=-1), larger
                sums = sums * old[..., None] + torch.einsum("tkgs,tskd->tkgd", shares, values)
            out[rows] = (sums / total.clamp(min=1e-30)[..., None]).flatten(1, 2).to(out.dtype)
        return out


class _Trees:
    """What rows see of new tokens that are trees."""

    def __init__(self, seen: torch.Tensor, begins: torch.Tensor, first_new: torch.Tensor) -> None:
        """Each [T]; begins: the row that is the first of the owner's; first_new: the number of its token."""
        bits = torch.arange(MAX_NODES + 1, device=seen.device)
        self._is_seen = (seen[:, None] | 1) >> bits & 1 != 0
        self._depths = self._is_seen.sum(dim=1) - 1
        self._begins, self._first_new = begins.long(), first_new.long()
        self.positions = self._first_new + self._depths

    def hide(self, rows: slice, numbers: torch.Tensor, window: int | None) -> torch.Tensor:
        """[t, S] of rows and the numbers of tokens [t, S]."""
        ahead = numbers - self._first_new[rows, None]
        places = ahead.clamp(0, MAX_NODES)
        is_seen = self._is_seen[rows].gather(1, places) & (ahead <= MAX_NODES)
        if window is not None:  # of positions: those of a tree's tokens follow their depths
            owners = (self._begins[rows, None] + places).clamp_(max=len(self._depths) - 1)
            is_seen &= self._depths[rows, None] - self._depths[owners] < window
        return (ahead > 0) & ~is_seen
