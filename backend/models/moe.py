"""A mixture of experts on one rank (Shazeer et al. 2017; Fedus et al. 2021), in the place of a layer's MLP.

Routing gives each token's experts and weights [T, k]; the experts, stacked [E, ...] when they are read, are one object that makes the
rank's share of the sum (`backend.quantization`). Over ranks they are split as an MLP is, or whole ones are spread
(expert_parallel). Shared experts are an MLP, split like any.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from backend.models.layers import Part, Weights
from backend.models.moe_spec import MoeSpec, RouterSpec
from backend.models.parts import activate, add_shares, optional_norm
from backend.models.spec import LayerSpec, MlpSpec
from backend.parallel.ranks import WHOLE, await_rows
from backend.quantization import Experts, Stored, cut_columns, cut_rows, make_experts, make_stored_experts
from kernels import ops


class Router:
    """Which experts a token takes. Every rank holds it whole, and computes in float32: near ties decide what is computed at all."""

    def __init__(self, spec: RouterSpec, weights: Weights) -> None:
        self._spec, self._correction, self.num_chosen = spec, None, spec.num_chosen
        self._gate = weights.exact(f"{spec.gate.name}.weight", (spec.gate.out_features, spec.gate.in_features))
        self._gate_parts = ops.split_gate(self._gate, weights.dtype)
        if spec.correction is not None:
            self._correction = weights.exact(spec.correction, spec.correction_shape).flatten()

    def __call__(self, x: torch.Tensor, norm: torch.Tensor, eps: float, groups: ops.ExpertGroups | None) -> ops.Routing:
        """Of x [T, hidden] normalised with the weights norm [hidden]. groups: how the rank's experts want what is chosen sorted, if they do."""
        spec = self._spec
        return ops.route_tokens(
            x,
            self._gate,
            spec.num_chosen,
            is_sigmoid=spec.scoring == "sigmoid",
            correction=self._correction,
            num_groups=spec.num_groups,
            num_chosen_groups=spec.num_chosen_groups,
            num_group_scores=spec.num_group_scores,
            min_sum=spec.min_sum if spec.is_normalized else None,
            scale=spec.scale,
            norm=(norm, eps),
            groups=groups,
            gate_parts=self._gate_parts,
        )


class SharedExpert:
    """An MLP that every token takes, perhaps with a gate."""

    def __init__(self, spec: MoeSpec, shared: MlpSpec, weights: Weights, norm: torch.Tensor, eps: float) -> None:
        """norm: weights of the norm of what goes into it."""
        self._norm, self._eps = norm, eps
        inner = shared.down.in_features
        self._gate_up = weights.split_rows(shared.gate_up, [Part("the shared experts' size", inner)] * 2)
        self.down = weights.split_columns(shared.down)
        self._activation = shared.activation
        own = spec.shared_gate
        self._gate = None if own is None else weights.linear(own.name, own.out_features, own.in_features)

    def into(self, x: torch.Tensor) -> torch.Tensor:
        """What `down` multiplies [T, inner] of x [T, hidden] before the norm."""
        if self._activation in ("silu", "swish"):
            y = self._gate_up.gated_after_norm(x, self._norm, self._eps)
        else:
            y = activate(self._gate_up.after_norm(x, self._norm, self._eps), self._activation)
        return y if self._gate is None else y.mul_(self._gate.after_norm(x, self._norm, self._eps).sigmoid())


class Moe:
    """Router, experts and shared experts."""

    def __init__(self, spec: MoeSpec, layer: LayerSpec, weights: Weights) -> None:
        self._ranks, self._eps = weights.ranks, layer.eps
        self._norm = weights.norm(layer.mlp_norm, layer.hidden_size, layer.norm_offset)
        self._post_norm = optional_norm(weights, layer.mlp_post_norm, layer)
        self.router = Router(spec.router, weights)
        self.experts = load_experts(spec, weights)
        self._shared = None if spec.shared is None else SharedExpert(spec, spec.shared, weights, self._norm, self._eps)

    def add(self, x: torch.Tensor, rows: Iterable[slice] = WHOLE) -> Iterable[slice]:
        """Adds to x [T, hidden] in place; rows: of x, as soon as they can be read. See `Ranks.add_product`."""
        await_rows(rows)  # the router chooses for all tokens at once
        # What shared experts make comes out of their weights while the router chooses, in memory that the router has had nothing in.
        inner, beside = (None, None) if self._shared is None else (self._shared.into(x), torch.empty_like(x))
        routing = self.router(x, self._norm, self._eps, self.experts.groups(x, self.router.num_chosen))
        if self._shared is not None and inner is not None and beside is not None:
            self._shared.down.write_to(beside, inner, is_ready=True)
        is_alone = self._post_norm is None and self._ranks.size == 1
        made = self.experts(routing, x if is_alone else None, beside)
        if not is_alone:
            add_shares(x, made, self._ranks, self._post_norm, self._eps)
        return WHOLE


