"""Loads the model of a folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from backend.errors import ModelError
from backend.kv_store import CacheSpec
from backend.model_checks import check_model
from backend.model_files import find_pickled
from backend.models.decoder import Decoder
from backend.models.latent_spec import LatentSpec
from backend.models.layers import Wanted
from backend.models.loader import Checkpoint, DummyCheckpoint, PickledCheckpoint
from backend.models.moe_spec import MoeSpec
from backend.models.spec import DecoderSpec, LayerSpec
from backend.parallel.ranks import Ranks
from kernels import ops
from kernels.attention import HEAD_DIMS

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the step needs of a family. T packed tokens, R rows that need logits."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_layers: int
    heads: tuple[int, int, int]
    """Of queries, of keys and values, and their size; on this rank."""

    def cache_specs(self, dtype: torch.dtype) -> list[CacheSpec]:
        """What it keeps of each token."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: list[tuple[torch.Tensor, ...]],
        plan: ops.Plan,
        wanted: Wanted | None = None,
        entering: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm [T, hidden], or [R, hidden] of those wanted; keys and values of all go to their slots.

        entering: by number of a layer, filled with the states [T, hidden] that enter it; num_layers: those before the final norm.
        """
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> [T, hidden], as the first layer takes them."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, V] in the model's dtype."""
        ...


def open_checkpoint(directory: str | Path, dtype: torch.dtype, device: torch.device, load_format: str) -> Checkpoint:
    """A folder's weights, or with load_format dummy random ones."""
    return DummyCheckpoint(directory, device, dtype) if load_format == "dummy" else Checkpoint(directory)


def open_drafter(directory: str | Path, dtype: torch.dtype, device: torch.device, load_format: str) -> Checkpoint:
    """The same of a drafter, whose weights may be an archive of tensors."""
    pickled = find_pickled(Path(directory))
    return PickledCheckpoint(pickled) if pickled is not None and load_format != "dummy" else open_checkpoint(directory, dtype, device, load_format)


def load_model(
    directory: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    *,
    only_head: bool = False,
    load_format: str = "safetensors",
    max_model_len: int | None = None,
    is_expert_parallel: bool = False,
) -> Model:
    """The model in a Hugging Face folder; only_head: embedding and head alone, for a drafter that shares them.

    max_model_len: the longest context that will be served, which decides whether windows matter; None: the model's own limit.
    is_expert_parallel: whole experts are spread over the ranks; else each is split.
    Raises ModelError for what is missing, truncated, mismatched or not supported.
    """
    spec = check_model(directory, has_weights=load_format != "dummy")
    context_len = min(max_model_len or spec.max_model_len, spec.max_model_len)
    if device.type == "cuda" and not only_head:
        check_gpu(spec, context_len)
    if is_expert_parallel and not any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        logger.warning("%s: expert_parallel changes nothing: the model has no experts", spec.where)
    with open_checkpoint(directory, dtype, device, load_format) as checkpoint:
        return Decoder(spec, checkpoint, dtype, device, ranks, context_len, only_head=only_head, is_expert_parallel=is_expert_parallel)


def check_gpu(spec: DecoderSpec, context_len: int) -> None:
    """Raises ModelError for parts that the CUDA kernels do not compute; on CPU all are served."""
    check_gpu_layers(spec.layers, spec.where, context_len)


def check_gpu_layers(layers: Sequence[LayerSpec], where: str, context_len: int) -> None:
    """The same of layers."""
    for mlp in (layer.mlp for layer in layers if isinstance(layer.mlp, MoeSpec)):
        raise ModelError(f"{where}: a GPU serves no experts ({mlp.router.count_key} {mlp.router.num_experts}) yet; use --device cpu")
    for layer in layers:
        part, key = layer.attention, None
        if isinstance(part, LatentSpec):
            raise ModelError(f"{where}: a GPU serves no latent attention (kv_lora_rank {part.rank}) yet; use --device cpu")
        if part.window is not None and part.window < context_len:
            key = f"sliding_window {part.window} (a context of {context_len} does not fit in it; one that does is served: max_model_len)"
        elif part.soft_cap is not None:
            key = f"attn_logit_softcapping {part.soft_cap:g}"
        elif part.head_dim not in HEAD_DIMS:
            key = f"head_dim {part.head_dim} (known: {', '.join(map(str, HEAD_DIMS))})"
        if key is not None:
            raise ModelError(f"{where}: attention on a GPU has no {key} yet; use --device cpu")
