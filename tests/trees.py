"""Trees of drafts that tests are made of."""

from __future__ import annotations

import random

from kernels import structs


def random_parents(rng: random.Random, count: int) -> list[int]:
    """Of a tree whose paths are no longer than is allowed."""
    depths: list[int] = []
    parents: list[int] = []
    for node in range(count):
        fitting = [-1, *(i for i in range(node) if depths[i] < structs.MAX_DEPTH)]
        parents.append(rng.choice(fitting[-6:] if rng.random() < 0.7 else fitting))
        depths.append(1 + (depths[parents[-1]] if parents[-1] >= 0 else 0))
    return parents


def path_to(parents: list[int], row: int) -> list[int]:
    """The drafts that lead to a row, the first one first."""
    found, node = [], row - 1
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]
