"""Projections of few tokens against torch and float64, against themselves at other sizes, and fused against unfused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from backend.models.layers import Weights
from backend.models.loader import DummyCheckpoint
from backend.models.spec import Projection
from backend.parallel.ranks import Ranks
from backend.quantization.dense import DenseLinear
from kernels.activation import silu_mul
from kernels.linear import MAX_TOKENS, add_linear, is_skinny, linear, norm_gated_linear, norm_linear, write_linear
from kernels.norm import rms_norm
from kernels.prompt_linear import WIDTHS, can_launch_groups, launch_groups
from kernels.prompt_linear import launch as prompt_linear
from kernels.wide_linear import is_wide, takes_operands
from kernels.wide_linear import launch as wide_linear

EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16)
CORRECTNESS = [(1, 6144, 4096), (6, 4096, 4096), (8, 4096, 14336), (16, 28672, 4096), (3, 576, 192), (11, 192, 512)]
CORNER = [(1, 32, 32), (16, 32, 288), (7, 4256, 96), (9, 12832, 64), (5, 64, 8192), (2, 33824, 160)]
PERFORMANCE = [(1, 128256, 4096), (16, 128256, 4096), (16, 4096, 14336)]


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def make(num_tokens: int, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, weight, bias, norm weight, residual; x is part of wider rows, and what is beside it is NaN."""
    wide = torch.full((num_tokens, in_size + 64), float("nan"), device=device, dtype=dtype)
    wide[:, 8 : 8 + in_size] = torch.randn(num_tokens, in_size, device=device)
    weight = (torch.randn(out_size, in_size, device=device) / in_size**0.5).to(dtype)
    bias, residual = torch.randn(out_size, device=device).to(dtype), torch.randn(num_tokens, out_size, device=device).to(dtype)
    return wide[:, 8 : 8 + in_size], weight, bias, (1 + 0.1 * torch.randn(in_size, device=device)).to(dtype), residual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), CORRECTNESS + CORNER + PERFORMANCE)
def test_linear(num_tokens: int, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias, _, _ = make(num_tokens, out_size, in_size, dtype, device)
    assert is_skinny(x, weight)
    for b in (None, bias):
        out, exact = linear(x, weight, b), F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert out.shape == exact.shape and out.dtype == dtype
        assert relative_error(out, exact) <= 2 * relative_error(F.linear(x, weight, b), exact) + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), CORRECTNESS + CORNER)
