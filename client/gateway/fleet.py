"""Several servers behind one gateway: which of them takes a request, which are left out, and what is tried again.

A request goes to the server that has seen the longest part of its prompt's beginning, and so has it in its prefix cache, while that server has
room; else to the less loaded of two that are drawn (Mitzenmacher 2001). Servers are asked every moment what they serve, which also says that their
engine steps: one that does not answer, or refuses because it shuts down, is left out until it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import random
import socket
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from client.gateway.beginnings import Beginnings, cut
from client.gateway.metrics import Metrics
from client.gateway.upstream import Corpus, Upstream
from client.headers import NO_HEADERS, Headers
from client.loopback import SECURE_GRPC, check_address
from client.messages import Chunk, GenerateError
from client.tls import DEFAULT_TLS, Tls

logger = logging.getLogger("foretoken.gateway")

PROBE_SECONDS = 0.75
"""For an answer, by the client's own clock, which knows of a gateway that stood still itself. A server that died is left out within a second."""
PAUSE_SECONDS = 0.2
"""Between two questions."""
RESOLVE_SECONDS = 5.0
"""Between two looks at the addresses of a name."""
SLACK = 1.25
"""A server has room while it has at most this many times the average of open requests, and one more (Mirrokni et al. 2018: bounded loads)."""
RETRIED = ("UNAVAILABLE", "TIMEOUT")
"""Errors of a server, and not of the request."""


