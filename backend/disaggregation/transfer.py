"""Pages of other nodes, read by NIXL (UCX: shared memory, TCP, cuda_ipc or RDMA, whatever the two have in common)."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from backend.errors import ConfigError, TransferError
from backend.heap import zeroed
from backend.kv_store import KvStore

logger = logging.getLogger(__name__)

MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where a node's pages lie, for others to read."""

    metadata: bytes
    """NIXL's, of the node's agent; of TCP: the token that a reader has to send."""
    begin: int
    """Of page 0, for NIXL."""
    page_bytes: int
    kind: str
    """DRAM or VRAM, for NIXL; or TCP."""
    device: int
    hosts: tuple[str, ...] = ()
    """Of TCP: addresses of the node, to be tried in turn."""
    port: int = 0
    near: PageAddress | None = None
    """Of TCP: where NIXL finds the same pages, for nodes of the same place."""
    place: str = ""
    """Of TCP, with `near`: `transfers.find_place`'s."""

    def as_dict(self) -> dict[str, Any]:
        near = None if self.near is None else self.near.as_dict()
        return dataclasses.asdict(self) | {"metadata": self.metadata.hex(), "hosts": list(self.hosts), "near": near}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PageAddress:
        near = None if values["near"] is None else cls.from_dict(values["near"])
        return cls(**{**values, "metadata": bytes.fromhex(values["metadata"]), "hosts": tuple(map(str, values["hosts"])), "near": near})

    @property
    def backend(self) -> str:
        """What moves these pages, to any node."""
        return backend_of(self.kind)


def backend_of(kind: str) -> str:
    return "tcp" if kind == "TCP" else "nixl"


class PageTransfer:
    """Offers the pages of a store, and reads others'. Pages that lie side by side on both nodes are one piece. Safe from any thread."""

    is_served = True
    """`serve` has to be called for others' reads to get on."""

    def __init__(self, name: str, store: KvStore, scratch: torch.Tensor) -> None:
        """name: unlike any other node's. scratch: `make_scratch`'s, for what is read beside the store's pages. Raises ConfigError."""
        api = _load_nixl()
        try:
            # NIXL's own thread for progress never sleeps: it takes a whole core of each node (measured). Readers poll, and who offers calls `serve`.
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
            self._agent = api.nixl_agent(name, config)
            self._store, self._memory, self.scratch = store, store.memory, scratch
            regions = [self._memory, *([self.scratch] if len(self.scratch) else [])]
            self._registered = [self._agent.register_memory(region) for region in regions]
            self._metadata = self._agent.get_agent_metadata()
        except Exception as error:
            raise ConfigError(f"disaggregation.transfer_backend nixl: {type(error).__name__}: {error}") from error
        self._peers: dict[bytes, str] = {}

    @property
    def address(self) -> PageAddress:
        kind, device = self._where()
        return PageAddress(self._metadata, self._memory.data_ptr(), self._store.page_bytes, kind, device)

    def _where(self) -> tuple[str, int]:
        device = self._memory.device
        return ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)

    def read(self, address: PageAddress, pages: Sequence[int], remote_pages: Sequence[int], *, to_scratch: bool = False) -> Any:
        """Begins to read remote pages into this store's, or into the scratch memory -> what `is_done` takes. Raises TransferError."""
        own = self._store.page_bytes
        check_backend(address, "nixl")
        if address.page_bytes != own:
            raise TransferError(f"pages of {address.page_bytes} bytes cannot be read: this node's are of {own} bytes")
        memory = self.scratch if to_scratch else self._memory
        if max(pages, default=0) >= len(memory):
            raise TransferError(f"page {max(pages)} does not exist; there are {len(memory)}")
        try:
            peer = self._peers.get(address.metadata)
            if peer is None:
                peer = self._peers[address.metadata] = self._agent.add_remote_agent(address.metadata)
            own_begins, remote_begins, lengths = find_runs(pages, remote_pages)
            if (remote_begins < 0).any():
                raise TransferError(f"page {remote_begins.min()} does not exist on the other node")
            local = self._describe(memory.data_ptr(), own_begins, lengths, *self._where())
            remote = self._describe(address.begin, remote_begins, lengths, address.kind, address.device)
            handle = self._agent.initialize_xfer("READ", local, remote, peer)
            if self._agent.transfer(handle) == "ERR":
                raise TransferError("the transfer was refused")
            return handle
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"{type(error).__name__}: {error}") from None

    def _describe(self, begin: int, pages: np.ndarray, lengths: np.ndarray, kind: str, device: int) -> Any:
        rows = np.empty((len(pages), 3), dtype=np.uint64)
        rows[:, 0] = begin + pages.astype(np.uint64) * np.uint64(self._store.page_bytes)
        rows[:, 1], rows[:, 2] = lengths * self._store.page_bytes, device
        return self._agent.get_xfer_descs(rows, mem_type=kind)

    def is_done(self, handle: Any) -> bool:
        """Whether a read is over; the handle is of no use afterwards. Raises TransferError when it failed: nothing is written any more."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            self._release(handle)
            raise TransferError(f"{type(error).__name__}: {error}") from None
        if state == "PROC":
            return False
        self._release(handle)
        if state != "DONE":
            raise TransferError(f"the transfer ended with state {state}")
        return True

    def serve(self) -> None:
        """Lets others' reads get on where the network wants this side for that (TCP). To be called again and again while there may be some."""
        with zeroed():  # UCX (of NIXL 1.5.1) answers reads by requests whose datatype it leaves unset, and goes by it when a reader has died
            self._agent.get_new_notifs()

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            logger.warning("a transfer's handle could not be released: %s", error)

    def forget(self, address: PageAddress) -> None:
        """The node is gone."""
        peer = self._peers.pop(address.metadata, None)
        if peer is not None:
            try:
                self._agent.remove_remote_agent(peer)
            except Exception as error:
                logger.debug("the agent of a node that is gone could not be removed: %s", error)

    def close(self) -> None:
        for address in list(self._peers):
            self.forget(PageAddress(address, 0, 0, "", 0))
        for registered in self._registered:
            try:
                self._agent.deregister_memory(registered)
            except Exception as error:
                logger.debug("memory could not be given back: %s", error)


