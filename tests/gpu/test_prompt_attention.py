"""Attention of prompts on Hopper GPUs against its formula in float32."""

from __future__ import annotations

import pytest
import torch

from kernels._load import gpu_of
from kernels.prompt_attention import attend_causally, can_attend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or gpu_of(torch.device("cuda")).generation != 9, reason="needs a Hopper GPU")
DEVICE = torch.device("cuda")
# Of prompts: queries, and keys, of which the queries are the last.
PROMPTS = [
    [(1, 1)],
    [(128, 128)],
    [(129, 129), (127, 127)],
    [(1, 700), (64, 64), (300, 301), (5, 2000)],
    [(512, 512)] * 4,
    [(100, 4000), (1000, 1000), (17, 17)],
    [(3, 3)] * 70,
    [(2048, 6144)],
]


def exactly(query, keys, values, queries, lens, scale, window):
    """In float32, a prompt after the other."""
    out, first, begin = query.new_empty(*query.shape[:2], values.shape[2], dtype=torch.float32), 0, 0
    group = query.shape[1] // keys.shape[1]
    for count, length in zip(queries, lens, strict=True):
        q = query[first : first + count].float().transpose(0, 1)
        k, v = (x[begin : begin + length].float().repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
        newest = torch.arange(length - count, length, device=query.device)[:, None]
        places = torch.arange(length, device=query.device)
        is_seen = places <= newest
        if window is not None:
            is_seen &= places > newest - window
        chances = (q @ k.transpose(1, 2) * scale).masked_fill(~is_seen, float("-inf")).softmax(dim=-1)
        out[first : first + count] = (chances @ v).transpose(0, 1)
        first, begin = first + count, begin + length
    return out


def make(prompts, num_heads, num_kv, size, dtype, value_size=None):
    generator = torch.Generator(DEVICE).manual_seed(0)
    queries, lens = zip(*prompts, strict=True)
    shapes = ((sum(queries), num_heads, size), (sum(lens), num_kv, size), (sum(lens), num_kv, value_size or size))
    query, keys, values = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes)
    bounds = [torch.tensor([0, *own], device=DEVICE).cumsum(0).int() for own in (queries, lens)]
    return query, keys, values, *bounds


@pytest.mark.parametrize("prompts", PROMPTS, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv", "size", "value_size"), [(8, 2, 128, 128), (4, 4, 64, 64), (3, 1, 128, 128), (4, 4, 192, 128), (4, 2, 256, 256)]
)
@pytest.mark.parametrize("window", [None, 1, 100, 128, 1000])
def test_as_the_formula(prompts, num_heads, num_kv, size, value_size, window):
    for dtype in (torch.bfloat16, torch.float16):
        query, keys, values, cu_queries, cu_keys = make(prompts, num_heads, num_kv, size, dtype, value_size)
        found = attend_causally(query, keys, values, cu_queries, cu_keys, size**-0.5, window)
        expected = exactly(query, keys, values, *zip(*prompts, strict=True), size**-0.5, window)
        torch.testing.assert_close(found.float(), expected, atol=2e-2 if dtype == torch.bfloat16 else 4e-3, rtol=2e-2)


def spread(x, lens, page, table, num_planes=3):
    """Rows of prompts [K, H, D] -> pages [P, page, H, D] as `table` [N, M] has them, between pages of others; what nobody wrote is not a number."""
    pages = torch.full((int(table.max()) + 1, num_planes, page, *x.shape[1:]), float("nan"), device=x.device, dtype=x.dtype)[:, 1]
    begin = 0
    for row, length in zip(table.tolist(), lens, strict=True):
        for place in range(length):
            pages[row[place // page], place % page] = x[begin + place]
        begin += length
    return pages


@pytest.mark.parametrize("page", [16, 64, 128, 256])
@pytest.mark.parametrize("window", [None, 90])
def test_pages(page, window):
    prompts = [(130, 300), (5, 700), (64, 64), (1, 1), (257, 257)]
    queries, lens = zip(*prompts, strict=True)
    query, keys, values, cu_queries, _ = make(prompts, 4, 2, 128, torch.bfloat16)
    width = max(-(-length // page) for length in lens) + 1
    order = torch.randperm(len(lens) * width, generator=torch.Generator().manual_seed(3)).view(len(lens), width)
    requests = [6, 1, 4, 0, 3]
    table = torch.full((8, width), 2**30, dtype=torch.int32, device=DEVICE)  # behind a request's pages may be anything
    for place, (number, length) in enumerate(zip(requests, lens, strict=True)):
        table[number, : -(-length // page)] = order[place, : -(-length // page)].to(DEVICE, torch.int32)
    stored = [spread(x, lens, page, order) for x in (keys, values)]
    own = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lens, requests)]
    found = attend_causally(query, *stored, cu_queries, own[0], 0.1, window, own[1], table)
    expected = exactly(query, keys, values, queries, lens, 0.1, window)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def test_queries_of_wider_rows():
    """As latents' are, whose values are smaller than their keys."""
    query, keys, values, *bounds = make([(300, 500), (77, 77)], 4, 4, 192, torch.bfloat16, 128)
    wide = torch.full((len(query), 4 * 192 + 64), float("nan"), device=DEVICE, dtype=query.dtype)
    wide[:, : 4 * 192] = query.flatten(1)
    own = wide[:, : 4 * 192].view(len(query), 4, 192)
    assert can_attend(own, keys, values, 2)
    assert torch.equal(attend_causally(own, keys, values, *bounds, 0.1), attend_causally(query, keys, values, *bounds, 0.1))


def test_large_scores():
    query, keys, values, *bounds = make([(300, 500)], 4, 2, 128, torch.bfloat16)
    found = attend_causally(query * 30, keys, values, *bounds, 1.0)
    torch.testing.assert_close(found.float(), exactly(query * 30, keys, values, [300], [500], 1.0, None), atol=3e-2, rtol=3e-2)


def test_others_values_are_nobodys():
    """What is not finite in one prompt is seen by none but that one's queries."""
    prompts = [(200, 200), (77, 77), (130, 333), (40, 40)]
    query, keys, values, *bounds = make(prompts, 4, 2, 128, torch.bfloat16)
    before = attend_causally(query, keys, values, *bounds, 0.1)
    begin = 0
    for number, (_, length) in enumerate(prompts):
        if number % 2:
            keys[begin : begin + length], values[begin : begin + length] = float("nan"), float("inf")
        begin += length
    after = attend_causally(query, keys, values, *bounds, 0.1)
    first = 0
    for number, (count, _) in enumerate(prompts):
        if not number % 2:
            assert torch.equal(after[first : first + count], before[first : first + count])
        else:
            assert not after[first : first + count].isfinite().any()
        first += count


def test_captured_and_repeated():
    query, keys, values, *bounds = make([(700, 900), (33, 33)], 8, 2, 128, torch.bfloat16)
    expected = attend_causally(query, keys, values, *bounds, 0.1)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        outs = [attend_causally(query, keys, values, *bounds, 0.1) for _ in range(5)]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
