"""What config.json says of mixtures of experts (Shazeer et al. 2017): how tokens find experts, and what those are made of. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

from backend.models.spec import DecoderSpec, LayerSpec, MlpSpec, Projection, WeightList
from backend.models.values import Values

MAX_EXPERTS = 4096
UNFUSED = "save the model with a weight for each expert's projection, as transformers does by default"
"""What is to be done where fused experts cannot be taken."""
GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
FUSED_NAMES = ("gate_up_proj", "down_proj")
"""Of all experts in one weight, as transformers 5 holds them; it writes them so where save_original_format is false, or where it has them on disk."""
FUSED_PART = re.compile(rf"\.experts\.(?:{'|'.join(FUSED_NAMES)})[._]")
"""In the name of a tensor that such weights have beside them, or instead, where they are quantized."""
RENAMED = ((".block_sparse_moe.", ".mlp."), (".mlp.moe_statics.", ".mlp.gate.moe_statics."))
"""Other names that it has then."""


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Scores of all experts in float32, the choice of some of them, and the weights of what those add.

    Softmax over the chosen experts' scores alone (Mixtral) is softmax over all with the chosen ones' divided by their sum: is_normalized.
    """

    gate: Projection
    """[experts, hidden]"""
    num_chosen: int
    count_key: str
    chosen_key: str
    """What config.json calls the number of experts, and num_chosen."""
    scoring: str = "softmax"
    """Or sigmoid."""
    correction: str | None = None
    """A weight that is added to the scores for the choice, not for the weights of what is chosen (DeepSeek-V3)."""
    correction_shape: tuple[int, ...] = ()
    is_normalized: bool = False
    """Weights of the chosen are divided by their sum."""
    min_sum: float = 0.0
    """Which counts as this at least."""
    scale: float = 1.0
    num_groups: int = 1
    """Experts are in groups, one after the other; only those of the best groups may be chosen (DeepSeek-V2: node-limited routing)."""
    num_chosen_groups: int = 1
    num_group_scores: int = 1
    """A group is as good as the sum of so many of its best scores."""

    @property
    def num_experts(self) -> int:
        return self.gate.out_features


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts in an MLP's place. Each expert is a gated MLP without biases."""

    router: RouterSpec
    prefix: str
    """Of the experts' names, which go on with an expert's number."""
    names: tuple[str, str, str]
    """Of an expert's projections: gate, up, down."""
    hidden_size: int
    inner: int
    """Of each expert."""
    inner_key: str
    """What config.json calls it."""
    activation: str = "silu"
    shared: MlpSpec | None = None
    """An MLP that every token takes."""
    shared_gate: Projection | None = None
    """[1, hidden]: what it adds is multiplied with the sigmoid of this product."""
    is_shared_assumed: bool = field(default=False, compare=False)
    """The file does not say whether there is such an MLP: there is none where a checkpoint has no weights of it."""

    is_fused: bool = False
    """All experts' weights are in two."""

    @property
    def stacks(self) -> tuple[tuple[str, tuple[int, int, int]], tuple[str, tuple[int, int, int]]]:
        """Where experts are fused: gate | up of all, and down, with their shapes."""
        gate_up, down = (f"{self.prefix}.{name}" for name in FUSED_NAMES)
        count, hidden, inner = self.router.num_experts, self.hidden_size, self.inner
        return (gate_up, (count, 2 * inner, hidden)), (down, (count, hidden, inner))

    def expert(self, number: int) -> tuple[Projection, Projection, Projection]:
        gate, up, down = (f"{self.prefix}.{number}.{name}" for name in self.names)
        hidden, inner = self.hidden_size, self.inner
        return Projection(gate, inner, hidden), Projection(up, inner, hidden), Projection(down, hidden, inner)

    def list_weights(self, weights: WeightList) -> None:
        router = self.router
        weights.add_plain(router.gate)
        if router.correction is not None:
            weights.required[router.correction] = router.correction_shape
        if self.is_fused:
            weights.required |= dict(self.stacks)
            weights.rounded |= dict.fromkeys((name for name, _ in self.stacks), "moe")
        for number in range(0 if self.is_fused else router.num_experts):
            for projection in self.expert(number):
                weights.add_plain(projection, "moe")
        if self.shared is not None:
            self.shared.list_weights(weights)
        if self.shared_gate is not None:
            weights.add_plain(self.shared_gate)


