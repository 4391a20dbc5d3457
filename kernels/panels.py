"""Products of float32 rows with weights in panels, on CPU: cpu/linear.cpp. The twin is torch's own product of the same weights."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

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


def pack(weight: torch.Tensor, width: int) -> tuple[torch.Tensor, bool]:
    """weight [out, in] float32 -> panels [P, in, width] of `width` outputs each, and whether they are in bfloat16: where that changes no weight.

    In bfloat16 [P, in, width / 2] int32: output j of a panel is the upper half of word j, output j + width / 2 the lower one.
    """
    num_outputs, num_inputs = weight.shape
    count = max(1, PIECE // (num_inputs * width))
    pieces = weight.split(count * width)
    is_half = not any((piece.contiguous().view(torch.int32) & 0xFFFF).any() for piece in pieces)
    made = torch.zeros(-(-num_outputs // width), num_inputs, width // 2 if is_half else width, dtype=torch.int32)
    for number, piece in enumerate(pieces):
        missing = -len(piece) % width
        whole = torch.cat([piece, piece.new_zeros(missing, num_inputs)]) if missing else piece
        bits = whole.contiguous().view(torch.int32).view(-1, width, num_inputs).transpose(1, 2)
        own = made[number * count : number * count + len(bits)]
        if is_half:
            upper, lower = bits.chunk(2, dim=2)
            torch.bitwise_or(upper, lower >> 16 & 0xFFFF, out=own)
        else:
            own.copy_(bits)
    return made, is_half


class PanelWeight:
    """Weights [out, in], and what a product adds: bias [out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        library = _library()
        assert library is not None, "is_usable comes first"
        self._run = library.foretoken_linear
        self.out_features, self.in_features = weight.shape
        self.panels, self.is_half = pack(weight, library.foretoken_panel())
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
