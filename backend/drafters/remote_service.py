"""The model drafter in a process of its own: runs it on draft calls, with paged memory that is numbered as the target's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from backend.core import kv_slots
from backend.drafters.calls import LIKELIEST, OWN_NOISE, DraftCall, DraftReply
from backend.drafters.protocol import ATTENTION, DrafterRows
from backend.drafters.recurrent import STATES, RecurrentDrafter
from backend.kv_store import KvStore, count_page_bytes
from kernels import distribution, ops, warm_up
from kernels.step_attention import MAX_SHORT_QUERIES
from kernels.structs import MAX_BATCH

ThreadsFor = Callable[[int], AbstractContextManager[None]]


class RemoteDrafterService:
    """A DraftService. The pages' numbers are the target's; what they hold is the drafter's own.

    threads_for: CPU threads for a forward of so many tokens (`backend.devices.threads_for`).
    """

    def __init__(self, drafter: RecurrentDrafter, dtype: torch.dtype, device: torch.device, threads_for: ThreadsFor) -> None:
        self._drafter = drafter
        self._dtype, self._device = dtype, device
        self._threads_for = threads_for
        self._store: KvStore | None = None

    def count_bytes(self, num_pages: int, page_size: int) -> int:
        return (num_pages + 1) * count_page_bytes(self._drafter.cache_specs(self._dtype), page_size)

    def open(self, num_pages: int, page_size: int) -> None:
        if self._store is not None and (self._store.num_pages, self._store.page_size) == (num_pages, page_size):
            self._store.memory.zero_()
            return
        self._store = KvStore(self._drafter.cache_specs(self._dtype), page_size, num_pages, self._device)
        self._drafter.attach(self._store)

    def warm_up(self, vocab_size: int, max_model_len: int, page_size: int) -> None:
        """On a GPU, within its `on_stream`, before it is opened: compiles and loads what calls need. Whoever asks waits for an answer for a moment,
        not for a compiler; with pages of another size it would."""
        if self._device.type != "cuda":
            return
        with warm_up.compiling(self._device):
            self._load_kernels(vocab_size, max_model_len, page_size)
        self._load_kernels(vocab_size, max_model_len, page_size)

    def _load_kernels(self, vocab_size: int, max_model_len: int, page_size: int) -> None:
        warm_up.load_attention(self._device, (MAX_SHORT_QUERIES,), MAX_BATCH, page_size, self._drafter.heads, self._dtype)
        distribution.load_all(self._device, self._dtype, vocab_size)
        self.try_calls(max_model_len, page_size)

    def try_calls(self, max_model_len: int, page_size: int) -> None:
        """Of so many tokens, and of so many requests, whose newest tokens' states are scored, that others take no other kernels; and in each of the
        ways in which drafts are chosen."""
        counts = sorted({min(count, max_model_len - 2) for count in warm_up.TOKEN_COUNTS})
        pages = list(range(-(-(counts[-1] + 2) // page_size)))
        self.open(len(pages), page_size)
        calls = [[count] for count in counts] + [[1] * min(batch, MAX_BATCH) for batch in warm_up.TOKEN_COUNTS if batch > 1]
        for lens in calls:
            # Of what is drawn no draft is made: while kernels are looked for only, that is any number.
            for mode, num_drafts in ((LIKELIEST, 2), (OWN_NOISE, 1)):
                batch, count = len(lens), sum(lens)
                hidden = torch.zeros(count, self._drafter.tap_width, dtype=self._dtype, device=self._device)
                lists = (lens, lens, [pages] * batch, [num_drafts] * batch, [(mode, 0, 1)] * batch, [(1.0, 1.0, 0.0)] * batch)
                self.draft(DraftCall([], [0] * count, hidden, *lists))

    @torch.inference_mode()
    def draft(self, call: DraftCall) -> DraftReply:
        with self._threads_for(len(call.token_ids)):
            return self._draft(call)

    def _draft(self, call: DraftCall) -> DraftReply:
        assert self._store is not None, "open comes first"
        self._store.copy((), call.fresh_pages)
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
            chosen = self._choose(call, drafting, self._drafter.logits(states, step), step, drawn_from)
            for b, token_id in zip(drafting, chosen, strict=True):
                reply.token_ids[b].append(token_id)
        reply.probs = {b: torch.stack(rows) for b, rows in drawn_from.items()}
        return reply

    def _rows(self, token_ids: list[int], spans: list[tuple[list[int], int, int]]) -> DrafterRows:
        """Of tokens begin to end of requests (pages, begin, end), one after the other."""
        store = self._store
        assert store is not None, "open comes first"
        size = store.page_size
        positions = [i for _, begin, end in spans for i in range(begin, end)]
        slots = [s for pages, begin, end in spans for s in kv_slots(pages, begin, end, size, store.stride(ATTENTION))]
        states, before = [0] * len(slots), [0] * len(slots)
        if STATES in store.specs:
            stride = store.stride(STATES)
            states = [s for pages, begin, end in spans for s in kv_slots(pages, begin, end, size, stride)]
            before = [s for pages, begin, end in spans for s in [0] * (begin == 0) + kv_slots(pages, max(begin - 1, 0), end - 1, size, stride)]
        rows = torch.tensor([token_ids, positions, slots, states, before], device=self._device)
        lengths, ends = [end - begin for _, begin, end in spans], [end for _, _, end in spans]
        plan = ops.plan_attention(lengths, ends, [pages for pages, _, _ in spans], size, self._drafter.heads, self._dtype, self._device)
        return DrafterRows(rows[0], rows[1], rows[2], rows[3], rows[4], plan)

    def _catch_up(self, call: DraftCall) -> list[torch.Tensor]:
        """`advance` over all tokens of the call; states at the last tokens of those that draft."""
        spans = [(pages, end - count, end) for pages, count, end in zip(call.page_ids, call.query_lens, call.seq_lens)]
        ends = list(itertools.accumulate(call.query_lens))
        last = torch.tensor([end - 1 for end, count in zip(ends, call.num_drafts) if count], dtype=torch.long, device=self._device)
        return self._drafter.advance(self._rows(call.token_ids, spans), last, call.hidden)

    def _go_on(self, call: DraftCall, drafting: list[int], token_ids: list[int], states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        """`extend` by each request's newest draft [B']."""
        spans = [(call.page_ids[b], call.seq_lens[b] + step - 1, call.seq_lens[b] + step) for b in drafting]
        return self._drafter.extend(self._rows(token_ids, spans), states, step)

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
