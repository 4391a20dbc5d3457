"""Attention of a few queries per request over paged latents: absorbed multi-head latent attention (DeepSeek-V2, 2024, section 2.1)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kernels._load import Gpu, Kernel, gpu_of, load
from kernels.attention import PLAN_CTAS, PLAN_THREADS, Heads
from kernels.cache_scales import CacheScales, check_scales
from kernels.latent import head_linear, is_head_weight
from kernels.reference.e4m3 import E4M3
from kernels.structs import LatentStrides, PlanSizes

TILES = (64, 32)
"""Keys of a stage; a warp has eight of them."""
MAX_ROWS = 64
"""Most rows (queries x heads) of one work item."""
MIN_KEYS = 64
"""A request's keys are split in no smaller parts than this many per block."""
MERGE_PARTS, MERGED_BYTES = 8, 40
"""Most threads that share the pieces of eight columns (so many where there are no more heads than multiprocessors), and bytes of what one has."""
PROJECTED_TOKENS, PROJECTED_ROWS, PROJECT_THREADS, MAX_PROJECTED = 2, 64, 512, 512
"""Tokens whose heads one kernel merges and projects, rows of weights and threads of its blocks, and the rank it is made for."""
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}


def _shared_bytes(rows: int, size: int, tile: int) -> int:
    rows = -(-rows // 16) * 16
    return (2 * tile + rows) * size * 2 + rows * tile * 2 + tile // 8 * rows * 4


@functools.lru_cache(maxsize=1024)
def choose_shape(
    max_query_len: int, page_size: int, heads: Heads, dtype: torch.dtype, gpu: Gpu, is_e4m3: bool = False
) -> tuple[tuple[str, int], ...] | None:
    """What latent_attention.cu is compiled with; None: no kernel has such sizes. is_e4m3: pages hold codes of e4m3."""
    rank, dim = heads.latent_rank, heads.latent_dim
    if dtype not in _DTYPES or (rank + dim) % 64 or dim % 8 or page_size < 16 or page_size & (page_size - 1):
        return None
    wanted = max_query_len * heads.num_query
    for blocks in range(1, wanted + 1):
        rows = wanted if blocks == 1 else -(-wanted // (16 * blocks)) * 16
        if rows > MAX_ROWS:
            continue
        for tile in TILES:
            columns = rank // (tile // 8)
            if rank % (tile // 8 * 16) or columns > 128 or _shared_bytes(rows, rank + dim, tile) > gpu.block_memory or (tile == 32 and rows > 32):
                continue
            defines = {"DTYPE": _DTYPES[dtype], "GROUP": heads.num_query, "NUM_KV_HEADS": 1, "HEAD_DIM": rank, "ROPE": dim, "PAGE_SIZE": page_size}
            defines |= {"MAX_ROWS": rows, "CLUSTER": 1, "TILE": tile, "NUM_WARPS": tile // 8, "MIN_CTAS": 1, "CASCADE": 0, "MERGE_APART": 1}
            if is_e4m3:
                defines["E4M3"] = 1
            return tuple(defines.items())
        if rows <= 16:
            break
    return None


class Kernels(NamedTuple):
    """What a plan runs. project: None where no kernel merges and projects heads of such a rank at once."""

    attend: Kernel
    plan: Kernel
    merge: Kernel
    project: Kernel | None


def load_all(device: torch.device, defines: dict[str, int]) -> Kernels:
    """The kernels of a shape; inside `_load.compiling` they are compiled."""
    rank, merge_bytes = defines["HEAD_DIM"], (MERGE_PARTS - 1) * defines["HEAD_DIM"] // 8 * MERGED_BYTES
    shared = _shared_bytes(defines["MAX_ROWS"], rank + defines["ROPE"], defines["TILE"])

    def get(name: str, shared: int = 0) -> Kernel:
        return load(device, "latent_attention", name, defines, shared, programmatic=True)

    return Kernels(
        get("latent_attention", shared),
        load(device, "latent_attention", "plan_attention", defines),
        get("merge_latents", merge_bytes),
        get("project_latents") if rank % 128 == 0 and rank <= MAX_PROJECTED else None,
    )


class LatentPlan:
    """How one step's attention over latents is spread over the GPU: see `kernels.attention.AttentionPlan`, whose arguments these are."""

    def __init__(
        self,
        *,
        cu_query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        table_rows: torch.Tensor,
        max_query_len: int,
        page_size: int,
        heads: Heads,
        defines: dict[str, int],
        first_token: int = 0,
    ) -> None:
        """defines: what `choose_shape` gave."""
        self._lists, self._table = (cu_query_lens, seq_lens), page_table
        self._table_rows, self._heads, self._page_size = table_rows, heads, page_size
        self._is_e4m3 = bool(defines.get("E4M3"))
        batch, device = len(seq_lens), seq_lens.device
        tile, rows = defines["TILE"], defines["MAX_ROWS"]
        self._kernels = load_all(device, defines)
        self._block, self._min_tiles, self._num_workers = (4 * tile, 1, 1), max(1, MIN_KEYS // tile), gpu_of(device).num_multiprocessors
        self._first_token, self.num_tokens = first_token, first_token + batch * max_query_len
        segments = batch * -(-max_query_len * heads.num_query // rows)
        self._num_items = segments + self._num_workers

        def make(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self._starts, self._items = make(self._num_workers, 32), make(self._num_items * 16)
        self._places, self._pieces = make(self.num_tokens, 4), make(segments, 2)
        self._partial_shapes = (2 * self._num_workers, rows, heads.latent_rank), (2 * self._num_workers, rows, 2)
        self._plan_bytes = 4 * (3 * batch + 2 + self._num_workers + 1)

    def refresh(self) -> None:
        """Spreads the step's work anew, from the lengths that the tensors hold now. Nothing comes to the host."""
        sizes = PlanSizes(len(self._table_rows), self._table.stride(0), self._num_workers, self._min_tiles, self._num_items, self.num_tokens)
        lists = (self._starts, self._items, self._places, self._pieces, *self._lists, self._table, self._table_rows, 0, 0)
        self._kernels.plan((PLAN_CTAS, 1), (PLAN_THREADS, 1, 1), *lists, sizes, shared=self._plan_bytes)

    def attend(
        self,
        absorbed: torch.Tensor,
        turned: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
        value_up: torch.Tensor,
        scales: CacheScales | None = None,
    ) -> torch.Tensor:
        """absorbed [T, H, R] and turned [T, H, D] parts of queries over pages [P, page, 1, R + D] -> weighted sums of latents, each head's times
        its value_up [H, V, R] transposed: [T, H, V].

        Row 0 is the packed row first_token. Rows past the last request's hold anything. scale: of scores; scales: of pages in e4m3.
        """
        heads, size = self._heads, self._heads.latent_rank + self._heads.latent_dim
        for name, tensor, width in (("absorbed", absorbed, heads.latent_rank), ("turned", turned, heads.latent_dim)):
            is_aligned = tensor.stride(2) == 1 and not any(stride % 8 for stride in tensor.stride()[:2]) and tensor.data_ptr() % 16 == 0
            if tensor.shape[1:] != (heads.num_query, width) or tensor.dtype != absorbed.dtype or not is_aligned:
                want = f"{absorbed.dtype} [T, {heads.num_query}, {width}] with rows at multiples of 16 bytes"
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}; must be {want}")
        dtype, is_plane = E4M3 if self._is_e4m3 else absorbed.dtype, pages.stride()[1:] == (size, size, 1)
        if pages.dtype != dtype or pages.shape[1:] != (self._page_size, 1, size) or not is_plane or pages.stride(0) * pages.element_size() % 16:
            want = f"{dtype} [P, {self._page_size}, 1, {size}], each in one piece"
            raise ValueError(f"pages are {pages.dtype} {list(pages.shape)} with strides {pages.stride()}; must be {want}")
        check_scales(pages, scales)
        found = torch.empty(absorbed.shape, dtype=absorbed.dtype, device=absorbed.device)
        sums, stats = (torch.empty(shape, dtype=torch.float32, device=found.device) for shape in self._partial_shapes)
        strides = LatentStrides(
            absorbed.stride(0),
            absorbed.stride(1),
            turned.stride(0),
            turned.stride(1),
            self._table.stride(0),
            pages.stride(0) * pages.element_size(),
            self._first_token,
            scale,
        )
        lists, factors = (self._table, self._starts, self._items), (0, 0) if scales is None else (scales.keys, scales.value_factors)
        self._kernels.attend((self._num_workers, 1), self._block, found, absorbed, turned, pages, *lists, sums, stats, strides, *factors)
        (num_heads, rank), num_tokens, num_values = absorbed.shape[1:], self.num_tokens - self._first_token, value_up.shape[1]
        partial, first = (sums, stats, self._places, self._pieces), self._first_token
        project = self._kernels.project
        if project is not None and num_tokens == len(found) <= PROJECTED_TOKENS and is_head_weight(value_up, found.dtype):
            made = found.new_empty(num_tokens, num_heads, num_values)
            grid = (-(-num_values // PROJECTED_ROWS), num_heads)
            project(grid, (PROJECT_THREADS, 1, 1), made, found, *partial, value_up, first, num_tokens, num_values, value_up.stride(0))
            return made
        parts = min(MERGE_PARTS, max(1, MERGE_PARTS * self._num_workers // (num_tokens * num_heads)))
        merge_bytes = (parts - 1) * rank // 8 * MERGED_BYTES
        self._kernels.merge((num_tokens, num_heads), (rank // 8 * parts, 1, 1), found, *partial, first, shared=merge_bytes)
        return head_linear(found, value_up)
