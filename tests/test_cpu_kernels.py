"""Kernels for CPU against their twins, compiled for every processor that this machine can be."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.config import EngineConfig
from backend.devices import choose_cpu_kernels
from backend.errors import ConfigError
from backend.quantization.dense import DenseLinear, PanelLinear
from kernels import _load_cpu, cpu_attention, cpu_drafts, cpu_ngram, cpu_rows, norm, ops, panels, reference, tape
from kernels._load_cpu import LEVELS, compile_sources, level_of, own_level, parse_flags, use_at_most
from kernels.cpu_attention import CpuRows
from kernels.reference import request_table as reference_table
from kernels.reference import step as reference_step
from kernels.reference.sampling import gumbel_noise, uniforms
from kernels.request_state import RequestState
from kernels.structs import ACCEPT_STREAM, DRAFTER_COUNT, END, INDEX, MODEL_LIMIT, NUM_FIELDS, NUM_PAGES, SAMPLE_STREAM, StepSizes
from kernels.toolchain import KernelError, find_cxx
from tests.conftest import ROOT

OWN_LEVELS = list(LEVELS)[list(LEVELS).index(own_level()) :]
"""Those that run here."""
MOST = reference.MAX_GROUPED_QUERIES


@pytest.fixture(params=OWN_LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    modules = (panels, cpu_attention, cpu_rows, cpu_drafts, cpu_ngram, tape)
    for module in modules:
        module._library.cache_clear()
        monkeypatch.setattr(module, "find_library", lambda: ctypes.CDLL(str(compile_sources(request.param))))
    yield request.param
    for module in modules:
        module._library.cache_clear()


# -- products ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 48), (33, 7), (2, 300), (258, 1), (130, 517)], ids=str)
def test_products(level: str, shape: tuple[int, int], is_half: bool) -> None:
    """Of every number of rows that a tile has, and of more; no output depends on the rows beside it."""
    num_outputs, num_inputs = shape
    weight, norm_weight = torch.randn(shape), torch.rand(num_inputs) + 0.5
    if is_half:
        weight = weight.bfloat16().float()
    for bias in (None, torch.randn(num_outputs)):
        own, plain = PanelLinear(weight, bias), DenseLinear(weight, bias)
        assert own._weight.is_half == is_half
        all_rows = torch.randn(70, num_inputs)
        whole = own(all_rows)
        for rows in (0, *range(1, 30), 70):
            x, residual = all_rows[:rows], torch.randn(rows, num_outputs)
            close = functools.partial(torch.testing.assert_close, rtol=2e-5, atol=2e-6 * num_inputs)
            close(own(x), plain(x))
            assert torch.equal(own(x), whole[:rows])
            close(own.after_norm(x, norm_weight, 1e-5), plain.after_norm(x, norm_weight, 1e-5))
            own.add_to(added := residual.clone(), x)
            close(added, residual + plain(x))
            own.write_to(put := torch.full_like(residual, torch.nan), x)
            assert torch.equal(put, whole[:rows])
            if num_outputs % 2 == 0:
                close(own.gated_after_norm(x, norm_weight, 1e-5), plain.gated_after_norm(x, norm_weight, 1e-5))


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
def test_products_of_many_rows(level: str, is_half: bool) -> None:
    """More than are multiplied at a time: the bits of each are those that it has alone."""
    weight, x = torch.randn(70, 600), torch.randn(1100, 600)
    own = PanelLinear(weight.bfloat16().float() if is_half else weight)
    whole = own(x)
    torch.testing.assert_close(whole, x @ (weight.bfloat16().float() if is_half else weight).t(), rtol=2e-5, atol=1e-3)
    for row in (0, 15, 16, 271, 272, 273, 543, 1023, 1024, 1099):
        assert torch.equal(own(x[row : row + 1])[0], whole[row])


def test_weights_are_laid_out_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for weight in (torch.randn(203, 7), torch.randn(203, 7).bfloat16().float(), torch.randn(7, 203).t()):
        is_half = panels.is_half(weight)
        ways = [functools.partial(panels.pack, weight, 32, is_half), *([functools.partial(panels.pack_tiles, weight, 64)] if is_half else [])]
        for way in ways:
            whole = way()
            with monkeypatch.context() as patched:
                patched.setattr(panels, "PIECE", 500)
                assert torch.equal(whole, way()) and panels.is_half(weight) == is_half


def test_products_of_parts_of_tensors(level: str) -> None:
    weight, wide, out = torch.randn(40, 12), torch.randn(5, 30), torch.zeros(5, 100)
    own = PanelLinear(weight)
    for x in (wide[:, 3:15], wide.t()[:5, :2].repeat(1, 6), wide[::2, :12], torch.randn(12, 5).t()):
        torch.testing.assert_close(own(x), x @ weight.t())
    own.write_to(out[:, 20:60], wide[:, :12])
    torch.testing.assert_close(out[:, 20:60], wide[:, :12] @ weight.t())
    assert not out[:, :20].any() and not out[:, 60:].any()


def test_what_is_no_number_stays_so(level: str) -> None:
    """In its own row alone; gates far out are 0, or all."""
    weight = torch.eye(64, 32)
    x = torch.randn(6, 32)
    x[1, 3], x[4, 5] = torch.nan, torch.inf
    own = PanelLinear(weight)
    made = own(x)
    assert not made[1].isfinite().any() and not made[4].isfinite().any() and made[[0, 2, 3, 5]].isfinite().all()
    gates = torch.tensor([-1e30, -200.0, -88.0, -87.0, -1.0, 0.0, 1e-30, 1.0, 87.0, 89.0, 200.0, 1e30]).repeat(3)[:32]
    gate_up = PanelLinear(torch.cat([torch.diag(gates), torch.eye(32)]))
    ones = torch.ones(1, 32)
    expected = ops.silu_mul(torch.cat([gates, torch.ones(32)])[None])
    torch.testing.assert_close(gate_up.gated_after_norm(ones, torch.ones(32), 0.0), expected, rtol=1e-6, atol=1e-37)


def test_exponentials(level: str) -> None:
    """By sigmoid(x) = silu(x) / x, and a hundred thousand of them."""
    gates = torch.linspace(-20, 20, 4096 * 16).view(16, 4096)
    gate_up = PanelLinear(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x = torch.stack([gates.flatten(), torch.ones(gates.numel())], dim=1)
    out = torch.empty(len(x), 1)
    gate_up._weight.multiply(x, out, panels.GATED)
    torch.testing.assert_close(out[:, 0], torch.nn.functional.silu(x[:, 0].double()).float(), rtol=5e-7, atol=1e-12)


def test_bad_products() -> None:
    own = PanelLinear(torch.randn(8, 4))
    for x, message in (
        (torch.randn(3, 5), r"\[3, 5\].*\[T, 4\]"),
        (torch.randn(3, 4).double(), "float64"),
        (torch.randn(3, 4).bfloat16(), "bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            own(x)
    with pytest.raises(ValueError, match=r"\[3, 7\]"):
        own.write_to(torch.zeros(3, 7), torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"norm is torch.float32 \[5\]; must be float32 \[4\]"):
        own.after_norm(torch.randn(3, 4), torch.ones(5), 1e-5)
    with pytest.raises(ValueError, match="no gradient"):
        own(torch.randn(3, 4, requires_grad=True))
    with torch.no_grad():
        own(torch.randn(3, 4, requires_grad=True))


def test_norms(level: str) -> None:
    for size in (1, 7, 64, 300):
        x, weight = torch.randn(5, size), torch.randn(size)
        torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
        assert torch.equal(norm.rms_norm(x.t().contiguous().t(), weight, 1e-6), norm.rms_norm(x, weight, 1e-6))
        heads = torch.randn(5, 6, size)
        expected, others = heads.clone(), heads[:, 4:].clone()
        reference.norm_heads(expected, weight.expand(4, size), 1e-6)
        norm.norm_heads(heads, weight.expand(4, size), 1e-6)
        torch.testing.assert_close(heads, expected)
        assert torch.equal(heads[:, 4:], others)
        apart, same = torch.randn(6, 5, size).transpose(0, 1), torch.randn(5, 6, size)
        same.copy_(apart)
        norm.norm_heads(apart, weight.expand(4, size), 1e-6)
        norm.norm_heads(same, weight.expand(4, size), 1e-6)
        torch.testing.assert_close(apart, same)
    assert norm.rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    with pytest.raises(ValueError, match=r"norm_heads: heads \(5, 6, 300\).*\[T, H, D\] and weight \(7, 300\)"):
        norm.norm_heads(heads, weight.expand(7, size), 1e-6)


def test_the_likeliest(level: str) -> None:
    for size in (1, 5, 100, 4096):
        logits = torch.randn(6, size) * torch.logspace(-3, 3, 6)[:, None]
        places, chances = ops.likeliest(logits)
        torch.testing.assert_close(chances, logits.softmax(dim=1).amax(dim=1))
        assert places.dtype == torch.int32 and torch.equal(places.long(), logits.argmax(dim=1))
    logits[0, 7], logits[1, 9], logits[2, 11] = torch.nan, torch.inf, -torch.inf
    logits[0, 3] = logits[1, 4000] = torch.inf
    logits[3] = -torch.inf
    logits[4, [30, 2000]] = logits[4].max() + 1  # the first of equals
    (places, chances), half = ops.likeliest(logits), logits.bfloat16()
    assert chances.isnan().tolist() == [True, True, False, True, False, False]
    assert places.tolist() == [7, 9, int(logits[2].argmax()), 0, 30, int(logits[5].argmax())]
    places, chances = ops.likeliest(half)
    assert chances.isnan().tolist() == [True, True, False, True, False, False] and places.tolist()[:2] == [7, 9]


def test_a_draft_is_appended_as_by_the_twin(level: str) -> None:
    """Requests that want no more, that want none, that ended, whose pages end, and the dummy."""
    generator = torch.Generator().manual_seed(5)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    for batch in (1, 2, 9):
        for step in (0, 1, 4):
            tables = [RequestState(9, 64, 5, 100, torch.device("cpu")) for _ in range(2)]
            known, page_table = draw(1, 60, 10), draw(0, 40, 10, 8)
            fields = torch.zeros(NUM_FIELDS, batch, dtype=torch.int32)
            fields[INDEX] = torch.randperm(10, generator=generator)[:batch].int()
            fields[NUM_PAGES], fields[END] = draw(0, 9, batch), known[fields[INDEX].long()] + draw(0, 9, batch)
            fields[DRAFTER_COUNT], fields[MODEL_LIMIT] = draw(-1, 2, batch), draw(0, 6, batch)
            skipped = draw(0, 2, batch) if step else None
            sizes = StepSizes(batch, 0, 0, batch, 64, 5, 8, 8, 8, 8, 24, 40, 9, 0)
            chosen, made = draw(0, 100, batch), []
            for table, append in zip(tables, (cpu_drafts.append_draft, reference_step.append_draft)):
                table.num_tokens.copy_(known)
                packed, lens = torch.full((3, batch), -7), torch.full((batch,), -7, dtype=torch.int32)
                append(packed, lens, table, fields, chosen, page_table, sizes, step, skipped)
                made.append((packed, lens, table.drafts, table.num_drafts))
            assert all(torch.equal(own, other) for own, other in zip(*made))


def test_lookups_are_those_of_the_twin(level: str) -> None:
    """Texts of few different tokens, so that they repeat; drafts that end them; limits, ends of requests, scores, and requests left alone."""
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    num_drafted = 0
    for number in range(120):
        tables, batch = [RequestState(9, 200, 6, 100, torch.device("cpu")) for _ in range(2)], 1 + number % 9
        tokens, drafts, known = draw(0, 2 + number % 5, 10, 200), draw(0, 3, 10, 6), draw(0, 190, 10)
        ends, indices = known + draw(0, 9, 10), torch.randperm(9, generator=generator)[:batch].int()
        limits, given = draw(-1, 7, batch), draw(0, 4, batch)
        sizes = (1 + number % 6, 1 + number % 6 % (1 + number % 3))
        made = []
        for table, look_up in zip(tables, (cpu_ngram.draft_ngram, reference_table.draft_ngram)):
            table.tokens.copy_(tokens)
            table.drafts.copy_(drafts)
            table.num_tokens.copy_(known)
            table.max_total_tokens.copy_(ends)
            scores = torch.full((batch,), -5, dtype=torch.int32) if number % 3 else None
            least = torch.full((batch,), 4, dtype=torch.int32) if number % 3 == 2 else None
            look_up(table, indices, limits, max(sizes), min(sizes), given if number % 2 else None, least, scores)
            made.append((table.drafts, table.num_drafts, torch.zeros(0) if scores is None else scores))
        assert all(torch.equal(own, other) for own, other in zip(*made)), number
        num_drafted += int((made[0][1] > 0).sum())
    assert num_drafted > 200


def test_random_numbers(level: str) -> None:
    """Bit for bit those of the twin, which every device draws by."""
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
    positions = torch.tensor([0, 1, 7, 131071, 2**31, 5])
    for count in (1, 7, 8, 127, 128, 129, 4099):
        for stream in (SAMPLE_STREAM, ACCEPT_STREAM):
            made = cpu_rows.uniforms(seeds, positions, count, stream)
            assert torch.equal(made, uniforms(seeds, positions, count, stream))
            noise = gumbel_noise(seeds, positions, count, stream)
            torch.testing.assert_close(noise, -torch.log(-torch.log1p(-made)), rtol=0, atol=0)


# -- attention -----------------------------------------------------------------------------------------------------------------------

Case = dict[str, torch.Tensor]


def make_case(query_lens: list[int], seq_lens: list[int], *, page: int = 16, heads: tuple[int, int] = (4, 2), size: int = 32, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    needed = [-(-length // page) for length in seq_lens]
    table = torch.zeros(len(seq_lens) + 2, max(needed) + 1, dtype=torch.int32)
    ids = torch.from_numpy(rng.permutation(sum(needed) + 3).astype(np.int32))
    indices = torch.from_numpy(rng.permutation(len(seq_lens) + 2)[: len(seq_lens)].astype(np.int32))
    begin = 0
    for index, count in zip(indices.tolist(), needed):
        table[index, :count] = ids[begin : begin + count]
        begin += count
    pool = torch.full((len(ids), 3, page, heads[1], size), torch.nan)  # three planes: what is another's, or not yet written, is looked at by nobody
    keys, values = pool[:, 0], pool[:, 2]
    for index, length in zip(indices.tolist(), seq_lens):
        for place in range(length):
            entry = table[index, place // page], place % page
            keys[entry], values[entry] = torch.randn(heads[1], size), torch.randn(heads[1], size)
    return {
        "query": torch.randn(sum(query_lens), heads[0], size),
        "keys": keys,
        "values": values,
        "cu": torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "indices": indices,
        "table": table,
    }


def attend(case: Case, window: int | None = None, seen: torch.Tensor | None = None) -> torch.Tensor:
    rows = CpuRows(case["cu"], case["seq_lens"], case["indices"], case["table"], seen, MOST)
    out = torch.full_like(case["query"], 7.0)
    rows.attend(case["query"], case["keys"], case["values"], window, out)
    return out


def expected_of(case: Case, window: int | None = None, seen: torch.Tensor | None = None) -> torch.Tensor:
    lens, page = case["seq_lens"].tolist(), case["keys"].shape[1]
    pages = [case["table"][index].tolist() for index in case["indices"].tolist()]
    groups = case["query"].shape[1] // case["keys"].shape[2]
    plan = reference.plan_attention(case["cu"].diff().tolist(), lens, pages, page, groups, torch.float32, seen=None if seen is None else seen.numpy())
    keys, values = (case[name].nan_to_num() for name in ("keys", "values"))  # the twin multiplies what it does not see by 0
    return reference.append_attention(case["query"], keys, values, plan, window)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("page", [16, 12, 1])
@pytest.mark.parametrize("window", [None, 1, 9, 1000])
def test_attention(level: str, heads: tuple[int, int], page: int, window: int | None) -> None:
    query_lens = [1, 5, 1, 3, 1, 32, 2, 1]
    seq_lens = [1, 5, 40, 17, 16, 50, 129, 300]
    case = make_case(query_lens, seq_lens, page=page, heads=heads)
    made = attend(case, window)
    torch.testing.assert_close(made, expected_of(case, window), rtol=1e-5, atol=1e-5)
    for b, (first, last) in enumerate(zip(case["cu"].tolist(), case["cu"].tolist()[1:])):  # alone, and its last row alone: the same bits
        alone = {**case, "query": case["query"][first:last], "cu": torch.tensor([0, last - first], dtype=torch.int32)}
        alone |= {name: case[name][b : b + 1] for name in ("seq_lens", "indices")}
        assert torch.equal(attend(alone, window), made[first:last])
        newest = {**alone, "query": case["query"][last - 1 : last], "cu": torch.tensor([0, 1], dtype=torch.int32)}
        assert torch.equal(attend(newest, window), made[last - 1 : last])


@pytest.mark.parametrize("size", [16, 48, 64, 128, 256])
def test_sizes_of_heads(level: str, size: int) -> None:
    case = make_case([1, 4, 2], [70, 33, 2], size=size)
    torch.testing.assert_close(attend(case), expected_of(case), rtol=1e-5, atol=1e-5)


def test_trees(level: str) -> None:
    """A tree of four, one of one alone, and a chain."""
    case = make_case([4, 1, 3], [21, 30, 18])
    seen = torch.tensor([0b0001, 0b0011, 0b0101, 0b1011, 0b1, 0, 0, 0])
    torch.testing.assert_close(attend(case, seen=seen), expected_of(case, seen=seen), rtol=1e-5, atol=1e-5)


def test_requests_that_are_not_its_own(level: str) -> None:
    """Those of no rows, and those of many, whose rows are left as they are."""
    case = make_case([2, 0, MOST + 1, 1], [20, 11, 40, 13])
    made, own = attend(case), [0, 1, 2 + MOST + 1]
    assert (made[2 : 2 + MOST + 1] == 7).all()
    active = {**case, **{name: case[name][[0, 2, 3]] for name in ("seq_lens", "indices")}, "cu": case["cu"][[0, 2, 3, 4]]}
    torch.testing.assert_close(made[own], expected_of(active)[own], rtol=1e-5, atol=1e-5)


def test_threads_that_help_from_everywhere() -> None:
    """Several threads at once, of which one has the helpers; more of them, fewer, and none; and the processes that fork in between."""
    code = """
