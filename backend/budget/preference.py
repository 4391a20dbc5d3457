"""Whether a lookup of the host is so often preferred to the model's drafts that the model need not be asked."""

from __future__ import annotations

from backend.budget.known import Own

SURE = 0.8
"""Share of steps with such a promise in which a lookup was preferred, from which on the model is not asked by requests with fixed counts
either: its drafts would be left aside."""
SMOOTHING = 0.1
"""Share of the newest step in how often a lookup is preferred to the model, by what lookups promised in the step before, once there were some."""


class Preference:
    """Called by the engine thread only."""

    def __init__(self) -> None:
        self._shares: dict[int, tuple[float, int]] = {}  # by promise; of so many steps, one of them a prior

    def note(self, own: Own, promise: int, is_alone: bool) -> None:
        """How often a lookup comes to be preferred says whether the model should be asked, by what lookups promised a step earlier.

        promise: what they do now; is_alone: one was preferred.
        """
        if own.was_asked:
            before, count = self._shares.get(own.promised, (0.0, 1))
            self._shares[own.promised] = before + max(SMOOTHING, 1 / (count + 1)) * (is_alone - before), count + 1
        own.promised = promise

    def share(self, own: Own) -> float:
        """Of steps in which a lookup is preferred, by what lookups promised the request last."""
        return self._shares.get(own.promised, (0.0, 0))[0]

    def is_sure(self, own: Own) -> bool:
        return self.share(own) > SURE
