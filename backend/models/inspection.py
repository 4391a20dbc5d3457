"""What a model folder or GGUF file is, before anything is loaded: `foretoken inspect`."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, DEFAULT_DRAFTER
from backend.drafter_checks import MODULES_METHOD, check_drafter_folder, find_method
from backend.errors import ConfigError, ModelError
from backend.kv_store import CacheSpec
from backend.model_checks import check_drafter, check_model, check_split, find_architecture
from backend.model_files import MODULES, find_pickled, find_weights, open_weights, read_config
from backend.models.embedding import splits_embedding
from backend.models.families import ARCHITECTURES, DRAFTERS
from backend.models.gguf_folder import read_file
from backend.models.latent_spec import LatentSpec
from backend.models.layers import ATTENTION
from backend.models.loading import check_gpu
from backend.models.moe_spec import MoeSpec
from backend.models.mtp_spec import MtpSpec
from backend.models.quantized_config import read_checkpoint_quantization
from backend.models.quantized_spec import FP8, CheckpointQuantization, Layout
from backend.models.spec import DecoderSpec, Projection, WeightList
from backend.models.values import Values
from backend.parallel.ranks import Ranks
from backend.quantization import Quantized, pad_columns
from backend.sampling_defaults import read_sampling_defaults
from backend.speculative_config import MODEL_METHODS, WEIGHTLESS_METHODS
from backend.text import Tokenizer
from backend.tokenizer_checks import find_unknown_tokens
from kernels import ops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = (1, 2, 4, 8)
"""Of groups of ranks that are tried."""
WEIGHTLESS = ", ".join(WEIGHTLESS_METHODS)


@dataclass(frozen=True, slots=True)
class Load:
    """What memory is asked for: sequences of so many tokens, on so many ranks."""

    length: int | None = None
    """None: the model's context, 8,192 at most."""
    batch: int = 1
    ranks: int = 1
    dtype: str | None = None
    """None: the checkpoint's."""
    kv_cache_dtype: str = "auto"
    """As the option of that name."""


def inspect(path: Path, load: Load, target: Path | None = None, *, has_weights: bool = True) -> dict[str, Any]:
    """What is at a path, by headings. target: the model that a drafter is meant for. has_weights: false where they are not here.

    Raises ModelError for what is neither a model that can be served nor a drafter, saying why.
    """
    if target is not None:
        return {"folder": str(path), "drafter": _fits(path, target)}
    if path.is_file():
        file, config, spec = read_file(path)
        kinds = Counter(
            {kind: sum(math.prod(file.shapes[name]) for name in file.shapes if file.kind(name) == kind) for kind in map(file.kind, file.shapes)}
        )
        found = {"file": str(path), "stored": ", ".join(f"{count / sum(kinds.values()):.0%} {kind}" for kind, count in kinds.most_common())}
        found |= _describe(spec, config, load, None) | {"drafters": _drafters(path, config, has_weights)}
        return found | {"served": f"foretoken serve --model {path} (converted once)"}
    config = read_config(path)
    if (drafter := _own_drafter(path, config, has_weights)) is not None:
        return {"folder": str(path), **drafter}
    spec = check_model(path, has_weights=has_weights)
    tokenizer = Tokenizer(path)
    read_sampling_defaults(path)
    stored = _stored(path) if has_weights else None
    found = {"folder": str(path), **({"stored": _list_stored(path, config, stored)} if stored else {})}
    found |= _describe(spec, config, load, stored)
    found["chat"] = "yes, by its template" if tokenizer.has_chat_template else "no template: it completes texts"
    found["drafters"] = _drafters(path, config, has_weights)
    served = f"foretoken serve --model {path}"
    if unknown := find_unknown_tokens(tokenizer.tokens, spec):
        served += f" --unknown-tokens refuse ({unknown})"
    return found | {"served": served}


