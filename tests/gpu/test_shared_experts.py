"""Shared experts' second product runs beside the router: it must see what the first one made, and nobody may see it half done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from backend.quantization import Linear, make_linear, quantize
from kernels.activation import silu_mul
from kernels.experts import choose_groups, mix_experts
from kernels.rounded import rounding_activations
from kernels.route import route_tokens

HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN, LAYERS = 1024, 768, 24, 3, 3
SCHEMES = ((None, False), ("wint8", False), ("wint4", False), ("fp8", True), ("wint4", True))
"""Of weights, and whether activations are rounded, too."""


def make_layer(scheme: str | None, has_bias: bool, device: torch.device) -> tuple[Linear, Linear, torch.Tensor]:
    into, down = (torch.randn(2 * INNER, HIDDEN) / HIDDEN**0.5, torch.randn(HIDDEN, INNER) / INNER**0.5)
    gate, bias = torch.randn(NUM_EXPERTS, HIDDEN, device=device), torch.randn(HIDDEN, device=device).bfloat16() if has_bias else None
    stored = (t.to(device, torch.bfloat16) if scheme is None else quantize(t.to(device, torch.bfloat16), scheme) for t in (into, down))
    return make_linear(next(stored)), make_linear(next(stored), bias), gate


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 17, 64, 192, 300])
@pytest.mark.parametrize(("scheme", "rounds"), SCHEMES)
def test_shared_experts_beside_the_router(scheme: str | None, rounds: bool, num_tokens: int, device: torch.device) -> None:
    torch.manual_seed(num_tokens)
    layers = [make_layer(scheme, i == 1, device) for i in range(LAYERS)]
    norm = torch.rand(HIDDEN, device=device).bfloat16() + 0.5
    gate_up = (torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, device=device) / HIDDEN**0.5).bfloat16()
    down = (torch.randn(NUM_EXPERTS, HIDDEN, INNER, device=device) / INNER**0.5).bfloat16()
    x, given = (torch.empty(num_tokens, HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(2))

    def run(is_beside: bool) -> None:
        x.copy_(given)
        for own_into, own_down, gate in layers:
            inner, beside = own_into.gated_after_norm(x, norm, 1e-6), torch.full_like(x, float("nan"))
            groups = choose_groups(num_tokens, NUM_CHOSEN, 0, NUM_EXPERTS, x.dtype, device, (HIDDEN, INNER))
            y, experts, weights, lists = route_tokens(x, gate, NUM_CHOSEN, norm=(norm, 1e-6), groups=groups)
            if is_beside:
                own_down.write_to(beside, inner, is_ready=True)
            else:
                torch.cuda.synchronize()
                beside.copy_(own_down(inner))
            mix_experts(y, experts, weights, gate_up, down, silu_mul, True, residual=x, beside=beside, lists=lists)

    with rounding_activations(rounds):
        check(run, given, x)


def check(run: Callable[[bool], None], given: torch.Tensor, x: torch.Tensor) -> None:
    given.normal_()
    run(True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        run(True)
    for _ in range(10):
        given.normal_()
        graph.replay()
        found = x.clone()
        run(False)
        assert torch.equal(found, x)
