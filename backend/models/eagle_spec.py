"""What the config.json of an EAGLE drafter says, in the formats of speculators, SpecForge and the papers' authors. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from backend.errors import ModelError
from backend.models.families.llama import llama_layer
from backend.models.spec import LAYER_TYPES, AttentionSpec, LayerSpec, Projection, Shapes, WeightList, read_eps, read_num_layers, read_window
from backend.models.values import Values

LAYER_KEY, TYPE_KEY = "transformer_layer_config", "speculators_model_type"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUTS = ("target_layer_ids", "aux_hidden_states_layer_ids")
"""DeepSeek's key and AngelSlim's: layers whose output is taken."""
PARD_KEYS = ("pard_token", "ptd_token_id")
MASK_KEYS = (*PARD_KEYS, "mask_token_id")
"""Of parallel drafting: those that vLLM reads, and speculators'."""
TAP_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
"""What SGLang's older files call fc_norm, as they call the key use_aux_norm."""
LAYOUT_KEYS = ("rope_is_neox_style", "is_neox_style")
"""SGLang's and vLLM's."""
QWEN = ("qwen2", "qwen3")
"""Kinds of layers which have windows where use_sliding_window says so: from max_window_layers on where no list says which."""
FULL, SLIDING = LAYER_TYPES
MAP = "d2t"
"""By token of the drafter: how far on in the target's vocabulary it is (an offset, not an id)."""
MASK = "t2d"
"""By token of the target: whether the drafter has it. Says no more than MAP does."""


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """EAGLE: fc joins embedding and state, then layers. EAGLE-3: fc joins states of several layers; the first layer's attention takes
    embedding and state side by side."""

    where: str
    hidden_size: int
    target_hidden_size: int
    eps: float
    draft_vocab_size: int
    tapped_layers: tuple[int, ...]
    """By what enters them; none: the target's last state, after its final norm (EAGLE)."""
    fc: Projection
    layers: tuple[LayerSpec, ...]
    embedding: str
    """Its own, where the folder has it; else the target's."""
    head: str
    """Likewise."""
    embedding_norm: str | None = None
    hidden_norm: str | None = None
    norm: str | None = None
    """Before the head."""
    fc_norms: tuple[str, ...] = ()
    """Of each tapped state before fc; or one of all of them side by side."""
    is_norm_residual: bool = False
    """What the layers add to is the state after hidden_norm, not before it."""
    is_norm_recycled: bool = False
    """What goes on is the state after the norm before the head."""
    logit_scale: float = 1.0
    mask_token_id: int | None = None
    """Of drafts that are made in parallel; None: one is made after the other."""
    mask_hidden: str | None = None
    """In the place of the tapped states of a mask token, [.., layers x target's hidden size]."""

    def list_weights(self, weights: WeightList, vocab_size: int) -> None:
        weights.add(self.fc)
        for name in (self.embedding_norm, self.hidden_norm, self.norm):
            weights.add_norm(name, self.hidden_size)
        for name in self.fc_norms:
            weights.add_norm(name, self.target_hidden_size * (len(self.tapped_layers) if len(self.fc_norms) == 1 else 1))
        for layer in self.layers:
            layer.list_weights(weights)
        weights.optional.append({f"{self.embedding}.weight": (vocab_size, self.hidden_size)})
        head: Shapes = {f"{self.head}.weight": (self.draft_vocab_size, self.hidden_size)}
        weights.ignored |= {MAP, MASK}
        if self.draft_vocab_size < vocab_size:
            weights.required |= head  # the target's has other rows
            weights.ids[MAP] = (self.draft_vocab_size,)
        else:
            weights.optional.append(head)
        if self.mask_hidden is not None:
            weights.ignored.add(self.mask_hidden)  # in any number of dimensions


def merge_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """config.json; of a speculators' folder, the layer's own values and the others as one."""
    inner = config.get(LAYER_KEY)
    if inner is None:
        return dict(config)
    if not isinstance(inner, dict):
        raise ModelError(f"{where}: {LAYER_KEY} is {inner!r:.80}; it must be an object")
    return {**config, **inner}


