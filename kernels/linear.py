"""Projections of few tokens at the speed of the memory, with what comes right before and after them.

A row of a result does not depend on how many rows there are, as long as `linear.cu` computes it: a drafted token is verified with
the sums that plain decoding would have made. From 17 to 192 tokens it is `wide_linear.cu` on Hopper GPUs, and for more `prompt_linear.cu`; other
GPUs' long products, float32 and odd shapes go to torch.

Weights and norm weights are read before the kernel ahead in the stream has ended: they must not be what that one writes.
"""

from __future__ import annotations

import torch

from kernels import prompt_linear, reference, wide_linear
from kernels._load import ELEMENTS, gpu_of, load
from kernels.activation import silu_mul
from kernels.norm import rms_norm

MAX_TOKENS = 16
TILE, STEP, THREADS, WARPS = 16, 32, 256, 8
SHARED = {8: 136 * 1024, 16: 160 * 1024}
"""By the tokens that there is room for: four to five stages, and so much that a multiprocessor holds one block. The next kernel's first
weights then come in while this one's last sums are made and whatever small kernel is between them runs, and not long before."""

MAX_SHARED = max(SHARED.values())
"""GPUs whose blocks have no more (GeForce) leave such products to torch."""
MAX_NORM = 16384
"""Elements of a norm's weight for which shared memory has room."""

Defines = dict[str, "int | str"]


def _choose(dtype: torch.dtype, num_tokens: int, out_size: int, in_size: int, has_norm: bool, is_gated: bool, num_blocks: int) -> Defines:
    """How `linear.cu` is compiled for a product. Nothing here changes the order in which an output's terms are added."""
    # Two tiles at a time unless three spare a pass: more make the stages of the pipeline fewer and longer.
    tiles = 3 if -(-out_size // TILE // num_blocks) == 3 else 2
    tokens = -(-num_tokens // 8) * 8
    norm = in_size if has_norm else 0
    return {"ELEMENT": ELEMENTS[dtype], "TOKENS": tokens, "TILES": tiles, "SHARED": SHARED[tokens], "NORM": norm, "GATED": int(is_gated)}


def _check(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(f"{name}: x {tuple(x.shape)} {x.dtype} must be [M, K] and weight {tuple(weight.shape)} {weight.dtype} [N, K] of one type")


def is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x weight^T is computed by `linear.cu`."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MAX_TOKENS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % STEP == 0
        and weight.shape[0] % (2 * TILE) == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.is_contiguous()
        and gpu_of(x.device).block_memory > MAX_SHARED
    )


def _can_fuse_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return is_skinny(x, weight) and x.dtype == torch.bfloat16 and x.shape[1] <= MAX_NORM


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    out: torch.Tensor | None = None,
    is_ready: bool = False,
) -> torch.Tensor:
    (num_tokens, in_size), out_size = x.shape, weight.shape[0]
    if out is None:
        out = x.new_empty(num_tokens, out_size // 2 if is_gated else out_size) if residual is None else residual
    num_blocks = gpu_of(x.device).num_multiprocessors
    defines = _choose(x.dtype, num_tokens, out_size, in_size, norm_weight is not None, is_gated, num_blocks)
    kernel = load(x.device, "linear", "linear", defines, shared=int(defines["SHARED"]), programmatic=True)
    pointers = (0 if t is None else t for t in (bias, residual, norm_weight))
    sizes = (num_tokens, out_size, in_size * x.element_size(), 0, 0, x.stride(0))
    kernel((min(out_size // TILE, num_blocks), 1), (THREADS, 1, 1), out, x, weight, *pointers, 0, 0, *sizes, eps, int(is_ready))
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N]."""
    _check("linear", x, weight)
    if is_skinny(x, weight):
        return _launch(x, weight, bias)
    if wide_linear.is_wide(x, weight):
        return wide_linear.launch(x, weight, bias)
    return prompt_linear.launch(x, weight, bias) if prompt_linear.is_long(x, weight) else reference.linear(x, weight, bias)


def add_linear(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Adds linear(x, weight, bias) to residual [M, N] in place, rounded before where the kernel does it; returns residual."""
    _check("add_linear", x, weight)
    if residual.shape != (len(x), len(weight)) or residual.dtype != x.dtype or not residual.is_contiguous():
        raise ValueError(f"add_linear: residual {tuple(residual.shape)} {residual.dtype} must be [{len(x)}, {len(weight)}] {x.dtype}, contiguous")
    if is_skinny(x, weight):
        return _launch(x, weight, bias, residual)
    if wide_linear.is_wide(x, weight) and residual.data_ptr() % 16 == 0:
        return wide_linear.launch(x, weight, bias, residual)
    if prompt_linear.is_long(x, weight) and residual.data_ptr() % 16 == 0:
        return prompt_linear.launch(x, weight, bias, residual)
    if x.is_cuda and bias is None:
        return residual.addmm_(x, weight.t())  # cuBLAS adds in float32
    return reference.add_linear(residual, x, weight, bias)


def write_linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_ready: bool = False) -> torch.Tensor:
    """Puts linear(x, weight, bias) in the place of what out [M, N] has; returns out.

    is_ready: the kernel right ahead on the stream waits for those before it and only then lets the next one in, as route.cu does; x is older, and out
    is nobody's. Then this need not wait, and a product of few tokens runs beside that kernel."""
    if is_skinny(x, weight) and out.is_contiguous():
        return _launch(x, weight, bias, out=out, is_ready=is_ready)
    is_aligned = out.is_contiguous() and out.data_ptr() % 16 == 0
    if wide_linear.is_wide(x, weight) and is_aligned:
        return wide_linear.launch(x, weight, bias, out=out, is_ready=is_ready)
    if prompt_linear.is_long(x, weight) and is_aligned:
        return prompt_linear.launch(x, weight, bias, out=out)
    if x.is_cuda and bias is None:
        return torch.mm(x, weight.t(), out=out)
    return out.copy_(linear(x, weight, bias))


def norm_linear(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """linear(rms_norm(x, norm_weight, eps), weight, bias).

    In bf16 and for few tokens in one kernel: x norm_weight is multiplied and the sums are divided by the root mean square, so that
    nothing waits for it. (fp16 might overflow.)
    """
    _check("norm_linear", x, weight)
    if _can_fuse_norm(x, weight):
        return _launch(x, weight, bias, None, norm_weight, eps)
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_gated_linear(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu_mul(norm_linear(x, norm_weight, eps, weight)): weight [2N, K] = gate | up -> [M, N], in `out` if that is given, contiguous. gate_up is
    rounded in between as there."""
    _check("norm_gated_linear", x, weight)
    if _can_fuse_norm(x, weight):
        return _launch(x, weight, None, None, norm_weight, eps, is_gated=True, out=out)
    x = rms_norm(x, norm_weight, eps)
    if is_skinny(x, weight):
        return _launch(x, weight, is_gated=True, out=out)
    if wide_linear.is_wide(x, weight, is_gated=True):
        return wide_linear.launch(x, weight, is_gated=True, out=out)
    if prompt_linear.is_long(x, weight, is_gated=True):
        return prompt_linear.launch(x, weight, is_gated=True, out=out)
    made = silu_mul(reference.linear(x, weight))
    return made if out is None else out.copy_(made)
