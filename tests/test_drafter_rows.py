"""What a model drafter's layers take in, and the spreading of its scores: by plain statements of both."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.drafter import pair_rows

ROWS, VOCABULARY, EPS = 5, 11, 1e-6


def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("has_table", [True, False])
@pytest.mark.parametrize("masks_pair", [True, False])
@pytest.mark.parametrize("is_hidden_first", [True, False])
@pytest.mark.parametrize("norms", [(True, True), (True, False), (False, True), (False, False)])
def test_an_embedding_and_a_state_side_by_side(norms: tuple[bool, bool], is_hidden_first: bool, masks_pair: bool, has_table: bool) -> None:
    table, states = torch.randn(VOCABULARY, 6), torch.randn(ROWS, 10)
    token_ids, positions = torch.tensor([3, 0, 10, 3, 7]), torch.tensor([0, 1, 2, 0, 1])
    weights = [torch.rand(size) if has_norm else None for size, has_norm in zip((6, 10), norms)]
    given = states.clone()
    embedded = 1.5 * table[token_ids]
    source = (table, token_ids, 1.5) if has_table else (embedded, None, 1.0)
    options = {"embedding_norm": weights[0], "hidden_norm": weights[1], "eps": EPS, "masked": 1, "masks_pair": masks_pair}
    made = pair_rows(*source[:2], given, positions, **options, is_hidden_first=is_hidden_first, factor=source[2])
    parts = [norm(embedded, weights[0]), norm(states, weights[1])]
    is_masked = (positions == 1)[:, None]
    parts[0] = parts[0].masked_fill(is_masked, 0)
    parts[1] = parts[1].masked_fill(is_masked, 0) if masks_pair else parts[1]
    torch.testing.assert_close(made.rows, torch.cat(parts[::-1] if is_hidden_first else parts, dim=1))
    assert made.states is None
    for keeps_normed in (False, True):
        kept = pair_rows(*source[:2], given, positions, **options, keeps_states=True, keeps_normed=keeps_normed, factor=source[2])
        assert kept.states is not None
        torch.testing.assert_close(kept.states, norm(states, weights[1]) if keeps_normed else states)
        kept.states.zero_()  # as layers change it in place
        assert torch.equal(given, states) and kept.rows.any()


def test_nothing_is_masked_unless_it_is_asked_for() -> None:
    table, states = torch.ones(3, 4), torch.ones(3, 4)
    made = pair_rows(table, torch.tensor([0, 1, 2]), states, torch.tensor([0, 1, 2]), masks_pair=True)
    assert torch.equal(made.rows, torch.ones(3, 8))


def test_scores_of_few_tokens_become_scores_of_all() -> None:
    spread, scores = ops.Spread(torch.tensor([7, 0, 4]), 9), torch.tensor([[1.0, 2.0, 3.0], [-1.0, float("-inf"), 0.0]])
    low = float("-inf")
    expected = [[2.0, low, low, low, 3.0, low, low, 1.0, low], [low, low, low, low, 0.0, low, low, -1.0, low]]
    assert spread(scores).tolist() == expected
    assert spread(scores[:0]).shape == (0, 9)
    with pytest.raises(ValueError, match=r"\[2, 2\] must be \[R, 3\]"):
        spread(scores[:, :2])
