"""Prompts that another engine computes: the same tokens, drafts and acceptance as on one engine, and no page is lost."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable

import pytest
import torch

import backend
from backend import SamplingParams
from backend.config import EngineConfig
from backend.core import NEVER, Delta, HandOff, Request
from backend.disaggregation.records import Job, probs_from_pages, probs_to_pages, read_job, write_job
from backend.engine import Engine
from backend.errors import RequestError
from tests.conftest import EVERY_METHOD, code_prompts, greedy
from tests.drafting import serve
from tests.families import random_tokens
from tests.small import LLM, memory_of
from tests.test_drafters import Service, collect
from tests.test_drawn_drafts import FIRST_SEED, NUM_DRAWN, Targets, make_drafter, make_targets, watch_handed


class Direct:
    """One engine computes another's prompts, in one process: pages by export and import, records as nodes write them."""

    min_tokens = 1

    def __init__(self, here: Engine, there: Engine) -> None:
        self.here, self.there = here, there
        self.jobs: dict[str, tuple[Request, int]] = {}
        self.is_wanted = True
        self.change: Callable[[HandOff], None] = lambda hand_off: None
        """Done to what comes."""
        self.num_failures = self.num_done = 0
        here.hand_offs.use(self)
        there.hand_offs.sink = self
        here.after_deltas = there.step  # both on one thread, step by step

    def wants(self, request: Request) -> bool:
        return self.is_wanted

    def begin(self, request: Request, num_cached_pages: int) -> None:
        fields = write_job(Job(f"job {request.request_id}", "here", request, num_cached_pages, self.here.worker.store.fingerprint))
        job = read_job({key.encode(): value for key, value in fields.items()})
        self.jobs[job.job_id] = request, num_cached_pages
        job.request.grammar = self.there.compile_grammar(job.request.params, job.state)
        self.there.submit_requests([job.request], self.note_end)

    def note_end(self, delta: Delta) -> None:
        if delta.error is not None:
            self.num_failures += 1
            request, _ = self.jobs.pop(delta.request_id)
            self.here.call(lambda: self.here.hand_offs.give_up(request, "failed"))

    def stop(self, request: Request) -> None:
        self.there.cancel(f"job {request.request_id}")

    def progress(self, request: Request, num_tokens: int) -> None:
        pass

    def done(self, request: Request, hand_off: HandOff) -> None:
        self.change(hand_off)
        own, num_cached = self.jobs.pop(request.request_id)
        store = self.there.worker.store
        content = store.export_pages(request.page_ids[num_cached:])
        if hand_off.draft_probs is not None:
            sent = probs_to_pages(hand_off.draft_probs, store.page_bytes)
            hand_off = dataclasses.replace(hand_off, draft_probs=probs_from_pages(sent, hand_off.draft_probs.shape))
        self.num_done += 1
        if self.num_done % 2:  # the first token comes before the pages as often as with them
            self.here.call(lambda: self.here.hand_offs.take_first(own, hand_off))
        self.here.call(lambda: self.land(own, num_cached, content, hand_off))

    def land(self, request: Request, num_cached: int, content: torch.Tensor, hand_off: HandOff) -> None:
        pages = request.page_ids[num_cached:]
        if pages:  # it may have ended
            self.here.worker.store.import_pages(pages, content[: len(pages)], self.there.worker.store.fingerprint)
        self.here.hand_offs.take(request, hand_off)


