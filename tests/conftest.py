"""Shared parts: a small model, as the engine and as transformers run it, and prompts of code that it has never seen."""

from __future__ import annotations

import copy
import gc
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings

from backend import SamplingParams
from backend.config import BUNDLED_MODEL
from backend.group import CHECK_ENDS_VARIABLE
from backend.parallel.ranks import Ranks
from backend.quantization.dense import PackedLinear, PanelLinear
from backend.step import worker
from backend.step.tensors import StepShape
from deploy.demo import running_gateway
from kernels import cpu_attention
from tests.servers import RunningServer, ServerPool, serve
from tests.small import LLM, SMALL_MODEL
from tests.triton_stand_in import adapter  # noqa: F401 -- a fixture
from training.heldout import read_heldout

if TYPE_CHECKING:
    from openai import OpenAI
    from playwright.sync_api import Browser

ROOT = Path(__file__).parent.parent

# One thread each for this process and the servers that tests start: two that share a core stall each other at every operation.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Ranks, of servers too, compare what they decided at every request's end: few requests of tests take as many steps as come between comparisons else.
os.environ[CHECK_ENDS_VARIABLE] = "1"

# What a shell runs in the background has SIGINT ignored, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; `--hypothesis-profile=explore` draws others.
settings.register_profile("explore", settings.default, derandomize=False)
settings.register_profile("repeatable", settings.default, derandomize=True)
settings.load_profile("repeatable")

LONGEST = (
    *("test_methods.py", "test_parallel.py", "test_disaggregation.py", "test_hand_offs.py", "test_drafters.py", "test_engine.py"),
    *("test_supervision.py", "test_kill_matrix.py", "test_nodes.py", "test_gateway.py", "test_drafter_server.py", "test_faults.py"),
)
NAMES_OF_SERVERS = re.compile(r"\b(?:serve|servers|gateway|api)\b")
"""What a file with tests that start servers has in it."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests that start servers are wanted, files without them are not imported: that takes longer than some of the tests."""
    is_asked = config.option.markexpr == "serving" and collection_path.match("test_*.py")
    return True if is_asked and not NAMES_OF_SERVERS.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that start servers (see the Makefile), and brings the longest to the front, for others to run beside them."""
    for item in items:
        if getattr(getattr(item, "module", None), "serve", None) is serve or "servers" in getattr(item, "fixturenames", ()):
            item.add_marker("serving")
            assert NAMES_OF_SERVERS.search(item.path.read_text()), f"{item.path} is not collected where servers' tests are: NAMES_OF_SERVERS"
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


_frozen = 0
"""Imported modules that the garbage collector leaves alone."""


def freeze_imports() -> None:
    """What is imported stays: looking through it again and again for garbage took a sixth of the tests' time."""
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)


