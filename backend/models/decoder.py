"""A decoder of any family: embedding, layers, final norm, head (tied or not), as its spec says. Fulfils `backend.models.Model`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from backend.kv_store import CacheSpec
from backend.models.cache_scales import Scales, read_cache_scales
from backend.models.decoder_layer import AttentionKinds, DecoderLayer, find_kinds
from backend.models.embedding import Embedding
from backend.models.head import Head
from backend.models.layers import ATTENTION, Wanted, Weights, own_heads
from backend.models.loader import Checkpoint
from backend.models.rope import Angles, RopeTables
from backend.models.spec import DecoderSpec
from backend.parallel.ranks import WHOLE, Ranks, await_rows
from backend.quantization_config import QuantizationConfig
from kernels import ops


@dataclass(slots=True)
class Passing:
    """A forward of T tokens on its way through the layers."""

    x: torch.Tensor
    """[T, hidden], changed in place."""
    angles: list[Angles]
    """Of each of the model's tables."""
    entering: dict[int, torch.Tensor]
    """See `Decoder.forward`."""
    coming: Iterable[slice] = WHOLE
    """Rows of x, as soon as they can be read."""


class Decoder:
    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        context_len: int,
        *,
        only_head: bool = False,
        is_expert_parallel: bool = False,
        quantization: QuantizationConfig | None = None,
        reads_cache_scales: bool = False,
        draft_ids: torch.Tensor | None = None,
        only_drafts: bool = False,
    ) -> None:
        """context_len: the longest context that will be served; only_head: `embed` and `logits` work, `forward` has no layers to run;
        quantization: how plain weights are rounded; reads_cache_scales: those of keys and values, which are to be kept in e4m3;
        draft_ids [N] int64: tokens that `draft_scores` scores; only_drafts: nothing else is to be scored."""
        self.vocab_size, self.hidden_size, self.max_model_len = spec.vocab_size, spec.hidden_size, spec.max_model_len
        self.context_len = context_len
        self.num_layers, self.eos_token_ids, self.ranks = len(spec.layers), spec.eos_token_ids, ranks
        own = spec.layers[0].attention
        self.value_dim = own.value_dim
        self.heads = own_heads(own, ranks)
        self._token_shape, self._num_planes = own.token_shape(self.heads.num_kv), own.num_planes
        self.eps = spec.layers[-1].eps
        scale = spec.embedding_scale
        weights = Weights(checkpoint, dtype, device, ranks, quantization, is_expert_parallel=is_expert_parallel)
        embedding = weights.whole(f"{spec.embedding}.weight", (self.vocab_size, self.hidden_size))
        if not spec.is_tied and checkpoint.tolerated is not None:  # a token that is no number costs the requests that have it, and no others
            checkpoint.tolerated.add(f"{spec.embedding}.weight")
        rounded = None if scale is None else torch.tensor(scale, dtype=dtype).item()  # as models were trained with it
        self._embedding = Embedding(embedding, ranks, rounded, spec.is_tied)
        is_shared = not self._embedding.is_split
        self._head = self._draft_head = Head(spec, weights, embedding, draft_ids if only_drafts else None, keeps_embedding=is_shared)
        self.draft_ids = None if draft_ids is None else draft_ids.to(device)
        if draft_ids is not None and not only_drafts:
            self._draft_head = Head(spec, weights, embedding, draft_ids, keeps_embedding=is_shared)
        del embedding
        self.layers: list[DecoderLayer] = []
        self._tables: list[RopeTables] = []
        self._table_of: list[int] = []
        """Of each layer, its place among the tables: layers that turn alike share one."""
        checkpoint.release()
        self.stored_scales: Scales | None = None
        if not only_head:
            self._build_layers(spec, weights, context_len)
        if reads_cache_scales:
            self.stored_scales = read_cache_scales(spec, weights)
        self.norm = weights.norm(spec.norm, self.hidden_size, spec.norm_offset)
        self.num_multiplied = weights.num_multiplied
        self.num_written_weights = max(weights.most_written, self._head.num_written_weights, self._draft_head.num_written_weights)

    @property
    def attention_kinds(self) -> AttentionKinds:
        return find_kinds(self.layers)

    def _build_layers(self, spec: DecoderSpec, weights: Weights, context_len: int) -> None:
        places: dict[tuple, int] = {}
        for layer in tqdm(spec.layers, desc="Loading the model", unit="layer", disable=None):  # on terminals alone
            self.layers.append(DecoderLayer(layer, weights, context_len))
            weights.checkpoint.release()
            key = layer.attention.turning
            if key not in places:
                places[key] = len(places)
                self._tables.append(RopeTables(*key[:2], context_len, weights.dtype, weights.device, key[2]))
            self._table_of.append(places[key])

    def cache_specs(self, dtype: torch.dtype) -> list[CacheSpec]:
        return [CacheSpec(ATTENTION, self._token_shape, dtype, self._num_planes * self.num_layers)]

    def scale_cache(self, scales: Scales) -> None:
        """Keys and values are kept in e4m3 from now on."""
        for layer, own in zip(self.layers, scales, strict=True):
            layer.attention.cache_scales = own

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: list[tuple[torch.Tensor, ...]],
        plan: ops.Plan,
        wanted: Wanted | None = None,
        entering: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        passing = self.enter(token_ids, positions, {} if entering is None else entering)
        last = self.num_layers - 1
        for number in range(last):
            query = self.ask(passing, number, slots, cache[number])
            self.answer(passing, number, self.attend(number, query, cache[number], plan))
        return self.finish(passing, self.ask(passing, last, slots, cache[last]), cache[last], plan, wanted)

    # A forward in pieces, between which layers attend: what a graph of them depends on is but how many tokens there are.

    def enter(self, token_ids: torch.Tensor, positions: torch.Tensor, entering: dict[int, torch.Tensor]) -> Passing:
        return Passing(self.embed(token_ids), [tables.at(positions) for tables in self._tables], entering)

    def ask(self, passing: Passing, number: int, slots: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The queries [T, H, D] of layer `number`, which the states have come to; what it keeps of the tokens goes to their slots."""
        rows, passing.coming = passing.coming, WHOLE
        if number in passing.entering:
            await_rows(rows)
            rows, passing.entering[number] = WHOLE, passing.x.clone()  # layers add to it in place
        return self.layers[number].attention.append(passing.x, passing.angles[self._table_of[number]], slots, cache, rows)

    def attend(
        self, number: int, query: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: ops.Plan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What layer `number`'s queries [T, H, D] find [T, H, V], in `out` if that is given."""
        return self.layers[number].attention.attend(query, cache, plan, out)

    def answer(self, passing: Passing, number: int, found: torch.Tensor) -> None:
        """The states past layer `number`, whose queries found this [T, H, V]."""
        passing.coming = self.layers[number].finish(passing.x, found)

    def finish(self, passing: Passing, query: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: ops.Plan, wanted: Wanted | None) -> torch.Tensor:
        """From the last layer's queries on -> what `forward` gives."""
        if wanted is not None:
            query, passing.x, plan = query[wanted.rows], passing.x[wanted.rows], wanted.plan
        if len(query):
            self.answer(passing, self.num_layers - 1, self.attend(self.num_layers - 1, query, cache, plan))
        return self.leave(passing)

    def leave(self, passing: Passing) -> torch.Tensor:
        """The states past the last layer, normalised."""
        await_rows(passing.coming)
        passing.coming = WHOLE
        if self.num_layers in passing.entering:
            passing.entering[self.num_layers] = passing.x
        return ops.rms_norm(passing.x, self.norm, self.eps)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(token_ids)

    def embeddings(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        return self._embedding.rows(token_ids)

    def has_embedding(self, weight: torch.Tensor) -> bool:
        return self._embedding.is_same(weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden)

    def can_share_rows(self, num_rows: int) -> bool:
        return self._head.can_share(num_rows)

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.own_logits(hidden)

    def draft_scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._draft_head.logits(hidden)
