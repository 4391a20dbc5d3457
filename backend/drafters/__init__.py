"""Drafters: what proposes tokens for the target to verify. One Protocol; nothing outside this package names a method."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from backend.config import SpeculativeConfig
from backend.core import Batch, Draft, DraftFaults, Request, Scheduled
from backend.drafters.calls import DraftService
from backend.drafters.hybrid import HybridDrafter
from backend.drafters.lookup import LookupDrafter
from backend.drafters.ngram import NgramLookup
from backend.drafters.protocol import Drafter, Lookup

if TYPE_CHECKING:
    from backend.drafters.mtp import MtpDrafter

logger = logging.getLogger(__name__)


def load_drafters(
    config: SpeculativeConfig, vocab_size: int, max_tokens: int, make_service: Callable[[], DraftService], fingerprint: str
) -> Drafters:
    """Every method that requests may choose.

    max_tokens: tokens that a model drafter catches up on in one step; make_service: runs the drafter's model, called only when a
    method needs one; fingerprint: of the tokenizer, for token ids that outlive this process. Raises ConfigError, ModelError.
    """
    loaded: dict[str, Drafter] = {}
    lookups: dict[str, Lookup] = {}
    for method in config.loaded_methods:
        if method == "ngram":
            assert config.min_ngram_size is not None
            lookups[method] = NgramLookup(config.max_ngram_size, config.min_ngram_size)
        elif method == "suffix":
            from backend.drafters.suffix import SuffixLookup

            lookups[method] = SuffixLookup(
                max_tree_depth=config.suffix_decoding_max_tree_depth,
                max_cached_requests=config.suffix_decoding_max_cached_requests,
                max_spec_factor=config.suffix_decoding_max_spec_factor,
                min_token_prob=config.suffix_decoding_min_token_prob,
                cache_path=config.suffix_decoding_cache_path,
                fingerprint=fingerprint,
            )
    loaded |= {name: LookupDrafter(lookup) for name, lookup in lookups.items()}
    if "mtp" in config.loaded_methods:
        from backend.drafters.mtp import MtpDrafter

        model = MtpDrafter(make_service(), config.draft_sampling, max_tokens)
        loaded["mtp"] = HybridDrafter(model, {f"with_{name}": lookup for name, lookup in lookups.items()})
        return Drafters(loaded, vocab_size, model)
    return Drafters(loaded, vocab_size)


class Drafters:
    """The loaded drafters as one: sends each entry of a batch to the drafter that its request chose."""

    def __init__(self, loaded: dict[str, Drafter], vocab_size: int, model_drafter: MtpDrafter | None = None) -> None:
        self._loaded = loaded
        self._vocab_size = vocab_size
        self.faults = DraftFaults()
        self.taps = tuple(dict.fromkeys(tap for drafter in loaded.values() for tap in drafter.taps))
        self.page_entries = [entry for drafter in loaded.values() for entry in drafter.page_entries]
        self.model_drafter = model_drafter

    def attach(self, num_pages: int, page_size: int, taps: dict[str, torch.Tensor]) -> None:
        for drafter in self._loaded.values():
            drafter.attach(num_pages, page_size, taps)

    def start(self, request: Request) -> None:
        if drafter := self._loaded.get(request.speculation.method):
            drafter.start(request)

    def stop(self, request: Request) -> None:
        if drafter := self._loaded.get(request.speculation.method):
            drafter.stop(request)

    def close(self) -> None:
        for drafter in self._loaded.values():
            drafter.close()

    def begin_step(self, batch: Batch) -> None:
        """Before each step, with all of its entries."""
        for drafter in self._loaded.values():
            drafter.begin_step(batch)

    def propose(self, entries: Sequence[Scheduled]) -> Draft:
        """A row of drafts per entry, empty for those that take none. Drafts are optional: a drafter that fails leaves them out."""
        draft = Draft([[] for _ in entries], [[] for _ in entries])
        for method, drafter in self._loaded.items():
            own = [b for b, e in enumerate(entries) if e.max_drafts and e.request.speculation.method == method]
            if not own:
                continue
            try:
                part = drafter.propose([entries[b] for b in own], self.faults)
            except Exception:
                logger.exception("drafter %s failed: %d requests go on without its drafts", method, len(own))
                self.faults.failures[method] += 1
                self.faults.undrafted[method] += len(own)
                continue
            draft.is_behind |= part.is_behind
            for i, b in enumerate(own):
                if self._is_good(method, entries[b], part.token_ids[i]):
                    draft.token_ids[b], draft.sources[b] = part.token_ids[i], part.sources[i]
                    if i in part.probs:
                        draft.probs[b] = part.probs[i]
        return draft

    def _is_good(self, method: str, entry: Scheduled, token_ids: Sequence[int]) -> bool:
        bad = next((t for t in token_ids if not 0 <= t < self._vocab_size), None)
        if bad is None and len(token_ids) <= entry.max_drafts:
            return True
        if bad is not None:
            what = f"token {bad}; the vocabulary has ids 0 to {self._vocab_size - 1}"
        else:
            what = f"{len(token_ids)} tokens; {entry.max_drafts} were asked for"
        logger.error("request %r: drafter %s proposed %s: it goes on without these drafts", entry.request.group_id, method, what)
        self.faults.invalid[method] += 1
        return False
