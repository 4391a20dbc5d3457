"""Writes a model folder anew with its weights rounded, in compressed-tensors' formats: `foretoken quantize`.

The weights are those that the option `quantization` makes when a model is loaded: the written folder, loaded without it, is the same model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from backend.errors import ConfigError, ModelError
from backend.model_checks import check_drafter, check_model
from backend.model_files import INDEX_FILE, find_weights, open_weights, read_config
from backend.models.families import ARCHITECTURES, DRAFTERS, WITH_IMAGES
from backend.models.quantized_config import CLASS, read_checkpoint_quantization
from backend.models.shards import ShardWriter, check_new
from backend.models.spec import WeightList
from backend.models.values import Values
from backend.quantization.schemes import BLOCK, GROUP, quantize
from backend.quantization.stored import Quantized
from backend.quantization_config import QuantizationConfig

MAX_FILE_BYTES = 2**28
"""Other files of the folder are copied up to this size: tokenizers, templates."""
FORMATS = {"wint8": "int-quantized", "wint4": "pack-quantized", "fp8": "float-quantized", "block_wise_fp8": "float-quantized"}


def write_quantized(directory: Path, out: Path, quantization: QuantizationConfig) -> None:
    """Writes the model or drafter of `directory` to the new folder `out`. Raises ModelError, ConfigError."""
    config = read_config(directory)
    if (found := read_checkpoint_quantization(config, directory)) is not None:
        raise ModelError(f"{directory}: the weights are quantized already ({found.method})")
    check_new(out)
    schemes = _find_schemes(config, directory, quantization)
    if not schemes:
        raise ConfigError(f"quantization {quantization.names} rounds no weight of {directory}")
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX_FILE and path.stat().st_size <= MAX_FILE_BYTES:
            shutil.copyfile(path, out / path.name)
    _write_weights(find_weights(directory), out, schemes)
    text = json.dumps(json.loads((directory / "config.json").read_text("utf-8")) | {"quantization_config": _describe(schemes)}, indent=2)
    (out / "config.json").write_text(f"{text}\n", "utf-8")


def _find_schemes(config: dict[str, Any], directory: Path, quantization: QuantizationConfig) -> dict[str, str]:
    """Of each projection that is rounded, its type."""
    weights = WeightList()
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed := config.get("architectures"), list) else []
    head = None
    if any(name in ARCHITECTURES or name in WITH_IMAGES for name in names):
        spec = check_model(directory)
        spec.list_weights(weights)
        for name in names:
            if name in DRAFTERS and config.get("num_nextn_predict_layers"):
                weights.add_known(DRAFTERS[name](Values(config, f"{directory}/config.json")))
        if quantization.head_quant_type is not None:
            if spec.is_tied:
                raise ConfigError(
                    f"quantization.head_quant_type: the head of {directory} is its embedding, which stays as it is; round it when it is loaded"
                )
            head = spec.head
    else:
        check_drafter(directory).list_weights(weights)
        if quantization.head_quant_type is not None:
            raise ConfigError(f"quantization.head_quant_type: {directory} is a drafter, whose head is its target's")
    kinds = {"dense": quantization.dense_quant_type, "moe": quantization.moe_quant_type}
    held = find_weights(directory)
    schemes = {name: scheme for name, kind in weights.rounded.items() if (scheme := kinds[kind]) is not None and f"{name}.weight" in held}
    if head is not None and quantization.head_quant_type is not None:
        schemes[head] = quantization.head_quant_type
    return schemes


def _write_weights(files: dict[str, Path], out: Path, schemes: dict[str, str]) -> None:
    by_file: dict[Path, list[str]] = {}
    for name, path in files.items():
        by_file.setdefault(path, []).append(name)
    with ShardWriter(out) as writer:
        for path, names in by_file.items():
            handle = open_weights(path, "pt")
            for name in names:
                try:
                    tensor, scheme = handle.get_tensor(name), schemes.get(name.removesuffix(".weight"))
                except SafetensorError as error:  # of what nobody reads, and so nobody has checked
                    raise ModelError(f"{path}: weight {name} cannot be read: {error}") from None
                if scheme is None or not name.endswith(".weight"):
                    writer.add({name: tensor})
                else:
                    parts = _tensors_of(quantize(tensor, scheme), scheme)
                    writer.add({f"{name.removesuffix('.weight')}.{part}": own for part, own in parts.items()})


def _tensors_of(stored: Quantized, scheme: str) -> dict[str, torch.Tensor]:
    """As the format has them, by what follows the projection's name."""
    if scheme == "wint4":
        rows, columns = stored.codes.shape
        digits = torch.nn.functional.pad(stored.codes, (0, -columns % 8)).to(torch.int64).unflatten(1, (-1, 8))
        words = (digits << torch.arange(0, 32, 4)).sum(dim=2)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        return {"weight_packed": words, "weight_scale": stored.scales, "weight_shape": torch.tensor([rows, columns])}
    return {"weight": stored.codes, "weight_scale": stored.scales[::BLOCK] if scheme == "block_wise_fp8" else stored.scales}


def _describe(schemes: dict[str, str]) -> dict[str, Any]:
    """quantization_config. The type that most projections have is the class's; the others are named, and what is not rounded has no such tensors."""
    kinds = sorted(set(schemes.values()), key=lambda scheme: -list(schemes.values()).count(scheme))
    groups = {}
    for number, scheme in enumerate(kinds):
        targets = [CLASS] if number == 0 else [name for name, own in schemes.items() if own == scheme]
        groups[f"group_{number}"] = {"targets": targets, "format": FORMATS[scheme], "weights": _arguments(scheme), "input_activations": None}
    form = FORMATS[kinds[0]] if len({FORMATS[kind] for kind in kinds}) == 1 else "mixed-precision"
    head = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**head, "config_groups": groups, "ignore": [] if any(name.endswith("lm_head") for name in schemes) else ["lm_head"]}


def _arguments(scheme: str) -> dict[str, Any]:
    own: dict[str, Any] = {
        "wint8": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "wint4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
        "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "block_wise_fp8": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]},
    }[scheme]
    return {**own, "symmetric": True, "dynamic": False}
