"""The instances of `decode` as ranks: which one this is, and what it does if it is not rank 0."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from backend.adapters.rank_instance import RankInstance
from backend.adapters.stub import model_folder
from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.parallel.claims import Claim, check_socket, claim_rank, meeting_folder
from backend.rank_processes import MEET_SECONDS, follow_in_process


def claim_instance(arguments: dict[str, str], config: EngineConfig) -> Claim | None:
    """This instance's rank; None where the ranks are processes. Raises ConfigError where the instance group does not fit, ModelError."""
    size = config.parallel_config.num_instances
    if size == 1:
        return None
    groups = json.loads(arguments["model_config"]).get("instance_group", [])
    gpus = sorted(gpu for group in groups for gpu in group.get("gpus") or [] for _ in range(group.get("count", 1)))
    count = len(gpus) or sum(group.get("count", 1) for group in groups)
    if count != size:
        raise ConfigError(f"instance_group has {count} instances; as ranks (parallel_config.ranks) there must be tensor_parallel_size, {size}")
    ranks = list(range(size))
    if gpus:
        if gpus != list(range(gpus[0], gpus[0] + size)):
            raise ConfigError(f"instance_group has GPUs {gpus}; as ranks (parallel_config.ranks) they must follow one another, each once")
        ranks = [int(arguments["model_instance_device_id"]) - gpus[0]]
    folder = meeting_folder(os.getppid(), model_folder(arguments))
    check_socket(folder)
    return claim_rank(folder, ranks, MEET_SECONDS)


def follow(claim: Claim, check: Callable[[], None]) -> RankInstance:
    """This instance as the rank that it has claimed. check: `Instances`'s. Raises ModelError."""
    return RankInstance(claim.rank, claim.socket, follow_in_process, MEET_SECONDS, check)
