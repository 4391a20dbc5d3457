"""The reference operations, which specify the kernels, against statements of their own: plain loops, float64, published vectors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import scipy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backend.models.rope import rope_frequencies, rope_tables
from kernels import cpu_attention
from kernels import reference as ops
from kernels.attention import Heads
from kernels.step_attention import StepAttention, append_attention

NEGATIVE = float("-inf")


# -- norms and activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 64)])
def test_rms_norm(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=generator), torch.randn(shape[1], generator=generator)
    for row, got in zip(x.double(), ops.rms_norm(x, weight, 1e-5)):
        expected = row / math.sqrt(sum(v * v for v in row.tolist()) / len(row) + 1e-5) * weight.double()
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_silu_mul() -> None:
    gate, up = torch.linspace(-20, 20, 12).view(3, 4), torch.linspace(-2, 3, 12).view(3, 4)
    expected = [[g / (1 + math.exp(-g)) * u for g, u in zip(*rows)] for rows in zip(gate.tolist(), up.tolist())]
    torch.testing.assert_close(ops.silu_mul(torch.cat([gate, up], dim=-1)), torch.tensor(expected), rtol=1e-5, atol=1e-6)


# -- random numbers -------------------------------------------------------------------------------------------------------------


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 as the paper has it, on Python's integers."""
    (c0, c1, c2, c3), (k0, k1), low = counter, key, 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & low, (a >> 32) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_plain_statement_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    """Random123's known answers (kat_vectors, philox4x32 10). The operation's counters are a part of these only: see below."""
    as_words = [[int(word, 16) for word in text.split()] for text in (counter, key, expected)]
    assert philox4x32(as_words[0], as_words[1]) == as_words[2]


def test_philox_of_zeros_is_the_published_vector() -> None:
    got = ops.philox(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 4)
    assert [f"{word:08x}" for word in got[0].tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


SEEDS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, -1, 2**32 - 1, 2**32, 0x299F31D0A4093822, -(2**63)])


@given(
    rows=st.lists(st.tuples(SEEDS, st.integers(0, 2**32 - 1) | st.integers(0, 4096)), min_size=1, max_size=4),
    count=st.integers(1, 21),
    stream=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_philox(rows: list[tuple[int, int]], count: int, stream: int) -> None:
    """Counter (number / 4, position, stream, 0), key the seed's low and high words: also where products pass 2^63."""
    seeds, positions = torch.tensor([s for s, _ in rows]), torch.tensor([p for _, p in rows])
    got = ops.philox(seeds, positions, count, stream)
    assert got.shape == (len(rows), count) and got.dtype == torch.int64
    for (seed, position), numbers in zip(rows, got.tolist()):
        words = [w for block in range(-(-count // 4)) for w in philox4x32((block, position, stream, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))]
        assert numbers == words[:count]


def test_gumbel_noise_has_its_moments() -> None:
    """Mean 0.5772, variance pi^2 / 6, and the whole distribution (Kolmogorov-Smirnov), over 400,000 numbers."""
    noise = ops.gumbel_noise(torch.full((100,), 7), torch.arange(100), 4000).double()
    assert noise.mean().item() == pytest.approx(0.57721566, abs=0.008)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert scipy.stats.kstest(noise.flatten()[::8].numpy(), "gumbel_r").pvalue > 1e-3
    # Neighbours in every direction, seeds too, are not correlated.
    other = ops.gumbel_noise(torch.full((100,), 8), torch.arange(100), 4000).double()
    for a, b in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise, other)):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()) < 0.01


def test_gumbel_noise_by_its_formula() -> None:
    """A kernel computes the same one: another formula of the same distribution would draw other tokens."""
    words = ops.philox(torch.tensor([5]), torch.tensor([9]), 504)[0].tolist()
    numbers = []
    for token_id in range(500):
        place, half = token_id // 8 * 8 + token_id % 8 // 2, token_id % 2 * 16
        numbers.append((words[place] >> half & 0xFFFF) << 16 | words[place + 4] >> half & 0xFFFF)
    noise = ops.gumbel_noise(torch.tensor([5]), torch.tensor([9]), 500)[0].tolist()
    for number, got in zip(numbers, noise):
        assert got == pytest.approx(-math.log(-math.log1p(-(number + 0.5) / 2**32)), abs=1e-4)


def test_gumbel_noise_is_of_the_number_alone() -> None:
    """A wider vocabulary, or other rows beside it, leave a number as it is."""
    seeds, positions = torch.tensor([3, -5, 3]), torch.tensor([10, 10, 11])
    wide = ops.gumbel_noise(seeds, positions, 1000)
    for row in range(3):
        torch.testing.assert_close(ops.gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 77)[0], wide[row, :77], rtol=0, atol=0)
    assert not torch.equal(wide[0], wide[1]) and not torch.equal(wide[0], wide[2])


