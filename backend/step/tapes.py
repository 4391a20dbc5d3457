"""What a step computes on CPU, recorded: a function's calls of compiled kernels are noted the first time, by the shapes of what it takes; the second
time both ways compute and are compared, bit by bit; from then on one call does it all (`kernels.tape`). What cannot be recorded is computed as ever.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum

import torch

from backend.models import Model
from backend.parallel.ranks import Ranks
from kernels import ops
from kernels.cpu_attention import CpuRows
from kernels.tape import CannotRecord, is_recording, record

logger = logging.getLogger(__name__)

MOST_ROWS = 32
"""Of more, kernels take longer than Python does to call them."""
MOST_MULTIPLIED = 5 * 10**8
"""Weights of a target, likewise."""
MOST_BYTES, MOST_BYTES_OF_ALL = 1 << 22, 1 << 26
"""Of what a function makes, which stays; and of all functions'."""
MOST_TAPES = 256
"""Of one function."""


class _Verdict(IntEnum):
    """Of what was recorded; of several ranks' the least."""

    REFUSED = 0
    NO_ROOM = 1
    TOO_LARGE = 2
    FITS = 3


Bind = Callable[[list[torch.Tensor]], Callable[[], Sequence[torch.Tensor]]]
"""Of tensors, what computes of what they hold: what is not to be recorded of it comes before."""


class _Recorded:
    """One function, of tensors of the same shapes each time."""

    def __init__(self, bind: Bind, inputs: Sequence[torch.Tensor], rows: CpuRows | None) -> None:
        """Computes once. Raises CannotRecord."""
        self._inputs, self._rows, self.is_checked = [own.clone() for own in inputs], rows, False
        self._run = bind(self._inputs)  # it has what calls read
        self.tape, self.results = record(self._run, self._inputs)
        self.num_bytes = self.tape.blocks.num_bytes + sum(own.nbytes for own in self._inputs)

    def play(self, inputs: Sequence[torch.Tensor], rows: CpuRows | None) -> list[torch.Tensor]:
        for own, given in zip(self._inputs, inputs):
            own.copy_(given)
        if self._rows is not None and rows is not None:
            self._rows.become(rows)
        self.tape.play()
        return self.results


class Tapes:
    """Of the functions of one worker. Ranks record and compare the same ones in the same steps, or one would exchange what the others do not."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        """ranks: that compute together, by exchanges that can be recorded; None: this one alone."""
        self._ranks = ranks or Ranks()
        self._all: dict[Hashable, _Recorded] = {}
        """By a function's name, and the shapes of what it takes."""
        self._refused: set[Hashable] = set()
        """Names of functions that cannot be recorded, and keys of what is too much to keep."""
        self._counts: Counter[Hashable] = Counter()
        """By name."""
        self._num_bytes, self._is_full = 0, False
        self._has_news = False

    def run(
        self,
        name: Hashable,
        bind: Bind,
        inputs: Sequence[torch.Tensor],
        num_rows: int,
        attention: ops.Plan | None = None,
        ends: list[float] | None = None,
    ) -> Sequence[torch.Tensor]:
        """bind(inputs)(), which depends on these tensors, on the rows of `attention`, and on what its name says alone.

        num_rows: that it computes; ends: where it notes times (`kernels.cpu_drafts.note_time`). Results are valid until it is run again.
        """
        rows = attention.compiled_rows if isinstance(attention, ops.StepAttention) else None
        if num_rows > MOST_ROWS or name in self._refused or (attention is not None and rows is None) or is_recording():
            return bind(list(inputs))()
        key = (name, *(own.shape for own in inputs), rows is not None and rows.has_trees)
        if key in self._refused:
            return bind(list(inputs))()
        own = self._all.get(key)
        if own is None:
            return self._record(name, key, bind, inputs, rows)
        if own.is_checked:
            made = own.play(inputs, rows)
            if ends is not None:
                ends += own.tape.times
            return made
        self._has_news = True
        made = [result.clone() for result in bind(list(inputs))()]
        are_same = all(map(_are_same, made, own.play(inputs, rows)))
        own.is_checked = bool(self._ranks.least(int(are_same), inputs[0].device))  # one that plays and one that does not would be apart later
        if not own.is_checked:
            logger.warning("a recorded step on CPU computes something else than the step does (%s): it is not used", name)
            self._refuse(name)
        return made

    def take_news(self) -> bool:
        """Whether anything was recorded or compared since the last call."""
        had, self._has_news = self._has_news, False
        return had

    def _record(self, name: Hashable, key: Hashable, bind: Bind, inputs: Sequence[torch.Tensor], rows: CpuRows | None) -> Sequence[torch.Tensor]:
        if self._counts[name] >= MOST_TAPES or self._is_full:
            return bind(list(inputs))()
        self._has_news, own = True, None
        try:
            own = _Recorded(bind, inputs, rows)
            results: Sequence[torch.Tensor] = own.results
            verdict = _Verdict.FITS
            if own.num_bytes > MOST_BYTES:
                verdict = _Verdict.TOO_LARGE
            elif self._num_bytes + own.num_bytes > MOST_BYTES_OF_ALL:
                verdict = _Verdict.NO_ROOM
        except CannotRecord as reason:
            logger.debug("%s is not recorded: %s", name, reason)
            results, verdict = reason.results, _Verdict.REFUSED
        verdict = _Verdict(self._ranks.least(verdict, inputs[0].device))  # ranks' shares of a model may differ in size
        if verdict == _Verdict.REFUSED:
            self._refuse(name)
        elif verdict == _Verdict.NO_ROOM:
            self._is_full = True
        elif verdict == _Verdict.TOO_LARGE:
            self._refused.add(key)
        elif own is not None:
            self._all[key] = own
            self._counts[name] += 1
            self._num_bytes += own.num_bytes
        return results

    def _refuse(self, name: Hashable) -> None:
        self._refused.add(name)
        self._all = {key: own for key, own in self._all.items() if key[0] != name}  # type: ignore[index]


def _are_same(made: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit."""
    return made.shape == other.shape and torch.equal(made.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def find_tapes(model: Model, dtype: torch.dtype, device: torch.device) -> Tapes | None:
    """None: nothing that this target computes is worth it, or can be recorded."""
    ranks = model.ranks
    is_possible = device.type == "cpu" and dtype == torch.float32 and (ranks.size == 1 or ranks.host is not None)
    return Tapes(ranks) if is_possible and ranks.least(int(model.num_multiplied <= MOST_MULTIPLIED), device) else None
