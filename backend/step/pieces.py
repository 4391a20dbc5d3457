"""A forward with prompts in it, captured by its number of rows: whole, where kernels of attention find by themselves which requests there are and how
long their contexts; else in pieces, which layers compute between their attention, and that is launched from Python (vLLM's piecewise graphs).
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from backend.config import EngineConfig
from backend.models import Model, Passing, Wanted
from kernels import ops

logger = logging.getLogger(__name__)

WORTH = 8
"""A forward is captured unless the device takes more than so many times as long for it as Python to launch it kernel by kernel where nothing
else runs: beside a server's other threads that takes three times as long."""
MAX_CAPTURED_ROWS = 8192
"""Each takes memory, and each number of them time to capture; which of them are worth it is timed."""
FEW, FINE, COARSE = 1024, 64, 256
"""Numbers of rows that forwards are captured for go in fine steps up to so many, and in coarse ones from there."""
TILE = 128
"""Rows that a product has whole tiles of."""
WORDS = {1: "|u1", 2: "<i2", 4: "<i4"}
"""By bytes, as `__cuda_array_interface__` names them."""

Result = TypeVar("Result")


def most_captured_rows(config: EngineConfig) -> int:
    """Of a step on a GPU: prompts, and the drafts beside them."""
    return min(config.max_step_rows_on("cuda"), MAX_CAPTURED_ROWS)


def row_counts(most: int) -> list[int]:
    """Numbers of rows that forwards are captured for: few are nobody's, and products have whole tiles."""
    counts = [8, 16, 32, 48, 64, 96, *range(2 * FINE, FEW, FINE), *range(FEW, most, COARSE)]
    return [count for count in counts if count < most] + [most]


def whole_rows(num_rows: int) -> int:
    """The most of these numbers that are no more and whole tiles, where there are so many."""
    step = TILE if num_rows < FEW else COARSE
    return num_rows - num_rows % step


