"""Products of quantized weights against their twin and float64, against themselves at other sizes, and fused against unfused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import linear, reference, wide_quantized
from kernels.activation import silu_mul
from kernels.norm import rms_norm
from kernels.quantized import (
    MAX_WIDE_TURNS,
    _multiply_stored,
    expand_weight,
    quantized_add_linear,
    quantized_gated_linear,
    quantized_linear,
    quantized_norm_gated_linear,
    quantized_norm_linear,
)
from kernels.quantized_weight import KINDS, NATURAL, QuantizedWeight
from kernels.round_rows import as_rounded, round_rows
from kernels.rounded import MIN_ROWS, is_rounded, is_rounded_for_groups, rounding_activations

DTYPES = (torch.bfloat16, torch.float16)
STORED = tuple(KINDS)
"""Dtypes of stored codes."""
SHAPES = [(1, 6144, 4096), (8, 4096, 4096), (5, 4096, 14336), (16, 28672, 4096), (30, 6144, 4096), (64, 4096, 14336), (192, 28672, 4096)]
CORNER = [
    (1, 32, 128),
    (8, 32, 256),
    (9, 576, 640),
    (16, 64, 8192),
    (17, 4256, 384),
    (33, 12832, 128),
    (65, 64, 8192),
    (100, 160, 1152),
    (129, 33824, 256),
    (250, 96, 640),
    (3, 48, 1152),
    (150, 8480, 128),
]
CASES = [(*shape, torch.bfloat16) for shape in SHAPES + CORNER] + [(*shape, torch.float16) for shape in (SHAPES[1], CORNER[2], CORNER[5], CORNER[7])]


def make(stored: torch.dtype, out_size: int, in_size: int, group: int | None, device: torch.device, has_zeros: bool = False) -> QuantizedWeight:
    """group: columns to a scale; None: all. Scales are such that products are about 1."""
    shape = (out_size, in_size if stored != torch.uint8 else in_size // 2)
    codes = torch.randint(0, 256, shape, device=device, dtype=torch.uint8)
    if stored == torch.float8_e4m3fn:
        codes = torch.randn(shape, device=device).mul_(50).clamp_(-448, 448).to(stored)
    num_groups = in_size // (group or in_size)
    size = {torch.int8: 74.0, torch.float8_e4m3fn: 50.0, torch.uint8: 4.6}[stored]
    scales = (torch.rand(out_size, num_groups, device=device) + 0.5) / size / in_size**0.5
    zeros = None
    if has_zeros:
        low, high = (0, 17) if stored == torch.uint8 else (-128, 129)
        zeros = torch.randint(low, high, (out_size, num_groups), device=device).float()
    return QuantizedWeight(codes.view(stored), scales, zeros, None, 4 if stored == torch.uint8 else 8).interleave()


def exact_weight(weight: QuantizedWeight) -> torch.Tensor:
    """[N, K] float64, without any rounding."""
    codes = weight.natural_codes(slice(None))
    digits = torch.cat([codes & 15, codes >> 4], dim=1).double() if weight.bits == 4 else codes.double()
    zeros = 8.0 if weight.bits == 4 else 0.0
    if weight.zeros is not None:
        zeros = weight.zeros.double().repeat_interleave(weight.group_size, dim=1)
    return (digits - zeros) * weight.scales.double().repeat_interleave(weight.group_size, dim=1)


def tokens(num_tokens: int, in_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Part of wider rows; what is beside it is NaN."""
    wide = torch.full((num_tokens + 1, in_size + 64), float("nan"), device=device, dtype=dtype)
    wide[:-1, 8 : 8 + in_size] = torch.randn(num_tokens, in_size, device=device)
    return wide[:-1, 8 : 8 + in_size]


def poison(*shape: int, dtype: torch.dtype, device: torch.device) -> None:
    """Fills the memory that the next tensor of this shape gets with NaN."""
    torch.full(shape, float("nan"), dtype=dtype, device=device)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


