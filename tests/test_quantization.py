"""Weights in 8 and 4 bits: no further from the plain weights than their rounding allows, as small as they say, and cut as plain ones are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from backend.config import EngineConfig
from backend.errors import ConfigError, ModelError
from backend.models.layers import Weights
from backend.models.loader import Checkpoint
from backend.models.spec import Projection
from backend.parallel.ranks import Ranks
from backend.quantization import make_linear, quantize
from backend.quantization.dense import DenseLinear, PackedLinear
from backend.quantization.experts import stack
from backend.quantization.quantized_linear import QuantizedLinear
from backend.quantization.schemes import BLOCK, GROUP
from backend.quantization.stored import Quantized, pad_columns, pad_rows
from backend.quantization_config import SCHEMES, QuantizationConfig, normalize_quantization, read_quantization
from kernels import ops
from kernels.quantized_weight import QuantizedWeight
from kernels.reference import quantized

OUT, IN, ROWS = 96, 320, 33
BFLOAT16 = 2.0**-8
"""Rounding to 8 significant bits changes a number by this part of it at most."""
CPU = torch.device("cpu")


def random_weight(seed: int = 0, rows: int = OUT, columns: int = IN) -> torch.Tensor:
    """Rows of sizes from 1e-3 to 1e3."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, rows)[:, None]


