"""Experts of quantized weights on the GPU: against float64, against the product of one projection bit by bit, and through the engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from backend import LLM, SamplingParams
from backend.errors import ModelError
from backend.quantization import Quantized, make_stored_experts, quantize
from backend.quantization.experts import QuantizedExperts
from kernels import quantized_experts, wide_quantized_experts
from kernels.activation import silu_mul
from kernels.quantized import quantized_gated_linear, quantized_linear
from kernels.quantized_experts import mix_quantized_experts
from kernels.quantized_weight import QuantizedWeight
from kernels.route import Routing
from tests.families import Case, make_model, random_tokens
from tests.gpu.test_experts import exact, relative_error
from tests.gpu.test_quantized import exact_weight, make

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8, INT4 = torch.int8, torch.float8_e4m3fn, torch.uint8
KINDS = [(INT8, None), (FP8, None), (FP8, 128), (INT4, 64), (INT4, 128), (INT8, 64)]
SHAPES = [(1, 64, 6, 2560, 1536), (3, 64, 6, 256, 128), (8, 7, 3, 384, 256), (9, 7, 3, 384, 256), (40, 5, 5, 128, 640), (100, 16, 2, 256, 384)]
SHAPES += [(300, 64, 6, 256, 128), (700, 5, 2, 128, 256), (17, 256, 8, 512, 256), (1, 1, 1, 128, 128), (14, 3, 2, 1408, 640), (90, 4, 3, 640, 1408)]
Shape = tuple[int, int, int, int, int]


def choose(num_tokens: int, num_experts: int, num_chosen: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(num_tokens, num_experts, device=device).add_(torch.rand(num_experts, device=device))
    return scores.topk(num_chosen).indices, torch.rand(num_tokens, num_chosen, device=device)


def make_weights(
    kind: tuple[torch.dtype, int | None], shape: Shape, device: torch.device, has_zeros: bool = False
) -> tuple[QuantizedWeight, QuantizedWeight]:
    _, count, _, hidden, inner = shape
    stored, group = kind
    return make(stored, count * 2 * inner, hidden, group, device, has_zeros), make(stored, count * hidden, inner, group, device, has_zeros)


@pytest.fixture(params=["wide", "few"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Hopper's, or the one that other GPUs have."""
    if request.param == "few":
        monkeypatch.setattr(wide_quantized_experts, "is_wide", lambda *_: False)
    return str(request.param)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mix(shape: Shape, kind: tuple[torch.dtype, int | None], dtype: torch.dtype, kernel: str, device: torch.device) -> None:
    num_tokens, count, num_chosen, hidden, inner = shape
    if dtype == FP32 and (num_tokens > 40 or kernel == "few"):
        pytest.skip("one way for any number, by torch")
    gate_up, down = make_weights(kind, shape, device, has_zeros=kind == (INT4, 64))
    wide = torch.full((num_tokens + 1, hidden + 64), float("nan"), device=device, dtype=dtype)
    wide[:-1, 8 : 8 + hidden] = torch.randn(num_tokens, hidden, device=device)
    x = wide[:-1, 8 : 8 + hidden]
    experts, weights = choose(num_tokens, count, num_chosen, device)
    plain = exact_weight(gate_up).view(count, 2 * inner, hidden), exact_weight(down).view(count, hidden, inner)
    expected = exact(x, experts, weights, *plain, range(count))
    torch.full((num_tokens * num_chosen, hidden), float("nan"), dtype=dtype, device=device)
    out = mix_quantized_experts(x, experts, weights, gate_up, down, silu_mul, True)
    limit = {BF16: 8e-3, FP16: 1.5e-3, FP32: 1e-5}[dtype]
    assert out.shape == x.shape and relative_error(out, expected) < limit
    residual = torch.randn(num_tokens, hidden, device=device).to(dtype)
    added = residual + out
    assert mix_quantized_experts(x, experts, weights, gate_up, down, silu_mul, True, residual=residual) is residual
    assert torch.equal(residual, added)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 64])
def test_an_expert_is_a_projection(num_tokens: int, kind: tuple[torch.dtype, int | None], kernel: str, device: torch.device) -> None:
    """Each token alone: the same bits, however many tokens an expert has, and but for the order of sums what the kernel of one projection makes."""
    shape = (num_tokens, 6, 2, 384, 256)
    gate_up, down = make_weights(kind, shape, device)
    x = torch.randn(num_tokens, 384, device=device).to(BF16)
    experts, _ = choose(num_tokens, 6, 2, device)
    for place in range(2):
        weights = torch.zeros(num_tokens, 2, device=device)
        weights[:, place] = 1.0
        out = mix_quantized_experts(x, experts, weights, gate_up, down, silu_mul, True)
        for token in range(num_tokens):
            number = int(experts[token, place])
            own, alone = (
                slice(token, token + 1),
                quantized_linear(quantized_gated_linear(x[token : token + 1], gate_up.part(number, 6)), down.part(number, 6)),
            )
            assert torch.equal(out[own], mix_quantized_experts(x[own], experts[own], weights[own], gate_up, down, silu_mul, True))
            assert relative_error(out[own], alone.double()) < 2**-7