@pytest.fixture(params=["linear", "wide"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which one has the few tokens that either can have."""
    for name in ("MIN_TOKENS", "MIN_GROUPED_TOKENS"):
        monkeypatch.setattr(wide_quantized, name, 1 if request.param == "wide" else linear.MAX_TOKENS + 1)
    return str(request.param)


@pytest.mark.parametrize("group", [None, 64, 128])
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size", "dtype"), CASES)
def test_linear(
    num_tokens: int,
    out_size: int,
    in_size: int,
    stored: torch.dtype,
    group: int | None,
    dtype: torch.dtype,
    kernel: str,
    device: torch.device,
) -> None:
    if kernel == "wide" and num_tokens > linear.MAX_TOKENS:
        pytest.skip("which has so many anyway")
    weight, x = make(stored, out_size, in_size, group, device), tokens(num_tokens, in_size, dtype, device)
    bias, residual = torch.randn(out_size, device=device).to(dtype), torch.randn(num_tokens, out_size, device=device).to(dtype)
    assert _multiply_stored(x, weight) is not None
    exact, twin = x.double() @ exact_weight(weight).T, reference.quantized_linear(x, weight)
    poison(num_tokens, out_size, dtype=dtype, device=device)
    out = quantized_linear(x, weight)
    assert out.shape == exact.shape and out.dtype == dtype
    allowed = 1.5 * relative_error(twin, exact) + 1e-6
    assert relative_error(out, exact) <= allowed
    with_bias = quantized_linear(x, weight, bias)
    assert relative_error(with_bias, exact + bias.double()) <= allowed
    expected = residual + with_bias
    assert quantized_add_linear(residual, x, weight, bias) is residual
    assert torch.equal(residual, expected)
    if out_size % 32 == 0:
        poison(num_tokens, out_size // 2, dtype=dtype, device=device)
        check_gated(quantized_gated_linear(x, weight), silu_mul(out))


def check_gated(gated: torch.Tensor, expected: torch.Tensor) -> None:
    """The same but for the order of sums, in which linear.cu's blocks differ, and what that makes of their rounding."""
    assert relative_error(gated, expected.double()) <= 4 * torch.finfo(gated.dtype).eps


@pytest.mark.parametrize("group", [None, 64])
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), [(1, 6144, 4096), (7, 96, 8192), (16, 28672, 4096), (40, 576, 640)])
def test_with_the_norm_before_it(
    num_tokens: int, out_size: int, in_size: int, stored: torch.dtype, group: int | None, kernel: str, device: torch.device
) -> None:
    """Where one kernel does both, x is not rounded between them: as near to exact as one after the other."""
    weight, x = make(stored, out_size, in_size, group, device), tokens(num_tokens, in_size, torch.bfloat16, device)
    norm = torch.rand(in_size, device=device).bfloat16() + 0.5
    exact = F.rms_norm(x.double(), (in_size,), norm.double(), 1e-5) @ exact_weight(weight).T
    apart = quantized_linear(rms_norm(x, norm, 1e-5), weight)
    allowed = 1.5 * relative_error(apart, exact)
    poison(num_tokens, out_size, dtype=torch.bfloat16, device=device)
    out = quantized_norm_linear(x, norm, 1e-5, weight)
    assert relative_error(out, exact) <= allowed
    check_gated(quantized_norm_gated_linear(x, norm, 1e-5, weight), silu_mul(out))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 64])
