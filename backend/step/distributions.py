"""Verification by whole distributions (`rejection`, `topp`), and what the drafts in the request table were drawn from."""

from __future__ import annotations

import torch

from backend.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from backend.step.options import Options
from backend.step.scores import padded_rows
from kernels import ops
from kernels.request_state import RequestState
from kernels.structs import IS_REJECTION, IS_TOP_P

MAX_ROWS = 256
"""Distributions that are held at a time: each is some numbers for every token of the vocabulary."""

Verified = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of each request: emitted [B, K + 1], num_emitted [B] and num_accepted [B], as `ops.verify_drafts` gives them."""


def count_held(config: SpeculativeConfig) -> int:
    """Leading drafts of a request whose distributions are kept: as many as its model drafts where the request chooses nothing. Trees have none."""
    return (config.num_model_steps or 1) if config.model_method and config.tree is None else 0


class Distributions:
    """What some drafts were drawn from: [H][S, V] float32 by draft number, kept on the device. All are made at the start: graphs hold the addresses,
    and memory that is counted then cannot be lacking later. Drafts behind them count as certain ones, which keeps the target's distribution."""

    def __init__(self, table: RequestState, config: SpeculativeConfig) -> None:
        self._table, self._config = table, config
        self._drawn_from = [torch.zeros(table.size, table.vocab_size, device=table.device) for _ in range(count_held(config))]
        self.num_drawn = torch.zeros(table.size, dtype=torch.int32, device=table.device)
        """[S]: so many leading drafts were drawn, of which those behind the kept ones count as certain, like the others."""

    @torch.inference_mode()
    def put(self, index: int, probs: torch.Tensor) -> None:
        """What the leading drafts of a request, made outside the step, were drawn from [k, V]."""
        for own, row in zip(self._drawn_from, probs):
            own[index] = row.to(self._table.device)
        self.num_drawn[index] = len(probs)

    def get(self, index: int) -> torch.Tensor:
        """What the leading drafts that a request has now were drawn from [k, V], on the host; of those that it is kept of."""
        kept = [own[index] for own in self._drawn_from[: int(self.num_drawn[index])]]
        return torch.stack(kept).cpu() if kept else torch.empty(0, self._table.vocab_size)

    def verify(
        self,
        logits: torch.Tensor,
        indices: torch.Tensor,
        cu_logit_rows: torch.Tensor,
        num_verified: torch.Tensor,
        width: int,
        options: Options,
        verified: Verified,
    ) -> None:
        """Writes over the verdict of the requests with one of these strategies: of `rejection` where there are drafts, else the target's
        choice is a draw from the same distribution. `topp` has its candidates with and without drafts: what may come must not depend on
        how many drafts a step has room for.

        logits [R, V]: processed; indices [B]; num_verified [B]: drafts of each request; width: most of them in this step, and one.
        """
        width = min(width, 1 + MAX_SPECULATIVE_TOKENS)  # of chains: trees are verified otherwise
        step = max(1, MAX_ROWS // width)
        for begin in range(0, len(indices), step):
            part = slice(begin, begin + step)
            parts = tuple(tensor[part] for tensor in verified)
            cu = cu_logit_rows[begin : begin + step + 1]
            self._verify(logits, indices[part].long(), cu, num_verified[part], width, options, (parts[0], parts[1], parts[2]))

    def _verify(
        self,
        logits: torch.Tensor,
        indices: torch.Tensor,
        cu_logit_rows: torch.Tensor,
        num_verified: torch.Tensor,
        width: int,
        options: Options,
        verified: Verified,
    ) -> None:
        table = self._table
        num_drawn = self.num_drawn[indices]
        self.num_drawn.index_fill_(0, indices, 0)  # the drafts are used up, verified or not
        if not len(logits) or (width == 1 and not options & Options.TOP_P):
            return
        places = torch.arange(width, device=logits.device)
        drafts, flags = table.drafts[indices, : width - 1], table.flags[indices]
        owners = indices[:, None].expand(-1, width).flatten()
        first, seeds = table.num_tokens[indices], table.seeds[owners]
        positions = (first[:, None] + places).flatten()
        rows = padded_rows(cu_logit_rows, width, len(logits)).flatten()
        probs = self._distribution(logits[rows], owners, options).view(len(indices), width, -1)
        if options & Options.REJECTION and width > 1:
            drawn_from = self._read_drawn(indices, drafts, num_drawn)
            decided = ops.verify_rejection(probs, drafts, num_verified, drawn_from, table.seeds[indices], first)
            _put_over(verified, (flags & IS_REJECTION != 0) & (num_verified > 0), *decided)
        if options & Options.TOP_P:
            config, vocab_size = self._config, probs.shape[-1]
            top_p = table.top_p[owners]
            ids, weights, counts = ops.top_p_candidates(probs.view(-1, vocab_size), top_p, config.max_candidate_len)
            corrections = ops.sample_candidates(ids, weights, counts, seeds, positions).view(-1, width)
            candidates = (ids.view(len(indices), width, -1), counts.view(-1, width), corrections)
            if width > 1:
                decided = ops.verify_top_p(drafts, num_verified, *candidates, config.verify_window)
            else:
                decided = corrections, torch.zeros_like(num_verified)
            _put_over(verified, (flags & IS_TOP_P != 0) & (verified[1] > 0), *decided)

    def draw(self, logits: torch.Tensor, indices: torch.Tensor, chosen: torch.Tensor, number: int, options: Options) -> torch.Tensor:
        """The model's draft `number` [B] int32 of logits [B, V]: as these strategies have it, and `chosen` for the other requests.

        `rejection`: drawn, with noise of its own, from a distribution that is kept for the next step. `topp`, and `rejection` past those that are
        kept: the likeliest.
        """
        table, indices = self._table, indices.long()
        flags, is_kept = table.flags[indices], number < len(self._drawn_from)
        likeliest = IS_TOP_P if is_kept else IS_TOP_P | IS_REJECTION
        if options & Options.TOP_P or not is_kept:
            chosen = torch.where(flags & likeliest != 0, ops.argmax(logits).int(), chosen)
        if options & Options.REJECTION and is_kept:
            probs = self._distribution(logits, indices, options)
            drawn = ops.draw_tokens(probs, table.seeds[indices], table.num_tokens[indices] + number, ops.DRAFT_STREAM)
            self._drawn_from[number].index_copy_(0, indices, probs)
            chosen = torch.where(flags & IS_REJECTION != 0, drawn, chosen)
        return chosen

    def note_drawn(self, indices: torch.Tensor, is_certain: torch.Tensor | None) -> None:
        """All drafts that the requests have now were drawn; is_certain [B]: none of these were."""
        indices = indices.long()
        counts = self._table.num_drafts[indices]
        self.num_drawn.index_copy_(0, indices, counts if is_certain is None else torch.where(is_certain != 0, 0, counts))

    def _distribution(self, logits: torch.Tensor, indices: torch.Tensor, options: Options) -> torch.Tensor:
        """[R, V] float32 of rows with request indices [R]; rows that no draw is made for get some distribution."""
        table = self._table
        flags = table.flags[indices]
        temperature = torch.where(flags & (IS_REJECTION | IS_TOP_P) != 0, table.temperature[indices], 1.0)
        top_p = torch.where(flags & IS_TOP_P != 0, 1.0, table.top_p[indices])
        return ops.probabilities(logits, temperature, table.top_k[indices], top_p, table.min_p[indices], bool(options & Options.FILTERS))

    def _read_drawn(self, indices: torch.Tensor, drafts: torch.Tensor, num_drawn: torch.Tensor) -> torch.Tensor | None:
        """[B, K, V] that drafts [B, K] were drawn from, the first num_drawn [B] of them; None: all are certain."""
        if not self._drawn_from:
            return None
        count, known = drafts.shape[1], self._drawn_from
        drawn_from = drafts.new_zeros(len(indices), count, self._table.vocab_size, dtype=torch.float32)
        for number in range(min(count, len(known))):
            drawn_from[:, number] = known[number][indices]
        is_certain = torch.arange(count, device=drafts.device) >= num_drawn.clamp(max=len(known))[:, None]
        drawn_from.masked_fill_(is_certain[:, :, None], 0.0)
        return drawn_from.scatter_add_(2, drafts.long()[:, :, None], is_certain.float()[:, :, None])


def _put_over(verified: Verified, own: torch.Tensor, token_ids: torch.Tensor, accepted: torch.Tensor) -> None:
    emitted, num_emitted, num_accepted = verified
    part = emitted[:, : token_ids.shape[1]]
    part.copy_(torch.where(own[:, None], token_ids.int(), part))
    num_accepted.copy_(torch.where(own, accepted.int(), num_accepted))
    num_emitted.copy_(torch.where(own, accepted.int() + 1, num_emitted))
