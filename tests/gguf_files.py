"""GGUF files of Hugging Face folders, as llama.cpp's converter writes them: what the reader is held against."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
}
FLOATS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "routed_scaling_factor": "expert_weights_scale",
    "clip_qkv": "attention.clamp_kqv",
}
TOKENS = ["<unk>", "<s>", "</s>", "Ġ", "a", "b", "c", "ab", "Ġab", "abc"]
MERGES = ["a b", "Ġ ab", "ab c"]
KINDS = [2, 3, 3, *[1] * 7]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp wants them for pairs that are beside each other."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def num_modules(config: dict[str, Any], arch: str) -> int:
    """Of those that predict more tokens: llama.cpp's converter leaves DeepSeek's out."""
    return 0 if arch == "deepseek2" else config.get("num_nextn_predict_layers") or 0


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    writer.add_block_count(config["num_hidden_layers"] + num_modules(config, arch))
    for key, name in KEYS.items():
        if config.get(key) is not None and not (key == "num_key_value_heads" and arch == "deepseek2"):
            writer.add_uint32(f"{arch}.{name}", config[key])
    for key, name in FLOATS.items():
        if config.get(key) is not None:
            writer.add_float32(f"{arch}.{name}", config[key])
    if (norm := config.get("norm_topk_prob")) is not None:
        writer.add_expert_weights_norm(norm)
    add_rope(writer, config, arch)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if arch == "deepseek2":  # keys and values apart: as one head of the latent and the key that turns
        writer.add_head_count_kv(1)
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(config["qk_rope_head_dim"])
        writer.add_uint32(f"{arch}.expert_gating_func", 2 if config["model_type"] == "deepseek_v3" else 1)
        return
    if config.get("head_dim"):
        writer.add_key_length(head)
        writer.add_value_length(head)
    writer.add_rope_dimension_count(int(head * (find_rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)))


def find_rope(config: dict[str, Any]) -> dict[str, Any]:
    found = config["rope_parameters"]
    return found.get("full_attention", found)


def add_rope(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    rope = find_rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(original)
    if rope["rope_type"] == "longrope":
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))
    if rope["rope_type"] == "llama3":
        size, found = config["head_dim"], []
        for i in range(size // 2):
            length = 2 * math.pi * rope["rope_theta"] ** (2 * i / size)
            low, high, whole = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
            smooth = (whole / length - low) / (high - low)
            found.append(1 if length < whole / high else rope["factor"] if length > whole / low else 1 / ((1 - smooth) / rope["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(found, dtype=np.float32))


def write_gguf(
    folder: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    edit: dict[str, Any] | None = None,
    tokenizer: Any = add_tokenizer,
    leave_out: str = "",
    split_tensors: int = 0,
) -> Path:
    """The model of a folder in a file. kind: of its matrices; edit: tensors to add; leave_out: one not to write; split_tensors: in a part."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_tensors)
    add_metadata(writer, config, arch)
    if tokenizer is not None:
        tokenizer(writer)
    layers = config["num_hidden_layers"] + num_modules(config, arch)
    names = gguf.get_tensor_name_map({name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[arch], layers)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    found: dict[str, np.ndarray] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        if arch == "llama" and (own := re.search(r"\.([qk])_proj\.", name)):
            weight = permuted(weight, config["num_attention_heads" if own[1] == "q" else "num_key_value_heads"])
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            stacks.setdefault(name.replace(expert[0], ".experts."), {})[int(expert[1])] = weight
        elif name.endswith("kv_b_proj.weight"):
            heads, key = config["num_attention_heads"], config["qk_nope_head_dim"]
            parts = weight.reshape(heads, key + config["v_head_dim"], -1)
            found[name.replace("kv_b", "k_b")] = parts[:, :key].swapaxes(1, 2)
            found[name.replace("kv_b", "v_b")] = parts[:, key:]
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = weight.squeeze()
    found |= {name: np.stack([own[number] for number in sorted(own)]) for name, own in stacks.items()}
    tensors = {names.get_name(name, (".weight", ".bias")): weight for name, weight in found.items()} | (edit or {})
    for name, weight in tensors.items():
        assert name is not None
        if name != leave_out:
            own = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
            weight = np.ascontiguousarray(weight)
            data = weight if own == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(weight, own)
            writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
