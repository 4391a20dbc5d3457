"""The step's layout on the device against its twins: every integer equal, over random states."""

from __future__ import annotations

import pytest
import torch

from kernels import step as ops
from kernels.ops import RequestTable, commit
from kernels.reference import step as reference
from kernels.step_rows import DrafterRows, StepRows
from kernels.structs import DRAFTER_COUNT, INDEX, RESULT_HEAD
from tests.test_step_layout import MAX_DRAFTS, MAX_LEN, POISON, Step, V

CORRECTNESS = [(1, 0), (4, 1), (32, 0), (128, 9)]
CORNER = [(1, 1), (2, 2), (33, 33), (7, 3)]
PERFORMANCE = [(254, 0), (256, 40)]
"""Rows, and how many of them are prompts."""


def padded(tensor: torch.Tensor, size: int, fill: list[int]) -> torch.Tensor:
    """[k, T] with columns `fill` [k] up to T = size."""
    out = torch.tensor(fill)[:, None].repeat(1, size)
    out[:, : tensor.shape[1]] = tensor
    return out


@pytest.mark.parametrize("room", ["plenty", "little"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("batch", "num_prompts"), CORRECTNESS + CORNER + PERFORMANCE)
def test_a_step(batch: int, num_prompts: int, seed: int, room: str, device: torch.device) -> None:
    step = Step(seed, batch, num_prompts)
    there, fields, page_table = step.table, step.fields, step.page_table
    total = reference.prepare_step(there, fields, page_table, step.sizes, None)
    rows, most_logits = total.packed.shape[1] + 5, len(total.logit_rows) + 3
    if room == "little":
        rows, most_logits = max(rows * 2 // 3, 1), max(most_logits // 2, 1)
    sizes = step.sizes._replace(rows=rows)
    here = RequestTable(there.size - 1, MAX_LEN, MAX_DRAFTS, V, device)
    for name in ("tokens", "num_tokens", "drafts", "num_drafts", "num_drafter_tokens", "params"):
        getattr(here, name).copy_(getattr(there, name))
    on = [x.to(device) for x in (fields, page_table)]

    expected = reference.prepare_step(there, fields, page_table, sizes, most_logits)
    got = StepRows.make(sizes, most_logits, device)
    for tensor in (got.packed, got.cu_query_lens, got.seq_lens, got.num_verified, got.cu_logit_rows, got.logit_rows):
        tensor.fill_(-7)
    assert ops.prepare_step(here, *on, sizes, got) is got
    scratch = sizes.scratch_page
    want = padded(expected.packed, rows, [0, 0, scratch * sizes.page_stride, scratch * sizes.tap_stride])
    assert torch.equal(got.packed.cpu(), want)
    assert torch.equal(got.logit_rows.cpu(), padded(expected.logit_rows[None], most_logits, [0])[0])
    for name in ("cu_query_lens", "seq_lens", "num_verified", "cu_logit_rows"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name

    chosen = torch.randint(0, V, (most_logits,), dtype=torch.int32)
    others = (fields[INDEX], expected.cu_logit_rows)
    simulated = chosen.to(device)
    ops.simulate_acceptance(simulated, here, *(x.to(device) for x in others), 0.6)
    ops.simulate_acceptance(chosen, there, *others, 0.6)
    assert torch.equal(simulated.cpu(), chosen)

    num_emitted = torch.minimum(expected.cu_logit_rows.diff(), torch.randint(1, MAX_DRAFTS + 2, (batch,), dtype=torch.int32))
    emitted = torch.randint(0, V, (batch, MAX_DRAFTS + 1), dtype=torch.int32)
    emitted[torch.arange(MAX_DRAFTS + 1) >= num_emitted[:, None]] = -1
    outputs = [x.to(device) for x in (emitted, num_emitted)]
    commit(emitted, num_emitted, there, fields[INDEX])
    commit(outputs[0], outputs[1], here, on[0][INDEX])
    results, is_broken = torch.full((batch, RESULT_HEAD + MAX_DRAFTS + 1), POISON, dtype=torch.int32), torch.rand(most_logits) < 0.1
    on_device = results.to(device)
    accepted = torch.randint(0, 4, (batch,), dtype=torch.int32)
    inputs = (accepted, expected.num_verified, is_broken, expected.cu_logit_rows)
    ops.pack_results(results, emitted, num_emitted, *inputs)
    ops.pack_results(on_device, *outputs, *(x.to(device) for x in inputs))
    assert torch.equal(on_device.cpu(), results)

    fields[DRAFTER_COUNT, ::3] = 0  # so that room for few rows is taken by several requests
    on[0].copy_(fields)
    first = there.num_drafter_tokens.clone()
    num_rows = reference.prepare_drafter(there, fields, expected, page_table, sizes, None).packed.shape[1] + 4
    there.num_drafter_tokens.copy_(first)
    num_rows = num_rows if room == "plenty" else max(num_rows // 2, 1)
    want_drafter = reference.prepare_drafter(there, fields, expected, page_table, sizes, num_rows)
    drafter = DrafterRows.make(sizes, num_rows, device)
    for tensor in (drafter.packed, drafter.cu_rows, drafter.seq_lens, drafter.last_rows):
        tensor.fill_(-7)
    ops.prepare_drafter(here, on[0], got, on[1], sizes, drafter)
    tap = scratch * sizes.tap_stride
    assert torch.equal(drafter.packed.cpu(), padded(want_drafter.packed, num_rows, [0, 0, scratch * sizes.drafter_stride, tap, tap]))
    for name in ("cu_rows", "seq_lens", "last_rows"):
        assert torch.equal(getattr(drafter, name).cpu(), getattr(want_drafter, name)), name

    is_skipped = torch.randint(0, 3, (batch,), dtype=torch.int32) // 2
    for number in range(MAX_DRAFTS):
        chosen = torch.randint(0, V, (batch,), dtype=torch.int32)
        packed, lens = torch.full((3, batch), POISON), torch.full((batch,), POISON, dtype=torch.int32)
        packed_here, lens_here = packed.to(device), lens.to(device)
        skipped = is_skipped if number else None
        ops.append_draft(packed, lens, there, fields, chosen, page_table, sizes, number, skipped)
        ops.append_draft(
            packed_here, lens_here, here, on[0], chosen.to(device), on[1], sizes, number, None if skipped is None else skipped.to(device)
        )
        assert torch.equal(packed_here.cpu(), packed) and torch.equal(lens_here.cpu(), lens)
    for name in ("tokens", "num_tokens", "drafts", "num_drafts", "num_drafter_tokens"):
        assert torch.equal(getattr(here, name).cpu(), getattr(there, name)), name


def test_values_are_written(device: torch.device) -> None:
    for count in (0, 1, 127, 128, 1000):
        target = torch.full((40, 50), -1, dtype=torch.int32, device=device)
        pairs = torch.stack([torch.randperm(2000)[:count], torch.arange(count)], dim=1).int()
        updates = torch.cat([pairs.flatten(), torch.tensor([5, 77], dtype=torch.int32)])
        ops.write_values(target, updates.to(device), count)
        expected = torch.full((40, 50), -1, dtype=torch.int32)
        ops.write_values(expected, updates, count)
        assert torch.equal(target.cpu(), expected)
