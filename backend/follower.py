"""A rank other than 0: a process that runs the plans that it is sent. It has no scheduler, no clock and no requests of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from backend.config import EngineConfig
from backend.devices import choose_cpu_kernels, on_stream
from backend.disaggregation.rank_pages import RankPages
from backend.errors import ModelError
from backend.group import ALL_THERE, CAPTURE, CHECK, MASKS, PLAN, PROBS, STOP, Verdicts, await_loaded, check_verdicts, compare_verdicts
from backend.own_process import has_begun
from backend.parallel.lines import BEAT_SECONDS, MASTER_HANG_SECONDS, ORDERS, PLANS, SILENT, Line, Orders, RankTakenError, connect
from backend.parallel.pulse import Pulse
from backend.parallel.ranks import Ranks, make_ranks
from backend.parallel.ring import PlanRing
from backend.rank_hello import describe_self, device_of_rank
from backend.rank_processes import EXCHANGE_SECONDS, LOAD_SECONDS, MEET_SECONDS
from backend.step.plan import StepPlan
from backend.step.worker import Begun, Launched, Worker

logger = logging.getLogger(__name__)

LOST_STATUS = 3
"""Exit status where rank 0 is gone."""
PARENT_SECONDS = 0.5
LOOK_SECONDS = 0.0005
"""Between two looks at a step under way, where plans come by a connection."""
LISTENS_SECONDS = 1.0
"""Between two looks whether rank 0, which is waited for, listens still."""
MEET_SLACK_SECONDS = 5.0
"""After which the library's own time limit for meeting is known not to hold."""


Report = Callable[[dict[str, Any]], None]
"""How a rank fares: `ready`, or `error`."""


class Plans:
    """Where they come from: rank 0's memory, or a connection from another host."""

    def __init__(self, ring: PlanRing | None, rank: int, plans: Line | None, orders: Line, check: Callable[[], None]) -> None:
        """check: raises where rank 0 is gone; called while there is no plan."""
        self._ring, self._rank, self._plans, self._orders, self._check = ring, rank, plans, orders, check
        self.num_done = 0

    def read(self, look: Callable[[], bool]) -> np.ndarray:
        """The next message. look: called while there is none; whether it wants to be called again soon. Raises RuntimeError when rank 0 is gone."""
        if self._ring is not None:

            def wait() -> None:
                self._check()
                look()

            return self._ring.read(self._rank - 1, wait)
        assert self._plans is not None
        try:
            content = None
            while content is None:
                content = self._plans.receive(LOOK_SECONDS if look() else None)
        except ConnectionError as error:
            raise RuntimeError(f"rank 0 has ended: {error}") from None
        return np.frombuffer(content, dtype="<i4").astype(np.int32)

    def note_done(self) -> None:
        """One step more was computed."""
        self.num_done += 1
        if self._ring is not None:
            self._ring.note_done(self._rank - 1, self.num_done)
        else:
            with contextlib.suppress(ConnectionError):
                self._orders.send_order({"done": self.num_done})


class Steps:
    """Those that this rank has launched. As on rank 0, the next is launched while one is under way: its GPU would wait between them else, and with
    it all the others."""

    def __init__(self, worker: Worker, ranks: Ranks, plans: Plans) -> None:
        self._worker, self._ranks, self._plans = worker, ranks, plans
        self._verdicts, self._num_launched = Verdicts(), 0
        self._begun: Begun | None = None
        """Awaits its masks."""
        self._under_way: deque[Launched] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.finish(1)
        check_verdicts(self._ranks, self._verdicts, self._num_launched, self._worker.device)
        self._num_launched += 1
        self._begun = self._worker.begin(plan)
        if not plan.awaits_masks:
            self.go_on(plan.masks)

    def go_on(self, masks: np.ndarray) -> None:
        """With the step that was begun last."""
        assert self._begun is not None, "rank 0 sent masks that no plan awaits"
        self._under_way.append(self._worker.go_on(self._begun, masks))
        self._begun = None
        self.look()

    def compare(self, num_steps: int) -> None:
        """What the ranks decided in the first num_steps steps. Raises RanksDiffer."""
        self.finish(self._num_launched - num_steps)
        compare_verdicts(self._ranks, self._verdicts, num_steps, self._worker.device)

    def finish(self, num_left: int = 0) -> None:
        """Waits until no more than so many are under way."""
        while len(self._under_way) > num_left:
            self._verdicts.add(self._under_way.popleft()().rows)
            self._plans.note_done()

    def look(self) -> bool:
        """Books those that are done. Whether some are not."""
        while self._under_way and self._under_way[0].is_done():
            self.finish(len(self._under_way) - 1)
        return bool(self._under_way)


