"""Shapes of draft trees: which drafts follow which, and which of the drafter's candidates each is. Integers only, no torch.

A path says a draft's rank among the candidates of each draft that leads to it, and its own: (0, 2) is the third candidate after the likeliest
first draft. As in Medusa's choices (Cai et al. 2024) and vLLM's token trees.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.errors import ConfigError
from backend.section import require

if TYPE_CHECKING:
    from backend.speculative_config import SpeculativeConfig

MAX_NODES, MAX_DEPTH = 63, 16
"""Drafts of a tree, and of one path: what the kernels are made for."""
MAX_RANK = 31
"""The last candidate that a path may name."""

DEFAULT_NODES, DEFAULT_DEPTH = 24, 4
TREE_KEYS = ("tree_nodes", "tree_top_k", "tree_paths")

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StaticTree:
    """One shape for every step. Drafts are numbered level by level, those of one level by their paths."""

    paths: tuple[Path, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Drafts of the longest path."""
        return len(self.paths[-1])

    @property
    def computed_by_depth(self) -> tuple[int, ...]:
        """Drafts that others follow, of each depth but the last."""
        followed = {path[:-1] for path in self.paths if len(path) > 1}
        return tuple(sum(len(path) == depth for path in followed) for depth in range(1, self.depth))

    @property
    def num_candidates(self) -> int:
        """That may follow a draft, at most."""
        return 1 + max(map(max, self.paths))

    @property
    def parents(self) -> tuple[int, ...]:
        """Of each draft the number of the one before it; -1: the newest token."""
        numbers = {path: number for number, path in enumerate(self.paths)}
        return tuple(numbers[path[:-1]] if len(path) > 1 else -1 for path in self.paths)

    def count_within(self, depth: int) -> int:
        """Drafts that are no deeper: the first ones."""
        return sum(len(path) <= depth for path in self.paths)


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """EAGLE-2 (Li et al. 2024): of each level the `top_k` drafts whose paths are likeliest go on, with `top_k` candidates each; of all of them
    the `num_nodes` likeliest are verified."""

    depth: int
    top_k: int
    num_nodes: int

    @property
    def num_candidates(self) -> int:
        return self.top_k

    def count_within(self, depth: int) -> int:
        """Drafts that are no deeper, where that is the whole depth or none."""
        return self.num_nodes if depth else 0

    @property
    def computed_by_depth(self) -> tuple[int, ...]:
        """Drafts that the drafter goes on from, of each depth but the last."""
        return (self.top_k,) * (self.depth - 1)


Tree = StaticTree | DynamicTree


def make_static(paths: Sequence[Sequence[int]], key: str) -> StaticTree:
    """The tree of such paths, in any order. Raises ConfigError, which names the path, for what is no tree or is too large."""

    def check(is_good: bool, path: Sequence[int], rule: str) -> None:
        if not is_good:
            raise ConfigError(f"{key}: the path {list(path)} {rule}")

    known: set[Path] = set()
    for path in paths:
        check(1 <= len(path) <= MAX_DEPTH, path, f"has {len(path)} drafts; it must have from 1 to {MAX_DEPTH}")
        bad = next((rank for rank in path if not 0 <= rank <= MAX_RANK), None)
        check(bad is None, path, f"has {bad}; candidates are numbered from 0 to {MAX_RANK}")
        check(tuple(path) not in known, path, "is there twice")
        known.add(tuple(path))
    for path in paths:
        check(len(path) == 1 or tuple(path[:-1]) in known, path, f"goes on from {list(path[:-1])}, which is no path of the tree: add it")
    if not 1 <= len(known) <= MAX_NODES:
        raise ConfigError(f"{key} has {len(known)} paths; it must have from 1 to {MAX_NODES}")
    return StaticTree(tuple(sorted(known, key=lambda path: (len(path), path))))


@functools.cache
def shape_static(num_nodes: int, depth: int, top_k: int) -> StaticTree:
    """The tree of so many drafts that are likeliest to be on the right path, were each candidate half as likely as the one before it."""
    found: list[Path] = []
    queue: list[tuple[int, int, Path]] = [(1, 1, (0,))]  # -log2 of the chance that the path is right, up to a constant; then its length
    while queue and len(found) < num_nodes:
        cost, _, path = heapq.heappop(queue)
        found.append(path)
        if len(path) < depth:
            heapq.heappush(queue, (cost + 1, len(path) + 1, (*path, 0)))
        if path[-1] + 1 < top_k:
            heapq.heappush(queue, (cost + 1, len(path), (*path[:-1], path[-1] + 1)))
    return StaticTree(tuple(sorted(found, key=lambda path: (len(path), path))))


def check_tree(config: SpeculativeConfig, method: str, *, can_make: bool) -> None:
    """Raises ConfigError for bad keys of trees, and for what they do not go with. method: of the step's drafter; can_make: trees."""
    for key, most in (("tree_nodes", MAX_NODES), ("tree_top_k", MAX_RANK + 1)):
        number = getattr(config, key)
        require(number is None or 1 <= number <= most, key, number, f"from 1 to {most}")
    depth = None if config.tree_paths is None else make_static(config.tree_paths, "tree_paths").depth
    given = next((key for key in TREE_KEYS if getattr(config, key) is not None), None)
    if given is None or not method:
        return
    require(can_make, given, getattr(config, given), f"left out with method {method}, which makes all drafts of a chain at once")
    count, steps = config.num_speculative_tokens if config.method == method else None, config.num_model_steps
    if depth is not None:
        for key in ("tree_nodes", "tree_top_k"):
            require(getattr(config, key) is None, key, getattr(config, key), "left out with tree_paths, which say it all")
        for key, value in (("num_speculative_tokens", count), ("num_model_steps", steps)):
            require(value in (None, depth), key, value, f"{depth} or left out with tree_paths, the longest of which has so many")
    else:
        require(config.tree_nodes is not None, "tree_top_k", config.tree_top_k, "left out without tree_nodes")
    for key, is_good, rule in (
        ("mtp_strategy", config.mtp_strategy == "default", "default"),
        ("parallel_drafting", not config.parallel_drafting, "left out"),
        ("placement", config.placement != "bls", "auto or in_process"),
        ("verify_strategy", config.verify_strategy != "topp", "target_match, greedy or rejection"),
        ("accept_policy", config.accept_policy != "simulated", "normal, accept_all or reject_all"),
        ("num_model_steps", None in (count, steps) or count == steps, f"num_speculative_tokens ({count}) or left out"),
    ):
        require(is_good, key, getattr(config, key), f"{rule} with {given}: drafts are trees")
