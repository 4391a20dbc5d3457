"""Bad words in the captured step: which token each row may not choose, since it would spell one after the tokens and drafts before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.state import SlotTable

MAX_SEQUENCES, MAX_LENGTH = 512, 16
"""Of token sequences of a request (256 words have no more), and tokens of each. A request with longer ones runs outside the captured step."""
_ANY = -1


class BadWords:
    """The sequences of each slot: [S, MAX_SEQUENCES, MAX_LENGTH] int32, which end at the right. -1 before one: any token; at the end: no sequence."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._sequences: torch.Tensor | None = None
        self._filled: set[int] = set()
        """Slots that have sequences."""

    @staticmethod
    def fits(sequences: Sequence[Sequence[int]]) -> bool:
        return len(sequences) <= MAX_SEQUENCES and all(len(s) <= MAX_LENGTH for s in sequences)

    def reserve(self) -> torch.Tensor:
        """The memory of all slots. Captured steps hold its address: it is made once."""
        if self._sequences is None:
            shape = (self._table.num_slots, MAX_SEQUENCES, MAX_LENGTH)
            self._sequences = torch.full(shape, _ANY, dtype=torch.int32, device=self._table.device)
        return self._sequences

    @torch.inference_mode()
    def put(self, slot: int, sequences: Sequence[Sequence[int]]) -> None:
        """Those of a slot. Waits for the steps under way, unless there are none and were none."""
        if not sequences and slot not in self._filled:
            return
        (self._filled.add if sequences else self._filled.discard)(slot)
        own = torch.full((MAX_SEQUENCES, MAX_LENGTH), _ANY, dtype=torch.int32)
        for row, sequence in zip(own, sequences):
            row[MAX_LENGTH - len(sequence) :] = torch.tensor(sequence, dtype=torch.int32)
        self.reserve()[slot] = own.to(self._table.device)

    def ban(self, logits: torch.Tensor, slots: torch.Tensor, cu_query_lens: torch.Tensor, width: int) -> None:
        """Sets logits [R, V] to -inf, in place. Request b has rows cu_query_lens[b] to cu_query_lens[b + 1], at most `width`; row j has its
        first j drafts before it."""
        table, slots = self._table, slots.long()
        sequences, known = self.reserve()[slots], table.num_tokens[slots].long()
        places = torch.arange(width, device=logits.device)
        # [B, W, MAX_LENGTH - 1]: positions before the token that each row chooses.
        positions = known[:, None, None] + places[:, None] - torch.arange(MAX_LENGTH - 1, 0, -1, device=logits.device)
        own = slots[:, None, None]
        tokens = table.tokens[own, positions.clamp(0, table.max_len - 1)]
        drafts = table.drafts[own, (positions - known[:, None, None]).clamp(0, table.drafts.shape[1] - 1)]
        before = torch.where(positions >= known[:, None, None], drafts, tokens).masked_fill_(positions < 0, -2)
        spelled = sequences[:, None, :, :-1]  # [B, 1, N, MAX_LENGTH - 1]
        is_match = ((spelled == before[:, :, None, :]) | (spelled == _ANY)).all(dim=-1)
        banned = sequences[:, None, :, -1].expand_as(is_match)
        is_row = places < cu_query_lens.diff()[:, None]
        is_banned = is_match & (banned != _ANY) & is_row[:, :, None]
        rows = (cu_query_lens[:-1, None] + places).clamp(max=len(logits) - 1)
        index = rows[:, :, None].long() * logits.shape[1] + banned.clamp(min=0)
        least = torch.where(is_banned, float("-inf"), float("inf")).to(logits.dtype)
        logits.view(-1).scatter_reduce_(0, index.flatten(), least.flatten(), "amin")
