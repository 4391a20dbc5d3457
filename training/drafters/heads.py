"""Drafting heads, each of which makes one draft from one state of the target: Medusa, Hydra, MLP speculators."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from backend.models.heads import NORM_EPS
from training.drafters.drafter import Drafter, Options
from training.drafters.layers import matrix, shift
from training.target import States, Target


def copies_of_head(target: Target, count: int) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(target.head.detach().float().clone()) for _ in range(count)])


class Medusa(Drafter):
    """Medusa-1 (Cai et al. 2024): head j says what comes j + 2 tokens after a state, whatever lies between: residual blocks that begin as
    nothing, and a copy of the target's head; cross-entropy of the text, 0.8 of the weight for each further head. Saved under vLLM's names."""

    method, default_drafts, default_loss = "medusa", 4, "text"
    accepted_options = frozenset({"layers"})

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        self.blocks = nn.Parameter(torch.zeros(options.drafts * options.layers, target.hidden_size, target.hidden_size))
        self.heads = copies_of_head(target, options.drafts)

    def forward(self, target: Target, states: States) -> list[torch.Tensor]:
        return [shift(states.hidden, step + 1) for step in range(self.options.drafts)]

    def score(self, target: Target, step: int, rows: torch.Tensor) -> torch.Tensor:
        count = self.options.layers
        for weight in self.blocks[step * count : (step + 1) * count]:
            rows = rows + F.silu(F.linear(rows, weight))
        return F.linear(rows, self.heads[step]).float()

    def vocabulary_heads(self) -> list[nn.Parameter]:
        return list(self.heads)

    def named(self) -> dict[str, torch.Tensor]:
        count = self.options.layers
        table: dict[str, torch.Tensor] = {f"lm_heads.{i}.weight": head for i, head in enumerate(self.heads)}
        return table | {f"blocks.{n // count}.layers.{n % count}.weight": weight for n, weight in enumerate(self.blocks)}

    def config(self, target: Target) -> dict[str, Any]:
        own = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": self.options.drafts, "num_hidden_layers": self.options.layers}
        return own | {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "truncated_vocab_size": target.vocab_size}


class Hydra(Drafter):
    """Hydra (Ankner et al. 2024), arch `mlp`: Medusa's heads that also see the embeddings of the drafts before theirs. Trained on the target's
    distribution, as Hydra++ is. Saved under the authors' names."""

    method, default_drafts = "hydra", 4
    accepted_options = frozenset({"layers"})

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        hidden = target.hidden_size
        widths = [hidden * (i + 2 if j == 0 else 1) for i in range(options.drafts) for j in range(options.layers)]
        self.linear = nn.ParameterList([nn.Parameter(torch.zeros(1, hidden, width)) for width in widths])
        self.bias = nn.ParameterList([nn.Parameter(torch.zeros(hidden)) for _ in widths])
        # The state passes as it is at first; the embeddings beside it add nothing yet.
        self.shortcut = nn.ParameterList([nn.Parameter(torch.eye(hidden, width)[None]) for width in widths[:: options.layers]])
        self.shortcut_bias = nn.ParameterList([nn.Parameter(torch.zeros(hidden)) for _ in self.shortcut])
        self.heads = copies_of_head(target, options.drafts)
        self.head_bias = nn.ParameterList([nn.Parameter(torch.zeros(target.vocab_size)) for _ in self.heads])

    def forward(self, target: Target, states: States) -> list[torch.Tensor]:
        embedded = target.embed(states.ids)
        outputs = []
        for step in range(self.options.drafts):
            parts = [shift(states.hidden, step + 1), *(shift(embedded, back) if back else embedded for back in range(step, -1, -1))]
            outputs.append(torch.cat(parts, dim=-1))
        return outputs

    def score(self, target: Target, step: int, rows: torch.Tensor) -> torch.Tensor:
        for j in range(self.options.layers):
            number = step * self.options.layers + j
            x = rows if j else F.linear(rows, self.shortcut[step][0], self.shortcut_bias[step])
            rows = x + F.silu(F.linear(rows, self.linear[number][0], self.bias[number]))
        return F.linear(rows, self.heads[step], self.head_bias[step]).float()

    def vocabulary_heads(self) -> list[nn.Parameter]:
        return list(self.heads)

    def named(self) -> dict[str, torch.Tensor]:
        table: dict[str, torch.Tensor] = {}
        for i in range(self.options.drafts):
            for j in range(self.options.layers):
                number, where = i * self.options.layers + j, f"hydra_mlp.{i}.{j}"
                table |= {f"{where}.linear.weight": self.linear[number][0], f"{where}.linear.bias": self.bias[number]}
            where = f"hydra_mlp.{i}.0.res_connection"
            table |= {f"{where}.weight": self.shortcut[i][0], f"{where}.bias": self.shortcut_bias[i]}
            table |= {f"hydra_lm_head.{i}.weight": self.heads[i], f"hydra_lm_head.{i}.bias": self.head_bias[i]}
        return table

    def config(self, target: Target) -> dict[str, Any]:
        own = {"hydra_head_arch": "mlp", "hydra_num_heads": self.options.drafts, "hydra_num_layers": self.options.layers, "grounded_heads": True}
        return own | {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}


class MlpSpeculator(Drafter):
    """IBM's MLP speculator (Wertheimer et al. 2024): a state that each draft's embedding is added to. Cross-entropy of the text."""

    method, default_drafts, default_loss, decay = "mlp_speculator", 3, "text", 1.0
    accepted_options = frozenset({"inner"})

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        count, self.inner = options.drafts, options.inner or target.hidden_size
        self.projections = nn.ParameterList([matrix(1, self.inner, self.inner if i else target.hidden_size) for i in range(count)])
        self.embeddings = nn.ParameterList([nn.Parameter(torch.randn(target.vocab_size, self.inner) * self.inner**-0.5) for _ in range(count)])
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(self.inner)) for _ in range(count)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(self.inner)) for _ in range(count)])
        self.heads = nn.ParameterList([nn.Parameter(torch.randn(target.vocab_size, self.inner) * self.inner**-0.5) for _ in range(count)])
        share = 0.5 ** (0.5 / count)
        self.token_weight = math.sqrt((1 - share**2) * (self.inner / 2)) / share

    def forward(self, target: Target, states: States) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        state = states.hidden
        for step in range(self.options.drafts):
            x = F.linear(shift(state), self.projections[step][0]) + self.token_weight * F.embedding(states.ids, self.embeddings[step])
            state = F.gelu(F.rms_norm(x, (self.inner,), self.norms[step], NORM_EPS) + self.biases[step])
            outputs.append(state)
        return outputs

    def score(self, target: Target, step: int, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.heads[step]).float()

    def named(self) -> dict[str, torch.Tensor]:
        table: dict[str, torch.Tensor] = {}
        for i in range(self.options.drafts):
            table |= {f"speculator.emb.{i}.weight": self.embeddings[i], f"speculator.proj.{i}.weight": self.projections[i][0]}
            table |= {f"speculator.ln.{i}.weight": self.norms[i], f"speculator.ln.{i}.bias": self.biases[i]}
            table |= {f"speculator.head.{i}.weight": self.heads[i]}
        return table

    def config(self, target: Target) -> dict[str, Any]:
        own: dict[str, Any] = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_predict": self.options.drafts}
        own |= {"emb_dim": target.hidden_size, "inner_dim": self.inner, "vocab_size": target.vocab_size}
        return own | {"tie_weights": False, "scale_input": False}
