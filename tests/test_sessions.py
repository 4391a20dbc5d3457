"""Several engines that share one drafter: each has a session of its own, as many as there is memory for."""

from __future__ import annotations

import itertools

import pytest
import torch

from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, EngineConfig
from backend.core import Delta
from backend.devices import cpu_threads
from backend.drafters import sessions
from backend.drafters.calls import LIKELIEST, OWN_NOISE, DraftCall, DraftError, DraftReply
from backend.drafters.recurrent import RecurrentDrafter
from backend.drafters.remote_service import RemoteDrafterService
from backend.drafters.sessions import CallNumber, DraftSessions
from backend.engine import Engine
from backend.models import load_model
from backend.models.mtp import Mtp
from backend.parallel.ranks import Ranks
from kernels.structs import MAX_BATCH
from kernels.warm_up import TOKEN_COUNTS
from tests.conftest import code_prompts, greedy

CPU = torch.device("cpu")
PROMPTS = code_prompts(6, (60, 300), seed=31)


@pytest.fixture(scope="module")
def make_service():
    target = load_model(str(BUNDLED_MODEL), torch.float32, CPU, Ranks(), only_head=True)
    model = Mtp(str(BUNDLED_DRAFTER), target, torch.float32, CPU, None)
    return lambda kind=RemoteDrafterService: kind(RecurrentDrafter(model, 3), torch.float32, CPU, lambda count: cpu_threads(1))


@pytest.mark.parametrize("context", [16, 4096])
def test_calls_that_a_gpu_is_warmed_up_with(make_service, context):
    """They are calls as any, within the context and their pages."""
    asked: list[DraftCall] = []
    scored: set[int] = set()

    class Noted(RemoteDrafterService):
        def draft(self, call: DraftCall) -> DraftReply:
            asked.append(call)
            reply = super().draft(call)
            assert [len(row) for row in reply.token_ids] == call.num_drafts
            return reply

    service = make_service(Noted)
    score = service._drafter.logits

    def logits(states: list[torch.Tensor], step: int) -> torch.Tensor:
        scored.add(len(states[0]))
        return score(states, step)

    service._drafter.logits = logits
    service.try_calls(context, 16)
    counts = {call.query_lens[0] for call in asked}
    assert counts == {min(count, context - 2) for count in TOKEN_COUNTS}
    assert all(call.seq_lens[0] + max(call.num_drafts) <= context for call in asked)
    assert {call.choices[0][0] for call in asked} == {LIKELIEST, OWN_NOISE}
    assert all(len(call.page_ids[0]) * 16 >= call.seq_lens[0] + call.num_drafts[0] - 1 for call in asked)
    assert scored == {min(count, MAX_BATCH) for count in TOKEN_COUNTS}, "states of as many requests are scored together"


class Remote:
    """A DraftService over sessions that others use too."""

    numbers = itertools.count(1)

    def __init__(self, shared: DraftSessions) -> None:
        self._shared = shared
        self._number = CallNumber(0, 0, 0, 0)
        self.num_opened = 0

    def open(self, num_pages: int, page_size: int) -> None:
        self.num_opened += 1
        self._number = CallNumber(next(self.numbers), 0, num_pages, page_size)

    def draft(self, call: DraftCall) -> DraftReply:
        number = self._number
        self._number = CallNumber(number.session, number.count + 1, number.num_pages, number.page_size)
        return self._shared.draft(call, number)


def run_together(engines: list[Engine]) -> list[list[Delta]]:
    """The last deltas of each engine's prompts; the engines step in turn, and number the same pages for different prompts."""
    ends: list[list[Delta]] = [[] for _ in engines]
    for engine, received in zip(engines, ends, strict=True):
        shift = len(PROMPTS) // 2 * (received is not ends[0])
        for i, prompt in enumerate(PROMPTS[shift:] + PROMPTS[:shift]):
            note = lambda delta, received=received: received.append(delta) if delta.is_final else None  # noqa: E731
            engine.submit(prompt, greedy(40), note, request_id=str((i + shift) % len(PROMPTS)))
    while any([engine.step() for engine in engines]):  # noqa: C419 (each of them steps)
        pass
    return [sorted(received, key=lambda d: d.request_id) for received in ends]


def make_engines(shared: DraftSessions, count: int) -> list[Engine]:
    speculative = {"method": "mtp", "num_speculative_tokens": 3, "placement": "bls", "adaptive": False}
    config = EngineConfig.from_dict({"model": str(BUNDLED_MODEL), "speculative_config": speculative, "kv_cache_memory": "32MiB"})
    return [Engine(config, draft_service=Remote(shared)) for _ in range(count)]


