"""What grammars allow in a planned step: a mask for each position of the rows whose request has one.

Where the newest tokens of such a request are in a step under way, the next one's forward need not wait for them: it is launched with the drafts
that the step itself makes, and the masks come when the tokens are known, before anything is chosen. A request whose grammar forces much waits
instead: forced tokens are drafts, and each spares it a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from backend.core import Request
from backend.grammar import Matcher, fill_masks
from backend.planned import Known, Masked, PlannedStep
from backend.speculative_config import SpeculativeConfig
from backend.step.options import Options
from kernels.structs import MASK

MAX_FORCED_SHARE = 0.5
"""Of an answer's tokens: with more of them forced, a request that sits every other step out for their sake is faster."""
SHARE_MEMORY = 0.9
"""Weight of a token's predecessors against it."""


class StepGrammars:
    """A part of the planner."""

    def __init__(self, config: SpeculativeConfig, max_masked_drafts: int, drafts_forced: bool) -> None:
        """max_masked_drafts: of a request with a grammar; drafts_forced: tokens that a grammar forces are drafted."""
        self._is_normal, self._max_masked_drafts, self._drafts_forced = config.accept_policy == "normal", max_masked_drafts, drafts_forced

    def may_follow(self, request: Request, known: Known, limit: int) -> bool:
        """Whether a request's masks may come after the forward of its step has begun. limit: most drafts.

        Drafts that its grammar forbids are verified then, and rejected, for the target cannot choose them. For strategies that do not go by that
        alone they have to be cut before.
        """
        if known.options & Options.TOP_P or not self._is_normal:
            return False
        if limit and (known.place.host or len(known.drafted.sources) > self._max_masked_drafts):
            return False
        return not limit or not self._drafts_forced or known.forced_share <= MAX_FORCED_SHARE

    def put(self, step: PlannedStep, known: Mapping[str, Known]) -> None:
        """Writes the masks, or that the plan awaits them."""
        plan, begin = step.plan, 0
        for b, (entry, verified) in enumerate(zip(step.entries, step.verified)):
            if entry.request.grammar is not None and entry.emits:
                step.masked.append(own := Masked(b, 1 + len(verified.sources), entry.request.num_steps_ahead > 0))
                plan.fields[MASK, b] = begin
                begin += own.num_masks
                plan.awaits_masks |= own.is_late
        if step.masked:
            plan.options |= Options.MASKS
            if not plan.awaits_masks:
                plan.masks = self.fill(step, known)

    def fill(self, step: PlannedStep, known: Mapping[str, Known]) -> np.ndarray:
        """The masks [M, W] int32, when all that requests emitted before the step is known. Those of requests that have ended allow all."""
        asked: list[tuple[Matcher, Sequence[int]]] = []
        for row, _, is_late in step.masked:
            request, verified = step.entries[row].request, step.verified[row]
            own, drafts = known.get(request.request_id), verified.token_ids or []
            if own is not None:
                step.grammars[own.index] = request.grammar, len(request.token_ids)
                if is_late:
                    drafts = own.next_drafts[: len(verified.sources)]
                    if self._drafts_forced:  # those that it would have been given, had it waited
                        _, forced = request.grammar.look_ahead(drafts, request.speculation.max_drafts)
                        self.note(own, min(1, len(forced)), 1)
            asked.append((request.grammar, drafts if own is not None else []))
        return fill_masks(asked, [count for _, count, _ in step.masked])[0]

    @staticmethod
    def note(known: Known, num_forced: int, num_tokens: int) -> None:
        """So many of a request's next tokens are drafts that its grammar alone makes."""
        kept = SHARE_MEMORY**num_tokens
        known.forced_share = kept * known.forced_share + (1 - kept) * num_forced / num_tokens
