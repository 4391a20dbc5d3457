"""Twins of the operations on a `RequestState`, in NumPy where tensors are small: a batch costs little more than one request."""

from __future__ import annotations

import numpy as np
import torch

from kernels.reference import sampling
from kernels.reference.paths import count_depths, find_paths
from kernels.request_state import Admission, RequestState
from kernels.structs import GREEDY, HAS_BANS, HAS_BIAS, HAS_PENALTIES, IN_PROMPT, MAX_SCORE_PAST, RULES, Policy


def admit(table: RequestState, admission: Admission) -> None:
    """Fills one place."""
    arrays, index, count = table.arrays, admission.index, len(admission.token_ids)
    tokens = np.asarray(admission.token_ids, np.int32)
    arrays.params[index] = table.pack_params(admission)[0]
    arrays.tokens[index, :count] = tokens
    arrays.num_tokens[index], arrays.num_drafts[index] = count, 0
    if table.has_trees:
        arrays.parents[index] = np.arange(-1, arrays.parents.shape[1] - 1)  # its drafts are a chain until somebody says otherwise
    arrays.num_drafter_tokens[index] = admission.num_drafter_tokens
    biases, banned = admission.logit_bias, admission.banned_ids
    arrays.bias_ids[index, : len(biases)], arrays.biases[index, : len(biases)] = list(biases), list(biases.values())
    arrays.banned_ids[index, : len(banned)] = list(banned)
    arrays.seen_place[index, arrays.seen[index, : arrays.num_seen[index], 0]] = 0  # those of the place's last request
    arrays.num_seen[index] = 0
    if admission.flags & HAS_PENALTIES:
        num_prompt = admission.num_prompt_tokens
        _see(table, index, tokens[:num_prompt], is_prompt=True)
        _see(table, index, tokens[num_prompt:], is_prompt=False)


def _see(table: RequestState, index: int, token_ids: np.ndarray, is_prompt: bool) -> None:
    arrays = table.arrays
    ids, counts = np.unique(token_ids[(token_ids >= 0) & (token_ids < table.vocab_size)], return_counts=True)
    places, begin = arrays.seen_place[index], int(arrays.num_seen[index])
    new = ids[places[ids] == 0]
    end = begin + len(new)
    arrays.seen[index, begin:end, 0], arrays.seen[index, begin:end, 1] = new, 0
    places[new] = np.arange(begin + 1, end + 1)
    arrays.num_seen[index] = end
    if is_prompt:
        arrays.seen[index, places[ids] - 1, 1] |= IN_PROMPT
    else:
        arrays.seen[index, places[ids] - 1, 1] += counts.astype(np.int32)


