"""What ranks of one host exchange on CPU: sums and parts by the memory that they share, and every way in which a rank may not come."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from backend.parallel.ranks import Ranks
from backend.step import tapes
from backend.step.tapes import Tapes
from kernels import cpu_exchange
from kernels.cpu_exchange import HEAD_BYTES, PIECE_BYTES, HostMemory
from kernels.tape import CannotRecord, record
from tests.test_mixtures import on_ranks

pytestmark = pytest.mark.skipif(cpu_exchange._library() is None, reason="no kernels are compiled here")


def host_of(ranks: Ranks) -> HostMemory:
    assert ranks.host is not None
    return ranks.host


def same_on_all(found: list[Any]) -> Any:
    assert all(torch.equal(own.view(torch.uint8), found[0].view(torch.uint8)) for own in found), "every rank has the same bits"
    return found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "shape"), [(2, (1, 1)), (2, (3, 192)), (3, (2, 513)), (4, (0, 8)), (5, (7, 33)), (2, (PIECE_BYTES // 256, 193))], ids=str
)
def test_sums(size: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Added in the ranks' order, in float32, of one piece and of several; in place, of a tensor with gaps too."""
    parts = torch.randn(size, *shape).to(dtype)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()

    def add(ranks: Ranks) -> torch.Tensor:
        own, gaps = parts[ranks.rank].clone(), torch.zeros(shape[0], 2 * shape[1], dtype=dtype)[:, ::2]
        gaps.copy_(own)
        assert ranks.all_reduce(own) is own and ranks.all_reduce(gaps) is gaps and torch.equal(gaps, own)
        return own

    assert torch.equal(same_on_all(on_ranks(size, add)), expected.to(dtype))


def test_sums_of_what_is_hardly_a_number() -> None:
    """As torch rounds float32 to bfloat16: to the even one of two as near, past the greatest to infinity; what is no number stays none."""
    values = torch.tensor([1.0, 1.0, -1.0, 3.0e38, 3.38953139e38, float("inf"), float("inf"), float("nan"), -0.0, 1e-40]).bfloat16()
    others = torch.tensor([2**-8, 3 * 2**-8, 2**-9, 3.0e38, 1e36, 1.0, float("-inf"), 0.0, -0.0, 1e-40]).bfloat16()
    found = same_on_all(on_ranks(2, lambda ranks: ranks.all_reduce((others if ranks.rank else values).clone())))
    expected = (values.float() + others.float()).bfloat16()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)) and torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("shape", [(), (7,), (3, 9), (2, 5), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool], ids=str)
def test_parts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    own = (100 * torch.randn(shape)).to(dtype)
    found = on_ranks(3, lambda ranks: ranks.gather(own if ranks.rank == 1 else torch.zeros_like(own)))
    for whole in found:
        assert torch.equal(whole, torch.stack([torch.zeros_like(own), own, torch.zeros_like(own)]))


def test_shares_of_rows() -> None:
    """Of more than a piece; of the last share's rows past the end anything."""
    rows, size, width = 7, 3, PIECE_BYTES // 8
    parts = torch.randn(size, rows, width)
    whole = parts.transpose(0, 1).reshape(rows, -1)
    for rank, found in enumerate(on_ranks(size, lambda ranks: ranks.share_rows(parts[ranks.rank]))):
        own = whole[3 * rank : 3 * rank + 3]
        assert found.shape == (3, size * width) and torch.equal(found[: len(own)], own)


