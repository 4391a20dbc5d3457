"""DFlash (Chen et al. 2026): a block of the newest token and of mask tokens goes once through layers of Qwen 3, whose rows see one another and, of
all tokens before, keys and values that are made of the target's states alone. In training many blocks of a sequence, at places drawn at random,
go through in one forward, none of which sees another.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from backend.errors import ModelError
from training.drafters.drafter import Drafter, Options
from training.drafters.layers import DecoderLayers, matrix, rotate
from training.target import States, Target

NUM_TAPS = 5
FIRST_NORMS = {"input_norm": "input_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


def spread_taps(num_layers: int) -> tuple[int, ...]:
    """As inputs: what leaves the second layer, the last but two, and three between them, as the authors spread them.

    Raises ModelError where there are too few.
    """
    if num_layers < 4:
        raise ModelError(f"block drafters tap what leaves layers 1 to n - 3 of the target, which has {num_layers}: name others with --taps")
    step = (num_layers - 4) / (NUM_TAPS - 1)
    return tuple(sorted({2 + round(i * step) for i in range(NUM_TAPS)}))


def decay_of(block_size: int) -> float:
    """Weight of each further draft in the loss, exp(-1 / gamma): the paper has a gamma of 4 for blocks of 8, 5 for 10, 7 for 16."""
    return math.exp(-1 / (4 if block_size <= 8 else 5 if block_size <= 10 else 7))


def see_blocks(anchors: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """Which of a sequence's `length` states, and then of the rows of its blocks, the rows of blocks at anchors [B, N] see:
    [B, N * block_size, length + N * block_size], true: seen. A block sees the states before its anchor, and itself."""
    batch, count = anchors.shape
    states = torch.arange(length, device=anchors.device) < anchors.repeat_interleave(block_size, dim=1)[..., None]
    number = torch.arange(count, device=anchors.device).repeat_interleave(block_size)
    return torch.cat([states, (number[:, None] == number).expand(batch, -1, -1)], dim=-1)


class BlockLayers(DecoderLayers):
    """Layers of Qwen 3 over blocks, and over states that no layer changes."""

    def __init__(self, config: dict[str, Any], count: int) -> None:
        super().__init__(config, count)
        sizes = {"input_norm": config["hidden_size"], "q_norm": self.head_dim, "k_norm": self.head_dim}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.ones(count, size)))

    def run_blocks(self, layer: int, x: torch.Tensor, context: torch.Tensor, places: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """x [B, R, H] plus attention over context [B, T, H] and itself, as seen [B, R, T + R] has it, and the MLP. places [B, R]: of x's rows."""
        y, length = self.norm(x, self.input_norm[layer]), context.shape[1]
        cos, sin = self.tables(length)
        both = torch.cat([context, y], dim=1)
        q, k, v = (
            F.linear(states, weight[layer]).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for states, weight in ((y, self.q), (both, self.k), (both, self.v))
        )
        own = cos[places][:, None], sin[places][:, None]
        q = rotate(self.norm(q, self.q_norm[layer]), *own)
        k = self.norm(k, self.k_norm[layer])
        k = torch.cat([rotate(k[:, :, :length], cos, sin), rotate(k[:, :, length:], *own)], dim=2)
        groups = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        return self.finish(layer, x, F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None]))

    def named(self, layer: int, prefix: str) -> dict[str, torch.Tensor]:
        return super().named(layer, prefix) | {f"{prefix}.{name}.weight": getattr(self, own)[layer] for own, name in FIRST_NORMS.items()}


class Dflash(Drafter):
    """Cross-entropy of the text. Embedding and head are the target's. Saved under the authors' names, which vLLM and SGLang read."""

    method, default_drafts, default_layers, default_loss, rows_before_drafts = "dflash", 15, 5, "text", 1
    accepted_options = frozenset({"layers", "inner", "taps"})

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        self.layers = options.taps or spread_taps(target.num_layers)
        if max(self.layers) > target.num_layers or min(self.layers) < 0:
            raise ModelError(f"--taps {','.join(map(str, self.layers))}: the target's layers have inputs 0 to {target.num_layers} (its last output)")
        hidden, values = target.hidden_size, target.drafter_config()
        self.values: dict[str, Any] = values | {"intermediate_size": options.inner or values["intermediate_size"]}
        self.block_size = options.drafts + self.rows_before_drafts
        self.decay = decay_of(self.block_size)
        self.fc = matrix(1, hidden, len(self.layers) * hidden)
        self.decoder = BlockLayers(self.values, options.layers)
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.norm = nn.Parameter(target.norm.detach().float().clone())

    def forward(self, target: Target, states: States) -> list[torch.Tensor]:
        anchors, decoder = states.anchors, self.decoder
        assert anchors is not None
        context = F.linear(torch.cat([states.entering[layer] for layer in self.layers], dim=-1), self.fc[0])
        context = decoder.norm(context, self.hidden_norm)
        places = anchors[..., None] + torch.arange(self.block_size, device=anchors.device)
        block = torch.full_like(places, self.options.mask_token_id)
        block[..., 0] = states.ids.gather(1, anchors)
        x, places = target.embed(block).flatten(1, 2), places.flatten(1)
        seen = see_blocks(anchors, states.ids.shape[1], self.block_size)
        for layer in range(self.options.layers):
            x = decoder.run_blocks(layer, x, context, places, seen)
        rows = decoder.norm(x, self.norm).unflatten(1, block.shape[1:])
        return list(rows[:, :, self.rows_before_drafts :].unbind(2))

    def score(self, target: Target, step: int, rows: torch.Tensor) -> torch.Tensor:
        return target.score(rows)

    def named(self) -> dict[str, torch.Tensor]:
        table = {"fc.weight": self.fc[0], "hidden_norm.weight": self.hidden_norm, "norm.weight": self.norm}
        for i in range(self.options.layers):
            table |= self.decoder.named(i, f"layers.{i}")
        return table

    def shape(self, target: Target) -> dict[str, Any]:
        """What config.json says of the layers, whoever reads it."""
        count = self.options.layers
        own: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": count, "layer_types": ["full_attention"] * count}
        own |= {"tie_word_embeddings": False, "attention_bias": False, "block_size": self.block_size, "num_target_layers": target.num_layers}
        return own | self.values

    def masked(self) -> dict[str, Any]:
        """The mask token, and the taps as layers whose output it is (-1: the embedding)."""
        return {"mask_token_id": self.options.mask_token_id, "target_layer_ids": [layer - 1 for layer in self.layers]}

    def config(self, target: Target) -> dict[str, Any]:
        return {"architectures": ["DFlashDraftModel"], "dflash_config": self.masked()} | self.shape(target)