def read_eagle(values: Values, names: Collection[str], num_target_layers: int) -> EagleSpec:
    """EAGLE (Li et al. 2024), as its authors and speculators store it; HASS's norms of both inputs. names: of the weights, if they are known.

    values: of `merge_config`. Raises ModelError.
    """
    _check_type(values, "eagle")
    check_target_layers((values,), num_target_layers)
    if values.flag("layernorms"):
        raise values.refuse("layernorms", "false: speculators' EAGLE with norms is not supported")
    hidden = values.integer("hidden_size", 2**17)
    is_fused = has_part("fusion_fc", names)
    prefix = _find_prefix(names)
    layers = [
        _layer(values, "transformer" if is_fused else f"{prefix}layers.{i}", names, window, is_first=i == 0)
        for i, window in enumerate(read_windows(values, 1 if is_fused else read_num_layers(values)))
    ]
    norms = (f"{prefix}embedding_layernorm.weight", f"{prefix}hidden_states_layernorm.weight") if values.flag("add_para_norm") else (None, None)
    return EagleSpec(
        where=values.where,
        hidden_size=hidden,
        target_hidden_size=hidden,
        eps=read_eps(values),
        draft_vocab_size=values.integer("vocab_size", 2**22),
        tapped_layers=(),
        fc=Projection("fusion_fc" if is_fused else f"{prefix}fc", hidden, 2 * hidden),
        layers=tuple(layers),
        embedding=f"{prefix}embed_tokens",
        head="lm_head",
        embedding_norm=norms[0],
        hidden_norm=norms[1],
    )


def read_eagle3(values: Values, names: Collection[str], num_target_layers: int) -> EagleSpec:
    """EAGLE-3 (Li et al. 2025) and 3.1, and P-EAGLE (Hui et al. 2026), as speculators and SpecForge store them: as `read_eagle`."""
    _check_type(values, "eagle3", "peagle")
    section = values.section("eagle_config")
    check_target_layers((values, section), num_target_layers)
    for place in (section, values):
        if not place.flag("use_aux_hidden_state", default=True):
            raise place.refuse("use_aux_hidden_state", "true: the drafter takes states of several layers")
    is_normed_before_fc = section.flag("norm_before_fc", default=values.flag("norm_before_fc"))
    has_tap_norms = values.flag("fc_norm") or values.flag("use_aux_norm")
    if is_normed_before_fc and has_tap_norms:
        key = "fc_norm" if values.flag("fc_norm") else "use_aux_norm"
        raise values.refuse(key, "false where norm_before_fc is true: either norm stands before fc, not both")
    hidden, prefix = values.integer("hidden_size", 2**17), _find_prefix(names)
    target_hidden = values.integer("target_hidden_size", 2**17, default=hidden)
    vocab_size = values.integer("vocab_size", 2**22)
    tapped = _read_tapped_layers(values, num_target_layers)
    own = TAP_NORMS if has_part(f"{prefix}{TAP_NORMS[0]}", names) else [f"fc_norm.{i}" for i in range(len(tapped))]
    if has_tap_norms and len(own) != len(tapped):
        raise ModelError(f"{values.where}: the weights have norms of {len(own)} states ({', '.join(own)}); {len(tapped)} are taken")
    fc_norms = tuple(f"{prefix}{name}.weight" for name in own) if has_tap_norms else ()
    first = next((f"{prefix}{name}" for name in ("midlayer", "layers.0") if has_part(f"{prefix}{name}.self_attn.q_proj", names)), f"{prefix}midlayer")
    layers = [
        _layer(values, first if i == 0 else f"{prefix}layers.{i}", names, window, is_first=i == 0, in_features=2 * hidden)
        for i, window in enumerate(read_windows(values, read_num_layers(values)))
    ]
    return EagleSpec(
        where=values.where,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        eps=read_eps(values),
        draft_vocab_size=values.integer("draft_vocab_size", vocab_size, default=vocab_size),
        tapped_layers=tapped,
        fc=Projection(f"{prefix}fc", hidden, len(tapped) * target_hidden),
        layers=tuple(layers),
        embedding=f"{prefix}embed_tokens",
        head="lm_head",
        embedding_norm=f"{first}.input_layernorm.weight",
        hidden_norm=f"{first}.hidden_norm.weight",
        norm=f"{prefix}norm.weight",
        fc_norms=(f"{prefix}input_norm.weight",) if is_normed_before_fc else fc_norms,
        is_norm_residual=values.flag("norm_before_residual", default=values.get(TYPE_KEY) == "eagle3"),
        is_norm_recycled=values.flag("norm_output"),
        logit_scale=values.number("logit_scale", 1e6, default=1.0),
        mask_token_id=read_mask_token(values, vocab_size),
        mask_hidden=f"{prefix}mask_hidden",
    )


