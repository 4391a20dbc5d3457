"""Every family that is served, against transformers in float32: tiny random models that have each feature, and each odd size."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backend.errors import ModelError
from backend.model_checks import check_model
from backend.models.decoder_layer import DecoderLayer
from backend.models.families import ARCHITECTURES, DRAFTERS
from backend.models.layers import Weights
from backend.models.loader import Checkpoint
from backend.models.loading import check_gpu
from backend.models.rope import frequencies
from backend.parallel.ranks import Ranks
from backend.tokenizer_checks import check_vocabulary
from deploy.served_model import check_model as check_before_launch
from tests.families import (
    CONTEXT,
    VOCABULARY,
    Case,
    assert_close,
    check_greedy,
    check_logits,
    edited,
    expected_logits,
    load,
    make_model,
    random_tokens,
    refused,
    rope,
)
from tests.steps import Row, Steps, make_sums_late, make_worker
from tests.test_latents import CASES as LATENTS
from tests.test_mixtures import CASES as MIXTURES
from tests.test_own_drafters import OWN

SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0], [1.0, 2.0, 3.0, 4.5, 6.0, 8.0, 12.0, 16.0]
LONGROPE = rope("longrope", short_factor=SHORT, long_factor=LONG)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LAYER_TYPES = ["sliding_attention", "full_attention"]
SCALED_QUERIES = {"head_dim": 16, **rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1)}
LATER = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
GLM = {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 0, "partial_rotary_factor": 0.5}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CASES = [
    Case("llama", "yarn, biases, gelu", {**YARN, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    Case("llama", "yarn with its own factor, bounds not whole", rope("yarn", factor=4.0, attention_factor=1.3, truncate=False)),
    Case("llama", "yarn with mscale", rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.2, original_max_position_embeddings=32)),
    Case("llama", "dynamic rope", rope("dynamic", factor=4.0)),
    Case("llama", "llama3 rope", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)),
    Case("llama", "one KV head of 80, one layer", {"num_key_value_heads": 1, "head_dim": 80, "num_hidden_layers": 1}),
    Case("llama", "heads of 96, tied", {"head_dim": 96, "tie_word_embeddings": True}),
    Case("llama", "three heads of 256, odd sizes", {"head_dim": 256, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 37}),
    Case("mistral", "a window in every layer", {"sliding_window": 11}),
    Case("mistral", "no window, heads of 80", {"sliding_window": None, "head_dim": 80}),
    Case("mistral", "a window as long as a page", {"sliding_window": 8, "num_key_value_heads": 1}),
    Case("mistral", "a window of one token", {"sliding_window": 1}),
    Case("ministral", "windows in some layers", {"sliding_window": 13, "layer_types": LAYER_TYPES, "head_dim": 16}),
    Case("ministral3", "queries that grow", SCALED_QUERIES),
    Case("qwen2"),
    Case("qwen2", "windows in later layers, tied", {**LATER, "tie_word_embeddings": True}),
    Case("qwen2", "yarn, one KV head", {**YARN, "num_key_value_heads": 1}),
    Case("qwen3", "heads of 32", {"head_dim": 32}),
    Case("qwen3", "biases, windows, tied", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True, "use_sliding_window": True}
         | {"sliding_window": 20, "layer_types": LAYER_TYPES}),
    Case("phi3", "fused weights"),
    Case("phi3", "a window, part of each head turns", {"sliding_window": 15, **rope("default", partial_rotary_factor=0.75)}),
    Case("phi3", "longrope", {**LONGROPE, "original_max_position_embeddings": 32}),
    Case("phi3", "longrope in part", {**rope("longrope", short_factor=SHORT[:6], long_factor=LONG[:6], partial_rotary_factor=0.75)}
         | {"original_max_position_embeddings": 32}),
    Case("phi3", "longrope within the original context", {**LONGROPE, "original_max_position_embeddings": CONTEXT}),
    Case("gemma2", "all that it has", GEMMA),
    Case("gemma2", "no caps, untied, biases, one KV head of 256", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
         | {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 1}),
    Case("gemma3_text", "all that it has", GEMMA | {"layer_types": LAYER_TYPES}),
    Case("gemma3_text", "caps, scaling where there is no window", GEMMA | {"sliding_window_pattern": 2, "rope_parameters": NESTED}
         | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "num_hidden_layers": 3}),
    Case("ernie4_5", "interleaved rope, tied", {"head_dim": 16}),
    Case("ernie4_5", "biases, one KV head", {"head_dim": 24, "use_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    Case("glm", "half of each head turns, interleaved", GLM),
    Case("glm4", "norms after each part too", GLM | {"attention_bias": False}),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    return make_model(request.param, folder), folder


def test_logits_are_those_of_transformers(case: tuple[Any, Path]) -> None:
    check_logits(*case, alone=64)


def test_greedy_tokens_are_those_of_transformers(case: tuple[Any, Path]) -> None:
    check_greedy(*case)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen2_moe", "deepseek_v3"])
def test_states_are_read_when_their_sums_are_there(family: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, counts = folders(family), make_sums_late(monkeypatch)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    check_logits(model, folder)
    assert (not counts) == (family == "gemma2")  # what it adds is normalised before, whole


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3", "phi3", "ministral3", "glm4", "ernie4_5_moe", "deepseek_v3"])
def test_bfloat16_computes_about_the_same(family: str, folders: Callable[[str], Path]) -> None:
    """It must agree with transformers' own bfloat16 as well as that does with float32."""
    auto, folder, token_ids = transformers.AutoModelForCausalLM, folders(family), random_tokens(40)
    exact, rounded = (
        expected_logits(auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval(), token_ids)
        for dtype in (torch.float32, torch.bfloat16)
    )
    steps = Steps(make_worker(folder, dtype="bfloat16"))
    steps.admit(0, token_ids, range(5))
    steps.run([Row(0, 0, 40)])
    assert (steps.logits() - exact).abs().mean() < 1.3 * (rounded - exact).abs().mean()


