"""What a model is made of, as its family reads it from config.json: parts, sizes and the names of their weights. No torch.

`backend.model_checks` compares a folder with it before anything is loaded; `backend.models.decoder` builds the model from it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Literal

from backend.models.rope_spec import RopeSpec, read_context_len
from backend.models.values import Values

if TYPE_CHECKING:
    from backend.models.latent_spec import LatentSpec
    from backend.models.moe_spec import MoeSpec
    from backend.models.mtp_spec import MtpSpec

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh")
LAYER_TYPES = ("full_attention", "sliding_attention")

Shapes = dict[str, tuple[int, ...]]


@dataclass(slots=True)
class WeightList:
    """The weights of a checkpoint, by name."""

    required: Shapes = field(default_factory=dict)
    optional: list[Shapes] = field(default_factory=list)
    """Groups of which it has all or none."""
    unspoken: set[str] = field(default_factory=set)
    """Those that config.json says nothing of, or that there are none: whoever has them is told that they are used."""
    rounded: dict[str, Literal["dense", "moe"]] = field(default_factory=dict)
    """Projections (without `.weight`) that are rounded where their kind is: see backend/quantization_config.py."""
    zeros: Shapes = field(default_factory=dict)
    """Biases that nothing adds: AutoGPTQ's first versions wrote some for every projection. They may be there, and all zero."""
    ids: Shapes = field(default_factory=dict)
    """Integers that have to be there."""
    ignored: set[str] = field(default_factory=set)
    """What may be there, and is read in another way or not at all."""

    def add_norm(self, name: str | None, size: int) -> None:
        if name is not None:
            self.required[name] = (size,)

    def add_known(self, spec: DecoderSpec | MtpSpec) -> None:
        """Weights that others read, each of which may be there."""
        other = WeightList()
        spec.list_weights(other)
        shapes = other.required | {name: shape for group in other.optional for name, shape in group.items()}
        self.optional += [{name: shape} for name, shape in shapes.items()]
        self.unspoken |= other.unspoken
        self.rounded |= other.rounded
        self.zeros |= other.zeros

    def add_plain(self, projection: Projection, kind: Literal["dense", "moe"] | None = None) -> None:
        """One that has no bias. kind: what it is rounded as; None: never."""
        if kind is not None:
            self.rounded[projection.name] = kind
        self.required[f"{projection.name}.weight"] = (projection.out_features, projection.in_features)
        self.zeros[f"{projection.name}.bias"] = (projection.out_features,)

    def add(self, *projections: Projection) -> None:
        """Projections of one input, whose biases go together."""
        biases: Shapes = {f"{p.name}.bias": (p.out_features,) for p in projections}
        self.required |= {f"{p.name}.weight": (p.out_features, p.in_features) for p in projections}
        self.rounded |= dict.fromkeys((p.name for p in projections), "dense")
        if projections[0].has_bias:
            self.required |= biases
        else:
            self.optional.append(biases)
            self.unspoken |= biases.keys()


