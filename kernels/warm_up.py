"""What has to be compiled before requests come, so that no step waits for nvcc whatever its shape.

    with compiling(device):
        load_step(...), load_attention(...), and the model's forward on so many tokens as TOKEN_COUNTS says, one after the other

Outside `compiling` the same calls load what was compiled, so that no step waits for that either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from kernels import attention, distribution, latent_attention, linear, ngram, quantized, route, sampling, token_mask, wide_linear, wide_quantized
from kernels._load import SOURCES, compiling, gpu_of, load
from kernels._signature import kernels_of
from kernels.attention import Heads

__all__ = ["TOKEN_COUNTS", "compiling", "load_attention", "load_step"]

TOKEN_COUNTS = (
    *route.FEW,
    8,
    linear.MAX_TOKENS,
    *sorted({*wide_linear.SIZES, *wide_quantized.SIZES}),
    wide_linear.MAX_TOKENS + 1,
    wide_quantized.MAX_TOKENS * quantized.MAX_WIDE_TURNS + 1,
)
"""Forwards of these many tokens use every kernel of the dense operations that forwards of any number use."""


def load_step(device: torch.device, dtypes: Sequence[torch.dtype], vocab_size: int, max_rows: int) -> None:
    """What a step does besides its forwards, with up to max_rows rows of logits of any of the dtypes."""
    for source in ("request_table", "step", "verify", "compact"):
        for name in kernels_of(SOURCES / f"{source}.cu"):
            load(device, source, name)
    load(device, "ngram", "draft_ngram", {"THREADS": ngram.THREADS})
    for dtype in dtypes:
        sampling.load_all(device, dtype, vocab_size, max_rows)
        distribution.load_all(device, dtype, vocab_size)
        token_mask.load_mask(device, dtype)


def load_attention(
    device: torch.device,
    widths: Sequence[int],
    max_batch: int,
    page_size: int,
    heads: Heads,
    dtype: torch.dtype,
    has_prefixes: bool = False,
    kinds: Collection[tuple[int | None, float | None]] = (),
    has_trees: bool = False,
    is_e4m3: bool = False,
    is_whole: bool = False,
) -> None:
    """Attention of up to max_batch rows that decode, at most `widths` queries each. kinds: windows and caps of scores that layers have, if they
    have any; has_trees: some of the queries are trees; is_e4m3: pages hold codes of e4m3; is_whole: see `attention.AttentionPlan`."""
    gpu = gpu_of(device)
    if heads.latent_rank:
        for latent_shape in {latent_attention.choose_shape(width, page_size, heads, dtype, gpu, is_e4m3) for width in widths} - {None}:
            latent_attention.load_all(device, dict(latent_shape or ()))
        return
    if not attention.is_known(page_size, heads):
        return
    shapes = {}
    for width in widths:
        for batch in range(1, max_batch + 1):
            for kind in ((None, None), *(() if has_prefixes else kinds)):
                defines = attention.choose_shape(batch, width, page_size, heads[:3], dtype, has_prefixes, gpu, *kind, has_trees, is_e4m3, is_whole)
                shapes[tuple(defines.items())] = defines
    for defines in shapes.values():
        attention.load_all(device, defines)
