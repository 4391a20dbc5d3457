"""Writes tiny checkpoints in the formats that others write: packed with integers of Python, and dequantized by the formats' own definitions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of a word, from its lowest bits on."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack(digits: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] -> int32 words [n, ceil(m bits / 32)]; place i of a word holds column places[i] of its columns."""
    per_word = 32 // bits
    words = []
    for row in digits.tolist():
        row = row + [0] * (-len(row) % per_word)
        pieces = [row[i : i + per_word] for i in range(0, len(row), per_word)]
        words.append([sum(piece[k] << (bits * i) for i, k in enumerate(places or range(per_word))) for piece in pieces])
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


@dataclass(frozen=True)
class Format:
    """A way to write a projection: its tensors, and what they stand for."""

    name: str
    config: dict[str, Any]
    """quantization_config"""
    write: Callable[..., tuple[Tensors, torch.Tensor] | None]
    file: str | None = None
    """Of the configuration, where it is not config.json's."""
    left_out: tuple[str, ...] = ()
    """Projections that stay as they are."""
    is_by_name: bool = False
    """`write` takes the projection's name first; None: it stays as it is."""

    def __str__(self) -> str:
        return self.name


def scales_of(rows: int, groups: int, generator: torch.Generator) -> torch.Tensor:
    """As small as those of weights, and far from each other."""
    return (torch.rand(rows, groups, generator=generator) * 0.04 + 0.01).half()


def digits_of(rows: int, columns: int, low: int, high: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high + 1, (rows, columns), generator=generator)


def group_index(columns: int, size: int | None, generator: torch.Generator | None = None) -> torch.Tensor:
    """[columns]; with a generator the columns are in any order."""
    groups = torch.arange(columns) // (size or columns)
    return groups if generator is None else groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]


