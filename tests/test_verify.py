"""Verification: rejection sampling keeps the target's distribution, and FastDeploy's rule is what its statement says."""

from __future__ import annotations

import itertools
import operator
import random
from collections import Counter

import pytest
import scipy
import torch

from backend import SamplingParams
from backend.speculative_config import SpeculativeConfig
from backend.step.distributions import Distributions
from backend.step.options import Options
from kernels import ops, reference
from kernels.request_state import Admission
from kernels.request_table import RequestTable
from tests.test_sampling import assert_follows

VOCABULARY, DRAFTS, DRAWS = 5, 2, 60_000


def conditional(seed: int) -> dict[tuple[int, ...], list[float]]:
    """A random model: the next token's probabilities after every history of up to DRAFTS tokens."""
    rng = random.Random(seed)
    table = {}
    for length in range(DRAFTS + 1):
        for history in itertools.product(range(VOCABULARY), repeat=length):
            weights = [rng.random() ** 3 for _ in range(VOCABULARY)]
            table[history] = [w / sum(weights) for w in weights]
    return table


def draw_pairs(target, drafter, is_certain: bool, verify) -> Counter:
    """First DRAFTS tokens of DRAWS verified spans; what a span leaves open is drawn from the target itself."""
    rng = random.Random(1)
    drafts = []
    for _ in range(DRAWS):
        history: tuple[int, ...] = ()
        for _ in range(DRAFTS):
            weights = drafter[history]
            token = max(range(VOCABULARY), key=weights.__getitem__) if is_certain else rng.choices(range(VOCABULARY), weights)[0]
            history += (token,)
        drafts.append(history)
    probs = torch.tensor([[target[d[:i]] for i in range(DRAFTS + 1)] for d in drafts])
    draft_probs = None if is_certain else torch.tensor([[drafter[d[:i]] for i in range(DRAFTS)] for d in drafts])
    seeds, positions = torch.arange(DRAWS) * 7919 + 5, torch.full((DRAWS,), 40)
    token_ids, accepted = verify(probs, torch.tensor(drafts), torch.full((DRAWS,), DRAFTS), draft_probs, seeds, positions)
    spans = []
    for row, count in zip(token_ids.tolist(), accepted.tolist()):
        span = tuple(row[: count + 1])
        assert row[count + 1 :] == [-1] * (DRAFTS - count) and -1 not in span
        while len(span) < DRAFTS:
            span += (rng.choices(range(VOCABULARY), target[span])[0],)
        spans.append(span[:DRAFTS])
    return Counter(spans)


def follows(counts: Counter, target) -> float:
    pairs = list(itertools.product(range(VOCABULARY), repeat=DRAFTS))
    wanted = [target[()][a] * target[a,][b] * DRAWS for a, b in pairs]
    return scipy.stats.chisquare([counts[p] for p in pairs], wanted).pvalue


@pytest.mark.parametrize("is_certain", [False, True], ids=["drawn", "one-hot"])
@pytest.mark.parametrize("drafter_seed", [1, 2], ids=["as the target", "bad"])
def test_rejection_keeps_the_distribution(is_certain, drafter_seed):
    target, drafter = conditional(1), conditional(drafter_seed)
    assert follows(draw_pairs(target, drafter, is_certain, reference.verify_rejection), target) > 1e-4


@pytest.mark.parametrize("is_certain", [False, True], ids=["drawn", "one-hot"])
def test_the_test_above_catches_a_verifier_without_residual(is_certain):
    """Replacing a rejected draft from p itself, not from what is left of it, must show."""

    def careless(probs, drafts, lengths, draft_probs, seeds, positions):
        token_ids, accepted = reference.verify_rejection(probs, drafts, lengths, draft_probs, seeds, positions)
        rows = torch.arange(len(drafts))
        noise = reference.gumbel_noise(seeds, positions + accepted, probs.shape[-1], reference.RECOVER_STREAM)
        token_ids[rows, accepted] = (probs[rows, accepted].log() + noise).argmax(-1)
        return token_ids, accepted

    target, drafter = conditional(1), conditional(2)
    assert follows(draw_pairs(target, drafter, is_certain, careless), target) < 1e-9


