"""What a training run leaves on disk to go on from: checkpoints, and its log up to them."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from backend.model_files import has_fingerprint
from training.drafters import Drafter
from training.run import Run


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
def open_log(run: Run, done: int, *, is_first: bool) -> Iterator[Any]:
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


def save(run: Run, drafter: Drafter, optimizers: list[torch.optim.Optimizer], generator: torch.Generator, counts: dict[str, Any]) -> None:
    """Writes the run's checkpoint, whole or not at all. counts: its steps, and its minutes' seconds, which a run that goes on does not have anew."""
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


def resume(run: Run, drafter: Drafter, optimizers: list[torch.optim.Optimizer], generator: torch.Generator) -> tuple[int, int | None, float]:
    """Reads the run's checkpoint into these. Raises ValueError for one of another run, or none.

    Returns the steps that are done, the run's, and the seconds that it has had of its minutes.
    """
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
    if "target" not in before or has_fingerprint(run.model, before["target"]):  # of a run before it was kept, or by an earlier version's rule
        before["target"] = now["target"]
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
