"""Which shapes of steps are captured, and which of them does for a step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from backend.step.options import Options
from backend.step.tensors import StepShape

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 17)
"""Tokens of a decoding row that kernels are compiled for in advance, whatever the server's own method: an eager step takes the next wider."""
DISTRIBUTIONS = Options.REJECTION | Options.TOP_P | Options.FILTERS
"""What of the options the draft phase depends on."""
UNCAPTURED = Options.BAD_WORDS
"""Their memory may move."""

Phase = tuple[str, int, int, tuple[object, ...]]
"""Name, batch, queries, and what else the phase depends on."""


def batch_sizes(max_batch_size: int) -> list[int]:
    """Rows that steps are captured for: few enough to capture, and near enough to one another that few rows are idle."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, *range(40, 129, 8), *range(144, max_batch_size, 16)]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


class Drafting(NamedTuple):
    """What a step's graph of the phase draft makes: a step that wants less may take it, since each row says how much it wants."""

    num_model: int
    has_lookup: bool
    has_lookup_alone: bool
    is_reported: bool

    def covers(self, shape: StepShape) -> bool:
        wanted = (shape.num_model_drafts, shape.has_lookup, shape.has_lookup_alone)
        return all(own >= what for own, what in zip(self, wanted))


def captured_drafting(drafts: Iterable[tuple[int, bool]]) -> list[Drafting]:
    """As plans say it, the least first. Where there is a model drafter the host wants to see how far it came, and a lookup may take its place; where
    there is a lookup beside it, that drafts without it too: a step for which the model is not worth its time must not compute it."""
    own = set(drafts)
    has_model = any(count for count, _ in own)
    own |= {(0, True)} if has_model and any(has for _, has in own) else set()
    return sorted(Drafting(count, has, has and count > 0, has_model and (count > 0 or has)) for count, has in own)


def fit_drafting(shape: StepShape, captured: Iterable[Drafting], **others: Any) -> StepShape:
    """With the drafting of the least graph that does for it. others: fields that change besides: writing a shape anew takes time in every step."""
    drafts = shape.num_model_drafts or shape.has_lookup
    if drafts and (found := next((own for own in captured if own.covers(shape)), None)) is not None:
        others |= {"num_model_drafts": found.num_model, "has_lookup": found.has_lookup, "has_lookup_alone": found.has_lookup_alone}
        others["reports_drafts"] = shape.reports_drafts or found.is_reported
    return dataclasses.replace(shape, **others) if others else shape


def shapes_to_capture(batches: Sequence[int], widths: Iterable[int], drafts: Sequence[Drafting], tree_width: int = 0) -> list[StepShape]:
    """Of steps without prompts, the largest batch first."""
    kinds = list(itertools.product(widths, drafts or [Drafting(0, False, False, False)]))
    return [
        StepShape(
            batch,
            width,
            num_model_drafts=own.num_model,
            has_lookup=own.has_lookup,
            has_lookup_alone=own.has_lookup_alone,
            has_trees=width == tree_width,
            reports_drafts=own.is_reported,
        )
        for batch in reversed(batches)
        for width, own in kinds
    ]


def phases_of(shape: StepShape, *, has_model: bool) -> list[list[Phase]]:
    """The graphs of a step's forward, of its verdict, and of its drafting, if it drafts. has_model: the step's model drafter has something to
    compute."""
    batch, queries, trees = shape.batch, shape.num_queries, shape.has_trees
    phases: list[list[Phase]] = [
        [("forward", batch, queries, (shape.has_prefixes, trees))],
        [("decide", batch, queries, (shape.options, trees))],
    ]
    drafting: list[Phase] = [("advance", batch, queries, (trees,))] if has_model else []
    if shape.num_model_drafts or shape.has_lookup or shape.reports_drafts:
        what = (shape.num_model_drafts, shape.has_lookup, shape.has_lookup_alone, shape.reports_drafts, shape.options & DISTRIBUTIONS, trees)
        drafting.append(("draft", batch, 0, what))  # how many tokens each request had is of no account any more
    return [*phases, drafting] if drafting else phases


def key_of(shape: StepShape) -> tuple[int, int, bool]:
    """What the tensors are of that the phases share."""
    return shape.batch, shape.num_queries, shape.has_trees
