"""Keys and values in e4m3: rounding, scales and where they come from, what is read of them, and whole engines over them.

A row's sums depend in their last bits on the rows beside it (on CPU: on the shape of a product), and e4m3 turns a last bit into a step of a
sixteenth now and then. So tests of equal tokens have sums in float64 (`exact_sums`): what is left to differ is what is kept and what is read.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.config import BUNDLED_MODEL, EngineConfig
from backend.devices import pick_cache_dtype
from backend.disaggregation.node import NodeInfo
from backend.disaggregation.records import VERSION
from backend.errors import ConfigError, KvStoreError, ModelError
from backend.kv_store import CacheSpec, KvStore
from backend.models.cache_scales import CALIBRATION_TOKENS, HEADROOM
from backend.models.layers import ATTENTION
from backend.models.quantized_config import read_checkpoint_quantization
from backend.other_servers.translation import translate
from backend.step.worker import Worker
from deploy.options import split_keys
from kernels import code_check, ops, reference
from kernels.toolchain import KernelError
from tests.conftest import EVERY_METHOD, code_prompts, greedy
from tests.families import Case, edited, make_model, random_tokens
from tests.small import LLM
from tests.steps import Row, Steps, make_worker
from tests.test_kv_store import adopt, go_on, leave
from tests.test_latents import DEEPSEEK
from tests.test_mixtures import on_ranks
from tests.test_plain_attention import Batch

CPU = torch.device("cpu")
FP8 = {"kv_cache_dtype": "fp8"}
SCHEME = {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
FAMILIES = {"keys": Case("llama", config={"vocab_size": 302}), "latents": Case("deepseek_v3", config=DEEPSEEK | {"vocab_size": 302})}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, case in FAMILIES.items():
        make_model(case, made[name])
    return made


# -- numbers ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_are_read_exactly(dtype: torch.dtype) -> None:
    """By the definition: sign, 4 bits of exponent with bias 7, 3 of fraction; the two codes of all ones are no numbers."""

    def number(code: int) -> float:
        exponent, fraction = code >> 3 & 15, code & 7
        size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        return math.nan if code & 127 == 127 else math.copysign(size, -1 if code & 128 else 1)

    codes = torch.arange(256, dtype=torch.uint8).view(ops.E4M3).view(4, 64)
    expected = torch.tensor([number(code) for code in range(256)], dtype=dtype).view(4, 64)
    for out in (None, torch.empty(4, 64, dtype=dtype)):
        assert torch.equal(reference.read_numbers(codes, dtype, out).nan_to_num(7), expected.nan_to_num(7))
    numbers = expected[expected.isfinite()]
    assert torch.equal(reference.round_to_e4m3(numbers, torch.ones(1)).float(), numbers.float())


def test_rounding_saturates() -> None:
    """To the nearest, ties to even; beyond the range to its end, infinity too. What is no number stays none."""
    x = torch.tensor([448.0, 463.9, 464.0, 480.0, 1e30, math.inf, -500.0, -math.inf, 17.0, 19.0, 2.0**-10, 1.5 * 2.0**-9, math.nan, 0.0])
    expected = torch.tensor([448.0, 448, 448, 448, 448, 448, -448, -448, 16, 20, 0, 2.0**-8, 0, 0])
    found = reference.round_to_e4m3(x, torch.ones(1)).float()
    assert found.isnan().tolist() == x.isnan().tolist() and torch.equal(found.nan_to_num(0), expected)
    assert torch.equal(reference.round_to_e4m3(x[:4], torch.tensor(0.5)).float(), torch.tensor([224.0, 224, 224, 240]))


# -- operations -------------------------------------------------------------------------------------------------------------------


def in_e4m3(batch: Batch, scales: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A batch's planes as codes, no numbers among them, and what the codes stand for (0 where nobody's tokens are)."""
    codes = [reference.round_to_e4m3(plane, 1 / own) for plane, own in zip(batch.planes, scales)]
    return codes, [plane.float().nan_to_num(0) * own for plane, own in zip(codes, scales)]


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_over_codes(window: int | None, cap: float | None) -> None:
    """Each way that a step has, against the numbers that codes and scales stand for."""
    batch = Batch((2, 24), (2, 24))
    scales = ops.CacheScales(torch.tensor([0.011, 0.25]), torch.tensor([0.5, 0.007]))
    codes, numbers = in_e4m3(batch, [scales.keys[:, None], scales.values[:, None]])
    query = batch.query(6, 24)
    expected = reference.append_attention(query, *numbers, batch.plan(3), window, cap)
    clean = [torch.where(plane.float().isnan(), 0, plane.float()).to(ops.E4M3) for plane in codes]
    found = ops.append_attention(query, *clean, batch.plan(3), window, cap, scales)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    scaled = scales.scale_query(query)
    for made in (batch.plain().attend(scaled, *codes, 0, window, cap), batch.prompts().attend(scaled, *codes, window, cap)):
        torch.testing.assert_close(scales.scale_result(made), expected, rtol=1e-4, atol=1e-5)


