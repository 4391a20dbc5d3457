"""Every strategy's verdict against the reference."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import reference
from kernels import verify as ops
from kernels.ops import Policy, RequestTable
from kernels.reference import request_table as reference_table

CORRECTNESS = [(1, 1, 50), (5, 3, 500), (20, 5, 1001)]
CORNER = [(3, 0, 40), (4, 16, 4096), (2, 31, 77)]
PERFORMANCE = [(32, 3, 128256)]
CASES = CORRECTNESS + CORNER


def make_drafts(batch: int, width: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.randint(0, width + 1, (batch,), dtype=torch.int32)
    drafts = torch.randint(0, vocab_size, (batch, width), dtype=torch.int32)
    drafts[torch.arange(width) >= counts[:, None]] = -1
    return drafts, counts


@pytest.mark.parametrize(("batch", "width", "vocab_size"), CASES)
def test_verify(batch: int, width: int, vocab_size: int, device: torch.device) -> None:
    drafts, counts = make_drafts(batch, width, vocab_size)
    targets = torch.randint(0, vocab_size, (batch, width + 1), dtype=torch.int32)
    is_same = torch.rand(batch, width) < 0.8
    targets[:, :width][is_same] = drafts[is_same].clamp(min=0)
    expected = reference.verify(drafts, counts, targets)
    got = ops.verify(drafts.to(device), counts.to(device), targets.to(device))
    for g, e in zip(got, expected):
        assert torch.equal(g.cpu().long(), e.long())


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(("batch", "max_drafts"), [(1, 3), (9, 5), (40, 31), (3, 0)])
def test_verify_drafts(batch: int, max_drafts: int, policy: Policy, device: torch.device) -> None:
    here, there = (RequestTable(batch, 64, max_drafts, 100, d) for d in (device, torch.device("cpu")))
    there.drafts.random_(0, 2)
    here.drafts.copy_(there.drafts)
    request_indices = torch.tensor([*torch.randperm(batch).tolist(), batch, batch], dtype=torch.int32)
    counts = [random.randint(0, max_drafts + 1) for _ in range(batch)]
    cu = torch.tensor([0, *counts, 0, 0]).cumsum(0).int()
    chosen = torch.randint(0, 2, (int(cu[-1]) + 3,), dtype=torch.int32)
    expected = reference_table.verify_drafts(chosen, there, request_indices, cu, policy)
    outputs = tuple(torch.full_like(x, -77).to(device) for x in expected)
    got = ops.verify_drafts(chosen.to(device), here, request_indices.to(device), cu.to(device), policy, outputs)  # type: ignore[arg-type]
    for g, e in zip(got, expected):
        assert torch.equal(g.cpu(), e)


@pytest.mark.parametrize("has_probs", [True, False])
@pytest.mark.parametrize(("batch", "width", "vocab_size"), CASES + PERFORMANCE)
def test_verify_rejection(batch: int, width: int, vocab_size: int, has_probs: bool, device: torch.device) -> None:
    drafts, counts = make_drafts(batch, width, vocab_size)
    probs = (torch.randn(batch, width + 1, vocab_size) * 2).softmax(-1)
    draft_probs = (probs[:, :width].log() + 0.3 * torch.randn(batch, width, vocab_size)).softmax(-1) if has_probs else None
    if draft_probs is not None and width:
        draft_probs[0] = probs[0, :width]  # nothing is left where p equals q
    for b in range(batch):
        for i in range(int(counts[b])):
            drafts[b, i] = int(probs[b, i].argmax()) if random.random() < 0.7 else random.randrange(vocab_size)
    if not has_probs and width and counts[0]:
        probs[0, :] = 0
        probs[0, :, 3] = 1
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (batch,)), torch.randint(0, 9999, (batch,), dtype=torch.int32)
    expected = reference.verify_rejection(probs, drafts.long(), counts, draft_probs, seeds, positions.long())
    on = [None if x is None else x.to(device) for x in (probs, drafts.long() if batch > 4 else drafts, counts, draft_probs, seeds, positions)]
    got = ops.verify_rejection(*on)  # type: ignore[arg-type]
    assert torch.equal(got[1].cpu().long(), expected[1].long())
    assert int((got[0].cpu() != expected[0]).any(dim=1).sum()) <= batch // 50  # a tie within float32's rounding


@pytest.mark.parametrize("most", [1, 5, 64])
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 3), (7, 500), (33, 4099), (4, 128256)])
def test_top_p_candidates(rows: int, vocab_size: int, most: int, device: torch.device) -> None:
    probs = (torch.randn(rows, vocab_size) * 3).softmax(-1)
    probs[::2] = (probs[::2] * 64).round() / 64  # ties, zeros
    top_p = torch.rand(rows)
    expected = reference.top_p_candidates(probs.double(), top_p.double(), most)
    got = ops.top_p_candidates(probs.to(device), top_p.to(device), most)
    assert torch.equal(got[0].cpu().long(), expected[0])
    assert torch.equal(got[1].cpu().double(), expected[1])
    assert torch.equal(got[2].cpu().long(), expected[2])
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(0, 9999, (rows,), dtype=torch.int32)
    want = reference_table.sample_candidates(got[0].cpu(), got[1].cpu(), got[2].cpu(), seeds, positions)
    assert torch.equal(ops.sample_candidates(*got, seeds.to(device), positions.to(device)).cpu(), want)


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (40, 5), (9, 31)])
def test_verify_top_p(batch: int, width: int, window: int, device: torch.device) -> None:
    drafts, counts = make_drafts(batch, width, 6)
    candidates = torch.rand(batch, width + 1, 6).argsort(dim=-1)[..., :4].int()
    is_best = torch.rand(batch, width) < 0.6
    drafts = torch.where((drafts >= 0) & is_best, candidates[:, :width, 0], drafts)
    num_candidates = torch.randint(1, 4, (batch, width + 1), dtype=torch.int32)
    num_candidates[:, ::3] = 1
    corrections = torch.randint(0, 6, (batch, width + 1), dtype=torch.int32)
    arguments = (drafts, counts, candidates, num_candidates, corrections)
    expected = ops.verify_top_p(*arguments, window)
    got = ops.verify_top_p(*(x.to(device) for x in arguments), window)
    assert torch.equal(got[0].cpu().long(), expected[0].long())
    assert torch.equal(got[1].cpu().long(), expected[1])