def test_a_fast_rank_waits_for_a_slow_one() -> None:
    """Whoever is slow, each rank reads what belongs to an exchange, also where the numbers of pieces begin again."""

    def exchange(ranks: Ranks) -> list[float]:
        host, pauses, found = host_of(ranks), random.Random(ranks.rank), []
        host._own.number = 2**32 - 100
        host._bytes.view(np.uint32)[HEAD_BYTES // 4 * (1 + ranks.rank)] = 2**32 - 100
        ranks._group.barrier().wait()
        for number in range(300):
            if pauses.random() < 0.1:
                time.sleep(pauses.random() * 3e-3)
            x = torch.full((1 + number % 3 * 100,), float(number * (1 + ranks.rank)))
            found.append(ranks.all_reduce(x)[-1].item())
        return found

    assert all(own == [number * 6.0 for number in range(300)] for own in on_ranks(3, exchange))


def refused(ranks: Ranks, words: str, exchange: Callable[[], Any]) -> bool:
    with pytest.raises(RuntimeError, match=words):
        exchange()
    with pytest.raises(RuntimeError, match=f"rank {ranks.rank} of {ranks.size}: exchanges were ended"):
        ranks.all_reduce(torch.zeros(1))
    return True


def test_a_rank_that_is_gone() -> None:
    """Whoever waits for it is told at once when any rank knows it, and so is whoever comes later."""
    waiting = threading.Barrier(3)

    def exchange(ranks: Ranks) -> bool:
        waiting.wait()
        if ranks.rank == 2:  # it is gone, and rank 0 hears of it
            return True
        if ranks.rank == 0:
            threading.Timer(0.1, ranks.abort).start()
        return refused(ranks, "exchanges were ended, as some rank is gone", lambda: ranks.all_reduce(torch.zeros(5)))

    assert on_ranks(3, exchange) == [True] * 3


def test_a_rank_that_does_not_come_in_time() -> None:
    """The others hear of it from whoever has waited longest."""

    def exchange(ranks: Ranks) -> bool:
        if ranks.rank == 2:
            return True
        if ranks.rank == 0:
            ranks.limit(timedelta(seconds=0.1))
        words = r"rank 0 of 3: an exchange timed out after 0.1 s of waiting for rank 2" if ranks.rank == 0 else "exchanges were ended"
        return refused(ranks, words, lambda: ranks.gather(torch.zeros(5)))

    assert on_ranks(3, exchange) == [True] * 3


def test_ranks_that_make_different_exchanges() -> None:
    def differ(ranks: Ranks) -> bool:
        words = f"rank {ranks.rank} of 2 and rank {1 - ranks.rank} make different exchanges"
        return refused(ranks, words, lambda: ranks.all_reduce(torch.zeros(5 + ranks.rank)))

    assert on_ranks(2, differ) == [True] * 2


def test_exchanges_are_recorded() -> None:
    """A tape makes them again, of what its inputs hold then; one that fails says why. Sums that go another way are not recorded."""

    def play(ranks: Ranks) -> bool:
        x, y, other = torch.zeros(2, 3), torch.zeros(1, 5), torch.zeros(2, dtype=torch.float64)
        with torch.inference_mode():
            with pytest.raises(CannotRecord, match="a sum by the group"):
                record(lambda: [ranks.all_reduce(other)])
            tape, (total, parts) = record(lambda: [ranks.all_reduce(x.clone()), ranks.gather_vocabulary(y.clone(), 10)], [x, y])
            for number in range(3):
                x.fill_(number + ranks.rank)
                y.fill_(number * (1 - ranks.rank))
                tape.play()
                assert torch.equal(total, torch.full((2, 3), 2.0 * number + 1))
                assert torch.equal(parts, torch.cat([torch.full((1, 5), float(number)), torch.zeros(1, 5)], dim=1))
            ranks.least(0, torch.device("cpu"))
            ranks.abort()
            return refused(ranks, "exchanges were ended", tape.play)

    assert on_ranks(2, play) == [True] * 2


@pytest.mark.parametrize("what", ["too large for one", "not to be recorded by one"])
def test_ranks_keep_the_same_tapes(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that plays what another computes twice, to compare, or computes anew would exchange something else than that."""
    monkeypatch.setattr(tapes, "MOST_BYTES", 3 * 128 * 4)

    def run(ranks: Ranks) -> bool:
        def compute(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            x = inputs[0][:, :4].clone()
            if ranks.rank and what == "not to be recorded by one":
                x = x + 0
            return [ranks.all_reduce(ranks.all_reduce(x))]

        own = Tapes(ranks)
        for number in range(4):
            x = torch.full((2, 256 if ranks.rank and what == "too large for one" else 64), float(number + ranks.rank))
            (total,) = own.run("it", lambda inputs: lambda: compute(inputs), [x], 2)
            assert torch.equal(total, torch.full((2, 4), 2.0 * (2 * number + 1)))
        return not own._all and (own._refused == {"it"}) == (what == "not to be recorded by one")

    with torch.inference_mode():
        assert on_ranks(2, run) == [True] * 2


@pytest.mark.parametrize("what", ["_make", "_open", "_library"])
def test_ranks_that_cannot_share_memory_exchange_by_sockets(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, where one cannot."""
    own, calls = getattr(cpu_exchange, what), iter(range(100))

    def fail(*arguments: Any) -> Any:
        if next(calls):
            return own(*arguments)
        if what == "_library":
            return None
        raise OSError("there is none")

    monkeypatch.setattr(cpu_exchange, what, fail)
    found = on_ranks(2, lambda ranks: (ranks.host, ranks.all_reduce(torch.ones(3) + ranks.rank)))
    assert all(host is None and torch.equal(x, torch.full((3,), 3.0)) for host, x in found)
