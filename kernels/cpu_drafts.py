"""A model drafter's drafts on CPU: cpu/drafts.cpp."""

from __future__ import annotations

import ctypes
import functools
import time

import torch

from kernels._load_cpu import find_library
from kernels.request_state import RequestState
from kernels.structs import StepSizes
from kernels.tape import Kind, current

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Table(ctypes.Structure):
    """As in cpu/drafts.cpp."""

    _fields_ = [
        ("num_tokens", _POINTER),
        ("drafts", _POINTER),
        ("drafts_stride", _LONG),
        ("num_drafts", _POINTER),
        ("page_table", _POINTER),
        ("table_width", _LONG),
        ("page_size", _LONG),
        ("drafter_stride", _LONG),
        ("scratch_page", _LONG),
        ("dummy_index", _LONG),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    own = find_library()
    if own is not None:
        own.foretoken_likeliest.argtypes = [_POINTER, _LONG, _LONG, _POINTER, _POINTER]
        own.foretoken_append_draft.argtypes = [_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER]
        own.foretoken_note_draft.argtypes = [_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER]
        own.foretoken_sum.argtypes, own.foretoken_sum.restype = [_POINTER, _LONG], ctypes.c_float
        own.foretoken_likeliest.restype = own.foretoken_append_draft.restype = own.foretoken_note_draft.restype = None
    return own


def is_usable() -> bool:
    return _library() is not None


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.sampling.likeliest`, of float32."""
    library, logits = _library(), logits.contiguous()
    assert library is not None, "is_usable comes first"
    chances, places = torch.empty(len(logits), dtype=torch.float32), torch.empty(len(logits), dtype=torch.int32)
    library.foretoken_likeliest(logits.data_ptr(), *logits.shape, chances.data_ptr(), places.data_ptr())
    if (tape := current.tape) is not None:
        tape.note(Kind.LIKELIEST, logits, *logits.shape, chances, places)
    return places, chances


def note_draft(
    kept: torch.Tensor,
    indices: torch.Tensor,
    number: int,
    chances: torch.Tensor,
    is_ended: torch.Tensor | None,
    trust: torch.Tensor,
    together: torch.Tensor,
) -> None:
    """How likely draft `number` of requests indices [B] int32 is to stand, chances [B] float32, goes to kept [S, K] and to together [B]: see
    `backend.step.standing`. trust: one number."""
    library = _library()
    assert library is not None, "is_usable comes first"
    ended = None if is_ended is None else is_ended.data_ptr()
    outputs = (trust.data_ptr(), together.data_ptr())
    library.foretoken_note_draft(kept.data_ptr(), kept.shape[1], indices.data_ptr(), len(indices), number, chances.data_ptr(), ended, *outputs)
    if (tape := current.tape) is not None:
        tape.note(Kind.NOTE_DRAFT, kept, kept.shape[1], indices, len(indices), number, chances, is_ended, trust, together)


def is_enough(together: torch.Tensor, least: torch.Tensor) -> bool:
    """Whether the sum of together [B] float32 is less than that number. On a tape what follows is not played where it is; recorded it is."""
    library = _library()
    assert library is not None, "is_usable comes first"
    if (tape := current.tape) is not None:
        tape.note(Kind.STOP, together, len(together), least)
        return False
    return library.foretoken_sum(together.data_ptr(), len(together)) < float(least)


def note_time(ends: list[float]) -> None:
    """Appends the time by time.perf_counter(); a tape's goes to its `times`."""
    ends.append(time.perf_counter())
    if (tape := current.tape) is not None:
        tape.note_time()


def append_draft(
    packed: torch.Tensor,
    seq_lens: torch.Tensor,
    table: RequestState,
    fields: torch.Tensor,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    sizes: StepSizes,
    step: int,
    is_skipped: torch.Tensor | None,
) -> None:
    """As `kernels.step.append_draft`, whose checks come first."""
    library = _library()
    assert library is not None, "is_usable comes first"
    own = _Table(
        table.num_tokens.data_ptr(),
        table.drafts.data_ptr(),
        table.drafts.stride(0),
        table.num_drafts.data_ptr(),
        page_table.data_ptr(),
        sizes.table_width,
        sizes.page_size,
        sizes.drafter_stride,
        sizes.scratch_page,
        sizes.dummy_index,
    )
    skipped = None if is_skipped is None else is_skipped.data_ptr()
    inputs = (ctypes.byref(own), fields.data_ptr(), sizes.batch, chosen.data_ptr(), skipped, step)
    library.foretoken_append_draft(*inputs, packed.data_ptr(), seq_lens.data_ptr())
    if (tape := current.tape) is not None:
        tape.note(Kind.APPEND_DRAFT, own, fields, sizes.batch, chosen, is_skipped, step, packed, seq_lens)
