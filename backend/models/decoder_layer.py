"""One decoder layer on one rank: attention, then an MLP or a mixture of experts, of the kinds that its spec names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from backend.models.latent import LatentAttention
from backend.models.latent_spec import LatentSpec
from backend.models.layers import Weights
from backend.models.moe import Moe
from backend.models.moe_spec import MoeSpec
from backend.models.parts import Attention, Mlp
from backend.models.rope import Angles
from backend.models.spec import LayerSpec
from backend.parallel.ranks import await_rows
from kernels import ops

AttentionKinds = frozenset[tuple[int | None, float | None]]
"""Windows and caps of scores of layers that have either."""


class DecoderLayer:
    def __init__(self, spec: LayerSpec, weights: Weights, context_len: int | None = None) -> None:
        """context_len: the longest context; a window that holds it is none."""
        part = spec.attention
        self.attention = LatentAttention(part, spec, weights) if isinstance(part, LatentSpec) else Attention(part, spec, weights, context_len)
        self.mlp = Moe(spec.mlp, spec, weights) if isinstance(spec.mlp, MoeSpec) else Mlp(spec.mlp, spec, weights)

    def forward(
        self,
        x: torch.Tensor,
        angles: Angles,
        slots: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        plan: ops.Plan,
        attended: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], residual included; x is changed in place. attended [T, in]: what attention takes in x's place."""
        query = self.attention.append(x if attended is None else attended, angles, slots, cache)
        await_rows(self.finish(x, self.attention.attend(query, cache, plan)))
        return x

    def finish(self, x: torch.Tensor, found: torch.Tensor) -> Iterable[slice]:
        """Adds to x [T, hidden] in place what follows from what its queries found [T, H, D]: see `Ranks.add_product`."""
        return self.mlp.add(x, self.attention.o.add(x, found.flatten(1)))


def find_kinds(layers: Iterable[DecoderLayer]) -> AttentionKinds:
    parts = (layer.attention for layer in layers)
    kinds = {(part.window, part.soft_cap) for part in parts if isinstance(part, Attention)}
    return frozenset(kinds - {(None, None)})