def gptq(bits: int = 4, size: int | None = 32, has_order: bool = False, version: int = 1) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        index = group_index(columns, size, generator if has_order else None)
        groups, top = int(index.max()) + 1, 2**bits - 1
        digits, scales = digits_of(rows, columns, 0, top, generator), scales_of(rows, groups, generator)
        zeros = digits_of(rows, groups, 0, top, generator)
        qzeros = pack(zeros.t(), bits)
        if version == 1:  # 1 is taken from all digits of a word at once, as GPTQModel does: where one is 0 it borrows from the next
            ones = sum(1 << place for place in range(0, 32, bits))
            qzeros = torch.from_numpy((qzeros.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
        tensors = {
            "qweight": pack(digits, bits).t(),
            "qzeros": qzeros,
            "scales": scales.t(),
            "g_idx": index.int(),
        }
        return tensors, scales.double()[:, index] * (digits - zeros[:, index])

    return write


def awq(size: int = 32) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        index = group_index(columns, size)
        groups = int(index.max()) + 1
        digits, scales = digits_of(rows, columns, 0, 15, generator), scales_of(rows, groups, generator)
        zeros = digits_of(rows, groups, 0, 15, generator)
        tensors = {"qweight": pack(digits.t(), 4, AWQ_PLACES), "qzeros": pack(zeros.t(), 4, AWQ_PLACES), "scales": scales.t()}
        return tensors, scales.double()[:, index] * (digits - zeros[:, index])

    return write


def packed(bits: int = 4, size: int | None = 32, is_symmetric: bool = True, has_order: bool = False) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        index, low = group_index(columns, size, generator if has_order else None), -(2 ** (bits - 1))
        groups = int(index.max()) + 1
        digits, scales = digits_of(rows, columns, low, -low - 1, generator), scales_of(rows, groups, generator).bfloat16()
        tensors = {"weight_packed": pack(digits - low, bits), "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
        zeros = torch.zeros(rows, groups, dtype=torch.int64)
        if not is_symmetric:
            zeros = digits_of(rows, groups, low, -low - 1, generator)
            tensors["weight_zero_point"] = pack((zeros - low).t(), bits).t()
        if has_order:
            tensors["weight_g_idx"] = index.int()
        return tensors, scales.double()[:, index] * (digits - zeros[:, index])

    return write


def scaled(
    is_float: bool = True,
    strategy: str = "channel",
    block: tuple[int, int] = (128, 128),
    name: str = "weight_scale",
    input_scale: str | None = None,
    is_symmetric: bool = True,
    top: int = 127,
    is_exponent: bool = False,
    is_divisor: bool = False,
) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        codes = digits_of(rows, columns, -top, top, generator).to(torch.int8)
        if is_float:
            codes = (torch.randn(rows, columns, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        blocks = -(-rows // block[0]), -(-columns // block[1])
        shape = {"channel": (rows, 1), "rows": (rows,), "tensor": (1,), "block": blocks, "blocks of four": (blocks[0], 1, blocks[1], 1)}[strategy]
        scales = (torch.rand(shape, generator=generator) * 0.004 + 0.001) * (127 / top)
        tensors: Tensors = {"weight": codes, name: 1 / scales if is_divisor else scales}
        if is_exponent:
            scales = 2.0 ** scales.log2().round()
            tensors[name] = (scales.log2() + 127).to(torch.uint8)
        own = scales.double().view(-1, 1) if strategy == "rows" else scales.double()
        if "block" in strategy:
            own = own.view(blocks)
            own = torch.stack([torch.stack([own[r // block[0], c // block[1]] for c in range(columns)]) for r in range(rows)])
        zeros = torch.zeros(1, dtype=torch.int64)
        if not is_symmetric:
            zeros = digits_of(rows, 1, -9, 9, generator)
            tensors["weight_zero_point"] = zeros.to(torch.int8)
        if input_scale is not None:
            tensors[input_scale] = torch.tensor(0.5)
        return tensors, own * (codes.double() - zeros)

    return write


def float4(size: int, names: tuple[str, str, str | None], is_divided: bool = False) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    """names: of codes, scales, and the scale of all."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        codes = digits_of(rows, columns, 0, 15, generator)
        values = torch.tensor([[E2M1[c % 8] * (-1 if c > 7 else 1) for c in row] for row in codes.tolist()], dtype=torch.float64)
        tensors = {names[0]: (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
        shape = (rows, columns // size)
        if names[2] is None:
            exponents = torch.randint(118, 125, shape, generator=generator)
            tensors[names[1]], factors = exponents.to(torch.uint8), 2.0 ** (exponents.double() - 127)
        else:
            scales = (torch.rand(shape, generator=generator) * 100 + 20).to(torch.float8_e4m3fn)
            whole = torch.tensor([2000.0 if is_divided else 0.0005])
            tensors |= {names[1]: scales, names[2]: whole}
            factors = scales.double() / whole.double() if is_divided else scales.double() * whole.double()
        return tensors, values * factors.repeat_interleave(size, dim=1)

    return write


def compressed(form: str, ignore: list[str] | None = None, targets: list[str] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": targets or ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    head = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**head, "config_groups": {"group_0": group}, "ignore": ["lm_head"] if ignore is None else ignore}


def is_projection(name: str) -> bool:
    return name.endswith(("_proj.weight", "_with_mqa.weight"))


def write_checkpoints(source: Path, form: Format, folder: Path) -> tuple[Path, Path]:
    """Copies of a model: its projections in the format, and as plain float32 numbers of the same values."""
    generator = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    plain: Tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        projection = name.removesuffix(".weight")
        if not is_projection(name) or projection.endswith(form.left_out):
            stored[name] = plain[name] = weight
            continue
        made = form.write(*((projection,) if form.is_by_name else ()), weight, generator)
        if made is None:
            stored[name] = plain[name] = weight
            continue
        tensors, values = made
        stored |= {f"{projection}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
        plain[name] = values.float()
    folders = []
    for kind, weights in (("stored", stored), ("plain", plain)):
        folders.append(folder / kind)
        shutil.copytree(source, folders[-1])
        save_file(weights, folders[-1] / "model.safetensors")
    if form.file is None:
        path = folders[0] / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": form.config}))
    else:
        (folders[0] / form.file).write_text(json.dumps(form.config))
    return folders[0], folders[1]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INVERSE = {"quant_method": "fp8", "method": "fp8", "format": "float8_e4m3fn", "weight_scale_method": "row", "weight_scale_semantics": "inverse"}
FP8 = {"num_bits": 8, "type": "float"}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int", "packing_format": "auto_round:auto_gptq"}
NVFP4 = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}}
CT_NAMES = ("weight_packed", "weight_scale", "weight_global_scale")
MXFP4 = Format("mxfp4", compressed("mxfp4-pack-quantized", strategy="group", group_size=32, type="float"), float4(32, (*CT_NAMES[:2], None)))
FORMATS = [
    Format("gptq", GPTQ, gptq()),
    Format("gptq, one group, v2", GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}, gptq(size=None, version=2)),
    Format("gptq, 8 bits, act order", GPTQ | {"bits": 8, "desc_act": True}, gptq(bits=8, has_order=True)),
    Format("gptq, act order, some left out", GPTQ | {"desc_act": True, "dynamic": {"-:.*k_proj": {}}}, gptq(has_order=True), left_out=("k_proj",)),
    Format("awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq()),
    Format("compressed int4", compressed("pack-quantized", strategy="group", group_size=32), packed()),
    Format(
        "compressed int4, zeros, act order",
        compressed("pack-quantized", strategy="group", group_size=32, symmetric=False, actorder="group"),
        packed(is_symmetric=False, has_order=True),
    ),
    Format("compressed int4, channels", compressed("pack-quantized", strategy="channel"), packed(size=None)),
    Format(
        "compressed int8 in words, some ignored",
        compressed("pack-quantized", ["lm_head", "re:.*down_proj$"], num_bits=8, strategy="channel"),
        packed(bits=8, size=None),
        left_out=("down_proj",),
    ),
    Format("compressed int8", compressed("int-quantized", num_bits=8, strategy="channel"), scaled(is_float=False)),
    Format("compressed int8, zeros", compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False), scaled(False, is_symmetric=False)),
    Format("compressed fp8", compressed("float-quantized", strategy="channel", **FP8), scaled()),
    Format("compressed fp8, tensors", compressed("float-quantized", strategy="tensor", **FP8), scaled(strategy="tensor", input_scale="input_scale")),
    Format(
        "compressed fp8, blocks",
        compressed("float-quantized", strategy="block", block_structure=[24, 20], **FP8),
        scaled(strategy="block", block=(24, 20)),
    ),
    Format("fp8 of DeepSeek", BLOCKS, scaled(strategy="block", name="weight_scale_inv")),
    Format("fp8, static", {"quant_method": "fp8", "activation_scheme": "static"}, scaled(strategy="tensor", input_scale="input_scale")),
    Format("fp8 of FBGEMM", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, scaled()),
    Format("nvfp4", compressed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16, type="float"), float4(16, CT_NAMES, True)),
    Format("nvfp4 of ModelOpt", NVFP4, float4(16, ("weight", "weight_scale", "weight_scale_2")), file="hf_quant_config.json"),
    Format("gptq of GPTQModel, v2", GPTQ | {"format": "gptq_v2", "method": "gptq"}, gptq(version=2)),
    Format("gptq in a file of AutoGPTQ", {"bits": 8, "group_size": 32, "desc_act": True}, gptq(8, has_order=True), file="quantize_config.json"),
    Format("awq in a file of AutoAWQ", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, awq(), file="quant_config.json"),
    Format("autoround", AUTOROUND | {"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}, gptq()),
    Format("autoround as awq", AUTOROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, awq()),
    Format(
        "compressed int4 in bytes, older",
        compressed("int-quantized", strategy="group", group_size=32) | {"quantization_status": "frozen"},
        scaled(False, "block", (1, 32), top=7),
    ),
    Format(
        "compressed mxfp8",
        compressed("mxfp8-quantized", strategy="group", group_size=32, **FP8),
        scaled(strategy="block", block=(1, 32), is_exponent=True),
    ),
    Format("fp8 of GPTQModel", INVERSE, scaled(strategy="rows", name="weight_scale_inv", is_divisor=True)),
    Format("fp8 of MiniMax", BLOCKS | {"fmt": "float8_e4m3fn"}, scaled(strategy="block", name="weight_scale_inv")),
    Format("fp8 blocks of ModelOpt", {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, scaled(strategy="blocks of four")),
    Format("fp8 rows of ModelOpt", {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, scaled(strategy="rows")),
    Format(
        "fp8 of transformers, static",
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        scaled(strategy="tensor", name="weight_scale_inv", input_scale="activation_scale"),
    ),
]
