"""Foretoken's engine: speculative decoding of large language models. Runs with no Triton and no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
