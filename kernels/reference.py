"""The operations of a step in pure torch: what runs on CPU, and what every CUDA kernel is tested against.

Shape letters: T packed tokens, B requests, R logits rows, V vocabulary, H query heads, Hkv key/value heads, D head size, P pages.
Keys and values of one layer are two tensors [P, page, Hkv, D].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

MAX_GROUPED_QUERIES = 32
"""Requests with at most this many query tokens are computed together; longer ones (prompts) one by one."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, N] over its root mean square, times weight [N] (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2N] = gate | up -> silu(gate) * up [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def append_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates queries and keys (RoPE, half-split layout), writes keys and values to their slots, returns the queries [T, H, D].

    qkv [T, H + 2 Hkv, D]; cos and sin [T, 1, D], sin negated in its first half, or with positions [T] the whole tables [L, 1, D];
    slots [T] = page * page_size + offset, a negative one is not written.
    """
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    num_kv, size = key_pages.shape[-2:]
    num_q = qkv.shape[1] - 2 * num_kv
    turning = qkv[:, : num_q + num_kv]
    swapped = turning.unflatten(-1, (2, size // 2)).flip(-2).flatten(-2)
    turned = torch.addcmul(turning * cos, swapped, sin)
    is_kept = slots >= 0
    for pages, rows in ((key_pages, turned[:, num_q:]), (value_pages, qkv[:, num_q + num_kv :])):
        pages.view(-1, num_kv, size).index_copy_(0, slots[is_kept].long(), rows[is_kept])
    return turned[:, :num_q]


@dataclass(slots=True)
class _Group:
    """Requests that one attention call computes together."""

    rows: torch.Tensor | slice
    """Packed positions of the queries [B' * Q]; padding points at a real row."""
    pages: torch.Tensor
    """[B' * N] page ids; padding repeats the request's first page."""
    mask: torch.Tensor
    """[B', 1, G * Q, N * page] 0 or -inf"""
    shape: tuple[int, int]
    """(B', Q)"""
    kept: torch.Tensor | None
    """Which of the B' * Q rows are real, when some are padding."""
    targets: torch.Tensor | slice
    """Where the real rows go."""


@dataclass(slots=True)
class AttentionPlan:
    """How one step's queries are grouped; made once, used by every layer."""

    groups: list[_Group]


def plan_attention(
    query_lens: list[int],
    seq_lens: list[int],
    page_ids: list[list[int]],
    page_size: int,
    num_groups: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Groups requests of like length, so that one call serves many of them and little of it is padding.

    query_lens and seq_lens [B]: new tokens, and all tokens with them; page_ids [B][>= pages of seq_len]; num_groups =
    H / Hkv. Page ids past those of seq_len are not read.
    """
    starts, total = [], 0
    for count in query_lens:
        starts.append(total)
        total += count
    needed = [-(-length // page_size) for length in seq_lens]
    small = sorted((b for b, q in enumerate(query_lens) if q <= MAX_GROUPED_QUERIES), key=lambda b: needed[b])
    buckets: list[list[int]] = []
    for b in small:
        if buckets and needed[b] <= 2 * needed[buckets[-1][0]] + 4:
            buckets[-1].append(b)
        else:
            buckets.append([b])
    buckets += [[b] for b, q in enumerate(query_lens) if q > MAX_GROUPED_QUERIES]
    groups = []
    for bucket in buckets:
        bucket.sort()
        width, most = max(query_lens[b] for b in bucket), max(needed[b] for b in bucket)
        pages = [page_ids[b][: needed[b]] + [page_ids[b][0]] * (most - needed[b]) for b in bucket]
        queries = torch.tensor([query_lens[b] for b in bucket], device=device)
        lengths = torch.tensor([seq_lens[b] for b in bucket], device=device)
        offsets = torch.arange(width, device=device)
        first = torch.tensor([starts[b] for b in bucket], device=device)
        is_real = offsets < queries[:, None]
        # Query j of a request sees the tokens up to its own place; padded queries see what the last real one sees.
        place = (lengths - queries)[:, None] + torch.minimum(offsets, queries[:, None] - 1)
        hidden = torch.arange(most * page_size, device=device) > place[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        rows = (first[:, None] + torch.minimum(offsets, queries[:, None] - 1)).flatten()
        is_padded = min(query_lens[b] for b in bucket) < width
        is_packed = not is_padded and bucket[-1] - bucket[0] == len(bucket) - 1
        span = slice(starts[bucket[0]], starts[bucket[0]] + len(bucket) * width)
        groups.append(
            _Group(
                rows=span if is_packed else rows,
                pages=torch.tensor(pages, device=device).flatten(),
                mask=mask.repeat(1, num_groups, 1).unsqueeze(1),
                shape=(len(bucket), width),
                kept=is_real.flatten() if is_padded else None,
                targets=span if is_packed else rows[is_real.flatten()],
            )
        )
    return AttentionPlan(groups)


def append_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Attention of packed queries [T, H, D] of mixed lengths over paged keys and values, causal among the new tokens -> [T, H, D].

    The new tokens' keys and values are in their pages already.
    """
    num_kv, size = key_pages.shape[-2:]
    num_groups = query.shape[1] // num_kv
    num_pages = key_pages.shape[0]
    flat_keys, flat_values = key_pages.view(num_pages, -1), value_pages.view(num_pages, -1)
    out = torch.empty_like(query)
    for group in plan.groups:
        batch, width = group.shape
        q = query[group.rows].view(batch, width, num_kv, num_groups, size)
        # The heads that share keys become more queries of one head.
        q = q.permute(0, 2, 3, 1, 4).reshape(batch, num_kv, num_groups * width, size)
        k = flat_keys.index_select(0, group.pages).view(batch, -1, num_kv, size).transpose(1, 2)
        v = flat_values.index_select(0, group.pages).view(batch, -1, num_kv, size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        y = y.view(batch, num_kv, num_groups, width, size).permute(0, 3, 1, 2, 4).reshape(batch * width, -1, size)
        out[group.targets] = y if group.kept is None else y[group.kept]
    return out


# -- sampling and verification ------------------------------------------------------------------------------------------


def apply_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """logits [R, V] after the three penalties (each [R]).

    prompt_mask [R, V]: token is in the prompt; output_counts [R, V]: times it was emitted before the row, drafts of the
    same step included. Repetition as in CTRL (Keskar et al. 2019), presence and frequency as in OpenAI's interface.
    """
    is_out = output_counts > 0
    scaled = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    logits = torch.where(prompt_mask | is_out, scaled, logits)
    return logits - presence[:, None] * is_out - frequency[:, None] * output_counts


def philox(seeds: torch.Tensor, positions: torch.Tensor, count: int, stream: int = 0) -> torch.Tensor:
    """`count` 32-bit random numbers per row, as int64 [R, count], by Philox4x32-10 (Salmon et al. 2011).

    Key: the seed [R] (64 bits); counter: (number / 4, position [R], stream, 0). Equal inputs give equal numbers.
    """
    low = 0xFFFFFFFF
    blocks = -(-count // 4)
    c0 = torch.arange(blocks, device=seeds.device)[None, :].expand(len(seeds), -1)
    c1 = positions[:, None].expand(-1, blocks)
    c2, c3 = torch.full_like(c0, stream), torch.zeros_like(c0)
    k0, k1 = (seeds & low)[:, None], ((seeds >> 32) & low)[:, None]
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & low) ^ c1 ^ k0, b & low, ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack([c0, c1, c2, c3], dim=-1).flatten(1)[:, :count]


SAMPLE_STREAM, ACCEPT_STREAM, RECOVER_STREAM, DRAFT_STREAM = 0, 1, 2, 3
"""Independent random numbers of one (seed, position): drawing a token, accepting a draft, replacing a rejected one, drafting."""


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, stream: int = SAMPLE_STREAM) -> torch.Tensor:
    """Standard Gumbel noise [R, V] float32 of (seed, position, token id).

    -log(E) with E = -log1p(-u): small E decide the argmax, and that is where u has most resolution.
    """
    u = (philox(seeds, positions, vocab_size, stream).to(torch.float32) + 0.5) * 2.0**-32
    u = u.clamp_(max=1 - 2.0**-24)  # the largest numbers round up to 1, and a token of noise -inf could never be drawn
    return -torch.log(-torch.log1p(-u))


def filter_logits(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """logits [R, V] (temperature applied) with -inf outside top_k [R] (0: off), then top_p [R], then min_p [R].

    top_p keeps the smallest set of likeliest tokens whose probability among the top_k reaches it; equal logits go by id.
    """
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    values = values.masked_fill((rank >= top_k[:, None]) & (top_k[:, None] > 0), float("-inf"))
    probs = values.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    values = values.masked_fill((before >= top_p[:, None]) & (top_p[:, None] < 1) & (rank > 0), float("-inf"))
    values = values.masked_fill(probs < min_p[:, None] * probs[:, :1], float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, values)


def probabilities(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The distribution [R, V] float32 that `sample` draws from. The parameters are [R]; temperature > 0."""
    return _scaled(logits, temperature, top_k, top_p, min_p).softmax(dim=-1)


def _scaled(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    logits = logits.float() / temperature[:, None]
    if ((top_k > 0) | (top_p < 1) | (min_p > 0)).any():
        logits = filter_logits(logits, top_k, top_p, min_p)
    return logits


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id per row of logits [R, V] -> int64 [R], by the Gumbel-max rule.

    The parameters are [R]; temperature > 0. The noise depends on (seed, position, token id) alone, so a row gives the same
    token in every batch.
    """
    logits = _scaled(logits, temperature, top_k, top_p, min_p)
    return (logits + gumbel_noise(seeds, positions, logits.shape[-1])).argmax(dim=-1)


def verify(draft_token_ids: torch.Tensor, num_drafts: torch.Tensor, target_token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts drafts while they equal what the target chose -> (token_ids [B, K + 1] padded with -1, num_accepted [B]).

    draft_token_ids [B, K]; num_drafts [B]; target_token_ids [B, K + 1]: the target's choice after input token i, so draft i is
    checked against column i, and the first column that differs, or the one after the last draft, is emitted too
    (Leviathan et al. 2023, with a deterministic choice).
    """
    width = draft_token_ids.shape[1]
    columns = torch.arange(width, device=draft_token_ids.device)
    is_match = (draft_token_ids == target_token_ids[:, :width]) & (columns < num_drafts[:, None])
    num_accepted = is_match.long().cumprod(dim=1).sum(dim=1)
    columns = torch.arange(width + 1, device=draft_token_ids.device)
    return target_token_ids.masked_fill(columns > num_accepted[:, None], -1), num_accepted


def verify_rejection(
    probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023) -> (token_ids [B, K + 1] padded with -1, num_accepted [B]).

    probs [B, K + 1, V] of the target after input token i; draft_probs [B, K, V] that the drafts were drawn from, None for
    certain drafts (one-hot); seeds [B]; positions [B] of the first draft. Draft x is accepted with probability
    min(1, p(x) / q(x)); the first rejected one is replaced by a draw from max(p - q, 0); after the last a bonus is drawn.
    """
    batch, width = draft_token_ids.shape
    places = positions[:, None] + torch.arange(width + 1, device=probs.device)
    keys = seeds[:, None].expand(-1, width + 1)
    drafts = draft_token_ids.clamp(min=0)
    if draft_probs is None:
        draft_probs = torch.zeros_like(probs[:, :width]).scatter_(2, drafts[:, :, None], 1.0)
    p, q = (x.gather(2, drafts[:, :, None])[:, :, 0] for x in (probs[:, :width], draft_probs))
    u = philox(keys[:, :width].flatten(), places[:, :width].flatten(), 1, ACCEPT_STREAM).view(batch, width)
    is_accepted = (u.double() + 0.5) * 2.0**-32 * q < p
    is_accepted &= torch.arange(width, device=probs.device) < num_drafts[:, None]
    num_accepted = is_accepted.long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(batch, device=probs.device)
    target = probs[rows, num_accepted]
    residual = (target - draft_probs[rows, num_accepted.clamp(max=max(width - 1, 0))]).clamp(min=0) if width else target
    # Where p <= q everywhere up to rounding, nothing is left: then p is as good as q.
    is_recovered = (num_accepted < num_drafts) & (residual.sum(dim=1) > 0)
    weights = torch.where(is_recovered[:, None], residual, target)
    noise = gumbel_noise(seeds, positions + num_accepted, probs.shape[-1], RECOVER_STREAM)
    last = (weights.log() + noise).argmax(dim=-1)
    columns = torch.arange(width + 1, device=probs.device)
    padded = torch.cat([draft_token_ids, draft_token_ids.new_full((batch, 1), -1)], dim=1)
    token_ids = torch.where(columns < num_accepted[:, None], padded, -1)
    return token_ids.scatter_(1, num_accepted[:, None], last[:, None]), num_accepted


def top_p_candidates(probs: torch.Tensor, top_p: torch.Tensor, max_candidates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row -> (token_ids [R, C], probs [R, C], num_candidates [R]), likeliest first, equal ones by id.

    C = max_candidates, or V when that is less. num_candidates: how many it takes to reach top_p [R], or C when they do not.
    """
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :max_candidates], ids[:, :max_candidates]
    before = values.cumsum(dim=-1) - values
    is_needed = (before < top_p[:, None]) & (values > 0)
    is_needed[:, 0] = True
    return ids, values, is_needed.sum(dim=-1)


def verify_top_p(
    draft_token_ids: list[list[int]],
    candidate_ids: torch.Tensor,
    num_candidates: torch.Tensor,
    correction_ids: torch.Tensor,
    window: int,
) -> tuple[list[list[int]], list[int]]:
    """FastDeploy's rule, which favours speed over the exact distribution -> (token ids and number accepted of each request).

    draft_token_ids [B][<= K]; candidate_ids [B, K + 1, C]; num_candidates [B, K + 1]; correction_ids [B, K + 1]: what each row
    would emit, drawn from its candidates. A draft among its row's candidates is accepted. One that is not, but is the row's second
    likeliest token, is accepted together with the `window` drafts after it when each of those is the likeliest of its row. Else
    the row's correction ends the span; after the last draft it is the bonus.
    """
    best, counts, corrections = candidate_ids.tolist(), num_candidates.tolist(), correction_ids.tolist()
    spans, accepted = [], []
    for b, drafts in enumerate(draft_token_ids):
        place = 0
        while place < len(drafts):
            if drafts[place] in best[b][place][: counts[b][place]]:
                place += 1
                continue
            ahead = range(place + 1, place + 1 + window)
            is_second = len(best[b][place]) > 1 and drafts[place] == best[b][place][1]
            if not is_second or ahead.stop > len(drafts) or any(drafts[i] != best[b][i][0] for i in ahead):
                break
            place = ahead.stop
        spans.append([*drafts[:place], corrections[b][place]])
        accepted.append(place)
    return spans, accepted


# -- the dense part -----------------------------------------------------------------------------------------------------


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x [T, N] to residual [T, N] in place, and normalises the sum as it was rounded -> [T, N]."""
    return rms_norm(residual.add_(x), weight, eps)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N]."""
    return F.linear(x, weight, bias)


def add_linear(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Adds linear(x, weight, bias), rounded, to residual [M, N] in place; returns residual."""
    return residual.add_(linear(x, weight, bias))


def norm_linear(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """linear(rms_norm(x, norm_weight, eps), weight, bias)."""
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_gated_linear(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    """silu_mul(norm_linear(x, norm_weight, eps, weight)): weight [2N, K] = gate | up -> [M, N]."""
    return silu_mul(norm_linear(x, norm_weight, eps, weight))
