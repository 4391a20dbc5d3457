"""Trees of drafts: a tree's step is what steps without drafts are, path by path; the tokens are those of plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backend import SamplingParams
from backend.config import BUNDLED_MODEL
from backend.step.scores import score_emitted
from kernels import ops, reference, structs
from kernels.plain_attention import PlainAttention
from kernels.request_state import Admission
from kernels.request_table import RequestTable
from kernels.structs import Policy
from tests.conftest import code_prompts
from tests.histories import run_histories
from tests.small import LLM, memory_of
from tests.steps import Row, Steps, make_worker
from tests.test_methods import Asked, ids_of, run
from tests.test_sampling import assert_follows
from tests.test_verify import DRAFTS, VOCABULARY, conditional
from tests.trees import path_to, random_parents

CPU = torch.device("cpu")
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]


# -- operations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (30, 20.0)])
def test_attention_of_trees(window: int | None, cap: float | None) -> None:
    """The twin and the plain way that GPUs have for odd sizes, each row against softmax over what it sees."""
    rng, page, num_kv, size = random.Random(0), 8, 2, 16
    lens, counts = [30, 12, 70, 9, 60], [9, 1, 64, 5, 40]
    table = torch.tensor(rng.sample(range(60), 50), dtype=torch.int32).view(5, 10)
    keys, values = torch.randn(2, 60, page, num_kv, size).unbind()
    query, cu = torch.randn(sum(counts), 4, size), torch.tensor([0, *counts]).cumsum(0).int()
    seen, expected = [], []
    for b, count in enumerate(counts):
        parents, first = random_parents(rng, count - 1), lens[b] - count
        for row in range(count):
            path = path_to(parents, row)
            word = 1 + sum(2 << node for node in path)
            seen.append(word - 2**64 if word >= 2**63 else word)
            tokens = [*range(first + 1), *(first + 1 + node for node in path)]
            tokens = tokens[-window:] if window is not None else tokens
            places = [(int(table[b, t // page]), t % page) for t in tokens]
            k, v = (torch.stack([x[p] for p in places]).repeat_interleave(2, dim=1) for x in (keys, values))
            scores = torch.einsum("hd,thd->ht", query[cu[b] + row], k) * size**-0.5
            scores = scores if cap is None else cap * (scores / cap).tanh()
            expected.append(torch.einsum("ht,thd->hd", scores.softmax(dim=-1), v))
    words, lists = torch.tensor(seen), (torch.tensor(lens, dtype=torch.int32), torch.arange(5, dtype=torch.int32))
    plan = reference.plan_attention(counts, lens, [row.numpy() for row in table], page, 2, torch.float32, seen=words.numpy())
    torch.testing.assert_close(reference.append_attention(query, keys, values, plan, window, cap), torch.stack(expected))
    plain = PlainAttention(cu, *lists, table, page, 80, words)
    torch.testing.assert_close(plain.attend(query, keys, values, 0, window, cap), torch.stack(expected))


@pytest.mark.parametrize("policy", Policy)
def test_verify_tree(policy: Policy) -> None:
    rng = random.Random(1)
    for batch in (1, 7, 40):
        table = RequestTable(batch, 64, 63, 100, CPU, has_trees=True)
        order, counts = rng.sample(range(batch), batch), [rng.randint(0, 64) for _ in range(batch)]
        parents = [random_parents(rng, 63) for _ in range(batch)]
        table.drafts.random_(0, 2)
        table.parents[:batch] = torch.tensor(parents, dtype=torch.int32)
        cu = torch.tensor([0, *counts]).cumsum(0).int()
        chosen = torch.randint(0, 2, (int(cu[-1]) + 3,), dtype=torch.int32)
        emitted, num_emitted, num_accepted, path = ops.verify_tree(chosen, table, torch.tensor(order, dtype=torch.int32), cu, policy)
        for b, index in enumerate(order):
            own, drafts = chosen[int(cu[b]) : int(cu[b + 1])].tolist(), table.drafts[index].tolist()
            tokens: list[int] = []
            rows: list[int] = []
            row = 0 if own else -1
            while row >= 0:
                rows.append(row)
                children = [n for n in range(len(own) - 1) if parents[index][n] == row - 1]
                good = [n for n in children if policy == Policy.ACCEPT_ALL or (policy == Policy.NORMAL and drafts[n] == own[row])]
                tokens.append(drafts[good[0]] if good else own[row])
                row = good[0] + 1 if good else -1
            assert emitted[b].tolist() == tokens + [-1] * (64 - len(tokens)) and path[b].tolist() == rows + [-1] * (64 - len(rows))
            assert (int(num_emitted[b]), int(num_accepted[b])) == (len(tokens), max(len(tokens) - 1, 0))


def test_what_is_offered_becomes_a_tree() -> None:
    """Without tokens that are none, what follows them, and what is more than the request wants."""
    table = RequestTable(3, 64, 20, 100, CPU, has_trees=True)
    table.admit([Admission(i, [1, 2, 3], 3, 60) for i in range(3)])
    fields = torch.zeros(structs.NUM_FIELDS, 3, dtype=torch.int32)
    fields[structs.INDEX], fields[structs.END], fields[structs.DRAFTER_COUNT] = torch.arange(3), torch.tensor([60, 60, 7]), -1
    fields[structs.MODEL_LIMIT] = torch.tensor([20, 0, 20])
    tokens = torch.tensor([[10, -1, 12, 13, 14, 15, 16]] * 3, dtype=torch.int32)
    ops.append_tree(table, fields, tokens, torch.tensor([-1, -1, 0, 1, 2, 3, 2], dtype=torch.int32))
    assert table.num_drafts.tolist() == [4, 0, 3, 0]
    assert table.drafts[0, :4].tolist() == [10, 12, 14, 16] and table.parents[0, :4].tolist() == [-1, 0, 1, 1]
    table.admit([Admission(0, [1], 1, 60)])
    assert table.parents[0].tolist() == list(range(-1, 19))


def test_candidates_are_what_would_be_drawn_one_after_the_other() -> None:
    table = RequestTable(3, 64, 20, 30, CPU, has_trees=True)
    params: list[dict[str, Any]] = [{"is_greedy": True}, {"temperature": 0.8, "seed": 7}, {"seed": 9, "top_k": 2}]
    table.admit([Admission(i, [1, 2, 3, 4], 3, 60, **own) for i, own in enumerate(params)])
    logits, indices, ones = torch.randn(3, 30), torch.arange(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    found, _ = ops.choose_candidates(logits, table, indices, 4, 2)
    assert found[2, 2:].tolist() == [-1, -1]
    limits, table.top_k[2] = logits.topk(2).values[2, 1], 0
    logits[2].masked_fill_(logits[2] < limits, float("-inf"))  # so that what was taken out does not let another in
    for number in range(4):
        chosen, _ = ops.choose(logits, table, indices, ones, ahead=2)
        assert all(int(a) == int(b) for a, b in zip(chosen, found[:, number]) if b >= 0)
        logits[torch.arange(3), chosen.long()] = float("-inf")
    likeliest, scores = ops.choose_candidates(logits[:2], table, indices[:2], 1, 2, is_likeliest=True)
    assert torch.equal(likeliest[:, 0], logits[:2].argmax(dim=1).int())
    torch.testing.assert_close(scores, logits[:2].log_softmax(dim=1).amax(dim=1, keepdim=True))


# -- a tree's step ------------------------------------------------------------------------------------------------------


RULES: dict[str, dict[str, Any]] = {
    "no rules": {},
    "penalties and bans": {"presence": 0.7, "repetition": 1.3, "banned_ids": list(range(200)), "min_known": 33},
}


@pytest.mark.parametrize("rules", RULES)
def test_every_row_is_plain_decoding_after_its_path(rules: str) -> None:
    """Logits of each row as the model gives them after the path alone, and the token that plain decoding would choose there; then a step after the
    accepted drafts, whose keys and values were moved, gives what plain decoding gives."""
    rng, options = random.Random(3), RULES[rules]
    worker = make_worker(BUNDLED_MODEL, speculative_config={"method": "token_recycling", "tree_nodes": 63})
    plain = make_worker(BUNDLED_MODEL)
    prompt = [rng.randrange(300, 900) for _ in range(29)]
    steps, alone = Steps(worker), Steps(plain)
    steps.admit(0, prompt, range(3, 20), temperature=0.9, seed=5, is_greedy=False, **options)
    known = [*prompt, *steps.run([Row(0, count=len(prompt))]).outcomes[0].token_ids]

    def decode(token_ids: list[int], index: int = 0) -> tuple[torch.Tensor, int]:
        """The logits after tokens, and what is chosen."""
        alone.admit(index, token_ids, range(3, 20), num_prompt_tokens=len(prompt), temperature=0.9, seed=5, is_greedy=False, **options)
        (outcome,) = alone.run([Row(index, count=len(token_ids))], is_whole=False).outcomes
        return alone.logits()[0], outcome.token_ids[0]

    for _ in range(2):
        right = list(known)
        while len(right) < len(known) + 4:
            right.append(decode(right)[1])
        right = right[len(known) :]
        parents, drafts = random_parents(rng, 36), [rng.randrange(300, 900) for _ in range(36)]
        node, wanted = -1, 0
        for place in range(36):  # a way through the tree that is right, for as far as it goes on
            if parents[place] == node and wanted < 4 and rng.random() < 0.6:
                drafts[place], node, wanted = right[wanted], place, wanted + 1
        expected = [decode([*known, *(drafts[n] for n in path_to(parents, row))]) for row in range(37)]
        (outcome,) = steps.run([Row(0, drafts=drafts, parents=parents)]).outcomes
        torch.testing.assert_close(steps.logits(), torch.stack([logits for logits, _ in expected]), atol=2e-4, rtol=1e-4)
        assert wanted > 0 and outcome.num_accepted >= wanted and outcome.num_drafts == 36
        tokens = [*right[: outcome.num_accepted], expected[1 + node][1]] if outcome.num_accepted == wanted else outcome.token_ids
        assert outcome.token_ids == tokens
        known += outcome.token_ids
    assert decode(known)[1] == steps.run([Row(0)]).outcomes[0].token_ids[0]


# -- requests -----------------------------------------------------------------------------------------------------------

RECYCLING = {"method": "token_recycling", "adaptive": False}
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "bad_words": ("self", " return", "\n    ", "x = 1; " * 9), "logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {278: 3.0, 361: -100.0}, "logprobs": 0},
    {"temperature": 0.7, "min_tokens": 12, "logit_bias": {0: 11.0}, "stop": ("\n\n",)},
]
SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "waiting": ({"tree_nodes": 24}, {}),
    "chunks, ahead": ({"tree_paths": PATHS}, {"async_scheduling": True, "max_num_batched_tokens": 24, "max_batch_size": 16}),
    "ahead, pages of one token": ({"tree_nodes": 63, "num_speculative_tokens": 6, "tree_top_k": 5}, {"async_scheduling": True, "page_size": 1}),
    "as many drafts as are worth it": ({"tree_nodes": 24, "adaptive": True}, {}),
    "few pages": ({"tree_nodes": 40, "verify_strategy": "rejection"}, {"num_pages": 30, "max_num_batched_tokens": 96, "max_batch_size": 16}),
}
CHOICES: list[dict[str, Any] | None] = [
    None,
    {"num_speculative_tokens": 2},
    {"method": "ngram", "num_speculative_tokens": 4},
    None,
    {"verify_strategy": "rejection"},
    None,
    {"method": "none"},
    {"method": "ngram"},
    None,
    None,
]


@pytest.fixture(scope="module")
def prompts(llm_plain) -> list[list[int]]:
    return [llm_plain.engine.tokenizer.encode(p) for p in code_prompts(10, (60, 400), seed=3)]


@pytest.fixture(scope="module")
def asked(prompts) -> list[Asked]:
    """Every set of parameters twice, each with a prompt of its own."""
    own = ({"max_tokens": 24, "seed": 100 + i, "ignore_eos": i % 2 == 0, **PARAMETERS[i % 5]} for i in range(10))
    return [Asked(prompt, SamplingParams(**params)) for prompt, params in zip(prompts, own)]


@pytest.fixture(scope="module")
def expected(llm_plain, asked) -> list:
    return run(llm_plain, asked)


@pytest.mark.parametrize("server", SERVERS)
def test_tokens_are_those_of_plain_decoding(llm_plain, asked, expected, server) -> None:
    """Of requests with trees, with fewer levels of them, with chains of a lookup, and without drafts, in one batch."""
    tree, options = SERVERS[server]
    if "num_pages" in options:
        options = {**options, "kv_cache_memory": options["num_pages"] * llm_plain.engine.worker.store.page_bytes}
        del options["num_pages"]
    llm = LLM(speculative_config={**RECYCLING, **tree}, **options)
    for _ in range(2):  # the second time from the prefix cache, and with much remembered
        outputs = run(llm, [Asked(a.prompt, a.params, choice) for a, choice in zip(asked, CHOICES)])
        for ours, theirs in zip(outputs, expected):
            assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
            for a, b in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert dict(a.top) == pytest.approx(dict(b.top), abs=1e-4)
    if tree.get("adaptive"):
        return  # there are as many drafts as measured times leave
    stats = [o.stats for o, choice in zip(outputs, CHOICES) if choice is None]
    assert sum(s.accepted for s in stats) > 20 and max(s.drafted / max(s.drafts, 1) for s in stats) > 5
    assert {name for o in outputs for name in o.sources} == {"target", "token_recycling", "ngram"}


def test_random_histories(llm_plain) -> None:
    """Cancels and preemptions in few pages, of trees among chains: no page is left, and no token is another."""
    sizes = {"max_batch_size": 6, "max_num_batched_tokens": 64, "max_model_len": 192, "kv_cache_memory": memory_of(12)}
    llm = LLM(speculative_config={**RECYCLING, "request_methods": ["ngram"]}, async_scheduling=True, **sizes)
    run_histories(llm, llm_plain, 40, arrivals=2, cancels=0.2, choices=({"method": "none"}, {"method": "ngram"}, None, None))


def test_completions_of_one_prompt(llm_plain, prompts) -> None:
    params = SamplingParams(max_tokens=16, n=3, seed=4, ignore_eos=True)
    answers = []
    for llm in (LLM(speculative_config=RECYCLING), llm_plain):
        answers.append(ids_of(llm.generate([{"prompt_token_ids": prompts[0]}], params, use_tqdm=False)[0].outputs))
    assert answers[0] == answers[1]


# -- the distribution ---------------------------------------------------------------------------------------------------


def draw_spans(parents: list[int], likely: list[int], verify: Callable[..., tuple[torch.Tensor, ...]], rounds: int) -> tuple[Counter, Counter]:
    """First tokens of spans that a tree's verification gives, what they leave open drawn from the target itself; and accepted drafts.

    likely: which of the likeliest tokens after its path each draft is.
    """
    batch, rng, target = 250, random.Random(4), conditional(1)
    table = RequestTable(batch, 8, 20, VOCABULARY, CPU, has_trees=True)
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(parents, likely):
        before = paths[parent + 1]
        paths.append((*before, sorted(range(VOCABULARY), key=lambda token, own=target[before]: -own[token])[rank]))
    indices, cu = torch.arange(batch, dtype=torch.int32), torch.arange(0, batch * len(paths) + 1, len(paths), dtype=torch.int32)
    logits = torch.tensor([target[path] for path in paths]).log().repeat(batch, 1)
    spans: Counter = Counter()
    accepted: Counter = Counter()
    for turn in range(rounds):
        table.admit([Admission(i, [3, 1, 4], 3, 8, seed=104729 * (batch * turn + i) + 7) for i in range(batch)])
        table.drafts[:batch, : len(parents)] = torch.tensor([path[-1] for path in paths[1:]], dtype=torch.int32)
        table.parents[:batch, : len(parents)] = torch.tensor(parents, dtype=torch.int32)
        chosen, _ = ops.process_and_choose(logits.clone(), table, indices, cu)
        emitted, num_emitted, num_accepted, _ = verify(chosen, table, indices, cu)
        for row, count, right in zip(emitted.tolist(), num_emitted.tolist(), num_accepted.tolist()):
            span = tuple(row[:count])
            while len(span) < DRAFTS:
                span += (rng.choices(range(VOCABULARY), target[span])[0],)
            spans[span[:DRAFTS]] += 1
            accepted[right] += 1
    return spans, accepted


PARENTS, LIKELY = [-1, -1, 0, 0, 0, 1], [0, 1, 0, 1, 2, 0]


def of_pairs() -> dict[tuple[int, int], float]:
    target = conditional(1)
    return {(a, b): target[()][a] * target[a,][b] for a in range(VOCABULARY) for b in range(VOCABULARY)}


def test_trees_keep_the_distribution() -> None:
    """And a child is accepted as often as the rule that goes from sibling to sibling accepts one: as the target has them all together."""
    target = conditional(1)
    spans, accepted = draw_spans(PARENTS, LIKELY, ops.verify_tree, 40)
    assert_follows(spans, of_pairs(), spans.total())
    first, second = sorted(range(VOCABULARY), key=lambda token: -target[()][token])[:2]
    one = target[()][first] + target[()][second]
    both = target[()][first] * sum(sorted(target[first,])[-3:]) + target[()][second] * max(target[second,])
    assert_follows(accepted, {0: 1 - one, 1: one - both, 2: both}, accepted.total())


def test_the_test_above_catches_siblings_without_residual() -> None:
    """A second sibling that is asked with a draw of its own from all of the target, not from what the first one left."""
    weights = torch.tensor(conditional(1)[()])

    def careless(chosen: torch.Tensor, table: RequestTable, indices: torch.Tensor, cu: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = cu[:-1].long()
        again = weights.multinomial(len(first), replacement=True).int()
        chosen[first] = torch.where(chosen[first] == table.drafts[: len(first), 0], chosen[first], again)
        return ops.verify_tree(chosen, table, indices, cu)

    spans, _ = draw_spans(PARENTS, LIKELY, careless, 40)
    with pytest.raises(AssertionError):
        assert_follows(spans, of_pairs(), spans.total())


def test_scores_of_a_path() -> None:
    """Of the rows that it goes through; what it says past the tokens that are emitted may be anything."""
    raw, emitted = torch.randn(7, 50), torch.tensor([[3, 4, 5, -1], [6, -1, -1, -1]], dtype=torch.int32)
    path = torch.tensor([[0, 2, 3, 99], [0, 2**31 - 1, -(2**31), 4]], dtype=torch.int32)
    scores = torch.zeros(2, 4, 5, dtype=torch.int32)
    score_emitted(scores, raw, emitted, torch.tensor([0, 4, 7], dtype=torch.int32), path)
    logprobs = raw.log_softmax(dim=-1)
    found = scores[..., 0].view(torch.float32)
    for own, (row, token) in ((found[0, 0], (0, 3)), (found[0, 1], (2, 4)), (found[0, 2], (3, 5)), (found[1, 0], (4, 6))):
        torch.testing.assert_close(own, logprobs[row, token])
