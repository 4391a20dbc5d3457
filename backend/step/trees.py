"""Draft trees in the step: which drafts there are is decided here, level by level; what may follow each is the drafter's to say.

Shapes depend on the step's alone, and nothing comes to the host, so that it can be captured.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from backend.drafters.protocol import DrafterRows, StepDrafter
from backend.speculative_config import SpeculativeConfig
from backend.step.tree_rows import TreeRows
from backend.trees import DynamicTree, StaticTree
from kernels import ops
from kernels.request_state import RequestState
from kernels.structs import INDEX, MODEL_LIMIT, StepSizes


@dataclass(slots=True)
class _Grown:
    """Drafts of B requests, and those of them that the drafter goes on from."""

    token_ids: torch.Tensor
    """[B, G] int32; -1: none."""
    parents: torch.Tensor
    """[B, G] int64 numbers of drafts; -1: the newest token."""
    scores: torch.Tensor
    """[B, G]: log-probability of the path to each, by the drafter."""

    def add(self, other: _Grown) -> None:
        self.token_ids, self.parents, self.scores = (
            torch.cat(pair, dim=1) for pair in ((self.token_ids, other.token_ids), (self.parents, other.parents), (self.scores, other.scores))
        )


class TreeForward:
    """Grows the trees of one worker's requests."""

    def __init__(
        self, config: SpeculativeConfig, drafter: StepDrafter, table: RequestState, page_table: torch.Tensor, max_model_len: int, dtype: torch.dtype
    ) -> None:
        tree, device = config.tree, table.device
        assert tree is not None
        self._drafter, self._table, self._is_greedy, self._tree = drafter, table, config.draft_sampling == "greedy", tree
        computed = tree.computed_by_depth if drafter.attends_drafts else ()
        self._rows = TreeRows(drafter, table, page_table, sum(computed), max_model_len, dtype) if drafter.attends_drafts else None
        self.row_counts = tuple(itertools.accumulate(computed, initial=1))[1:]
        """Of each forward of the drafter that goes on from drafts."""
        self.depth = tree.depth
        self._levels = [_Level(tree, depth, device) for depth in range(1, tree.depth + 1)] if isinstance(tree, StaticTree) else []

    def draft(
        self,
        fields: torch.Tensor,
        newest: torch.Tensor,
        states: list[torch.Tensor],
        num_drafts: int,
        sizes: StepSizes,
        chances: torch.Tensor | None,
    ) -> None:
        """Puts trees of num_drafts drafts at most into the request table.

        fields [NUM_FIELDS, B]; newest [B]: token ids; states: what `StepDrafter.advance` made of them; chances [S, K] float32: where it is to be
        noted how likely each draft is after the one before it, if anywhere.
        """
        tree, indices = self._tree, fields[INDEX]
        is_fitting = self._rows.begin(fields, newest, states, sizes) if self._rows is not None else None
        grown, level = None, self._grow(states, indices, None, None, 0)
        for depth in range(1, self.depth + 1):
            first = 0 if grown is None else grown.token_ids.shape[1]
            if grown is None:
                grown = level
            else:
                grown.add(level)
            if depth == self.depth or (isinstance(tree, StaticTree) and grown.token_ids.shape[1] >= num_drafts):
                break
            places = self._choose(level, depth)
            token_ids = level.token_ids.gather(1, places).clamp(min=0).long()
            states = self._follow(states, token_ids, level.parents.gather(1, places), places + first, depth)
            level = self._grow(states, indices, places + first, level.scores.gather(1, places), depth)
        assert grown is not None
        if isinstance(tree, DynamicTree):
            grown = _keep_best(grown, tree.num_nodes)
        else:
            # A request has the first drafts of the shape: none that is deeper than it asked for comes in the place of one that there is not.
            numbers = torch.arange(grown.token_ids.shape[1], device=fields.device)
            grown.token_ids = grown.token_ids.masked_fill(numbers >= fields[MODEL_LIMIT][:, None], -1)
            if chances is not None:
                grown = _put_missing_last(grown, self.depth)
        if chances is not None:
            chances[indices.long()] = 0
            chances[indices.long(), : grown.token_ids.shape[1]] = _chances_of(grown)[:, : chances.shape[1]]
        token_ids = grown.token_ids[:, :num_drafts]
        if is_fitting is not None:
            token_ids = token_ids.masked_fill(~is_fitting[:, None], -1)
        ops.append_tree(self._table, fields, token_ids.contiguous(), grown.parents[:, :num_drafts].int().contiguous())

    def _grow(
        self, states: list[torch.Tensor], indices: torch.Tensor, parents: torch.Tensor | None, scores: torch.Tensor | None, depth: int
    ) -> _Grown:
        """The drafts after those that go on [B, m], with their scores [B, m]; None: after the newest tokens."""
        batch, tree = len(indices), self._tree
        count = self._levels[depth].num_candidates if isinstance(tree, StaticTree) else tree.top_k
        token_ids, own = (found.view(batch, -1, count) for found in self._find(states, indices, depth, count))
        if parents is None or scores is None:
            parents, scores = torch.full((batch, 1), -1, device=indices.device), own.new_zeros(batch, 1)
        parents, own = parents[:, :, None].expand(-1, -1, count), own.clamp(max=0) + scores[:, :, None]
        if isinstance(tree, StaticTree):
            level = self._levels[depth]
            return _Grown(*(values[:, level.parents, level.ranks] for values in (token_ids, parents, own)))
        # What is no number is sorted before all others: before the draft that it follows, too, which has to come first.
        own = own.masked_fill(token_ids < 0, float("-inf")).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        return _Grown(token_ids.flatten(1), parents.flatten(1), own.flatten(1))

    def _find(self, states: list[torch.Tensor], indices: torch.Tensor, depth: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, count] candidates, the first ones before others, -1: there are no more; and their log-probabilities."""
        if self._drafter.memory is not None:
            found = self._drafter.memory.recall(states, count)
            ranks = torch.arange(1, count + 1, dtype=torch.float32, device=found.device)
            return found, (-math.log(2) * ranks).expand(found.shape)  # as `shape_static` takes them to be
        logits = self._drafter.logits(states, depth)
        owners = indices.repeat_interleave(len(logits) // len(indices))
        return ops.choose_candidates(logits, self._table, owners, count, depth, is_likeliest=self._is_greedy)

    def _choose(self, level: _Grown, depth: int) -> torch.Tensor:
        """[B, m]: the drafts of a level that go on."""
        if isinstance(self._tree, StaticTree):
            return self._levels[depth - 1].followed.expand(len(level.token_ids), -1)
        return level.scores.topk(self._tree.top_k, dim=1).indices

    def _follow(
        self, states: list[torch.Tensor], token_ids: torch.Tensor, parents: torch.Tensor, numbers: torch.Tensor, depth: int
    ) -> list[torch.Tensor]:
        """The states that drafts after drafts [B, m] are chosen from. parents, numbers [B, m]: of the drafts."""
        if self._rows is not None:
            return self._rows.extend(token_ids, parents, numbers, depth)
        batch, level = len(token_ids), self._levels[depth - 1]
        before = level.parents[level.followed]
        own = [state.view(batch, -1, state.shape[-1])[:, before].flatten(0, 1) for state in states]
        newest = token_ids.flatten()
        nowhere = torch.zeros_like(newest)
        return self._drafter.extend(DrafterRows(newest, nowhere, nowhere, nowhere, nowhere, None), own, depth)


class _Level:
    """Drafts of one depth of a static tree, which follow those that go on of the depth before."""

    def __init__(self, tree: StaticTree, depth: int, device: torch.device) -> None:
        own = [path for path in tree.paths if len(path) == depth]
        going_on = sorted({path[:-1] for path in own})
        followed = {path[:-1] for path in tree.paths if len(path) == depth + 1}

        def index(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        self.parents = index([going_on.index(path[:-1]) for path in own])
        """[n]: of each draft, the place of the one before among those that go on."""
        self.ranks = index([path[-1] for path in own])
        """[n]: which candidate it is."""
        self.num_candidates = 1 + max(path[-1] for path in own)
        self.followed = index([place for place, path in enumerate(own) if path in followed])
        """[m]: places of those of its drafts that go on."""


def _keep_best(grown: _Grown, count: int) -> _Grown:
    """The drafts whose paths are likeliest, the best first. A path is no likelier than what it begins with, which comes first of equal ones."""
    order = grown.scores.sort(dim=1, descending=True, stable=True).indices
    return _reorder(grown, order[:, :count])


def _put_missing_last(grown: _Grown, depth: int) -> _Grown:
    """Drafts that there are not, and those that would follow them, after all others: so they lie in the request table."""
    is_there, before = grown.token_ids >= 0, grown.parents.clamp(min=0)
    for _ in range(depth - 1):
        is_there &= (grown.parents < 0) | is_there.gather(1, before)
    return _reorder(grown, (~is_there).int().sort(dim=1, stable=True).indices)


def _reorder(grown: _Grown, order: torch.Tensor) -> _Grown:
    """order [B, n]: numbers of the drafts that are kept, parents before those that follow them."""
    token_ids, parents, scores = (values.gather(1, order) for values in (grown.token_ids, grown.parents, grown.scores))
    places = torch.zeros_like(grown.parents).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand(order.shape))
    return _Grown(token_ids, torch.where(parents < 0, -1, places.gather(1, parents.clamp(min=0))), scores)


def _chances_of(grown: _Grown) -> torch.Tensor:
    """[B, G]: of each draft after the one before it, above 0; 0: there is none."""
    before = torch.where(grown.parents < 0, 0.0, grown.scores.gather(1, grown.parents.clamp(min=0)))
    chances = (grown.scores - before).exp().nan_to_num(0.0).clamp(min=1e-6, max=1.0)
    return chances.masked_fill(grown.token_ids < 0, 0.0)