def test_pages_that_are_lost_again(llm_plain) -> None:
    """Requests that are set back go on with what they have emitted: nobody else computes that."""
    memory, there = memory_of(37, with_drafter=True), LLM(speculative_config=EVERY_METHOD)
    llm = LLM(kv_cache_memory=memory, enable_prefix_caching=False, speculative_config=EVERY_METHOD)
    link = Direct(llm.engine, there.engine)
    prompts, params = code_prompts(6, (300, 700), seed=66), greedy(60)
    expected = [r.outputs[0].token_ids for r in llm_plain.generate(prompts, params, use_tqdm=False)]
    assert [r.outputs[0].token_ids for r in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert llm.engine.metrics.preemptions > 0 and llm.engine.hand_offs.num_fetched >= len(prompts)
    check_idle(link)


@pytest.fixture(scope="module")
def own_model() -> type[backend.LLM]:
    """Whose engines `pair` makes: another module may have another one."""
    return LLM


@pytest.fixture(scope="module")
def pair(own_model):
    """Makes an engine whose prompts another one computes, and the link: once for either way of scheduling."""
    made: dict[bool, tuple[backend.LLM, backend.LLM, Direct]] = {}

    def pair_of(is_ahead: bool) -> tuple[backend.LLM, Direct]:
        if is_ahead not in made:
            here, there = (own_model(speculative_config=EVERY_METHOD, async_scheduling=is_ahead) for _ in range(2))
            made[is_ahead] = here, there, Direct(here.engine, there.engine)
        here, _, link = made[is_ahead]
        return here, link

    yield pair_of
    for here, there, _ in made.values():
        here.close()
        there.close()


def check_idle(link: Direct) -> None:
    for engine in (link.here, link.there):
        engine.scheduler.check()
        assert engine.scheduler.pool.num_held == 0 and engine.scheduler.num_open == 0
    assert not link.jobs


CHOICES = [
    {"method": "none"},
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "mtp"},
    {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 5},
    {"method": "mtp", "mtp_strategy": "with_suffix", "num_speculative_tokens": 5},
    {"method": "mtp", "num_speculative_tokens": 1},
    *({"method": m, "verify_strategy": s} for m in ("ngram", "mtp") for s in ("rejection", "topp")),
    {"method": "mtp", "mtp_strategy": "with_suffix", "num_speculative_tokens": 5, "verify_strategy": "rejection"},
]
FORM = {"regex": r"self\.(width|height) = [0-9]{3}\n(    return [a-z_.]{3,12}\n){2}"}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "ignore_eos": True}
PARAMETERS = {
    "greedy": greedy(10),
    "penalties": SamplingParams(max_tokens=10, presence_penalty=0.7, repetition_penalty=1.1, frequency_penalty=0.3, **SAMPLED),
    "logprobs": SamplingParams(max_tokens=8, logprobs=3, logit_bias={40: 1.5}, min_tokens=4, **SAMPLED),
    "n": SamplingParams(max_tokens=8, n=2, temperature=1.0, seed=5, ignore_eos=True),
    "one": greedy(1),
    "form": SamplingParams(max_tokens=48, temperature=0.8, seed=3, structured_outputs=FORM),
    "greedy form": greedy(32, structured_outputs=FORM, logprobs=1),
}


def summary(llm: LLM, prompts: list, params: SamplingParams | list[SamplingParams], choice: dict | list[dict]) -> list:
    results = llm.generate(prompts, params, speculative=choice, use_tqdm=False)
    return [(o.token_ids, o.text, o.logprobs, o.finish_reason, o.sources, o.stats.as_dict()) for r in results for o in r.outputs]


AHEAD = [choice for choice in CHOICES if choice["method"] == "ngram" or choice.get("verify_strategy") == "rejection"]
"""Also where the next step is planned before this one is read."""


FORMS = ("form", "greedy form")


@pytest.mark.parametrize(
    ("is_ahead", "choice", "form"),
    # Either form with every choice where both ways of scheduling are tested, and with every other one of the rest.
    [*((False, c, FORMS[i % 2]) for i, c in enumerate(CHOICES)), *((True, c, FORMS[1 - CHOICES.index(c) % 2]) for c in AHEAD)],
    ids=lambda p: "-".join(map(str, p.values())) if isinstance(p, dict) else p if isinstance(p, str) else "ahead" if p else "waiting",
)
def test_as_on_one_engine(llm_all, pair, is_ahead, choice, form) -> None:
    """Tokens, log-probabilities, who drafted what and how much of it stood, from the first step on."""
    llm, link = pair(is_ahead)
    prompts = code_prompts(2, (40, 500), seed=31)
    before = llm.engine.hand_offs.num_fetched
    for name in [name for name in PARAMETERS if name == form or name not in FORMS]:
        params = PARAMETERS[name]
        expected, found = (summary(one, prompts, params, choice) for one in (llm_all, llm))
        # Drafts are equal, too, where they depend on the text alone: which lookup has the word is learned from all requests before, and what
        # `suffix` finds from how far its thread has come; forced tokens are drafts where a request waits for the host, which is a matter of what
        # else runs. With other drafts `rejection` draws other tokens.
        # With other drafts beside it a row's log-probability is rounded otherwise.
        parts = range(6)
        is_form_ahead = is_ahead and name in FORMS
        if ("suffix" in str(choice) or is_form_ahead) and choice.get("verify_strategy") == "rejection":
            parts = [3]
        elif "suffix" in str(choice) or choice.get("mtp_strategy") == "with_ngram" or is_form_ahead:
            parts = [0, 1, 3]
            for own, one in zip(found, expected, strict=True):
                pairs = zip(own[2] or [], one[2] or [], strict=True)
                assert all(a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs), name
        if is_form_ahead:
            assert all(re.fullmatch(FORM["regex"], own[1]) for one in (found, expected) for own in one if own[3] == "stop"), name
        assert [[own[part] for part in parts] for own in found] == [[own[part] for part in parts] for own in expected], name
    assert llm.engine.hand_offs.num_fetched > before and not llm.engine.hand_offs.fallbacks
    check_idle(link)


