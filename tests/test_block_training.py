"""How block drafters are trained: which blocks, what they see, and DSpark's loss. The rest is in `test_train.py` and `test_trained_drafters.py`."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.errors import ModelError
from tests.families import Case, make_model
from training.data import choose_mask_token
from training.drafters import KINDS, Options
from training.drafters.dflash import see_blocks, spread_taps
from training.objective import Objective
from training.run import Run
from training.target import Target


def test_which_rows_of_a_block_see_what() -> None:
    """The states before its anchor and the whole block, and nothing of another block."""
    seen = see_blocks(torch.tensor([[1, 3], [2, 2]]), 4, 2)
    assert seen.shape == (2, 4, 8)
    for batch, anchors in enumerate(([1, 3], [2, 2])):
        for row in range(4):
            block = row // 2
            assert seen[batch, row].nonzero().flatten().tolist() == [*range(anchors[block]), 4 + 2 * block, 5 + 2 * block]


def test_where_blocks_are_and_what_stands_for_their_drafts() -> None:
    """Each place once, with a state before it and text after its drafts; the token that the text has least, the last of several."""
    run = Run("dspark", Path(), Path(), 1, 64, 12, 1e-3, 0, "l1", 4, 1, None, None, "float32", num_anchors=7)
    anchors = run.draw_anchors(torch.Generator().manual_seed(0))
    assert anchors is not None and sorted(set(anchors.flatten().tolist())) == [*range(1, 8)]
    assert torch.equal(anchors, torch.arange(1, 8).expand(64, -1))
    run.num_anchors = 2
    drawn = run.draw_anchors(torch.Generator().manual_seed(0))
    assert drawn is not None and drawn.shape == (64, 2) and set(drawn.flatten().tolist()) == set(range(1, 8)) and (drawn[:, 0] < drawn[:, 1]).all()
    assert choose_mask_token(np.array([0, 1, 1, 3, 5], dtype=np.uint32), 6) == 4 and choose_mask_token(np.arange(6, dtype=np.uint32), 6) == 5


def test_the_loss_of_dspark_against_its_plain_statement(tmp_path: Path) -> None:
    """A tenth of cross-entropy, nine tenths of L1 distance, and what the confidence head misses of the chance to stand; later drafts count less."""
    make_model(Case("llama"), tmp_path)
    target = Target(tmp_path, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    drafter = KINDS["dspark"](target, Options(3, 1, 40, (1, 2), mask_token_id=9, markov_rank=8))
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    states = target.states(torch.randint(target.vocab_size, (2, 9)), (1, 2))
    states.anchors = torch.tensor([[1, 4], [2, 5]])
    objective = Objective(target, drafter, "l1")
    loss, agreed = objective.average(objective(states))
    wanted, hits = 0.0, []
    for step, rows in enumerate(drafter(target, states)):
        terms, same = [], []
        for b, n in itertools.product(range(2), range(2)):
            place, row = int(states.anchors[b, n]) + step, rows[b, n][None]
            q, p = drafter.score(target, step, row)[0].softmax(0), target.score(states.hidden[b, place][None])[0].softmax(0)
            distance, chance = (q - p).abs().sum(), drafter.judge(row).sigmoid()[0]
            stands = torch.minimum(q, p).sum()
            missed = -(stands * chance.log() + (1 - stands) * (1 - chance).log())
            terms.append(0.1 * -q[states.ids[b, place + 1]].log() + 0.9 * distance + missed)
            same.append(float(q.argmax() == p.argmax()))
        wanted = wanted + math.exp(-step / 4) * torch.stack(terms).mean()
        hits.append(sum(same) / 4)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    assert agreed.tolist() == hits


def test_usual_taps() -> None:
    """Those of published drafters, by what enters them: Qwen3-8B's 36 layers; fewer where the target has few layers."""
    assert spread_taps(36) == (2, 10, 18, 26, 34) and spread_taps(5) == (2, 3) and spread_taps(4) == (2,)
    with pytest.raises(ModelError, match="of the target, which has 3: name others with --taps"):
        spread_taps(3)