def test_attention_over_latents_in_codes() -> None:
    batch = Batch((1, 11 + 6))
    scales = ops.CacheScales(torch.tensor([0.011]), torch.tensor([0.3]))
    codes, numbers = in_e4m3(batch, [torch.cat([scales.values.expand(11), scales.keys.expand(6)])])
    query, key_up, value_up = batch.query(3, 5 + 6), torch.randn(3, 5, 11), torch.randn(3, 7, 11)
    expected = reference.latent_attention(query, *numbers, batch.plan(1), key_up, value_up, 0.3)
    clean = [torch.where(plane.float().isnan(), 0, plane.float()).to(ops.E4M3) for plane in codes]
    found = ops.latent_attention(query, *clean, batch.plan(1), key_up, value_up, 0.3, scales=scales)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    scaled = scales.scale_latent_query(query, 5)
    made = batch.prompts().attend_latents(scaled, *codes, key_up, value_up, 0.3)
    torch.testing.assert_close(scales.scale_result(made), expected, rtol=1e-4, atol=1e-5)
    absorbed = torch.cat([torch.einsum("thn,hnr->thr", scaled[..., :5], key_up), scaled[..., 5:]], dim=-1)
    mixed = batch.plain().attend_latents(absorbed, *codes, 11, 0, 0.3)
    torch.testing.assert_close(scales.scale_result(torch.einsum("thr,hvr->thv", mixed, value_up)), expected, rtol=1e-4, atol=1e-5)


