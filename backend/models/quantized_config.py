"""Reads a checkpoint's `quantization_config`. What it does not understand is an error that names it, never ignored. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from backend.errors import ModelError
from backend.model_files import MODELOPT_FILE, OLD_QUANTIZATION_FILES, QUANTIZATION_KEYS, find_quantization_file, read_json
from backend.models.quantized_spec import FP8, CheckpointQuantization, Layout
from backend.models.values import Values

CLASS = "Linear"
"""What compressed-tensors' targets call projections in general."""
E4M3 = "F8_E4M3"
MXFP8 = Layout("scaled", 8, 32, dtype=E4M3, is_exponent=True)
NVFP4 = Layout("float4", bits=4, group=16, global_scale="weight_scale_2")
MODELOPT = {
    "FP8": Layout("scaled", dtype=E4M3),
    "FP8_PER_CHANNEL_PER_TOKEN": Layout("scaled", dtype=E4M3),
    "FP8_PB_WO": Layout("scaled", block=(128, 128), dtype=E4M3),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "MXFP8": MXFP8,
}
MIXED = "MIXED_PRECISION"
"""ModelOpt's, where layers differ."""


def read_checkpoint_quantization(config: Mapping[str, Any], directory: str | Path) -> CheckpointQuantization | None:
    """How the checkpoint beside config.json is quantized; None: it is not. Raises ModelError."""
    where = f"{directory}/config.json"
    for key in QUANTIZATION_KEYS:
        if not (found := Values(config, where).section(key)).is_empty:
            return _read(found)
    path = find_quantization_file(config, Path(directory))
    if path is None:
        return None
    if path.name != MODELOPT_FILE:
        return _read(Values({"quant_method": OLD_QUANTIZATION_FILES[path.name]} | read_json(path), str(path)))
    values = Values(read_json(path), str(path)).section("quantization")
    if not values.names("quant_algo") or values.has("quant_algo"):
        return dataclasses.replace(_read_modelopt(values), cache=_read_cache(values))
    cache = _read_cache(values)
    return None if cache is None else CheckpointQuantization("modelopt", lambda name: None, cache, has_weights=False)


def _read(values: Values) -> CheckpointQuantization:
    method = values.get("quant_method") or values.get("quant_library")  # which older files of ModelOpt have instead
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        # What FastDeploy and PaddleNLP write names types of parts instead.
        own = next((f"{key} {values.get(key)!r:.80}" for key in ("quantization", "weight_quantize_algo") if values.has(key)), "")
        raise ModelError(f"{values.where} of {own or f'quant_method {method!r:.80}'} is not supported; known: {', '.join(READERS)}")
    return dataclasses.replace(reader(values), cache=_read_cache(values))


def _read_cache(values: Values) -> str | None:
    """What keys and values are meant to be kept in; null and "auto" say nothing."""
    algo, scheme = values.get("kv_cache_quant_algo"), values.get("kv_cache_scheme")
    if isinstance(scheme, str) and values.has("quant_algo"):  # ModelOpt's in config.json, where it is none of compressed-tensors'
        algo = algo or scheme
    if algo is not None:
        return FP8 if str(algo).upper() == "FP8" else f"{algo!r:.40}"
    if scheme is None or scheme == "auto":
        return None
    if scheme == "static":  # AutoFP8's word for e4m3
        return FP8
    section = values.section("kv_cache_scheme")
    bits, kind = section.integer("num_bits", 32), section.choice("type", ("int", "float"), "int")
    return FP8 if (bits, kind) == (8, "float") else f"{bits}-bit {kind}"


def _all(method: str, layout: Layout) -> CheckpointQuantization:
    return CheckpointQuantization(method, lambda name: layout)


def _group(values: Values, key: str = "group_size", default: int | None = None) -> int | None:
    """-1: all inputs."""
    return None if values.get(key) == -1 else values.integer(key, 2**17, default=default)


