"""More ranks than there are GPUs, several to each: for what they answer, not for how soon, as those of one GPU take turns.

NCCL takes one rank on each GPU. So what no kernel of ours exchanges goes through the hosts' memory, by gloo.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from backend import follower, group, rank_hello
from backend.config import EngineConfig
from backend.parallel.ranks import Ranks, make_ranks, meet_through
from backend.rank_processes import start_rank
from kernels.all_reduce import can_all_reduce, meet_peers


@dataclass(frozen=True, slots=True)
class SharedRanks(Ranks):
    """`Ranks` whose group is gloo's."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if can_all_reduce(x, self.size):
            return Ranks.all_reduce(self, x)
        own = x.cpu()
        self._group.allreduce([own]).wait()
        return x.copy_(own)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return Ranks.gather(self, x.cpu()).to(x.device)


def make_shared_ranks(rank: int, size: int, store: dist.Store, device: torch.device, timeout: timedelta, address: str = "") -> Ranks:
    """In the place of `make_ranks`, on GPUs of one host that can write each other's memory. Raises RuntimeError where they cannot."""
    hosts = make_ranks(rank, size, store, torch.device("cpu"), timeout, address)
    peers = meet_through(store, device, rank, size, meet_peers)
    if peers is None:
        raise RuntimeError("ranks that share GPUs need such as can write each other's memory")
    return SharedRanks(rank, size, hosts.group, peers, sockets=hosts.sockets)


def device_of_rank(config: EngineConfig, rank: int) -> str:
    """In turns, from the first GPU on."""
    return f"cuda:{rank % torch.cuda.device_count()}"


@contextlib.contextmanager
def shared_gpus(device: str, size: int) -> Iterator[None]:
    """Engines of so many ranks that are made inside share GPUs, where there are fewer."""
    with contextlib.ExitStack() as stack:
        if device != "cpu" and size > torch.cuda.device_count():
            for module in (rank_hello, group):
                stack.enter_context(mock.patch.object(module, "device_of_rank", device_of_rank))
            stack.enter_context(mock.patch.object(group, "make_ranks", make_shared_ranks))
            stack.enter_context(mock.patch.object(group, "start_rank", functools.partial(start_rank, module=__name__)))
        yield


def main() -> None:
    """A rank other than 0."""
    with mock.patch.object(follower, "make_ranks", make_shared_ranks):
        follower.main()


if __name__ == "__main__":
    main()