def test_powers_of_two_are_exact_in_every_type() -> None:
    scales = ops.CacheScales(torch.tensor([2.0**-7, 4.0]), torch.tensor([0.5, 2.0**-3]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (1 + torch.rand(5, 4, 8)).to(dtype)  # float16's smallest numbers have fewer bits, which a power of two does not keep
        assert torch.equal(scales.scale_query(x).double(), x.double() * scales.keys.repeat_interleave(2)[:, None])
        assert torch.equal(scales.scale_result(x).double(), x.double() * scales.values.repeat_interleave(2)[:, None])


@pytest.mark.parametrize("is_latent", [False, True], ids=["keys", "latents"])
def test_scales_and_e4m3_go_together(is_latent: bool) -> None:
    pages, scales = torch.zeros(2, 4, 1, 16), ops.CacheScales(torch.ones(1), torch.ones(1))
    tables, slots = torch.ones(3, 1, 8 if is_latent else 16), torch.arange(3)

    def append(planes: torch.Tensor, own: ops.CacheScales | None) -> None:
        if is_latent:
            ops.append_latent(torch.zeros(3, 2, 12), torch.zeros(3, 16), torch.ones(8), 1e-6, tables, tables, slots, planes, own)
        else:
            ops.append_kv(torch.zeros(3, 4, 16), tables, tables, slots, planes, planes.clone(), scales=own)

    append(pages, None)
    append(pages.to(ops.E4M3), scales)
    for unfit in ((pages, scales), (pages.to(ops.E4M3), None)):
        with pytest.raises(ValueError, match=r"torch\.float32"):
            append(*unfit)
    with pytest.raises(ValueError, match="scales are of 2 heads of keys and values; must be of 1"):
        append(pages.to(ops.E4M3), ops.CacheScales(torch.ones(2), torch.ones(2)))
    plan = reference.plan_attention([1], [1], [[0]], 4, 1, torch.float32)
    with pytest.raises(ValueError, match=r"pages are torch\.float8_e4m3fn, scales missing"):
        ops.append_attention(torch.zeros(1, 1, 16), pages.to(ops.E4M3), pages.to(ops.E4M3), plan)
    with pytest.raises(ValueError, match=r"scales of values are torch\.float32 \[2\]; must be float32 \[1\]"):
        ops.CacheScales(torch.ones(1), torch.ones(2))


# -- scales -----------------------------------------------------------------------------------------------------------------------


def scales_of(worker: Worker) -> list[ops.CacheScales]:
    return [layer.attention.cache_scales for layer in worker.model.layers]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FAMILIES)
def test_calibrated_scales_cover_what_the_model_keeps(folders: dict[str, Path], name: str) -> None:
    """Powers of two, the least that leave the room; and other tokens find room too."""
    worker, plain = make_worker(folders[name], **FP8), Steps(make_worker(folders[name]))
    assert worker.store.layout["cache_scales"].startswith("calibrated ")
    plain.admit(0, random_tokens(100, 5), range(13))
    plain.run([Row(0, 0, 100)])
    planes, rank = plain.worker.store.planes(ATTENTION), worker.model.heads.latent_rank
    for number, own in enumerate(scales_of(worker)):
        kept = [planes[number][:13, ..., rank:], planes[number][:13, ..., :rank]] if rank else [p[:13] for p in planes[2 * number : 2 * number + 2]]
        for scale, seen in zip((own.keys, own.values), kept):
            assert torch.equal(scale, 2 ** scale.log2().round())
            largest = seen.abs().amax(dim=(0, 1, 3))
            assert (largest < ops.E4M3_MAX * scale).all(), "other tokens saturate"
            assert (largest * 2 * HEADROOM > ops.E4M3_MAX * scale / 4).all(), "more room than is asked for"
    again = make_worker(folders[name], **FP8)
    assert again.store.fingerprint == worker.store.fingerprint
    assert CALIBRATION_TOKENS > worker.max_model_len == 128, "a context shorter than the prompt is enough"


def test_every_rank_scales_its_own_heads(folders: dict[str, Path]) -> None:
    """And all have one identity for their pages."""
    values = {"model": str(folders["keys"]), "device": "cpu", "dtype": "float32", "kv_cache_memory": "1MiB", "page_size": 8, "max_batch_size": 4}
    config = EngineConfig.from_dict(values | FP8 | {"parallel_config": {"tensor_parallel_size": 2}})
    ranks = on_ranks(2, lambda ranks: Worker(config, ranks))
    assert ranks[0].store.layout["cache_scales"] == ranks[1].store.layout["cache_scales"]
    whole = scales_of(make_worker(folders["keys"], **FP8))
    for layer, *own in zip(whole, *(scales_of(worker) for worker in ranks)):
        for name in ("keys", "values"):
            assert torch.equal(torch.cat([getattr(part, name) for part in own]), getattr(layer, name))


def with_scales(folder: Path, out: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """The model with tensors of every layer, named below its attention, and a quantization_config."""
    edited(folder, out, quantization_config=SCHEME | config)
    weights = load_file(out / "model.safetensors")
    own = {f"model.layers.{n}.self_attn.{name}": tensor.clone() for n in range(2) for name, tensor in tensors.items()}
    (out / "model.safetensors").unlink()
    save_file(weights | own, out / "model.safetensors")
    return out


K, V = torch.tensor([0.02]), torch.tensor([0.3])


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"k_scale": K, "v_scale": V}, ([0.02, 0.02], [0.3, 0.3])),
        ({"k_scale": torch.tensor(0.02), "v_scale": V, "q_scale": K, "k_zero_point": torch.zeros(1)}, ([0.02, 0.02], [0.3, 0.3])),
        ({"k_scale": torch.tensor([0.02, 0.04]).view(2, 1, 1), "v_scale": torch.tensor([0.3, 0.5])}, ([0.02, 0.04], [0.3, 0.5])),
        ({"attn.k_scale": K, "attn.v_scale": V}, ([0.02, 0.02], [0.3, 0.3])),
        ({"k_proj.k_scale": K, "v_proj.v_scale": V}, ([0.02, 0.02], [0.3, 0.3])),
        ({"k_proj.output_scale": K, "v_proj.output_scale": V.half()}, ([0.02, 0.02], [float(V.half())] * 2)),
        ({"kv_scale": K}, ([0.02, 0.02], [0.02, 0.02])),
        ({"cachek_matmul.activation_scale": K * 448, "cachev_matmul.activation_scale": torch.tensor([448.0, 44.8])}, ([0.02, 0.02], [1.0, 0.1])),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_scales_of_a_checkpoint(
    folders: dict[str, Path], tmp_path: Path, tensors: dict[str, torch.Tensor], expected: tuple[list[float], ...]
) -> None:
    """Under every name that writers give them; auto follows kv_cache_scheme."""
    worker = make_worker(with_scales(folders["keys"], tmp_path / "model", tensors))
    assert worker.cache_dtype == ops.E4M3 and worker.store.layout["cache_scales"].startswith("of the checkpoint ")
    for own in scales_of(worker):
        torch.testing.assert_close(torch.stack([own.keys, own.values]), torch.tensor(expected))