NEARLY_ALL_ONES = (0, 9977, 835)
"""Seed, position and token id whose 32-bit number is 0xffffffd4, which float32 rounds up to 2^32."""


def test_gumbel_noise_is_finite_at_the_largest_numbers() -> None:
    """Found by search: -log(-log1p(-1)) would be -inf, and a token that is the only one allowed could not be drawn."""
    seed, position, token_id = NEARLY_ALL_ONES
    number = ops.token_numbers(torch.tensor([seed]), torch.tensor([position]), token_id + 1, ops.SAMPLE_STREAM)[0, token_id].item()
    assert number == 0xFFFFFFD4
    assert ops.gumbel_noise(torch.tensor([seed]), torch.tensor([position]), token_id + 1)[0, token_id].isfinite()


# -- filters --------------------------------------------------------------------------------------------------------------------


def plain_filter(logits: list[float], top_k: int, top_p: float, min_p: float) -> tuple[list[int], float]:
    """The token ids that stay, and how far from a border the closest decision was."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])  # stable: equal logits go by id
    if top_k > 0:
        order = order[:top_k]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    probs = [w / math.fsum(weights) for w in weights]
    kept, before, margin = [], 0.0, math.inf
    for i, prob in zip(order, probs):
        if top_p < 1:
            margin = min(margin, abs(before - top_p) if kept else math.inf)
            if before >= top_p:
                break
        if min_p > 0 and kept:
            margin = min(margin, abs(prob - min_p * probs[0]) / probs[0])
        if prob >= min_p * probs[0]:
            kept.append(i)
        before += prob
    return kept, margin


@given(
    logits=st.lists(st.integers(-8, 8).map(float) | st.floats(-12, 12, width=32), min_size=1, max_size=24),
    top_k=st.integers(0, 26),
    top_p=st.just(1.0) | st.integers(1, 99).map(lambda p: p / 100),
    min_p=st.just(0.0) | st.integers(1, 100).map(lambda p: p / 100),
)
@settings(max_examples=300, deadline=None)
def test_filter_logits(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    kept, margin = plain_filter(logits, top_k, top_p, min_p)
    assume(margin > 1e-5)  # a float32 sum may decide a border either way
    got = ops.filter_logits(torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))[0].tolist()
    assert got == [value if i in kept else NEGATIVE for i, value in enumerate(logits)]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, [0, 1, 2, 3]),
        (1, 1.0, 0.0, [1]),
        (2, 1.0, 0.0, [0, 1]),
        (3, 1.0, 0.0, [0, 1, 2]),  # 2 and 3 are equal: the smaller id stays
        (99, 1.0, 0.0, [0, 1, 2, 3]),
        (0, 1e-30, 0.0, [1]),  # however small, the likeliest stays
        (0, 0.49, 0.0, [1]),
        (0, 0.51, 0.0, [0, 1]),
        (0, 0.76, 0.0, [0, 1, 2]),
        (2, 0.7, 0.0, [0, 1]),  # of the two that top_k left, the first has two thirds
        (2, 0.6, 0.0, [1]),
        (0, 1.0, 1.0, [1]),
        (0, 1.0, 0.4, [0, 1]),
        (0, 1.0, 0.24, [0, 1, 2, 3]),
        (3, 0.9, 0.3, [0, 1]),
    ],
)
def test_filter_examples(top_k: int, top_p: float, min_p: float, kept: list[int]) -> None:
    """Probabilities 1/4, 1/2, 1/8, 1/8."""
    logits = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log()
    got = ops.filter_logits(logits, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    assert got.isfinite().nonzero()[:, 1].tolist() == kept


def test_equal_logits_go_by_id() -> None:
    for width in (40, 4096):
        got = ops.filter_logits(torch.zeros(1, width), torch.tensor([10]), torch.ones(1), torch.zeros(1))
        assert got.isfinite().nonzero()[:, 1].tolist() == list(range(10))


def test_filter_leaves_bans_and_other_rows_alone() -> None:
    logits = torch.tensor([[1.0, NEGATIVE, 0.0, 2.0], [1.0, NEGATIVE, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    got = ops.filter_logits(logits, torch.tensor([0, 2, 0]), torch.tensor([1.0, 1.0, 0.5]), torch.zeros(3))
    assert got.tolist() == [[1.0, NEGATIVE, 0.0, 2.0], [1.0, NEGATIVE, NEGATIVE, 2.0], [0.0, 0.0, NEGATIVE, NEGATIVE]]


# -- sampling -------------------------------------------------------------------------------------------------------------------


def draw(
    logits: torch.Tensor, count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 11
) -> torch.Tensor:
    """One row's tokens at `count` positions."""

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype)

    long = torch.long
    parameters = (column(temperature), column(top_k, long), column(top_p), column(min_p), column(seed, long), torch.arange(count))
    return ops.sample(logits.expand(count, -1), *parameters)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
        {"seed": -(2**63)},
    ],
)
def test_sample_has_the_distribution_asked_for(options: dict[str, float]) -> None:
    """Chi-square of 40,000 draws; the seeds are fixed, so this passes always or never."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.7, NEGATIVE, 0.1])
    scaled = (logits.double() / options.get("temperature", 1.0)).tolist()
    kept, _ = plain_filter(scaled, int(options.get("top_k", 0)), options.get("top_p", 1.0), options.get("min_p", 0.0))
    weights = [math.exp(scaled[i]) if i in kept else 0.0 for i in range(len(scaled))]
    count = 40_000
    found = torch.bincount(draw(logits, count, **options), minlength=len(logits)).tolist()
    expected = [count * w / math.fsum(weights) for w in weights]
    assert all(f == 0 for f, e in zip(found, expected) if e == 0), f"a token that was filtered out: {found}"
    pairs = [(f, e) for f, e in zip(found, expected) if e > 0]
    assert scipy.stats.chisquare([f for f, _ in pairs], [e for _, e in pairs]).pvalue > 1e-3


def test_sample_does_not_depend_on_the_batch() -> None:
    """A row alone, and among rows with other parameters that switch the filters on, gives the same token."""
    generator = torch.Generator().manual_seed(1)
    rows = 60
    logits = torch.randn(rows, 500, generator=generator) * 3
    numbers = random.Random(5)
    columns = [
        torch.tensor([numbers.choice([0.3, 1.0, 1.7]) for _ in range(rows)]),
        torch.tensor([numbers.choice([0, 0, 1, 5, 50, 999]) for _ in range(rows)]),
        torch.tensor([numbers.choice([1.0, 1.0, 0.9, 0.3]) for _ in range(rows)]),
        torch.tensor([numbers.choice([0.0, 0.0, 0.1]) for _ in range(rows)]),
        torch.tensor([numbers.randrange(-(2**63), 2**63) for _ in range(rows)]),
        torch.tensor([numbers.randrange(5000) for _ in range(rows)]),
    ]
    together = ops.sample(logits, *columns)
    order = torch.tensor(numbers.sample(range(rows), rows))
    assert torch.equal(ops.sample(logits[order], *[c[order] for c in columns]), together[order])
    alone = torch.cat([ops.sample(logits[i : i + 1], *[c[i : i + 1] for c in columns]) for i in range(rows)])
    assert torch.equal(alone, together)


def test_draw_tokens_by_its_formula() -> None:
    """From the distribution that `sample` draws from, and in its stream, the same tokens; in another stream, others of the same distribution."""
    logits = torch.tensor([2.0, 1.0, 0.5, NEGATIVE, -0.5])
    count = 20_000
    seeds, positions = torch.full((count,), 7), torch.arange(count)
    probs = logits.softmax(dim=-1).expand(count, -1)
    same = ops.draw_tokens(probs, seeds, positions, ops.SAMPLE_STREAM)
    assert same.dtype == torch.int32
    drawn = ops.sample(
        logits.expand(count, -1), torch.ones(count), torch.zeros(count, dtype=torch.long), torch.ones(count), torch.zeros(count), seeds, positions
    )
    assert (same != drawn).sum() <= 2  # log(softmax) is rounded otherwise
    other = ops.draw_tokens(probs, seeds, positions, ops.DRAFT_STREAM)
    assert 0.2 < (other == same).double().mean() < 0.8
    found = torch.bincount(other, minlength=5).tolist()
    assert found[3] == 0
    kept = [i for i in range(5) if i != 3]
    weights = probs[0].double()
    expected = [count * (weights[i] / weights.sum()).item() for i in kept]
    assert scipy.stats.chisquare([found[i] for i in kept], expected).pvalue > 1e-3


def test_sample_at_a_low_temperature_is_greedy() -> None:
    logits = torch.tensor([0.0, 1.0, 0.9, -3.0])
    assert draw(logits, 2000, temperature=1e-3).tolist() == [1] * 2000


def test_sample_draws_the_only_token_allowed() -> None:
    """Whatever its noise is: at NEARLY_ALL_ONES it is the smallest that there can be."""
    seed, position, token_id = NEARLY_ALL_ONES
    one, positions = torch.ones(1), torch.tensor([position])
    alone = torch.full((1, 4096), NEGATIVE)
    alone[0, token_id] = 3.0
    likeliest = torch.zeros(1, 4096)
    likeliest[0, token_id] = 3.0
    for logits, top_k in ((alone, 0), (likeliest, 1)):
        got = ops.sample(logits, one, torch.tensor([top_k]), one, torch.zeros(1), torch.tensor([seed]), positions)
        assert got.tolist() == [token_id]


# -- rotary embedding -----------------------------------------------------------------------------------------------------------


def pages_of(num_pages: int, page: int, num_kv: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((num_pages, page, num_kv, size), float("nan"), dtype=dtype)


@pytest.mark.parametrize(("num_q", "num_kv", "size"), [(4, 4, 8), (8, 2, 16), (8, 1, 64), (1, 1, 2)])
def test_append_kv_rotates_as_complex_numbers_do(num_q: int, num_kv: int, size: int) -> None:
    """Half-split layout: (x[i], x[i + D/2]) is a complex number, turned by position * frequency[i]."""
    generator = torch.Generator().manual_seed(2)
    positions = [0, 1, 7, 300, 1999]
    count, half = len(positions), size // 2
    qkv = torch.randn(count, num_q + 2 * num_kv, size, generator=generator)
    before = qkv.clone()
    frequencies = rope_frequencies({"rope_theta": 10000.0}, size)
    cos, sin = rope_tables(frequencies, 2000, torch.float32, torch.device("cpu"))
    slots = torch.tensor([3, 0, 51, 28, 27])
    pool = pages_of(5, 13, num_kv, size)  # pages of 4 tokens lie 13 apart: what is between them is others'
    keys, values = pool[:, :4], pool[:, 7:11]
    queries = ops.append_kv(qkv, cos[positions], sin[positions], slots, keys, values)
    exponents = [10000.0 ** (-2 * i / size) for i in range(half)]
    turns = torch.polar(torch.ones(count, half).double(), torch.tensor([[p * f for f in exponents] for p in positions]).double())
    points = torch.complex(before[..., :half].double(), before[..., half:].double()) * turns[:, None]
    turned = torch.cat([points.real, points.imag], dim=-1)
    torch.testing.assert_close(queries.double(), turned[:, :num_q], rtol=0, atol=3e-4)  # angles of 2000 radians in float32
    stored = pool.view(-1, num_kv, size)
    torch.testing.assert_close(stored[slots].double(), turned[:, num_q : num_q + num_kv], rtol=0, atol=3e-4)
    assert torch.equal(stored[slots + 7], before[:, num_q + num_kv :]), "values are stored as they are"
    untouched = torch.ones(65, dtype=torch.bool)
    untouched[slots] = untouched[slots + 7] = False
    assert stored[untouched].isnan().all(), "a slot that is not listed was written"
    assert torch.equal(ops.token_rows(keys)[slots], stored[slots].flatten(1)) and ops.token_rows(values).shape == (56, num_kv * size)


def test_append_kv_keeps_lengths_and_position_zero() -> None:
    qkv = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(3))
    cos, sin = rope_tables(rope_frequencies({}, 8), 50, torch.float32, torch.device("cpu"))
    queries = ops.append_kv(qkv.clone(), cos[[0, 20, 49]], sin[[0, 20, 49]], torch.arange(3), pages_of(1, 4, 2, 8), pages_of(1, 4, 2, 8))
    torch.testing.assert_close(queries.norm(dim=-1), qkv[:, :2].norm(dim=-1))
    assert torch.equal(queries[0], qkv[0, :2])


def test_slots_that_are_not_written() -> None:
    pages = [pages_of(1, 4, 1, 8), pages_of(1, 4, 1, 8)]
    table = torch.ones(3, 1, 8)
    ops.append_kv(torch.randn(3, 3, 8), table, table, torch.tensor([-1, 2, -1]), pages[0], pages[1])
    for plane in pages:
        assert plane.isfinite().flatten(2).all(dim=2).tolist() == [[False, False, True, False]]


def test_what_is_no_plane_is_refused() -> None:
    for odd in (torch.zeros(3, 4, 2, 8).transpose(1, 2), torch.zeros(3, 4, 2, 9)[..., :8], torch.zeros(3, 70)[:, :64].view(3, 4, 2, 8)):
        with pytest.raises(ValueError, match=r"pages in one piece, \d+ n apart, are needed"):
            ops.token_rows(odd)


# -- attention ------------------------------------------------------------------------------------------------------------------

UNREAD = 10**9
"""A page id that no page has: reading it is an index error."""


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One request's queries [Q, H, D], the last Q of its keys' [S, Hkv, D] places, by loops in float64."""
    (count, num_q, size), (length, num_kv, _) = query.shape, keys.shape
    out = torch.zeros(count, num_q, size, dtype=torch.float64)
    for i in range(count):
        seen = length - count + i + 1
        for head in range(num_q):
            own = head // (num_q // num_kv)
            scores = keys[:seen, own].double() @ query[i, head].double() / math.sqrt(size)
            out[i, head] = scores.softmax(dim=0) @ values[:seen, own].double()
    return out


