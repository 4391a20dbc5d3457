"""What config.json says of multi-token-prediction modules: a drafter's own, or those beside a model's layers in its checkpoint. No torch."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from backend.models.moe_spec import settle_fused_layer
from backend.models.spec import LayerSpec, Projection, WeightList
from backend.models.values import Values


@dataclass(frozen=True, slots=True)
class MtpLayerSpec:
    """One module of a multi-token-prediction drafter: norms, projection of both, decoder layer, norm before the shared head."""

    embedding_norm: str
    hidden_norm: str
    projection: Projection
    decoder: LayerSpec
    head_norm: str
    repeated: tuple[str, ...] = ()
    """The target's embedding and head, which some files hold again."""


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """A drafter's modules; embedding and head are the target's."""

    vocab_size: int
    hidden_size: int
    layers: tuple[MtpLayerSpec, ...]
    is_hidden_first: bool = False
    """The projection takes state and embedding in this order, not the other."""
    is_norm_recycled: bool = False
    """What the next module, or the next draft, takes is the state after the norm before the head, not before it."""
    is_first_masked: bool = False
    """The first token that a module sees with a state before it has zeros for its embedding."""

    def list_weights(self, weights: WeightList) -> None:
        for layer in self.layers:
            for name in (layer.embedding_norm, layer.hidden_norm, layer.head_norm):
                weights.add_norm(name, self.hidden_size)
            weights.add(layer.projection)
            weights.optional += [{name: (self.vocab_size, self.hidden_size)} for name in layer.repeated]
            layer.decoder.list_weights(weights)

    def settle_fused(self, names: Container[str]) -> MtpSpec:
        """With experts in one weight for all where a checkpoint of these weights has them so."""
        return replace(self, layers=tuple(replace(layer, decoder=settle_fused_layer(layer.decoder, names)) for layer in self.layers))


def read_modules(
    values: Values,
    make: Callable[[int], MtpLayerSpec],
    *,
    is_hidden_first: bool = False,
    is_norm_recycled: bool = False,
    is_first_masked: bool = True,
) -> MtpSpec:
    """As many modules as num_nextn_predict_layers says. make: number `i`, from 0.

    is_first_masked: so do vLLM's modules of all families (deepseek_mtp.py, glm4_moe_mtp.py, ernie_mtp.py, mimo_mtp.py), where position 0 is that of
    the state and the token is the one after it; and SGLang's of MiMo (mimo_mtp.py).
    """
    count = values.integer("num_nextn_predict_layers", 1024)
    layers = tuple(make(number) for number in range(count))
    return MtpSpec(values.integer("vocab_size", 2**22), layers[0].decoder.hidden_size, layers, is_hidden_first, is_norm_recycled, is_first_masked)


def make_module(prefix: str, decoder: LayerSpec) -> MtpLayerSpec:
    """A module under DeepSeek-V3's names, which most files use: all that belongs to it is within the layer that it is beside."""
    hidden = decoder.hidden_size
    return MtpLayerSpec(
        embedding_norm=f"{prefix}.enorm.weight",
        hidden_norm=f"{prefix}.hnorm.weight",
        projection=Projection(f"{prefix}.eh_proj", hidden, 2 * hidden),
        decoder=decoder,
        head_norm=f"{prefix}.shared_head.norm.weight",
        repeated=(f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"),
    )
