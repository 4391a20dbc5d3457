"""The rule: of drafts in the order of their worth, as many as bring most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

EVEN = 3e-4
"""Share of a speed within which another is as high, and more drafts are taken, of which more is learned: no times are known better."""


def best_count(gains: Sequence[float], base: float, seconds: Callable[[int], float]) -> tuple[int, float]:
    """B that maximises (base + the sum of the B first gains) / seconds(B), and that speed.

    base: tokens that come without any draft. All B are looked at, not the first after which it falls: costs may be a staircase. Nor some of them, so
    many apart: a drawn draft would be taken or left together with the one behind it, whose survival says which token was drawn.
    """
    best, total, most = 0, base, base / max(seconds(0), 1e-9)
    for number, gain in enumerate(gains, 1):
        total += gain
        speed = total / max(seconds(number), 1e-9)
        if speed > most * (1 - EVEN):
            best, most = number, max(most, speed)
    return best, most


def share(chains: Sequence[Sequence[float]], base: float, seconds: Callable[[int], float]) -> tuple[list[int], float]:
    """How many leading drafts of each request are worth it together, and the speed; chains: of each request, the survival of each draft.

    Survivals never rise along a chain, so the best drafts of all requests are leading ones of each. Ties go by place, then by request.
    """
    slots = sorted((-survival, place, number) for number, chain in enumerate(chains) for place, survival in enumerate(chain))
    count, speed = best_count([-slot[0] for slot in slots], base, seconds)
    counts = [0] * len(chains)
    for _, _, number in slots[:count]:
        counts[number] += 1
    return counts, speed


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
