"""Calls of compiled kernels on CPU, noted while a function runs, and made again without Python between them: cpu/tape.cpp. What CUDA's graphs are to
a GPU: a small model's step is a hundred calls, each of which takes Python as long as the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels._load_cpu import find_library


class CannotRecord(Exception):
    """A function does something beside what a tape can do again."""

    results: Sequence[torch.Tensor] = ()
    """Of the function, which went on to its end: what it exchanges with other ranks it must not do twice."""


class Kind(IntEnum):
    """As in cpu/tape.cpp."""

    LINEAR = 0
    APPEND_KV = 1
    ATTENTION = 2
    RMS_NORM = 3
    NORM_HEADS = 4
    COPY = 5
    GATHER = 6
    SCATTER = 7
    EQUALS = 8
    FILL = 9
    LIKELIEST = 10
    NOTE_DRAFT = 11
    APPEND_DRAFT = 12
    CLOCK = 13
    STOP = 14
    ALL_REDUCE = 15
    GATHER_PARTS = 16


MOST_ARGUMENTS = 11
MOST_TIMES = 64
ALIGNMENT = 64


class _Call(ctypes.Structure):
    """As in cpu/tape.cpp."""

    _fields_ = [("kind", ctypes.c_int64), ("own", ctypes.c_int64 * MOST_ARGUMENTS)]


@functools.cache
def _library() -> ctypes.CDLL | None:
    own = find_library()
    if own is not None:
        own.foretoken_play.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        own.foretoken_play.restype = ctypes.c_int64
    return own


class _Blocks:
    """Memory of what a recorded function makes. What it lets go is given out again: when the tape is played, it has been read by then, too."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self.all: list[np.ndarray] = []
        self._addresses: set[int] = set()

    def make(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Contiguous; what is in it is undefined."""
        num_bytes = max(shape.numel(), 1) * dtype.itemsize
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(size, [])
        if free:
            block = free.pop()
        else:
            room = np.zeros(size + ALIGNMENT, dtype=np.uint8)
            first = -room.ctypes.data % ALIGNMENT
            block = room[first : first + size]
            self.all.append(block)
            self._addresses.add(block.ctypes.data)
        lent = block[:]  # of its own, and alive as long as a tensor or a view of it is
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=dtype, count=shape.numel()).view(shape)

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self.all)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses


class Tape:
    """What a function called, in order."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, list[int]]] = []
        self._kept: list[Any] = []
        """What calls read and nobody else may hold."""
        self.blocks = _Blocks()
        self._calls: Any = None
        self._times = np.zeros(1 + MOST_TIMES, dtype=np.int64)
        self._num_times = 0
        self._explanations: dict[Kind, Callable[[], Exception]] = {}
        self.failure: CannotRecord | None = None
        """The first one."""

    def note(self, kind: Kind, *arguments: Any) -> None:
        """A call of a compiled kernel with these: addresses are given by what lies there, None is null."""
        self._noted.append((kind, [self._as_integer(own) for own in arguments]))

    def _as_integer(self, own: Any) -> int:
        if own is None:
            return 0
        if isinstance(own, torch.Tensor):
            if not self.blocks.has(own):
                self._kept.append(own)
            return own.data_ptr()
        if isinstance(own, ctypes.Structure):
            self._kept.append(own)
            return ctypes.addressof(own)
        if isinstance(own, float):
            return int.from_bytes(struct.pack("<f", own), "little")
        return int(own)

    def fail(self, reason: CannotRecord) -> None:
        """It is of no use; what is recorded goes on."""
        self.failure = self.failure or reason

    def explain(self, kind: Kind, explanation: Callable[[], Exception]) -> None:
        """Why such a call fails; those of other kinds fail where a place is none."""
        self._explanations[kind] = explanation

    def note_time(self) -> None:
        """A look at the clock of time.perf_counter(), which `times` has."""
        self._num_times += 1
        self.note(Kind.CLOCK, self._times.ctypes.data, self._num_times)

    @property
    def times(self) -> list[float]:
        """Seconds, of when it was last played."""
        count = int(self._times[0])
        return [nanoseconds / 1e9 for nanoseconds in self._times[1 : 1 + count].tolist()]

    def end(self) -> None:
        """Nothing more is noted."""
        self._calls = (_Call * len(self._noted))()
        for call, (kind, arguments) in zip(self._calls, self._noted):
            call.kind, call.own[: len(arguments)] = kind, arguments
        self._noted = []

    def __len__(self) -> int:
        return len(self._noted) if self._calls is None else len(self._calls)

    def play(self) -> None:
        """Raises IndexError for a place that is none, such as a slot past the cache; and what calls explain themselves by (`explain`)."""
        library = _library()
        assert library is not None and self._calls is not None, "a tape is recorded first"
        failed = library.foretoken_play(ctypes.addressof(self._calls), len(self._calls), torch.get_num_threads())
        if failed:
            kind = Kind(self._calls[failed - 1].kind)
            if (explanation := self._explanations.get(kind)) is not None:
                raise explanation()
            raise IndexError(f"call {failed} of {len(self._calls)} of a recorded step, {kind.name}, was given a row that does not exist")


class _Current(threading.local):
    tape: Tape | None = None
    """That this thread records on."""


current = _Current()


def is_recording() -> bool:
    return current.tape is not None


def record(function: Callable[[], Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor] = ()) -> tuple[Tape, list[torch.Tensor]]:
    """A tape of what the function calls, and its results, which playing the tape writes anew; it runs once.

    inputs: what it reads, from where it is each time, and may write. Raises CannotRecord.
    """
    tape = Tape()
    if _library() is None:
        tape.fail(CannotRecord("no kernels are compiled"))
    assert current.tape is None, "one at a time"
    current.tape = tape
    try:
        with _Recorder(tape):
            made = list(function())
    finally:
        current.tape = None
    if outside := [list(own.shape) for own in made if not tape.blocks.has(own) and not any(own is known for known in inputs)]:
        tape.fail(CannotRecord(f"results {outside} are not its own"))
    if tape.failure is not None:
        tape.failure.results = made
        raise tape.failure
    tape.end()
    return tape, made


def refuse(what: str) -> None:
    """Called by a compiled kernel that no tape knows: what is recorded cannot be."""
    if current.tape is not None:
        current.tape.fail(CannotRecord(what))


aten = torch.ops.aten
ROOM = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim,
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.unbind.int, aten.expand.default, aten.as_strided.default,
    aten.t.default, aten.transpose.int, aten.alias.default, aten.detach.default, aten.to.dtype, aten.contiguous.default,
}  # fmt: skip
"""Also such as copy where they have to: these are refused where they do."""
WORD = 4