def _own_drafter(path: Path, config: Mapping[str, Any], has_weights: bool) -> dict[str, Any] | None:
    """Of a folder that holds a drafter's modules alone."""
    try:
        find_architecture(config, path)
        return None
    except ModelError as error:
        try:
            method = find_method(path, has_weights=has_weights)
            spec = check_drafter(path, has_weights=has_weights) if method == MODULES_METHOD else None
        except ModelError:
            raise error from None  # of the two, that it is no model known here
    if spec is None:
        if has_weights and find_pickled(path) is None:
            _stored(path)  # raises what reading them does
        return {"drafter": f"of method {method}", "fits": "--target MODEL says whether a model is one that it was made for"}
    names = f"{len(spec.layers)} modules of multi-token prediction" if len(spec.layers) > 1 else "a module of multi-token prediction"
    fits = f"targets of hidden_size {spec.hidden_size} and vocab_size {spec.vocab_size}; --target MODEL says whether a model is one"
    return {"drafter": names, "parameters": _count(spec), "fits": fits}


def _fits(path: Path, target: Path) -> str:
    """The methods that a folder is a drafter of, for a target; else why not. Raises ModelError for a target that cannot be served."""
    check_model(target)
    reasons, fitting = {}, []
    for method in MODEL_METHODS:
        try:
            check_drafter_folder(method, path, target)
            fitting.append(method)
        except (ModelError, ConfigError) as error:
            reasons[method] = str(error)
    if fitting:
        return f"fits {target} as {', '.join(fitting)}"
    raise ModelError(f"{path} is no drafter for {target}:\n" + "\n".join(f"  {method}: {reason}" for method, reason in reasons.items()))


def _drafters(path: Path, config: Mapping[str, Any], has_weights: bool) -> str:
    """The methods that need no other folder: those without weights, and mtp where modules come with the model."""
    if config.get(MODULES):
        try:
            if path.is_file():  # whose tensors were looked at when it was read
                spec = DRAFTERS[config["architectures"][0]](Values(config, str(path)))
            else:
                spec = check_drafter(path, has_weights=has_weights)
            return f"{WEIGHTLESS}, mtp ({len(spec.layers)} own, {_count(spec)})"
        except ModelError as error:
            return f"{WEIGHTLESS}; its own modules cannot be used: {error}"
    if path.resolve() == BUNDLED_MODEL.resolve():
        return f"{WEIGHTLESS}, mtp (bundled, {_count(check_drafter(BUNDLED_DRAFTER))}), eagle3 (its folder {DEFAULT_DRAFTER.name}, the default)"
    return WEIGHTLESS


# -- sizes --------------------------------------------------------------------------------------------------------------------------


def _shapes(spec: DecoderSpec | MtpSpec) -> dict[str, tuple[int, ...]]:
    weights = WeightList()
    spec.list_weights(weights)
    return weights.required


def _count(spec: DecoderSpec | MtpSpec) -> str:
    """Parameters, in words; of a mixture also those that one token runs through."""
    total = sum(math.prod(shape) for shape in _shapes(spec).values())
    layers = spec.layers if isinstance(spec, DecoderSpec) else [module.decoder for module in spec.layers]
    idle = 0
    for layer in layers:
        if isinstance(layer.mlp, MoeSpec):
            router = layer.mlp.router
            idle += (router.num_experts - router.num_chosen) * 3 * layer.mlp.hidden_size * layer.mlp.inner
    return f"{_millions(total)}" + (f", {_millions(total - idle)} for a token" if idle else "")


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _stored(path: Path) -> dict[str, tuple[str, int]]:
    """Of each tensor its dtype, and its numbers."""
    files, found = find_weights(path), {}
    for file in sorted(set(files.values())):
        with open_weights(file, "np") as handle:
            for name in handle.keys():  # noqa: SIM118 - no dictionary
                entry = handle.get_slice(name)
                found[name] = entry.get_dtype(), math.prod(entry.get_shape())
    return found


def _list_stored(path: Path, config: Mapping[str, Any], stored: Mapping[str, tuple[str, int]]) -> str:
    kinds: Counter[str] = Counter()
    for kind, count in stored.values():
        kinds[kind] += count
    quantization = read_checkpoint_quantization(config, path)
    files = len(set(find_weights(path).values()))
    text = ", ".join(f"{count / sum(kinds.values()):.0%} {kind}" for kind, count in kinds.most_common())
    return text + f" in {files} file{'s' if files > 1 else ''}" + (f", quantized ({quantization.method})" if quantization else "")


