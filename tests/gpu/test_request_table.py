"""Admission and commit against their twins, over random histories of the table."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.ops import Admission, RequestTable, commit
from kernels.structs import HAS_PENALTIES
from tests.gpu.test_sampling import random_admission


def assert_same(here: RequestTable, there: RequestTable) -> None:
    for name in ("num_tokens", "num_drafts", "num_drafter_tokens", "params", "num_seen"):
        assert torch.equal(getattr(here, name).cpu(), getattr(there, name)), name
    tokens, seen, place = here.tokens.cpu(), here.seen.cpu(), here.seen_place.cpu()
    for index in range(there.size):
        known = int(there.num_tokens[index])
        assert torch.equal(tokens[index, :known], there.tokens[index, :known])
        for name, count in (("bias_ids", there.num_biases), ("biases", there.num_biases), ("banned_ids", there.num_banned)):
            assert torch.equal(getattr(here, name)[index, : count[index]].cpu(), getattr(there, name)[index, : count[index]])
        count = int(there.num_seen[index])
        entries = seen[index, :count].tolist()
        assert sorted(entries) == sorted(there.seen[index, :count].tolist())
        assert int((place[index] != 0).sum()) == count
        assert [int(place[index, token_id]) for token_id, _ in entries] == list(range(1, count + 1))


@pytest.mark.parametrize(
    ("requests", "vocab_size", "max_len", "max_drafts"), [(1, 50, 64, 0), (7, 4096, 500, 3), (33, 300, 5000, 16), (3, 9000, 90, 31)]
)
def test_histories(requests: int, vocab_size: int, max_len: int, max_drafts: int, device: torch.device) -> None:
    here, there = (RequestTable(requests, max_len, max_drafts, vocab_size, d) for d in (device, torch.device("cpu")))
    for turn in range(8):
        fresh = random.sample(range(requests), random.randint(1, requests))
        admissions = [random_admission(index, vocab_size, max_len) for index in fresh]
        for table in (here, there):
            table.admit(admissions, ring=turn % 2)
        assert_same(here, there)
        for _ in range(4):
            indices = [*random.sample(range(requests), random.randint(1, requests)), requests, requests]
            width = max_drafts + 1
            counts = torch.tensor([random.randint(0, width) if index < requests else 0 for index in indices], dtype=torch.int32)
            counts[[i for i, index in enumerate(indices) if there.num_tokens[index] == 0]] = 0
            emitted = torch.randint(0, vocab_size, (len(indices), width), dtype=torch.int32)
            emitted[:, 1::2] = emitted[:, :1]  # the same token several times
            emitted[torch.arange(width) >= counts[:, None]] = -1
            on_device = [x.to(device) for x in (emitted, counts, torch.tensor(indices, dtype=torch.int32))]
            commit(on_device[0], on_device[1], here, on_device[2])
            commit(emitted, counts, there, torch.tensor(indices, dtype=torch.int32))
            assert torch.equal(on_device[0].cpu(), emitted)
            assert torch.equal(on_device[1].cpu(), counts)
            assert_same(here, there)


def test_penalties_off_leave_no_counts(device: torch.device) -> None:
    table = RequestTable(2, 32, 3, 100, device)
    table.admit([Admission(0, [5, 5, 6], 2, 30, presence=0.1), Admission(1, [5], 1, 30)])
    assert table.num_seen.tolist() == [2, 0, 0]
    assert (table.flags & HAS_PENALTIES).tolist() == [HAS_PENALTIES, 0, 0]
    table.admit([Admission(0, [7], 1, 30)], ring=1)
    assert table.num_seen.tolist() == [0, 0, 0] and not table.seen_place.any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    table = RequestTable(2, 32, 3, 100, device)
    for admission, message in (
        (Admission(2, [1], 1, 30), "index is 2; the limit is 1"),
        (Admission(0, [1] * 33, 1, 32), "number of tokens is 33; the limit is 32"),
        (Admission(0, [1], 1, 33), "max_total_tokens is 33; the limit is 32"),
        (Admission(0, [1], 1, 30, num_drafter_tokens=2), "number of drafter tokens is 2; the limit is 1"),
        (Admission(0, [1], 1, 30, banned_ids=range(513)), "number of banned ids is 513; the limit is 512"),
    ):
        with pytest.raises(ValueError, match=message):
            table.admit([admission])
