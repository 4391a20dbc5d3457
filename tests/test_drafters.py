"""Drafters that fail, lie or go away; and speculative sampling with a real drafter's own probabilities."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import time
from collections import Counter
from pathlib import Path

import pytest
import scipy
import torch
import transformers
from safetensors.torch import save_file

from backend import SamplingParams
from backend.config import EngineConfig
from backend.devices import on_stream
from backend.drafters import remote
from backend.drafters.calls import DraftCall, DraftError, DraftReply
from backend.drafters.recurrent import RecurrentDrafter
from backend.drafters.remote_service import RemoteDrafterService
from backend.drafters.suffix import SuffixLookup
from backend.engine import Engine
from backend.errors import ConfigError, ModelError
from backend.models import load_model as load_served
from backend.models.mtp import Mtp
from backend.parallel.ranks import Ranks
from kernels import ops, reference
from tests.conftest import code_prompts, greedy
from tests.models import make_tiny
from tests.small import LLM, SMALL_DRAFTER, SMALL_MODEL
from training.drafters import Options
from training.drafters.mtp import Mtp as TrainedMtp
from training.target import Target

PROMPTS, TOKENS = code_prompts(4, (60, 200), seed=9), 20


def collect(engine: Engine, prompts: list[str], params: SamplingParams) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, params, lambda d: outputs[int(d.request_id)].extend(d.token_ids), request_id=str(i))
    while engine.step():
        pass
    engine.scheduler.check()
    assert engine.scheduler.num_open == 0
    return outputs


@pytest.fixture(scope="module")
def plain(llm_plain) -> list[list[int]]:
    return collect(llm_plain.engine, PROMPTS, greedy(TOKENS))


class Service:
    """The real drafter, behind a switch."""

    def __init__(self, device: str = "cpu") -> None:
        own, dtype = torch.device(device), torch.float32
        with on_stream(own):
            target = load_served(str(SMALL_MODEL), dtype, own, Ranks(), only_head=True)
            drafter = RecurrentDrafter(Mtp(SMALL_DRAFTER, target, dtype, own), max_steps=3)
        self.inner = RemoteDrafterService(drafter, dtype, own, lambda count: contextlib.nullcontext())
        self.fault = ""
        self.num_opened = 0
        self.num_calls = 0
        self.caught_up: list[int] = []

    def open(self, num_pages: int, page_size: int) -> None:
        self.num_opened += 1
        self.inner.open(num_pages, page_size)

    def draft(self, call: DraftCall) -> DraftReply:
        self.num_calls += 1
        self.caught_up.append(len(call.token_ids))
        if self.fault == "unreachable":
            raise DraftError("nobody there")
        if self.fault == "broken":
            raise ZeroDivisionError("a bug")
        reply = self.inner.draft(call)
        if self.fault == "nothing":
            return DraftReply([[] for _ in reply.token_ids])
        if self.fault == "too many":
            return DraftReply([[*row, 5, 6, 7, 8] for row in reply.token_ids])
        if self.fault == "no such id":
            return DraftReply([[4096, *row[1:]] for row in reply.token_ids])
        if self.fault == "negative id":
            return DraftReply([[-7, *row[1:]] for row in reply.token_ids])
        return reply


@pytest.fixture
def service(monkeypatch) -> Service:
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(remote, "RETRY_SHARE", 0)
    return Service()


def make_engine(service: Service, **options) -> Engine:
    speculative = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False, "placement": "bls"}
    return Engine(EngineConfig.from_dict({"model": str(SMALL_MODEL), "speculative_config": speculative, **options}), draft_service=service)


@pytest.mark.parametrize("fault", ["unreachable", "broken"])
def test_a_drafter_that_fails_leaves_plain_decoding_and_is_used_again(service, plain, fault, caplog):
    engine = make_engine(service)
    assert collect(engine, PROMPTS, greedy(TOKENS)) == plain
    accepted = engine.metrics.accepted_tokens["mtp"]
    assert accepted > 0 and service.num_opened == 1
    service.fault = fault
    with caplog.at_level(logging.WARNING):
        assert collect(engine, PROMPTS, greedy(TOKENS)) == plain
    assert engine.metrics.accepted_tokens["mtp"] == accepted
    faults = engine.drafters.faults
    assert faults.failures["mtp"] > 0 and faults.undrafted["mtp"] >= faults.failures["mtp"]
    assert sum("goes on without drafts" in r.message for r in caplog.records) == 1, "one warning, not one a step"
    service.fault = ""
    assert collect(engine, PROMPTS, greedy(TOKENS)) == plain
    assert engine.metrics.accepted_tokens["mtp"] == 2 * accepted, "all that it had forgotten was shown to it again"
    assert service.num_opened > 1


def test_a_drafter_that_comes_back_in_the_middle_of_a_request(service, plain):
    engine = make_engine(service)
    outputs: list[int] = []
    engine.submit(PROMPTS[0], greedy(TOKENS), lambda d: outputs.extend(d.token_ids), request_id="0")
    service.fault = "unreachable"
    while len(outputs) < 10:
        engine.step()
    service.fault = ""
    before = service.num_calls
    while engine.step():
        pass
    assert outputs == plain[0]
    known = len(engine.tokenizer.encode(PROMPTS[0])) + 10
    assert service.caught_up[before] == known, "the whole text so far"
    assert engine.metrics.accepted_tokens["mtp"] > 0


def test_a_dead_drafter_is_not_asked_every_step(monkeypatch, plain):
    service = Service()
    monkeypatch.setattr(remote, "RETRY_SECONDS", 3600.0)
    engine = make_engine(service)
    service.fault = "unreachable"
    assert collect(engine, PROMPTS, greedy(TOKENS)) == plain
    assert service.num_calls == 1 and engine.drafters.faults.undrafted["mtp"] > 30


@pytest.mark.parametrize(
    ("fault", "message"),
    [("too many", "7 tokens; 3 were asked for"), ("no such id", "token 4096; the vocabulary has ids 0 to 4095"), ("negative id", "token -7;")],
)
def test_bad_proposals_are_refused_and_said(service, plain, fault, message, caplog):
    engine = make_engine(service)
    service.fault = fault
    assert collect(engine, PROMPTS, greedy(TOKENS)) == plain
    assert engine.metrics.draft_tokens["mtp"] == 0
    assert engine.drafters.faults.invalid["mtp"] > 0
    assert any(message in r.message and "request" in r.message for r in caplog.records)


def test_a_drafter_may_propose_nothing(service, plain):
    engine = make_engine(service)
    service.fault = "nothing"
    assert collect(engine, PROMPTS, greedy(TOKENS)) == plain
    assert engine.metrics.draft_tokens["mtp"] == 0 and not engine.drafters.faults.invalid


LOOKUP, HYBRID = {"method": "suffix"}, {"method": "mtp", "mtp_strategy": "with_suffix"}
CALLS = ("start", "stop", "begin_step", "propose")


@pytest.mark.parametrize(
    ("call", "choice", "is_ahead"), [(call, choice, (i + j) % 2 == 1) for i, call in enumerate(CALLS) for j, choice in enumerate((LOOKUP, HYBRID))]
)
def test_any_drafter_on_the_host_may_raise(llm_all, llm_ahead, plain, monkeypatch, call, choice, is_ahead):
    """In whatever it is asked: it costs its drafts, and requests of other methods keep theirs. Each call and each kind with either scheduling."""
    engine = (llm_ahead if is_ahead else llm_all).engine
    failed, drafted = engine.drafters.faults.failures.copy(), engine.metrics.draft_tokens["ngram"]
    key = choice["method"] if len(choice) == 1 else "mtp with_suffix"

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.drafters._host[key], call, broken)
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    for i, prompt in enumerate(PROMPTS):
        own = choice if i % 2 else {"method": "ngram"}
        engine.submit(prompt, greedy(TOKENS), lambda d: outputs[int(d.request_id)].extend(d.token_ids), request_id=str(i), speculative=own)
    while engine.step():
        pass
    engine.scheduler.check()
    assert outputs == plain and engine.scheduler.num_open == 0
    assert engine.drafters.faults.failures[choice["method"]] > failed[choice["method"]]
    assert engine.metrics.draft_tokens["ngram"] > drafted


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_drafting_on_the_host_is_time_of_drafting(llm_all, llm_ahead, monkeypatch, is_ahead):
    """On /metrics, and for the choice of how many drafts are worth it: they looked free."""
    own = llm_ahead if is_ahead else llm_all
    lookup, num_calls = SuffixLookup.lookup_judged, 0

    def slow(self: SuffixLookup, *arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        time.sleep(0.02)
        return lookup(self, *arguments)

    monkeypatch.setattr(SuffixLookup, "lookup_judged", slow)
    before = own.engine.metrics.propose_seconds
    own.generate("x = [1, 2, 3, 1, 2, 3, ", greedy(12), speculative={"method": "suffix"}, use_tqdm=False)
    assert num_calls > 1 and own.engine.metrics.propose_seconds - before >= 0.02 * num_calls


def test_backlogs_longer_than_a_call_are_taken_in_parts(service, plain, monkeypatch):
    """The bound is the drafter's own: the decoding batch's budget has nothing to do with it."""
    monkeypatch.setattr(remote, "MAX_TOKENS", 24)
    engine = make_engine(service, max_num_batched_tokens=512)
    assert collect(engine, PROMPTS, greedy(TOKENS)) == plain
    assert max(service.caught_up) <= 24 < max(len(engine.tokenizer.encode(p)) for p in PROMPTS)
    assert engine.metrics.accepted_tokens["mtp"] > 0


def test_a_drafter_that_is_too_slow_for_a_backlog_gets_shorter_ones(service, plain, monkeypatch):
    """It has a time limit for each call: shown all at once it would fail for ever."""
    draft, num_failures = service.draft, 0

    def limited(call):
        nonlocal num_failures
        if len(call.token_ids) > 50:
            num_failures += 1
            raise DraftError("it did not answer in time")
        return draft(call)

    monkeypatch.setattr(service, "draft", limited)
    monkeypatch.setattr(remote, "SLOW_SECONDS", 0.0)
    engine = make_engine(service)
    assert collect(engine, PROMPTS, greedy(TOKENS)) == plain
    assert 0 < num_failures < 12 and engine.metrics.accepted_tokens["mtp"] > 0


def test_bls_needs_a_server():
    with pytest.raises(ConfigError, match="placement bls needs a server"):
        LLM(speculative_config={"method": "mtp", "placement": "bls"})


# -- folders that are no drafter of this target ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, root) -> Path:
    source = root / "model_repository/standalone/mtp_drafter/1"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no drafter of method mtp; known: LlamaMTP"),
        ({"hidden_size": 256}, "hidden_size is 256; the target's is 192"),
        ({"vocab_size": 32000}, "vocab_size is 32000; the target's is 4096"),
        ({"max_position_embeddings": 1024}, "max_position_embeddings is 1024; the target's is 2048"),
        ({"num_nextn_predict_layers": 3}, "model.layers.2.enorm.weight"),
        ({"intermediate_size": 100}, "has shape"),
    ],
)
def test_a_folder_that_is_no_drafter_of_this_target(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 2, "model": str(folder)})


def test_a_drafter_without_a_needed_key(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="num_nextn_predict_layers"):
        LLM(speculative_config={"method": "mtp", "model": str(folder)})
    with pytest.raises(ModelError, match="does not exist"):
        LLM(speculative_config={"method": "mtp", "model": str(folder / "nowhere")})


# -- the distribution of sampled answers -------------------------------------------------------------------------------

VOCABULARY, LENGTH, DRAWS = 6, 3, 12000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A target of six words, whose answers of three tokens can be counted."""
    return make_tiny(tmp_path_factory.mktemp("tiny"), VOCABULARY)


