"""Attention of prompts of any length over their gathered keys, with packed queries and keys: on Hopper GPUs by prompt_attention.cu, else by torch's
flash attention (Dao 2023)."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from kernels._load import ELEMENTS, gpu_of, load
from kernels.reference.attention import token_rows
from kernels.reference.e4m3 import read_rows
from kernels.tensor_map import tensor_map

MAX_QUERIES = 1024
"""Of a prompt, that are computed together where scores are held whole."""
MAX_HEAD_DIM = 256
"""That flash attention takes."""


ROWS, LINE = 128, 64
"""Queries that a block takes, and keys at a time (half as many of 256 numbers); elements of a row that are copied at once. As in the kernel."""
STAGES = 2
PAGES = (16, 32, 64, 128, 256)
"""Tokens of a page that is read as it lies."""
MAX_PROMPTS = 1024
SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Of a head's queries and keys, and of its values."""


def takes_sizes(query: torch.Tensor, value_size: int) -> bool:
    """Whether prompt_attention.cu is compiled for queries [T, H, D] and values of so many numbers."""
    is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return is_half and (query.shape[2], value_size) in SIZES and gpu_of(query.device).generation == 9


def can_attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, num_prompts: int) -> bool:
    """Whether prompt_attention.cu takes queries [T, H, D] and keys [K, Hkv, D], values [K, Hkv, V]: or pages of them [P, page, Hkv, D], [..., V]."""
    if not takes_sizes(query, values.shape[-1]) or keys.shape != (*values.shape[:-1], query.shape[2]) or not 0 < num_prompts <= MAX_PROMPTS:
        return False
    if keys.dim() == 4 and (keys.shape[1] not in PAGES):
        return False
    is_whole = all(x[0].is_contiguous() and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (query, keys, values) if len(x))
    return is_whole and len(query) > 0 and query.shape[1] % keys.shape[-2] == 0 and keys.dtype == values.dtype == query.dtype


def attend_causally(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_queries: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    requests: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries [T, H, D] of prompts whose rows begin at cu_queries [N + 1] -> [T, H, V], in `out` if that is given.

    Keys [K, Hkv, D] and values [K, Hkv, V], a prompt's from lens [N + 1] on; or pages [P, page, Hkv, D] and [P, page, Hkv, V] of prompts with
    lens [N] keys, which rows `requests` [N] of page_table [S, M] name; indices are int32. A prompt's last query sees all of its keys, the one
    before all but the last, and so on, and none of them more than `window`. Raises ValueError for what `can_attend` refuses.
    """
    count = len(cu_queries) - 1
    if not can_attend(query, keys, values, count) or (keys.dim() == 4) != (page_table is not None):
        raise ValueError(
            f"attend_causally: query {tuple(query.shape)} {query.dtype}, keys {tuple(keys.shape)}, values {tuple(values.shape)} do not fit"
        )
    return _launch(query, keys, values, cu_queries, lens, scale, window, requests, page_table, out)


def _launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_queries: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int | None,
    requests: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_causally` of what `can_attend` takes."""
    count = len(cu_queries) - 1
    num_heads, (num_kv, size), value_size = query.shape[1], keys.shape[-2:], values.shape[-1]
    query = query.contiguous()  # latents' is part of wider rows
    if out is None:
        out = query.new_empty(len(query), num_heads, value_size)
    elif out.shape != (len(query), num_heads, value_size) or out.dtype != query.dtype or not out.is_contiguous() or out.data_ptr() % 16:
        raise ValueError(
            f"attend_causally: out {tuple(out.shape)} {out.dtype} must be {(len(query), num_heads, value_size)} {query.dtype}, contiguous"
        )
    page = 0 if page_table is None else keys.shape[1]
    rows = ROWS if size < 256 else ROWS // 2
    item, box = query.element_size(), (LINE, 1, min(page, rows) or rows)
    maps = [_map(query, (LINE, 1, ROWS)), *(_map(x, box if page_table is None else (*box, 1)) for x in (keys, values))]
    shared = (size * ROWS + STAGES * (size + value_size) * rows) * item + 1024
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[query.dtype], "HEAD": size, "VALUE": value_size, "PAGE": page}
    kernel = load(query.device, "prompt_attention", "prompt_attention", defines, shared, programmatic=True)
    pages = (0, 0, 0) if requests is None or page_table is None else (requests, page_table, page_table.shape[1])
    grid = (gpu_of(query.device).num_multiprocessors, 1)
    kernel(grid, (384, 1, 1), *maps, out, cu_queries, lens, *pages, count, num_heads, num_kv, window or 0, scale)
    return out


def _map(x: torch.Tensor, box: tuple[int, ...]) -> bytes:
    """Of a tensor as it lies, innermost dimension first."""
    sizes = (x.shape[-1], x.shape[-2], *reversed(x.shape[:-2]))
    strides = (x.stride(-2), *reversed(x.stride()[:-2]))
    return tensor_map(x.data_ptr(), x.dtype, sizes, tuple(stride * x.element_size() for stride in strides), box)


