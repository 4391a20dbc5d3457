"""Seconds from one step to the next where each request has as many rows as the one with most drafts, and a step is planned while another runs.

So it is on a GPU. The device's time is what events say at the ends of phases; the host's is what it is busy for a step. Steps with prompts are
measured apart: there is more to launch, and where requests come and go there are hardly any others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from backend.budget.costs import CostClass, StepCosts
from backend.budget.times import Times

SMOOTHING, SMOOTHING_OF_SHARE = 0.05, 0.02
"""Share of the newest step in means, and in that of steps with prompts, which come in bursts."""

MAX_SHARE = 0.98
"""Of steps with prompts, so that it can be said what it would be with fewer tokens."""


class PaddedStep(NamedTuple):
    """What such a step was like."""

    most_drafts: int
    """That a request was given room for."""
    is_waited_for: bool
    """No other was under way when it was planned."""
    is_behind: bool
    """It has rows as prompts have, but of requests alone whose model drafter caught up."""
    asked_host: Sequence[bool]
    """Of each request that may have drafts: lookups of the host were asked for them."""


def _effort(has_drafts: bool, has_model: bool) -> int:
    """The more of these, the more there is to plan and to book of each request; neighbours stand in for what was never seen."""
    return 2 if has_model else int(has_drafts)


class PaddedTimes:
    """Called by the engine thread only."""

    def __init__(self, drafter: CostClass) -> None:
        self._device = {False: StepCosts(drafter), True: StepCosts(drafter)}  # by whether there are prompts in the step
        # By that, and by whether it is waited for; by what drafts in it, and over requests: drafts are booked one by one.
        self._host: dict[tuple[bool, bool], dict[int, Times]] = defaultdict(lambda: defaultdict(Times))
        # Of the device's time in steps that are waited for, by whether they have prompts: the share that the host does nothing in.
        self._idle: dict[bool, float] = {}
        self._had_model = False  # the step planned last
        self._share = 0.0  # of steps with prompts
        self._tokens = 0.0  # of a step
        self._prompt_rows = 0.0  # of such a step
        self._verify: dict[tuple[bool, int], float] = {}  # by rows, for the step that is planned
        self._following = 0.0  # seconds of the model drafter there, where it makes no drafts

    @property
    def is_known(self) -> bool:
        return any(costs.is_known for costs in self._device.values())

    def begin(self, num_requests: int, num_keys: int) -> None:
        self._verify.clear()
        for costs in self._device.values():
            costs.begin(num_requests, num_keys)

    def add_device(
        self,
        num_requests: int,
        num_rows: int,
        num_prompt_rows: int,
        num_keys: int,
        num_tokens: int,
        verify: float,
        draft: float,
        num_model: int,
        num_asked: int,
    ) -> None:
        """num_rows: with those of prompts; num_tokens: emitted; verify, draft: seconds; num_model: drafts of the model drafter for each of num_asked
        requests."""
        has_prompts = num_prompt_rows > 0
        costs = self._device[has_prompts]
        self.add_tokens(num_tokens, has_prompts)
        costs.add_verify(num_rows, verify, num_requests, num_keys)
        if has_prompts:
            self._prompt_rows += SMOOTHING * (num_prompt_rows - self._prompt_rows) if self._prompt_rows else num_prompt_rows
        if num_model and num_asked:
            costs.add_draft(num_model, num_asked, draft)
        elif has_prompts:
            self._following += SMOOTHING * (draft - self._following) if self._following else draft

    def add_tokens(self, num_tokens: int, has_prompts: bool = False) -> None:
        """Of a step, emitted."""
        self._share += SMOOTHING_OF_SHARE * (has_prompts - self._share)
        self._tokens += SMOOTHING_OF_SHARE * (num_tokens - self._tokens) if self._tokens else num_tokens

    def add_host(
        self, num_requests: int, seconds: float, is_waited_for: bool, has_prompts: bool, *, has_drafts: bool = False, has_model: bool = False
    ) -> None:
        """is_waited_for: the device had nothing to do meanwhile; has_drafts: requests had some, or were looked up; has_model: the model made some."""
        is_alike, self._had_model = has_model == self._had_model, has_model
        if is_alike or is_waited_for:  # else the step that was booked meanwhile had the model's drafts, or lacked them: a trial's first one
            self._host[has_prompts, is_waited_for][_effort(has_drafts, has_model)].add(num_requests, seconds)

    def add_wait(self, seconds: float, device_seconds: float, has_prompts: bool) -> None:
        """Of a step that was waited for: how long the host did nothing, and how long the device took."""
        share, known = min(seconds / device_seconds, 1.0), self._idle.get(has_prompts)
        self._idle[has_prompts] = share if known is None else known + SMOOTHING * (share - known)

    def _host_of(self, num_requests: int, is_waited_for: bool, has_prompts: bool, effort: int) -> float:
        known = self._host[has_prompts, is_waited_for]
        return known[min(known, key=lambda own: abs(own - effort))].at(num_requests) if known else 0.0

    def step(self, num_requests: int, num_drafts: int, num_model: int, num_asked: int, is_waited_for: bool, num_tokens: float) -> float:
        """Of a usual step of requests that may have so many drafts each: the device's time, or the host's where that is longer; where one waits for
        the other both, but for what the device does while Python still launches, or prepares the next step. 0 before anything was measured.

        num_tokens: that it emits. Prompts come as requests end: the more tokens a step brings, the more steps have prompts in them.
        """
        return self.steps(num_requests, [(num_drafts, num_model, num_asked, num_tokens)], is_waited_for)[0]

    def steps(self, num_requests: int, shapes: Sequence[tuple[int, int, int, float]], is_waited_for: bool) -> list[float]:
        """The same of several. shapes: (num_drafts, num_model, num_asked, num_tokens) of each."""
        share, tokens = min(self._share, MAX_SHARE), self._tokens
        shares = [1 - (1 - share) ** (shape[3] / tokens) if tokens else self._share for shape in shapes]
        totals, known = [0.0] * len(shapes), [0.0] * len(shapes)
        for has_prompts, costs in self._device.items():
            if not costs.is_known:
                continue
            more, following = (round(self._prompt_rows), self._following) if has_prompts else (0, 0.0)
            # Until that is measured: prompts are launched kernel by kernel, and all else at once.
            idle = self._idle.get(has_prompts, 0.0 if has_prompts else 1.0) if is_waited_for else 0.0
            drafting, hosts = dict[tuple[int, int], float](), dict[int, float]()
            for number, (num_drafts, num_model, num_asked, _) in enumerate(shapes):
                rows, asked, effort = num_requests * (1 + num_drafts) + more, (num_model, num_asked), _effort(num_drafts > 0, num_model > 0)
                verify, draft, host = self._verify.get((has_prompts, rows)), drafting.get(asked), hosts.get(effort)
                if verify is None:
                    verify = self._verify[has_prompts, rows] = costs.verify(rows)
                if draft is None:
                    draft = drafting[asked] = max(costs.draft(*asked), following)
                if host is None:
                    host = hosts[effort] = self._host_of(num_requests, is_waited_for, has_prompts, effort)
                device, weight = verify + draft, max(shares[number] if has_prompts else 1 - shares[number], 1e-3)
                totals[number] += weight * max(device, host + idle * device)
                known[number] += weight
        return [total / weight if weight else 0.0 for total, weight in zip(totals, known)]
