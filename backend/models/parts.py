"""Parts of decoder layers on one rank: grouped-query attention and gated MLPs, as a family's spec says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from backend.models.layers import Part, Weights
from backend.models.rope import Angles, head_order
from backend.models.spec import AttentionSpec, LayerSpec, MlpSpec
from backend.parallel.ranks import WHOLE, Ranks, await_rows
from backend.quantization import Linear
from backend.quantization.unfused import put
from kernels import ops


def activate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate | up [T, 2 N] -> act(gate) * up [T, N]."""
    return ops.silu_mul(gate_up) if activation in ("silu", "swish") else ops.gelu_mul(gate_up, is_exact=activation == "gelu")


def add_shares(x: torch.Tensor, y: torch.Tensor, ranks: Ranks, post_norm: torch.Tensor | None, eps: float) -> None:
    """Adds the sum of the ranks' y [T, hidden] to the residual stream x in place; post_norm: weights of a norm of what is added."""
    if post_norm is None:
        ranks.add_sum(x, y)
    else:
        x.add_(ops.rms_norm(ranks.all_reduce(y), post_norm, eps))


def by_rows(
    projection: Linear, compute: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor], x: torch.Tensor, rows: Iterable[slice]
) -> torch.Tensor:
    """compute(x) [T, N], whose rows depend on those of x [T, hidden], and whose time is the projection's; rows: of x, as soon as they can be read.
    compute also takes where its result is to be."""
    if rows is WHOLE or not projection.takes_pieces(x):
        await_rows(rows)
        return compute(x, None)
    made = None
    for own in rows:
        part = compute(x[own], None if made is None else made[own])
        if made is None:
            made = part.new_empty(len(x), *part.shape[1:])
            made[own] = part
    assert made is not None
    return made


class Residual:
    """What the ranks' parts of a projection make together, added to the residual stream."""

    def __init__(self, projection: Linear, ranks: Ranks, post_norm: torch.Tensor | None, eps: float) -> None:
        self._projection, self._ranks, self._post_norm, self._eps = projection, ranks, post_norm, eps

    def add(self, x: torch.Tensor, y: torch.Tensor) -> Iterable[slice]:
        """Adds the product of y to x in place: see `Ranks.add_product`."""
        if self._post_norm is None:
            return self._ranks.add_product(x, y, self._projection)
        add_shares(x, self._projection(y), self._ranks, self._post_norm, self._eps)
        return WHOLE


