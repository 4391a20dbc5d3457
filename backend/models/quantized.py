"""Reads quantized projections from a checkpoint: each layout into the one form that all kernels and ranks know (`Quantized`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from backend.models.quantized_spec import Layout
from backend.quantization.stored import Quantized, Stored

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AutoAWQ's the digits 0, 1, 2 ... lie."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PIECE = 2**15
"""Words of 8 codes that are looked at together."""
Tensors = Mapping[str, torch.Tensor]
"""By what follows the projection's name."""


def unpack_words(words: torch.Tensor, bits: int, count: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Digits [n, count] int16 of int32 words [n, m] whose lowest bits are the first digit. order: places of the digits in a word."""
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    digits = (words.unsqueeze(-1) >> places) & (2**bits - 1)
    return digits.flatten(1)[:, :count].to(torch.int16)


def read_quantized(layout: Layout, tensors: Tensors, out: int, inputs: int) -> Stored:
    """The weight [out, in] of tensors that are as `Layout.tensors` says; formats of 4-bit floats give a plain one, in float32.

    Raises ValueError for numbers that no such weight has.
    """
    return _READERS[layout.kind](layout, tensors, out, inputs)


def _groups(layout: Layout, inputs: int, index: torch.Tensor | None = None, name: str = "") -> torch.Tensor:
    """Of each input, where they lie in order, or as the checkpoint's index says. Raises ValueError for groups that are not there."""
    if index is None:
        return torch.arange(inputs) // (layout.group or inputs)
    low, high, limit = int(index.min()), int(index.max()), layout.num_groups(inputs) - 1
    if low < 0 or high > limit:
        raise ValueError(f"{name} has {low if low < 0 else high}; the limit is {limit}")
    return index.long()


def _finite(scales: torch.Tensor, name: str) -> torch.Tensor:
    """float32. Raises ValueError for what would make no numbers of all that it is multiplied with."""
    scales = scales.float()
    if not bool((is_finite := scales.isfinite()).all()):
        raise ValueError(f"{name} has {scales[~is_finite][0].item()} for a scale; scales must be finite")
    return scales


def _has_no_number(codes: torch.Tensor) -> bool:
    """Whether one of these e4m3 codes stands for no number (0x7f, 0xff), which kernels would take for 480. Eight at a time and within a core's cache:
    that takes half as long as a copy."""
    flat = codes.contiguous().view(torch.uint8).flatten()
    words = F.pad(flat, (0, -len(flat) % 8)) if len(flat) % 8 else flat
    for piece in words.view(torch.int64).split(PIECE):
        if bool((((piece & 0x7F7F7F7F7F7F7F7F) + 0x0101010101010101) & -0x7F7F7F7F7F7F7F80).any()):  # the bytes' highest bits
            return True
    return False


def _settle(digits: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, groups: torch.Tensor, bits: int) -> Quantized:
    """digits [out, in] from 0, zeros [out, G] from 0 (None: the middle) -> the common form."""
    middle = 2 ** (bits - 1)
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    codes = digits.to(torch.int8) if bits == 4 else (digits - middle).to(torch.int8)
    own = None if zeros is None else zeros.float() - (0 if bits == 4 else middle)
    return Quantized(codes, scales, own, groups, bits)


def _read_scaled(layout: Layout, tensors: Tensors, out: int, inputs: int) -> Stored:
    codes = tensors["weight"]
    if codes.dtype == torch.float8_e4m3fn and _has_no_number(codes):
        raise ValueError("weight has nan for a weight; weights must be finite")
    scales = _read_exponents(tensors[layout.scale]) if layout.is_exponent else tensors[layout.scale].float()
    scales = _finite(1 / scales if layout.is_divisor else scales, layout.scale)
    if layout.block is not None:
        (rows, columns), scales = layout.block, scales.reshape(len(scales), -1)
        return Quantized(codes, scales.repeat_interleave(rows, dim=0)[:out], None, torch.arange(inputs) // columns)
    num_groups = layout.num_groups(inputs)
    zeros = None if layout.is_symmetric else _of_rows(tensors["weight_zero_point"].float(), out, num_groups)
    scales, groups = _of_rows(scales, out, num_groups), _groups(layout, inputs)
    if layout.bits == 8:
        return Quantized(codes, scales, zeros, groups)
    middle = 2 ** (layout.bits - 1)
    low, high = (int(which) for which in codes.aminmax())
    if low < -middle or high >= middle:
        raise ValueError(f"weight has {low if low < -middle else high}; the limits are {-middle} and {middle - 1}")
    return _settle(codes.to(torch.int16) + middle, None if zeros is None else zeros + middle, scales, groups, layout.bits)


def _read_exponents(scales: torch.Tensor) -> torch.Tensor:
    """e8m0, which safetensors may hold as plain bytes."""
    return torch.exp2(scales.view(torch.uint8).float() - 127)


def _of_rows(values: torch.Tensor, out: int, num_groups: int) -> torch.Tensor:
    """[out, G], of which there may be one for all."""
    return (values if values.dim() == 2 else values.reshape(-1, 1)).expand(out, num_groups).contiguous()


def _read_packed(layout: Layout, tensors: Tensors, out: int, inputs: int) -> Stored:
    digits, zeros, index = unpack_words(tensors["weight_packed"], layout.bits, inputs), None, tensors.get("weight_g_idx")
    if index is not None and bool((index == -1).all()):
        index = None  # none was found, as by rounding to nearest: compressed-tensors takes the inputs in order then
    groups = _groups(layout, inputs, index, "weight_g_idx")
    if not layout.is_symmetric:
        zeros = unpack_words(tensors["weight_zero_point"].t(), layout.bits, out).t()
    return _settle(digits, zeros, _of_rows(_finite(tensors["weight_scale"], "weight_scale"), out, layout.num_groups(inputs)), groups, layout.bits)


def _read_gptq(layout: Layout, tensors: Tensors, out: int, inputs: int) -> Stored:
    digits = unpack_words(tensors["qweight"].t(), layout.bits, inputs)
    # Who writes the first format takes 1 from all digits of a word at once, which borrows where one is 0: so it is added to the word.
    ones = sum(layout.zero_offset << place for place in range(0, 32, layout.bits))
    zeros = unpack_words(tensors["qzeros"] + ones, layout.bits, out).t()
    groups = _groups(layout, inputs, tensors.get("g_idx"), "g_idx")
    return _settle(digits, zeros, _finite(tensors["scales"].t(), "scales"), groups, layout.bits)


def _read_awq(layout: Layout, tensors: Tensors, out: int, inputs: int) -> Stored:
    digits = unpack_words(tensors["qweight"], layout.bits, out, AWQ_ORDER).t()
    zeros = unpack_words(tensors["qzeros"], layout.bits, out, AWQ_ORDER).t()
    return _settle(digits, zeros, _finite(tensors["scales"].t(), "scales"), _groups(layout, inputs), layout.bits)


def _read_float4(layout: Layout, tensors: Tensors, out: int, inputs: int) -> Stored:
    packed, scales = tensors[layout.weight], tensors[layout.scale]
    digits = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])[digits]
    # Without a global scale those of groups are exponents of 2 alone (e8m0).
    factors = _read_exponents(scales) if layout.global_scale is None else scales.float()
    if layout.global_scale is not None:
        whole = tensors[layout.global_scale].float().reshape(())
        factors = factors / whole if layout.is_divisor else factors * whole
    factors = _finite(factors, layout.scale)
    return (values.unflatten(1, (factors.shape[1], -1)) * factors.unsqueeze(-1)).flatten(1)


_READERS: dict[str, Callable[[Layout, Tensors, int, int], Stored]] = {
    "scaled": _read_scaled,
    "packed": _read_packed,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "float4": _read_float4,
}