def _bits(values: Values, key: str, known: tuple[int, ...]) -> int:
    bits = values.integer(key, 32)
    if bits not in known:
        raise values.refuse(key, " or ".join(map(str, known)))
    return bits


# -- GPTQ -------------------------------------------------------------------------------------------------------------------------


def _read_gptq(values: Values) -> CheckpointQuantization:
    if values.get("rotation"):
        raise ModelError(f"{values.where}: rotation {values.get('rotation')!r:.40} is not supported: what it turns is not turned back here")
    general = _gptq_layout(values)
    rules: list[tuple[re.Pattern[str], Layout | None]] = []
    section = values.section("dynamic")
    for pattern in values.get("dynamic") or {}:
        layout = None if pattern.startswith("-:") else _gptq_layout(section.section(pattern), general)
        rules.append((_compile(values, "dynamic", pattern.removeprefix("-:").removeprefix("+:")), layout))

    def layout_of(name: str) -> Layout | None:
        return next((layout for pattern, layout in rules if pattern.match(name)), general)

    return CheckpointQuantization("gptq", layout_of)


def _gptq_layout(values: Values, general: Layout | None = None) -> Layout:
    """general: what holds where a rule for some modules does not say."""
    bits = _bits(values, "bits", (4, 8)) if general is None or values.has("bits") else general.bits
    group = _group(values) if general is None or values.has("group_size") else general.group
    has_order = values.flag("desc_act", default=general.has_order if general is not None else False)
    is_symmetric = values.flag("sym", default=True if general is None else general.is_symmetric)  # zeros are stored either way
    key = "format" if values.has("format") and not values.has("checkpoint_format") else "checkpoint_format"  # GPTQModel writes both
    form = values.choice(key, ("gptq", "gptq_v2"), "gptq") if general is None or values.has(key) else None
    offset = (0 if form == "gptq_v2" else 1) if form is not None or general is None else general.zero_offset
    return Layout("gptq", bits, group, has_order=has_order, zero_offset=offset, is_symmetric=is_symmetric)


