"""Checkpoints in the formats that people have: the model must be that of the numbers that they stand for."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, EngineConfig
from backend.drafter_checks import check_drafter_rounding
from backend.errors import ModelError
from backend.model_checks import settle_quantization
from backend.models.loader import Checkpoint
from backend.models.mtp import Mtp
from backend.models.quantized import read_quantized
from backend.models.quantized_config import read_checkpoint_quantization
from backend.models.quantized_spec import Layout
from backend.quantization import QuantizedLinear
from backend.quantization_config import QuantizationConfig
from backend.step.worker import Worker
from tests.families import VOCABULARY, Case, assert_close, edited, load, make_model, random_tokens, refused
from tests.quantized import AUTOROUND, BLOCKS, FORMATS, GPTQ, MXFP4, Format, compressed, float4, gptq, packed, scaled, write_checkpoints
from tests.steps import Row, Steps, make_worker
from tests.test_latents import DEEPSEEK
from tests.test_mixtures import QWEN2, logits_of, on_ranks

BY_NAME = {form.name: form for form in FORMATS}
GPTQ_FORM, ACT_ORDER, INT4 = FORMATS[0], FORMATS[3], FORMATS[5]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vocabulary that two ranks can split."""
    folder = tmp_path_factory.mktemp("model")
    make_model(Case("llama", config={"vocab_size": VOCABULARY + 1}), folder)
    return folder


def own_logits(folder: Path) -> torch.Tensor:
    steps = Steps(make_worker(folder))
    steps.admit(0, random_tokens(33), range(5))
    steps.run([Row(0, 0, 33)])
    return steps.logits()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.usefixtures("exact_sums")
def test_the_numbers_are_those_of_the_format(source: Path, tmp_path: Path, form: Format) -> None:
    stored, plain = write_checkpoints(source, form, tmp_path)
    assert_close(own_logits(stored), own_logits(plain))


MIXED: list[tuple[Case, Format]] = [
    (Case("deepseek_v3", config=DEEPSEEK), Format("blocks", BLOCKS, scaled(strategy="block", name="weight_scale_inv"))),
    (Case("qwen2_moe", config=QWEN2), Format("int4", compressed("pack-quantized", strategy="group", group_size=8), packed(size=8))),
    (Case("phi3"), Format("fused", GPTQ | {"desc_act": True}, gptq(has_order=True))),
    (Case("llama", config={"intermediate_size": 96}), MXFP4),
]


@pytest.mark.parametrize(("case", "form"), MIXED, ids=str)
@pytest.mark.usefixtures("exact_sums")
def test_experts_latents_and_fused_projections(tmp_path: Path, case: Case, form: Format) -> None:
    make_model(case, tmp_path / "source")
    stored, plain = write_checkpoints(tmp_path / "source", form, tmp_path)
    assert_close(own_logits(stored), own_logits(plain))


@pytest.mark.parametrize("form", [FORMATS[9], FORMATS[13], INT4], ids=str)
@pytest.mark.usefixtures("exact_sums")
def test_some_experts_are_plain(tmp_path: Path, form: Format) -> None:
    """The first one's, as lists of what is left out may have it: numbers of 8 bits of the others would pass for weights without their scales."""

    def write(name: str, weight: torch.Tensor, generator: torch.Generator) -> Any:
        return None if ".experts.0." in name and "down" not in name else form.write(weight, generator)

    make_model(Case("qwen3_moe", config=QWEN2), tmp_path / "source")
    stored, plain = write_checkpoints(tmp_path / "source", Format("mixed", form.config, write, is_by_name=True), tmp_path)
    assert_close(own_logits(stored), own_logits(plain))


