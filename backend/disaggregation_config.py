"""The section `disaggregation` of the configuration: a node's part in prefill and decode apart."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import math
import os
from dataclasses import dataclass
from pathlib import Path

from backend.errors import ConfigError
from backend.section import Section, choose, require

ROLES = ("mixed", "prefill", "decode")
SCHEDULERS = ("local", "redis")
TRANSFER_BACKENDS = ("auto", "nixl", "tcp")
MAX_TTL = 10**9


@dataclass(frozen=True, kw_only=True)
class DisaggregationConfig(Section):
    """Prefill and decode on nodes of their own, which find each other in Redis (docs/disaggregation.md)."""

    role: str = "mixed"
    """prefill (computes prompts for decode nodes), decode (has prompts computed by prefill nodes, or itself where there is none), or mixed: a
    node that computes its own prompts, and with a scheduler those of decode nodes too."""
    scheduler_name: str | None = None
    """local (no other nodes) or redis, also written splitwise. Default: redis for the roles prefill and decode."""
    scheduler_host: str = "127.0.0.1"
    """Of the Redis server."""
    scheduler_port: int = 6379
    """Of the Redis server."""
    scheduler_db: int = 0
    """Number of the Redis database."""
    scheduler_password_file: str | None = None
    """File whose first line is the password of the Redis server; spaces around it are no part of it."""
    scheduler_password_variable: str | None = None
    """Environment variable that holds it, in place of a file."""
    scheduler_topic: str = "foretoken"
    """What all keys in Redis begin with: nodes of one topic work for each other."""
    scheduler_ttl: int = 900
    """Seconds after which Redis forgets streams that nobody writes to; not fewer than job_seconds."""
    transfer_backend: str = "auto"
    """What moves pages, the same on all nodes: nixl (RDMA, and GPUs within a host), tcp (plain connections; a GPU's pages pass through the host's
    memory), or auto: nixl where there are RDMA devices, else tcp, but nixl between GPUs of one host (of one container, or of containers that share
    their IPC and PID namespaces). By nixl without RDMA between two hosts, a decode node that dies while it reads can end the prefill node."""
    transfer_host: str | None = None
    """With tcp, this node's address for those that read its pages. Default: all that the host has."""
    node_id: str | None = None
    """Name of this node in Redis and in logs, where a random number follows it. Default: host name and process."""
    heartbeat_seconds: float = 1.0
    """Between a node's signs of life; after three that are missing it is taken for dead."""
    job_seconds: float = 30.0
    """Without a word from a prefill node after which the decode node computes the prompts that it has there itself."""
    lease_seconds: float = 30.0
    """For a decode node to read the pages of a prompt that is computed; then the prefill node gives them to others."""
    min_remote_tokens: int = 64
    """Prompts that lack fewer tokens than these in the decode node's cache are computed there."""

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("role", choose("role", self.role, ROLES))
        name = self.scheduler_name or ("local" if self.role == "mixed" else "redis")
        name = choose("scheduler_name", name, (*SCHEDULERS, "splitwise"))
        put("scheduler_name", "redis" if name == "splitwise" else name)
        require(self.role == "mixed" or self.scheduler_name == "redis", "scheduler_name", self.scheduler_name, f"redis for role {self.role}")
        put("transfer_backend", choose("transfer_backend", self.transfer_backend, TRANSFER_BACKENDS))
        good = self.transfer_host is None or self.transfer_backend != "nixl"
        require(good, "transfer_host", self.transfer_host, "left out with transfer_backend nixl, which reads at addresses of its own")
        require(1 <= self.scheduler_port <= 65535, "scheduler_port", self.scheduler_port, "from 1 to 65535")
        require(self.scheduler_db >= 0, "scheduler_db", self.scheduler_db, ">= 0")
        for key in ("scheduler_host", "scheduler_topic", "node_id", "scheduler_password_file", "scheduler_password_variable"):
            value = getattr(self, key)
            require(value is None or (value != "" and is_text(value)), key, value, "a name")
        require(
            is_host(self.scheduler_host), "scheduler_host", self.scheduler_host, "a host's name or address alone; scheduler_port is a key of its own"
        )
        require(
            self.transfer_host is None or is_single_address(self.transfer_host), "transfer_host", self.transfer_host, "an IP address of this host"
        )
        good = self.scheduler_password_file is None or self.scheduler_password_variable is None
        require(good, "scheduler_password_variable", self.scheduler_password_variable, "left out where scheduler_password_file is given")
        for key, least in (("heartbeat_seconds", 0.05), ("job_seconds", 0.1), ("lease_seconds", 2.0)):
            value = getattr(self, key)
            require(least <= value <= 86400, key, value, f"from {least} to 86400")
        least = math.ceil(self.job_seconds)  # else jobs that wait would be forgotten, and be waited for all the same
        good = least <= self.scheduler_ttl <= MAX_TTL
        require(good, "scheduler_ttl", self.scheduler_ttl, f"from {least} (job_seconds) to {MAX_TTL}")
        require(self.min_remote_tokens >= 1, "min_remote_tokens", self.min_remote_tokens, ">= 1")

    @property
    def is_on(self) -> bool:
        return self.scheduler_name == "redis"


def is_address(value: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(value))
    return False


def is_single_address(value: str) -> bool:
    return is_address(value) and not ipaddress.ip_address(value).is_unspecified


def is_host(value: str) -> bool:
    """Not an URL, a socket's path, or a host with its port: none would ever be found."""
    return is_address(value) or not set(value) & set(":/[]@, \t\n")


def is_text(value: str) -> bool:
    """Whether Redis, or an answer, can have it: bytes of a command line that are no UTF-8 come as halves of surrogate pairs."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def read_password(config: DisaggregationConfig) -> str | None:
    """Of the Redis server; None: it wants none. Raises ConfigError."""
    if config.scheduler_password_variable is not None:
        value = os.environ.get(config.scheduler_password_variable)
        if not value:
            raise ConfigError(f"disaggregation.scheduler_password_variable: the environment has no {config.scheduler_password_variable}")
        return value
    if config.scheduler_password_file is None:
        return None
    try:
        line = Path(config.scheduler_password_file).expanduser().read_text("utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:  # the last of `~name` for no user
        raise ConfigError(f"disaggregation.scheduler_password_file {config.scheduler_password_file} cannot be read: {error}") from None
    if not line:
        raise ConfigError(f"disaggregation.scheduler_password_file {config.scheduler_password_file} is empty")
    return line
