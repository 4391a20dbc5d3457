"""The loop that trains a drafter of any kind: batches, optimizers, checkpoints, one process or several (DistributedDataParallel)."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors import SafetensorError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from backend.devices import on_stream
from deploy.endings import ENDING_SIGNALS, hear_endings
from training.drafters import KINDS, Drafter, Options
from training.objective import Objective
from training.optimizers import COOLDOWN, Muon, learning_rate
from training.states import OfflineStates, OnlineStates
from training.target import Target

HEAD_RATE = 0.25
"""Of the learning rate, for what begins as the target's head."""
CHECKPOINT = "checkpoint.pt"
LOG_EVERY = 50
COMPILED_BY, TIMED_STEPS = 5, 20
"""Steps after which nothing is compiled any more, and those whose time says first how many fit into a run of so many minutes; then twice as many."""


@dataclass(slots=True)
class Run:
    """All that decides what is trained; two runs of equal values are equal, to the bit on CPU."""

    kind: str
    model: Path
    out: Path
    steps: int | None
    """None: as many as fit into `minutes`."""
    batch_size: int
    context: int
    lr: float
    seed: int
    loss: str
    drafts: int
    layers: int
    inner: int | None
    taps: tuple[int, ...] | None
    dtype: str
    num_anchors: int | None = None
    markov_rank: int | None = None
    markov_head_type: str | None = None
    mask_token_id: int | None = None
    states: Path | None = None
    draft_ids: torch.Tensor | None = None
    device: str = "cpu"
    processes: int = 1
    checkpoint_every: int = 500
    resume: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    """What the token ids are made of, in words and numbers."""
    minutes: float | None = None
    clock: Callable[[], float] = time.perf_counter
    """Of these minutes, and of the log's seconds."""

    @property
    def checkpoint(self) -> Path:
        return self.out / CHECKPOINT

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have as the run before it had it."""
        free = ("model", "out", "device", "processes", "checkpoint_every", "resume", "draft_ids", "clock")
        values = {key: value for key, value in asdict(self).items() if key not in free}
        drafted = None if self.draft_ids is None else len(self.draft_ids)
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()} | {"draft_vocab_size": drafted}

    def make_drafter(self, target: Target) -> Drafter:
        """As it begins. Raises ModelError."""
        torch.manual_seed(self.seed)
        ids = None if self.draft_ids is None else self.draft_ids.to(target.device)
        own = ("mask_token_id", "num_anchors", "markov_rank", "markov_head_type")
        given = {key: value for key in own if (value := getattr(self, key)) is not None}
        return KINDS[self.kind](target, Options(self.drafts, self.layers, self.inner, self.taps, ids, **given)).to(target.device)

    def draw_anchors(self, generator: torch.Generator) -> torch.Tensor | None:
        """Places [batch_size, num_anchors] of a step's blocks, in order, with a state before them and text after each draft; None: no blocks."""
        if self.num_anchors is None:
            return None
        drawn = torch.rand(self.batch_size, count_anchors(self.context, self.drafts), generator=generator).argsort(dim=1)
        return 1 + drawn[:, : self.num_anchors].sort(dim=1).values


def count_anchors(context: int, drafts: int) -> int:
    """Places of a sequence after which so many drafts have a text to be compared with."""
    return context - 1 - drafts


def train(run: Run, ids: torch.Tensor) -> bool:
    """Trains on token ids [T] int32 and writes the drafter, checkpoints and `log.jsonl`; false when a signal ended it: all is saved then.

    Raises ValueError, ModelError; KeyboardInterrupt where nothing is saved yet.
    """
    if run.processes == 1:
        return _train(0, run, ids)
    context, told_to_end = None, False
    shared, meeting = ids.share_memory_(), run.out / f".meeting-{os.getpid()}"
    meeting.unlink(missing_ok=True)

    def forward(number: int) -> None:
        nonlocal told_to_end
        told_to_end = True
        for process in () if context is None else context.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGINT)

    try:
        with _handling(forward):
            context = multiprocessing.start_processes(_join, (run, shared, str(meeting)), nprocs=run.processes, join=False, start_method="spawn")
            if told_to_end:  # while they were started
                forward(signal.SIGINT)
            while not context.join():
                pass
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
        endings = (None, *(number.name for number in (signal.SIGINT, *ENDING_SIGNALS)))
        is_told = isinstance(error, multiprocessing.ProcessExitedException) and error.signal_name in endings
        if told_to_end and is_told:  # before the loop, which would have saved
            raise KeyboardInterrupt from None
        text = str(error).strip()
        raise ValueError(f"a process of {run.processes} ended: {text.splitlines()[-1]:.300}") from error
    finally:
        meeting.unlink(missing_ok=True)
    saved = torch.load(run.checkpoint, map_location="cpu", weights_only=True)
    return bool(saved["step"] == saved.get("steps", run.steps))  # of a run before --minutes


