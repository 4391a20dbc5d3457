"""Foretoken's engine: speculative decoding of large language models. Runs with no Triton and no GPU."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

SPINS = "8000"
"""Looks of an idle OpenMP thread, some 0.2 ms, before it sleeps. By its own default it goes on looking for milliseconds: on a machine that has
anything else to do it takes the very core that the thread it waits for needs (`benchmarks.idle_threads`: 1.9 times as fast beside two busy processes
on two cores, at half the processor time; alone on the machine 0.99)."""

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:  # it is read when torch is loaded
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

if TYPE_CHECKING:
    from backend.llm import LLM
    from backend.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    # Loaded on first use: the launcher and the tokenizer model need parts of this package, and not torch.
    if name == "LLM":
        from backend.llm import LLM

        return LLM
    if name == "SamplingParams":
        from backend.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'backend' has no attribute {name!r}")