@pytest.mark.parametrize("num_tokens", [7, 16, 40, 130])
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
def test_zeros(stored: torch.dtype, num_tokens: int, group: int | None, dtype: torch.dtype, kernel: str, device: torch.device) -> None:
    weight, x = make(stored, 576, 640, group, device, has_zeros=True), tokens(num_tokens, 640, dtype, device)
    exact = x.double() @ exact_weight(weight).T
    out = quantized_linear(x, weight)
    assert relative_error(out, exact) <= 1.1 * relative_error(reference.quantized_linear(x, weight), exact) + 1e-6
    check_gated(quantized_gated_linear(x, weight), silu_mul(out))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 16, 64])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_expanded_weights_are_the_twins(stored: torch.dtype, has_zeros: bool, group: int | None, dtype: torch.dtype, device: torch.device) -> None:
    """Bit by bit, every code there is."""
    for out_size, in_size in ((256, 512), (31, 64), (4096, 4096)):
        weight = make(stored, out_size, in_size, group, device, has_zeros and stored != torch.float8_e4m3fn)
        if (out_size, in_size) == (256, 512):
            codes = torch.arange(256, dtype=torch.uint8, device=device)
            if stored == torch.float8_e4m3fn:
                codes = codes.masked_fill(codes & 127 == 127, 0)  # which are no numbers
            weight.codes.view(torch.uint8).copy_(codes[:, None].expand(-1, weight.codes.shape[1]))
        poison(out_size, in_size, dtype=dtype, device=device)
        assert torch.equal(expand_weight(weight, dtype), weight.expand().to(dtype))


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("out_size", "in_size"), [(6144, 4096), (4096, 14336), (28672, 4096), (576, 640)])
def test_rows_do_not_depend_on_their_number(
    out_size: int, in_size: int, stored: torch.dtype, group: int | None, kernel: str, device: torch.device
) -> None:
    """As long as one kernel has them."""
    weight = make(stored, out_size, in_size, group, device)
    few, many = ((0, 1), (3, 4), (15, 16), (0, 6), (5, 13), (0, 9)), ((0, 17), (20, 60), (100, 192), (3, 131), (150, 182))
    most = wide_quantized.most_tokens(weight)
    many = tuple(part for part in many if part[1] <= most)
    ranges = ((linear.MAX_TOKENS, few), (most, many)) if kernel == "linear" else ((most, few + many),)
    for most, parts in ranges:
        x = tokens(most, in_size, torch.bfloat16, device)
        whole, gated = quantized_linear(x, weight), quantized_gated_linear(x, weight)
        for start, stop in parts:
            assert torch.equal(quantized_linear(x[start:stop], weight), whole[start:stop])
            assert torch.equal(quantized_gated_linear(x[start:stop], weight), gated[start:stop])


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_many_tokens_and_odd_sizes(stored: torch.dtype, device: torch.device) -> None:
    """The first are multiplied with weights that are written out, the others by torch alone."""
    for num_tokens, out_size, in_size, group in (
        (wide_quantized.MAX_TOKENS * MAX_WIDE_TURNS + 1, 96, 256, 64),  # of 4 bits from 257 on
        (700, 96, 256, None),
        (4, 48, 260, 130),
        (4, 96, 96, 32),
        (4, 96, 256, 32),
        (50, 7, 26, None),
    ):
        weight, x = make(stored, out_size, in_size, group, device), tokens(num_tokens, in_size, torch.bfloat16, device)
        assert _multiply_stored(x, weight) is None
        exact = x.double() @ exact_weight(weight).T
        allowed = 1.5 * relative_error(F.linear(x, weight.expand().bfloat16()), exact) + 1e-6
        assert relative_error(quantized_linear(x, weight), exact) <= allowed
        residual = torch.randn(num_tokens, out_size, device=device, dtype=torch.bfloat16)
        before = residual.double()
        quantized_add_linear(residual, x, weight)
        assert relative_error(residual, before + exact) <= allowed + 2.0**-8
        if out_size % 2 == 0:
            assert relative_error(quantized_gated_linear(x, weight), silu_mul(exact.float().cpu()).double().to(device)) <= 4 * allowed


def exact_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What round_rows made, as float64 in the columns' order."""
    pieces = codes[: len(scales)].view(torch.uint8).unflatten(1, (-1, 16))[:, :, NATURAL].flatten(1).view(torch.float8_e4m3fn)
    return pieces.double() * scales.double()


@pytest.mark.parametrize("size", [16, 128, 528, 4096, 14336, 53248])
def test_rows_in_e4m3(size: int, device: torch.device) -> None:
    x = tokens(7, size, torch.bfloat16, device)
    x[:, 5] *= 40  # as some channels are
    x[3] = 0
    codes, scales = round_rows(x).codes[:7], round_rows(x).scales
    assert torch.allclose(scales[:, 0], x.abs().amax(dim=1).float().clamp(min=1e-12) / 448)
    error = (exact_rows(codes, scales) - x.double()).abs()
    assert (error <= x.double().abs() / 16 + scales / 512 * 1.01).all(), "more than half a step"
    assert torch.equal(as_rounded(x), exact_rows(codes, scales).bfloat16())
    for columns in (64, 128) if size % 128 == 0 else ():
        sums = round_rows(x, None, columns).sums
        assert torch.equal(sums[:, :7], codes.float().unflatten(1, (-1, columns)).sum(2).t())
    norm = (1 + 0.1 * torch.randn(size, device=device)).bfloat16()
    if size < 32768:  # rms_norm's longest rows
        normed = round_rows(rms_norm(x.contiguous(), norm, 1e-5))
        assert torch.equal(exact_rows(*round_rows(x, (norm, 1e-5))[:2]), exact_rows(*normed[:2]))


