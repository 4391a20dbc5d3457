"""A planned step on its way to every rank. On the engine's thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.group import Group
from backend.planned import PlannedStep
from backend.planner import Planner
from backend.precedence import Precedence
from backend.scheduler import Scheduler
from backend.step.worker import Launched, Worker


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched."""

    step: PlannedStep
    read: Launched
    """Waits for it."""
    number: int
    """Steps with it."""


class Launching:
    """Tells the other ranks, if there are any, of each step that this one launches."""

    def __init__(self, worker: Worker, scheduler: Scheduler, planner: Planner, group: Group | None, device: torch.device) -> None:
        self._worker, self._scheduler, self._planner, self._group, self._device = worker, scheduler, planner, group, device
        self.precedence = Precedence()
        self._hold = self.precedence.hold if device.type == "cuda" else contextlib.nullcontext  # on CPU to launch is to compute
        self.num_launched = 0
        """Steps."""

    def launch(self, step: PlannedStep, finish: Callable[[], None]) -> InFlight:
        """finish: reads and books the steps under way, where the new one's masks depend on what they emit; its forward runs meanwhile."""
        worker, group, plan = self._worker, self._group, step.plan
        for index, probs in step.host_probs:
            worker.put_draft_probs(index, probs)
            if group is not None:
                group.send_probs(index, probs)
        if group is not None:
            group.send(plan, self._device)
        with self._hold():
            begun = worker.begin(plan)
        self._scheduler.launch(step.entries)
        masks = plan.masks
        if plan.awaits_masks:
            finish()
            masks = self._planner.late_masks(step)
            if group is not None:
                group.send_masks(masks)
        self.num_launched += 1
        with self._hold():
            read = worker.go_on(begun, masks, step.grammars if group is None else None)
        return InFlight(step, read, self.num_launched)
