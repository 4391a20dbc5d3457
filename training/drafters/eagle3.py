"""EAGLE-3 (Li et al. 2025): one layer over the token's embedding and a projection of the target's states at three depths, side by side. It is
trained over its own states for several steps, as it drafts (training-time test), on the target's distribution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from backend.errors import ModelError
from training.drafters.drafter import Drafter, Options
from training.drafters.layers import DecoderLayers, matrix, shift
from training.target import States, Target


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The authors' choice: what enters layers 2, n / 2 and n - 3. Raises ModelError where there are too few."""
    if num_layers < 4:
        raise ModelError(f"eagle3 taps what enters layers 2, n / 2 and n - 3 of the target, which has {num_layers}: name others with --taps")
    return 2, num_layers // 2, num_layers - 3


class Eagle3(Drafter):
    """Saved under SpecForge's names, which vLLM, SGLang and the authors' code read; with other taps than the usual ones as a speculators' folder."""

    method, default_drafts = "eagle3", 5
    accepted_options = frozenset({"inner", "taps", "draft_vocab_size"})

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        self.layers = options.taps or usual_taps(target.num_layers)
        if max(self.layers) > target.num_layers or min(self.layers) < 1:
            raise ModelError(f"--taps {','.join(map(str, self.layers))}: the target's layers have inputs 1 to {target.num_layers} (its last output)")
        hidden, values = target.hidden_size, target.drafter_config()
        self.values: dict[str, Any] = values | {"intermediate_size": options.inner or values["intermediate_size"]}
        self.fc = matrix(1, hidden, len(self.layers) * hidden)
        self.decoder = DecoderLayers(self.values, 1, in_features=2 * hidden)
        for name in ("input_norm", "hidden_norm", "norm"):
            setattr(self, name, nn.Parameter(torch.ones(hidden)))
        head = target.head.detach().float()
        self.draft_ids = options.draft_ids
        with torch.no_grad():
            self.norm.copy_(target.norm.float())
        self.head = nn.Parameter(head[self.draft_ids].clone() if self.draft_ids is not None else head.clone())

    def forward(self, target: Target, states: States) -> list[torch.Tensor]:
        decoder = self.decoder
        embedded = decoder.norm(target.embed(states.ids), self.input_norm)
        previous = F.linear(torch.cat([states.entering[layer] for layer in self.layers], dim=-1), self.fc[0])
        # The first token has no state before it, and is in no pair: its keys and values are zeros, as in serving.
        is_first = torch.arange(states.ids.shape[1], device=states.ids.device)[:, None] == 0
        outputs: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for _ in range(self.options.drafts):
            before = shift(previous)
            pair = torch.cat([embedded, decoder.norm(before, self.hidden_norm)], dim=-1)
            previous = decoder.run(0, before, pair.masked_fill(is_first, 0), keys, values)
            outputs.append(decoder.norm(previous, self.norm))
        return outputs

    def score(self, target: Target, step: int, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.head).float()

    def vocabulary_heads(self) -> list[nn.Parameter]:
        return [self.head]

    def named(self) -> dict[str, torch.Tensor]:
        layer = "midlayer" if self.options.taps is None else "layers.0"
        table = {"fc.weight": self.fc[0], "lm_head.weight": self.head, "norm.weight": self.norm} | self.decoder.named(0, layer)
        table |= {f"{layer}.input_layernorm.weight": self.input_norm, f"{layer}.hidden_norm.weight": self.hidden_norm}
        if self.draft_ids is not None:
            drafted = torch.zeros(self.values["vocab_size"], dtype=torch.bool, device=self.draft_ids.device)
            drafted[self.draft_ids] = True
            offsets = self.draft_ids - torch.arange(len(self.draft_ids), device=self.draft_ids.device)
            table |= {"d2t": offsets, "t2d": drafted}
        return table

    def config(self, target: Target) -> dict[str, Any]:
        own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        layer = own | self.values | {"tie_word_embeddings": False, "attention_bias": False}
        if self.options.taps is None:
            return layer | {"draft_vocab_size": len(self.head)}
        # Programs count other layers in different ways, but for those in speculators' folders: what enters them.
        verifier = {"name_or_path": str(target.directory), "architectures": target.config.get("architectures", [])}
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.options.drafts}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal], "verifier": verifier},
            "transformer_layer_config": layer,
            "draft_vocab_size": len(self.head),
            "target_hidden_size": target.hidden_size,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
        }
