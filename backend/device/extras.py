"""What a captured step does for requests that ask for more than the chosen token: log-probabilities, verification by whole distributions
(`rejection`, `topp`), and bad words (in bad_words.py).

It is all torch and kernels that never wait for the host. A request without any of it pays nothing: steps are captured for each set of extras.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch

from backend.config import SpeculativeConfig
from backend.core import MAX_LOGPROBS, Request, TokenLogprobs
from backend.sampling import is_deterministic
from backend.verify import accept_likely
from kernels import ops
from kernels.state import IS_REJECTION, IS_TOP_P, SlotTable


class Extras(enum.IntFlag):
    """What some request of a step asks for."""

    NONE = 0
    REJECTION = 1
    TOP_P = 2
    FILTERS = 4
    """Of those that `rejection` or `topp` verifies: top_k, top_p (which is no filter for `topp`) or min_p is on."""
    LOGPROBS = 8
    BAD_WORDS = 16


def extras_of(request: Request, policy: str) -> Extras:
    """policy: the server's accept_policy; where it is not `normal`, it decides instead of the requests' strategies."""
    params, strategy = request.params, request.speculation.verify_strategy
    extras = Extras.NONE if params.logprobs is None else Extras.LOGPROBS
    if request.bad_word_ids:
        extras |= Extras.BAD_WORDS
    if policy != "normal" or is_deterministic(request) or not request.speculation.num_speculative_tokens:
        return extras
    if strategy not in ("rejection", "topp"):
        return extras
    is_filtered = params.top_k > 0 or params.min_p > 0 or (strategy == "rejection" and params.top_p < 1)
    return extras | (Extras.REJECTION if strategy == "rejection" else Extras.TOP_P) | (Extras.FILTERS if is_filtered else Extras.NONE)


def padded_rows(cu_query_lens: torch.Tensor, width: int, num_rows: int) -> torch.Tensor:
    """[B, width]: the packed rows of each request; a short one repeats its last, and one without rows gets any."""
    last = (cu_query_lens.diff() - 1).clamp(min=0)
    places = torch.arange(width, dtype=torch.int32, device=cu_query_lens.device)
    return (cu_query_lens[:-1, None] + torch.minimum(places, last[:, None])).clamp(max=num_rows - 1).long()


Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of each request: emitted [B, K + 1], num_emitted [B] and num_accepted [B], as `ops.verify_drafts` gives them."""


class Distributions:
    """Verification by `rejection` and `topp`, and what the drafts of each slot were drawn from."""

    def __init__(self, table: SlotTable, config: SpeculativeConfig) -> None:
        self._table, self._config = table, config
        self._has_model = "mtp" in config.loaded_methods
        self._drawn_from: list[torch.Tensor] = []
        """By draft number: [S, V] float32."""
        self._num_drawn = torch.zeros(table.num_slots, dtype=torch.int32, device=table.device)
        """[S]: so many leading drafts were drawn; the others are certain."""

    def reserve(self, num_drafts: int) -> None:
        """Makes room for what so many drafts were drawn from. Captured steps hold its address: it is made once."""
        table = self._table
        while self._has_model and len(self._drawn_from) < num_drafts:
            self._drawn_from.append(torch.zeros(table.num_slots, table.vocab_size, device=table.device))

    @torch.inference_mode()
    def put(self, slot: int, probs: torch.Tensor | None) -> None:
        """What the leading drafts of a slot, made outside the step, were drawn from [k, V]."""
        count = 0 if probs is None else len(probs)
        self.reserve(count)
        for number in range(count):
            assert probs is not None
            self._drawn_from[number][slot] = probs[number]
        self._num_drawn[slot] = count

    def verify(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        cu_query_lens: torch.Tensor,
        num_verified: torch.Tensor,
        width: int,
        extras: Extras,
        outcome: Outcome,
    ) -> None:
        """Writes over the outcome of the rows that have drafts and one of these strategies.

        logits [R, V]: processed; num_verified [B]: drafts of each request; width: most of them in this step, and one.
        """
        table, slots = self._table, slots.long()
        num_drawn = self._num_drawn[slots]
        self._num_drawn.index_fill_(0, slots, 0)  # the drafts are used up, verified or not
        if width == 1:
            return
        places = torch.arange(width, device=logits.device)
        drafts, flags = table.drafts[slots, : width - 1], table.flags[slots]
        owners = slots[:, None].expand(-1, width).flatten()
        first, seeds = table.num_tokens[slots], table.seeds[owners]
        positions = (first[:, None] + places).flatten()
        rows = padded_rows(cu_query_lens, width, len(logits)).flatten()
        probs = self._distribution(logits[rows], owners, extras).view(len(slots), width, -1)
        if extras & Extras.REJECTION:
            drawn_from = self._read_drawn(slots, drafts, num_drawn)
            decided = ops.verify_rejection(probs, drafts, num_verified, drawn_from, table.seeds[slots], first)
            _put_over(outcome, flags & IS_REJECTION, num_verified, *decided)
        if extras & Extras.TOP_P:
            decided = accept_likely(probs, drafts, num_verified, table.top_p[owners], seeds, positions, self._config)
            _put_over(outcome, flags & IS_TOP_P, num_verified, *decided)

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, chosen: torch.Tensor, number: int, extras: Extras) -> torch.Tensor:
        """The model's draft `number` [B] int32 of logits [B, V]: as these strategies have it, and `chosen` for the other requests.

        `rejection`: drawn, with noise of its own, from a distribution that is kept for the next step. `topp`: the likeliest.
        """
        table, slots = self._table, slots.long()
        flags = table.flags[slots]
        if extras & Extras.TOP_P:
            chosen = torch.where(flags & IS_TOP_P != 0, logits.argmax(dim=-1).int(), chosen)
        if extras & Extras.REJECTION:
            probs = self._distribution(logits, slots, extras)
            drawn = ops.draw_tokens(probs, table.seeds[slots], table.num_tokens[slots] + number, ops.DRAFT_STREAM)
            self._drawn_from[number].index_copy_(0, slots, probs)
            chosen = torch.where(flags & IS_REJECTION != 0, drawn, chosen)
        return chosen

    def note_drawn(self, slots: torch.Tensor) -> None:
        """All drafts that the slots have now were drawn."""
        slots = slots.long()
        self._num_drawn.index_copy_(0, slots, self._table.num_drafts[slots])

    def _distribution(self, logits: torch.Tensor, slots: torch.Tensor, extras: Extras) -> torch.Tensor:
        """[R, V] float32 of rows with slots [R]; rows that no draw is made for get some distribution."""
        table = self._table
        flags = table.flags[slots]
        temperature = torch.where(flags & (IS_REJECTION | IS_TOP_P) != 0, table.temperature[slots], 1.0)
        top_p = torch.where(flags & IS_TOP_P != 0, 1.0, table.top_p[slots])
        return ops.probabilities(logits, temperature, table.top_k[slots], top_p, table.min_p[slots], bool(extras & Extras.FILTERS))

    def _read_drawn(self, slots: torch.Tensor, drafts: torch.Tensor, num_drawn: torch.Tensor) -> torch.Tensor | None:
        """[B, K, V] that drafts [B, K] were drawn from, the first num_drawn [B] of them; None: all are certain."""
        if not self._has_model:
            return None
        count = drafts.shape[1]
        drawn_from = torch.stack([plane[slots] for plane in self._drawn_from[:count]], dim=1)
        is_certain = torch.arange(count, device=drafts.device) >= num_drawn[:, None]
        drawn_from.masked_fill_(is_certain[:, :, None], 0.0)
        return drawn_from.scatter_add_(2, drafts.long()[:, :, None], is_certain.float()[:, :, None])


