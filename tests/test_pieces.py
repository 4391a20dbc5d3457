"""Numbers of rows that forwards with prompts are captured for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend.step.graphs import Graphs
from backend.step.pieces import COARSE, FEW, FINE, TILE, row_counts, whole_rows
from backend.step.program import Program
from backend.step.tensors import StepShape


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


# -- memory of captured forwards, of which a later graph may have been given a part ------------------------------------


def overlapping(num_rows: int, num_wanted: int) -> tuple[Any, Any]:
    """States of a forward, as `program.forward` leaves them, and those of a graph that begin a row further on in the same memory."""
    memory = torch.arange(4.0 * (num_rows + 1)).view(-1, 4)
    return memory[:num_rows], memory[1 : 1 + num_wanted]


def test_states_for_the_verdict_are_those_of_the_forward() -> None:
    hidden, own = overlapping(8, 4)
    rows, program = torch.tensor([0, 3, 4, 7]), SimpleNamespace(_wants_few=lambda shape: False)
    wanted = hidden[rows].clone()
    step = SimpleNamespace(shape=None, hidden=hidden, rows=SimpleNamespace(logit_rows=rows))
    Program.leave_to(program, step, SimpleNamespace(hidden=own))  # type: ignore[arg-type]
    assert torch.equal(own, wanted)


def test_states_that_are_followed_eagerly_stay_where_they_are() -> None:
    """Also where a graph of steps that decode has as many rows."""
    hidden, own = overlapping(4, 4)
    wanted, shape = hidden.clone(), StepShape(4, 1, prompt_lens=(1,), prompt_seq_lens=(9,))
    step = SimpleNamespace(shape=shape, hidden=torch.empty(0))
    program = SimpleNamespace(forward=lambda own: setattr(own, "hidden", hidden))
    graphs = SimpleNamespace(_program=program, _tensors={(4, 1, False): SimpleNamespace(hidden=own)})
    Graphs._run_eagerly(graphs, ("forward", 4, 1, ()), step)  # type: ignore[arg-type]
    assert step.hidden is hidden and torch.equal(hidden, wanted)