def test_targets_have_weights_of_their_own(source: Path, tmp_path: Path) -> None:
    """The name before the pattern before the class; queries, keys and values that are stored differently are one projection here."""
    config = compressed("pack-quantized", ["lm_head", "model.layers.0.self_attn.v_proj"], strategy="group", group_size=32)
    eight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config["config_groups"]["group_1"] = {"targets": ["re:.*(q|down)_proj$"], "weights": eight}
    four = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    config["config_groups"]["group_2"] = {"targets": ["model.layers.1.self_attn.q_proj"], "weights": four}
    general, of_pattern, of_name = packed(), packed(bits=8, size=None), packed(size=16)

    def write(name: str, weight: torch.Tensor, generator: torch.Generator) -> Any:
        if name == "model.layers.0.self_attn.v_proj":
            return None
        own = of_name if name == "model.layers.1.self_attn.q_proj" else of_pattern if name.endswith(("q_proj", "down_proj")) else general
        return own(weight, generator)

    stored, plain = write_checkpoints(source, Format("several", config, write, is_by_name=True), tmp_path)
    assert_close(own_logits(stored), own_logits(plain))


@pytest.mark.parametrize(("size", "strategy"), [(32, "group"), (-1, "channel")])
def test_a_strategy_that_is_not_named_is_that_of_the_group_size(size: int, strategy: str) -> None:
    """As compressed-tensors itself takes it."""
    configs = [compressed("pack-quantized", group_size=size, strategy=name) for name in (None, strategy)]
    found = [read_checkpoint_quantization({"quantization_config": config}, "DIR") for config in configs]
    layouts = [own and own.layout_of("model.layers.0.mlp.up_proj") for own in found]
    assert layouts[0] is not None and layouts[0] == layouts[1]


@pytest.mark.usefixtures("exact_sums")
def test_rules_of_gptq(source: Path, tmp_path: Path) -> None:
    config = GPTQ | {"dynamic": {"-:.*k_proj": {}, r"+:.*\.1\..*": {"bits": 8, "group_size": 16}, ".*o_proj": {"group_size": -1}}}

    def write(name: str, weight: torch.Tensor, generator: torch.Generator) -> Any:
        if name.endswith("k_proj"):
            return None
        return (gptq(8, 16) if ".1." in name else gptq(size=None) if name.endswith("o_proj") else gptq())(weight, generator)

    stored, plain = write_checkpoints(source, Format("rules", config, write, is_by_name=True), tmp_path)
    assert_close(own_logits(stored), own_logits(plain))


def test_layers_of_autoround(source: Path, tmp_path: Path) -> None:
    """By name before pattern; what they do not say is as in general."""
    own = {"model.layers.0.self_attn.k_proj": {"bits": 16, "data_type": "float"}, ".*(k|o)_proj": {"bits": 8}, ".*q_proj": {"group_size": -1}}

    def write(name: str, weight: torch.Tensor, generator: torch.Generator) -> Any:
        if name == "model.layers.0.self_attn.k_proj":
            return None
        return (gptq(8) if name.endswith(("k_proj", "o_proj")) else gptq(size=None) if name.endswith("q_proj") else gptq())(weight, generator)

    stored, plain = write_checkpoints(source, Format("layers", AUTOROUND | {"extra_config": own}, write, is_by_name=True), tmp_path)
    assert_close(own_logits(stored), own_logits(plain))


def test_modelopt_names_each_layer(source: Path, tmp_path: Path) -> None:
    kinds = {
        "q_proj": ({"quant_algo": "FP8"}, scaled(strategy="tensor", input_scale="input_scale")),
        "o_proj": ({"quant_algo": "MXFP8", "group_size": 32}, scaled(strategy="block", block=(1, 32), is_exponent=True)),
        "up_proj": ({"quant_algo": "NVFP4", "group_size": 16}, float4(16, ("weight", "weight_scale", "weight_scale_2"))),
    }
    layers = {name: kinds[name.split(".")[-1]][0] for name in own_projections(source) if name.split(".")[-1] in kinds}

    def write(name: str, weight: torch.Tensor, generator: torch.Generator) -> Any:
        kind = kinds.get(name.split(".")[-1])
        return None if kind is None else kind[1](weight, generator)

    config = {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}}
    form = Format("mixed", config, write, file="hf_quant_config.json", is_by_name=True)
    stored, plain = write_checkpoints(source, form, tmp_path)
    assert_close(own_logits(stored), own_logits(plain))


def own_projections(folder: Path) -> list[str]:
    return [name.removesuffix(".weight") for name in load_file(folder / "model.safetensors") if name.endswith("_proj.weight")]