import os, threading, torch
from backend.quantization.dense import PanelLinear
torch.manual_seed(0)
x = [torch.randn(rows, 96) for rows in (1, 2, 5, 9, 40)]
linear = PanelLinear(torch.randn(700, 96))
torch.set_num_threads(1)
expected = [linear(own) for own in x]
faults = []

def work(seed):
    for turn in range(3000):
        torch.set_num_threads(1 + (turn // 7 + seed) % 4)
        own = (turn + seed) % len(x)
        if not torch.equal(linear(x[own]), expected[own]):
            faults.append((seed, turn))

def run():
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    work(3)
    for thread in threads:
        thread.join()

run()
child = os.fork()
run()
if not child:
    os._exit(len(faults))
assert not faults and os.waitpid(child, 0)[1] == 0, faults
print("done")
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert made.stdout == "done\n", made.stderr


def test_threads_change_no_bit() -> None:
    """Of few rows, and of so many that norms and gates are shared out, too."""
    case, before = make_case([1, 5, 3], [200, 77, 31]), torch.get_num_threads()
    small, large, norm_weight = PanelLinear(torch.randn(300, 64)), PanelLinear(torch.randn(1200, 1024)), torch.rand(1024)
    x, many = torch.randn(40, 64), torch.randn(80, 1024)

    def compute() -> list[torch.Tensor]:
        products = [small(x), small(x[:1]), large(many), large.after_norm(many, norm_weight, 1e-5), large.gated_after_norm(many, norm_weight, 1e-5)]
        return [attend(case), *products]

    one = compute()
    torch.set_num_threads(2)
    try:
        two = compute()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("size", [2, 6, 32, 96])
@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64], ids=str)
def test_append_kv(level: str, size: int, slot_type: torch.dtype) -> None:
    num_heads, num_kv, page, count = 3, 2, 4, 9
    made, expected = (torch.zeros(6, 2, page, num_kv, size) for _ in range(2))
    wide = torch.randn(count, num_heads + 2 * num_kv + 1, size)
    heads = wide[:, 1:]
    slots = torch.tensor([0, 3, 8, 9, -1, 17, 40, -5, 43], dtype=slot_type)
    cos, sin, positions = torch.randn(50, 1, size), torch.randn(50, 1, size), torch.arange(7, 7 + count, dtype=torch.int32)
    for own in (None, positions):
        angles = (cos[:count], sin[:count]) if own is None else (cos, sin)
        queries = cpu_attention.append_kv(heads, *angles, slots, made[:, 0], made[:, 1], own)
        twin = reference.append_kv(heads, *angles, slots, expected[:, 0], expected[:, 1], own)
        torch.testing.assert_close(queries, twin)
        torch.testing.assert_close(made, expected)
    before = made.clone()
    slots[2] = 44  # of pages of 8 tokens, of which either plane has every other 4, the last one begins at 40
    with pytest.raises(IndexError, match="slots has 44; the cache ends at 44"):
        cpu_attention.append_kv(heads, cos[:count], sin[:count], slots, made[:, 0], made[:, 1], None)
    assert torch.equal(made, before)


