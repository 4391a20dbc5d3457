"""Attention in torch's own operations, which a GPU falls back to, against the twin: on CPU, as it is the same there."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels import reference
from kernels.attention import Heads
from kernels.plain_attention import PlainAttention
from kernels.prompt_attention import PromptAttention
from kernels.step_attention import StepAttention

PAGE, SHAPES = 8, [(1, 17), (3, 3), (5, 40), (1, 1), (2, 90)]
"""(query_len, seq_len) of each request."""


class Batch:
    """Requests whose pages lie anywhere in a pool that is no number where nobody's tokens are, behind a row of nobody."""

    def __init__(self, *planes: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.query_lens, self.seq_lens = (list(lens) for lens in zip(*SHAPES))
        counts = [-(-n // PAGE) for n in self.seq_lens]
        order = torch.randperm(sum(counts), generator=generator).tolist()
        self.pages = [[order.pop() for _ in range(count)] for count in counts]
        self.planes = [torch.full((sum(counts), PAGE, *shape), float("nan")) for shape in planes]
        for own, length in zip(self.pages, self.seq_lens):
            for place in range(length):
                for plane in self.planes:
                    plane[own[place // PAGE], place % PAGE] = torch.randn(plane.shape[2:], generator=generator)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, own in zip(table, self.pages):
            row[: len(own)] = torch.tensor(own)
        self.cu = torch.tensor([0, *itertools.accumulate(self.query_lens)], dtype=torch.int32)
        self.lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        self.table, self.indices = table, torch.arange(len(counts), dtype=torch.int32)
        self.num_rows = sum(self.query_lens)

    def query(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.num_rows, *shape, generator=torch.Generator().manual_seed(4))

    def clean(self) -> list[torch.Tensor]:
        return [plane.nan_to_num(0) for plane in self.planes]

    def plan(self, num_groups: int, *, is_whole: bool = False) -> reference.AttentionPlan:
        return reference.plan_attention(self.query_lens, self.seq_lens, self.pages, PAGE, num_groups, torch.float32, is_whole=is_whole)

    def plain(self, ahead: int = 0) -> PlainAttention:
        return PlainAttention(self.cu, self.lens, self.indices, self.table, PAGE, self.table.shape[1] * PAGE, ahead=ahead)

    def prompts(self) -> PromptAttention:
        lens = (max(self.query_lens), max(self.seq_lens), sum(self.seq_lens))
        return PromptAttention(self.cu, self.lens, self.indices, self.table, PAGE, *lens)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("num_keys", [16384, 64])
def test_keys_and_values(num_keys: int, window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.plain_attention.KEYS", num_keys)
    batch = Batch((2, 24), (2, 24))
    query = batch.query(6, 24)
    expected = reference.append_attention(query, *batch.clean(), batch.plan(3), window, cap)
    torch.testing.assert_close(batch.plain().attend(query, *batch.planes, 0, window, cap), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.prompts().attend(query, *batch.planes, window, cap), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4, 7, 64])
@pytest.mark.parametrize("num_keys", [16384, 64])
def test_queries_that_see_those_after_them(num_keys: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin against a statement of what each query sees; then torch's operations, and a step's attention on CPU, against the twin."""
    monkeypatch.setattr("kernels.plain_attention.KEYS", num_keys)
    batch = Batch((2, 24), (2, 24))
    query, planes, stated = batch.query(6, 24), batch.clean(), []
    for begin, count, length, own in zip(batch.cu.tolist(), batch.query_lens, batch.seq_lens, batch.pages, strict=False):
        keys, values = (plane[own].flatten(0, 1)[:length].repeat_interleave(3, dim=1) for plane in planes)
        for j in range(count):
            first = 0 if window is None else max(0, length - count + j + 1 - window)
            scores = torch.einsum("hd,khd->hk", query[begin + j], keys[first:]) * 24**-0.5
            stated.append(torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values[first:]))
    expected = reference.append_attention(query, *planes, batch.plan(3, is_whole=True), window)
    torch.testing.assert_close(expected, torch.stack(stated), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.plain(max(batch.query_lens)).attend(query, *batch.planes, 0, window, None), expected, rtol=1e-4, atol=1e-5)
    sizes = {"max_query_len": max(batch.query_lens), "max_seq_len": max(batch.seq_lens), "page_size": PAGE}
    lists = {"cu_query_lens": batch.cu, "seq_lens": batch.lens, "request_indices": batch.indices, "page_table": batch.table}
    step = StepAttention(**lists, **sizes, heads=Heads(6, 2, 24), dtype=torch.float32, is_whole=True)
    step.refresh()
    torch.testing.assert_close(step.attend(query, *planes, window), expected)
    with pytest.raises(ValueError, match="is_whole goes with no prompts, prefixes, trees or latents"):
        StepAttention(
            **lists, **sizes, heads=Heads(6, 2, 24), dtype=torch.float32, is_whole=True, seen=torch.zeros(batch.num_rows, dtype=torch.int64)
        )


def test_latents() -> None:
    batch = Batch((1, 11 + 6))
    query, scale = batch.query(3, 5 + 6), 0.3
    key_up, value_up = torch.randn(3, 5, 11), torch.randn(3, 7, 11)
    expected = reference.latent_attention(query, *batch.clean(), batch.plan(1), key_up, value_up, scale)
    absorbed = torch.cat([torch.einsum("thn,hnr->thr", query[..., :5], key_up), query[..., 5:]], dim=-1)
    mixed = batch.plain().attend_latents(absorbed, *batch.planes, 11, 0, scale)
    torch.testing.assert_close(torch.einsum("thr,hvr->thv", mixed, value_up), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.prompts().attend_latents(query, *batch.planes, key_up, value_up, scale), expected, rtol=1e-4, atol=1e-5)


def test_rows_behind_prompts_and_of_nobody() -> None:
    """Packed rows begin behind those of prompts; a row past the last request's is some number."""
    batch = Batch((2, 24), (2, 24))
    query = batch.query(6, 24)
    whole = batch.plain().attend(query, *batch.planes, 0, None, None)
    plain = PlainAttention(batch.cu[2:], batch.lens[2:], batch.indices[2:], batch.table, PAGE, batch.table.shape[1] * PAGE)
    first = int(batch.cu[2])
    more = torch.cat([query[first:], query[:2]])
    torch.testing.assert_close(plain.attend(more, *batch.planes, first, None, None)[:-2], whole[first:])
