"""How many pages a rank has room for, beside its weights and what steps take."""

from __future__ import annotations

import gc
import logging
import math
import os
from dataclasses import dataclass

import torch

from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.kv_store import CacheSpec, count_page_bytes
from backend.models import Model
from backend.step.distributions import MAX_ROWS, count_held
from backend.step.pieces import most_captured_rows

logger = logging.getLogger(__name__)

DEFAULT_CPU_CACHE = 4 * 2**30
CACHE_SHARE_OF_FREE_MEMORY = 0.5
ACTIVATIONS_PER_STATE = 24
"""Values that a forward holds at its widest for each value of a token's state: gate and up take 7, with what they are made of and into."""
BYTES_PER_PROBABILITY = 40
"""That whole distributions take for each score: sorted with their places, summed up, and what drafts were drawn from."""
GRAPHS_BYTES = 512 * 2**20
"""That the driver and the kernels take for captured phases, about."""


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """What the memory of steps depends on beside the configuration."""

    model: Model
    dtype: torch.dtype
    max_model_len: int
    max_num_batched_tokens: int


def mask_shape(config: EngineConfig, vocab_size: int) -> tuple[int, int]:
    """Of the token masks that one step takes at most: [M, V / 32]."""
    return config.max_batch_size * (1 + config.max_masked_drafts), -(-vocab_size // 32)


def count_pages(config: EngineConfig, specs: list[CacheSpec], needs: StepNeeds, device: torch.device) -> int:
    """Pages within the memory asked for, never more than a full batch of full contexts. Raises ConfigError where there is room for none."""
    per_request = -(-needs.max_model_len // config.page_size)
    useful = per_request * config.max_batch_size
    if config.kv_cache_memory is not None:
        memory = int(config.kv_cache_memory)
    elif device.type == "cuda":
        gc.collect()  # an engine that this process had before, which refers to itself
        torch.cuda.empty_cache()  # what that had, and what loading took beside the weights
        free, total = torch.cuda.mem_get_info(device)
        memory = int(free - (1 - config.gpu_memory_utilization) * total) - _count_working_memory(config, needs)
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = min(DEFAULT_CPU_CACHE, int(available * CACHE_SHARE_OF_FREE_MEMORY))
    page_bytes = count_page_bytes(specs, config.page_size)
    pages = min(useful, memory // page_bytes)
    if pages < 1:
        key = "gpu_memory_utilization" if device.type == "cuda" and config.kv_cache_memory is None else "kv_cache_memory"
        why = f"{memory} bytes hold no page" if memory >= 0 else f"steps alone need {-memory} bytes more than there are, and pages come on top"
        raise ConfigError(f"{key}: {why}; one takes {page_bytes} bytes: raise --{key.replace('_', '-')}")
    if pages < per_request:
        logger.warning("the KV cache holds %d tokens, less than one context of %d", pages * config.page_size, needs.max_model_len)
    return pages


def _count_working_memory(config: EngineConfig, needs: StepNeeds) -> int:
    """Bytes that steps take on a GPU beside weights and pages, about: activations, logits, and what is kept of each request.

    Any request may ask for any strategy, so memory for all of them is counted.
    """
    model, size, speculative = needs.model, needs.dtype.itemsize, config.speculative_config
    num_rows = config.max_batch_size * (1 + speculative.max_own_drafts)
    # Forwards with prompts are captured, in memory that nothing else uses.
    activations = (needs.max_num_batched_tokens + most_captured_rows(config) + num_rows) * model.hidden_size * ACTIVATIONS_PER_STATE * size
    state = (config.max_batch_size + 1) * 4 * (model.vocab_size + 4 * needs.max_model_len) + GRAPHS_BYTES
    # Whole distributions are held for some rows at a time; float32 logits beside the model's own where penalties ask for them.
    logits = num_rows * model.vocab_size * (size + 4) + MAX_ROWS * model.vocab_size * BYTES_PER_PROBABILITY
    written = 2 * model.num_written_weights * size  # eagerly, and in graphs
    masks = 4 * math.prod(mask_shape(config, model.vocab_size))
    return activations + written + logits + masks + state + count_held(speculative) * (config.max_batch_size + 1) * model.vocab_size * 4
