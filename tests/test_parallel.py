"""Tensor parallelism by processes, on CPU: the tokens of one rank, and one clear error when a rank is gone or cannot be."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import signal
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend import SamplingParams, devices, follower, rank_hello
from backend import engine as engine_module
from backend import group as group_module
from backend.config import EngineConfig
from backend.core import Delta
from backend.engine import Engine
from backend.errors import ConfigError, EngineError, ModelError
from backend.follower import Steps
from backend.group import CHECK_ENDS_VARIABLE, CHECK_EVERY, Group, RanksDiffer, Verdicts, check_verdicts
from backend.models import embedding
from backend.models.embedding import Embedding, splits_embedding
from backend.models.layers import Part, Weights
from backend.models.loader import DummyCheckpoint
from backend.models.spec import Projection
from backend.parallel import ranks as ranks_of
from backend.parallel.ranks import Ranks
from backend.parallel.ring import NAME, NUM_SLOTS, SLOT_WORDS, PlanRing
from backend.quantization.dense import DenseLinear
from backend.rank_hello import Hello, describe_rank, describe_self, digest_sources
from backend.speculative_config import HEAD_METHODS
from backend.step import program
from backend.step.plan import StepPlan
from backend.step.shared_rows import choose_own_rows
from backend.step.worker import Begun, Launched, Results, Worker
from deploy.demo import free_ports
from kernels import scattered
from tests.conftest import code_prompts
from tests.families import Case, make_model, random_tokens
from tests.ranks import as_threads
from tests.small import LLM, SMALL_MODEL, memory_of
from tests.test_drawn_drafts import KINDS, Targets, make_drafter, make_targets
from tests.test_latents import DEEPSEEK
from tests.test_mixtures import on_ranks
from tests.test_own_drafters import DEEPSEEK_NAMES, Own, make_checkpoint

PROMPTS = code_prompts(3, (60, 300), seed=31)
SPECULATION = {"method": "mtp", "num_speculative_tokens": 4, "num_model_steps": 2, "request_methods": ["suffix"], "adaptive": False}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"method": "none"}, {"temperature": 0.0, "logprobs": 1}),
    ({"method": "ngram", "num_speculative_tokens": 5}, {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.1, "logit_bias": {9: 1.5}}),
    ({"method": "mtp", "mtp_strategy": "with_ngram"}, {"temperature": 0.0, "bad_words": ["self"]}),
    ({"method": "suffix"}, {"temperature": 0.9, "seed": 5, "top_p": 0.9, "min_p": 0.02}),
    ({"method": "mtp", "verify_strategy": "rejection"}, {"temperature": 0.8, "seed": 4}),
    ({"method": "mtp"}, {"temperature": 0.8, "seed": 6, "structured_outputs": {"regex": r"def [a-z_]+\(self\):(\n    [a-z]+ = [0-9]+){9}"}}),
]


def answers(llm: LLM, cases: Sequence[tuple[dict[str, Any], dict[str, Any]]] = CASES) -> list[list[list[int]]]:
    results = []
    for choice, sampling in cases:
        params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
        results.append([r.outputs[0].token_ids for r in llm.generate(PROMPTS, params, speculative=choice, use_tqdm=False)])
    return results


@pytest.fixture(scope="module")
def llm_one() -> LLM:
    return LLM(speculative_config=SPECULATION, num_threads=1)


@pytest.fixture(scope="module")
def expected(llm_one: LLM) -> list[list[list[int]]]:
    return answers(llm_one)


def test_tokens_are_those_of_one_rank(llm_one: LLM, expected: list[list[list[int]]]) -> None:
    """Every method and strategy, with chunks and prefix hits; ranks that decided differently would end the engine."""
    llm = LLM(speculative_config=SPECULATION, tensor_parallel_size=2, num_threads=1, max_num_batched_tokens=256, max_batch_size=8)
    assert answers(llm) == expected == answers(llm)
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.num_held == 0
    assert llm.engine.worker.model.heads[1] * 2 == llm_one.engine.worker.model.heads[1], "each rank has its own heads"
    llm.close()  # at once: a rank that waits looks for plans all the time


def test_four_ranks_whose_pages_run_out(llm_one: LLM, expected: list[list[list[int]]]) -> None:
    """Two and two have the same head of keys and values. In one batch: several completions, penalties, log-probabilities, and requests set back."""
    with as_threads():
        llm = LLM(
            speculative_config=SPECULATION, tensor_parallel_size=4, num_threads=1, max_num_batched_tokens=256, kv_cache_memory=memory_of(20, True)
        )
    assert answers(llm, CASES[-2:]) == expected[-2:]
    choices = [{"method": "none"}, {"method": "mtp"}, {"method": "suffix"}, {"method": "mtp", "mtp_strategy": "with_ngram"}]
    sampled = {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    params = [SamplingParams(max_tokens=24, n=2, seed=i, logprobs=1, ignore_eos=True, **(sampled if i % 2 else {})) for i in range(len(choices))]
    results = [own.generate([*PROMPTS, PROMPTS[0]], params, speculative=choices, use_tqdm=False) for own in (llm_one, llm)]
    found, wanted = ([out for result in own for out in result.outputs] for own in results)
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
    chances = [[own.logprob for out in outputs for own in out.logprobs or ()] for outputs in (found, wanted)]
    assert len(chances[0]) == 2 * 24 * len(choices) and chances[0] == pytest.approx(chances[1], abs=1e-4)
    engine = llm.engine
    assert engine.metrics.preemptions and engine.scheduler.num_cached_tokens > 300
    engine.scheduler.check()
    heads, of_all = engine.worker.model.heads, llm_one.engine.worker.model.heads
    assert (heads[0] * 4, heads[1] * 2) == (of_all[0], of_all[1])
    llm.close()


def test_a_full_batch_over_four_ranks(tmp_path: Path) -> None:
    """256 requests at once, half of whose clients leave early, in whatever order."""
    make_model(Case("llama"), tmp_path)
    answers: list[dict[int, list[int]]] = []
    for size in (1, 4):
        values = {"num_threads": 1, "kv_cache_memory": "16MiB", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
        with as_threads():
            llm = LLM(str(tmp_path), parallel_config={"tensor_parallel_size": size}, max_batch_size=256, **values)
        engine, found = llm.engine, {i: [] for i in range(256)}
        for i in range(256):
            params = SamplingParams(max_tokens=8 if i % 2 else 100, seed=i, ignore_eos=True)
            engine.submit(random_tokens(4 + i % 9, i), params, lambda delta, own=found[i]: own.extend(delta.token_ids), request_id=str(i))
        while engine.step():
            if all(len(found[i]) == 8 for i in range(1, 256, 2)):
                for i in range(0, 256, 2):
                    engine.cancel(str(i))
        engine.scheduler.check()
        assert engine.scheduler.pool.num_held == 0
        answers.append({i: own[:8] for i, own in found.items()})
        llm.close()
    assert answers[0] == answers[1] and all(len(own) == 8 for own in answers[0].values())


def test_ranks_choose_a_share_of_the_rows(llm_one: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose rows lie on several ranks, of all kinds: where one needs all rows, all of the step's go to all. Each has some of the
    embedding's columns, too."""
    monkeypatch.setattr(ranks_of, "MIN_SHARED_ROWS", 2)
    monkeypatch.setattr(embedding, "MIN_SAVED_BYTES", 0)
    size, shared, kinds = 4, [], []
    monkeypatch.setattr(program, "choose_own_rows", lambda *own: shared.append((own[4], len(own[0]))) or choose_own_rows(*own))
    with as_threads():
        llm = LLM(speculative_config=SPECULATION, tensor_parallel_size=size, num_threads=1)
    for chosen in (CASES, [case for case in CASES[1:4] if "bad_words" not in case[1]]):
        requests = [(p, c, {**s, "ignore_eos": True, "max_tokens": 10, "min_tokens": i}) for c, s in chosen for i, p in enumerate(PROMPTS)]
        prompts, choices, values = zip(*requests)
        params = [SamplingParams(**own) for own in values]
        found, wanted = (
            [r.outputs[0].token_ids for r in own.generate(prompts, params, speculative=choices, use_tqdm=False)] for own in (llm, llm_one)
        )
        assert found == wanted
        kinds.append({(rows, share) for rows, share in shared})
    assert llm.engine.worker.model._embedding.is_split
    llm.close()
    assert len(kinds[1] - kinds[0]) > 4 and any(rows % size for rows, _ in kinds[1])
    assert all(share == -(-rows // size) for rows, share in kinds[1])


def test_masks_follow_to_ranks_that_launch_ahead(llm_one: LLM) -> None:
    """A request's masks come to them when its step is under way already; in one batch with the others."""
    requests = [(prompt, choice, {**sampling, "ignore_eos": True, "max_tokens": 16}) for choice, sampling in CASES for prompt in PROMPTS[:2]]
    with as_threads():
        ahead = LLM(speculative_config=SPECULATION, tensor_parallel_size=2, num_threads=1, async_scheduling=True)
    sent, send = [], ahead.engine.group.send_masks
    ahead.engine.group.send_masks = lambda masks: sent.append(len(masks)) or send(masks)
    prompts, choices, params = zip(*requests)
    expected, found = (
        [r.outputs[0].token_ids for r in llm.generate(prompts, [SamplingParams(**own) for own in params], speculative=choices, use_tqdm=False)]
        for llm in (llm_one, ahead)
    )
    ahead.close()
    assert found == expected and len(sent) > 5


def test_a_model_with_experts_latents_and_its_own_drafter(tmp_path: Path) -> None:
    """On two ranks heads are split, experts spread; latents and the drafter are every rank's."""
    make_checkpoint(Own(Case("deepseek_v3", config=DEEPSEEK), DEEPSEEK_NAMES, is_norm_recycled=True), tmp_path)
    prompts = [{"prompt_token_ids": random_tokens(30, seed)} for seed in range(3)]
    choices = [({"method": "none"}, {"temperature": 0.0}), ({"method": "ngram"}, {"temperature": 0.0}), ({"method": "mtp"}, {"temperature": 0.0})]
    choices.append(({"method": "mtp", "verify_strategy": "rejection"}, {"temperature": 0.9, "seed": 5}))
    answers: list[list[list[int]]] = []
    for size in (1, 2):
        with as_threads():
            llm = LLM(
                str(tmp_path),
                parallel_config={"tensor_parallel_size": size, "expert_parallel": True},
                num_threads=1,
                kv_cache_memory="2MiB",
                speculative_config={"method": "mtp", "num_speculative_tokens": 2, "adaptive": False},
            )
        answers.append([])
        for choice, sampling in choices:
            params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
            answers[-1] += [r.outputs[0].token_ids for r in llm.generate(prompts, params, speculative=choice, use_tqdm=False)]
        llm.close()
    assert answers[0] == answers[1]
    assert answers[0][:3] == answers[0][3:6] == answers[0][6:9]


TREES: dict[str, dict[str, Any]] = {
    "grown": {"tree_nodes": 9, "tree_top_k": 3, "num_speculative_tokens": 3},
    "fixed": {"tree_paths": [[0], [1], [0, 0], [0, 1], [1, 0]], "num_speculative_tokens": 2},
}


SPLIT = [
    *((kind, None, size) for kind, size in zip(KINDS, itertools.cycle((2, 4)))),
    ("EAGLE-3 of few tokens", "grown", 2),
    ("", "fixed", 4),
]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return make_targets(tmp_path_factory)


@pytest.mark.parametrize(("kind", "tree", "size"), SPLIT)
def test_a_drafter_on_ranks(kind: str, tree: str | None, size: int, targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is taken (of a tree, those of one path), so that the answers are what the drafter makes on several ranks and on one. Medusa's
    and Hydra's heads are every rank's, others are split; "": the target's own memory drafts. Of chains' target the embedding is split, too."""
    monkeypatch.setattr(embedding, "MIN_SAVED_BYTES", 2**30 if tree else 0)
    target, speculative = make_drafter(kind, targets, tmp_path / "drafter") if kind else (targets["attending"][1], {"method": "token_recycling"})
    config = {"num_speculative_tokens": 3, "accept_policy": "accept_all", "adaptive": False, **speculative} | (TREES[tree] if tree else {})
    prompts = [{"prompt_token_ids": random_tokens(30, seed)} for seed in range(3)]
    answers: list[list[list[int]]] = []
    for number in (1, size):
        if kind and config["method"] not in HEAD_METHODS:
            config["draft_tensor_parallel_size"] = number
        with as_threads():
            parallel = {"tensor_parallel_size": number}
            llm = LLM(str(target), parallel_config=parallel, num_threads=1, kv_cache_memory="2MiB", speculative_config=config)
        results = llm.generate(prompts, SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True), use_tqdm=False)
        answers.append([r.outputs[0].token_ids for r in results])
        llm.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("size", "count"), [(2, 301), (3, 4096), (2, 9), (4, 9), (5, 3), (2, 32001), (4, 32000)])
def test_vocabularies_of_any_size_are_split(size: int, count: int) -> None:
    """As many tokens on each rank, all of them together once."""
    expected = torch.stack([torch.arange(count), -torch.arange(count)])
    found = on_ranks(size, lambda ranks: (ranks.vocabulary(count), ranks.gather_vocabulary(expected[:, ranks.vocabulary(count)], count)))
    assert all(torch.equal(whole, expected) for _, whole in found)
    assert len({own.stop - own.start for own, _ in found}) == 1


@pytest.mark.parametrize("scale", [None, 3.5])
@pytest.mark.parametrize(("size", "width"), [(2, 64), (3, 40), (4, 24)])
def test_an_embedding_is_split_by_its_columns(size: int, width: int, scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree whether another is the same, wherever it differs; none keeps more than its own part."""
    monkeypatch.setattr(embedding, "MIN_SAVED_BYTES", 0)
    weight, token_ids = torch.randn(50, width), torch.randint(50, (17,))
    other = weight.clone()
    other[3, width - 1] += 1
    of_all = weight if scale is None else weight * scale

    def look(ranks: Ranks) -> Any:
        own = Embedding(weight, ranks, scale, is_tied=False)
        assert own._weight.untyped_storage().nbytes() == own._weight.nbytes < weight.nbytes
        return own(token_ids), own.is_same(of_all), own.is_same(other if scale is None else other * scale)

    for rows, is_same, is_other_same in on_ranks(size, look):
        assert torch.equal(rows, of_all[token_ids]) and (is_same, is_other_same) == (True, False)


def test_which_embeddings_are_split() -> None:
    """Those of which each rank saves a gigabyte: of one that is the head's weights, too, a rank keeps rows besides."""
    size_70b, size_8b = 128256 * 8192 * 2, 128256 * 4096 * 2
    assert [splits_embedding(size_70b, size, False) for size in (1, 2, 4, 8)] == [False, False, True, True]
    assert [splits_embedding(size_70b, size, True) for size in (1, 2, 4, 8)] == [False, False, False, True]
    assert not splits_embedding(size_8b, 8, False)


def test_a_rank_keeps_its_share_of_the_head_alone() -> None:
    """Not the memory of the others', which it was cut from where it is used (on CPU layers copy). Of a projection by itself, too."""
    weights = Weights(DummyCheckpoint(".", torch.device("cpu"), torch.float32), torch.float32, torch.device("meta"), Ranks(1, 2))
    one = Projection("one", 64, 16)
    for linear in (weights.head(one), weights.split_rows([one], [Part("one", 64)])):
        assert isinstance(linear, DenseLinear)
        assert linear.weight.shape == (32, 16) and linear.weight.untyped_storage().nbytes() == linear.weight.nbytes


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_shares_of_large_sums(size: int) -> None:
    """Each rank adds some rows, all of them together once, from whole tiles on; what goes so depends on nothing but the shape."""
    for num_rows in (128 * size, 128 * size + 1, 1400, 2049, 4095, 8192):
        shares = scattered.cut_shares(num_rows, size)
        assert [row for share in shares for row in range(share.start, share.stop)] == list(range(num_rows))
        assert all(share.start % scattered.TILE == 0 and share.stop > share.start for share in shares)
    width = -(-scattered.MIN_BYTES // (2 * 128 * size * 8)) * 8
    assert scattered.can_scatter(torch.empty(128 * size, width, dtype=torch.bfloat16), size)
    assert not scattered.can_scatter(torch.empty(128 * size - 1, width + 128, dtype=torch.bfloat16), size)  # some rank would have none
    assert not scattered.can_scatter(torch.empty(128 * size, width - 8, dtype=torch.bfloat16), size)
    assert not scattered.can_scatter(torch.empty(256 * size, 4 * width).t(), size)
    most = scattered.MAX_SHARE_BYTES // 4096
    assert scattered.can_scatter(torch.empty(most * size, 1024), size) and not scattered.can_scatter(torch.empty(most * size + 128, 1024), size)


def test_how_long_an_exchange_may_wait_can_change() -> None:
    """While ranks load it is long: one may read its part from a slower disk."""
    has_ended = threading.Event()

    def exchange(ranks: Ranks) -> bool:
        if ranks.rank:
            return has_ended.wait(30)
        ranks.limit(timedelta(seconds=0.1))
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            ranks.least(0, torch.device("cpu"))
        has_ended.set()
        return True

    assert on_ranks(2, exchange) == [True, True]


def test_a_rank_that_is_killed_ends_every_open_request() -> None:
    llm = LLM(tensor_parallel_size=2, num_threads=1)
    deltas: list[Delta] = []
    ended = threading.Event()

    def sink(delta: Delta) -> None:
        deltas.append(delta)
        if delta.is_final:
            ended.set()

    engine = llm.engine
    engine.start()
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True), sink, request_id="open")
    assert engine._group is not None
    (child,) = engine._group._children.values()
    os.kill(child.pid, signal.SIGKILL)
    assert ended.wait(60)
    assert isinstance(deltas[-1].error, EngineError) and not engine.is_healthy
    assert "rank 1 of 2 has ended: exit status -9" in str(deltas[-1].error)
    llm.close()
    assert child.poll() == -signal.SIGKILL


def test_what_a_step_makes_without_a_rank_is_nobodys() -> None:
    """On a GPU such a step ends, with whatever numbers."""
    with as_threads():
        llm = LLM(tensor_parallel_size=2, num_threads=1)
    engine, group = llm.engine, llm.engine.group
    deltas: list[Delta] = []
    assert group is not None
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True), deltas.append, request_id="open")
    while not deltas:
        engine.step()
    num_tokens, go_on = sum(len(delta.token_ids) for delta in deltas), engine.worker.go_on

    def lose_meanwhile(*arguments: Any) -> Launched:
        launched = go_on(*arguments)
        group.switchboard.lose(1, "a cut")
        return launched

    engine.worker.go_on = lose_meanwhile  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="rank 1 of 2 has ended"):
        engine.step()
    assert sum(len(delta.token_ids) for delta in deltas) == num_tokens
    llm.close()


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 5: .* which does not divide by it"):
        Ranks(0, 5).part(12, "num_attention_heads")
    shares = [Ranks(r, 8).part(2, "num_key_value_heads", can_repeat=True) for r in range(8)]
    assert shares == [slice(r // 4, r // 4 + 1) for r in range(8)], "heads are replicated"
    with pytest.raises(ConfigError, match="tensor_parallel_size 8: num_attention_heads is 2, which does not divide by it"):
        Ranks(0, 8).part(2, "num_attention_heads")
    with pytest.raises(ConfigError, match="rank is 2; the group has ranks 0 to 1"):
        Ranks(2, 2)


def test_a_group_that_cannot_be_leaves_nothing_behind() -> None:
    def left() -> set[str]:
        files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return {name for name in files if NAME in name} | {str(pid) for pid in followers()}

    before = left()
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3: .* does not divide by it"):
        LLM(tensor_parallel_size=3, num_threads=1)
    assert left() == before


def missing_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(folder / "missing")


def too_few_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(config: EngineConfig, rank: int) -> str:
        raise ConfigError(f"this machine has 0 GPUs, and rank {rank} is on cuda:0")

    monkeypatch.setattr(follower, "device_of_rank", refuse)
    return str(SMALL_MODEL)


@pytest.mark.parametrize(
    ("model_of", "message"),
    [(missing_model, "ModelError: model folder .*missing does not exist"), (too_few_gpus, "ConfigError: this machine has 0 GPUs")],
)
def test_rank_0_hears_why_another_host_s_rank_cannot_come(
    model_of: Callable[[Path, pytest.MonkeyPatch], str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not that it did not come in time."""
    (port,), model = free_ports(1), model_of(tmp_path, monkeypatch)
    place = {"tensor_parallel_size": 2, "nnodes": 2, "master": f"127.0.0.1:{port}"}
    config = EngineConfig.from_dict({"model": model, "parallel_config": {**place, "node_rank": 1}})
    spec = describe_rank(config, 1, config.parallel_config.meeting_place, None, reports=True)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(follower.run_rank, spec, lambda report: None, lambda why: None)
        with pytest.raises(ModelError, match=f"rank 1 of 2 has ended: {message}"):
            Group(EngineConfig.from_dict({"model": str(SMALL_MODEL), "parallel_config": place}))
        assert isinstance(ending.exception(30), ModelError | ConfigError)


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was waited for: a name may stand for an address that no other host reaches."""
    monkeypatch.setattr(group_module, "MEET_SECONDS", 1.0)
    (port,) = free_ports(1)
    place = {"tensor_parallel_size": 3, "nnodes": 3, "master": f"localhost:{port}"}
    with pytest.raises(ModelError, match=rf"rank 1, 2 of 3 did not come to (127\.0\.0\.1|::1), port {port}, within 1 s"):
        Group(EngineConfig.from_dict({"model": str(SMALL_MODEL), "parallel_config": place}))


def test_other_ranks_hear_why_rank_0_cannot_load(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = queue.Queue[str]()

    def refuse(*arguments: Any) -> None:
        raise ModelError("no room for rank 0's part")

    def start(rank: int, spec: dict[str, Any]) -> None:
        def run() -> None:
            with contextlib.suppress(RuntimeError):
                follower.run_rank(spec, lambda report: None, reasons.put)

        threading.Thread(target=run, daemon=True).start()

    monkeypatch.setattr(engine_module, "load_parts", refuse)
    config = EngineConfig.from_dict({"model": str(SMALL_MODEL), "num_threads": 1, "parallel_config": {"tensor_parallel_size": 2}})
    with pytest.raises(ModelError, match=r"^no room for rank 0's part$"):
        Engine(config, greet=start)
    assert reasons.get(timeout=30) == "rank 0: no room for rank 0's part"


def test_ranks_say_what_they_compute_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bits of a sum depend on it, and some sums every rank makes by itself. Of threads all take as many as the rank with the fewest."""

    def describe(rank: int, **values: Any) -> Hello:
        return describe_self(EngineConfig.from_dict({"model": str(SMALL_MODEL), "device": "cpu", **values}), rank)

    own = describe(0)
    assert not own.differences(describe(1, num_threads=3))
    assert own.differences(describe(1, single_thread_tokens=3)) == "single_thread_tokens None on rank 0, 3 on rank 1"
    assert not own.differences(describe(1, cpu_kernels="any"))  # what comes of that is said beside it
    monkeypatch.setattr(devices, "find_library", lambda: None)
    found = re.fullmatch(r"processor cpu \(.*\) on rank 0, cpu \(.*, kernels of its own: none\) on rank 1", own.differences(describe(1)))
    assert found, "kernels in torch add up in another order"


def test_ranks_of_other_sources_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts amid an upgrade: what is released anew has a new number, what is not has the same, and other kernels."""
    config = EngineConfig.from_dict({"model": str(SMALL_MODEL), "device": "cpu"})
    found = []
    for number, (name, content) in enumerate([("linear.cpp", "a"), ("linear.cpp", "b"), ("pool.h", "b"), ("linear.cpp.o", "b")]):
        for folder in ("backend", "kernels/cpu"):
            (tmp_path / str(number) / folder).mkdir(parents=True)
        (tmp_path / str(number) / "kernels/cpu" / name).write_text(content)
        found.append(digest_sources(tmp_path / str(number)))
    assert len(set(found)) == 4, "contents and names count; what is made of them does not"
    assert found[3] == digest_sources(tmp_path / "none")
    own = describe_self(config, 0)
    assert not own.differences(describe_self(config, 1))
    monkeypatch.setattr(rank_hello, "PROJECT", tmp_path / "0")
    assert f"sources {found[0]}, torch" in own.differences(describe_self(config, 1))


def test_ranks_compute_with_as_many_threads(tmp_path: Path) -> None:
    make_model(Case("llama"), tmp_path)

    def count(ranks: Ranks) -> Worker:
        values = {"model": str(tmp_path), "device": "cpu", "kv_cache_memory": "1MiB", "num_threads": 3 - ranks.rank}
        return Worker(EngineConfig.from_dict(values | {"parallel_config": {"tensor_parallel_size": 2}}), ranks)

    for worker in on_ranks(2, count):
        with worker._threads_for(10_000):
            assert torch.get_num_threads() == 2


def followers() -> list[int]:
    """Processes of other ranks that this one has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                is_own = f"PPid:\t{os.getpid()}\n" in (folder / "status").read_text()
                if is_own and b"backend.follower" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found


class TestRing:
    def test_messages_of_any_size_come_in_order_to_every_reader(self) -> None:
        ring = PlanRing(2)
        other = PlanRing(2, ring.path)
        messages = [np.arange(n, dtype=np.int32) for n in (1, 0, SLOT_WORDS, SLOT_WORDS + 1, 3 * SLOT_WORDS)]
        for message in messages:
            ring.write(message, fail)
        for reader in range(2):
            for message in messages:
                np.testing.assert_array_equal(other.read(reader, fail), message)
        other.close()
        ring.close()

    def test_a_full_ring_waits_for_the_slowest_reader(self) -> None:
        ring = PlanRing(2)
        for _ in range(NUM_SLOTS):
            ring.write(np.ones(1, np.int32), fail)
        ring.read(0, fail)
        with pytest.raises(EngineError, match="rank 1"):
            ring.write(np.ones(1, np.int32), fail)
        ring.read(1, fail)
        ring.write(np.ones(1, np.int32), fail)
        ring.close()


def fail() -> None:
    raise EngineError("rank 1 of 2 has ended")


@pytest.mark.parametrize(("num_steps", "wrong"), [(CHECK_EVERY, 100), (CHECK_EVERY, 0), (2 * CHECK_EVERY, CHECK_EVERY - 1), (3 * CHECK_EVERY, 700)])
def test_ranks_that_decide_differently_are_an_error(monkeypatch: pytest.MonkeyPatch, num_steps: int, wrong: int) -> None:
    """The checksum is over all rows up to the step before the last one launched, and compared every so often. One rank may have booked more."""
    first, second, third = Verdicts(), Verdicts(), Verdicts()
    for step in range(num_steps):
        rows = np.full((2, 3), step, np.int32)
        if step < num_steps - 1:
            first.add(rows)
        second.add(rows + (step == wrong))
        third.add(rows)
    device, ranks = torch.device("cpu"), Ranks(0, 2)
    others = [second]

    def gather(self: Ranks, x: torch.Tensor) -> torch.Tensor:
        own = others[0].since_check(num_steps - 1)
        return torch.stack([x, torch.tensor(own[-len(x) :])])

    monkeypatch.setattr(Ranks, "gather", gather)
    check_verdicts(ranks, first, num_steps - 1, device)
    with pytest.raises(RanksDiffer, match=rf"decided differently in step {wrong}, .* after step {num_steps - 2}") as error:
        check_verdicts(ranks, first, num_steps, device)
    assert error.value.step == wrong
    others[0] = third
    check_verdicts(ranks, first, num_steps, device)


@pytest.mark.parametrize(("max_tokens", "wrong", "checks_ends"), [(300, 200, "0"), (24, 10, "1")], ids=["by number of steps", "at a request's end"])
def test_a_rank_that_decides_differently_is_found(
    max_tokens: int, wrong: int, checks_ends: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its step is named, with the plan of it, and every open request has an error."""
    monkeypatch.setenv(CHECK_ENDS_VARIABLE, checks_ends)
    make_model(Case("llama", config={"max_position_embeddings": 512}), tmp_path)
    llm = LLM(str(tmp_path), tensor_parallel_size=2, num_threads=1, kv_cache_memory="2MiB", speculative_config={"method": "none"})
    worker, begin, counts = llm.engine.worker, llm.engine.worker.begin, [0]
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3, ignore_eos=True)

    def begin_wrongly(plan: StepPlan) -> Begun:
        if counts[0] == wrong:
            worker.table.seeds.fill_(5)  # of rank 0 alone
        counts[0] += 1
        return begin(plan)

    worker.begin = begin_wrongly  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=rf"the ranks decided differently in step {wrong // 10}[0-9], "):
        llm.generate({"prompt_token_ids": random_tokens(30)}, params, use_tqdm=False)
    assert "was: 1 rows, 0 of prompts" in caplog.text
    llm.close()


class TestSteps:
    """Of a rank whose steps take as long as the test says."""

    @staticmethod
    def make() -> tuple[Steps, list[str], set[int]]:
        """The steps, what happened to them in order, and those that are done."""
        log: list[str] = []
        done: set[int] = set()

        class Launcher:
            device = torch.device("cpu")

            def begin(self, plan: StepPlan) -> Begun:
                if plan.awaits_masks:
                    log.append("begin")
                return Begun(plan, None)  # type: ignore[arg-type]

            def go_on(self, begun: Begun, masks: np.ndarray) -> Launched:
                number = sum(line.startswith("launch") for line in log)
                log.append(f"launch {number}")

                def read() -> Results:
                    log.append(f"read {number}")
                    return Results([], np.full((1, 4), number, np.int32))

                return Launched(read, lambda: number in done)

        class Noted:
            def note_done(self) -> None:
                log.append("done")

        return Steps(Launcher(), Ranks(), Noted()), log, done  # type: ignore[arg-type]

    def test_the_next_is_launched_while_one_is_under_way(self) -> None:
        steps, log, _ = self.make()
        for _ in range(3):
            steps.launch(StepPlan())
        assert log == ["launch 0", "launch 1", "read 0", "done", "launch 2"]
        steps.finish()
        assert log[5:] == ["read 1", "done", "read 2", "done"]

    def test_one_that_awaits_masks_goes_on_with_them(self) -> None:
        steps, log, done = self.make()
        steps.launch(StepPlan())
        steps.launch(StepPlan(awaits_masks=True))
        done.add(0)
        assert not steps.look() and log == ["launch 0", "begin", "read 0", "done"]
        steps.go_on(np.zeros((2, 3), np.int32))
        assert steps.look() and log[4:] == ["launch 1"]

    def test_what_is_compared_is_booked_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At a request's end rank 0 has booked so many; a later one may be under way."""
        steps, log, _ = self.make()
        monkeypatch.setattr(Ranks, "gather", lambda self, x: log.append(f"gather {x.tolist()}") or torch.stack([x, x]))
        steps.launch(StepPlan())
        steps.compare(1)
        first = zlib.crc32(np.full((1, 4), 0, np.int32).tobytes())
        assert log == ["launch 0", "read 0", "done", f"gather {[first]}"]
        steps.launch(StepPlan())
        steps.launch(StepPlan())
        steps.compare(2)
        assert log[4:] == ["launch 1", "launch 2", "read 1", "done", f"gather {[zlib.crc32(np.full((1, 4), 1, np.int32).tobytes(), first)]}"]

    def test_one_that_is_done_is_booked_while_no_plan_comes(self) -> None:
        steps, log, done = self.make()
        steps.launch(StepPlan())
        assert steps.look() and log == ["launch 0"]
        done.add(0)
        assert not steps.look() and log[1:] == ["read 0", "done"]
        steps.launch(StepPlan())
        steps.launch(StepPlan())
        done.add(2)  # never before the one ahead of it
        assert steps.look() and log[3:] == ["launch 1", "launch 2"]
        done.add(1)
        assert not steps.look() and log[5:] == ["read 1", "done", "read 2", "done"]
