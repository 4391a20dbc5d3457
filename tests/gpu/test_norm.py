"""rms_norm, add_rms_norm and silu_mul against their twins and float64."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.activation import silu_mul
from kernels.norm import add_rms_norm, rms_norm

EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CORRECTNESS = [(1, 4096), (6, 4096), (3, 192), (64, 128), (33, 512), (7, 5120)]
CORNER = [(0, 4096), (1, 8), (9, 520), (2, 16384), (1, 1024)]
PERFORMANCE = [(128, 4096), (8192, 4096), (512, 8192)]


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def check(out: torch.Tensor, by_torch: torch.Tensor, exact: torch.Tensor) -> None:
    assert out.dtype == by_torch.dtype and out.shape == by_torch.shape
    if out.numel():
        # A row's scale is one number, whose rounding in float32 all of it has: with one row torch's can be right by luck.
        assert relative_error(out, exact) <= max(2 * relative_error(by_torch, exact), torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), CORRECTNESS + CORNER + PERFORMANCE)
def test_rms_norm(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = (3 * torch.randn(rows, size, device=device)).to(dtype)
    weight = (1 + 0.1 * torch.randn(size, device=device)).to(dtype)
    check(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), reference.rms_norm(x.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), CORRECTNESS + CORNER + PERFORMANCE)
def test_add_rms_norm(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = ((3 * torch.randn(2, rows, size, device=device)).to(dtype)).unbind()
    weight = (1 + 0.1 * torch.randn(size, device=device)).to(dtype)
    total = x + residual
    out = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(out, rms_norm(total, weight, EPS))  # fused and unfused agree
    check(out, reference.rms_norm(total, weight, EPS), reference.rms_norm(total.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [*CORRECTNESS, *CORNER, (1, 14336), (128, 14336), (8192, 14336)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (4 * torch.randn(rows, 2 * size, device=device)).to(dtype)
    check(silu_mul(gate_up), reference.silu_mul(gate_up), reference.silu_mul(gate_up.double()))


def test_extremes(device: torch.device) -> None:
    gate = torch.tensor([-3e38, -1000.0, -100.0, -88.0, 0.0, 88.0, 1000.0, 3e38], device=device)
    for dtype in (torch.bfloat16, torch.float32):
        out = silu_mul(torch.cat([gate, torch.ones(8, device=device)])[None].to(dtype))
        torch.testing.assert_close(out, reference.silu_mul(torch.cat([gate, torch.ones(8, device=device)])[None].to(dtype)))
    assert torch.equal(rms_norm(torch.zeros(1, 4096, device=device), torch.ones(4096, device=device), EPS), torch.zeros(1, 4096, device=device))


def test_errors(device: torch.device) -> None:
    x = torch.randn(2, 4100, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="N = 4100"):
        rms_norm(x, x[0], EPS)
    with pytest.raises(ValueError, match=r"weight \(4096,\)"):
        rms_norm(x, x[0, :4096], EPS)
    with pytest.raises(ValueError, match=r"\[T, 2N\]"):
        silu_mul(x[:, :4099])
