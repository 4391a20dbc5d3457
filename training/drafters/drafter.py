"""What the trainer asks of a drafter, whatever its kind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from backend.models.shards import save_weights
from training.target import States, Target


@dataclass(frozen=True, slots=True)
class Options:
    """Of a drafter's shape. None: the kind's own default."""

    drafts: int
    """Steps that it is trained for; of heads, their number; of a block, those that it makes."""
    layers: int = 1
    """Modules of mtp, residual blocks of each head, layers of a block drafter."""
    inner: int | None = None
    """Width of the feed-forward part, or of an MLP speculator's state."""
    taps: tuple[int, ...] | None = None
    """eagle3 and block drafters: layers of the target whose input it takes."""
    draft_ids: torch.Tensor | None = field(default=None, compare=False)
    """eagle3: ids [Vd], ascending, that it drafts; None: all."""
    mask_token_id: int = 0
    """Block drafters: the token that stands for the drafts of a block."""
    num_anchors: int | None = None
    """Block drafters: blocks of each sequence that are trained in a step."""
    markov_rank: int = 256
    """dspark: numbers that its Markov head keeps of each token."""
    markov_head_type: str = "vanilla"
    """dspark: vanilla, gated or rnn."""


class Drafter(nn.Module):
    """A kind of drafter. Row s of step j scores what follows token s, from the tokens up to s and the target's states up to s - j - 1: what
    serving knows when draft j is made."""

    method: ClassVar[str]
    """As in `speculative_config`."""
    default_drafts: ClassVar[int]
    default_layers: ClassVar[int] = 1
    rows_before_drafts: ClassVar[int | None] = None
    """Of a block drafter: rows of a block before that of its first draft. None: it makes no blocks."""
    default_loss: ClassVar[str] = "target"
    sharpen: ClassVar[float] = 0.0
    """Weight of the target's likeliest token beside its whole distribution."""
    decay: float = 0.8
    """Weight of each further step in the loss: it counts only when the drafts before it were accepted."""
    accepted_options: ClassVar[frozenset[str]] = frozenset()
    """Of the command, beside those of all kinds, or of all block drafters."""

    layers: tuple[int, ...] = ()
    """Of the target, whose inputs it takes; the state after the final norm is always there."""
    draft_ids: torch.Tensor | None = None

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__()
        self.options = options

    def forward(self, target: Target, states: States) -> list[torch.Tensor]:
        """Each step's states [B, T, ...], from which `score` makes logits; of a block drafter [B, N, ...], at the anchors of `states`."""
        raise NotImplementedError

    def score(self, target: Target, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows [N, ...] of a step's states -> logits [N, V] in float32, or [N, Vd] over `draft_ids`."""
        raise NotImplementedError

    def judge(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Rows [N, ...] of a step's states -> log-odds [N] in float32 that its draft stands; None: it does not say."""
        return None

    def named(self) -> dict[str, torch.Tensor]:
        """Weights under the names of the saved file."""
        raise NotImplementedError

    def config(self, target: Target) -> dict[str, Any]:
        """config.json."""
        raise NotImplementedError

    def vocabulary_heads(self) -> list[nn.Parameter]:
        """Parameters that begin as the target's head, and are trained more slowly."""
        return []

    def save(self, target: Target, out: Path, dtype: torch.dtype) -> None:
        """Writes what the engine loads: config.json and model.safetensors, floating point weights in dtype."""
        out.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, weight in self.named().items():
            own = weight.detach().cpu()
            tensors[name] = (own.to(dtype) if own.is_floating_point() else own).contiguous().clone()
        save_weights(tensors, out / "model.safetensors")
        values = self.config(target) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (out / "config.json").write_text(json.dumps(values, indent=2) + "\n")  # last: what is ended before is no drafter
