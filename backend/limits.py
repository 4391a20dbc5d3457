"""What a server takes at all, whatever it has to do: for any thread, before a request is the scheduler's; and where a request ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.core import FinishReason, Request
from backend.errors import CapacityError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one request, and of how many are open."""

    max_batch_size: int
    max_waiting: int
    max_model_len: int
    page_size: int
    num_pages: int

    @property
    def max_open(self) -> int:
        return self.max_batch_size + self.max_waiting

    @property
    def max_num_tokens(self) -> int:
        """Of one request, prompt and output together, in an empty server."""
        return min(self.max_model_len, self.num_pages * self.page_size)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int, num_completions: int = 1) -> None:
        """Raises RequestError when a request could never finish, however empty the server is."""
        if num_completions > self.max_open:
            raise RequestError(
                f"n is {num_completions}; the limit is {self.max_batch_size} running and {self.max_waiting} waiting: lower n, or raise --max-waiting"
            )
        if num_prompt_tokens >= self.max_model_len:
            raise RequestError(f"the prompt has {num_prompt_tokens} tokens; the context holds {self.max_model_len}, one output token included")
        if max_tokens > self.max_model_len:
            raise RequestError(f"max_tokens is {max_tokens}; the context holds {self.max_model_len} tokens, the prompt's among them")
        needed = -(-min(num_prompt_tokens + max_tokens, self.max_model_len) // self.page_size)
        if needed > self.num_pages:
            raise RequestError(
                f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} need {needed} KV pages of {self.page_size} tokens; "
                f"the server has {self.num_pages}: lower max_tokens, or raise --kv-cache-memory"
            )

    def check_room(self, more: int, num_open: int) -> None:
        """Raises CapacityError when `more` requests beside `num_open` would be too many."""
        if num_open + more > self.max_open:
            raise CapacityError(
                f"{num_open} requests are open; the limit is {self.max_batch_size} running and {self.max_waiting} waiting: "
                "retry later, or raise --max-waiting"
            )


def cut_at_end(request: Request, token_ids: Sequence[int], max_model_len: int) -> tuple[list[int], FinishReason | None]:
    """The part of an emitted span that counts, and why the request ends there (None: it goes on).

    The first end-of-text or stop id ends it, and nothing after it is emitted; then max_tokens and the context's end.
    """
    params, num_known = request.params, len(request.token_ids)
    num_before = num_known - len(request.prompt_token_ids)
    room = min(params.max_tokens - num_before, max_model_len - num_known)
    if request.stop_ids and not request.stop_ids.isdisjoint(token_ids):
        for count, token_id in enumerate(token_ids[:room], 1):
            if token_id in request.stop_ids and num_before + count > params.min_tokens:
                return list(token_ids[:count]), "stop"
    if len(token_ids) < room:
        return list(token_ids), None
    return list(token_ids[:room]), "length"
