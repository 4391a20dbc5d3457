"""Weights and KV memory: turns a batch and its drafts into logits."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from dataclasses import dataclass

import torch

from backend.config import EngineConfig
from backend.core import Batch, Draft
from backend.errors import ConfigError
from backend.model_files import read_config
from backend.models import Model, load_model
from backend.parallel.ranks import Ranks
from kernels.reference import plan_attention

logger = logging.getLogger(__name__)

DEFAULT_CPU_CACHE = 4 * 2**30
CACHE_SHARE_OF_FREE_MEMORY = 0.5


@dataclass(slots=True)
class Forward:
    """One step's results. Entry b owns rows row_starts[b]:row_starts[b + 1]: none, or one per draft and one more."""

    logits: torch.Tensor
    """[R, V] float32"""
    hidden: torch.Tensor
    """[T, hidden] of all packed tokens, after the final norm"""
    row_starts: list[int]


def pick_device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {config.device}: torch {torch.__version__} sees no GPU; use --device cpu")
    return torch.device(config.device)


def pick_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        return torch.float32
    values = read_config(config.model)
    name = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    return torch.float32 if name == "float32" else torch.bfloat16


def keep_temporaries_on_heap() -> None:
    """Stops glibc from mapping and unmapping every large temporary.

    A step's gathered keys and values are some megabytes; their page faults took ten times as long as the copy itself.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD; glibc takes no more
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # another libc: slower, not wrong


class Runner:
    """Owns the model and its paged KV tensors. Called by the engine thread only."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        self.device = pick_device(config)
        self.dtype = pick_dtype(config, self.device)
        if self.device.type == "cpu":
            keep_temporaries_on_heap()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.model: Model = load_model(config.model, self.dtype, self.device, ranks)
        self.page_size = config.page_size
        self.max_model_len = min(config.max_model_len or self.model.max_model_len, self.model.max_model_len)
        if config.max_model_len is not None and config.max_model_len > self.model.max_model_len:
            raise ConfigError(f"max_model_len {config.max_model_len} is beyond the model's own limit {self.model.max_model_len}")
        self.page_bytes = self._page_bytes()
        self.num_pages = self._count_pages(config)
        self.cache = [tuple(self._zeros(shape) for shape in self.model.cache_planes) for _ in range(self.model.num_layers)]

    def _zeros(self, entry: tuple[int, ...]) -> torch.Tensor:
        """One plane of one layer's cache [P, page, *entry]. On CPU, pages that are never used take no memory."""
        shape = (self.num_pages, self.page_size, *entry)
        if self.device.type == "cpu":
            size = torch.Size(shape).numel() * self.dtype.itemsize
            return torch.frombuffer(mmap.mmap(-1, size), dtype=self.dtype).view(shape)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _page_bytes(self) -> int:
        entries = sum(torch.Size(shape).numel() for shape in self.model.cache_planes)
        return self.page_size * entries * self.dtype.itemsize * self.model.num_layers

    def _count_pages(self, config: EngineConfig) -> int:
        """Pages within the memory asked for, never more than a full batch of full contexts."""
        per_request = -(-self.max_model_len // self.page_size)
        useful = per_request * config.max_batch_size
        if config.kv_cache_memory is not None:
            memory = int(config.kv_cache_memory)
        elif self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            memory = int(free - (1 - config.gpu_memory_utilization) * total)
        else:
            available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            memory = min(DEFAULT_CPU_CACHE, int(available * CACHE_SHARE_OF_FREE_MEMORY))
        pages = min(useful, memory // self.page_bytes)
        if pages < 1:
            raise ConfigError(f"kv_cache_memory: {memory} bytes hold no page; one takes {self.page_bytes} bytes: raise --kv-cache-memory")
        if pages < per_request:
            logger.warning("the KV cache holds %d tokens, less than one context of %d", pages * self.page_size, self.max_model_len)
        return pages

    @torch.inference_mode()
    def forward(self, batch: Batch, draft: Draft) -> Forward:
        """Computes every entry's tokens and drafts; scores the last known token and each draft of the entries that emit."""
        self._copy_pages(batch.page_copies)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        row_starts = [0]
        query_lens: list[int] = []
        seq_lens: list[int] = []
        size = self.page_size
        for entry, drafts in zip(batch.entries, draft.token_ids, strict=True):
            request, begin = entry.request, entry.request.num_computed_tokens
            end = begin + entry.num_tokens
            token_ids += request.token_ids[begin:end]
            token_ids += drafts
            end += len(drafts)
            positions += range(begin, end)
            pages = request.page_ids
            slots += [pages[i // size] * size + i % size for i in range(begin, end)]
            query_lens.append(end - begin)
            seq_lens.append(end)
            if entry.emits:
                rows += range(len(token_ids) - len(drafts) - 1, len(token_ids))
            row_starts.append(len(rows))
        plan = plan_attention(
            query_lens, seq_lens, [e.request.page_ids for e in batch.entries], size, self.model.num_query_groups, self.dtype, self.device
        )
        packed = torch.tensor([token_ids, positions, slots], device=self.device)
        hidden = self.model.forward(packed[0], packed[1], packed[2], self.cache, plan)
        scored = hidden if len(rows) == len(token_ids) else hidden[torch.tensor(rows, dtype=torch.long, device=self.device)]
        return Forward(self.model.logits(scored), hidden, row_starts)

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        pairs = torch.tensor(copies, device=self.device)
        for planes in self.cache:
            for plane in planes:
                plane[pairs[:, 1]] = plane[pairs[:, 0]]
