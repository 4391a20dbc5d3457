"""pair_rows and Spread against their twins."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels import ops
from kernels.drafter import pair_rows

EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = [(1, 4096, 4096), (6, 2048, 4096), (33, 8, 520), (3, 5120, 64), (0, 64, 64), (2, 16384, 1024)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "hidden"), SIZES)
def test_pairs(rows: int, width: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Each part is what the norm alone makes of it, to the bit."""
    table, states = torch.randn(97, width, device=device).to(dtype), (3 * torch.randn(rows, hidden, device=device)).to(dtype)
    norms = [(1 + 0.1 * torch.randn(size, device=device)).to(dtype) for size in (width, hidden)]
    token_ids, positions = torch.randint(0, 97, (rows,), device=device), torch.arange(rows, device=device) % 4
    for has_norms, masked, masks_pair, is_first, has_ids in itertools.product(
        ((True, True), (True, False), (False, True), (False, False)), (-1, 0, 2), (False, True), (False, True), (True, False)
    ):
        own = [norm if has_norm else None for norm, has_norm in zip(norms, has_norms)]
        factor = 1.0 if masked else 1.25
        given = (table, token_ids) if has_ids else (table[token_ids], None)
        options = {"eps": EPS, "masked": masked, "masks_pair": masks_pair, "is_hidden_first": is_first, "factor": factor}
        made = pair_rows(*given, states, positions, embedding_norm=own[0], hidden_norm=own[1], **options)
        is_masked = (positions == masked)[:, None]
        embedded = (table[token_ids] * factor).masked_fill(is_masked, 0)
        parts = [embedded if own[0] is None else ops.rms_norm(embedded, own[0], EPS), states if own[1] is None else ops.rms_norm(states, own[1], EPS)]
        expected = torch.cat(parts[::-1] if is_first else parts, dim=1)
        assert torch.equal(made.rows, expected.masked_fill(is_masked, 0) if masks_pair else expected)
        for keeps_normed in (False, True):
            kept = pair_rows(
                *given, states, positions, embedding_norm=own[0], hidden_norm=own[1], **options, keeps_states=True, keeps_normed=keeps_normed
            ).states
            assert (kept is not None and kept.data_ptr() != states.data_ptr()) or not rows
            assert torch.equal(kept, parts[1] if keeps_normed else states)


def test_a_state_that_is_one_for_all_rows(device: torch.device) -> None:
    """As of drafts that are made at once."""
    table, state = torch.randn(9, 64, device=device), torch.randn(1, 64, device=device)
    token_ids, positions = torch.tensor([1, 8, 1], device=device), torch.tensor([[4, 5, 6], [0, 0, 0]], device=device).T[:, 0]
    made = pair_rows(table, token_ids, state.expand(3, -1), positions, keeps_states=True)
    assert torch.equal(made.rows, torch.cat([table[token_ids], state.expand(3, -1)], dim=1))
    assert made.states is not None and torch.equal(made.states, state.expand(3, -1))
    made.states[0] = 0
    assert made.states[1:].any() and state.any()


def test_what_no_kernel_takes(device: torch.device) -> None:
    states, positions = torch.zeros(2, 12, device=device, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="multiples of 8"):
        pair_rows(states, None, states, positions)
    states = torch.zeros(2, 16, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="int64"):
        pair_rows(states, None, states, positions.int())
    with pytest.raises(ValueError, match="contiguous"):
        pair_rows(states.float(), None, states, positions)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "count", "size"), [(1, 32000, 128256), (5, 100, 4096), (3, 7, 1001), (40, 4096, 4096), (0, 3, 9), (2, 1, 8)])
def test_scores(rows: int, count: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    token_ids = torch.randperm(size)[:count]
    scores = torch.randn(rows, count).to(dtype)
    made = ops.Spread(token_ids.to(device), size)(scores.to(device))
    assert torch.equal(made.cpu(), ops.Spread(token_ids, size)(scores))