ROUNDED = [(1, 6144, 4096), (6, 4096, 4096), (8, 28672, 4096), (30, 4096, 14336), (64, 28672, 4096), (100, 6144, 4096), (128, 4096, 14336)]
ROUNDED += [(192, 28672, 4096), (193, 96, 640), (500, 4096, 4096), (510, 96, 656)]
ROUNDED += [(1, 16, 128), (3, 32, 256), (17, 4256, 384), (65, 12832, 128), (129, 33824, 256), (191, 576, 640), (9, 48, 1152), (33, 64, 8192)]


@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), ROUNDED)
def test_rounded_activations(num_tokens: int, out_size: int, in_size: int, device: torch.device) -> None:
    """Sums of the rounded numbers, as exact as tensor cores add them up: their error is far below that of rounding."""
    weight, x = make(torch.float8_e4m3fn, out_size, in_size, None, device), tokens(num_tokens, in_size, torch.bfloat16, device)
    bias, residual = torch.randn(out_size, device=device).bfloat16(), torch.randn(num_tokens, out_size, device=device).bfloat16()
    norm = (1 + 0.1 * torch.randn(in_size, device=device)).bfloat16()
    exact = exact_rows(*round_rows(x)[:2]) @ exact_weight(weight).T
    before = residual.clone()
    with rounding_activations(True):
        assert is_rounded(x, weight)
        out, with_bias = quantized_linear(x, weight), quantized_linear(x, weight, bias)
        added = quantized_add_linear(residual, x, weight)
        normed = quantized_norm_linear(x, norm, 1e-5, weight, bias)
        gated = quantized_gated_linear(x, weight) if out_size % 2 == 0 else None
        normed_gated = quantized_norm_gated_linear(x, norm, 1e-5, weight)
        own = rms_norm(x.contiguous(), norm, 1e-5)
        expected, expected_gated = quantized_linear(own, weight, bias), quantized_gated_linear(own, weight)
    assert relative_error(out, exact) < 4e-3
    assert relative_error(with_bias, exact + bias.double()) < 4e-3
    assert added is residual and torch.equal(added, before + out)
    assert torch.equal(normed, expected) and torch.equal(normed_gated, expected_gated)
    assert gated is not None and torch.equal(gated, silu_mul(out))
    assert 1e-2 < relative_error(out, x.double() @ exact_weight(weight).T) < 6e-2, "it is what rounding costs"
    assert not is_rounded(x, weight), "outside"


def test_what_is_not_rounded(device: torch.device) -> None:
    x = tokens(MIN_ROWS, 256, torch.bfloat16, device)
    by_row, by_group = make(torch.float8_e4m3fn, 96, 256, None, device), make(torch.float8_e4m3fn, 96, 256, 64, device)
    with rounding_activations(True):
        assert is_rounded(x, by_row) and is_rounded(x[:1], by_row)
        assert not is_rounded(x, by_group) and is_rounded_for_groups(x, by_group) and not is_rounded_for_groups(x, by_row)
        assert not is_rounded_for_groups(x, make(torch.int8, 96, 256, 64, device)) and not is_rounded(x, make(torch.int8, 96, 256, None, device))
        assert not is_rounded(x.half(), by_row) and not is_rounded(x[:0], by_row)
        odd = make(torch.float8_e4m3fn, 96, 208, None, device)
        assert is_rounded(x[:, :208], odd) and not is_rounded(x[1:, :208], odd), "wide_linear.cu has no form for it"