def largest_of(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """[out, in]: the largest weight among those that share a scale."""
    values, (rows, columns) = weight.double().abs(), weight.shape
    height = BLOCK if scheme == "block_wise_fp8" else 1
    width = {"wint4": GROUP, "block_wise_fp8": BLOCK}.get(scheme, columns)
    found = torch.empty_like(values)
    for r in range(0, rows, height):
        for c in range(0, columns, width):
            found[r : r + height, c : c + width] = values[r : r + height, c : c + width].amax()
    return found


def allowed_error(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """How far each weight may move, float64: from the rounding alone.

    Of wint8 the largest weight that shares a scale is 127 steps, and the nearest is half a step away at most. Of wint4 it is 8 steps; there are
    digits for 7 on the other side of zero, and steps may be smaller by 0.78. fp8 (e4m3) has 4 significant bits, so a number moves by 1/16 of it
    at most; below 2^-6 its steps are 2^-9; the largest weight is at 448.
    """
    values, largest = weight.double().abs(), largest_of(weight, scheme)
    if scheme in ("fp8", "block_wise_fp8"):
        error = torch.maximum(values / 16, largest / 448 * 2.0**-10)
    else:
        error = largest * {"wint8": 1 / 127 / 2, "wint4": 1 - 0.78 * 7 / 8}[scheme]
    return error * (1 + 1e-5) + 1e-12  # float32's own rounding; what is below 1e-12 counts as zeros


def expand(stored: Quantized) -> torch.Tensor:
    """By the kernels' form, [out, in] float32."""
    packed = stored.pack()
    if packed.order is None:
        return packed.expand()
    found = torch.zeros(len(stored.scales), len(stored.groups) + 1)
    found[:, packed.order] = packed.expand()
    return found[:, :-1]


@pytest.mark.parametrize("shape", [(OUT, IN), (200, 300), (7, 13), (50, 159)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_move_by_their_rounding_at_most(scheme: str, shape: tuple[int, int]) -> None:
    weight = random_weight(rows=shape[0], columns=shape[1])
    stored = quantize(weight, scheme)
    share = (expand(stored).double() - weight.double()).abs() / allowed_error(weight, scheme)
    assert share.max() <= 1
    if scheme != "wint4":
        assert share.max() > 0.8 and share.mean() > 0.04, "a bound this loose would hold for anything"
    torch.testing.assert_close(expand(stored), stored.expand(), rtol=1e-6, atol=0)


def test_four_bits_are_no_worse_than_the_nearest_of_seven_steps() -> None:
    """By the squared error of all groups, and of nearly each."""
    groups = random_weight(9, rows=512).view(-1, GROUP).double()
    step = groups.abs().amax(dim=1, keepdim=True) / 7
    plain = ((groups / step).round() * step - groups).square().sum(dim=1)
    own = (expand(quantize(groups.float(), "wint4")).double() - groups).square().sum(dim=1)
    assert (own / plain).mean() < 0.85 and (own <= plain).double().mean() > 0.8


@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_the_expanded_weights(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tile by tile, the last one shorter; float32 rounds IN products and their sums. A bias is added as it is."""
    monkeypatch.setattr(quantized, "TILE_BYTES", 4 * IN * 40)
    stored, bias = quantize(random_weight(), scheme), torch.linspace(-5, 5, OUT)
    weight, linear = stored.expand().double(), QuantizedLinear(stored, bias)
    for num_rows in (1, ROWS):
        x = torch.randn(num_rows, IN, generator=torch.Generator().manual_seed(1))
        allowed = (IN + 2) * 2.0**-23 * (x.double().abs() @ weight.abs().T + bias.double().abs())
        assert ((linear(x).double() - (x.double() @ weight.T + bias.double())).abs() <= allowed).all()
    assert torch.equal(linear(torch.zeros(2, IN)), bias.expand(2, -1))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_in_bfloat16(scheme: str) -> None:
    """The weights are rounded once, the sums are float32's, and the result is rounded once."""
    stored = quantize(random_weight(), scheme)
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    y, weight = QuantizedLinear(stored)(x), stored.expand().double()
    assert y.dtype == torch.bfloat16 and y.shape == (ROWS, OUT)
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    assert ((y.double() - exact).abs() <= BFLOAT16 * (exact.abs() + size) + (IN + 2) * 2.0**-23 * size).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sums_of_digits_beyond_float16(scheme: str) -> None:
    """640 times the largest digit of 8 bits is more than it holds; the product, which is scaled, is not."""
    y = QuantizedLinear(quantize(torch.ones(16, 2 * IN), scheme))(torch.ones(3, 2 * IN, dtype=torch.float16))
    torch.testing.assert_close(y, torch.full((3, 16), 2.0 * IN, dtype=torch.float16))


@pytest.mark.parametrize(
    ("scheme", "num_bytes"),
    [
        ("wint8", OUT * IN + OUT * 4),
        ("fp8", OUT * IN + OUT * 4),
        ("block_wise_fp8", OUT * IN + OUT * 5 * 4),  # 320 = 128 + 128 + 64: scales of 64
        ("wint4", OUT * IN // 2 + OUT * IN // GROUP * 4),
    ],
)
def test_storage(scheme: str, num_bytes: int) -> None:
    """A byte or half a byte a weight, and a scale for each row, group or part of a block's row; nothing else is kept."""
    packed = QuantizedLinear(quantize(random_weight().bfloat16(), scheme)).weight
    held = [value for field in dataclasses.fields(packed) if isinstance(value := getattr(packed, field.name), torch.Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == num_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay_zeros(scheme: str) -> None:
    weight = random_weight()
    weight[::3], weight[1, :GROUP] = 0, 0
    linear = QuantizedLinear(quantize(weight, scheme))
    y = linear(torch.full((2, IN), 1e30))
    assert y.isfinite().all() and not y[:, ::3].any()
    assert not QuantizedLinear(quantize(torch.full((2, IN), 1e-30), scheme))(torch.ones(1, IN)).isnan().any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_outlier_costs_what_shares_its_scale(scheme: str) -> None:
    weight = random_weight()
    before = expand(quantize(weight, scheme))
    weight[5, 70] = 1e6
    after = expand(quantize(weight, scheme))
    torch.testing.assert_close(after[5, 70], torch.tensor(1e6))
    own = largest_of(weight, scheme) == 1e6
    assert torch.equal(after[~own], before[~own])
    if scheme.startswith("wint"):  # steps of 1e6 / 127 or / 7: the others are nothing beside it
        own[5, 70] = False
        assert not after[own].any() and before[own].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_largest_weights_are_kept(scheme: str) -> None:
    """Also where dividing by the scale gives a little more than the largest digit: fp8 has no infinity, and past its end comes NaN."""
    generator = torch.Generator().manual_seed(3)
    largest = (torch.rand(4096, generator=generator) * 2 - 1) * 10 ** torch.linspace(-6, 6, 4096)
    weight = torch.zeros(4096, GROUP)
    weight[:, 7], weight[:, 8] = largest, -largest
    expanded = expand(quantize(weight, scheme))
    if scheme == "block_wise_fp8":
        assert expanded.isfinite().all()
    elif scheme == "wint4":
        assert (expanded[:, 7] / largest).min() > 0.75
    else:
        assert torch.equal(expanded[:, 8], -expanded[:, 7])
        torch.testing.assert_close(expanded[:, 7], largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_on_the_grid_is_exact(scheme: str) -> None:
    """Every digit there is, in every place: packing them must not mix them up."""
    floats = [m * 2.0**e for e in range(-5, 6) for m in range(-15, 16)]
    digits = {"wint8": range(-127, 128), "wint4": range(-8, 8)}.get(scheme, floats)
    top = {"wint8": 127, "wint4": 8}.get(scheme, 448)
    generator = torch.Generator().manual_seed(4)
    weight = torch.tensor(list(digits), dtype=torch.float32)[torch.randint(len(digits), (OUT, IN), generator=generator)].clamp(-top, top)
    weight[:, ::GROUP] = -top  # each group's scale is then 1
    assert torch.equal(expand(quantize(weight, scheme)), weight)


# -- cutting and joining --------------------------------------------------------------------------------------------------------


def make_stored(kind: str, columns: int = 176) -> Quantized:
    """Of every kind that a checkpoint may hold: groups in and out of order, the last one short, zeros."""
    generator = torch.Generator().manual_seed(6)
    groups = torch.arange(columns) // (columns if kind == "one group" else 32)
    if "order" in kind:
        groups = groups[torch.randperm(columns, generator=generator)]
    count, bits = int(groups.max()) + 1, 8 if "8" in kind else 4
    low, high = (-128, 127) if bits == 8 else (0, 15)
    codes = torch.randint(low, high + 1, (24, columns), generator=generator).to(torch.int8)
    zeros = torch.randint(low, high + 2, (24, count), generator=generator).float() if "zeros" in kind else None
    return Quantized(codes, torch.rand(24, count, generator=generator) + 0.1, zeros, groups, bits)


@pytest.mark.parametrize("columns", [slice(0, 176), slice(64, 128), slice(88, 176), slice(5, 47), slice(3, 4)], ids=str)
@pytest.mark.parametrize("kind", ["one group", "groups", "groups, 8 bits", "groups, zeros", "order", "order, zeros", "order, zeros, 8 bits"])
def test_what_is_cut_is_what_was_there(kind: str, columns: slice) -> None:
    """Groups need not end where a rank's part does, nor hold as many inputs as others there."""
    stored = make_stored(kind)
    rows = torch.tensor([5, 3, 23, 0])
    own = stored.columns(columns).rows(rows)
    expected = stored.expand()[rows][:, columns]
    torch.testing.assert_close(expand(own), expected, rtol=1e-6, atol=1e-6)
    x = torch.randn(3, expected.shape[1], generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(QuantizedLinear(own)(x), x @ expected.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["one group", "groups", "groups, 8 bits", "groups, zeros", "fp8"])
def test_what_is_padded_is_zero(kind: str) -> None:
    """Outputs that are added are zero, inputs that are added take zeros: a gate's and up's, and then down's, change nothing."""
    stored = quantize(random_weight(), "fp8") if kind == "fp8" else make_stored(kind)
    plain = stored.expand()
    taller, wider = pad_rows(stored, 40), pad_columns(stored, 80)
    assert torch.equal(taller.expand()[: len(plain)], plain) and not taller.expand()[len(plain) :].any()
    assert torch.equal(wider.expand()[:, : plain.shape[1]], plain)
    assert wider.pack().num_columns == plain.shape[1] + 80 and wider.pack().order is None
    x = torch.randn(3, plain.shape[1], generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(QuantizedLinear(wider)(F.pad(x, (0, 80))), QuantizedLinear(stored)(x))


def test_projections_that_are_stored_differently_are_one() -> None:
    """Those that are alike become one weight; the others stand beside it, each with its share of the biases."""
    parts = [make_stored("groups"), make_stored("groups, zeros"), make_stored("order"), torch.randn(5, 176)]
    bias = torch.linspace(-1, 1, 24 * 3 + 5)
    linear = make_linear(parts, bias)
    assert len(linear.parts) == 3
    x = torch.randn(4, 176, generator=torch.Generator().manual_seed(7))
    weight = torch.cat([part.expand() if isinstance(part, Quantized) else part for part in parts])
    torch.testing.assert_close(linear(x), x @ weight.T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_and_neighbours_change_no_weight(scheme: str, tmp_path: Path) -> None:
    """A projection is rounded whole: whoever holds a part of it holds the same numbers."""
    parts = {"a": random_weight(5) * 100, "b": random_weight(6)}
    save_file({f"{name}.weight": weight for name, weight in parts.items()}, tmp_path / "model.safetensors")
    x, a, b = torch.randn(3, IN, generator=torch.Generator().manual_seed(7)), Projection("a", OUT, IN), Projection("b", OUT, IN)
    whole = {name: quantize(weight, scheme).expand() for name, weight in parts.items()}
    with Checkpoint(tmp_path) as checkpoint:
        for ranks in (Ranks(), Ranks(1, 2)):
            weights = Weights(checkpoint, torch.float32, CPU, ranks, QuantizationConfig(quantization=scheme))
            begin = 0 if ranks.size == 1 else 1
            rows, columns = slice(begin * OUT // 2, OUT), slice(begin * IN // 2, IN)
            torch.testing.assert_close(weights.split_rows([a, b])(x), x @ torch.cat([whole["a"][rows], whole["b"][rows]]).T, rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(weights.split_columns(b)(x[:, columns]), x[:, columns] @ whole["b"][:, columns].T, rtol=1e-4, atol=1e-3)


# -- the option -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dense", "experts", "head"),
    [
        (None, None, None, None),
        ("WINT8", "wint8", "wint8", None),
        ("weight_only_int4", "wint4", "wint4", None),
        ("a8w8_fp8", "fp8", "fp8", None),
        ("a8w8_fp8_wint4", "fp8", "wint4", None),
        ({"dense_quant_type": "wint8", "moe_quant_type": "wint4"}, "wint8", "wint4", None),
        ({"quantization": "mix_quant", "moe_quant_type": "weight_only_int4"}, None, "wint4", None),
        ({"quantization": "fp8", "moe_quant_type": "wint4", "head_quant_type": "wint8"}, "fp8", "wint4", "wint8"),
        ({"quantization": "A8W8_FP8_WINT4", "head_quant_type": "wint8"}, "fp8", "wint4", "wint8"),
    ],
)
def test_names_of_types(value: object, dense: str | None, experts: str | None, head: str | None) -> None:
    given = QuantizationConfig.from_dict(value) if isinstance(value, dict) else value
    found = read_quantization(normalize_quantization("quantization", given))
    assert (found.dense_quant_type, found.moe_quant_type, found.head_quant_type) == (dense, experts, head)
    assert QuantizationConfig.from_dict(dataclasses.asdict(found)) == found, "as another rank reads it"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wint3", "quantization must be one of wint8, wint4, fp8, block_wise_fp8, got 'wint3'"),
        ({"dense_quant_type": "int8"}, "quantization.dense_quant_type must be one of wint8"),
        ({"quantization": 8}, "quantization must be str or null, got 8"),
        ({"moe_type": "wint4"}, "unknown key 'moe_type'; did you mean \"moe_quant_type\"?"),
    ],
)
def test_names_that_are_none(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        normalize_quantization("quantization", QuantizationConfig.from_dict(value, "quantization.") if isinstance(value, dict) else value)
    assert message in str(caught.value)


def test_experts_are_stacked_as_each_is_packed() -> None:
    """For a GPU: one below the other; such as are stored differently, or whose columns lie in another order, are an error that names the layer."""
    own = [quantize(random_weight(seed), "wint4") for seed in range(3)]
    stacked = stack(own, 3, "layers.0")
    for number, weight in enumerate(own):
        packed, part = weight.pack(), stacked.part(number, 3)
        assert torch.equal(part.codes, packed.codes) and torch.equal(part.scales, packed.scales) and part.zeros is packed.zeros is None
    with pytest.raises(ModelError, match=r"layers\.0: experts are stored differently"):
        stack([own[0], quantize(random_weight(), "wint8")], 2, "layers.0")
    zeros = dataclasses.replace(own[1], zeros=torch.full_like(own[1].scales, 7.0))
    with pytest.raises(ModelError, match=r"no zeros and torch\.float32"):
        stack([own[0], zeros], 2, "layers.0")
    with pytest.raises(ModelError, match="desc_act"):
        stack([dataclasses.replace(own[0], groups=own[0].groups.flip(0))], 1, "layers.0")


def test_interleaved_codes_are_the_same_weight() -> None:
    """As GPUs' kernels have them, for every width of codes, zeros and parts of a weight as well."""
    for scheme in ("wint8", "wint4", "fp8", "block_wise_fp8"):
        packed = quantize(random_weight(), scheme).pack()
        packed = dataclasses.replace(packed, zeros=torch.full_like(packed.scales, 3.0) if scheme != "fp8" else None)
        made = packed.interleave()
        assert made.is_interleaved and made.interleave() is made and not torch.equal(made.codes.view(torch.uint8), packed.codes.view(torch.uint8))
        assert (made.scales.shape[1] == 1 or made.scales.stride() == (1, len(made.scales))) and torch.equal(made.expand(), packed.expand())
        assert torch.equal(made.part(1, 2).expand(), packed.expand()[len(packed.codes) // 2 :])
    odd = QuantizedWeight(torch.zeros(4, 24, dtype=torch.int8), torch.ones(4, 1))
    assert odd.interleave() is odd


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_where_nothing_compiles(has_bias: bool) -> None:
    """By oneDNN."""
    torch.manual_seed(0)
    weight, bias, norm = torch.randn(24, 13), torch.randn(24) if has_bias else None, torch.randn(13)
    own, plain = PackedLinear(weight, bias), DenseLinear(weight, bias)
    for rows in (0, 1, 3, 33):
        x, residual = torch.randn(rows, 13), torch.randn(rows, 24)
        for name, arguments in (("__call__", (x,)), ("after_norm", (x, norm, 1e-5)), ("gated_after_norm", (x, norm, 1e-5))):
            torch.testing.assert_close(getattr(own, name)(*arguments), getattr(plain, name)(*arguments), msg=name)
        added = residual.clone()
        own.add_to(added, x)
        torch.testing.assert_close(added, residual + plain(x))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "model"),
        ({"quantization": "fp8"}, "model"),
        ({"quantization": "A8W8_FP8"}, "fp8"),
        ({"quantization": "w4a8"}, "fp8"),
        ({"quantization": {"dense_quant_type": "a8w8_fp8", "moe_quant_type": "wint4"}}, "fp8"),  # in an object as alone
        ({"quantization": {"quantization": "a8w8_fp8_wint4"}}, "fp8"),
        ({"quantization": {"quantization": "w4a8", "dense_quant_type": "wint8"}}, "model"),
        ({"quantization": {"moe_quant_type": "w4a8", "head_quant_type": "a8w8_fp8"}}, "model"),  # whose inputs stay as they are
    ],
)
def test_names_that_ask_for_activations(own: dict[str, Any], expected: str) -> None:
    config = EngineConfig.from_dict(own)
    assert config.activations == expected and dataclasses.replace(config).activations == expected
    assert EngineConfig.from_dict(own | {"activations": "model"}).activations == "model"
    with pytest.raises(ConfigError, match="activations must be one of auto, model, fp8, got 'int8'"):
        EngineConfig.from_dict(own | {"activations": "int8"})


@pytest.mark.parametrize("scheme", ["fp8", "block_wise_fp8", "wint4", "wint8"])
def test_inputs_of_products_are_rounded(scheme: str) -> None:
    """As GPUs' kernels do: a step of e4m3 for each token, which its largest number is 448 of; not for weights in int8, and nowhere outside."""
    torch.manual_seed(0)
    linear, x = (
        QuantizedLinear(quantize(torch.randn(24, 128), scheme), torch.randn(24)),
        torch.randn(5, 128) * 10 ** torch.linspace(-3, 3, 5)[:, None],
    )
    x[2] = 0
    steps = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    rounded = (x / steps).to(torch.float8_e4m3fn).float() * steps
    before, residual, norm = linear(x), torch.randn(5, 24), torch.randn(128)
    added, normed = residual.clone(), F.rms_norm(x, (128,), norm, 1e-5)
    with ops.rounding_activations(True):
        out = linear(x)
        linear.add_to(added, x)
        torch.testing.assert_close(linear.after_norm(x, norm, 1e-5), linear(normed))
    expected = before if scheme == "wint8" else linear(rounded)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(added, residual + expected)
    assert torch.equal(linear(x), before)
    assert scheme == "wint8" or not torch.allclose(out, before, rtol=1e-3)