def _describe(spec: DecoderSpec, config: Mapping[str, Any], load: Load, stored: Mapping[str, tuple[str, int]] | None) -> dict[str, Any]:
    """What holds of a folder and a file. stored: a folder's tensors. Raises ConfigError for a load that cannot be."""
    name = load.dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = DTYPES.get(name.removeprefix("torch."), torch.bfloat16)
    length = load.length or min(spec.max_model_len, 8192)
    if length > spec.max_model_len:
        raise ConfigError(f"max_model_len {length} is beyond the model's own limit {spec.max_model_len}")
    ranks = Ranks(0, load.ranks)
    check_split(spec, load.ranks)
    layer, num_kv = spec.layers[0].attention, spec.layers[0].attention.heads[1]
    part = ranks.part(num_kv, "num_key_value_heads", can_repeat=True)
    kept = _cache_dtype(config, spec, load.kv_cache_dtype, dtype)
    cache = CacheSpec(ATTENTION, layer.token_shape(part.stop - part.start), kept, layer.num_planes * len(spec.layers))
    token = cache.token_bytes * cache.num_planes
    quantization = None if stored is None else read_checkpoint_quantization(config, Path(spec.where).parent)
    weights = _weight_bytes(spec, dtype, load.ranks, quantization, stored or ())
    on_cpu, head = _bytes_on_cpu(spec, torch.float32 if load.dtype is None else dtype, load.ranks, quantization, stored or {})
    twice, total = "", token * length * load.batch
    if load.dtype is None and dtype != torch.float32:  # which is the default there
        wide = _cache_dtype(config, spec, load.kv_cache_dtype, torch.float32).itemsize / kept.itemsize
        sizes = on_cpu + head, token * wide, on_cpu + head + total * wide
        twice = "; on CPU, by default in float32: weights {}, a token {}, together {}".format(*map(_size, sizes))
    else:
        twice += f"; on CPU {_size(head)} more for the head" if head else ""
        twice += f"; on CPU {_size(weights - on_cpu)} less, since projections of bfloat16 stay so" if on_cpu < weights else ""
    if padding := _padding_bytes(spec, dtype, load.ranks, quantization, stored or ()):
        twice += f"; on a GPU {_size(padding)} more for experts, whose inputs are padded to whole steps of its kernels"
    each = " on each rank" if load.ranks > 1 else ""
    own = "" if kept == dtype else " in fp8"
    kinds = sorted({type(own.mlp).__name__ == "MoeSpec" for own in spec.layers})
    shape = f"{len(spec.layers)} layers of {spec.hidden_size}, heads {spec.layers[0].attention.heads[0]} / {num_kv}"
    names = config["architectures"]
    architecture = next((name for name in names if name in ARCHITECTURES), names[0])
    try:
        check_gpu(spec, dtype)
        gpu = "CPU and GPU"
    except ModelError as error:
        gpu = f"CPU; not on a GPU: {error}"
    return {
        "architecture": f"{architecture}: {shape}" + (", experts" if kinds[-1] else "") + f", vocabulary {spec.vocab_size}",
        "context": f"{spec.max_model_len} tokens",
        "parameters": _count(spec),
        "memory": f"in {str(dtype).removeprefix('torch.')}{each}: weights {_size(weights)}, a token{own} {_size(token)}, "
        f"{load.batch} x {length} tokens {_size(total)}, together {_size(weights + total)}{twice}",
        "runs on": gpu,
        "ranks": ", ".join(str(size) for size in SIZES if _splits(spec, size)),
    }


def _cache_dtype(config: Mapping[str, Any], spec: DecoderSpec, asked: str, dtype: torch.dtype) -> torch.dtype:
    """Of keys and values on CPU."""
    if asked == "auto":
        found = read_checkpoint_quantization(config, Path(spec.where).parent)
        asked = "fp8" if found is not None and found.cache == FP8 else "model"
    return ops.E4M3 if asked == "fp8" else dtype


def _bytes_on_cpu(
    spec: DecoderSpec, dtype: torch.dtype, ranks: int, quantization: CheckpointQuantization | None, stored: Mapping[str, tuple[str, int]]
) -> tuple[float, float]:
    """Of a rank's weights there, and of a tied head beside them: products want weights laid out in another way, and rows of the embedding are looked
    up as they are. In float32 projections whose numbers are of bfloat16 stay so (`kernels.panels`)."""
    halves = {name for name, (kind, _) in stored.items() if kind == "BF16"} if dtype == torch.float32 else set()
    size = 2 if f"{spec.embedding}.weight" in halves else dtype.itemsize
    head = spec.vocab_size * spec.hidden_size * size / ranks if spec.is_tied else 0.0
    return _weight_bytes(spec, dtype, ranks, quantization, stored, halves), head