def make_scratch(store: KvStore, num_bytes: int) -> torch.Tensor:
    """Pages of nobody, beside a store's, for at least so many bytes: [n, page_bytes] uint8."""
    scratch = torch.zeros(-(-num_bytes // store.page_bytes), store.page_bytes, dtype=torch.uint8, device=store.device)
    if scratch.is_cuda:
        torch.cuda.current_stream(scratch.device).synchronize()  # what is read comes by another stream, or none
    return scratch


def check_backend(address: PageAddress, own: str) -> None:
    """Raises TransferError."""
    if address.backend != own:
        raise TransferError(f"disaggregation.transfer_backend is {own} here, {address.backend} on the other node")


def find_runs(pages: Sequence[int], remote_pages: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First pages here and there, and how many, of runs that lie side by side on both nodes: each piece costs the transfer some microseconds."""
    own, remote = np.asarray(pages, dtype=np.int64), np.asarray(remote_pages, dtype=np.int64)
    order = np.argsort(own, kind="stable")
    own, remote = own[order], remote[order]
    begins = np.flatnonzero(np.concatenate([[True], (np.diff(own) != 1) | (np.diff(remote) != 1)])[: len(own)])
    return own[begins], remote[begins], np.diff(begins, append=len(own))


def _load_nixl() -> ModuleType:
    errors = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            errors.append(str(error))
            continue
        logging.getLogger(module.logger.name).setLevel(logging.WARNING)  # it says at every start that it started
        return module
    raise ConfigError(f"disaggregation.transfer_backend nixl cannot be loaded ({'; '.join(errors)}): pip install nixl-cu12 (nixl-cu13 for CUDA 13)")
