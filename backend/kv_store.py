"""All paged memory of a rank: what the model, its taps and the step's drafters keep of each token, page by page.

One page number means the same tokens in every plane, so prefix hits, preemption, copies and transfers cover drafters too.
A page is contiguous over everything that it holds: a transfer moves one piece a page (measured with NIXL: 168 GB/s, against
5.7 where each plane of a page is a piece of its own), and attention reads as fast from either.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from backend.errors import KvStoreError
from kernels import ops

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes that planes begin at multiples of: what the widest loads and copies of a GPU like."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """`num_planes` tensors of one shape that somebody keeps per token: a model's keys and values, a tap, a drafter's memory."""

    name: str
    shape: tuple[int, ...]
    """Of one token in one plane."""
    dtype: torch.dtype
    num_planes: int = 1

    @property
    def token_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def count_page_bytes(specs: Sequence[CacheSpec], page_size: int) -> int:
    """Bytes of a page: a multiple of every plane's token, so that a page's first token is a whole number of tokens away from the next page's."""
    used = sum(spec.num_planes * _plane_bytes(spec, page_size) for spec in specs)
    unit = math.lcm(ALIGNMENT, *(spec.token_bytes for spec in specs))
    total = -(-used // unit) * unit
    if total > 1.25 * used:
        logger.warning("pages take %d bytes, %d of them to keep tokens of %s at whole strides", total, total - used, ", ".join(s.name for s in specs))
    return total


def _plane_bytes(spec: CacheSpec, page_size: int) -> int:
    return -(-page_size * spec.token_bytes // ALIGNMENT) * ALIGNMENT


class KvStore:
    """Paged memory [P + 1, page bytes]; the last page belongs to nobody: idle rows of a step write there.

    A KV slot says where a token's part of a plane is: page * stride + offset, with the plane's own stride (`stride`), which is
    the number of its tokens that fit from one page's begin to the next one's.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], page_size: int, num_pages: int, device: torch.device, identity: Mapping[str, object] | None = None
    ) -> None:
        """identity: what else has to be equal for two stores to exchange pages: model, drafter, the rank's share."""
        if len({spec.name for spec in specs}) != len(specs):
            raise KvStoreError(f"cache specs have a name twice: {', '.join(spec.name for spec in specs)}")
        self.specs = {spec.name: spec for spec in specs}
        self.page_size, self.num_pages, self.device = page_size, num_pages, device
        self.page_bytes = count_page_bytes(specs, page_size)
        self.memory = _make_memory(num_pages + 1, self.page_bytes, device)
        """[P + 1, page_bytes] uint8"""
        specs_said = {spec.name: f"{spec.num_planes} x {list(spec.shape)} {spec.dtype}" for spec in specs}
        self.layout: dict[str, object] = {**(identity or {}), "page_size": page_size, "page_bytes": self.page_bytes, **specs_said}
        """What has to be equal for two stores to exchange pages, in words."""
        self.fingerprint = hashlib.blake2b(json.dumps(list(self.layout.items())).encode(), digest_size=16).hexdigest()
        """Of the layout. Only stores with equal ones may exchange pages."""
        self._planes: dict[str, list[torch.Tensor]] = {}
        offset, places = 0, []
        for spec in specs:
            flat, size = self.memory.view(-1).view(spec.dtype), spec.dtype.itemsize
            strides = [self.page_bytes // size, math.prod(spec.shape)]
            strides += [math.prod(spec.shape[i + 1 :]) for i in range(len(spec.shape))]
            own = self._planes[spec.name] = []
            for _ in range(spec.num_planes):
                own.append(flat.as_strided((num_pages + 1, page_size, *spec.shape), strides, offset // size))
                places.append((offset, spec.token_bytes))
                offset += _plane_bytes(spec, page_size)

        self._places = torch.tensor(places, dtype=torch.long, device=device).view(-1, 2)
        """[N, 2]: where each plane begins in a page, and bytes of a token."""

    def free(self) -> None:
        """Of a GPU. Planes stay where they are referred to, and have no bytes."""
        self.memory.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    def planes(self, name: str) -> list[torch.Tensor]:
        """Of a spec: [P + 1, page, *shape] each, a strided view of the memory."""
        return self._planes[name]

    def stride(self, name: str) -> int:
        """A spec's tokens from one page's begin to the next one's."""
        return self.page_bytes // self.specs[name].token_bytes

    def rows(self, name: str, number: int = 0) -> torch.Tensor:
        """A plane by KV slot: [slots, numel of a token], contiguous; between two pages lie other planes' bytes."""
        plane, size = self._planes[name][number], math.prod(self.specs[name].shape)
        return plane.as_strided((self.num_pages * self.stride(name) + self.page_size, size), (size, 1), plane.storage_offset())

    @torch.inference_mode()
    def copy(self, copies: Sequence[tuple[int, int, int]], cleared: Sequence[int] = ()) -> None:
        """Reads all sources of copies (source, target, leading tokens that count), clears pages, then writes the targets.

        A page may be source, cleared and target at once. On CPU, where attention multiplies what it does not look at by zero, what lies past
        the tokens that count is cleared too: it may be another request's, and not even finite.
        """
        self.check_pages([page for source, target, _ in copies for page in (source, target)] + list(cleared))
        if not copies:
            self._clear(cleared)
            return
        sources, targets, counts = zip(*copies)
        copied = self._read(sources)
        self._clear(cleared)
        self._write(targets, copied)
        places = self._index(targets)
        if self.device.type != "cpu" or min(counts) == self.page_size:
            return
        is_past = torch.arange(self.page_size) >= torch.tensor(counts)[:, None]
        owners, past = is_past.nonzero(as_tuple=True)
        for planes in self._planes.values():
            for plane in planes:
                plane[places[owners], past] = 0

    def compact(self, slots: torch.Tensor, page_stride: int, cu_query_lens: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """What is kept of accepted drafts of trees goes where the tokens' own KV slots are, in all planes: see `ops.compact_rows`."""
        ops.compact_rows(self.memory, self._places, slots, page_stride, cu_query_lens, path, num_accepted)

    # By bytes, indexed operations of a CPU take 30 times as long as copying does (0.25 ms to clear a page of 320 KiB, against 6 us).

    def _clear(self, page_ids: Sequence[int]) -> None:
        if self.device.type == "cpu":
            for page in page_ids:
                self.memory[page].zero_()
        elif page_ids:
            self.memory.index_fill_(0, self._index(page_ids), 0)

    def _read(self, page_ids: Sequence[int]) -> torch.Tensor:
        index = self._index(page_ids)
        return self.memory.index_select(0, index) if self.device.type == "cpu" else self.memory[index]

    def _write(self, page_ids: Sequence[int], content: torch.Tensor) -> None:
        if self.device.type == "cpu":
            for page, own in zip(page_ids, content, strict=True):
                self.memory[page].copy_(own)
        else:
            self.memory.index_copy_(0, self._index(page_ids), content.to(self.device))

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(list(values), dtype=torch.long)
        return index if self.device.type == "cpu" else index.pin_memory().to(self.device, non_blocking=True)

    def check_pages(self, page_ids: Sequence[int]) -> None:
        """Raises KvStoreError for a page that there is not."""
        bad = next((page for page in page_ids if not 0 <= page < self.num_pages), None)
        if bad is not None:
            raise KvStoreError(f"page {bad} does not exist; there are pages 0 to {self.num_pages - 1}")

    # -- exchange with another store ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def export_pages(self, page_ids: Sequence[int]) -> torch.Tensor:
        """What pages hold, over all specs: [n, page_bytes] uint8, a copy on the store's device."""
        self.check_pages(page_ids)
        return self._read(page_ids)

    @torch.inference_mode()
    def import_pages(self, page_ids: Sequence[int], content: torch.Tensor, fingerprint: str) -> None:
        """Writes what another store's `export_pages` gave. Raises KvStoreError when the layouts differ."""
        if fingerprint != self.fingerprint:
            raise KvStoreError(f"pages of layout {fingerprint} cannot be read: this store's is {self.fingerprint}")
        self.check_pages(page_ids)
        if content.shape != (len(page_ids), self.page_bytes) or content.dtype != torch.uint8:
            raise KvStoreError(f"{len(page_ids)} pages of {self.page_bytes} bytes came as {content.dtype} {list(content.shape)}")
        self._write(page_ids, content)


def _make_memory(num_pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros [num_pages, page_bytes]. On CPU, pages that are never used take no memory."""
    if device.type == "cpu":
        return torch.frombuffer(mmap.mmap(-1, num_pages * page_bytes), dtype=torch.uint8).view(num_pages, page_bytes)
    return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)
