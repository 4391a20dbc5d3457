"""Numbers of rows that forwards with prompts are captured for."""

from __future__ import annotations

import pytest

from backend.step.pieces import COARSE, FEW, FINE, TILE, row_counts, whole_rows


@pytest.mark.parametrize("most", [1, 2, 8, 100, 300, 1024, 2000, 4096])
def test_they_go_up_to_the_most_and_no_step_is_wide(most):
    counts = row_counts(most)
    assert counts == sorted(set(counts)) and counts[-1] == most
    for less, more in zip(counts, counts[1:]):
        assert more - less <= (max(8, FINE) if more <= FEW else COARSE)


def test_prompts_are_cut_to_numbers_that_are_among_them():
    counts = set(row_counts(4096))
    for num_rows in range(TILE, 4097):
        whole = whole_rows(num_rows)
        assert whole in counts and 0 <= num_rows - whole < COARSE
    assert [whole_rows(n) for n in (0, 127, 128, 1023, 1024, 1279, 1280)] == [0, 0, 128, 896, 1024, 1024, 1280]
