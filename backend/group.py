"""Rank 0's side of tensor parallelism: starts the other ranks of its host, meets those of others, sends them every plan, and knows when one is gone.

The other ranks schedule nothing: they run the plans that they are sent (backend/follower.py), in the order in which they come.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from backend.config import EngineConfig
from backend.devices import on_stream
from backend.errors import ConfigError, EngineError, ModelError
from backend.parallel.lines import ORDERS, PLANS, SILENT, Switchboard, listen
from backend.parallel.ranks import Ranks, make_ranks
from backend.parallel.ring import PlanRing
from backend.rank_hello import Hello, describe_rank, describe_self, device_of_rank
from backend.rank_processes import EXCHANGE_SECONDS, LOAD_SECONDS, MEET_SECONDS, end_ranks, start_rank
from backend.step.plan import PlanOutline, StepPlan

logger = logging.getLogger(__name__)

CHECK_EVERY = 256
"""Steps between comparisons of what the ranks decided."""
CHECK_ENDS_VARIABLE = "FORETOKEN_CHECK_RANKS"
"""Of rank 0's environment: where it is 1, they compare it at every request's end too, which waits for the steps under way. For tests."""
MAX_UNDER_WAY = 4
"""Steps that one rank may have booked before another has."""
EXPLAIN_SECONDS = 1.0
"""That a rank whose exchange failed may take to end."""
DONE_SECONDS = 0.0002
ALL_THERE = "all ranks are there already: does another host have this node_rank, or does rank 0 not know yet that this one was started again?"
VERDICT_SECONDS, LOOK_SECONDS = 2.0, 0.5
"""For the ranks to hear why they do not fit, and between two looks at who has ended while one is waited for."""
PLAN, CAPTURE, STOP, PROBS, CHECK, MASKS = range(6)
"""What a message's first word says that it is."""


Greeting = Callable[[int, dict[str, Any]], None]
"""Tells a rank that runs already what it is to do (`describe_rank`)."""


class Verdicts:
    """A checksum over what the steps decided, by step: equal on all ranks, since they compute it from equal inputs."""

    def __init__(self) -> None:
        self._sum = 0
        self._recent: deque[int] = deque(maxlen=CHECK_EVERY + MAX_UNDER_WAY)
        self.num_steps = 0

    def add(self, rows: np.ndarray) -> None:
        self._sum = zlib.crc32(rows.tobytes(), self._sum)
        self._recent.append(self._sum)
        self.num_steps += 1

    def since_check(self, num_steps: int) -> list[int]:
        """After each of the first num_steps steps that the check before this one has not seen; the newest few may be left out."""
        begin = max(0, num_steps - CHECK_EVERY)
        kept = list(self._recent)
        first = self.num_steps - len(kept)
        return kept[begin - first : num_steps - first]


def check_verdicts(ranks: Ranks, verdicts: Verdicts, num_launched: int, device: torch.device) -> None:
    """Before every CHECK_EVERY-th step, on every rank. Raises RanksDiffer when they decided differently."""
    if num_launched and num_launched % CHECK_EVERY == 0:
        compare_verdicts(ranks, verdicts, num_launched - 1, device)  # the last one may be under way still


def compare_verdicts(ranks: Ranks, verdicts: Verdicts, num_steps: int, device: torch.device) -> None:
    """Those of the first num_steps steps, at least 1, which every rank has booked. Raises RanksDiffer."""
    own = verdicts.since_check(num_steps)
    ends = ranks.gather(torch.tensor(own[-1:], dtype=torch.int64, device=device)).flatten().tolist()
    if len(set(ends)) > 1:
        sums = ranks.gather(torch.tensor(own, dtype=torch.int64, device=device))
        step = num_steps - len(own) + int((sums != sums[0]).any(dim=0).nonzero()[0])
        raise RanksDiffer(step, f"the ranks decided differently in step {step}, and perhaps later: checksums {ends} after step {num_steps - 1}")


def await_loaded(ranks: Ranks, device: torch.device) -> None:
    """On every rank, when it has loaded its part: what follows are steps."""
    ranks.least(0, device)
    ranks.limit(timedelta(seconds=EXCHANGE_SECONDS))


def open_store(host: str, port: int) -> dist.TCPStore:
    """What the ranks meet by, at that address alone: the library by itself listens on all of the machine's, and asks nobody who he is. Raises
    OSError, RuntimeError."""
    with listen(host, port) as listener:
        own = listener.getsockname()[1]
        wait = timedelta(seconds=MEET_SECONDS)
        return dist.TCPStore(host, own, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach())


class RanksDiffer(EngineError):
    """Ranks of one model have computed different things."""

    def __init__(self, step: int, text: str) -> None:
        """step: the first one, counted from 0."""
        super().__init__(text)
        self.step = step


