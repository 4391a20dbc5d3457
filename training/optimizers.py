"""What trainings step with."""

from __future__ import annotations

import torch

WARMUP, COOLDOWN = 100, 0.6


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), scaled to AdamW's update size (Liu et al. 2025).

    torch.optim.Muon takes one matrix at a time; this one takes a stack [layers, out, in], so a step is 7 batches of
    products instead of 140.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(state["momentum"], group["momentum"]).bfloat16()
                is_tall = x.shape[-2] > x.shape[-1]
                x = x.mT if is_tall else x
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    gram = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                x = x.mT if is_tall else x
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x.to(p.dtype), alpha=-0.2 * max(p.shape[-2:]) ** 0.5 * group["lr"])


def learning_rate(step: int, steps: int | None) -> float:
    """Share of the peak: linear warm-up (a tenth of a short run), flat, then linear to zero over the last COOLDOWN of the run.

    steps: None while nobody knows yet.
    """
    if steps is None:
        return min((step + 1) / WARMUP, 1.0)
    return min((step + 1) / min(WARMUP, max(1, steps // 10)), 1.0, (steps - step) / (COOLDOWN * steps))