def test_groups_of_activations_alone_say_nothing_of_weights(source: Path, tmp_path: Path) -> None:
    stored, _ = write_checkpoints(source, INT4, tmp_path)
    groups = INT4.config["config_groups"] | {"attention": {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 8, "type": "float"}}}
    expected = own_logits(stored)
    assert torch.equal(own_logits(edited(stored, tmp_path / "model", quantization_config=INT4.config | {"config_groups": groups})), expected)


@pytest.mark.parametrize("form", [GPTQ_FORM, ACT_ORDER, FORMATS[13], FORMATS[14]], ids=str)
def test_two_ranks_compute_what_one_does(source: Path, tmp_path: Path, form: Format) -> None:
    """Groups and blocks are cut where the inputs and outputs are."""
    stored, _ = write_checkpoints(source, form, tmp_path)
    values = {"model": str(stored), "device": "cpu", "dtype": "float32", "kv_cache_memory": "1MiB", "page_size": 8, "max_batch_size": 4}
    config = EngineConfig.from_dict(values | {"parallel_config": {"tensor_parallel_size": 2}})
    own = on_ranks(2, lambda ranks: logits_of(Worker(config, ranks)))
    assert torch.equal(own[0], own[1])
    assert_close(own[0], logits_of(make_worker(stored)))


def test_a_drafter_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(BUNDLED_DRAFTER, drafter)
    stored, plain = write_checkpoints(drafter, GPTQ_FORM, tmp_path)
    target = load(BUNDLED_MODEL, only_head=True)
    made = [Mtp(folder, target, torch.float32, torch.device("cpu")) for folder in (stored, plain)]
    x = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(0))
    norm = torch.ones(target.hidden_size)
    for first, second in zip(*(model.layers for model in made)):
        assert_close(first.decoder.attention.qkv.after_norm(x, norm, 1e-5), second.decoder.attention.qkv.after_norm(x, norm, 1e-5))
    with pytest.raises(ModelError, match=r"the weights are quantized already \(gptq\); leave quantization wint4/wint4/- out"):
        Mtp(stored, target, torch.float32, torch.device("cpu"), QuantizationConfig(quantization="wint4"))
    beside = edited(BUNDLED_DRAFTER, tmp_path / "beside", quantization_config=GPTQ_FORM.config)  # a plain one, of a model that is not
    rounded = Mtp(beside, target, torch.float32, torch.device("cpu"), QuantizationConfig(quantization="wint4"))
    assert isinstance(rounded.layers[0].decoder.attention.qkv, QuantizedLinear)


# -- what is refused ------------------------------------------------------------------------------------------------------------

