"""What each rank says of itself as they meet, and what one is told that is to be started."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.config import EngineConfig
from backend.devices import describe_processor
from backend.drafters import step_drafter_identity
from backend.errors import ConfigError
from backend.model_files import fingerprint
from backend.token_map import token_map_digest
from backend.version import VERSION

OWN_KEYS = ("model", "device", "num_threads", "cpu_kernels", "kv_cache_memory", "gpu_memory_utilization", "disaggregation")
"""Of the configuration: what may differ from host to host. Of memory and threads the least counts."""
OWN_SPECULATIVE_KEYS = ("model", "draft_token_map", "suffix_decoding_cache_path", "suffix_decoding_corpus")

PROJECT = Path(__file__).parent.parent
COMPUTING, SOURCES = ("backend", "kernels"), frozenset({".py", ".cpp", ".h", ".cu", ".cuh"})
"""Folders of what ranks run, and what its files end with."""


@functools.cache
def digest_sources(project: Path) -> str:
    """Of all that a rank runs of this software, found once for a process: states of it that differ have one version, and may add up in other
    orders, or read each other's plans wrongly."""
    digest = hashlib.blake2b(digest_size=6)
    for folder in COMPUTING:
        for path in sorted(path for path in (project / folder).rglob("*") if path.suffix in SOURCES):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(project)} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()


def device_of_rank(config: EngineConfig, rank: int) -> str:
    """On GPUs each rank of a host has its own, from the one of the host's first rank on: without a number that is `pick_device`'s, the current."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    number, parallel = config.device.partition(":")[2], config.parallel_config
    # A rank of a host whose ranks only follow has no GPU yet when it asks.
    first = int(number) if number else torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if first + parallel.host_size > torch.cuda.device_count():
        of_all = f" on {parallel.nnodes} hosts" if parallel.nnodes > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size {parallel.tensor_parallel_size}{of_all}: this machine has {torch.cuda.device_count()} GPUs, "
            f"and rank {parallel.first_rank} is on cuda:{first}"
        )
    return f"cuda:{first + rank - parallel.first_rank}"


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself; all but its number has to be equal on all ranks."""

    rank: int
    values: dict[str, Any]

    def differences(self, other: Hello) -> str:
        """Both values of what differs; empty: nothing does."""
        keys = [key for key in {**self.values, **other.values} if self.values.get(key) != other.values.get(key)]
        return ", ".join(f"{key} {self.values.get(key)} on rank {self.rank}, {other.values.get(key)} on rank {other.rank}" for key in keys)

    def write(self) -> str:
        """One line."""
        return json.dumps({"rank": self.rank, "values": self.values}) + "\n"

    @classmethod
    def read(cls, line: str) -> Hello:
        return cls(**json.loads(line))


def describe_self(config: EngineConfig, rank: int) -> Hello:
    """Raises ModelError."""
    own = dataclasses.asdict(config)
    values: dict[str, Any] = {
        "version": f"Foretoken {VERSION}, sources {digest_sources(PROJECT)}, torch {torch.__version__}, numpy {np.__version__}, "
        f"tokenizers {metadata.version('tokenizers')}",
        "processor": describe_processor(torch.device(config.device if rank else device_of_rank(config, 0))),
        "checkpoint": fingerprint(config.model),
        "drafter": step_drafter_identity(config),
        "draft_token_map": token_map_digest(config.speculative_config.draft_token_map),
    }
    parallel = {key: value for key, value in own.pop("parallel_config").items() if key not in ("node_rank", "master")}
    speculative = {key: value for key, value in own.pop("speculative_config").items() if key not in OWN_SPECULATIVE_KEYS}
    values |= parallel | {key: value for key, value in own.items() if key not in OWN_KEYS} | speculative
    return Hello(rank, json.loads(json.dumps(values)))


def describe_rank(config: EngineConfig, rank: int, meeting_place: tuple[str, int], ring: str | None, *, reports: bool = False) -> dict[str, Any]:
    """What a rank of this host is told (`backend.follower.run_rank`). ring: where plans come, on rank 0's own host; reports: it says how it fares."""
    values = dataclasses.asdict(config)
    if not config.parallel_config.node_rank:  # others find their GPUs themselves: rank 0 is to hear where there are too few
        values["device"] = device_of_rank(config, rank)
    host, port = meeting_place
    return {"config": values, "rank": rank, "host": host, "port": port, "ring": ring, "reports": reports, "parent": os.getpid()}
