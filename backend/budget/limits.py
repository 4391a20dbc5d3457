"""One limit for all requests of a step: where drafts are not known when it is planned, or each request takes as many rows as the one with most."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from backend.budget.costs import StepCosts
from backend.budget.forecast import Forecast, asking
from backend.budget.known import Group, Own
from backend.budget.padded import PaddedTimes

FAR_EVERY = 8
"""Trials between those of a limit far off."""
UNDRAFTED_EVERY = 4
"""Trials of which one has no drafts, where each request has as many rows as the one with most."""
MIN_GAIN = 1.03
"""Another limit has to promise this much more speed, or noise would drive the choice."""
MIN_GAIN_OF_NUMBER, MIN_GAIN_OF_MODEL, MIN_GAIN_WITHOUT_MODEL = 1.01, 1.15, 1.08
"""The same where each request has as many rows as the one with most: of another number of drafts alone; with the model drafter, which takes several
times a step's time to catch up; and without it."""
MIN_ALIKE, MIN_GAIN_SOON = 64, 1.5
"""Steps for which that holds then, unless this is gained."""
LEVELS = (0, 1, 2, 3, 5, 7, 11)
"""Numbers of drafts that steps of such rows are captured for, beside the highest: one between takes as long as the next of these."""
MAX_SHIFT = 4.0
"""How many times as much drafts are held to bring these requests as others like them, at most."""
DAMPING = 0.5
"""Its power: a request's last ten steps say less than hundreds of others' do."""
FEW, EVERY_OF_FEW, EVERY, ALIKE = 4, 4, 16, 4
"""Steps between two choices there, unless requests of another kind come, or more than one and the fourth part of them more or less: Python would take
longer to choose than the device for a small step, and where requests come and go their number is another one in every step. Of few requests each
choice that changes nothing puts the next one off by as many more."""
SETTLED = (6, 24)
"""Trials after which one of two is left out, and then three of four, if nothing else was chosen meanwhile."""
REGRET_MEMORY = 0.995
"""What is left of older steps in the regret after one more."""


class Choice(NamedTuple):
    limit: int
    is_asked: bool
    """The model drafter makes the first drafts."""
    waits: bool = False
    """No step is planned before the one before it was read, so that lookups of the host draft too."""


UNDRAFTED = Choice(0, True)
"""No drafts."""


def _levels(top: int, is_padded: bool) -> list[int]:
    """Limits to choose from, with 0."""
    return sorted({0, top, *(level for level in LEVELS if level < top)}) if is_padded else list(range(top + 1))


def _pick(speeds: Mapping[Choice, float], current: Choice) -> Choice:
    """The fastest that is enough faster than the one now."""

    def best_of(choices: Iterable[Choice]) -> Choice | None:
        return max(choices, key=lambda choice: speeds[choice], default=None)

    near = best_of(own for own in speeds if own.is_asked == current.is_asked) or current
    far = best_of(own for own in speeds if own.is_asked != current.is_asked)
    if far is not None and speeds[far] > (MIN_GAIN_OF_MODEL if far.is_asked else MIN_GAIN_WITHOUT_MODEL) * speeds[near]:
        return far
    least = MIN_GAIN_OF_NUMBER if near.waits == current.waits else MIN_GAIN
    return near if speeds[near] > least * speeds[current] else current