def check_target_layers(places: Iterable[Values], count: int) -> None:
    """Raises ModelError for a drafter of a target with other than `count` layers: its weights may fit, and hardly a draft would be right."""
    for place in places:
        if place.has("num_target_layers") and place.integer("num_target_layers", 1024) != count:
            raise place.refuse("num_target_layers", f"{count}, as many as the target has")


def read_mask_token(values: Values, vocab_size: int) -> int | None:
    """The token that stands for drafts which are not known yet; None: config.json names none."""
    key = next((key for key in MASK_KEYS if values.has(key)), None)
    return None if key is None else values.integer(key, vocab_size - 1, low=0)


def choose_parallel(spec: EagleSpec, names: Collection[str], wanted: bool | None) -> bool:
    """Whether drafts are made in parallel. names: of the weights, where they are known; wanted: None: where the drafter was made for it.

    Raises ModelError where it is wanted of a drafter that was not.
    """
    lacking = ""
    if spec.mask_token_id is None:
        lacking = f"config.json names no mask token ({', '.join(MASK_KEYS)})"
        if wanted is None and spec.mask_hidden in names:  # SpecForge's P-EAGLE takes the id from its training's configuration
            rule = "add the one that it was trained with, or say parallel_drafting false"
            raise ModelError(f"{spec.where}: {lacking}, and weight {spec.mask_hidden} says that drafts are made in parallel: {rule}")
    elif not spec.tapped_layers or (names and spec.mask_hidden not in names):
        lacking = f"weight {spec.mask_hidden or 'mask_hidden'} is missing"
    if wanted and lacking:
        raise ModelError(f"{spec.where}: {lacking}: drafts are made in parallel by drafters that were trained for it; leave parallel_drafting out")
    return wanted is not False and not lacking


def _is_speculators(values: Values) -> bool:
    return values.has(TYPE_KEY)


def made_for(values: Values, *parts: str) -> bool:
    """Whether the class that a folder names has one of these in its name."""
    names = values.get("architectures")
    return isinstance(names, list) and any(part in str(name) for name in names for part in parts)


def check_format(values: Values, *kinds: str) -> None:
    """Raises ModelError for a speculators' folder that does not say of which kind it is: others count layers in another way."""
    if values.has(LAYER_KEY) and not values.has(TYPE_KEY):
        raise values.refuse(TYPE_KEY, f"{' or '.join(map(repr, kinds))}, where there is a {LAYER_KEY}")


def _check_type(values: Values, *kinds: str) -> None:
    check_format(values, *kinds)
    if not _is_speculators(values) and made_for(values, "DFlash", "DSpark"):  # whose tensors may have EAGLE's names and sizes
        raise values.refuse("architectures", "an EAGLE drafter's with this method")
    if _is_speculators(values) and values.get(TYPE_KEY) not in kinds:
        raise values.refuse(TYPE_KEY, f"{' or '.join(map(repr, kinds))} with this method")


