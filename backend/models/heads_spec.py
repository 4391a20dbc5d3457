"""What the folders of drafting heads hold: Medusa, Hydra, MLP speculators, in their authors' formats and vLLM's. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from backend.errors import ModelError
from backend.models.eagle_spec import has_part
from backend.models.families.llama import llama_layer
from backend.models.spec import LayerSpec, Projection, WeightList
from backend.models.values import Values

MAX_HEADS = 16
MEDUSA_PREFIX = "medusa_heads."
"""Of heads' names where others may be beside them: those of the model, which Model-Optimizer saves together with its heads."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the target."""

    hidden: int
    vocab: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Block:
    """x -> shortcut(x) + SiLU(linear(x)); without a shortcut x itself is added."""

    linear: Projection
    shortcut: Projection | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """One draft's: blocks, then the scores of the vocabulary."""

    blocks: tuple[Block, ...]
    scores: Projection


@dataclass(frozen=True, slots=True)
class Prefix:
    """A layer of attention over the target's states, before Hydra's heads."""

    layer: LayerSpec
    norm: str


@dataclass(frozen=True, slots=True)
class HeadsSpec:
    """Medusa's and Hydra's heads."""

    where: str
    heads: tuple[Head, ...]
    hidden_size: int
    is_grounded: bool = False
    """Head i takes the embeddings of the newest token and of i drafts beside the state."""
    tapped_layer: int | None = None
    """The layer of the target whose input the state is; None: the state after the final norm."""
    prefix: Prefix | None = None
    map: str | None = None
    """The weight that says which of the target's tokens the scores are of; None: all, in order."""

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def list_weights(self, weights: WeightList) -> None:
        # All blocks have a bias (the authors') or none has (vLLM's), and so have all scores.
        blocks = [block for head in self.heads for block in head.blocks]
        if parts := [part for block in blocks for part in (block.linear, block.shortcut) if part is not None]:
            weights.add(*parts)
        weights.add(*(head.scores for head in self.heads))
        weights.unspoken.clear()  # no config.json of heads speaks of biases
        if self.prefix is not None:
            self.prefix.layer.list_weights(weights)
            weights.add_norm(self.prefix.norm, self.hidden_size)
            weights.ignored.add("prefix_embeding_layer.embed_tokens.weight")
        if self.map is not None:
            weights.ids[self.map] = (self.heads[0].scores.out_features,)


@dataclass(frozen=True, slots=True)
class SpeculatorSpec:
    """An MLP speculator. Names by draft; those that several drafts share are the same."""

    where: str
    num_predicted: int
    embeddings: tuple[str, ...]
    projections: tuple[str, ...]
    norms: tuple[str, ...]
    scores: tuple[str, ...]
    hidden_size: int
    inner: int
    vocab_size: int
    is_input_scaled: bool
    copies: dict[str, str]
    """Weights that a file of shared ones may repeat, and what each is a copy of."""

    @property
    def num_heads(self) -> int:
        return len(self.embeddings)

    def list_weights(self, weights: WeightList) -> None:
        weights.ignored |= self.copies.keys()
        for number, (embedding, projection, norm, scores) in enumerate(zip(self.embeddings, self.projections, self.norms, self.scores)):
            weights.required |= {f"{name}.weight": (self.vocab_size, self.inner) for name in (embedding, scores)}
            weights.required[f"{projection}.weight"] = (self.inner, self.inner if number else self.hidden_size)
            weights.required |= {f"{norm}.{part}": (self.inner,) for part in ("weight", "bias")}


@dataclass(frozen=True, slots=True)
class LstmSpec:
    """Arctic's LSTM variant of the MLP speculator: one set of weights for all drafts, but for the first projection."""

    where: str
    num_predicted: int
    num_drafts: int
    prefix: str
    hidden_size: int
    inner: int
    vocab_size: int
    is_input_scaled: bool

    @property
    def num_heads(self) -> int:
        return self.num_drafts

    def list_weights(self, weights: WeightList) -> None:
        prefix, inner = self.prefix, self.inner
        weights.required |= {f"{prefix}{name}.0.weight": (self.vocab_size, inner) for name in ("forget_emb", "head")}
        weights.required |= {f"{prefix}projs.{i}.weight": (4 * inner, inner if i else self.hidden_size) for i in range(2)}
        weights.required |= {f"{prefix}{name}_ln.0.{part}": (inner,) for name in ("cell", "state") for part in ("weight", "bias")}
        # Copies of what all drafts share, in the fp8 that its authors make of it, or under other numbers.
        weights.ignored |= {f"{prefix}{name}.{i}.weight" for name in ("head", "qhead") for i in range(MAX_HEADS)}