class Limits:
    """A limit, whether the model drafter makes the first drafts, and whether the host's lookups are waited for, by what that has brought so far."""

    def __init__(self, costs: StepCosts, padded: PaddedTimes | None) -> None:
        """padded: the times of steps, where each request has as many rows as the one with most; None: steps have the rows of their tokens."""
        self.forecast = Forecast()
        self._costs, self._padded = costs, padded
        self.chosen = Choice(-1, True)
        """Limit -1: none was chosen yet."""
        self.num_unasked = 0
        """Steps since the choice was one with the model drafter."""
        self._speeds: dict[Choice, float] = {}
        self._last: tuple[frozenset[Group], int] | None = None  # what was chosen for
        self._num_last = 0  # of how many requests
        self._age = 0  # steps since
        self._num_trials = self._num_same = 0  # since another choice was made; and choices since then
        self._num_alike = MIN_ALIKE  # steps with the model, or without it, one after the other
        self._fixed: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # tokens and seconds that a limit promised
        self._actual = [0.0, 0.0]

    def choose(self, groups: Mapping[Group, Sequence[Own]], num_requests: int, top: int, draft_seconds: float, has_prompts: bool) -> float:
        """Tokens a second of the limit chosen. top: the highest; draft_seconds: of a step, where it is exact; has_prompts: no time can be
        measured."""
        self._age += 1
        self._num_alike += 1
        self.num_unasked = 0 if self.chosen.limit and self.chosen.is_asked else self.num_unasked + 1
        wanted, every = (frozenset(groups), top), EVERY if num_requests > FEW else min(EVERY, EVERY_OF_FEW * (1 + self._num_same))
        is_alike = self._last == wanted and ALIKE * abs(num_requests - self._num_last) <= max(self._num_last, ALIKE)
        if self._padded is not None and is_alike and self._age < every:
            return self._speeds[self.chosen]
        self._last, self._num_last, self._age = wanted, num_requests, 0
        speeds = self._speeds = self._find_speeds(groups, num_requests, top, draft_seconds, has_prompts)
        before = self.chosen
        limit = min((own.limit for own in speeds if own.limit >= before.limit >= 0), default=top)
        similar = (before._replace(limit=limit), Choice(limit, before.is_asked), Choice(limit, True))
        current = next(own for own in (*similar, Choice(top, True)) if own in speeds)
        if self._padded is not None:
            found = _pick(speeds, current)
            is_soon = found.is_asked != current.is_asked and self._num_alike < MIN_ALIKE and speeds[found] < MIN_GAIN_SOON * speeds[current]
            self.chosen = current if is_soon else found
        else:
            best = max(speeds, key=lambda choice: speeds[choice])
            self.chosen = best if speeds[best] > MIN_GAIN * speeds[current] else current
        self._num_same = self._num_same + 1 if self.chosen == before else 0
        if self.chosen.is_asked != before.is_asked:
            self._num_alike = 0
        if self.chosen[1:] != before[1:]:
            self._num_trials = 0
        return speeds[self.chosen]

    def another(self, trial: int, top: int) -> Choice:
        """What to try in the place of what was chosen: mostly one draft more, or the other with the model drafter or the host's lookups, or nothing
        (what the host takes for a step without drafts is known from such steps alone); rarely any limit."""
        chosen, speeds = self.chosen, self._speeds
        levels = _levels(top, self._padded is not None)
        if trial % FAR_EVERY == 0:
            return chosen._replace(limit=levels[trial // FAR_EVERY % len(levels)])
        if trial % 2 and chosen.limit:
            others = [own for own in speeds if own.is_asked != chosen.is_asked and own.waits == chosen.waits]
            waiting = [own for own in speeds if own.waits != chosen.waits and own.is_asked == chosen.is_asked]
            found = waiting if waiting and (trial % 4 == 1 or not others) else others
            if self._padded is not None:
                return max(found, key=lambda own: speeds[own], default=UNDRAFTED)
            return chosen._replace(is_asked=chosen.is_asked != bool(others))
        if self._padded is not None and chosen.limit and trial % UNDRAFTED_EVERY == 2:
            return UNDRAFTED
        return chosen._replace(limit=next((level for level in levels if level > chosen.limit), top))

    def is_time_to_try(self) -> bool:
        """At a trial's first step."""
        self._num_trials += 1
        return self._padded is None or self._num_trials % self.rarity == 0

    @property
    def rarity(self) -> int:
        """How many times as rarely as at first something else is looked at."""
        return 1 << sum(self._num_trials > settled for settled in SETTLED)

    def _find_speeds(
        self, groups: Mapping[Group, Sequence[Own]], num_requests: int, top: int, draft_seconds: float, has_prompts: bool
    ) -> dict[Choice, float]:
        """Tokens a second."""
        found: dict[Choice, float] = {}
        padded = self._padded
        has_model = padded is not None and any(group.kind.has_model and group.is_paced for group in groups)
        may_wait = padded is not None and any(group.may_wait and group.is_paced for group in groups)
        for is_asked, waits in itertools.product((True, False) if has_model else (True,), (False, True) if may_wait else (False,)):
            expected = {}
            for group, owns in groups.items():
                is_silent = group.kind.has_model and group.is_paced and not is_asked and (not group.has_others or group.num_nodes > 0)
                count = group.num_wanted
                expected[group] = [(0.0, 0.0)] * (count + 1) if is_silent else self._expect(group, owns, is_asked, waits)
            limits = _levels(top, padded is not None)[0 if is_asked and not waits else 1 :]
            shapes, num_rows = [], []
            for limit in limits:
                rows = tokens = float(num_requests)
                asked = most = num_model = 0
                for group, owns in groups.items():
                    number = len(owns)
                    own_limit = min(limit, group.num_wanted) if group.is_paced else group.num_wanted
                    drafted, accepted = expected[group][own_limit]
                    rows += number * drafted
                    tokens += number * accepted
                    most = max(most, own_limit * (group.num_nodes or 1))
                    if group.kind.has_model and (is_asked or not group.is_paced) and own_limit:
                        asked, num_model = asked + number, max(num_model, group.num_nodes or min(group.num_model, own_limit))
                shapes.append((most, num_model, asked, tokens))
                num_rows.append(rows)
            if padded is None:
                times = [self._costs.verify(rows) + (draft_seconds if limit else 0.0) for limit, rows in zip(limits, num_rows)]
            else:
                times = padded.steps(num_requests, shapes, waits)
            for limit, (*_, tokens), seconds in zip(limits, shapes, times):
                found[Choice(limit, is_asked, waits)] = tokens / seconds if seconds else 0.0
                if is_asked and not waits and (padded is not None or not has_prompts):
                    self._fixed[limit][0] += tokens
                    self._fixed[limit][1] += seconds
        return found

    def _expect(self, group: Group, owns: Sequence[Own], is_asked: bool, waits: bool) -> list[tuple[float, float]]:
        """Drafts and accepted drafts of one request by limit: as it was with others like these, and where steps are padded as much more or less as
        these have had lately."""
        if group.num_nodes:
            return [(0.0, 0.0), (float(group.num_nodes), sum(own.means.model for own in owns) / len(owns))]
        has_model, has_host = group.kind.has_model and (is_asked or not group.is_paced), waits and group.may_wait and group.is_paced
        found = self.forecast.expect(asking(group.kind, has_model, has_host), group.num_wanted)
        if self._padded is None or (has_host and has_model) or not group.num_model or not group.has_others:
            return found
        lately = sum(own.means.gain if has_model else own.means.host if has_host else own.means.lookup for own in owns) / len(owns)
        usual = found[min(max(self.chosen.limit, 0), group.num_wanted) if has_model and self.chosen.is_asked else group.num_wanted][1]
        shift = min(max(lately / usual, 1 / MAX_SHIFT), MAX_SHIFT) ** DAMPING if usual else 1.0
        return [(drafted, shift * accepted) for drafted, accepted in found]

    @property
    def is_fresh(self) -> bool:
        """The choice was made for this step: it is one of those by which limits are held against what was done."""
        return self._age == 0

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
