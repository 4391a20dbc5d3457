"""Attention of a few queries per request over paged keys and values: append_attention, and the plan that balances a step."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch

from kernels._load import Gpu, Kernel, KernelError, gpu_of, load
from kernels.append_kv import check_planes
from kernels.cache_scales import CacheScales, check_scales
from kernels.reference.e4m3 import E4M3
from kernels.structs import MAX_NODES, PlanSizes

MAX_ITEM_ROWS = {64: 80, 128: 80, 256: 48}
"""Most rows (queries x heads that share a KV head) of one work item by head size, so that the sums stay in registers."""
HEAD_DIMS = tuple(MAX_ITEM_ROWS)
PREFIX_ROWS = {64: 64, 128: 24, 256: 32}
"""The same where requests of at most MAX_PREFIX_ROWS rows share prefixes: what leaves room for two CTAs per SM. With more rows, reading a prefix
again for every few of them from the L2 cache costs more than that brings."""
MAX_PREFIX_ROWS = 16
PLAN_THREADS, PLAN_CTAS = 256, 32
MAX_LARGE_ROWS = 32
"""Most rows of an item whose stages are large, so that weights and values stay in registers."""
MIN_KEYS = 256
"""A request's keys are split in no smaller parts than this many per CTA."""
PIPELINES = ((2, 3, 64), (1, 3, 128), (1, 5, 64), (1, 4, 64), (1, 3, 64), (1, 2, 64))
"""CTAs per SM, stages and keys of a stage, the best first: a CTA that is alone on its SM waits for the products of each stage in turn, so its
stages are large."""
CODE_PIPELINES = ((3, 4, 64), (3, 3, 64), (2, 6, 64), (2, 5, 64), (2, 4, 64), *PIPELINES)
"""The same over codes, which are half as large."""
THREE_CTA_ROWS = range(17, 33)
"""Rows of an item over codes for which three CTAs share an SM, so that they hide each other's instructions: fewer rows have few, and of more the
registers are too few."""
CODE_CLUSTER_CTAS = 2
"""Most CTAs per SM, over codes, where several share an item."""
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def _shared_bytes(rows: int, size: int, cluster: int, stages: int, tile: int, is_e4m3: bool = False) -> int:
    m_tiles = -(-rows // 16)
    query_buffers = stages - 1 if m_tiles * size <= (128 if is_e4m3 else 256) else stages
    peers = 0 if cluster == 1 else cluster * rows * (8 + size // cluster * 4)
    return (
        stages * (2 if is_e4m3 else 4) * tile * size
        + query_buffers * rows * 2 * size
        + m_tiles * 16 * tile * 2
        + m_tiles * 16 * tile // 4
        + stages * 64
        + peers
    )


def _num_workers(sms: int, ctas: int, cluster: int) -> int:
    """Clusters that run at a time, at least. One of more than two CTAs lies within a GPC, and GPCs have SMs to spare."""
    return sms * ctas // cluster if cluster <= 2 else sms * ctas * 7 // (8 * cluster)


def choose_shape(
    batch: int,
    max_query_len: int,
    page_size: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    has_prefixes: bool = False,
    gpu: Gpu | None = None,
    window: int | None = None,
    cap: float | None = None,
    has_trees: bool = False,
    is_e4m3: bool = False,
    is_whole: bool = False,
) -> dict[str, int]:
    """What attention.cu is compiled with for a batch size and its bounds. heads: of queries, of keys and values, and their size; gpu: the
    current one when not given; window: tokens that a query sees, itself with them; cap: of scores. Neither goes with prefixes. has_trees: new
    tokens of some requests are trees. is_e4m3: pages hold codes of e4m3. is_whole: queries see all of their request's new tokens.

    Raises KernelError where the GPU has too little shared memory for such heads."""
    if has_prefixes and (window is not None or cap is not None):
        raise ValueError(f"window is {window} and cap {cap}: attention with shared prefixes has neither")
    gpu = gpu or gpu_of()
    defines = dict(_choose_shape(batch, max_query_len, page_size, heads, dtype, has_prefixes, is_e4m3, gpu))
    if has_trees:
        defines["TREE"] = 1
    if is_e4m3:
        defines["E4M3"] = 1
    if is_whole:
        defines["WHOLE"] = 1
    if window is not None:
        defines["WINDOW"] = window
    if cap is not None:
        (defines["CAP_BITS"],) = struct.unpack("i", struct.pack("f", cap))
    return defines


@functools.lru_cache(maxsize=4096)
def _choose_shape(
    batch: int, max_query_len: int, page_size: int, heads: tuple[int, int, int], dtype: torch.dtype, has_prefixes: bool, is_e4m3: bool, gpu: Gpu
) -> dict[str, int]:
    num_query_heads, num_kv_heads, head_dim = heads
    sms, shared = gpu.num_multiprocessors, gpu.shared_memory
    group = num_query_heads // num_kv_heads
    has_prefixes &= dtype != torch.float32  # whose kernel is for tests, and reads a prefix once per request
    cluster, ctas, stages, tile = 1, 4, 0, 64  # float32
    for blocks in range(1, max_query_len * group + 1):
        rows = -(-max_query_len * group // blocks)
        rows = rows if blocks == 1 else -(-rows // 16) * 16
        if has_prefixes:
            rows = (PREFIX_ROWS if max_query_len * group <= MAX_PREFIX_ROWS else MAX_ITEM_ROWS)[head_dim] // blocks
        if rows > MAX_ITEM_ROWS[head_dim]:
            continue
        if dtype == torch.float32:
            break
        # As many CTAs share an item as still leave a cluster for each.
        clusters = (8, 4, 2, 1) if gpu.has_clusters and not has_prefixes else (1,)
        pipelines = [p for p in (CODE_PIPELINES if is_e4m3 else PIPELINES) if p[2] == 64 or (head_dim == 128 and rows <= MAX_LARGE_ROWS)]
        pipelines = [p for p in pipelines if p[0] < 3 or rows in THREE_CTA_ROWS]
        fits = [(c, *p) for c in clusters for p in pipelines if c == 1 or not is_e4m3 or p[0] <= CODE_CLUSTER_CTAS]
        fits = [(c, n, s, t) for c, n, s, t in fits if _shared_bytes(rows, head_dim, c, s, t, is_e4m3) <= shared // n - 1024]
        if fits:
            enough = [fit for fit in fits if _num_workers(sms, fit[1], fit[0]) >= batch * blocks * num_kv_heads]
            cluster, ctas, stages, tile = (enough or [fit for fit in fits if fit[0] == 1])[0]
            break
    if not stages and dtype != torch.float32:
        raise KernelError(f"attention with heads of {head_dim} needs more shared memory than this GPU's {shared} bytes")
    return {
        "DTYPE": _DTYPES[dtype],
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": page_size,
        "MAX_ROWS": rows,
        "CLUSTER": cluster,
        "TILE": tile,
        "STAGES": stages,
        "MIN_CTAS": ctas,
        "CASCADE": int(has_prefixes),
    }


def load_all(device: torch.device, defines: dict[str, int]) -> tuple[Kernel, Kernel, Kernel | None]:
    """The kernels that attend, plan, and merge what requests with shared prefixes have; inside `_load.compiling` they are compiled."""
    cluster, rows, stages, tile, head_dim = (defines[key] for key in ("CLUSTER", "MAX_ROWS", "STAGES", "TILE", "HEAD_DIM"))
    shared = _shared_bytes(rows, head_dim, cluster, stages, tile, bool(defines.get("E4M3"))) if stages else 0
    attend = load(device, "attention", "append_attention", defines, shared, programmatic=True)
    plan = load(device, "attention", "plan_attention", defines)
    return attend, plan, load(device, "attention", "merge_attention", defines) if defines["CASCADE"] else None


class Heads(NamedTuple):
    """Of a model's attention, on this rank."""

    num_query: int
    num_kv: int
    size: int
    latent_rank: int = 0
    """Numbers of a latent that keys and values of all heads are made of; 0: keys and values are kept."""
    latent_dim: int = 0
    """Numbers of the key beside it, which all heads share."""


def is_known(page_size: int, heads: Heads) -> bool:
    """Whether attention.cu computes it."""
    return heads.size in HEAD_DIMS and page_size >= 16 and page_size & (page_size - 1) == 0


class AttentionPlan:
    """How one step's attention is spread over the GPU. Made once for a batch size and its bounds; `refresh` once per step.

    cu_query_lens [B + 1] int32: the queries of request b are the packed rows cu[b] .. cu[b + 1] (none: an inactive request);
    seq_lens [B] int32: its tokens in the cache, the new ones with them; page_table [S, N] int32: page ids; table_rows [B] int32:
    its row of page_table. Their contents may change between steps, their addresses may not. A request has at most
    max_query_len queries. heads: of queries, of keys and values, and their size. first_token: cu_query_lens[0], which the host knows.

    With prefixes, that is prefix_group [B] int32 (below B; -1: none) and prefix_len [B] int32 (a multiple of page_size, and no more than the
    tokens before the new ones), requests of one group have the same first prefix_len tokens in the same pages, which are read once for
    all of them (cascade inference, Ye et al. 2024).
    """

    def __init__(
        self,
        *,
        cu_query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        table_rows: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        page_size: int,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        prefixes: tuple[torch.Tensor, torch.Tensor] | None = None,
        first_token: int = 0,
        window: int | None = None,
        cap: float | None = None,
        seen: torch.Tensor | None = None,
        is_e4m3: bool = False,
        is_whole: bool = False,
    ) -> None:
        """window: tokens that a query sees, itself with them; cap: scores become cap tanh(score / cap). seen [T] int64, of packed rows: where new
        tokens are trees, which of its request's each sees, a bit each; a window is larger than a tree is deep then. is_e4m3: pages hold codes
        of e4m3. is_whole: queries see all of their request's tokens, from where their own window begins on."""
        batch, (num_query_heads, num_kv_heads, head_dim) = len(seq_lens), heads
        lists = {"cu_query_lens": cu_query_lens, "seq_lens": seq_lens, "table_rows": table_rows}
        if prefixes is not None:
            lists |= {"prefix_group": prefixes[0], "prefix_len": prefixes[1]}
        for name, tensor in lists.items():
            length = batch + (name == "cu_query_lens")
            if tensor.shape != (length,) or tensor.dtype != torch.int32:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; must be int32 [{length}]")
        if page_table.ndim != 2 or page_table.dtype != torch.int32 or page_table.stride(1) != 1:
            raise ValueError(f"page_table is {page_table.dtype} {list(page_table.shape)}; must be int32 [S, N] with rows in one piece")
        if page_size < 16 or page_size & (page_size - 1):
            raise ValueError(f"page_size is {page_size}; must be a power of two of at least 16")
        if page_table.shape[1] * page_size < max_seq_len:
            raise ValueError(f"page_table has {page_table.shape[1]} pages of {page_size} a row; max_seq_len is {max_seq_len}")
        if num_query_heads % num_kv_heads:
            raise ValueError(f"num_query_heads is {num_query_heads}; must be a multiple of num_kv_heads ({num_kv_heads})")
        if head_dim not in MAX_ITEM_ROWS:
            raise ValueError(f"head_dim is {head_dim}; must be one of {', '.join(map(str, MAX_ITEM_ROWS))}")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype}; must be bfloat16, float16 or float32")
        self.cu_query_lens, self.seq_lens, self.page_table, self.table_rows = cu_query_lens, seq_lens, page_table, table_rows
        self.page_size, self.num_query_heads, self.num_kv_heads, self.head_dim, self.dtype = page_size, num_query_heads, num_kv_heads, head_dim, dtype
        self.prefixes, self.device, self.page_dtype = prefixes, seq_lens.device, E4M3 if is_e4m3 else dtype
        if seen is not None and (seen.dtype != torch.int64 or seen.ndim != 1 or not seen.is_contiguous()):
            raise ValueError(f"seen is {seen.dtype} {list(seen.shape)}; must be int64 [T], contiguous")
        if seen is not None and max_query_len > MAX_NODES + 1:
            raise ValueError(f"max_query_len is {max_query_len}; the limit is {MAX_NODES + 1} where new tokens are trees")
        kind = (window, cap, seen is not None, is_e4m3, is_whole)
        defines = choose_shape(batch, max_query_len, page_size, heads, dtype, prefixes is not None, None, *kind)
        self.seen = seen
        cluster, rows, tile = (defines[key] for key in ("CLUSTER", "MAX_ROWS", "TILE"))
        self._block, self._min_tiles = (2 * tile, 1, 1), MIN_KEYS // tile
        self.has_prefixes = bool(defines["CASCADE"])
        self._attend, self._plan, self._merge = load_all(self.device, defines)
        known = self._attend.count_clusters(cluster, 2 * tile) if cluster > 2 else None
        self._num_workers = known or _num_workers(gpu_of().num_multiprocessors, defines["MIN_CTAS"], cluster)
        self._grid = (self._num_workers * cluster, 1)
        self.num_tokens = first_token + batch * max_query_len
        rows_per_request = max_query_len * defines["GROUP"]
        blocks = batch * -(-rows_per_request // rows)
        if self.has_prefixes:  # a prefix has two members at least, and all their rows
            blocks += batch * rows_per_request // rows + batch // 2
        segments = blocks * num_kv_heads
        self._num_items = segments + self._num_workers
        pieces = self._num_items if self.has_prefixes else 2 * self._num_workers

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self._starts, self._items = make(self._num_workers * cluster, 32), make(self._num_items * 16 + self.num_tokens)
        self._partial_shapes = (pieces, rows, head_dim), (pieces, cluster, rows, 2)
        self._counters = torch.zeros(segments * cluster, dtype=torch.int32, device=self.device)
        self._places, self._pieces = make(self.num_tokens, 4), make(segments, 2)  # with prefixes
        self._plan_bytes = 4 * ((10 if self.has_prefixes else 3) * batch + 2 + self._num_workers + 1)

    def refresh(self) -> None:
        """Spreads the step's work anew, from the lengths that the tensors hold now. Nothing comes to the host.

        The tensors are written by earlier kernels that do not let others begin early. `append_attention` reads the plan, page ids and
        keys of earlier steps before the kernel ahead of it has ended.
        """
        self._plan(
            (PLAN_CTAS, 1),
            (PLAN_THREADS, 1, 1),
            self._starts,
            self._items,
            self._places,
            self._pieces,
            self.cu_query_lens,
            self.seq_lens,
            self.page_table,
            self.table_rows,
            *(self.prefixes if self.prefixes and self.has_prefixes else (0, 0)),
            PlanSizes(len(self.seq_lens), self.page_table.stride(0), self._num_workers, self._min_tiles, self._num_items, self.num_tokens),
            shared=self._plan_bytes,
        )


def append_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor | None = None,
    scales: CacheScales | None = None,
) -> torch.Tensor:
    """Attention of packed queries [T, H, D] over the planes [P, page, Hkv, D] of `plan`'s requests -> [T, H, D]. scales: of pages in e4m3.

    Query j of a request with q queries and n tokens sees the keys 0 .. n - q + j. Rows past the last request's are not written.
    The work is split in the manner of stream-K (Osama et al. 2023) and partial results are merged (flash-decoding, Dao et al. 2023).
    """
    shape, kv_shape = (plan.num_query_heads, plan.head_dim), (plan.page_size, plan.num_kv_heads, plan.head_dim)
    if query.shape[1:] != shape or query.stride()[1:] != (plan.head_dim, 1) or query.dtype != plan.dtype:
        raise ValueError(f"query is {query.dtype} {list(query.shape)}; must be {plan.dtype} [T, {shape[0]}, {shape[1]}] with rows in one piece")
    check_planes(key_pages, value_pages, kv_shape, plan.page_dtype)
    check_scales(key_pages, scales)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # Partial results can be large: taken for the call alone, all layers and captured steps share the memory.
    sums, stats = (torch.empty(shape, dtype=torch.float32, device=query.device) for shape in plan._partial_shapes)
    plan._attend(
        plan._grid,
        plan._block,
        out,
        query,
        key_pages,
        value_pages,
        plan.page_table,
        plan._starts,
        plan._items,
        sums,
        stats,
        plan._counters,
        0 if plan.seen is None else plan.seen,
        query.stride(0),
        plan.page_table.stride(0),
        key_pages.stride(0) * key_pages.element_size(),
        *((0, 0) if scales is None else (scales.keys, scales.value_factors)),
    )
    if plan._merge is not None:
        plan._merge((plan.num_tokens, plan.num_kv_heads), plan._block, out, sums, stats, plan._places, plan._pieces)
    return out
