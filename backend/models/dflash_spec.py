"""What the config.json of a DFlash or DSpark drafter says, in the formats of their authors and speculators. No torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from backend.errors import ModelError
from backend.models.eagle_spec import MAP, MASK, TYPE_KEY, check_format, check_target_layers, has_part, made_for, read_windows, settle_layout
from backend.models.families.qwen import qwen3_layer
from backend.models.spec import (
    LAYER_TYPES,
    AttentionSpec,
    BlockView,
    LayerSpec,
    Projection,
    Shapes,
    WeightList,
    read_eps,
    read_layer_types,
    read_num_layers,
)
from backend.models.values import Values

logger = logging.getLogger(__name__)

Place = Callable[[str], Values]

MARKOV_KINDS = ("vanilla", "gated", "rnn")
MAX_BLOCK = 1024
PROJECTORS = ("dflash", "dspark")
"""SpecForge's names of the heads that are served."""
HEADS = ("markov_head.", "markov_w1.", "prefix_gru.", "embed_proj.", "logit_head.")
"""Weights of what looks at the tokens before a draft (DSpark's, also Model-Optimizer's, Domino's, either in SpecForge's older files) begin so."""
UNKNOWN = ("conv_kernel_size", "selector_rank", "selector_top_k", "xpress_rank", "attention_sink_bias", "use_gemma_norm")
"""What later variants have, sinks, and norms' weights counted from 1, none of which is served; false, null and 0 say that there is none."""
MAX_WINDOW = 2**24
FACTORS = ("attention_value_scale", "input_embedding_scale")
"""Of values and of embeddings (MiMo's, DFlash2's): 1 changes nothing."""


@dataclass(frozen=True, slots=True)
class MarkovSpec:
    """DSpark's head that looks at the token before: so many numbers are kept of each token."""

    rank: int
    kind: str
    prefix: str
    """Of its weights' names."""

    def list_weights(self, weights: WeightList, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        weights.required |= {
            f"{self.prefix}markov_w1.weight": (vocab_size, self.rank),
            f"{self.prefix}markov_w2.weight": (draft_vocab_size, self.rank),
        }
        if self.kind != "vanilla":
            weights.add(self.mixer(hidden_size))

    def mixer(self, hidden_size: int) -> Projection:
        """Of what the token's numbers are mixed with, but for a vanilla head."""
        if self.kind == "gated":
            return Projection(f"{self.prefix}gate_proj", self.rank, hidden_size + self.rank, has_bias=True)
        return Projection(f"{self.prefix}joint_proj", 3 * self.rank, hidden_size + 2 * self.rank, has_bias=True)


@dataclass(frozen=True, slots=True)
class DflashSpec:
    """Layers of Qwen 3 whose keys and values are made of the target's states, and of a block of mask tokens."""

    where: str
    hidden_size: int
    target_hidden_size: int
    eps: float
    vocab_size: int
    draft_vocab_size: int
    tapped_layers: tuple[int, ...]
    """By what enters them."""
    fc: Projection
    layers: tuple[LayerSpec, ...]
    embedding: str
    """Its own, where the folder has it; else the target's."""
    head: str
    """Likewise."""
    hidden_norm: str
    """After fc."""
    norm: str
    """Before the head."""
    mask_token_id: int
    max_drafts: int
    is_anchor_sampled: bool
    """The newest token's row makes the first draft; else that of the first mask."""
    views: tuple[BlockView, ...]
    """Of each layer."""
    markov: MarkovSpec | None
    confidence: int | None
    """Numbers that the confidence head looks at; None: there is no such head."""
    confidence_name: str
    """Of its weight and bias."""
    logit_scale: float = 1.0

    def bound_layers(self, num_rows: int) -> list[LayerSpec]:
        """The layers, with their windows as attention is asked over a block of so many rows: those that share one see what the last row does."""
        bound = []
        for layer, view in zip(self.layers, self.views, strict=True):
            assert isinstance(layer.attention, AttentionSpec)
            window = layer.attention.window
            if window is not None and view == BlockView.SHARED:
                window += num_rows
            bound.append(dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=window)))
        return bound

    def list_weights(self, weights: WeightList) -> None:
        weights.add(self.fc)
        for name in (self.hidden_norm, self.norm):
            weights.add_norm(name, self.hidden_size)
        for layer in self.layers:
            layer.list_weights(weights)
        weights.optional.append({f"{self.embedding}.weight": (self.vocab_size, self.hidden_size)})
        head: Shapes = {f"{self.head}.weight": (self.draft_vocab_size, self.hidden_size)}
        weights.ignored |= {MAP, MASK}
        if self.draft_vocab_size < self.vocab_size:
            weights.required |= head  # the target's has other rows
            weights.ids[MAP] = (self.draft_vocab_size,)
        else:
            weights.optional.append(head)
        if self.markov is not None:
            self.markov.list_weights(weights, self.hidden_size, self.vocab_size, self.draft_vocab_size)
        if self.confidence is not None:
            weights.required |= {f"{self.confidence_name}.weight": (1, self.confidence), f"{self.confidence_name}.bias": (1,)}