def read_router(
    values: Values, gate: str, hidden: int, count_key: str, chosen_key: str = "num_experts_per_tok", default_chosen: int | None = None
) -> RouterSpec:
    """Softmax over `count_key` experts, `chosen_key` of which a token takes; families replace what else theirs has."""
    count = values.integer(count_key, MAX_EXPERTS)
    chosen = values.integer(chosen_key, MAX_EXPERTS, default=default_chosen)
    if chosen > count:
        raise values.refuse(chosen_key, f"no more than {count_key} ({count})")
    return RouterSpec(Projection(gate, count, hidden), chosen, count_key, chosen_key)


def read_groups(values: Values, router: RouterSpec, num_group_scores: int) -> RouterSpec:
    """The router with n_group and topk_group, where the file has them. Raises ModelError where such groups cannot be."""
    if not values.has("n_group") and not values.has("topk_group"):
        return router
    groups, best = values.integer("n_group", MAX_EXPERTS), values.integer("topk_group", MAX_EXPERTS)
    count, chosen = router.num_experts, router.num_chosen
    if count % groups or (groups > 1 and count // groups < num_group_scores):
        raise values.refuse("n_group", f"such that {router.count_key} ({count}) divides by it, {num_group_scores} experts to a group at least")
    if best > groups or best * (count // groups) < chosen:
        rule = f"no more than n_group ({groups}), whose groups of {count // groups} have {router.chosen_key} ({chosen}) experts"
        raise values.refuse("topk_group", rule)
    return replace(router, num_groups=groups, num_chosen_groups=best, num_group_scores=num_group_scores)


def read_sparse_layers(values: Values, num_layers: int) -> Callable[[int], bool]:
    """Which layers have experts, by mlp_only_layers and decoder_sparse_step."""
    plain, step = frozenset(values.integers("mlp_only_layers", num_layers - 1)), values.integer("decoder_sparse_step", 2**16, default=1)
    return lambda layer: layer not in plain and (layer + 1) % step == 0


def settle_fused(spec: DecoderSpec, names: Container[str]) -> DecoderSpec:
    """The model, whose experts a checkpoint of these weights may have in one weight for all."""
    return replace(spec, layers=tuple(settle_fused_layer(layer, names) for layer in spec.layers))


def settle_fused_layer(layer: LayerSpec, names: Container[str]) -> LayerSpec:
    def rename(name: str, ending: str = "") -> str:
        for old, new in RENAMED:
            if (renamed := name.replace(old, new)) + ending in names:
                return renamed
        return name

    mlp, first = layer.mlp, f".{FUSED_NAMES[0]}"
    if not isinstance(mlp, MoeSpec):
        return layer
    prefix = rename(mlp.prefix, first)
    if prefix + first not in names:
        return layer
    router = replace(mlp.router, gate=replace(mlp.router.gate, name=rename(mlp.router.gate.name, ".weight")))
    if router.correction is not None:
        router = replace(router, correction=rename(router.correction))
    return replace(layer, mlp=replace(mlp, router=router, prefix=prefix, is_fused=True))


def settle_shared(spec: DecoderSpec, names: Iterable[str]) -> DecoderSpec:
    """The model, with those shared experts that are assumed alone which a checkpoint of these weights has."""
    held = {name.rpartition(".")[0] for name in names}

    def settle(layer: LayerSpec) -> LayerSpec:
        mlp = layer.mlp
        if isinstance(mlp, MoeSpec) and mlp.is_shared_assumed and mlp.shared is not None and mlp.shared.down.name not in held:
            return replace(layer, mlp=replace(mlp, shared=None))
        return layer

    return replace(spec, layers=tuple(map(settle, spec.layers)))
