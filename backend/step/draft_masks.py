"""Grammars over the model drafter's scores, on CPU: the host is there between two drafts, and says what it allows after the first.

On a GPU it is not: a draft is chosen on the device, in a captured graph, and what may follow it is known once the host has read it. To wait for
that at each draft would hold up every request of the batch. There drafts are cut when the next step is planned.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from backend.grammar import Matcher, fill_draft_masks
from kernels import ops
from kernels.request_state import RequestState

Grammars = Mapping[int, tuple[Matcher, int]]
"""By request index: where the request is in its grammar, and its tokens until there."""


def mask_draft(logits: torch.Tensor, table: RequestState, indices: torch.Tensor, number: int, grammars: Grammars) -> torch.Tensor:
    """The scores of each request's draft `number` [B, V], with -inf for what its grammar forbids after the drafts before; indices [B] int32."""
    asked, places = [], []
    for place, index in enumerate(indices.tolist()):
        if index in grammars:
            matcher, num_known = grammars[index]
            emitted = table.tokens[index, num_known : int(table.num_tokens[index])]
            asked.append((matcher, [*emitted.tolist(), *table.drafts[index, :number].tolist()]))
            places.append(place)
    masks, rows = fill_draft_masks(asked)
    if not len(masks):
        return logits
    starts = torch.full_like(indices, -1)
    starts[places] = torch.tensor(rows, dtype=starts.dtype)
    masked = logits.clone()
    ops.mask_logits(masked, torch.from_numpy(masks), starts, torch.arange(len(logits) + 1, dtype=torch.int32))
    # A drafter with a vocabulary of its own may know nothing that is allowed: its draft is cut later.
    return torch.where(masked.isfinite().any(1, keepdim=True), masked, logits)
