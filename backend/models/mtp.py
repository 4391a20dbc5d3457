"""Multi-token-prediction modules (DeepSeek-V3, 2024, section 2.2) over paged memory, for Llama layers.

Layer k at token s takes the embedding of s and the state of layer k - 1 at the token before it (k = 1: the target's hidden state
after its final norm; before the first token: zeros), and scores what follows s. So what a layer keeps of a token depends on the
tokens up to that one alone, and a page of it is right for every request that shares the page's tokens. Past the last layer, the
last one goes on with its own state.
"""

from __future__ import annotations

from pathlib import Path

import torch

from backend.errors import ModelError
from backend.model_files import read_config
from backend.models import Model, open_checkpoint
from backend.models.layers import Weights, rope_frequencies, rope_tables
from backend.models.llama import LlamaLayer
from backend.parallel.ranks import Ranks
from kernels import ops

ARCHITECTURE = "LlamaMTP"


class _Layer:
    """One module: norms, projection, decoder layer, norm before the shared head."""

    def __init__(self, prefix: str, config: dict, weights: Weights, head_dim: int) -> None:
        hidden = config["hidden_size"]
        self.embedding_norm = weights.whole(f"{prefix}.enorm.weight", (hidden,))
        self.hidden_norm = weights.whole(f"{prefix}.hnorm.weight", (hidden,))
        self.head_norm = weights.whole(f"{prefix}.shared_head.norm.weight", (hidden,))
        self.projection = weights.linear(f"{prefix}.eh_proj", hidden, 2 * hidden)
        self.decoder = LlamaLayer(prefix, config, weights, head_dim)


class Mtp:
    """The drafter's layers; embedding and head are the target's own tensors.

    cache_planes holds, layer after layer, what is kept of each token: keys, values, and for all but the last layer its state.
    """

    def __init__(
        self,
        directory: str | Path,
        target: Model,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
        load_format: str = "safetensors",
    ) -> None:
        """Raises ModelError for what is missing, damaged, or not a drafter of this target."""
        config = read_config(directory)
        where = f"{directory}/config.json"
        if config.get("architectures") != [ARCHITECTURE]:
            raise ModelError(f"{where}: architectures {config.get('architectures')} is no drafter; known: {ARCHITECTURE}")
        for key, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if config.get(key) != own:
                raise ModelError(f"{where}: {key} is {config.get(key)}; the target's is {own}")
        if config.get("max_position_embeddings", 0) < target.max_model_len:
            raise ModelError(f"{where}: max_position_embeddings is {config.get('max_position_embeddings')}; the target's is {target.max_model_len}")
        self._target = target
        self.hidden_size: int = target.hidden_size
        try:
            self.num_layers: int = config["num_nextn_predict_layers"]
            self.eps: float = config["rms_norm_eps"]
            num_q = config["num_attention_heads"]
            num_kv = config.get("num_key_value_heads") or num_q
            head_dim = config.get("head_dim") or self.hidden_size // num_q
            self.heads = (num_q, num_kv, head_dim)
            with open_checkpoint(directory, dtype, device, load_format) as checkpoint:
                weights = Weights(checkpoint, dtype, device, Ranks(), quantization)
                self.layers = [_Layer(f"model.layers.{i}", config, weights, head_dim) for i in range(self.num_layers)]
        except KeyError as error:
            raise ModelError(f"{where} has no {error}") from None
        self.cos, self.sin = rope_tables(rope_frequencies(config, head_dim), target.max_model_len, dtype, device)
        entry = (num_kv, head_dim)
        self.cache_planes = [s for i in range(self.num_layers) for s in (entry, entry, *([(self.hidden_size,)] if i + 1 < self.num_layers else []))]

    def forward(
        self,
        layer: int,
        token_ids: torch.Tensor,
        previous: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        planes: list[torch.Tensor],
        plan: ops.Plan,
    ) -> torch.Tensor:
        """States [T, hidden] of one layer at tokens [T]; previous [T, hidden]: states at the tokens before them."""
        own = self.layers[layer]
        embedded = ops.rms_norm(self._target.embed(token_ids), own.embedding_norm, self.eps)
        x = own.projection(torch.cat([embedded, ops.rms_norm(previous, own.hidden_norm, self.eps)], dim=-1))
        return own.decoder.forward(x, self.cos[positions], self.sin[positions], slots, (planes[3 * layer], planes[3 * layer + 1]), plan)

    def logits(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, V] in the model's dtype."""
        return self._target.logits(ops.rms_norm(states, self.layers[layer].head_norm, self.eps))
