"""Values of config.json that no model has: each an error that names the key, or what transformers makes of it. No weights."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

from backend.errors import ModelError
from backend.model_checks import check_config, check_model
from backend.models.families import ARCHITECTURES
from backend.models.quantized_config import read_checkpoint_quantization
from tests.families import Case, load, make_model

NAN, INFINITE = float("nan"), float("inf")
NO_NUMBER = ["4", True, [], {}, "nonsense", [1, 2]]
NO_POSITIVE = [-1, 0, NAN, INFINITE, *NO_NUMBER]
NO_COUNT = [-1, 0, 0.5, NAN, INFINITE, 10**12, *NO_NUMBER]
NO_INDEX = [value for value in NO_COUNT if value != 0]
NO_FLAG = [0, 1, "true", [], {}, NAN]
NO_NAME = [5, True, [], {}, "nonsense"]
NO_LAYERS = [["full_attention"], ["full_attention", "full_attention", "full_attention"], ["full_attention", "odd_attention"], [1, 2], {}, "x", 5]

WRONG: dict[str, list[Any]] = {
    "hidden_size": NO_COUNT, "intermediate_size": NO_COUNT, "num_hidden_layers": NO_COUNT, "num_attention_heads": NO_COUNT, "vocab_size": NO_COUNT,
    "num_key_value_heads": [3, 8, *NO_COUNT], "head_dim": [1, 7, *NO_COUNT], "max_position_embeddings": NO_COUNT,
    "rms_norm_eps": [1.5, *NO_POSITIVE], "eos_token_id": [-1, 301, 10**9, 0.5, NAN, "4", True, {}, [1, 301], ["x"]], "bos_token_id": [301, -2, "x"],
    "tie_word_embeddings": NO_FLAG, "attention_bias": NO_FLAG, "mlp_bias": NO_FLAG, "use_bias": NO_FLAG, "qkv_bias": NO_FLAG, "use_qk_norm": NO_FLAG,
    "hidden_act": NO_NAME, "hidden_activation": NO_NAME, "layer_types": NO_LAYERS, "use_sliding_window": NO_FLAG,
    "max_window_layers": NO_INDEX, "query_pre_attn_scalar": NO_POSITIVE, "final_logit_softcapping": NO_POSITIVE,
    "num_experts": [1, *NO_COUNT], "num_local_experts": [1, *NO_COUNT], "n_routed_experts": [1, *NO_COUNT], "moe_num_experts": [1, *NO_COUNT],
    "num_experts_per_tok": [9, *NO_COUNT], "moe_k": [9, *NO_COUNT], "moe_intermediate_size": NO_COUNT, "norm_topk_prob": NO_FLAG,
    "routed_scaling_factor": NO_POSITIVE, "n_shared_experts": NO_INDEX, "first_k_dense_replace": NO_INDEX, "decoder_sparse_step": NO_COUNT,
    "rope_interleave": NO_FLAG,
    "mlp_only_layers": [[-1], [2], ["x"], "x", 5, {}], "moe_layer_interval": NO_COUNT, "moe_norm_min": NO_POSITIVE, "clip_qkv": NO_POSITIVE,
    "kv_lora_rank": NO_COUNT, "q_lora_rank": NO_COUNT, "qk_nope_head_dim": NO_COUNT, "qk_rope_head_dim": [7, *NO_COUNT], "v_head_dim": NO_COUNT,
    "rope_parameters": [0, False, 5, "x", [1]], "rope_scaling": [0, False, 5, "x", [1], {"type": "odd"}, {"rope_type": ""}, {"rope_type": 5}],
    "quantization_config": [0, False, 5, "x", [1], {"quant_method": "odd"}, {"quant_method": 5}],
}  # fmt: skip
"""By key; of those that a family's configuration has."""
EVERYWHERE = ("rope_parameters", "rope_scaling", "quantization_config")
UNREAD = {
    "deepseek_v2": {"num_key_value_heads", "head_dim"}, "deepseek_v3": {"num_key_value_heads", "head_dim"}, "mistral": {"layer_types"},
}  # fmt: skip
"""Keys of a family that say nothing: its attention has them from elsewhere."""
WRITTEN = {"rope_scaling": "rope", "quantization_config": "quant"}
BESIDE = ("num_key_value_heads", "head_dim", "num_attention_heads", "n_group", "topk_group", "num_experts_per_tok", "moe_k", "mlp_only_layers")
"""Which an error names in the place of the key that they contradict."""
IN_ROPE: dict[str, list[Any]] = {"rope_theta": NO_POSITIVE, "partial_rotary_factor": [0.03, 1.5, *NO_POSITIVE], "rope_type": NO_NAME}

LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
FEW = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**FEW, "shared_expert_intermediate_size": 24, "num_experts": 8, "sliding_window": 64}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**FEW, "num_experts": 8}),
    "mixtral": ("MixtralForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {"moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 2}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**FEW, "n_routed_experts": 8}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**LATENT, "n_group": 2, "topk_group": 1}),
}


def read(config: dict[str, Any]) -> Any:
    return ARCHITECTURES[config["architectures"][0]](check_config(config, "DIR"))


@pytest.fixture(scope="module", params=FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    family = request.param
    architecture, own = FAMILIES[family]
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": 301, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    heads = {} if "kv_lora_rank" in own else {"head_dim": 16}
    values = transformers.AutoConfig.for_model(family, **{**sizes, **ids, **heads, **own}).to_dict()
    return {**json.loads(json.dumps(values)), "architectures": [architecture]}


def test_what_no_model_has_is_named(config: dict[str, Any]) -> None:
    taken = []
    for key, wrong in WRONG.items():
        if (key not in config and key not in EVERYWHERE) or key in UNREAD.get(config["model_type"], ()):
            continue
        for value in wrong:
            try:
                read({**config, key: value})
            except ModelError as error:
                named = (WRITTEN.get(key, key), *BESIDE)
                assert any(name in str(error) for name in named), (key, value, str(error))
                assert "DIR" in str(error)
            else:
                taken.append((key, value))
    assert not taken


def test_what_no_rotary_embedding_has_is_named(config: dict[str, Any]) -> None:
    parameters = config["rope_parameters"] or {}
    nested = [name for name in ("full_attention", "sliding_attention") if name in parameters]
    for key, wrong in IN_ROPE.items():
        for value in wrong:
            changed = {**parameters, **{name: {**parameters[name], key: value} for name in nested}} if nested else {**parameters, key: value}
            with pytest.raises(ModelError) as caught:
                read({**config, "rope_parameters": changed})
            assert key in str(caught.value) or (key == "rope_type" and "rope scaling" in str(caught.value)), (key, value)


NULL_FLAGS = {key for key, wrong in WRONG.items() if wrong is NO_FLAG}


def test_null_is_what_is_not_there(config: dict[str, Any]) -> None:
    """But of windows and caps, which null takes away, of flags, which it turns off, and of the heads' size."""
    for key in set(WRONG) & set(config) - {"sliding_window", "final_logit_softcapping", "rope_parameters", "head_dim"} - NULL_FLAGS:
        without, spec = {name: value for name, value in config.items() if name != key}, None
        try:
            spec = read(without)
        except (ModelError, KeyError):
            with pytest.raises((ModelError, KeyError)):
                read({**config, key: None})
        else:
            assert read({**config, key: None}) == spec, key
    for key in NULL_FLAGS & set(config):
        assert read({**config, key: None}) == read({**config, key: False}), key


def test_a_size_of_heads_that_is_null_is_that_of_their_share(config: dict[str, Any]) -> None:
    """Whatever the family's own is where the file does not name one."""
    if "kv_lora_rank" not in config:
        assert read({**config, "hidden_size": 48, "head_dim": None}) == read({**config, "hidden_size": 48, "head_dim": 12})


UNLIKE_DEFAULT = {
    "eos_token_id",  # what is not named ends no answer
    "head_dim", "num_key_value_heads",  # by the other sizes, as the models' own code has it
    "q_lora_rank", "n_shared_experts",  # null says that there are none, and null is what is not there
}  # fmt: skip


def test_what_the_file_does_not_say_is_what_transformers_takes(config: dict[str, Any]) -> None:
    defaults = json.loads(json.dumps(transformers.AutoConfig.for_model(config["model_type"]).to_dict()))
    unlike = set()
    for key in config.keys() - {"architectures", "model_type"}:
        try:
            spec = read({name: value for name, value in config.items() if name != key})
        except (ModelError, KeyError):
            continue  # it has to say this one
        with contextlib.suppress(ModelError):  # what fits that model's other sizes alone
            if read({**config, key: defaults.get(key)}) != spec:
                unlike.add(key)
    assert unlike <= UNLIKE_DEFAULT


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_group": 3}, "n_group is 3; it must be such that n_routed_experts (8) divides by it"),
        ({"n_group": 8, "topk_group": 2}, "n_group is 8; it must be such that n_routed_experts (8) divides by it, 2 experts to a group"),
        ({"topk_group": 3}, "topk_group is 3; it must be no more than n_group (2)"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "topk_group is 1; it must be no more than n_group (4), whose groups of 2 have"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be no more than n_routed_experts (8)"),
    ],
)
def test_groups_that_cannot_be(values: dict[str, Any], message: str) -> None:
    config = transformers.AutoConfig.for_model("deepseek_v3", **LATENT, num_hidden_layers=2, n_group=2, topk_group=1).to_dict()
    with pytest.raises(ModelError) as caught:
        read({**config, "architectures": ["DeepseekV3ForCausalLM"], **values})
    assert message in str(caught.value)


