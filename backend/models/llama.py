"""The Llama family: RMS norm, rotary grouped-query attention, SwiGLU (Touvron et al. 2023; Llama 3.1's rope scaling)."""

from __future__ import annotations

from typing import Any

import torch

from backend.errors import ModelError
from backend.models.layers import Weights, rope_frequencies, rope_tables
from backend.models.loader import Checkpoint
from backend.parallel.ranks import Ranks
from backend.quantization import Linear, make_linear
from kernels import ops


class LlamaLayer:
    """One decoder layer on one rank."""

    def __init__(self, prefix: str, config: dict[str, Any], weights: Weights, head_dim: int) -> None:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        num_q, num_kv = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
        self.head_dim = head_dim
        self.eps = config["rms_norm_eps"]
        self.ranks = weights.ranks
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.input_norm = weights.whole(f"{prefix}.input_layernorm.weight", (hidden,))
        self.post_norm = weights.whole(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        parts = [(f"{attention}.q_proj", num_q * head_dim), (f"{attention}.k_proj", num_kv * head_dim), (f"{attention}.v_proj", num_kv * head_dim)]
        self.qkv = weights.split_rows(parts, hidden, unit=head_dim)
        self.o = weights.split_columns(f"{attention}.o_proj", hidden, num_q * head_dim)
        self.gate_up = weights.split_rows([(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)], hidden)
        self.down = weights.split_columns(f"{mlp}.down_proj", hidden, inner)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: ops.Plan
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], residual included; x is changed in place."""
        keys, values = cache
        y = self.qkv.after_norm(x, self.input_norm, self.eps)
        query = ops.append_kv(y.view(len(x), -1, self.head_dim), cos, sin, slots, keys, values)
        y = ops.append_attention(query, keys, values, plan)
        self._add(self.o, x, y.view(len(x), -1))
        self._add(self.down, x, self.gate_up.gated_after_norm(x, self.post_norm, self.eps))
        return x

    def _add(self, projection: Linear, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds what the ranks' parts of a projection make together to the residual stream."""
        if self.ranks.size == 1:
            projection.add_to(x, y)
        else:
            x.add_(self.ranks.all_reduce(projection(y)))


class Llama:
    """LlamaForCausalLM: embedding, layers, final norm, head (tied or not). Fulfils `backend.models.Model`."""

    def __init__(
        self, config: dict[str, Any], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ranks: Ranks, *, only_head: bool = False
    ) -> None:
        """only_head: `embed` and `logits` work, `forward` has no layers to run."""
        hidden, num_q = config["hidden_size"], config["num_attention_heads"]
        self.vocab_size: int = config["vocab_size"]
        self.hidden_size: int = hidden
        self.num_layers: int = config["num_hidden_layers"]
        self.max_model_len: int = config["max_position_embeddings"]
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{checkpoint.directory}/config.json: hidden_act {config['hidden_act']!r} is not supported; known: silu")
        num_kv = config.get("num_key_value_heads") or num_q
        head_dim = config.get("head_dim") or hidden // num_q
        end = config.get("eos_token_id")
        self.eos_token_ids = frozenset([end] if isinstance(end, int) else end or [])
        self.eps = config["rms_norm_eps"]
        own_q, own_kv = ranks.part(num_q, "num_attention_heads"), ranks.part(num_kv, "num_key_value_heads")
        self.heads = (own_q.stop - own_q.start, own_kv.stop - own_kv.start, head_dim)
        self.cache_planes: tuple[tuple[int, ...], ...] = (self.heads[1:],) * 2
        self.ranks = ranks
        weights = Weights(checkpoint, dtype, device, ranks)
        self.embedding = weights.whole("model.embed_tokens.weight", (self.vocab_size, hidden))
        self.layers = [LlamaLayer(f"model.layers.{i}", config, weights, head_dim) for i in range(0 if only_head else self.num_layers)]
        self.norm = weights.whole("model.norm.weight", (hidden,))
        is_tied = bool(config.get("tie_word_embeddings"))
        if is_tied and ranks.size == 1:
            self.head = make_linear(self.embedding)
        else:
            self.head = weights.split_rows([("model.embed_tokens" if is_tied else "lm_head", self.vocab_size)], hidden)
        frequencies = rope_frequencies(config, head_dim)
        self.cos, self.sin = rope_tables(frequencies, self.max_model_len, dtype, device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, cache: list[tuple[torch.Tensor, ...]], plan: ops.Plan
    ) -> torch.Tensor:
        x = self.embed(token_ids)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer.forward(x, cos, sin, slots, layer_cache, plan)
        return ops.rms_norm(x, self.norm, self.eps)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_gather(self.head(hidden))