def capture(run: Callable[[], Result], pool: tuple[int, int]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what `run` launches, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(
        pool=pool,  # type: ignore[arg-type]
        capture_error_mode="thread_local",
    )
    try:
        made = run()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture is void by then
            graph.capture_end()
        raise
    graph.capture_end()
    return graph, made


class _Words:
    """A tensor's memory, which is not held."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        address = (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": tuple(tensor.shape), "typestr": WORDS[size], "data": address, "strides": strides, "version": 3}


def _unheld(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which a later graph of the pool may use for something else: valid from where a graph wrote it to the next one's replay."""
    return torch.as_tensor(_Words(tensor), device=tensor.device).view(tensor.dtype)


class Forward:
    """The graphs of one number of rows."""

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._made: list[torch.Tensor] = []
        """By graph: the queries of a layer, or the states at the end."""
        self._passing: Passing | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def add(self, graph: torch.cuda.CUDAGraph, made: torch.Tensor) -> None:
        self._graphs.append(graph)
        self._made.append(_unheld(made))

    def end(self, passing: Passing) -> None:
        """passing: what the graphs handed on, which may be let go now."""
        entering = {number: _unheld(states) for number, states in passing.entering.items()}
        self._passing = Passing(_unheld(passing.x), [], entering)

    def replay(self, number: int) -> torch.Tensor:
        self._graphs[number].replay()
        return self._made[number]

    @property
    def passing(self) -> Passing:
        """The states after the last piece, and what entered layers."""
        assert self._passing is not None
        return dataclasses.replace(self._passing)


class Pieces:
    """The forwards that were captured, by their number of rows."""

    def __init__(
        self,
        model: Model,
        cache: list[tuple[torch.Tensor, ...]],
        tapped: frozenset[int],
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        pool: tuple[int, int],
        *,
        has_end: bool,
    ) -> None:
        """tapped: layers whose entering states are wanted; has_end: the states of all rows are wanted, so that the last layer is captured, too."""
        self._model, self._cache, self._tapped, self._device, self._pool = model, cache, tapped, device, pool
        self._has_end, self._num_pieces = has_end, model.num_layers + has_end
        self._counts = row_counts(max_rows)
        self._packed = torch.zeros(4 * max_rows, dtype=torch.long, device=device)
        self.split: ops.SplitRows | None = None
        """What attention reads, where it is captured with the rest: the step's requests are to be there before `forward`."""
        self._attentions: list[tuple[int, ops.SplitAttention]] = []
        """By most queries of a request that decodes, the fewest first: a kernel for many has less of each multiprocessor for the keys."""
        self._found = torch.zeros(max_rows, model.heads.num_query, model.value_dim, dtype=dtype, device=device)
        """What a layer's queries found."""
        self._forwards: dict[tuple[int, ops.Plan | None], Forward] = {}
        """By rows, and by the attention that is captured with them."""

    def capture_attention(self, split: ops.SplitRows, num_queries: int, attention: ops.SplitAttention) -> None:
        """Attention is captured with the rest: this one, of steps whose decoding requests have so many queries at most. All of them read `split`."""
        self.split = split
        self._attentions = sorted([*self._attentions, (num_queries, attention)], key=lambda own: own[0])

    def attention(self, num_queries: int) -> ops.SplitAttention | None:
        """Of a step whose decoding requests have so many queries; None: it is launched between the pieces."""
        return next((own for most, own in self._attentions if most >= num_queries), None)

    def fit(self, num_rows: int) -> int:
        """The least number of rows that was captured and holds so many; 0: there is none."""
        place = bisect.bisect_left(self._counts, num_rows)
        return self._counts[place] if place < len(self._counts) else 0

    @property
    def counts(self) -> list[int]:
        """Numbers of rows that were captured, ascending."""
        return list(self._counts)

    # -- running ------------------------------------------------------------------------------------------------------

    def packed(self, count: int) -> torch.Tensor:
        """Where the rows of a forward of so many are to lie [4, count]: see `step_rows.StepRows`."""
        return self._packed[: 4 * count].view(4, count)

    def forward(self, count: int, plan: ops.Plan, wanted: Wanted | None = None, entering: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        """See `Model.forward`; of as many rows as were captured, which lie in `packed`. plan: one of `attention`, where there are any."""
        is_whole = self.split is not None
        own, found, last = self._forwards[count, plan if is_whole else None], self._found[:count], self._model.num_layers - 1
        if not is_whole:
            found.zero_()  # rows of nobody are read by products, and choose experts
            for number in range(self._num_pieces - 1):
                self._model.attend(number, own.replay(number), self._cache[number], plan, found)
        states, passing = own.replay(len(own) - 1), own.passing
        if not self._has_end:
            states = self._model.finish(passing, states, self._cache[last], plan, wanted)
        if entering is not None:
            entering.update(passing.entering)
        return states

    # -- capturing ----------------------------------------------------------------------------------------------------

    def capture_all(self) -> None:
        """Of as many rows as are worth it, the most first: the others' lie in the same memory."""
        started = time.perf_counter()
        most = self._count_worth()
        self._counts = [count for count in self._counts if count <= most]
        try:
            for count in reversed(self._counts):
                attentions: list[ops.SplitAttention | None] = [own for _, own in self._attentions]
                for attention in attentions or [None]:
                    self._forwards[count, attention] = self._capture(count, attention)
        except Exception:
            if self._model.ranks.size > 1:
                raise  # the others wait for this one's part
            logger.exception("forwards of %d rows cannot be captured: steps with prompts are launched kernel by kernel", count)
            self._forwards, self._counts = {}, []
        logger.info("captured forwards with prompts of up to %d rows in %.1f s", max(self._counts, default=0), time.perf_counter() - started)

    def _count_worth(self) -> int:
        """Rows for which the device takes so much longer than Python that nothing is gained."""
        few, most = self._counts[0], self._counts[-1]
        launching, _ = self._time_launched(few)
        _, computing = self._time_launched(most)
        return self._model.ranks.least(max(few, int(WORTH * launching / computing * most)), self._device)

    def _run(self, number: int, count: int, passing: Passing | None) -> tuple[Passing, torch.Tensor]:
        """Piece `number` -> what it hands on, and its result: queries, or the states at the end."""
        token_ids, positions, slots, _ = self.packed(count)
        if passing is None:
            passing = self._model.enter(token_ids, positions, dict.fromkeys(self._tapped, token_ids))
        else:
            self._model.answer(passing, number - 1, self._found[:count])
        if number == self._model.num_layers:
            return passing, self._model.leave(passing)
        return passing, self._model.ask(passing, number, slots, self._cache[number])

    def _run_all(self, count: int, attention: ops.SplitAttention | None) -> tuple[Passing, torch.Tensor]:
        """All pieces, with attention if it is captured."""
        passing, made, found = None, None, self._found[:count]
        if attention is not None:
            attention.refresh()
            found.zero_()
        for number in range(self._num_pieces):
            if made is not None and attention is not None:
                self._model.attend(number - 1, made, self._cache[number - 1], attention, found)
            passing, made = self._run(number, count, passing)
        assert passing is not None and made is not None
        return passing, made

    def _time_launched(self, count: int) -> tuple[float, float]:
        """Seconds until everything is launched, and until it is computed."""
        for _ in range(2):  # the first time loads kernels
            torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            self._run_all(count, self.attention(1))
            launched = time.perf_counter()
            torch.cuda.synchronize(self._device)
        return launched - started, time.perf_counter() - started

    def _capture(self, count: int, attention: ops.SplitAttention | None) -> Forward:
        self._run_all(count, attention)  # lets cuBLAS choose
        forward, passing = Forward(), None
        if attention is not None:
            graph, (passing, made) = capture(functools.partial(self._run_all, count, attention), self._pool)
            forward.add(graph, made)
        for number in range(self._num_pieces if attention is None else 0):
            graph, (passing, made) = capture(functools.partial(self._run, number, count, passing), self._pool)
            forward.add(graph, made)
            del made  # what it takes is the next pieces' then, as it will be when they are replayed
        assert passing is not None
        forward.end(passing)
        return forward