CT4 = INT4.config
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "quantization_config of quant_method 'bitsandbytes' is not supported; known: compressed",
    ),
    ({"quantization": "mix_quant", "dense_quant_type": "wint8"}, "quantization_config of quantization 'mix_quant' is not supported"),
    (GPTQ | {"bits": 3}, "bits is 3; it must be 4 or 8"),
    (GPTQ | {"bits": "4"}, "bits is '4'; it must be an integer"),
    (GPTQ | {"group_size": 0}, "group_size is 0"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; known: gptq, gptq_v2"),
    (GPTQ | {"desc_act": "yes"}, "desc_act is 'yes'; it must be true or false"),
    (GPTQ | {"dynamic": {"+:(": {}}}, "dynamic has '(', which is no regular expression"),
    (GPTQ | {"dynamic": {"a{99999999999999999999}": {}}}, "dynamic has 'a{99999999999999999999}', which is no regular expression: the repetition"),
    (GPTQ | {"dynamic": {"(" * 5000: {}}}, ", which is no regular expression: maximum recursion depth"),
    (GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, "dynamic: +:.*: bits is 2"),
    (GPTQ | {"dynamic": [1]}, "dynamic is [1]; it must be an object"),
    (GPTQ | {"group_size": 16}, " has shape (2, 64); config.json makes it (4, 64)"),
    ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version 'gemv' is not supported; known: gemm"),
    ({"quant_method": "awq", "bits": 4, "group_size": 32}, "self_attn.k_proj.g_idx, "),
    (GPTQ | {"format": "marlin"}, "format 'marlin' is not supported; known: gptq, gptq_v2"),
    (AUTOROUND | {"packing_format": "auto_round"}, "packing_format 'auto_round' is not supported; known: auto_round:auto_gptq, auto_round:auto_awq"),
    (AUTOROUND | {"data_type": "mx_fp"}, "data_type 'mx_fp' is not supported; known: int"),
    (AUTOROUND | {"extra_config": {".*q_proj": {"bits": 3}}}, "extra_config: .*q_proj: bits is 3; it must be 4 or 8"),
    (AUTOROUND | {"extra_config": {"(": {}}}, "extra_config has '(', which is no regular expression"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4"}}}, "a: quant_algo 'W4'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported; known: e4m3"),
    (BLOCKS | {"weight_block_size": [128]}, "weight_block_size is [128]; it must be two integers above 0"),
    ({"quant_method": "fp8"}, "no weight is quantized as config.json says (fp8)"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported; known: FP8, "),
    (BLOCKS | {"weight_scale_semantics": "direct"}, "weight_scale_semantics 'direct' is not supported; known: inverse"),
    (GPTQ | {"rotation": "hadamard"}, "rotation 'hadamard' is not supported"),
    (CT4 | {"format": "marlin-24"}, "format 'marlin-24' is not supported; known: pack-quantized"),
    (CT4 | {"quantization_status": "calibration"}, "quantization_status 'calibration' is not supported"),
    (CT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
    (CT4 | {"transform_config": {"u": {}}}, "transform_config is not supported"),
    (CT4 | {"ignore": "lm_head"}, "ignore is 'lm_head'; it must be a list of names"),
    (compressed("pack-quantized", strategy="group", group_size=32, num_bits=3), "weights: num_bits is 3; it must be 4 or 8"),
    (compressed("pack-quantized", strategy="tensor"), "weights: strategy is 'tensor'; it must be group or channel"),
    (compressed("float-quantized", strategy="channel", num_bits=8), "weights: type is 'int'; it must be float, where the format is float-quantized"),
    (compressed("int-quantized", strategy="channel", num_bits=8, dynamic=True), "weights: dynamic is True; it must be false for weights"),
]


@pytest.fixture(scope="module")
def stored(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoints(source, GPTQ_FORM, tmp_path_factory.mktemp("gptq"))[0]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda value: value[:50] if isinstance(value, str) else "")
def test_what_is_not_understood_is_named(stored: Path, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    refused(edited(stored, tmp_path / "model", quantization_config=config), str(tmp_path / "model"), message)


def damage(folder: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy with other tensors of the first layer's queries; None takes one away."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    for part, tensor in tensors.items():
        name = f"model.layers.0.self_attn.q_proj.{part}"
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, target / "model.safetensors")
    return target


def test_tensors_that_do_not_fit(stored: Path, tmp_path: Path) -> None:
    refused(damage(stored, tmp_path / "a", scales=None), "weight model.layers.0.self_attn.q_proj.scales is missing")
    refused(damage(stored, tmp_path / "b", scales=torch.ones(2, 63)), "q_proj.scales has shape (2, 63); config.json makes it (2, 64)")
    refused(damage(stored, tmp_path / "c", qweight=torch.zeros(8, 64)), "q_proj.qweight is of dtype F32; known: I32")
    refused(damage(stored, tmp_path / "d", qweight=None), "weight model.layers.0.self_attn.q_proj.weight is missing")
    refused(damage(stored, tmp_path / "e", marlin=torch.zeros(2)), "q_proj.marlin would not be used")


def test_biases_that_add_nothing(tmp_path: Path) -> None:
    """AutoGPTQ's first versions wrote some for every projection, experts' too."""
    make_model(Case("qwen2_moe", config=QWEN2 | {"shared_expert_intermediate_size": 24}), tmp_path / "source")
    folder, plain = write_checkpoints(tmp_path / "source", Format("gptq", GPTQ | {"group_size": 8}, gptq(size=8)), tmp_path)
    weights = load_file(folder / "model.safetensors")
    zeros = {f"{name.removesuffix('.scales')}.bias": torch.zeros(scales.shape[1]).half() for name, scales in weights.items() if "scales" in name}
    save_file(zeros | weights, folder / "model.safetensors")
    assert_close(own_logits(folder), own_logits(plain))
    name = "model.layers.1.mlp.experts.2.up_proj.bias"
    save_file(zeros | weights | {name: torch.full_like(zeros[name], 0.5)}, folder / "model.safetensors")
    refused(folder, f"weight {name} is not zero; this family adds no biases there")


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("form", "tensors", "message"),
    [
        (GPTQ_FORM, {"scales": torch.full((2, 64), NAN)}, "scales has nan for a scale; scales must be finite"),
        (INT4, {"weight_scale": torch.full((64, 2), INFINITE)}, "weight_scale has inf for a scale"),
        (BY_NAME["fp8 of DeepSeek"], {"weight_scale_inv": torch.tensor([[-INFINITE]])}, "weight_scale_inv has -inf for a scale"),
        (BY_NAME["fp8 of GPTQModel"], {"weight_scale_inv": torch.zeros(64)}, "weight_scale_inv has inf for a scale"),
        (BY_NAME["compressed mxfp8"], {"weight_scale": torch.full((64, 2), 255, dtype=torch.uint8)}, "weight_scale has inf for a scale"),
        (BY_NAME["nvfp4"], {"weight_global_scale": torch.zeros(1)}, "weight_scale has inf for a scale"),
    ],
    ids=str,
)
def test_scales_that_are_no_numbers(source: Path, tmp_path: Path, form: Format, tensors: dict[str, torch.Tensor], message: str) -> None:
    """They would make no numbers of all answers."""
    stored, _ = write_checkpoints(source, form, tmp_path)
    refused(damage(stored, tmp_path / "model", **tensors), f"model.layers.0.self_attn.q_proj.{message}")


@pytest.mark.parametrize("form", [BY_NAME["compressed fp8"], BY_NAME["fp8 of DeepSeek"], BY_NAME["compressed mxfp8"]], ids=str)
@pytest.mark.parametrize(("place", "code"), [((0, 0), 0x7F), ((63, 63), 0xFF), ((5, 31), 0xFF)], ids=str)
def test_codes_that_are_no_numbers(source: Path, tmp_path: Path, form: Format, place: tuple[int, int], code: int) -> None:
    """Kernels would take them for 480. The largest number is one below them."""
    stored, _ = write_checkpoints(source, form, tmp_path)
    codes = torch.full((64, 64), 0x7E, dtype=torch.uint8)
    codes[32:] = 0xFE
    load(damage(stored, tmp_path / "largest", weight=codes.view(torch.float8_e4m3fn)))
    codes[place] = code
    message = "model.layers.0.self_attn.q_proj.weight has nan for a weight"
    refused(damage(stored, tmp_path / "model", weight=codes.view(torch.float8_e4m3fn)), message)


def test_codes_of_odd_counts() -> None:
    layout = Layout("scaled", dtype="F8_E4M3")
    for code, is_good in ((0x7E, True), (0x7F, False)):
        codes = torch.zeros(3, 7, dtype=torch.uint8)
        codes[2, 6] = code
        tensors = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.ones(1)}
        with nullcontext() if is_good else pytest.raises(ValueError, match="weight has nan for a weight; weights must be finite"):
            read_quantized(layout, tensors, 3, 7)


def test_sizes_that_such_words_cannot_hold(stored: Path) -> None:
    with (
        Checkpoint(stored, read_checkpoint_quantization({"quantization_config": GPTQ}, stored)) as checkpoint,
        pytest.raises(
            ModelError, match=r"layers\.0\.self_attn\.q_proj cannot be quantized as config\.json says: out_features 63 is not a multiple of 8"
        ),
    ):
        checkpoint.get_projection("model.layers.0.self_attn.q_proj", 63, 64)


def test_an_index_of_groups_that_are_not_there(source: Path, tmp_path: Path) -> None:
    stored, _ = write_checkpoints(source, ACT_ORDER, tmp_path)
    refused(damage(stored, tmp_path / "model", g_idx=torch.full((64,), 2, dtype=torch.int32)), "q_proj.g_idx has 2; the limit is 1")


def test_an_order_that_was_never_found(source: Path, tmp_path: Path) -> None:
    """compressed-tensors saves -1 of every input where act-order was asked for and weights were rounded to nearest."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> Any:
        tensors, values = packed()(weight, generator)
        return tensors | {"weight_g_idx": torch.full((weight.shape[1],), -1, dtype=torch.int32)}, values

    config = compressed("pack-quantized", strategy="group", group_size=32, actorder="group")
    stored, plain = write_checkpoints(source, Format("no order", config, write), tmp_path)
    assert_close(own_logits(stored), own_logits(plain))
    index = torch.zeros(64, dtype=torch.int32)
    index[5] = -1
    refused(damage(stored, tmp_path / "model", weight_g_idx=index), "q_proj.weight_g_idx has -1; the limit is 1")


def test_an_order_that_the_configuration_denies(source: Path, tmp_path: Path) -> None:
    """The file's own index says in which group an input is: AutoGPTQ's products read it whatever desc_act is."""
    stored, plain = write_checkpoints(source, ACT_ORDER, tmp_path)
    assert_close(own_logits(edited(stored, tmp_path / "model", quantization_config=ACT_ORDER.config | {"desc_act": False})), own_logits(plain))


def test_codes_of_4_bits_that_need_more(source: Path, tmp_path: Path) -> None:
    config = compressed("int-quantized", strategy="group", group_size=32)
    stored, _ = write_checkpoints(source, Format("int4", config, scaled(False, "block", (1, 32), top=7)), tmp_path)
    refused(damage(stored, tmp_path / "model", weight=torch.full((64, 64), 8, dtype=torch.int8)), "q_proj.weight has 8; the limits are -8 and 7")


def test_what_is_left_out_stays_out(source: Path, tmp_path: Path) -> None:
    """A projection that the list names and the file has quantized."""
    stored, _ = write_checkpoints(source, INT4, tmp_path)
    config = compressed("pack-quantized", ["lm_head", "re:.*o_proj"], strategy="group", group_size=32)
    refused(edited(stored, tmp_path / "model", quantization_config=config), "weight model.layers.0.self_attn.o_proj.weight, ", "is missing")


def test_scales_of_a_cache_are_passed_over(stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file(weights | {f"model.layers.0.self_attn.{kind}_scale": torch.ones(1) for kind in "kv"}, tmp_path / "model" / "model.safetensors")
    load(tmp_path / "model")


def test_its_own_format_may_be_named(stored: Path) -> None:
    """As vLLM's commands do."""
    for name in ("gptq", "GPTQ_marlin"):
        option, line = settle_quantization(name, stored)
        assert option is None and line == f"quantization {name} has no effect, and none is needed: the checkpoint says itself that it is gptq"
    with pytest.raises(ModelError, match=r"quantization 'awq' contradicts the checkpoint in .*, which is gptq: leave it out"):
        settle_quantization("awq", stored)
    with pytest.raises(ModelError, match=r"quantization 'fp8' contradicts the checkpoint in .*, which is gptq"):
        settle_quantization("fp8", stored)
    with pytest.raises(ModelError, match=r"quantization 'compressed_tensors': the weights in .* are plain: leave it out, or name what they are"):
        settle_quantization("compressed_tensors", BUNDLED_MODEL)
    for option in ("fp8", "wint8", None, {"dense_quant_type": "fp8"}):
        assert settle_quantization(option, BUNDLED_MODEL) == (option, "")


def test_it_is_not_rounded_again(stored: Path) -> None:
    with pytest.raises(ModelError, match=r"the weights are quantized already \(gptq\); leave quantization fp8/fp8/- out"):
        load(stored, quantization=QuantizationConfig(quantization="fp8"))
    load(stored, quantization=QuantizationConfig(head_quant_type="wint8"))  # which the checkpoint holds as plain numbers
    with pytest.raises(ModelError, match=r"load_format dummy makes plain weights, not gptq"):
        load(stored, load_format="dummy")
    with pytest.raises(ModelError, match="quantization -/wint4/- rounds experts, and the model has none"):
        load(BUNDLED_MODEL, quantization=QuantizationConfig(moe_quant_type="wint4"))
    with pytest.raises(ModelError, match="quantization -/wint4/- rounds experts, and the model has none"):
        check_drafter_rounding("eagle3", BUNDLED_DRAFTER, QuantizationConfig(moe_quant_type="wint4"))
