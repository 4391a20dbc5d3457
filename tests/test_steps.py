"""What steps do beside giving the right tokens: who takes part in them, who drafts, how small a number still acts."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backend import SamplingParams, precedence
from backend.chunk_limit import ChunkLimit
from backend.core import Delta
from backend.engine import Engine
from backend.planned import PlannedStep
from backend.step.bad_words import BadWords
from kernels.request_state import Admission
from kernels.request_table import RequestTable
from tests.conftest import EVERY_METHOD, code_prompts, greedy
from tests.models import make_tiny
from tests.small import LLM


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PlannedStep, int]]:
    """Every step that is planned from now on, with the steps that are under way meanwhile."""
    from backend.planner import Planner

    steps: list[tuple[PlannedStep, int]] = []
    engines: list[Engine] = []
    plan, step = Planner.plan, Engine._step

    def noted_step(engine: Engine) -> bool:
        engines[:] = [engine]
        return step(engine)

    def noted_plan(planner: Planner, *arguments) -> PlannedStep:
        steps.append((plan(planner, *arguments), len(engines[0]._under_way)))
        return steps[-1][0]

    monkeypatch.setattr(Engine, "_step", noted_step)
    monkeypatch.setattr(Planner, "plan", noted_plan)
    return steps


def submit(llm: LLM, name: str, ids: list[int], params: SamplingParams, **choice) -> list[Delta]:
    deltas: list[Delta] = []
    llm.engine.submit(ids, params, deltas.append, request_id=name, speculative=choice or None)
    return deltas


def drain(llm: LLM) -> None:
    while llm.engine.step():
        pass
    llm.engine.scheduler.check()


@pytest.fixture(scope="module")
def texts(llm_all) -> list[list[int]]:
    return [llm_all.engine.tokenizer.encode(p)[:60] for p in code_prompts(6, (300, 500), seed=31)]


@pytest.mark.parametrize("host", [{"method": "suffix"}, {"method": "mtp", "mtp_strategy": "with_suffix"}], ids=["suffix", "mtp with suffix"])
def test_a_request_that_waits_for_the_host_sits_out_alone(llm_ahead, texts, planned, host) -> None:
    """The host looks at every token before it drafts for this one; the others take part in each step, and each is planned ahead."""
    others = [f"other {i}" for i in range(4)]
    for name, ids in zip(others, texts):
        submit(llm_ahead, name, ids, greedy(40), method="ngram", num_speculative_tokens=2)
    slow = submit(llm_ahead, "host", texts[5], greedy(40), **host)
    drain(llm_ahead)
    assert slow[-1].finish_reason == "length"
    spans = {name: [i for i, (step, _) in enumerate(planned) if name in {e.request.request_id for e in step.entries}] for name in [*others, "host"]}
    for name in others:
        assert spans[name] == list(range(spans[name][0], spans[name][-1] + 1)), f"{name} sat a step out"
    own = spans["host"]
    assert all(b - a == 2 for a, b in zip(own[1:], own[2:]) if b <= max(spans[name][-1] for name in others)), "every other step is its own"
    shared = [in_flight for step, in_flight in planned if len(step.entries) > 1]
    assert sum(in_flight == 1 for in_flight in shared) >= len(shared) - 2, "a step was planned with nothing under way"


FREE, FORCED = {"regex": "[a-z =0-9.()\\n]{300}"}, {"regex": "(self_width_and_height, ){40}"}


@pytest.mark.parametrize("form", [FREE, FORCED], ids=["free", "forced"])
def test_a_request_with_a_grammar_sits_out_only_where_much_is_forced(texts, planned, form) -> None:
    """Its masks come when its step is under way already; forced tokens are drafts, and for these it waits."""
    llm = LLM(speculative_config={"method": "none", "adaptive": False}, async_scheduling=True)  # by measured times forced tokens may not be worth it
    others = {f"other {i}" for i in range(3)}
    for name, ids in zip(sorted(others), texts):
        submit(llm, name, ids, greedy(50))
    formed = submit(llm, "formed", texts[5], greedy(36, structured_outputs=form))
    drain(llm)
    assert sum(len(d.token_ids) for d in formed) == 36
    own = [i for i, (step, _) in enumerate(planned) if "formed" in {e.request.request_id for e in step.entries}]
    late = [i for i in own if planned[i][0].plan.awaits_masks]
    if form is FREE:
        assert own == list(range(own[0], own[-1] + 1)) and late == own[1:]
    else:
        assert len(own) < 18 and all(b - a == 2 for a, b in zip(own[-3:], own[-2:])) and own[-3:] != late[-3:]
    for step, _ in planned[own[1] : own[-1]]:
        assert others <= {e.request.request_id for e in step.entries}


@pytest.mark.parametrize("count", [2, 5])
def test_who_waits_for_the_host_does_not_run_in_two_halves(llm_ahead, texts, planned, count) -> None:
    """Prompts of several lengths end in different steps. From then on all are in each."""
    for number in range(count):
        submit(llm_ahead, str(number), texts[number] + texts[0][: 9 * number], greedy(30), method="suffix")
        llm_ahead.engine.step()
    drain(llm_ahead)
    sizes = [len(step.entries) for step, _ in planned][count + 1 :]
    assert sizes[0] == count and sizes == sorted(sizes, reverse=True), "as many take part in each as have not ended"


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_model_drafts_begin_with_the_first_token_after_cold_prompts(llm_all, planned, is_ahead) -> None:
    """Prompts that take many steps beside requests that decode already: the drafter computes each chunk in the chunk's own step."""
    llm = LLM(
        speculative_config={"method": "mtp", "num_speculative_tokens": 3, "adaptive": False},
        async_scheduling=is_ahead,
        max_num_batched_tokens=96,
        max_batch_size=16,
    )
    ids = [i for p in code_prompts(24, (700, 900), seed=37) for i in llm_all.engine.tokenizer.encode(p)]
    for number in range(8):
        submit(llm, str(number), ids[300 * number : 300 * (number + 1)], greedy(24))
    drain(llm)
    rows: Counter[str] = Counter()
    for step, _ in planned:
        for entry, verified in zip(step.entries, step.verified):
            if entry.is_decoding and entry.max_drafts:
                rows["drafts" if verified.sources else "none"] += 1
    assert rows["drafts"] > 60 and rows["drafts"] >= 0.95 * rows.total(), rows


