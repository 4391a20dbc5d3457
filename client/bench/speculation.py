"""What speculation did during a run: the server's counters before and after it."""

from __future__ import annotations

import ssl
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from client.loopback import open_url

PREFIX = "foretoken_spec_decode_num_"
Counters = dict[tuple[str, str, int], float]
"""(name, method, position; -1 where a counter has none) -> value."""


def read_counters(url: str, timeout: float = 10.0, context: ssl.SSLContext | None = None) -> Counters:
    """The server's speculation counters. context: of https:// URLs. Raises OSError when the address does not answer, ValueError when it answers
    something else."""
    with open_url(url, timeout, context) as response:
        text = response.read().decode()
    counters: Counters = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                counters[name, sample.labels.get("method", ""), int(sample.labels.get("position", -1))] += sample.value
    return dict(counters)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One method's drafts between two readings."""

    method: str
    num_drafts: int
    """Steps of a request that verified at least one draft."""
    draft_tokens: int
    accepted_tokens: int
    per_position: list[float]
    """Accepted share of what was drafted at each position."""

    @property
    def rate(self) -> float:
        """Accepted share of all drafted tokens."""
        return self.accepted_tokens / self.draft_tokens

    @property
    def length(self) -> float:
        """Tokens that a step with drafts emits: those accepted, and the target's own."""
        return 1 + self.accepted_tokens / self.num_drafts

    def as_dict(self) -> dict[str, Any]:
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_acceptance_rate": self.rate,
            "spec_decode_acceptance_length": self.length,
            "spec_decode_per_position_acceptance_rates": self.per_position,
        }


def compare(before: Counters, after: Counters) -> list[Acceptance]:
    """What every method that drafted did in between. Raises ValueError when the server started anew meanwhile."""
    if any(after.get(key, 0.0) < value for key, value in before.items()):
        raise ValueError("the server's counters went back: it started anew during the run")
    gained = {key: int(value - before.get(key, 0.0)) for key, value in after.items()}
    found = []
    for method in sorted({method for _, method, _ in gained}):
        drafts = gained.get(("drafts", method, -1), 0)
        if not drafts:
            continue
        drafted = {p: n for (name, m, p), n in gained.items() if name == "draft_tokens_per_pos" and m == method and n}
        shares = [gained.get(("accepted_tokens_per_pos", method, p), 0) / drafted[p] for p in sorted(drafted)]
        found.append(Acceptance(method, drafts, gained["draft_tokens", method, -1], gained.get(("accepted_tokens", method, -1), 0), shares))
    return found
