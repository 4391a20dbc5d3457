"""A rank other than 0: a process that runs the plans that it is sent. It has no scheduler, no clock and no requests of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from backend.config import EngineConfig
from backend.devices import on_stream
from backend.group import CAPTURE, EXCHANGE_SECONDS, MEET_SECONDS, PLAN, STOP, Verdicts, check_verdicts, describe_self
from backend.parallel.ranks import Ranks, make_ranks
from backend.parallel.ring import PlanRing
from backend.step.plan import StepPlan
from backend.step.worker import Worker

logger = logging.getLogger(__name__)


def follow(worker: Worker, ranks: Ranks, ring: PlanRing, parent: int) -> None:
    """Runs plans until rank 0 says that it was the last."""
    verdicts, num_launched = Verdicts(), 0

    def check() -> None:
        if os.getppid() != parent:
            raise RuntimeError("rank 0 has ended")

    while True:
        words = ring.read(ranks.rank - 1, check)
        if words[0] == STOP:
            return
        if words[0] == CAPTURE:
            worker.capture_waiting()
            continue
        assert words[0] == PLAN, f"rank 0 sent a message of kind {words[0]}"
        plan = StepPlan.from_array(words[1:])
        check_verdicts(ranks, verdicts, num_launched, worker.device)
        num_launched += 1
        verdicts.add(worker.launch(plan)().rows)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 has it too, and says when it is over
    spec: dict[str, Any] = json.loads(sys.stdin.readline())
    rank, size = spec["rank"], spec["size"]
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank} %(name)s %(message)s")
    store = dist.TCPStore("127.0.0.1", spec["port"], size, is_master=False, timeout=timedelta(seconds=MEET_SECONDS))
    try:
        config = EngineConfig.from_dict(spec["config"])
        ring = PlanRing(size - 1, spec["ring"])
        store.set(f"hello {rank}", describe_self())
        device = torch.device(config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with on_stream(device):
            ranks = make_ranks(rank, size, store, device, timedelta(seconds=EXCHANGE_SECONDS))
            worker = Worker(config, ranks)
            worker.warm_up()
            try:
                follow(worker, ranks, ring, spec["parent"])
            finally:
                ring.close()
            worker.release()
            ranks.close()
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, may be gone
            store.set(f"error {rank}", f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