def test_a_form_that_leaves_no_token(pair, caplog) -> None:
    """That is the request's own fault, which the node that computes its prompt finds: nothing is handed on, and no node is to blame."""
    llm, link = pair(False)
    before = link.num_failures, link.num_done
    with pytest.raises(RequestError, match="no token was both allowed by the grammar and possible"):
        llm.generate(code_prompts(1, (40, 50), seed=32), greedy(8, structured_outputs={"regex": "b{6}"}, bad_words=["b", "bb"]), use_tqdm=False)
    assert (link.num_failures, link.num_done) == (before[0] + 1, before[1])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    llm.engine.hand_offs.fallbacks.clear()
    check_idle(link)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_trees_as_on_one_engine(is_ahead) -> None:
    """The first tree comes with the prompt, and what has to be known to grow the next one."""
    own = {"method": "mtp", "tree_nodes": 12, "tree_top_k": 4, "num_speculative_tokens": 4, "request_methods": ["ngram"], "adaptive": False}
    alone, here, there = (LLM(speculative_config=own, async_scheduling=is_ahead) for _ in range(3))
    link = Direct(here.engine, there.engine)
    seen: list[list[int]] = []
    link.change = lambda hand_off: seen.append(hand_off.outcome.next_parents)
    prompts = code_prompts(2, (40, 500), seed=34)
    for name in ("greedy", "penalties", "one", "form"):
        for choice in ({"method": "mtp"}, {"method": "ngram"}):
            num_parts = 4 if is_ahead and name in FORMS else 6  # which forced tokens were drafts is a matter of what else runs
            expected, found = ([own[:num_parts] for own in summary(one, prompts, PARAMETERS[name], choice)] for one in (alone, here))
            assert found == expected, (name, choice)
    assert sum(len(parents) > 4 for parents in seen) >= 4 and [] in seen, "trees, and chains of the lookup and of answers of a given form"
    assert here.engine.hand_offs.num_fetched == len(seen) == 16 and not here.engine.hand_offs.fallbacks
    check_idle(link)
    for llm in (alone, here, there):
        llm.close()


