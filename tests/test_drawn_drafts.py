"""What `rejection` relies on, of every drafter: a draft was drawn from the distribution that the verifier is given, with noise of its own.

Then answers follow the target's distribution, whatever the drafter is: test_drafters.py counts those of two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from backend import SamplingParams
from backend.engine import Engine
from backend.step.distributions import Distributions
from kernels import ops, reference
from tests import test_block_drafters as blocks
from tests import test_draft_heads as heads
from tests import test_eagle as eagle
from tests.drafting import serve
from tests.families import Case, make_model, random_tokens
from tests.test_drafters import Service
from tests.test_drafters import make_engine as make_remote
from tests.test_own_drafters import MIMO_NAMES, Own, make_checkpoint

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.1, "min_p": 0.02},
    {"temperature": 0.9},
]
FIRST_SEED, NUM_DRAWN = 11, 3
"""The last request is one whose drafts have the target's own noise: it is beside the others."""


@dataclass
class Handed:
    """To the verifier: each draft of the requests whose drafts are drawn."""

    probs: list[torch.Tensor] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    @property
    def num_certain(self) -> int:
        return sum(float(own[draft]) == 1 for own, draft in zip(self.probs, self.drafts))

    def count_wrong(self) -> int:
        """Drafts that are not those which the noise of their places draws."""
        probs, drafts = torch.stack(self.probs), torch.tensor(self.drafts)
        torch.testing.assert_close(probs.sum(dim=1), torch.ones(len(probs)))
        noise = reference.gumbel_noise(torch.tensor(self.seeds), torch.tensor(self.positions), probs.shape[1], reference.DRAFT_STREAM)
        return int(((probs.log() + noise).argmax(dim=1) != drafts).sum())

    def take(self) -> tuple[list[tuple[int, int, int]], torch.Tensor]:
        """Seed, position and token of each draft, one request's after the other's, and what they were drawn from; forgets them."""
        order = sorted(range(len(self.drafts)), key=self.seeds.__getitem__)
        found = [(self.seeds[i], self.positions[i], self.drafts[i]) for i in order], torch.stack([self.probs[i] for i in order])
        for own in (self.probs, self.drafts, self.seeds, self.positions):
            own.clear()
        return found


