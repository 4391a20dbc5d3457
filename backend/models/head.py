"""What scores the vocabulary from states after the final norm: all tokens, or those alone that drafts may be."""

from __future__ import annotations

import torch

from backend.models.layers import Weights
from backend.models.spec import DecoderSpec, Projection
from backend.quantization import count_written, make_linear
from kernels import ops


class Head:
    """Split over the ranks by `Ranks.vocabulary`."""

    def __init__(
        self, spec: DecoderSpec, weights: Weights, embedding: torch.Tensor, token_ids: torch.Tensor | None = None, *, keeps_embedding: bool = True
    ) -> None:
        """embedding [V, hidden]: the head's weights where the two are tied. token_ids [N] int64 on the host: tokens that are scored; None: all.
        keeps_embedding: it stays in memory anyway, whole."""
        self._ranks, self._soft_cap = weights.ranks, spec.logit_soft_cap
        self._count = spec.vocab_size if token_ids is None else len(token_ids)
        if spec.is_tied:
            own = weights.ranks.vocabulary(self._count)
            rows = own if token_ids is None else token_ids[own]
            name, scheme = f"{spec.head}.bias", weights.quantization.head_quant_type
            bias = weights.whole(name, (spec.vocab_size,))[rows] if name in weights.checkpoint else None
            weights.num_multiplied += (own.stop - own.start) * spec.hidden_size
            plain = embedding[rows] if keeps_embedding or token_ids is not None else embedding[rows].clone()
            self._linear = make_linear(plain if scheme is None else weights.round(spec.embedding, embedding, scheme).rows(rows), bias)
        else:
            self._linear = weights.head(Projection(spec.head, spec.vocab_size, spec.hidden_size), token_ids)
        self.num_written_weights = count_written(self._linear)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, N] in the model's dtype."""
        logits = self._ranks.gather_vocabulary(self._linear(hidden), self._count)
        return logits if self._soft_cap is None else ops.soft_cap(logits, self._soft_cap)

    def can_share(self, num_rows: int) -> bool:
        """Whether each rank had better have a share of so many rows."""
        return self._ranks.can_share_rows(num_rows, self._count)

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [S, N] of this rank's share of the rows, as `Ranks.share_rows` has it."""
        logits = self._ranks.share_rows(self._linear(hidden))
        return logits if self._soft_cap is None else ops.soft_cap(logits, self._soft_cap)
