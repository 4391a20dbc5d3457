"""Pages of other nodes, read over TCP: one connection for each node that is read from.

Where networks have no RDMA, UCX reads by messages, and its offering side ends its process where a reader dies in the middle of one: with the next
message's assertion, or by a request that it had not filled in (NIXL 1.5.1). Here whatever a reader does ends its own connection.

A reader sends the offering node's token, which is answered by a byte; then for each read the number of its runs, and of each the first page and how
many (32-bit, little-endian), which are answered by the pages. Those in a GPU's memory pass through pinned memory at both ends (`staging`).
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from backend.disaggregation.staging import Pieces, make_pages
from backend.disaggregation.transfer import PageAddress, check_backend, find_runs
from backend.errors import ConfigError, TransferError
from backend.kv_store import KvStore

logger = logging.getLogger(__name__)

TOKEN_BYTES, WORD, WELCOME = 16, 4, b"+"
MAX_RUNS, MAX_READERS, BACKLOG = 1 << 20, 1024, 128
HELLO_SECONDS, SILENCE_SECONDS, CONNECT_SECONDS = 5, 10, 2.0
"""For a token to come and to be answered; without a byte, or room for one, after which a connection is given up; to one of a node's addresses."""


@dataclass(slots=True, eq=False)
class TcpRead:
    """One read. Its peer's thread writes, and says when it does no more."""

    runs: np.ndarray
    """[n, 2] uint32, of the other node: first page, and how many."""
    pieces: Pieces
    """To be filled."""
    error: str = ""
    is_over: bool = False