def check_attention(shapes: Sequence[tuple[int, int]], *, page: int, num_q: int, num_kv: int, size: int, dtype: torch.dtype, seed: int = 0) -> None:
    """shapes: (query_len, seq_len) of each request. Pages in random order, unread ones poisoned, unread page ids impossible."""
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [-(-length // page) for _, length in shapes]
    num_pages = sum(needed) + 3
    free = numbers.sample(range(num_pages), num_pages)
    pool = pages_of(num_pages, 2 * page + 1, num_kv, size, dtype)
    keys, values = pool[:, :page], pool[:, page + 1 :]
    page_ids: list[list[int]] = []
    whole: list[tuple[torch.Tensor, torch.Tensor]] = []
    for (_, length), count in zip(shapes, needed):
        own, free = free[:count], free[count:]
        page_ids.append([*own, *[UNREAD] * numbers.randint(0, 3)])
        # A page's slots past the end hold what was there before: numbers, and large ones here, so that a missing mask shows.
        k, v = (torch.randn(count * page, num_kv, size, generator=generator, dtype=dtype) for _ in range(2))
        k[length:], v[length:] = 50.0, 1e4
        keys[own], values[own] = k.view(count, page, num_kv, size), v.view(count, page, num_kv, size)
        whole.append((k[:length], v[:length]))
    query_lens = [count for count, _ in shapes]
    query = torch.randn(sum(query_lens), num_q, size, generator=generator, dtype=dtype)
    plan = ops.plan_attention(query_lens, [length for _, length in shapes], page_ids, page, num_q // num_kv, dtype)
    out = ops.append_attention(query, keys, values, plan)
    in_a_step = [query, keys, values, query_lens, [length for _, length in shapes], page_ids]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "is_usable", lambda *_: False)
        assert torch.equal(attend_in_a_step(*in_a_step, numbers), out)
    if cpu_attention.is_usable(size, dtype):  # by processors whose vectors are as short as these heads
        torch.testing.assert_close(attend_in_a_step(*in_a_step, numbers), out, rtol=2e-5, atol=2e-5)
    assert out.shape == query.shape and out.dtype == dtype
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    start = 0
    for (count, _), (k, v) in zip(shapes, whole):
        expected = plain_attention(query[start : start + count], k, v)
        torch.testing.assert_close(out[start : start + count].double(), expected, rtol=tolerance, atol=tolerance)
        start += count


def attend_in_a_step(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    page_ids: list[list[int]],
    rng: random.Random,
) -> torch.Tensor:
    """The same by lengths and pages in tensors, with an inactive row between the others."""
    batch, page = len(query_lens) + 1, keys.shape[1]
    lens, ends, indices = list(query_lens), list(seq_lens), rng.sample(range(batch + 2), batch)
    idle = rng.randrange(batch)
    lens.insert(idle, 0)
    ends.insert(idle, rng.choice([0, 9]))
    table = torch.full((batch + 2, max(len(own) for own in page_ids)), UNREAD, dtype=torch.int32)
    for own, index in zip(page_ids, indices[:idle] + indices[idle + 1 :], strict=True):
        table[index, : len(own)] = torch.tensor(own)
    plan = StepAttention(
        cu_query_lens=torch.tensor([0, *lens]).cumsum(0).int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        request_indices=torch.tensor(indices, dtype=torch.int32),
        page_table=table,
        num_prompts=1,
        num_prompt_rows=lens[0] or 1,
        max_prompt_query_len=lens[0] or 1,
        max_prompt_seq_len=ends[0] or 1,
        num_prompt_keys=ends[0] or 1,
        max_query_len=max(lens),
        max_seq_len=max(ends),
        page_size=page,
        heads=Heads(query.shape[1], keys.shape[2], query.shape[2]),
        dtype=query.dtype,
    )
    plan.refresh()
    return append_attention(query, keys, values, plan)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_of_mixed_requests(groups: int, dtype: torch.dtype) -> None:
    """Decoding, drafts and prompts in one batch; lengths before, on and after the border of a page."""
    shapes = [(1, 17), (5, 16), (1, 1), (3, 3), (40, 40), (1, 33), (33, 50), (6, 31), (32, 32), (1, 16), (2, 48), (1, 150)]
    check_attention(shapes, page=16, num_q=2 * groups, num_kv=2, size=8, dtype=dtype)


@pytest.mark.parametrize("page", [1, 2, 16])
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1)],
        [(1, 16)],
        [(1, 17)],
        [(16, 16)],
        [(1, 15), (1, 16), (1, 17)],
        [(2, 2), (1, 1)],
        [(ops.MAX_GROUPED_QUERIES, 40), (ops.MAX_GROUPED_QUERIES + 1, 40)],
        [(1, 5)] * 9,
        [(1, 300), (1, 2), (4, 90), (1, 3), (4, 4)],
        [(64, 64), (1, 64)],
        [(1, 5), (40, 40), (1, 6)],  # the first and the last are computed together, and lie apart
        [(2, 9), (1, 500), (2, 9)],
        [(1, 10), (1, 40), (1, 20), (1, 60)],  # by length in another order than in the batch
    ],
)
def test_attention_at_the_edges(shapes: list[tuple[int, int]], page: int) -> None:
    check_attention(shapes, page=page, num_q=4, num_kv=2, size=4, dtype=torch.float64)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)).map(lambda s: (s[0], s[0] + s[1])), min_size=1, max_size=7),
    page=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (8, 1)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_attention_of_any_batch(shapes: list[tuple[int, int]], page: int, heads: tuple[int, int], seed: int) -> None:
    check_attention(shapes, page=page, num_q=heads[0], num_kv=heads[1], size=4, dtype=torch.float64, seed=seed)


