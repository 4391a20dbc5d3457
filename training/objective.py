"""The loss of drafters of every kind, and how often they agree with the target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.drafters import Drafter
from training.target import States, Target

LOSSES = ("target", "text", "l1")
"""Divergence from the target's distribution; cross-entropy of the text's own next token; TEXT_SHARE of that, and L1 distance from the target's."""
TEXT_SHARE = 0.1
"""As DSpark is trained."""
MAX_LOGITS = 2**27
"""That are in memory at a time: longer batches are scored in parts, whose logits are made again for the gradients."""


class Objective(nn.Module):
    """States -> by step sums over rows [S, 3]: of the loss, of agreements on the likeliest token, of rows that count (`average`)."""

    def __init__(self, target: Target, drafter: Drafter, loss: str) -> None:
        super().__init__()
        self._target, self.drafter, self._loss = target, drafter, loss

    def forward(self, states: States) -> torch.Tensor:
        ids = states.ids
        following = F.pad(ids[:, 1:], (0, 1), value=-1)
        outputs = self.drafter(self._target, states)
        found = []
        for step, output in enumerate(outputs):
            if states.anchors is None:
                # Rows before have no state to be drafted from; the last one has no text after it.
                rows = slice(step + 1, ids.shape[1] - (self._loss != "target"))
                parts = [x[:, rows].flatten(0, 1) for x in (output, states.hidden, following)]
            else:
                places = torch.arange(len(ids), device=ids.device)[:, None], states.anchors + step
                parts = [x.flatten(0, 1) for x in (output, states.hidden[places], following[places])]
            sums = torch.zeros(3, device=ids.device)
            size = max(1, MAX_LOGITS // self._target.vocab_size)
            is_split = len(parts[0]) > size
            for part in zip(*(x.split(size) for x in parts)):
                if is_split:
                    sums = sums + checkpoint(self._rows, step, *part, use_reentrant=False)
                else:
                    sums = self._rows(step, *part)
            found.append(sums)
        return torch.stack(found)

    def average(self, sums: torch.Tensor, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Of sums [S, 3] the loss, and by step [S] the share of rows where drafter and target agree. rows [S]: that count; None: the sums'."""
        count = (sums[:, 2] if rows is None else rows).detach().clamp(min=1)
        weights = self.drafter.decay ** torch.arange(len(sums), device=sums.device)
        return (weights * sums[:, 0] / count).sum(), (sums[:, 1] / count).detach()

    def _rows(self, step: int, rows: torch.Tensor, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Sums over rows [N]: of the loss, of agreements, of rows that count (those whose likeliest token the drafter has)."""
        drafter, target = self.drafter, self._target
        with torch.no_grad():
            scores = target.score(hidden)
            best = scores.argmax(dim=-1)
            kept = drafter.draft_ids
            is_drafted = torch.ones_like(best, dtype=torch.bool)
            if kept is not None:
                is_drafted = torch.isin(best if self._loss == "target" else following, kept)
                scores = scores[:, kept]
            wanted = scores.log_softmax(dim=-1)
            probs = wanted.exp()
        logits = drafter.score(target, step, rows)
        likeliest = logits.argmax(dim=-1)
        agreed = (likeliest if kept is None else kept[likeliest]) == best
        judged = drafter.judge(rows)
        if self._loss == "l1" or judged is not None:
            distance = (logits.softmax(dim=-1) - probs).abs().sum(dim=-1)
        if self._loss != "target":
            label = following if kept is None else torch.searchsorted(kept, following).clamp(max=len(kept) - 1)
            losses = F.cross_entropy(logits, label, reduction="none")
            if self._loss == "l1":
                losses = TEXT_SHARE * losses + (1 - TEXT_SHARE) * distance
        else:
            losses = (probs * wanted).sum(dim=-1) - (probs * logits).sum(dim=-1) + logits.logsumexp(dim=-1)
            if drafter.sharpen:
                losses = losses + drafter.sharpen * F.cross_entropy(logits, wanted.argmax(dim=-1), reduction="none")
        if judged is not None:
            # A draft stands, where it is drawn as `rejection` draws it, as often as the two distributions overlap.
            losses = losses + F.binary_cross_entropy_with_logits(judged, 1 - distance.detach() / 2, reduction="none")
        return torch.stack([(losses * is_drafted).sum(), (agreed & is_drafted).sum().float(), is_drafted.sum().float()])