@pytest.fixture(scope="module")
def tiny_drafters(tiny, tmp_path_factory) -> dict[str, Path]:
    return make_drafters(tiny, tmp_path_factory)


def make_drafters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that was never trained, and one that gives the target's own scores back (its layers add nothing)."""
    target = Target(tiny, torch.float32, torch.device("cpu"))
    target.config.setdefault("rope_theta", 10000.0)
    paths = {}
    for name in ("bad", "fair"):
        torch.manual_seed(8)
        drafter = TrainedMtp(target, Options(drafts=2, layers=2, inner=48))
        if name == "fair":
            with torch.no_grad():
                for weight in (drafter.decoder.o, drafter.decoder.down):
                    weight.zero_()
                drafter.eh.copy_(0.3 * drafter.eh)
                drafter.norm.fill_(0.4)  # less sure of itself, so that it is right more often in distribution
        paths[name] = tmp_path_factory.mktemp(name)
        drafter.save(target, paths[name], torch.bfloat16)
    return paths


PARAMETERS = {"temperature": 1.3, "ignore_eos": True}


def answers(tiny: Path, drafter: Path, choice: dict, is_ahead: bool = False, device: str = "cpu") -> tuple[Counter, float]:
    """How often each answer came, the first token (which no draft can precede) and LENGTH more, and the share of accepted drafts."""
    speculative = {"method": "mtp", "num_speculative_tokens": 2, "model": str(drafter), "adaptive": False, **choice}
    options: dict = {"dtype": "float32", "kv_cache_memory": "8MiB", "async_scheduling": is_ahead, "device": device}
    llm = LLM(str(tiny), speculative_config=speculative, **options)
    prompts = [{"prompt_token_ids": [1, 3, 2, 4]}] * (DRAWS // 50)
    seeded = [SamplingParams(max_tokens=LENGTH + 1, n=50, seed=1000 * i, **PARAMETERS) for i in range(len(prompts))]
    outputs = [o for r in llm.generate(prompts, seeded, use_tqdm=False) for o in r.outputs]
    drafted = sum(o.stats.drafted for o in outputs)
    return Counter(tuple(o.token_ids) for o in outputs), sum(o.stats.accepted for o in outputs) / drafted


@functools.cache
@torch.inference_mode()
def exact(tiny: Path) -> dict[tuple[int, ...], float]:
    model = transformers.LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    spans = list(itertools.product(range(VOCABULARY), repeat=LENGTH + 1))
    ids = torch.tensor([[1, 3, 2, 4, *s] for s in spans])
    scores = (model(ids).logits / PARAMETERS["temperature"]).log_softmax(-1)
    picked = scores[:, 3:-1].gather(2, ids[:, 4:, None])[:, :, 0].sum(1)
    return dict(zip(spans, picked.exp().tolist()))


def fit(counts: Counter, wanted: dict[tuple[int, ...], float]) -> float:
    """p of the chi-square test; rare answers together."""
    total = sum(counts.values())
    large = [s for s, p in wanted.items() if p * total >= 8]
    seen = [counts[s] for s in large]
    expected = [wanted[s] * total for s in large]
    return scipy.stats.chisquare([*seen, total - sum(seen)], [*expected, total - sum(expected)]).pvalue


@pytest.mark.parametrize(
    ("strategy", "name", "is_ahead"),
    [
        ("rejection", "bad", False),
        ("rejection", "fair", True),
        ("target_match", "fair", True),  # whoever drafts: its tokens are those of plain decoding (test_methods)
    ],
)
def test_answers_follow_the_targets_distribution(tiny, tiny_drafters, strategy, name, is_ahead):
    counts, rate = answers(tiny, tiny_drafters[name], {"verify_strategy": strategy}, is_ahead)
    assert fit(counts, exact(tiny)) > 1e-3
    assert 0.05 < rate < 0.98, "drafts that are all accepted or none test nothing"


def test_answers_follow_it_with_drafts_from_a_part_of_the_vocabulary(tiny, tmp_path):
    """What is never drafted has probability 0 there, and comes from the residual alone."""
    generator = torch.Generator().manual_seed(2)
    weights = {f"blocks.{i}.layers.0.weight": torch.randn(32, 32, generator=generator) * 0.2 for i in range(2)}
    weights |= {f"lm_heads.{i}.weight": torch.randn(4, 32, generator=generator) * 0.3 for i in range(2)}
    save_file({**weights, "token_map": torch.tensor([0, 2, 3, 5])}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 2, "truncated_vocab_size": 4}))
    counts, rate = answers(tiny, tmp_path, {"method": "medusa", "verify_strategy": "rejection"})
    assert fit(counts, exact(tiny)) > 1e-3
    assert 0.05 < rate < 0.98


def test_the_test_above_catches_a_verifier_without_residual(tiny, tiny_drafters, monkeypatch):
    right = ops.verify_rejection

    def careless(probs, drafts, lengths, draft_probs, seeds, positions):
        token_ids, accepted = right(probs, drafts, lengths, draft_probs, seeds, positions)
        rows = torch.arange(len(drafts))
        noise = reference.gumbel_noise(seeds, positions + accepted, probs.shape[-1], reference.RECOVER_STREAM)
        token_ids[rows, accepted] = (probs[rows, accepted].log() + noise).argmax(-1)
        return token_ids, accepted

    monkeypatch.setattr(ops, "verify_rejection", careless)
    counts, _ = answers(tiny, tiny_drafters["bad"], {"verify_strategy": "rejection"})
    assert fit(counts, exact(tiny)) < 1e-6


def test_a_drafter_file_that_is_damaged(folder):
    blob = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(blob[: len(blob) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        LLM(speculative_config={"method": "mtp", "model": str(folder)})
    save_file({"other": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="is missing"):
        LLM(speculative_config={"method": "mtp", "model": str(folder)})
