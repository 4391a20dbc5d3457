"""append_attention against the reference in float64, over batches of mixed lengths with everything unread poisoned."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kernels import _load, attention, reference, step_attention
from kernels.attention import AttentionPlan, Heads, append_attention
from kernels.step_attention import StepAttention

UNREAD = 10**9
"""A page id that no page has."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    shapes: Sequence[tuple[int, int]]
    """(query_len, seq_len) of each request; a query_len of 0 is an inactive one."""
    heads: tuple[int, int] = (8, 2)
    """(H, Hkv)"""
    size: int = 128
    page: int = 16
    dtype: torch.dtype = BF16
    max_query_len: int = 0
    """Bound of the plan, when it is more than the longest."""
    prefixes: Sequence[tuple[int, int]] = ()
    """(group, prefix_len) of each request, when some share prefixes."""

    @property
    def bound(self) -> int:
        return self.max_query_len or max(1, *(q for q, _ in self.shapes), 1)

    def __str__(self) -> str:
        shapes = ",".join(f"{q}/{n}" for q, n in self.shapes[:3])
        heads, kv_heads = self.heads
        shared = f"-{len({g for g, _ in self.prefixes})} prefixes" if self.prefixes else ""
        return f"{len(self.shapes)}x({shapes})-{heads}:{kv_heads}x{self.size}-page{self.page}-{str(self.dtype)[6:]}{shared}"


MIXED = [(1, 17), (5, 16), (0, 7), (1, 1), (3, 3), (17, 33), (6, 31), (1, 16), (2, 48), (1, 150), (4, 64), (4, 65), (0, 0), (1, 700)]
SKEWED = [(1, 5000), *[(q % 6 + 1, 64 + 37 * q) for q in range(20)], (4, 3000)]

SHARED = [(1, 300), (2, 259), (0, 0), (6, 400), (1, 50), (4, 900), (1, 901), (3, 130), (1, 70)]
GROUPS = [(2, 256), (2, 256), (2, 256), (2, 256), (-1, 0), (0, 880), (0, 880), (5, 64), (-1, 48)]

CORRECTNESS = [
    Case(SHARED, prefixes=GROUPS),
    Case([(1, 64)]),
    Case([(1, 100), (4, 40)]),
    Case(MIXED),
    Case(MIXED, page=64),
    Case(MIXED, dtype=FP16, page=32),
    Case(MIXED, dtype=FP32, heads=(4, 2), size=64),
    Case(MIXED, heads=(4, 4), size=64, page=64),
    Case(MIXED, heads=(4, 1), size=256),
    Case([(1, 3000), (6, 2000)], heads=(8, 2)),
    Case([(4, 3000)] * 40, heads=(8, 8), size=64),
]
CORNER = [
    Case([(1, 70)] * 2, prefixes=[(1, 64)] * 2, page=64),
    Case([(6, 2000)] * 70, prefixes=[(i % 3 - 1, 1600) for i in range(70)], heads=(32, 8)),
    Case([(q % 5, 3000 + q) for q in range(40)], prefixes=[(0, 2992)] * 40, heads=(8, 2), size=256),
    Case([(1, 900)] * 30, prefixes=[(3, 512)] * 30, heads=(8, 8), size=64, dtype=FP16),
    Case(SHARED, prefixes=GROUPS, dtype=FP32, size=64),
    Case([(1, 1)]),
    Case([(1, 1)] * 5, heads=(32, 8)),
    Case([(17, 17)]),
    Case([(17, 4000)], heads=(16, 2)),
    Case([(0, 0), (0, 9)]),
    Case([(0, 0), (1, 900), (0, 9)], page=128),
    Case(SKEWED, heads=(32, 8)),
    Case(SKEWED, heads=(28, 4), dtype=FP16, page=64),
    Case(SKEWED, heads=(6, 2), size=64, dtype=FP32),
    Case(SKEWED, heads=(16, 16), size=64),
    Case(SKEWED, heads=(8, 4), size=256, page=64),
    Case([(17, 900), (9, 3000), (1, 70)], heads=(8, 1), size=256, dtype=FP16),
    Case([(1, 30)] * 300, heads=(8, 2), max_query_len=4),
    Case([(1, n) for n in range(1, 130)], heads=(4, 1), size=64),
    Case([(1, 20000), *[(1, 16)] * 63], heads=(32, 8), max_query_len=6),
]
PERFORMANCE = [
    *(Case([(q, n)] * b, heads=(32, 8), page=16) for q in (1, 4, 6) for b, n in ((1, 768), (8, 768), (32, 768), (128, 768), (1, 32768), (8, 4096))),
    Case([(6, 4096)] * 32, heads=(32, 8), page=64),
]


