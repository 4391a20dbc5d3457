"""How a checkpoint holds quantized projections, as its configuration says: which tensors, of which shapes, stand for a weight. No torch.

The layouts are those of the libraries that write them: compressed-tensors (vLLM's llm-compressor), AutoGPTQ and GPTQModel, AutoAWQ,
DeepSeek-V3's and FBGEMM's fp8, and NVIDIA's ModelOpt. `backend.models.quantized` reads them. Activations are not rounded, whatever a
checkpoint says of them: products are the more exact for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Literal

PLAIN = ("F64", "F32", "F16", "BF16")
"""dtypes of weights and scales."""
SCALES = (*PLAIN, "F8_E8M0")
EXPONENTS = ("U8", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor of a checkpoint must be."""

    shapes: tuple[tuple[int, ...], ...]
    """One of them; the first is named in messages."""
    dtypes: tuple[str, ...] = PLAIN


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one projection [out, in]."""

    kind: Literal["scaled", "packed", "gptq", "awq", "float4"]
    bits: int = 8
    group: int | None = None
    """Inputs that share a scale; None: all."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale."""
    dtype: str = "I8"
    """Of `weight`, where it has a byte for each."""
    scale: str = "weight_scale"
    is_symmetric: bool = True
    """All zeros are the middle: gptq and awq store them anyway."""
    has_order: bool = False
    """Groups are of any inputs, as an index says (act-order, desc_act)."""
    zero_offset: int = 0
    """Added to stored zeros: GPTQ's first format holds one less."""
    weight: str = "weight"
    global_scale: str | None = None
    """float4: of the whole tensor."""
    is_divisor: bool = False
    """Scales divide, they do not multiply; float4: the one of the whole tensor."""
    is_exponent: bool = False
    """scaled: scales are powers of 2, stored as exponents."""
    other: Layout | None = None
    """How the same may be stored under other names."""

    @property
    def marker(self) -> str:
        """The tensor that only a quantized projection has."""
        return {"scaled": self.scale, "packed": "weight_packed", "gptq": "qweight", "awq": "qweight", "float4": self.scale}[self.kind]

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group is None else math.ceil(in_features / self.group)

    def tensors(self, out: int, inputs: int) -> dict[str, Expected]:
        """By what follows the projection's name, of all that it must have. Raises ValueError for sizes that such tensors cannot hold."""
        groups, per_word = self.num_groups(inputs), 32 // self.bits
        if self.kind == "scaled":
            if self.block is not None:
                rows, columns = math.ceil(out / self.block[0]), math.ceil(inputs / self.block[1])
                scales = Expected(((rows, columns), (rows, 1, columns, 1)), SCALES)
                return {"weight": Expected(((out, inputs),), (self.dtype,)), self.scale: scales}
            shapes: tuple[tuple[int, ...], ...] = ((out, groups),)
            if groups == 1:
                shapes = ((out, 1), (out,), (1,), (), (1, 1))
            found = {"weight": Expected(((out, inputs),), (self.dtype,)), self.scale: Expected(shapes, EXPONENTS if self.is_exponent else SCALES)}
            if not self.is_symmetric:
                found["weight_zero_point"] = Expected(shapes, ("I8", "I32", "I64", *PLAIN))
            return found
        if self.kind == "packed":
            found = {
                "weight_packed": Expected(((out, math.ceil(inputs / per_word)),), ("I32",)),
                "weight_scale": Expected(((out, groups), (out,)) if groups == 1 else ((out, groups),)),
            }
            if not self.is_symmetric:
                found["weight_zero_point"] = Expected(((math.ceil(out / per_word), groups),), ("I32",))
            if self.has_order:
                found["weight_g_idx"] = Expected(((inputs,),), ("I32", "I64"))
            return found
        if self.kind == "float4":
            size = self.group or 32
            if inputs % size:
                raise ValueError(f"in_features {inputs} is not a multiple of {size}")
            found = {self.weight: Expected(((out, inputs // 2),), ("U8",))}
            found[self.scale] = Expected(((out, inputs // size),), EXPONENTS if self.global_scale is None else ("F8_E4M3",))
            if self.global_scale is not None:
                found[self.global_scale] = Expected(((1,), ()))
            return found
        if self.kind == "gptq" and inputs % per_word:
            raise ValueError(f"in_features {inputs} is not a multiple of {per_word}")
        if out % per_word:
            raise ValueError(f"out_features {out} is not a multiple of {per_word}")
        packed = (inputs // per_word, out) if self.kind == "gptq" else (inputs, out // per_word)
        found = {"qweight": Expected((packed,), ("I32",)), "scales": Expected(((groups, out),))}
        found["qzeros"] = Expected(((groups, out // per_word),), ("I32",))
        if self.has_order:
            found["g_idx"] = Expected(((inputs,),), ("I32", "I64"))
        return found

    def optional(self, inputs: int) -> dict[str, Expected]:
        """What may be there too, and is not needed: factors of activations, and what is known anyway."""
        number = Expected(((1,), ()))
        found = dict.fromkeys(("input_scale", "activation_scale", "input_global_scale", "output_scale", "k_scale", "v_scale"), number)
        found["input_zero_point"] = Expected(((1,), ()), ("I8", "I32", "I64", *PLAIN))
        found["weight_shape"] = Expected(((2,),), ("I64", "I32"))
        if self.kind == "gptq" and not self.has_order:
            found["g_idx"] = Expected(((inputs,),), ("I32", "I64"))
        if self.kind in ("packed", "scaled") and self.is_symmetric:
            found["weight_zero_point"] = Expected((), ("I8", "I32", "I64", *PLAIN))
        return {name: expected for name, expected in found.items() if name not in (self.scale, self.global_scale)}


FP8 = "fp8"
CACHE_SCALES = (
    ("{0}_scale", 1.0),  # compressed-tensors
    ("attn.{0}_scale", 1.0),  # vLLM's own
    ("{0}_proj.{0}_scale", 1.0),  # ModelOpt
    ("qkv_proj.{0}_scale", 1.0),
    ("{0}_proj.output_scale", 1.0),  # compressed-tensors, before it had a name of its own for them; Quark
    ("kv_scale", 1.0),  # AutoFP8: one for both
    ("cache{0}_matmul.activation_scale", 448.0),  # FastDeploy: the largest number, which is to become e4m3's largest
)
"""Names of scales of keys and values below a layer's attention, {0} being k or v, and what they are divided by."""
CACHE_TENSORS = re.compile(
    r"\.self_attn\.(([kqv]|prob|kv)_scale|attn\.[kqv]_scale|qkv_proj\.[kqv]_scale|[kv]_proj\.([kv]|output)_scale|[kqv]_zero_point"
    r"|cache[kv]_matmul\.activation_scale)$"
)
"""All that belongs to keys and values in 8 bits, also where they are kept in the model's dtype."""


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """The layouts of a checkpoint's projections."""

    method: str
    """For messages."""
    layout_of: Callable[[str], Layout | None]
    """Of the projection of a name (without `.weight`); None: it is plain."""
    cache: str | None = None
    """What keys and values are meant to be kept in: FP8 (e4m3), or another type in words; None: it does not say."""
    has_weights: bool = True
    """False: nothing but keys and values is quantized."""

    def find(self, name: str, held: Container[str]) -> Layout | None:
        """What a checkpoint with these tensors holds: lists of what is not quantized are of many dialects, tensors are not."""
        layout = self.layout_of(name)
        while layout is not None and f"{name}.{layout.marker}" not in held:
            layout = layout.other
        return layout
