"""Loads the model of a folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from backend.devices import keep_temporaries_on_heap
from backend.errors import ModelError
from backend.kv_store import CacheSpec
from backend.model_checks import check_model, check_rounded_parts, check_rounding
from backend.model_files import find_pickled, read_config
from backend.models.cache_scales import Scales
from backend.models.decoder import Decoder, Passing
from backend.models.latent_spec import LatentSpec
from backend.models.layers import Wanted
from backend.models.loader import Checkpoint, DummyCheckpoint, PickledCheckpoint
from backend.models.moe_spec import MoeSpec
from backend.models.quantized_config import read_checkpoint_quantization
from backend.models.spec import AttentionSpec, DecoderSpec, LayerSpec, WeightList
from backend.parallel.ranks import Ranks
from backend.quantization_config import QuantizationConfig
from backend.token_map import read_token_map
from kernels import ops

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the step needs of a family. T packed tokens, R rows that need logits."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    context_len: int
    """The longest that is served: of drafters, too."""
    eos_token_ids: frozenset[int]
    num_layers: int
    heads: ops.Heads
    """On this rank."""
    value_dim: int
    """Numbers that a head's queries find."""
    ranks: Ranks

    @property
    def attention_kinds(self) -> frozenset[tuple[int | None, float | None]]:
        """Windows and caps of scores of the layers that have either."""
        ...

    num_multiplied: int
    """Weights of projections, of this rank, that every token is multiplied with: without experts, of which it takes some."""

    num_written_weights: int
    """Weights that one product may write out in the model's dtype, where they are stored in fewer bits."""

    stored_scales: Scales | None
    """Of keys and values in e4m3, where they were asked for and the checkpoint has some."""

    def cache_specs(self, dtype: torch.dtype) -> list[CacheSpec]:
        """What it keeps of each token."""
        ...

    def scale_cache(self, scales: Scales) -> None:
        """Keys and values are kept in e4m3 from now on, with these scales of every layer."""
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

    # The same in pieces, between which layers attend.

    def enter(self, token_ids: torch.Tensor, positions: torch.Tensor, entering: dict[int, torch.Tensor]) -> Passing:
        """A forward of T tokens before the first layer."""
        ...

    def ask(self, passing: Passing, number: int, slots: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The queries [T, H, D] of layer `number`, which the states have come to; what it keeps of the tokens goes to their slots."""
        ...

    def attend(
        self, number: int, query: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: ops.Plan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What layer `number`'s queries [T, H, D] find [T, H, V], in `out` if that is given."""
        ...

    def answer(self, passing: Passing, number: int, found: torch.Tensor) -> None:
        """The states past layer `number`, whose queries found this [T, H, V]."""
        ...

    def leave(self, passing: Passing) -> torch.Tensor:
        """The states past the last layer, normalised."""
        ...

    def finish(self, passing: Passing, query: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: ops.Plan, wanted: Wanted | None) -> torch.Tensor:
        """From the last layer's queries on -> what `forward` gives."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> [T, hidden], as the first layer takes them."""
        ...

    def embeddings(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """What `embed` gives, as `ops.pair_rows` takes it: a table [V, hidden], its rows, or None for the table itself, and a factor."""
        ...

    def has_embedding(self, weight: torch.Tensor) -> bool:
        """Whether `embed` gives the rows of this [V, hidden]. Every rank has to ask, with the same."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, V] in the model's dtype."""
        ...

    def can_share_rows(self, num_rows: int) -> bool:
        """Whether each rank had better score a share of so many rows alone."""
        ...

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [S, V], those of this rank (`Ranks.share_rows`)."""
        ...

    draft_ids: torch.Tensor | None
    """[N] int64 ascending: the tokens that a model drafter may draft; None: all."""

    def draft_scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, N], of these alone: for drafters that share this model's head."""
        ...


def open_checkpoint(directory: str | Path, dtype: torch.dtype, device: torch.device, load_format: str, *, is_drafter: bool = False) -> Checkpoint:
    """A folder's weights, or with load_format dummy random ones. is_drafter: values that are no numbers cost drafts alone, and are warned of."""
    if load_format == "dummy":
        return DummyCheckpoint(directory, device, dtype)
    found = Checkpoint(directory, read_checkpoint_quantization(read_config(directory), directory))
    return _tolerate(found) if is_drafter else found


def _tolerate(checkpoint: Checkpoint) -> Checkpoint:
    checkpoint.tolerated = None
    return checkpoint


def open_drafter(directory: str | Path, dtype: torch.dtype, device: torch.device, load_format: str) -> Checkpoint:
    """The same of a drafter, whose weights may be an archive of tensors."""
    pickled = find_pickled(Path(directory))
    if pickled is not None and load_format != "dummy":
        return _tolerate(PickledCheckpoint(pickled))
    return open_checkpoint(directory, dtype, device, load_format, is_drafter=True)


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
    quantization: QuantizationConfig | None = None,
    reads_cache_scales: bool = False,
    draft_token_map: str | None = None,
) -> Model:
    """The model in a Hugging Face folder; only_head: embedding and head alone, for a drafter that shares them.

    max_model_len: the longest context that will be served, which decides whether windows matter; None: the model's own limit.
    is_expert_parallel: whole experts are spread over the ranks; else each is split. quantization: how plain weights are rounded.
    reads_cache_scales: those that the checkpoint has of keys and values, which are to be kept in e4m3. draft_token_map: file of the tokens
    that a model drafter may draft (`backend.token_map`).
    Raises ModelError for what is missing, truncated, mismatched or not supported, ConfigError for the file of tokens.
    """
    spec = check_model(directory, has_weights=load_format != "dummy")
    draft_ids = None if draft_token_map is None else torch.tensor(read_token_map(draft_token_map, spec.vocab_size))
    check_rounding(read_config(directory), directory, quantization)
    context_len = min(max_model_len or spec.max_model_len, spec.max_model_len)
    if device.type == "cuda" and not only_head:
        check_gpu(spec, dtype)
    has_experts = any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers)
    weights = WeightList()
    spec.list_weights(weights)
    check_rounded_parts(spec.where, weights, quantization)
    if is_expert_parallel and not has_experts:
        logger.warning("%s: expert_parallel changes nothing: the model has no experts", spec.where)
    if device.type == "cpu":
        keep_temporaries_on_heap()
    with open_checkpoint(directory, dtype, device, load_format) as checkpoint:
        return Decoder(
            spec,
            checkpoint,
            dtype,
            device,
            ranks,
            context_len,
            only_head=only_head,
            is_expert_parallel=is_expert_parallel,
            quantization=quantization,
            reads_cache_scales=reads_cache_scales,
            draft_ids=draft_ids,
        )


def check_gpu(spec: DecoderSpec, dtype: torch.dtype) -> None:
    """Raises ModelError for sizes that no CUDA kernel takes; on CPU all are served."""
    width = 16 // dtype.itemsize  # numbers of one access
    if spec.hidden_size % width:
        raise ModelError(f"{spec.where}: hidden_size {spec.hidden_size}: a GPU serves multiples of {width} in {dtype}; use --device cpu")
    check_gpu_layers(spec.layers, spec.where, dtype)


def check_gpu_layers(layers: Sequence[LayerSpec], where: str, dtype: torch.dtype) -> None:
    """The same of layers."""
    width = 16 // dtype.itemsize
    for part in {layer.attention for layer in layers}:
        count = part.query_down.out_features if isinstance(part, LatentSpec) and part.query_down is not None else 0
        if count % width:
            raise ModelError(f"{where}: q_lora_rank {count}: a GPU serves multiples of {width} in {dtype}; use --device cpu")
        if isinstance(part, AttentionSpec) and part.head_dim % (2 * width):
            raise ModelError(f"{where}: head_dim {part.head_dim}: a GPU serves multiples of {2 * width} in {dtype}; use --device cpu")