PROMPTS = [(300, 300), (40, 700), (1, 65), (129, 129)]
STEPS = [
    (Case([*PROMPTS, *MIXED]), 4),
    (Case([*PROMPTS, *MIXED], dtype=FP16, page=64, heads=(8, 8), size=64), 4),
    (Case([*PROMPTS, *MIXED], dtype=FP32, heads=(4, 2), size=64), 4),
    (Case([*PROMPTS, *MIXED], heads=(4, 1), size=256), 3),
    (Case(PROMPTS, heads=(32, 8)), 4),
    (Case([(2000, 2000), *[(6, 900)] * 30], heads=(32, 8)), 1),
    (Case([(0, 0), *PROMPTS, (1, 300)]), 5),
    (Case([*PROMPTS[:2], *SHARED], prefixes=[(-1, 0), (-1, 0), *((g + 2 if g >= 0 else -1, n) for g, n in GROUPS)]), 2),
    (Case([*PROMPTS[:2], *SHARED], dtype=FP32, size=64, prefixes=[(-1, 0), (-1, 0), *((g + 2 if g >= 0 else -1, n) for g, n in GROUPS)]), 2),
    (Case(MIXED), 0),
]
DECODING = [replace(case, shapes=case.shapes[n:], prefixes=case.prefixes[n:]) for case, n in STEPS if n < len(case.shapes)]


def jobs_of(cases: Sequence[Case]) -> list[tuple[str, dict[str, int]]]:
    jobs = {}
    for c in cases:
        defines = attention.choose_shape(len(c.shapes), c.bound, c.page, (*c.heads, c.size), c.dtype, bool(c.prefixes))
        jobs[str(defines)] = ("attention", defines)
    return list(jobs.values())


@pytest.fixture(scope="module", autouse=True)
def compiled(device: torch.device) -> None:
    _load.compile_all(jobs_of([*CORRECTNESS, *CORNER, *PERFORMANCE, *DECODING]), _load.device_of(device).architecture)


