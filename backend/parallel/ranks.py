"""The group of processes that hold one model's parts. Layers are built for `size` parts; with one, nothing is exchanged."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from backend.errors import ConfigError
from backend.parallel.split import check_divides
from kernels import peer_memory, scattered
from kernels.all_reduce import PeerMemory, all_gather, all_reduce, can_all_gather, can_all_reduce, can_share_rows, meet_peers, share_rows
from kernels.cpu_exchange import HostMemory, meet_host
from kernels.tape import refuse

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
UNIT = 8
"""Tokens of a vocabulary that does not divide go to ranks in so many: products have whole tiles then."""
MIN_SHARED_ROWS = 32
"""Of fewer rows each rank chooses all tokens: another exchange takes longer than that."""
MAX_BYTES = 64
"""Of what ranks tell each other where they meet."""
WHOLE = (slice(None),)
"""All rows at once."""

Met = TypeVar("Met")


def await_rows(rows: Iterable[slice]) -> None:
    """Until all of them can be read."""
    for _ in rows:
        pass


class Projection(Protocol):
    """What `backend.quantization.Linear` has of a product."""

    def takes_pieces(self, x: torch.Tensor) -> bool: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None: ...

    def write_to(self, out: torch.Tensor, x: torch.Tensor, is_ready: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place in the group, and the group's exchanges, which every rank makes in the same order."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """torch.distributed's process group, of the backend's own class; None when the rank is alone."""
    peers: PeerMemory | None = None
    """Through which small exchanges go, where the GPUs can write each other's memory."""
    scattered: scattered.ScatterMemory | None = None
    """Through which large sums go there."""
    sockets: frozenset[str] = frozenset()
    """On CPU the connections of the group, as /proc names them."""
    host: HostMemory | None = None
    """On CPU what ranks of one host exchange by."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank is {self.rank}; the group has ranks 0 to {self.size - 1}")

    def part(self, count: int, what: str, *, can_repeat: bool = False) -> slice:
        """This rank's share of `count` rows, heads or experts. Raises DoesNotDivideError when it does not divide.

        can_repeat: where there are more ranks than that, several may hold the same one; what the ranks' parts make must not be added up then.
        """
        check_divides(count, self.size, what, can_repeat=can_repeat)
        if count % self.size == 0:
            share = count // self.size
            return slice(self.rank * share, (self.rank + 1) * share)
        own = self.rank // (self.size // count)
        return slice(own, own + 1)

    def vocabulary(self, count: int) -> slice:
        """This rank's share of `count` tokens: as many on each rank, so that where they do not divide the last ones hold some of others' too."""
        return self._tokens_of(self.rank, count)

    def _tokens_of(self, rank: int, count: int) -> slice:
        share = count // self.size if count % self.size == 0 else min(count, -(-count // (UNIT * self.size)) * UNIT)
        first = min(rank * share, count - share)
        return slice(first, first + share)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self.size == 1:
            return x
        if self.peers is not None and can_all_reduce(x, self.size):
            return all_reduce(x, self.peers)
        if self.host is not None and self.host.can_all_reduce(x):
            return self.host.all_reduce(x)
        refuse("a sum by the group")
        self._group.allreduce([x]).wait()
        return x

    def add_sum(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Adds the sum of the ranks' parts to x, in place; both of the same shape and type."""
        if self.peers is not None and can_all_reduce(part, self.size):
            all_reduce(part, self.peers, x)
        else:
            x.add_(self.all_reduce(part))

    def add_product(self, x: torch.Tensor, y: torch.Tensor, projection: Projection) -> Iterable[slice]:
        """Adds the sum of the ranks' projection(y) [T, N] to x [T, N], in place. Gives rows of x, as soon as they can be read; until all are given, x
        must not be used otherwise."""
        # Of a product that is made at once nothing would be computed meanwhile, and NCCL is faster alone.
        if self.scattered is not None and projection.takes_pieces(y) and scattered.can_scatter(x, self.size):
            return scattered.add_product(x, y, projection, self.scattered)
        if self.size > 1 and (self.peers is None or not can_all_reduce(x, self.size)):  # one rank's part has x in it, and nothing is added behind
            (projection.add_to if self.rank == 0 else projection.write_to)(x, y)
            self.all_reduce(x)
        elif self.size > 1:
            self.add_sum(x, projection(y))
        else:
            projection.add_to(x, y)
        return WHOLE

    def gather_vocabulary(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """[R, tokens of this rank] -> [R, count]: what each rank has of its `vocabulary`."""
        if self.size == 1:
            return x
        if self.peers is not None and x.shape[-1] * self.size == count and can_all_gather(x, self.size):
            return all_gather(x, self.peers)
        parts, end, own = self.gather(x), 0, []
        for rank, part in enumerate(parts):
            tokens = self._tokens_of(rank, count)
            own.append(part[..., end - tokens.start :])
            end = tokens.stop
        return torch.cat(own, dim=-1)

    def can_share_rows(self, num_rows: int, count: int) -> bool:
        """Whether `share_rows` takes so many rows of the scores of `count` tokens and is the faster way; the same on every rank."""
        has_way = self.peers is not None or bool(self.sockets)  # by NCCL alone it was not tried
        return has_way and self.size > 1 and num_rows >= MIN_SHARED_ROWS and count % (self.size * UNIT) == 0

    def share_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[R, tokens of this rank] -> [S, tokens of all]: the rows from rank * S on, S = ceil(R / size); past row R - 1 anything."""
        if self.peers is not None and can_share_rows(x):
            return share_rows(x, self.peers)
        share = -(-len(x) // self.size)
        x = torch.nn.functional.pad(x, (0, 0, 0, share * self.size - len(x)))
        if self.host is not None:
            parts = self.host.share(x)
        else:
            parts = x.new_empty(self.size, share, x.shape[1])
            self._group.alltoall_base(parts.flatten(0, 1), x.contiguous(), [], []).wait()
        return parts.transpose(0, 1).reshape(share, -1)

    def gather_words(self, words: torch.Tensor) -> torch.Tensor:
        """int32 [N] of each rank, of which none is -2^31 and N divides by 4 -> [size, N]."""
        if self.peers is not None:
            return all_gather(words.view(torch.float32)[None], self.peers).view(torch.int32).view(self.size, -1)
        return self.gather(words)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: what each rank has."""
        if self.host is not None:
            return self.host.gather(x)
        parts = x.new_empty(self.size, *x.shape)
        self._group.allgather([list(parts.unbind())], [x.contiguous()]).wait()
        return parts

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """What each rank has, of up to MAX_BYTES without zeros at the end. On CPU."""
        words = torch.frombuffer(bytearray(own.ljust(MAX_BYTES, b"\0")), dtype=torch.uint8)
        return [part.numpy().tobytes().rstrip(b"\0") for part in self.gather(words)]

    def least(self, value: int, device: torch.device) -> int:
        """The least of the ranks' values, for what all of them must agree on. Waits for all."""
        return value if self.size == 1 else int(self.gather(torch.tensor([value], dtype=torch.int64, device=device)).min())

    def limit(self, timeout: timedelta) -> None:
        """How long an exchange from now on may wait for another rank."""
        if self.host is not None:
            self.host.limit(timeout)
        if self.group is not None:
            self.group._set_default_timeout(timeout)

    def abort(self) -> None:
        """Exchanges that wait for a rank that is gone wait no longer, from any thread: on CPU they raise, which alone would wait for their own time
        limit; on GPUs they end, with results that are of no use."""
        if self.host is not None:
            self.host.abort()
        if self.sockets:
            for number, name in _open_sockets().items():
                if name in self.sockets:
                    _cut(number, name)
            return
        if self.peers is not None:
            waited = [own.waited for own in (self.peers, self.scattered) if own is not None]
            arguments = (self.peers.turns.device, self.rank, waited)
            threading.Thread(target=peer_memory.give_up, args=arguments, name="give up", daemon=True).start()
        if self.group is not None and hasattr(self.group, "abort"):
            self.group.abort()

    def close(self) -> None:
        """Leaves the group, as all ranks do at the same time; graphs with exchanges in them are gone by then (`Worker.release`)."""
        for memory in (self.peers, self.scattered):
            if memory is not None:
                memory.close()
        if self.group is not None and hasattr(self.group, "shutdown"):
            self.group.shutdown()

    @property
    def _group(self) -> Any:
        assert self.group is not None, "a group of several ranks has exchanges"
        return self.group


def make_ranks(rank: int, size: int, store: dist.Store, device: torch.device, timeout: timedelta, address: str = "") -> Ranks:
    """Meets the other ranks, on a GPU within its `on_stream`. Raises RuntimeError when they do not come in time.

    address: where ranks of other hosts, if there are any, reach this one. (NCCL finds its own.)
    """
    own = dist.PrefixStore("exchanges", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        peers, scattering = None, None
        if not address:  # memory is one host's
            peers = meet_through(store, device, rank, size, meet_peers)
            scattering = meet_through(store, device, rank, size, scattered.meet_scattering)
        if peers is None and rank == 0:
            logger.warning("tensor_parallel_size %d: the GPUs cannot write each other's memory; all sums go through NCCL", size)
        ranks = Ranks(rank, size, dist.ProcessGroupNCCL(own, rank, size, options), peers, scattering)
        ranks.least(0, device)  # NCCL meets in the first exchange, for which others may not wait as long as for a rank that loads
        return ranks
    before = set(_open_sockets().values())
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address or LOOPBACK)]
    group = dist.ProcessGroupGloo(own, rank, size, gloo)
    group.barrier().wait()  # type: ignore[attr-defined]
    ranks = Ranks(rank, size, group, sockets=frozenset(_open_sockets().values()) - before)
    return ranks if address else replace(ranks, host=meet_host(rank, size, timeout, ranks.gather_bytes))


def meet_through(
    store: dist.Store, device: torch.device, rank: int, size: int, meet: Callable[[torch.device, int, int, peer_memory.Exchange], Met]
) -> Met:
    """What ranks of one host `meet` for, by the store that all of them reach."""
    meeting = dist.PrefixStore("peers", store)

    def exchange(name: str, words: bytes) -> list[bytes]:
        meeting.set(f"{name} {rank}", words.hex())
        return [bytes.fromhex(meeting.get(f"{name} {r}").decode()) for r in range(size)]

    return meet(device, rank, size, exchange)


def _open_sockets() -> dict[int, str]:
    """This process's, by file descriptor."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{number}")).startswith("socket:"):
                found[int(number)] = name
    return found


def _cut(number: int, name: str) -> None:
    """Ends a connection whose file descriptor somebody else has. A socket that listens is left alone, and another one: the number may have been
    given back, and taken again, since it was looked up."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
        if os.readlink(f"/proc/self/fd/{own.fileno()}") != name:
            return
        own.getpeername()
        own.shutdown(socket.SHUT_RDWR)