def _put_over(outcome: Outcome, flag: torch.Tensor, num_verified: torch.Tensor, token_ids: torch.Tensor, accepted: torch.Tensor) -> None:
    emitted, num_emitted, num_accepted = outcome
    own = (flag != 0) & (num_verified > 0)
    part = emitted[:, : token_ids.shape[1]]
    part.copy_(torch.where(own[:, None], token_ids.int(), part))
    num_accepted.copy_(torch.where(own, accepted.int(), num_accepted))
    num_emitted.copy_(torch.where(own, accepted.int() + 1, num_emitted))


# -- log-probabilities -----------------------------------------------------------------------------------------------------------


def score_width(vocab_size: int) -> int:
    """Words of an emitted token's row in `score_emitted`."""
    return 1 + 2 * min(MAX_LOGPROBS, vocab_size)


def score_emitted(scores: torch.Tensor, raw: torch.Tensor, emitted: torch.Tensor, cu_query_lens: torch.Tensor) -> None:
    """Fills scores [B, W, 1 + 2 N] int32: the bits of the log-probability of each emitted token [B, >= W], then the N likeliest ids, then the bits
    of theirs. raw [R, V]: logits that nothing has changed."""
    rows = padded_rows(cu_query_lens, scores.shape[1], len(raw))
    logprobs = raw.log_softmax(dim=-1, dtype=torch.float32)
    values, ids = logprobs.topk(scores.shape[2] // 2, dim=-1)
    own = emitted[:, : scores.shape[1]].clamp(0, raw.shape[1] - 1)  # past a request's end there is none
    chosen = logprobs.view(-1)[rows * raw.shape[1] + own]
    scores[:, :, 0] = chosen.view(torch.int32)
    scores[:, :, 1 : 1 + ids.shape[1]] = ids[rows]
    scores[:, :, 1 + ids.shape[1] :] = values.view(torch.int32)[rows]


def read_scores(scores: np.ndarray, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of one request: scores [>= len(token_ids), 1 + 2 N] as `score_emitted` filled them."""
    most = scores.shape[1] // 2
    values, ids = scores.view(np.float32), scores[:, 1 : 1 + num_top].tolist()
    own, tops = values[:, 0].tolist(), values[:, 1 + most : 1 + most + num_top].tolist()
    return [TokenLogprobs(token_id, own[i], list(zip(ids[i], tops[i], strict=True))) for i, token_id in enumerate(token_ids)]