@dataclass(frozen=True, slots=True)
class Projection:
    """A stored weight [out, in], and its bias."""

    name: str
    """Without `.weight`."""
    out_features: int
    in_features: int
    has_bias: bool = False
    """It must be there; else it is taken where the checkpoint has it."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention."""

    num_planes: ClassVar[int] = 2
    """Tensors that are kept of each layer: keys and values."""

    num_q: int
    num_kv: int
    head_dim: int
    qkv: tuple[Projection, ...]
    """Of queries, keys and values; or one, whose rows are theirs in this order."""
    o: Projection
    rope: RopeSpec
    query_norm: str | None = None
    key_norm: str | None = None
    scale: float | None = None
    """What scores are multiplied with; None: head_dim ** -0.5."""
    window: int | None = None
    """Tokens that a query sees, itself with them."""
    soft_cap: float | None = None
    """Scores become cap tanh(score / cap)."""
    are_norms_whole: bool = False
    """The norms are of all queries and of all keys at once, not of each head."""
    clip: float | None = None
    """What queries, keys and values are clipped to, either way."""

    @property
    def heads(self) -> tuple[int, int, int]:
        """Of queries, of keys and values, and their size."""
        return self.num_q, self.num_kv, self.head_dim

    @property
    def value_dim(self) -> int:
        """Of a head."""
        return self.head_dim

    @property
    def latent(self) -> tuple[int, int]:
        """Numbers of a latent and of the key beside it: here keys and values are kept."""
        return 0, 0

    @property
    def turning(self) -> tuple[RopeSpec, int, float | None]:
        """Rotary embedding, size of heads, factor of scores within the tables: what `backend.models.rope.RopeTables` are made for."""
        return self.rope, self.head_dim, self.scale

    def token_shape(self, num_kv: int) -> tuple[int, ...]:
        """Of what a rank with num_kv heads keeps of a token in a plane."""
        return num_kv, self.head_dim

    def list_weights(self, weights: WeightList) -> None:
        weights.add(*self.qkv)
        weights.add(self.o)
        for name, heads in ((self.query_norm, self.num_q), (self.key_norm, self.num_kv)):
            weights.add_norm(name, self.head_dim * (heads if self.are_norms_whole else 1))


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """act(gate) * up, and down."""

    gate_up: tuple[Projection, ...]
    """Gate and up; or one, whose rows are theirs in this order."""
    down: Projection
    activation: str = "silu"

    def list_weights(self, weights: WeightList) -> None:
        weights.add(*self.gate_up)
        weights.add(self.down)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer: norms, attention, MLP. A post norm is of what a part adds to the residual stream."""

    hidden_size: int
    eps: float
    input_norm: str | None
    """None: attention takes its input as it is."""
    attention: AttentionSpec | LatentSpec
    mlp_norm: str
    mlp: MlpSpec | MoeSpec
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    norm_offset: float = 0.0
    """Added to the weights of norms: Gemma's say how far from 1 they are."""

    def list_weights(self, weights: WeightList) -> None:
        for name in (self.input_norm, self.mlp_norm, self.attention_post_norm, self.mlp_post_norm):
            weights.add_norm(name, self.hidden_size)
        self.attention.list_weights(weights)
        self.mlp.list_weights(weights)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole model: embedding, layers, final norm, head."""

    where: str
    """The file that said so."""
    vocab_size: int
    hidden_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    layers: tuple[LayerSpec, ...]
    is_tied: bool
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm.weight"
    head: str = "lm_head"
    norm_offset: float = 0.0
    embedding_scale: float | None = None
    logit_soft_cap: float | None = None
    placeholders: frozenset[str] = frozenset()
    """Tokens beyond the embedding that published tokenizers of the family have for what is no text: no text has them, and they are no error."""

    def list_weights(self, weights: WeightList) -> None:
        head: Shapes = {f"{self.head}.weight": (self.vocab_size, self.hidden_size)}
        weights.required |= {f"{self.embedding}.weight": (self.vocab_size, self.hidden_size), self.norm: (self.hidden_size,)}
        if self.is_tied:
            weights.optional.append(head)  # some files repeat it
        else:
            weights.required |= head
        weights.optional.append({f"{self.head}.bias": (self.vocab_size,)})
        weights.unspoken.add(f"{self.head}.bias")
        for layer in self.layers:
            layer.list_weights(weights)


class BlockView(Enum):
    """What the rows of a block see of it in a layer, and where its window begins."""

    CAUSAL = "the rows before their own; each row's window ends with itself"
    WHOLE = "all rows; each row's window begins where it would if it ended with itself"
    SHARED = "all rows, and with a window as many tokens before the block"


# -- what families read alike -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder layer."""

    hidden: int
    inner: int
    num_q: int
    num_kv: int
    head_dim: int


