"""Random numbers, penalties, filters, and the target's choice."""

from __future__ import annotations

import numpy as np
import torch

from kernels import cpu_rows
from kernels.structs import SAMPLE_STREAM


def argmax(x: torch.Tensor) -> torch.Tensor:
    """The place of the greatest of each row of x [R, V], the first of equals; of the first NaN when there is one -> int64 [R].

    By NumPy on CPU, whose search is vectorised: 25 times as fast as torch's in float32, 15 times in bfloat16.
    """
    if x.is_cuda:
        return x.argmax(dim=-1)
    return torch.from_numpy(np.argmax(x.detach().float().numpy(), axis=-1))


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


def token_numbers(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
    """A 32-bit random number for each token of each row, as int64 [R, V].

    Token 8c + k takes half k (low halves first) of `philox`'s words 8c to 8c + 3 as its leading 16 bits, and of words 8c + 4 to 8c + 7 as the
    others: the first four words say of eight tokens whether the rest matters.
    """
    chunks = -(-vocab_size // 8)
    words = philox(seeds, positions, 8 * chunks, stream).view(len(seeds), chunks, 2, 4)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(3)
    return (halves[:, :, 0] << 16 | halves[:, :, 1]).flatten(1)[:, :vocab_size]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
    """A number in (0, 1) for each token of each row, float32 [R, V]."""
    u = (token_numbers(seeds, positions, vocab_size, stream).to(torch.float32) + 0.5) * 2.0**-32
    return u.clamp_(max=1 - 2.0**-24)  # the largest numbers round up to 1, and a token of noise -inf could never be drawn


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, stream: int = SAMPLE_STREAM) -> torch.Tensor:
    """Standard Gumbel noise [R, V] float32 of (seed, position, token id).

    -log(E) with E = -log1p(-u): small E decide the argmax, and that is where u has most resolution.
    """
    u = cpu_rows.uniforms(seeds, positions, vocab_size, stream)  # the same numbers, thirty times as fast
    if u is None:
        u = uniforms(seeds, positions, vocab_size, stream)
    return u.neg_().log1p_().neg_().log_().neg_()


def draw_tokens(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """One token id per row of probs [B, V] -> int32 [B], by the Gumbel-max rule with the noise of (seed [B], position [B], token id) in `stream`."""
    return argmax(probs.log() + gumbel_noise(seeds, positions, probs.shape[-1], stream)).int()


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


def probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    is_filtered: bool | None = None,
) -> torch.Tensor:
    """The distribution [R, V] float32 that `sample` draws from. The parameters are [R]; temperature > 0.

    is_filtered: whether some row's top_k, top_p or min_p is on. None: they are looked at, which waits for a GPU.
    """
    return scale_logits(logits, temperature, top_k, top_p, min_p, is_filtered).softmax(dim=-1)


def scale_logits(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, is_filtered: bool | None = None
) -> torch.Tensor:
    """float32 logits over temperature, -inf where a filter drops a token: what `sample` adds noise to."""
    logits = logits.float() / temperature[:, None]
    if is_filtered is None:
        is_filtered = bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())
    if not is_filtered:
        return logits
    if not logits.is_cuda:  # where it costs nothing to know which rows: the others need no sorting
        rows = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero()[:, 0]
        if len(rows) < len(logits):
            return logits.index_copy_(0, rows, filter_logits(logits[rows], top_k[rows], top_p[rows], min_p[rows]))
    return filter_logits(logits, top_k, top_p, min_p)


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
    logits = scale_logits(logits, temperature, top_k, top_p, min_p)
    return argmax(logits + gumbel_noise(seeds, positions, logits.shape[-1]))
