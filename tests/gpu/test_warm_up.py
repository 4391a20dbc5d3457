"""After `warm_up` no shape within its bounds needs nvcc."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from backend import SamplingParams
from kernels import _load, distribution
from kernels.attention import AttentionPlan, Heads, append_attention
from kernels.ops import Admission, RequestTable, process_and_choose
from kernels.warm_up import compiling, load_attention, load_step
from tests import test_block_drafters as blocks
from tests.drafting import serve
from tests.families import Case, make_model, random_tokens

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


TARGET = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 8192, "max_position_embeddings": 512}
"""Whose head is compiled otherwise than its layers."""
SMALLER = {**TARGET, "head_dim": 128, "hidden_size": 512, "intermediate_size": 1024}
"""Nothing of it is compiled as the target is."""
BLOCKS_TARGET = Case("llama", config={**blocks.TARGET.config, "max_position_embeddings": 512})
SERVERS: dict[str, tuple[Case | blocks.Kind | None, dict[str, Any], list[dict[str, Any] | None]]] = {
    "scores of prompts": (None, {"method": "none"}, [None]),
    "more drafts than the server's method makes": (None, {"method": "ngram", "num_speculative_tokens": 2}, [None, {"num_speculative_tokens": 16}]),
    "a draft model's trees": (Case("qwen3", config=SMALLER), {"tree_nodes": 12, "num_speculative_tokens": 3}, [None, {"method": "ngram"}]),
    "a draft model with windows": (Case("gemma3_text", config={**SMALLER, "sliding_window": 32}), {}, [None, {"num_speculative_tokens": 10}]),
    "capped scores": (Case("gemma2", config={**SMALLER, "sliding_window": 32}), {}, [None, {"num_speculative_tokens": 10}]),
    "PARD": (Case("qwen3", config={**SMALLER, "pard_token": 8000}), {}, [None, {"num_speculative_tokens": 6}, {"num_speculative_tokens": 16}]),
    "blocks": (blocks.DFLASH, {}, [None, {"num_speculative_tokens": 2}]),
    "blocks that layers see in two ways": (blocks.WINDOWED[0], {}, [None, {"num_speculative_tokens": 2}]),
}


@pytest.mark.parametrize("server", SERVERS)
def test_nothing_is_compiled_for_requests(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server of few requests, whose captured steps have few rows: of what kernels are asked for, all was there when it was ready."""
    drafter, speculation, choices = SERVERS[server]
    made_for, method = Case("llama", config=TARGET), "draft_model"
    if isinstance(drafter, blocks.Kind):
        made_for, method = BLOCKS_TARGET, drafter.method
        blocks.save_drafter(drafter, blocks.make_weights(drafter), tmp_path / "drafter")
    elif drafter is not None:
        make_model(drafter, tmp_path / "drafter")
    make_model(made_for, tmp_path / "target")
    if drafter is not None:
        speculation = {"method": method, "model": str(tmp_path / "drafter"), **speculation}
    asked: set[tuple[str, Any]] = set()
    find = _load._kernel

    def note(index: int, source: str, name: str, defines: Any, *others: Any) -> Any:
        asked.add((source, defines))
        return find(index, source, name, defines, *others)

    monkeypatch.setattr(_load, "_kernel", note)
    options = {"device": "cuda", "dtype": "bfloat16", "max_batch_size": 2, "page_size": 16, "kv_cache_memory": "64MiB", "max_num_batched_tokens": 512}
    llm = serve(tmp_path / "target", options, **speculation)
    ready = set(asked)
    prompts = [{"prompt_token_ids": random_tokens(length, length)} for length in (3, 20, 50, 100, 180, 300)]
    for choice in choices:
        for lasting in ({"max_tokens": 24}, {"max_tokens": 2, "echo": True, "logprobs": 2}):
            params = SamplingParams(temperature=0.0, ignore_eos=True, **lasting)
            llm.generate(prompts, params, speculative=choice, use_tqdm=False)
    llm.close()
    assert asked <= ready, sorted(asked - ready, key=str)