@pytest.mark.parametrize("budget", [8, 16])
def test_the_budget_of_known_tokens_caps_no_drafts(llm_ahead, texts, planned, budget) -> None:
    """Every request of a full batch drafts as many as it wants, however small max_num_batched_tokens is."""
    llm = LLM(speculative_config={**EVERY_METHOD, "num_speculative_tokens": 5}, max_batch_size=8, max_num_batched_tokens=budget)
    for number in range(8):
        submit(llm, str(number), texts[number % 6][number : number + 6], greedy(240))
    drain(llm)
    full = [step for step, _ in planned if sum(e.is_decoding for e in step.entries) == 8]
    assert len(full) >= 3
    for step in full:
        wanted = [min(5, e.request.params.max_tokens - (e.begin - len(e.request.prompt_token_ids)) - 2) for e in step.entries]
        assert [e.max_drafts for e in step.entries] == [max(0, count) for count in wanted]
        assert max(len(v.sources) for v in step.verified) == max(e.max_drafts for e in step.entries)


@pytest.fixture(scope="module")
def llm_chunked() -> LLM:
    return LLM(speculative_config=EVERY_METHOD, max_batch_size=4, max_num_batched_tokens=16, async_scheduling=True)


EVERYTHING = {
    "bad words": ({"bad_words": ["self", "return x"]}, {}),
    "log-probabilities": ({"logprobs": 3}, {}),
    "penalties and biases": ({"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {9: 1.5}, "min_tokens": 4, "min_p": 0.1}, {}),
    "rejection": ({"temperature": 0.9, "seed": 1}, {"verify_strategy": "rejection"}),
    "topp": ({"temperature": 0.9, "seed": 1, "top_p": 0.9}, {"verify_strategy": "topp"}),
    "scores of the prompt": ({"echo": True, "logprobs": 2}, {"method": "none"}),
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_step_of_chunks_alone(llm_chunked, texts, name) -> None:
    """No request of it chooses a token, whatever it asks for."""
    sampling, choice = EVERYTHING[name]
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
    deltas = submit(llm_chunked, name, texts[0], params, **choice)
    drain(llm_chunked)
    assert deltas[-1].error is None and sum(len(d.token_ids) for d in deltas) >= 8


def test_chunks_of_prompts_are_cut_to_max_step_ms(llm_all, texts, planned, monkeypatch) -> None:
    """Beside requests that decode; how the size is chosen from measured times: test_chunk_limit."""
    seen = []
    monkeypatch.setattr(ChunkLimit, "choose", lambda self, num_decoding: 32 if num_decoding else None)
    monkeypatch.setattr(ChunkLimit, "observe", lambda self, count, seconds: seen.append((count, seconds)))
    llm = LLM(max_step_ms=5.0, max_num_batched_tokens=512)
    first = submit(llm, "first", texts[0], greedy(100))
    while len(first) < 3:
        llm.engine.step()
    ids = [i for text in texts[1:] for i in text]
    submit(llm, "second", ids, greedy(2))
    while not any(e.request.request_id == "second" and e.is_decoding for step, _ in planned for e in step.entries):
        llm.engine.step()
    chunks = [e.num_tokens for step, _ in planned for e in step.entries if e.request.request_id == "second" and not e.is_decoding]
    assert sum(chunks) == len(ids) and set(chunks[:-1]) == {32} and chunks[-1] <= 32
    assert [count for count, _ in seen if count] == [len(texts[0]), *chunks] and all(seconds > 0 for _, seconds in seen)
    llm.engine.end_all(RuntimeError("enough"))


# -- numbers that a rounded logit would lose ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two words are equally likely wherever one stands, at a score of about 20 that bfloat16 keeps in steps of 0.125; no other comes near."""
    from safetensors.torch import load_file, save_file

    path = make_tiny(tmp_path_factory.mktemp("tied"), vocabulary=12)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()  # what follows depends on nothing
    state = torch.zeros(32)
    state[0] = 1.0
    weights["model.embed_tokens.weight"][:] = state
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][[3, 7], 0] = 20 / 32**0.5  # the norm makes the state sqrt(32) long
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_small_penalties_and_biases_act(tied, dtype, is_ahead) -> None:
    """From the first token on: it follows the same rule as the rest."""
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}
    llm = LLM(str(tied), dtype=dtype, speculative_config=speculative, kv_cache_memory="4MiB", async_scheduling=is_ahead)
    params = {
        "plain": {},
        "presence": {"presence_penalty": 0.05},
        "frequency": {"frequency_penalty": 0.05},
        "bias": {"logit_bias": {7: 0.05}},
        "bias against": {"logit_bias": {3: -0.05}},
        "repetition": {"repetition_penalty": 1.002},
        "both": {"logit_bias": {7: 0.05}, "presence_penalty": 0.03},
    }
    expected = {
        "plain": [3] * 6,
        "presence": [3, 7, 3, 3, 3, 3],  # once both were there, they are even again
        "frequency": [3, 7, 3, 7, 3, 7],
        "bias": [7] * 6,
        "bias against": [7] * 6,
        "repetition": [7, 3, 3, 3, 3, 3],  # 3 is in the prompt
        "both": [7] * 6,
    }
    for method in ("none", "ngram"):
        deltas = {
            name: submit(llm, name, [3, 3, 1] if name == "repetition" else [1, 2, 1], greedy(6, **own), method=method) for name, own in params.items()
        }
        drain(llm)
        found = {name: [t for d in own for t in d.token_ids] for name, own in deltas.items()}
        assert found == expected


@pytest.mark.parametrize("params", [{"logit_bias": {5: 40.0}}, {"bad_words": ("w3", "w7")}, {"min_tokens": 3, "stop_token_ids": (3, 7)}], ids=str)
def test_the_first_token_follows_the_rule_of_the_rest(tied, params) -> None:
    llm = LLM(str(tied), dtype="float32", kv_cache_memory="4MiB")
    deltas = submit(llm, "first", [1, 2, 1], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, **params))
    drain(llm)
    tokens = [t for d in deltas for t in d.token_ids]
    assert len(tokens) == 3 and len(set(tokens)) == 1 and not set(tokens) & {3, 7}


