"""Weights and KV memory: turns a batch and its drafts into logits."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Packed:
    """A batch as the model takes it, without padding: T tokens of B entries one after the other."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """Where each token's keys and values go: page * page_size + offset."""
    query_lens: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    page_ids: list[list[int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Which of the T tokens need logits."""
    row_starts: list[int] = field(default_factory=lambda: [0])


def pack(batch: Batch, draft: Draft, page_size: int) -> Packed:
    """Lays out every entry's known tokens and drafts."""
    packed = Packed()
    for entry, drafts in zip(batch.entries, draft.token_ids, strict=True):
        request, begin = entry.request, entry.request.num_computed_tokens
        end = begin + entry.num_tokens + len(drafts)
        packed.token_ids += request.token_ids[begin : begin + entry.num_tokens]
        packed.token_ids += drafts
        packed.positions += range(begin, end)
        packed.slots += [request.page_ids[i // page_size] * page_size + i % page_size for i in range(begin, end)]
        packed.query_lens.append(end - begin)
        packed.seq_lens.append(end)
        packed.page_ids.append(request.page_ids)
        if entry.emits:
            packed.rows += range(len(packed.token_ids) - len(drafts) - 1, len(packed.token_ids))
        packed.row_starts.append(len(packed.rows))
    return packed


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

    A step's gathered keys and values are some megabytes, and page faults would dominate copying them.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD; glibc takes no more
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # another libc: slower, not wrong


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Runs torch on that many CPU threads, and leaves its setting as it was: it is the whole process's."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Runner:
    """Owns the model and its paged KV tensors. Called by the engine thread only."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        self.device = pick_device(config)
        self.dtype = pick_dtype(config, self.device)
        if self.device.type == "cpu":
            keep_temporaries_on_heap()
        self._num_threads = config.num_threads or torch.get_num_threads()
        self._single_thread_tokens = config.single_thread_tokens
        # OpenMP keeps a pool for every thread that ever ran in parallel, and sleeps at each barrier once the pools together
        # outnumber the cores: loading must not leave one behind, for the steps may run on another thread.
        with cpu_threads(1):
            self._load(config, ranks)

    def _load(self, config: EngineConfig, ranks: Ranks) -> None:
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
        packed = pack(batch, draft, self.page_size)
        with cpu_threads(self._num_threads if len(packed.token_ids) >= self._single_thread_tokens else 1):
            self._prepare_pages(batch)
            return self._compute(packed)

    def _compute(self, packed: Packed) -> Forward:
        device, size, groups = self.device, self.page_size, self.model.num_query_groups
        plan = plan_attention(packed.query_lens, packed.seq_lens, packed.page_ids, size, groups, self.dtype, device)
        token_ids, positions, slots = torch.tensor([packed.token_ids, packed.positions, packed.slots], device=device)
        hidden = self.model.forward(token_ids, positions, slots, self.cache, plan)
        is_all = len(packed.rows) == len(packed.token_ids)
        scored = hidden if is_all else hidden[torch.tensor(packed.rows, dtype=torch.long, device=device)]
        return Forward(self.model.logits(scored), hidden, packed.row_starts)

    def _prepare_pages(self, batch: Batch) -> None:
        """Reads all copies' sources, clears fresh pages, writes the copies."""
        if not batch.fresh_pages:
            return
        fresh = torch.tensor(batch.fresh_pages, device=self.device)
        sources, targets, counts = torch.tensor(batch.page_copies or [(0, 0, 0)], device=self.device).T
        is_past = (torch.arange(self.page_size, device=self.device) >= counts[:, None])[:, :, None, None]
        for plane in (plane for planes in self.cache for plane in planes):
            if batch.page_copies:
                copied = plane[sources].masked_fill_(is_past, 0)
                plane.index_fill_(0, fresh, 0)
                plane[targets] = copied
            else:
                plane.index_fill_(0, fresh, 0)
