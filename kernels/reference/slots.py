"""Twins, in pure torch, of the operations on a `kernels.state.SlotTable`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels import reference

if TYPE_CHECKING:
    from kernels.state import Admission, SlotTable

_HAS_PENALTIES, _HAS_BIAS, _HAS_BANS, _GREEDY = 2, 4, 8, 1
_IN_PROMPT = 1 << 30


def admit(table: SlotTable, admission: Admission) -> None:
    """Fills one slot."""
    slot, count = admission.slot, len(admission.token_ids)
    table.params[slot] = torch.from_numpy(table.pack_params(admission))
    table.tokens[slot, :count] = torch.tensor(admission.token_ids, dtype=torch.int32)
    table.num_tokens[slot], table.num_drafts[slot] = count, 0
    biases, banned = admission.logit_bias, admission.banned_ids
    table.bias_ids[slot, : len(biases)] = torch.tensor(list(biases), dtype=torch.int32)
    table.biases[slot, : len(biases)] = torch.tensor(list(biases.values()), dtype=torch.float32)
    table.banned_ids[slot, : len(banned)] = torch.tensor(list(banned), dtype=torch.int32)
    table.seen_place[slot] = table.num_seen[slot] = 0
    if admission.flags & _HAS_PENALTIES:
        for i, token_id in enumerate(admission.token_ids):
            _see(table, slot, token_id, i < admission.num_prompt_tokens)


def _see(table: SlotTable, slot: int, token_id: int, is_prompt: bool) -> None:
    place = int(table.seen_place[slot, token_id]) - 1
    if place < 0:
        place = int(table.num_seen[slot])
        table.seen[slot, place, 0], table.seen[slot, place, 1] = token_id, 0
        table.num_seen[slot], table.seen_place[slot, token_id] = place + 1, place + 1
    if is_prompt:
        table.seen[slot, place, 1] |= _IN_PROMPT
    else:
        table.seen[slot, place, 1] += 1


def process_logits(logits: torch.Tensor, table: SlotTable, row_slots: torch.Tensor, cu_query_lens: torch.Tensor) -> None:
    """Penalties, biases and bans of each row, in place."""
    starts = cu_query_lens.tolist()
    for b, slot in enumerate(row_slots.tolist()):
        flags, rows = int(table.flags[slot]), logits[starts[b] : starts[b + 1]]
        known = int(table.num_tokens[slot])
        drafts = table.drafts[slot, : max(len(rows) - 1, 0)].long()
        if flags & _HAS_PENALTIES and len(rows):
            tokens, num_prompt = table.tokens[slot, :known].long(), int(table.num_prompt_tokens[slot])
            prompt_mask = torch.zeros(logits.shape[1], dtype=torch.bool)
            prompt_mask[tokens[:num_prompt]] = True
            counts = torch.bincount(tokens[num_prompt:], minlength=logits.shape[1]).float().repeat(len(rows), 1)
            for place, token_id in enumerate(drafts.tolist()):
                counts[place + 1 :, token_id] += 1
            penalties = (table.repetition[slot], table.presence[slot], table.frequency[slot])
            rows.copy_(reference.apply_penalties(rows, prompt_mask.expand(len(rows), -1), counts, *(p.expand(len(rows)) for p in penalties)))
        if flags & _HAS_BIAS:
            count = int(table.num_biases[slot])
            rows[:, table.bias_ids[slot, :count].long()] += table.biases[slot, :count]
        if flags & _HAS_BANS:
            early = max(int(table.min_known[slot]) - known, 0)
            rows[:early, table.banned_ids[slot, : int(table.num_banned[slot])].long()] = float("-inf")


def choose(
    logits: torch.Tensor, table: SlotTable, row_slots: torch.Tensor, cu_query_lens: torch.Tensor, num_tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's token of each row [R] int32, and whether one of its logits is NaN or +inf [R]."""
    num_tokens = table.num_tokens if num_tokens is None else num_tokens
    counts = cu_query_lens.diff().long()
    total = int(counts.sum())
    slots = torch.repeat_interleave(row_slots.long(), counts)
    positions = num_tokens[slots].long() + torch.arange(total) - torch.repeat_interleave(cu_query_lens[:-1].long(), counts)
    token_ids, is_broken = torch.zeros(len(logits), dtype=torch.int32), torch.zeros(len(logits), dtype=torch.bool)
    token_ids[:total] = logits[:total].argmax(dim=-1).int()
    is_broken[:total] = ~(logits[:total] < float("inf")).all(dim=-1)
    drawn = ((table.flags[slots] & _GREEDY) == 0).nonzero()[:, 0]
    if len(drawn):
        own = slots[drawn]
        parameters = (table.temperature[own], table.top_k[own], table.top_p[own], table.min_p[own], table.seeds[own], positions[drawn])
        token_ids[drawn] = reference.sample(logits[drawn], *parameters).int()
    return token_ids, is_broken


