"""Parts of decoder layers on one rank: grouped-query attention and gated MLPs, as a family's spec says."""

from __future__ import annotations

import torch

from backend.models.layers import Part, Weights
from backend.models.rope import Angles, head_order
from backend.models.spec import AttentionSpec, LayerSpec, MlpSpec
from backend.parallel.ranks import Ranks
from backend.quantization import Linear
from kernels import ops


class Residual:
    """What the ranks' parts of a projection make together, added to the residual stream."""

    def __init__(self, projection: Linear, ranks: Ranks, post_norm: torch.Tensor | None, eps: float) -> None:
        """post_norm: weights of a norm of what is added."""
        self._projection, self._ranks, self._post_norm, self._eps = projection, ranks, post_norm, eps

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds the product of y to x in place."""
        if self._post_norm is None and self._ranks.size == 1:
            self._projection.add_to(x, y)
            return
        y = self._ranks.all_reduce(self._projection(y))
        x.add_(y if self._post_norm is None else ops.rms_norm(y, self._post_norm, self._eps))


class Attention:
    """Grouped-query attention over paged keys and values."""

    def __init__(self, spec: AttentionSpec, layer: LayerSpec, weights: Weights, context_len: int | None) -> None:
        """context_len: the longest context; a window that holds it is none."""
        ranks, self.head_dim, self.eps = weights.ranks, spec.head_dim, layer.eps
        order = head_order(spec.rope, spec.head_dim)
        heads = {"num_attention_heads": spec.num_q, "num_key_value_heads": spec.num_kv}
        (q_name, num_q), (kv_name, num_kv) = heads.items()
        unit = spec.head_dim
        parts = [Part(q_name, num_q * unit, unit, order), Part(kv_name, num_kv * unit, unit, order), Part(kv_name, num_kv * unit, unit)]
        self.input_norm = weights.norm(layer.input_norm, layer.hidden_size, layer.norm_offset)
        self.qkv = weights.split_rows(spec.qkv, parts)
        post_norm = _optional_norm(weights, layer.attention_post_norm, layer)
        self.o = Residual(weights.split_columns(spec.o), ranks, post_norm, layer.eps)
        self.head_norms = None
        if spec.query_norm is not None and spec.key_norm is not None:
            query, key = (weights.norm(name, unit, layer.norm_offset) for name in (spec.query_norm, spec.key_norm))
            if order is not None:
                query, key = query[order.to(query.device)], key[order.to(key.device)]
            own_heads = (ranks.part(num_q, q_name), ranks.part(num_kv, kv_name))
            counts = [own.stop - own.start for own in own_heads]
            self.head_norms = torch.cat([own.expand(count, unit) for own, count in zip((query, key), counts)])
        is_seen_whole = spec.window is None or (context_len is not None and spec.window >= context_len)
        self.window = None if is_seen_whole else spec.window
        self.soft_cap = spec.soft_cap

    def append(self, x: torch.Tensor, angles: Angles, slots: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """x [T, hidden] -> queries [T, H, D]; keys and values go to their slots."""
        heads = self.qkv.after_norm(x, self.input_norm, self.eps).view(len(x), -1, self.head_dim)
        if self.head_norms is not None:
            ops.norm_heads(heads, self.head_norms, self.eps)
        keys, values = cache
        query = ops.append_kv(heads, angles.cos, angles.sin, slots, keys, values)
        return query if angles.query_scale is None else query * angles.query_scale

    def add(self, x: torch.Tensor, query: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: ops.Plan) -> None:
        """Adds what the queries find to x [T, hidden] in place."""
        keys, values = cache
        y = ops.append_attention(query, keys, values, plan, self.window, self.soft_cap)
        self.o.add(x, y.view(len(x), -1))


class Mlp:
    """act(gate) * up, and down."""

    def __init__(self, spec: MlpSpec, layer: LayerSpec, weights: Weights) -> None:
        self.eps, self._activation = layer.eps, spec.activation
        self.norm = weights.norm(layer.mlp_norm, layer.hidden_size, layer.norm_offset)
        inner = spec.down.in_features
        self.gate_up = weights.split_rows(spec.gate_up, [Part("intermediate_size", inner), Part("intermediate_size", inner)])
        post_norm = _optional_norm(weights, layer.mlp_post_norm, layer)
        self.down = Residual(weights.split_columns(spec.down), weights.ranks, post_norm, layer.eps)

    def add(self, x: torch.Tensor) -> None:
        """Adds to x [T, hidden] in place."""
        if self._activation in ("silu", "swish"):
            y = self.gate_up.gated_after_norm(x, self.norm, self.eps)
        else:
            y = ops.gelu_mul(self.gate_up.after_norm(x, self.norm, self.eps), is_exact=self._activation == "gelu")
        self.down.add(x, y)


def _optional_norm(weights: Weights, name: str | None, layer: LayerSpec) -> torch.Tensor | None:
    return None if name is None else weights.norm(name, layer.hidden_size, layer.norm_offset)


class DecoderLayer:
    """One layer on one rank."""

    def __init__(self, spec: LayerSpec, weights: Weights, context_len: int | None = None) -> None:
        self.attention = Attention(spec.attention, spec, weights, context_len)
        self.mlp = Mlp(spec.mlp, spec, weights)

    def forward(
        self,
        x: torch.Tensor,
        angles: Angles,
        slots: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        plan: ops.Plan,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], residual included; x is changed in place. rows [R]: the result is wanted of these alone, and the plan
        is theirs; keys and values of all T are kept."""
        query = self.attention.append(x, angles, slots, cache)
        if rows is not None:
            query, x = query[rows], x[rows]
            if not len(rows):
                return x
        self.attention.add(x, query, cache, plan)
        self.mlp.add(x)
        return x