def _rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """x, words from a row to the next, rows, and words of each: of a tensor [T, ...] whose rows are in one piece."""
    size = x.element_size()
    if not x.dim() or size % WORD or not (len(x) == 0 or x[0].is_contiguous()):
        raise CannotRecord(f"rows of {x.dtype} {list(x.shape)} with strides {list(x.stride())}")
    words = size // WORD
    return x, x.stride(0) * words, len(x), x[0].numel() * words if len(x) else 0


def _places(index: Any) -> torch.Tensor:
    if not isinstance(index, torch.Tensor) or index.dtype != torch.int64 or index.dim() != 1 or not index.is_contiguous():
        raise CannotRecord("an index that is no list of rows")
    return index


class _Recorder(TorchDispatchMode):
    """Has torch's own operations noted as well: the few that tapes know."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled by torch here, and to be left alone by what compiles it takes 1.4 s and 70 MB to load."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if self._tape.failure is not None:
            return made
        try:
            return self._note(function, made, args, kwargs)
        except CannotRecord as reason:
            self._tape.fail(reason)
            return made

    def _note(self, function: Any, made: Any, args: Any, kwargs: Any) -> Any:
        """Raises CannotRecord."""
        if function in ROOM:
            if made.device.type != "cpu" or not made.is_contiguous() or not made.numel():
                raise CannotRecord(f"room for {list(made.shape)} on {made.device} with strides {list(made.stride())}")
            return self._tape.blocks.make(made.shape, made.dtype)
        if function in VIEWS:
            first = made[0] if isinstance(made, list | tuple) else made
            if first.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr() or first.dtype != args[0].dtype:
                raise CannotRecord(f"{function} that copies")
            return made
        rule = RULES.get(function)
        if rule is None or (kwargs and any(value is not None for value in kwargs.values())):
            raise CannotRecord(str(function))
        return rule(self._tape, made, *args)


def _own(tape: Tape, made: torch.Tensor) -> torch.Tensor:
    return tape.blocks.make(made.shape, made.dtype).copy_(made)


def _index(tape: Tape, made: torch.Tensor, source: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    if len(indices) != 1:
        raise CannotRecord("an index of several dimensions")
    out, places, (_, stride, limit, width) = _own(tape, made), _places(indices[0]), _rows_of(source)
    tape.note(Kind.GATHER, out, _rows_of(out)[1], source, stride, places, len(places), width, limit)
    return out


def _clone(tape: Tape, made: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    out, (_, stride, rows, width) = _own(tape, made), _rows_of(source)
    tape.note(Kind.COPY, out, _rows_of(out)[1], source, stride, rows, width)
    return out


def _cat(tape: Tape, made: torch.Tensor, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    if made.dim() != 2 or dim not in (1, -1):
        raise CannotRecord(f"a concatenation {list(made.shape)} along {dim}")
    out, begin = _own(tape, made), 0
    for part in parts:
        source, stride, rows, width = _rows_of(part)
        tape.note(Kind.COPY, out[:, begin:], out.stride(0) * out.element_size() // WORD, source, stride, rows, width)
        begin += part.shape[1]
    return out


def _equals(tape: Tape, made: torch.Tensor, source: torch.Tensor, value: int) -> torch.Tensor:
    if source.dtype != torch.int64 or not source.is_contiguous():
        raise CannotRecord(f"a comparison of {source.dtype}")
    out = _own(tape, made)
    tape.note(Kind.EQUALS, source, source.numel(), value, out)
    return out


def _fill(tape: Tape, made: torch.Tensor, x: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    own, stride, rows, width = _rows_of(x)
    if x.dtype != torch.float32 or x.dim() != 2 or mask.shape != (rows, 1) or not mask.is_contiguous():
        raise CannotRecord(f"a filling of {x.dtype} {list(x.shape)} by a mask {list(mask.shape)}")
    tape.note(Kind.FILL, own, stride, mask, rows, width, float(value))
    return made


def _scatter(tape: Tape, made: torch.Tensor, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    places, (own, stride, limit, _), (_, source_stride, rows, width) = _places(index), _rows_of(x), _rows_of(source)
    if dim or x.dtype != source.dtype or len(places) != rows:
        raise CannotRecord(f"a copy of {source.dtype} {list(source.shape)} to rows of {x.dtype}")
    tape.note(Kind.SCATTER, own, stride, source, source_stride, places, rows, width, limit)
    return made


RULES: dict[Any, Callable[..., torch.Tensor]] = {
    aten.index.Tensor: _index,
    aten.clone.default: _clone,
    aten.cat.default: _cat,
    aten.eq.Scalar: _equals,
    aten.masked_fill_.Scalar: _fill,
    aten.index_copy_.default: _scatter,
}
