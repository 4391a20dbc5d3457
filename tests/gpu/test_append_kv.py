"""append_kv against the reference in float64, with everything that it must not write watched."""

from __future__ import annotations

import os

import pytest
import torch

from kernels import reference
from kernels.append_kv import append_kv

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# (tokens, H, Hkv, D, page, dtype)
CORRECTNESS = [(5, 8, 2, 128, 16, BF16), (33, 4, 2, 64, 64, FP16), (7, 4, 2, 64, 16, FP32), (4, 2, 1, 256, 16, BF16)]
CORNER = [(1, 32, 8, 128, 16, BF16), (1, 1, 1, 16, 16, FP16), (0, 8, 2, 128, 16, BF16), (3, 7, 1, 64, 16, FP32), (700, 32, 8, 128, 64, FP16)]
PERFORMANCE = [(b * q, 32, 8, 128, 16, BF16) for b in (1, 8, 32, 128) for q in (1, 6)]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("case", [*CORRECTNESS, *CORNER, *PERFORMANCE], ids=str)
def test_append_kv(case: tuple[int, int, int, int, int, torch.dtype], has_positions: bool, index: torch.dtype, device: torch.device) -> None:
    count, num_heads, num_kv, size, page, dtype = case
    seed = int.from_bytes(os.urandom(3))
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    num_pages = count // page + 3
    qkv = draw(count, num_heads + 2 * num_kv + 1, size)[:, : num_heads + 2 * num_kv]  # a view with a stride
    positions = torch.randint(0, 50, (count,), generator=generator, device=device, dtype=index) if has_positions else None
    cos, sin = (draw(50 if has_positions else count, 1, size) for _ in range(2))
    places = torch.randperm(num_pages * page, generator=generator, device=device)[:count]
    slots = (places // page * (2 * page + 3) + places % page).to(index)
    slots[torch.rand(count, generator=generator, device=device) < 0.2] = -1
    results = []
    for kind in (None, dtype, torch.float64):
        # Two planes of a pool, whose pages lie three tokens further apart than they are long.
        pool = torch.full((num_pages, 2 * page + 3, num_kv, size), float("nan"), device=device, dtype=kind or dtype)
        planes = [pool[:, :page], pool[:, page + 1 : 2 * page + 1]]
        op = append_kv if kind is None else reference.append_kv
        queries = op(qkv.to(kind or dtype) if kind else qkv, cos.to(kind or dtype), sin.to(kind or dtype), slots, *planes, positions)
        results.append([queries, *planes, pool])
    for name, got, like, exact in zip(("queries", "keys", "values", "pool"), *results):
        assert torch.equal(got.isnan(), exact.isnan()), f"seed {seed}: {name} written elsewhere"
        got, like, exact = (x.double().nan_to_num(0) for x in (got, like, exact))
        assert (got - exact).norm() <= 2 * (like - exact).norm() + 1e-12, f"seed {seed}: {name}"
        if name == "values":
            assert torch.equal(got, exact)


def test_unfit_shapes_are_refused(device: torch.device) -> None:
    qkv, table, pages = torch.zeros(2, 6, 64, device=device), torch.zeros(2, 1, 64, device=device), torch.zeros(1, 16, 2, 64, device=device)
    slots = torch.zeros(2, dtype=torch.int32, device=device)
    fit = {"qkv": qkv, "cos": table, "sin": table, "slots": slots, "key_pages": pages, "value_pages": pages}
    for name, unfit in (("qkv", qkv[:, :, :32]), ("cos", table[:1]), ("slots", slots[:1]), ("value_pages", pages[0])):
        with pytest.raises(ValueError, match=name):
            append_kv(**{**fit, name: unfit})
