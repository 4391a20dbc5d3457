"""What config.json says of rotary embeddings. No torch.

Newer files keep all of it in `rope_parameters`, older ones `rope_theta` and `rope_scaling` apart, or the first within the second; models
whose layers differ have an object in `rope_parameters` for each type of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.errors import ModelError
from backend.models.values import Values

UNREAD = ("attn_factor", "extrapolation_factor", "short_mscale", "long_mscale")
"""Keys of other programs' files that say more of how strong rotary embeddings are, or how far they reach: 1 changes nothing."""
ROPE_KINDS = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
DEFAULT_THETA = 10000.0
MAX_LEN = 2**24
"""Of contexts."""
ORIGINAL_LEN = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dim` numbers of a head; the others pass as they are."""

    dim: int
    theta: float = DEFAULT_THETA
    kind: str = "default"
    is_interleaved: bool = False
    """Numbers 2 i and 2 i + 1 turn together, not i and i + dim / 2."""
    factor: float = 1.0
    original_len: int = 0
    """The context that the model was trained with before it was extended."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    """yarn's bounds are whole numbers."""
    attention_factor: float | None = None
    """What cos and sin are multiplied with; None: by the kind's own rule."""
    mscale: tuple[float, float] | None = None
    """yarn's own for that rule, of the rotation and of all numbers (DeepSeek)."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    query_scale_beta: float = 0.0
    """Queries at position p are multiplied with 1 + beta log(1 + p // original_len) (Llama 4)."""


def find_scaling(values: Values) -> Values:
    """The object that says how the context was extended."""
    return values.section("rope_parameters" if values.section("rope_scaling").is_empty else "rope_scaling")


def _find_kind(scaling: Values) -> object:
    return next((scaling.get(key) for key in ("rope_type", "type") if scaling.has(key)), "default")


def read_context_len(values: Values) -> int:
    """Tokens of a model's context. Raises ModelError.

    Whoever adds yarn to a config.json, as Qwen's model cards tell to, leaves max_position_embeddings as it is: how far it reaches is what it
    stretches, so many times (vLLM likewise).
    """
    own, scaling = values.integer("max_position_embeddings", MAX_LEN), find_scaling(values)
    place = values if values.has(ORIGINAL_LEN) else scaling
    if _find_kind(scaling) != "yarn" or not scaling.has("factor") or not place.has(ORIGINAL_LEN):
        return own
    original = place.integer(ORIGINAL_LEN, MAX_LEN)
    reach = int(original * scaling.number("factor", 1e6))
    if reach > MAX_LEN:
        raise scaling.refuse("factor", f"such that {ORIGINAL_LEN} ({original}) times it is {MAX_LEN} at most")
    return max(own, reach)


def read_rope(
    values: Values,
    head_dim: int,
    *,
    layer_type: str | None = None,
    theta: float = DEFAULT_THETA,
    partial: float | None = None,
    is_interleaved: bool = False,
    aliases: Mapping[str, str] | None = None,
    original_len: int | None = None,
) -> RopeSpec:
    """The rotary embedding of layers of a type. Raises ModelError for what is out of range or not known.

    theta: where the file has none; partial: the share of a head that turns, likewise, of families that have such a key (None: this one has
    none); aliases: other names of kinds; original_len: where the file has none.
    """
    parameters = values.section("rope_parameters")
    if layer_type is not None and isinstance(parameters.get(layer_type), dict):
        parameters = parameters.section(layer_type)
    elif any(isinstance(parameters.get(name), dict) for name in ("full_attention", "sliding_attention")):
        raise parameters.refuse(layer_type or "rope_type", "an object, as the other type of layer has")
    older = values.section("rope_scaling")
    scaling = parameters if older.is_empty else older
    for place in (scaling, parameters, values):
        if place.has("rope_theta"):
            theta = place.number("rope_theta", 1e15)
            break
    for key in UNREAD:
        if scaling.has(key) and scaling.get(key) != 1:
            raise scaling.refuse(key, "1: what else it means, implementations do not agree on")
    kind = _find_kind(scaling)
    if not any(map(scaling.has, ("rope_type", "type"))) and scaling.get("factor") not in (None, 1):
        raise scaling.refuse("rope_type", f"one of {', '.join(ROPE_KINDS)}, where there is a factor")
    kind = (aliases or {}).get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ROPE_KINDS:
        raise ModelError(f"{values.where}: rope scaling {kind!r:.80} is not supported; known: {', '.join(ROPE_KINDS)}")
    share_place = next((place for place in (scaling, parameters, values) if place.has("partial_rotary_factor")), values)
    share = share_place.number("partial_rotary_factor", 1.0, default=partial or 1.0)
    if partial is None and share != 1.0:
        raise share_place.refuse("partial_rotary_factor", "1: this family turns whole heads")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise share_place.refuse("partial_rotary_factor", f"such that an even part of a head of {head_dim} turns")
    return _read_kind(values, scaling, kind, RopeSpec(dim, theta, kind, is_interleaved), original_len)


def _read_kind(values: Values, scaling: Values, kind: str, rope: RopeSpec, original_len: int | None) -> RopeSpec:
    """The rest, which depends on the kind."""
    more: dict[str, object] = {}
    # A value beside rope_parameters comes first: so do the files of Phi-3, and transformers follows it for all families.
    place = values if values.has(ORIGINAL_LEN) else scaling
    if kind in ("linear", "llama3", "dynamic"):
        more["factor"] = scaling.number("factor", 1e6)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor", 1e6), scaling.number("high_freq_factor", 1e6)
        if low >= high:
            raise scaling.refuse("low_freq_factor", f"below high_freq_factor ({high:g})")
        more |= {"low_freq_factor": low, "high_freq_factor": high, "original_len": place.integer(ORIGINAL_LEN, MAX_LEN)}
    if kind in ("yarn", "longrope"):
        max_len = values.integer("max_position_embeddings", MAX_LEN)
        own_len = place.integer(ORIGINAL_LEN, MAX_LEN, default=original_len or max_len)
        more |= {"original_len": own_len, "factor": scaling.number("factor", 1e6, default=max_len / own_len)}
        if scaling.has("attention_factor"):
            more["attention_factor"] = scaling.number("attention_factor", 1e6)
    if kind == "yarn":
        if rope.theta == 1:
            raise ModelError(f"{values.where}: rope_theta is 1; yarn, which tells pairs by how often they turn, needs another")
        more |= {"beta_fast": scaling.number("beta_fast", 1e6, default=32.0), "beta_slow": scaling.number("beta_slow", 1e6, default=1.0)}
        more["is_truncated"] = scaling.flag("truncate", default=True)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            more["mscale"] = scaling.number("mscale", 1e6), scaling.number("mscale_all_dim", 1e6)
    if kind == "longrope":
        more |= {name: scaling.numbers(name, rope.dim // 2) for name in ("short_factor", "long_factor")}
        if own_len < 2:
            raise place.refuse(ORIGINAL_LEN, "2 at least")
    fields = {name: getattr(rope, name) for name in ("dim", "theta", "kind", "is_interleaved")}
    return RopeSpec(**{**fields, **more})  # type: ignore[arg-type]


def describe_rope(rope: RopeSpec) -> dict[str, Any]:
    """The keys of a config.json from which `read_rope` makes it, of a family that turns whole heads and has one kind of layer."""
    own: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.kind == "default":
        return own
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn", "longrope"):
        scaling[ORIGINAL_LEN] = rope.original_len
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.is_truncated}
        scaling |= {} if rope.mscale is None else dict(zip(("mscale", "mscale_all_dim"), rope.mscale))
    if rope.kind == "longrope":
        scaling |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    return own | {"rope_scaling": scaling}
