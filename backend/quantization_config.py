"""Which weights are rounded when a model is loaded (the option `quantization`), and what keys and values are kept in. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from backend.errors import ConfigError
from backend.section import Section, closest

SCHEMES = ("wint8", "wint4", "fp8", "block_wise_fp8")
ACTIVATION_ALIASES = {"a8w8_fp8": "fp8", "wfp8afp8": "fp8", "w4a8": "wint4", "w4afp8": "wint4"}
ALIASES = {"weight_only_int8": "wint8", "weight_only_int4": "wint4", **ACTIVATION_ALIASES}
"""What PaddleNLP and FastDeploy call them; some name activations in e4m3, too."""
NESTED_ALIASES = {"a8w8_fp8_wint4": {"dense_quant_type": "fp8", "moe_quant_type": "wint4"}}
STORED = {
    "awq": "awq", "awq_marlin": "awq", "gptq": "gptq", "gptq_marlin": "gptq", "compressed-tensors": "compressed-tensors", "fp8": "fp8",
    "fbgemm_fp8": "fbgemm_fp8", "modelopt": "modelopt", "modelopt_fp4": "modelopt", "modelopt_mxfp8": "modelopt", "modelopt_mixed": "modelopt",
    "auto-round": "auto-round", "inc": "auto-round",
}  # fmt: skip
"""vLLM's names of formats of checkpoints, and what those say themselves (`quant_method`)."""
CACHE_DTYPES = ("auto", "model", "fp8")
CACHE_ALIASES = {"fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8", "float8_e4m3fn": "fp8"}
"""What vLLM, SGLang and FastDeploy call it."""
CACHE_SCALES = ("auto", "one")
MIXED = "mix_quant"
"""FastDeploy's name for a type of each part."""


def asks_for_activations(value: object) -> bool:
    """Whether an option's name is one of PaddleNLP's and FastDeploy's for weights and activations in 8 bits; of parts, that of dense ones: inputs of
    experts and of the head stay as they are."""
    if isinstance(value, QuantizationConfig):
        return value.asks_for_activations
    return isinstance(value, str) and value.lower() in (*ACTIVATION_ALIASES, *NESTED_ALIASES)


def normalize_scheme(key: str, value: object) -> str:
    """A scheme's own name from any accepted spelling. Raises ConfigError."""
    name = value.lower() if isinstance(value, str) else ""
    name = ALIASES.get(name, name)
    if name not in SCHEMES:
        hint = closest(name, (*SCHEMES, *ALIASES)) or ": of a checkpoint that is quantized already it is left out"
        raise ConfigError(f"{key} must be one of {', '.join(SCHEMES)}, got {value!r:.80}{hint}")
    return name


def normalize_cache_dtype(key: str, value: object) -> str:
    """What keys and values are kept in, from any accepted spelling. Raises ConfigError."""
    name = value.lower() if isinstance(value, str) else ""
    name = CACHE_ALIASES.get(name, name)
    if name not in CACHE_DTYPES:
        known = ", ".join(CACHE_DTYPES)
        raise ConfigError(f"{key} must be one of {known}, got {value!r:.80}: keys and values are in the model's dtype, or in e4m3 (fp8)")
    return name


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(Section):
    """The types of parts that have types of their own."""

    aliases: ClassVar[dict[str, str]] = {}

    quantization: str | None = None
    """The type of all parts that are not named, without the head; also mix_quant: the others have none."""
    dense_quant_type: str | None = None
    """Of attention, MLPs and shared experts."""
    moe_quant_type: str | None = None
    """Of experts."""
    head_quant_type: str | None = None
    """Of the output head, which is left as it is by default. Not for drafters: their head is the target's."""
    kv_cache_quant_type: str | None = None
    """FastDeploy's place for `kv_cache_dtype`: float8_e4m3fn is fp8. Not for drafters: they keep keys and values in the model's dtype."""

    def __post_init__(self) -> None:
        named = self.quantization if self.dense_quant_type is None else self.dense_quant_type
        object.__setattr__(self, "_asks_for_activations", asks_for_activations(named))  # no key, and names are settled below
        general: dict[str, str] = {}
        if self.quantization not in (None, MIXED):
            parts = NESTED_ALIASES.get(self.quantization.lower())
            general = parts or dict.fromkeys(("dense_quant_type", "moe_quant_type"), normalize_scheme("quantization", self.quantization))
        for key in ("dense_quant_type", "moe_quant_type", "head_quant_type"):
            value = getattr(self, key)
            object.__setattr__(self, key, general.get(key) if value is None else normalize_scheme(key, value))
        object.__setattr__(self, "quantization", None)  # what it says, the others say now
        if self.kv_cache_quant_type is not None:
            cache = normalize_cache_dtype("kv_cache_quant_type", self.kv_cache_quant_type)
            object.__setattr__(self, "kv_cache_quant_type", cache)

    @property
    def asks_for_activations(self) -> bool:
        """Whether dense parts were given a name of weights and activations in 8 bits."""
        return bool(getattr(self, "_asks_for_activations", False))

    @property
    def names(self) -> str:
        """For messages and identities: of dense parts, experts and head."""
        return "/".join(name or "-" for name in (self.dense_quant_type, self.moe_quant_type, self.head_quant_type))


def normalize_quantization(key: str, value: str | QuantizationConfig | None, *, has_cache: bool = False) -> str | QuantizationConfig | None:
    """What an option names: a type for all parts, by its own name, or types of parts. has_cache: keys and values may be among them.

    Raises ConfigError."""
    if isinstance(value, QuantizationConfig) and value.kv_cache_quant_type is not None and not has_cache:
        raise ConfigError(f"{key}.kv_cache_quant_type is of a server's own model (kv_cache_dtype), and of weights alone here: leave it out")
    if not isinstance(value, str):
        return value
    if (nested := NESTED_ALIASES.get(value.lower())) is not None:
        return QuantizationConfig(**nested)
    return normalize_scheme(key, value)


def read_quantization(value: str | QuantizationConfig | None) -> QuantizationConfig:
    """Of a normalized option, each part's type."""
    if isinstance(value, QuantizationConfig):
        return value
    return QuantizationConfig(dense_quant_type=value, moe_quant_type=value)
