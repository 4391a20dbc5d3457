"""Routing and mixtures of experts on the GPU against their twins: every rule, chunks of any number of rows, and replays of a captured step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels import reference
from kernels.activation import silu_mul
from kernels.experts import choose_groups, mix_experts, order_pairs
from kernels.norm import rms_norm
from kernels.route import MAX_SCORED, _score, route_tokens, split_gate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RULES: list[tuple[int, int, dict[str, Any]]] = [
    (64, 6, {}),
    (64, 6, {"min_sum": 1e-12, "scale": 2.5, "is_corrected": True}),
    (256, 8, {"is_sigmoid": True, "is_corrected": True, "num_groups": 8, "num_chosen_groups": 4, "num_group_scores": 2, "min_sum": 1e-20}),
    (160, 6, {"num_groups": 8, "num_chosen_groups": 3, "scale": 16.0}),
    (5, 2, {"is_sigmoid": True}),
    (1, 1, {"min_sum": 0.0}),
    (7, 7, {}),
    (33, 32, {"min_sum": 0.5}),
    (6, 3, {"is_sigmoid": True, "num_groups": 3, "num_chosen_groups": 2, "num_group_scores": 2}),
]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 100, MAX_SCORED + 1])
@pytest.mark.parametrize(("num_experts", "num_chosen", "rule"), RULES)
def test_route(num_experts: int, num_chosen: int, rule: dict[str, Any], num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    rule = dict(rule)
    hidden = 1608
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    gate = torch.randn(num_experts, hidden, device=device) / hidden**0.5
    correction = torch.randn(num_experts, device=device) * 0.1 if rule.pop("is_corrected", False) else None
    is_sigmoid = rule.pop("is_sigmoid", False)
    scores = (x.double() @ gate.double().t()).cpu()
    shares = scores.sigmoid() if is_sigmoid else scores.softmax(dim=-1)
    expected = reference.route(shares, num_chosen, correction=None if correction is None else correction.cpu().double(), **rule)
    rule |= {"is_sigmoid": is_sigmoid, "correction": correction, "gate_parts": split_gate(gate, dtype)}
    _, experts, weights, _ = route_tokens(x, gate, num_chosen, **rule)
    whole = torch.zeros(2, num_tokens, num_experts, dtype=torch.float64)
    for target, (numbers, values) in zip(whole, (expected, (experts.cpu(), weights.cpu().double()))):
        assert all(len(set(row)) == num_chosen for row in numbers.tolist())
        target.scatter_(1, numbers, values)
    is_same = (whole[0].ne(0) == whole[1].ne(0)).all(dim=1)
    assert is_same.float().mean() > 0.98  # but for near ties
    torch.testing.assert_close(whole[1][is_same], whole[0][is_same], rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("sizes", [None, (512, 64)], ids=["stored", "plain"])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 200])
def test_pairs_are_sorted_by_expert(num_tokens: int, sizes: tuple[int, int] | None, device: torch.device) -> None:
    x, gate = torch.randn(num_tokens, 512, device=device).to(BF16), torch.randn(40, 512, device=device) / 512**0.5
    for first, num_own in ((0, 40), (10, 20)):
        groups = choose_groups(num_tokens, 5, first, num_own, BF16, device, sizes)
        if groups is None:
            assert num_tokens == 200 and sizes is None
            continue
        _, experts, _, lists = route_tokens(x, gate, 5, groups=groups)
        assert lists is not None
        numbers, values = experts.flatten().tolist(), lists.tolist()
        rows = values[4 * groups.max_chunks : -1]
        found: dict[int, list[int]] = {}
        for expert, begin, count, _ in zip(*[iter(values[: 4 * values[-1]])] * 4):
            assert 0 < count <= groups.rows_per_chunk
            found.setdefault(first + expert, []).extend(rows[begin : begin + count])
        expected = {e: [p for p, number in enumerate(numbers) if number == e] for e in range(first, first + num_own)}
        assert {e: sorted(own) for e, own in found.items()} == {e: own for e, own in expected.items() if own}


def test_parts_of_a_gate(device: torch.device) -> None:
    gate = torch.randn(9, 64, device=device)
    parts = split_gate(gate, BF16)
    assert parts is not None and len(parts) == 3 and torch.equal(parts.double().sum(dim=0), gate.double())
    assert len(split_gate(gate.to(BF16).float(), BF16)) == 1 and split_gate(gate, FP16) is None  # type: ignore[arg-type]
    x = torch.randn(400, 64, device=device).to(BF16)
    scores, whole = _score(x, parts), x.double() @ gate.double().t()
    assert (scores - whole).abs().max() < 1e-5 * whole.abs().max()


@pytest.mark.parametrize("num_tokens", [1, 300, 5000])
def test_pairs_in_order(num_tokens: int, device: torch.device) -> None:
    experts = torch.rand(num_tokens, 90, device=device).topk(7).indices
    for first, num_own in ((0, 90), (40, 33)):
        tokens, places, ends = order_pairs(experts, num_own, first, BF16)
        numbers = experts.flatten().cpu() - first
        numbers[(numbers < 0) | (numbers >= num_own)] = num_own
        assert torch.equal(ends.cpu(), numbers.bincount(minlength=num_own + 1)[:num_own].cumsum(0).int())
        assert torch.equal(places.flatten().sort().values, torch.arange(7 * num_tokens, device=device))
        assert torch.equal(numbers[places.flatten().argsort().cpu()], numbers.sort().values)
        assert torch.equal(tokens[places], torch.arange(num_tokens, device=device)[:, None].expand(-1, 7))


def test_scores_that_are_no_numbers_choose_some_experts(device: torch.device) -> None:
    x = torch.full((3, 64), float("nan"), device=device, dtype=BF16)
    _, experts, _, _ = route_tokens(x, torch.randn(10, 64, device=device), 4)
    assert ((experts >= 0) & (experts < 10)).all()


def make(num_tokens: int, num_experts: int, num_chosen: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """x, experts, weights, gate_up, down."""
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    experts = torch.rand(num_tokens, num_experts, device=device).add_(torch.rand(num_experts, device=device)).topk(num_chosen).indices
    weights = torch.rand(num_tokens, num_chosen, device=device)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, inner, device=device) / inner**0.5).to(dtype)
    return [x, experts, weights, gate_up, down]


def exact(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, own: range) -> torch.Tensor:
    """In float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for number in own:
        share = (weights * (experts == number)).sum(dim=1, keepdim=True).double()
        rows = share[:, 0].nonzero()[:, 0]
        gate, up = F.linear(x[rows].double(), gate_up[number].double()).chunk(2, dim=-1)
        out[rows] += F.linear(F.silu(gate) * up, down[number].double()) * share[rows]
    return out


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