def test_bad_words_cost_what_those_of_the_requests_in_the_table_take() -> None:
    """Not what a request before them had: many words, and long ones."""
    table = RequestTable(2, 16, 4, 8, torch.device("cpu"))
    table.admit([Admission(index, [1, 2, 3], num_prompt_tokens=3, max_total_tokens=16, is_greedy=True) for index in range(2)])
    words, indices, cu = BadWords(table), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)

    def ban() -> tuple[list[list[int]], int]:
        """Tokens that each row may not choose, and the numbers of the largest tensor on the way."""
        logits, sizes = torch.zeros(2, 8), [0]

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                made = func(*args, **(kwargs or {}))
                sizes.append(made.numel() if isinstance(made, torch.Tensor) else 0)
                return made

        with Watch():
            words.ban(logits, indices, cu, 1)
        return [row.isinf().nonzero()[:, 0].tolist() for row in logits], max(sizes)

    words.put(1, [(3, 6), (4,)])
    found, size = ban()
    assert found == [[], [4, 6]]
    words.put(0, [(1, 2, 3, 5), (2, 2, 3, 7), *((3, 3, i % 8) for i in range(200))])
    assert ban()[0] == [[5], [4, 6]]
    words.put(0, ())
    again, most = ban()
    assert again == found and most < 2 * size


def test_others_give_way_while_a_step_is_launched(monkeypatch) -> None:
    """Until it is over, or for so long; nobody waits where none is launched."""
    own, log = precedence.Precedence(), []
    monkeypatch.setattr(precedence, "MOST_SECONDS", 60.0)
    own.give_way()

    def run() -> None:
        own.give_way()
        log.append("other")

    with pytest.raises(ZeroDivisionError), own.hold():
        other = threading.Thread(target=run)
        other.start()
        other.join(0.2)
        log.append("launch")
        raise ZeroDivisionError
    other.join(60)
    assert log == ["launch", "other"]
    monkeypatch.setattr(precedence, "MOST_SECONDS", 0.01)
    with own.hold():
        own.give_way()
