"""Shared parts: the bundled model, as the engine and as transformers run it, and prompts of code that it has never seen."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL
from backend.device.graphs import StepShape
from tests.servers import serve
from training.heldout import read_heldout

ROOT = Path(__file__).parent.parent

# One thread each for this process and the servers that tests start: two that share a core stall each other at every operation.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that start servers or use a GPU: each has the machine for itself, while others run beside one another (see the Makefile)."""
    for item in items:
        if getattr(getattr(item, "module", None), "serve", None) is serve or item.path.parent.name == "gpu":
            item.add_marker("alone")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


def code_prompts(count: int, lengths: tuple[int, int] = (60, 900), seed: int = 0) -> list[str]:
    """Stretches of held-out standard-library code, cut at the end of a line (its break left to the model)."""
    rng = random.Random(seed)
    texts = list(read_heldout().values())
    prompts = []
    while len(prompts) < count:
        text = rng.choice(texts)
        start = rng.randrange(len(text) - lengths[1])
        piece = text[start : start + rng.randint(*lengths)].rpartition("\n")[0]
        if len(piece) >= lengths[0] // 2:
            prompts.append(piece)
    return prompts


@pytest.fixture(scope="session")
def hf_model():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def llm_ngram() -> LLM:
    """One engine that has ngram loaded; requests choose none, naive or ngram. Drafts are not paced: they must not depend on the clock."""
    return LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 4, "adaptive": False})


@pytest.fixture(scope="session")
def llm_all() -> LLM:
    """One engine that has every method loaded, mtp by default, not paced either."""
    return LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3, "request_methods": ["suffix"], "adaptive": False})


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def note_shapes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> set[StepShape]:
    """The shapes of the device's steps that are launched from now on."""
    graphs, used = llm.engine.device_steps._graphs, set()
    launch = graphs.launch
    monkeypatch.setattr(graphs, "launch", lambda shape, updates: used.add(shape) or launch(shape, updates))
    return used


def run_in_batches(llm: LLM, prompts: list[list[int]], params: SamplingParams, batch: int, method: str) -> list[list[int]]:
    """Output ids of every prompt, `batch` prompts at a time."""
    outputs = []
    for i in range(0, len(prompts), batch):
        part = [{"prompt_token_ids": ids} for ids in prompts[i : i + batch]]
        results = llm.generate(part, params, speculative={"method": method}, use_tqdm=False)
        outputs += [r.outputs[0].token_ids for r in results]
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.num_held == 0
    return outputs
