"""The engine's data: requests, one step's batch, drafts, verdicts and what goes back to the caller.

Shape letters: B requests, K drafted tokens, R logits rows, V vocabulary. This module imports no sibling but what requests ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch


FinishReason = Literal["stop", "length", "cancelled", "timeout"]

NEVER = 1 << 20
"""A score that no lookup reaches."""
MAX_CHARACTERS_PER_TOKEN = 64
"""No real text is longer in its context: what is, is refused before megabytes are tokenized."""
MAX_TIMEOUT = 10**9
"""Seconds: thirty years, which clocks can be asked to wait for."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How one request speculates: the engine's configuration with the request's own choices over it."""

    method: str = "none"
    num_speculative_tokens: int = 0
    verify_strategy: str = "target_match"
    num_model_steps: int = 1
    """Drafts that the model drafter makes; the others are looked up."""
    mtp_strategy: str = "default"
    num_nodes: int = 0
    """Drafts of a tree, on paths of num_speculative_tokens at most; 0: they are a chain."""
    is_adaptive: bool = True
    """Its number of drafts follows measured times and acceptance; else it is fixed."""

    @property
    def max_drafts(self) -> int:
        """Of a step."""
        return self.num_nodes or self.num_speculative_tokens

    def depth_of(self, num_drafts: int) -> int:
        """Drafts on the longest path of so many, at most."""
        return min(num_drafts, self.num_speculative_tokens) if self.num_nodes else num_drafts


@dataclass(slots=True)
class SpeculationStats:
    """One request's counts. Acceptance rate = accepted / drafted; mean accepted length = 1 + accepted / drafts."""

    steps: int = 0
    """Target steps that emitted."""
    drafts: int = 0
    """Steps that verified at least one draft."""
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    """Drafts that did not stand, by who made them (a `token_sources` name)."""

    def add(self, num_drafted: int, num_accepted: int, num_emitted: int, depth: int, refused: Sequence[str] = ()) -> None:
        """depth: drafts on the longest path, of which a chain has all; refused: who made each draft that did not stand."""
        self.steps += 1
        for name in refused:
            self.refused[name] = self.refused.get(name, 0) + 1
        self.drafts += num_drafted > 0
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.emitted += num_emitted
        if not depth:
            return
        while len(self.accepted_per_position) < depth:
            self.accepted_per_position.append(0)
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def as_dict(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "mean_accepted_length": 1 + self.accepted / self.drafts if self.drafts else 1.0,
            "accept_ratio": 1 - self.steps / self.emitted if self.emitted else 0.0,
            "accepted_per_position": list(self.accepted_per_position),
            "refused": dict(self.refused),
        }


