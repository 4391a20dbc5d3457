"""The pages of ranks other than 0: each reads its own part from the same rank of the other node, as rank 0 tells it to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend.disaggregation.transfer import PageAddress
from backend.disaggregation.transfers import Transfer, Transport
from backend.errors import ConfigError, TransferError
from backend.kv_store import KvStore
from backend.parallel.lines import BEAT_SECONDS, Order, Orders

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.0005
SERVE_SECONDS = 1.0
"""For which others' reads are served after rank 0 has said that there may be some."""


@dataclass(slots=True)
class _Read:
    order: Order
    handle: Any = None
    """None: steps that may write to its pages have to end first."""


class RankPages:
    """A rank's side. All but the constructor runs on the thread of orders."""

    def __init__(self, store: KvStore, orders: Orders, num_done: Callable[[], int]) -> None:
        """num_done: steps that this rank has computed."""
        self._store, self._orders, self._num_done = store, orders, num_done
        self._transfer: Transfer | None = None
        self._reads: list[_Read] = []
        self._serve_end = 0.0
        orders.handle({"open": self._open, "read": self._begin, "forget": self._forget, "serve": self._serve})
        orders.poll = self._poll

    def close(self) -> None:
        """The process is about to end."""
        if self._transfer is not None:
            self._transfer.close()

    def _open(self, order: Order) -> None:
        try:
            self._transfer = Transport.from_dict(order["transport"]).open(order["name"], self._store, is_follower=True)
        except ConfigError as error:
            self._orders.reply({"open": {"error": str(error)}})
            return
        self._orders.reply({"open": {"address": self._transfer.address.as_dict()}})

    def _begin(self, order: Order) -> None:
        self._reads.append(_Read(order))

    def _forget(self, order: Order) -> None:
        if self._transfer is not None:
            self._transfer.forget(PageAddress.from_dict(order["address"]))

    def _serve(self, order: Order) -> None:
        self._serve_end = time.monotonic() + SERVE_SECONDS

    def _poll(self) -> float:
        """Begins, and looks at, reads; lets others' get on."""
        transfer = self._transfer
        if transfer is None:
            return BEAT_SECONDS
        for read in list(self._reads):
            try:
                if read.handle is None:
                    if self._num_done() >= read.order["after"]:
                        address = PageAddress.from_dict(read.order["address"])
                        read.handle = transfer.read(address, read.order["pages"], read.order["remote_pages"])
                elif transfer.is_done(read.handle):
                    self._end(read, "")
            except TransferError as error:
                self._end(read, str(error))
            except Exception as error:  # an order that cannot be
                logger.exception("pages could not be read")
                self._end(read, f"{type(error).__name__}: {error}")
        is_serving = time.monotonic() < self._serve_end
        if is_serving:
            transfer.serve()
        return POLL_SECONDS if self._reads or is_serving else BEAT_SECONDS

    def _end(self, read: _Read, error: str) -> None:
        self._reads.remove(read)
        self._orders.reply({"read": read.order["number"], "error": error})
