"""Block drafters in the step (DFlash, DSpark): one forward makes the states of all drafts; a head may add what the draft before says of each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from backend.drafters.protocol import ATTENTION, BlockPass, CandidateMemory, DrafterRows, StateKeeper
from backend.kv_store import CacheSpec, KvStore
from backend.models.decoder_layer import AttentionKinds
from backend.models.dflash import Dflash


class BlockDrafter:
    """A StepDrafter, its StateKeeper and its BlockPass.

    A block is as long as the most drafts of a step, however many a step wants: rows that see one another make other drafts of a shorter one.
    """

    heads, tap_width, first = None, 0, 0
    attention_kinds: AttentionKinds = frozenset()
    memory: CandidateMemory | None = None
    attends_drafts = False

    def __init__(self, model: Dflash) -> None:
        spec = model.spec
        self._model, self.max_drafts = model, model.max_drafts
        self.mask_token_id, self.tapped_layers = spec.mask_token_id, spec.tapped_layers
        self.block_heads, self.block_kinds = model.heads, model.attention_kinds
        self.views = frozenset(spec.views)
        self._planes: tuple[torch.Tensor, ...] = ()

    @property
    def block(self) -> BlockPass:
        return self

    @property
    def keeper(self) -> StateKeeper:
        return self

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        raise AssertionError("what a block drafter looks at is kept in its own keys and values")

    def cache_specs(self, dtype: torch.dtype) -> list[CacheSpec]:
        return [CacheSpec(ATTENTION, self._model.token_shape, dtype, self._model.num_planes)]

    def attach(self, store: KvStore) -> None:
        self._planes = tuple(store.planes(ATTENTION))

    def keep(self, entering: Mapping[int, torch.Tensor], positions: torch.Tensor, kv_slots: torch.Tensor) -> None:
        self._model.keep(entering, positions, kv_slots, self._planes)

    def advance(self, rows: DrafterRows, last: torch.Tensor) -> list[torch.Tensor]:
        """The newest tokens: all that comes before them is kept."""
        return [rows.token_ids[last]]

    def count_rows(self, num_drafts: int) -> int:
        return self._model.num_rows

    def compute(self, rows: DrafterRows | None, states: list[torch.Tensor], num_drafts: int) -> list[torch.Tensor]:
        """Scores [B, K, drafter's vocabulary] and states [B, K, hidden] of the block, and what the Markov head makes of the newest tokens."""
        assert rows is not None
        made = self._model.forward(rows.token_ids, rows.positions, rows.kv_slots, self._planes, rows.block_plans)
        (newest,), first = states, self._model.num_skipped
        hidden = made.view(len(newest), -1, made.shape[-1])[:, first : first + num_drafts].contiguous()
        scores = self._model.score(hidden.flatten(0, 1)).view(len(newest), num_drafts, -1)
        markov = self._model.markov
        return [scores, hidden] if markov is None else self._mix([scores, hidden], newest, markov.begin(len(newest)), 0)

    def _mix(self, block: list[torch.Tensor], token_ids: torch.Tensor, state: torch.Tensor, step: int) -> list[torch.Tensor]:
        """The block with the Markov head's part of draft number `step`: what scores are made of, the token before, the state."""
        markov = self._model.markov
        assert markov is not None
        embedded = markov.embed(token_ids)
        mixed, state = markov.mix(embedded, block[1][:, step], state)
        return [*block[:2], mixed, embedded, state]

    def extend(self, rows: DrafterRows, states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        return states if self._model.markov is None else self._mix(states, rows.token_ids, states[4], step)

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        scores, markov = states[0][:, step], self._model.markov
        return self._model.spread((scores if markov is None else scores + markov.score(states[2])).contiguous())

    def judge(self, states: list[torch.Tensor], step: int) -> torch.Tensor | None:
        return self._model.judge(states[1][:, step], states[3] if self._model.markov is not None else None)