class Group:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, config: EngineConfig, greet: Greeting | None = None) -> None:
        """Starts those of this host, or greets them where they run already, and meets all. Raises ConfigError, ModelError."""
        parallel = config.parallel_config
        if parallel.node_rank:
            raise ConfigError(f"parallel_config.node_rank {parallel.node_rank}: this host's ranks follow: start `foretoken serve` here")
        self.size, self._num_local = parallel.tensor_parallel_size, parallel.host_size
        self._ring = PlanRing(self._num_local - 1) if self._num_local > 1 else None
        self._is_closed = False
        self.num_launched = 0
        """Steps."""
        self.verdicts = Verdicts()
        self._checks_ends = os.environ.get(CHECK_ENDS_VARIABLE) == "1"
        self._plans: deque[PlanOutline] = deque(maxlen=CHECK_EVERY + MAX_UNDER_WAY)
        """Of the newest steps, without anybody's tokens."""
        self.ranks: Ranks | None = None
        self.on_lost: Callable[[], None] = lambda: None
        """A rank is gone: `check` says which. Called by a thread of its own."""
        self.on_silent: Callable[[int], None] = lambda rank: None
        """A rank that this process has not started hangs: whoever can is to end it."""
        self._children: dict[int, subprocess.Popen[str]] = {}
        """Ranks of this host."""
        self._losing = threading.Lock()
        host, port = parallel.meeting_place
        board: Switchboard | None = None
        try:
            self.switchboard = board = Switchboard(host, self.size, self._note_lost)
            self._store = open_store(host, port)
        except (OSError, RuntimeError) as error:
            if board is not None:
                board.close()
            self._close_ring()
            raise ConfigError(f"parallel_config.master {host}:{port}: this host cannot listen there: {str(error).splitlines()[0]}") from None
        try:
            for rank in range(1, self._num_local):
                spec = describe_rank(config, rank, (host, self._store.port), None if self._ring is None else self._ring.path)
                if greet is None:
                    self._children[rank] = start_rank(spec)
                else:
                    greet(rank, spec)
            self._store.set("lines", str(self.switchboard.port))
            self._meet(config)
            device = torch.device(device_of_rank(config, 0))
            with on_stream(device):
                address = host if parallel.nnodes > 1 else ""
                try:
                    self.ranks = make_ranks(0, self.size, self._store, device, timedelta(seconds=EXCHANGE_SECONDS), address)
                except RuntimeError as error:
                    why = str(self.explain(error)).splitlines()[0]
                    raise ModelError(f"tensor_parallel_size {self.size}: the ranks could not connect to each other: {why}") from error
                self.ranks.limit(timedelta(seconds=LOAD_SECONDS))
                self.check()  # one that was lost before there were exchanges to abort would be waited for as long
        except BaseException as error:
            self.close(why=str(error))
            raise

    # -- meeting --------------------------------------------------------------------------------------------------------

    def _meet(self, config: EngineConfig) -> None:
        """Waits until every rank has said what it is, tells all of them whether they fit, and waits for their connections."""
        end = time.monotonic() + MEET_SECONDS
        came: set[int] = set()
        try:
            self._await_hellos(describe_self(config, 0), came, end)
        except Exception as error:
            self._store.set("verdict", str(error))
            end = time.monotonic() + VERDICT_SECONDS  # the store goes with this process
            while came and time.monotonic() < end and not self._store.check([f"heard {rank}" for rank in came]):
                time.sleep(0.01)
            raise
        self._store.set("verdict", "")
        for rank in range(1, self.size):
            for kind in (ORDERS,) if rank < self._num_local else (ORDERS, PLANS):
                while not self.switchboard.wait_for(rank, kind, LOOK_SECONDS):
                    self._check_errors({rank})
                    self.check()
                    if time.monotonic() > end:
                        raise ModelError(f"rank {rank} of {self.size} did not connect within {MEET_SECONDS:.0f} s")
        self._store.set("verdict", ALL_THERE)  # whoever cannot connect any more looks there
        self.switchboard.stop_listening()

    def _await_hellos(self, own: Hello, came: set[int], end: float) -> None:
        """came: the ranks that have said theirs."""
        num_read = 0
        while missing := set(range(1, self.size)) - came:
            self._check_errors(missing)
            self.check()
            lines = self._store.get("hello").decode().splitlines() if self._store.check(["hello"]) else []
            others = [Hello.read(line) for line in lines[num_read:]]
            came.update(other.rank for other in others)
            for other in others:
                if why := own.differences(other):
                    raise ModelError(f"rank {other.rank} does not fit rank 0: {why}")
            num_read = len(lines)
            if missing - came and time.monotonic() > end:
                ranks = ", ".join(map(str, sorted(missing)))
                place = f"{self.switchboard.address}, port {self._store.port}"
                raise ModelError(f"rank {ranks} of {self.size} did not come to {place}, within {MEET_SECONDS:.0f} s")
            time.sleep(0.01)

    def _check_errors(self, ranks: set[int]) -> None:
        """Raises ModelError when one of these, which have no connection yet, has said that it cannot come."""
        for rank in sorted(ranks):
            if self._store.check([f"error {rank}"]):
                raise ModelError(f"rank {rank} of {self.size} has ended: {self._store.get(f'error {rank}').decode()}")

    # -- ranks that end ---------------------------------------------------------------------------------------------------

    def await_loaded(self, device: torch.device) -> None:
        """Waits for the ranks that load for longer than this one."""
        assert self.ranks is not None
        await_loaded(self.ranks, device)
        self.switchboard.rest()

    def watch(self) -> None:
        """All is loaded: a rank that hangs from now on is taken for gone. Raises EngineError when one is."""
        self.switchboard.watch()

    def _note_lost(self) -> None:
        if self._is_closed:
            return
        self.on_lost()
        with self._losing:
            for rank, why in self.switchboard.lost.items():
                child = self._children.get(rank)
                if not why.startswith(SILENT):
                    continue
                if child is None:
                    self.on_silent(rank)
                elif child.poll() is None:
                    child.kill()
            if self.ranks is not None:
                self.ranks.abort()

    @property
    def has_lost(self) -> bool:
        return bool(self.switchboard.lost)

    def check(self) -> None:
        """Raises EngineError when a rank is gone."""
        lost = dict(self.switchboard.lost)
        for rank in range(1, self.size):
            child, why = self._children.get(rank), lost.get(rank)
            if child is not None and why is not None and child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # its connection is gone a little before it
                    child.wait(EXPLAIN_SECONDS)
            has_ended = child is not None and child.poll() is not None
            if why is None and not has_ended:
                continue
            if self._store.check([f"error {rank}"]):
                why = self._store.get(f"error {rank}").decode()
            elif child is not None and has_ended and (why is None or not why.startswith(SILENT)):
                why = f"exit status {child.returncode}"
            raise EngineError(f"rank {rank} of {self.size} has ended: {why}")

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

    # -- the step's path --------------------------------------------------------------------------------------------------

    def send(self, plan: StepPlan, device: torch.device) -> None:
        """To every rank, which launches it, as the caller does next."""
        self._send(PLAN, plan.to_array())
        assert self.ranks is not None
        with self._plan_logged():
            check_verdicts(self.ranks, self.verdicts, self.num_launched, device)
        self._plans.append(plan.outline())
        self.num_launched += 1

    def send_masks(self, masks: np.ndarray) -> None:
        """Those that the plan sent last awaits [M, W] int32."""
        self._send(MASKS, np.concatenate([np.array(masks.shape, dtype=np.int32), masks.ravel()]))

    def note_end(self, device: torch.device) -> None:
        """A request has ended with the steps that were booked. Raises RanksDiffer where that is looked at (CHECK_ENDS_VARIABLE)."""
        if not self._checks_ends or not self.verdicts.num_steps:
            return
        self._send(CHECK, np.array([self.verdicts.num_steps], dtype=np.int32))
        assert self.ranks is not None
        with self._plan_logged():
            compare_verdicts(self.ranks, self.verdicts, self.verdicts.num_steps, device)

    @contextlib.contextmanager
    def _plan_logged(self) -> Iterator[None]:
        """Of the first step that ranks decided differently."""
        try:
            yield
        except RanksDiffer as error:
            logger.error("step %d was: %s", error.step, self._plans[error.step - self.num_launched])
            raise

    def send_capture(self) -> None:
        self._send(CAPTURE)

    def send_probs(self, index: int, probs: torch.Tensor) -> None:
        """What the leading drafts [k, V] that the next plan writes for a request were drawn from."""
        own = probs.float().cpu().contiguous()
        self._send(PROBS, np.concatenate([np.array([index, *own.shape], dtype=np.int32), own.numpy().view(np.int32).ravel()]))

    def _send(self, kind: int, words: np.ndarray | None = None) -> None:
        head = np.array([kind], dtype=np.int32)
        message = head if words is None else np.concatenate([head, words])
        if self._ring is not None:
            self._ring.write(message, self.check)
        for rank in range(self._num_local, self.size):
            self.switchboard.send_words(rank, message)

    def await_done(self, num_steps: int) -> None:
        """Until every rank is through with so many steps: what they wrote is final. Raises EngineError when one is gone."""
        while self._num_done < num_steps:
            self.check()
            time.sleep(DONE_SECONDS)

    @property
    def _num_done(self) -> int:
        others = [self.switchboard.num_done.get(rank, 0) for rank in range(self._num_local, self.size)]
        return min([*others, *([self._ring.num_done] if self._ring is not None else [])])

    # -- the end ----------------------------------------------------------------------------------------------------------

    def close(self, release: Callable[[], None] = lambda: None, why: str = "") -> None:
        """Ends the other ranks. release: gives back what holds exchanges on this one; why: it has failed, of which they are told."""
        if self._is_closed:
            return
        self._is_closed = True
        self.on_lost = lambda: None
        if why:
            self.switchboard.fail(why)
        try:
            self.check()  # where one is gone, what waits for the GPU might wait for it
            if self.ranks is not None:
                self._send(STOP)
            release()
            if self.ranks is not None:
                self.ranks.close()
        except Exception as error:
            logger.warning("the ranks are ended: %s", error)
        if self.ranks is None:  # they wait for a verdict, or load: nobody reads plans yet
            self.switchboard.close()
        end_ranks(list(self._children.values()))
        self._children = {}
        self.switchboard.close()
        self._close_ring()

    def _close_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