def read_windows(values: Values, count: int, window: int | None = None) -> list[int | None]:
    """Of each of so many layers of a drafter. A list of another length is the target's, which drafters' authors leave.

    window: where the file has it elsewhere than in sliding_window. Raises ModelError.
    """
    kinds, is_qwen = values.get("layer_types"), values.get("model_type") in QWEN
    has_list = isinstance(kinds, list) and len(kinds) == count
    if kinds is None and is_qwen and values.flag("use_sliding_window"):
        first = values.integer("max_window_layers", 2**16, low=0, default=28)
        kinds = [SLIDING if i >= first else FULL for i in range(count)]
    elif not has_list:
        return [None] * count
    for number, kind in enumerate(kinds):
        if kind not in LAYER_TYPES:
            raise ModelError(f"{values.where}: layer_types[{number}] is {kind!r:.80}; it must be one of {', '.join(LAYER_TYPES)}")
    if SLIDING not in kinds:
        return [None] * count
    if window is None:
        # Qwen's own code has no windows without the flag, whatever the list says: which of them is right nobody knows.
        if is_qwen and not values.flag("use_sliding_window"):
            raise values.refuse("use_sliding_window", f"true where layer_types has {SLIDING}")
        window = read_window(values, 4096 if is_qwen else None)
        if window is None and has_list:
            raise values.refuse("sliding_window", f"an integer where layer_types has {SLIDING}")
    return [window if kind == SLIDING else None for kind in kinds]


def settle_layout(values: Values, part: AttentionSpec) -> AttentionSpec:
    """Attention whose numbers turn in the pairs that it was trained with, whatever the target's do: halves, unless the file says otherwise."""
    key = next((key for key in LAYOUT_KEYS if values.has(key)), None)
    if key is None or values.flag(key):
        return part
    return dataclasses.replace(part, rope=dataclasses.replace(part.rope, is_interleaved=True))


def has_part(part: str, names: Collection[str]) -> bool:
    """However its weight is stored."""
    return any(name.startswith(f"{part}.") for name in names)


def _find_prefix(names: Collection[str]) -> str:
    return "model." if has_part("model.fc", names) else ""


def _layer(values: Values, prefix: str, names: Collection[str], window: int | None, *, is_first: bool, in_features: int | None = None) -> LayerSpec:
    """A layer of Llama; the first one has no norm before its attention, which takes in_features numbers."""
    layer = llama_layer(values, prefix)
    part = layer.attention
    assert isinstance(part, AttentionSpec)
    part = dataclasses.replace(settle_layout(values, part), window=window)
    if f"{prefix}.self_attn.q_norm.weight" in names:
        part = dataclasses.replace(part, query_norm=f"{prefix}.self_attn.q_norm.weight", key_norm=f"{prefix}.self_attn.k_norm.weight")
    if is_first and in_features is not None:
        part = dataclasses.replace(part, qkv=tuple(dataclasses.replace(p, in_features=in_features) for p in part.qkv))
    return dataclasses.replace(layer, attention=part, input_norm=None if is_first else layer.input_norm)


def _read_tapped_layers(values: Values, count: int) -> tuple[int, ...]:
    """The layers of the target, `count` in all, whose inputs are taken.

    EAGLE-3's own choice is what enters layers 2, count / 2 and count - 3. Lists of speculators count so; others name the layers whose
    output it is, and those that name the same choice in the other way are known by it.
    """
    default, outputs = (2, count // 2, count - 3), (1, count // 2 - 1, count - 4)
    section = values.section("eagle_config")
    place = section if section.get(LAYER_IDS) else values
    key = next((key for key in OUTPUTS if values.get(key) not in (None, [])), None)
    if not place.get(LAYER_IDS) and key is not None:
        found: tuple[int, ...] = tuple(number + 1 for number in values.integers(key, 2**16))
        if max(found) > count:
            raise values.refuse(key, f"a list of layers of the target, which has {count}")
        return found
    if place.get(LAYER_IDS) in (None, []):  # ModelOpt writes an empty list for the usual choice
        if min(default) < 0:
            raise ModelError(f"{values.where} has no {LAYER_IDS!r}, and the target's {count} layers are too few for the usual choice")
        return default
    given = place.integers(LAYER_IDS, 2**16)
    found = default
    if given not in (default, outputs):
        found = given if _is_speculators(values) else tuple(number + 1 for number in given)
    if not found or max(found) > count:
        raise place.refuse(LAYER_IDS, f"a list of layers of the target, which has {count}")
    expected = values.integer("num_aux_hidden_states", 2**16, default=len(found))
    if expected != len(found):
        raise values.refuse("num_aux_hidden_states", f"{len(found)}, as many as {LAYER_IDS} has")
    return found