@pytest.mark.parametrize("num_tokens", [4, 200])
def test_a_rank_adds_its_own_experts(num_tokens: int, kernel: str, device: torch.device) -> None:
    shape = (num_tokens, 8, 3, 256, 128)
    gate_up, down = make_weights((INT4, 64), shape, device)
    x, (experts, weights) = torch.randn(num_tokens, 256, device=device).to(BF16), choose(num_tokens, 8, 3, device)
    parts = [
        mix_quantized_experts(x, experts, weights, gate_up.part(half, 2), down.part(half, 2), silu_mul, True, first=4 * half).float()
        for half in (0, 1)
    ]
    plain = exact_weight(gate_up).view(8, 256, 256), exact_weight(down).view(8, 256, 128)
    assert relative_error(parts[0] + parts[1], exact(x, experts, weights, *plain, range(8))) < 1e-2


@pytest.mark.parametrize("is_silu", [False, True])
def test_other_activations_and_many_pairs(is_silu: bool, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose weights would take too much memory are read for every chunk."""
    monkeypatch.setattr(quantized_experts, "MAX_EXPANDED_BYTES", 1)
    monkeypatch.setattr(quantized_experts.plain, "MAX_PAIRS", 500)
    shape = (600, 4, 2, 256, 128)
    gate_up, down = make_weights((FP8, 128), shape, device)
    x, (experts, weights) = torch.randn(600, 256, device=device).to(BF16), choose(600, 4, 2, device)
    plain = exact_weight(gate_up).view(4, 256, 256), exact_weight(down).view(4, 256, 128)
    for residual in (None, torch.zeros(600, 256, device=device, dtype=BF16)):
        out = mix_quantized_experts(x, experts, weights, gate_up, down, silu_mul, is_silu, residual=residual)
        assert relative_error(out, exact(x, experts, weights, *plain, range(4))) < 1e-2


def test_experts_that_are_stored_differently(device: torch.device) -> None:
    own = [quantize(torch.randn(64, 128, device=device), scheme) for scheme in ("wint8", "wint8", "wint4", "wint4")]
    pairs: list[tuple[list[Quantized | torch.Tensor], Quantized | torch.Tensor]] = [([w, w], w) for w in own]
    with pytest.raises(ModelError, match=r"layers\.0: experts are stored differently"):
        make_stored_experts(pairs, device, silu_mul, where="layers.0")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="all quantized, and alike"):
        make_stored_experts([([own[0], torch.randn(64, 128, device=device)], own[0])], device, silu_mul, where="layers.0")


@pytest.mark.parametrize("scheme", ["wint4", "fp8"])
@pytest.mark.parametrize("inner", [96, 192, 224])
def test_a_ranks_share_of_an_experts_inner_size(inner: int, scheme: str, device: torch.device) -> None:
    """What is no whole number of steps is padded, so that stored weights are read all the same."""
    count, hidden, num_tokens = 5, 128, 20
    plain = [[torch.randn(*shape, device=device) / 12 for shape in ((inner, hidden), (inner, hidden), (hidden, inner))] for _ in range(count)]
    own = [[quantize(weight, scheme) for weight in weights] for weights in plain]
    pairs: list[tuple[list[Quantized | torch.Tensor], Quantized | torch.Tensor]] = [([gate, up], down) for gate, up, down in own]
    made = make_stored_experts(pairs, device, silu_mul, is_silu=True)  # type: ignore[arg-type]
    assert isinstance(made, QuantizedExperts) and wide_quantized_experts.is_wide(made._gate_up, made._down, count, BF16)
    x, (experts, weights) = torch.randn(num_tokens, hidden, device=device).to(BF16), choose(num_tokens, count, 2, device)
    into = torch.stack([torch.cat([gate.expand(), up.expand()]) for gate, up, _ in own]).double()
    expected = exact(x, experts, weights, into, torch.stack([down.expand() for _, _, down in own]).double(), range(count))
    assert relative_error(made(Routing(x, experts, weights)), expected) < 8e-3


@pytest.mark.parametrize("scheme", ["wint4", "wint8", "fp8"])
def test_answers(scheme: str, tmp_path: Path) -> None:
    """In float32 the CPU's tokens; in bfloat16, by the kernels, about its scores."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
    make_model(Case("ernie4_5_moe", config=sizes | {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1}), tmp_path)
    prompts = [{"prompt_token_ids": ids} for ids in (random_tokens(60, 3), (random_tokens(9, 4) * 9)[:71], random_tokens(3, 5))]
    answers, scores = {}, {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        config = {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
        options = {"kv_cache_memory": "8MiB", "page_size": 16, "max_batch_size": 4, "quantization": scheme}
        llm = LLM(str(tmp_path), dtype=dtype, device=device, speculative_config=config, **options)
        for method in ("none", "ngram"):
            params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
            outputs = llm.generate(prompts, params, speculative={"method": method}, use_tqdm=False)
            answers[device, dtype, method] = [output.outputs[0].token_ids for output in outputs]
        (output,) = llm.generate(prompts[:1], SamplingParams(max_tokens=0, echo=True, logprobs=0), use_tqdm=False)
        scores[device, dtype] = [entry.logprob for entry in output.outputs[0].logprobs]
        llm.close()
    assert all(answer == answers["cpu", "float32", "none"] for (_, dtype, _), answer in answers.items() if dtype == "float32")
    pairs = list(zip(scores["cpu", "float32"], scores["cuda", "bfloat16"]))
    assert math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs)) < 0.1