class Batch:
    """A case's tensors, and what the reference makes of them."""

    def __init__(self, case: Case, device: torch.device, seed: int, table_width: int | None = None) -> None:
        numbers, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
        self.case, self.device = case, device
        num_heads, num_kv = case.heads
        needed = [-(-n // case.page) if q else 0 for q, n in case.shapes]
        num_pages = sum(needed) + 3
        free = numbers.sample(range(num_pages), num_pages)
        shape = (num_pages, case.page, num_kv, case.size)
        self.clean = [torch.randn(shape, generator=generator, device=device).to(case.dtype) for _ in range(2)]
        # Of a pool, as planes of a page-major memory are: what lies between two pages belongs to others.
        pool = torch.full((num_pages, 2 * case.page + 3, num_kv, case.size), float("nan"), device=device, dtype=case.dtype)
        self.poisoned = [pool[:, : case.page], pool[:, case.page + 2 : 2 * case.page + 2]]
        for plane, values in zip(self.poisoned, self.clean):
            plane.copy_(values)
        width = table_width or max([*needed, 1]) + 2
        rows = numbers.sample(range(len(case.shapes) + 2), len(case.shapes))
        table = torch.full((len(case.shapes) + 2, width), UNREAD, dtype=torch.int32)
        is_read = torch.zeros(num_pages * case.page, dtype=torch.bool)
        self.page_ids: list[list[int]] = []
        prefix_pages: dict[int, list[int]] = {}
        for row, (q, n), count in zip(rows, case.shapes, needed):
            own, free = free[:count], free[count:]
            if case.prefixes and q and (group := case.prefixes[len(self.page_ids)])[0] >= 0:
                shared = prefix_pages.setdefault(group[0], own[: group[1] // case.page])
                own = [*shared, *own[len(shared) :]]
            table[row, :count] = torch.tensor(own, dtype=torch.int32)
            self.page_ids.append(own)
            if q:
                is_read[(torch.tensor(own)[:, None] * case.page + torch.arange(case.page)).flatten()[:n]] = True
        for plane in self.poisoned:  # whole pages, and slots of the last page that hold no token yet
            plane[~is_read.view(num_pages, case.page).to(device)] = float("nan")
        for plane in self.clean:
            plane.view(-1, num_kv, case.size)[~is_read.to(device)] = 0
        self.total = sum(q for q, _ in case.shapes)
        self.query = torch.randn(self.total + 3, num_heads, case.size, generator=generator, device=device).to(case.dtype)
        self.query[self.total :] = float("nan")
        lens = torch.tensor([0, *(q for q, _ in case.shapes)], dtype=torch.int32)
        self.inputs = {
            "cu_query_lens": lens.cumsum(0).int().to(device),
            "seq_lens": torch.tensor([n for _, n in case.shapes], dtype=torch.int32, device=device),
            "page_table": table.to(device),
            "table_rows": torch.tensor(rows, dtype=torch.int32, device=device),
        }
        columns = [torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*case.prefixes)]
        self.prefixes = (columns[0], columns[1]) if columns else None

    def plan(self) -> AttentionPlan:
        case = self.case
        longest = max(n for _, n in case.shapes)
        return AttentionPlan(
            **self.inputs,
            max_query_len=case.bound,
            max_seq_len=longest,
            page_size=case.page,
            heads=(*case.heads, case.size),
            dtype=case.dtype,
            prefixes=self.prefixes,
        )

    def step(self, num_prompts: int, *, is_gone: bool = False, is_whole: bool = False) -> StepAttention:
        """The first requests as prompts. is_gone: the host counts tokens of the first one, which computes none."""
        case, prompts = self.case, self.case.shapes[:num_prompts]
        return StepAttention(
            cu_query_lens=self.inputs["cu_query_lens"],
            seq_lens=self.inputs["seq_lens"],
            page_table=self.inputs["page_table"],
            request_indices=self.inputs["table_rows"],
            num_prompts=num_prompts,
            num_prompt_rows=sum(q for q, _ in prompts),
            max_prompt_query_len=max((q for q, _ in prompts), default=0),
            max_prompt_seq_len=max((n for _, n in prompts), default=0),
            num_prompt_keys=sum(n for _, n in prompts) + 100 * is_gone,
            max_query_len=max((q for q, _ in case.shapes[num_prompts:]), default=1),
            max_seq_len=max(n for _, n in case.shapes),
            page_size=case.page,
            heads=Heads(*case.heads, case.size),
            dtype=case.dtype,
            prefix_group=None if self.prefixes is None else self.prefixes[0],
            prefix_len=None if self.prefixes is None else self.prefixes[1],
            is_whole=is_whole,
        )

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        case = self.case
        active = [(q, n, pages) for (q, n), pages in zip(case.shapes, self.page_ids) if q]
        if not active:
            return self.query[:0].to(dtype)
        query_lens, seq_lens, pages = (list(x) for x in zip(*active))
        plan = reference.plan_attention(query_lens, seq_lens, pages, case.page, case.heads[0] // case.heads[1], dtype, self.device)
        return reference.append_attention(self.query[: self.total].to(dtype), *(x.to(dtype) for x in self.clean), plan)


def check(batch: Batch, plan: AttentionPlan | StepAttention) -> None:
    plan.refresh()
    if isinstance(plan, AttentionPlan):
        out = torch.full_like(batch.query, float("nan"))
        append_attention(batch.query, *batch.poisoned, plan, out)
        assert out[batch.total :].isnan().all(), "a row past the last request's was written"
    else:
        keys, values = batch.poisoned
        out = step_attention.append_attention(batch.query, keys, values, plan)
    got, exact = out[: batch.total].double(), batch.reference(torch.float64)
    assert got.isfinite().all(), f"rows {got.isfinite().flatten(1).all(1).logical_not().nonzero().flatten().tolist()[:20]} are not finite"
    if batch.total:
        error, allowed = (got - exact).norm(), 2 * (batch.reference(batch.case.dtype).double() - exact).norm()
        worst = ((got - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max()
        assert error <= allowed + 1e-7 * exact.norm(), f"error {error / exact.norm():.2e}, allowed {allowed / exact.norm():.2e}"
        assert worst < (1e-5 if batch.case.dtype == FP32 else 3e-2), f"one row's error is {worst:.2e}"


@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
def test_correctness(case: Case, device: torch.device) -> None:
    run(case, device)


@pytest.mark.parametrize("case", CORNER, ids=str)
def test_corner(case: Case, device: torch.device) -> None:
    run(case, device)


@pytest.mark.parametrize("case", PERFORMANCE, ids=str)
def test_performance(case: Case, device: torch.device) -> None:
    run(case, device)


def run(case: Case, device: torch.device) -> None:
    seed = int.from_bytes(os.urandom(3))
    batch = Batch(case, device, seed)
    plan = batch.plan()
    try:
        check(batch, plan)
        check(batch, plan)  # counters are as they were
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from None


@pytest.mark.parametrize(("case", "num_prompts"), STEPS, ids=str)
def test_prompts_and_decoding_rows(case: Case, num_prompts: int, device: torch.device) -> None:
    seed = int.from_bytes(os.urandom(3))
    batch = Batch(case, device, seed)
    plan = batch.step(num_prompts)
    try:
        for _ in range(2):
            check(batch, plan)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from None


def test_nothing_waits_for_the_host(device: torch.device) -> None:
    """A step with prompts is planned and computed with what the host knew before."""
    batch = Batch(STEPS[0][0], device, 3)
    plan = batch.step(4)
    check(batch, plan)  # what is made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = batch.step(4)
        plan.refresh()
        step_attention.append_attention(batch.query, batch.poisoned[0], batch.poisoned[1], plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_prompt_that_computes_nothing_after_all(device: torch.device) -> None:
    """The host counted more keys than there are: nobody's are read from some page, and nothing else changes."""
    batch = Batch(Case([*PROMPTS, *MIXED]), device, 4)
    check(batch, batch.step(4, is_gone=True))


def test_lists_of_lengths(device: torch.device) -> None:
    for shapes in (MIXED[:6], [(5, 16), (300, 300), (1, 90)]):
        case = Case([(q, n) for q, n in shapes if q])
        batch = Batch(case, device, 5)
        lens, heads = list(zip(*case.shapes)), Heads(*case.heads, case.size)
        plan = step_attention.plan_attention(lens[0], lens[1], batch.page_ids, case.page, heads, case.dtype, device)
        assert isinstance(plan, StepAttention)
        check(batch, plan)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_lengths_change_between_replays(dtype: torch.dtype, device: torch.device, stream: None) -> None:
    """One captured graph serves any lengths within its bounds: nothing of them is known on the host."""
    numbers = random.Random(5)
    first = Batch(Case([(6, 3000)] * 9, (8, 2), 64, 16, dtype), device, 0, table_width=200)
    plan = first.plan()
    query, planes = torch.empty_like(first.query), [torch.empty_like(x, memory_format=torch.preserve_format) for x in first.clean]
    out = torch.empty_like(query)

    def step() -> None:
        plan.refresh()
        append_attention(query, *planes, plan, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    for replay in range(12):
        longest = numbers.choice([10, 300, 3000])
        shapes = [(q, numbers.randint(max(q, 1), longest)) for q in (numbers.randint(0, 6) for _ in range(9))]
        batch = Batch(replace(first.case, shapes=shapes, max_query_len=6), device, replay, table_width=200)
        for name, tensor in batch.inputs.items():
            first.inputs[name].copy_(tensor)
        query.zero_()[: len(batch.query)].copy_(batch.query)
        for plane, new in zip(planes, batch.poisoned):
            plane.fill_(float("nan"))[: len(new)].copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        got, exact = out[: batch.total].double(), batch.reference(torch.float64)
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-5 if dtype == FP32 else 2e-2)
        assert out[batch.total :].isnan().all()


def test_unfit_shapes_are_refused(device: torch.device) -> None:
    batch = Batch(CORRECTNESS[0], device, 0)
    plan = batch.plan()
    with pytest.raises(ValueError, match="query is"):
        append_attention(batch.query[:, :4], *batch.poisoned, plan)
    with pytest.raises(ValueError, match="value_pages is"):
        append_attention(batch.query, batch.poisoned[0], batch.poisoned[1].half(), plan)
    with pytest.raises(ValueError, match=r"key_pages is .* with strides"):
        append_attention(batch.query, batch.poisoned[0].transpose(1, 2).contiguous().transpose(1, 2), batch.poisoned[1], plan)
    with pytest.raises(ValueError, match="pages of keys lie 8960 apart, those of values 4096"):
        append_attention(batch.query, batch.poisoned[0], batch.poisoned[1].contiguous(), plan)
    with pytest.raises(ValueError, match="seq_lens is"):
        AttentionPlan(**{**batch.inputs, "seq_lens": batch.inputs["seq_lens"].long()}, **SIZES)
    with pytest.raises(ValueError, match="page_table has"):
        AttentionPlan(**batch.inputs, **{**SIZES, "max_seq_len": 10**6})
    with pytest.raises(ValueError, match="page_size is 24"):
        AttentionPlan(**batch.inputs, **{**SIZES, "page_size": 24})


SIZES = {
    "max_query_len": 1,
    "max_seq_len": 64,
    "page_size": 16,
    "heads": (8, 2, 128),
    "dtype": BF16,
}
