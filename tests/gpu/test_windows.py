"""Attention with windows and caps of scores on the GPU, against float64 in the twin."""

from __future__ import annotations

import pytest
import torch

from kernels import _load, attention, reference, step_attention
from tests.gpu.test_attention import BF16, FP16, FP32, MIXED, PROMPTS, SKEWED, Batch, Case

KINDS = [
    (128, BF16, 1, None),
    (128, BF16, 40, None),
    (128, FP16, 1000, 3.0),
    (128, BF16, None, 3.0),
    (256, BF16, 33, 20.0),
    (64, BF16, 40, None),
    (64, FP32, 33, 20.0),
]
SHAPES = [MIXED, SKEWED, [(2, 3000)]]


@pytest.fixture(scope="module", autouse=True)
def compiled(device: torch.device) -> None:
    jobs = []
    for size, dtype, window, cap in KINDS:
        for shapes in SHAPES:
            sizes = (len(shapes), max(q for q, _ in shapes), 16, (8, 2, size), dtype, False, None)
            for kind in ((window, cap), (None, None)):
                jobs += [("attention", attention.choose_shape(*sizes, *kind, is_whole=is_whole)) for is_whole in (False, True)]
    _load.compile_all(jobs, _load.device_of(device).architecture)


def check(
    shapes: list[tuple[int, int]],
    num_prompts: int,
    size: int,
    dtype: torch.dtype,
    window: int | None,
    cap: float | None,
    device: torch.device,
    *,
    is_whole: bool = False,
) -> None:
    batch = Batch(Case(shapes, (8, 2), size, 16, dtype), device, 6)
    plan = batch.step(num_prompts, is_whole=is_whole)
    plan.refresh()
    out = step_attention.append_attention(batch.query, *batch.poisoned, plan, window, cap)[: batch.total]
    lens = [[n for n, (q, _) in zip(values, shapes) if q] for values in zip(*shapes)]
    pages = [own for own, (q, _) in zip(batch.page_ids, shapes) if q]
    twin = reference.plan_attention(*lens, pages, 16, 4, torch.float64, is_whole=is_whole)
    planes = [plane.cpu().double() for plane in batch.clean]
    expected = reference.append_attention(batch.query[: batch.total].cpu().double(), *planes, twin, window, cap)
    error = float((out.cpu().double() - expected).norm() / expected.norm())
    assert error < {BF16: 1e-2, FP16: 2e-3, FP32: 1e-5}[dtype], error


@pytest.mark.parametrize("shapes", SHAPES, ids=["mixed", "skewed", "long"])
@pytest.mark.parametrize(("size", "dtype", "window", "cap"), KINDS)
def test_decoding(size: int, dtype: torch.dtype, window: int | None, cap: float | None, shapes: list[tuple[int, int]], device: torch.device) -> None:
    check(shapes, 0, size, dtype, window, cap, device)


@pytest.mark.parametrize("shapes", SHAPES, ids=["mixed", "skewed", "long"])
@pytest.mark.parametrize(("size", "dtype", "window", "cap"), [*KINDS, (96, BF16, 40, None), (96, BF16, None, None)])
def test_queries_that_see_those_after_them(
    size: int, dtype: torch.dtype, window: int | None, cap: float | None, shapes: list[tuple[int, int]], device: torch.device
) -> None:
    """By kernels, and by torch's operations where heads are of a size that none has."""
    check(shapes, 0, size, dtype, window, cap, device, is_whole=True)


@pytest.mark.parametrize(("window", "cap"), [(40, None), (33, 20.0)])
def test_prompts(window: int | None, cap: float | None, device: torch.device) -> None:
    check([*PROMPTS, *MIXED], len(PROMPTS), 128, BF16, window, cap, device)
    check(PROMPTS, len(PROMPTS), 128, BF16, window, cap, device)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (40, None), (None, 20.0)])
def test_heads_that_no_kernel_has(window: int | None, cap: float | None, device: torch.device) -> None:
    for shapes, num_prompts in ((MIXED, 0), (PROMPTS, len(PROMPTS))):
        check(shapes, num_prompts, 96, BF16, window, cap, device)