MIXES = [(n, 64, 6, 2560, 1536) for n in (1, 3, 8, 9, 16, 32, 128, 300, 700)]
MIXES += [(1, 1, 1, 32, 32), (40, 5, 5, 96, 160), (17, 256, 8, 512, 256), (5, 7, 3, 288, 96), (200, 3, 2, 64, 32), (64, 8, 2, 4096, 1408)]
MIXES += [(34, 256, 8, 512, 256), (33, 3, 1, 64, 64), (90, 2, 2, 192, 320), (250, 6, 2, 448, 64), (230, 7, 3, 64, 192), (1200, 16, 1, 320, 128)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", MIXES, ids=str)
def test_mix_experts(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, experts, weights, gate_up, down = make(*shape, dtype, device)
    expected = exact(x, experts, weights, gate_up, down, range(shape[1]))
    out = mix_experts(x, experts, weights, gate_up, down, silu_mul, True)
    limit = 6e-3 if dtype == BF16 else 1e-3
    assert out.shape == x.shape and relative_error(out, expected) < limit
    residual, beside = torch.randn_like(x), torch.randn_like(x)
    added = residual + out
    assert mix_experts(x, experts, weights, gate_up, down, silu_mul, True, residual=residual) is residual
    assert torch.equal(residual, added)
    assert torch.equal(mix_experts(x, experts, weights, gate_up, down, silu_mul, True, beside=beside), out + beside)
    mix_experts(x, experts, weights, gate_up, down, silu_mul, True, residual=residual, beside=beside)
    assert torch.equal(residual, added + out + beside)
    assert relative_error(mix_experts(x, experts, weights, gate_up, down, silu_mul, False), expected) < limit


@pytest.mark.parametrize("num_tokens", [4, 500])
def test_experts_of_two_ranks(num_tokens: int, device: torch.device) -> None:
    x, experts, weights, gate_up, down = make(num_tokens, 12, 4, 512, 256, BF16, device)
    for own in (range(5), range(5, 12)):
        part = slice(own.start, own.stop)
        expected = exact(x, experts, weights, gate_up, down, own)
        out = mix_experts(x, experts, weights, gate_up[part].contiguous(), down[part].contiguous(), silu_mul, True, own.start)
        assert relative_error(out, expected) < 6e-3


def test_odd_sizes_and_float32(device: torch.device) -> None:
    for dtype, shape in ((FP32, (9, 5, 2, 64, 24)), (BF16, (9, 5, 2, 48, 24))):
        x, experts, weights, gate_up, down = make(*shape, dtype, device)
        expected = exact(x, experts, weights, gate_up, down, range(5))
        assert relative_error(mix_experts(x, experts, weights, gate_up, down, silu_mul, True), expected) < (1e-5 if dtype == FP32 else 1e-2)


@pytest.mark.parametrize(
    "slices", [[(0, 32), (0, 1), (5, 12), (3, 19)], [(0, 600), (0, 33), (5, 69), (64, 192), (100, 340), (20, 420)]], ids=["few", "more"]
)
def test_rows_do_not_depend_on_their_number(slices: list[tuple[int, int]], device: torch.device) -> None:
    """Nor on the kernel of a chunk's size, and experts of which one takes most: few are experts.cu's, more wide_experts.cu's."""
    x, experts, weights, gate_up, down = make(600, 16, 2, 512, 256, BF16, device)
    experts[::3] = torch.tensor([3, 9], device=device)

    def mix(start: int, stop: int) -> torch.Tensor:
        own = (part[start:stop].contiguous() for part in (x, experts, weights))
        return mix_experts(*own, gate_up, down, silu_mul, True)

    found = torch.full_like(x, float("nan"))
    for start, stop in slices:
        out = mix(start, stop)
        is_new = found[start:stop].isnan()
        assert torch.equal(out, torch.where(is_new, out, found[start:stop]))
        found[start:stop] = out


def test_tokens_choose_the_same_beside_others(device: torch.device) -> None:
    for hidden in (512, 2560, 7168):
        x, gate = torch.randn(200, hidden, device=device).to(BF16), torch.randn(64, hidden, device=device) / hidden**0.5
        _, experts, weights, _ = route_tokens(x, gate, 6)
        for start, stop in ((0, 1), (3, 11), (8, 24), (30, 47), (100, 200)):
            _, own_experts, own_weights, _ = route_tokens(x[start:stop], gate, 6)
            assert torch.equal(own_experts, experts[start:stop]) and torch.equal(own_weights, weights[start:stop])


@pytest.mark.parametrize("num_tokens", [2, 40, 200, 400, 1100])
def test_replays_follow_the_router(num_tokens: int, device: torch.device) -> None:
    """One captured graph serves whatever tokens take: nothing of it is known on the host."""
    x, _, _, gate_up, down = make(num_tokens, 24, 3, 512, 256, BF16, device)
    gate = torch.randn(24, 512, device=device) / 512**0.5
    out = torch.empty_like(x)

    norm = (torch.ones(512, device=device, dtype=BF16), 1e-6)

    def step() -> None:
        groups = choose_groups(num_tokens, 3, 0, 24, BF16, device, (512, 256))
        y, experts, weights, lists = route_tokens(x, gate, 3, min_sum=0.0, norm=norm, groups=groups)
        assert (lists is None) == (num_tokens > MAX_SCORED) and (groups is None) == (num_tokens == 1100)
        out.copy_(x)
        mix_experts(y, experts, weights, gate_up, down, silu_mul, True, residual=out, lists=lists)

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    for _ in range(20):
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        found = out.clone()
        y = rms_norm(x, *norm)
        _, experts, weights, _ = route_tokens(y, gate, 3, min_sum=0.0)
        assert relative_error(found, x.double() + exact(y, experts, weights, gate_up, down, range(24))) < 6e-3
        step()
        assert torch.equal(out, found)


def test_errors(device: torch.device) -> None:
    x, experts, weights, gate_up, down = make(4, 6, 2, 64, 32, BF16, device)
    with pytest.raises(ValueError, match=r"gate_up \(6, 32, 64\)"):
        mix_experts(x, experts, weights, gate_up[:, :32].contiguous(), down, silu_mul, True)
    with pytest.raises(ValueError, match=r"experts .* must be int64"):
        mix_experts(x, experts.int(), weights, gate_up, down, silu_mul, True)
    with pytest.raises(ValueError, match="num_chosen is 7; must be from 1 to the number of experts"):
        route_tokens(x, torch.randn(6, 64, device=device), 7)
