"""Weights and KV memory: turns a batch and its drafts into logits."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from backend.config import EngineConfig
from backend.core import Batch, Draft, slots_of
from backend.errors import ConfigError
from backend.model_files import read_config
from backend.models import Model, load_model
from backend.parallel.ranks import Ranks
from kernels import ops
from kernels._load import KernelError, check_device, device_stream

logger = logging.getLogger(__name__)

DEFAULT_CPU_CACHE = 4 * 2**30
CACHE_SHARE_OF_FREE_MEMORY = 0.5
REHEARSED_TOKENS = 256
ACTIVATIONS_PER_STATE = 24
"""Values that a forward holds at its widest for each value of a token's state: gate and up take 7, with what they are made of and into."""
BYTES_PER_PROBABILITY = 40
"""That whole distributions take for each score: sorted with their places, summed up, and what drafts were drawn from."""
CAPTURED_STEPS_BYTES = 320 * 2**20
"""That the driver and the kernels take for captured steps, about."""


@dataclass(slots=True)
class Forward:
    """One step's results. Entry b owns rows row_starts[b]:row_starts[b + 1]: none, or one per draft and one more."""

    logits: torch.Tensor
    """[R, V] float32"""
    row_starts: list[int]
    prompt_states: dict[int, torch.Tensor]
    """By entry that scores its prompt: the states [chunk, hidden] of tokens that another one of the prompt follows."""


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
    prompt_spans: dict[int, slice] = field(default_factory=dict)
    """By entry that scores its prompt: those of the T tokens that another one of the prompt follows."""


def pack(batch: Batch, draft: Draft, page_size: int) -> Packed:
    """Lays out every entry's known tokens and drafts."""
    packed = Packed()
    for b, (entry, drafts) in enumerate(zip(batch.entries, draft.token_ids, strict=True)):
        request, begin = entry.request, entry.request.num_computed_tokens
        end = begin + entry.num_tokens + len(drafts)
        if request.scores_prompt and begin < len(request.prompt_token_ids) - 1:
            start = len(packed.token_ids)
            packed.prompt_spans[b] = slice(start, start + min(end, len(request.prompt_token_ids) - 1) - begin)
        packed.token_ids += request.token_ids[begin : begin + entry.num_tokens]
        packed.token_ids += drafts
        packed.positions += range(begin, end)
        packed.slots += slots_of(request.page_ids, begin, end, page_size)
        packed.query_lens.append(end - begin)
        packed.seq_lens.append(end)
        packed.page_ids.append(request.page_ids)
        if entry.emits:
            packed.rows += range(len(packed.token_ids) - len(drafts) - 1, len(packed.token_ids))
        packed.row_starts.append(len(packed.rows))
    return packed


def pick_device(config: EngineConfig) -> torch.device:
    """Where the engine runs. Raises ConfigError for a GPU that is not there, or that kernels cannot run on."""
    if config.device == "cpu":
        return torch.device("cpu")
    is_auto = config.device == "auto"
    if not torch.cuda.is_available():
        if is_auto:
            return torch.device("cpu")
        raise ConfigError(f"device {config.device}: torch {torch.__version__} sees no GPU; use --device cpu")
    device = torch.device("cuda" if is_auto else config.device)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(f"device {config.device}: this machine has {torch.cuda.device_count()} GPUs, from cuda:0")
    try:
        check_device(device)
    except KernelError as error:
        if not is_auto:
            raise ConfigError(f"device {config.device}: {error}") from None
        logger.warning("the engine runs on the CPU, though there is a GPU: %s", error)
        return torch.device("cpu")
    return device


def pick_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        return torch.float32
    values = read_config(config.model)
    name = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    return torch.float32 if name == "float32" else torch.bfloat16


def on_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """What everything on a device runs in: the stream that kernels, torch and graphs share."""
    return device_stream(device) if device.type == "cuda" else contextlib.nullcontext()


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


