"""Every model drafter on the GPU in float32: where all drafts are taken, answers are what the CPU's drafter makes; else they are the target's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL, EngineConfig
from backend.devices import on_stream
from backend.drafters.calls import LIKELIEST, OWN_NOISE, SHARED_NOISE, DraftCall, DraftReply
from backend.drafters.recurrent import RecurrentDrafter
from backend.drafters.remote_service import RemoteDrafterService
from backend.engine import Engine
from backend.models import load_model
from backend.models.mtp import Mtp
from backend.parallel.ranks import Ranks
from kernels import _load
from tests import test_block_drafters as blocks
from tests import test_draft_heads as heads
from tests import test_eagle as eagle
from tests.conftest import code_prompts
from tests.drafting import serve
from tests.families import Case, make_model, random_tokens
from tests.small import SMALL_DRAFTER, SMALL_MODEL
from tests.test_drafters import Service, collect

OPTIONS = {"page_size": 16, "max_batch_size": 8, "max_num_batched_tokens": 64, "kv_cache_memory": "64MiB"}
DRAFT_MODELS = [
    Case("qwen3", config={"head_dim": 64, "vocab_size": 250}),
    Case("qwen3", "PARD", {"head_dim": 64, "pard_token": 245, "vocab_size": 250}),
]
CAPPED = Case("gemma2", "capped scores, a window", {"head_dim": 64, "sliding_window": 9, "vocab_size": 250})
EAGLES = [kind for kind in eagle.KINDS if kind.name in ("speculators", "norm before fc, two layers", "3.1", "EAGLE, two layers, HASS")]
EAGLES += [kind for kind in eagle.KINDS if kind.name.startswith("P-EAGLE")]
EAGLES += [kind for kind in eagle.WINDOWED if kind.name in ("a window", "P-EAGLE, a window smaller than its masks")]
BLOCKS = [*blocks.KINDS, *(blocks.WINDOWED[i] for i in (0, 5, 6, 8, 9))]
HEADS = [kind for kind in heads.KINDS if kind.name in ("Medusa, few tokens", "Hydra, an archive", "Hydra++", "speculator, tied")]


def ask(llm: LLM, speculative: dict[str, Any] | None = None, **sampling: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
    prompts = [{"prompt_token_ids": random_tokens(length, length)} for length in (37, 9, 70)]
    return [r.outputs[0].token_ids for r in llm.generate(prompts, params, speculative=speculative, use_tqdm=False)]


def make(kind: Any, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A target, and what names the drafter."""
    target, folder, method = tmp_path / "target", tmp_path / "drafter", "draft_model" if isinstance(kind, Case) else kind.method
    owner: Any = next((module for module in (eagle, blocks) if isinstance(kind, module.Kind)), heads)
    model = make_model(owner.TARGET, target)
    if isinstance(kind, Case):
        make_model(kind, folder)
    elif owner is heads:
        heads.make(kind, folder, model)
    else:
        owner.save_drafter(kind, owner.make_weights(kind), folder)
    return target, {"method": method, "model": str(folder)}


@pytest.mark.parametrize("kind", [*DRAFT_MODELS, *EAGLES, *HEADS, *BLOCKS], ids=str)
def test_a_drafter_is_the_cpus(kind: Any, tmp_path: Path) -> None:
    """While its shapes run eagerly, and once they are captured."""
    compare(*make(kind, tmp_path))


@pytest.mark.parametrize("kind", [*DRAFT_MODELS, CAPPED, *EAGLES, *HEADS, *BLOCKS], ids=str)
def test_a_drafter_in_half_precision(kind: Any, tmp_path: Path) -> None:
    """On a Hopper GPU its way through prompts is captured with its attention then, where scores are not capped. All drafts are taken, so that answers
    are the drafter's; two tokens that are as likely as bfloat16 can tell may come in each other's place."""
    target, speculative = make(kind, tmp_path)
    llm = serve(target, {**OPTIONS, "device": "cuda", "dtype": "bfloat16", "enable_prefix_caching": False}, **speculative, accept_policy="accept_all")
    graphs, answers = llm.engine.worker.graphs, []
    assert graphs is not None and graphs.pieces is not None
    assert kind is not CAPPED or graphs.advancing is None
    for advancing in (graphs.advancing, None):
        graphs.advancing = advancing
        answers.append(ask(llm, temperature=0.0))
    llm.close()
    beginnings = [[ids[:2] for ids in own] for own in answers]
    assert all(len(ids) == 24 for own in answers for ids in own)
    assert sum(a == b for a, b in zip(*beginnings, strict=True)) >= 2, beginnings


@pytest.mark.parametrize("kind", [DRAFT_MODELS[0], EAGLES[1], HEADS[1], blocks.DFLASH, blocks.DSPARK, "mtp"], ids=str)
def test_a_drafter_that_scores_few_tokens(kind: Any, tmp_path: Path) -> None:
    target, speculative = (BUNDLED_MODEL, {"method": "mtp"}) if kind == "mtp" else make(kind, tmp_path)
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    (tmp_path / "tokens.json").write_text(json.dumps(list(range(1, vocab_size, 3))))
    compare(target, speculative | {"draft_token_map": str(tmp_path / "tokens.json")})


