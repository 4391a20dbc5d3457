"""Grammars in a step's plan: which drafts are verified, and the tokens that each position may choose."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from backend.grammar.matcher import Matcher
from backend.grammar.thinking import FORM, MAY_THINK

SOURCE = "grammar"
"""As in `token_sources`."""


def fit_drafts(
    matcher: Matcher, token_ids: Sequence[int], sources: Sequence[str], num_drawn: int, limit: int, wants_forced: bool = True
) -> tuple[list[int], list[str], int]:
    """Drafts without what the grammar forbids, and, if wanted, with what it forces after them, at most `limit` -> (token ids, sources, drawn ones).

    num_drawn: leading drafts that were drawn from a distribution, for `rejection`. Of these the first forbidden one stays: it is rejected, and
    what takes its place is drawn from what is left of the target's distribution. Without it that position would be drawn from all of it, and
    whether it is there depends on the draw.
    """
    token_ids = token_ids[:limit]
    num_drawn = min(num_drawn, len(token_ids))
    count, forced = matcher.look_ahead(token_ids, limit, wants_forced)
    if count < num_drawn:
        return list(token_ids[: count + 1]), list(sources[: count + 1]), count + 1
    return [*token_ids[:count], *forced], [*sources[:count], *[SOURCE] * len(forced)], num_drawn


def fill_masks(asked: Sequence[tuple[Matcher, Sequence[int]]], rooms: Sequence[int] | None = None) -> tuple[np.ndarray, list[int]]:
    """Masks [M, W] int32 of requests and their drafts, and where each request's begin: one for each draft, and one after the last.

    rooms: masks of each request, if there are to be more; those that are left allow all.
    Bit i % 32 of word i // 32: token i is allowed. What follows a draft that the grammar forbids, or the text's end, is all allowed: nobody
    chooses there.
    """
    vocabulary = asked[0][0].vocabulary
    starts, single, several, begin = [], [], [], 0
    thought: list[tuple[int, int]] = []
    rooms = rooms or [1 + len(drafts) for _, drafts in asked]
    for (matcher, drafts), room in zip(asked, rooms, strict=True):
        known = next((drafts[:place] for place, token_id in enumerate(drafts) if token_id in vocabulary.end_ids), drafts)
        starts.append(begin)
        if matcher.is_complete or matcher.inner.is_error():  # its request ends with what is emitted here, or has ended
            pass
        else:
            states, first = ([], 0) if matcher.state == FORM else matcher.trace(known)
            thought += [(begin + place, state) for place, state in enumerate(states)]
            if matcher.state == MAY_THINK and first != 0:
                single.append((matcher.inner, begin))
            if first is not None and len(known) > first:
                # Of a copy: the drafts are taken back, of which tokens that the grammar names by their ids are too long.
                several.append((matcher.inner.deep_copy(), begin + first, list(known[first:])))
            elif first is not None:
                single.append((matcher.inner, begin + first))
        begin += room
    masks = np.full((begin, vocabulary.num_own_words), -1, dtype=np.int32)
    place = (masks.ctypes.data, 4 * vocabulary.num_own_words, begin)
    if single:
        vocabulary.executor.unsafe_compute_mask_ptr(single, *place)
    if several:
        vocabulary.executor.unsafe_compute_mask_ptr_with_draft_token(several, *place)
    for row in np.nonzero(~(masks & vocabulary.others).any(axis=1))[0] if vocabulary.marks else ():
        number = bisect.bisect(starts, row) - 1
        matcher, drafts = asked[number]
        _split_marks(masks[row], matcher.after(drafts[: row - starts[number]]))
    for row, state in thought:
        own = vocabulary.thoughts.mask(state)
        masks[row] = masks[row] | own if state == MAY_THINK else own
    for (matcher, drafts), start in zip(asked, starts):
        if matcher.ignores_end:
            _forbid(masks[start : start + 1 + len(drafts)], sorted(vocabulary.end_ids))
    return np.ascontiguousarray(masks[:, : vocabulary.num_words]), starts


def _split_marks(mask: np.ndarray, matcher: Matcher | None) -> None:
    """A mask [W] of nothing but marks at the matcher's place: of a text that has to come in pieces, the first piece."""
    token_ids = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()
    if matcher is not None and token_ids and (piece := matcher.find_piece(token_ids)) is not None:
        mask[:] = 0
        mask[piece // 32] = np.uint32(1 << piece % 32).view(np.int32)


def fill_draft_masks(asked: Sequence[tuple[Matcher, Sequence[int]]]) -> tuple[np.ndarray, list[int]]:
    """Masks [M, W] as above of what may be drafted after tokens that are not taken in yet; -1 in the place of a request's mask: anything."""
    found = [(place, own) for place, (matcher, token_ids) in enumerate(asked) if (own := matcher.after(token_ids)) is not None]
    starts = [-1] * len(asked)
    if not found:
        return np.empty((0, 0), dtype=np.int32), starts
    masks, rows = fill_masks([(own, ()) for _, own in found])
    for (place, _), row in zip(found, rows):
        starts[place] = row
    return masks, starts


def _forbid(masks: np.ndarray, token_ids: Sequence[int]) -> None:
    """In rows that allow anything else."""
    for row in masks:
        without = row.copy()
        for token_id in token_ids:
            without[token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).view(np.int32))
        if without.any():
            row[:] = without
