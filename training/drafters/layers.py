"""Decoder layers of drafters as they are trained: whole sequences at once, and passes that go on from their own states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from backend.models.rope import frequencies
from backend.models.rope_spec import read_rope
from backend.models.values import Values

MATRICES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
"""Stacked parameters by name, and what Hugging Face calls each layer's share."""


def matrix(count: int, out_features: int, in_features: int, scale: float = 1.0) -> nn.Parameter:
    """[count, out, in], drawn so that products keep the size of what they take."""
    return nn.Parameter(torch.randn(count, out_features, in_features) * scale * in_features**-0.5)


class DecoderLayers(nn.Module):
    """Llama's layers without the norm before attention, stacked on a leading axis. Each may run several times over a sequence."""

    def __init__(self, config: dict[str, Any], count: int, in_features: int | None = None) -> None:
        """config: of `Target.drafter_config`; in_features: what attention takes, if it is not the hidden size."""
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        q_size, kv_size = config["num_attention_heads"] * self.head_dim, config["num_key_value_heads"] * self.head_dim
        wide = in_features or hidden
        self.q, self.k, self.v = matrix(count, q_size, wide), matrix(count, kv_size, wide), matrix(count, kv_size, wide)
        self.o = matrix(count, hidden, q_size, 0.5)
        self.gate, self.up, self.down = matrix(count, inner, hidden), matrix(count, inner, hidden), matrix(count, hidden, inner, 0.5)
        self.post_norm = nn.Parameter(torch.ones(count, hidden))
        inverse, scale = frequencies(read_rope(Values(config, "config.json"), self.head_dim), config["max_position_embeddings"])
        self.register_buffer("inverse", torch.cat([inverse, inverse]), persistent=False)
        self.scale = scale

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [length, head_dim]."""
        angles = torch.outer(torch.arange(length, device=self.inverse.device).float(), self.inverse)
        return angles.cos() * self.scale, angles.sin() * self.scale

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def run(self, layer: int, x: torch.Tensor, attended: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        """x [B, T, H] plus attention over attended [B, T, in] and the MLP. keys, values: of this layer's passes before, and now of this one."""
        cos, sin = self.tables(x.shape[1])
        q, k, v = (F.linear(attended, weight[layer]).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for weight in (self.q, self.k, self.v))
        keys.append(rotate(k, cos, sin))
        values.append(v)
        return self.finish(layer, x, attend_unrolled(rotate(q, cos, sin), keys, values))

    def finish(self, layer: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x [B, T, H] plus what the heads found, y [B, heads, T, head_dim], and the MLP."""
        x = x + F.linear(y.transpose(1, 2).flatten(2), self.o[layer])
        y = self.norm(x, self.post_norm[layer])
        return x + F.linear(F.silu(F.linear(y, self.gate[layer])) * F.linear(y, self.up[layer]), self.down[layer])

    def named(self, layer: int, prefix: str) -> dict[str, torch.Tensor]:
        """A layer's weights under the names of a file."""
        table = {f"{prefix}.{name}.weight": getattr(self, attribute)[layer] for attribute, name in MATRICES.items()}
        return table | {f"{prefix}.post_attention_layernorm.weight": self.post_norm[layer]}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [..., T, D] by the tables' rows of its positions."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def shift(x: torch.Tensor, count: int = 1) -> torch.Tensor:
    """x [B, T, ...] moved `count` positions on; zeros before the first."""
    return torch.cat([torch.zeros_like(x[:, :count]), x[:, : max(0, x.shape[1] - count)]], dim=1)


def attend_unrolled(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention of the last of r + 1 passes of one layer: q [B, H, T, D]; keys and values of each pass [B, Hkv, T, D].

    A row sees the first pass's keys up to r positions back, and of pass m the one r - m back: what the cache holds when the last
    r tokens are drafts.
    """
    passes = len(keys) - 1
    if passes == 0:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True, enable_gqa=True)
    groups = q.shape[1] // keys[0].shape[1]
    keys = [k.repeat_interleave(groups, dim=1) for k in keys]
    values = [v.repeat_interleave(groups, dim=1) for v in values]
    length = q.shape[-2]
    place = torch.arange(length, device=q.device)
    scores = (q @ keys[0].mT).masked_fill(place[None, :] > place[:, None] - passes, float("-inf"))
    own = []
    for m in range(1, passes + 1):
        back = passes - m
        moved = F.pad(keys[m], (0, 0, back, 0))[:, :, :length]
        own.append((q * moved).sum(-1, keepdim=True).masked_fill((place < back)[:, None], float("-inf")))
    weights = (torch.cat([scores, *own], dim=-1) * q.shape[-1] ** -0.5).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    y = weights[..., :length] @ values[0]
    for m in range(1, passes + 1):
        back = passes - m
        y = y + weights[..., length + m - 1, None] * F.pad(values[m], (0, 0, back, 0))[:, :, :length]
    return y
