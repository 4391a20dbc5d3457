"""A decode node's prompts that are on their way from prefill nodes, and the reads of their pages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Set
from dataclasses import dataclass, field

from backend.core import HandOff, Request
from backend.devices import beside_steps
from backend.disaggregation.node_transfer import NodeAddress, NodeRead, NodeTransfer
from backend.disaggregation.records import Message, probs_from_pages
from backend.errors import TransferError


@dataclass(slots=True, eq=False)
class Read:
    """Of some pages of one node."""

    handle: NodeRead
    address: NodeAddress
    node_id: str
    num_pages: int
    begun: float
    to_scratch: bool = False


@dataclass(slots=True, eq=False)
class Fetch:
    """A prompt on its way."""

    request: Request
    job_id: str
    page_ids: list[int]
    """Of this node, to be filled."""
    first_page: int
    """Number within the prompt of the first of them."""
    lease: int
    begun: float
    """time.monotonic()"""
    tokens: int
    """To be computed elsewhere."""
    after: int
    """Steps that were launched when its pages were given out."""
    node_id: str = ""
    address: NodeAddress | None = None
    num_asked: int = 0
    """Leading ones of page_ids that were read, or are being read."""
    reads: list[Read] = field(default_factory=list)
    done: Message | None = None
    lease_end: float = 0.0
    """time.monotonic() by which its pages have to be here, once it is done."""
    hand_off: HandOff | None = None
    wants_probs: bool = False
    told: float = 0.0
    """time.monotonic() at which the node told of it last: from the first time on it is as late as the node is with all that it has."""
    is_told: bool = False
    """The node knows that its pages are read, or not wanted."""
    is_over: bool = False
    """The engine was told how it ended, or asked for its end: its reads are waited for, for the pages' sake."""

    def drop_drafts(self) -> None:
        """Drafts that were drawn from what cannot be had cannot be verified."""
        assert self.hand_off is not None
        self.wants_probs = False
        self.hand_off = HandOff(dataclasses.replace(self.hand_off.outcome, next_drafts=[]))


class PageReads:
    """Begins reads and sees them end. One thread's, but for the counts."""

    def __init__(self, transfer: NodeTransfer, page_bytes: int, limit: float) -> None:
        """limit: seconds after which a read hangs. The network may be cut, though Redis still tells of the other node, and a read has no end of
        its own until TCP gives up."""
        self._transfer, self._page_bytes, self._limit = transfer, page_bytes, limit
        self._probs_of: Fetch | None = None
        """Whose distributions are being read to the scratch memory."""
        self._addresses: dict[str, NodeAddress] = {}
        """Of nodes that were read from."""
        self.num_bytes = 0
        self.seconds = 0.0

    def begin(self, fetch: Fetch, local: list[int], remote: list[int], *, to_scratch: bool = False) -> None:
        """Raises TransferError."""
        assert fetch.address is not None
        begun = time.monotonic()
        try:
            handle = self._transfer.read(fetch.address, local, remote, after=fetch.after, to_scratch=to_scratch)
        except TransferError:
            self._transfer.forget(fetch.address)  # a later one begins anew
            raise
        self._addresses[fetch.node_id] = fetch.address
        fetch.reads.append(Read(handle, fetch.address, fetch.node_id, len(local), begun, to_scratch))

    def begin_probs(self, fetch: Fetch, pages: list[int], now: float) -> None:
        """What a hand-off's drafts were drawn from, once there is room for it; where there will be none, the drafts go. Raises TransferError."""
        other = self._probs_of
        if other is not None:
            if any(read.to_scratch and self.hangs(read, now) for read in other.reads):
                fetch.drop_drafts()
        elif len(pages) > len(self._transfer.scratch):
            fetch.drop_drafts()
        else:
            fetch.wants_probs = False
            self.begin(fetch, list(range(len(pages))), pages, to_scratch=True)
            self._probs_of = fetch

    def look(self, fetch: Fetch) -> str:
        """Takes what has come -> a node that it has come from; empty: nothing has. Raises TransferError for a read that failed; the others of the
        prompt go on."""
        node_id = ""
        for read in list(fetch.reads):
            try:
                if not self._transfer.is_done(read.handle):
                    continue
            except TransferError:
                fetch.reads.remove(read)
                if read.to_scratch:
                    self._probs_of = None
                self._transfer.forget(read.address)
                raise
            self.num_bytes += read.num_pages * self._page_bytes
            self.seconds += time.monotonic() - read.begun
            fetch.reads.remove(read)
            node_id = read.node_id
            if read.to_scratch:
                self._take_probs(fetch)
        return node_id

    def _take_probs(self, fetch: Fetch) -> None:
        self._probs_of = None
        if fetch.done is None or fetch.hand_off is None:
            return
        count = len(fetch.done.probs_pages)
        with beside_steps(self._transfer.scratch.device):
            probs = probs_from_pages(self._transfer.scratch[:count].clone(), fetch.done.probs_shape)
        fetch.hand_off = dataclasses.replace(fetch.hand_off, draft_probs=probs)

    def forget_dead(self, alive: Set[str], read: Set[str]) -> None:
        """Nodes that are gone, and that nothing is read from any more: their connections would stay for as long as this node lives."""
        for node_id in self._addresses.keys() - alive - read:
            self._transfer.forget(self._addresses.pop(node_id))

    def hangs(self, read: Read, now: float) -> bool:
        return now - read.begun >= self._limit
