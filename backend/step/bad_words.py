"""Bad words in a step: which token each row may not choose, since it would spell one after the tokens and drafts before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.request_state import RequestState

_ANY = -1


class BadWords:
    """The token sequences of each request: [S, N, L] int32, which end at the right. -1 before one: any token; at the end: no sequence.

    N and L grow to what the requests so far needed, so steps with bad words are never captured: graphs hold addresses.
    """

    def __init__(self, table: RequestState) -> None:
        self._table = table
        self._sequences = torch.full((table.size, 1, 2), _ANY, dtype=torch.int32, device=table.device)
        self._filled: dict[int, tuple[int, int]] = {}
        """N and L of the requests in the table that have some, by place: a step looks at no more than the most of these."""

    @torch.inference_mode()
    def put(self, index: int, sequences: Sequence[Sequence[int]]) -> None:
        """Those of a request that enters the table."""
        if not sequences and index not in self._filled:
            return
        self._filled.pop(index, None)
        if sequences:
            self._filled[index] = len(sequences), max(map(len, sequences))
            self._grow(*self._filled[index])
        count, length = self._sequences.shape[1:]
        own = torch.full((count, length), _ANY, dtype=torch.int32)
        for row, sequence in zip(own, sequences):
            row[length - len(sequence) :] = torch.tensor(sequence, dtype=torch.int32)
        if self._table.device.type == "cuda":
            own = own.pin_memory()  # so that nothing waits for the steps under way
        self._sequences[index].copy_(own, non_blocking=True)

    def _grow(self, count: int, length: int) -> None:
        size, old_count, old_length = self._sequences.shape
        if count <= old_count and length <= old_length:
            return
        count, length = (1 << (max(new, old) - 1).bit_length() for new, old in ((count, old_count), (length, old_length)))
        grown = torch.full((size, count, length), _ANY, dtype=torch.int32, device=self._table.device)
        grown[:, :old_count, length - old_length :] = self._sequences
        self._sequences = grown

    def _climb(self, indices: torch.Tensor, places: torch.Tensor, length: int) -> torch.Tensor:
        """[B, W, L - 1]: of trees, the draft so many before each row's choice; -1: the newest token, -2 the one before it, and so on."""
        parents, node = self._table.parents[indices].long(), (places - 1).expand(len(indices), -1)
        found = []
        for _ in range(length - 1):
            found.append(node)
            above = parents.gather(1, node.clamp(0, parents.shape[1] - 1))
            node = torch.where(node >= 0, above, node - 1)
        return torch.stack(found[::-1], dim=-1) if found else node[:, :, None][:, :, :0]

    def ban(self, logits: torch.Tensor, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, width: int) -> None:
        """Sets logits [R, V] to -inf, in place. Request b has rows cu[b] to cu[b + 1], at most `width`; row j has its first j drafts before it, or
        draft j - 1 and those that it follows, where drafts may be trees."""
        if not len(logits):  # chunks of prompts alone: nobody chooses
            return
        table, indices = self._table, request_indices.long()
        num_sequences, length = (max(sizes) for sizes in zip(*self._filled.values(), strict=True))
        sequences, known = self._sequences[:, :num_sequences, -length:][indices], table.num_tokens[indices].long()
        places = torch.arange(width, device=logits.device)
        own, back = indices[:, None, None], torch.arange(length - 1, 0, -1, device=logits.device)
        # [B, W, L - 1]: numbers of the drafts that lead to each row, negative ones for tokens before them.
        numbers = self._climb(indices, places, length) if table.has_trees else (places[:, None] - back).expand(len(indices), -1, -1)
        drafts = table.drafts[own, numbers.clamp(0, table.drafts.shape[1] - 1)]
        positions = known[:, None, None] + numbers
        tokens = table.tokens[own, positions.clamp(0, table.max_len - 1)]
        before = torch.where(numbers >= 0, drafts, tokens).masked_fill_(positions < 0, -2)
        spelled = sequences[:, None, :, :-1]  # [B, 1, N, L - 1]
        is_match = ((spelled == before[:, :, None, :]) | (spelled == _ANY)).all(dim=-1)
        banned = sequences[:, None, :, -1].expand_as(is_match)
        is_row = places < cu_logit_rows.diff()[:, None]
        is_banned = is_match & (banned != _ANY) & is_row[:, :, None]
        rows = (cu_logit_rows[:-1, None] + places).clamp(max=len(logits) - 1)
        index = rows[:, :, None].long() * logits.shape[1] + banned.clamp(min=0)
        least = torch.where(is_banned, float("-inf"), float("inf")).to(logits.dtype)
        logits.view(-1).scatter_reduce_(0, index.flatten(), least.flatten(), "amin")
