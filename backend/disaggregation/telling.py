"""What a prefill node tells decode nodes of their jobs, and that there was more where Redis did not take it."""

from __future__ import annotations

from collections import deque
from typing import Any

from backend.disaggregation.node import Node
from backend.disaggregation.records import Job, Message

MAX_UNTOLD = 4096


class Telling:
    """From any thread; `tell_again` from one."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._untold: deque[tuple[str, str]] = deque(maxlen=MAX_UNTOLD)
        """Decode nodes, and jobs of theirs of which a message could not be written."""

    def tell(self, job: Job, kind: str, num_tokens: int, *, is_urgent: bool = True, **values: Any) -> None:
        """num_tokens: that are to be computed here, so that the decode node need not go by an old sign of life."""
        sender, job_id = job.sender, job.job_id
        message = Message(kind, job_id, self._node.node_id, load=num_tokens, time=self._node.server_time(), **values)
        on_failure = None if kind == "taken" else lambda: self._untold.append((sender, job_id))  # what comes after that says the same
        self._node.tell(sender, message, on_failure, is_urgent=is_urgent)

    def tell_failed(self, sender: str, job_id: str, reason: str, text: str) -> None:
        message = Message("failed", job_id, self._node.node_id, reason=reason, text=text)
        self._node.tell(sender, message, lambda: self._untold.append((sender, job_id)))

    def tell_again(self) -> None:
        """Who waits for a message that was lost would do so for as long as this node tells it of other prompts. Pages are held as ever: the message
        may have come all the same, and they may be read."""
        for _ in range(len(self._untold)):  # those that fail again come later
            self.tell_failed(*self._untold.popleft(), "redis", "Redis did not take a message of this job")
