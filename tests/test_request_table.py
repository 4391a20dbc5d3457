"""The request table on CPU, against walks over its requests in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.ngram import draft_ngram
from kernels.ops import Admission, RequestTable, commit
from kernels.sampling import choose, process_and_choose, process_logits
from kernels.structs import HAS_PENALTIES, IN_PROMPT, Policy
from kernels.verify import verify_drafts

V, MAX_LEN, MAX_DRAFTS = 50, 64, 4
CPU = torch.device("cpu")


def look_up(text: list[int], max_size: int, min_size: int) -> tuple[list[int], int]:
    """What followed the earliest place of the longest end of a text, and how many tokens match there, up to 16 past the size."""
    for size in range(min(max_size, len(text) - 1), min_size - 1, -1):
        for at in range(len(text) - size):
            if text[at : at + size] == text[len(text) - size :]:
                back = 0
                while back < 16 and at - back > 0 and text[at - back - 1] == text[len(text) - size - back - 1]:
                    back += 1
                return text[at + size :], size + back
    return [], 0


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.sampled_from([(5, 1), (3, 2), (1, 1), (8, 3), (2, 2)]))
def test_lookup(seed: int, sizes: tuple[int, int]) -> None:
    rng = random.Random(seed)
    count = rng.choice([1, 4, 9])
    table = RequestTable(count, MAX_LEN, MAX_DRAFTS, V, CPU)
    texts = [[rng.randrange(rng.choice([1, 2, 5, 40])) for _ in range(rng.randint(1, 50))] for _ in range(count)]
    ends = [len(text) + rng.randint(1, 10) for text in texts]
    table.admit([Admission(i, text, 1, end) for i, (text, end) in enumerate(zip(texts, ends))])
    first = torch.randint(0, 3, (count + 1, MAX_DRAFTS), dtype=torch.int32)
    table.drafts.copy_(first)
    table.num_drafts.fill_(77)
    order = [*rng.sample(range(count), count), count]

    def ints(low: int, high: int) -> torch.Tensor:
        return torch.tensor([rng.randint(low, high) for _ in order], dtype=torch.int32)

    limits, num_given, min_scores = ints(-1, MAX_DRAFTS + 1), ints(0, 3), ints(0, 8)
    has_given, has_least = rng.random() < 0.5, rng.random() < 0.5
    scores = torch.full((len(order),), -5, dtype=torch.int32)
    optional = (num_given if has_given else None, min_scores if has_least else None)
    draft_ngram(table, torch.tensor(order, dtype=torch.int32), limits, *sizes, *optional, scores)
    for b, index in enumerate(order[:-1]):
        asked, known = int(limits[b]), len(texts[index])
        if asked < 0:
            assert int(table.num_drafts[index]) == 77 and int(scores[b]) == 0
            continue
        limit = min(asked, ends[index] - known - 1, MAX_DRAFTS)
        base = first[index, : min(int(num_given[b]) * has_given, limit)].tolist()
        found, score = look_up(texts[index] + base, *sizes) if limit > len(base) else ([], 0)
        assert int(scores[b]) == score
        if has_least and score < int(min_scores[b]):
            found = []
        assert table.drafts[index, : int(table.num_drafts[index])].tolist() == base + found[: limit - len(base)]


def test_a_place_is_given_to_another() -> None:
    """What the last request left there does not count for the next."""
    table = RequestTable(2, 64, 3, 100, CPU)
    table.admit([Admission(0, [5, 5, 6, 6, 7], 3, 30, presence=0.1, num_drafter_tokens=4), Admission(1, [5], 1, 30)])
    seen = dict(table.seen[0, : int(table.num_seen[0])].tolist())
    assert seen == {5: IN_PROMPT, 6: IN_PROMPT + 1, 7: 1} and table.num_seen.tolist() == [3, 0, 0]
    assert table.num_drafter_tokens.tolist() == [4, 0, 0]
    assert (table.flags & HAS_PENALTIES).tolist() == [HAS_PENALTIES, 0, 0]
    commit(torch.tensor([[8, 5, 8, -1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), table, torch.tensor([0], dtype=torch.int32))
    seen = dict(table.seen[0, : int(table.num_seen[0])].tolist())
    assert seen == {5: IN_PROMPT + 1, 6: IN_PROMPT + 1, 7: 1, 8: 2}
    table.admit([Admission(0, [7], 1, 30)])
    assert table.num_seen.tolist() == [0, 0, 0] and not table.seen_place.any() and table.num_drafter_tokens.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_marked(value: float, dtype: torch.dtype) -> None:
    table = RequestTable(3, 64, 3, V, CPU)
    table.admit([Admission(i, [1, 2], 2, 60, is_greedy=i % 2 == 0) for i in range(3)])
    logits = torch.randn(9, V).to(dtype)
    logits[:, 5] = float("-inf")
    logits[4, 7] = logits[8, 49] = value
    cu = torch.tensor([0, 3, 6, 8], dtype=torch.int32)  # the last row is nobody's
    ids, is_broken = choose(logits, table, torch.arange(3, dtype=torch.int32), cu)
    assert is_broken.tolist() == [i == 4 for i in range(9)] and int(ids[8]) == 0


def test_small_penalties_act_in_float32() -> None:
    """At a logit of 20 bfloat16 has steps of an eighth: there a penalty of 0.05 is nothing."""
    table = RequestTable(1, 64, 3, V, CPU)
    table.admit([Admission(0, [1, 2], 1, 60, is_greedy=True, presence=0.05, logit_bias={9: 0.02})])
    logits = torch.zeros(1, V)
    logits[0, 2], logits[0, 3], logits[0, 9] = 20.04, 20.0, 19.99
    indices, cu = torch.tensor([0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    assert process_and_choose(logits, table, indices, cu)[0].tolist() == [9]
    torch.testing.assert_close(logits[0, [2, 3, 9]], torch.tensor([19.99, 20.0, 20.01]))


def test_a_draw_ahead_is_the_draw_at_that_place() -> None:
    table = RequestTable(1, 64, 3, V, CPU)
    logits, indices, cu = torch.randn(1, V), torch.tensor([0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    table.admit([Admission(0, [1, 2, 3, 4, 5], 1, 60, seed=9)])
    late = choose(logits, table, indices, cu, ahead=3)[0]
    table.num_tokens[0] = 8
    assert torch.equal(choose(logits, table, indices, cu)[0], late)


@pytest.mark.parametrize("policy", Policy)
def test_verify_drafts(policy: Policy) -> None:
    rng = random.Random(1)
    for batch in (1, 7, 40):
        table = RequestTable(batch, 64, MAX_DRAFTS, 100, CPU)
        table.drafts.random_(0, 2)
        order, counts = rng.sample(range(batch), batch), [rng.randint(0, MAX_DRAFTS + 1) for _ in range(batch)]
        cu = torch.tensor([0, *counts]).cumsum(0).int()
        chosen = torch.randint(0, 2, (int(cu[-1]) + 3,), dtype=torch.int32)
        got = verify_drafts(chosen, table, torch.tensor(order, dtype=torch.int32), cu, policy)
        for b, index in enumerate(order):
            own, drafts = chosen[int(cu[b]) : int(cu[b + 1])].tolist(), table.drafts[index].tolist()
            emitted: list[int] = []
            for j, token in enumerate(own):
                if j < len(own) - 1 and policy != Policy.REJECT_ALL and (policy == Policy.ACCEPT_ALL or drafts[j] == token):
                    emitted.append(drafts[j])
                else:
                    emitted.append(token)
                    break
            assert got[0][b].tolist() == emitted + [-1] * (MAX_DRAFTS + 1 - len(emitted))
            assert (int(got[1][b]), int(got[2][b])) == (len(emitted), max(len(emitted) - 1, 0))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_step_is_the_reference_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    table = RequestTable(3, MAX_LEN, MAX_DRAFTS, V, CPU)
    admissions = []
    for index in range(3):
        ids = [rng.randrange(20) for _ in range(rng.randint(2, 30))]
        bias = {i: rng.uniform(-5, 5) for i in rng.sample(range(V), 3)}
        known = len(ids)
        admissions.append(
            Admission(
                *(index, ids, rng.randint(1, known), known + rng.randint(1, 8), rng.random() < 0.4),
                **{"temperature": 0.8, "top_k": rng.choice([0, 5]), "top_p": rng.choice([1.0, 0.7]), "min_p": 0.05, "seed": rng.randrange(2**63)},
                **{"repetition": rng.choice([1.0, 1.3]), "presence": rng.choice([0.0, 0.4]), "frequency": 0.2, "logit_bias": bias},
                **{"banned_ids": [1, 2], "min_known": known + 2},
            )
        )
    table.admit(admissions)
    table.drafts.copy_(torch.randint(0, 20, table.drafts.shape))
    order, counts = rng.sample(range(3), 3), [rng.randint(0, MAX_DRAFTS + 1) for _ in range(3)]
    request_indices, cu = torch.tensor([*order, 3], dtype=torch.int32), torch.tensor([0, *counts, 0]).cumsum(0).int()
    logits = torch.randn(int(cu[-1]) + 2, V)
    processed = logits.clone()
    process_logits(processed, table, request_indices, cu)
    chosen, is_broken = choose(processed, table, request_indices, cu)
    assert torch.equal(process_and_choose(logits.clone(), table, request_indices, cu)[0], chosen) and not is_broken.any()
    assert torch.equal(processed[int(cu[-1]) :], logits[int(cu[-1]) :])
    emitted, num_emitted, num_accepted = verify_drafts(chosen, table, request_indices, cu)
    for b, index in enumerate(order):
        own, drafts = admissions[index], table.drafts[index].tolist()
        tokens = []
        for place in range(counts[b]):
            history = [*own.token_ids, *drafts[:place]]
            output = torch.tensor(history[own.num_prompt_tokens :], dtype=torch.long)
            prompt = torch.zeros(1, V, dtype=torch.bool)
            prompt[0, own.token_ids[: own.num_prompt_tokens]] = True
            row = logits[int(cu[b]) + place][None]
            penalties = [torch.tensor([p]) for p in (own.repetition, own.presence, own.frequency)]
            row = reference.apply_penalties(row, prompt, torch.bincount(output, minlength=V).float()[None], *penalties)
            for token_id, bias in own.logit_bias.items():
                row[0, token_id] += bias
            if len(history) < own.min_known:
                row[0, list(own.banned_ids)] = float("-inf")
            torch.testing.assert_close(processed[int(cu[b]) + place], row[0])
            parameters = [torch.tensor([p]) for p in (own.temperature, own.top_k, own.top_p, own.min_p, own.seed, len(history))]
            expected = row.argmax(dim=1) if own.is_greedy else reference.sample(row, *parameters)
            assert int(chosen[int(cu[b]) + place]) == int(expected)
            if place == len(tokens):  # every draft so far was accepted
                tokens.append(int(expected))
                if place < counts[b] - 1 and drafts[place] != tokens[-1]:
                    break
        assert emitted[b, : int(num_emitted[b])].tolist() == tokens and int(num_emitted[b]) == len(tokens)
        assert int(num_accepted[b]) == max(len(tokens) - 1, 0)
    assert num_emitted[3] == 0
    commit(emitted, num_emitted, table, request_indices)
    for b, index in enumerate(order):
        own, count = admissions[index], int(num_emitted[b])
        known = len(own.token_ids) + count
        assert known <= own.max_total_tokens and int(table.num_tokens[index]) == known
        assert table.tokens[index, :known].tolist() == [*own.token_ids, *emitted[b, :count].tolist()]
        assert (emitted[b, count:] == -1).all()