class TcpTransfer:
    """Offers the pages of a store, and reads others'. Safe from any thread."""

    is_served = False
    """Others' reads get on by themselves."""

    def __init__(self, store: KvStore, hosts: Sequence[str], scratch: torch.Tensor) -> None:
        """hosts: this host's addresses, which other nodes try in turn; one: others do not reach the pages. scratch: `make_scratch`'s, for what is
        read beside the store's pages. Raises ConfigError."""
        self._page_bytes, self._num_pages, self.scratch = store.page_bytes, len(store.memory), scratch
        self._pages, self._scratch_pages = make_pages([store.memory, scratch])
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._listener = listen(hosts)
        self.address = PageAddress(self._token, 0, store.page_bytes, "TCP", 0, tuple(hosts), self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._readers: set[socket.socket] = set()
        self._peers: dict[PageAddress, _Peer] = {}
        self._is_closed = False
        threading.Thread(target=self._accept, name="pages", daemon=True).start()

    # -- offering -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    self._listener.close()
                    return
                logger.warning("pages: a connection could not be taken: %s", error)
                time.sleep(0.1)  # out of file descriptors, say
                continue
            with self._lock:
                is_welcome = len(self._readers) < MAX_READERS and not self._is_closed
                if is_welcome:
                    self._readers.add(reader)
            try:
                if is_welcome:
                    threading.Thread(target=self._answer, args=(reader,), name="page reader", daemon=True).start()
                    continue
                logger.warning("pages: %d nodes read here; no more are let in", MAX_READERS)
            except RuntimeError as error:  # no more threads
                logger.warning("pages: %s", error)
            self._leave(reader)

    def _leave(self, reader: socket.socket) -> None:
        with self._lock:
            self._readers.discard(reader)
        reader.close()

    def _answer(self, reader: socket.socket) -> None:
        """One reader's requests, until it leaves."""
        try:
            prepare(reader, HELLO_SECONDS)
            if not hmac.compare_digest(receive(reader, TOKEN_BYTES), self._token):
                return
            reader.sendall(WELCOME)
            while True:
                limit_silence(reader, 0)  # until it wants something
                head = receive(reader, 1)
                limit_silence(reader, SILENCE_SECONDS)
                (count,) = struct.unpack("<I", head + receive(reader, WORD - 1))
                if not 1 <= count <= MAX_RUNS:
                    return
                runs = np.frombuffer(receive(reader, 2 * WORD * count), dtype="<u4").reshape(-1, 2).astype(np.int64)
                if not runs[:, 1].all() or (runs.sum(axis=1) > self._num_pages).any():
                    return
                with contextlib.closing(self._pages.outgoing(runs.tolist())) as pieces:
                    for piece in pieces:
                        reader.sendall(piece)
        except (OSError, EOFError) as error:
            logger.debug("pages: a reader has left: %s", error)
        except TransferError as error:
            logger.warning("pages are not sent to a node: %s", error)
        except Exception:
            logger.exception("pages could not be sent")
        finally:
            self._leave(reader)

    def serve(self) -> None:
        """Readers have threads of their own."""

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, address: PageAddress, pages: Sequence[int], remote_pages: Sequence[int], *, to_scratch: bool = False) -> TcpRead:
        """Begins to read remote pages into this store's, or into the scratch memory -> what `is_done` takes. Raises TransferError."""
        check_backend(address, "tcp")
        if address.page_bytes != self._page_bytes:
            raise TransferError(f"pages of {address.page_bytes} bytes cannot be read: this node's are of {self._page_bytes} bytes")
        own_pages, count = (self._scratch_pages, len(self.scratch)) if to_scratch else (self._pages, self._num_pages)
        if max(pages, default=0) >= count:
            raise TransferError(f"page {max(pages)} does not exist; there are {count}")
        own, remote, lengths = find_runs(pages, remote_pages)
        if (remote < 0).any():
            raise TransferError(f"page {remote.min()} does not exist on the other node")
        pieces = own_pages.incoming(np.stack([own, lengths], axis=1).tolist())
        read = TcpRead(np.stack([remote, lengths], axis=1).astype("<u4"), pieces, is_over=not len(own))
        with self._lock:
            if self._is_closed:
                raise TransferError("this node is shutting down")
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = _Peer(address)
            if not read.is_over and not peer.put(read):
                self._peers[address] = peer = _Peer(address)  # its connection has broken since
                peer.put(read)
        return read

    def is_done(self, read: TcpRead) -> bool:
        """Whether a read is over. Raises TransferError when it failed: nothing is written any more."""
        if read.is_over and read.error:
            raise TransferError(read.error)
        return read.is_over

    def forget(self, address: PageAddress) -> None:
        """The node is gone, or begins anew: what is read from there ends."""
        with self._lock:
            peer = self._peers.pop(address, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            readers, addresses = list(self._readers), list(self._peers)
        for address in addresses:
            self.forget(address)
        shut(self._listener)
        for reader in readers:
            shut(reader)


class _Peer:
    """A node that is read from: its reads one after the other."""

    def __init__(self, address: PageAddress) -> None:
        self._address = address
        self._reads: queue.SimpleQueue[TcpRead | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._error = ""
        """Why nothing is read any more."""
        threading.Thread(target=self._run, name="page reads", daemon=True).start()

    def put(self, read: TcpRead) -> bool:
        """False: nothing is read here any more."""
        with self._lock:
            if not self._error:
                self._reads.put(read)
            return not self._error

    def close(self, error: str = "its node was forgotten") -> None:
        with self._lock:
            self._error = self._error or error
            connected = self._socket
        self._reads.put(None)
        if connected is not None:
            shut(connected)

    def _run(self) -> None:
        read: TcpRead | None = None
        try:
            with connect(self._address) as connected:
                with self._lock:
                    self._socket = connected
                    is_wanted = not self._error
                while is_wanted and (read := self._reads.get()) is not None:
                    connected.sendall(struct.pack("<I", len(read.runs)) + read.runs.tobytes())
                    with contextlib.closing(read.pieces) as pieces:
                        for piece in pieces:
                            fill(connected, piece)
                    read.is_over, read = True, None
        except (OSError, EOFError, TransferError) as error:
            self.close(str(error))
        except Exception as error:
            logger.exception("pages could not be read")
            self.close(f"{type(error).__name__}: {error}")
        while read is not None or not self._reads.empty():
            if read is not None:
                read.error, read.is_over = self._error, True
            read = self._reads.get() if not self._reads.empty() else None


# -- sockets --------------------------------------------------------------------------------------------------------------


def find_hosts(host: str, port: int) -> tuple[str, ...]:
    """This host's addresses, the one on the way to another host first: where that is itself, others may reach it by the rest."""
    found = []
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of UDP: nothing is sent
                found.append(probe.getsockname()[0])
    own = [a for addresses in psutil.net_if_addrs().values() for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
    others = [a.address for a in own if not ipaddress.ip_address(a.address.partition("%")[0]).is_link_local]
    return tuple(dict.fromkeys([*found, *sorted(others, key=lambda address: address.startswith("127."))]))


def listen(hosts: Sequence[str]) -> socket.socket:
    """At one address, or at all. Raises ConfigError."""
    host = hosts[0] if len(hosts) == 1 else ""
    is_v6 = ":" in host or (not host and socket.has_dualstack_ipv6())
    try:
        return socket.create_server(
            (host, 0), family=socket.AF_INET6 if is_v6 else socket.AF_INET, backlog=BACKLOG, dualstack_ipv6=is_v6 and not host
        )
    except OSError as error:
        raise ConfigError(f"disaggregation.transfer_host: nothing can listen at {host or 'any address'}: {error}") from error


def connect(address: PageAddress) -> socket.socket:
    """A connection on which the other node awaits requests. Raises OSError, which names the addresses that were tried."""
    errors = []
    for host in address.hosts:
        try:
            connected = socket.create_connection((host, address.port), timeout=CONNECT_SECONDS)
        except OSError as error:
            errors.append(f"{host}:{address.port}: {error}")
            continue
        try:
            prepare(connected, HELLO_SECONDS)
            connected.sendall(address.metadata)
            if receive(connected, len(WELCOME)) == WELCOME:
                limit_silence(connected, SILENCE_SECONDS)
                return connected
            errors.append(f"{host}:{address.port}: somebody else listens there")
        except (OSError, EOFError) as error:
            errors.append(f"{host}:{address.port}: {error}")
        connected.close()
    raise OSError("; ".join(errors))


def prepare(connected: socket.socket, seconds: int) -> None:
    """seconds: of silence."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.settimeout(None)  # by the kernel's limits: Python's own would have it wake for each piece
    limit_silence(connected, seconds)


def limit_silence(connected: socket.socket, seconds: int) -> None:
    """0: without an end for what is received."""
    for option, limit in ((socket.SO_RCVTIMEO, seconds), (socket.SO_SNDTIMEO, seconds or SILENCE_SECONDS)):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", limit, 0))


def fill(connected: socket.socket, target: memoryview) -> None:
    """Raises EOFError, OSError."""
    while target:
        try:
            count = connected.recv_into(target, flags=socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("nothing has come for too long") from None
        if not count:
            raise EOFError("the other node has closed the connection")
        target = target[count:]


def receive(connected: socket.socket, count: int) -> bytearray:
    """Raises EOFError, OSError."""
    found = bytearray(count)
    fill(connected, memoryview(found))
    return found


def shut(connected: socket.socket) -> None:
    """Whoever waits on it goes on, and closes it: its number would be another's while they do."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
