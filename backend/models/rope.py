"""Rotary embedding (Su et al. 2021): frequencies of every kind, and tables that kernels read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from backend.models.rope_spec import RopeSpec, read_rope
from backend.models.values import Values


def rope_frequencies(config: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Inverse frequencies [head_dim / 2] in float32 of a config.json whose heads turn whole. Raises ModelError for a scaling that is not known."""
    return frequencies(read_rope(Values(config, "config.json"), head_dim), 0)[0]


def frequencies(rope: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [dim / 2] in float32, and what cos and sin are multiplied with.

    context_len: the longest context. Where LongRoPE has other factors for contexts past the original one, that length decides which: a
    token's keys must not depend on how long the request, or another that shares its pages, becomes. `dynamic` changes nothing up to
    max_position_embeddings, which is its limit here.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain), _yarn_scale(rope)
    if rope.kind == "longrope":
        factors = rope.long_factor if context_len > rope.original_len else rope.short_factor
        scale = rope.attention_factor
        if scale is None:
            scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_len)) if rope.factor > 1 else 1.0
        return 1.0 / (torch.tensor(factors) * rope.theta**exponents), scale
    return plain, 1.0


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's rule keeps short wavelengths, divides long ones by the factor, and blends between."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = rope.original_len * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al. 2023): pairs that turn often within the original context stay, those that turn seldom are divided by the factor."""

    def pair_of(turns: float) -> float:
        return rope.dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    share = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * share + plain * (1 - share)


def _yarn_scale(rope: RopeSpec) -> float:
    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    return of(1.0) if rope.mscale is None else of(rope.mscale[0]) / of(rope.mscale[1])


def head_order(rope: RopeSpec, head_dim: int) -> torch.Tensor | None:
    """In which order a head's numbers lie, so that number i turns with number i + head_dim / 2 as kernels have it; None: as they are.

    Scores are sums over a head, so that queries and keys may lie in any order that is the same for both.
    """
    if rope.dim == head_dim and not rope.is_interleaved:
        return None
    turning, rest = torch.arange(rope.dim), torch.arange(rope.dim, head_dim)
    first, second = (turning[::2], turning[1::2]) if rope.is_interleaved else turning.chunk(2)
    rests = rest.chunk(2) if len(rest) else (rest, rest)
    return torch.cat([first, rests[0], second, rests[1]])


class Angles(NamedTuple):
    """Of T tokens."""

    cos: torch.Tensor
    """[T, 1, D]"""
    sin: torch.Tensor
    query_scale: torch.Tensor | None
    """[T, 1, 1]"""
    positions: torch.Tensor | None = None
    """[T] int64: cos and sin are those of all positions [L, 1, D]. None: of the tokens."""

    @property
    def own(self) -> Angles:
        """Of the tokens in any case."""
        return self if self.positions is None else Angles(self.cos[self.positions], self.sin[self.positions], self.query_scale)


class RopeTables:
    """cos and sin of every position."""

    def __init__(
        self, rope: RopeSpec, head_dim: int, context_len: int, dtype: torch.dtype, device: torch.device, score_scale: float | None = None
    ) -> None:
        """score_scale: what scores are multiplied with, where it is not head_dim ** -0.5: it is in the tables, half of it on either side."""
        own, scale = frequencies(rope, context_len)
        rest = 1.0
        if score_scale is not None:
            rest = math.sqrt(score_scale * head_dim**0.5)
        if rope.dim < head_dim:
            own = torch.cat([own, torch.zeros((head_dim - rope.dim) // 2)])
        factors = torch.full((head_dim // 2,), rest)
        factors[: rope.dim // 2] *= scale
        self.cos, self.sin = rope_tables(own, context_len, dtype, device, None if factors.eq(1).all() else factors)
        self._query_scale = None
        if rope.query_scale_beta:
            steps = torch.arange(context_len) // rope.original_len
            self._query_scale = (1 + rope.query_scale_beta * steps.float().log1p()).to(device, dtype)[:, None, None]

    def at(self, positions: torch.Tensor) -> Angles:
        scale = self._query_scale
        return Angles(self.cos[positions], self.sin[positions], None if scale is None else scale[positions])

    def for_one(self, positions: torch.Tensor) -> Angles:
        """The same for one layer: on a GPU it looks them up itself."""
        if not positions.is_cuda:
            return self.at(positions)
        return Angles(self.cos, self.sin, None if self._query_scale is None else self._query_scale[positions], positions)


def rope_tables(
    frequencies: torch.Tensor, length: int, dtype: torch.dtype, device: torch.device, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, 1, D] as `kernels.reference.append_kv` wants them: sin negated in its first half. factors [D / 2]: of both."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    if factors is not None:
        cos, sin = cos * factors, sin * factors
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return cos[:, None].to(device, dtype), sin[:, None].to(device, dtype)
