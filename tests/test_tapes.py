"""Steps on CPU that are recorded: what tapes can do again, that nothing else is taken for it, and that answers are the same."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from backend import LLM, SamplingParams
from backend.config import DEFAULT_DRAFTER
from backend.step import tapes
from backend.step.tapes import MOST_BYTES, MOST_ROWS, Bind, Tapes
from backend.step.tensors import StepTensors
from kernels import ops, panels
from kernels.tape import CannotRecord, record, refuse
from tests.conftest import code_prompts
from tests.families import Case, make_model, random_tokens

pytestmark = pytest.mark.skipif(not panels.is_usable(torch.zeros(1, 1)), reason="no kernels are compiled here")
WIDTH = 32


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.inference_mode():
        yield


class Small:
    """What tapes can do, all of it."""

    def __init__(self) -> None:
        self.table, self.norm = torch.randn(50, WIDTH), torch.rand(2 * WIDTH)
        self.first, self.second = panels.PanelWeight(torch.randn(64, 2 * WIDTH)), panels.PanelWeight(torch.randn(WIDTH, 32))
        self.kept, self.calls = torch.zeros(50, WIDTH), 0

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        (token_ids, positions), before = inputs
        x = self.table[token_ids]
        entering = x.clone()
        pair = torch.cat([x, before], dim=-1)
        pair.masked_fill_((positions == 0)[:, None], 0)
        gated = self.first.multiply(ops.rms_norm(pair, self.norm, 1e-5), pair.new_empty(len(pair), 32), panels.GATED)
        self.second.multiply(gated, x, panels.ADD)
        self.kept.index_copy_(0, positions, x)
        return [x, entering, before]


def bound(compute: Any) -> Bind:
    return lambda inputs: lambda: compute(inputs)


def draw(count: int) -> list[torch.Tensor]:
    return [torch.stack([torch.randint(0, 50, (count,)), torch.randperm(50)[:count]]), torch.randn(count, WIDTH)]


def check(own: Tapes, compute: Small, inputs: Sequence[torch.Tensor]) -> None:
    made = [result.clone() for result in own.run("it", bound(compute), inputs, inputs[1].shape[0])]
    kept = compute.kept.clone()
    compute.kept.zero_()
    calls, expected = compute.calls, compute(list(inputs))
    compute.calls = calls
    assert all(torch.equal(*pair) for pair in zip(made, expected)) and torch.equal(kept[inputs[0][1]], compute.kept[inputs[0][1]])


def test_what_is_played_is_what_is_computed() -> None:
    """Of each number of rows, whichever come between."""
    own, compute = Tapes(), Small()
    for _ in range(6):
        for count in (1, 2, 5, 17):
            check(own, compute, draw(count))
    assert compute.calls == 2 * 4, "the first time it is recorded, the second time compared"
    for count in (MOST_ROWS, MOST_ROWS + 1):
        for _ in range(4):
            check(own, compute, draw(min(count, 50)))
    assert compute.calls == 2 * 4 + 2 + 4, "of more rows it is computed as ever"


def test_steps_that_record_say_so() -> None:
    """They take longer than any will again."""
    own, compute = Tapes(), Small()
    told = []
    for count in (2, 2, 2, 3, 2, 3, 3):
        own.run("it", bound(compute), draw(count), count)
        told.append((own.take_news(), own.take_news()))
    assert told == [(is_new, False) for is_new in (True, True, False, True, False, True, False)]


def test_memory_is_that_of_what_lives_at_a_time() -> None:
    weight = panels.PanelWeight(torch.eye(WIDTH))

    def compute() -> list[torch.Tensor]:
        x = given.clone()
        for _ in range(40):
            x = weight.multiply(x, torch.empty_like(x))
        return [x]

    given = torch.randn(3, WIDTH)
    tape, (made,) = record(compute)
    gc.collect()
    assert len(tape) == 41 and len(tape.blocks.all) <= 3
    given.copy_(torch.randn(3, WIDTH))
    tape.play()
    torch.testing.assert_close(made, given)


@pytest.mark.parametrize(
    "compute",
    [
        lambda inputs: [inputs[0] + 1],
        lambda inputs: [inputs[0].clone().mul_(2)],
        lambda inputs: [inputs[0].clone()] if float(inputs[0].sum()) > 1e9 else [inputs[0].clone(), inputs[0].clone()],
        lambda inputs: [inputs[0][:, None].expand(-1, 3, -1).reshape(-1, WIDTH)],
        lambda inputs: [torch.from_numpy(inputs[0].numpy() * 2)],
        lambda inputs: [refuse("a kernel that no tape knows"), inputs[0].clone()][1:],
    ],
    ids=["addition", "in place", "a look at a number", "a view that copies", "by NumPy", "an unknown kernel"],
)
def test_what_cannot_be_recorded_is_computed(compute) -> None:
    own = Tapes()
    for _ in range(4):
        x = torch.randn(2, WIDTH)
        assert all(torch.equal(*pair) for pair in zip(own.run("it", bound(compute), [x], 2), compute([x]), strict=True))
    with pytest.raises(CannotRecord):
        record(lambda: compute([torch.randn(2, WIDTH)]))
    assert own._refused == {"it"} and not own._all, "it is not tried again"


def test_what_cannot_be_recorded_is_computed_once_all_the_same() -> None:
    """What it sends to other ranks they get once."""
    calls: list[int] = []
    own = Tapes()

    def compute(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(1)
        return [inputs[0] + 1]

    for number in range(1, 4):
        own.run("it", bound(compute), [torch.randn(2, WIDTH)], 2)
        assert len(calls) == number


def test_what_is_not_the_same_again_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """The second time, where something was written that no tape saw."""
    own = Tapes()

    def compute(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        out = inputs[0].clone()
        ctypes.memset(out.data_ptr(), 0, 4)
        return [out]

    for _ in range(3):
        x = torch.randn(2, WIDTH)
        (made,) = own.run("it", bound(compute), [x], 2)
        assert made[0, 0] == 0 and torch.equal(made.flatten()[1:], x.flatten()[1:])
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "it is not used" in caplog.text


def test_large_results_are_not_kept() -> None:
    own, calls = Tapes(), []

    def compute(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(len(inputs[0]))
        return [inputs[0].clone()]

    for count in (1, 2, 1, 2, 1, 2):
        own.run("it", bound(compute), [torch.randn(count, MOST_BYTES // 16 + 1)], count)
    assert calls == [1, 2, 1, 2, 2], "of two rows there are too many"


def test_tapes_end_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number, and by what all of them keep."""
    for name, value in (("MOST_TAPES", 3), ("MOST_BYTES_OF_ALL", 1000)):
        own = Tapes()
        monkeypatch.setattr(tapes, name, value)
        for count in [*range(1, 20)] * 3:
            x = torch.randn(count, WIDTH)
            assert torch.equal(own.run("it", lambda inputs: lambda: [inputs[0].clone()], [x], count)[0], x)
        assert 0 < len(own._all) <= 4 and own._num_bytes < 4000
        monkeypatch.undo()