# -- how they are made ---------------------------------------------------------------------------------------------------------------


def test_levels() -> None:
    assert level_of(frozenset()) == "any" and level_of(frozenset({"avx2", "fma", "f16c"})) == "avx2"
    flags = parse_flags(
        "processor\t: 0\nflags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512cd avx512dq avx512vl\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert level_of(flags) == "avx512" and level_of(flags - {"avx512vl"}) == "avx2" and level_of(flags - {"fma"}) == "any"
    with_tiles = flags | {"amx_tile", "amx_bf16"}
    assert level_of(with_tiles) == "amx" and level_of(with_tiles - {"amx_bf16"}) == "avx512" == level_of(with_tiles - {"amx_tile"})
    assert parse_flags("Features : asimd") == frozenset()


@pytest.mark.parametrize(
    ("asked", "is_given", "expected"),
    [(None, True, "amx"), (None, False, "avx512"), ("avx2", True, "avx2"), ("amx", False, "avx512"), ("none", True, "none"), ("any", False, "any")],
)
def test_the_level_of_a_process(asked: str | None, is_given: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix unit where Linux does not give it; a lower level where one is asked for, in time."""
    monkeypatch.setattr(_load_cpu, "machine_level", _load_cpu.machine_level.__wrapped__)
    monkeypatch.setattr(_load_cpu._Choice, "most", None)
    monkeypatch.setattr(_load_cpu._Choice, "is_made", False)
    monkeypatch.setattr(_load_cpu, "parse_flags", lambda text: frozenset(option[2:].replace("-", "_") for option in LEVELS["amx"]))
    monkeypatch.setattr(_load_cpu, "_is_given_tiles", lambda: is_given)
    if asked is not None:
        use_at_most(asked)
    assert own_level() == expected
    monkeypatch.setattr(_load_cpu._Choice, "is_made", True)
    use_at_most(expected)
    other = "any" if expected == "none" else "none"
    with pytest.raises(ConfigError, match=f"cpu_kernels {other}: this process computes with {expected} already"):
        choose_cpu_kernels(EngineConfig(cpu_kernels=other))
    assert own_level() == expected


def test_a_compiler_that_knows_no_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    old = tmp_path / "old-c++"
    old.write_text(f'#!/bin/sh\ncase "$*" in *amx*) echo "unrecognized option" >&2; exit 1;; esac\nexec {shutil.which("g++")} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    level = "amx" if own_level() in ("amx", "avx512") else own_level()
    made = _load_cpu.compile_for(level, tmp_path / "built")
    assert ctypes.CDLL(str(made)) and "amx" not in made.name
    assert ("without the processor's matrix unit" in caplog.text) == (level == "amx")


def test_parts_of_numbers_are_the_numbers(level: str) -> None:
    """Of weights that bfloat16 has: 1 gives back every float32, small and great; infinities and what is no number stay in their row."""
    least, most = torch.finfo(torch.float32).tiny * 2**40, torch.finfo(torch.float32).max
    x = torch.tensor([1 + 2**-23, -1 - 2**-23, 1 / 3, most, -most, least, 2**-20 + 2**-43, 16777215.0, 0.0, 65535.99])[:, None]
    own = PanelLinear(torch.ones(40, 1))
    assert own._weight.is_half
    assert torch.equal(own(x), x.expand(-1, 40))
    assert torch.equal(own(x.t().expand(3, -1).contiguous()[:, :1]), x[:1].expand(3, 40))
    odd = torch.tensor([[torch.inf], [-torch.inf], [torch.nan], [2.0]])
    assert torch.equal(own(odd)[:2], odd[:2].expand(-1, 40)) and own(odd)[2].isnan().all() and (own(odd)[3] == 2).all()


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Steps run by torch; what is missing is said."""
    monkeypatch.setattr(_load_cpu, "BUILT", tmp_path / "built")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    _load_cpu._find.cache_clear()
    try:
        assert _load_cpu.find_library() is None
    finally:
        _load_cpu._find.cache_clear()
    assert "no C++ compiler on PATH" in caplog.text and "apt-get install g++" in caplog.text


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++x"
    broken.write_text("#!/bin/sh\necho 'no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert find_cxx() == str(broken)
    with pytest.raises(KernelError, match=r"could not compile kernels/cpu for avx2:\nno such thing"):
        compile_sources("avx2", tmp_path / "built")
    monkeypatch.setenv("CXX", shutil.which("g++") or "")
    if os.getuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(KernelError, match="cannot be written"):
            compile_sources("avx2", tmp_path / "closed" / "built")
    made = compile_sources("any", tmp_path / "built")
    monkeypatch.setenv("CXX", str(broken))
    assert compile_sources("any", tmp_path / "built") == made, "what is on disk needs no compiler"


def test_a_damaged_library_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A machine that lost its power leaves files cut or with zeros: to load one ended the process by a signal, at each start."""
    (compiler := tmp_path / "c++").write_text(
        f'#!/bin/sh\necho run >> "$0.runs"\nexec {shutil.which("g++")} -shared -fPIC -o "$2" -x c++ /dev/null\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(_load_cpu, "BUILT", tmp_path / "built")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = compile_sources("any", tmp_path / "built")
    whole = made.read_bytes()
    # Not in this process: of a library that is loaded nothing may be overwritten.
    subprocess.run([sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", made], check=True)
    assert compile_sources("any") == made and not caplog.records
    half, flipped = len(whole) // 2, bytearray(whole)
    flipped[half] ^= 1
    damaged = [
        *(whole[: len(whole) * tenth // 10] for tenth in range(10)),
        bytes(len(whole)),
        whole[:half] + bytes(len(whole) - half),
        bytes(flipped),
    ]
    for content in damaged:
        made.write_bytes(content)
        caplog.clear()
        assert compile_sources("any", tmp_path / "built") == made and made.read_bytes() == whole
        assert f"{made} is damaged" in caplog.text
    made.write_bytes(damaged[3])
    elsewhere = compile_sources("any")  # where setup's folder may not be written to
    assert elsewhere.is_relative_to(tmp_path / "cache") and elsewhere.read_bytes() == whole
    assert (tmp_path / "c++.runs").read_text() == "run\n" * (len(damaged) + 2)


def test_they_are_in_use() -> None:
    """Here, where setup has found a compiler."""
    from backend.quantization import make_linear

    assert isinstance(make_linear(torch.randn(4, 4)), PanelLinear) and cpu_attention.is_usable(64, torch.float32)
    assert not isinstance(make_linear(torch.randn(4, 4).bfloat16()), PanelLinear)


def test_what_several_want_at_once_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank, or thread, that started at once ran a compiler of its own."""
    (compiler := tmp_path / "c++").write_text('#!/bin/sh\necho run >> "$0.runs"\nsleep 0.3\necho made > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(4) as pool:
        made = [own.result() for own in [pool.submit(compile_sources, "any", tmp_path / "built") for _ in range(4)]]
    assert len(set(made)) == 1 and made[0].read_bytes()[: -_load_cpu.SEAL_BYTES] == b"made\n"
    assert (tmp_path / "c++.runs").read_text() == "run\n" and list((tmp_path / "built").iterdir()) == [made[0]]