@dataclass(eq=False)
class Member:
    """One server."""

    url: str
    upstream: Upstream
    is_up: bool = True
    """Until it is known: a request may find out."""
    num_open: int = 0
    """Of this gateway's requests."""
    num_others: int = 0
    """Of other gateways' requests, as the server told lately."""
    description: dict[str, Any] = field(default_factory=dict)
    watch: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Open requests."""
        return self.num_open + self.num_others

    def note(self, description: dict[str, Any], num_open: int) -> None:
        """What the server says of itself. num_open: of this gateway's requests when it was asked, which must not count as others' once they end."""
        self.description = description
        self.num_others = max(0, description.get("num_running", 0) + description.get("num_waiting", 0) - max(num_open, self.num_open))


class Fleet:
    """The servers at some addresses; a name stands for all addresses that it has. The interface is Upstream's."""

    def __init__(self, addresses: Sequence[str], model: str, metrics: Metrics, tls: Tls = DEFAULT_TLS, headers: Headers = NO_HEADERS) -> None:
        self._addresses = list(addresses)
        self._model = model
        self._tls = tls
        self._headers = headers
        self._metrics = metrics
        self._members: dict[str, Member] = {}
        self._beginnings = Beginnings()
        self._random = random.Random()
        self._resolving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._resolve()
        self._resolving = asyncio.create_task(self._keep_resolving())

    async def close(self) -> None:
        if self._resolving is not None:
            self._resolving.cancel()
        for url in list(self._members):
            await self._remove(url)

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    # -- who is there -------------------------------------------------------------------------------------------------

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_SECONDS)
            await self._resolve()

    async def _resolve(self) -> None:
        found = {url: address for address in self._addresses for url in await find_addresses(address)}
        for url, address in found.items():
            if url not in self._members:
                try:
                    tls = self._tls if url == address else dataclasses.replace(self._tls, server_name=_host(address))  # certificates are of names
                    upstream = Upstream(url, self._model, tls.at(url), self._headers)
                except ValueError as error:  # files may have changed since the start
                    logger.warning("server %s cannot be asked: %s", url, error)
                    continue
                self._members[url] = member = Member(url, upstream)
                member.watch = asyncio.create_task(self._keep_asking(member))
                logger.info("server %s is among those asked", url)
        for url in self._members.keys() - found.keys():
            if self._members[url].num_open == 0:  # else at a later look
                await self._remove(url)

    async def _remove(self, url: str) -> None:
        member = self._members.pop(url)
        if member.watch is not None:
            member.watch.cancel()
        await member.upstream.close()
        self._metrics.forget_server(url)

    async def _keep_asking(self, member: Member) -> None:
        while True:
            try:
                num_open, process = member.num_open, member.description.get("process")
                member.note(await member.upstream.describe(PROBE_SECONDS), num_open)
                if member.description.get("process") != process:
                    self._beginnings.forget(member.url)  # it was started anew
                self._set_up(member, True)
            except (GenerateError, ValueError) as error:
                self._set_up(member, False, str(error))
            await asyncio.sleep(PAUSE_SECONDS)

    def _set_up(self, member: Member, is_up: bool, reason: str = "") -> None:
        if is_up != member.is_up:
            logger.warning("server %s %s", member.url, "is back" if is_up else f"is left out: {reason}")
        member.is_up = is_up
        self._metrics.note_server(member.url, is_up, member.num_open)

    # -- who takes a request ------------------------------------------------------------------------------------------

    def choose(self, parameters: dict[str, Any], tried: set[Member]) -> Member | None:
        """None: all were tried. Those that are left out come after all others: a request may know better than a probe."""
        rest = [m for m in self._members.values() if m not in tried]
        candidates = [m for m in rest if m.is_up] or rest
        if not candidates:
            return None
        limit = SLACK * (sum(m.load for m in candidates) + 1) / len(candidates) + 1
        roomy = {m.url: m for m in candidates if m.load < min(limit, m.description.get("max_batch_size", limit))}
        pieces = cut(parameters)
        drawn = [roomy[url] for url in self._beginnings.find(pieces, roomy)] or self._random.sample(candidates, min(2, len(candidates)))
        member = min(drawn, key=lambda m: m.load)
        self._beginnings.note(pieces, member.url)
        return member

    def _nobody(self, whose: str = "") -> GenerateError:
        return GenerateError(f"{whose}no server is known (addresses that were given: {len(self._addresses)})", "UNAVAILABLE")

    async def stream(self, request_id: str, parameters: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """As Upstream.stream. What a server loses before its first token is asked of another."""
        tried: set[Member] = set()
        is_begun = False
        error = self._nobody(f"request {request_id!r}: ")
        while (member := self.choose(parameters, tried)) is not None:
            if tried:
                self._metrics.retries.inc()
            tried.add(member)
            member.num_open += 1
            try:
                async with contextlib.aclosing(member.upstream.stream(request_id, parameters)) as chunks:
                    async for chunk in chunks:
                        is_begun = is_begun or not chunk.is_empty
                        yield chunk
                return
            except GenerateError as failure:
                if failure.code not in RETRIED or is_begun:
                    raise
                error = failure
                logger.warning("%s was lost by %s: %s", request_id, member.url, failure)
            finally:
                member.num_open -= 1
        raise error

    # -- what any of them can answer ----------------------------------------------------------------------------------

    async def _ask_any(self, ask: str, *arguments: Any) -> Any:
        error = self._nobody()
        for member in sorted(self._members.values(), key=lambda m: (not m.is_up, m.load)):
            try:
                return await getattr(member.upstream, ask)(*arguments)
            except GenerateError as failure:
                if failure.code not in RETRIED:
                    raise
                error = failure
        raise error

    async def describe(self, limit: float | None = None) -> dict[str, Any]:
        return await self._ask_any("describe", limit)

    async def tokenize(self, prompt: dict[str, Any]) -> list[int]:
        return await self._ask_any("tokenize", prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._ask_any("detokenize", token_ids)

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return await self._ask_any("token_bytes", token_ids)

    async def add_suffix_corpus(self, request_id: str, corpus: Corpus) -> dict[str, int]:
        """As Upstream.add_suffix_corpus, of every server; answers with what the fullest of them says. Raises GenerateError where one of them
        did not take it, though others have."""
        members = list(self._members.values())
        found = await asyncio.gather(*(m.upstream.add_suffix_corpus(request_id, corpus) for m in members), return_exceptions=True)
        taken = [answer for answer in found if isinstance(answer, dict)]
        for member, error in zip(members, found, strict=True):
            if isinstance(error, GenerateError):
                raise GenerateError(f"{member.url}: {error} ({len(taken)} of {len(members)} servers took it)", error.code)
            if isinstance(error, BaseException):
                raise error
        if not taken:
            raise self._nobody()
        return max(taken, key=lambda answer: answer["num_all_tokens"])

    async def check(self) -> None:
        """Raises GenerateError unless one of the servers generates now."""
        if not any(member.is_up for member in self._members.values()):  # the others would have to be waited for, one after the other
            raise GenerateError(f"none of {len(self._members)} servers answers", "UNAVAILABLE")
        await self._ask_any("check")


async def find_addresses(address: str) -> list[str]:
    """HOST:PORT, or grpcs://HOST:PORT, with each address of the host; a host that nobody knows now has none. Addresses stay as they are."""
    bare = _host(address)
    scheme, port = SECURE_GRPC if address.startswith(SECURE_GRPC) else "", address.rpartition(":")[2]
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(bare)
        return [address]
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        logger.warning("%s: %s", address, error)
        return []
    hosts = [f"[{place[0]}]" if family == socket.AF_INET6 else place[0] for family, _, _, _, place in entries]
    return [f"{scheme}{host}:{port}" for host in dict.fromkeys(hosts)]


def _host(address: str) -> str:
    return address.removeprefix(SECURE_GRPC).rpartition(":")[0].strip("[]")


def is_fleet(url: str) -> bool:
    """Whether it names several servers, or a name that may stand for several."""
    if "," in url:
        return True
    host = _host(url)
    try:
        ipaddress.ip_address(host)
        return False
    except ValueError:
        return host != "localhost"


def split_addresses(text: str) -> list[str]:
    """The addresses of HOST:PORT,... Raises ValueError naming the one that is none."""
    found = [part.strip() for part in text.split(",")]
    for part in found:
        check_address(part)
    if len(set(found)) != len(found):
        raise ValueError("an address is named twice")
    return found
