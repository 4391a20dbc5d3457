"""Pages of a node, whatever its ranks: each rank reads its part from the same rank of the other node."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backend.disaggregation.rank_pages import SERVE_SECONDS
from backend.disaggregation.transfer import PageAddress
from backend.disaggregation.transfers import Transport
from backend.engine import Engine
from backend.errors import ConfigError, EngineError, TransferError
from backend.parallel.lines import Order

logger = logging.getLogger(__name__)

OPEN_SECONDS = 60.0
"""For the ranks to offer their pages."""

NodeAddress = tuple[PageAddress, ...]
"""Of a node's ranks, in their order."""


@dataclass(slots=True, eq=False)
class NodeRead:
    """One read by all ranks. It is over when each one's is."""

    begin_own: Callable[[], Any] | None
    """Begins rank 0's part: steps that may write to its pages have to end first."""
    own: Any = None
    """Rank 0's handle, until its part is done."""
    after: int = 0
    missing: set[int] = field(default_factory=set)
    """Other ranks that read."""
    errors: list[str] = field(default_factory=list)


class NodeTransfer:
    """Offers the pages of a node, and reads others'. Safe from any thread."""

    def __init__(self, name: str, engine: Engine, transport: Transport, num_scratch_bytes: int = 0) -> None:
        """Raises ConfigError."""
        self._own = transport.open(name, engine.worker.store, num_scratch_bytes)
        self._engine, self._group = engine, engine.group
        self._others = range(1, self._group.size if self._group is not None else 1)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._reads: dict[int, NodeRead] = {}
        self._opened: dict[int, Order] = {}
        self._has_opened = threading.Condition()
        self._serve_due = 0.0
        self.address: NodeAddress = (self._own.address, *self._open(name, transport))

    @property
    def is_served(self) -> bool:
        """`serve` has to be called for others' reads to get on."""
        return self._own.is_served

    @property
    def scratch(self) -> torch.Tensor:
        """[n, page_bytes] uint8, of rank 0."""
        return self._own.scratch

    def _open(self, name: str, transport: Transport) -> list[PageAddress]:
        if self._group is None:
            return []
        board = self._group.switchboard
        board.on_reply = self._take_reply
        try:
            for rank in self._others:
                board.order(rank, {"do": "open", "name": f"{name} rank {rank}", "transport": transport.as_dict()})
        except EngineError as error:
            raise ConfigError(f"disaggregation.transfer_backend {transport.backend}: {error}") from None
        with self._has_opened:
            if not self._has_opened.wait_for(lambda: len(self._opened) == len(self._others) or board.lost, OPEN_SECONDS) or board.lost:
                missing = sorted(set(self._others) - set(self._opened))
                raise ConfigError(
                    f"disaggregation.transfer_backend {transport.backend}: rank {missing} did not offer its pages within {OPEN_SECONDS:.0f} s"
                )
        for rank in self._others:
            if why := self._opened[rank].get("error"):
                raise ConfigError(f"rank {rank}: {why}")
        return [PageAddress.from_dict(self._opened[rank]["address"]) for rank in self._others]

    def _take_reply(self, rank: int, order: Order) -> None:
        """On a thread of the rank's own."""
        if "open" in order:
            with self._has_opened:
                self._opened[rank] = order["open"]
                self._has_opened.notify_all()
        elif "read" in order:
            with self._lock:
                read = self._reads.get(order["read"])
                if read is None:
                    return
                if order["error"]:
                    read.errors.append(f"rank {rank}: {order['error']}")
                read.missing.discard(rank)
                if not read.missing:
                    del self._reads[order["read"]]

    def read(self, address: NodeAddress, pages: Sequence[int], remote_pages: Sequence[int], *, after: int = 0, to_scratch: bool = False) -> NodeRead:
        """Begins to read remote pages into this node's, or into rank 0's scratch memory -> what `is_done` takes. Raises TransferError.

        after: steps that a rank ends first. Those under way when the pages were given out may write to them still, for who had them before.
        """
        if len(address) != 1 + len(self._others):
            raise TransferError(f"pages of {len(address)} ranks cannot be read: this node has {1 + len(self._others)}")
        read = NodeRead(lambda: self._own.read(address[0], pages, remote_pages, to_scratch=to_scratch), after=after)
        self._begin_own(read)
        if self._group is None or to_scratch:
            return read
        read.missing = set(self._others)
        number = next(self._numbers)
        with self._lock:
            self._reads[number] = read
        order = {"do": "read", "number": number, "after": after, "pages": list(pages), "remote_pages": list(remote_pages)}
        for rank in self._others:
            try:
                self._group.switchboard.order(rank, order | {"address": address[rank].as_dict()})
            except EngineError as error:  # the engine ends by it, too
                self._take_reply(rank, {"read": number, "error": str(error)})
        return read

    def is_done(self, read: NodeRead) -> bool:
        """Whether a read is over. Raises TransferError when it failed: nothing is written any more, on no rank."""
        if read.begin_own is not None or read.own is not None:
            try:
                if not self._begin_own(read) or not self._own.is_done(read.own):
                    return False
            except TransferError as error:
                read.begin_own = None
                read.errors.append(str(error))
            read.own = None
        with self._lock:
            missing = set(read.missing)
        if self._group is not None and missing & set(self._group.switchboard.lost):
            raise TransferError("a rank of this node is gone")
        if missing:
            return False
        if read.errors:
            raise TransferError("; ".join(read.errors))
        return True

    def _begin_own(self, read: NodeRead) -> bool:
        """False: not yet. Raises TransferError."""
        if read.begin_own is not None and self._engine.num_finished >= read.after:
            begin, read.begin_own = read.begin_own, None
            try:
                read.own = begin()
            except TransferError:
                raise
            except Exception as error:  # as many threads as there may be, say: else it would look as if it were over
                logger.exception("pages could not be read")
                raise TransferError(f"{type(error).__name__}: {error}") from None
        return read.begin_own is None

    def serve(self, now: float) -> None:
        """Lets others' reads get on where the network wants this side for that (TCP). To be called again and again while there may be some."""
        self._own.serve()
        if self._group is not None and now >= self._serve_due:
            self._serve_due = now + SERVE_SECONDS / 2
            for rank in self._others:
                self._group.switchboard.order(rank, {"do": "serve"})

    def forget(self, address: NodeAddress) -> None:
        """The node is gone."""
        self._own.forget(address[0])
        if self._group is None or len(address) != 1 + len(self._others):
            return
        for rank in self._others:
            try:
                self._group.switchboard.order(rank, {"do": "forget", "address": address[rank].as_dict()})
            except EngineError:
                return

    def close(self) -> None:
        self._own.close()
