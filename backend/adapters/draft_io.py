"""Draft calls as Triton tensors, and the decode model's side of placement `bls`.

Each engine has a session of its own. It begins with call 0 and counts its calls: a drafter that was loaded anew, that missed a call, or
that needed the memory, does not know the next one's number and says so, and the engine opens a new session.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import from_dlpack

from backend.drafters.calls import CHOICES, OWN_NOISE, DraftCall, DraftError, DraftReply
from backend.drafters.sessions import CallNumber
from backend.speculative_config import MAX_SPECULATIVE_TOKENS

CALL_SECONDS = 2.0
"""A drafter that has not answered by then counts as dead: the server never answers for a process that died during a call."""


def _to_tensor(name: str, values: torch.Tensor) -> Any:
    return pb_utils.Tensor(name, values.float().contiguous().cpu().numpy())  # models take inputs from the host's memory, wherever they run


def _to_torch(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(tensor.as_numpy()) if tensor.is_cpu() else from_dlpack(tensor.to_dlpack())


def call_tensors(call: DraftCall, number: CallNumber) -> list[Any]:
    """The inputs of `mtp_drafter`."""
    requests = [
        (queries, length, drafts, len(pages), *choice)
        for queries, length, drafts, pages, choice in zip(call.query_lens, call.seq_lens, call.num_drafts, call.page_ids, call.choices, strict=True)
    ]
    return [
        pb_utils.Tensor("session", np.array([number.session, number.count, number.num_pages, number.page_size], dtype=np.int64)),
        pb_utils.Tensor("tokens", np.array(call.token_ids, dtype=np.int32)),
        _to_tensor("hidden", call.hidden),
        pb_utils.Tensor("requests", np.array(requests, dtype=np.int64)),
        pb_utils.Tensor("filters", np.array(call.filters, dtype=np.float32)),
        pb_utils.Tensor("pages", np.array(list(itertools.chain.from_iterable(call.page_ids)), dtype=np.int32)),
        pb_utils.Tensor("fresh_pages", np.array(call.fresh_pages, dtype=np.int32)),
    ]


def read_call(request: Any, vocab_size: int, hidden_size: int, max_model_len: int) -> tuple[DraftCall, CallNumber]:
    """The reverse of `call_tensors`. Raises ValueError naming the input that does not fit the others, or the model.

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


def read_reply(response: Any, call: DraftCall, device: torch.device) -> DraftReply:
    """Raises DraftError for an answer that does not fit the call."""
    if response.has_error():
        raise DraftError(response.error().message())
    outputs = {tensor.name(): tensor for tensor in response.output_tensors()}
    drafts, probs = outputs["drafts"].as_numpy(), _to_torch(outputs["probs"])
    owners = [b for b, (mode, _, _) in enumerate(call.choices) if mode == OWN_NOISE and call.num_drafts[b]]
    if len(drafts) != len(call.num_drafts) or len(probs) != sum(call.num_drafts[b] for b in owners):
        raise DraftError(f"{len(call.num_drafts)} requests got {len(drafts)} rows of drafts and {len(probs)} of probabilities")
    reply = DraftReply([[t for t in row if t != -1] for row in drafts.tolist()])
    begin = 0
    for b in owners:
        reply.probs[b] = probs[begin : begin + call.num_drafts[b]].to(device)
        begin += call.num_drafts[b]
    return reply


class _Worker(threading.Thread):
    """Makes calls for a thread that must not wait for ever."""

    def __init__(self) -> None:
        super().__init__(name="drafter calls", daemon=True)
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (request := self.calls.get()) is not None:
            try:
                self.answers.put(request.exec())
            except Exception as error:
                self.answers.put(error)


class BlsDraftService:
    """A DraftService that calls the `mtp_drafter` model of the same server."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._worker = _Worker()
        self._session = secrets.randbits(62)
        self._count = self._num_pages = self._page_size = 0

    def open(self, num_pages: int, page_size: int) -> None:
        """By the same name each time: the pages of the session before it are given back, not kept beside the new one's."""
        self._count, self._num_pages, self._page_size = 0, num_pages, page_size

    def draft(self, call: DraftCall) -> DraftReply:
        number = CallNumber(self._session, self._count, self._num_pages, self._page_size)
        self._count += 1
        request = pb_utils.InferenceRequest(
            model_name=self._model_name, requested_output_names=["drafts", "probs"], inputs=call_tensors(call, number)
        )
        self._worker.calls.put(request)
        try:
            answer = self._worker.answers.get(timeout=CALL_SECONDS)
        except queue.Empty:
            self._worker.calls.put(None)  # it ends if it ever gets its answer
            self._worker = _Worker()
            raise DraftError(f"model {self._model_name!r} did not answer within {CALL_SECONDS} s") from None
        if isinstance(answer, Exception):
            raise DraftError(f"model {self._model_name!r}: {answer}")
        return read_reply(answer, call, call.hidden.device)
