"""Attention over paged latents on the GPU: against float64 in the twin, with memory that is no number wherever no token of the request is."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kernels import latent_attention as latents
from kernels import reference
from kernels.attention import Heads
from kernels.latent import append_latent, head_linear
from kernels.step_attention import StepAttention, latent_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
MIXED = [(1, 17), (5, 16), (0, 7), (1, 1), (3, 3), (6, 31), (1, 150), (4, 65), (0, 0), (1, 700)]
SKEWED = [(1, 5000), *[(q % 4 + 1, 64 + 37 * q) for q in range(20)]]


class Batch:
    """query_len and seq_len of each request; num_prompts leading ones are prompts."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 512,
        dim: int = 64,
        num_prompts: int = 0,
    ) -> None:
        numbers = random.Random(1)
        self.shapes, self.num_prompts, self.page, self.still, self.value = shapes, num_prompts, 16, 128, 128
        self.heads, self.dtype, self.device = Heads(num_heads, num_heads, self.still + dim, rank, dim), dtype, device
        counts = [-(-n // self.page) for _, n in shapes]
        order = list(range(sum(counts) + 3))
        numbers.shuffle(order)
        self.pages = [[order.pop() for _ in range(count)] for count in counts]
        num_pages = sum(counts) + 3
        # Pages of several planes: a plane's lie apart.
        memory = torch.full((num_pages, 2, self.page, 1, rank + dim), NAN, device=device, dtype=dtype)
        self.plane = memory[:, 1]
        for own, (_, length) in zip(self.pages, shapes):
            for place, page in enumerate(own):
                count = min(self.page, length - place * self.page)
                self.plane[page, :count] = torch.randn(count, 1, rank + dim, device=device).to(dtype)
        width = max(counts) + 1
        table = torch.full((len(shapes), width), num_pages - 1, dtype=torch.int32)
        for row, own in zip(table, self.pages):
            row[: len(own)] = torch.tensor(own)
        self.table = table.to(device)
        self.cu = torch.tensor([0, *itertools.accumulate(q for q, _ in shapes)], dtype=torch.int32, device=device)
        self.lens = torch.tensor([n for _, n in shapes], dtype=torch.int32, device=device)
        self.query = torch.randn(sum(q for q, _ in shapes), num_heads, self.still + dim, device=device).to(dtype)
        self.key_up = (torch.randn(num_heads, self.still, rank, device=device) / rank**0.5).to(dtype)
        self.value_up = (torch.randn(num_heads, self.value, rank, device=device) / rank**0.5).to(dtype)
        self.scale = 0.07

    def step(self) -> StepAttention:
        prompts, decoding = self.shapes[: self.num_prompts], self.shapes[self.num_prompts :]
        plan = StepAttention(
            cu_query_lens=self.cu,
            seq_lens=self.lens,
            request_indices=torch.arange(len(self.shapes), dtype=torch.int32, device=self.device),
            page_table=self.table,
            num_prompts=self.num_prompts,
            num_prompt_rows=sum(q for q, _ in prompts),
            max_prompt_query_len=max((q for q, _ in prompts), default=0),
            max_prompt_seq_len=max((n for _, n in prompts), default=0),
            num_prompt_keys=sum(n for _, n in prompts),
            max_query_len=max((q for q, _ in decoding), default=1),
            max_seq_len=self.table.shape[1] * self.page,
            page_size=self.page,
            heads=self.heads,
            dtype=self.dtype,
        )
        plan.refresh()
        return plan

    def attend(self, plan: StepAttention) -> torch.Tensor:
        return latent_attention(self.query, self.plane, plan, self.key_up, self.value_up, self.scale)

    def exact(self) -> torch.Tensor:
        lens = [[n for n, (q, _) in zip(values, self.shapes) if q] for values in zip(*self.shapes)]
        pages = [own for own, (q, _) in zip(self.pages, self.shapes) if q]
        plan = reference.plan_attention(*lens, pages, self.page, 1, torch.float64)
        tensors = (self.query.cpu().double(), self.plane.nan_to_num(0).cpu().double().contiguous())
        return reference.latent_attention(*tensors, plan, self.key_up.cpu().double(), self.value_up.cpu().double(), self.scale)


def check(batch: Batch, plan: StepAttention) -> None:
    out, expected = batch.attend(plan).double().cpu(), batch.exact()
    assert out.shape == expected.shape
    error = float((out - expected).norm() / expected.norm())
    assert error < {BF16: 1.2e-2, FP16: 2e-3, FP32: 1e-5}[batch.dtype], error


@pytest.mark.parametrize("num_heads", [16, 3, 20, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_decoding(dtype: torch.dtype, num_heads: int, device: torch.device) -> None:
    few = [(1, 64)], [(1, 700)], [(1, 1), (1, 65)], [(1, 3000)], [(1, 3000), (1, 3)], [(2, 3000)], [(1, 40), (0, 0)]
    for shapes in (*few, MIXED, SKEWED, [(16, 300), (1, 40)], [(2, 400)] * 40):
        batch = Batch(shapes, num_heads, dtype, device)
        plan = batch.step()
        assert isinstance(plan._decoding, latents.LatentPlan)
        check(batch, plan)


@pytest.mark.parametrize(("dtype", "rank", "dim"), [(FP32, 512, 64), (BF16, 256, 64), (BF16, 384, 64), (BF16, 96, 24), (FP32, 11, 6)])
def test_other_sizes(dtype: torch.dtype, rank: int, dim: int, device: torch.device) -> None:
    for shapes in (MIXED, [(1, 2000)], [(1, 2000), (1, 70)]):
        batch = Batch(shapes, 4, dtype, device, rank, dim)
        plan = batch.step()
        assert isinstance(plan._decoding, latents.LatentPlan) == (rank in (256, 384))
        check(batch, plan)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_prompts(dtype: torch.dtype, device: torch.device) -> None:
    """Whole ones, chunks behind cached latents, alone and beside rows that decode."""
    prompts = [(70, 70), (33, 400), (1, 19), (300, 301)]
    for shapes, count in ((prompts, 4), (prompts + MIXED, 4)):
        batch = Batch(shapes, 16, dtype, device, num_prompts=count)
        check(batch, batch.step())


def test_lengths_change_between_replays(device: torch.device) -> None:
    numbers = random.Random(5)
    first = Batch([(4, 3000)] * 9, 16, BF16, device)
    plan = first.step()
    query, plane, out = (
        torch.empty_like(first.query),
        torch.empty_like(first.plane, memory_format=torch.preserve_format),
        torch.empty_like(first.query[..., :128]),
    )

    def step() -> None:
        plan.refresh()
        out.copy_(latent_attention(query, plane, plan, first.key_up, first.value_up, first.scale))

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    for _ in range(8):
        longest = numbers.choice([10, 300, 3000])
        shapes = [(q, numbers.randint(max(q, 1), longest)) for q in (numbers.randint(0, 4) for _ in range(8))] + [(1, 50)]
        batch = Batch(shapes, 16, BF16, device)
        batch.key_up, batch.value_up = first.key_up, first.value_up
        first.cu.copy_(batch.cu)
        first.lens.copy_(batch.lens)
        first.table[:, : batch.table.shape[1]].copy_(batch.table)
        query.zero_()[: len(batch.query)].copy_(batch.query)
        plane.fill_(NAN)[: len(batch.plane)].copy_(batch.plane)
        out.fill_(NAN)
        graph.replay()
        expected = batch.exact()
        found = out[: len(batch.query)].double().cpu()
        assert float((found - expected).norm() / expected.norm()) < 1.2e-2


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("num_heads", "rank", "dim"), [(16, 512, 64), (3, 11, 6), (128, 512, 64)])
def test_append_latent(num_heads: int, rank: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    num_tokens, size, still = 9, 8, 24
    wide = torch.randn(num_tokens, rank + dim + 16, device=device).to(dtype)
    norm = (1 + 0.1 * torch.randn(rank, device=device)).to(dtype)
    query = torch.randn(num_tokens, num_heads, still + dim, device=device).to(dtype)
    cos, sin = (torch.randn(num_tokens, 1, dim, device=device).to(dtype) for _ in range(2))
    slots = torch.tensor([3, 17, -1, 0, 40, 8, 9, 41, -1], device=device)
    pages = torch.full((6, size, 1, rank + dim), 7.0, device=device, dtype=dtype)
    own = (query.cpu().double(), wide[:, 16:].cpu().double(), norm.cpu().double(), 1e-6, cos.cpu().double(), sin.cpu().double(), slots.cpu())
    expected = pages.cpu().double()
    append_latent(*own, expected)
    append_latent(query, wide[:, 16:], norm, 1e-6, cos, sin, slots, pages)
    tolerance = {BF16: 2e-2, FP16: 3e-3, FP32: 1e-5}[dtype]
    torch.testing.assert_close(pages.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(query.cpu().double(), own[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("in_size", "out_size"), [(128, 512), (512, 128), (64, 96), (32, 16), (352, 48), (40, 24), (1024, 64)])
def test_head_linear(in_size: int, out_size: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = (torch.randn(5, out_size, in_size, device=device) / in_size**0.5).to(dtype)
    x = torch.randn(100, 5, in_size + 64, device=device).to(dtype)[..., :in_size]
    exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    whole = head_linear(x, weight)
    assert float((whole.double() - exact).norm() / exact.norm()) < 4e-3
    for start, stop in ((0, 1), (3, 9), (10, 43)) if in_size % 32 == 0 and in_size <= 512 else ():
        assert torch.equal(head_linear(x[start:stop], weight), whole[start:stop])
