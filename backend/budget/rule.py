"""The rule: of drafts in the order of their worth, as many as bring most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

EVEN = 3e-4
"""Share of a speed within which another is as high, and more drafts are taken, of which more is learned: no times are known better."""


def best_count(gains: np.ndarray, base: float, seconds: Callable[[np.ndarray], np.ndarray]) -> tuple[int, float]:
    """B that maximises (base + the sum of the B first gains) / seconds(B), and that speed; seconds: of each of several numbers.

    base: tokens that come without any draft. All B are looked at, not the first after which it falls: costs may be a staircase. Nor some of them, so
    many apart: a drawn draft would be taken or left together with the one behind it, whose survival says which token was drawn.
    """
    tokens = np.cumsum(np.concatenate(([base], gains)))
    speeds = tokens / np.maximum(seconds(np.arange(len(tokens))), 1e-9)
    most = np.maximum.accumulate(speeds)  # so far
    taken = np.flatnonzero(speeds[1:] > most[:-1] * (1 - EVEN))
    return (int(taken[-1]) + 1 if len(taken) else 0), float(most[-1])


def share(chains: Sequence[Sequence[float]], base: float, seconds: Callable[[np.ndarray], np.ndarray]) -> tuple[list[int], float]:
    """How many leading drafts of each request are worth it together, and the speed; chains: of each request, the survival of each draft.

    Survivals never rise along a chain, so the best drafts of all requests are leading ones of each. Ties go by place, then by request.
    """
    lengths = [len(chain) for chain in chains]
    survivals = np.full((max(lengths), len(chains)), -1.0)
    for number, chain in enumerate(chains):
        survivals[: lengths[number], number] = chain
    order = np.argsort(-survivals, axis=None, kind="stable")[: sum(lengths)]
    count, speed = best_count(survivals.reshape(-1)[order], base, seconds)
    return np.bincount(order[:count] % len(chains), minlength=len(chains)).tolist(), speed


def level(survivals: Sequence[float]) -> list[float]:
    """Of a tree's drafts, whose survivals may rise from one to the next, as `share` takes them: means that never do.

    The slopes of the least concave curve above their sums (pool adjacent violators): what so many leading ones bring at best.
    """
    pools: list[tuple[float, int]] = []  # sums, and of how many
    for survival in survivals:
        total, count = survival, 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            before, number = pools.pop()
            total, count = total + before, count + number
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
