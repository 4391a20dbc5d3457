"""What GGUF files of these families say in their metadata, as config.json says it (llama.cpp, convert_hf_to_gguf.py and llama-model.cpp). No torch.

A file names its tensors by llama.cpp's own scheme, which the package `gguf` maps to Hugging Face's; what else differs is here: which
families' queries and keys lie in other rows, whose norms are counted from zero, and what the metadata leave out because the engine knows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backend.errors import ModelError
from backend.models.values import Values

Config = dict[str, Any]
Tensors = Mapping[str, tuple[int, ...]]
"""Shapes of a file's tensors by name, the slowest dimension first."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """How a file becomes a Hugging Face folder."""

    config: Config
    """Of config.json."""
    is_permuted: bool = False
    """Numbers 2 i and 2 i + 1 of queries and keys turn together; in Hugging Face's files i and i + dim / 2."""
    norm_offset: float = 0.0
    """What the file's norms have more than Hugging Face's."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's values and the shapes of its tensors."""

    values: Values
    """Of the architecture: keys without its name before them."""
    tensors: Tensors
    factors: Mapping[str, tuple[float, ...]]
    """Of rotary frequencies: the file's `rope_freqs`, `rope_factors_short`, `rope_factors_long`, those that it has."""

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def one(self, key: str, high: int, default: int | None = None) -> int:
        """An integer that some files have for each layer: all must be the same. Raises ModelError."""
        value = self.values.get(key)
        if isinstance(value, list):
            if not value or any(own != value[0] for own in value):
                raise self.values.refuse(key, "the same for all layers: models whose layers differ in it are not served")
            return Values({key: value[0]}, self.values.where).integer(key, high)
        return self.values.integer(key, high, default=default)


def _read_common(meta: Metadata) -> Config:
    """What all have: sizes, rotary embedding, vocabulary."""
    values, embedding = meta.values, meta.tensors.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelError(f"{values.where}: tensor token_embd.weight is missing")
    if not values.flag("attention.causal", default=True):  # of models that embed texts
        raise values.refuse("attention.causal", "true: tokens are written one after the other")
    heads = meta.one("attention.head_count", 1024)
    config: Config = {
        "hidden_size": values.integer("embedding_length", 2**17),
        "intermediate_size": meta.one("feed_forward_length", 2**20),
        "num_hidden_layers": values.integer("block_count", 1024),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.one("attention.head_count_kv", 1024, default=heads),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon", 1.0),
        "max_position_embeddings": values.integer("context_length", 2**24),
        "vocab_size": embedding[0],
        "rope_theta": values.number("rope.freq_base", 1e15, default=10000.0),
        "tie_word_embeddings": not meta.has("output.weight"),
    }
    if values.has("attention.key_length"):
        config["head_dim"] = values.integer("attention.key_length", 1024)
        if values.get("attention.value_length") not in (None, config["head_dim"]):
            raise values.refuse("attention.value_length", f"attention.key_length ({config['head_dim']})")
    if scaling := _read_scaling(meta):
        config["rope_scaling"] = scaling
    return config


YARN_UNREAD = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor")
"""How strong yarn's rotary embeddings are, and how much of it there is."""