def _join(rank: int, run: Run, ids: torch.Tensor, meeting: str) -> None:
    # torch has the system send it where the parent has died. Whoever waits for others runs no handler, and background jobs of a script ignore it:
    # until the loop, which saves, it ends the process. That a terminal closes is for the parent to pass on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    is_gpu = run.device.startswith("cuda")
    if is_gpu:
        torch.cuda.set_device(rank)
        run.device = f"cuda:{rank}"
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // run.processes))
    backend = "nccl" if is_gpu else "gloo"
    # The first process may compute states for hours while the others wait.
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=run.processes, timeout=timedelta(hours=24))
    try:
        _train(rank, run, ids)
    finally:
        dist.destroy_process_group()


class _Stop:
    """A signal that asks a process to end asks the loop to save first; a second one ends a process that is alone (of several each gets the terminal's
    and the first one's)."""

    def __init__(self, run: Run) -> None:
        self.is_asked, self._is_alone = False, run.processes == 1

    def __call__(self, number: int) -> None:
        if self.is_asked and self._is_alone:
            raise KeyboardInterrupt
        self.is_asked = True

    def agree(self, run: Run, device: torch.device) -> bool:
        """Whether any process was asked."""
        if run.processes == 1:
            return self.is_asked
        flag = torch.tensor([float(self.is_asked)], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


class _Timer:
    """Seconds since a run went on, without its first steps, in which programs are compiled; and how many steps fit into its minutes."""

    def __init__(self, run: Run, device: torch.device, first: int, spent: float, *, is_fixed: bool) -> None:
        """spent: of the run's minutes, in seconds, before it was stopped; is_fixed: the number of steps is known."""
        self._run, self._device, self._first, self._spent, self._is_fixed = run, device, first, spent, is_fixed
        self._started, self._looks_at = run.clock(), TIMED_STEPS

    def seconds(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._run.clock() - self._started

    def spent(self, done: int) -> float:
        """Seconds of the run's minutes so far, with those before it was stopped; those of its first steps are none of them."""
        return self._spent + (self.seconds() if done >= self._first + COMPILED_BY else 0.0)

    def fit(self, done: int, steps: int | None) -> int | None:
        """Called after each step: how many there are to be, the same for all processes. It may change while the learning rate does not yet know."""
        timed = done - self._first - COMPILED_BY
        if not timed:
            self._started += self.seconds()
        if self._is_fixed or timed <= 0 or self._run.minutes is None:
            return steps
        limit, is_due = 60 * self._run.minutes, timed == self._looks_at
        if steps is not None and not (is_due and done < (1 - COOLDOWN) * steps):
            return steps
        found = torch.zeros(1, dtype=torch.int64, device=self._device)
        # Long steps: a tenth of the run says enough.
        if is_due or self.seconds() > limit / 10:
            found += max(done, self._first + COMPILED_BY + round((limit - self._spent) / self.seconds() * timed))
        if self._run.processes > 1:
            dist.broadcast(found, 0)
        if is_due:
            self._looks_at *= 2
        return int(found.item()) or None


@contextmanager
def _handling(handler: Callable[[int], object], numbers: Sequence[int] = (signal.SIGINT, *ENDING_SIGNALS)) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = hear_endings(handler, numbers)
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def make_optimizers(drafter: Drafter, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest. Each group has its own `peak`."""
    heads = drafter.vocabulary_heads()
    is_head = {id(p) for p in heads}
    matrices = [p for p in drafter.parameters() if p.dim() == 3]
    others = [p for p in drafter.parameters() if p.dim() != 3 and id(p) not in is_head]
    groups = [{"params": own, "peak": peak} for own, peak in ((others, lr), (heads, lr * HEAD_RATE)) if own]
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr=lr)]
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("peak", lr)
    return optimizers


def _train(rank: int, run: Run, ids: torch.Tensor) -> bool:
    device = torch.device(run.device)
    with on_stream(device):  # the target's kernels are the engine's
        return _train_on(device, rank, run, ids)


def _train_on(device: torch.device, rank: int, run: Run, ids: torch.Tensor) -> bool:
    torch.set_float32_matmul_precision("high")
    is_first = rank == 0
    target = Target(run.model, run.torch_dtype, device)
    drafter = run.make_drafter(target)
    objective = Objective(target, drafter, run.loss)
    source = make_source(run, target, ids.numpy().view(np.uint32), drafter.layers, is_writer=is_first)
    optimizers = make_optimizers(drafter, run.lr)
    adamw = [p for p in drafter.parameters() if p.dim() != 3]
    generator = torch.Generator().manual_seed(run.seed)
    first, steps, spent = _resume(run, drafter, optimizers, generator) if run.resume else (0, run.steps, 0.0)
    module: nn.Module = objective
    if run.processes > 1:
        module = DistributedDataParallel(objective, broadcast_buffers=False)
    if device.type == "cuda":
        module = torch.compile(module)  # type: ignore[assignment]
    share = run.batch_size // run.processes
    own = slice(rank * share, (rank + 1) * share)
    stop, timer, done = _Stop(run), _Timer(run, device, first, spent, is_fixed=steps is not None), first
    bar = tqdm(initial=first, total=steps, desc=f"train {run.kind}", unit="step", mininterval=2.0, disable=not is_first)
    # torch ends the other processes by SIGTERM where one has failed: they may wait for it in a call that never returns.
    heard = _handling(stop) if run.processes == 1 else _handling(stop, (signal.SIGINT,))
    with bar, told(run.out, run.checkpoint), heard, _open_log(run, first, is_first=is_first) as log:
        while done != steps:
            starts = torch.randint(source.num_starts, (run.batch_size,), generator=generator)
            states, anchors = source.read(starts[own]), run.draw_anchors(generator)
            if anchors is not None:
                states.anchors = anchors[own].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=run.torch_dtype == torch.bfloat16):
                loss, agreed = module(states)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(adamw, 1.0)
            rate = learning_rate(done, steps)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            done += 1
            steps = bar.total = timer.fit(done, steps)
            is_stopped, is_last = stop.agree(run, device), done == steps
            bar.update()
            if is_first and (done % LOG_EVERY == 0 or is_last):
                row = {"step": done, "loss": round(loss.item(), 4), "agreement": [round(a, 4) for a in agreed.tolist()]}
                log.write(json.dumps(row | {"seconds": round(timer.seconds(), 1)}) + "\n")
                log.flush()
                bar.set_postfix_str(f"loss {row['loss']}, agreement {row['agreement']}")
            if is_first and (done % run.checkpoint_every == 0 or is_last or is_stopped):
                _save(run, drafter, optimizers, generator, {"step": done, "steps": steps, "seconds": timer.spent(done)})
            if is_stopped and not is_last:
                return False
    if is_first:
        with told(run.out, run.checkpoint):
            drafter.save(target, run.out, torch.bfloat16)
    return True


def make_source(run: Run, target: Target, ids: np.ndarray, layers: tuple[int, ...], *, is_writer: bool) -> OnlineStates | OfflineStates:
    if run.states is None:
        return OnlineStates(target, ids, run.context, layers)
    if is_writer:
        source = OfflineStates(target, ids, run.context, layers, run.states)
    if run.processes > 1:
        dist.barrier()
    return source if is_writer else OfflineStates(target, ids, run.context, layers, run.states, is_writer=False)


@contextmanager
def told(out: Path, checkpoint: Path) -> Iterator[None]:
    """Raises ValueError for a folder that cannot be written: a full disk is no traceback."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors has no errno.
        is_full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        last = "--resume goes on from the checkpoint there" if checkpoint.is_file() else "no checkpoint was written yet"
        reason = "No space left on device" if is_full else error
        raise ValueError(f"--out {out}: {reason}; {last}") from None


@contextmanager
def _open_log(run: Run, done: int, *, is_first: bool) -> Iterator[Any]:
    """log.jsonl up to the step that is gone on from; of processes that are not the first, nothing."""
    path = run.out / "log.jsonl"
    kept = path.read_text(errors="replace").splitlines(keepends=True) if done and is_first and path.is_file() else []
    with open(path if is_first else os.devnull, "w") as log:
        log.writelines(line for line in kept if line.endswith("\n") and _is_before(line, done))
        log.flush()
        yield log


def _is_before(line: str, done: int) -> bool:
    """Whether a line of the log is of a step up to this one; one that a crash has damaged is not."""
    try:
        return bool(json.loads(line)["step"] <= done)
    except (ValueError, TypeError, KeyError):
        return False


def _save(run: Run, drafter: Drafter, optimizers: list[torch.optim.Optimizer], generator: torch.Generator, counts: dict[str, Any]) -> None:
    """counts: its steps, and its minutes' seconds, which a run that goes on does not have anew."""
    state = {"drafter": drafter.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "generator": generator.get_state()}
    part = run.checkpoint.with_suffix(".tmp")
    try:
        buffer = io.BytesIO()  # torch's own writer tells a full disk in no words that can be known
        torch.save(state | counts | {"run": json.dumps(run.identity())}, buffer)
        part.write_bytes(buffer.getbuffer())
        part.replace(run.checkpoint)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _resume(run: Run, drafter: Drafter, optimizers: list[torch.optim.Optimizer], generator: torch.Generator) -> tuple[int, int | None, float]:
    """Returns the steps that are done, the run's, and the seconds that it has had of its minutes."""
    path = run.checkpoint
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # whoever takes it copies it to where it computes
        before, step, steps = dict(json.loads(state["run"])), int(state["step"]), run.steps
        spent = float(state.get("seconds", 0.0))  # of a run before they were kept
        if steps is None and (saved_steps := state.get("steps")) is not None:
            steps = int(saved_steps)
        if steps is not None and not 0 <= step <= steps and before.get("steps") == run.steps:
            raise ValueError(f"step {step} is none of the run's {steps}")
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(f"--resume: {path} cannot be read: {error!r:.200}") from None
    now = json.loads(json.dumps(run.identity()))
    if other := [key for key in now if before.get(key) != now[key]]:
        told = ", ".join(f"{key} {before.get(key)!r:.60} (now {now[key]!r:.60})" for key in other)
        raise ValueError(f"--resume: {path} is of a run with {told}")
    try:
        drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--resume: {path} is of another drafter: {error!r:.200}") from None
    return step, steps, spent
