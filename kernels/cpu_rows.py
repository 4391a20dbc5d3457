"""Operations on rows of float32 by themselves, on CPU: cpu/rows.cpp."""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels._load_cpu import find_library
from kernels.tape import Kind, current, refuse

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def _library() -> ctypes.CDLL | None:
    own = find_library()
    if own is not None:
        own.foretoken_rms_norm.argtypes = [_POINTER, _LONG, _LONG, _POINTER, _FLOAT, _POINTER]
        own.foretoken_uniforms.argtypes = [_POINTER, _POINTER, _LONG, _LONG, ctypes.c_int, _POINTER]
        own.foretoken_norm_heads.argtypes = [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _FLOAT]
        own.foretoken_norm_heads.restype = own.foretoken_rms_norm.restype = own.foretoken_uniforms.restype = None
    return own


def is_usable(x: torch.Tensor) -> bool:
    """Of x [T, N], of which no gradient is wanted."""
    is_float = x.device.type == "cpu" and x.dtype == torch.float32
    return is_float and not (x.requires_grad and torch.is_grad_enabled()) and _library() is not None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `kernels.norm.rms_norm`, whose checks come first."""
    library, x, weight = _library(), x.contiguous(), weight.contiguous()
    assert library is not None, "is_usable comes first"
    out = torch.empty_like(x)
    library.foretoken_rms_norm(x.data_ptr(), *x.shape, weight.data_ptr(), eps, out.data_ptr())
    if (tape := current.tape) is not None:
        tape.note(Kind.RMS_NORM, x, *x.shape, weight, float(eps), out)
    return out


def norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """As `reference.norm_heads`; heads in one piece for each token."""
    library, weight = _library(), weight.contiguous()
    assert library is not None, "is_usable comes first"
    library.foretoken_norm_heads(heads.data_ptr(), len(heads), heads.stride(0), *weight.shape, weight.data_ptr(), eps)
    if (tape := current.tape) is not None:
        tape.note(Kind.NORM_HEADS, heads, len(heads), heads.stride(0), *weight.shape, weight, float(eps))


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, count: int, stream: int) -> torch.Tensor | None:
    """As `reference.sampling.uniforms`; None: on a GPU, or where nothing is compiled."""
    if seeds.device.type != "cpu" or (library := _library()) is None:
        return None
    refuse("uniforms")
    seeds, positions = seeds.to(torch.int64).contiguous(), positions.to(torch.int64).contiguous()
    out = torch.empty(len(seeds), count, dtype=torch.float32)
    library.foretoken_uniforms(seeds.data_ptr(), positions.data_ptr(), len(seeds), count, stream, out.data_ptr())
    return out
