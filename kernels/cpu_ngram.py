"""Prompt lookup on CPU: cpu/ngram.cpp."""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels._load_cpu import find_library
from kernels.request_state import RequestState
from kernels.structs import MAX_SCORE_PAST
from kernels.tape import refuse

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Texts(ctypes.Structure):
    """As in cpu/ngram.cpp."""

    _fields_ = [
        ("tokens", _POINTER),
        ("max_len", _LONG),
        ("num_tokens", _POINTER),
        ("drafts", _POINTER),
        ("max_drafts", _LONG),
        ("num_drafts", _POINTER),
        ("max_total_tokens", _POINTER),
        ("stride", _LONG),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    own = find_library()
    if own is not None:
        own.foretoken_draft_ngram.argtypes = [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _LONG]
        own.foretoken_draft_ngram.restype = None
    return own


def is_usable() -> bool:
    return _library() is not None


def draft_ngram(
    table: RequestState,
    request_indices: torch.Tensor,
    draft_limits: torch.Tensor,
    max_size: int,
    min_size: int,
    num_given: torch.Tensor | None = None,
    min_scores: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
) -> None:
    """As `kernels.ngram.draft_ngram`, whose checks come first."""
    refuse("draft_ngram")
    library = _library()
    assert library is not None, "is_usable comes first"
    own = _Texts(
        table.tokens.data_ptr(),
        table.max_len,
        table.num_tokens.data_ptr(),
        table.drafts.data_ptr(),
        table.drafts.shape[1],
        table.num_drafts.data_ptr(),
        table.max_total_tokens.data_ptr(),
        table.max_total_tokens.stride(0),
    )
    optional = (None if tensor is None else tensor.data_ptr() for tensor in (num_given, min_scores, scores))
    lists = (request_indices.data_ptr(), draft_limits.data_ptr(), len(request_indices))
    library.foretoken_draft_ngram(ctypes.byref(own), *lists, max_size, min_size, *optional, MAX_SCORE_PAST)
