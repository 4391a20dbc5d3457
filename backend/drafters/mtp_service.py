"""Runs a multi-token-prediction model on draft calls, with its own paged memory. In the decode model's process, or in its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from backend.core import slots_of
from backend.drafters.calls import LIKELIEST, OWN_NOISE, DraftCall, DraftReply
from backend.models.mtp import Mtp
from kernels import ops

MakePlane = Callable[[tuple[int, ...]], torch.Tensor]
ThreadsFor = Callable[[int], AbstractContextManager[None]]


@dataclass(slots=True)
class Rows:
    """T packed tokens that the layers compute; each [T] int64."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    before: torch.Tensor
    """Slots of the tokens before these; any slot before a first token."""
    plan: ops.Plan


class MtpService:
    """A DraftService. The pages' numbers are the target's; what they hold is the drafter's own.

    threads_for: CPU threads for a forward of so many tokens (`Runner.threads_for`); max_steps: layers beyond that many drafts a step
    are left out, and requests that want more go on with the last one in use.
    """

    def __init__(self, model: Mtp, make_plane: MakePlane, threads_for: ThreadsFor, max_steps: int) -> None:
        self._model = model
        self._make_plane = make_plane
        self._threads_for = threads_for
        self._num_layers = min(model.num_layers, max_steps)
        self.heads = model.heads
        self.page_entries = model.cache_planes[: 3 * self._num_layers - 1]
        self._planes: list[torch.Tensor] = []
        self._page_size = 0

    def open(self, num_pages: int, page_size: int) -> None:
        if self._planes and tuple(self._planes[0].shape[:2]) == (num_pages + 1, page_size):
            for plane in self._planes:
                plane.zero_()
            return
        self._page_size = page_size
        # One page more, for idle rows of captured steps.
        self._planes = [self._make_plane((num_pages + 1, page_size, *entry)) for entry in self.page_entries]

    @torch.inference_mode()
    def draft(self, call: DraftCall) -> DraftReply:
        with self._threads_for(len(call.token_ids)):
            return self._draft(call)

    def _draft(self, call: DraftCall) -> DraftReply:
        if call.fresh_pages:
            fresh = torch.tensor(call.fresh_pages, device=call.hidden.device)
            for plane in self._planes:
                plane.index_fill_(0, fresh, 0)
        states = self._catch_up(call)
        reply = DraftReply([[] for _ in call.num_drafts])
        drawn_from: dict[int, list[torch.Tensor]] = {}
        for step in range(max(call.num_drafts)):
            drafting = [b for b, count in enumerate(call.num_drafts) if count > step]
            if step:
                if any(call.num_drafts[b] == step for b in range(len(call.num_drafts))):
                    before = [b for b, count in enumerate(call.num_drafts) if count >= step]
                    kept = [i for i, b in enumerate(before) if call.num_drafts[b] > step]
                    states = [own[kept] for own in states]
                states = self._go_on(call, drafting, [reply.token_ids[b][-1] for b in drafting], states, step)
            chosen = self._choose(call, drafting, self.logits(states, step), step, drawn_from)
            for b, token_id in zip(drafting, chosen, strict=True):
                reply.token_ids[b].append(token_id)
        reply.probs = {b: torch.stack(rows) for b, rows in drawn_from.items()}
        return reply

    def _catch_up(self, call: DraftCall) -> list[torch.Tensor]:
        """`advance` over all tokens of the call; states at the last tokens of those that draft."""
        begins = [length - count for length, count in zip(call.seq_lens, call.query_lens)]
        spans, size = list(zip(call.page_ids, begins, call.seq_lens)), self._page_size
        positions = [i for _, begin, end in spans for i in range(begin, end)]
        slots = [s for pages, begin, end in spans for s in slots_of(pages, begin, end, size)]
        before = [s for pages, begin, end in spans for s in [0] * (begin == 0) + slots_of(pages, max(begin - 1, 0), end - 1, size)]
        rows = torch.tensor([call.token_ids, positions, slots, before], device=call.hidden.device)
        ends = list(itertools.accumulate(call.query_lens))
        last = torch.tensor([end - 1 for end, count in zip(ends, call.num_drafts) if count], dtype=torch.long, device=call.hidden.device)
        plan = self._plan(call.query_lens, call.seq_lens, call.page_ids, call.hidden)
        return self.advance(Rows(rows[0], rows[1], rows[2], rows[3], plan), call.hidden, last)

    def _go_on(self, call: DraftCall, drafting: list[int], token_ids: list[int], states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        """`extend` by each request's newest draft [B']."""
        pages, lengths = [call.page_ids[b] for b in drafting], [call.seq_lens[b] + step for b in drafting]
        slots = [s for own, length in zip(pages, lengths) for s in slots_of(own, length - 1, length, self._page_size)]
        rows = torch.tensor([token_ids, [length - 1 for length in lengths], slots], device=states[0].device)
        plan = self._plan([1] * len(drafting), lengths, pages, states[0])
        return self.extend(Rows(rows[0], rows[1], rows[2], rows[2], plan), states, step)

    def advance(self, rows: Rows, hidden: torch.Tensor, last: torch.Tensor) -> list[torch.Tensor]:
        """Every layer over known tokens; hidden [T, hidden]: the target's states before them. Each layer's states [B, hidden] at rows last [B]."""
        states = self._compute(0, rows, hidden)
        newest = [states[last]]
        for layer in range(1, self._num_layers):
            kept = self._planes[3 * layer - 1].flatten(0, 1)
            kept.index_copy_(0, rows.slots, states)
            previous = kept[rows.before].masked_fill_((rows.positions == 0)[:, None], 0)  # nothing comes before the first token
            states = self._compute(layer, rows, previous)
            newest.append(states[last])
        return newest

    def extend(self, rows: Rows, states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        """The newest drafts [B] in the layers that draft number `step` and later ones need, from every layer's states [B, hidden] before them."""
        newest, last = list(states), self._num_layers - 1
        for layer in range(min(step, last), last + 1):
            newest[layer] = self._compute(layer, rows, states[layer - 1 if step <= layer else layer])
        return newest

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        """What draft number `step` is chosen by [B, V], from every layer's states [B, hidden] at the token before it."""
        layer = min(step, self._num_layers - 1)
        return self._model.logits(layer, states[layer])

    def _compute(self, layer: int, rows: Rows, previous: torch.Tensor) -> torch.Tensor:
        return self._model.forward(layer, rows.token_ids, previous, rows.positions, rows.slots, self._planes, rows.plan)

    def _plan(self, query_lens: list[int], seq_lens: list[int], pages: list[list[int]], like: torch.Tensor) -> ops.Plan:
        return ops.plan_attention(query_lens, seq_lens, pages, self._page_size, self.heads, like.dtype, like.device)

    @staticmethod
    def _choose(call: DraftCall, drafting: list[int], logits: torch.Tensor, step: int, drawn_from: dict[int, list[torch.Tensor]]) -> list[int]:
        """A token for each row of logits [B', V]; rows of OWN_NOISE leave their distribution in `drawn_from`."""
        if all(call.choices[b][0] == LIKELIEST for b in drafting):
            return logits.argmax(dim=-1).tolist()
        device = logits.device
        modes, top_k, seeds = torch.tensor([call.choices[b] for b in drafting], device=device).T
        # A greedy row's temperature is 0: 1 in its place, and its draw is not looked at.
        temperature, top_p, min_p = torch.tensor([call.filters[b] for b in drafting], dtype=torch.float32, device=device).T
        temperature = torch.where(modes == LIKELIEST, torch.ones_like(temperature), temperature)
        positions = torch.tensor([call.seq_lens[b] + step for b in drafting], device=device)
        scores = ops.probabilities(logits, temperature, top_k, top_p, min_p)
        drawn = ops.draw_tokens(scores, seeds, positions, ops.SAMPLE_STREAM)
        if (modes == OWN_NOISE).any():
            drawn = torch.where(modes == OWN_NOISE, ops.draw_tokens(scores, seeds, positions, ops.DRAFT_STREAM), drawn)
        for i, b in enumerate(drafting):
            if call.choices[b][0] == OWN_NOISE:
                drawn_from.setdefault(b, []).append(scores[i])
        return torch.where(modes == LIKELIEST, logits.argmax(dim=-1), drawn).tolist()
