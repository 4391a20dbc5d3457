"""What the engine asks of drafters on the host, what the step asks of those that run in it, and what both ask of lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from backend.budget import Chain
from backend.core import Batch, Draft, DraftFaults, Request, Scheduled
from backend.kv_store import CacheSpec, KvStore
from backend.models.decoder_layer import AttentionKinds
from backend.models.spec import BlockView
from kernels import ops

HIDDEN = "hidden"
"""The tap: the target's state of each token after its final norm, or what the step's drafter makes of several states (`StepDrafter.tap`)."""
ATTENTION = "drafter.attention"
"""The cache spec of a step drafter's keys and values."""


class HostDrafter(Protocol):
    """Proposes tokens when a step is planned, so it needs to know every token of its requests. Called by the engine thread only."""

    def attach(self, store: KvStore) -> None:
        """The paged memory is made."""
        ...

    def start(self, request: Request) -> None:
        """A request was admitted; its prompt is known."""
        ...

    def begin_step(self, batch: Batch) -> None:
        """A step begins: its pages are given out, and what it says of copies and fresh pages is done."""
        ...

    def propose(self, entries: Sequence[Scheduled], faults: DraftFaults) -> Draft:
        """At most `max_drafts` tokens for each entry, to follow its last known token."""
        ...

    def stop(self, request: Request) -> None:
        """A request ended."""
        ...

    def close(self) -> None:
        """The engine was shut down."""
        ...


@dataclass(slots=True)
class DrafterRows:
    """T packed tokens that the drafter computes; each [T] int64."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    """Of its keys and values."""
    state_slots: torch.Tensor
    """Of its layers' states, and of the tap."""
    before_slots: torch.Tensor
    """The same of the tokens before these; any slot before a first token."""
    plan: ops.Plan | None
    """None: the drafter has no attention. Of a block: of layers whose rows see those before them, if there are any."""
    block_plans: Mapping[BlockView, ops.Plan] = field(default_factory=dict)
    """Of a block, by what rows see of it."""


class BlockPass(Protocol):
    """One forward that makes several drafts of each request, after `StepDrafter.advance`. B requests, N rows of each."""

    mask_token_id: int
    """The token of all rows but one that begins with the newest token."""
    first: int
    """Where a request's rows begin: 0: at its newest token; 1: after it."""
    views: frozenset[BlockView]
    """What its layers see."""

    @property
    def block_heads(self) -> ops.Heads:
        """Of its attention."""
        ...

    @property
    def block_kinds(self) -> AttentionKinds:
        """Of the same."""
        ...

    def count_rows(self, num_drafts: int) -> int:
        """N of a step that makes so many drafts; 0: no forward is needed."""
        ...

    def compute(self, rows: DrafterRows | None, states: list[torch.Tensor], num_drafts: int) -> list[torch.Tensor]:
        """The states that all drafts are chosen from, of rows [B * N], request by request, and of what `advance` made; no rows: N is 0."""
        ...

    def judge(self, states: list[torch.Tensor], step: int) -> torch.Tensor | None:
        """How likely draft number `step` is to stand where those before it do [B] float32; None: the drafter does not say."""
        ...


class StateKeeper(Protocol):
    """What a drafter keeps of the target's states alone: in its own keys and values, as soon as the target has computed them."""

    def keep(self, entering: Mapping[int, torch.Tensor], positions: torch.Tensor, kv_slots: torch.Tensor) -> None:
        """Of tokens [T]: entering[layer] [T, hidden] before layers of the target; positions and the drafter's KV slots [T]."""
        ...


class CandidateMemory(Protocol):
    """What a drafter remembers in place of computing it: which tokens may follow."""

    def learn(self, token_ids: torch.Tensor, logits: torch.Tensor, is_own: torch.Tensor | None = None) -> None:
        """The target's logits [R, V] after tokens [R] int64, before any parameter acts. A token may be there several times. is_own [R]: others are
        rows of nobody, whatever their tokens; None: there are none."""
        ...

    def recall(self, states: list[torch.Tensor], count: int) -> torch.Tensor:
        """What may follow tokens whose states [R, n] `advance` or `extend` made -> [R, count] int32, the likeliest first; -1: it does not know."""
        ...


class StepDrafter(Protocol):
    """A model drafter that runs in the step, on every rank: it computes the tokens that the step computed, then drafts."""

    @property
    def block(self) -> BlockPass | None:
        """Where one forward makes all drafts; None: one is made after the other."""
        ...

    @property
    def keeper(self) -> StateKeeper | None: ...

    attends_drafts: bool
    """Its drafts see one another by keys and values: those of a tree are computed as a tree. It has one layer for all, or another for the first."""

    @property
    def memory(self) -> CandidateMemory | None:
        """None: it computes what may follow."""
        ...

    @property
    def heads(self) -> ops.Heads | None:
        """Of its attention over known tokens; None: it has none."""
        ...

    @property
    def attention_kinds(self) -> AttentionKinds:
        """Of the same."""
        ...

    @property
    def max_drafts(self) -> int:
        """That it can make in a step."""
        ...

    @property
    def tap_width(self) -> int:
        """Numbers that are kept of each token of the target for it; 0: none."""
        ...

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """The layers of the target whose input it looks at; num_layers stands for the last one's output."""
        ...

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What is kept [T, tap_width] of tokens whose states are hidden [T, hidden] after the final norm, and entering[layer] before layers."""
        ...

    def cache_specs(self, dtype: torch.dtype) -> list[CacheSpec]:
        """What it keeps of each token beside the tap."""
        ...

    def attach(self, store: KvStore) -> None: ...

    def advance(self, rows: DrafterRows, last: torch.Tensor) -> list[torch.Tensor]:
        """Computes known tokens [T] -> states [B, hidden] at rows last [B], in a list of its own kind."""
        ...

    def extend(self, rows: DrafterRows, states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        """Computes draft number step - 1 [B] -> the states that draft number `step` is chosen from."""
        ...

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        """What draft number `step` is chosen by [B, V]."""
        ...


class Lookup(Protocol):
    """Finds a continuation in what was written before."""

    name: str
    """As in `token_sources`."""

    def start(self, request: Request, is_soon: bool = True) -> None:
        """is_soon: it is likely to be asked for the request's first steps; else what takes long may wait until it is."""
        ...

    def lookup(self, request: Request, drafts: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens to follow the request's tokens and `drafts`, which another drafter proposed."""
        ...

    def lookup_judged(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[list[int], Chain]]:
        """As `lookup` for each of the requests, with what is known of each draft: its survival estimate."""
        ...

    def stop(self, request: Request) -> None: ...

    def close(self) -> None: ...
