"""Writes a model folder anew with its weights rounded, in compressed-tensors' formats: `foretoken quantize`.

The weights are those that the option `quantization` makes when a model is loaded: the written folder, loaded without it, is the same model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from backend.drafter_checks import list_drafter_weights
from backend.errors import ConfigError, ModelError
from backend.model_checks import check_model
from backend.model_files import (
    INDEX_FILE,
    MODELOPT_FILE,
    OLD_QUANTIZATION_FILES,
    QUANTIZATION_KEYS,
    TEMPLATES,
    find_weights,
    is_named,
    open_weights,
    read_config,
    read_json,
)
from backend.models.eagle_spec import has_part
from backend.models.families import ARCHITECTURES, DRAFTERS, OLDER_NAMES, WITH_IMAGES
from backend.models.moe_spec import UNFUSED
from backend.models.quantized_config import CLASS, read_checkpoint_quantization
from backend.models.quantized_spec import FP8
from backend.models.shards import ShardWriter, check_new, new_folder
from backend.models.spec import WeightList
from backend.models.values import Values
from backend.quantization.schemes import BLOCK, GROUP, quantize
from backend.quantization.stored import Quantized
from backend.quantization_config import QuantizationConfig

MAX_FILE_BYTES = 2**28
"""Other files of the folder are copied up to this size: tokenizers, templates."""
KEPT = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
KEPT_NAMES = ("tokenizer", "LICENSE", "NOTICE", "USE_POLICY")
"""What else belongs to a checkpoint begins so: tokenizer.model.v3, licences."""
NOT_KEPT = (INDEX_FILE, "config.json", MODELOPT_FILE, *OLD_QUANTIZATION_FILES)
"""Written anew, or said by config.json from now on."""
CODE = "auto_map"
"""Where a file names a model's own code, which transformers runs. Other code, such as Triton's model.py, is not the checkpoint's."""
HEAD = "lm_head"
JOINS = ("fc", "model.fc", "fusion_fc")
"""What joins a token and a state, or several states, in drafters of the EAGLE and DFlash kinds; no model has it."""
EXPERT = re.compile(r"\.experts\.\d+\.")
NUMBER = re.compile(r"\.\d+\.")
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""Of keys and values that the source means to be kept in e4m3, though its weights are plain."""
FORMATS = {"wint8": "pack-quantized", "wint4": "pack-quantized", "fp8": "float-quantized", "block_wise_fp8": "float-quantized"}


def write_quantized(directory: Path, out: Path, quantization: QuantizationConfig) -> None:
    """Writes the model or drafter of `directory` to the new folder `out`. Raises ModelError, ConfigError."""
    config = read_config(directory)
    found = read_checkpoint_quantization(config, directory)
    if found is not None and found.has_weights:
        raise ModelError(f"{directory}: the weights are quantized already ({found.method})")
    check_new(out)
    schemes = _find_schemes(config, directory, quantization)
    if not schemes:
        raise ConfigError(f"quantization {quantization.names} rounds no weight of {directory}")
    with new_folder(out) as part:
        for path in _find_files(directory):
            copy = part / path.relative_to(directory)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        plain = _write_weights(find_weights(directory), part, schemes)
        described = _describe(schemes, plain) | ({"kv_cache_scheme": CACHE} if found is not None and found.cache == FP8 else {})
        own = {key: value for key, value in read_json(directory / "config.json").items() if key not in QUANTIZATION_KEYS}
        (part / "config.json").write_text(f"{json.dumps(own | {QUANTIZATION_KEYS[0]: described}, indent=2)}\n", "utf-8")


def _find_files(directory: Path) -> list[Path]:
    """What stands beside the weights of a checkpoint and belongs to it: not what a server, a trainer or another format has in the folder."""
    beside = [path for path in directory.iterdir() if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES]
    has_code = any(is_named(path) and read_json(path).get(CODE) for path in (directory / "config.json", directory / "tokenizer_config.json"))

    def belongs(name: str, suffix: str) -> bool:
        if name in NOT_KEPT or name.endswith(".index.json"):
            return False
        return suffix in KEPT or name.startswith(KEPT_NAMES) or (has_code and suffix == ".py" and name != "model.py")

    found = [path for path in beside if belongs(path.name, path.suffix)]
    return sorted((*found, *(directory / TEMPLATES).glob("*.jinja")))


def _find_schemes(config: dict[str, Any], directory: Path, quantization: QuantizationConfig) -> dict[str, str]:
    """Of each projection that is rounded, its type."""
    weights = WeightList()
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed := config.get("architectures"), list) else []
    head = None
    is_joined = any(has_part(part, find_weights(directory)) for part in JOINS)  # EAGLE's authors give drafters their target's architecture
    held = find_weights(directory)
    if any(name in known for name in names for known in (ARCHITECTURES, OLDER_NAMES, WITH_IMAGES)) and not is_joined:
        spec = check_model(directory)
        spec.list_weights(weights)
        for name in names:
            if name in DRAFTERS and config.get("num_nextn_predict_layers"):
                weights.add_known(DRAFTERS[name](Values(config, f"{directory}/config.json")).settle_fused(held))
        if quantization.head_quant_type is not None:
            if spec.is_tied:
                raise ConfigError(
                    f"quantization.head_quant_type: the head of {directory} is its embedding, which stays as it is; round it when it is loaded"
                )
            head = spec.head
    else:
        weights = list_drafter_weights(directory)
        if quantization.head_quant_type is not None:
            raise ConfigError(f"quantization.head_quant_type: {directory} is a drafter, whose head is its target's")
    kinds = {"dense": quantization.dense_quant_type, "moe": quantization.moe_quant_type}
    if fused := [name for name, kind in weights.rounded.items() if name in held and kinds[kind] is not None]:
        raise ModelError(f"{directory}: weight {fused[0]}, of all experts, is not rounded: {UNFUSED}")
    schemes = {name: scheme for name, kind in weights.rounded.items() if (scheme := kinds[kind]) is not None and f"{name}.weight" in held}
    if head is not None and quantization.head_quant_type is not None:
        schemes[head] = quantization.head_quant_type
    return schemes


def _write_weights(files: dict[str, Path], out: Path, schemes: dict[str, str]) -> list[str]:
    """-> Projections that stay as they are."""
    plain: list[str] = []
    by_file: dict[Path, list[str]] = {}
    for name, path in files.items():
        by_file.setdefault(path, []).append(name)
    with ShardWriter(out) as writer:
        for path, names in by_file.items():
            handle = open_weights(path, "pt")
            for name in names:
                try:
                    tensor, scheme = handle.get_tensor(name), schemes.get(projection := name.removesuffix(".weight"))
                except (SafetensorError, ValueError) as error:  # of what nobody reads, and so nobody has checked
                    raise ModelError(f"{path}: weight {name} cannot be read: {error}") from None
                if scheme is None or projection == name:
                    writer.add({name: tensor})
                    plain += [projection] if projection != name and tensor.dim() == 2 else []
                else:
                    try:
                        parts = _tensors_of(quantize(tensor, scheme), scheme)
                    except ValueError as error:
                        raise ModelError(f"{path}: {projection} cannot be rounded to {scheme}: {error}") from None
                    writer.add({f"{projection}.{part}": own for part, own in parts.items()})
    return plain


def _tensors_of(stored: Quantized, scheme: str) -> dict[str, torch.Tensor]:
    """As the format has them, by what follows the projection's name."""
    if scheme in ("wint8", "wint4"):  # int8 in words too: vLLM takes plain ones with activations in 8 bits only
        (rows, columns), bits = stored.codes.shape, stored.bits
        digits = stored.codes.to(torch.int64) + (128 if bits == 8 else 0)
        digits = torch.nn.functional.pad(digits, (0, -columns % (32 // bits))).unflatten(1, (-1, 32 // bits))
        words = (digits << torch.arange(0, 32, bits)).sum(dim=2)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        return {"weight_packed": words, "weight_scale": stored.scales, "weight_shape": torch.tensor([rows, columns])}
    return {"weight": stored.codes, "weight_scale": stored.scales[::BLOCK] if scheme == "block_wise_fp8" else stored.scales}


def _describe(schemes: dict[str, str], plain: Iterable[str]) -> dict[str, Any]:
    """quantization_config. The type that most projections but experts have is the class's, and the others are named: others who read it look for the
    experts' by their names. What is not rounded is named too, for they go by the list, and not by what tensors there are."""
    names = [name for name in schemes if not EXPERT.search(name)]
    kinds = sorted(set(schemes.values()), key=lambda scheme: (-sum(schemes[name] == scheme for name in names), scheme))
    groups = {}
    for number, scheme in enumerate(kinds):
        others = [name for name, own in schemes.items() if own != scheme]
        targets = [CLASS] if number == 0 else _shorten((name for name, own in schemes.items() if own == scheme), others)
        groups[f"group_{number}"] = {"targets": targets, "format": FORMATS[scheme], "weights": _arguments(scheme), "input_activations": None}
    form = FORMATS[kinds[0]] if len({FORMATS[kind] for kind in kinds}) == 1 else "mixed-precision"
    head = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    heads = [] if any(name.endswith(HEAD) for name in schemes) else [HEAD]  # of tied ones there may be no weight
    ignored = _shorten((name for name in plain if name != HEAD), schemes)
    return {**head, "config_groups": groups, "ignore": heads + [_find_below_model(entry) for entry in ignored]}


def _find_below_model(entry: str) -> str:
    """transformers has there what stands beside a text model in files (vision towers)."""
    if entry.startswith(("model.", r"re:model\.")):
        return entry
    own = entry.removeprefix("re:") if entry.startswith("re:") else f"{re.escape(entry)}$"
    return rf"re:(model\.)?{own}"


def _shorten(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """These names as patterns of all layers and experts, where they are no pattern of one of the others."""
    taken = {_pattern(name) for name in others}
    return list(dict.fromkeys(name if (own := _pattern(name)) in taken or own == name else f"re:{own}$" for name in names))


def _pattern(name: str) -> str:
    """Itself, where there is no number between its dots."""
    return re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) if NUMBER.search(name) else name


def _arguments(scheme: str) -> dict[str, Any]:
    own: dict[str, Any] = {
        "wint8": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "wint4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
        "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "block_wise_fp8": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]},
    }[scheme]
    return {**own, "symmetric": True, "dynamic": False}
