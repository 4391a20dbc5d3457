"""What a step depends on, and its tensors, which the phases share."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from backend.step.options import Options
from kernels import ops, step_rows
from kernels.structs import DRAFTER_COUNT, INDEX, StepSizes

if TYPE_CHECKING:
    from backend.step.pieces import Pieces

REPORT_HEAD = 3
"""Before the drafts of a row of a report: tokens that the model drafter has computed, score of the lookup, number of drafts."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the phases depend on beside their tensors' contents."""

    batch: int
    num_queries: int
    """Most tokens of a decoding row: its drafts and one more."""
    _: KW_ONLY
    num_model_drafts: int = 0
    least_standing: float = 0.0
    """See `StepPlan.least_standing`, in requests; captured shapes have 0."""
    trust: float = 1.0
    """See `StepPlan.trust`; captured shapes have 1."""
    has_lookup: bool = False
    has_lookup_alone: bool = False
    has_prefixes: bool = False
    has_trees: bool = False
    reports_drafts: bool = False
    options: Options = Options.NONE
    prompt_lens: tuple[int, ...] = ()
    """[P] tokens of each prompt row."""
    prompt_seq_lens: tuple[int, ...] = ()
    drafter_counts: tuple[int, ...] = ()
    drafter_seq_lens: tuple[int, ...] = ()
    scored: tuple[tuple[int, int], ...] = ()
    num_rows: int = 0
    """Of a step with prompts: rows that its forward is captured for, the last ones nobody's; 0: it has its own, and is not captured."""
    num_drafter_rows: int = 0
    """The same of the model drafter's rows."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_lens)

    @property
    def asks_model(self) -> bool:
        """Whether the step's model drafter, if there is one, has anything to compute."""
        return self.num_model_drafts > 0 or any(self.drafter_counts)

    def without_prompts(self) -> StepShape:
        """What is the same after the forward: of as many requests that all decode."""
        none: Any = dict.fromkeys(("prompt_lens", "prompt_seq_lens", "drafter_counts", "drafter_seq_lens", "scored"), ())
        return dataclasses.replace(self, num_rows=0, num_drafter_rows=0, has_prefixes=False, **none)


@dataclass(slots=True)
class Advanced:
    """What the model drafter's drafts go on from, of B requests."""

    states: list[torch.Tensor]
    """As `StepDrafter.advance` made them, [B, ...] each."""
    newest: torch.Tensor | None
    """[B] int64: the newest known tokens; None: nothing asks for them."""

    def take(self, other: Advanced) -> None:
        """The other's, which may be of more requests, in memory that graphs hold the addresses of."""
        for own, what in zip(self.states, other.states, strict=True):
            own.copy_(what[: len(own)])
        if self.newest is not None and other.newest is not None:
            self.newest.copy_(other.newest[: len(self.newest)])

    def first(self, count: int) -> Advanced:
        """Of the first requests."""
        return Advanced([states[:count] for states in self.states], None if self.newest is None else self.newest[:count])

    def clone(self) -> Advanced:
        return Advanced([states.clone() for states in self.states], None if self.newest is None else self.newest.clone())


@dataclass(slots=True)
class StepTensors:
    """One step's tensors. On a GPU those that the host writes or reads have addresses that graphs hold."""

    shape: StepShape
    sizes: StepSizes
    fields: torch.Tensor
    """[NUM_FIELDS, B] int32"""
    results: torch.Tensor
    """[B, RESULT_HEAD + K + 1] int32: see `ops.pack_results`."""
    pieces: Pieces | None = None
    """What has the forward of a step with prompts, where that is captured."""
    rows: step_rows.StepRows | None = None
    """None on CPU before the layout is made, which is exact there."""
    attention: ops.StepAttention | ops.SplitAttention | None = None
    wanted_attention: ops.StepAttention | None = None
    """Of the rows that logits are wanted of alone, for the last layer of a step with prompts."""
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[T, hidden]: the target's states; where only those are wanted that logits are made of: [R, hidden]."""
    scores: torch.Tensor | None = None
    """[B, W, 1 + 2 N] int32: see `backend.step.scores`."""
    prompt_scores: dict[int, torch.Tensor] = field(default_factory=dict)
    """By row."""
    drafter_rows: step_rows.DrafterRows | None = None
    drafter_attention: ops.StepAttention | None = None
    advanced: Advanced | None = None
    """Of one graph for another: in memory that all steps of a batch size share."""
    draft_packed: torch.Tensor | None = None
    draft_lens: torch.Tensor | None = None
    draft_attention: ops.StepAttention | None = None
    report: torch.Tensor | None = None
    """[B, REPORT_HEAD + K] int32: what the step drafted for the next one; of a request table with trees [B, REPORT_HEAD + 2 K], parents last."""
    draft_ends: list[float] = field(default_factory=list)
    """When each of the model drafter's drafts was made (`time.perf_counter`), on CPU."""
    chances: torch.Tensor | None = None
    """[S, K] float32 by request index: the greatest probability that the model drafter gave at each draft, of a tree the draft's own; on CPU."""

    @property
    def indices(self) -> torch.Tensor:
        """[B] int32: request indices."""
        return self.fields[INDEX]


def select_drafting(step: StepTensors, is_alone: torch.Tensor | None) -> StepTensors:
    """The step of those requests alone that the model drafter computes; on CPU."""
    is_asked = step.fields[DRAFTER_COUNT] != 0
    if is_alone is not None:
        is_asked &= is_alone == 0
    if not step.shape.num_prompts and bool(is_asked.all()):
        count = step.shape.batch
        return dataclasses.replace(step, draft_packed=torch.zeros(3, count, dtype=torch.long), draft_lens=torch.zeros(count, dtype=torch.int32))
    own = is_asked.nonzero()[:, 0]
    count, rows = len(own), step.rows
    assert rows is not None
    prompts = [row for row in own.tolist() if row < step.shape.num_prompts]
    counts, seq_lens = (tuple(values[row] for row in prompts) for values in (step.shape.drafter_counts, step.shape.drafter_seq_lens))
    return dataclasses.replace(
        step,
        shape=dataclasses.replace(step.shape, batch=count, drafter_counts=counts, drafter_seq_lens=seq_lens),
        sizes=step.sizes._replace(batch=count, num_prompts=len(prompts)),
        fields=step.fields[:, own].contiguous(),
        rows=dataclasses.replace(rows, seq_lens=rows.seq_lens[own]),
        draft_packed=torch.zeros(3, count, dtype=torch.long),
        draft_lens=torch.zeros(count, dtype=torch.int32),
    )
