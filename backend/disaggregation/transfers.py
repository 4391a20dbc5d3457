"""What moves a node's pages, and where others find them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.disaggregation.tcp_transfer import TcpRead, TcpTransfer, find_hosts
from backend.disaggregation.transfer import PageAddress, PageTransfer, make_scratch
from backend.disaggregation_config import DisaggregationConfig
from backend.errors import ConfigError
from backend.kv_store import KvStore

logger = logging.getLogger(__name__)

RDMA_DEVICES = Path("/sys/class/infiniband")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = tuple(Path(f"/proc/self/ns/{kind}") for kind in ("ipc", "pid"))


class EitherTransfer:
    """A GPU's pages where there is no RDMA: nodes in reach of CUDA IPC are read by NIXL, all others over TCP. Safe from any thread.

    Others NIXL would read by messages, with which a reader that dies can end the offering process (`tcp_transfer`).
    """

    is_served = True

    def __init__(self, near: PageTransfer, far: TcpTransfer, place: str) -> None:
        """Of one store, with one scratch memory."""
        self._near, self._far, self.scratch = near, far, near.scratch
        self.address = dataclasses.replace(far.address, near=near.address, place=place)

    def read(self, address: PageAddress, pages: Sequence[int], remote_pages: Sequence[int], *, to_scratch: bool = False) -> Any:
        """See the transfers."""
        if address.near is not None and address.place == self.address.place:
            return self._near.read(address.near, pages, remote_pages, to_scratch=to_scratch)
        return self._far.read(address, pages, remote_pages, to_scratch=to_scratch)

    def is_done(self, read: Any) -> bool:
        return self._far.is_done(read) if isinstance(read, TcpRead) else self._near.is_done(read)

    def serve(self) -> None:
        self._near.serve()

    def forget(self, address: PageAddress) -> None:
        self._far.forget(address)
        if address.near is not None:
            self._near.forget(address.near)

    def close(self) -> None:
        self._far.close()
        self._near.close()


Transfer = PageTransfer | TcpTransfer | EitherTransfer


@dataclass(frozen=True, slots=True)
class Transport:
    """The same for all ranks of a node."""

    backend: str
    """nixl or tcp."""
    toward: tuple[str, int]
    """Host and port of Redis: the other nodes lie on the way to it, as far as anybody knows."""
    host: str | None = None
    """This node's address, if it was given."""
    has_near: bool = False
    """With tcp: nodes in reach of CUDA IPC are read by nixl."""

    @classmethod
    def choose(cls, config: DisaggregationConfig, device: torch.device) -> Transport:
        """`auto`: nixl where this host has RDMA devices; else tcp, beside which nodes in reach of CUDA IPC read a GPU's pages by nixl."""
        backend, is_auto = config.transfer_backend, config.transfer_backend == "auto"
        if is_auto:
            backend = "nixl" if has_rdma() else "tcp"
        has_near = is_auto and backend == "tcp" and device.type == "cuda"
        return cls(backend, (config.scheduler_host, config.scheduler_port), config.transfer_host, has_near)

    def as_dict(self) -> dict[str, Any]:
        return {"backend": self.backend, "toward": list(self.toward), "host": self.host, "has_near": self.has_near}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Transport:
        return cls(values["backend"], (values["toward"][0], values["toward"][1]), values["host"], values["has_near"])

    def open(self, name: str, store: KvStore, num_scratch_bytes: int = 0, *, is_follower: bool = False) -> Transfer:
        """name: unlike any other's; is_follower: a rank that may be on another host, with other addresses than its node was given; the rest: see
        the transfers. Raises ConfigError."""
        scratch = make_scratch(store, num_scratch_bytes)
        if self.backend == "nixl":
            return PageTransfer(name, store, scratch)
        hosts = find_hosts(*self.toward)
        if self.host is not None and (self.host in hosts or not is_follower):
            hosts = (self.host,)
        near, place = None, find_place() if self.has_near else ""
        if place:
            try:
                near = PageTransfer(name, store, scratch)
            except ConfigError as error:
                logger.warning("GPUs of this host are read over TCP, too: %s", error)
        far = TcpTransfer(store, hosts, scratch)
        return far if near is None else EitherTransfer(near, far, place)


def has_rdma() -> bool:
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


def find_place() -> str:
    """Equal for processes that are in reach of CUDA IPC: of one host, and not in containers that are kept apart. Empty: nobody knows."""
    try:
        return ":".join([BOOT_ID.read_text().strip(), *(str(path.stat().st_ino) for path in NAMESPACES)])
    except OSError:
        return ""
