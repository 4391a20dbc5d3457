"""Lookup on the device against its twin."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.ngram import draft_ngram
from kernels.ops import Admission, RequestTable

CORRECTNESS = [(1, 40, 3), (9, 200, 5), (40, 700, 16)]
CORNER = [(5, 4, 3), (3, 5000, 31), (2, 65, 1)]
PERFORMANCE = [(32, 2048, 5), (128, 32768, 5)]


def make_text(kind: str, count: int) -> list[int]:
    if kind == "repeats":
        phrase = [random.randrange(1000) for _ in range(random.randint(1, max(count // 3, 1)))]
        return [t if random.random() < 0.97 else random.randrange(1000) for t in (phrase * (count // len(phrase) + 1))[:count]]
    return [random.randrange(2 if kind == "binary" else 10**5) for _ in range(count)]


@pytest.mark.parametrize("kind", ["repeats", "binary", "random"])
@pytest.mark.parametrize(("requests", "max_len", "max_drafts"), CORRECTNESS + CORNER + PERFORMANCE)
def test_draft_ngram(requests: int, max_len: int, max_drafts: int, kind: str, device: torch.device) -> None:
    here, there = (RequestTable(requests, max_len, max_drafts, 10**5, d) for d in (device, torch.device("cpu")))
    texts = [make_text(kind, random.randint(1, max_len - 1)) for _ in range(requests)]
    ends = [random.choice([max_len, len(t) + 1, min(len(t) + 3, max_len)]) for t in texts]
    requests_in = [Admission(index, text, 1, end) for index, (text, end) in enumerate(zip(texts, ends))]
    for max_size, min_size, has_given in ((5, 1, False), (3, 2, True), (1, 1, True), (12, 4, False)):
        drafts = torch.randint(0, 3, here.drafts.shape, dtype=torch.int32)
        request_indices = torch.tensor([*torch.randperm(requests).tolist(), requests], dtype=torch.int32)
        limits = torch.tensor([random.randint(-1, max_drafts + 2) for _ in request_indices], dtype=torch.int32)
        given = torch.tensor([random.randint(0, 2) for _ in request_indices], dtype=torch.int32) if has_given else None
        least = torch.tensor([random.randint(0, 25) for _ in request_indices], dtype=torch.int32) if max_size != 1 else None
        scores = []
        for table in (here, there):
            table.tokens.fill_(-(10**6))
            table.admit(requests_in)
            table.drafts.copy_(drafts)
            on = [None if x is None else x.to(table.device) for x in (request_indices, limits, given, least)]
            scores.append(torch.full_like(request_indices, -5, device=table.device) if max_size != 3 else None)
            draft_ngram(table, on[0], on[1], max_size, min_size, on[2], on[3], scores[-1])  # type: ignore[arg-type]
        if scores[0] is not None:
            assert torch.equal(scores[0].cpu(), scores[1])
        assert torch.equal(here.num_drafts.cpu(), there.num_drafts)
        assert torch.equal(here.drafts.cpu(), there.drafts)
        assert torch.equal(here.num_tokens.cpu(), there.num_tokens)
