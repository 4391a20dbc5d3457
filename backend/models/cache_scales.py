"""Scales of keys and values that are kept in e4m3: those of the checkpoint, or calibrated when the model is loaded."""

from __future__ import annotations

import hashlib
import logging
import math
from typing import TYPE_CHECKING

import torch

from backend.errors import ModelError
from backend.kv_store import KvStore
from backend.models.latent_spec import LatentSpec
from backend.models.layers import ATTENTION, Weights
from backend.models.quantized_spec import CACHE_SCALES, FP8
from backend.models.spec import AttentionSpec, DecoderSpec
from kernels import ops

if TYPE_CHECKING:
    from backend.config import EngineConfig
    from backend.models.loading import Model
    from backend.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

HEADROOM = 4.0
"""The largest number seen may grow by this before it saturates. In a floating-point type room costs no precision: with it, what is 3,500 times
smaller than the largest number seen still has all bits of e4m3. A key's pairs turn with its position, which alone makes up to 2 ** 0.5."""
CALIBRATION_TOKENS = 256
PAGE = 16
SPREAD = 0x9E3779B1
"""Odd, so that multiples of it reach tokens all over a vocabulary (Fibonacci hashing, Knuth 1973, section 6.4)."""

Scales = list[ops.CacheScales]
"""Of every layer."""


def read_cache_scales(spec: DecoderSpec, weights: Weights) -> Scales | None:
    """What a checkpoint says of this rank's heads; None: nothing. A scale is of all heads of a layer, or of one each.

    Raises ModelError where some layers have scales and others have none, and for scales that cannot be.
    """
    quantization = weights.checkpoint.quantization
    if quantization is None or quantization.cache not in (None, FP8):  # scales of another type
        return None
    found: Scales = []
    absent = ""
    for layer in spec.layers:
        part = layer.attention
        prefix = (part.down if isinstance(part, LatentSpec) else part.qkv[0]).name.rpartition(".")[0]
        keys, values = (_read(kind, prefix, part, weights) for kind in "kv")
        if isinstance(part, LatentSpec) and keys is not None:
            values = keys  # one scale is of the whole entry, as vLLM keeps it
        if isinstance(part, AttentionSpec) and part.scale is not None and keys is not None:
            keys = keys * math.sqrt(part.scale * part.head_dim**0.5)  # with which keys are multiplied here: see `RopeTables`
        if keys is None or values is None:
            absent = absent or f"{prefix}.{'k' if keys is None else 'v'}_scale"
        else:
            found.append(ops.CacheScales(keys, values))
    if found and absent:
        raise ModelError(f"{weights.checkpoint.directory}: {absent} is missing, though {len(found)} of {len(spec.layers)} layers have their scales")
    return found or None


def _read(kind: str, prefix: str, part: AttentionSpec | LatentSpec, weights: Weights) -> torch.Tensor | None:
    """kind: k or v -> [Hkv] of this rank."""
    checkpoint = weights.checkpoint
    (_, total, _), is_latent = part.heads, isinstance(part, LatentSpec)
    shapes: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1), (1, 1, 1))
    if not is_latent:
        shapes += ((total,), (total, 1), (total, 1, 1), (1, total, 1, 1))
    for name, divisor in CACHE_SCALES:
        full = f"{prefix}.{name.format(kind)}"
        if full not in checkpoint:
            continue
        scales = checkpoint.get_any(full, shapes).to(weights.device, torch.float32).flatten() / divisor
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise ModelError(f"{checkpoint.directory}: {full} is {scales.tolist()!r:.80}; scales must be finite and above 0")
        if is_latent:
            return scales
        own = weights.ranks.part(total, "num_key_value_heads", can_repeat=True)
        return scales.expand(total)[own].contiguous()
    return None


def scale_cache(config: EngineConfig, model: Model, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> str:
    """Has a model keep keys and values in e4m3 -> whose scales those are and their digest, which two stores that exchange pages must have in common.

    Every rank calls it at the same time. Raises ModelError.
    """
    if config.kv_cache_scales == "one":
        source, scales = "1", _plain_scales(model, device)
    elif model.stored_scales is not None:
        source, scales = "of the checkpoint", model.stored_scales
    else:
        source, scales = "calibrated", calibrate(model, dtype, device, min(config.max_model_len or model.max_model_len, model.max_model_len))
    model.scale_cache(scales)
    low, high = (float(which) for which in torch.stack([torch.stack([own.keys, own.values]) for own in scales]).aminmax())
    logger.info("keys and values are kept in e4m3, scales %s: %.3g to %.3g", source, low, high)
    return f"{source} {_digest(scales, ranks)}"


def _plain_scales(model: Model, device: torch.device) -> Scales:
    """1 for all."""
    ones = torch.ones(1 if model.heads.latent_rank else model.heads.num_kv, device=device)
    return [ops.CacheScales(ones, ones)] * model.num_layers


@torch.inference_mode()
def calibrate(model: Model, dtype: torch.dtype, device: torch.device, context_len: int) -> Scales:
    """Scales by what the model itself keeps of CALIBRATION_TOKENS tokens from all over its vocabulary, in its own dtype.

    The tokens are the same for every server, so that answers depend on no traffic and no order of it, and pages stay valid as long as a server runs.
    Scales are powers of two: nodes and devices that differ in the last bits of a sum agree on them (but where the largest number lies on a bound),
    and what is kept is exact in every type that computes with it. Every rank computes its own heads', at the same time.

    Raises ModelError for keys or values that are not finite.
    """
    count = min(CALIBRATION_TOKENS, context_len)
    numbers = torch.arange(count, device=device)
    token_ids = numbers * SPREAD % model.vocab_size
    pages = -(-count // PAGE)
    store = KvStore(model.cache_specs(dtype), PAGE, pages, device)
    planes = store.planes(ATTENTION)
    each = len(planes) // model.num_layers
    cache = [tuple(planes[i : i + each]) for i in range(0, len(planes), each)]
    plan = ops.plan_attention([count], [count], [list(range(pages))], PAGE, model.heads, dtype, device)
    model.forward(token_ids, numbers, numbers // PAGE * store.stride(ATTENTION) + numbers % PAGE, cache, plan)
    rank, made = model.heads.latent_rank, []
    for number, own in enumerate(cache):
        kept = [plane[:pages].flatten(0, 1)[:count].float().abs() for plane in own]  # [count, Hkv, D]
        keys, values = (kept[0][..., rank:], kept[0][..., :rank]) if rank else kept
        made.append(ops.CacheScales(*(_cover(part.amax(dim=(0, 2)), number) for part in (keys, values))))
    return made


def _cover(largest: torch.Tensor, layer: int) -> torch.Tensor:
    """The least power of two by which e4m3 reaches HEADROOM times as far [Hkv]; 1 where all is 0."""
    scales = []
    for value in largest.tolist():
        if not math.isfinite(value):
            raise ModelError(f"kv_cache_dtype fp8: layer {layer} keeps numbers that are not finite ({value}): take kv_cache_dtype model")
        fraction, exponent = math.frexp(value * HEADROOM / ops.E4M3_MAX)  # fraction: from 0.5 on, below 1
        scales.append(2.0 ** max(exponent - (fraction == 0.5), -100) if value else 1.0)
    return torch.tensor(scales, device=largest.device)


def _digest(scales: Scales, ranks: Ranks) -> str:
    """Of all ranks' scales."""
    own = torch.stack([torch.stack([layer.keys, layer.values]) for layer in scales])
    whole = own if ranks.size == 1 else ranks.gather(own)
    return hashlib.blake2b(whole.cpu().numpy().tobytes(), digest_size=8).hexdigest()