def follow(worker: Worker, ranks: Ranks, plans: Plans) -> None:
    """Runs plans until rank 0 says that it was the last."""
    steps = Steps(worker, ranks, plans)
    while True:
        words = plans.read(steps.look)
        if words[0] == PLAN:
            steps.launch(StepPlan.from_array(words[1:]))
        elif words[0] == MASKS:
            steps.go_on(words[3:].reshape(words[1], words[2]))
        elif words[0] == CHECK:
            steps.compare(int(words[1]))
        elif words[0] == PROBS:
            index, count, width = words[1:4].tolist()
            worker.put_draft_probs(index, torch.from_numpy(words[4:].view(np.float32).reshape(count, width).copy()).to(worker.device))
        else:
            steps.finish()
            if words[0] == STOP:
                return
            assert words[0] == CAPTURE, f"rank 0 sent a message of kind {words[0]}"
            worker.capture_waiting()


class NotWanted(RuntimeError):
    """Rank 0 has no use for this process."""


class MasterSilent(ModelError):
    """Rank 0's machine is gone without a word: a call of its store would not come back for long."""


def meet(store: dist.Store, config: EngineConfig, rank: int, host: str, silence: Callable[[float], float]) -> tuple[Line, Line | None]:
    """Says what this rank is, and hears whether it fits. silence: as `Orders` has it.

    Raises NotWanted with rank 0's words where it does not; MasterSilent, ModelError, ConnectionError.
    """
    store.append("hello", describe_self(config, rank).write())  # type: ignore[attr-defined]
    verdict = hear_verdict(store, silence)
    store.set(f"heard {rank}", "")
    if verdict:
        raise NotWanted(verdict)
    port = int(store.get("lines"))
    try:
        return connect(host, port, rank, ORDERS), connect(host, port, rank, PLANS) if config.parallel_config.node_rank else None
    except ConnectionError as error:
        if isinstance(error, RankTakenError) or store.get("verdict"):  # two came before rank 0 had a verdict, and the other one was quicker
            raise NotWanted(ALL_THERE) from None
        raise


def hear_verdict(store: dist.Store, silence: Callable[[float], float]) -> str:
    """What rank 0 says once all ranks are there. Raises ModelError, and MasterSilent, which the library tells as late as of a rank that does not
    come."""
    heard: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def hear() -> None:
        try:
            heard.put(store.get("verdict").decode())
        except RuntimeError as error:  # the store goes with rank 0
            heard.put(error)

    threading.Thread(target=hear, name="verdict", daemon=True).start()
    while True:
        try:
            found = heard.get(timeout=BEAT_SECONDS)
            break
        except queue.Empty:
            if (silent := silence(time.monotonic())) > MASTER_HANG_SECONDS:
                raise MasterSilent(f"rank 0: {SILENT} for {silent:.1f} s before the ranks had met: its host, or the network, may be gone") from None
    if isinstance(found, Exception):
        raise ModelError(f"rank 0 has ended, or said nothing, before the ranks had met: {str(found).splitlines()[0]}")
    return found


def reach_store(host: str, port: int, size: int) -> dist.TCPStore:
    """What rank 0, which listens by now, and the others meet by. Raises ModelError: the library waits for ever for who takes a connection and says
    nothing, and as long as for any other for one that is gone."""
    made: list[dist.TCPStore] = []
    errors: list[Exception] = []

    def reach() -> None:
        try:
            made.append(dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=MEET_SECONDS)))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=reach, name="meeting", daemon=True)
    thread.start()
    end = time.monotonic() + MEET_SECONDS + MEET_SLACK_SECONDS
    while thread.is_alive() and (left := end - time.monotonic()) > 0:
        thread.join(min(left, LISTENS_SECONDS))
        if thread.is_alive():
            check_listens(host, port)
    if not made:
        why = str(errors[0]).splitlines()[0] if errors else "it takes connections, and says nothing"
        raise ModelError(f"parallel_config.master {host}:{port}: no rank 0 within {MEET_SECONDS:.0f} s: {why}")
    return made[0]


