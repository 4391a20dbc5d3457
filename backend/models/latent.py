"""Multi-head latent attention on one rank (DeepSeek-V2, 2024, section 2.1). Heads are split over the ranks; latents are every rank's."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from backend.models.latent_spec import LatentSpec
from backend.models.layers import Part, Weights
from backend.models.parts import Residual, by_rows, optional_norm
from backend.models.rope import Angles, head_order
from backend.models.spec import LayerSpec
from backend.parallel.ranks import WHOLE
from kernels import ops


class LatentAttention:
    """Attention over paged latents; as `backend.models.parts.Attention` for whoever calls it."""

    def __init__(self, spec: LatentSpec, layer: LayerSpec, weights: Weights) -> None:
        self._eps, self._norm_eps, self._scale, self._rank = layer.eps, spec.norm_eps, spec.scale, spec.rank
        name, (_, _, size) = "num_attention_heads", spec.heads
        order = head_order(spec.rope, spec.rope.dim)
        # What turns lies behind what does not.
        query_order, down_order = (None if order is None else torch.cat([torch.arange(n), n + order]) for n in (spec.still_dim, spec.rank))
        self._size = size
        assert layer.input_norm is not None
        self.input_norm = weights.norm(layer.input_norm, layer.hidden_size, layer.norm_offset)
        self._latent_norm = weights.norm(spec.latent_norm, spec.rank)
        down = Part("latents", spec.down.out_features, spec.down.out_features, down_order, can_repeat=True)
        own, query = weights.ranks.part(spec.num_heads, name), Part(name, spec.query.out_features, size, query_order)
        self._query_norm = None
        if spec.query_down is None or spec.query_norm is None:
            self._num_query = (own.stop - own.start) * size
            self._down = weights.split_rows([spec.query, spec.down], [query, down])
        else:
            self._num_query = spec.query_down.out_features
            self._down = weights.split_rows([spec.query_down, spec.down], [Part("latents", self._num_query, self._num_query, can_repeat=True), down])
            self._query_norm = weights.norm(spec.query_norm, self._num_query)
            self._query = weights.split_rows([spec.query], [query])
        up = weights.whole(f"{spec.up.name}.weight", (spec.up.out_features, spec.up.in_features)).unflatten(0, (spec.num_heads, -1))[own]
        self._key_up, self._value_up = up[:, : spec.still_dim].contiguous(), up[:, spec.still_dim :].contiguous()
        self._absorb = self._key_up.transpose(1, 2).contiguous() if weights.device.type == "cuda" else None
        self.o = Residual(weights.split_columns(spec.o), weights.ranks, optional_norm(weights, layer.attention_post_norm, layer), layer.eps)
        self.cache_scales: ops.CacheScales | None = None
        """Of latents that are kept in e4m3."""

    def append(
        self, x: torch.Tensor, angles: Angles, slots: torch.Tensor, cache: tuple[torch.Tensor, ...], rows: Iterable[slice] = WHOLE
    ) -> torch.Tensor:
        """x [T, hidden] -> queries [T, H, D]; latents go to their slots. rows: of x, as soon as they can be read."""
        made = by_rows(self._down, self._project, x, rows)
        query, latents = made[:, : self._num_query], made[:, self._num_query :]
        if self._query_norm is not None:
            query = self._query.after_norm(query, self._query_norm, self._norm_eps)
        query, (pages,) = query.view(len(x), -1, self._size), cache
        own = angles.own
        ops.append_latent(query, latents, self._latent_norm, self._norm_eps, own.cos, own.sin, slots, pages, self.cache_scales)
        return query

    def _project(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return self._down.after_norm(x, self.input_norm, self._eps, out)

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: ops.Plan, out: torch.Tensor | None = None) -> torch.Tensor:
        """What the queries [T, H, D] find [T, H, V], in `out` if that is given."""
        (pages,) = cache
        return ops.latent_attention(query, pages, plan, self._key_up, self._value_up, self._scale, self._absorb, self.cache_scales, out)
