"""What the steps that run now are like, and what drafting is worth in them: rows against tokens, a model's time against what it brings.

Tokens are priced by the time of the step that they come in: drafts are worth their time where the step has a higher speed with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from backend.budget.costs import StepCosts
from backend.budget.known import NO_LOOKUPS, PRIOR_VALUE, Beside, Own
from backend.budget.survival import has_probability
from backend.budget.times import bucket_of
from backend.core import Chain

PRIOR_MADE, PRIOR_CHANCE = 2.0, 0.7
"""Before anything is measured: drafts that the model makes in a step, and the chance of one more."""
SMOOTHING = 0.05
"""Share of the newest step in means."""
CHANCE_SMOOTHING = 0.01
FOLLOWING_MEMORY = 0.995
"""What is left after one more step of the time that a model took to follow texts. Prompts come in few steps; and what was not worth it at twice the
price is tried again after 140 (0.999 took the model from chat at four requests for too long: 0.92 of the best fixed choice, not 0.94)."""
PRIOR_TRUST, MIN_TRUST, TRUST_RATE = 0.7, 0.2, 0.02
"""Of the power of a greatest probability: small drafters are right more often than they say."""
CHEAP = 0.01
"""Share of a step's time that lookups may take whatever they bring."""
SLOPE = 4
"""Times as many rows tell what one more takes."""