def _read_scaling(meta: Metadata) -> Config | None:
    """`rope_scaling`, as older config.json have it."""
    values = meta.values
    kind = values.get("rope.scaling.type") or "linear"  # llama.cpp's own where a file has a factor alone, as older ones do
    original = values.get("rope.scaling.original_context_length")
    if kind in ("none", "longrope"):  # the latter by its factors
        return None
    key = "rope.scaling.factor" if values.get("rope.scaling.factor") else "rope.scale_linear"  # the older name; 0 is none
    factor = values.number(key, 1e6, default=1.0) if values.get(key) else 1.0
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        for key in YARN_UNREAD:
            if values.get(key) not in (None, 1):
                raise values.refuse(key, "1: what else it means, config.json cannot say")
        more = {"original_max_position_embeddings": original} if original else {}
        for key, name in (("rope.scaling.yarn_beta_fast", "beta_fast"), ("rope.scaling.yarn_beta_slow", "beta_slow")):
            if values.has(key):
                more[name] = values.number(key, 1e6)
        return {"rope_type": "yarn", "factor": factor, **more}
    raise values.refuse("rope.scaling.type", "none, linear, yarn or longrope")


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every published model that has this scaling: a file keeps the factors that came of it, not the numbers."""


def _llama3_factors(factor: float, dim: int, theta: float) -> list[float]:
    """What `rope_type` llama3 divides the frequencies by."""
    found = []
    for i in range(0, dim, 2):
        length = 2 * math.pi * theta ** (i / dim)
        long, short = (LLAMA3["original_max_position_embeddings"] / LLAMA3[name] for name in ("low_freq_factor", "high_freq_factor"))
        smooth = (LLAMA3["original_max_position_embeddings"] / length - 1.0) / (LLAMA3["high_freq_factor"] - 1.0)
        found.append(1.0 if length < short else factor if length > long else 1 / ((1 - smooth) / factor + smooth))
    return found


def _scale_llama3(meta: Metadata, config: Config, head_dim: int) -> None:
    """rope_freqs as `rope_type` llama3 where that makes the same of them; else as factors that are always used."""
    factors = meta.factors.get("rope_freqs")
    if factors is None:
        return
    if len(factors) != head_dim // 2:
        raise ModelError(f"{meta.values.where}: tensor rope_freqs has {len(factors)} numbers; half a head has {head_dim // 2}")
    factor = round(max(factors), 3)
    if factor > 1 and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, _llama3_factors(factor, head_dim, config["rope_theta"]))):
        config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    elif any(own != 1.0 for own in factors):
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": list(factors), "long_factor": list(factors), "attention_factor": 1.0}


def _experts(meta: Metadata, count_key: str, *, inner_key: str = "moe_intermediate_size") -> Config:
    """Sizes of a mixture; what a token's weights are divided by, where the file says it."""
    values = meta.values
    found: Config = {
        count_key: values.integer("expert_count", 4096),
        "num_experts_per_tok": values.integer("expert_used_count", 4096),
    }
    if values.has("expert_feed_forward_length"):
        found[inner_key] = values.integer("expert_feed_forward_length", 2**20)
    if values.has("expert_weights_norm"):
        found["norm_topk_prob"] = values.flag("expert_weights_norm")
    return found


def _has_experts(meta: Metadata) -> bool:
    return bool(meta.values.get("expert_count"))


def _head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _turning_share(meta: Metadata, config: Config, turning: int) -> float:
    """Of a head."""
    if not (size := _head_dim(config)):
        rule = f"no more than embedding_length ({config['hidden_size']}), where there is no attention.key_length"
        raise meta.values.refuse("attention.head_count", rule)
    return turning / size


def _refuse_partial(meta: Metadata, config: Config) -> None:
    turning = meta.values.get("rope.dimension_count")
    if turning not in (None, _head_dim(config)):
        raise meta.values.refuse("rope.dimension_count", f"the size of a head ({_head_dim(config)}): this family turns whole heads")


def llama(meta: Metadata) -> GgufModel:
    """Llama and Mistral, and Mixtral where there are experts."""
    config = _read_common(meta)
    _refuse_partial(meta, config)
    _scale_llama3(meta, config, _head_dim(config))
    if _has_experts(meta):
        return GgufModel({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **config, **_experts(meta, "num_local_experts")}, True)
    own = {
        "attention_bias": meta.has("blk.0.attn_q.bias") and meta.has("blk.0.attn_output.bias"),
        "mlp_bias": meta.has("blk.0.ffn_gate.bias"),
        "hidden_act": "silu",
    }
    return GgufModel({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **config, **own}, is_permuted=True)


def qwen2(meta: Metadata) -> GgufModel:
    return GgufModel({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_read_common(meta), "use_sliding_window": False})


def qwen3(meta: Metadata) -> GgufModel:
    own = {"use_sliding_window": False, "attention_bias": meta.has("blk.0.attn_q.bias")}
    return GgufModel({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_read_common(meta), **own})


