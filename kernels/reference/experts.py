"""Mixtures of experts: which experts a token takes, and what those make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def route(
    scores: torch.Tensor,
    num_chosen: int,
    *,
    correction: torch.Tensor | None = None,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    num_group_scores: int = 1,
    min_sum: float | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token [T, k] int64 and the weights of what they add [T, k], from scores [T, E] float32.

    The choice is by scores plus correction [E], the weights are of the scores alone (DeepSeek-V3, 2024, section 2.1.2). With groups of experts
    only those of the num_chosen_groups best groups take part, by the sum of a group's num_group_scores best (DeepSeek-V2, 2024, section 2.2.2).
    min_sum: weights are divided by their sum, which counts as this at least; None: they are not. scale: of all weights.
    """
    ranking = scores if correction is None else scores + correction
    if num_groups > 1:
        grouped = ranking.unflatten(-1, (num_groups, -1))
        group_scores = grouped.topk(num_group_scores, dim=-1).values.sum(dim=-1)
        best = group_scores.topk(num_chosen_groups, dim=-1).indices
        is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
        ranking = grouped.masked_fill(is_out[..., None], float("-inf")).flatten(-2)
    experts = ranking.topk(num_chosen, dim=-1).indices
    weights = scores.gather(-1, experts)
    if min_sum is not None:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=min_sum)
    return experts, weights if scale == 1.0 else weights * scale


def mix_experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, own: Sequence[Callable[[torch.Tensor], torch.Tensor]], first: int = 0
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it: x [T, hidden] -> [T, hidden].

    experts [T, k] int64, weights [T, k] float32; own: the experts from number `first` on, [n, hidden] -> [n, hidden]. Those that no token
    takes are not run; what others would add is left out. A token's sum does not depend on the tokens beside it but for its products' rounding.
    """
    (num_tokens, num_chosen), numbers = experts.shape, experts.flatten() - first
    order = numbers.argsort(stable=True)
    hit, counts = numbers[order].unique_consecutive(return_counts=True)
    made = x.new_zeros(num_tokens * num_chosen, x.shape[1])
    rows_of = order.split(counts.tolist())
    for number, rows in zip(hit.tolist(), rows_of):
        if 0 <= number < len(own):
            made[rows] = own[number](x[rows // num_chosen])
    return (made.view(num_tokens, num_chosen, -1) * weights[..., None]).sum(dim=1).to(x.dtype)
