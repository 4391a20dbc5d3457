"""Which drafts lead to the rows of a request: row 0 is its newest token, row i + 1 its draft i. Of a chain, all before it; of a tree, its ancestors.

In NumPy. A tree is an array of parents: the number of the draft that each draft follows, smaller than its own; -1: the newest token.
"""

from __future__ import annotations

import numpy as np

from kernels.request_state import RequestState


def count_depths(table: RequestState, indices: np.ndarray, places: np.ndarray) -> np.ndarray:
    """How many drafts lead to rows [R] with request indices [R], itself among them: how far it lies past the newest token."""
    return climb(table, indices, places)[0] if table.has_trees else places


def climb(table: RequestState, indices: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same, and the rows of its request that each row sees, itself among them: a bit each, the lowest for row 0 -> int64 [R]."""
    parents = table.arrays.parents
    depths, seen = np.zeros(len(places), np.int64), np.ones(len(places), np.int64)
    nodes = places.astype(np.int64) - 1
    while (is_draft := nodes >= 0).any():
        depths += is_draft
        seen |= np.where(is_draft, np.int64(1) << (nodes + 1), 0)
        nodes = np.where(is_draft, parents[indices, np.maximum(nodes, 0)], np.int64(-1)).astype(np.int64)  # int32 has no 63rd bit
    return depths, seen


def find_paths(table: RequestState, index: int, num_rows: int) -> np.ndarray:
    """[R, R - 1] bool: which drafts lead to each of a request's first R rows."""
    places = np.arange(num_rows)
    if not table.has_trees:
        return places[:, None] > places[None, : num_rows - 1]
    seen = climb(table, np.full(num_rows, index), places)[1]
    return seen[:, None] >> places[None, 1:] & 1 != 0