def test_two_engines_draft_as_one_alone(make_service):
    alone = run_together(make_engines(DraftSessions(make_service), 1))[0]
    engines = make_engines(DraftSessions(make_service), 2)
    for ends in run_together(engines):
        assert [(d.stats.drafted, d.stats.accepted, d.stats.steps) for d in ends] == [
            (d.stats.drafted, d.stats.accepted, d.stats.steps) for d in alone
        ]
    for engine in engines:
        assert not engine.drafters.faults.failures and not engine.drafters.faults.undrafted


def call_of(number: CallNumber) -> DraftCall:
    return DraftCall([], [3], torch.zeros(1, 192), [1], [1], [[0]], [1], [(0, 0, 0)], [(0.0, 1.0, 0.0)])


def draft(shared: DraftSessions, session: int, count: int, num_pages: int = 4) -> DraftReply:
    number = CallNumber(session, count, num_pages, 16)
    return shared.draft(call_of(number), number)


def test_calls_are_counted_by_session(make_service):
    shared = DraftSessions(make_service)
    first = draft(shared, 1, 0).token_ids
    assert draft(shared, 2, 0).token_ids == draft(shared, 1, 1).token_ids == draft(shared, 2, 1).token_ids == first
    for session, count in ((1, 3), (1, 2), (9, 1)):
        with pytest.raises(DraftError, match=f"call {count} of session {session} is not the one expected here: open a new session"):
            draft(shared, session, count)
    assert draft(shared, 2, 2).token_ids == draft(shared, 1, 0).token_ids == first


@pytest.mark.parametrize(("num_pages", "page_size"), [(1000, 16), (4, 64)])
def test_a_session_keeps_its_pages(make_service, num_pages, page_size):
    """A call's pages are checked by what it says of them itself: ones that the session does not have would be written all the same."""
    shared = DraftSessions(make_service)
    draft(shared, 1, 0)
    number = CallNumber(1, 1, num_pages, page_size)
    with pytest.raises(DraftError, match=f"call 1 of session 1 is for {num_pages} pages of {page_size} tokens; the session has 4 of 16: open a new"):
        shared.draft(call_of(number), number)
    with pytest.raises(DraftError, match="open a new session"):
        draft(shared, 1, 1)
    draft(shared, 1, 0)


def test_memory_is_bounded(make_service):
    shared = DraftSessions(make_service, make_service().count_bytes(9, 16))  # each session has a page more than it is asked for
    with pytest.raises(
        DraftError, match=r"a session of 10 pages of 16 tokens needs \d+ bytes; the limit is \d+: raise the drafter's kv_cache_memory"
    ):
        draft(shared, 1, 0, num_pages=10)
    draft(shared, 1, 0)
    draft(shared, 2, 0)
    draft(shared, 1, 1)
    draft(shared, 3, 0)  # in the place of 2, which was used longest ago
    draft(shared, 1, 2)
    with pytest.raises(DraftError, match="open a new session"):
        draft(shared, 2, 1)
    draft(shared, 2, 0, num_pages=8)  # in the place of both
    for session, count in ((1, 3), (3, 1)):
        with pytest.raises(DraftError, match="open a new session"):
            draft(shared, session, count)


def test_the_number_of_sessions_is_bounded(make_service, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    shared = DraftSessions(make_service)
    for session in range(4):
        draft(shared, session, 0)
    with pytest.raises(DraftError, match="open a new session"):
        draft(shared, 0, 1)
    draft(shared, 1, 1)


def test_a_device_without_memory(make_service):
    """Others' sessions are closed before a session is refused."""
    room = [2]

    class Service(RemoteDrafterService):
        def open(self, num_pages: int, page_size: int) -> None:
            if len(shared._open) >= room[0]:
                raise MemoryError
            super().open(num_pages, page_size)

    shared = DraftSessions(lambda: make_service(Service))
    for session in (1, 2, 3):
        draft(shared, session, 0)
    with pytest.raises(DraftError, match="open a new session"):
        draft(shared, 1, 1)
    draft(shared, 2, 1)
    room[0] = 0
    with pytest.raises(MemoryError):
        draft(shared, 4, 0)


def test_a_session_that_fails_is_closed_alone(make_service):
    shared = DraftSessions(make_service)
    draft(shared, 1, 0)
    draft(shared, 2, 0)
    number = CallNumber(1, 1, 4, 16)
    broken = call_of(number)
    broken.hidden = torch.zeros(1, 7)
    with pytest.raises(ValueError, match="rms_norm"):
        shared.draft(broken, number)
    with pytest.raises(DraftError, match="open a new session"):
        draft(shared, 1, 2)
    draft(shared, 2, 1)