def _weight_bytes(
    spec: DecoderSpec,
    dtype: torch.dtype,
    ranks: int,
    quantization: CheckpointQuantization | None = None,
    held: Container[str] = (),
    halves: Container[str] = (),
) -> float:
    """Of a rank. held: the names of a checkpoint's tensors, where it is quantized; halves: weights that are kept in 16 bits as projections."""
    weights, total = WeightList(), 0.0
    spec.list_weights(weights)
    shares, in_few_bits = _shares(spec, dtype, ranks), {*weights.rounded, spec.head}  # others are kept as plain numbers, however they are stored
    for name, shape in weights.required.items():
        own = name.removesuffix(".weight")
        layout = quantization.find(own, held) if quantization is not None and own in in_few_bits else None
        kept = 2 if own in in_few_bits and name in halves else dtype.itemsize
        size = math.prod(shape) * kept if layout is None else _kept_bytes(layout, shape[0], shape[1], dtype)
        total += size * (1 if len(shape) == 1 else shares.get(name, 1 / ranks))
    return total


def _padding_bytes(spec: DecoderSpec, dtype: torch.dtype, ranks: int, quantization: CheckpointQuantization | None, held: Container[str]) -> int:
    """Beside `_weight_bytes`, of experts in few bits on a GPU: zeros up to whole steps of its kernels."""
    total = 0
    for mlp in (layer.mlp for layer in spec.layers):
        if quantization is None or not isinstance(mlp, MoeSpec):
            continue
        layout, inner, hidden = quantization.find(mlp.expert(0)[2].name, held), mlp.inner // ranks, mlp.hidden_size
        if layout is None or layout.kind == "float4":
            continue
        missing = -inner % (ops.STORED_STEP * (2 if layout.bits == 4 else 1))
        into = 2 * (_kept_bytes(layout, inner + missing, hidden, dtype) - _kept_bytes(layout, inner, hidden, dtype))
        back = _kept_bytes(layout, hidden, inner, dtype, missing) - _kept_bytes(layout, hidden, inner, dtype)
        total += mlp.router.num_experts * (into + back)
    return total


@functools.cache
def _kept_bytes(layout: Layout, out: int, inputs: int, dtype: torch.dtype, more_inputs: int = 0) -> int:
    """Of a projection: as kernels have it, which is not as files do. more_inputs: that are zero."""
    if layout.kind == "float4":
        return out * inputs * dtype.itemsize
    groups = torch.arange(inputs) // (layout.block[1] if layout.block is not None else layout.group or inputs)
    scales = torch.empty(out, int(groups[-1]) + 1, device="meta")
    codes = torch.empty(out, inputs, dtype=torch.int8, device="meta")
    packed = pad_columns(Quantized(codes, scales, None if layout.is_symmetric else scales, groups, layout.bits), more_inputs).pack()
    return sum(part.nbytes for part in (packed.codes, packed.scales, packed.zeros) if part is not None)


def _shares(spec: DecoderSpec, dtype: torch.dtype, ranks: int) -> dict[str, float]:
    """Of each weight that is not split evenly, by its name, the share that a rank holds."""
    is_split = splits_embedding(spec.vocab_size * spec.hidden_size * dtype.itemsize, ranks, spec.is_tied)
    shares = {f"{spec.embedding}.weight": (2 if spec.is_tied else 1) / ranks if is_split else 1.0}

    def add(share: float, *projections: Projection | None) -> None:
        shares.update({f"{own.name}.weight": share for own in projections if own is not None})

    for layer in spec.layers:
        part = layer.attention
        if isinstance(part, LatentSpec):
            add(1.0, part.down, part.query_down)
        elif len(part.qkv) > 1:  # fused ones are not apart in the file
            add(max(1 / ranks, 1 / part.num_kv), *part.qkv[1:])
        if isinstance(layer.mlp, MoeSpec):
            add(1.0, layer.mlp.router.gate, layer.mlp.shared_gate)
    return shares


def _splits(spec: DecoderSpec, size: int) -> bool:
    try:
        check_split(spec, size)
        return True
    except ConfigError:
        return False
