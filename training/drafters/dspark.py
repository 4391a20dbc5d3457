"""DSpark (DeepSeek 2026): DFlash whose first draft is made by the newest token's own row, with a Markov head, which adds to each draft's scores what
the token before says of it, and a confidence head, which says how likely a draft is to stand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from training.drafters.dflash import Dflash
from training.drafters.drafter import Options
from training.drafters.layers import matrix
from training.target import States, Target

MIXERS = {"gated": "gate_proj", "rnn": "joint_proj"}


class Dspark(Dflash):
    """A tenth of cross-entropy of the text and nine tenths of L1 distance from the target's distribution; the confidence head learns the chance to
    stand, one less half that distance. In training the tokens before drafts are those of the text. Saved under DeepSeek's names."""

    method, default_drafts, default_loss, rows_before_drafts = "dspark", 7, "l1", 0
    accepted_options = Dflash.accepted_options | {"markov_rank", "markov_head_type"}

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        rank, hidden, size = options.markov_rank, target.hidden_size, target.vocab_size
        self.markov_w1 = nn.Parameter(torch.randn(size, rank) * rank**-0.5)
        self.markov_w2 = nn.Parameter(torch.zeros(size, rank))
        mixed = {"vanilla": None, "gated": (rank, hidden + rank), "rnn": (3 * rank, hidden + 2 * rank)}[options.markov_head_type]
        if mixed is not None:
            self.mixer, self.mixer_bias = matrix(1, *mixed), nn.Parameter(torch.zeros(mixed[0]))
        self.confidence, self.confidence_bias = nn.Parameter(torch.zeros(1, hidden + rank)), nn.Parameter(torch.zeros(1))

    def forward(self, target: Target, states: States) -> list[torch.Tensor]:
        """Of each draft: the block's row, what the Markov head scores with, and its numbers of the token before, side by side."""
        blocks, outputs = super().forward(target, states), []
        assert states.anchors is not None
        state = torch.zeros(1, device=states.ids.device).expand(*states.anchors.shape, self.options.markov_rank)
        for step, hidden in enumerate(blocks):
            embedded = F.embedding(states.ids.gather(1, states.anchors + step), self.markov_w1)
            mixed, state = self._mix(embedded, hidden, state)
            outputs.append(torch.cat([hidden, mixed, embedded], dim=-1))
        return outputs

    def _mix(self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is scored with [B, N, rank], and the state after it."""
        kind = self.options.markov_head_type
        if kind == "vanilla":
            return embedded, state
        seen = [hidden, embedded] if kind == "gated" else [state, embedded, hidden]
        mixed = F.linear(torch.cat(seen, dim=-1), self.mixer[0], self.mixer_bias)
        if kind == "gated":
            return mixed.sigmoid() * embedded, state
        gate, candidate, out = mixed.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rank = self.options.markov_rank
        return rows.split([rows.shape[-1] - 2 * rank, rank, rank], dim=-1)

    def score(self, target: Target, step: int, rows: torch.Tensor) -> torch.Tensor:
        hidden, mixed, _ = self._parts(rows)
        return target.score(hidden) + F.linear(mixed, self.markov_w2).float()

    def judge(self, rows: torch.Tensor) -> torch.Tensor:
        hidden, _, embedded = self._parts(rows)
        return F.linear(torch.cat([hidden, embedded], dim=-1), self.confidence, self.confidence_bias)[:, 0].float()

    def named(self) -> dict[str, torch.Tensor]:
        table = super().named() | {"markov_head.markov_w1.weight": self.markov_w1, "markov_head.markov_w2.weight": self.markov_w2}
        if name := MIXERS.get(self.options.markov_head_type):
            table |= {f"markov_head.{name}.weight": self.mixer[0], f"markov_head.{name}.bias": self.mixer_bias}
        return table | {"confidence_head.proj.weight": self.confidence, "confidence_head.proj.bias": self.confidence_bias}

    def config(self, target: Target) -> dict[str, Any]:
        options = self.options
        own: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], "num_anchors": options.num_anchors, "markov_rank": options.markov_rank}
        own |= {"markov_head_type": options.markov_head_type, "enable_confidence_head": True, "confidence_head_with_markov": True}
        return own | self.masked() | self.shape(target)