def read_medusa(values: Values, names: Collection[str], sizes: Sizes, target: Values) -> HeadsSpec:
    """Medusa (Cai et al. 2024), in the authors' format, vLLM's and Model-Optimizer's, which has the authors' names beside its model's, or those of
    TensorRT-LLM. names: of the weights, where they are known."""
    _check_sizes(values, sizes)
    prefix = MEDUSA_PREFIX if any(name.startswith(MEDUSA_PREFIX) for name in names) else ""
    is_blocks = values.has("num_heads") or has_part(f"{prefix}blocks.0.layers.0", names)
    has_parts = has_part(f"{prefix}0.medusa_layers.0.linear", names)
    # Model-Optimizer's config.json is the model's, and says nothing of heads.
    listed = _count(names, rf"{prefix}0\.(?:medusa_layers\.)?(\d+)\.linear\.")
    num_layers = values.integer("num_hidden_layers" if is_blocks else "medusa_num_layers", 64, default=1 if is_blocks else max(1, listed))
    # The authors' configurations say two heads of files that hold five.
    stated = values.integer("num_heads" if is_blocks else "medusa_num_heads", MAX_HEADS, default=None if is_blocks else 5)
    found = _count(names, rf"{prefix}blocks\.(\d+)\." if is_blocks else rf"{prefix}(\d+)\.(?:medusa_layers\.)?\d+\.linear\.")
    count = stated if is_blocks or not found else found
    num_scores = values.integer("truncated_vocab_size", sizes.vocab, low=0, default=0) or sizes.vocab  # speculators writes 0
    is_shared = values.flag("original_lm_head")
    heads = []
    for i in range(count):
        block = f"{prefix}blocks.{i}.layers" if is_blocks else f"{prefix}{i}.medusa_layers" if has_parts else f"{prefix}{i}"
        blocks = [Block(Projection(f"{block}.{j}" if is_blocks else f"{block}.{j}.linear", sizes.hidden, sizes.hidden)) for j in range(num_layers)]
        scores = f"{prefix}{i}.lm_head" if has_parts else f"{block}.{num_layers}"
        if is_blocks:
            scores = f"{prefix}lm_heads.{0 if is_shared else i}"
        heads.append(Head(tuple(blocks), Projection(scores, num_scores, sizes.hidden)))
    return HeadsSpec(values.where, tuple(heads), sizes.hidden, map=f"{prefix}token_map" if num_scores < sizes.vocab else None)


def read_hydra(values: Values, names: Collection[str], sizes: Sizes, target: Values) -> HeadsSpec:
    """Hydra and Hydra++ (Ankner et al. 2024); the latter's layer of attention is as the target's own, which has to be a Llama."""
    _check_sizes(values, sizes)
    kind = values.choice("hydra_head_arch", ("mlp", "prefix-mlp"), "prefix-mlp" if "prefix_embeding_layer.norm.weight" in names else "mlp")
    count, num_layers = values.integer("hydra_num_heads", MAX_HEADS, default=4), values.integer("hydra_num_layers", 64, default=1)
    # The authors' default is false; the weights say it too.
    is_grounded = values.flag("grounded_heads", default=not names or any(".res_connection." in name for name in names))
    offset = values.integer("hidden_state_offset", sizes.num_layers, low=0, default=0)
    # Where each part has a dropout before it, places count double.
    has_dropout = kind == "prefix-mlp" or (has_part("hydra_mlp.0.1.linear", names) and not has_part("hydra_mlp.0.0.linear", names))
    heads = []
    for i in range(count):
        blocks = []
        for j in range(num_layers):
            where, width = f"hydra_mlp.{i}.{2 * j + 1 if has_dropout else j}", sizes.hidden * (i + 2 if is_grounded and j == 0 else 1)
            shortcut = Projection(f"{where}.res_connection", sizes.hidden, width) if width > sizes.hidden else None
            blocks.append(Block(Projection(f"{where}.linear", sizes.hidden, width), shortcut))
        heads.append(Head(tuple(blocks), Projection(f"hydra_lm_head.{i}.1" if has_dropout else f"hydra_lm_head.{i}", sizes.vocab, sizes.hidden)))
    prefix = Prefix(llama_layer(target, "prefix_embeding_layer.layers.0"), "prefix_embeding_layer.norm.weight") if kind == "prefix-mlp" else None
    tapped = sizes.num_layers - offset if offset else None
    return HeadsSpec(values.where, tuple(heads), sizes.hidden, is_grounded, tapped, prefix)