def _up(latents: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    """latents [K, R] times each head's weight [H, N, R] transposed -> [K, H, size], whose first N numbers are written."""
    out = latents.new_empty(len(latents), len(weight), size)
    torch.bmm(latents.expand(len(weight), -1, -1), weight.transpose(1, 2), out=out[..., : weight.shape[1]].transpose(0, 1))
    return out


class PromptAttention:
    """The leading rows of one step that are prompts. Where torch attends, keys and values of all their tokens are gathered for
    each layer."""

    def __init__(
        self,
        cu_queries: torch.Tensor,
        seq_lens: torch.Tensor,
        request_indices: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        max_query_len: int,
        max_seq_len: int,
        num_keys: int,
    ) -> None:
        """cu_queries [N + 1], seq_lens and request_indices [N]: of the prompts alone; num_keys: the sum of their seq_lens."""
        self._max_queries, self._max_keys, self._num_keys = max_query_len, max_seq_len, num_keys
        self._cu_queries, self._lens, self._requests, self._table, self._page_size = cu_queries, seq_lens, request_indices, page_table, page_size
        self._slots: dict[int, torch.Tensor] = {}
        """KV slots of the keys, by the stride of the plane's pages."""
        self._bounds: tuple[list[int], list[int]] | None = None

    @functools.cached_property
    def _cu_keys(self) -> torch.Tensor:
        sums = torch.zeros(len(self._lens) + 1, dtype=torch.int32, device=self._lens.device)
        torch.cumsum(self._lens, 0, out=sums[1:])
        return sums

    @functools.cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each key its page, and where it is there."""
        keys = torch.arange(self._num_keys, dtype=torch.int32, device=self._lens.device)
        # Should a prompt compute nothing after all, then some keys are nobody's: they are read from anywhere.
        owners = torch.searchsorted(self._cu_keys[1:], keys, right=True).clamp_(max=len(self._lens) - 1)
        places = keys - self._cu_keys[owners]
        numbers = (places // self._page_size).clamp_(max=self._table.shape[1] - 1)
        return self._table[self._requests[owners].long(), numbers.long()].long(), places % self._page_size

    def _gather(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A plane [P, page, Hkv, D] -> what it has of the keys [K, Hkv, D]; of e4m3 in `dtype`, without their scales."""
        rows = token_rows(pages)
        stride = pages.stride(0) // rows.shape[1]
        if stride not in self._slots:
            page_ids, offsets = self._places
            self._slots[stride] = (page_ids * stride + offsets).clamp_(0, len(rows) - 1)
        return read_rows(rows, self._slots[stride], dtype).view(-1, *pages.shape[2:])

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        window: int | None = None,
        cap: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `kernels.step_attention.append_attention`."""
        scale = query.shape[2] ** -0.5
        if cap is None and can_attend(query, key_pages, value_pages, len(self._lens)):
            pages = (self._requests, self._table)
            return _launch(query, key_pages, value_pages, self._cu_queries, self._lens, scale, window, *pages, out)
        made = self._attend(query, self._gather(key_pages, query.dtype), self._gather(value_pages, query.dtype), scale, window, cap)
        return made if out is None else out.copy_(made)

    def attend_latents(self, query: torch.Tensor, pages: torch.Tensor, key_up: torch.Tensor, value_up: torch.Tensor, scale: float) -> torch.Tensor:
        """See `kernels.step_attention.latent_attention`: keys and values of all heads are made first."""
        (num_heads, still, rank), value_size = key_up.shape, value_up.shape[1]
        latents = self._gather(pages, query.dtype)[:, 0]
        own, shared = latents[:, :rank], latents[:, rank:]
        size = query.shape[2]
        if value_size > size or takes_sizes(query, value_size):
            values = F.linear(own, value_up.flatten(0, 1)).view(-1, num_heads, value_size)
        else:  # flash attention wants keys and values of one size
            values = _up(own, value_up, size)
            values[..., value_size:] = 0
        keys = _up(own, key_up, size)
        keys[..., still:] = shared[:, None]
        return self._attend(query, keys, values, scale, None, None)[..., :value_size].contiguous()

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None, cap: float | None
    ) -> torch.Tensor:
        size = query.shape[2]
        if cap is None and can_attend(query, keys, values, len(self._lens)):
            return _launch(query, keys, values, self._cu_queries, self._cu_keys, scale, window)
        if query.dtype == torch.float32 or cap is not None or size % 8 or size > MAX_HEAD_DIM or values.shape[2] != size:
            return self._attend_exactly(query, keys, values, scale, window, cap)
        lens = (self._cu_queries, self._cu_keys, self._max_queries, self._max_keys)
        sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        return torch.ops.aten._flash_attention_forward(query, keys, values, *lens, 0.0, True, False, scale=scale, **sides)[0]

    def _attend_exactly(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None, cap: float | None
    ) -> torch.Tensor:
        """What flash attention has not: float32, which is for tests, capped scores, odd sizes. It waits for the lengths, once a step."""
        out = query.new_empty(*query.shape[:2], values.shape[2])
        if self._bounds is None:
            self._bounds = (self._cu_queries.tolist(), self._cu_keys.tolist())
        queries, places = self._bounds
        for begin, end, first, last in zip(queries, queries[1:], places, places[1:]):
            k, v = (x[first:last].transpose(0, 1) for x in (keys, values))
            for start in range(begin, end, MAX_QUERIES):
                stop = min(start + MAX_QUERIES, end)
                newest = last - first - (end - start)  # what the first of these sees last
                seen = torch.arange(newest, newest + stop - start, device=query.device)[:, None]
                numbers = torch.arange(last - first, device=query.device)
                is_seen = numbers <= seen
                if window is not None:
                    is_seen &= numbers > seen - window
                q = query[start:stop].transpose(0, 1)
                if cap is None:
                    y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=is_seen, enable_gqa=len(q) != len(k), scale=scale)[0]
                else:
                    groups = len(q) // len(k)
                    scores = q.unflatten(0, (-1, groups)).float() @ k[:, None].transpose(2, 3).float() * scale
                    scores = (cap * (scores / cap).tanh()).masked_fill_(~is_seen, float("-inf"))
                    y = (scores.softmax(dim=-1) @ v[:, None].float()).flatten(0, 1).to(query.dtype)
                out[start:stop] = y.transpose(0, 1)
        return out
