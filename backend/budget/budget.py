"""Who drafts for each request in each step, and how many of the drafts are verified: the choice that promises most tokens a second.

Tokens: one for each request, and the survival of each draft (`backend.budget.survival`). Seconds: what steps of that size took
(`backend.budget.costs`). Where drafts are known when the step is planned, each is judged by what its drafter says of it, and the best ones
of all requests are verified (`backend.budget.rule`). Where they are not (a step is under way), or where a step computes as many rows for
each request as for the one with most drafts (captured graphs), one limit holds for all, from what limits have brought so far
(`backend.budget.limits`); with captured graphs also whether the model drafts, and whether the host's lookups are waited for, by the time from
one step to the next (`backend.budget.padded`).

A length may follow the distribution that a draft was drawn from, never the drawn token: `rejection` would not keep the target's
distribution. So what a lookup found behind drawn drafts has no say in whether they are verified. `target_match` and `greedy` emit the same
tokens whatever is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from backend.budget.applied import Applied
from backend.budget.beside import BesideHost
from backend.budget.costs import CostClass, StepCosts
from backend.budget.known import Ability, Cohort, Group, Own, as_promise, group_of
from backend.budget.learning import OWN_SMOOTHING, Learning, listen_every, often_of
from backend.budget.limits import MIN_ALIKE, Limits
from backend.budget.observing import Observing, StepSeen
from backend.budget.padded import PaddedTimes
from backend.budget.preference import Preference
from backend.budget.prices import Prices
from backend.budget.rule import level, share
from backend.budget.survival import Survival
from backend.budget.trials import Trials
from backend.core import NEVER, Branches, Chain, Request

TRY_EVERY = 32
"""Steps of a request between trials of a lookup that hardly matches, and of the model alone."""
NOTHING = float("-inf")
"""What no drafts are worth beside others: how many of those are verified, if any, is seen with all requests together."""
RECOVERY = 0.05
"""Of a request that the model is not asked for: how far what its drafts are held to be worth goes back to what they are worth for all."""
LEAVE_AFTER = MIN_ALIKE
"""Steps without the model drafter from which on it does not follow new prompts either."""
ALONE_EVERY = 8
"""Steps of a request for which a score from which its lookup drafts alone is kept, where the device is not to wait for Python."""


class DraftBudget:
    """Called by the engine thread only."""

    def __init__(self, describe: Callable[[Request], Ability], *, is_exact: bool, drafter: CostClass = CostClass.PER_DRAFT) -> None:
        """is_exact: a step computes as many rows as it has tokens; drafter: the model drafter's class."""
        self._describe, self._is_exact = describe, is_exact
        self._costs, self._survival = StepCosts(drafter, is_exact=is_exact), Survival()
        self._padded = None if is_exact else PaddedTimes(drafter)
        self._limits, self._prices = Limits(self._costs, self._padded), Prices(self._costs, is_exact)
        self._learning = Learning(self._survival, self._prices, self._limits.forecast, is_exact)
        self._means = self._learning.means
        self._observing = Observing(self._costs, self._padded, self._prices, self._limits)
        self._cohorts: dict[Group, Cohort] = {}
        self._trials = Trials(self._limits, is_exact=is_exact)
        self._applied, self._beside = Applied(self._limits, self._trials), BesideHost()
        self.keeps_up = False
        """The model drafter follows the text in the next step though it is not asked for drafts: the step is a trial without them."""
        self._next_draft_seconds = 0.0
        self._num_requests = self._often = self._listen_every = 1  # often: steps that one of a request speaks for
        self._has_prompts = False  # in the last step that was read; the next one is likely to as well
        self._preference = Preference()
        self.predicted = self._learning.predicted
        """Drafts that were expected to be accepted, of those that were verified, by method."""
        self.chosen = self._learning.chosen
        """Drafts that were verified for a request in a step."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def _meet(self, request: Request) -> Own:
        """Of a request whose `drafting` is not there yet."""
        speculation, ability = request.speculation, self._describe(request)
        group = group_of(speculation, ability, is_exact=self._is_exact)
        cohort, common = self._cohorts.setdefault(group, Cohort(group)), self._means[group.kind]
        is_limited = group.is_paced and not request.is_prefill_only
        own = Own(ability, cohort, group.kind, group.is_paced, is_limited, speculation.max_drafts, replace(common), common)
        request.drafting = own
        return own

    def _of(self, request: Request) -> Own:
        return request.drafting or self._meet(request)

    def stop(self, request: Request) -> None:
        request.drafting = None
        self._survival.stop(request.request_id)

    # -- before a step ------------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Request]) -> None:
        """Chooses for the next step of these requests, all of them decoding.

        Where steps compute as many rows as they have tokens, nothing is tried beside prompts while there are steps without, which measure better.
        """
        cohorts: dict[Cohort, list[Own]] = {}
        paced: list[Request] = []
        for request in requests:
            own = self._of(request)
            if own.most:
                cohorts.setdefault(own.cohort, []).append(own)
                if own.is_paced:
                    paced.append(request)
        self._trials.end()
        self._applied.put(None)
        self.keeps_up = self._beside.is_left_out = False
        num_requests = self._num_requests = max(1, len(requests))
        self._often, self._listen_every = often_of(num_requests), listen_every(num_requests) * self._limits.rarity
        if not paced and not any(cohort.group.has_others and cohort.group.kind.has_model for cohort in cohorts):
            if self._padded is not None and not requests and self._limits.chosen.limit >= 0:
                self._applied.put(self._limits.chosen._replace(waits=False))  # what a prompt's last step drafts is for a step like those before
            return
        prices = self._prices
        (self._padded or self._costs).begin(num_requests, sum([len(request.token_ids) for request in requests]))
        groups = {cohort.group: owns for cohort, owns in cohorts.items() if not (self._is_exact and cohort.group.num_nodes)}
        top = max((group.num_wanted for group in groups if group.is_paced), default=0)
        speed = self._limits.choose(groups, num_requests, top, prices.draft_seconds * num_requests, self._has_prompts)
        if self._is_exact:
            prices.begin(num_requests, [own for cohort, owns in cohorts.items() if cohort.group.num_model for own in owns])
            prices.speed = prices.usual_speed
        else:
            prices.speed = speed
            self._survival.step += 1
        if not paced:
            return
        may_try = not (self._is_exact and self._has_prompts) or self._costs.is_beside_prompts
        self._applied.put(self._trials.choose(paced, top, may_try))
        self.keeps_up = self._trials.keeps_up
        self._beside.begin(self._applied.waits and not self._applied.is_asked)

    def limit(self, request: Request) -> int:
        """Most drafts of a request that the next step verifies; `allot` may leave fewer of those that are known."""
        own = self._of(request)
        if self._applied.limit is None or not own.is_limited:
            return own.most
        return self._limit(request, own) if self._is_exact else self._applied.limit_for(request, own)

    def _limit(self, request: Request, own: Own) -> int:
        """Of a request that the choice holds for, where steps have the rows of their tokens."""
        # Where a model drafts too, it is asked or not by itself.
        if request.request_id not in self._trials.explorers and not own.ability.num_model and not self._prices.are_lookups_worth(own):
            return 0
        assert self._applied.limit is not None
        return min(own.most, self._applied.limit) if request.num_steps_ahead and not request.speculation.num_nodes else own.most

    # -- drafts that are known ----------------------------------------------------------------------------------------

    def pick(self, request: Request, chains: Sequence[Chain]) -> int:
        """The one of several drafts of a request that promises most. chains: the first one is the model's, with what may be judged of it."""
        own = self._of(request)
        if not self._is_exact and own.is_paced:
            found = [number for number, chain in enumerate(chains) if chain]
            if len(found) < 2:
                return found[0] if found else 0  # there is nothing to weigh
            promised = [self._survival.promised(request.request_id, chain) if chain else NOTHING for chain in chains]
            return promised.index(max(promised))
        survivals = [self._survival.survivals(request.request_id, chain) for chain in chains]
        worth = [self._prices.worth(one) if one else NOTHING for one in survivals]
        best = max(range(len(worth)), key=lambda number: worth[number])
        if self._is_exact:
            beside = max(range(1, len(worth)), key=lambda number: worth[number], default=0)
            own.note_beside(self._prices.count_worth(survivals[beside] if beside else ()), OWN_SMOOTHING)
        # Where one choice holds for all, those that it does not hold for look at it alone.
        if own.ability.num_model and not own.ability.is_remote:
            self._preference.note(own, as_promise(worth[1:]), best > 0)
        return best

    def foresee(self, request: Request, chains: Sequence[Chain]) -> None:
        """What lookups promise at a prompt's end."""
        self._of(request).promised = as_promise([self._worth(request, chain) for chain in chains])

    def _worth(self, request: Request, chain: Chain) -> float:
        """What drafts bring beyond their cost, in tokens."""
        return self._prices.worth(self._survival.survivals(request.request_id, chain))

    def asks_model(self, request: Request, chains: Sequence[Chain]) -> bool:
        """Whether a model drafter that can be asked now is worth its time beside other drafts of the request."""
        own = self._of(request)
        if request.request_id in self._trials.explorers or (not chains and not own.is_paced):
            return True
        if own.is_paced and not self._prices.is_model_worth:
            return False
        return self._prices.model_worth(own) > max((0.0, *(self._worth(request, chain) for chain in chains)))

    def watch(self, request: Request, token_ids: list[int], chain: Chain) -> None:
        """Drafts that were not verified: the text that follows tells how many of them were right."""
        self._of(request).watch(len(request.token_ids), token_ids, chain, is_step=False)

    def watch_step(self, request: Request, token_ids: list[int], chain: Chain) -> None:
        """The same of the step's own drafts, of which its lookup's alone are looked at: what they would have brought without the host's. No drafts:
        it found nothing."""
        own = self._of(request)
        is_lookup = chain[0].source == own.ability.lookup if chain else bool(own.ability.lookup)
        if self._padded is not None and is_lookup and own.was_looked_up and own.turn % self._often == 0:
            own.watch(len(request.token_ids), token_ids, chain, is_step=True)

    def compare(self, request: Request) -> None:
        """Learns from what was watched and is known by now."""
        own = self._of(request)
        if not own.pending:
            return
        for settled in self._learning.compare(request, own, self._often):
            if self._padded is not None and own.ability.may_wait and not self._applied.waits:
                self._learning.note_listened(request, own, settled, self._listen_every * self._num_requests)

    @property
    def listens(self) -> bool:
        """Whether lookups of the host are to be asked for one request that does not wait for them, to see what they would bring."""
        if self._padded is None or self._applied.limit is None or self._applied.waits:
            return False
        return self._trials.num_steps % self._listen_every == 0

    def allot(
        self, requests: Sequence[Request], chains: Sequence[Chain], num_drawn: Sequence[int], num_rows: int, parents: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """How many of each request's drafts, which are known, are verified: the first ones. num_drawn: leading ones that were drawn from a
        distribution that verification uses, or 0; num_rows: of requests that go on, without any draft; parents: as `Survival.survivals`
        takes them, of each; none: all are chains."""
        counts = [len(chain) for chain in chains]
        if self._applied.limit is None or not self._is_exact or not self._costs.is_known:
            return counts
        explorers = () if self._trials.is_plain else self._trials.explorers
        free = [n for n, r in enumerate(requests) if counts[n] and self._of(r).is_paced and r.request_id not in explorers]
        if not free:
            return counts
        if self._trials.is_plain:
            return [0 if n in free else count for n, count in enumerate(counts)]
        survivals = [self._survive(requests[n], chains[n], parents[n] if parents else ()) for n in free]
        judged = [own[: num_drawn[n]] if num_drawn[n] else own for n, own in zip(free, survivals)]
        others = sum(counts) - sum(counts[n] for n in free)
        rest, at = self._next_draft_seconds + self._costs.rest, self._costs.curve().at
        found, speed = share(judged, num_rows, lambda number: at(num_rows + others + number) + rest)
        for n, own, count in zip(free, survivals, found):
            if num_drawn[n] and count == num_drawn[n]:
                while count < len(own) and own[count] > speed * self._prices.row_seconds:
                    count += 1
            counts[n] = count
        return counts

    def _survive(self, request: Request, chain: Chain, parents: Sequence[int]) -> list[float]:
        found = self._survival.survivals(request.request_id, chain, parents)
        return level(found) if parents else found

    # -- drafts for the step after it ---------------------------------------------------------------------------------

    def num_model(self, request: Request) -> int:
        """Drafts that the step's model drafter makes for a request at the step's end."""
        own = self._of(request)
        count = own.ability.num_model
        if count and own.is_limited and self._applied.limit is not None:
            if not self._is_exact:
                count = self._applied.num_model_for(request, own)
            elif request.num_steps_ahead:
                is_asked = self._applied.is_asked or request.speculation.num_nodes > 0
                count = min(count, self._limit(request, own)) if is_asked else 0
            elif request.request_id not in self._trials.explorers and self._costs.is_known:
                is_worth = self._prices.is_model_worth and self._prices.model_gain(own, self._preference.share(own)) > 0
                count = count if is_worth else 0
        elif count and own.ability.has_host and self._preference.is_sure(own):
            own.num_steps += 1
            count = count if own.num_steps % TRY_EVERY == 0 else 0
        own.was_asked = count > 0
        often = 1 if self._is_exact else self._often
        if own.is_paced and own.ability.num_model and not count and own.turn % often == 0:
            own.means.note_model(own.common.model, own.common.gain, 1 - (1 - RECOVERY) ** often)
        return count

    def waits(self, request: Request) -> bool:
        """Whether the next step of a request is not planned before the one under way was read, so that lookups of the host can draft for it."""
        return self._applied.waits and (own := self._of(request)).is_paced and own.ability.may_wait

    def settle_lookup(self, request: Request) -> bool:
        """Settles, and notes, whether the step that is planned asks its own lookup for a request that the host's may draft for -> whether it does."""
        own = self._of(request)
        own.was_looked_up = not (self._beside.is_left_out and self.waits(request))
        return own.was_looked_up

    def asks_soon(self, request: Request) -> bool:
        """Whether lookups of the host are asked for a request that begins. Where nobody waits for them, what they would bring one is looked at."""
        chosen = self._limits.chosen
        return self._padded is None or chosen.limit < 0 or chosen.waits or not self._of(request).ability.may_wait

    def leaves_model(self, request: Request) -> bool:
        """Whether prompts, too, are kept from a model drafter that has not been asked for long. It catches up where it is asked again."""
        if self._padded is None or self._applied.limit is None or self._limits.num_unasked < LEAVE_AFTER or request.is_prefill_only:
            return False
        return self._of(request).is_paced

    def may_ask(self, request: Request) -> bool:
        """Whether `num_model` will be above 0 in the step that is planned, where steps compute as many rows for each request as for the one with
        most drafts."""
        own = self._of(request)
        if own.is_limited and self._applied.limit is not None:
            return self._applied.num_model_for(request, own) > 0
        if not own.ability.num_model:
            return False
        return not (own.ability.has_host and self._preference.is_sure(own)) or (own.num_steps + 1) % TRY_EVERY == 0

    def alone_score(self, request: Request, num_model: int, limit: int) -> int:
        """The least score from which the step's lookup drafts alone, and the model is not asked; num_model: drafts that it would make; limit: those
        that the lookup makes, or lengthens the model's to, at most."""
        own = self._of(request)
        if not num_model:
            return 1 if self._is_exact else NEVER  # with a score, what it found can be judged
        own.num_steps += 1
        if own.num_steps % TRY_EVERY == 0:
            return 1 if own.num_steps // TRY_EVERY % 2 else NEVER
        if self._is_exact:
            return self._learning.least_score(request, own.ability.lookup, limit, self._prices.model_worth(own))
        if limit != own.alone[0] or own.num_steps % ALONE_EVERY == 0:
            worth = self._prices.model_worth(own)
            own.alone = limit, self._survival.least_match(request.request_id, own.ability.lookup, limit, worth) or NEVER
        return own.alone[1]

    def least_standing(self) -> float:
        """Requests for which all drafts so far have to stand for one draft more of each to be worth the model's time."""
        if self._applied.limit is None or not self._is_exact or not self._costs.is_known:
            return 0.0
        return self._prices.least_standing

    @property
    def trust(self) -> float:
        """The power of the model's greatest probability at a draft that says how likely it stands."""
        return self._prices.trust

    def expect_drafts(self, num_drafts: int, num_requests: int) -> None:
        """What the model drafter is to make at the end of the step that is planned: it is a part of the step's time."""
        self._next_draft_seconds = self._costs.draft(num_drafts, num_requests)

    # -- after a step -------------------------------------------------------------------------------------------------

    def note_verified(self, request: Request, num_drafts: int) -> bool:
        """So many drafts of a request were verified. False: there is no time to learn from them (`learn`) in this step."""
        own = self._of(request)
        if request.speculation.num_speculative_tokens:
            self.chosen.observe(num_drafts)
        if self._is_exact:
            return True
        own.turn += 1
        return own.turn % self._often == 0

    def learn(
        self,
        request: Request,
        chain: Chain,
        num_accepted: int,
        has_model: bool,
        tree: Branches | None = None,
        *,
        matched: int = 0,
        is_alone: bool = False,
        asked_host: bool = False,
        has_step: bool = True,
    ) -> None:
        """After `note_verified` said so.

        chain: of a request's drafts that were verified; has_model: the model drafter had made the first ones, verified or not; tree: that
        they are, in the place of a chain; matched: of the step's lookup, whatever was verified; is_alone: its drafts came in the model's place;
        asked_host: the host's lookups were asked, and some of the drafts may be theirs; has_step: the step before had been asked too."""
        own, often, how = self._of(request), self._often, {"is_alone": is_alone, "asked_host": asked_host, "has_step": has_step}
        if asked_host and has_step and not has_model and own.ability.may_wait:
            self._beside.note(num_accepted, bool(chain) and chain[0].source == own.ability.lookup)
        self._learning.learn(request, own, chain, num_accepted, has_model, tree, matched=matched, often=often, **how)

    def observe(self, limits: Sequence[tuple[Request, int, bool]], outcomes: Sequence[tuple[int, int]], step: StepSeen) -> None:
        """What a step brought. limits: of each request that may have drafts, its limit and whether the model was asked for them; outcomes: its
        drafts that were verified, and those accepted."""
        self._learning.forecast(limits, outcomes, step.padded)
        self._has_prompts = step.num_prompts > 0
        if step.padded is not None and (step.padded.is_behind or not step.num_prompts):
            chosen = self._limits.chosen
            is_extra = step.is_catching_up or step.padded.is_behind or (step.num_asked > 0 and not (chosen.limit and chosen.is_asked))
            self._trials.note(step.verify_seconds + step.draft_seconds, is_extra=is_extra)
        self._observing.observe(step, outcomes, is_limited=self._applied.limit is not None, has_explorers=bool(self._trials.explorers))

    def note_host(
        self, num_requests: int, seconds: float, is_waited_for: bool, has_prompts: bool, *, has_drafts: bool = False, has_model: bool = False
    ) -> None:
        """What the host was busy for with a step that may be planned while another is under way; is_waited_for: none was; the others: see
        `PaddedTimes.add_host`."""
        if self._padded is not None:
            self._padded.add_host(num_requests, seconds, is_waited_for, has_prompts, has_drafts=has_drafts, has_model=has_model)

    def note_wait(self, seconds: float, device_seconds: float, has_prompts: bool) -> None:
        """See `PaddedTimes.add_wait`."""
        if self._padded is not None and device_seconds > 0:
            self._padded.add_wait(seconds, device_seconds, has_prompts)

    def note_rest(self, seconds: float) -> None:
        """What the last step took outside its phases."""
        self._costs.add_rest(seconds)

    @property
    def regret(self) -> float:
        """See `Limits.regret`."""
        return self._limits.regret