def process_logits(logits: torch.Tensor, table: RequestState, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, first_row: int = 0) -> None:
    """Penalties, biases and bans of each row, in place."""
    arrays, indices, starts = table.arrays, request_indices.numpy(), cu_logit_rows.numpy()
    flags = arrays.params["flags"][indices]
    has_rules = flags & RULES != 0
    if not has_rules.any():
        return
    if first_row or len(logits) < starts[-1]:  # a request may have some of its rows here, and rules go by where a row is among them
        begin, end = first_row, min(first_row + len(logits), int(starts[-1]))
        if begin < end:
            whole = logits.new_zeros(int(starts[-1]), logits.shape[1])
            whole[begin:end] = logits[: end - begin]
            process_logits(whole, table, request_indices, cu_logit_rows)
            logits[: end - begin] = whole[begin:end]
        return
    for b in np.flatnonzero(has_rules & (starts[1:] > starts[:-1])).tolist():
        index, rows = int(indices[b]), logits[int(starts[b]) : int(starts[b + 1])]
        params, known = arrays.params[index], int(arrays.num_tokens[index])
        if flags[b] & HAS_PENALTIES:
            _penalize(rows, table, index)
        if flags[b] & HAS_BIAS:
            count = int(params["num_biases"])
            rows[:, table.bias_ids[index, :count].long()] += table.biases[index, :count]
        if flags[b] & HAS_BANS:
            depths = count_depths(table, np.full(len(rows), index), np.arange(len(rows)))
            early = torch.from_numpy(np.flatnonzero(known + depths < params["min_known"]))
            rows[early[:, None], table.banned_ids[index, : int(params["num_banned"])].long()] = float("-inf")


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, mask_starts: torch.Tensor, cu_logit_rows: torch.Tensor) -> None:
    """Forbids the tokens whose bit is 0, in the rows of requests that take masks."""
    starts, cu, vocab_size = mask_starts.numpy(), cu_logit_rows.numpy(), logits.shape[1]
    for b in np.flatnonzero((starts >= 0) & (cu[1:] > cu[:-1])).tolist():
        own = masks[starts[b] : starts[b] + cu[b + 1] - cu[b]].numpy()
        is_allowed = np.unpackbits(own.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        logits[cu[b] : cu[b + 1]].masked_fill_(torch.from_numpy(is_allowed == 0), float("-inf"))


def _penalize(rows: torch.Tensor, table: RequestState, index: int) -> None:
    """Of the tokens that were seen, and of the drafts that lead to each row: the others are as they were."""
    arrays, num_rows = table.arrays, len(rows)
    seen = arrays.seen[index, : arrays.num_seen[index]]
    drafts = arrays.drafts[index, : num_rows - 1]
    drafts = np.where((drafts >= 0) & (drafts < table.vocab_size), drafts, -1)
    ids = np.union1d(seen[:, 0], drafts[drafts >= 0])
    places = np.searchsorted(ids, seen[:, 0])
    counts = np.zeros((num_rows, len(ids)), np.float32)
    counts[:, places] = seen[:, 1] & ~IN_PROMPT
    is_on_path = find_paths(table, index, num_rows)
    for place, token_id in enumerate(drafts.tolist()):
        counts[:, ids == token_id] += is_on_path[:, place, None]
    is_prompt = np.zeros(len(ids), bool)
    is_prompt[places] = seen[:, 1] & IN_PROMPT != 0
    columns = torch.from_numpy(ids).long()
    penalties = (p[index].expand(num_rows) for p in (table.repetition, table.presence, table.frequency))
    own = rows[:, columns].float()
    changed = sampling.apply_penalties(own, torch.from_numpy(is_prompt).expand(num_rows, -1), torch.from_numpy(counts), *penalties)
    rows[:, columns] = changed.to(rows.dtype)


def choose(
    logits: torch.Tensor, table: RequestState, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, ahead: int = 0, first_row: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's token of each row [R] int32, and whether one of its logits is NaN or +inf [R]."""
    starts, num_rows, vocab_size = cu_logit_rows.numpy(), *logits.shape
    total = min(max(int(starts[-1]) - first_row, 0), num_rows)
    values = logits[:total].float().numpy()
    best = values.argmax(axis=1)
    # Where a logit is NaN, or else +inf, the greatest is that one.
    is_broken = np.zeros(num_rows, bool)
    np.logical_not(values.reshape(-1).take(best + np.arange(0, total * vocab_size, vocab_size)) < np.inf, out=is_broken[:total])
    token_ids = np.zeros(num_rows, np.int32)
    token_ids[:total] = best
    indices = request_indices.numpy()
    is_drawn = table.arrays.params["flags"][indices] & GREEDY == 0
    if total and is_drawn.any():
        counts = starts[1:] - starts[:-1]
        owners = np.repeat(np.arange(len(counts)), counts)[first_row : first_row + total]
        drawn = np.flatnonzero(is_drawn[owners])
        mine, places = indices[owners[drawn]], first_row + drawn - starts[owners[drawn]]
        positions = torch.from_numpy(table.arrays.num_tokens[mine].astype(np.int64) + count_depths(table, mine, places) + ahead)
        own = torch.from_numpy(mine).long()
        parameters = (table.temperature[own], table.top_k[own], table.top_p[own], table.min_p[own], table.seeds[own])
        rows = logits[:total] if len(drawn) == total else logits[torch.from_numpy(drawn)]
        token_ids[drawn] = sampling.sample(rows, *parameters, positions).numpy()
    return torch.from_numpy(token_ids), torch.from_numpy(is_broken)


def choose_candidates(
    logits: torch.Tensor, table: RequestState, request_indices: torch.Tensor, count: int, ahead: int, is_likeliest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row [R, count] int32, or those that would be drawn first, -1: the others are impossible; and their scores."""
    scores, own = logits.float(), request_indices.long()
    is_drawn = table.flags[own] & GREEDY == 0
    if not is_likeliest and is_drawn.any():
        mine = own[is_drawn]
        parameters = (table.temperature[mine], table.top_k[mine], table.top_p[mine], table.min_p[mine])
        noise = sampling.gumbel_noise(table.seeds[mine], table.num_tokens[mine].long() + ahead, logits.shape[1])
        scores = scores.clone()
        scores[is_drawn] = sampling.scale_logits(logits[is_drawn], *parameters) + noise
    values, ids = scores.topk(count, dim=-1)
    return ids.int().masked_fill_(values == float("-inf"), -1), values - scores.logsumexp(dim=-1, keepdim=True)


def verify_drafts(
    chosen: torch.Tensor, table: RequestState, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, policy: Policy = Policy.NORMAL
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each request emits [B, max_drafts + 1], how much of it, and how many drafts were accepted."""
    width, starts = table.max_drafts + 1, cu_logit_rows.numpy()
    counts = np.minimum(starts[1:] - starts[:-1], width)
    emitted = np.full((len(counts), width), -1, np.int32)
    most = int(counts.max())
    accepted = np.zeros(len(counts), np.int32)
    if most:
        columns = np.arange(most)
        own = chosen.numpy().take(starts[:-1, None] + columns, mode="clip")
        if most > 1:
            drafts = table.arrays.drafts[request_indices.numpy(), : most - 1]
            is_draft = columns[1:] < counts[:, None]
            if policy == Policy.NORMAL:
                is_draft &= own[:, :-1] == drafts
                np.logical_and.accumulate(is_draft, axis=1).sum(axis=1, out=accepted)
            elif policy == Policy.ACCEPT_ALL:
                is_draft.sum(axis=1, out=accepted)
                np.copyto(own[:, :-1], drafts, where=is_draft)
        np.copyto(emitted[:, :most], own, where=columns <= np.where(counts > 0, accepted, -1)[:, None])
    num_emitted = (accepted + 1) * (counts > 0)
    return torch.from_numpy(emitted), torch.from_numpy(num_emitted), torch.from_numpy(accepted)


def verify_tree(
    chosen: torch.Tensor, table: RequestState, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, policy: Policy = Policy.NORMAL
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each request emits [B, max_drafts + 1], how much of it, how many drafts were accepted, and the rows [B, max_drafts + 1] that chose."""
    width, starts, arrays = table.max_drafts + 1, cu_logit_rows.tolist(), table.arrays
    indices, tokens = request_indices.tolist(), chosen.tolist()
    emitted, path = (np.full((len(indices), width), -1, np.int32) for _ in range(2))
    accepted, offered = (np.zeros(len(indices), np.int32) for _ in range(2))
    for b, index in enumerate(indices):
        count = min(starts[b + 1] - starts[b], width)
        if not count:
            continue
        own, row, depth = tokens[starts[b] : starts[b] + count], 0, 0
        drafts, parents = arrays.drafts[index, : count - 1].tolist(), arrays.parents[index, : count - 1].tolist()
        children: list[list[int]] = [[] for _ in range(count)]
        for node, parent in enumerate(parents):
            children[parent + 1].append(node + 1)
        while policy != Policy.REJECT_ALL:
            found = next((child for child in children[row] if policy == Policy.ACCEPT_ALL or drafts[child - 1] == own[row]), None)
            if found is None:
                break
            emitted[b, depth], path[b, depth] = drafts[found - 1], row
            row, depth = found, depth + 1
        emitted[b, depth], path[b, depth] = own[row], row
        accepted[b], offered[b] = depth, depth + 1
    return torch.from_numpy(emitted), torch.from_numpy(offered), torch.from_numpy(accepted), torch.from_numpy(path)


def commit(emitted: torch.Tensor, num_emitted: torch.Tensor, table: RequestState, request_indices: torch.Tensor) -> None:
    """Appends what each request emitted, cut at its end."""
    arrays, rows, offered, indices = table.arrays, emitted.numpy(), num_emitted.numpy(), request_indices.numpy()
    known, emits = arrays.num_tokens.take(indices), offered > 0
    counts = np.maximum(np.minimum(offered, arrays.params["max_total_tokens"][indices] - known), 0)
    begins = np.add.accumulate(counts) - counts
    numbers = np.arange(int(begins[-1] + counts[-1]))
    sources = np.repeat(np.arange(0, rows.size, rows.shape[1]) - begins, counts) + numbers
    arrays.tokens.reshape(-1)[np.repeat(indices * table.max_len + known - begins, counts) + numbers] = rows.reshape(-1).take(sources)
    if not np.array_equal(counts, offered):
        rows[(np.arange(rows.shape[1]) >= counts[:, None]) & emits[:, None]] = -1
        np.copyto(offered, counts, where=emits)
    mine = indices[emits]
    arrays.num_tokens[mine], arrays.num_drafts[mine] = (known + counts)[emits], 0
    is_counted = arrays.params["flags"][indices] & HAS_PENALTIES != 0
    if is_counted.any():
        for b in np.flatnonzero(is_counted & emits).tolist():
            _see(table, int(indices[b]), rows[b, : counts[b]], is_prompt=False)


def draft_ngram(
    table: RequestState,
    request_indices: torch.Tensor,
    draft_limits: torch.Tensor,
    max_size: int,
    min_size: int,
    num_given: torch.Tensor | None = None,
    min_scores: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
) -> None:
    """What followed the earliest place of the longest end of each text."""
    arrays, indices, asked = table.arrays, request_indices.numpy(), draft_limits.numpy()
    known = arrays.num_tokens[indices]
    limits = np.maximum(np.minimum(np.minimum(asked, table.drafts.shape[1]), arrays.params["max_total_tokens"][indices] - known - 1), 0)
    given = np.zeros_like(limits) if num_given is None else np.minimum(num_given.numpy(), limits)
    ends, drafts = known + given, arrays.drafts
    found: list[np.ndarray] = []  # of each searched text the places of its last token but the last one
    searched = np.flatnonzero((asked >= 0) & (given < limits) & (known > 0) & (np.minimum(max_size, ends - 1) >= min_size)).tolist()
    places_of, starts_of, ends_of = indices.tolist(), known.tolist(), ends.tolist()
    for b in searched:
        row, end = arrays.tokens[places_of[b]], ends_of[b]
        if end > starts_of[b]:  # drafts that end the text: what lies past a request's tokens is nobody's
            row[starts_of[b] : end] = drafts[places_of[b], : end - starts_of[b]]
        found.append((row[: end - 1] == row[end - 1]).nonzero()[0])
    sizes, places = np.zeros(len(indices), np.int32), np.zeros(len(indices), np.int64)
    if found:
        _match_longest(table, indices, ends, searched, found, max_size, sizes, places)
    sizes[sizes < min_size] = 0
    if scores is not None or min_scores is not None:
        scored = sizes + _match_back(table, indices, ends, sizes, places)
        if scores is not None:
            scores.numpy()[:] = scored
        if min_scores is not None:
            sizes[scored < min_scores.numpy()] = 0
    counts = np.where(sizes > 0, np.minimum(limits - given, ends - 1 - places), 0)
    for b in np.flatnonzero(counts).tolist():
        begin = int(places[b]) + 1
        drafts[indices[b], given[b] : given[b] + counts[b]] = arrays.tokens[indices[b], begin : begin + counts[b]]
    is_asked = asked >= 0
    arrays.num_drafts[indices[is_asked]] = (given + counts)[is_asked]


def _match_longest(
    table: RequestState,
    indices: np.ndarray,
    ends: np.ndarray,
    searched: list[int],
    found: list[np.ndarray],
    max_size: int,
    sizes: np.ndarray,
    places: np.ndarray,
) -> None:
    """Writes the longest match of each text, up to max_size tokens, and the place of its last token: the earliest of equals."""
    text = table.arrays.tokens.ravel()
    owners, last = np.repeat(searched, [len(own) for own in found]), np.concatenate(found)
    bases = indices.astype(np.int64) * table.max_len
    for size in range(1, max_size + 1):
        if not len(owners):
            return
        is_first = np.empty(len(owners), bool)
        is_first[0] = True
        np.not_equal(owners[1:], owners[:-1], out=is_first[1:])
        sizes[owners[is_first]], places[owners[is_first]] = size, last[is_first]
        if size == max_size:
            return
        base = bases[owners]
        is_longer = (last >= size) & (text[base + np.maximum(last - size, 0)] == text[base + ends[owners] - 1 - size])
        owners, last = owners[is_longer], last[is_longer]


def _match_back(table: RequestState, indices: np.ndarray, ends: np.ndarray, sizes: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Tokens before each match that agree with those before the text's end, as far as scores need to know."""
    first = (places - sizes)[:, None] - np.arange(MAX_SCORE_PAST)
    second = first + (ends - 1 - places)[:, None]
    own = indices[:, None]
    is_equal = (first >= 0) & (sizes > 0)[:, None]
    tokens = table.arrays.tokens
    is_equal &= tokens[own, np.maximum(first, 0)] == tokens[own, np.maximum(second, 0)]
    return np.logical_and.accumulate(is_equal, axis=1).sum(axis=1, dtype=np.int32)


def sample_candidates(
    candidate_ids: torch.Tensor, probs: torch.Tensor, num_candidates: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One of each row's first num_candidates [R] candidates [R, C], by their probs [R, C], with the noise of their ids -> [R]."""
    ids = candidate_ids.long()
    noise = sampling.gumbel_noise(seeds, positions.long(), int(ids.max()) + 1).gather(1, ids)
    is_out = torch.arange(ids.shape[1]) >= num_candidates[:, None]
    best = (probs.log() + noise).masked_fill(is_out, float("-inf")).argmax(dim=-1, keepdim=True)
    return candidate_ids.gather(1, best)[:, 0]
