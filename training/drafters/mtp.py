"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2): each layer pairs a token's embedding with the hidden state of the position before
it, projects the two to one, and runs one decoder layer; embedding and head are the target's. Layer 1 takes the target's hidden state, layer k
that of layer k - 1; past the last layer the last one is fed with its own output, which training unrolls (as EAGLE-3's training-time test, Li
et al. 2025) so that it learns to live with its own errors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from training.drafters.drafter import Drafter, Options
from training.drafters.layers import DecoderLayers, matrix, shift
from training.target import States, Target

NORMS = {"enorm": "enorm", "hnorm": "hnorm", "input_norm": "input_layernorm", "norm": "shared_head.norm"}


class Mtp(Drafter):
    method, default_drafts, sharpen = "mtp", 3, 0.3
    accepted_options = frozenset({"layers", "inner"})

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        values = target.drafter_config()
        self.values: dict[str, Any] = values | {"intermediate_size": options.inner or values["intermediate_size"]}
        count, hidden = options.layers, target.hidden_size
        self.eh = matrix(count, hidden, 2 * hidden)
        self.decoder = DecoderLayers(self.values, count)
        for name in NORMS:
            setattr(self, name, nn.Parameter(torch.ones(count, hidden)))
        with torch.no_grad():
            self.norm.copy_(target.norm.float().expand(count, -1))

    def forward(self, target: Target, states: States) -> list[torch.Tensor]:
        decoder, embedded, previous = self.decoder, target.embed(states.ids), states.hidden
        outputs: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(self.options.drafts):
            layer = min(step, self.options.layers - 1)
            if layer == step:
                keys, values = [], []  # a layer's first pass: its keys are those of known tokens
            pair = [decoder.norm(embedded, self.enorm[layer]), decoder.norm(shift(previous), self.hnorm[layer])]
            x = F.linear(torch.cat(pair, dim=-1), self.eh[layer])
            previous = decoder.run(layer, x, decoder.norm(x, self.input_norm[layer]), keys, values)
            outputs.append(decoder.norm(previous, self.norm[layer]))
        return outputs

    def score(self, target: Target, step: int, rows: torch.Tensor) -> torch.Tensor:
        return target.score(rows)

    def named(self) -> dict[str, torch.Tensor]:
        table: dict[str, torch.Tensor] = {}
        for i in range(self.options.layers):
            prefix = f"model.layers.{i}"
            table |= {f"{prefix}.eh_proj.weight": self.eh[i]} | self.decoder.named(i, prefix)
            table |= {f"{prefix}.{name}.weight": getattr(self, attribute)[i] for attribute, name in NORMS.items()}
        return table

    def config(self, target: Target) -> dict[str, Any]:
        own = {"architectures": ["LlamaMTP"], "num_nextn_predict_layers": self.options.layers, "num_model_steps_trained": self.options.drafts}
        return own | self.values
