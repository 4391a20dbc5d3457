"""An independent model as a drafter (Leviathan et al. 2023): it sees the tokens alone, and has the target's vocabulary or nearly so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from backend.drafter_checks import read_parallel
from backend.model_checks import check_model, check_same_tokens
from backend.models.decoder import Decoder
from backend.models.loading import Model, check_gpu, open_checkpoint
from backend.parallel.ranks import Ranks
from backend.quantization_config import QuantizationConfig
from kernels import ops

logger = logging.getLogger(__name__)


class DraftModel:
    """A `backend.drafters.recurrent.RecurrentModel` over any model of a known family; its own cache, no tap."""

    num_layers, tap_width = 1, 0
    tapped_layers: tuple[int, ...] = ()
    mask_state: torch.Tensor | None = None

    def __init__(
        self,
        directory: str | Path,
        target_directory: str | Path,
        target: Model,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationConfig | None,
        load_format: str,
        ranks: Ranks,
        is_parallel: bool | None = None,
    ) -> None:
        """ranks: that it is split over; is_parallel: see `read_parallel`.

        Raises ModelError for what is missing, damaged, not supported, or of another vocabulary than the target."""
        spec = check_model(directory, has_weights=load_format != "dummy")
        if load_format != "dummy":
            check_same_tokens(directory, target_directory)
        context_len = target.max_model_len
        if device.type == "cuda":
            check_gpu(spec, dtype)
        if (own := spec.max_model_len) < context_len:
            logger.warning("%s: max_position_embeddings is %d; the target's is %d: drafts past it may be worse", spec.where, own, context_len)
        with open_checkpoint(directory, dtype, device, load_format) as checkpoint:
            self._model = Decoder(spec, checkpoint, dtype, device, ranks, context_len, quantization=quantization)
        (cache,) = self._model.cache_specs(dtype)
        self.hidden_size, self.heads = self._model.hidden_size, self._model.heads
        self.token_shape, self.num_planes = cache.shape, cache.num_planes
        self._vocab_size = target.vocab_size
        self.mask_token_id = read_parallel(directory, is_parallel)

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        raise AssertionError("a draft model looks at no state of the target")

    def forward(
        self,
        layer: int,
        token_ids: torch.Tensor,
        previous: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        plan: ops.Plan,
    ) -> torch.Tensor:
        """States [T, hidden] after its final norm."""
        if self._model.vocab_size < self._vocab_size:  # tokens that it does not know are read as its last one
            token_ids = token_ids.clamp(max=self._model.vocab_size - 1)
        count = len(cache) // self._model.num_layers
        planes = [tuple(cache[i : i + count]) for i in range(0, len(cache), count)]
        return self._model.forward(token_ids, positions, slots, planes, plan)

    def logits(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(states)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._vocab_size].contiguous()
