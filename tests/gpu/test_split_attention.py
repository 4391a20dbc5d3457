"""Attention that finds prompts by itself against that of steps whose prompts the host knows, to the bit: the same kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels import ops
from kernels._load import device_stream, gpu_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = [
    ([200, 1, 129, 4, 0, 2], [0, 50, 3, 700, 0, 16], 3),
    ([1], [0], 1),
    ([5, 3, 1], [100, 64, 2000], 0),
    ([128, 128], [0, 1000], 2),
    ([0, 60, 0, 1], [0, 9, 0, 33], 2),
    ([17] * 12, [31 * n for n in range(12)], 6),
]
"""Rows of each request, tokens before them, prompts."""


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "page"), [(ops.Heads(8, 2, 64), 16), (ops.Heads(32, 8, 128), 16), (ops.Heads(4, 4, 256), 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_attends_as_where_the_host_knows_prompts(heads, page, dtype, window):
    device = torch.device("cuda")
    if not ops.can_split(heads, page, dtype, gpu_of(device), {(window, None)}):
        pytest.skip("this GPU has no such kernel")
    size, most, max_rows = 16, 17, 512
    generator = torch.Generator(device).manual_seed(1)
    with device_stream(device):
        table = torch.randperm(size * 160, device=device, generator=generator).int().view(size, 160)
        keys, values = (torch.randn(size * 160, page, heads.num_kv, heads.size, device=device, generator=generator).to(dtype) for _ in range(2))
        split = ops.SplitRows.make(size, device)
        sizes = {"max_seq_len": 160 * page, "page_size": page, "heads": heads, "dtype": dtype}
        attention = ops.SplitAttention(split, table, max_rows=max_rows, max_query_len=most, **sizes)
        query = torch.randn(max_rows, heads.num_query, heads.size, device=device, generator=generator).to(dtype)
        for counts, pasts, num_prompts in STEPS:
            cu_rows = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
            lens = torch.tensor([own + past if own else 0 for own, past in zip(counts, pasts)], dtype=torch.int32, device=device)
            owners = torch.arange(len(counts), 0, -1, dtype=torch.int32, device=device)
            ops.split_rows(split, cu_rows, lens, owners, num_prompts)
            attention.refresh()
            got = torch.full_like(query, 7)
            attention.attend(query, keys, values, window, out=got)
            own = sum(counts)
            prompt_lens = counts[:num_prompts]
            bounds = {"max_prompt_query_len": max([*prompt_lens, 1]), "max_prompt_seq_len": 4000, "num_prompt_keys": 4000}
            plan = ops.StepAttention(
                cu_query_lens=cu_rows,
                seq_lens=lens,
                request_indices=owners,
                page_table=table,
                num_prompts=num_prompts,
                num_prompt_rows=sum(prompt_lens),
                max_query_len=most,
                **bounds,
                **sizes,
            )
            plan.refresh()
            wanted = torch.full_like(query, 7)
            plan.attend(query, keys, values, window, out=wanted)
            if num_prompts < len(counts):  # one step's decoding rows are cut in other pieces than another's
                torch.testing.assert_close(got[sum(prompt_lens) : own].float(), wanted[sum(prompt_lens) : own].float(), rtol=2e-2, atol=2e-2)
            assert torch.equal(got[: sum(prompt_lens)], wanted[: sum(prompt_lens)]), (counts, num_prompts)
            assert (got[own:] == 7).all()


def test_what_it_is_not_for_is_refused():
    heads, gpu = ops.Heads(8, 2, 128), gpu_of(torch.device("cuda"))
    for own, page, dtype, kinds, is_e4m3 in (
        (heads, 16, torch.float32, (), False),
        (heads, 16, torch.bfloat16, {(None, 30.0)}, False),
        (heads, 16, torch.bfloat16, (), True),
        (heads, 8, torch.bfloat16, (), False),
        (ops.Heads(8, 2, 96), 16, torch.bfloat16, (), False),
        (ops.Heads(8, 1, 576, 512, 64), 16, torch.bfloat16, (), False),
    ):
        assert not ops.can_split(own, page, dtype, gpu, kinds, is_e4m3=is_e4m3)