def qwen2moe(meta: Metadata) -> GgufModel:
    values = meta.values
    own: Config = {"norm_topk_prob": False, "decoder_sparse_step": 1, "use_sliding_window": False} | _experts(meta, "num_experts")
    own["shared_expert_intermediate_size"] = values.integer("expert_shared_feed_forward_length", 2**20)
    return GgufModel({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", **_read_common(meta), **own})


def qwen3moe(meta: Metadata) -> GgufModel:
    own = {"norm_topk_prob": True, "decoder_sparse_step": 1, "use_sliding_window": False} | _experts(meta, "num_experts")
    return GgufModel({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_read_common(meta), **own})


def olmoe(meta: Metadata) -> GgufModel:
    own: Config = {"norm_topk_prob": False} | _experts(meta, "num_experts", inner_key="intermediate_size")
    if meta.values.has("attention.clamp_kqv"):
        own["clip_qkv"] = meta.values.number("attention.clamp_kqv", 1e9)
    return GgufModel({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", **_read_common(meta), **own})


def _gemma(meta: Metadata, largest: int) -> Config:
    """largest: layers of the family's largest model, whose scores are scaled by another size than the heads' (27B, of both)."""
    config = _read_common(meta)
    is_largest = config["num_hidden_layers"] == largest
    config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if is_largest else _head_dim(config)
    config |= {"hidden_activation": "gelu_pytorch_tanh", "head_dim": _head_dim(config)}
    config["dtype"] = "bfloat16"  # its states exceed what float16 holds
    return config


def _read_pattern(meta: Metadata, default: int, num_layers: int) -> list[str]:
    """Types of layers: of each `default` or attention.sliding_window_pattern the last one sees all; or, of each layer, whether it has a window."""
    key, values = "attention.sliding_window_pattern", meta.values
    given = values.get(key)
    if isinstance(given, list):
        if len(given) != num_layers or not all(isinstance(own, bool) for own in given):
            raise values.refuse(key, f"an integer, or true or false for each of {num_layers} layers")
        return ["sliding_attention" if own else "full_attention" for own in given]
    period = values.integer(key, 1024, default=default)
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]


def gemma2(meta: Metadata) -> GgufModel:
    config, values = _gemma(meta, largest=46), meta.values
    config["layer_types"] = _read_pattern(meta, 2, config["num_hidden_layers"])
    config["sliding_window"] = values.integer("attention.sliding_window", 2**24, default=4096)
    config["attn_logit_softcapping"] = values.number("attn_logit_softcapping", 1e9, default=50.0)
    config["final_logit_softcapping"] = values.number("final_logit_softcapping", 1e9, default=30.0)
    return GgufModel({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **config}, norm_offset=1.0)


def gemma3(meta: Metadata) -> GgufModel:
    config, values = _gemma(meta, largest=62), meta.values
    # Without one llama.cpp has no windows at all, and one rotary base for all layers: which no config.json of this family says.
    config["sliding_window"] = values.integer("attention.sliding_window", 2**24)
    config["rope_local_base_freq"] = values.number("rope.freq_base_swa", 1e15, default=10000.0)
    config["rope_theta"] = values.number("rope.freq_base", 1e15, default=1e6)
    config["layer_types"] = _read_pattern(meta, 6, config["num_hidden_layers"])
    if values.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = values.number("final_logit_softcapping", 1e9)
    return GgufModel({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **config}, norm_offset=1.0)


def phi3(meta: Metadata) -> GgufModel:
    config, values = _read_common(meta), meta.values
    turning = values.integer("rope.dimension_count", 1024, default=_head_dim(config))
    if turning != _head_dim(config):
        config["partial_rotary_factor"] = _turning_share(meta, config, turning)
    if "rope_factors_long" in meta.factors:
        if "rope_factors_short" not in meta.factors:
            raise ModelError(f"{values.where}: tensor rope_factors_short is missing")
        long, short = (list(meta.factors[f"rope_factors_{name}"]) for name in ("long", "short"))
        config["rope_scaling"] = {"type": "longrope", "short_factor": short, "long_factor": long}
        config["original_max_position_embeddings"] = values.integer("rope.scaling.original_context_length", 2**24)
    if window := values.get("attention.sliding_window"):
        config["sliding_window"] = window
    return GgufModel({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **config})


def ernie4_5(meta: Metadata) -> GgufModel:
    config = _read_common(meta)
    own = {"use_bias": meta.has("blk.0.attn_q.bias"), "head_dim": _head_dim(config)}
    return GgufModel({"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", **config, **own})


def ernie4_5_moe(meta: Metadata) -> GgufModel:
    values = meta.values
    own: Config = {
        "moe_num_experts": values.integer("expert_count", 4096),
        "moe_k": values.integer("expert_used_count", 4096),
        "moe_intermediate_size": values.integer("expert_feed_forward_length", 2**20),
        "moe_num_shared_experts": values.integer("expert_shared_count", 1024, low=0, default=0),
        "moe_layer_start_index": values.integer("leading_dense_block_count", 1024, low=0, default=0),
        "moe_layer_interval": values.integer("interleave_moe_layer_step", 1024, default=1),
        "use_bias": meta.has("blk.0.attn_q.bias"),
    }
    return GgufModel({"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", **_read_common(meta), **own})


def glm4(meta: Metadata) -> GgufModel:
    config = _read_common(meta)
    turning = meta.values.integer("rope.dimension_count", 1024)
    own = {
        "head_dim": _head_dim(config),
        "partial_rotary_factor": _turning_share(meta, config, turning),
        "attention_bias": meta.has("blk.0.attn_q.bias"),
    }
    return GgufModel({"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", **config, **own})


def _corrected(meta: Metadata) -> Config:
    """DeepSeek-V3's router, and what is beside it."""
    values = meta.values
    own: Config = {"norm_topk_prob": True} | _experts(meta, "n_routed_experts")
    own["n_shared_experts"] = values.integer("expert_shared_count", 1024, low=0, default=0)
    own["first_k_dense_replace"] = values.integer("leading_dense_block_count", 1024, low=0, default=0)
    own["routed_scaling_factor"] = values.number("expert_weights_scale", 1e6, default=1.0)
    groups = values.integer("expert_group_count", 4096, default=1)
    own["n_group"], own["topk_group"] = groups, values.integer("expert_group_used_count", 4096, default=1)
    return own


SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


def glm4moe(meta: Metadata) -> GgufModel:
    config, values = _read_common(meta), meta.values
    if values.integer("expert_gating_func", 255, default=SIGMOID) != SIGMOID:
        raise values.refuse("expert_gating_func", f"{SIGMOID} (sigmoid)")
    modules = values.integer("nextn_predict_layers", 1024, low=0, default=0)
    turning = values.integer("rope.dimension_count", 1024)
    own = {
        "head_dim": _head_dim(config),
        "partial_rotary_factor": _turning_share(meta, config, turning),
        "attention_bias": meta.has("blk.0.attn_q.bias"),
        "use_qk_norm": meta.has("blk.0.attn_q_norm.weight"),
        "num_hidden_layers": config["num_hidden_layers"] - modules,
        "num_nextn_predict_layers": modules,
    }
    return GgufModel({"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", **config, **_corrected(meta), **own})


def deepseek2(meta: Metadata) -> GgufModel:
    """V2 and V3. Newer files keep keys and values of a latent apart, as one head of latent and turning key: the heads' own sizes have other keys."""
    values, config = meta.values, _read_common(_without_heads(meta))
    turning = values.integer("rope.dimension_count", 2**16)
    size = "_mla" if values.has("attention.key_length_mla") else ""
    heads = {
        "kv_lora_rank": values.integer("attention.kv_lora_rank", 2**16),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": values.integer(f"attention.key_length{size}", 2**16) - turning,
        "v_head_dim": values.integer(f"attention.value_length{size}", 2**16),
        "q_lora_rank": values.integer("attention.q_lora_rank", 2**16) if values.has("attention.q_lora_rank") else None,
        "num_key_value_heads": config["num_attention_heads"],
    }
    own = _corrected(meta)
    if own["n_routed_experts"] > 64 and not values.has("expert_group_count"):
        # V2 and V3 choose among the best groups of experts; older files do not say how many those are.
        raise ModelError(f"{values.where} has no 'expert_group_count': it is older than that key; convert the model's own weights anew")
    if isinstance(scaling := config.get("rope_scaling"), dict) and values.has("rope.scaling.yarn_log_multiplier"):
        scale = round(10 * values.number("rope.scaling.yarn_log_multiplier", 1e3), 6)
        scaling |= {"mscale": scale, "mscale_all_dim": scale}
    if values.integer("expert_gating_func", 255, default=SOFTMAX) == SIGMOID:
        name = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    else:
        name = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        own |= {"norm_topk_prob": False, "topk_method": "greedy" if own["n_group"] == 1 else "group_limited_greedy"}
    return GgufModel({**name, **config, **own, **heads})


def _without_heads(meta: Metadata) -> Metadata:
    """The sizes of heads mean something else here."""
    known = ("attention.key_length", "attention.value_length", "attention.head_count_kv")
    return Metadata(meta.values.without(*known), meta.tensors, meta.factors)


GGUF_ARCHITECTURES: dict[str, Callable[[Metadata], GgufModel]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
    "olmoe": olmoe,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "ernie4_5": ernie4_5,
    "ernie4_5-moe": ernie4_5_moe,
    "glm4": glm4,
    "glm4moe": glm4moe,
    "deepseek2": deepseek2,
}
"""By `general.architecture`."""
