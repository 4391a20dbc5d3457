"""The Llama architecture for training: one dense causal forward pass, every layer's weights stacked on a leading axis.

Serving has its own implementation over paged memory (`backend/models/llama.py`); both read the same Hugging Face files.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from backend.errors import ModelError
from backend.model_files import read_config
from backend.models.loader import Checkpoint
from backend.models.rope import rope_frequencies
from backend.models.shards import save_weights
from training.tokenizer import END_OF_TEXT, load_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


PARTS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm",
}  # fmt: skip
"""Stacked parameters by name, and what Hugging Face calls each layer's share."""


class Llama(nn.Module):
    """Token ids [B, T] and the ids that follow -> mean cross-entropy in nats."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.config = config
        layers, hidden, inner = config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]
        self.head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
        self.q_size = config["num_attention_heads"] * self.head_dim
        self.kv_size = (config.get("num_key_value_heads") or config["num_attention_heads"]) * self.head_dim

        def matrix(out_features: int, in_features: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(layers, out_features, in_features) * scale * in_features**-0.5)

        self.embed = nn.Parameter(torch.randn(config["vocab_size"], hidden) * 0.02)
        self.q, self.k, self.v = matrix(self.q_size, hidden), matrix(self.kv_size, hidden), matrix(self.kv_size, hidden)
        self.o = matrix(hidden, self.q_size, (2 * layers) ** -0.5)
        self.gate, self.up = matrix(inner, hidden), matrix(inner, hidden)
        self.down = matrix(hidden, inner, (2 * layers) ** -0.5)
        self.input_norm = nn.Parameter(torch.ones(layers, hidden))
        self.post_norm = nn.Parameter(torch.ones(layers, hidden))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.own_head = None if config.get("tie_word_embeddings") else nn.Parameter(torch.randn(config["vocab_size"], hidden) * 0.02)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.make_tables()

    def make_tables(self) -> None:
        """Rotations of every position [max_position_embeddings, head_dim], on the weights' device."""
        angles = torch.outer(torch.arange(self.config["max_position_embeddings"]).float(), rope_frequencies(self.config, self.head_dim))
        angles = torch.cat([angles, angles], dim=-1).to(self.embed.device)
        self.cos, self.sin = angles.cos(), angles.sin()

    @property
    def head(self) -> torch.Tensor:
        """[V, hidden]"""
        return self.embed if self.own_head is None else self.own_head

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half, length = x.shape[-1] // 2, x.shape[-2]
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return (x * self.cos[:length] + turned * self.sin[:length]).to(x.dtype)

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [B, T] -> hidden states after the final norm [B, T, hidden]."""
        c = self.config
        batch, length = ids.shape
        x = F.embedding(ids, self.embed)
        for i in range(c["num_hidden_layers"]):
            y = F.rms_norm(x, (x.shape[-1],), self.input_norm[i], c["rms_norm_eps"])
            q, k, v = (F.linear(y, w[i]).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
            x = x + F.linear(y.transpose(1, 2).reshape(batch, length, self.q_size), self.o[i])
            y = F.rms_norm(x, (x.shape[-1],), self.post_norm[i], c["rms_norm_eps"])
            x = x + F.linear(F.silu(F.linear(y, self.gate[i])) * F.linear(y, self.up[i]), self.down[i])
        return F.rms_norm(x, (x.shape[-1],), self.norm, c["rms_norm_eps"])

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(self.hidden_states(ids), self.head)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def save(self, directory: Path) -> None:
        """Writes config.json, generation_config.json and model.safetensors (bfloat16, Hugging Face names)."""
        named = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        for attribute, name in PARTS.items():
            for i, weight in enumerate(getattr(self, attribute)):
                named[f"model.layers.{i}.{name}.weight"] = weight
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in named.items()}
        save_weights(tensors, directory / "model.safetensors")
        end = load_tokenizer().token_to_id(END_OF_TEXT)
        config = {**self.config, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end + 1}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end + 1}
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_model(directory: Path) -> Llama:
    """A Llama folder with float32 weights, for evaluation.

    Raises ModelError for another architecture, and for weights that are missing or of another shape.
    """
    config = read_config(directory)
    if config.get("architectures") != ["LlamaForCausalLM"]:
        raise ModelError(f"{directory}: architectures {config.get('architectures')} cannot be trained on; known: LlamaForCausalLM")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}/config.json: hidden_act {config['hidden_act']!r} is not supported; known: silu")
    try:
        with torch.device("meta"):
            model = Llama(config)
    except KeyError as error:
        raise ModelError(f"{directory}/config.json has no {error}") from None
    with Checkpoint(directory) as checkpoint:

        def stack(name: str, like: torch.Tensor) -> torch.Tensor:
            shape = tuple(like.shape[1:])
            if f"model.layers.0.{name}.bias" in checkpoint:
                raise ModelError(f"{directory}: weight model.layers.0.{name}.bias: targets with biases cannot be trained on")
            return torch.stack([checkpoint.get(f"model.layers.{i}.{name}.weight", shape).float() for i in range(len(like))])

        weights = {attribute: stack(name, getattr(model, attribute)) for attribute, name in PARTS.items()}
        weights["embed"] = checkpoint.get("model.embed_tokens.weight", tuple(model.embed.shape)).float()
        weights["norm"] = checkpoint.get("model.norm.weight", tuple(model.norm.shape)).float()
        if model.own_head is not None:
            weights["own_head"] = checkpoint.get("lm_head.weight", tuple(model.own_head.shape)).float()
    model = model.to_empty(device="cpu")
    model.load_state_dict(weights)
    model.make_tables()
    return model.eval()