def test_ragged_drafts():
    probs = torch.tensor(conditional(3)[()]).repeat(3, 4, 1)
    drafts = torch.tensor([[1, 2, 3], [2, -1, -1], [4, 0, -1]])
    seeds = torch.tensor([1, 2, 3])
    token_ids, accepted = reference.verify_rejection(probs, drafts, torch.tensor([3, 1, 2]), None, seeds, torch.tensor([9, 9, 9]))
    for row, count, draft, length in zip(token_ids.tolist(), accepted.tolist(), drafts.tolist(), (3, 1, 2)):
        assert count <= length and row[:count] == draft[:count] and row[count] >= 0 and set(row[count + 1 :]) <= {-1}


@pytest.mark.parametrize(
    ("known", "num_kept"),
    [(0, DRAFTS), (1, DRAFTS), (2, DRAFTS), (2, 1)],
    ids=["certain", "first drawn, then looked up", "drawn", "drawn, and the first kept"],
)
def test_drafts_of_mixed_origin_keep_the_distribution(known, num_kept):
    """What a hybrid drafter proposes: the first drafts with the distributions that they were drawn from, the others without.

    In one batch with entries of the other two kinds, and with shorter ones. The distributions have to be used: a drawn draft that is
    taken for a certain one is accepted less often, and the tokens would not show it.
    """
    batch, rounds, rng = 200, 40, random.Random(known)
    target, other = conditional(1), conditional(2)
    drafter = {history: [(a + b) / 2 for a, b in zip(weights, other[history])] for history, weights in target.items()}
    proposed = {h: [[float(i == max(range(VOCABULARY), key=w.__getitem__)) for i in range(VOCABULARY)], w] for h, w in drafter.items()}
    table = RequestTable(batch, 8, DRAFTS, VOCABULARY, torch.device("cpu"))
    distributions = Distributions(table, SpeculativeConfig(method="mtp", num_model_steps=num_kept))
    indices = torch.arange(batch, dtype=torch.int32)
    spans: Counter[tuple[int, ...]] = Counter()
    accepted: Counter[int] = Counter()
    for turn in range(rounds):
        seeds = [104729 * (batch * turn + i) + 7 for i in range(batch)]
        table.admit([Admission(i, [3, 1, 4], 3, 8, seed=seed, is_rejection=True) for i, seed in enumerate(seeds)])
        kinds = [known if i % 4 else (known + 1 + i // 4 % 2) % 3 for i in range(batch)]
        drafts, rows, starts = [], [], [0]
        for i, kind in enumerate(kinds):
            history: tuple[int, ...] = ()
            for place in range(1 if i % 7 == 0 else DRAFTS):
                history += (rng.choices(range(VOCABULARY), proposed[history][place < kind])[0],)
            drafts.append(history)
            rows += [target[history[:place]] for place in range(len(history) + 1)]
            starts.append(len(rows))
            table.drafts[i, : len(history)] = torch.tensor(history, dtype=torch.int32)
            distributions.put(i, torch.tensor([drafter[history[:place]] for place in range(min(kind, len(history)))]).view(-1, VOCABULARY))
        table.num_drafts[:batch] = num_drafts = torch.tensor([len(history) for history in drafts], dtype=torch.int32)
        logits, cu = torch.tensor(rows).log(), torch.tensor(starts, dtype=torch.int32)
        chosen, _ = ops.process_and_choose(logits, table, indices, cu)
        emitted, num_emitted, num_accepted = ops.verify_drafts(chosen, table, indices, cu)
        distributions.verify(logits, indices, cu, num_drafts, DRAFTS + 1, Options.REJECTION, (emitted, num_emitted, num_accepted))
        for i in range(batch):
            span = tuple(emitted[i, : num_emitted[i]].tolist())
            assert span[:-1] == drafts[i][: num_accepted[i]] and len(span) == num_accepted[i] + 1
            if kinds[i] == known:
                accepted[int(num_accepted[i])] += len(drafts[i]) == DRAFTS
                while len(span) < DRAFTS:
                    span += (rng.choices(range(VOCABULARY), target[span])[0],)
                spans[span[:DRAFTS]] += 1
    assert_follows(spans, {(a, b): target[()][a] * target[a,][b] for a in range(VOCABULARY) for b in range(VOCABULARY)}, spans.total())
    # How often the draft after h is accepted: one whose distribution is not kept, as often as the target has it.
    overlap = {h: sum(map(min if len(h) < num_kept else operator.mul, target[h], proposed[h][len(h) < known])) for h in target}
    both = sum(min(p, q) * overlap[a,] for a, (p, q) in enumerate(zip(target[()], proposed[()][known > 0])))
    assert_follows(accepted, {0: 1 - overlap[()], 1: overlap[()] - both, 2: both}, accepted.total())


def plain_top_p(drafts, rows, top_p, max_candidates, window):
    """The rule in words: (accepted drafts, row that the last token comes from, its candidates)."""

    def candidates(row):
        ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))[:max_candidates]
        kept, mass = [], 0.0
        for token in ranked:
            kept.append(token)
            mass += row[token]
            if mass >= top_p - 1e-9:
                break
        return kept, ranked

    place = 0
    while place < len(drafts):
        kept, ranked = candidates(rows[place])
        if drafts[place] in kept:
            place += 1
        elif (
            len(ranked) > 1
            and drafts[place] == ranked[1]
            and len(drafts) - place - 1 >= window
            and all(drafts[place + 1 + j] == candidates(rows[place + 1 + j])[1][0] for j in range(window))
        ):
            place += 1 + window
        else:
            break
    return place, candidates(rows[place])[0]


