"""Logits processing and sampling against the reference: the same ids, but where float32 cannot tell two of them apart."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import reference
from kernels.ops import Admission, RequestTable
from kernels.reference import request_table as reference_table
from kernels.sampling import choose, process_and_choose, process_logits, sample
from tests.gpu.logits import make_logits

CORRECTNESS = [(1, 8), (3, 1001), (7, 4096), (40, 4096), (150, 515)]
CORNER = [(1, 1), (2, 3), (1, 128256), (5, 151936), (130, 32003), (300, 16384)]
PERFORMANCE = [(20, 128256), (200, 128256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_parameters(rows: int, vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    """temperature, top_k, top_p, min_p, seeds, positions: every filter on and off."""

    def pick(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(random.choices(values, k=rows), dtype=dtype, device=device)

    return [
        pick([0.1, 0.7, 0.8, 1.0, 3.0, 1e30], torch.float32),
        pick([0, 0, 1, 2, 50, vocab_size // 2, vocab_size], torch.int64),
        pick([1.0, 1.0, 0.95, 0.9, 0.5, 0.05, 1e-6], torch.float32),
        pick([0.0, 0.0, 0.01, 0.2, 1.0], torch.float32),
        torch.randint(-(2**63), 2**63 - 1, (rows,), device=device),
        torch.randint(0, 100000, (rows,), device=device),
    ]


def is_right(logits: torch.Tensor, token_id: int, parameters: list[torch.Tensor]) -> bool:
    """In float64: the token is kept, and no kept one scores more, up to float32's rounding."""
    temperature, top_k, top_p, min_p, seed, position = parameters
    noise = reference.gumbel_noise(seed[None], position[None], len(logits))[0].double()
    scaled = (logits.float() / temperature).double()
    order = scaled.argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    is_in = (rank < top_k) | (top_k == 0)
    probs = scaled.masked_fill(~is_in, float("-inf")).softmax(0)
    before = torch.empty_like(probs).scatter_(0, order, probs[order].cumsum(0) - probs[order])
    slack = 1e-5 + 1e-6 * scaled[scaled.isfinite()].abs().max()

    def kept(sign: int) -> torch.Tensor:
        is_kept = is_in & (((before < top_p + sign * slack) & (top_p < 1)) | (top_p >= 1) | (rank == 0))
        return is_kept & (probs >= min_p * probs.max() * (1 - sign * slack))

    best = (scaled + noise)[kept(-1)].max() if kept(-1).any() else torch.tensor(float("-inf"))
    return bool(kept(1)[token_id]) and bool((scaled + noise)[token_id] >= best - slack)


