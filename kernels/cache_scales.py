"""The scales of keys and values that are kept in e4m3: where they meet what is written, and what is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, eq=False)
class CacheScales:
    """Of one layer on one rank. A number is kept as e4m3(number / scale); reading multiplies scores and results, not what is kept.

    Scores are linear in keys and results in values, so a head's scale moves from all its keys to the few scores, and from its values to the few
    results. Kernels multiply sums in float32. What has no kernel multiplies queries, query . (scale code) = (scale query) . code, and results: with
    scales that are powers of two that is exact; with others they are rounded once more, in their own type.
    """

    keys: torch.Tensor
    """[Hkv] float32, above 0. Of latents [1]: of the key that turns, which all heads share."""
    values: torch.Tensor
    """[Hkv] float32, above 0. Of latents [1]: of the latent."""
    key_factors: torch.Tensor = field(init=False)
    """1 / keys: what is multiplied with when they are written. Rounded here once, so that kernels and their twins write the same codes."""
    value_factors: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            own = getattr(self, name)
            if own.dtype != torch.float32 or own.shape != (len(self.keys),) or not own.is_contiguous():
                raise ValueError(f"scales of {name} are {own.dtype} {list(own.shape)}; must be float32 [{len(self.keys)}], contiguous")
        object.__setattr__(self, "key_factors", self.keys.reciprocal())
        object.__setattr__(self, "value_factors", self.values.reciprocal())

    def check(self, num_kv: int, what: str) -> None:
        """Raises ValueError where there are not as many as heads."""
        if len(self.keys) != num_kv:
            raise ValueError(f"{what}: scales are of {len(self.keys)} heads of keys and values; must be of {num_kv}")

    def scale_query(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, D] as they meet codes of keys."""
        return _times(query, self.keys)

    def scale_result(self, result: torch.Tensor) -> torch.Tensor:
        """What attention over codes of values gives [T, H, D], as it is over the values."""
        return _times(result, self.values)

    def scale_latent_query(self, query: torch.Tensor, still: int) -> torch.Tensor:
        """Queries [T, H, still + D], whose first numbers meet keys that are made of latents, and whose others meet the shared key."""
        factors = torch.cat([self.values.expand(still), self.keys.expand(query.shape[2] - still)])
        return (query * factors).to(query.dtype)


def check_scales(pages: torch.Tensor, scales: CacheScales | None) -> None:
    """Raises ValueError where pages [P, page, Hkv, ...] are in e4m3 and scales are missing, or the reverse, or there are not as many as heads."""
    if (pages.dtype == torch.float8_e4m3fn) != (scales is not None):
        raise ValueError(f"pages are {pages.dtype}, scales {'missing' if scales is None else 'given'}; they go with {torch.float8_e4m3fn} alone")
    if scales is not None:
        scales.check(pages.shape[2], "attention")


def attend_scaled(
    attend: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor, scales: CacheScales | None, still: int | None = None
) -> torch.Tensor:
    """What `attend` makes of queries [T, H, D] where it takes codes for numbers. still: how many numbers of a query meet keys made of latents."""
    if scales is None:
        return attend(query)
    return scales.scale_result(attend(scales.scale_query(query) if still is None else scales.scale_latent_query(query, still)))


def _times(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], of each group of H / Hkv heads with its scale, rounded once."""
    return (x.unflatten(1, (len(scales), -1)) * scales[:, None, None]).to(x.dtype).flatten(1, 2)
