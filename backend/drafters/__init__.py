"""Drafters: what proposes tokens for the target to verify. Nothing outside this package names a method."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from backend.budget import Ability, Chain, CostClass, DraftBudget
from backend.core import Batch, Draft, DraftFaults, Request, Scheduled, Speculation
from backend.drafters.calls import DraftService
from backend.drafters.hybrid import HybridDrafter
from backend.drafters.loading import cost_class, count_block_rows, count_tokens_after_step, load_step_drafter, step_drafter_identity, tap_width
from backend.drafters.lookup import LookupDrafter, StepDrafts
from backend.drafters.ngram import PredictionLookup
from backend.drafters.protocol import HostDrafter, Lookup
from backend.errors import RequestError
from backend.speculative_config import AUTO, MAX_SPECULATIVE_TOKENS, MTP_STRATEGIES, STEP_METHODS, SpeculativeConfig

if TYPE_CHECKING:
    from backend.drafters.suffix import SuffixLookup
    from backend.kv_store import KvStore

__all__ = [
    "AddedCorpus",
    "Drafters",
    "Placement",
    "Placements",
    "cost_class",
    "count_block_rows",
    "count_tokens_after_step",
    "find_place",
    "load_step_drafter",
    "make_placements",
    "step_drafter_identity",
    "tap_width",
]

logger = logging.getLogger(__name__)

_LOOKUP, _PREDICTION, _PREDICTED = "ngram", "prediction", "with_prediction"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the drafts of a method are made."""

    has_model: bool = False
    """The step's model drafter makes the first ones."""
    has_lookup: bool = False
    """The step's own lookup makes the others."""
    host: str = ""
    """Key of the host drafter that makes or lengthens them; "": none."""
    waits: bool = True
    """The host drafter is asked at every step: the request is in no step until the one before it was read."""


class AddedCorpus(NamedTuple):
    """What became of texts for the suffix trees."""

    num_texts: int
    """That have tokens."""
    num_tokens: int
    num_all_tokens: int
    """With those that were there."""
    max_tokens: int


Placements = dict[tuple[str, str], Placement]
"""By method and, of the model drafter, its strategy."""


def make_placements(config: SpeculativeConfig, *, has_step_drafter: bool) -> Placements:
    """Of every method that requests may choose."""
    lookups = [method for method in config.loaded_methods if method in (_LOOKUP, "suffix")]
    found: Placements = {(name, ""): Placement(has_lookup=True) if name == _LOOKUP else Placement(host=name) for name in lookups}
    if model := config.model_method:
        for strategy in ("default", *(f"with_{name}" for name in lookups)):
            own_lookup, is_alone = strategy == f"with_{_LOOKUP}", strategy == "default"
            in_step = Placement(has_model=True, has_lookup=own_lookup, host="" if own_lookup or is_alone else f"{model} {strategy}")
            found[model, strategy] = in_step if has_step_drafter else Placement(host=model)
    if AUTO in config.loaded_methods:
        others = any(name != _LOOKUP for name in lookups)
        if config.model_method and not has_step_drafter:
            found[AUTO, ""] = Placement(host=AUTO)
        else:  # the host's lookups join where no step is under way
            found[AUTO, ""] = Placement(bool(config.model_method), has_lookup=True, host=AUTO if others else "", waits=False)
    return found


def find_place(placements: Placements, speculation: Speculation) -> Placement:
    """Where a request's drafts are made."""
    strategy = speculation.mtp_strategy if speculation.method in STEP_METHODS else ""
    return placements.get((speculation.method, strategy), _NOWHERE)