def check(logits: torch.Tensor, parameters: list[torch.Tensor], got: torch.Tensor, want: torch.Tensor) -> None:
    differing = (got.long() != want).nonzero()[:, 0].tolist()
    for row in differing:
        own = [p[row] for p in parameters]
        assert is_right(logits[row], int(got[row]), own), (row, int(got[row]), int(want[row]), own)
    assert len(differing) <= 1 + len(got) // 50


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "constant", "wide", "banned", "few", "certain"])
@pytest.mark.parametrize(("rows", "vocab_size"), CORRECTNESS + CORNER)
def test_sample(rows: int, vocab_size: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    logits, parameters = make_logits(kind, rows, vocab_size, dtype, device), make_parameters(rows, vocab_size, device)
    check(logits, parameters, sample(logits, *parameters), reference.sample(logits, *parameters))


@pytest.mark.parametrize("kind", ["flat", "peaked"])
@pytest.mark.parametrize(("rows", "vocab_size"), PERFORMANCE)
def test_sample_large(rows: int, vocab_size: int, kind: str, device: torch.device) -> None:
    logits, parameters = make_logits(kind, rows, vocab_size, torch.bfloat16, device), make_parameters(rows, vocab_size, device)
    check(logits, parameters, sample(logits, *parameters), reference.sample(logits, *parameters))


def test_a_vocabulary_that_leaves_no_room_for_chunks_on_their_way(device: torch.device) -> None:
    """In float32, and with so many rows that each has one block."""
    rows, vocab_size = 160, 262144
    logits, parameters = make_logits("flat", rows, vocab_size, torch.float32, device), make_parameters(rows, vocab_size, device)
    for kind in range(4):
        own = slice(kind * 40, kind * 40 + 40)  # the reference takes gigabytes for all at once
        got = sample(logits, *parameters)[own]
        check(logits[own], [p[own] for p in parameters], got, reference.sample(logits[own], *(p[own] for p in parameters)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["flat", "constant", "banned"])
@pytest.mark.parametrize("top_p", [0.03, 0.5, 0.9, 0.99])
def test_many_tokens_may_be_kept(top_p: float, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """So many rows that each has one block, and in most of them more tokens to choose among than are listed."""
    rows, vocab_size = 280, 40000
    logits, parameters = make_logits(kind, rows, vocab_size, dtype, device), make_parameters(rows, vocab_size, device)
    full = [torch.full((rows,), value, device=device) for value in (0.8, top_p, 0.0)]
    for top_k in (0, vocab_size // 3):
        parameters[:4] = [full[0], torch.full((rows,), top_k, device=device), full[1], full[2]]
        check(logits, parameters, sample(logits, *parameters), reference.sample(logits, *parameters))


NUM_LIKELY = [1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 700]
"""About where a warp, and a block's list of tokens that may be kept, is full."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("vocab_size", [16384, 16391])
@pytest.mark.parametrize("rows", [3, 150, 300])
def test_likely_tokens_fill_a_list(rows: int, vocab_size: int, is_packed: bool, is_tied: bool, dtype: torch.dtype, device: torch.device) -> None:
    """So many tokens far above the others, all in neighbouring places or eight places apart, equal or close; the same ids in any order."""
    logits = torch.randn(rows, vocab_size, device=device) - 30
    for row in range(rows):
        count = NUM_LIKELY[row % len(NUM_LIKELY)]
        places = torch.arange(count, device=device) * (1 if is_packed else 8) + row
        logits[row, places] = torch.zeros(count, device=device) if is_tied else torch.rand(count, device=device)
    logits = logits.to(dtype)
    counts = torch.tensor(NUM_LIKELY, device=device).repeat(-(-rows // len(NUM_LIKELY)))[:rows]
    for top_k, top_p, min_p in ((0, 0.9, 0.0), (0, 0.31, 0.0), (0, 1.0, 0.4), (1, 0.9, 0.0), (-1, 0.93, 0.0), (-1, 1.0, 0.0), (-2, 0.97, 0.5)):
        # Negative top_k: it is all of the likely tokens, or leaves out some of equal ones.
        kept = counts.clone() if top_k == -1 else (counts * 2 // 3).clamp(min=1) if top_k == -2 else torch.full_like(counts, top_k)
        full = [torch.full((rows,), value, device=device) for value in (0.8, top_p, min_p)]
        seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device=device)
        parameters = [full[0], kept, full[1], full[2], seeds, torch.arange(rows, device=device)]
        got = sample(logits, *parameters)
        check(logits, parameters, got, reference.sample(logits, *parameters))
        assert torch.equal(got.flip(0), sample(logits.flip(0).contiguous(), *(p.flip(0) for p in parameters)))


def test_the_distribution_is_the_reference_s(device: torch.device) -> None:
    """65,536 draws of one row: frequencies within five standard deviations."""
    count, vocab_size = 65536, 64
    logits = (torch.randn(1, vocab_size, device=device) * 2).expand(count, -1).contiguous()
    full = [torch.full((count,), v, device=device) for v in (0.8, 0, 0.9, 0.0, 7)]
    parameters = [*full[:4], full[4].long(), torch.arange(count, device=device)]
    counts = torch.bincount(sample(logits, *parameters).long(), minlength=vocab_size).double()
    expected = reference.probabilities(logits[:1], *(p[:1] for p in parameters[:4]))[0].double() * count
    assert ((counts - expected).abs() <= 5 * expected.sqrt() + 1e-9).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 20, 40, 200])
def test_greedy_takes_the_lowest_id_of_equals(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    for vocab_size, kind in ((5000, "ties"), (4999, "flat"), (128256, "constant"), (64, "banned")):
        logits = make_logits(kind, rows, vocab_size, dtype, device)
        zero = torch.zeros(rows, device=device)
        ones = zero + 1
        got = sample(logits, zero, zero.long(), ones, zero, zero.long(), zero.long())
        best = logits.float().max(dim=1, keepdim=True).values
        want = (logits.float() == best).int().argmax(dim=1)
        assert torch.equal(got.long(), want)


def random_admission(index: int, vocab_size: int, max_len: int, min_room: int = 40) -> Admission:
    known = random.randint(1, max_len - min_room)
    ids = [random.randrange(vocab_size) for _ in range(random.choice([2, 30, 3000]))]
    bias_ids = random.sample(range(vocab_size), min(random.choice([0, 0, 5, 1024]), vocab_size))
    return Admission(
        index=index,
        token_ids=random.choices(ids, k=known),
        num_prompt_tokens=random.randint(1, known),
        max_total_tokens=random.randint(known + 1, max_len),
        is_greedy=random.random() < 0.4,
        temperature=random.choice([0.5, 0.8, 1.0, 2.0]),
        top_k=random.choice([0, 0, 5, 40]),
        top_p=random.choice([1.0, 0.9, 0.4]),
        min_p=random.choice([0.0, 0.0, 0.1]),
        seed=random.randrange(-(2**63), 2**63),
        repetition=random.choice([1.0, 1.0, 1.3, 0.7]),
        presence=random.choice([0.0, 0.0, 0.5]),
        frequency=random.choice([0.0, 0.0, -1.5, 0.3]),
        logit_bias={i: random.uniform(-100, 100) for i in bias_ids},
        banned_ids=random.sample(range(vocab_size), random.choice([0, 1, 20])),
        min_known=random.choice([0, known + 2, known + 50]),
    )


def make_tables(requests: int, vocab_size: int, max_len: int, max_drafts: int, device: torch.device) -> tuple[RequestTable, RequestTable]:
    """The same on the device and on the CPU, with requests admitted twice over and random drafts."""
    here, there = (RequestTable(requests, max_len, max_drafts, vocab_size, d) for d in (device, torch.device("cpu")))
    for turn in range(2):
        admissions = [random_admission(index, vocab_size, max_len) for index in range(requests)]
        for table in (here, there):
            table.admit(admissions, ring=turn)
    drafts = torch.randint(0, vocab_size, here.drafts.shape, dtype=torch.int32)
    drafts[::2, 2:] = drafts[::2, :1]  # duplicates
    for index in range(0, requests, 3):
        drafts[index, 1] = there.tokens[index, 0]
    here.drafts.copy_(drafts)
    there.drafts.copy_(drafts)
    return here, there


def pack(requests: int, max_drafts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """request_indices and cu_query_lens, some requests without rows, padding requests at the end."""
    order = torch.randperm(requests).tolist()
    counts = [random.randint(0, max_drafts + 1) for _ in order]
    request_indices = torch.tensor([*order, requests, requests], dtype=torch.int32)
    cu = torch.tensor([0, *counts, 0, 0]).cumsum(0).int()
    return request_indices, cu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("requests", "vocab_size", "max_len"), [(1, 3000, 300), (9, 4096, 300), (9, 4096, 5000), (60, 5001, 300), (120, 4096, 300), (3, 128256, 300)]
)
def test_process_and_choose(requests: int, vocab_size: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
    here, there = make_tables(requests, vocab_size, max_len, 5, device)
    request_indices, cu = pack(requests, 5, device)
    num_rows = int(cu[-1]) + 3
    logits = (torch.randn(num_rows, vocab_size) * 3).to(dtype)
    logits[int(cu[-1]) :] = float("nan")  # padding
    expected, got = logits.clone(), logits.to(device)
    reference_table.process_logits(expected, there, request_indices, cu)
    process_logits(got, here, request_indices.to(device), cu.to(device))
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    want, want_broken = reference_table.choose(expected, there, request_indices, cu)
    outputs = (torch.full((num_rows,), -7, dtype=torch.int32, device=device), torch.ones(num_rows, dtype=torch.bool, device=device))
    ids, is_broken = choose(got, here, request_indices.to(device), cu.to(device), outputs)
    assert not is_broken.any() and not want_broken.any()
    raw = logits.to(device)
    fused, _ = process_and_choose(raw, here, request_indices.to(device), cu.to(device))
    torch.testing.assert_close(raw, got, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(fused, ids)
    raw, parts = logits.to(device), []
    for first in range(0, num_rows, share := -(-num_rows // 4)):  # as ranks do
        parts.append(process_and_choose(raw[first : first + share], here, request_indices.to(device), cu.to(device), first_row=first))
    torch.testing.assert_close(raw, got, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.cat([part[0] for part in parts]), ids) and not torch.cat([part[1] for part in parts]).any()
    ahead, _ = choose(got, here, request_indices.to(device), cu.to(device), ahead=3)
    here.num_tokens += 3
    assert torch.equal(choose(got, here, request_indices.to(device), cu.to(device))[0], ahead)
    here.num_tokens -= 3
    differing = (ids.cpu() != want).nonzero()[:, 0].tolist()
    owners = torch.repeat_interleave(request_indices.long(), cu.diff().long())
    for row in differing:
        index = int(owners[row])
        place = row - int(cu[request_indices.tolist().index(index)])
        own = [t[index] for t in (there.temperature, there.top_k, there.top_p, there.min_p, there.seeds)]
        assert not int(there.flags[index]) & 1
        assert is_right(expected[row], int(ids[row]), [*own, there.num_tokens[index].long() + place])
    assert len(differing) <= 1 + num_rows // 50


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("requests", [8, 40])
def test_rows_that_are_not_finite_are_marked(requests: int, value: float, dtype: torch.dtype, device: torch.device) -> None:
    table = RequestTable(requests, 64, 3, 40000, device)
    table.admit([Admission(s, [1, 2], 2, 60, is_greedy=s % 2 == 0, top_p=[1.0, 0.9][s // 2 % 2], top_k=s // 4 % 2 * 9) for s in range(requests)])
    cu = torch.arange(requests + 1, dtype=torch.int32, device=device) * 4
    logits = torch.randn(4 * requests, 40000, device=device).to(dtype)
    rows = random.sample(range(4 * requests), 9)
    for row in rows:
        logits[row, random.randrange(40000)] = value
    logits[:, 5] = float("-inf")
    ids, is_broken = choose(logits, table, torch.arange(requests, dtype=torch.int32, device=device), cu)
    assert is_broken.nonzero()[:, 0].tolist() == sorted(rows)
    assert ((ids >= 0) & (ids < 40000)).all()
