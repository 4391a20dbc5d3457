"""After `warm_up` no shape within its bounds needs nvcc."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from kernels import _load, distribution
from kernels.attention import AttentionPlan, Heads, append_attention
from kernels.ops import Admission, RequestTable, process_and_choose
from kernels.warm_up import compiling, load_attention, load_step

WIDTHS, MAX_BATCH, MAX_ROWS, VOCAB = (1, 4), 70, 300, 4096
PAGE, HEADS = 128, Heads(6, 2, 64)  # of no other test


def test_nothing_is_compiled_afterwards(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = (torch.bfloat16, torch.float32)
    with compiling(device):
        load_step(device, dtypes, VOCAB, MAX_ROWS)
        for has_prefixes in (False, True):
            load_attention(device, WIDTHS, MAX_BATCH, PAGE, HEADS, torch.bfloat16, has_prefixes)

    def refuse(*args: object, **options: object) -> NoReturn:
        raise AssertionError("nvcc was asked for")

    monkeypatch.setattr(_load.subprocess, "run", refuse)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    planes = torch.zeros(2, 3, PAGE, *HEADS[1:3], dtype=torch.bfloat16, device=device)
    for width in WIDTHS:
        for batch in range(1, MAX_BATCH + 1):
            for has_prefixes in (False, True):
                plan = AttentionPlan(
                    cu_query_lens=ints(list(range(0, batch * width + 1, width))),
                    seq_lens=ints([200] * batch),
                    page_table=ints([[0, 1]] * batch),  # type: ignore[arg-type]
                    table_rows=ints(list(range(batch))),
                    max_query_len=width,
                    max_seq_len=256,
                    page_size=PAGE,
                    heads=HEADS[:3],
                    dtype=torch.bfloat16,
                    prefixes=(ints([0] * batch), ints([128] * batch)) if has_prefixes else None,
                )
                plan.refresh()
                out = append_attention(torch.zeros(batch * width, HEADS[0], HEADS[2], dtype=torch.bfloat16, device=device), *planes, plan)
                assert not out.any()
    table = RequestTable(1, 64, 3, VOCAB, device)
    table.admit([Admission(0, [1, 2], 1, 60, presence=0.5)])
    for dtype in dtypes:
        for rows in range(1, MAX_ROWS + 1):
            logits = torch.zeros(rows, VOCAB, dtype=dtype, device=device)
            process_and_choose(logits, table, ints([0]), ints([0, min(rows, 4)]))
            one = torch.ones(rows, device=device)
            distribution.probabilities(logits, one, one.int() * 0, one, one * 0)
