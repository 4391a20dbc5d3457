"""The request table: admission of requests, and what a step emitted put into it.

A request has one place from its admission until that is given to another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels._load import load
from kernels.reference import request_table as reference
from kernels.request_state import Admission, RequestState
from kernels.structs import MAX_NODES


class RequestTable(RequestState):
    """A RequestState that requests are admitted to."""

    def __init__(self, max_requests: int, max_len: int, max_drafts: int, vocab_size: int, device: torch.device, *, has_trees: bool = False) -> None:
        super().__init__(max_requests, max_len, max_drafts, vocab_size, device, has_trees=has_trees)
        self._staging: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def admit(self, admissions: Sequence[Admission], ring: int = 0) -> None:
        """Fills the places of a step's new requests: one copy and one kernel, with no wait.

        ring: index of the pinned buffer. It may be used again once the work of this call is done on the stream.
        """
        for admission in admissions:
            self.check(admission)
        if not admissions:
            return
        if self.device.type != "cuda":
            for admission in admissions:
                reference.admit(self, admission)
            return
        records = [self._record(admission) for admission in admissions]
        starts = np.cumsum([len(records), *(len(r) for r in records[:-1])], dtype=np.int32)
        words = np.concatenate([starts, *records])
        pinned, staged = self._staged(ring, len(words))
        pinned[: len(words)].numpy()[:] = words
        staged[: len(words)].copy_(pinned[: len(words)], non_blocking=True)
        load(self.device, "request_table", "admit")((len(records), 1), (1024, 1, 1), self.arguments, staged)

    def _record(self, admission: Admission) -> np.ndarray:
        head = np.array([admission.index, len(admission.token_ids)], np.int32)
        ids, biases = np.array(list(admission.logit_bias), np.int32), np.array(list(admission.logit_bias.values()), np.float32)
        tokens, banned = np.asarray(admission.token_ids, np.int32), np.asarray(admission.banned_ids, np.int32)
        return np.concatenate([head, self.pack_params(admission).view(np.int32), tokens, ids, biases.view(np.int32), banned])

    def _staged(self, ring: int, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pinned and the device buffer of a ring index, grown when a step admits more than any before."""
        if ring not in self._staging or len(self._staging[ring][0]) < num_words:
            size = max(1 << 16, 1 << (num_words - 1).bit_length())
            pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
            self._staging[ring] = (pinned, torch.empty(size, dtype=torch.int32, device=self.device))
        return self._staging[ring]


def commit(emitted: torch.Tensor, num_emitted: torch.Tensor, table: RequestState, request_indices: torch.Tensor) -> None:
    """Appends emitted [B, K + 1] (the first num_emitted [B]) to the tokens of request_indices [B], and to the counts of requests with penalties.

    What goes past a request's max_total_tokens is cut, there and in emitted (-1) and num_emitted. Drafts of rows that emit are used up.
    """
    if emitted.ndim != 2 or emitted.shape[1] > MAX_NODES + 1 or emitted.dtype != torch.int32:
        raise ValueError(f"emitted is {emitted.dtype} {list(emitted.shape)}; int32 [B, K + 1] with K + 1 <= {MAX_NODES + 1} is needed")
    batch = len(emitted)
    for name, tensor in (("num_emitted", num_emitted), ("request_indices", request_indices)):
        if tensor.shape != (batch,) or tensor.dtype != torch.int32:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; int32 [{batch}] is needed")
    if not emitted.is_cuda:
        return reference.commit(emitted, num_emitted, table, request_indices)
    kernel = load(emitted.device, "request_table", "commit")
    kernel((batch, 1), (32, 1, 1), emitted, num_emitted, table.arguments, request_indices, emitted.shape[1])
