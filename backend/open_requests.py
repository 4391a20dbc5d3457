"""Requests between `submit` and their end: which there are, and what each one is told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from backend.core import Delta, FinishReason, Request, TokenLogprobs
from backend.errors import InternalError, RequestError
from backend.metrics import Metrics
from backend.text import TextStream, Tokenizer
from backend.thought import ThoughtCount

logger = logging.getLogger(__name__)

DeltaSink = Callable[[Delta], None]


@dataclass(slots=True)
class OpenRequest:
    """What is kept of a request beside the scheduler."""

    request: Request
    sink: DeltaSink
    stream: TextStream
    thought: ThoughtCount
    submitted: float
    begun: float = 0.0
    """When it came among the running."""
    first_token: float = 0.0
    last_tokens: float = 0.0
    """When the last step that emitted for it was read."""
    is_echoed: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    silent: frozenset[int] = frozenset()
    """Tokens that end it and write nothing."""

    def read(self, token_ids: list[int]) -> tuple[list[int], str, bool]:
        """The tokens up to a stop string, their text, and whether there is one."""
        is_silent = bool(token_ids) and token_ids[-1] in self.silent  # which is the last one, if any is
        if self.thought.is_over and not self.stream.has_stop:  # as most steps have it
            return token_ids, self.stream.extend(token_ids[:-1] if is_silent else token_ids), False
        text, first, min_tokens = "", self.request.num_output_tokens, self.request.params.min_tokens
        for count, token_id in enumerate(token_ids, 1):
            if not self.thought.is_over:
                self.thought.push(token_id)
            if is_silent and count == len(token_ids):
                break
            piece, is_stopped = self.stream.append(token_id, first + count > min_tokens)
            text += piece
            if is_stopped:
                return token_ids[:count], text, True
        return token_ids, text, False

    def score_prompt(self, place: int, logprobs: list[TokenLogprobs]) -> None:
        """Those of a chunk from `place` on: they take the place of what came after it, for a request that was set back computes its prompt again."""
        self.prompt_logprobs[place:] = logprobs


class OpenRequests:
    """By id. What goes wrong for one request ends that request alone: in its sink, in the tokenizer, or in freeing what it held.

    `reserve`, `count` and `has` are safe from any thread, the others are the engine thread's."""

    def __init__(self, tokenizer: Tokenizer, metrics: Metrics, release: Callable[[Request], None]) -> None:
        """release: frees what the engine holds of a request that ends."""
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._release = release
        self._open: dict[str, OpenRequest] = {}
        self._groups: dict[str, list[str]] = {}
        self._ids: set[str] = set()  # of every request between submit and its end
        self._lock = threading.Lock()
        self.has_deadlines = False

    # -- any thread -------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Of requests that were reserved and have not ended."""
        return len(self._ids)

    def has(self, group_id: str) -> bool:
        return group_id in self._groups

    def reserve(self, requests: list[Request]) -> None:
        """Takes the ids of a group's requests. Raises RequestError when one is in use."""
        group_id, ids = requests[0].group_id, [r.request_id for r in requests]
        with self._lock:
            if group_id in self._groups or not self._ids.isdisjoint(ids):
                raise RequestError(f"request id {group_id!r:.100} is in use")
            self._ids.update(ids)
            self._groups[group_id] = ids

    # -- engine thread ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open.values()))

    def begin(self, request: Request, sink: DeltaSink, submitted: float) -> OpenRequest:
        params = request.params
        stream = TextStream(self._tokenizer, params.stop, params.include_stop, request.may_call, params.skip_special_tokens)
        own = OpenRequest(request, sink, stream, ThoughtCount(self._tokenizer, request.begins_thinking), submitted)
        if not params.include_stop:
            own.silent = request.stop_ids
        self._open[request.request_id] = own
        self.has_deadlines |= request.deadline is not None
        return own

    def note_run(self, request: Request) -> None:
        """It is among the running now, for the first time or again."""
        own = self.get(request)
        if own is not None and not own.begun:
            own.begun = time.monotonic()
            self._metrics.queue_time.observe(own.begun - own.submitted)

    def get(self, request: Request) -> OpenRequest | None:
        """None: it has ended, and another one may have its id."""
        found = self._open.get(request.request_id)
        return found if found is not None and found.request is request else None

    def is_open(self, request: Request) -> bool:
        return self.get(request) is not None

    def end_group(self, group_id: str, reason: FinishReason) -> None:
        for own_id in list(self._groups.get(group_id, ())):
            if own_id in self._open:
                self._end(self._open[own_id], reason)

    def end_late(self) -> None:
        """Ends the requests whose deadline is over."""
        now = time.monotonic()
        for own in self:
            if own.request.deadline is not None and now >= own.request.deadline:
                self._end(own, "timeout")
        self.has_deadlines = any(own.request.deadline is not None for own in self._open.values())

    def end_all(self, error: Exception) -> None:
        for own in self:
            self.fail(own, error)

    @property
    def next_deadline(self) -> float | None:
        return min((own.request.deadline for own in self._open.values() if own.request.deadline is not None), default=None)

    def fail(self, own: OpenRequest, error: Exception) -> None:
        self.send(own, Delta(own.request.group_id, own.request.index, error=error))

    def fail_internally(self, own: OpenRequest, error: Exception) -> None:
        """Ends a request for which something went wrong that should not have."""
        logger.error("request %r failed", own.request.group_id, exc_info=error)
        if self.is_open(own.request):
            self.fail(own, InternalError(f"{type(error).__name__}: {error}"))

    def _end(self, own: OpenRequest, reason: FinishReason) -> None:
        self.send(own, Delta(own.request.group_id, own.request.index, finish_reason=reason))

    def send(self, own: OpenRequest, delta: Delta) -> None:
        """Gives a delta to the request's sink, with what every delta, the first and the last one carry."""
        request, is_final = own.request, delta.is_final
        try:
            if is_final or not own.first_token:  # else it is one in the middle, as most are
                now = time.monotonic()
                if delta.error is None:
                    self._complete(own, delta, now)
                if is_final:
                    delta.stats = request.stats
                    self._close(own, now)
            delta.num_prompt_tokens = num_prompt_tokens = len(request.prompt_token_ids)
            delta.num_cached_tokens = request.num_cached_tokens
            delta.begins_thinking = request.begins_thinking
            delta.num_thought_tokens = own.thought.num_tokens
            delta.num_output_tokens = len(request.token_ids) - num_prompt_tokens
            own.sink(delta)
        except Exception as error:
            self.fail_internally(own, error)

    def _complete(self, own: OpenRequest, delta: Delta, now: float) -> None:
        """Adds the prompt to a first delta that shall have it, and the rest of the text to the last one."""
        params, prompt = own.request.params, own.request.prompt_token_ids
        if delta.token_ids and not own.first_token:
            own.first_token = now
            self._metrics.time_to_first_token.observe(now - own.submitted)
        if params.echo and not own.is_echoed:
            own.is_echoed = True
            delta.prompt_token_ids = prompt
            delta.prompt_text = self._tokenizer.decode(prompt, skip_special_tokens=params.skip_special_tokens)
            if params.logprobs is not None and len(own.prompt_logprobs) == len(prompt) - 1:
                delta.logprobs = own.prompt_logprobs + (delta.logprobs or [])
                own.prompt_logprobs = []
        if delta.is_final:
            delta.text += own.stream.flush()
            self._metrics.finished_requests[delta.finish_reason or ""] += 1
            self._metrics.request_time.observe(now - own.submitted)
            self._metrics.prompt_tokens.observe(len(prompt))
            self._metrics.output_tokens.observe(own.request.num_output_tokens)

    def _close(self, own: OpenRequest, now: float) -> None:
        request = own.request
        self._forget(request)
        try:
            self._release(request)
        except Exception:
            logger.exception("request %r: what was held of it could not be freed", request.group_id)
        if request.num_output_tokens > 1:
            self._metrics.time_per_output_token.observe((now - own.first_token) / (request.num_output_tokens - 1))

    def _forget(self, request: Request) -> None:
        self._open.pop(request.request_id, None)
        with self._lock:
            self._ids.discard(request.request_id)
            siblings = self._groups[request.group_id]
            siblings.remove(request.request_id)
            if not siblings:
                del self._groups[request.group_id]

    def refuse(self, request: Request, sink: DeltaSink, error: Exception) -> None:
        """Ends a request that could not begin."""
        logger.error("request %r could not begin", request.group_id, exc_info=error)
        self._forget(request)
        try:
            sink(Delta(request.group_id, request.index, error=InternalError(f"{type(error).__name__}: {error}")))
        except Exception:
            logger.exception("request %r: nor could it be told", request.group_id)