class Prices:
    """Of one engine's steps. Seconds and tokens; `begin` comes before each step, `observe` after it."""

    def __init__(self, costs: StepCosts, is_exact: bool = True) -> None:
        """is_exact: steps have as many rows as tokens; else rows and the model's drafts take their time whether a request wants them or not, so that
        tokens alone are weighed, and `begin` and `observe` are not called."""
        self._costs, self._is_exact = costs, is_exact
        self.speed = 0.0
        """Tokens a second that the choice promises."""
        self.row_seconds = 0.0
        """Of one row more."""
        self.is_model_worth = True
        """Whether the model drafter is worth its time for all that may ask it together."""
        self.draft_seconds = 0.0
        """Of a request's step, on average."""
        self._num_requests = 1  # in the step
        self._num_asking = 0  # those of them that a model drafter may be worth its time for
        self._asking_value = self._asking_gain = 0.0  # what it brings them, in tokens, and beyond lookups
        self._asking_seconds = 0.0  # of one of them more
        # By requests in a step: what the model took to follow texts, and the requests that asked it meanwhile.
        self._following: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._lookup_seconds = 0.0  # of a request's step without a model
        self._num_made = self._num_checked = PRIOR_MADE  # drafts that the model makes in a step, and that are verified of a request's
        self._mean_tokens, self._mean_drafts = PRIOR_VALUE, PRIOR_MADE  # of a request's step: emitted, and drafts that were verified
        # A step in which one request has no drafts, and the others what they have on average: rows, seconds beside those of rows.
        self._rows, self._rest = 1.0, 0.0
        self._times: list[float] = []  # of that step with so many drafts of the one request, as they are asked for
        self._other_tokens = 0.0
        self._chance = PRIOR_CHANCE
        self._num_asked = 1  # in the last step that asked any: a lookup in the step may draft in the model's place
        self.trust = PRIOR_TRUST
        """The power of the model's greatest probability at a draft that says how likely it stands."""

    # -- before a step ------------------------------------------------------------------------------------------------

    def begin(self, num_requests: int, able: Sequence[Own]) -> None:
        """able: those of the step's requests that a model may draft for."""
        verify, others = self._costs.verify, num_requests - 1
        self.row_seconds = (verify(SLOPE * num_requests) - verify(num_requests)) / ((SLOPE - 1) * num_requests)
        self._rows, self._rest, self._times = num_requests + others * self._mean_drafts, others * self.draft_seconds, []
        self._other_tokens = others * self._mean_tokens
        asking = [own for own in able if self.model_gain(own) > 0]  # by the step before
        self._num_requests, self._num_asking = num_requests, len(asking)
        self._asking_value, self._asking_gain = sum(own.means.model for own in asking), sum(own.means.gain for own in asking)
        self._weigh_model(able)

    def _weigh_model(self, able: Sequence[Own]) -> None:
        """What the model adds to lookups, against all that it takes and at the speed of a step that has lookups alone."""
        number, made = self._num_asking, max(1, round(self._num_made))
        tokens, rows = (self._num_requests + sum(column) for column in zip(NO_LOOKUPS, *(own.mean_beside for own in able)))
        before = self._costs.verify(rows)
        more, asked = self._following[bucket_of(self._num_requests)]
        seconds = self._costs.draft(made, number) + number * more / max(1.0, asked)
        seconds += self._costs.verify(rows + number * self._num_checked) - before
        self.is_model_worth = not before or self._asking_gain * before > seconds * tokens
        half = len(able) // 2
        one = (self._costs.draft(made, len(able)) - self._costs.draft(made, half)) / max(1, len(able) - half)
        self._asking_seconds = one + self._num_checked * self.row_seconds

    @property
    def usual_speed(self) -> float:
        """Of a step whose requests all have what they have on average."""
        return self._speed_with(self._mean_tokens - 1, self.draft_seconds)

    def _time_of(self, num_drafts: int) -> float:
        times = self._times
        while len(times) <= num_drafts:
            times.append(self._costs.verify(self._rows + len(times)) + self._rest)
        return times[num_drafts]

    def _speed_with(self, gain: float, seconds: float) -> float:
        """Tokens a second of a step in which one request has `gain` accepted drafts after so many seconds more, and the others what they have on
        average."""
        plain = self._time_of(0)
        return (1 + gain + self._other_tokens) / max(plain + seconds, 1e-9) if plain else 0.0

    def model_worth(self, own: Own) -> float:
        """What the model's drafts for a request bring beyond their cost, in tokens, as they were when it was asked. How many it makes of them is
        seen as it goes (`least_standing`).

        Worth: the step has a higher speed with them than without. It is this request's speed that counts, not what the server had lately: text that
        is hard to draft takes as many tokens, however fast other text went. Where lookups promised more a step earlier, it is the speed that they
        bring.
        """
        return self._beyond_cost(own, own.means.model) if self._is_exact else own.means.model

    def model_gain(self, own: Own, alone: float = 0.0) -> float:
        """The same of what they bring beyond lookups' drafts of the same step; alone: how likely they are made for nothing."""
        return self._beyond_cost(own, (1 - alone) * own.means.gain)

    def _beyond_cost(self, own: Own, gain: float) -> float:
        seconds = self._asking_seconds
        return gain - max(self._speed_with(gain, seconds), self._speed_with(own.promised / 2, 0.0)) * seconds

    def worth(self, survivals: Sequence[float], enough: float = float("inf")) -> float:
        """The same of drafts that are there, as many leading ones as bring most, and one at least: below 0 where not even that one is worth its
        row. By the time of whole steps, since the first rows may take longer than later ones. enough: whether there is more is not asked."""
        if not survivals or not self._is_exact:
            return sum(survivals)
        self._time_of(len(survivals))
        times, tokens, gain, best = self._times, 1 + self._other_tokens, 0.0, float("-inf")
        plain = times[0]
        for survival, whole in zip(survivals, times[1:]):
            gain += survival
            found = gain - (tokens + gain) / whole * (whole - plain) if plain else gain
            if found > best:
                best = found
                if best >= enough:
                    break
        return best

    def count_worth(self, survivals: Sequence[float]) -> Beside:
        """Of drafts that are there, those that are worth their rows at the usual speed."""
        least = self.usual_speed * self.row_seconds
        kept = [survival for survival in survivals if survival > least]
        return Beside(sum(kept), len(kept))

    def are_lookups_worth(self, own: Own) -> bool:
        """Whether the lookups of a request without a model bring more than the time that they take."""
        is_cheap = self._lookup_seconds * self._num_requests < CHEAP * self._costs.verify(self._num_requests)
        return is_cheap or own.means.lookup > self.speed * self._lookup_seconds

    @property
    def least_standing(self) -> float:
        """Requests for which all drafts so far have to stand for one draft more of each to be worth the model's time."""
        asking, number = max(1, self._num_asking), max(1, min(self._num_asking, self._num_asked))
        first = self._costs.draft(1, number)
        # Hopeful: where no step has made several for long, what they took then is not held against one more now.
        one = min((self._costs.draft(1 + more, number) - first) / more for more in (1, 2, 3))
        speed = self._speed_with(self._asking_value / asking, self._asking_seconds)  # of a step with them: those with lookups' may be faster
        return speed * (max(0.0, one) + self.row_seconds) / self._chance

    # -- after a step -------------------------------------------------------------------------------------------------

    def note_model(self, num_right: int, made: Chain, num_checked: float) -> None:
        """Of a request: the model's drafts that were accepted, those of it that were verified, and how many more were verified
        than lookups alone would have had."""
        for place, evidence in enumerate(made[: num_right + 1]):
            is_right = place < num_right
            self._chance += CHANCE_SMOOTHING * (is_right - self._chance)
            if has_probability(evidence):
                self.trust += TRUST_RATE * (evidence.guess**self.trust - is_right)
        self.trust = min(max(self.trust, MIN_TRUST), 1 / MIN_TRUST)
        self._num_checked += SMOOTHING / max(1, self._num_asking) * (num_checked - self._num_checked)

    def observe_draft(self, num_model: int, num_asked: int, seconds: float, ends: Sequence[float] = ()) -> None:
        self._costs.add_draft(num_model, num_asked, seconds, ends)
        self._num_made += SMOOTHING * (num_model - self._num_made)
        self._num_asked = num_asked

    def observe(self, num_requests: int, outcomes: Sequence[tuple[int, int]], seconds: float | None) -> None:
        """outcomes: of requests that may have drafts, those verified and accepted; seconds: of drafting, None: not that of such a step."""
        num_drafts, num_tokens = (sum(column) / num_requests for column in zip(*outcomes, (0, num_requests)))
        self._mean_drafts += SMOOTHING * (num_drafts - self._mean_drafts)
        self._mean_tokens += SMOOTHING * (num_tokens - self._mean_tokens)
        if seconds is not None:
            self.draft_seconds += SMOOTHING * (seconds / num_requests - self.draft_seconds)

    def observe_beside(
        self, num_requests: int, outcomes: Sequence[tuple[int, int]], num_model: int, num_asked: int, draft_ends: Sequence[float]
    ) -> None:
        """Of a step with prompts, of which the others are told. The model's first draft comes after it has followed them: it takes what each of the
        others does."""
        if num_asked and len(draft_ends) > 1:
            one = (draft_ends[-1] - draft_ends[0]) / (len(draft_ends) - 1)
            self.observe_draft(num_model, num_asked, one * num_model, [one * number for number in range(1, num_model + 1)])
        self.observe(num_requests, outcomes, self._costs.draft(num_model, num_asked))

    def observe_lookups(self, num_requests: int, seconds: float) -> None:
        """Drafting of so many requests without a model."""
        self._lookup_seconds += SMOOTHING * (seconds / num_requests - self._lookup_seconds)

    def observe_following(self, num_requests: int, num_lookups: int, num_asked: int, seconds: float) -> None:
        """Of every step: what drafting took beyond the time of the drafts that were made, with so many lookups in it."""
        own = self._following[bucket_of(num_requests)]
        if self.is_model_worth:
            own[0] = FOLLOWING_MEMORY * own[0] + max(0.0, seconds - num_lookups * self._lookup_seconds)
            own[1] = FOLLOWING_MEMORY * own[1] + num_asked
        else:  # it follows little, which says nothing of what it would take
            own[0] *= FOLLOWING_MEMORY