class Drafters:
    """Which drafter serves a request, and those on the host as one."""

    lookup_name = _LOOKUP
    """As in `token_sources`."""

    def __init__(
        self,
        config: SpeculativeConfig,
        vocab_size: int,
        *,
        has_step_drafter: bool,
        make_service: Callable[[], DraftService],
        fingerprint: str,
        encode: Callable[[str], list[int]],
        is_layout_exact: bool = True,
        cost_class: CostClass = CostClass.PER_DRAFT,
        max_model_drafts: int = MAX_SPECULATIVE_TOKENS,
    ) -> None:
        """Loads every method that requests may choose.

        make_service: reaches the drafter's model in another process, called only when a method needs one; fingerprint: of the
        tokenizer, for token ids that outlive this process; encode: of texts by the same; is_layout_exact: a step computes no more rows than
        it has tokens; cost_class, max_model_drafts: of the step's model drafter. Raises ConfigError, ModelError.
        """
        self._vocab_size, self._encode = vocab_size, encode
        self.model_name = config.model_method
        """As in `token_sources`; "": there is no model drafter."""
        self.faults = DraftFaults()
        self._max_model_drafts = max_model_drafts
        self.budget = DraftBudget(self._describe, is_exact=is_layout_exact, drafter=cost_class)
        self._step_drafts: StepDrafts | None = None
        self._has_trees = config.tree is not None
        self._host: dict[str, HostDrafter] = {}
        self._placements = make_placements(config, has_step_drafter=has_step_drafter)
        lookups = _make_lookups(config, fingerprint, encode, vocab_size)
        self._suffix: SuffixLookup | None = lookups.get("suffix")  # type: ignore[assignment]
        self._host[_PREDICTION] = LookupDrafter(PredictionLookup(config.max_ngram_size))
        for name in lookups:
            if host := self._placements[name, ""].host:
                self._host[host] = LookupDrafter(lookups[name])
        if self.model_name:
            self._load_model_hosts(config, lookups, has_step_drafter, make_service)
        if AUTO in config.loaded_methods and AUTO not in self._host and self._placements[AUTO, ""].host:
            self._step_drafts = self._step_drafts or StepDrafts()
            beside = dict.fromkeys(MTP_STRATEGIES, tuple(lookup for name, lookup in lookups.items() if name != _LOOKUP))
            self._host[AUTO] = HybridDrafter(self._step_drafts, beside, self.budget, self.model_name, asks=False)

    def _load_model_hosts(
        self, config: SpeculativeConfig, lookups: dict[str, Lookup], is_in_step: bool, make_service: Callable[[], DraftService]
    ) -> None:
        """What is on the host of the model drafter's strategies: all of it, or the lookups that lengthen the step's drafts."""
        strategies = {f"with_{name}": (lookup,) for name, lookup in lookups.items()}
        if not is_in_step:
            from backend.drafters.remote import RemoteDrafter

            remote = RemoteDrafter(make_service(), config.draft_sampling)
            self._host[self.model_name] = HybridDrafter(remote, strategies, self.budget, self.model_name, asks=True)
            if AUTO in config.loaded_methods:
                every = dict.fromkeys(MTP_STRATEGIES, tuple(lookups.values()))
                self._host[AUTO] = HybridDrafter(remote, every, self.budget, self.model_name, asks=True)
            return
        self._step_drafts = StepDrafts()
        predicted = dict.fromkeys(MTP_STRATEGIES, (PredictionLookup(config.max_ngram_size),))
        self._host[f"{self.model_name} {_PREDICTED}"] = HybridDrafter(self._step_drafts, predicted, self.budget, self.model_name, asks=False)
        for strategy, lookup in strategies.items():
            if host := self._placements[self.model_name, strategy].host:
                self._host[host] = HybridDrafter(self._step_drafts, {strategy: lookup}, self.budget, self.model_name, asks=False)

    def place(self, request: Request) -> Placement:
        found = find_place(self._placements, request.speculation)
        if not request.prediction_ids or found is _NOWHERE:
            return found
        # Its drafts come from the prediction; those of a model in the step too, where there is one.
        if found.has_model and not self._has_trees:
            return Placement(has_model=True, host=f"{self.model_name} {_PREDICTED}")
        return Placement(host=_PREDICTION)

    def _describe(self, request: Request) -> Ability:
        place, steps = self.place(request), request.speculation.num_model_steps
        is_remote = bool(self.model_name) and place.host in (self.model_name, AUTO) and not place.has_model
        has_model = place.has_model or is_remote
        # On a server with trees, requests without one have no drafts of the model.
        num_model = request.speculation.num_nodes if self._has_trees else min(steps, MAX_SPECULATIVE_TOKENS if is_remote else self._max_model_drafts)
        return Ability(
            model=self.model_name if has_model else "",
            num_model=num_model if has_model else 0,
            lookup=self.lookup_name if place.has_lookup else "",
            has_host=bool(place.host) and (place.host != self.model_name or request.speculation.mtp_strategy != "default"),
            may_wait=bool(place.host) and not place.waits,
            is_remote=is_remote,
        )

    def attach(self, store: KvStore) -> None:
        for drafter in self._host.values():
            drafter.attach(store)

    def add_corpus(self, contents: Sequence[object]) -> AddedCorpus:
        """Texts, or lists of token ids, that suffix is to search from now on: all of them or none. From any thread, which it keeps for as long as
        tokenizing takes. Raises RequestError, ConfigError (both the request's fault) or EngineError."""
        from backend.drafters.corpus import CALL, encode_corpus

        if self._suffix is None:
            raise RequestError(f"{CALL}: the method suffix is not loaded: start the server with it as method, or among request_methods")
        texts = encode_corpus(contents, self._encode, self._vocab_size)
        return AddedCorpus(len(texts), sum(map(len, texts)), self._suffix.add_corpus(texts), self._suffix.max_corpus_tokens)

    # A drafter that fails costs its drafts, never a request: every call of one is guarded.

    def start(self, request: Request) -> None:
        key = self.place(request).host
        if key:
            self._guard(key, "start", lambda: self._host[key].start(request))

    def stop(self, request: Request) -> None:
        self.budget.stop(request)
        key = self.place(request).host
        if key:
            self._guard(key, "stop", lambda: self._host[key].stop(request))

    def close(self) -> None:
        for key, drafter in self._host.items():
            self._guard(key, "close", drafter.close)

    def begin_step(self, batch: Batch) -> None:
        """Before each step, with all of its entries."""
        for key, drafter in self._host.items():
            self._guard(key, "begin_step", lambda drafter=drafter: drafter.begin_step(batch))  # type: ignore[misc]

    def foresee(self, request: Request) -> None:
        """See `HybridDrafter.foresee`."""
        key = self.place(request).host
        host = self._host.get(key)
        if isinstance(host, HybridDrafter):
            self._guard(key, "foresee", lambda: host.foresee(request))

    def listen(self, request: Request) -> None:
        """See `HybridDrafter.listen`."""
        key = self.place(request).host
        host = self._host.get(key)
        if isinstance(host, HybridDrafter):
            self._guard(key, "listen", lambda: host.listen(request))

    def put_step_drafts(self, request: Request, token_ids: list[int], sources: list[str], chain: Chain) -> None:
        """What the step made for the request's next one, and what is known of each draft."""
        if self._step_drafts is not None:
            self._step_drafts.put(request, token_ids, sources, chain)

    def _guard(self, key: str, what: str, action: Callable[[], object]) -> bool:
        try:
            action()
            return True
        except Exception:
            logger.exception("drafter %s failed in %s", key, what)
            self.faults.failures[key.split()[0]] += 1
            return False

    def propose(self, entries: Sequence[Scheduled]) -> Draft:
        """A row of drafts per entry, of the host's drafters; empty for those that take none. Drafts are optional: a drafter that fails leaves
        them out."""
        draft = Draft([[] for _ in entries], [[] for _ in entries], [() for _ in entries])
        by_host: dict[str, list[int]] = {}
        for b, entry in enumerate(entries):
            key = self.place(entry.request).host
            if key and entry.max_drafts:
                by_host.setdefault(key, []).append(b)
        for key, own in by_host.items():
            method = key.split()[0]
            part = Draft([], [])

            def ask(key: str = key, own: list[int] = own) -> None:
                nonlocal part
                part = self._host[key].propose([entries[b] for b in own], self.faults)

            if not self._guard(key, "propose", ask):
                self.faults.undrafted[method] += len(own)
                continue
            for i, b in enumerate(own):
                if self._is_good(method, entries[b], part.token_ids[i]):
                    draft.token_ids[b], draft.sources[b], draft.evidence[b] = part.token_ids[i], part.sources[i], part.evidence[i]
                    if i in part.probs:
                        draft.probs[b] = part.probs[i]
        return draft

    def _is_good(self, method: str, entry: Scheduled, token_ids: Sequence[int]) -> bool:
        if not token_ids:
            return True
        is_known = min(token_ids) >= 0 and max(token_ids) < self._vocab_size
        if is_known and len(token_ids) <= entry.max_drafts:
            return True
        if not is_known:
            bad = next(t for t in token_ids if not 0 <= t < self._vocab_size)
            what = f"token {bad}; the vocabulary has ids 0 to {self._vocab_size - 1}"
        else:
            what = f"{len(token_ids)} tokens; {entry.max_drafts} were asked for"
        logger.error("request %r: drafter %s proposed %s: it goes on without these drafts", entry.request.group_id, method, what)
        self.faults.invalid[method] += 1
        return False


_NOWHERE = Placement()


def _make_lookups(config: SpeculativeConfig, fingerprint: str, encode: Callable[[str], list[int]], vocab_size: int) -> dict[str, Lookup]:
    lookups: dict[str, Lookup] = {}
    for method in config.loaded_methods:
        if method == _LOOKUP:
            from backend.drafters.ngram import NgramLookup

            assert config.min_ngram_size is not None
            lookups[method] = NgramLookup(config.max_ngram_size, config.min_ngram_size)
        elif method == "suffix":
            from backend.drafters.corpus import read_corpus
            from backend.drafters.suffix import SuffixLookup

            lookups[method] = SuffixLookup(
                max_tree_depth=config.suffix_decoding_max_tree_depth,
                max_cached_requests=config.suffix_decoding_max_cached_requests,
                max_spec_factor=config.suffix_decoding_max_spec_factor,
                min_token_prob=config.suffix_decoding_min_token_prob,
                cache_path=config.suffix_decoding_cache_path,
                fingerprint=fingerprint,
                corpus=read_corpus(config.suffix_decoding_corpus, encode, vocab_size),
            )
    return lookups