def read_speculator(values: Values, names: Collection[str], sizes: Sizes, target: Values) -> SpeculatorSpec | LstmSpec:
    """IBM's MLP speculators (Wertheimer et al. 2024), and Arctic's LSTM variant (Snowflake 2025)."""
    if values.get("method") == "sum_lstm":
        return _read_lstm(values, names, sizes)
    count = values.integer("n_predict", MAX_HEADS)
    is_tied = values.flag("tie_weights")
    num_drafts = values.integer("num_lookahead_tokens", MAX_HEADS, default=count)
    if num_drafts > count and not is_tied:
        raise values.refuse("num_lookahead_tokens", f"n_predict ({count}) at most, since tie_weights is false")
    _check_sizes(values, sizes, hidden_key="emb_dim")
    inner = values.integer("inner_dim", 2**17, low=0, default=0) or sizes.hidden
    prefix = "" if has_part("emb.0", names) else "speculator."
    if (found := _count(names, rf"{re.escape(prefix)}emb\.(\d+)\.")) > max(count, num_drafts):  # how much a token counts for follows from it
        raise values.refuse("n_predict", f"{found}, as many embeddings as the file has")

    def name(part: str, last: int = 0) -> tuple[str, ...]:
        return tuple(f"{prefix}{part}.{min(i, last) if is_tied else i}" for i in range(num_drafts))

    parts = [(part, 1 if part == "proj" else 0, kind) for part in ("emb", "proj", "ln", "head") for kind in ("weight", "bias")]
    copies = {f"{prefix}{part}.{i}.{kind}": f"{prefix}{part}.{last}.{kind}" for part, last, kind in parts for i in range(last + 1, count)}
    return SpeculatorSpec(
        where=values.where,
        num_predicted=count,
        embeddings=name("emb"),
        projections=name("proj", 1),
        norms=name("ln"),
        scores=name("head"),
        hidden_size=sizes.hidden,
        inner=inner,
        vocab_size=sizes.vocab,
        is_input_scaled=values.flag("scale_input"),
        copies=copies if is_tied else {},
    )


def _read_lstm(values: Values, names: Collection[str], sizes: Sizes) -> LstmSpec:
    for key in ("tie_weights", "tie_lstm_embs"):
        if not values.flag(key):
            raise values.refuse(key, "true where method is sum_lstm")
    _check_sizes(values, sizes, hidden_key="input_hidden_dim")
    widths = {key: _read_width(values, key) for key in ("inner_dim", "emb_dim", "proj_dim")}
    inner = widths["inner_dim"]
    for key, width in widths.items():
        if width != inner:
            raise values.refuse(key, f"inner_dim ({inner}) where method is sum_lstm")
    count = values.integer("n_predict", MAX_HEADS)
    return LstmSpec(
        where=values.where,
        num_predicted=count,
        num_drafts=values.integer("num_lookahead_tokens", MAX_HEADS, default=count),
        prefix="" if has_part("forget_emb.0", names) else "speculator.",
        hidden_size=sizes.hidden,
        inner=inner,
        vocab_size=sizes.vocab,
        is_input_scaled=values.flag("scale_input"),
    )


def _read_width(values: Values, key: str) -> int:
    """One number, as a text too: these files have several widths with dots between, of which an LSTM has one."""
    given = values.get(key)
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= 2**17:
        raise values.refuse(key, f"one integer from 1 to {2**17}")
    return given


def _check_sizes(values: Values, sizes: Sizes, hidden_key: str = "hidden_size") -> None:
    """What these files say of the target, where they say it."""
    for key, own in ((hidden_key, sizes.hidden), ("vocab_size", sizes.vocab)):
        if values.has(key) and values.get(key) != own:
            raise ModelError(f"{values.where}: {key} is {values.get(key)!r:.80}; the target's is {own}")


def _count(names: Collection[str], pattern: str) -> int:
    return 1 + max((int(found[1]) for name in names if (found := re.match(pattern, name))), default=-1)


HEADS: dict[str, Callable[[Values, Collection[str], Sizes, Values], HeadsSpec | SpeculatorSpec | LstmSpec]] = {
    "medusa": read_medusa,
    "hydra": read_hydra,
    "mlp_speculator": read_speculator,
}
"""By method: of the drafter's config.json, the names of its weights where they are known, and the target's sizes and config.json."""