def test_requests_are_grouped_and_each_is_in_one_group() -> None:
    """One call serves many requests of like length; a long one among short ones must not make padding of all of them."""
    query_lens, seq_lens = [1] * 20 + [100] + [1] * 20, [20] * 20 + [100] + [2000] * 20
    page_ids = [list(range(125))] * 41
    plan = ops.plan_attention(query_lens, seq_lens, page_ids, 16, 1, torch.float32)
    assert len(plan.groups) == 3
    assert sum(len(g.pages) for g in plan.groups) == 20 * 2 + 7 + 20 * 125
    covered = torch.zeros(140, dtype=torch.long)
    for group in plan.groups:
        covered[group.targets] += 1
    assert covered.tolist() == [1] * 140


# -- penalties ------------------------------------------------------------------------------------------------------------------


@given(data=st.data(), rows=st.integers(1, 4), vocab=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_apply_penalties(data: st.DataObject, rows: int, vocab: int) -> None:
    def table(values: st.SearchStrategy[float]) -> list[list[float]]:
        return data.draw(st.lists(st.lists(values, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows))

    def column(low: float, high: float) -> list[float]:
        return data.draw(st.lists(st.floats(low, high, width=32), min_size=rows, max_size=rows))

    logits = table(st.floats(-10, 10, width=32) | st.sampled_from([0.0, NEGATIVE]))
    prompt, counts = table(st.booleans()), table(st.integers(0, 3).map(float))
    repetition, presence, frequency = column(0.5, 10), column(-2, 2), column(-2, 2)
    tensors = [torch.tensor(repetition), torch.tensor(presence), torch.tensor(frequency)]
    given_logits = torch.tensor(logits)
    got = ops.apply_penalties(given_logits, torch.tensor(prompt, dtype=torch.bool), torch.tensor(counts), *tensors)
    expected = []
    for r in range(rows):
        row = []
        for t in range(vocab):
            value = logits[r][t]
            if prompt[r][t] or counts[r][t]:
                value = value / repetition[r] if value > 0 else value * repetition[r]
            row.append(value - (presence[r] if counts[r][t] else 0.0) - frequency[r] * counts[r][t])
        expected.append(row)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert given_logits.tolist() == logits, "the logits that were given are not changed"


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 3.0]])
    prompt = torch.tensor([[True, True, False, False, False]])
    counts = torch.tensor([[0.0, 0.0, 1.0, 3.0, 0.0]])
    got = ops.apply_penalties(logits, prompt, counts, torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25]))
    assert got.tolist() == [[1.0, -4.0, 1.0 - 0.75, -4.0 - 1.25, 3.0]]