def check_listens(host: str, port: int) -> None:
    """Raises ModelError where rank 0 has ended. It may be slow to take a connection."""
    try:
        socket.create_connection((host, port), LISTENS_SECONDS).close()
    except ConnectionRefusedError:
        raise ModelError(f"parallel_config.master {host}:{port}: rank 0 has ended before the ranks had met") from None
    except OSError:
        pass


def run_rank(spec: dict[str, Any], report: Report, end: Callable[[str], None]) -> None:
    """One rank, by what `backend.rank_hello.describe_rank` says of it, until rank 0 says that it was the last plan.

    end: told, by a thread of its own, why rank 0 is gone; where it comes back, the rank ends with RuntimeError.
    """
    rank, host = spec["rank"], spec["host"]
    config = EngineConfig.from_dict(spec["config"])
    size, is_far = config.parallel_config.tensor_parallel_size, config.parallel_config.nnodes > 1
    try:
        store = reach_store(host, spec["port"], size)
    except ModelError as error:
        report({"error": str(error)})
        raise
    lost: list[str] = []
    ranks: Ranks | None = None
    pulse: Pulse | None = None

    def lose(why: str) -> None:
        lost.append(why)
        end(why)
        if ranks is not None:
            ranks.abort()

    def check() -> None:
        if lost:
            raise RuntimeError(f"rank 0 has ended: {lost[0]}")

    try:
        choose_cpu_kernels(config)
        if config.parallel_config.node_rank:
            config = dataclasses.replace(config, device=device_of_rank(config, rank))
        ring = PlanRing(config.parallel_config.host_size - 1, spec["ring"]) if spec["ring"] else None
        pulse = Pulse(reach_store(host, spec["port"], size))
        pulse.start()
        line, plan_line = meet(store, config, rank, host, pulse.silence)
        plans = Plans(ring, rank, plan_line, line, check)
        orders = Orders(line, pulse.silence, lose)
        orders.start()
        device = torch.device(config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with on_stream(device):
            address = line.own_address if is_far else ""
            ranks = make_ranks(rank, size, store, device, timedelta(seconds=EXCHANGE_SECONDS), address)
            ranks.limit(timedelta(seconds=LOAD_SECONDS))
            worker = Worker(config, ranks)
            pages = RankPages(worker.store, orders, lambda: plans.num_done)
            worker.warm_up()
            await_loaded(ranks, device)
            orders.rest()
            has_begun()
            report({"ready": True})
            try:
                follow(worker, ranks, plans)
            finally:
                if ring is not None:
                    ring.close()
            orders.end()
            pulse.stop()  # before rank 0 goes
            pages.close()
            worker.release()
            ranks.close()
    except Exception as error:
        report({"error": str(error) if isinstance(error, NotWanted) else f"{type(error).__name__}: {error}"})  # rank 0's words, or its own
        with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, may be gone
            if not isinstance(error, NotWanted | MasterSilent):  # of the first another may be this rank
                store.set(f"error {rank}", f"{type(error).__name__}: {error}")
        raise
    finally:
        if pulse is not None:
            pulse.stop()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 has it too, and says when it is over
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks where threads stand, and Python has no answer of its own but to end
    spec: dict[str, Any] = json.loads(sys.stdin.readline())
    rank = spec["rank"]
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank} %(name)s %(message)s")
    report = print_report if spec["reports"] else ignore_report
    threading.Thread(target=live_with_parent, args=(spec["parent"], report), name="parent", daemon=True).start()
    run_rank(spec, report, end_at_once(rank, report))


def print_report(report: dict[str, Any]) -> None:
    """To the host's own process, where rank 0 is another host's."""
    with contextlib.suppress(OSError):
        print(json.dumps(report), flush=True)


def ignore_report(report: dict[str, Any]) -> None:
    pass


def live_with_parent(parent: int, report: Callable[[dict[str, Any]], None]) -> None:
    """Reports that it lives while the parent does, and ends with that, whatever this process waits for."""
    while os.getppid() == parent:
        report({})
        time.sleep(PARENT_SECONDS)
    os._exit(LOST_STATUS)


def end_at_once(rank: int, report: Callable[[dict[str, Any]], None]) -> Callable[[str], None]:
    """What is done when rank 0 is gone: an exchange that waits for it would go on waiting."""

    def end(why: str) -> None:
        logger.error("rank %d ends: %s", rank, why)
        report({"error": f"rank 0 has ended: {why}"})
        os._exit(LOST_STATUS)

    return end


if __name__ == "__main__":
    main()
