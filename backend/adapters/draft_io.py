"""Draft calls as Triton tensors: the drafter model's side of placement `bls`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import from_dlpack

from backend.drafters.calls import CHOICES, DraftCall, DraftReply
from backend.drafters.sessions import CallNumber
from backend.speculative_config import MAX_SPECULATIVE_TOKENS


def _to_tensor(name: str, values: torch.Tensor) -> Any:
    return pb_utils.Tensor(name, values.float().contiguous().cpu().numpy())  # models take inputs from the host's memory, wherever they run


def _to_torch(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(tensor.as_numpy()) if tensor.is_cpu() else from_dlpack(tensor.to_dlpack())


def read_call(request: Any, vocab_size: int, hidden_size: int, max_model_len: int) -> tuple[DraftCall, CallNumber]:
    """The reverse of `backend.engine_process.drafts.call_arrays`. Raises ValueError naming the input that does not fit the others, or the model.

    Anybody can call the model, and an index out of range would end the process on a GPU.
    """
    inputs = {tensor.name(): tensor for tensor in request.inputs()}
    session, count, num_pages, page_size = inputs["session"].as_numpy().tolist()
    if num_pages < 0 or page_size < 1:
        raise ValueError(f"session: {num_pages} pages of {page_size} tokens are none: give 0 pages or more, of 1 token or more")
    requests = inputs["requests"].as_numpy().tolist()
    call = DraftCall(
        fresh_pages=inputs["fresh_pages"].as_numpy().tolist(),
        token_ids=inputs["tokens"].as_numpy().tolist(),
        hidden=_to_torch(inputs["hidden"]),
        filters=[tuple(row) for row in inputs["filters"].as_numpy().tolist()],
    )
    pages, begin = inputs["pages"].as_numpy().tolist(), 0
    for queries, length, drafts, num_own, mode, top_k, seed in requests:
        call.query_lens.append(queries)
        call.seq_lens.append(length)
        call.num_drafts.append(drafts)
        call.choices.append((mode, top_k, seed))
        call.page_ids.append(pages[begin : begin + num_own])
        begin += num_own
        if length + drafts > max_model_len:
            raise ValueError(f"requests: {length} tokens and {drafts} drafts are more than the context of {max_model_len}")
        if drafts > MAX_SPECULATIVE_TOKENS:  # each is a forward, for which all other sessions wait
            raise ValueError(f"requests: {drafts} drafts of one request; the limit is {MAX_SPECULATIVE_TOKENS}")
        if mode not in CHOICES:
            raise ValueError(f"requests: drafts are chosen in one of the ways {', '.join(map(str, CHOICES))}, got {mode}")
        if not 1 <= queries <= length or drafts < 0 or num_own < 0 or num_own * page_size < length + max(drafts - 1, 0):
            raise ValueError(f"requests: {queries} of {length} tokens with {drafts} drafts do not fit {num_own} pages of {page_size}")
    for name, own in (("pages", pages), ("fresh_pages", call.fresh_pages)):
        if wrong := [page for page in own if not 0 <= page < num_pages]:
            raise ValueError(f"{name}: page {wrong[0]} is not one of 0 to {num_pages - 1}")
    if begin != len(pages):
        raise ValueError(f"pages: {len(pages)} came for requests that have {begin}")
    if unknown := [token_id for token_id in call.token_ids if not 0 <= token_id < vocab_size]:
        raise ValueError(f"tokens: id {unknown[0]} is not one of 0 to {vocab_size - 1}")
    if not requests or len(call.token_ids) != sum(call.query_lens) or len(call.filters) != len(requests) or len(call.hidden) != len(call.token_ids):
        raise ValueError(
            f"{len(requests)} requests of {sum(call.query_lens)} tokens came with {len(call.token_ids)} tokens, {len(call.hidden)} hidden rows "
            f"and {len(call.filters)} filters"
        )
    if call.hidden.shape[1] != hidden_size:
        raise ValueError(f"hidden: rows have {call.hidden.shape[1]} values; the model's have {hidden_size}")
    return call, CallNumber(session, count, num_pages, page_size)


def reply_tensors(reply: DraftReply, vocab_size: int) -> list[Any]:
    width = max(map(len, reply.token_ids), default=0)
    drafts = np.full((len(reply.token_ids), width), -1, dtype=np.int32)
    for row, token_ids in zip(drafts, reply.token_ids):
        row[: len(token_ids)] = token_ids
    own = [reply.probs[b] for b in sorted(reply.probs)]
    probs = torch.cat(own) if own else torch.empty(0, vocab_size)
    return [pb_utils.Tensor("drafts", drafts), _to_tensor("probs", probs)]
