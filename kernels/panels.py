"""Products of float32 rows with weights in panels, on CPU: cpu/linear.cpp. The twin is torch's own product of the same weights."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

from kernels import huge_pages
from kernels._load_cpu import find_library
from kernels.tape import Kind, current

WRITE, ADD, GATED = range(3)
"""What becomes of a product: see cpu/linear.cpp."""


class _Weight(ctypes.Structure):
    """As in cpu/linear.cpp."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("is_half", ctypes.c_int64),
    ]


_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


@functools.cache
def _library() -> ctypes.CDLL | None:
    own = find_library()
    if own is not None:
        own.foretoken_linear.argtypes = [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _FLOAT, _POINTER, _LONG, _INT, _INT]
        own.foretoken_linear.restype = None
    return own


def is_usable(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.ndim == 2 and _library() is not None


PIECE = 1 << 22
"""Weights that are laid out at a time: what that takes beside what stays."""


TILE_INPUTS, TILE_OUTPUTS = 32, 16
"""Of a tile of weights: see cpu/tiles.h."""


def is_half(weight: torch.Tensor) -> bool:
    """Whether float32 weights [out, in] are numbers of bfloat16, every one."""
    rows = max(1, PIECE // max(1, weight.shape[1]))
    return not any((piece.contiguous().view(torch.int32) & 0xFFFF).any() for piece in weight.split(rows))


def _bits(weight: torch.Tensor, width: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some panels of `width` outputs at a time: which ones, and the words of their weights [n, width, in], 0 past the last output."""
    num_inputs = weight.shape[1]
    count = max(1, PIECE // (num_inputs * width))
    for number, piece in enumerate(weight.split(count * width)):
        missing = -len(piece) % width
        whole = torch.cat([piece, piece.new_zeros(missing, num_inputs)]) if missing else piece
        bits = whole.contiguous().view(torch.int32).view(-1, width, num_inputs)
        yield slice(number * count, number * count + len(bits)), bits


def pack(weight: torch.Tensor, width: int, is_half: bool) -> torch.Tensor:
    """weight [out, in] float32 -> panels [P, in, width] of `width` outputs each, as int32.

    is_half: in bfloat16 [P, in, width / 2]; output j of a panel is the upper half of word j, output j + width / 2 the lower one.
    """
    num_outputs, num_inputs = weight.shape
    made = huge_pages.zeros((-(-num_outputs // width), num_inputs, width // 2 if is_half else width), torch.int32)
    for own, bits in _bits(weight, width):
        if is_half:
            upper, lower = bits.transpose(1, 2).chunk(2, dim=2)
            torch.bitwise_or(upper, lower >> 16 & 0xFFFF, out=made[own])
        else:
            made[own] = bits.transpose(1, 2)
    return made


def pack_tiles(weight: torch.Tensor, width: int) -> torch.Tensor:
    """weight [out, in], numbers of bfloat16 -> panels [P, blocks, width / 16, 16, 16, 2] int16 of `width` outputs each.

    A block is 32 inputs, 0 past the last one; of a block tiles of 16 outputs: [pair of inputs, output, input of the pair].
    """
    num_outputs, num_inputs = weight.shape
    blocks, tiles, pairs = -(-num_inputs // TILE_INPUTS), width // TILE_OUTPUTS, TILE_INPUTS // 2
    made = huge_pages.zeros((-(-num_outputs // width), blocks, tiles, pairs, TILE_OUTPUTS, 2), torch.int16)
    for own, bits in _bits(weight, width):
        halves = torch.nn.functional.pad(bits.view(torch.int16)[..., 1::2], (0, blocks * TILE_INPUTS - num_inputs))
        made[own] = halves.view(-1, tiles, TILE_OUTPUTS, blocks, pairs, 2).permute(0, 3, 1, 4, 2, 5)
    return made


class PanelWeight:
    """Weights [out, in], and what a product adds: bias [out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        library = _library()
        assert library is not None, "is_usable comes first"
        self._run = library.foretoken_linear
        self.out_features, self.in_features = weight.shape
        self.is_half = is_half(weight)
        width = library.foretoken_panel(self.is_half)
        is_tiled = self.is_half and library.foretoken_has_tiles()
        self.panels = pack_tiles(weight, width) if is_tiled else pack(weight, width, self.is_half)
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._own = _Weight(
            self.panels.data_ptr(), None if self._bias is None else self._bias.data_ptr(), self.in_features, self.out_features, self.is_half
        )
        self._address = ctypes.addressof(self._own)

    def multiply(self, x: torch.Tensor, out: torch.Tensor, mode: int = WRITE, norm: torch.Tensor | None = None, eps: float = 0.0) -> torch.Tensor:
        """x [T, in] float32 times the weights, in out [T, out] (GATED: [T, out / 2]); norm [in]: x is normalised first (RMS, `eps`).

        Raises ValueError for other shapes and types, and for what a gradient is to flow through, which nothing here notes.
        """
        rows, width = x.shape
        wanted = (rows, self.out_features // 2 if mode == GATED else self.out_features)
        if width != self.in_features or x.dtype != torch.float32 or out.shape != wanted or out.dtype != torch.float32 or out.stride(1) != 1:
            given = f"x {x.dtype} {list(x.shape)}, out {out.dtype} {list(out.shape)}"
            raise ValueError(f"{given}: must be float32 [T, {self.in_features}] and {list(wanted)}, rows in one piece")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("products of weights in panels have no gradient; use torch.no_grad()")
        if x.stride(1) != 1:
            x = x.contiguous()
        if norm is not None and (norm.shape != (width,) or norm.dtype != torch.float32 or not norm.is_contiguous()):
            raise ValueError(f"norm is {norm.dtype} {list(norm.shape)}; must be float32 [{width}]")
        if rows:
            weights: Any = None if norm is None else norm.data_ptr()
            self._run(self._address, x.data_ptr(), rows, x.stride(0), weights, eps, out.data_ptr(), out.stride(0), mode, torch.get_num_threads())
            if (tape := current.tape) is not None:
                tape.note(Kind.LINEAR, self._own, x, rows, x.stride(0), norm, float(eps), out, out.stride(0), mode)
        return out