def load_experts(spec: MoeSpec, weights: Weights) -> Experts:
    """The rank's own: each expert's share of inner rows, or whole experts. What it does not hold is not read."""
    ranks, count = weights.ranks, spec.router.num_experts
    own, inner = slice(0, count), slice(0, spec.inner)
    if weights.is_expert_parallel:
        own = ranks.part(count, f"{spec.router.count_key} (expert_parallel)")
    else:
        inner = ranks.part(spec.inner, spec.inner_key)
    scheme = weights.quantization.moe_quant_type
    numbers = range(own.start, own.stop)
    if scheme is not None or any(weights.checkpoint.is_quantized(part.name) for number in numbers for part in spec.expert(number)):
        return _load_stored(spec, weights, own, inner, scheme)
    num_own, size = own.stop - own.start, inner.stop - inner.start
    gate_up = weights.empty(num_own, 2 * size, spec.hidden_size)
    down = weights.empty(num_own, spec.hidden_size, size)
    for place, number in enumerate(numbers):
        gate, up, back = _read_plain(spec, weights, number)
        gate_up[place, :size] = gate[inner]
        gate_up[place, size:] = up[inner]
        down[place] = back[:, inner]
    for part, tensor in enumerate((gate_up[:, :size], gate_up[:, size:], down)):
        weights.checkpoint.watch(_plain_names(spec, numbers, part), tensor)
    return make_experts(gate_up, down, lambda x: activate(x, spec.activation), own.start, is_silu=_is_silu(spec))


def _read_plain(spec: MoeSpec, weights: Weights, number: int) -> Iterable[torch.Tensor]:
    """Gate, up and down of one expert, each as it is asked for. Of fused ones no other is read."""
    checkpoint = weights.checkpoint
    if not spec.is_fused:
        return (checkpoint.get(f"{own.name}.weight", (own.out_features, own.in_features)) for own in spec.expert(number))
    (gate_up, shape), (down, down_shape) = spec.stacks
    both = checkpoint.get_one(gate_up, shape, number)
    return both[: spec.inner], both[spec.inner :], checkpoint.get_one(down, down_shape, number)


def _plain_names(spec: MoeSpec, numbers: range, part: int) -> list[str]:
    """Of each expert's gate (0), up (1) or down (2)."""
    if spec.is_fused:
        return [spec.stacks[part == 2][0]] * len(numbers)
    return [f"{spec.expert(number)[part].name}.weight" for number in numbers]


def _load_stored(spec: MoeSpec, weights: Weights, own: slice, inner: slice, scheme: str | None) -> Experts:
    """Of quantized weights, or such as are rounded here."""

    def read(number: int) -> tuple[list[Stored], Stored]:
        if spec.is_fused:
            read = zip(spec.expert(number), _read_plain(spec, weights, number), strict=True)
            gate, up, down = (weights.hold(projection.name, own, scheme) for projection, own in read)
        else:
            gate, up, down = (weights.stored(projection, scheme) for projection in spec.expert(number))
        return [cut_rows(gate, inner), cut_rows(up, inner)], cut_columns(down, inner)

    experts = (read(number) for number in range(own.start, own.stop))  # one after the other where they are packed so
    where = f"{weights.checkpoint.directory}: {spec.prefix}"
    made = make_stored_experts(experts, weights.device, lambda x: activate(x, spec.activation), own.start, is_silu=_is_silu(spec), where=where)
    weights.most_written = max(weights.most_written, made.num_written)
    return made


def _is_silu(spec: MoeSpec) -> bool:
    return spec.activation in ("silu", "swish")