def test_a_checkpoints_scale_of_latents(folders: dict[str, Path], tmp_path: Path) -> None:
    worker = make_worker(with_scales(folders["latents"], tmp_path / "model", {"k_scale": K, "v_scale": V}))
    assert all(own.keys.item() == own.values.item() == K.item() for own in scales_of(worker))


def test_a_checkpoints_scale_of_keys_that_hold_half_of_the_scores_factor(tmp_path: Path) -> None:
    """Scores are multiplied with 1, not 1 / 4: keys twice as large are kept, which the checkpoint's own scale would cut off."""
    make_model(Case("gemma2", config={"head_dim": 16, "query_pre_attn_scalar": 1}), tmp_path / "plain")
    worker = make_worker(with_scales(tmp_path / "plain", tmp_path / "model", {"k_scale": K, "v_scale": V}))
    for own in scales_of(worker):
        torch.testing.assert_close(torch.stack([own.keys, own.values]), torch.tensor([[2 * 0.02] * 2, [0.3] * 2]))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k_scale": torch.zeros(1), "v_scale": V}, r"layers\.0\.self_attn\.k_scale is \[0\.0\]; scales must be finite and above 0"),
        ({"k_scale": K, "v_scale": torch.tensor([math.nan])}, r"v_scale is \[nan\]; scales must be finite and above 0"),
        ({"k_scale": torch.ones(3), "v_scale": V}, r"k_scale has shape \(3,\); config\.json makes it \(1,\)"),
    ],
    ids=["zero", "nan", "shape"],
)
def test_scales_that_cannot_be(folders: dict[str, Path], tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    folder = with_scales(folders["keys"], tmp_path / "model", tensors)
    with pytest.raises(ModelError, match=message):
        make_worker(folder)
    make_worker(folder, kv_cache_dtype="model")
    make_worker(folder, kv_cache_scales="one")


def test_a_layer_without_scales(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = with_scales(folders["keys"], tmp_path / "model", {"k_scale": K, "v_scale": V})
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.v_scale"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.v_scale is missing, though 1 of 2 layers have their scales"):
        make_worker(folder)


@pytest.mark.parametrize(
    ("scheme", "options", "expected"),
    [
        ({"num_bits": 8, "type": "float"}, {}, "calibrated"),
        ("static", {}, "calibrated"),
        (None, {}, None),
        (None, FP8, "calibrated"),
        ({"num_bits": 8, "type": "float"}, {"kv_cache_dtype": "model"}, None),
        ({"num_bits": 8, "type": "float"}, {"kv_cache_scales": "one"}, "1"),
        ({"num_bits": 8, "type": "int"}, {}, None),
        ({"num_bits": 8, "type": "int"}, FP8, "calibrated"),
        ({"num_bits": 4, "type": "float"}, {}, None),
    ],
    ids=str,
)
def test_what_a_checkpoint_asks_for(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, scheme: Any, options: dict[str, str], expected: str | None
) -> None:
    config = dict(SCHEME, kv_cache_scheme=scheme) if scheme is not None else None
    worker = make_worker(edited(folders["keys"], tmp_path / "model", quantization_config=config), **options)
    assert worker.store.layout.get("cache_scales", "").split(" ")[0] == (expected or "")
    assert worker.cache_dtype == (torch.float32 if expected is None else ops.E4M3)
    is_told = isinstance(scheme, dict) and (scheme["type"], scheme["num_bits"]) != (8, "float") and expected is None and not options
    assert ("the checkpoint's keys and values are meant for" in caplog.text) == is_told


@pytest.mark.parametrize(("algo", "expected"), [("FP8", "fp8"), ("NVFP4", "'NVFP4'"), (None, None)])
def test_modelopts_own_file(folders: dict[str, Path], tmp_path: Path, algo: str | None, expected: str | None) -> None:
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": %s}}' % ("null" if algo is None else f'"{algo}"')
    )
    found = read_checkpoint_quantization({}, tmp_path)
    assert (found and found.cache) == expected and (found is None or not found.has_weights)


FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("config", "expected", "has_weights"),
    [
        ({"quant_method": "modelopt", "ignore": [], "kv_cache_scheme": FLOAT8}, "fp8", False),
        ({"quant_library": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": "FP8"}, "fp8", True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": "NVFP4"}, "'NVFP4'", True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": FLOAT8}, "fp8", True),
    ],
    ids=["alone", "older", "of 4 bits", "newer"],
)
def test_modelopts_config(tmp_path: Path, config: dict[str, Any], expected: str, has_weights: bool) -> None:
    """In config.json, where it has been written in several ways."""
    found = read_checkpoint_quantization({"quantization_config": config}, tmp_path)
    assert found is not None and (found.cache, found.has_weights) == (expected, has_weights)


@pytest.mark.parametrize("scheme", [8, "dynamic", {"num_bits": "8"}, {"num_bits": 8, "type": "complex"}, []], ids=str)
def test_schemes_that_cannot_be(folders: dict[str, Path], tmp_path: Path, scheme: Any) -> None:
    with pytest.raises(ModelError, match="kv_cache_scheme"):
        make_worker(edited(folders["keys"], tmp_path / "model", quantization_config=dict(SCHEME, kv_cache_scheme=scheme)))


# -- options ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["fp8", "FP8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn"])
def test_names_of_the_type(given: str) -> None:
    """vLLM's and SGLang's flags, and FastDeploy's key beside types of weights."""
    assert split_keys(translate({"kv_cache_dtype": given}, {"kv_cache_dtype"}).values)[1].kv_cache_dtype == "fp8"
    config = EngineConfig.from_dict({"quantization": {"quantization": "mix_quant", "dense_quant_type": "wint8", "kv_cache_quant_type": given}})
    assert config.kv_cache_dtype == "fp8" and dataclasses.replace(config) == config
    assert EngineConfig().kv_cache_dtype == "auto"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *[({"kv_cache_dtype": name}, f"kv_cache_dtype must be one of auto, model, fp8, got '{name}': k") for name in ("fp8_e5m2", "int8", "bf16")],
        *[({"quantization": {"kv_cache_quant_type": name}}, f"kv_cache_quant_type must be one of auto, model, fp8, got '{name}'")
          for name in ("int8", "block_wise_fp8", "float8_e4m3fn_zp")],
        ({"kv_cache_dtype": 8}, "kv_cache_dtype must be str, got 8"),
        ({"kv_cache_scales": "dynamic"}, "kv_cache_scales must be one of auto, one, got 'dynamic'"),
        ({"kv_cache_dtype": "model", "quantization": {"kv_cache_quant_type": "fp8"}}, "kv_cache_dtype must be fp8, or left out, where quantization"),
        ({"speculative_config": {"method": "mtp", "quantization": {"kv_cache_quant_type": "fp8"}}}, "kv_cache_quant_type is of a server's own"),
    ],
    ids=str,
)  # fmt: skip
def test_names_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_dict(values)


