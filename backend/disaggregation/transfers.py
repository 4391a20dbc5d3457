"""What moves a node's pages, and where others find them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.disaggregation.tcp_transfer import TcpTransfer, find_hosts
from backend.disaggregation.transfer import PageTransfer
from backend.disaggregation_config import DisaggregationConfig
from backend.kv_store import KvStore

RDMA_DEVICES = Path("/sys/class/infiniband")

Transfer = PageTransfer | TcpTransfer


@dataclass(frozen=True, slots=True)
class Transport:
    """The same for all ranks of a node."""

    backend: str
    """nixl or tcp."""
    toward: tuple[str, int]
    """Host and port of Redis: the other nodes lie on the way to it, as far as anybody knows."""
    host: str | None = None
    """This node's address, if it was given."""

    @classmethod
    def choose(cls, config: DisaggregationConfig, device: torch.device) -> Transport:
        backend = config.transfer_backend
        if backend == "auto":
            backend = "nixl" if device.type == "cuda" or has_rdma() else "tcp"
        return cls(backend, (config.scheduler_host, config.scheduler_port), config.transfer_host)

    def as_dict(self) -> dict[str, Any]:
        return {"backend": self.backend, "toward": list(self.toward), "host": self.host}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Transport:
        return cls(values["backend"], (values["toward"][0], values["toward"][1]), values["host"])

    def open(self, name: str, store: KvStore, num_scratch_bytes: int = 0, *, is_follower: bool = False) -> Transfer:
        """name: unlike any other's; is_follower: a rank that may be on another host, with other addresses than its node was given; the rest: see
        the transfers. Raises ConfigError."""
        if self.backend == "nixl":
            return PageTransfer(name, store, num_scratch_bytes)
        hosts = find_hosts(*self.toward)
        if self.host is not None and (self.host in hosts or not is_follower):
            hosts = (self.host,)
        return TcpTransfer(store, hosts, num_scratch_bytes)


def has_rdma() -> bool:
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