class Attention:
    """Grouped-query attention over paged keys and values."""

    def __init__(self, spec: AttentionSpec, layer: LayerSpec, weights: Weights, context_len: int | None) -> None:
        """context_len: the longest context; a window that holds it is none."""
        ranks, self.head_dim, self.eps = weights.ranks, spec.head_dim, layer.eps
        order = head_order(spec.rope, spec.head_dim)
        heads = {"num_attention_heads": spec.num_q, "num_key_value_heads": spec.num_kv}
        (q_name, num_q), (kv_name, num_kv) = heads.items()
        unit = spec.head_dim
        key_part, value_part = (Part(kv_name, num_kv * unit, unit, own, can_repeat=True) for own in (order, None))
        parts = [Part(q_name, num_q * unit, unit, order), key_part, value_part]
        self.input_norm = optional_norm(weights, layer.input_norm, layer)
        self.qkv = weights.split_rows(spec.qkv, parts)
        post_norm = optional_norm(weights, layer.attention_post_norm, layer)
        self.o = Residual(weights.split_columns(spec.o), ranks, post_norm, layer.eps)
        self.head_norms, self._whole_norms, self._clip = None, None, spec.clip
        if spec.query_norm is not None and spec.key_norm is not None:
            own_heads = (ranks.part(num_q, q_name), ranks.part(num_kv, kv_name, can_repeat=True))
            if spec.are_norms_whole:
                self._whole_norms = WholeNorms(spec, weights, own_heads, order)
            else:
                query, key = (weights.norm(name, unit, layer.norm_offset) for name in (spec.query_norm, spec.key_norm))
                if order is not None:
                    query, key = query[order.to(query.device)], key[order.to(key.device)]
                counts = [own.stop - own.start for own in own_heads]
                self.head_norms = torch.cat([own.expand(count, unit) for own, count in zip((query, key), counts)])
        is_seen_whole = spec.window is None or (context_len is not None and spec.window >= context_len)
        self.window = None if is_seen_whole else spec.window
        self.soft_cap = spec.soft_cap
        self.cache_scales: ops.CacheScales | None = None
        """Of keys and values that are kept in e4m3."""

    def append(
        self, x: torch.Tensor, angles: Angles, slots: torch.Tensor, cache: tuple[torch.Tensor, ...], rows: Iterable[slice] = WHOLE
    ) -> torch.Tensor:
        """x [T, in] -> queries [T, H, D]; keys and values go to their slots. rows: of x, as soon as they can be read."""
        return self._append(by_rows(self.qkv, self._project, x, rows), angles, slots, cache)

    def _project(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if self.input_norm is not None:
            return self.qkv.after_norm(x, self.input_norm, self.eps, out)
        return put(self.qkv(x), out)

    def keep(self, x: torch.Tensor, angles: Angles, slots: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> None:
        """Keys and values of x [T, in], which is normed already, go to their slots: what others are to see, and asks nothing itself."""
        self._append(self.qkv(x), angles, slots, cache)

    def _append(self, heads: torch.Tensor, angles: Angles, slots: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> torch.Tensor:
        heads = heads.view(len(heads), -1, self.head_dim)
        if self.head_norms is not None:
            ops.norm_heads(heads, self.head_norms, self.eps)
        if self._whole_norms is not None:
            self._whole_norms.normalize(heads, self.eps)
        if self._clip is not None:
            heads.clamp_(-self._clip, self._clip)
        keys, values = cache
        query = ops.append_kv(heads, angles.cos, angles.sin, slots, keys, values, angles.positions, self.cache_scales)
        return query if angles.query_scale is None else query * angles.query_scale

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: ops.Plan, out: torch.Tensor | None = None) -> torch.Tensor:
        """What the queries [T, H, D] find [T, H, D], in `out` if that is given."""
        keys, values = cache
        return ops.append_attention(query, keys, values, plan, self.window, self.soft_cap, self.cache_scales, out)


class WholeNorms:
    """Norms over all queries, and over all keys, of a token: sums of squares are the ranks' together."""

    def __init__(self, spec: AttentionSpec, weights: Weights, own_heads: tuple[slice, slice], order: torch.Tensor | None) -> None:
        assert spec.query_norm is not None and spec.key_norm is not None
        self._ranks, self._weights, self._shares, sizes = weights.ranks, [], [], []
        for name, count, own in zip((spec.query_norm, spec.key_norm), (spec.num_q, spec.num_kv), own_heads):
            weight = weights.norm(name, count * spec.head_dim).view(count, spec.head_dim)[own]
            self._weights.append(weight if order is None else weight[:, order.to(weight.device)])
            # Of heads that several ranks hold, each counts its part.
            self._shares.append(count / (weights.ranks.size * (own.stop - own.start)))
            sizes.append(count * spec.head_dim)
        self._sizes = torch.tensor(sizes, dtype=torch.float32, device=weights.device)

    def normalize(self, heads: torch.Tensor, eps: float) -> None:
        """heads [T, H + 2 Hkv, D] of this rank, in place."""
        num_q, num_kv = (len(weight) for weight in self._weights)
        parts = heads[:, :num_q], heads[:, num_q : num_q + num_kv]
        squares = [part.float().square().sum(dim=(1, 2)) * share for part, share in zip(parts, self._shares)]
        scales = (self._ranks.all_reduce(torch.stack(squares, dim=1)) / self._sizes + eps).rsqrt()
        for number, (part, weight) in enumerate(zip(parts, self._weights)):
            part.copy_((part.float() * scales[:, number, None, None]).to(part.dtype) * weight)


class Mlp:
    """act(gate) * up, and down."""

    def __init__(self, spec: MlpSpec, layer: LayerSpec, weights: Weights) -> None:
        self.eps, self._activation = layer.eps, spec.activation
        self.norm = weights.norm(layer.mlp_norm, layer.hidden_size, layer.norm_offset)
        inner = spec.down.in_features
        self.gate_up = weights.split_rows(spec.gate_up, [Part("intermediate_size", inner), Part("intermediate_size", inner)])
        post_norm = optional_norm(weights, layer.mlp_post_norm, layer)
        self.down = Residual(weights.split_columns(spec.down), weights.ranks, post_norm, layer.eps)

    def add(self, x: torch.Tensor, rows: Iterable[slice] = WHOLE) -> Iterable[slice]:
        """Adds to x [T, hidden] in place; rows: of x, as soon as they can be read. See `Ranks.add_product`."""
        return self.down.add(x, by_rows(self.gate_up, self._activated, x, rows))

    def _activated(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if self._activation in ("silu", "swish"):
            return self.gate_up.gated_after_norm(x, self.norm, self.eps, out)
        return put(activate(self.gate_up.after_norm(x, self.norm, self.eps), self._activation), out)


def optional_norm(weights: Weights, name: str | None, layer: LayerSpec) -> torch.Tensor | None:
    return None if name is None else weights.norm(name, layer.hidden_size, layer.norm_offset)
