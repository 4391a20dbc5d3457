"""The loss of each kind of drafter, and its gradient, against a plain statement: row by row, of whole distributions, in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.families import Case, make_model
from training import objective
from training.drafters import KINDS, Drafter, Options
from training.objective import Objective
from training.target import States, Target

LENGTH = 9
BLOCK = {"taps": (1, 2), "mask_token_id": 9}
CASES: dict[str, tuple[str, str, float, dict[str, Any]]] = {
    "mtp": ("mtp", "target", 0.8, {"layers": 2}),
    "mtp, of the text": ("mtp", "text", 0.8, {}),
    "eagle3, few tokens": ("eagle3", "target", 0.8, {"taps": (1, 2), "few": 2}),
    "eagle3, few tokens, of the text": ("eagle3", "text", 0.8, {"taps": (1, 2), "few": 2}),
    "eagle3, few tokens, by their distance": ("eagle3", "l1", 0.8, {"taps": (1, 2), "few": 2}),
    "dflash": ("dflash", "text", 0.7788, BLOCK),
    "dflash, of the target": ("dflash", "target", 0.7788, BLOCK),
    "medusa": ("medusa", "text", 0.8, {}),
    "hydra": ("hydra", "target", 0.8, {}),
    "mlp_speculator": ("mlp_speculator", "text", 1.0, {"inner": 24}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    make_model(Case("gemma2", config={"head_dim": 16, "final_logit_softcapping": 2.0}), folder)
    return Target(folder, torch.float32, torch.device("cpu"))


def of_row(kind: str, loss: str, q: torch.Tensor, p: torch.Tensor, label: int) -> torch.Tensor:
    """q, p: distributions of drafter and target over the tokens that are drafted; label: which of them the text has next."""
    if loss == "target":
        return (p * (p / q).log()).sum() - (0.3 * q[p.argmax()].log() if kind == "mtp" else 0.0)
    text = -q[label].log()
    return text if loss == "text" else 0.1 * text + 0.9 * (q - p).abs().sum()


def state_plainly(target: Target, drafter: Drafter, states: States, kind: str, loss: str, decay: float) -> tuple[torch.Tensor, list[float]]:
    kept = list(range(target.vocab_size)) if drafter.draft_ids is None else drafter.draft_ids.tolist()
    total, agreed = torch.zeros(()), []
    for step, rows in enumerate(drafter(target, states)):
        losses, hits = [], []
        for b in range(len(states.ids)):
            places = range(step + 1, LENGTH) if states.anchors is None else [int(a) + step for a in states.anchors[b]]
            for number, place in enumerate(places):
                following = int(states.ids[b, place + 1]) if place + 1 < LENGTH else None
                scores = target.score(states.hidden[b, place][None])[0]
                wanted = int(scores.argmax()) if loss == "target" else following
                if wanted not in kept:
                    continue
                logits = drafter.score(target, step, rows[b, place if states.anchors is None else number][None])[0]
                label = -1 if loss == "target" else kept.index(following)
                losses.append(of_row(kind, loss, logits.softmax(0), scores[kept].softmax(0), label))
                hits.append(float(kept[int(logits.argmax())] == int(scores.argmax())))
        total = total + decay**step * torch.stack(losses).mean()
        agreed.append(sum(hits) / len(hits))
    return total, agreed


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_against_their_plain_statement(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, loss, decay, own = CASES[name]
    monkeypatch.setattr(objective, "MAX_LOGITS", 4 * target.vocab_size)  # rows in parts, whose logits are made twice
    few = torch.arange(0, target.vocab_size, own["few"]) if "few" in own else None
    torch.manual_seed(0)
    options = {key: value for key, value in own.items() if key != "few"}
    drafter = KINDS[kind](target, Options(3, draft_ids=few, **options))
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    states = target.states(torch.randint(target.vocab_size, (2, LENGTH)), drafter.layers)
    if drafter.rows_before_drafts is not None:
        states.anchors = torch.tensor([[1, 4], [2, 5]])
    own = Objective(target, drafter, loss)
    found, agreed = own.average(own(states))
    gradients = torch.autograd.grad(found, list(drafter.parameters()), allow_unused=True)
    expected, hits = state_plainly(target, drafter, states, kind, loss, decay)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert agreed.tolist() == pytest.approx(hits)
    for (where, _), one, other in zip(
        drafter.named_parameters(), gradients, torch.autograd.grad(expected, list(drafter.parameters()), allow_unused=True)
    ):
        assert (one is None) == (other is None), where
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=lambda text, where=where: f"{where}: {text}")
