"""One limit for all requests of a step: where drafts are not known when it is planned, or each request takes as many rows as the one with most."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from backend.budget.costs import StepCosts
from backend.budget.forecast import Forecast, Kind

FAR_EVERY = 8
"""Trials between those of a limit far off."""
MIN_GAIN = 1.03
"""Another limit has to promise this much more speed, or noise would drive the choice."""
REGRET_MEMORY = 0.995
"""What is left of older steps in the regret after one more."""


class Group(NamedTuple):
    """Requests of a step that are alike."""

    kind: Kind
    num_wanted: int
    """Most drafts that they want."""
    num_model: int
    """Those that the model drafter makes for them at most."""
    has_others: bool
    """Lookups draft for them as well."""
    is_paced: bool
    """The limit holds for them."""


class Limits:
    """A limit, and whether the model drafter makes the first drafts, by what limits have brought so far."""

    def __init__(self, costs: StepCosts, is_exact: bool) -> None:
        self.forecast = Forecast()
        self._costs, self._is_exact = costs, is_exact
        self.chosen = (-1, True)
        """The limit (-1: none was chosen yet), and whether the model is asked."""
        self._has_both = False
        self._fixed: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # tokens and seconds that a limit promised
        self._actual = [0.0, 0.0]

    def choose(self, groups: Counter[Group], num_requests: int, top: int, draft_seconds: float, has_prompts: bool) -> float:
        """Tokens a second of the limit chosen. top: the highest; draft_seconds: of a step, where it is exact; has_prompts: no time can be
        measured."""
        speeds = self._speeds(groups, num_requests, top, draft_seconds, has_prompts)
        level, is_asked = self.chosen
        current = (min(level, top) if level >= 0 else top, is_asked)
        if current not in speeds:
            current = (current[0], True)
        best = max(speeds, key=lambda choice: speeds[choice])
        self.chosen = best if speeds[best] > MIN_GAIN * speeds[current] else current
        self._has_both = len({is_asked for _, is_asked in speeds}) > 1
        return speeds[self.chosen]

    def another(self, trial: int, top: int) -> tuple[int, bool]:
        """What to try in the place of what was chosen: mostly one draft more, or the other with the model drafter; rarely any limit."""
        level, is_asked = self.chosen
        if trial % FAR_EVERY == 0:
            return trial // FAR_EVERY % (top + 1), is_asked
        if trial % 2 and level:
            return level, is_asked != self._has_both
        return min(level + 1, top), is_asked

    def _speeds(self, groups: Counter[Group], num_requests: int, top: int, draft_seconds: float, has_prompts: bool) -> dict[tuple[int, bool], float]:
        """Tokens a second by limit, and whether the model drafter makes the first drafts."""
        found: dict[tuple[int, bool], float] = {}
        has_model = not self._is_exact and any(group.kind.has_model and group.is_paced for group in groups)
        for is_asked in (True, False) if has_model else (True,):
            expected = {}
            for kind, count, _, others, is_paced in groups:
                own = kind._replace(has_model=kind.has_model and (is_asked or not is_paced))
                is_silent = kind.has_model and is_paced and not is_asked and not others
                expected[kind, count] = [(0.0, 0.0)] * (count + 1) if is_silent else self.forecast.expect(own, count)
            for limit in range(0 if is_asked else 1, top + 1):
                rows = tokens = float(num_requests)
                asked = most = num_model = 0
                for (kind, count, steps, _, is_paced), number in groups.items():
                    own_limit = min(limit, count) if is_paced else count
                    drafted, accepted = expected[kind, count][own_limit]
                    rows += number * drafted
                    tokens += number * accepted
                    most = max(most, own_limit)
                    if kind.has_model and (is_asked or not is_paced) and own_limit:
                        asked, num_model = asked + number, max(num_model, min(steps, own_limit))
                if self._is_exact:
                    seconds = self._costs.verify(rows) + (draft_seconds if limit else 0.0)
                else:
                    seconds = self._costs.verify(num_requests * (1 + most)) + self._costs.draft(num_model, asked)
                found[limit, is_asked] = tokens / seconds if seconds else 0.0
                if is_asked and not has_prompts:
                    self._fixed[limit][0] += tokens
                    self._fixed[limit][1] += seconds
        return found

    def note_actual(self, num_tokens: int, seconds: float) -> None:
        """Of a step: tokens emitted, and what its rows and drafts take by the times measured."""
        self._actual[0] += num_tokens
        self._actual[1] += seconds
        for pair in (self._actual, *self._fixed.values()):
            pair[0], pair[1] = REGRET_MEMORY * pair[0], REGRET_MEMORY * pair[1]

    @property
    def regret(self) -> float:
        """How much more speed the best fixed limit would have promised over the last steps, as a share; below 0: less. Both by measured times."""
        fixed = [tokens / seconds for tokens, seconds in self._fixed.values() if seconds > 0]
        if not fixed or not self._actual[1]:
            return 0.0
        return max(fixed) * self._actual[1] / self._actual[0] - 1
