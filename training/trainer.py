"""The loop that trains a drafter of any kind: batches, optimizers, checkpoints, one process or several (DistributedDataParallel)."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from backend.devices import on_stream
from deploy.endings import ENDING_SIGNALS, hear_endings
from training.checkpoints import open_log, resume, save, told
from training.drafters import Drafter
from training.objective import Objective
from training.optimizers import COOLDOWN, Muon, learning_rate
from training.run import Run
from training.states import OfflineStates, OnlineStates
from training.target import Target

HEAD_RATE = 0.25
"""Of the learning rate, for what begins as the target's head."""
LOG_EVERY = 50
COMPILED_BY, TIMED_STEPS = 5, 20
"""Steps after which nothing is compiled any more, and those whose time says first how many fit into a run of so many minutes; then twice as many."""


def train(run: Run, ids: torch.Tensor) -> bool:
    """Trains on token ids [T] int32 and writes the drafter, checkpoints and `log.jsonl`; false when a signal ended it: all is saved then.

    Raises ValueError, ModelError; KeyboardInterrupt where nothing is saved yet.
    """
    if run.processes == 1:
        return _train(0, run, ids)
    context, told_to_end = None, False
    shared, meeting = ids.share_memory_(), run.out / f".meeting-{os.getpid()}"
    for left in run.out.glob(".meeting-*"):  # of runs that were killed: the folder is this one's alone
        left.unlink(missing_ok=True)

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


def _add_up(run: Run, values: torch.Tensor) -> torch.Tensor:
    """Of all processes."""
    if run.processes > 1:
        dist.all_reduce(values := values.clone())
    return values


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
    first, steps, spent = resume(run, drafter, optimizers, generator) if run.resume else (0, run.steps, 0.0)
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
    with bar, told(run.out, run.checkpoint), heard, open_log(run, first, is_first=is_first) as log:
        while done != steps:
            starts = torch.randint(source.num_starts, (run.batch_size,), generator=generator)
            states, anchors = source.read(starts[own]), run.draw_anchors(generator)
            if anchors is not None:
                states.anchors = anchors[own].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=run.torch_dtype == torch.bfloat16):
                sums = module(states)
            totals = _add_up(run, sums.detach())
            # Gradients become the mean of all processes', whose rows that count are not as many everywhere.
            own_loss, _ = objective.average(sums, totals[:, 2] / run.processes)
            own_loss.backward()
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
                loss, agreed = objective.average(totals)
                row = {"step": done, "loss": round(loss.item(), 4), "agreement": [round(a, 4) for a in agreed.tolist()]}
                log.write(json.dumps(row | {"seconds": round(timer.seconds(), 1)}) + "\n")
                log.flush()
                bar.set_postfix_str(f"loss {row['loss']}, agreement {row['agreement']}")
            if is_first and (done % run.checkpoint_every == 0 or is_last or is_stopped):
                save(run, drafter, optimizers, generator, {"step": done, "steps": steps, "seconds": timer.spent(done)})
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