def _compile(values: Values, key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:  # the latter two of numbers and nesting beyond what Python compiles
        raise ModelError(f"{values.where}: {key} has {pattern!r:.80}, which is no regular expression: {error}") from None


# -- AutoRound, AWQ, fp8, ModelOpt ------------------------------------------------------------------------------------------------


def _read_autoround(values: Values) -> CheckpointQuantization:
    """AutoRound's own name for tensors that are as GPTQ's or AWQ's; extra_config names layers that differ, by name or pattern."""
    kind = values.choice("packing_format", ("auto_round:auto_gptq", "auto_round:auto_awq")).removeprefix("auto_round:auto_")
    general = _autoround_layout(values, kind)
    section = values.section("extra_config")
    own = {name: _autoround_layout(section.section(name), kind, general) for name in values.get("extra_config") or {}}
    patterns = [(_compile(values, "extra_config", name), layout) for name, layout in own.items() if set(name) & set("*+?^$()[]{}|\\")]

    def layout_of(name: str) -> Layout | None:
        return own[name] if name in own else next((layout for pattern, layout in patterns if pattern.search(name)), general)

    return CheckpointQuantization(f"auto-round {kind}", layout_of)


def _autoround_layout(values: Values, kind: str, general: Layout | None = None) -> Layout | None:
    if values.has("bits") and values.integer("bits", 32) >= 16:
        return None
    values.choice("data_type", ("int",), "int")
    bits = _bits(values, "bits", (4, 8) if kind == "gptq" else (4,)) if general is None or values.has("bits") else general.bits
    group = _group(values) if general is None or values.has("group_size") else general.group
    is_symmetric = values.flag("sym", default=True if general is None else general.is_symmetric)
    if kind == "awq":
        return Layout("awq", bits, group, is_symmetric=is_symmetric)
    return Layout("gptq", bits, group, zero_offset=1, is_symmetric=is_symmetric)


def _read_awq(values: Values) -> CheckpointQuantization:
    bits = _bits(values, "bits" if values.has("bits") else "w_bit", (4,))
    group = _group(values, "group_size" if values.has("group_size") else "q_group_size")
    values.choice("format" if values.has("format") and not values.has("version") else "version", ("gemm", "GEMM"), "gemm")
    if not values.flag("zero_point", default=True):
        raise values.refuse("zero_point", "true")
    return _all("awq", Layout("awq", bits, group, is_symmetric=False))


def _read_fp8(values: Values) -> CheckpointQuantization:
    values.choice("activation_scheme", ("static", "dynamic"), "dynamic")
    values.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    # GPTQModel's scales are what their names say; all others' multiply.
    is_divisor = values.has("weight_scale_semantics") and values.choice("weight_scale_semantics", ("inverse",)) == "inverse"
    inverse = Layout("scaled", dtype=E4M3, scale="weight_scale_inv", is_divisor=is_divisor)
    if values.has("weight_block_size"):
        block = values.integers("weight_block_size", 2**16)
        if len(block) != 2 or 0 in block:
            raise values.refuse("weight_block_size", "two integers above 0")
        return _all("fp8", dataclasses.replace(inverse, block=(block[0], block[1])))
    return _all("fp8", Layout("scaled", dtype=E4M3, other=inverse))  # as transformers calls it


def _read_fbgemm(values: Values) -> CheckpointQuantization:
    return _all("fbgemm_fp8", Layout("scaled", dtype=E4M3))


def _read_modelopt(values: Values) -> CheckpointQuantization:
    if not values.has("quant_algo") and values.has("kv_cache_scheme"):
        return CheckpointQuantization("modelopt", lambda name: None, has_weights=False)
    if values.get("quant_algo") == MIXED:
        section = values.section("quantized_layers")
        layouts = {layer: _modelopt_layout(section.section(layer))[1] for layer in values.get("quantized_layers") or {}}
        return CheckpointQuantization(f"modelopt {MIXED}", layouts.get)
    name, layout = _modelopt_layout(values)
    return _all(f"modelopt {name}", layout)


def _modelopt_layout(values: Values) -> tuple[str, Layout]:
    algo = values.get("quant_algo")
    name = algo.upper() if isinstance(algo, str) and algo.upper() in MODELOPT else values.choice("quant_algo", tuple(MODELOPT))
    layout = MODELOPT[name]
    if layout.group is not None:
        layout = dataclasses.replace(layout, group=values.integer("group_size", 2**10, default=layout.group))
    return name, layout


# -- compressed-tensors -----------------------------------------------------------------------------------------------------------


def _read_compressed(values: Values) -> CheckpointQuantization:
    values.choice("quantization_status", ("compressed", "frozen"), "compressed")  # the latter by older versions, for the same
    if values.section("sparsity_config").get("format") not in (None, "dense"):
        raise ModelError(f"{values.where}: sparsity_config is not supported")
    if values.get("transform_config"):
        raise ModelError(f"{values.where}: transform_config is not supported: its rotations are not computed")
    if not values.has("config_groups"):
        raise ModelError(f"{values.where} has no 'config_groups'")
    groups = values.section("config_groups")
    general = values.get("format")
    exact: dict[str, Layout] = {}
    patterns: list[tuple[re.Pattern[str], Layout]] = []
    of_class: Layout | None = None
    for name in values.get("config_groups") or {}:
        group = groups.section(name)
        if not group.has("weights"):  # of activations alone
            continue
        layout = _compressed_layout(group.section("weights"), group.get("format") or general, group.where)
        targets = group.get("targets") if group.has("targets") else [CLASS]
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise group.refuse("targets", "a list of names")
        for target in targets:
            if target.startswith("re:"):
                patterns.append((_compile(group, "targets", target.removeprefix("re:")), layout))
            elif target == CLASS:
                of_class = layout
            else:
                exact[target] = layout
    ignored = _matcher(values, "ignore")

    def layout_of(name: str) -> Layout | None:
        if ignored(name):
            return None
        return exact.get(name) or next((layout for pattern, layout in patterns if pattern.match(name)), of_class)

    has_weights = bool(exact or patterns or of_class) or not (values.get("config_groups") or values.has("kv_cache_scheme"))
    return CheckpointQuantization(f"compressed-tensors {general}", layout_of, has_weights=has_weights)


def _matcher(values: Values, key: str) -> Callable[[str], bool]:
    names = values.get(key) if values.has(key) else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise values.refuse(key, "a list of names")
    plain = {name for name in names if not name.startswith("re:")}
    patterns = [_compile(values, key, name.removeprefix("re:")) for name in names if name.startswith("re:")]
    return lambda name: name in plain or any(pattern.match(name) for pattern in patterns)


FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip


def _compressed_layout(weights: Values, form: object, where: str) -> Layout:
    if form not in FORMATS:
        raise ModelError(f"{where}: format {form!r:.80} is not supported; known: {', '.join(FORMATS)}")
    size = weights.get("group_size")  # which says what the strategy is where the file does not
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    kind, strategy = weights.choice("type", ("int", "float"), "int"), weights.choice("strategy", STRATEGIES, by_size)
    is_symmetric = weights.flag("symmetric", default=True)
    if weights.flag("dynamic"):
        raise weights.refuse("dynamic", "false for weights")
    if form == "nvfp4-pack-quantized":
        return _micro(weights, Layout("float4", 4, 16, weight="weight_packed", global_scale="weight_global_scale", is_divisor=True))
    if form == "mxfp4-pack-quantized":
        return _micro(weights, Layout("float4", 4, 32, weight="weight_packed"))
    if form == "mxfp8-quantized":
        return _micro(weights, MXFP8)
    group = weights.integer("group_size", 2**17) if strategy == "group" else None
    if form == "pack-quantized":
        bits, has_order = _bits(weights, "num_bits", (4, 8)), _read_order(weights)
        if kind != "int" or strategy not in ("group", "channel"):
            raise weights.refuse("strategy" if kind == "int" else "type", "group or channel of int, where the format is pack-quantized")
        return Layout("packed", bits, group, is_symmetric=is_symmetric, has_order=has_order)
    bits = _bits(weights, "num_bits", (4, 8) if kind == "int" else (8,))
    if (form == "int-quantized") > (kind == "int") or (form == "float-quantized") > (kind == "float"):
        raise weights.refuse("type", f"{form.split('-')[0]}, where the format is {form}")
    block = None
    if strategy == "block":
        block = weights.integers("block_structure", 2**16)
        if len(block) != 2 or 0 in block:
            raise weights.refuse("block_structure", "two integers above 0")
    return Layout("scaled", bits, group, None if block is None else (block[0], block[1]), "I8" if kind == "int" else E4M3, is_symmetric=is_symmetric)


def _read_order(weights: Values) -> bool:
    """Whether inputs are put in groups by a table; true and false are older files' names of group and none (compressed-tensors)."""
    order = weights.get("actorder")
    if order is None or isinstance(order, bool):
        return bool(order)
    return weights.choice("actorder", ORDERS) in ("group", "dynamic")


ORDERS = ("group", "dynamic", "weight", "static")
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


def _micro(weights: Values, layout: Layout) -> Layout:
    """Of floating-point numbers in groups of one size."""
    _bits(weights, "num_bits", (layout.bits,))
    if weights.choice("type", ("int", "float"), "float") != "float":
        raise weights.refuse("type", "float")
    if weights.integer("group_size", 2**10, default=layout.group) != layout.group:
        raise weights.refuse("group_size", str(layout.group))
    return layout


READERS: dict[str, Callable[[Values], CheckpointQuantization]] = {
    "compressed-tensors": _read_compressed,
    "gptq": _read_gptq,
    "auto-round": _read_autoround,
    "intel/auto-round": _read_autoround,
    "awq": _read_awq,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "modelopt": _read_modelopt,
}
