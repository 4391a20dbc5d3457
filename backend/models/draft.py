"""An independent model as a drafter (Leviathan et al. 2023): it sees the tokens alone.

It has the target's vocabulary or nearly so; or another one, of which it drafts the tokens that the target has too (`backend.shared_tokens`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from backend.drafter_checks import read_parallel
from backend.errors import ModelError
from backend.model_checks import check_model
from backend.model_files import read_config
from backend.models.decoder import Decoder
from backend.models.drafter_weights import spread_over
from backend.models.loading import Model, check_gpu, open_checkpoint
from backend.parallel.ranks import Ranks
from backend.quantization_config import QuantizationConfig
from backend.shared_tokens import read_shared_tokens
from backend.tokenizer_checks import check_same_tokens
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
        *,
        has_other_tokens: bool = False,
    ) -> None:
        """ranks: that it is split over; is_parallel: see `read_parallel`; has_other_tokens: its tokenizer is another one than the target's.

        Raises ModelError for what is missing, damaged, not supported, or of another vocabulary than the target."""
        spec = check_model(directory, has_weights=load_format != "dummy")
        if load_format != "dummy" and not has_other_tokens:
            check_same_tokens(directory, target_directory)
        if read_config(directory).get("spd_type") == "pard2":
            logger.warning("%s: what PARD-2 makes of the target's states (warp_model.bin) is not read: it drafts from the tokens alone", directory)
        context_len = target.context_len
        if device.type == "cuda":
            check_gpu(spec, dtype)
        if (own := spec.max_model_len) < context_len:
            logger.warning("%s: max_position_embeddings is %d; contexts of %d are served: drafts past it may be worse", spec.where, own, context_len)
        self._vocab_size, self._own_of, self._spread, own_ids = target.vocab_size, None, None, None
        if has_other_tokens or target.draft_ids is not None:
            folders = (directory, target_directory)
            own_ids, target_ids, own_of = _choose_tokens(*folders, spec.vocab_size, target, has_other_tokens=has_other_tokens)
            self._spread, self._own_of = spread_over(target, target_ids.to(device)), None if own_of is None else own_of.to(device)
        with open_checkpoint(directory, dtype, device, load_format, is_drafter=True) as checkpoint:
            arguments = (spec, checkpoint, dtype, device, ranks, context_len)
            self._model = Decoder(*arguments, quantization=quantization, draft_ids=own_ids, only_drafts=True)
        (cache,) = self._model.cache_specs(dtype)
        self.hidden_size, self.heads, self.attention_kinds = self._model.hidden_size, self._model.heads, self._model.attention_kinds
        self.token_shape, self.num_planes = cache.shape, cache.num_planes
        self.mask_token_id = None if has_other_tokens else read_parallel(directory, is_parallel)

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
        if self._own_of is not None:
            token_ids = self._own_of[token_ids]
        elif self._model.vocab_size < self._vocab_size:  # tokens that it does not know are read as its last one
            token_ids = token_ids.clamp(max=self._model.vocab_size - 1)
        count = len(cache) // self._model.num_layers
        planes = [tuple(cache[i : i + count]) for i in range(0, len(cache), count)]
        return self._model.forward(token_ids, positions, slots, planes, plan)

    def logits(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        logits = self._model.draft_scores(states)
        if self._spread is not None:
            return self._spread(logits)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._vocab_size].contiguous()


def _choose_tokens(
    directory: str | Path, target_directory: str | Path, vocab_size: int, target: Model, *, has_other_tokens: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Own ids and the target's [N] of the tokens that are drafted, and by the target's ids [V] the own ones where its tokens are others. On the host.

    vocab_size: the draft model's.
    """
    own_of = None
    if has_other_tokens:
        pairs, unknown = read_shared_tokens(directory, target_directory)
        pairs = [(own, other) for own, other in pairs if own < vocab_size and other < target.vocab_size]
        if not pairs:
            raise ModelError(f"{directory}: of the tokens that both tokenizers have, none has a place in both models' vocabularies")
        own_ids, target_ids = torch.tensor(pairs).view(-1, 2).T.contiguous()
        own_of = torch.full((target.vocab_size,), min(unknown, vocab_size - 1)).index_copy_(0, target_ids, own_ids)
    else:
        own_ids = target_ids = torch.arange(min(vocab_size, target.vocab_size))
    if target.draft_ids is not None:
        is_kept = torch.isin(target_ids, target.draft_ids.cpu())
        own_ids, target_ids = own_ids[is_kept], target_ids[is_kept]
        if not len(own_ids):
            raise ModelError(f"{directory}: it has none of the {len(target.draft_ids)} tokens of draft_token_map")
    return own_ids, target_ids, own_of
