"""What a decoding step has to read, and the kernels that its time goes to: for `benchmarks.gpu_step`."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from backend.models import moe
from backend.models.loading import check_model
from backend.models.moe_spec import MoeSpec
from backend.models.spec import WeightList
from kernels.route import Routing


class ExpertCount:
    """Experts that the tokens of a step took, counted by kernels that are captured with it."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Of the steps that are counted: others, with prompts in them, are not."""
        self._seen: dict[int, torch.Tensor] = {}

    def note(self, experts: torch.Tensor, num_experts: int) -> None:
        if (count := len(experts)) not in self._seen:
            self._seen[count] = torch.zeros(2, dtype=torch.int64, device=experts.device)
        # Where kernels are looked for only, nothing is chosen.
        taken = torch.zeros(num_experts, dtype=torch.int64, device=experts.device).scatter_(0, experts.flatten().clamp(0, num_experts - 1), 1)
        self._seen[count][0] += taken.sum()
        self._seen[count][1] += 1

    def take(self, num_tokens: int) -> float | None:
        """Of layers of steps of so many tokens since the last call, on average; None: there were none."""
        if num_tokens not in self._seen:
            return None
        taken, layers = self._seen[num_tokens].tolist()
        with torch.inference_mode():  # in which they were made
            self._seen[num_tokens].zero_()
        return taken / layers if layers else None


@contextlib.contextmanager
def counted_experts() -> Iterator[ExpertCount]:
    """For models that are loaded inside. Their steps take longer."""
    count, route = ExpertCount(), moe.ops.route_tokens

    def route_counted(x: torch.Tensor, gate: torch.Tensor, *args: Any, **options: Any) -> Routing:
        routing = route(x, gate, *args, **options)
        count.note(routing.experts, len(gate))
        return routing

    moe.ops.route_tokens = route_counted
    try:
        yield count
    finally:
        moe.ops.route_tokens = route


def read_bytes(folder: Path, experts_taken: float | None, cached_bytes: float, item: int = 2) -> float:
    """Of a step: weights that it needs, its experts as often as they are taken, and cached_bytes. The embedding is looked up."""
    spec, weights = check_model(folder, has_weights=False), WeightList()
    spec.list_weights(weights)
    total = sum(math.prod(shape) for shape in weights.required.values())
    total -= 0 if spec.is_tied else spec.vocab_size * spec.hidden_size  # the embedding, of which a step reads some rows
    for layer in spec.layers:
        if isinstance(layer.mlp, MoeSpec) and experts_taken is not None:
            total -= (layer.mlp.router.num_experts - experts_taken) * 3 * layer.mlp.hidden_size * layer.mlp.inner
    return total * item + cached_bytes


@contextlib.contextmanager
def profiled(most: int = 24) -> Iterator[None]:
    """Prints the kernels that the time inside went to, over all steps.

    A kernel may begin before the one ahead of it has ended and then waits for it, so its own time says little: what it adds is by how much
    it ends later than all that began before it. The rest is time in which nothing ran.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    added: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    events = [e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    last, first = -math.inf, min((e.time_range.start for e in events), default=0.0)
    for event in sorted(events, key=lambda e: e.time_range.start):
        times[event.name] += event.device_time
        added[event.name] += max(0.0, event.time_range.end - max(last, event.time_range.start))
        calls[event.name] += 1
        last = max(last, event.time_range.end)
    total = last - first
    print("    of the time, us added a call, us a call, calls")
    for name, time in added.most_common(most):
        print(f"    {time / total:6.1%} {time / calls[name]:9.2f} {times[name] / calls[name]:9.2f} {calls[name]:6} {name[:110]}")