def verify_drafts(
    chosen: torch.Tensor, table: SlotTable, row_slots: torch.Tensor, cu_query_lens: torch.Tensor, policy: str = "normal"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each request emits [B, max_drafts + 1], how much of it, and how many drafts were accepted."""
    width, starts = table.max_drafts + 1, cu_query_lens.tolist()
    emitted = torch.full((len(row_slots), width), -1, dtype=torch.int32)
    num_emitted, num_accepted = (torch.zeros(len(row_slots), dtype=torch.int32) for _ in range(2))
    for b, slot in enumerate(row_slots.tolist()):
        own = chosen[starts[b] : starts[b + 1]].tolist()[:width]
        if not own:
            continue
        drafts = table.drafts[slot, : len(own) - 1].tolist()
        accepted = 0
        while accepted < len(drafts) and (policy == "accept_all" or (policy == "normal" and drafts[accepted] == own[accepted])):
            accepted += 1
        emitted[b, : accepted + 1] = torch.tensor([*drafts[:accepted], own[accepted]])
        num_emitted[b], num_accepted[b] = accepted + 1, accepted
    return emitted, num_emitted, num_accepted


def commit(emitted: torch.Tensor, num_emitted: torch.Tensor, table: SlotTable, row_slots: torch.Tensor) -> None:
    """Appends emitted tokens, cut at each request's end."""
    for b, slot in enumerate(row_slots.tolist()):
        if num_emitted[b] <= 0:
            continue
        known = int(table.num_tokens[slot])
        count = max(min(int(num_emitted[b]), int(table.max_total_tokens[slot]) - known), 0)
        table.tokens[slot, known : known + count] = emitted[b, :count]
        if int(table.flags[slot]) & _HAS_PENALTIES:
            for token_id in emitted[b, :count].tolist():
                _see(table, slot, token_id, is_prompt=False)
        emitted[b, count:] = -1
        num_emitted[b], table.num_tokens[slot], table.num_drafts[slot] = count, known + count, 0


def draft_ngram(
    table: SlotTable, row_slots: torch.Tensor, draft_limits: torch.Tensor, max_size: int, min_size: int, num_given: torch.Tensor | None = None
) -> None:
    """What followed the earliest place of the longest end of each text."""
    for b, slot in enumerate(row_slots.tolist()):
        if draft_limits[b] < 0:
            continue
        known = int(table.num_tokens[slot])
        room = int(table.max_total_tokens[slot]) - known - 1
        limit = max(min(int(draft_limits[b]), table.drafts.shape[1], room), 0)
        given = min(0 if num_given is None else int(num_given[b]), limit)
        text = [*table.tokens[slot, :known].tolist(), *table.drafts[slot, :given].tolist()]
        found = _lookup(text, max_size, min_size)[: limit - given]
        table.drafts[slot, given : given + len(found)] = torch.tensor(found, dtype=torch.int32)
        table.num_drafts[slot] = given + len(found)


def _lookup(text: list[int], max_size: int, min_size: int) -> list[int]:
    for size in range(min(max_size, len(text) - 1), min_size - 1, -1):
        for at in range(len(text) - size):
            if text[at : at + size] == text[-size:]:
                return text[at + size :]
    return []


def sample_candidates(
    candidate_ids: torch.Tensor, probs: torch.Tensor, num_candidates: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One of each row's first num_candidates [R] candidates [R, C], by their probs [R, C], with the noise of their ids -> [R]."""
    ids = candidate_ids.long()
    noise = reference.gumbel_noise(seeds, positions.long(), int(ids.max()) + 1).gather(1, ids)
    is_out = torch.arange(ids.shape[1]) >= num_candidates[:, None]
    best = (probs.log() + noise).masked_fill(is_out, float("-inf")).argmax(dim=-1, keepdim=True)
    return candidate_ids.gather(1, best)[:, 0]