def test_windows(config: dict[str, Any]) -> None:
    """Where they are used."""
    if config["model_type"] in ("mistral", "gemma2", "gemma3_text", "mixtral", "phi3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        used = {"use_sliding_window": True} if "use_sliding_window" in config else {}
        for value in NO_COUNT:
            with pytest.raises(ModelError, match="sliding_window is"):
                read({**config, **used, "sliding_window": value})


QUANTIZED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("num_bits", [3, 16, *NO_COUNT]),
        ("group_size", NO_COUNT),
        ("strategy", NO_NAME),
        ("symmetric", NO_FLAG),
        ("actorder", [-1, 0, 0.5, NAN, [], {}, "nonsense"]),
        ("ignore", [0, False, {}, "x", [5]]),
        ("format", NO_NAME),
        ("targets", [0, False, {}, "x", [5]]),
    ],
)
def test_what_no_quantized_checkpoint_has_is_named(key: str, wrong: list[Any]) -> None:
    for value in wrong:
        group = QUANTIZED["config_groups"]["a"]  # type: ignore[index]
        changed: dict[str, Any] = {**QUANTIZED, "config_groups": {"a": {**group, "weights": {**group["weights"]}}}}
        place = changed if key in changed else changed["config_groups"]["a"] if key == "targets" else changed["config_groups"]["a"]["weights"]
        place[key] = value
        with pytest.raises(ModelError, match=key):
            read_checkpoint_quantization({"quantization_config": changed}, "DIR")


def test_a_tied_head_beside_another_in_the_file(tmp_path) -> None:
    """transformers takes the file's, others the embedding: nobody may choose in silence. One that repeats the embedding says nothing."""
    make_model(Case("llama", config={"tie_word_embeddings": False}), tmp_path)
    path, weights = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
    check_model(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"tie_word_embeddings is true, .* the weight lm_head.weight is not model.embed_tokens.weight"):
        check_model(tmp_path)
    for head, is_good in ((weights["model.embed_tokens.weight"], True), (weights["model.embed_tokens.weight"].to(torch.bfloat16), False)):
        save_file({**weights, "lm_head.weight": head.clone()}, tmp_path / "model.safetensors")
        if is_good:
            assert check_model(tmp_path).is_tied
        else:
            with pytest.raises(ModelError, match="tie_word_embeddings is true"):
                check_model(tmp_path)


def test_a_tied_head_alone_is_the_embedding(tmp_path) -> None:
    """As transformers loads it: safetensors' save_model, which writes one weight under one name, leaves the head's."""
    save_model(make_model(Case("llama", config={"tie_word_embeddings": True}), tmp_path), str(tmp_path / "model.safetensors"))
    weights = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" not in weights
    model = load(tmp_path)
    assert torch.equal(model.embed(torch.tensor([3, 300])), weights["lm_head.weight"][[3, 300]])
    assert torch.equal(model.logits(torch.eye(64)[:1])[0], weights["lm_head.weight"][:, 0])