def test_scales_of_what_has_none() -> None:
    config = EngineConfig(kv_cache_scales="one", model=str(BUNDLED_MODEL))
    with pytest.raises(
        ConfigError, match=r"kv_cache_scales is one.* keys and values are kept in torch\.float32: leave it out, or say kv_cache_dtype fp8"
    ):
        pick_cache_dtype(config, torch.float32, CPU)


def test_others_options() -> None:
    notes = translate({"calculate_kv_scales": True}, set()).notes
    assert notes == [
        "calculate_kv_scales has no effect, and none is needed: of --kv-cache-dtype fp8 scales that the checkpoint lacks are found at the start"
    ]
    for key, value in (
        ("quantization_param_path", "scales.json"),
        ("cachekv_scale_file", "x"),
        ("cachekv_int8_type", "static"),
        ("use_cachekv_int8", 1),
    ):
        with pytest.raises(ConfigError, match=f"{key} .* is not an option here: .*--kv-cache-"):
            translate({key: value}, set())


def test_what_is_asked_for_or_meant_is_taken_on_any_device(folders: dict[str, Path], tmp_path: Path) -> None:
    asked = EngineConfig.from_dict({"model": str(folders["keys"]), **FP8})
    own = EngineConfig(model=str(edited(folders["keys"], tmp_path / "model", quantization_config=SCHEME)))
    for device in (CPU, torch.device("cuda", 0)):
        assert pick_cache_dtype(asked, torch.bfloat16, device) == pick_cache_dtype(own, torch.bfloat16, device) == ops.E4M3


# -- memory -----------------------------------------------------------------------------------------------------------------------


