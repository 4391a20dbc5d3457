"""The engine's side of placement `bls`: draft calls as arrays, which the process that Triton has passes on to the drafter's model.

Each engine has a session of its own. It begins with call 0 and counts its calls: a drafter that was loaded anew, that missed a call, or
that needed the memory, does not know the next one's number and says so, and the engine opens a new session.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import time

import numpy as np
import torch

from backend.drafters.calls import OWN_NOISE, DraftCall, DraftError, DraftReply
from backend.drafters.sessions import CallNumber
from backend.engine_process.calls import DRAFT_SECONDS, Arrays
from backend.engine_process.line import Line

LINE_SECONDS = 1.0
"""For the other process to say that a drafter is dead."""


def call_arrays(call: DraftCall, number: CallNumber) -> Arrays:
    """The inputs of `mtp_drafter`."""
    requests = [
        (queries, length, drafts, len(pages), *choice)
        for queries, length, drafts, pages, choice in zip(call.query_lens, call.seq_lens, call.num_drafts, call.page_ids, call.choices, strict=True)
    ]
    return {
        "session": np.array([number.session, number.count, number.num_pages, number.page_size], dtype=np.int64),
        "tokens": np.array(call.token_ids, dtype=np.int32),
        "hidden": call.hidden.float().contiguous().cpu().numpy(),  # models take inputs from the host's memory, wherever they run
        "requests": np.array(requests, dtype=np.int64),
        "filters": np.array(call.filters, dtype=np.float32),
        "pages": np.array(list(itertools.chain.from_iterable(call.page_ids)), dtype=np.int32),
        "fresh_pages": np.array(call.fresh_pages, dtype=np.int32),
    }


def read_reply(outputs: Arrays, call: DraftCall, device: torch.device) -> DraftReply:
    """Raises DraftError for an answer that does not fit the call."""
    drafts, probs = outputs["drafts"], torch.from_numpy(outputs["probs"])
    owners = [b for b, (mode, _, _) in enumerate(call.choices) if mode == OWN_NOISE and call.num_drafts[b]]
    if len(drafts) != len(call.num_drafts) or len(probs) != sum(call.num_drafts[b] for b in owners):
        raise DraftError(f"{len(call.num_drafts)} requests got {len(drafts)} rows of drafts and {len(probs)} of probabilities")
    reply = DraftReply([[t for t in row if t != -1] for row in drafts.tolist()])
    begin = 0
    for b in owners:
        reply.probs[b] = probs[begin : begin + call.num_drafts[b]].to(device)
        begin += call.num_drafts[b]
    return reply


class PassedDraftService:
    """A DraftService that has its calls made by the other process. `draft` is for one thread."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._answers: queue.SimpleQueue[tuple[int, Arrays | str]] = queue.SimpleQueue()
        self._session = secrets.randbits(62)
        self._count = self._num_pages = self._page_size = self._num_calls = 0

    def open(self, num_pages: int, page_size: int) -> None:
        """By the same name each time: the pages of the session before it are given back, not kept beside the new one's."""
        self._count, self._num_pages, self._page_size = 0, num_pages, page_size

    def draft(self, call: DraftCall) -> DraftReply:
        number = CallNumber(self._session, self._count, self._num_pages, self._page_size)
        self._count += 1
        self._num_calls += 1
        self._line.send("draft", self._num_calls, call_arrays(call, number))
        return read_reply(self._await(self._num_calls), call, call.hidden.device)

    def answer(self, number: int, answer: Arrays | str) -> None:
        """What came of a call: outputs, or why there are none. From any thread."""
        self._answers.put((number, answer))

    def _await(self, number: int) -> Arrays:
        end = time.monotonic() + DRAFT_SECONDS + LINE_SECONDS
        found = 0
        while found != number:  # an answer that came too late is of an earlier call
            try:
                found, answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise DraftError(f"the server's process did not answer within {DRAFT_SECONDS + LINE_SECONDS} s") from None
        if isinstance(answer, str):
            raise DraftError(answer)
        return answer
