"""Rotary embedding with the write to the paged cache, and attention of rows that decode, in float32 on CPU: cpu/attention.cpp. The twins are
`reference.append_kv` and `reference.append_attention`."""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels._load_cpu import find_library
from kernels.tape import Kind, current

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Cache(ctypes.Structure):
    """As in cpu/attention.cpp."""

    _fields_ = [("keys", _POINTER), ("values", _POINTER), ("page_stride", _LONG), ("page", _LONG), ("heads", _LONG), ("size", _LONG)]


class _Requests(ctypes.Structure):
    """As in cpu/attention.cpp."""

    _fields_ = [
        ("cu_query_lens", _POINTER),
        ("seq_lens", _POINTER),
        ("indices", _POINTER),
        ("page_table", _POINTER),
        ("table_stride", _LONG),
        ("batch", _LONG),
        ("seen", _POINTER),
        ("max_query_len", _LONG),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    own = find_library()
    if own is not None:
        sizes, tables = (_LONG, _LONG, _LONG), (_POINTER,) * 4
        own.foretoken_append_kv.argtypes = (_POINTER, *sizes, *tables, _LONG, _POINTER, _POINTER)
        own.foretoken_append_kv.restype = _INT
        own.foretoken_attention.argtypes = [_POINTER, _LONG, _POINTER, _POINTER, _LONG, _FLOAT, _POINTER, _INT]
        own.foretoken_attention.restype = None
    return own


def is_usable(size: int, dtype: torch.dtype) -> bool:
    """Of heads of `size` numbers, and a cache of dtype."""
    library = _library()
    return library is not None and dtype == torch.float32 and size % library.foretoken_lanes() == 0


@functools.lru_cache(maxsize=1024)
def _cache(keys: int, values: int, page_stride: int, shape: tuple[int, ...]) -> _Cache:
    """The same few planes come with every layer of every step."""
    return _Cache(keys, values, page_stride, *shape)


def _cache_of(key_pages: torch.Tensor, value_pages: torch.Tensor) -> _Cache:
    return _cache(key_pages.data_ptr(), value_pages.data_ptr(), key_pages.stride(0), tuple(key_pages.shape[1:]))


def append_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    positions: torch.Tensor | None,
) -> torch.Tensor:
    """As `kernels.append_kv.append_kv`, whose checks come first. Raises IndexError for a slot past the last page."""
    library, (num_pages, page_size, num_kv, size) = _library(), key_pages.shape
    assert library is not None, "is_usable comes first"
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * num_kv
    queries = torch.empty(num_tokens, num_heads, size, dtype=torch.float32)
    slots = slots.to(torch.int64).contiguous()
    positions = None if positions is None else positions.contiguous()
    num_slots = (num_pages - 1) * (key_pages.stride(0) // (num_kv * size)) + page_size
    cache = _cache_of(key_pages, value_pages)
    failed = library.foretoken_append_kv(
        qkv.data_ptr(),
        num_tokens,
        num_heads,
        qkv.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        None if positions is None else positions.data_ptr(),
        slots.data_ptr(),
        num_slots,
        ctypes.byref(cache),
        queries.data_ptr(),
    )
    if failed:
        raise IndexError(f"slots has {int(slots.max())}; the cache ends at {num_slots}")
    if (tape := current.tape) is not None:
        tape.note(Kind.APPEND_KV, qkv, num_tokens, num_heads, qkv.stride(0), cos, sin, positions, slots, num_slots, cache, queries)
    return queries


class CpuRows:
    """Rows of a step's requests that have at most max_query_len of them, as `kernels.step_attention.StepAttention` has them."""

    def __init__(
        self,
        cu_query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        indices: torch.Tensor,
        page_table: torch.Tensor,
        seen: torch.Tensor | None,
        max_query_len: int,
    ) -> None:
        library = _library()
        assert library is not None, "is_usable comes first"
        given = (cu_query_lens, seq_lens, indices, page_table)
        self._tensors = [tensor.contiguous() for tensor in given]
        self._seen = None if seen is None else seen.contiguous()
        self.is_live = all(own is tensor for own, tensor in zip((*self._tensors, self._seen), (*given, seen)))
        """Whether it has what the tensors hold when it attends, and no copies of what they held before."""
        self.own = _Requests(
            *(tensor.data_ptr() for tensor in self._tensors),
            self._tensors[3].shape[1],
            len(seq_lens),
            None if self._seen is None else self._seen.data_ptr(),
            max_query_len,
        )
        self._run = library.foretoken_attention

    @property
    def has_trees(self) -> bool:
        return self._seen is not None

    def attend(self, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, window: int | None, out: torch.Tensor) -> None:
        """query [T, H, D] over planes [P, page, Hkv, D], in out [T, H, D]; other requests' rows are left as they are."""
        query = query.contiguous()
        cache = _cache_of(key_pages, value_pages)
        scale = query.shape[2] ** -0.5
        addresses = (ctypes.byref(self.own), ctypes.byref(cache))
        self._run(query.data_ptr(), query.shape[1], *addresses, window or 0, scale, out.data_ptr(), torch.get_num_threads())
        if (tape := current.tape) is not None:
            tape.note(Kind.ATTENTION, query, query.shape[1], self.own, cache, window or 0, scale, out)

    def become(self, other: CpuRows) -> None:
        """Has whoever computes with this compute of the other's rows: of whose tensors, which must outlive that."""
        ctypes.memmove(ctypes.addressof(self.own), ctypes.addressof(other.own), ctypes.sizeof(_Requests))
