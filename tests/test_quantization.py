"""Weights in 8 and 4 bits: no further from the dense weights than their rounding allows, and as small as they say."""

from __future__ import annotations

import pytest
import torch

from backend.models.layers import Weights
from backend.models.loader import Checkpoint
from backend.models.spec import Projection
from backend.parallel.ranks import Ranks
from backend.quantization import make_linear
from backend.quantization.weight_only import GROUP, WeightOnlyLinear

SCHEMES = ("wint8", "wint4", "fp8")
OUT, IN, ROWS = 96, 320, 33
BFLOAT16 = 2.0**-8
"""Rounding to 8 significant bits changes a number by this part of it at most."""


def random_weight(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows of sizes from 1e-3 to 1e3."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(OUT, IN, generator=generator) * torch.logspace(-3, 3, OUT)[:, None]).to(dtype)


def allowed_error(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """How far each weight may move, float64: from the rounding alone.

    The integers divide a row's (wint4: a group's) largest weight in 127 or 7 steps, and the nearest is half a step away at most. fp8 (e4m3)
    has 4 significant bits, so a number moves by 1/16 of it at most; below 2^-6 its steps are 2^-9; the largest weight is at 448. In
    bfloat16 the scale is rounded, and then its product with the digits.
    """
    values = weight.double()
    if scheme == "fp8":
        step = values.abs().amax(dim=1, keepdim=True) / 448
        error = torch.maximum(values.abs() / 16, step * 2.0**-10)
    elif scheme == "wint8":
        error = (values.abs().amax(dim=1, keepdim=True) / 127 / 2).expand_as(values)
    else:
        groups = values.view(len(values), -1, GROUP)
        error = (groups.abs().amax(dim=2, keepdim=True) / 7 / 2).expand_as(groups).reshape(values.shape)
    if weight.dtype == torch.bfloat16:
        error = error + (values.abs() + error) * ((1 + BFLOAT16) ** 2 - 1)
    return error * (1 + 1e-5) + 1e-12  # float32's own rounding; rows below 1e-12 count as zeros


def moved(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    expanded = WeightOnlyLinear(weight, None, scheme).expand()
    assert expanded.shape == weight.shape and expanded.dtype == weight.dtype
    return (expanded.double() - weight.double()).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_move_by_their_rounding_at_most(scheme: str, dtype: torch.dtype) -> None:
    weight = random_weight(dtype)
    share = moved(weight, scheme) / allowed_error(weight, scheme)
    assert share.max() <= 1
    assert share.max() > 0.8 and share.mean() > 0.1, "a bound this loose would hold for anything"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_differ_by_what_the_weights_do(scheme: str) -> None:
    """|x| times the weights' errors, and float32's rounding of IN products and sums."""
    weight, x = random_weight(), torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(OUT, generator=torch.Generator().manual_seed(2))
    exact = x.double() @ weight.double().T + bias.double()
    error = (WeightOnlyLinear(weight, bias, scheme)(x).double() - exact).abs()
    from_weights = x.double().abs() @ allowed_error(weight, scheme).T
    from_sums = (IN + 2) * 2.0**-24 * (x.double().abs() @ (weight.double().abs() + allowed_error(weight, scheme)).T + bias.double().abs())
    assert (error <= from_weights + from_sums).all()
    assert (error > 10 * from_sums).any(), "it would be the dense product"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_in_bfloat16(scheme: str) -> None:
    """The activations' dtype is the weights'; the sums are float32's and the result is rounded once."""
    weight = random_weight(torch.bfloat16)
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = WeightOnlyLinear(weight, None, scheme)(x)
    assert y.dtype == torch.bfloat16 and y.shape == (ROWS, OUT)
    from_weights = x.double().abs() @ allowed_error(weight, scheme).T
    from_sums = (IN + 2) * 2.0**-24 * (x.double().abs() @ (weight.double().abs() + allowed_error(weight, scheme)).T)
    exact = x.double() @ weight.double().T
    assert ((y.double() - exact).abs() <= from_weights + from_sums + BFLOAT16 * (exact.abs() + from_weights + from_sums)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bias_is_added_as_it_is(scheme: str) -> None:
    weight, x, bias = random_weight(), torch.randn(ROWS, IN), torch.linspace(-5, 5, OUT)
    layer = WeightOnlyLinear(weight, None, scheme)
    from_sums = 2 * (IN + 2) * 2.0**-24 * (x.double().abs() @ layer.expand().double().abs().T + bias.double().abs())
    assert ((WeightOnlyLinear(weight, bias, scheme)(x).double() - (layer(x) + bias).double()).abs() <= from_sums).all()
    assert torch.equal(WeightOnlyLinear(weight, bias, scheme)(torch.zeros(2, IN)), bias.expand(2, -1))


@pytest.mark.parametrize(
    ("scheme", "dtype", "num_bytes"),
    [
        ("wint8", torch.bfloat16, OUT * IN + OUT * 2),
        ("fp8", torch.bfloat16, OUT * IN + OUT * 2),
        ("wint4", torch.bfloat16, OUT * IN // 2 + OUT * IN // GROUP * 2),
        ("wint8", torch.float32, OUT * IN + OUT * 4),
        ("wint4", torch.float32, OUT * IN // 2 + OUT * IN // GROUP * 4),
    ],
)
def test_storage(scheme: str, dtype: torch.dtype, num_bytes: int) -> None:
    """A byte or half a byte a weight, and a scale for each row or group; nothing else is kept."""
    linear = WeightOnlyLinear(random_weight(dtype), None, scheme)
    held = [value for name in linear.__slots__ if isinstance(value := getattr(linear, name), torch.Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == num_bytes


@pytest.mark.parametrize("size", [1, 63, 96, GROUP + 1])
def test_wint4_needs_whole_groups(size: int) -> None:
    with pytest.raises(ValueError, match=f"wint4 needs input sizes that are multiples of {GROUP}, got {size}"):
        WeightOnlyLinear(torch.ones(4, size), None, "wint4")
    for scheme in ("wint8", "fp8"):
        assert torch.equal(WeightOnlyLinear(torch.ones(4, size), None, scheme)(torch.ones(1, size)), torch.full((1, 4), float(size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_zero_rows_stay_zero(scheme: str, dtype: torch.dtype) -> None:
    weight = random_weight(dtype)
    weight[::3] = 0
    weight[1, :GROUP] = 0
    linear = WeightOnlyLinear(weight, None, scheme)
    assert not linear.expand()[::3].any() and not linear.expand()[1, :GROUP].any()
    y = linear(torch.full((2, IN), 1e30, dtype=dtype))
    assert y.isfinite().all() and not y[:, ::3].any()
    assert not WeightOnlyLinear(torch.full((2, IN), 1e-30, dtype=dtype), None, scheme)(torch.ones(1, IN, dtype=dtype)).isnan().any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_outlier_costs_its_own_row_or_group(scheme: str) -> None:
    weight = random_weight()
    before = WeightOnlyLinear(weight, None, scheme).expand()
    weight[5, 70] = 1e6
    after = WeightOnlyLinear(weight, None, scheme).expand()
    torch.testing.assert_close(after[5, 70], torch.tensor(1e6))
    assert (moved(weight, scheme) <= allowed_error(weight, scheme)).all()
    own = torch.zeros(OUT, IN, dtype=torch.bool)
    own[5, slice(GROUP, 2 * GROUP) if scheme == "wint4" else slice(None)] = True
    assert torch.equal(after[~own], before[~own])
    if scheme != "fp8":  # steps of 1e6 / 127 or / 7: the others are nothing beside it
        own[5, 70] = False
        assert not after[own].any() and before[own].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_largest_weights_are_kept(scheme: str) -> None:
    """Also where dividing by the scale gives a little more than the largest digit: fp8 has no infinity, and past its end comes NaN."""
    generator = torch.Generator().manual_seed(3)
    largest = (torch.rand(4096, generator=generator) * 2 - 1) * 10 ** torch.linspace(-6, 6, 4096)
    weight = torch.zeros(4096, GROUP)
    weight[:, 7], weight[:, 8] = largest, -largest
    expanded = WeightOnlyLinear(weight, None, scheme).expand()
    torch.testing.assert_close(expanded[:, 7], largest, rtol=1e-6, atol=0)
    assert torch.equal(expanded[:, 8], -expanded[:, 7])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_on_the_grid_is_exact(scheme: str) -> None:
    """Every digit there is, in every place: packing them must not mix them up."""
    digits = {"wint8": range(-127, 128), "wint4": range(-7, 8), "fp8": [m * 2.0**e for e in range(-5, 6) for m in range(-15, 16)]}[scheme]
    top = {"wint8": 127, "wint4": 7, "fp8": 448}[scheme]
    generator = torch.Generator().manual_seed(4)
    weight = torch.tensor(list(digits), dtype=torch.float32)[torch.randint(len(digits), (OUT, IN), generator=generator)].clamp(-top, top)
    weight[:, ::GROUP] = top  # each group's scale is then 1
    assert torch.equal(WeightOnlyLinear(weight, None, scheme).expand(), weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_projections_that_are_joined_do_not_share_scales(scheme: str, tmp_path) -> None:
    from safetensors.torch import save_file

    parts = {"a": random_weight(seed=5) * 100, "b": random_weight(seed=6)}
    save_file({f"{name}.weight": weight for name, weight in parts.items()}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        weights = Weights(checkpoint, torch.float32, torch.device("cpu"), Ranks(), scheme)
        joined = weights.split_rows([Projection("a", OUT, IN), Projection("b", OUT, IN)])
        single = weights.linear("b", OUT, IN)
    assert isinstance(joined, WeightOnlyLinear) and isinstance(single, WeightOnlyLinear)
    assert torch.equal(joined.expand()[OUT:], single.expand())
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(joined(x)[:, OUT:], make_linear(parts["b"], None, scheme)(x))
