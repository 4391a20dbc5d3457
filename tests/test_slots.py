"""The state by slot, on CPU tensors, against what the engine does request by request."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.drafters.ngram import NgramLookup
from kernels import reference
from kernels.ngram import draft_ngram
from kernels.sampling import choose, process_and_choose, process_logits
from kernels.state import Admission, SlotTable, commit
from kernels.verify import verify_drafts

V, MAX_LEN, MAX_DRAFTS = 50, 64, 4
CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.sampled_from([(5, 1), (3, 2), (1, 1), (8, 3)]), given_drafts=st.integers(0, 3))
def test_lookup_is_the_engine_s(seed: int, sizes: tuple[int, int], given_drafts: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(rng.choice([2, 5, 40])) for _ in range(rng.randint(1, 50))]
    end, asked = len(text) + rng.randint(1, 10), rng.randint(0, MAX_DRAFTS)
    table = SlotTable(2, MAX_LEN, MAX_DRAFTS, V, CPU)
    table.admit([Admission(1, text, 1, end)])
    first = [rng.randrange(3) for _ in range(MAX_DRAFTS)]
    table.drafts[1] = torch.tensor(first)
    slots, limits = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([asked, 0], dtype=torch.int32)
    draft_ngram(table, slots, limits, *sizes, torch.tensor([given_drafts, 0], dtype=torch.int32))
    limit = min(asked, end - len(text) - 1)
    base = first[: min(given_drafts, limit)]
    lookup, request = NgramLookup(*sizes), SimpleNamespace(request_id="r", token_ids=text)
    lookup.start(request)  # type: ignore[arg-type]
    found = lookup.lookup(request, base, limit - len(base)) if limit > len(base) else []  # type: ignore[arg-type]
    count = int(table.num_drafts[1])
    assert table.drafts[1, :count].tolist() == base + found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_step_is_the_reference_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    table = SlotTable(3, MAX_LEN, MAX_DRAFTS, V, CPU)
    admissions = []
    for slot in range(3):
        ids = [rng.randrange(20) for _ in range(rng.randint(2, 30))]
        bias = {i: rng.uniform(-5, 5) for i in rng.sample(range(V), 3)}
        known = len(ids)
        admissions.append(
            Admission(
                *(slot, ids, rng.randint(1, known), known + rng.randint(1, 8), rng.random() < 0.4),
                **{"temperature": 0.8, "top_k": rng.choice([0, 5]), "top_p": rng.choice([1.0, 0.7]), "min_p": 0.05, "seed": rng.randrange(2**63)},
                **{"repetition": rng.choice([1.0, 1.3]), "presence": rng.choice([0.0, 0.4]), "frequency": 0.2, "logit_bias": bias},
                **{"banned_ids": [1, 2], "min_known": known + 2},
            )
        )
    table.admit(admissions)
    table.drafts.copy_(torch.randint(0, 20, table.drafts.shape))
    order, counts = rng.sample(range(3), 3), [rng.randint(0, MAX_DRAFTS + 1) for _ in range(3)]
    row_slots, cu = torch.tensor([*order, 3], dtype=torch.int32), torch.tensor([0, *counts, 0]).cumsum(0).int()
    logits = torch.randn(int(cu[-1]) + 2, V)
    processed = logits.clone()
    process_logits(processed, table, row_slots, cu)
    chosen, is_broken = choose(processed, table, row_slots, cu)
    assert torch.equal(process_and_choose(logits.clone(), table, row_slots, cu)[0], chosen) and not is_broken.any()
    assert torch.equal(processed[int(cu[-1]) :], logits[int(cu[-1]) :])
    emitted, num_emitted, num_accepted = verify_drafts(chosen, table, row_slots, cu)
    for b, slot in enumerate(order):
        own, drafts = admissions[slot], table.drafts[slot].tolist()
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
    commit(emitted, num_emitted, table, row_slots)
    for b, slot in enumerate(order):
        own, count = admissions[slot], int(num_emitted[b])
        known = len(own.token_ids) + count
        assert known <= own.max_total_tokens and int(table.num_tokens[slot]) == known
        assert table.tokens[slot, :known].tolist() == [*own.token_ids, *emitted[b, :count].tolist()]
        assert (emitted[b, count:] == -1).all()