def read_dflash(values: Values, names: Collection[str], num_target_layers: int, *, is_spark: bool) -> DflashSpec:
    """DFlash (Chen et al. 2026) or DSpark (DeepSeek 2026), as their authors and speculators store them.

    values: of `eagle_spec.merge_config`; names: of the weights, where they are known. Raises ModelError.
    """
    method = "dspark" if is_spark else "dflash"
    is_speculators = values.has(TYPE_KEY)
    check_format(values, method)
    if is_speculators and values.get(TYPE_KEY) != method:
        raise values.refuse(TYPE_KEY, f"{method!r} with this method")
    section = values.section("dflash_config")
    for part in (values, section):
        if key := next((key for key in UNKNOWN if part.get(key)), None):
            raise part.refuse(key, "left out: it is not served")
        if key := next((key for key in FACTORS if part.get(key) not in (None, 1)), None):
            raise part.refuse(key, "1, or left out: it is not served")
    section.choice("projector_type", PROJECTORS, method)

    def place(key: str) -> Values:
        """Where a value is: SpecForge writes into the section what the others have beside it."""
        return section if section.has(key) else values

    read_layer_types(values, [LAYER_TYPES[0]] * read_num_layers(values))
    hidden, prefix = values.integer("hidden_size", 2**17), "model." if has_part("model.fc", names) else ""
    vocab_size = values.integer("vocab_size", 2**22)
    target_hidden = values.integer("target_hidden_size", 2**17, default=hidden)
    tapped = _read_tapped_layers(values, section, num_target_layers)
    # DeepSeek's code makes DFlash drafters too, which draft as DSpark's do.
    is_deepseek = made_for(values, "DSpark") if not is_speculators else is_spark
    anchor = place("sample_from_anchor")
    is_told = anchor.has("sample_from_anchor") or place("shift_label").flag("shift_label")  # the latter is Model-Optimizer's
    if is_spark and not is_speculators and made_for(values, "DFlash") and not is_told:  # its first row is not a draft
        raise values.refuse("architectures", "a DSpark drafter's with this method")
    is_anchor_sampled = anchor.flag("sample_from_anchor", default=is_deepseek or is_spark)
    if is_speculators and is_spark and not anchor.has("sample_from_anchor"):
        told = "the newest token's row drafts, as speculators has it; those that were trained before it had the key (0.7) need false"
        logger.warning("%s has no 'sample_from_anchor': %s", values.where, told)
    block = place("block_size").integer("block_size", MAX_BLOCK, low=1 if is_anchor_sampled else 2)
    views = _read_views(values, place, block, is_speculators=is_speculators)
    default, is_bare = 256 if is_spark and is_speculators else 0, has_part("markov_w1", names)  # Model-Optimizer's heads have no prefix
    markov = _read_markov(place, is_spark=is_spark, is_anchor_sampled=is_anchor_sampled, default=default, is_bare=is_bare)
    confidence = None
    # SpecForge's drafters have the head where its loss had a weight, unless the flag says otherwise; Model-Optimizer's flag has another name.
    is_optimizers = section.flag("use_confidence_head")
    is_confident = is_optimizers or bool(section.get("confidence_head_alpha")) or (is_speculators and is_spark)
    if place("enable_confidence_head").flag("enable_confidence_head", default=is_confident):
        own = place("confidence_head_with_markov")
        with_markov = own.flag("confidence_head_with_markov", default=is_speculators or is_optimizers)
        if with_markov and markov is None:
            raise own.refuse("confidence_head_with_markov", "false where markov_rank is 0")
        confidence = hidden + (markov.rank if with_markov and markov is not None else 0)
    if markov is None and (unread := next((name for name in names if name.startswith(HEADS)), None)):
        raise ModelError(f"{values.where}: weight {unread} would not be used: no such head is named, and without it hardly a draft would be right")
    return DflashSpec(
        where=values.where,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        eps=read_eps(values),
        vocab_size=vocab_size,
        draft_vocab_size=values.integer("draft_vocab_size", vocab_size, default=vocab_size),
        tapped_layers=tapped,
        fc=Projection(f"{prefix}fc", hidden, len(tapped) * target_hidden),
        layers=tuple(_layer(values, f"{prefix}layers.{i}", window) for i, (window, _) in enumerate(views)),
        views=tuple(view for _, view in views),
        embedding=f"{prefix}embed_tokens",
        head="lm_head",
        hidden_norm=f"{prefix}hidden_norm.weight",
        norm=f"{prefix}norm.weight",
        mask_token_id=_read_mask_token(place, vocab_size),
        max_drafts=block if is_anchor_sampled else block - 1,
        is_anchor_sampled=is_anchor_sampled,
        markov=markov,
        confidence=confidence,
        confidence_name="confidence_proj" if is_bare else "confidence_head.proj",
        logit_scale=values.number("logit_scale", 1e6, default=1.0),
    )