def test_top_p_rule_against_its_plain_statement():
    rng = random.Random(0)
    seen = Counter()
    for trial in range(3000):
        count, window, most = rng.randint(1, 5), rng.randint(1, 2), rng.choice([1, 2, 3, 5, 9])
        top_p = rng.choice([0.1, 0.5, 0.75, 0.9, 1.0])
        rows = []
        for _ in range(count + 1):
            weights = [rng.choice([1, 2, 4, 8, 16, 32]) + rng.random() / 8 for _ in range(6)]
            rows.append([w / sum(weights) for w in weights])
        drafts = [sorted(range(6), key=lambda i, r=row: -r[i])[min(int(rng.expovariate(1.5)), 5)] for row in rows[:count]]
        place, allowed = plain_top_p(drafts, rows, top_p, most, window)
        probs = torch.tensor(rows, dtype=torch.float64)
        ids, weights, num = reference.top_p_candidates(probs, torch.full((count + 1,), top_p, dtype=torch.float64), most)
        corrections = ids[:, :1].T  # the likeliest: any of the candidates would do
        token_ids, accepted = reference.verify_top_p(torch.tensor([drafts]), torch.tensor([count]), ids[None], num[None], corrections, window)
        assert accepted.tolist() == [place], trial
        assert token_ids[0].tolist() == [*drafts[:place], corrections[0, place], *[-1] * (count - place)], trial
        assert set(ids[place, : num[place]].tolist()) == set(allowed)
        seen["all" if place == count else "some" if place else "none"] += 1
        seen["window"] += any(drafts[i] not in plain_top_p([drafts[i]], rows[i:], top_p, most, 9)[1] for i in range(place))
        seen["not reached"] += len(allowed) == min(most, 6) and sum(rows[place][i] for i in allowed) < top_p
    assert min(seen.values()) > 50, seen


STRATEGIES = {s: {"method": "ngram", "verify_strategy": s, "num_speculative_tokens": 4} for s in ("target_match", "topp")}
REPEATING = (
    "class Box:\n"
    + "".join(f"    def get_{n}(self):\n        return self._{n}\n\n" for n in ("width", "height", "depth"))
    + "    def get_size(self):"
)


def test_top_p_accepts_more_than_target_match(llm_all):
    accepted = {}
    for strategy in ("target_match", "topp"):
        params = [SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95, seed=i, ignore_eos=True) for i in range(16)]
        results = llm_all.generate([REPEATING] * 16, params, speculative=STRATEGIES[strategy], use_tqdm=False)
        accepted[strategy] = sum(r.outputs[0].stats.accepted for r in results) / sum(r.outputs[0].stats.drafted for r in results)
    assert accepted["topp"] > accepted["target_match"]
