"""The frozen model that a drafter is trained for, as the engine itself computes it: any family that is served, with the states that serving taps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from backend.core import kv_slots
from backend.errors import ModelError
from backend.kv_store import KvStore
from backend.model_checks import check_model, read_model_config
from backend.models import load_model
from backend.models.layers import ATTENTION, Weights
from backend.models.loading import open_checkpoint
from backend.models.rope_spec import RopeSpec, describe_rope
from backend.models.spec import AttentionSpec
from backend.parallel.ranks import Ranks
from kernels import ops

PAGE_SIZE = 16
MAX_FORWARD_TOKENS = 2**15
"""Of one forward, so that what layers hold between them stays small."""
MAX_SHAPES = 8
"""Of forwards whose plans are kept."""


@dataclass(slots=True)
class States:
    """Sequences of token ids [B, T], and what the target computed at them."""

    ids: torch.Tensor
    hidden: torch.Tensor
    """[B, T, H] after the final norm."""
    entering: dict[int, torch.Tensor]
    """By layer: [B, T, H] that enters it; num_layers: what leaves the last one."""
    anchors: torch.Tensor | None = None
    """[B, N]: places of the tokens after which block drafters draft; None: of other drafters, which draft after every token."""


class Target:
    """Raises ModelError for a folder that the engine does not load, and for a head that gradients do not go through."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.directory, self.dtype, self.device = directory, dtype, device
        self.config = read_model_config(directory)
        self._spec = check_model(directory)
        self._model = model = load_model(directory, dtype, device, Ranks())
        self.hidden_size, self.vocab_size, self.num_layers = model.hidden_size, model.vocab_size, model.num_layers
        self.max_model_len = model.max_model_len
        self.eps = self._spec.layers[-1].eps
        with open_checkpoint(directory, dtype, device, "safetensors") as checkpoint:
            weights, name = Weights(checkpoint, dtype, device, Ranks()), self._spec.embedding if self._spec.is_tied else self._spec.head
            if f"{name}.weight" not in checkpoint:
                raise ModelError(f"{directory} has no {name}.weight: where the head is quantized, train on the model before its weights were rounded")
            self.head = weights.whole(f"{name}.weight", (self.vocab_size, self.hidden_size))
            bias = f"{self._spec.head}.bias"
            self._head_bias = weights.whole(bias, (self.vocab_size,)) if bias in checkpoint else None
            self.norm = weights.norm(self._spec.norm, self.hidden_size, self._spec.norm_offset)
        self._soft_cap = self._spec.logit_soft_cap
        self._store: KvStore | None = None
        self._prepared: dict[tuple[int, int], tuple[Any, ...]] = {}

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[..., H], as the first layer takes them."""
        with torch.no_grad():
            return self._model.embed(ids.flatten()).view(*ids.shape, -1)

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """[N, H] after a norm -> logits [N, V] in float32, with gradients."""
        logits = F.linear(states, self.head, self._head_bias).float()
        return logits if self._soft_cap is None else self._soft_cap * torch.tanh(logits / self._soft_cap)

    def drafter_config(self) -> dict[str, object]:
        """config.json of a Llama layer with the target's sizes: what drafters with attention are made of. `intermediate_size` is the target's."""
        part, config = self._spec.layers[0].attention, self.config
        if isinstance(part, AttentionSpec):
            num_q, num_kv, size = part.heads
        else:  # latents: a drafter's layer keeps keys and values
            size = 128 if self.hidden_size % 128 == 0 else 64
            num_q = num_kv = max(1, self.hidden_size // size)
        rope, _, _ = part.turning
        if rope.dim < size or not isinstance(part, AttentionSpec):
            rope = RopeSpec(size, rope.theta)  # a drafter's layer turns whole heads
        elif rope.kind == "longrope":  # which factors a server's target has depends on its context; the drafter keeps those that it is trained with
            own = rope.long_factor if self.max_model_len > rope.original_len else rope.short_factor
            rope = replace(rope, short_factor=own, long_factor=own)
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": config.get("intermediate_size") or 4 * self.hidden_size,
            "num_attention_heads": num_q,
            "num_key_value_heads": num_kv,
            "head_dim": size,
            "max_position_embeddings": self.max_model_len,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            **describe_rope(rope),
        }

    @torch.no_grad()
    def states(self, ids: torch.Tensor, layers: Sequence[int]) -> States:
        """Token ids [B, T] -> the states that the engine has of them."""
        count = max(1, MAX_FORWARD_TOKENS // ids.shape[1])
        parts = [self._forward(part, layers) for part in ids.split(count)]
        if len(parts) == 1:
            return parts[0]
        entering = {layer: torch.cat([part.entering[layer] for part in parts]) for layer in layers}
        return States(ids, torch.cat([part.hidden for part in parts]), entering)

    def _forward(self, ids: torch.Tensor, layers: Sequence[int]) -> States:
        batch, length = ids.shape
        positions, slots, cache, plan = self._prepare(batch, length)
        entering: dict[int, torch.Tensor] = dict.fromkeys(layers, torch.empty(0))
        hidden = self._model.forward(ids.flatten(), positions, slots, cache, plan, entering=entering)
        shape = (batch, length, -1)
        return States(ids, hidden.view(shape), {layer: state.view(shape) for layer, state in entering.items()})

    def _prepare(self, batch: int, length: int) -> tuple[Any, ...]:
        """Positions, slots, cache and plan of so many sequences: batches are alike, and in Python these take as long as a GPU's step, or longer."""
        model, width = self._model, -(-length // PAGE_SIZE)
        if self._store is None or self._store.num_pages < batch * width:
            self._store = KvStore(model.cache_specs(self.dtype), PAGE_SIZE, batch * width, self.device)
            self._prepared.clear()
        store, shape = self._store, (batch, length)
        if shape not in self._prepared:
            if len(self._prepared) >= MAX_SHAPES:
                self._prepared.clear()
            planes, pages = store.planes(ATTENTION), [list(range(b * width, (b + 1) * width)) for b in range(batch)]
            slots = torch.tensor([s for own in pages for s in kv_slots(own, 0, length, PAGE_SIZE, store.stride(ATTENTION))], device=self.device)
            positions = torch.arange(length, device=self.device).repeat(batch)
            plan = ops.plan_attention([length] * batch, [length] * batch, pages, PAGE_SIZE, model.heads, self.dtype, self.device)
            each = len(planes) // model.num_layers
            cache = [tuple(planes[each * i : each * (i + 1)]) for i in range(model.num_layers)]
            self._prepared[shape] = (positions, slots, cache, plan)
        return self._prepared[shape]