def read_sizes(values: Values, head_dim: int | None = None) -> Sizes:
    """head_dim: the family's own where the file does not name it; None: hidden / heads, as where the file says null."""
    hidden, num_q = values.integer("hidden_size", 2**17), values.integer("num_attention_heads", 1024)
    num_kv = values.integer("num_key_value_heads", num_q) if values.has("num_key_value_heads") else num_q
    if num_q % num_kv:
        raise values.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_q})")
    if values.names("head_dim"):
        head_dim = None
    if not values.has("head_dim") and head_dim is None and hidden % num_q:
        raise values.refuse("num_attention_heads", f"a divisor of hidden_size ({hidden}), where there is no head_dim")
    size = values.integer("head_dim", 1024, default=head_dim or hidden // num_q)
    if size < 2 or size % 2:
        raise values.refuse("head_dim", f"even, since RoPE turns pairs; hidden_size // num_attention_heads is {hidden // num_q}")
    return Sizes(hidden, values.integer("intermediate_size", 2**20), num_q, num_kv, size)


def attention(
    prefix: str,
    sizes: Sizes,
    rope: RopeSpec,
    *,
    has_bias: bool = False,
    has_output_bias: bool = False,
    has_head_norms: bool = False,
    is_fused: bool = False,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    are_norms_whole: bool = False,
    clip: float | None = None,
) -> AttentionSpec:
    """Grouped-query attention under the names that most families use."""
    query, key = sizes.num_q * sizes.head_dim, sizes.num_kv * sizes.head_dim
    parts = (("qkv_proj", query + 2 * key),) if is_fused else (("q_proj", query), ("k_proj", key), ("v_proj", key))
    return AttentionSpec(
        sizes.num_q,
        sizes.num_kv,
        sizes.head_dim,
        qkv=tuple(Projection(f"{prefix}.{name}", rows, sizes.hidden, has_bias) for name, rows in parts),
        o=Projection(f"{prefix}.o_proj", sizes.hidden, query, has_output_bias),
        rope=rope,
        query_norm=f"{prefix}.q_norm.weight" if has_head_norms or are_norms_whole else None,
        key_norm=f"{prefix}.k_norm.weight" if has_head_norms or are_norms_whole else None,
        scale=None if scale == sizes.head_dim**-0.5 else scale,
        window=window,
        soft_cap=soft_cap,
        are_norms_whole=are_norms_whole,
        clip=clip,
    )


def gated_mlp(prefix: str, sizes: Sizes, activation: str, *, has_bias: bool = False, is_fused: bool = False, inner: int | None = None) -> MlpSpec:
    """A gated MLP under the names that most families use. inner: where it is not intermediate_size."""
    inner = inner or sizes.inner
    parts = (("gate_up_proj", 2 * inner),) if is_fused else (("gate_proj", inner), ("up_proj", inner))
    gate_up = tuple(Projection(f"{prefix}.{name}", rows, sizes.hidden, has_bias) for name, rows in parts)
    return MlpSpec(gate_up, Projection(f"{prefix}.down_proj", sizes.hidden, inner, has_bias), activation)


def read_decoder(
    values: Values,
    layers: Iterable[LayerSpec],
    *,
    is_tied: bool = False,
    norm_offset: float = 0.0,
    embedding_scale: float | None = None,
    logit_soft_cap: float | None = None,
) -> DecoderSpec:
    """is_tied: where the file does not say."""
    if not values.flag("is_causal", default=True):  # of models that embed texts, whose tokens see later ones
        raise values.refuse("is_causal", "true: tokens are written one after the other")
    end = values.get("eos_token_id")
    return DecoderSpec(
        values.where,
        values.integer("vocab_size", 2**22),
        values.integer("hidden_size", 2**17),
        read_context_len(values),
        frozenset([end] if isinstance(end, int) else end or []),
        tuple(layers),
        values.flag("tie_word_embeddings", default=is_tied),
        norm_offset=norm_offset,
        embedding_scale=embedding_scale,
        logit_soft_cap=logit_soft_cap,
    )


def settle_tied(spec: DecoderSpec, names: Container[str]) -> DecoderSpec:
    """The model, whose embedding a checkpoint of these weights may have under its head's name alone: safetensors' save_model keeps that one."""
    is_head = spec.is_tied and f"{spec.embedding}.weight" not in names and f"{spec.head}.weight" in names
    return replace(spec, embedding=spec.head) if is_head else spec


def read_layer_types(values: Values, default: Sequence[str]) -> list[str]:
    """Of each layer; `default` where the file does not say."""
    types = values.get("layer_types")
    if types is None:
        return list(default)
    if not isinstance(types, list) or len(types) != len(default) or any(kind not in LAYER_TYPES for kind in types):
        raise values.refuse("layer_types", f"a list of num_hidden_layers ({len(default)}) of: {', '.join(LAYER_TYPES)}")
    return types


def read_window(values: Values, default: int | None = None) -> int | None:
    """sliding_window; `default` where the file does not name it, which is not the same as null."""
    if not values.has("sliding_window"):
        return None if values.names("sliding_window") else default
    return values.integer("sliding_window", 2**24)


def read_soft_cap(values: Values, key: str, default: float | None = None) -> float | None:
    """A cap of scores; null: none."""
    if not values.has(key):
        return None if values.names(key) else default
    return values.number(key, 1e9)


def pre_norm_layer(prefix: str, sizes: Sizes, eps: float, attention: AttentionSpec | LatentSpec, mlp: MlpSpec | MoeSpec) -> LayerSpec:
    """A layer with a norm before each part, under the names that most families use."""
    norms = (f"{prefix}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm"))
    return LayerSpec(sizes.hidden, eps, next(norms), attention, next(norms), mlp)


def read_eps(values: Values) -> float:
    return values.number("rms_norm_eps", 1.0)


def read_num_layers(values: Values) -> int:
    return values.integer("num_hidden_layers", 1024)