GROUPS = [(1, 6144, 4096, 128), (6, 4096, 4096, 64), (8, 28672, 4096, 128), (30, 4096, 14336, 128), (64, 28672, 4096, 64), (128, 4096, 14336, 128)]
GROUPS += [(100, 6144, 4096, None), (192, 4096, 4096, 128), (256, 4096, 4096, 128), (500, 576, 640, 64)]
GROUPS += [
    (1, 32, 128, 64),
    (3, 32, 256, 128),
    (17, 4256, 384, 64),
    (65, 12832, 128, 64),
    (129, 33824, 256, 128),
    (9, 48, 1152, 64),
    (33, 64, 8192, 256),
]


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size", "group"), GROUPS)
def test_rounded_activations_of_groups(
    num_tokens: int, out_size: int, in_size: int, group: int | None, stored: torch.dtype, has_zeros: bool, device: torch.device
) -> None:
    """Digits of 4 bits are multiplied as they are: the zeros' part is taken off by sums of codes."""
    if stored != torch.uint8 and (has_zeros or group is None):
        pytest.skip("there are none of e4m3, or wide_linear.cu multiplies them")
    weight, x = make(stored, out_size, in_size, group, device, has_zeros), tokens(num_tokens, in_size, torch.bfloat16, device)
    x += 1.5 * x.std()  # as what an activation leaves: sums of codes are large
    bias, residual = torch.randn(out_size, device=device).bfloat16(), torch.randn(num_tokens, out_size, device=device).bfloat16()
    norm = (1 + 0.1 * torch.randn(in_size, device=device)).bfloat16()
    exact, before = exact_rows(*round_rows(x)[:2]) @ exact_weight(weight).T, residual.clone()
    with rounding_activations(True):
        assert is_rounded_for_groups(x, weight) and not is_rounded(x, weight)
        out, with_bias = quantized_linear(x, weight), quantized_linear(x, weight, bias)
        added = quantized_add_linear(residual, x, weight)
        normed, own = quantized_norm_linear(x, norm, 1e-5, weight, bias), rms_norm(x.contiguous(), norm, 1e-5)
        expected = quantized_linear(own, weight, bias)
        gated = quantized_gated_linear(x, weight) if out_size % 32 == 0 else None
        normed_gated, expected_gated = quantized_norm_gated_linear(x, norm, 1e-5, weight), quantized_gated_linear(own, weight)
    assert relative_error(out, exact) < 5e-3
    assert relative_error(with_bias, exact + bias.double()) < 5e-3
    assert added is residual and relative_error(added, before.double() + exact) < 5e-3
    assert torch.equal(normed, expected)
    if gated is not None:  # else linear.cu's, whose norm is fused
        assert torch.equal(gated, silu_mul(out)) and torch.equal(normed_gated, expected_gated)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize(("out_size", "in_size"), [(6144, 4096), (4096, 14336), (28672, 4096), (576, 640), (33824, 256)])
def test_rounded_rows_do_not_depend_on_their_number(out_size: int, in_size: int, stored: torch.dtype, device: torch.device) -> None:
    weight = make(stored, out_size, in_size, None if stored == torch.float8_e4m3fn else 64 if in_size % 128 else 128, device)
    x = tokens(192, in_size, torch.bfloat16, device)
    with rounding_activations(True):
        whole, gated = quantized_linear(x, weight), quantized_gated_linear(x, weight)
        for start, stop in ((0, 1), (10, 42), (3, 9), (30, 64), (1, 49), (60, 125), (0, 128), (3, 192), (191, 192)):
            assert torch.equal(quantized_linear(x[start:stop], weight), whole[start:stop])
            assert torch.equal(quantized_gated_linear(x[start:stop], weight), gated[start:stop])


def test_columns_in_another_order(device: torch.device) -> None:
    """As of GPTQ's act-order; one past the last is a padding."""
    weight, order = make(torch.uint8, 64, 256, 64, device), torch.randperm(201, device=device)
    weight = QuantizedWeight(weight.codes, weight.scales, None, torch.cat([order, order.new_full((55,), 200)]), 4, True)
    x = tokens(5, 200, torch.bfloat16, device)
    wide = torch.cat([x, x.new_zeros(5, 1)], dim=1)[:, weight.order]
    exact = wide.double() @ exact_weight(weight).T
    assert relative_error(quantized_linear(x, weight), exact) < 0.01


@pytest.mark.parametrize(("stored", "rounds"), [*((dtype, False) for dtype in STORED), (torch.float8_e4m3fn, True), (torch.uint8, True)], ids=str)
def test_in_a_graph(stored: torch.dtype, rounds: bool, device: torch.device) -> None:
    group = None if rounds and stored != torch.uint8 else 64
    weight, other = make(stored, 512, 256, group, device), make(stored, 256, 256, group, device)
    x = tokens(6, 256, torch.bfloat16, device)

    def run() -> torch.Tensor:
        with rounding_activations(rounds):
            return quantized_add_linear(x.clone(memory_format=torch.contiguous_format), quantized_gated_linear(x, weight), other)

    expected, graph = run(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        out = run()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_errors(device: torch.device) -> None:
    weight, x = make(torch.int8, 64, 128, None, device), torch.zeros(2, 128, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x \(2, 64\) must be \[M, 128\]"):
        quantized_linear(x[:, :64], weight)
    with pytest.raises(ValueError, match=r"residual \(1, 64\) torch.bfloat16 must be \[2, 64\]"):
        quantized_add_linear(x[:1, :64].contiguous(), x, weight)