def compare(target: Path, speculative: dict[str, Any]) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0}
    drafted = []
    for device in ("cpu", "cuda"):
        llm = serve(target, {**OPTIONS, "device": device}, **speculative, accept_policy="accept_all")
        drafted.append(ask(llm, **greedy))
        while llm.engine.worker.capture_waiting():
            pass
        assert ask(llm, **greedy) == drafted[-1]
        llm.close()
    assert drafted[0] == drafted[1]
    llm = serve(target, {**OPTIONS, "device": "cuda"}, **speculative)
    for sampling in (greedy, {"temperature": 0.8, "seed": 5}):
        expected = ask(llm, {"method": "none"}, **sampling)
        for choice in ({}, {"mtp_strategy": "with_ngram"}, {"verify_strategy": "rejection"} if sampling is greedy else {}):
            assert ask(llm, choice, **sampling) == expected
    llm.close()


class Apart:
    """The drafter as its own process has it: in another thread, which enters the stream for each call (`backend.adapters.mtp_drafter`)."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread, self.inner = thread, thread.submit(Service, "cuda:0").result()

    def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        with on_stream(torch.device("cuda:0")):
            return call(*arguments)

    def open(self, num_pages: int, page_size: int) -> None:
        self._thread.submit(self._run, self.inner.open, num_pages, page_size).result()

    def draft(self, call: DraftCall) -> DraftReply:
        return self._thread.submit(self._run, self.inner.draft, call).result()


@pytest.mark.parametrize("choice", [{}, {"draft_sampling": "greedy"}, {"verify_strategy": "rejection"}], ids=str)
def test_a_drafter_apart_draws_what_the_one_in_the_step_does(choice: dict[str, Any]) -> None:
    prompts = code_prompts(6, (60, 300), seed=19)
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5}):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **options)
        found = []
        with ThreadPoolExecutor(1) as thread:
            for placement, service in (("bls", Apart(thread)), ("in_process", None)):
                speculative = {"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 3, "adaptive": False, "placement": placement}
                config = {**OPTIONS, "model": str(SMALL_MODEL), "device": "cuda", "dtype": "float32", "async_scheduling": False}
                speculative |= {"model": str(SMALL_DRAFTER), **choice}
                engine = Engine(EngineConfig.from_dict({**config, "speculative_config": speculative}), draft_service=service)
                found.append((collect(engine, prompts, params), engine.metrics.accepted_tokens["mtp"]))
                assert service is None or not engine.drafters.faults.failures["mtp"]
        (apart, accepted), (together, same) = found
        assert apart == together and accepted > 40 and abs(accepted - same) < 0.1 * same, (accepted, same)


def test_a_drafter_apart_waits_for_no_compiler_once_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gives each call two seconds."""
    page_size = 256  # of no other test
    with ThreadPoolExecutor(1) as thread:
        service = Apart(thread)
        thread.submit(service._run, service.inner.inner.warm_up, 4096, 2048, page_size).result()

        def refuse(*arguments: object, **options: object) -> NoReturn:
            raise AssertionError("nvcc was asked for")

        monkeypatch.setattr(_load.subprocess, "run", refuse)
        service.open(64, page_size)
        for batch, count in ((1, 1), (1, 300), (3, 40), (7, 5), (40, 3), (200, 1)):
            hidden = torch.randn(batch * count, service.inner.inner._drafter.tap_width, device="cuda")
            for mode in (LIKELIEST, SHARED_NOISE, OWN_NOISE):
                pages, choices = [[b % 60, 60 + b % 4] for b in range(batch)], [(mode, 5, b) for b in range(batch)]
                lists = ([count] * batch, [count] * batch, pages, [3] * batch, choices, [(0.8, 0.9, 0.0)] * batch)
                reply = service.draft(DraftCall([], [7] * (batch * count), hidden, *lists))
                assert all(len(row) == 3 and all(0 <= token_id < 4096 for token_id in row) for row in reply.token_ids)


def test_a_drafter_apart_has_all_kernels_of_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of many requests are scored together, by kernels that none of its layers has: here of random weights, and of many more tokens."""
    device, dtype, vocab_size, asked = torch.device("cuda:0"), torch.bfloat16, 32768, set()
    find = _load._kernel

    def note(index: int, source: str, name: str, defines: Any, *others: Any) -> Any:
        asked.add((source, defines))
        return find(index, source, name, defines, *others)

    monkeypatch.setattr(_load, "_kernel", note)
    for own in (SMALL_MODEL, SMALL_DRAFTER):
        (tmp_path / own.name).mkdir()
        config = json.loads((own / "config.json").read_text()) | {"vocab_size": vocab_size}
        (tmp_path / own.name / "config.json").write_text(json.dumps(config))
    target = load_model(tmp_path / SMALL_MODEL.name, dtype, device, Ranks(), only_head=True, load_format="dummy")
    drafter = RecurrentDrafter(Mtp(tmp_path / SMALL_DRAFTER.name, target, dtype, device, load_format="dummy"), 3)
    service = RemoteDrafterService(drafter, dtype, device, lambda count: contextlib.nullcontext())
    service.warm_up(vocab_size, 2048, 16)
    ready = set(asked)
    service.open(64, 16)
    for batch, count in ((1, 1), (1, 300), (3, 40), (20, 1), (40, 3), (90, 1), (150, 1), (250, 1)):
        hidden = torch.randn(batch * count, drafter.tap_width, device=device, dtype=dtype)
        for mode in (LIKELIEST, SHARED_NOISE, OWN_NOISE):
            lists = ([count] * batch, [count] * batch, [list(range(20))] * batch, [3] * batch, [(mode, 5, 1)] * batch, [(0.8, 0.9, 0.0)] * batch)
            service.draft(DraftCall([], [7] * (batch * count), hidden, *lists))
    assert asked <= ready, sorted(asked - ready, key=str)