def kv_slots(page_ids: Sequence[int], begin: int, end: int, page_size: int, stride: int) -> list[int]:
    """Where a plane keeps tokens begin to end: page * stride + offset, with the plane's stride (`KvStore.stride`)."""
    return [page_ids[i // page_size] * stride + i % page_size for i in range(begin, end)]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine. The scheduler alone changes what is below `params`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    speculation: Speculation = Speculation()
    seed: int = 0
    index: int = 0
    """Which of the n completions."""
    group_id: str = ""
    """The caller's id, shared by its n completions."""
    priority: int = 0
    """Lower goes first."""
    deadline: float | None = None
    """time.monotonic() after which it ends with `timeout`."""
    stop_ids: frozenset[int] = frozenset()
    """End-of-text ids and stop_token_ids that end it."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Any = None
    """Its `backend.grammar.Matcher`, where its text has to have a form."""
    may_call: bool = False
    """Its text has the special tokens of calls."""
    begins_thinking: bool = False
    """Its prompt ends with `<think>`: the answer begins with what the model thinks."""
    prediction_ids: tuple[int, ...] = ()
    """What the answer is expected to be like: drafts are looked up there."""
    arrival: int = 0
    num_tokens_after_step: int = 0
    """Past those of a step, for what a drafter makes at its end."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output. The last one is never in the KV cache."""
    num_computed_tokens: int = 0
    """Known tokens that were computed, or are in a step under way."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache gave, at the first admission."""
    num_preemptions: int = 0
    num_steps_ahead: int = 0
    """Steps under way that emit for it: launched, and not read yet."""
    num_tokens_ahead: int = 0
    """Tokens that those emit at most."""
    page_ids: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the leading full pages that are registered in the prefix cache."""
    prompt_hashes: list[bytes] = field(default_factory=list)
    """Those of its leading full pages, as far as somebody has computed them."""
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    is_prefill_only: bool = False
    """It ends here with its prompt: another node goes on with it."""
    is_remote: bool = False
    """Another node is to compute its prompt."""
    hand_off: HandOff | None = None
    """What that node's last step brought, until the first step here."""
    drafting: Any = None
    """What the planner of drafts knows of it (`backend.budget.known.Own`): it is asked several times in each step of each request."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        self.group_id = self.group_id or self.request_id

    @property
    def signed_seed(self) -> int:
        """The 64-bit seed as an int64 holds it."""
        seed = self.seed & (2**64 - 1)
        return seed - 2**64 if seed >= 2**63 else seed

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """The log-probabilities of its prompt are wanted, and not sent yet: all of it has to be computed."""
        return self.params.echo and self.params.logprobs is not None and self.num_output_tokens == 0

    @property
    def is_decoding(self) -> bool:
        """At most its last known token is neither computed nor on its way."""
        return len(self.token_ids) - self.num_computed_tokens <= 1


@dataclass(slots=True)
class Scheduled:
    """One request's share of a step: `num_tokens` known tokens from position `begin` on, and room for drafts."""

    request: Request
    num_tokens: int
    max_drafts: int = 0
    begin: int = 0
    """Where steps are under way, the newest token of a decoding request lies further on: only the worker knows where."""
    emits: bool = True
    """False for a chunk that leaves some of the prompt for later."""
    is_decoding: bool = False
    """Its token is the request's newest one, whatever that is once the steps under way have ended."""
    is_short: bool = False
    """There were no pages for drafts, nor for those that a drafter makes at the step's end beyond the first."""


@dataclass(slots=True)
class Batch:
    """What one step computes.

    Before it, `page_copies` (source, target, leading tokens that count) are read, then `fresh_pages` are cleared, then the copies
    are written: a page may be source, fresh and target at once. Clearing keeps what one request left behind, which may not even
    be finite, from another that only multiplies it by zero.
    """

    entries: list[Scheduled] = field(default_factory=list)
    page_copies: list[tuple[int, int, int]] = field(default_factory=list)
    fresh_pages: list[int] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    fetches: list[Request] = field(default_factory=list)
    """Requests that got pages for their whole prompt, which another node is to compute."""
    is_short: bool = False
    """A request got no pages, and could not take others' because steps are under way."""

    def __bool__(self) -> bool:
        return bool(self.entries)


class Evidence(NamedTuple):
    """What is known of one draft."""

    source: str
    """Who made it (a `token_sources` name)."""
    bucket: int
    """Drafts of a source in one bucket are alike."""
    guess: float
    """The drafter's own: the chance that it stands if those before it do. How many of its bucket stood corrects it."""


Chain = Sequence[Evidence]
"""Of a request's drafts, one after the other."""


class Branches(NamedTuple):
    """Of a request's drafts, where they were a tree."""

    parents: Sequence[int]
    """Of each the number of the draft before it, which is smaller; -1: the newest token."""
    path: list[int]
    """Numbers of those that were accepted, one after the other."""


@dataclass(slots=True)
class Draft:
    """Proposed tokens, one row per entry of the batch; rows of entries that take no drafts are empty."""

    token_ids: list[list[int]]
    """[B][<= K]"""
    sources: list[list[str]]
    """[B][<= K]: who drafted each token (a `token_sources` name)."""
    evidence: list[Chain] = field(default_factory=list)
    """[B][<= K]: what is known of each; no rows: no more than the sources say."""
    probs: dict[int, torch.Tensor] = field(default_factory=dict)
    """By entry: [k, V] that its first k drafts were drawn from. Drafts without are certain (one-hot)."""


@dataclass(slots=True)
class DraftFaults:
    """What went wrong with drafters, by method. Requests go on without the drafts."""

    failures: Counter[str] = field(default_factory=Counter)
    """Times a drafter raised or could not be reached."""
    invalid: Counter[str] = field(default_factory=Counter)
    """Proposals that were no good: too long, or with ids outside the vocabulary."""
    undrafted: Counter[str] = field(default_factory=Counter)
    """Steps of a request that were decoded plainly because its drafter was down."""


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability of one emitted token and of the likeliest ones, natural logarithm."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]


@dataclass(slots=True)
class Outcome:
    """What a step brought one request: accepted drafts and one token more, or nothing for an unfinished prompt."""

    token_ids: list[int] = field(default_factory=list)
    num_drafts: int = 0
    """That were verified."""
    num_accepted: int = 0
    is_broken: bool = False
    """The model's scores are not all finite, and there is no answer."""
    scores: np.ndarray | None = None
    """Log-probabilities of the emitted tokens, as `backend.step.scores.read_scores` takes them."""
    prompt_scores: np.ndarray | None = None
    """Of a request that scores its prompt: those of the prompt's tokens after each one computed in this step."""
    next_drafts: list[int] = field(default_factory=list)
    """What the step drafted for the next one, where the host asked for it."""
    next_parents: list[int] = field(default_factory=list)
    """Of each of them, where they are a tree, the number of the draft before it; -1: the newest token. Empty: a chain."""
    draft_chances: list[float] | None = None
    """How likely the model drafter held each of its leading drafts' choices to be: the greatest probability there, of a tree's draft its own.
    Empty: it made none, or was not asked; None: the step does not say."""
    lookup_score: int = 0
    """How well the lookup's match was at the step's end; 0: none, or not asked for."""
    num_drafter_tokens: int = 0
    """Leading tokens that the step's model drafter has computed."""


@dataclass(slots=True)
class HandOff:
    """What a prompt's last step brought on the node that computed it, for the node that goes on with the request."""

    outcome: Outcome
    """Its first token, with scores, and the drafts for the next step."""
    sources: list[str] = field(default_factory=list)
    """Who made each of those drafts."""
    draft_probs: torch.Tensor | None = None
    """[k, V] float32 that the first k drafts were drawn from. The others are certain."""


@dataclass(slots=True)
class Delta:
    """What one step adds to one completion; the last one carries `finish_reason`, or `error`."""

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """Of token_ids; with `echo` the first delta has those of the prompt's tokens before them, from the second on."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_thought_tokens: int = 0
    """Of those, the ones up to `</think>` where the answer begins with what the model thinks."""
    begins_thinking: bool = False
    stats: SpeculationStats | None = None
    prompt_text: str | None = None
    prompt_token_ids: list[int] | None = None
    """Both for `echo`, in the first delta."""

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None or self.error is not None