def make_plane(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One tensor of paged memory [P, page, ...], zeros. On CPU, pages that are never used take no memory."""
    if device.type == "cpu":
        size = torch.Size(shape).numel() * dtype.itemsize
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def prepare_pages(planes: Sequence[torch.Tensor], copies: Sequence[tuple[int, int, int]], fresh: Sequence[int]) -> None:
    """Reads all copies' sources (source, target, leading slots that count), clears fresh pages, writes the copies.

    planes [P, page, ...] hold something of every token.
    """
    device, size = planes[0].device, planes[0].shape[1]
    cleared = torch.tensor(fresh, dtype=torch.long, device=device)
    if not copies:
        for plane in planes:
            plane.index_fill_(0, cleared, 0)
        return
    sources, targets, counts = torch.tensor(copies, device=device).T
    is_past = torch.arange(size, device=device) >= counts[:, None]
    for plane in planes:
        copied = plane[sources]
        copied.masked_fill_(is_past.view(*is_past.shape, *[1] * (plane.dim() - 2)), 0)
        plane.index_fill_(0, cleared, 0)
        plane[targets] = copied


class Runner:
    """Owns the model and its paged KV tensors. Called by the engine thread only."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        self.device = pick_device(config)
        self.dtype = pick_dtype(config, self.device)
        if self.device.type == "cpu":
            keep_temporaries_on_heap()
        self._num_threads = config.num_threads or torch.get_num_threads()
        self._single_thread_tokens = config.single_thread_tokens
        self._config = config
        # OpenMP keeps a pool for every thread that ever ran in parallel, and sleeps at each barrier once the pools together
        # outnumber the cores: loading must not leave one behind, for the steps may run on another thread.
        with cpu_threads(1):
            self.model: Model = load_model(config.model, self.dtype, self.device, ranks, load_format=config.load_format)
        self.page_size = config.page_size
        self.max_model_len = min(config.max_model_len or self.model.max_model_len, self.model.max_model_len)
        if config.max_model_len is not None and config.max_model_len > self.model.max_model_len:
            raise ConfigError(f"max_model_len {config.max_model_len} is beyond the model's own limit {self.model.max_model_len}")

    def allocate_cache(self, taps: Sequence[str] = (), drafter_entries: Sequence[tuple[int, ...]] = ()) -> None:
        """Makes the paged memory: the target's keys and values, and the taps that drafters read.

        taps: what each says of a token is kept beside the token's keys and values, so that a drafter can catch up on any token,
        whoever computed it; known: hidden, the state after the final norm. drafter_entries: shapes of what drafters keep of a
        token in memory of their own, which has to fit too.
        """
        model, known = self.model, {"hidden": (self.model.hidden_size,)}
        entries = [shape for _ in range(model.num_layers) for shape in model.cache_planes] + [known[tap] for tap in taps]
        self.page_bytes = self.page_size * self.dtype.itemsize * sum(torch.Size(shape).numel() for shape in [*entries, *drafter_entries])
        self.num_pages = self._count_pages(self._config)
        # One page more than there are: a captured step's idle rows write there.
        self._planes = [make_plane((self.num_pages + 1, self.page_size, *shape), self.dtype, self.device) for shape in entries]
        width = len(model.cache_planes)
        num_cached = model.num_layers * width
        self.cache = [tuple(self._planes[i : i + width]) for i in range(0, num_cached, width)]
        self.taps = dict(zip(taps, self._planes[num_cached:]))

    def _count_pages(self, config: EngineConfig) -> int:
        """Pages within the memory asked for, never more than a full batch of full contexts."""
        per_request = -(-self.max_model_len // self.page_size)
        useful = per_request * config.max_batch_size
        if config.kv_cache_memory is not None:
            memory = int(config.kv_cache_memory)
        elif self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            memory = int(free - (1 - config.gpu_memory_utilization) * total) - self._count_working_memory(config)
        else:
            available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            memory = min(DEFAULT_CPU_CACHE, int(available * CACHE_SHARE_OF_FREE_MEMORY))
        pages = min(useful, memory // self.page_bytes)
        if pages < 1:
            key = "gpu_memory_utilization" if self.device.type == "cuda" and config.kv_cache_memory is None else "kv_cache_memory"
            raise ConfigError(f"{key}: {memory} bytes hold no page; one takes {self.page_bytes} bytes: raise --{key.replace('_', '-')}")
        if pages < per_request:
            logger.warning("the KV cache holds %d tokens, less than one context of %d", pages * self.page_size, self.max_model_len)
        return pages

    def _count_working_memory(self, config: EngineConfig) -> int:
        """Bytes that steps take on a GPU beside weights and pages, about: activations, logits, and what is kept of each request."""
        model, size = self.model, self.dtype.itemsize
        num_rows = config.max_batch_size * (1 + (config.speculative_config.num_speculative_tokens or 0))
        activations = max(config.max_num_batched_tokens, num_rows) * model.hidden_size * ACTIVATIONS_PER_STATE * size
        state = (config.max_batch_size + 1) * 4 * (model.vocab_size + 4 * self.max_model_len) + CAPTURED_STEPS_BYTES
        logits = num_rows * model.vocab_size * (size + 4)
        if config.speculative_config.verify_strategy in ("rejection", "topp"):
            logits += num_rows * model.vocab_size * BYTES_PER_PROBABILITY
        return activations + logits + state

    def threads_for(self, num_tokens: int) -> contextlib.AbstractContextManager[None]:
        """CPU threads for a forward of that many tokens: waking the others for a few costs more than it brings."""
        return cpu_threads(self._num_threads if num_tokens >= self._single_thread_tokens else 1)

    @torch.inference_mode()
    def prepare(self, batch: Batch) -> None:
        """Copies and clears the pages that the batch says; before its drafts, which may read them."""
        # The kernels never read past a request's tokens; on CPU what lies there is multiplied by zero, and must be finite.
        fresh = batch.fresh_pages if self.device.type == "cpu" else []
        if fresh or batch.page_copies:
            with self.threads_for(1):
                prepare_pages(self._planes, batch.page_copies, fresh)

    @torch.inference_mode()
    def forward(self, batch: Batch, draft: Draft) -> Forward:
        """Computes every entry's tokens and drafts; scores the last known token and each draft of the entries that emit."""
        packed = pack(batch, draft, self.page_size)
        with self.threads_for(len(packed.token_ids)):
            return self._compute_packed(packed)

    def _compute_packed(self, packed: Packed) -> Forward:
        device = self.device
        plan = ops.plan_attention(packed.query_lens, packed.seq_lens, packed.page_ids, self.page_size, self.model.heads, self.dtype, device)
        token_ids, positions, slots = torch.tensor([packed.token_ids, packed.positions, packed.slots], device=device)
        hidden = self.compute(token_ids, positions, slots, plan)
        is_all = len(packed.rows) == len(packed.token_ids)
        scored = hidden if is_all else hidden[torch.tensor(packed.rows, dtype=torch.long, device=device)]
        return Forward(self.logits(scored), packed.row_starts, {b: hidden[span] for b, span in packed.prompt_spans.items()})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The scores [N, V], float32, of states [N, hidden]."""
        return self.model.logits(hidden).float()

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Computes a prompt that nobody sent, on the page that nobody has: what prompts need is loaded before the first one comes."""
        count = min(REHEARSED_TOKENS, self.max_model_len)
        slots = [self.num_pages * self.page_size + i % self.page_size for i in range(count)]
        page_ids = [[self.num_pages] * -(-count // self.page_size)]
        self._compute_packed(Packed([0] * count, list(range(count)), slots, [count], [count], page_ids, [count - 1], [0, 1]))

    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: ops.Plan) -> torch.Tensor:
        """The target's states [T, hidden] of packed tokens; what is kept of them goes to their slots."""
        hidden = self.model.forward(token_ids, positions, slots, self.cache, plan)
        if "hidden" in self.taps:
            self.taps["hidden"].flatten(0, 1).index_copy_(0, slots, hidden)
        return hidden

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        return on_stream(self.device)