def _layer(values: Values, prefix: str, window: int | None) -> LayerSpec:
    layer = qwen3_layer(values, prefix)
    assert isinstance(layer.attention, AttentionSpec)
    return dataclasses.replace(layer, attention=dataclasses.replace(settle_layout(values, layer.attention), window=window))


def _read_views(values: Values, place: Place, block_size: int, *, is_speculators: bool) -> list[tuple[int | None, BlockView]]:
    """Of each layer its window, and what it sees. Layers with windows see as a decoder's do, the others all of the block, unless the file says it.

    That is what SpecForge's masks have in training, and vLLM and SGLang after it; Model-Optimizer's have WHOLE with windows. Speculators' layers with
    windows may see all of a block; its masks then begin as many tokens before the block for each row. They do so of causal rows, too, for which vLLM
    has the plain window, and so has this.
    """
    own, swa = place("swa_window_size"), place("use_swa")
    window = own.integer("swa_window_size", MAX_WINDOW) if own.has("swa_window_size") else None
    windows = read_windows(values, read_num_layers(values), window)
    is_everywhere = swa.flag("use_swa") and not any(windows)
    if is_everywhere:
        windows = [values.integer("sliding_window", MAX_WINDOW) if window is None else window] * len(windows)
    part, key = (place("causal"), "causal") if place("causal").has("causal") else (values, "is_causal")
    if part.has(key):
        views = [BlockView.CAUSAL if part.flag(key) else BlockView.WHOLE] * len(windows)
    elif is_speculators and values.flag("sliding_window_non_causal"):
        views = [BlockView.SHARED] * len(windows)
    else:
        views = [BlockView.WHOLE if width is None or is_everywhere else BlockView.CAUSAL for width in windows]
    if (narrow := next((width for width, view in zip(windows, views) if width and view == BlockView.WHOLE), None)) and narrow < block_size:
        # Nobody trains such, and what a row sees of the block then servers do not agree on.
        source, name = (values, "sliding_window") if window is None else (own, "swa_window_size")
        raise source.refuse(name, f"block_size ({block_size}) at least, where rows see all of a block")
    # Without a window there is nothing to begin elsewhere: rows ask alone.
    views = [BlockView.SHARED if width is None and view == BlockView.WHOLE else view for width, view in zip(windows, views)]
    return list(zip(windows, views))


def _read_mask_token(place: Place, vocab_size: int) -> int:
    key = next((key for key in ("mask_token_id", "pard_token", "ptd_token_id") if place(key).has(key)), "mask_token_id")
    return place(key).integer(key, vocab_size - 1, low=0)


def _read_markov(place: Place, *, is_spark: bool, is_anchor_sampled: bool, default: int, is_bare: bool) -> MarkovSpec | None:
    """default: the rank where none is written; is_bare: its weights' names have no prefix."""
    rank = place("markov_rank").integer("markov_rank", 2**14, low=0, default=default)
    if not rank:
        return None
    if not is_spark:
        raise place("markov_rank").refuse("markov_rank", "0 with method dflash; a drafter with this head is one of method dspark")
    kind = place("markov_head_type").choice("markov_head_type", MARKOV_KINDS, "vanilla")
    if kind == "rnn" and not is_anchor_sampled:
        raise place("sample_from_anchor").refuse("sample_from_anchor", "true where markov_head_type is rnn")
    return MarkovSpec(rank, kind, "" if is_bare else "markov_head.")


def _read_tapped_layers(values: Values, section: Values, count: int) -> tuple[int, ...]:
    """The layers of the target, `count` in all, whose inputs are taken: the authors name those whose output it is (-1: the embedding)."""
    check_target_layers((values, section), count)
    for place, key, offset in (
        (values, "aux_hidden_state_layer_ids", 0),
        (section, "target_layer_ids", 1),
        (values, "target_layer_ids", 1),
    ):
        if not place.has(key):
            continue
        given = place.get(key)
        found = [number + offset for number in given] if _are_integers(given) else []
        if not found or min(found) < 0 or max(found) > count:
            raise place.refuse(key, f"a list of layers of the target, which has {count}")
        return tuple(found)
    if values.has("num_target_layers"):  # z-lab's and SpecForge's own choice where the file names none
        num_layers = read_num_layers(values)
        if count < 4 or num_layers == 1:
            return (count // 2 + 1,)
        return tuple(round(1 + i * (count - 4) / (num_layers - 1)) + 1 for i in range(num_layers))
    raise ModelError(f"{values.where} has no 'aux_hidden_state_layer_ids', nor 'target_layer_ids' in dflash_config")


def _are_integers(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(number, int) and not isinstance(number, bool) for number in given)
