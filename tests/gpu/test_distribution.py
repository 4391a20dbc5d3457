"""Distributions and draws from them against the reference: what is kept, but where float32 cannot tell; in float64, how likely each is."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import reference
from kernels.distribution import draw_tokens, probabilities
from tests.gpu.logits import make_logits

SHAPES = [(1, 1), (2, 3), (3, 1001), (9, 4096), (40, 4099), (150, 520)]
LARGE = [(1, 128256), (20, 128256), (70, 128255), (140, 128256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["flat", "peaked", "ties", "constant", "zeros", "wide", "negative", "banned"]
OFF = (0, 1.0, 0.0)


def make_parameters(rows: int, vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    """temperature, top_k, top_p, min_p: every filter on and off."""

    def pick(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(random.choices(values, k=rows), dtype=dtype, device=device)

    return [
        pick([0.1, 0.7, 1.0, 1.0, 3.0, 1e30]),
        pick([0, 0, 1, 2, 50, 1500, vocab_size // 2, vocab_size, vocab_size + 7], torch.int32),
        pick([1.0, 1.0, 0.95, 0.9, 0.5, 0.05, 1e-6, 0.999999]),
        pick([0.0, 0.0, 0.01, 0.2, 1.0]),
    ]


def one_parameter(rows: int, device: torch.device, top_k: int, top_p: float, min_p: float) -> list[torch.Tensor]:
    full = [torch.full((rows,), v, device=device) for v in (1.3, top_p, min_p)]
    return [full[0], torch.full((rows,), top_k, dtype=torch.int32, device=device), *full[1:]]


def check_row(logits: torch.Tensor, got: torch.Tensor, temperature: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    assert got.isfinite().all() and (got >= 0).all()  # outputs are written whole
    scaled = logits.float() / temperature
    # float32 logits are ordered after the division, which may make some equal.
    order = (scaled if logits.dtype == torch.float32 else logits.float()).sort(descending=True, stable=True).indices
    scaled = scaled.double() if logits.dtype == torch.float32 else logits.double() / temperature
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    is_in = (rank < top_k) | (top_k == 0)
    probs = scaled.masked_fill(~is_in, float("-inf")).softmax(0)
    before = torch.empty_like(probs)
    before[order] = probs[order].cumsum(0) - probs[order]

    def kept(slack: float) -> torch.Tensor:
        is_first = (before < top_p + slack) | (rank == 0) if top_p < 1 else torch.ones_like(is_in)
        return is_in & is_first & (probs >= min_p * probs.max() * (1 - slack))

    is_kept = got > 0
    assert not (is_kept & ~kept(4e-6)).any(), f"{int((is_kept & ~kept(4e-6)).sum())} kept that are not to be"
    is_missing = ~is_kept & kept(-4e-6) & (scaled > scaled.max() - 80)  # below, float32 has nothing left
    assert not is_missing.any(), f"{int(is_missing.sum())} missing"
    expected = scaled.masked_fill(~is_kept, float("-inf")).softmax(0)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-20)


def check(logits: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    torch.full(logits.shape, float("nan"), device=logits.device)  # freed at once: the output's memory holds it
    got = probabilities(logits, *parameters)
    assert got.dtype == torch.float32 and got.shape == logits.shape
    for row, (top_k, top_p, min_p) in enumerate(zip(*(p.tolist() for p in parameters[1:]))):
        check_row(logits[row], got[row], parameters[0][row], top_k, top_p, min_p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "vocab_size"), SHAPES)
def test_mixed_parameters(rows: int, vocab_size: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(make_logits(kind, rows, vocab_size, dtype, device), make_parameters(rows, vocab_size, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "banned"])
@pytest.mark.parametrize(("rows", "vocab_size"), LARGE)
def test_large_rows(rows: int, vocab_size: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(make_logits(kind, rows, vocab_size, dtype, device), make_parameters(rows, vocab_size, device))


@pytest.mark.parametrize(
    "filters",
    [OFF, (1, 1.0, 0.0), (50, 1.0, 0.0), (3000, 1.0, 0.0), (0, 0.9, 0.0), (0, 1e-6, 0.0), (0, 0.999999, 0.0), (0, 1.0, 0.05), (3000, 0.9, 0.01)],
)
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties"])
def test_one_filter_at_a_time(kind: str, filters: tuple[int, float, float], device: torch.device) -> None:
    check(make_logits(kind, 4, 128256, torch.bfloat16, device), one_parameter(4, device, *filters))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [64, 5000, 128256])
def test_equals_on_both_sides_of_the_border_go_by_id(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """More equals than are ever listed: one likely token, and the others all the same."""
    logits = torch.zeros(3, vocab_size, dtype=dtype, device=device)
    logits[:, vocab_size - 2] = 2
    count = vocab_size // 2
    top_k = torch.tensor([count, 0, 0], dtype=torch.int32, device=device)
    top_p = torch.tensor([1.0, 0.25, 1.0], device=device)
    got = probabilities(logits, torch.ones(3, device=device), top_k, top_p, torch.zeros(3, device=device))
    ids = (got > 0).nonzero()
    first = ids[ids[:, 0] == 0][:, 1].tolist()
    assert first == [*range(count - 1), vocab_size - 2]
    second = ids[ids[:, 0] == 1][:, 1].tolist()
    likely = 7.38905609893065
    wanted = 0.25 * (likely + vocab_size - 1) - likely  # tokens of weight 1 that are less than this before the next
    assert second[:-1] == list(range(len(second) - 1)) and second[-1] == vocab_size - 2
    assert abs(len(second) - 1 - max(wanted, 0)) <= 1 + 1e-6 * vocab_size
    assert (got[2] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [9, 4096, 128256])
def test_rows_that_are_not_finite_are_nan(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(40, vocab_size, device=device).to(dtype)
    broken = [0, 3, 4, 11, 39]
    for row, value in zip(broken, [float("nan"), float("inf"), float("nan"), float("inf"), float("nan")]):
        logits[row, random.randrange(vocab_size)] = value
    logits[7] = float("-inf")
    parameters = make_parameters(40, vocab_size, device)
    got = probabilities(logits, *parameters)
    is_nan = got.isnan()
    assert is_nan.all(dim=1).nonzero()[:, 0].tolist() == [0, 3, 4, 7, 11, 39]
    assert is_nan.any(dim=1).sum() == 6


def test_without_filters_they_are_not_looked_at(device: torch.device) -> None:
    logits = make_logits("flat", 5, 4096, torch.bfloat16, device)
    parameters = make_parameters(5, 4096, device)
    expected = reference.probabilities(logits, *parameters, is_filtered=False)
    torch.testing.assert_close(probabilities(logits, *parameters, is_filtered=False), expected, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("rows", [3, 140])
def test_capture_and_replay_with_other_inputs(rows: int, device: torch.device) -> None:
    vocab_size = 32000
    logits = make_logits("flat", rows, vocab_size, torch.bfloat16, device)
    parameters = make_parameters(rows, vocab_size, device)
    seeds, positions = torch.zeros(rows, dtype=torch.int64, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
    draw_tokens(probabilities(logits, *parameters), seeds, positions, reference.DRAFT_STREAM)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        probs = probabilities(logits, *parameters)
        token_ids = draw_tokens(probs, seeds, positions, reference.DRAFT_STREAM)
    for kind in ("peaked", "ties", "flat"):
        logits.copy_(make_logits(kind, rows, vocab_size, torch.bfloat16, device))
        for own, other in zip(parameters, make_parameters(rows, vocab_size, device)):
            own.copy_(other)
        seeds.random_()
        positions.random_(0, 9999)
        probs.fill_(7)
        token_ids.fill_(-7)
        graph.replay()
        again = probabilities(logits, *parameters)
        assert torch.equal(probs, again)
        assert torch.equal(token_ids, draw_tokens(again, seeds, positions, reference.DRAFT_STREAM))
        assert (probs.gather(1, token_ids.long()[:, None]) > 0).all()


@pytest.mark.parametrize("numbers", [reference.SAMPLE_STREAM, reference.DRAFT_STREAM])
@pytest.mark.parametrize("kind", ["flat", "peaked", "banned"])
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (3, 7), (9, 1001), (65, 4096), (32, 128256), (5, 128255)])
def test_draw_tokens(rows: int, vocab_size: int, kind: str, numbers: int, device: torch.device) -> None:
    probs = make_logits(kind, rows, vocab_size, torch.float32, device).softmax(dim=-1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device=device)
    positions = torch.randint(0, 100000, (rows,), device=device)
    got = draw_tokens(probs, seeds, positions, numbers)
    assert got.dtype == torch.int32
    expected = reference.draw_tokens(probs, seeds, positions, numbers)
    scores = probs.log().double() + reference.gumbel_noise(seeds, positions, vocab_size, numbers).double()
    for row in (got != expected).nonzero()[:, 0].tolist():  # a tie within float32's rounding
        assert scores[row, got[row]] >= scores[row, expected[row]] - 1e-5
    assert int((got != expected).sum()) <= rows // 50


def test_wrong_inputs_are_said(device: torch.device) -> None:
    logits, parameters = torch.zeros(2, 16, device=device), make_parameters(2, 16, device)
    with pytest.raises(ValueError, match=r"logits are \[2, 8\] of torch.float32; contiguous"):
        probabilities(logits[:, ::2], *parameters)
    with pytest.raises(ValueError, match=r"top_k is \[1\] on cuda:0; \[2\] on cuda:0 is needed"):
        probabilities(logits, parameters[0], parameters[1][:1], *parameters[2:])
    with pytest.raises(ValueError, match=r"min_p is \[2\] on cpu; \[2\] on cuda:0 is needed"):
        probabilities(logits, *parameters[:3], parameters[3].cpu())
    with pytest.raises(ValueError, match=r"probs are \[2, 16\] of torch.float16"):
        draw_tokens(logits.half(), parameters[1].long(), parameters[1], 0)
    with pytest.raises(ValueError, match=r"seeds are torch.int32; int64 is needed"):
        draw_tokens(logits, parameters[1], parameters[1], 0)
