"""Answers follow the target's distribution jointly on the GPU too, by what a model drafter drew itself: eagerly and captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import make_tiny
from tests.test_drafters import VOCABULARY, answers, exact, fit, make_drafters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), VOCABULARY, hidden_size=128, head_dim=64)


@pytest.fixture(scope="module")
def drafters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_drafters(tiny, tmp_path_factory)


@pytest.mark.parametrize("strategy", ["rejection", "target_match"])
@pytest.mark.parametrize("name", ["bad", "fair"])
def test_answers_follow_the_targets_distribution(tiny: Path, drafters: dict[str, Path], name: str, strategy: str) -> None:
    counts, rate = answers(tiny, drafters[name], {"verify_strategy": strategy}, True, "cuda")
    assert fit(counts, exact(tiny)) > 1e-3
    assert 0.02 < rate < 0.98, "drafts that are all accepted or none test nothing"