def test_a_row_that_does_not_exist_is_an_error() -> None:
    table = torch.randn(50, WIDTH)
    ids = torch.tensor([3, 49])
    tape, (made,) = record(lambda: [table[ids]])
    tape.play()
    assert torch.equal(made, table[ids])
    ids[1] = 50
    with pytest.raises(IndexError, match="call 1 of 1 of a recorded step, GATHER, was given a row that does not exist"):
        tape.play()


@pytest.mark.parametrize("method", ["none", "eagle3", "mtp"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_those_of_steps_that_are_not_recorded(method: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    own_drafter = {"num_speculative_tokens": 3, **({"model": str(DEFAULT_DRAFTER)} if method == "eagle3" else {})}
    speculative = {"method": method, "adaptive": False, **(own_drafter if method != "none" else {})}
    prompts, params = code_prompts(5, (20, 200), seed=9), SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True, logprobs=2)
    options = {"device": "cpu", "kv_cache_memory": "16MiB", "max_batch_size": 4, "speculative_config": speculative}
    recorded = LLM(**options)
    found = recorded.generate(prompts, params, use_tqdm=False)
    own = recorded.engine.worker.program._tapes
    assert own is not None and not own._refused and sum(tape.is_checked for tape in own._all.values()) > 1
    gc.collect()
    kept = [step for step in gc.get_objects() if isinstance(step, StepTensors)]
    assert all(step.rows is None and not step.hidden.numel() for step in kept), "a tape keeps no states of the step that it was recorded in"
    assert (method == "eagle3" and not temperature) <= bool(kept)
    monkeypatch.setattr(tapes, "MOST_MULTIPLIED", 0)
    plain = LLM(**options)
    assert plain.engine.worker.program._tapes is None
    for one, other in zip(found, plain.generate(prompts, params, use_tqdm=False), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids and one.outputs[0].logprobs == other.outputs[0].logprobs


HEADS = {"head_dim": 16}


@pytest.mark.parametrize(
    ("case", "is_recorded"),
    [
        (Case("llama", config=HEADS | {"attention_bias": True}), True),
        (Case("mistral", config=HEADS | {"sliding_window": 11}), True),
        (Case("qwen2", config=HEADS), True),
        (Case("qwen3", config=HEADS), True),
        (Case("phi3", config=HEADS), True),
        (Case("ernie4_5", config=HEADS), True),
        (Case("gemma2", config=HEADS), False),
        (Case("olmoe", config={"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2}), False),
    ],
    ids=str,
)
def test_families(case: Case, is_recorded: bool, tmp_path: Path) -> None:
    """What they share is recorded, other parts are computed: that both are right is tested of each family where its logits are."""
    make_model(case, tmp_path)
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", kv_cache_memory="4MiB", speculative_config={"method": "none"})
    llm.generate([{"prompt_token_ids": random_tokens(9)}], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True), use_tqdm=False)
    own = llm.engine.worker.program._tapes
    assert own is not None and (own._refused == set()) == is_recorded == any(tape.is_checked for tape in own._all.values())