def test_pages_hold_more_tokens(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llms = {dtype: LLM(str(folders["keys"]), kv_cache_memory=2**18, max_batch_size=256, kv_cache_dtype=dtype) for dtype in ("model", "fp8")}
    assert "keys and values in torch.float8_e4m3fn" in caplog.text and "keys and values are kept in e4m3, scales calibrated: " in caplog.text
    stores = {dtype: llm.engine.worker.store for dtype, llm in llms.items()}
    assert stores["fp8"].num_pages == 4 * stores["model"].num_pages and 4 * stores["fp8"].page_bytes == stores["model"].page_bytes


def test_past_tokens_of_a_copy_are_cleared() -> None:
    store = KvStore([CacheSpec("attention", (2, 16), ops.E4M3, 2)], 8, 4, CPU)
    for plane in store.planes("attention"):
        plane.view(torch.uint8).fill_(0x7F)
    store.copy([(1, 2, 3)])
    for plane in store.planes("attention"):
        assert plane[2, :3].float().isnan().all() and not plane[2, 3:].view(torch.uint8).any() and plane[1].float().isnan().all()


def test_layouts_name_their_scales(folders: dict[str, Path]) -> None:
    """Pages of other scales mean other numbers: both values are named."""
    one, other, plain = (make_worker(folders["keys"], **options).store for options in (FP8, FP8 | {"kv_cache_scales": "one"}, {}))
    with pytest.raises(KvStoreError, match=f"pages of layout {other.fingerprint} cannot be read"):
        one.import_pages([0], other.export_pages([1]), other.fingerprint)
    infos = [NodeInfo("id", "decode", VERSION, store.fingerprint, store.layout, [], 100, []) for store in (one, other, plain)]
    assert infos[0].differences(infos[1]) == f"cache_scales {one.layout['cache_scales']} here, {other.layout['cache_scales']} there"
    assert other.layout["cache_scales"].startswith("1 ")
    assert "torch.float8_e4m3fn here" in infos[0].differences(infos[2]) and "cache_scales calibrated" in infos[0].differences(infos[2])


# -- engines ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_see_what_the_pages_hold(folders: dict[str, Path], name: str, exact_sums: None) -> None:
    """Whole, in chunks, token by token, behind another request's pages, and as drafts: the same logits."""
    steps, token_ids = Steps(make_worker(folders[name], **FP8)), random_tokens(60)
    steps.admit(0, token_ids, range(8))
    steps.run([Row(0, 0, 60)])
    whole = steps.logits()
    steps.admit(1, token_ids, range(8, 16))
    for begin, count in ((0, 13), (13, 30), (43, 1), (44, 4)):
        steps.run([Row(1, begin, count, is_end=False)])
        torch.testing.assert_close(steps.logits(), whole[begin : begin + count])
    steps.admit(2, token_ids, [*range(8, 13), *range(16, 19)])
    steps.run([Row(1, 48, 12), Row(2, 40, 9)])
    torch.testing.assert_close(steps.logits(), torch.cat([whole[48:], whole[40:49]]))
    kept = [plane.view(torch.uint8) for plane in steps.worker.store.planes(ATTENTION)]
    assert all(torch.equal(plane[:7], plane[8:15]) for plane in kept), "the same codes, however they were computed"


def tokens_of(llm: LLM, prompts: list[dict[str, list[int]]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(16), use_tqdm=False)]


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_chunks_cached_pages_and_preemption_change_nothing(folders: dict[str, Path], name: str, exact_sums: None) -> None:
    prompts = [{"prompt_token_ids": (random_tokens(12, seed) * 6)[:length]} for seed, length in enumerate((60, 33, 17))]

    def make(**options: Any) -> LLM:
        return LLM(str(folders[name]), **{"kv_cache_memory": "1MiB"} | FP8 | options)

    llm = make()
    plain = tokens_of(llm, prompts)
    assert tokens_of(llm, prompts) == plain and llm.engine.scheduler.num_cached_tokens > 0
    assert tokens_of(make(max_num_batched_tokens=5, max_batch_size=2), prompts) == plain
    tight = make(kv_cache_memory=9 * llm.engine.worker.store.page_bytes)
    assert tokens_of(tight, prompts) == plain and tight.engine.metrics.preemptions > 0
    drafting = make(speculative_config={"method": "ngram", "num_speculative_tokens": 4, "adaptive": False})
    assert tokens_of(drafting, prompts) == plain and drafting.engine.metrics.accepted_tokens["ngram"] > 0


def test_another_store_goes_on(exact_sums: None) -> None:
    """The bundled model with its drafter, whose own memory stays in the model's dtype, against plain decoding over the same codes."""
    here, there = (LLM(speculative_config=EVERY_METHOD, **FP8) for _ in range(2))
    store = here.engine.worker.store
    assert [name for name, spec in store.specs.items() if spec.dtype == ops.E4M3] == [ATTENTION] != list(store.specs)
    prompt = here.engine.tokenizer.encode(code_prompts(1, (600, 700), seed=23)[0])[:115]
    whole = LLM(enable_prefix_caching=False, **FP8).generate({"prompt_token_ids": prompt}, greedy(48), use_tqdm=False)[0].outputs[0].token_ids
    known, pages = leave(here, prompt, whole, {"method": "mtp"})
    computed = len(known) - 1
    lease = here.engine.scheduler.pool.lease(pages)
    here.engine.cancel("moves")
    here.engine.step()
    adopt(there, known[:computed], store.export_pages(pages), store.fingerprint, here.engine.planner._seen.count(pages, computed))
    here.engine.scheduler.pool.end_lease(lease)
    for choice in ({"method": "mtp"}, {"method": "none"}):
        found = go_on(there, known, choice)
        assert found[0] == whole[len(known) - len(prompt) :][:24] and found[3] == computed


HEADS = {"keys and values": ops.Heads(6, 2, 64), "latents": ops.Heads(4, 4, 96, 64, 32)}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_what_computes_over_codes_is_checked_at_the_start(heads: ops.Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernels against the twin: here the twin against itself, and against one that takes some keys for others."""
    where = (torch.device("cpu"), heads, 16, torch.bfloat16)
    code_check.check_codes(*where, {1, 6})
    exact = code_check._plan
    monkeypatch.setattr(code_check, "_plan", lambda *args: exact(*args[:-1], [ids[::-1] for ids in args[-1]]))
    message = r"attention over keys and values in e4m3 is off by .* \(limit 0.05; 1 queries a request.* kv_cache_dtype model"
    with pytest.raises(KernelError, match=message):
        code_check.check_codes(*where, {1, 6})