def test_fused(num_tokens: int, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias, norm_weight, residual = make(num_tokens, out_size, in_size, dtype, device)
    expected = residual + linear(x, weight, bias)
    assert add_linear(residual, x, weight, bias) is residual
    assert torch.equal(residual, expected)
    normalised = rms_norm(x.contiguous(), norm_weight, EPS)
    exact = F.linear(F.rms_norm(x.double(), (in_size,), norm_weight.double(), EPS), weight.double(), bias.double())
    out = norm_linear(x, norm_weight, EPS, weight, bias)
    chance = 6 * torch.finfo(dtype).eps / (num_tokens * out_size / 2) ** 0.5  # of few numbers one may be rounded luckily, or the other not
    assert relative_error(out, exact) <= 2 * relative_error(F.linear(normalised, weight, bias), exact) + chance
    exact, apart = silu_mul((exact - bias.double()).cpu()).to(device), silu_mul(F.linear(normalised, weight))
    assert relative_error(norm_gated_linear(x, norm_weight, EPS, weight), exact) <= 2 * relative_error(apart, exact) + chance


@pytest.mark.parametrize(("out_size", "in_size"), [(6144, 4096), (4096, 14336), (28672, 4096), (576, 192), (33824, 160)])
def test_rows_do_not_depend_on_their_number(out_size: int, in_size: int, device: torch.device) -> None:
    x, weight, bias, norm_weight, _ = make(MAX_TOKENS, out_size, in_size, torch.bfloat16, device)
    whole, gated = linear(x, weight, bias), norm_gated_linear(x, norm_weight, EPS, weight)
    normed = norm_linear(x, norm_weight, EPS, weight, bias)
    for start, stop in ((0, 1), (3, 4), (15, 16), (0, 6), (5, 13), (0, 9), (4, 16)):
        assert torch.equal(linear(x[start:stop], weight, bias), whole[start:stop])
        assert torch.equal(norm_linear(x[start:stop], norm_weight, EPS, weight, bias), normed[start:stop])
        assert torch.equal(norm_gated_linear(x[start:stop], norm_weight, EPS, weight), gated[start:stop])


WIDE = [(17, 6144, 4096), (32, 4096, 4096), (24, 28672, 4096), (27, 4096, 14336), (20, 2048, 2048)]
WIDE += [(48, 6144, 4096), (64, 4096, 4096), (42, 28672, 4096), (57, 28672, 4096), (64, 4096, 14336), (33, 2048, 2048)]
WIDE += [(65, 6144, 4096), (96, 4096, 4096), (128, 28672, 4096), (100, 4096, 14336), (160, 28672, 4096), (192, 4096, 14336), (129, 3072, 2048)]
WIDE_CORNER = [(17, 32, 64), (32, 96, 128), (30, 576, 192), (23, 4256, 320), (32, 12832, 64), (24, 128256, 256), (31, 33824, 512)]
WIDE_CORNER += [(48, 32, 64), (49, 96, 128), (50, 576, 192), (63, 4256, 320), (40, 12832, 64), (33, 128256, 256), (64, 33824, 512)]
WIDE_CORNER += [(192, 32, 64), (65, 96, 128), (129, 576, 192), (127, 4256, 320), (191, 12832, 64), (77, 128256, 256), (150, 33824, 512)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), WIDE + WIDE_CORNER)
def test_wide(num_tokens: int, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias, norm_weight, residual = make(num_tokens, out_size, in_size, dtype, device)
    assert is_wide(x, weight)
    exact = F.linear(x.double(), weight.double())
    allowed = 2 * relative_error(F.linear(x, weight), exact) + 1e-6
    out, with_bias = linear(x, weight), linear(x, weight, bias)
    assert relative_error(out, exact) <= allowed
    assert relative_error(with_bias, exact + bias.double()) <= allowed
    expected = residual + with_bias
    assert add_linear(residual, x, weight, bias) is residual
    assert torch.equal(residual, expected)
    if is_wide(x, weight, is_gated=True):
        gated = wide_linear(x, weight, is_gated=True)
        torch.testing.assert_close(gated, silu_mul(out), rtol=0, atol=0)
        normed = norm_gated_linear(x.contiguous(), norm_weight, EPS, weight)
        torch.testing.assert_close(normed, silu_mul(linear(rms_norm(x.contiguous(), norm_weight, EPS), weight)), rtol=0, atol=0)


@pytest.mark.parametrize(("out_size", "in_size"), [(6144, 4096), (4096, 14336), (28672, 4096), (576, 192), (33824, 256)])
def test_wide_rows_do_not_depend_on_their_number(out_size: int, in_size: int, device: torch.device) -> None:
    x, weight, bias, norm_weight, _ = make(192, out_size, in_size, torch.bfloat16, device)
    whole, gated = linear(x, weight, bias), norm_gated_linear(x, norm_weight, EPS, weight)
    for start, stop in ((0, 17), (10, 42), (3, 22), (30, 64), (1, 49), (5, 64), (60, 125), (0, 128), (3, 192), (63, 192)):
        assert torch.equal(linear(x[start:stop], weight, bias), whole[start:stop])
        assert torch.equal(norm_gated_linear(x[start:stop], norm_weight, EPS, weight), gated[start:stop])


LONG = [(512, 6144, 4096), (193, 4096, 4096), (640, 28672, 4096), (1500, 4096, 14336), (4100, 3072, 2048)]
LONG_CORNER = [(256, 32, 64), (193, 96, 128), (257, 576, 192), (385, 4256, 320), (1000, 12832, 64), (200, 128256, 256), (900, 33824, 512)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), LONG + LONG_CORNER)
def test_long(num_tokens: int, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias, norm_weight, residual = make(num_tokens, out_size, in_size, dtype, device)
    assert takes_operands(x, weight)
    exact = F.linear(x.double(), weight.double())
    allowed = 2 * relative_error(F.linear(x, weight), exact) + 1e-6
    out, with_bias = prompt_linear(x, weight), prompt_linear(x, weight, bias)
    assert relative_error(out, exact) <= allowed
    assert relative_error(with_bias, exact + bias.double()) <= allowed
    written = torch.full_like(out, float("nan"))
    assert prompt_linear(x, weight, out=written) is written and torch.equal(written, out)
    assert relative_error(write_linear(written, x, weight), exact) <= allowed
    expected, added = residual + with_bias, residual.clone()
    assert prompt_linear(x, weight, bias, added) is added
    assert torch.equal(added, expected)
    assert add_linear(residual, x, weight, bias) is residual
    assert relative_error(residual, expected.double()) <= 2 * torch.finfo(dtype).eps
    if takes_operands(x, weight, is_gated=True):
        normed = norm_gated_linear(x.contiguous(), norm_weight, EPS, weight)
        torch.testing.assert_close(normed, silu_mul(prompt_linear(rms_norm(x.contiguous(), norm_weight, EPS), weight)), rtol=0, atol=0)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_of_long_products(width: int, is_gated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of any width make the same numbers, however many there are to a block."""
    for num_tokens, out_size, in_size in ((513, 608, 192), (2100, 5152, 1088), (260, 28672, 4096), (257, 1600, 4096)):
        x, weight, bias, _, residual = make(num_tokens, out_size, in_size, torch.bfloat16, device)
        outs = []
        for one in (128, width):
            monkeypatch.setattr("kernels.prompt_linear.choose_width", lambda *_, one=one: one)
            outs.append(prompt_linear(x, weight, None if is_gated else bias, None if is_gated else residual.clone(), is_gated))
        assert torch.equal(*outs)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[300], [0, 70, 0, 5, 130, 64, 1, 0], [129] * 40, [64] * 3 + [1000, 0, 65]], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_groups_of_rows(
    counts: list[int], width: int, dtype: torch.dtype, is_gated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As products of each expert's rows alone; what is behind the last stays as it is."""
    monkeypatch.setattr("kernels.prompt_linear.choose_width", lambda *_: width)
    x = torch.randn(sum(counts) + 37, 192, device=device).to(dtype)
    weight = (torch.randn(len(counts), 608, 192, device=device) / 192**0.5).to(dtype)
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    assert can_launch_groups(x, *weight.shape)
    made = launch_groups(x, weight, ends, is_gated)
    first = 0
    for own, count in zip(weight, counts, strict=True):
        if count:
            assert torch.equal(made[first : first + count], prompt_linear(x[first : first + count], own, is_gated=is_gated))
        first += count


@pytest.mark.parametrize("num_tokens", [6, 24, 64, 100, 192, 193, 384])
def test_chain_in_graph(num_tokens: int, device: torch.device) -> None:
    """Kernels that begin before the one ahead has ended still see all that it wrote, replay after replay."""
    x, qkv, _, norm_weight, _ = make(num_tokens, 6144, 4096, torch.bfloat16, device)
    _, o, _, _, _ = make(num_tokens, 4096, 4096, torch.bfloat16, device)
    _, gate_up, _, _, _ = make(num_tokens, 28672, 4096, torch.bfloat16, device)
    _, down, _, _, _ = make(num_tokens, 4096, 14336, torch.bfloat16, device)
    start = x.contiguous()

    def run(stream: torch.Tensor, is_fused: bool) -> torch.Tensor:
        for _ in range(4):
            if is_fused:
                add_linear(stream, norm_linear(stream, norm_weight, EPS, qkv)[:, :4096], o)
                add_linear(stream, norm_gated_linear(stream, norm_weight, EPS, gate_up), down)
            else:
                y = norm_linear(stream, norm_weight, EPS, qkv)
                torch.cuda.synchronize()
                stream += linear(y[:, :4096], o)
                y = norm_gated_linear(stream, norm_weight, EPS, gate_up)
                torch.cuda.synchronize()
                stream += linear(y, down)
                torch.cuda.synchronize()
        return stream

    expected = run(start.clone(), False)
    out = start.clone()
    run(out, True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        out.copy_(start)
        run(out, True)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_goes_to_torch(device: torch.device) -> None:
    for num_tokens, out_size, in_size, dtype in (
        (193, 64, 64, torch.bfloat16),
        (17, 64, 96, torch.bfloat16),
        (0, 64, 64, torch.bfloat16),
        (2, 64, 64, torch.float32),
        (2, 48, 64, torch.half),
    ):
        x, weight, bias, norm_weight, residual = make(num_tokens, out_size, in_size, dtype, device)
        x = x.contiguous()
        assert not is_skinny(x, weight) and not is_wide(x, weight)
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
        assert add_linear(residual, x, weight) is residual
        assert norm_linear(x, norm_weight, EPS, weight).shape == (num_tokens, out_size)
        assert norm_gated_linear(x, norm_weight, EPS, weight).shape == (num_tokens, out_size // 2)


def test_errors(device: torch.device) -> None:
    x, weight, *_ = make(2, 64, 64, torch.bfloat16, device)
    with pytest.raises(ValueError, match=r"weight \(64, 32\)"):
        linear(x, weight[:, :32])
    with pytest.raises(ValueError, match=r"must be \[2, 64\]"):
        add_linear(x[:1], x, weight)


def test_a_ranks_share_of_a_head_is_all_that_it_keeps(device: torch.device) -> None:
    before = torch.cuda.memory_allocated(device)
    weights = Weights(DummyCheckpoint(".", torch.device("cpu"), torch.bfloat16), torch.bfloat16, device, Ranks(1, 2))
    head = weights.head(Projection("lm_head", 65536, 512))
    assert isinstance(head, DenseLinear) and head.weight.shape == (32768, 512)
    assert torch.cuda.memory_allocated(device) - before < 1.1 * head.weight.nbytes