def watch_handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    verify, found = ops.verify_rejection, Handed()

    def watched(
        probs: torch.Tensor,
        drafts: torch.Tensor,
        lengths: torch.Tensor,
        drawn_from: torch.Tensor | None,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for row, seed in enumerate(seeds.tolist()):
            for place in range(int(lengths[row]) if seed - FIRST_SEED < NUM_DRAWN else 0):
                draft = int(drafts[row, place])
                certain = torch.zeros(probs.shape[-1]).index_fill_(0, torch.tensor(draft), 1.0)
                found.probs.append(certain if drawn_from is None else drawn_from[row, place].clone())
                found.drafts.append(draft)
                found.seeds.append(seed)
                found.positions.append(int(positions[row]) + place)
        return verify(probs, drafts, lengths, drawn_from, seeds, positions)

    monkeypatch.setattr(ops, "verify_rejection", watched)
    return found


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    return watch_handed(monkeypatch)


def answer(engine: Engine, method: str, form: dict[str, str] | None = None, **choice: Any) -> None:
    for number, own in enumerate(SAMPLED):
        params = SamplingParams(max_tokens=10, seed=FIRST_SEED + number, ignore_eos=True, structured_outputs=form, **own)
        strategy = "rejection" if number < NUM_DRAWN else "target_match"
        speculative = {"method": method, "verify_strategy": strategy, **choice}
        prompt = random_tokens(50 + number, number)
        engine.submit(prompt, params, lambda _: None, request_id=str(number), speculative=speculative)
    while engine.step():
        pass


Targets = dict[str, tuple[Any, Path]]
"""Models and their folders: of drafters that attend, and of heads."""


def make_targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("attending", "heads")}
    cases = {"attending": eagle.TARGET, "heads": heads.TARGET}
    return {name: (make_model(cases[name], folder), folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return make_targets(tmp_path_factory)


def make_mtp(folder: Path) -> None:
    folder.mkdir()
    make_checkpoint(
        Own(Case("qwen2"), MIMO_NAMES, num_modules=2, is_hidden_first=True, is_norm_recycled=True, architecture="MiMoForCausalLM"), folder
    )


def make_draft_model(folder: Path, **config: Any) -> None:
    folder.mkdir()
    make_model(Case("qwen3", config=config), folder)


def of_eagle(kind: eagle.Kind) -> tuple[str, str, Callable[[Path, Any], object]]:
    return kind.method, "attending", lambda folder, _: eagle.save_drafter(kind, eagle.make_weights(kind), folder)


def of_block(kind: blocks.Kind) -> tuple[str, str, Callable[[Path, Any], object]]:
    return kind.method, "attending", lambda folder, _: blocks.save_drafter(kind, blocks.make_weights(kind), folder)


def of_head(number: int) -> tuple[str, str, Callable[[Path, Any], object]]:
    kind = heads.KINDS[number]
    return kind.method, "heads", lambda folder, model: heads.make(kind, folder, model)


KINDS: dict[str, tuple[str, str, Callable[[Path, Any], object]]] = {
    "mtp": ("mtp", "", lambda folder, _: make_mtp(folder)),
    "EAGLE": of_eagle(eagle.KINDS[10]),
    "EAGLE-3 of few tokens": of_eagle(eagle.KINDS[0]),
    "P-EAGLE": of_eagle(eagle.KINDS[8]),
    "draft_model": ("draft_model", "attending", lambda folder, _: make_draft_model(folder)),
    "PARD": ("draft_model", "attending", lambda folder, _: make_draft_model(folder, pard_token=305, vocab_size=310)),
    "DFlash": of_block(blocks.KINDS[0]),
    "DSpark of few tokens": of_block(blocks.KINDS[7]),
    "DSpark with a state": of_block(blocks.KINDS[6]),
    "Medusa of few tokens": of_head(2),
    "Hydra": of_head(3),
    "Hydra++": of_head(6),
    "MLP speculator": of_head(7),
    "DFlash with a window": of_block(blocks.WINDOWED[0]),
    "EAGLE-3 with a window": of_eagle(eagle.WINDOWED[0]),
}


def make_drafter(kind: str, targets: Targets, folder: Path) -> tuple[Path, dict[str, str]]:
    """The target's folder, and what names the drafter."""
    method, name, make = KINDS[kind]
    model, target = targets[name] if name else (None, folder)
    make(folder, model)
    return target, {"method": method, "model": str(folder)} if name else {"method": method}


def make_engine(kind: str, targets: Targets, folder: Path, **options: Any) -> Engine:
    target, speculative = make_drafter(kind, targets, folder)
    return serve(target, {"async_scheduling": list(KINDS).index(kind) % 2 == 0}, **speculative, **options).engine


@pytest.fixture(scope="module")
def engine(targets: Targets, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    options = {"num_model_steps": 3, "num_speculative_tokens": 5, "request_methods": ["ngram", "suffix"], "min_ngram_size": 1}
    return make_engine("mtp", targets, tmp_path_factory.mktemp("own") / "drafter", **options)


def check(handed: Handed) -> None:
    """Some distributions leave one token: of sure drafters, by the filters."""
    assert len(handed.drafts) > 40 and 8 * handed.num_certain < len(handed.drafts)
    assert not handed.count_wrong()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mtp"])
def test_drafts_are_drawn_from_what_the_verifier_is_given(kind: str, targets: Targets, handed: Handed, tmp_path: Path) -> None:
    answer(make_engine(kind, targets, tmp_path / "drafter"), KINDS[kind][0])
    check(handed)


@pytest.mark.parametrize("form", [None, {"regex": "[a-z ]{20,}"}], ids=["free", "form"])
def test_so_are_those_of_modules_that_also_follow_a_form(form: dict[str, str] | None, engine: Engine, handed: Handed) -> None:
    answer(engine, "mtp", form)
    check(handed)


def test_so_are_those_of_a_drafter_in_another_process(handed: Handed) -> None:
    """Its distributions come with them."""
    answer(make_remote(Service()), "mtp")
    check(handed)


@pytest.mark.parametrize("strategy", ["with_ngram", "with_suffix"])
def test_those_of_a_lookup_are_certain(strategy: str, engine: Engine, handed: Handed) -> None:
    """Behind drafts that were drawn, or in their place."""
    answer(engine, "mtp", mtp_strategy=strategy)
    assert 0 < handed.num_certain < len(handed.drafts) - 10
    assert not handed.count_wrong()


def put_another_temperature(drawn_from: torch.Tensor) -> torch.Tensor:
    return drawn_from.sqrt() / drawn_from.sqrt().sum(dim=-1, keepdim=True)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "those of other places": lambda drawn_from: drawn_from.roll(1, dims=1),
    "those of other requests": lambda drawn_from: drawn_from.roll(1, dims=0),
    "another temperature": put_another_temperature,
    "the target's noise": lambda drawn_from: drawn_from,
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_tests_above_catch(name: str, engine: Engine, handed: Handed, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Distributions._read_drawn
    monkeypatch.setattr(Distributions, "_read_drawn", lambda *arguments: CHANGES[name](read(*arguments)))
    if name == "the target's noise":
        monkeypatch.setattr(ops, "DRAFT_STREAM", ops.SAMPLE_STREAM)
    answer(engine, "mtp")
    assert 4 * handed.count_wrong() > len(handed.drafts)


def test_noise_of_each_kind_is_of_its_own() -> None:
    streams = (ops.SAMPLE_STREAM, ops.DRAFT_STREAM, reference.ACCEPT_STREAM, reference.RECOVER_STREAM)
    numbers = [reference.philox(torch.tensor([FIRST_SEED]), torch.tensor([50]), 64, stream).tolist() for stream in streams]
    assert len({number for (own,) in numbers for number in own}) == 4 * 64
