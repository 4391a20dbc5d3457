"""What drafters share with their target or map to it: embeddings, heads, and a vocabulary of its more frequent tokens alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch

from backend.errors import ModelError
from backend.models.eagle_spec import MASK
from backend.models.layers import Weights
from backend.models.loader import Checkpoint, DummyCheckpoint
from backend.models.loading import Model
from kernels import ops

logger = logging.getLogger(__name__)


def load_embedding(name: str, hidden_size: int, checkpoint: Checkpoint, target: Model, weights: Weights) -> torch.Tensor | None:
    """A drafter's own [V, hidden], if the checkpoint has one that is not the target's. name: without `.weight`."""
    can_share = hidden_size == target.hidden_size
    if can_share and (f"{name}.weight" not in checkpoint or isinstance(checkpoint, DummyCheckpoint)):
        return None
    own = weights.whole(f"{name}.weight", (target.vocab_size, hidden_size))
    return None if can_share and target.has_embedding(own) else own


def has_other_order(name: str, count: int, checkpoint: Checkpoint) -> bool:
    """Whether a drafter of as many tokens as the target says that its ids mean others."""
    return name in checkpoint and bool(checkpoint.get_ids(name, count).any())


def load_target_ids(name: str, count: int, checkpoint: Checkpoint, target: Model) -> torch.Tensor:
    """The target's ids of a drafter's `count` tokens, from how far on each is. Raises ModelError for ids that there are not, or twice."""
    most = target.vocab_size
    offsets = checkpoint.get_ids(name, count)
    ids = torch.arange(count, device=offsets.device) + offsets
    low, high, num_double = int(ids.min()), int(ids.max()), len(ids) - len(ids.unique())
    if low < 0 or high >= most or num_double:
        raise ModelError(
            f"{checkpoint.directory}: {name} makes token ids from {low} to {high}, {num_double} of them twice; "
            f"the target has ids 0 to {most - 1}, and each may come once: {name} holds offsets from the drafter's ids"
        )
    return ids


def check_mask(checkpoint: Checkpoint, target: Model, target_ids: torch.Tensor) -> None:
    """Warns where the weight that says which of its target's tokens a drafter has, by each of them, contradicts their ids, which are what is used:
    one of the two is of another drafter, or of another target."""
    if MASK not in checkpoint or isinstance(checkpoint, DummyCheckpoint):
        return
    path, mask = checkpoint.find(MASK)
    if mask.dim() != 1 or len(mask) != target.vocab_size:
        logger.warning("%s: weight %s has shape %s; the target has %d tokens", path, MASK, tuple(mask.shape), target.vocab_size)
    elif (num_other := int((mask.bool() != torch.zeros(len(mask), dtype=torch.bool).index_fill_(0, target_ids.cpu(), True)).sum())) > 0:
        logger.warning("%s: weight %s has %d of %d tokens otherwise than the drafter's ids", path, MASK, num_other, len(mask))


def load_head(
    name: str, map_name: str, count: int, hidden_size: int, checkpoint: Checkpoint, target: Model, weights: Weights, *, can_have_own: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A drafter's own head [N, hidden], None: it is the target's; and the target's ids [N] of what it scores, None: all tokens in their order.

    name: without `.weight`; map_name: of the ids' offsets where the drafter has `count` tokens of the target's alone, or in an order of its own.
    """
    head = None
    if can_have_own and (f"{name}.weight" in checkpoint or count < target.vocab_size or hidden_size != target.hidden_size):
        head = weights.whole(f"{name}.weight", (count, hidden_size))
    if count < target.vocab_size or (head is not None and has_other_order(map_name, count, checkpoint)):
        refuse_token_map(target, f"{checkpoint.directory}: {map_name} names the tokens that the drafter scores")
        target_ids = load_target_ids(map_name, count, checkpoint, target)
        check_mask(checkpoint, target, target_ids)
        return head, target_ids.to(weights.device)
    return head if head is None or target.draft_ids is None else head[target.draft_ids], target.draft_ids


def refuse_token_map(target: Model, why: str) -> None:
    """Raises ModelError where tokens to draft are named beside a drafter that has some of its own."""
    if target.draft_ids is not None:
        raise ModelError(f"{why}: leave draft_token_map out of speculative_config (it names {len(target.draft_ids)})")


def spread_over(target: Model, target_ids: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes scores of a drafter's tokens [R, N] scores of all of the target's [R, V]: see `ops.Spread`. None: it has all, in their order."""
    return (lambda scores: scores) if target_ids is None else ops.Spread(target_ids, target.vocab_size)


def load_vector(name: str, size: int, checkpoint: Checkpoint, weights: Weights) -> torch.Tensor:
    """Numbers that are stored in one dimension, or with ones before it."""
    *shapes, last = ((size,), (1, size), (1, 1, size))
    for shape in shapes:
        with contextlib.suppress(ModelError):
            return weights.whole(name, shape).flatten()
    return weights.whole(name, last).flatten()