# -- what every family's files are held against ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The first case of a family, saved once."""
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make_model(next(case for case in ALL_CASES if case.family == family), made[family])
        return made[family]

    return folder_of


ALL_CASES = [*CASES, *MIXTURES, *LATENTS]
FAMILIES = list(dict.fromkeys(case.family for case in ALL_CASES))


def test_every_family_has_a_case(folders: Callable[[str], Path]) -> None:
    named = {json.loads((folders(family) / "config.json").read_text())["architectures"][0] for family in FAMILIES}
    others = {own.architecture for own in OWN if own.architecture}  # of families that transformers does not have
    assert named | others == set(ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_missing_or_left_over(family: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = edited(folders(family), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    names = [name for name in weights if name.startswith("model.layers.0.") and not (name.endswith("bias") and family in ("glm", "ernie4_5"))]
    for name in (random.Random(family).choice(names), "model.norm.weight"):
        save_file({key: value for key, value in weights.items() if key != name}, folder / "model.safetensors")
        refused(folder, f"weight {name} is missing")
    save_file(weights | {"model.layers.0.self_attn.sinks": torch.zeros(4)}, folder / "model.safetensors")
    refused(folder, "weight model.layers.0.self_attn.sinks would not be used")


@pytest.mark.parametrize("family", FAMILIES)
def test_made_up_weights(family: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Of the shapes that config.json makes them, with no file to read."""
    folder = edited(folders(family), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    steps = Steps(make_worker(folder, load_format="dummy"))
    steps.admit(0, random_tokens(20), range(3))
    steps.run([Row(0, 0, 20)])
    assert steps.logits().shape == (20, VOCABULARY) and steps.logits().isfinite().all()


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; known: silu, swish, gelu, gelu_new, gelu_pytorch_tanh"),
        ("gemma2", {"hidden_activation": "relu6"}, "hidden_activation 'relu6' is not supported"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0; it must be a number above 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; it must be false"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; it must be a list of num_hidden_layers (2)"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, "of: full_attention, sliding_attention"),
        ("qwen2", {"is_causal": False}, "is_causal is False; it must be true: tokens are written one after the other"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'; it must be true or false"),
        ("mistral", {"layer_types": LAYER_TYPES}, "layer_types is ['sliding_attention', 'full_attention']; it must be what a model of ['MistralFor"),
        ("llama", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types is ['full_attention', 'chunked_attention']"),
        ("ministral3", {"rope_parameters": ...}, "rope_parameters is None; it must be an object"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be an integer from 1"),
        ("mistral", {"sliding_window": 2.5}, "sliding_window is 2.5"),
        ("llama", rope("default", partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; it must be 1"),
        (
            "glm",
            {"rope_parameters": {"partial_rotary_factor": 0.2}},
            "partial_rotary_factor is 0.2; it must be such that an even part of a head of 16",
        ),
        ("glm", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
        (
            "phi3",
            rope("longrope", short_factor=SHORT, long_factor=LONG[:3]),
            "long_factor is [1.0, 2.0, 3.0]; it must be a list of 8 numbers above 0",
        ),
        ("phi3", rope("longrope", short_factor=SHORT), "has no 'long_factor'"),
        # What follows transformers passes over in silence: a length within the scaling, a scaling of all layers, a kind by its older name.
        (
            "phi3",
            rope("longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=32) | {"original_max_position_embeddings": ...},
            "original_max_position_embeddings is 32; it must be beside this object",
        ),
        ("gemma3_text", rope("linear", factor=8.0), "it must be an object for each type of layer (full_attention, sliding_attention)"),
        ("gemma3_text", {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 8.0}}, "type is 'linear'; it must be named rope_type"),
        ("llama", rope("yarn", factor=4.0, beta_fast=-1.0), "beta_fast is -1.0"),
        ("llama", rope("yarn", factor=4.0, attn_factor=0.8), "attn_factor is 0.8; it must be 1"),
        ("llama", rope("yarn", factor=4.0, rope_theta=1), "rope_theta is 1; yarn"),
        ("llama", rope("dynamic"), "has no 'factor'"),
        ("llama", {"rope_parameters": NESTED}, "rope_parameters"),
        ("llama", rope("mrope"), "rope scaling 'mrope' is not supported; known: default, linear, llama3, dynamic, yarn, longrope"),
        ("llama", {"architectures": ["MambaForCausalLM"]}, "architectures ['MambaForCausalLM'] are not supported; known: LlamaForCausalLM, Mistral"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_values_that_no_model_has(family: str, values: dict[str, Any], message: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    refused(edited(folders(family), tmp_path / "model", **values), str(tmp_path / "model"), message)


def test_a_config_that_promises_biases(folders: Callable[[str], Path], tmp_path: Path) -> None:
    refused(edited(folders("ernie4_5"), tmp_path / "model", use_bias=True), "q_proj.bias", "is missing")


def test_a_file_of_ministral_under_its_older_name(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders("ministral")
    assert check_model(edited(folder, tmp_path / "model", architectures=["MistralForCausalLM"])).layers == check_model(folder).layers


def test_older_files_of_gemma3(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The bases of both kinds of layers beside each other, as the files of 2025 have them."""
    folder = folders("gemma3_text")
    before = edited(
        folder, tmp_path / "model", rope_parameters=..., rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=2, layer_types=...
    )
    assert check_model(before).layers == check_model(folder).layers


def test_the_placeholder_of_gemma3(folders: Callable[[str], Path]) -> None:
    """For images, beyond the embedding of its text models as they are published."""
    tokens = {i: f"w{i}" for i in range(VOCABULARY)} | {VOCABULARY: "<image_soft_token>"}
    check_vocabulary(tokens, check_model(folders("gemma3_text")), "error")
    with pytest.raises(ModelError, match="a token beyond the model's embedding"):
        check_vocabulary(tokens, check_model(folders("gemma2")), "error")


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_gemma_reads_one_name_of_its_activation(family: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers and vLLM read hidden_activation alone, whatever a file has beside it."""
    folder = folders(family)
    assert check_model(edited(folder, tmp_path / "model", hidden_activation=..., hidden_act="silu")).layers == check_model(folder).layers


def test_older_names_of_longrope(folders: Callable[[str], Path], tmp_path: Path) -> None:
    scaling = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    values = {"rope_parameters": ..., "rope_theta": 1000.0, "rope_scaling": scaling, "original_max_position_embeddings": 32}
    part = check_model(edited(folders("phi3"), tmp_path / "model", **values)).layers[0].attention.rope
    assert (part.kind, part.original_len, part.factor, part.long_factor) == ("longrope", 32, 4.0, tuple(LONG))


@pytest.mark.parametrize("family", ["llama", "qwen3", "ministral3", "gemma2", "ernie4_5", "ernie4_5_moe", "deepseek_v3"])
def test_older_places_of_rope(family: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """rope_scaling has what rope_parameters have, and then the base in it comes before the one beside it, as in transformers."""
    folder = folders(family)
    config = json.loads((folder / "config.json").read_text())
    parameters = config["rope_parameters"] | {"rope_theta": 1234.0}
    own = check_model(edited(folder, tmp_path / "own", rope_parameters=parameters)).layers
    inside = edited(folder, tmp_path / "inside", rope_parameters=..., rope_scaling=parameters, rope_theta=77.0)
    apart = {key: value for key, value in parameters.items() if key != "rope_theta"}
    beside = edited(folder, tmp_path / "beside", rope_parameters=..., rope_scaling=apart, rope_theta=1234.0)
    assert check_model(inside).layers == check_model(beside).layers == own


@pytest.mark.parametrize(("family", "kind"), [("llama", "llama3"), ("ministral3", "yarn")])
def test_an_original_context_beside_the_scaling_comes_first(family: str, kind: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As in transformers, which so reads Phi-3's files: for what turns, and for queries that grow."""
    scaling = rope(kind, factor=4.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0, llama_4_scaling_beta=0.1)
    folder = edited(folders(family), tmp_path / "model", **scaling, original_max_position_embeddings=64)
    model, own = transformers.AutoModelForCausalLM.from_pretrained(folder), check_model(folder).layers[0].attention.rope
    assert own.original_len == model.config.rope_parameters["original_max_position_embeddings"] == 64
    torch.testing.assert_close(frequencies(own, CONTEXT)[0], model.model.rotary_emb.inv_freq)


def test_yarn_says_how_far_a_context_reaches(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Whoever adds it to a config.json, as Qwen's model cards tell to, leaves max_position_embeddings (128) as it is."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = edited(folders("qwen2"), tmp_path / "model", rope_parameters=..., rope_scaling=scaling)
    assert check_before_launch(str(folder), 256) == folder and check_model(folder).max_model_len == 256
    steps, token_ids = Steps(make_worker(folder)), random_tokens(200)
    steps.admit(0, token_ids, range(25))
    steps.run([Row(0, 0, 200)])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert_close(steps.logits(), expected_logits(model, token_ids))
    shorter = edited(folder, tmp_path / "shorter", rope_scaling=scaling | {"original_max_position_embeddings": 16})
    assert check_model(shorter).max_model_len == CONTEXT
    huge = edited(folder, tmp_path / "huge", rope_scaling=scaling | {"factor": 1e6})
    refused(huge, "factor is 1000000.0; it must be such that original_max_position_embeddings (64) times it is 16777216 at most")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("gemma3_text", "ministral3")])
def test_bases_that_no_file_names(family: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = edited(folders(family), tmp_path / "model", rope_parameters=...)
    part = check_model(folder).layers[0].attention.rope
    assert part.theta == transformers.AutoConfig.for_model(family).rope_parameters["rope_theta"]


# -- where it is served ---------------------------------------------------------------------------------------------------------


def test_sizes_that_a_gpu_does_not_take(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """An error names them before anything is loaded; windows, caps and other sizes of heads are served."""
    for name in ("mistral", "gemma2", "qwen2"):
        check_gpu(check_model(folders(name)), torch.bfloat16)
    odd = check_model(edited(folders("mistral"), tmp_path / "odd", head_dim=24), has_weights=False)
    check_gpu(odd, torch.float32)
    with pytest.raises(ModelError, match=r"config.json: head_dim 24: a GPU serves multiples of 16 in torch.bfloat16; use --device cpu"):
        check_gpu(odd, torch.bfloat16)


def test_windows_that_hold_the_context_cost_nothing(folders: Callable[[str], Path]) -> None:
    folder = folders("mistral")
    assert [layer.attention.window for layer in load(folder).layers] == [11, 11]
    assert [layer.attention.window for layer in load(folder, max_model_len=11).layers] == [None, None]


@pytest.mark.parametrize("family", ["phi3", "ernie4_5", "qwen3", "qwen2"])
def test_ranks_hold_their_heads(family: str, folders: Callable[[str], Path]) -> None:
    """Rows of fused weights too, and of heads whose numbers are reordered."""
    spec, cpu = check_model(folders(family)).layers[1], torch.device("cpu")
    with Checkpoint(folders(family)) as checkpoint:
        whole, *parts = (DecoderLayer(spec, Weights(checkpoint, torch.float32, cpu, ranks)) for ranks in (Ranks(), Ranks(0, 2), Ranks(1, 2)))
    x = torch.randn(3, whole.attention.input_norm.numel())
    queries = [layer.attention.qkv(x).unflatten(1, (-1, spec.attention.head_dim)) for layer in (whole, *parts)]
    for begin, end in ((0, 4), (4, 6), (6, 8)):  # queries, keys, values
        own = torch.cat([part[:, begin // 2 : end // 2] for part in queries[1:]], dim=1)
        torch.testing.assert_close(own, queries[0][:, begin:end])
    gates = [layer.mlp.gate_up(x).unflatten(1, (2, -1)) for layer in (whole, *parts)]
    torch.testing.assert_close(torch.cat(gates[1:], dim=2), gates[0])


def test_a_window_reads_its_own_pages_alone(folders: Callable[[str], Path]) -> None:
    """What lies in pages before it is not even multiplied by zero."""
    steps = Steps(make_worker(folders("mistral"), page_size=8))
    token_ids = random_tokens(41)
    steps.admit(0, token_ids, range(6))
    steps.run([Row(0, 0, 40, is_end=False)])
    steps.run([Row(0, 40, 1)])
    expected = steps.logits()
    for plane in steps.worker.store.planes("attention"):
        plane[:3] = float("nan")
    steps.admit(1, token_ids, range(6))
    steps.run([Row(1, 40, 1)])
    assert torch.equal(steps.logits(), expected)


def test_nothing_else_names_a_family() -> None:
    root = Path(__file__).parent.parent
    names = (*ARCHITECTURES, *DRAFTERS)
    paths = [path for package in ("backend", "kernels", "deploy") for path in (root / package).rglob("*.py")]
    others = [path for path in paths if not path.is_relative_to(root / "backend/models/families")]
    assert [f"{path}: {name}" for path in others for name in names if name in path.read_text("utf-8")] == []
