"""Which drafts stand, by each strategy, with no host in between."""

from __future__ import annotations

import torch

from kernels import reference
from kernels._load import load
from kernels.reference import request_table as reference_table
from kernels.request_state import RequestState
from kernels.structs import MAX_DRAFTS, MAX_NODES, Policy


def _ints(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As the kernels read them; nothing happens to those that are int32 already."""
    return tuple(t.int().contiguous() for t in tensors)


def _check_width(width: int, most: int = MAX_DRAFTS) -> None:
    if not 1 <= width <= most + 1:
        raise ValueError(f"K + 1 is {width}; the limit is {most + 1}")


def _check_rows(chosen: torch.Tensor, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor) -> None:
    batch = len(request_indices)
    for name, tensor, length in (
        ("chosen", chosen, len(chosen)),
        ("request_indices", request_indices, batch),
        ("cu_logit_rows", cu_logit_rows, batch + 1),
    ):
        if tensor.shape != (length,) or tensor.dtype != torch.int32:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; int32 [{length}] is needed")


def verify_drafts(
    chosen: torch.Tensor,
    table: RequestState,
    request_indices: torch.Tensor,
    cu_logit_rows: torch.Tensor,
    policy: Policy = Policy.NORMAL,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepts each request's drafts while they are what the target chose -> (emitted [B, max_drafts + 1], num_emitted [B], num_accepted [B]).

    chosen [R]: the target's token per row of logits, cu_logit_rows [B + 1]: rows of each request, one more than it has drafts. A request
    without rows emits nothing. emitted is padded with -1. ACCEPT_ALL and REJECT_ALL are for debugging. All int32. outputs: where a GPU
    writes them.
    """
    _check_width(table.max_drafts + 1)
    _check_rows(chosen, request_indices, cu_logit_rows)
    batch, width = len(request_indices), table.max_drafts + 1
    if not chosen.is_cuda:
        return reference_table.verify_drafts(chosen, table, request_indices, cu_logit_rows, policy)
    if outputs is None:
        outputs = (chosen.new_empty(batch, width), chosen.new_empty(batch), chosen.new_empty(batch))
    kernel = load(chosen.device, "verify", "verify_drafts")
    kernel((batch, 1), (32, 1, 1), *outputs, chosen, table.arguments, request_indices, cu_logit_rows, width, int(policy))
    return outputs


def verify_tree(
    chosen: torch.Tensor, table: RequestState, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, policy: Policy = Policy.NORMAL
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where drafts may be trees -> (emitted, num_emitted, num_accepted, path [B, max_drafts + 1]).

    From the newest token on, the child is accepted that is what the target chose at its parent, the first of equal ones. path: the number of
    the row, among its request's, that chose each emitted token; padded with -1. ACCEPT_ALL takes first children.

    This is `target_match`, and `rejection` too: the recursive rule over siblings that are not drawn (Miao et al. 2023, SpecInfer: accept
    child x with the probability that the residual has for it, else take x out of the residual, and go on with the next) accepts each child
    with the probability that the target has for it, and else emits a draw from the target without the children. So does one draw from the
    target that is looked for among the children. Children are the drafter's likeliest tokens, never drawn.
    """
    _check_width(table.max_drafts + 1, MAX_NODES)
    _check_rows(chosen, request_indices, cu_logit_rows)
    if not table.has_trees:
        raise ValueError("the request table was made without has_trees; verify_tree needs the drafts' parents")
    if not chosen.is_cuda:
        return reference_table.verify_tree(chosen, table, request_indices, cu_logit_rows, policy)
    batch, width = len(request_indices), table.max_drafts + 1
    emitted, path = chosen.new_empty(batch, width), chosen.new_empty(batch, width)
    num_emitted, num_accepted = chosen.new_empty(batch), chosen.new_empty(batch)
    outputs = (emitted, num_emitted, num_accepted, path)
    kernel = load(chosen.device, "verify", "verify_tree")
    kernel((batch, 1), (32, 1, 1), *outputs, chosen, table.arguments, request_indices, cu_logit_rows, width, int(policy))
    return outputs


def verify(draft_token_ids: torch.Tensor, num_drafts: torch.Tensor, target_token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.verify`; int32 on a GPU."""
    batch, width = target_token_ids.shape
    _check_width(width)
    if not target_token_ids.is_cuda:
        return reference.verify(draft_token_ids, num_drafts, target_token_ids)
    inputs = _ints(draft_token_ids, num_drafts, target_token_ids)
    emitted, num_accepted = torch.empty_like(inputs[2]), torch.empty_like(inputs[1])
    kernel = load(emitted.device, "verify", "verify")
    kernel((batch, 1), (32, 1, 1), emitted, num_accepted, *inputs, width)
    return emitted, num_accepted


def verify_rejection(
    probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.verify_rejection`; int32 on a GPU. Probabilities are float32."""
    batch, width, vocab_size = probs.shape
    _check_width(width)
    for name, tensor in (("probs", probs), ("draft_probs", draft_probs)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ValueError(f"{name} are {tensor.dtype}; float32 is needed")
    if not probs.is_cuda:
        return reference.verify_rejection(probs, draft_token_ids, num_drafts, draft_probs, seeds, positions)
    drafts, counts, places = _ints(draft_token_ids, num_drafts, positions)
    emitted, num_accepted = drafts.new_empty(batch, width), torch.empty_like(counts)
    kernel = load(probs.device, "verify", "verify_rejection")
    inputs = (probs.contiguous(), 0 if draft_probs is None else draft_probs.contiguous(), drafts, counts, seeds.contiguous(), places)
    kernel((batch, 1), (1024, 1, 1), emitted, num_accepted, *inputs, width, vocab_size)
    return emitted, num_accepted


def top_p_candidates(probs: torch.Tensor, top_p: torch.Tensor, max_candidates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.top_p_candidates`; on a GPU the ids and counts are int32."""
    if not probs.is_cuda:
        return reference.top_p_candidates(probs, top_p, max_candidates)
    rows, vocab_size = probs.shape
    most = min(max_candidates, vocab_size)
    ids = probs.new_empty(rows, most, dtype=torch.int32)
    outputs = (ids, probs.new_empty(rows, most), ids.new_empty(rows))
    kernel = load(probs.device, "verify", "top_p_candidates")
    kernel((rows, 1), (1024, 1, 1), *outputs, probs.contiguous(), top_p.contiguous(), most, vocab_size)
    return outputs


def sample_candidates(
    candidate_ids: torch.Tensor, probs: torch.Tensor, num_candidates: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draws one of each row's first num_candidates [R] candidates [R, C] by their probs [R, C] -> [R], with the noise of `sample`."""
    if not probs.is_cuda:
        return reference_table.sample_candidates(candidate_ids, probs, num_candidates, seeds, positions)
    rows, most = probs.shape
    ids, counts, places = _ints(candidate_ids, num_candidates, positions)
    token_ids = ids.new_empty(rows)
    kernel = load(probs.device, "verify", "sample_candidates")
    kernel((rows, 1), (32, 1, 1), token_ids, ids, probs.contiguous(), counts, seeds.contiguous(), places, most)
    return token_ids


def verify_top_p(
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    candidate_ids: torch.Tensor,
    num_candidates: torch.Tensor,
    correction_ids: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.verify_top_p`; int32 on a GPU."""
    batch, width, most = candidate_ids.shape
    _check_width(width)
    if not candidate_ids.is_cuda:
        return reference.verify_top_p(draft_token_ids, num_drafts, candidate_ids, num_candidates, correction_ids, window)
    inputs = _ints(draft_token_ids, num_drafts, candidate_ids, num_candidates, correction_ids)
    emitted, num_accepted = inputs[0].new_empty(batch, width), torch.empty_like(inputs[1])
    kernel = load(candidate_ids.device, "verify", "verify_top_p")
    kernel((batch, 1), (32, 1, 1), emitted, num_accepted, *inputs, width, most, window)
    return emitted, num_accepted
