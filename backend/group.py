"""Rank 0's side of tensor parallelism on one host: starts the other ranks, sends them every plan, and knows when one is gone.

The other ranks schedule nothing: they run the plans that they are sent (backend/follower.py), in the order in which they come.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from backend.config import EngineConfig
from backend.devices import on_stream
from backend.errors import ConfigError, EngineError, ModelError
from backend.parallel.ranks import Ranks, make_ranks
from backend.parallel.ring import PlanRing
from backend.step.plan import StepPlan

logger = logging.getLogger(__name__)

MEET_SECONDS, EXCHANGE_SECONDS = 120.0, 30.0
"""For the ranks to meet, and for a rank to take part in an exchange that others wait in."""
CHECK_EVERY = 256
"""Steps between comparisons of what the ranks decided."""
STOP_SECONDS = 10.0
EXPLAIN_SECONDS = 1.0
"""That a rank whose exchange failed may take to end."""
PLAN, CAPTURE, STOP = range(3)
"""What a message's first word says that it is."""


def device_of_rank(config: EngineConfig, rank: int) -> str:
    """On GPUs each rank has its own, from the one of rank 0 on."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    first = int(config.device.partition(":")[2] or 0)
    if first + config.parallel_config.tensor_parallel_size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size {config.parallel_config.tensor_parallel_size}: this machine has {torch.cuda.device_count()} GPUs, "
            f"and rank 0 is on cuda:{first}"
        )
    return f"cuda:{first + rank}"


def describe_self() -> str:
    """What has to be equal on all ranks, beside the configuration."""
    return f"torch {torch.__version__}, numpy {np.__version__}, tokenizers {metadata.version('tokenizers')}"


class Verdicts:
    """A checksum over what the steps decided, by step: equal on all ranks, since they compute it from equal inputs."""

    def __init__(self) -> None:
        self._sum = 0
        self._recent: deque[int] = deque(maxlen=4)
        self.num_steps = 0

    def add(self, rows: np.ndarray) -> None:
        self._sum = zlib.crc32(rows.tobytes(), self._sum)
        self._recent.append(self._sum)
        self.num_steps += 1

    def at(self, num_steps: int) -> int:
        """After so many steps, of which the newest four are known."""
        return self._recent[num_steps - self.num_steps - 1]


def check_verdicts(ranks: Ranks, verdicts: Verdicts, num_launched: int, device: torch.device) -> None:
    """Before every CHECK_EVERY-th step, on every rank. Raises EngineError when they decided differently."""
    if num_launched % CHECK_EVERY or not num_launched:
        return
    own = verdicts.at(num_launched - 1)  # the last one may be under way still
    sums = ranks.gather(torch.tensor([own], dtype=torch.int64, device=device)).flatten().tolist()
    if len(set(sums)) > 1:
        raise EngineError(f"the ranks decided differently within {CHECK_EVERY} steps up to step {num_launched - 1}: checksums {sums}")


class Group:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts them, and meets them. Raises ConfigError, ModelError."""
        size = config.parallel_config.tensor_parallel_size
        self._ring = PlanRing(size - 1)
        self._is_closed = False
        self._store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEET_SECONDS))
        self._children: list[subprocess.Popen[str]] = []
        self._num_launched = 0
        self.verdicts = Verdicts()
        self.ranks: Ranks | None = None
        try:
            for rank in range(1, size):
                self._children.append(self._start(config, rank, size))
            self._meet(size)
            self._ring.unlink()
            device = torch.device(device_of_rank(config, 0))
            with on_stream(device):
                self.ranks = make_ranks(0, size, self._store, device, timedelta(seconds=EXCHANGE_SECONDS))
        except BaseException:
            self.close()
            raise

    def _start(self, config: EngineConfig, rank: int, size: int) -> subprocess.Popen[str]:
        values = {**dataclasses.asdict(config), "device": device_of_rank(config, rank)}
        spec = {"config": values, "rank": rank, "size": size, "port": self._store.port, "ring": self._ring.path, "parent": os.getpid()}
        root = str(Path(__file__).parents[1])
        # Within the server this process is its stub, which embeds the python3 on PATH.
        python = sys.executable if Path(sys.executable or "").name.startswith("python") else shutil.which("python3") or "python3"
        child = subprocess.Popen([python, "-m", "backend.follower"], stdin=subprocess.PIPE, text=True, cwd=root)
        assert child.stdin is not None
        child.stdin.write(json.dumps(spec) + "\n")
        child.stdin.flush()
        return child

    def _meet(self, size: int) -> None:
        """Waits until every rank has said what it is."""
        end, own = time.monotonic() + MEET_SECONDS, describe_self()
        for rank in range(1, size):
            while not self._store.check([f"hello {rank}"]):
                self.check()
                if time.monotonic() > end:
                    raise ModelError(f"rank {rank} of {size} did not come within {MEET_SECONDS:.0f} s")
                time.sleep(0.01)
            if (other := self._store.get(f"hello {rank}").decode()) != own:
                raise ModelError(f"rank {rank} has {other}; rank 0 has {own}")

    def check(self) -> None:
        """Raises EngineError when a rank is gone."""
        for rank, child in enumerate(self._children, 1):
            if child.poll() is not None:
                known = self._store.check([f"error {rank}"])
                why = self._store.get(f"error {rank}").decode() if known else f"exit status {child.returncode}"
                raise EngineError(f"rank {rank} of {len(self._children) + 1} has ended: {why}")

    def explain(self, error: Exception) -> Exception:
        """The end of a rank, where that is why an exchange with it failed: in words of ours, not of the library's."""
        end = time.monotonic() + EXPLAIN_SECONDS
        while time.monotonic() < end:
            try:
                self.check()
            except EngineError as gone:
                return gone
            time.sleep(0.05)
        return error

    def send(self, plan: StepPlan, device: torch.device) -> None:
        """To every rank, which launches it, as the caller does next."""
        self._send(PLAN, plan.to_array())
        assert self.ranks is not None
        check_verdicts(self.ranks, self.verdicts, self._num_launched, device)
        self._num_launched += 1

    def send_capture(self) -> None:
        self._send(CAPTURE)

    def _send(self, kind: int, words: np.ndarray | None = None) -> None:
        head = np.array([kind], dtype=np.int32)
        self._ring.write(head if words is None else np.concatenate([head, words]), self.check)

    def close(self, release: Callable[[], None] = lambda: None) -> None:
        """Ends the other ranks. release: gives back what holds exchanges on this one."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._children:
                self._send(STOP)
            release()
            if self.ranks is not None:
                self.ranks.close()
        except Exception as error:
            logger.warning("the ranks are ended: %s", error)
        end = time.monotonic() + STOP_SECONDS
        for child in self._children:
            try:
                child.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children = []
        self._ring.close()
