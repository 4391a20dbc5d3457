"""CUDA graphs of the step's phases. Each phase is captured apart, so that their number adds up and does not multiply.

A shape that has no graph runs eagerly, and is captured when nobody waits. A step with prompts has a forward of its own, captured by its number of
rows (`backend.step.pieces`), and so has the model drafter (`backend.step.advancing`); all else are graphs of steps that decode.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

import torch

from backend.config import EngineConfig
from backend.prefixes import MIN_SHARERS
from backend.step.advancing import Advancing
from backend.step.captured_shapes import (
    DISTRIBUTIONS,
    UNCAPTURED,
    WIDTHS,
    Drafting,
    Phase,
    batch_sizes,
    captured_drafting,
    fit_drafting,
    key_of,
    phases_of,
    shapes_to_capture,
)
from backend.step.options import Options
from backend.step.pieces import Pieces, capture, most_captured_rows
from backend.step.plan import StepPlan
from backend.step.program import Program
from backend.step.tensors import Advanced, StepShape, StepTensors
from kernels import warm_up
from kernels.code_check import check_codes
from kernels.request_table import RequestTable
from kernels.structs import COUNT, FIRST, NUM_FIELDS

logger = logging.getLogger(__name__)

MAX_WAITING, MAX_LATER, MAX_FITTED = 256, 128, 4096
"""Shapes that wait to be captured, and graphs that were captured while serving: the least used goes first; shapes of steps that were fitted."""

Launch = Callable[[], None]


@dataclasses.dataclass(slots=True)
class Running:
    """A step whose phases are launched one after the other."""

    step: StepTensors
    left: list[list[Launch]]
    """By phase."""
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = dataclasses.field(default_factory=list)
    """Events at each phase's beginning and end."""

    def launch(self, count: int) -> None:
        """The next so many phases, if there are as many."""
        begin = _record()
        for launches in self.left[:count]:
            for launch in launches:
                launch()
            end = _record()
            self.spans.append((begin, end))
            begin = end
        del self.left[:count]

    def finish(self) -> None:
        self.launch(len(self.left))


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Graphs:
    """Runs steps on a GPU. Used by the engine thread only, on the device's stream."""

    def __init__(self, config: EngineConfig, program: Program, table: RequestTable, device: torch.device, num_words: int) -> None:
        """num_words: that the host sends for one step at most."""
        self._program, self._table, self.device = program, table, device
        self._is_cascade = config.cascade_attention
        tree = config.speculative_config.tree
        self._tree_width = 1 + tree.num_nodes if tree is not None else 0
        """Tokens of a tree's row; 0: there are no trees."""
        self._tree_widths = sorted({self._tree_width, max(self._tree_width, WIDTHS[-1])}) if self._tree_width else []
        """Of rows in steps with trees: chains beside them may be longer."""
        self._batch_sizes = batch_sizes(config.max_batch_size)
        self.staged = torch.zeros(num_words, dtype=torch.int32, device=device)
        """What the host sent: the fields first."""
        self._queries: list[int] = []
        self._drafts: list[Drafting] = []
        self._tensors: dict[tuple[int, int, bool], StepTensors] = {}
        """What the graphs of all phases of a batch size and width share, with trees or without."""
        self._advanced: dict[int, Advanced] = {}
        """By batch size: what the model drafter's graphs leave to those of drafts."""
        self._fitted: dict[StepShape, StepShape] = {}
        """What steps without prompts were fitted to."""
        self._graphs: dict[Phase, tuple[torch.cuda.CUDAGraph, StepTensors]] = {}
        self._later: OrderedDict[Phase, None] = OrderedDict()
        self._waiting: OrderedDict[StepShape, None] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._max_prompt_rows = most_captured_rows(config)
        self.pieces: Pieces | None = None
        """Forwards with prompts; None: they are launched kernel by kernel."""
        self.advancing: Advancing | None = None
        """The model drafter's, likewise."""

    @property
    def _chain_widths(self) -> list[int]:
        return [width for width in self._queries if width != self._tree_width]

    def fit(self, shape: StepShape) -> StepShape:
        """The least shape made in advance that such a step fits in. Of a step with prompts that is what follows its forward; where nothing made in
        advance follows, it keeps its requests."""
        if shape.num_prompts:  # hardly any two are the same
            return self._fit(shape)
        found = self._fitted.get(shape)
        if found is None:
            if len(self._fitted) >= MAX_FITTED:
                self._fitted.clear()
            found = self._fitted[shape] = self._fit(shape)
        return found

    def _fit(self, shape: StepShape) -> StepShape:
        own, trees = self._chain_widths, self._tree_widths if shape.has_trees else None
        num_rows = sum(shape.prompt_lens) + (shape.batch - shape.num_prompts) * shape.num_queries
        # What was captured is worth some idle rows.
        queries = next(n for n in trees or (*own, *WIDTHS) if n >= shape.num_queries)
        batch = next(size for size in self._batch_sizes if size >= shape.batch)
        num_drafter_rows = 0
        if shape.num_prompts and self._can_follow(shape, (batch, queries, shape.has_trees)):
            if self.advancing is not None and shape.asks_model:
                num_drafter_rows = self.advancing.fit(num_rows - sum(shape.prompt_lens) + sum(shape.drafter_counts))
        elif shape.num_prompts:
            batch, queries = shape.batch, next(n for n in trees or sorted({*own, *WIDTHS}) if n >= shape.num_queries)
            num_rows = sum(shape.prompt_lens) + (batch - shape.num_prompts) * queries
        rows = {}
        if shape.num_prompts and self.pieces is not None:
            rows = {"num_rows": self.pieces.fit(num_rows), "num_drafter_rows": num_drafter_rows}
        return fit_drafting(shape, self._drafts, batch=batch, num_queries=queries, **rows)

    def _can_follow(self, shape: StepShape, key: tuple[int, int, bool]) -> bool:
        """Whether graphs of steps that decode may follow a forward with prompts: of scores of prompts, and of what looks at rows once more, there are
        none."""
        return key in self._tensors and not (shape.scored or self._tree_width or self._program.remembers_rows)

    # -- running ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, shape: StepShape) -> Running:
        """Starts a step whose plan was staged with its forward; the caller finishes it."""
        later = shape.without_prompts() if shape.num_prompts else shape
        is_followed = self._can_follow(shape, key_of(shape)) if shape.num_prompts else key_of(shape) in self._tensors
        if not is_followed:
            if not shape.num_prompts:
                self._wait_for_capture(shape)
            step = self._program.make_tensors(shape, self._fields(shape.batch))
            if shape.num_rows and self.pieces is not None and step.rows is not None:
                step.pieces, step.rows.packed = self.pieces, self.pieces.packed(shape.num_rows)
                step.attention = self.pieces.attention(shape.num_queries) or step.attention
            phases = self._phases(shape)
            running = Running(step, [[partial(self._run_eagerly, phase, step) for phase in own] for own in phases])
        else:
            step, phases = self._select(later), self._phases(shape)
            if any(phase not in self._graphs for phase in itertools.chain(*self._phases(later))):
                self._wait_for_capture(later)
            running = Running(step, [[partial(self._replay, phase, step) for phase in own] for own in phases])
            if shape.num_prompts:
                self._begin_with_prompts(running, shape)
        running.launch(1)
        return running

    def _phases(self, shape: StepShape) -> list[list[Phase]]:
        return phases_of(shape, has_model=self._program.drafting.asks_model(shape))

    def _begin_with_prompts(self, running: Running, shape: StepShape) -> None:
        """What reads all rows of a step with prompts: its forward, and the model drafter's."""
        program, step = self._program, running.step
        advancing = self.advancing if shape.num_drafter_rows else None
        own = program.make_prompt_tensors(shape, self._tensors[key_of(step.shape)], self.pieces if shape.num_rows else None, advancing)
        own.advanced = self._advanced.get(shape.batch)

        def forward() -> None:
            program.forward(own)
            program.leave_to(own, step)

        def advance() -> None:
            program.advance(own, advancing)
            step.advanced = own.advanced

        running.left[0] = [forward]
        if program.drafting.asks_model(shape):
            running.left[2][0] = advance

    def _replay(self, phase: Phase, step: StepTensors) -> None:
        """Or, where there is no graph of it yet, eagerly."""
        found = self._graphs.get(phase)
        if found is None:
            self._run_eagerly(phase, step)
            return
        if phase in self._later:
            self._later.move_to_end(phase)
        graph, own = found
        graph.replay()
        # What the graph wrote that no other phase shares.
        if phase[0] == "decide":
            step.scores = own.scores
        elif phase[0] == "draft":
            step.report = own.report

    def _run_eagerly(self, phase: Phase, step: StepTensors) -> None:
        getattr(self._program, phase[0])(step)
        base = self._tensors.get(key_of(step.shape))
        if phase[0] != "forward" or step.shape.num_prompts:  # what follows prompts here is eager, too
            return
        if base is not None and base is not step and step.hidden.shape == base.hidden.shape:
            base.hidden.copy_(step.hidden)
            step.hidden = base.hidden

    def _fields(self, batch: int) -> torch.Tensor:
        return self.staged[: NUM_FIELDS * batch].view(NUM_FIELDS, batch)

    def _select(self, shape: StepShape) -> StepTensors:
        """Tensors for a step of this shape over those that the phases' graphs share."""
        base, advanced = self._tensors[key_of(shape)], self._advanced.get(shape.batch)
        plain = not (shape.has_prefixes or shape.num_model_drafts or shape.reports_drafts or Options.LOGPROBS in shape.options)
        if plain or all(phase in self._graphs for phase in itertools.chain(*self._phases(shape))):
            return dataclasses.replace(base, shape=shape, advanced=advanced)
        step = self._program.make_tensors(shape, base.fields, base.rows)
        attention = step.attention if shape.has_prefixes else base.attention
        return dataclasses.replace(step, attention=attention, hidden=base.hidden, results=base.results, advanced=advanced)

    # -- capturing ----------------------------------------------------------------------------------------------------

    def _wait_for_capture(self, shape: StepShape) -> None:
        if not shape.options & UNCAPTURED and len(self._waiting) < MAX_WAITING:
            self._waiting[shape] = None

    @property
    def is_capture_waiting(self) -> bool:
        return bool(self._waiting)

    @torch.inference_mode()
    def capture_waiting(self) -> bool:
        """Captures one shape that a step ran eagerly. False: there is none."""
        if not self._waiting:
            return False
        shape, _ = self._waiting.popitem(last=False)
        for phase in self._capture(shape):
            self._later[phase] = None
        while len(self._later) > MAX_LATER:
            phase, _ = self._later.popitem(last=False)
            del self._graphs[phase]
        return True

    def _capture(self, shape: StepShape) -> list[Phase]:
        """The phases of a shape that have no graph yet."""
        self._clear_fields(shape.batch)
        key = key_of(shape)
        if key not in self._tensors:
            plain = StepShape(shape.batch, shape.num_queries, has_trees=shape.has_trees)
            base = self._program.make_tensors(plain, self._fields(shape.batch))
            self._graphs[self._phases(plain)[0][0]] = (self._capture_phase(self._program.forward, base), base)
            self._tensors[key] = base
        made = []
        step = None
        for phase in itertools.chain(*self._phases(shape)):
            if phase in self._graphs:
                continue
            if step is None:
                step = self._select(shape)
            if phase[0] == "advance" and shape.batch not in self._advanced:
                self._program.advance(step)
                assert step.advanced is not None
                step.advanced = self._advanced[shape.batch] = step.advanced.clone()
            run = self._forward_into(self._tensors[key]) if phase[0] == "forward" else getattr(self._program, phase[0])
            self._graphs[phase] = (self._capture_phase(run, step), step)
            made.append(phase)
        return made

    def _forward_into(self, base: StepTensors) -> Callable[[StepTensors], None]:
        def run(step: StepTensors) -> None:
            self._program.forward(step)
            base.hidden.copy_(step.hidden)
            step.hidden = base.hidden

        return run

    def _capture_phase(self, run: Callable[[StepTensors], None], step: StepTensors) -> torch.cuda.CUDAGraph:
        run(step)  # loads kernels, and lets cuBLAS choose
        run(step)
        return capture(lambda: run(step), self._pool)[0]

    def _clear_fields(self, batch: int, prompt: int = 0) -> None:
        """Rows of nobody."""
        fields = self._fields(batch)
        fields.copy_(torch.from_numpy(StepPlan().padded_fields(batch, self._table.dummy_index)))
        if prompt:
            fields[FIRST, 0], fields[COUNT, 0] = 0, prompt

    @torch.inference_mode()
    def warm_up(self, queries: Iterable[int], drafts: Iterable[tuple[int, bool]], max_prompt: int) -> None:
        """Compiles what any step may need, and captures those of the given widths and drafts (of the model, and whether a lookup follows), of all
        batch sizes."""
        started = time.perf_counter()
        self._queries, self._drafts = sorted(set(queries)), captured_drafting(drafts)
        self._fitted.clear()
        shapes = shapes_to_capture(self._batch_sizes, self._queries, self._drafts, self._tree_width)
        if self._is_cascade:
            shapes += [dataclasses.replace(shape, has_prefixes=True) for shape in shapes if shape.batch >= MIN_SHARERS]
        with warm_up.compiling(self.device):
            self._load_kernels(max_prompt)
        self._load_kernels(max_prompt)
        if self._program.is_e4m3:
            widths = sorted({1, *self._chain_widths})
            check_codes(self.device, self._program.all_heads[0], self._program.page_size, self._program.dtype, {widths[0], widths[-1]})
        # Trees, and beginnings that are read once, are for attention that is launched.
        whole = [] if self._tree_width or self._is_cascade else sorted({self._queries[-1], WIDTHS[-1]})
        self.pieces = self._program.capture_pieces(self._max_prompt_rows, self._pool, self._batch_sizes[-1], whole)
        if whole:
            self.advancing = self._program.capture_advancing(self.pieces.counts, self._pool, self._batch_sizes[-1], whole[-1])
        for number, shape in enumerate(shapes, 1):
            self._capture(shape)
            if number % 64 == 0 or number == len(shapes):
                logger.info("captured %d of %d steps in %.1f s", number, len(shapes), time.perf_counter() - started)

    def _load_kernels(self, max_prompt: int) -> None:
        """Everything that a step of any shape launches: the first time inside `compiling`, then to have it at hand."""
        program, table = self._program, self._table
        widths, most = sorted({*WIDTHS, *self._chain_widths}), self._batch_sizes[-1]
        dtype, num_rows = program.dtype, most * max(widths[-1], self._tree_width)
        warm_up.load_step(self.device, (dtype, torch.float32) if dtype != torch.float32 else (dtype,), table.vocab_size, num_rows)
        for number, (heads, kinds) in enumerate(zip(program.all_heads, program.all_kinds)):
            is_e4m3 = program.is_e4m3 and number == 0  # the target's: drafters keep theirs in the model's dtype
            for has_prefixes in (False, True) if self._is_cascade else (False,):
                own = (heads, dtype, has_prefixes, kinds)
                warm_up.load_attention(self.device, widths, most, program.page_size, *own, is_e4m3=is_e4m3)
                if self._tree_width and number == 0:
                    warm_up.load_attention(self.device, self._tree_widths, most, program.page_size, *own, has_trees=True, is_e4m3=is_e4m3)
        for tree_heads, counts in program.drafting.tree_widths:
            kinds = program.all_kinds[-1]
            warm_up.load_attention(self.device, counts, most, program.page_size, tree_heads, dtype, kinds=kinds, has_trees=True)
        for block_heads, width, rows, is_whole in program.drafting.block_attention(own.num_model for own in self._drafts):
            own_kinds = program.drafting.block_kinds
            warm_up.load_attention(self.device, (width,), most * rows, program.page_size, block_heads, dtype, kinds=own_kinds, is_whole=is_whole)
        for count in warm_up.TOKEN_COUNTS:
            # Scores of few rows alone follow prompts here; of requests that decode, and of prompts that are scored, there may be as many as these.
            program.score_nothing(count)
            lens = (min(count, max_prompt),)
            # The drafter's way through them, too, which is launched kernel by kernel where it cannot be captured.
            self._run_once(StepShape(1, 1, prompt_lens=lens, prompt_seq_lens=lens, drafter_counts=lens, drafter_seq_lens=lens))
        if most_drafts := program.drafting.most_at_once:
            for batch in sorted({min(-(-count // most_drafts), most) for count in warm_up.TOKEN_COUNTS}):
                self._run_once(StepShape(batch, 1, num_model_drafts=most_drafts))
        # What torch loads when it is first asked for.
        self._run_once(StepShape(1, 2, options=Options.LOGPROBS | Options.FLOAT32 | DISTRIBUTIONS))

    def _run_once(self, shape: StepShape) -> None:
        self._clear_fields(shape.batch, shape.prompt_lens[0] if shape.num_prompts else 0)
        step = self._program.make_tensors(shape, self._fields(shape.batch))
        for phase in itertools.chain(*self._phases(shape)):
            self._run_eagerly(phase, step)
