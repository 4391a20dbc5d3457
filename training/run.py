"""What a training run is: all that decides what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from training.drafters import KINDS, Drafter, Options
from training.target import Target

CHECKPOINT = "checkpoint.pt"


@dataclass(slots=True)
class Run:
    """All that decides what is trained; two runs of equal values are equal, to the bit on CPU."""

    kind: str
    model: Path
    out: Path
    steps: int | None
    """None: as many as fit into `minutes`."""
    batch_size: int
    context: int
    lr: float
    seed: int
    loss: str
    drafts: int
    layers: int
    inner: int | None
    taps: tuple[int, ...] | None
    dtype: str
    num_anchors: int | None = None
    markov_rank: int | None = None
    markov_head_type: str | None = None
    mask_token_id: int | None = None
    states: Path | None = None
    draft_ids: torch.Tensor | None = None
    device: str = "cpu"
    processes: int = 1
    checkpoint_every: int = 500
    resume: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    """What the token ids are made of, in words and numbers."""
    target: str = ""
    """Fingerprint of the model, which may lie elsewhere when a run goes on."""
    minutes: float | None = None
    clock: Callable[[], float] = time.perf_counter
    """Of these minutes, and of the log's seconds."""

    @property
    def checkpoint(self) -> Path:
        return self.out / CHECKPOINT

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have as the run before it had it."""
        free = ("model", "out", "device", "processes", "checkpoint_every", "resume", "draft_ids", "clock")
        values = {key: value for key, value in asdict(self).items() if key not in free}
        drafted = None if self.draft_ids is None else len(self.draft_ids)
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()} | {"draft_vocab_size": drafted}

    def make_drafter(self, target: Target) -> Drafter:
        """As it begins. Raises ModelError."""
        torch.manual_seed(self.seed)
        ids = None if self.draft_ids is None else self.draft_ids.to(target.device)
        own = ("mask_token_id", "num_anchors", "markov_rank", "markov_head_type")
        given = {key: value for key in own if (value := getattr(self, key)) is not None}
        return KINDS[self.kind](target, Options(self.drafts, self.layers, self.inner, self.taps, ids, **given)).to(target.device)

    def draw_anchors(self, generator: torch.Generator) -> torch.Tensor | None:
        """Places [batch_size, num_anchors] of a step's blocks, in order, with a state before them and text after each draft; None: no blocks."""
        if self.num_anchors is None:
            return None
        drawn = torch.rand(self.batch_size, count_anchors(self.context, self.drafts), generator=generator).argsort(dim=1)
        return 1 + drawn[:, : self.num_anchors].sort(dim=1).values


def count_anchors(context: int, drafts: int) -> int:
    """Places of a sequence after which so many drafts have a text to be compared with."""
    return context - 1 - drafts