# -- verification ---------------------------------------------------------------------------------------------------------------


def plain_verify(drafts: Sequence[int], targets: Sequence[int]) -> tuple[list[int], int]:
    """Emitted tokens and how many drafts among them, of one request."""
    emitted: list[int] = []
    for draft, target in zip(drafts, targets):
        emitted.append(target)
        if draft != target:
            return emitted, len(emitted) - 1
    return [*emitted, targets[len(drafts)]], len(drafts)


PAIRS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5)
"""One request's drafts with the target's choice at each."""


@given(rows=st.lists(st.tuples(PAIRS, st.integers(0, 2)), min_size=1, max_size=5), spare=st.integers(0, 2), fill=st.sampled_from([-1, 0, 1]))
@settings(max_examples=300, deadline=None)
def test_verify(rows: list[tuple[list[tuple[int, int]], int]], spare: int, fill: int) -> None:
    """Ragged numbers of drafts, K = 0 among them; what stands in the padding may look like a match, and counts for nothing."""
    width = max(len(pairs) for pairs, _ in rows) + spare
    drafts = [[d for d, _ in pairs] + [fill] * (width - len(pairs)) for pairs, _ in rows]
    targets = [[t for _, t in pairs] + [last] + [fill] * (width - len(pairs)) for pairs, last in rows]
    lengths = [len(pairs) for pairs, _ in rows]
    tensors = torch.tensor(drafts, dtype=torch.long).view(len(rows), width), torch.tensor(lengths), torch.tensor(targets)
    token_ids, accepted = ops.verify(*tensors)
    assert token_ids.shape == (len(rows), width + 1)
    for (pairs, last), row, count in zip(rows, token_ids.tolist(), accepted.tolist()):
        emitted, expected = plain_verify([d for d, _ in pairs], [*[t for _, t in pairs], last])
        assert count == expected
        assert row == emitted + [-1] * (width + 1 - len(emitted))