def test_a_lookup_that_spared_the_drafter_a_prompt(llm_all, pair, monkeypatch) -> None:
    """What the drafter has not computed there it computes here, on pages that came: every draft is the one of a single engine."""
    llm, link = pair(False)

    def alone_score(request: Request, num_model: int, limit: int) -> int:
        length = len(request.token_ids)
        return 1 if length == len(request.prompt_token_ids) or length % 3 == 0 else NEVER

    for engine in (llm_all.engine, link.here, link.there):  # each would learn of its own steps who is to draft
        monkeypatch.setattr(engine.planner._budget, "alone_score", alone_score)
        monkeypatch.setattr(engine.planner._budget, "least_standing", lambda: 0.0)
    spared: list[bool] = []
    monkeypatch.setattr(link, "change", lambda hand_off: spared.append(hand_off.outcome.num_drafter_tokens < 40))
    (tokens,) = (llm_all.engine.tokenizer.encode(prompt) for prompt in code_prompts(1, (150, 300), seed=33))
    prompts = [{"prompt_token_ids": own} for own in (tokens, tokens + tokens[: len(tokens) // 2], tokens[:20] * 6, tokens[::-1])]
    choice = {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 5}
    for prompt in prompts:
        expected, found = (summary(one, [prompt], PARAMETERS["penalties"], choice) for one in (llm_all, llm))
        assert found == expected
    assert 0 < sum(spared) < len(spared) == len(prompts) and not link.here.hand_offs.fallbacks
    check_idle(link)


@pytest.mark.parametrize("method", ["none", "suffix", "mtp"])
@pytest.mark.parametrize("fault", ["lost", "other"])
def test_a_first_token_whose_pages_do_not_come(llm_all, pair, monkeypatch, fault, method) -> None:
    """Or whose prompt another node takes over, which finds another token: the prompt is computed here, and the first token stands."""
    llm, link = pair(False)

    def land(request: Request, num_cached: int, content: torch.Tensor, hand_off: HandOff) -> None:
        llm.engine.hand_offs.take_first(request, hand_off)  # again: it is sent once
        assert request.num_output_tokens == 1
        if fault == "lost":
            llm.engine.hand_offs.give_up(request, "transfer")
        else:
            wrong = dataclasses.replace(hand_off.outcome, token_ids=[hand_off.outcome.token_ids[0] ^ 1])
            llm.engine.hand_offs.take(request, dataclasses.replace(hand_off, outcome=wrong))

    monkeypatch.setattr(link, "land", land)
    before = llm.engine.hand_offs.num_fetched, llm.engine.scheduler.num_prompt_tokens
    prompts = code_prompts(3, (40, 500), seed=38)
    for number, params in enumerate((PARAMETERS["penalties"], PARAMETERS["greedy form"], PARAMETERS["logprobs"])):
        link.num_done = 0
        expected, found = ([own[:2] for own in summary(one, prompts[number : number + 1], params, {"method": method})] for one in (llm_all, llm))
        assert found == expected
    assert llm.engine.hand_offs.fallbacks.pop("transfer" if fault == "lost" else "internal") == 3
    asked = sum(len(llm.engine.tokenizer.encode(prompt)) for prompt in prompts)
    assert (llm.engine.hand_offs.num_fetched, llm.engine.scheduler.num_prompt_tokens) == (before[0], before[1] + asked)
    check_idle(link)


@pytest.mark.parametrize("end", ["cancelled", "stop"])
def test_a_request_that_ends_before_its_pages_are_here(llm_all, pair, monkeypatch, end) -> None:
    """What was computed for it is left, and its pages come back."""
    llm, link = pair(False)
    (prompt,) = code_prompts(1, (100, 500), seed=39)
    (only,) = llm_all.generate(prompt, greedy(1), use_tqdm=False)[0].outputs

    def land(request: Request, num_cached: int, content: torch.Tensor, hand_off: HandOff) -> None:
        assert request.token_ids[-1:] == only.token_ids
        llm.engine.cancel(request.group_id)  # or it has ended
        llm.engine.call(lambda: llm.engine.hand_offs.take(request, hand_off))

    monkeypatch.setattr(link, "land", land)
    link.num_done = 0
    params = greedy(20, stop=[only.text] if end == "stop" else [])
    (answer,) = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    assert (answer.token_ids, answer.finish_reason) == (only.token_ids, end) and not llm.engine.hand_offs.fallbacks
    check_idle(link)


ENDS = ["length", "stop", "context", "form"]


@pytest.mark.parametrize("end", ENDS)
def test_pages_are_kept_of_requests_that_end_with_their_first_token(llm_all, pair, monkeypatch, end) -> None:
    """It waits for them: whoever asks next finds them, and the other completions do not ask for them one by one."""
    llm, link = pair(False)
    monkeypatch.setattr(llm.engine.scheduler.fetches, "min_tokens", 32)
    (prompt,) = code_prompts(1, (300, 500), seed=40 + ENDS.index(end))
    tokens = llm.engine.tokenizer.encode(prompt)
    limit = llm.engine.worker.max_model_len
    if end == "context":
        tokens = (tokens * (limit // len(tokens) + 1))[: limit - 1]
    (only,) = llm_all.generate({"prompt_token_ids": tokens}, greedy(1), use_tqdm=False)[0].outputs
    params = {
        "length": greedy(1, n=3),
        "stop": greedy(20, n=3, stop_token_ids=only.token_ids),
        "context": greedy(1, n=3),
        "form": greedy(20, n=3, structured_outputs={"choice": [only.text]}),
    }[end]
    before, fetched = llm.engine.hand_offs.num_fetched, 0
    for number in range(2):
        link.num_done = 0
        (result,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        assert [own.token_ids for own in result.outputs] == [only.token_ids] * 3
        fetched += link.num_done
        assert number == 0 or result.num_cached_tokens > len(tokens) - 2 * llm.engine.config.page_size
    assert fetched == 1 and llm.engine.hand_offs.num_fetched == before + fetched and not llm.engine.hand_offs.fallbacks
    check_idle(link)


def test_a_first_token_that_the_form_forbids(llm_all, pair, monkeypatch) -> None:
    """As of a node with another tokenizer: the prompt is computed here, and the answer is right."""
    llm, link = pair(False)
    (prompt,) = code_prompts(1, (40, 500), seed=32)
    (wrong,) = llm.engine.tokenizer.encode(")", add_special_tokens=False)
    monkeypatch.setattr(link, "change", lambda hand_off: hand_off.outcome.token_ids.__setitem__(0, wrong))
    before = llm.engine.hand_offs.num_fetched
    expected, found = (summary(one, [prompt], PARAMETERS["form"], {"method": "mtp"}) for one in (llm_all, llm))
    assert found == expected and llm.engine.hand_offs.num_fetched == before
    assert llm.engine.hand_offs.fallbacks.pop("internal") == 1
    check_idle(link)


@pytest.mark.parametrize("strategy", ["target_match", "rejection"])
def test_a_drafter_that_is_a_model_of_its_own(strategy) -> None:
    """Placement bls: each node has a drafter beside it; the decode node's reads the prompts' states off the pages that came."""
    speculative = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False, "placement": "bls", "verify_strategy": strategy}
    config = EngineConfig.from_dict({"speculative_config": speculative})
    services = [Service() for _ in range(3)]
    alone, here, there = (Engine(config, draft_service=service) for service in services)
    link = Direct(here, there)
    prompts = code_prompts(2, (40, 500), seed=33)
    for params in (PARAMETERS["greedy"], PARAMETERS["penalties"]):
        deltas: list[list[Delta]] = [[] for _ in prompts]
        for i, (prompt, own) in enumerate(zip(prompts, deltas, strict=True)):
            here.submit(prompt, params, own.append, request_id=str(i))
        while not all(own and own[-1].is_final for own in deltas):
            here.step()
            there.step()
        outputs = [[token for delta in own for token in delta.token_ids] for own in deltas]
        assert outputs == collect(alone, prompts, params)
    assert here.hand_offs.num_fetched == 4 and not here.hand_offs.fallbacks
    assert here.metrics.accepted_tokens["mtp"] == alone.metrics.accepted_tokens["mtp"] > 0
    assert max(services[1].caught_up) == max(services[0].caught_up) > 200 and not services[2].num_calls
    check_idle(link)


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> Targets:
    return make_targets(tmp_path_factory)


OTHERS = ("EAGLE", "EAGLE-3 of few tokens", "draft_model", "PARD", "DSpark with a state", "Hydra++")


@pytest.mark.parametrize("kind", [*OTHERS, "DFlash with a window", "EAGLE-3 with a window"])
def test_drafters_of_other_kinds(kind, targets, tmp_path, monkeypatch) -> None:
    """What they keep in pages comes with the prompts' own: drafts, what they were drawn from, and how many stand, are one engine's."""
    target, speculative = make_drafter(kind, targets, tmp_path / "drafter")
    here, there = (serve(target, {"enable_prefix_caching": False}, **speculative) for _ in range(2))
    handed, method = watch_handed(monkeypatch), speculative["method"]
    choices = [{"method": method, "verify_strategy": "rejection"}] * NUM_DRAWN + [{"method": method}]
    prompts = [{"prompt_token_ids": random_tokens(length, length)} for length in (40, 9, 26, 17)]
    params = [SamplingParams(max_tokens=8, temperature=0.8, seed=FIRST_SEED + i, ignore_eos=True) for i in range(len(prompts))]
    expected, (drafts, probs) = summary(there, prompts, params, choices), handed.take()
    link = Direct(here.engine, there.engine)
    assert summary(here, prompts, params, choices) == expected
    found, own_probs = handed.take()
    assert found == drafts and len(drafts) > 20
    torch.testing.assert_close(own_probs, probs, rtol=1e-3, atol=1e-5)
    assert here.engine.hand_offs.num_fetched == len(prompts) and not here.engine.hand_offs.fallbacks
    check_idle(link)


def test_a_prompt_that_cannot_be_asked_for_is_computed_here(llm_all, pair, monkeypatch) -> None:
    """At once: nothing else wakes the engine."""
    llm, link = pair(False)

    def begin(request: Request, num_cached_pages: int) -> None:
        raise OSError("no way")

    monkeypatch.setattr(link, "begin", begin)
    (prompt,) = code_prompts(1, (40, 300), seed=45)
    ended: list[Delta] = []
    llm.engine.submit(prompt, greedy(4), ended.append, request_id="alone")
    for _ in range(20):
        if not llm.engine.step():  # the loop would sleep now
            break
    assert ended[-1].is_final and llm.engine.hand_offs.fallbacks.pop("internal") == 1
    check_idle(link)
