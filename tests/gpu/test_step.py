"""The step's layout on the device against its twins: every integer equal, over random states."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import step as ops
from kernels.step import END, LOOKUP_LIMIT, MODEL_LIMIT, NUM_FIELDS, NUM_PAGES, RESULT_HEAD, SLOT, VERIFY_LIMIT, StepSizes

CORRECTNESS = [(1, 1, 0, 16), (4, 4, 3, 16), (32, 6, 5, 16), (128, 4, 3, 64)]
CORNER = [(2, 1, 3, 16), (5, 9, 5, 16), (3, 17, 16, 16), (8, 2, 7, 64)]
"""Rows, most queries of a row, most drafts, page size. Queries may have less room than drafts, or more."""
PERFORMANCE = [(256, 6, 5, 16)]
VOCAB, MAX_TOKENS = 1000, 300


def make_state(batch: int, num_queries: int, max_drafts: int, page_size: int) -> tuple[StepSizes, dict[str, torch.Tensor]]:
    """Slots in any order, some rows without a request, some at their end or past their pages."""
    num_slots, width = batch + 3, -(-MAX_TOKENS // page_size)
    sizes = StepSizes(batch, batch * num_queries, MAX_TOKENS, max_drafts, width, page_size, scratch_page=num_slots * width, dummy_slot=num_slots)
    fields = torch.zeros(NUM_FIELDS, batch, dtype=torch.int32)
    fields[SLOT] = torch.tensor([s if random.random() < 0.9 else num_slots for s in random.sample(range(num_slots), batch)])
    num_tokens = torch.randint(1, MAX_TOKENS - 40, (num_slots + 1,), dtype=torch.int32)
    known = num_tokens[fields[SLOT].long()]
    fields[NUM_PAGES] = torch.clamp(-(-(known + torch.randint(-2, 20, (batch,))) // page_size), 1, width)
    fields[END] = known + torch.randint(0, 12, (batch,))
    fields[VERIFY_LIMIT], fields[MODEL_LIMIT] = (
        torch.randint(0, min(max_drafts, num_queries - 1) + 1, (batch,)),
        torch.randint(0, max_drafts + 1, (batch,)),
    )
    fields[LOOKUP_LIMIT] = -1
    state = {
        "fields": fields,
        "tokens": torch.randint(0, VOCAB, (num_slots + 1, MAX_TOKENS), dtype=torch.int32),
        "num_tokens": num_tokens,
        "drafts": torch.randint(0, VOCAB, (num_slots + 1, max(max_drafts, 1)), dtype=torch.int32),
        "num_drafts": torch.randint(0, max_drafts + 1, (num_slots + 1,), dtype=torch.int32),
        "page_table": torch.randperm((num_slots + 1) * width).int().view(num_slots + 1, width) % sizes.scratch_page,
    }
    return sizes, state


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("batch", "num_queries", "max_drafts", "page_size"), CORRECTNESS + CORNER + PERFORMANCE)
def test_a_step(batch: int, num_queries: int, max_drafts: int, page_size: int, seed: int, device: torch.device) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    sizes, state = make_state(batch, num_queries, max_drafts, page_size)
    rows, width = sizes.rows, max_drafts + 1
    random_inputs = {
        "chosen": torch.randint(0, VOCAB, (rows,), dtype=torch.int32),
        "emitted": torch.randint(0, VOCAB, (batch, width), dtype=torch.int32),
        "num_accepted": torch.randint(0, width, (batch,), dtype=torch.int32),
        "is_broken": torch.rand(rows) < 0.1,
        "own_choice": torch.randint(0, VOCAB, (batch,), dtype=torch.int32),
    }

    def run(where: torch.device) -> dict[str, torch.Tensor]:
        own = {name: tensor.to(where, copy=True) for name, tensor in (state | random_inputs).items()}
        on_device = sizes.to(where)

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, -7, dtype=dtype, device=where)

        out = {"packed": make(3, rows, dtype=torch.long), "cu": make(batch + 1), "seq_lens": make(batch), "num_verified": make(batch)}
        shared = [own[n] for n in ("tokens", "num_tokens", "drafts", "num_drafts", "page_table")]
        ops.prepare_step(*out.values(), own["fields"], *shared, sizes, on_device)
        ops.simulate_acceptance(own["chosen"], own["fields"], out["cu"], own["drafts"], own["num_tokens"], sizes, on_device, 0.6)
        counts = out["cu"].diff()
        num_emitted = torch.minimum(counts, own["num_accepted"] + 1)  # as verification and commit leave them
        slots = own["fields"][SLOT].long()
        own["num_tokens"][slots] += num_emitted
        results = make(batch, RESULT_HEAD + width)
        ops.pack_results(results, own["emitted"], num_emitted, own["num_accepted"], out["num_verified"], own["is_broken"], out["cu"])
        out["results"] = results
        drafter = {"drafter": make(4, rows, dtype=torch.long), "drafter_lens": make(batch), "last_rows": make(batch, dtype=torch.long)}
        ops.prepare_drafter(
            *drafter.values(), own["fields"], out["cu"], own["emitted"], num_emitted, own["num_tokens"], own["page_table"], sizes, on_device
        )
        out |= drafter
        for number in range(max_drafts):
            packed, lens = make(3, batch, dtype=torch.long), make(batch)
            inputs = (own["fields"], own["own_choice"], own["num_tokens"], own["page_table"])
            ops.append_draft(own["drafts"], own["num_drafts"], packed, lens, *inputs, sizes, on_device, number)
            out |= {f"draft {number}": packed, f"draft_lens {number}": lens}
        return out | {"chosen": own["chosen"], "drafts": own["drafts"], "num_drafts": own["num_drafts"]}

    got, expected = run(device), run(torch.device("cpu"))
    dummy = sizes.dummy_slot  # what lies there is nobody's
    for name, value in expected.items():
        mine = got[name].cpu()
        if name in ("drafts", "num_drafts"):
            mine, value = mine[:dummy], value[:dummy]
        assert torch.equal(mine, value), name


def test_values_are_written(device: torch.device) -> None:
    for count in (0, 1, 127, 128, 1000):
        target = torch.full((40, 50), -1, dtype=torch.int32, device=device)
        pairs = torch.stack([torch.randperm(2000)[:count], torch.arange(count)], dim=1).int()
        updates = torch.cat([pairs.flatten(), torch.tensor([5, 77], dtype=torch.int32)])
        ops.write_values(target, updates.to(device), count)
        expected = torch.full((40, 50), -1, dtype=torch.int32)
        ops.write_values(expected, updates, count)
        assert torch.equal(target.cpu(), expected)
