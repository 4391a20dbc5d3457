"""The step's own lookup beside those of the host that are waited for: whether it still brings anything."""

from __future__ import annotations

MEMORY = 0.998
"""What is left of older drafts after those of one more request."""
LEAST_KNOWN = 200.0
"""Drafts that stood, before anything is said."""
MIN_SHARE = 0.02
"""Of the drafts that stood that the step's lookup made: for fewer, each request is planned, reported and weighed twice."""
EVERY = 24
"""Steps of which one has it all the same: text changes."""


class BesideHost:
    """Called by the engine thread only: `begin` before each step."""

    def __init__(self) -> None:
        self._all = self._by_step = 0.0  # drafts that stood, and those of them that the step's lookup made
        self._number = 0  # of steps
        self.is_left_out = False
        """The step that is planned does without it, for requests that wait for the host's."""

    def begin(self, waits_alone: bool) -> None:
        """waits_alone: lookups of the host are waited for, and no model drafts."""
        self._number += 1
        brings_little = self._all >= LEAST_KNOWN and self._by_step < MIN_SHARE * self._all
        self.is_left_out = waits_alone and brings_little and self._number % EVERY != 0

    def note(self, num_accepted: int, is_step: bool) -> None:
        """Drafts of a request that stood, where both had been asked; is_step: the step's lookup made them."""
        self._all = MEMORY * self._all + num_accepted
        self._by_step = MEMORY * self._by_step + (num_accepted if is_step else 0)