def pytest_collection_finish() -> None:
    freeze_imports()
    gc.set_threshold(20_000)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """With the next: a test and its fixtures draw the same numbers in every run, whichever tests ran before."""
    seed_everything(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed_everything(1)


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> Iterator[None]:
    """Also what a module's tests import at first use, as transformers' models are: it is set up first, so its fixtures are gone by then."""
    yield
    if len(sys.modules) > _frozen + 200:
        freeze_imports()


def copied(model: Any) -> Any:
    """The same weights in parts of its own, which a test or an engine may change."""
    own = copy.copy(model)
    own.layers = [copy.copy(layer) for layer in model.layers]
    for layer in own.layers:
        layer.attention, layer.mlp = copy.copy(layer.attention), copy.copy(layer.mlp)
    return own


@pytest.fixture(scope="session", autouse=True)
def models_once() -> Iterator[None]:
    """Engines of this process read these models' files once for each of a few choices of options: there are hundreds of engines."""
    load, loaded = worker.load_model, {}

    def load_once(directory: str | Path, dtype: torch.dtype, device: torch.device, ranks: Ranks, **options: Any) -> Any:
        is_usual = device.type == "cpu" and ranks.size == 1 and not any(options[name] for name in ("is_expert_parallel", "draft_token_map"))
        if Path(directory) not in (BUNDLED_MODEL, SMALL_MODEL) or not is_usual:
            return load(directory, dtype, device, ranks, **options)
        key = str((directory, dtype, options))
        if key not in loaded:
            loaded[key] = load(directory, dtype, device, ranks, **options)
        return copied(loaded[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "load_model", load_once)
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    with ServerPool(tmp_path_factory.mktemp("servers")) as pool:
        yield pool


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """For one module's time: while it is there, its event loop runs in this thread, and asyncio.run would refuse."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The system's, or the one that `playwright install chromium` fetched.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=120_000)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def gateway(servers: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway before the server that has no options, for tests that leave it as they found it."""
    with running_gateway(tmp_path_factory.mktemp("gateway") / "log", servers.get().grpc) as (address, _):
        yield address


@pytest.fixture(scope="session")
def bundled_server(servers: ServerPool) -> RunningServer:
    return servers.get(f"--model={BUNDLED_MODEL}")


@pytest.fixture(scope="session")
def bundled_gateway(bundled_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Whose page opens with completions, as it does for this model alone."""
    with running_gateway(tmp_path_factory.mktemp("gateway") / "log", bundled_server.grpc) as (address, _):
        yield address


@pytest.fixture(scope="session")
def api(gateway: str) -> Iterator[OpenAI]:
    """OpenAI's own client of it."""
    import openai  # not on every machine that has a GPU

    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


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

    return LlamaForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def llm_plain() -> LLM:
    """One engine that knows nothing of drafters, nor of prefixes. What a grammar forces is drafted, whatever the clock says that it is worth."""
    return LLM(speculative_config={"method": "none", "adaptive": False}, enable_prefix_caching=False)


@pytest.fixture(scope="session")
def llm_ngram() -> LLM:
    """One engine that has ngram loaded; requests choose none, naive or ngram. Drafts are not paced: they must not depend on the clock."""
    return LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 4, "adaptive": False})


EVERY_METHOD = {
    "method": "mtp",
    "num_speculative_tokens": 3,
    "request_methods": ["suffix"],
    "adaptive": False,
    "suffix_decoding_max_cached_requests": 0,  # drafts depend on the request alone
}


@pytest.fixture(scope="session")
def llm_all() -> LLM:
    """One engine that has every method loaded, mtp by default, not paced either. Each step is read before the next one is planned."""
    return LLM(speculative_config=EVERY_METHOD)


@pytest.fixture(scope="session")
def llm_ahead() -> LLM:
    """The same, with the next step planned while one is under way."""
    return LLM(speculative_config=EVERY_METHOD, async_scheduling=True)


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def note_shapes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> set[StepShape]:
    """The shapes of the steps that are launched on a GPU from now on."""
    graphs, used = llm.engine.worker.graphs, set()
    assert graphs is not None
    run = graphs.run
    monkeypatch.setattr(graphs, "run", lambda shape: used.add(shape) or run(shape))
    return used


def fake_server(folder: Path, text: str, version: str | None = None) -> Path:
    executable = folder / "bin" / "tritonserver"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho '{text}'\n")
    executable.chmod(0o755)
    if version:
        (folder / "TRITON_VERSION").write_text(version)
    return executable


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A state folder of its own, and a tritonserver on PATH, which is asked for its options and never run otherwise."""
    fake_server(tmp_path, "--model-repository <string>")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "foretoken"


@pytest.fixture
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and attention sum in float64, and round to the model's float32: a row's do not depend on the rows beside it."""
    for layout in (PanelLinear, PackedLinear):  # whose products go by other names
        monkeypatch.setattr(layout, "is_usable", staticmethod(lambda weight: False))
    monkeypatch.setattr(cpu_attention, "is_usable", lambda size, dtype: False)
    linear, attention, matmul = F.linear, F.scaled_dot_product_attention, torch.Tensor.__matmul__

    def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        return attention(q.double(), k.double(), v.double(), attn_mask=attn_mask.double(), **options).to(q.dtype)

    monkeypatch.setattr(
        F, "linear", lambda x, weight, bias=None: linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)
    )
    monkeypatch.setattr(F, "scaled_dot_product_attention", exact_attention)
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: matmul(x.double(), y.double()).to(x.dtype))
