"""Model families by the name that config.json's `architectures` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from backend.errors import ModelError
from backend.model_files import read_config
from backend.models.loader import Checkpoint, DummyCheckpoint
from backend.parallel.ranks import Ranks
from kernels import ops


class Model(Protocol):
    """What the runner needs of a family. T packed tokens, R rows that need logits."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_layers: int
    heads: tuple[int, int, int]
    """Of queries, of keys and values, and their size; on this rank."""
    cache_planes: tuple[tuple[int, ...], ...]
    """Shape of what each layer caches per token, one tuple per tensor: keys and values for GQA."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, cache: list[tuple[torch.Tensor, ...]], plan: ops.Plan
    ) -> torch.Tensor:
        """Hidden states after the final norm [T, hidden]; keys and values go to their slots."""
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


def load_model(
    directory: str | Path, dtype: torch.dtype, device: torch.device, ranks: Ranks, *, only_head: bool = False, load_format: str = "safetensors"
) -> Model:
    """The model in a Hugging Face folder; only_head: embedding and head alone, for a drafter that shares them.

    Raises ModelError for what is missing, truncated, mismatched or not supported.
    """
    from backend.models.llama import Llama

    families = {"LlamaForCausalLM": Llama}
    config = read_config(directory)
    names = config.get("architectures") or []
    family = next((families[name] for name in names if name in families), None)
    if family is None:
        raise ModelError(f"{directory}: architectures {names} are not supported; known: {', '.join(families)}")
    with open_checkpoint(directory, dtype, device, load_format) as checkpoint:
        try:
            return family(config, checkpoint, dtype, device, ranks, only_head=only_head)
        except KeyError as error:
            raise ModelError(f"{directory}/config.json has no {error}") from None