def test_verify_by_hand() -> None:
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, -1, -1], [-1, -1, -1]])
    targets = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8], [5, 6, 9, 8], [5, 4, -1, -1], [3, -1, -1, -1]])
    token_ids, accepted = ops.verify(drafts, torch.tensor([3, 3, 3, 1, 0]), targets)
    assert accepted.tolist() == [3, 0, 2, 1, 0]
    assert token_ids.tolist() == [[5, 6, 7, 8], [9, -1, -1, -1], [5, 6, 9, -1], [5, 4, -1, -1], [3, -1, -1, -1]]


def test_verify_without_drafts_is_plain_decoding() -> None:
    """K = 0: the same operation, one column wide."""
    token_ids, accepted = ops.verify(torch.empty(3, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long), torch.tensor([[4], [0], [9]]))
    assert token_ids.tolist() == [[4], [0], [9]]
    assert accepted.tolist() == [0, 0, 0]


def test_one_long_draft_widens_no_other_requests_attention() -> None:
    """Nor does a long context lengthen it: what a step multiplies is little more than what is asked."""
    query_lens, seq_lens = [4] * 15 + [13, 1], [300] * 15 + [313, 2000]
    plan = ops.plan_attention(query_lens, seq_lens, [list(range(125))] * 17, 16, 1, torch.float32)
    made = sum(group.mask[:, 0].numel() for group in plan.groups)
    asked = sum(queries * -(-length // 16) * 16 for queries, length in zip(query_lens, seq_lens))
    assert asked <= made <= 1.1 * asked
