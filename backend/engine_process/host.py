"""The engine behind a line: requests in, a message of news out for each step.

Threads beside the engine's: one that reads the line, and two that tokenize. Nothing here answers clients, so that a step shares Python's lock
with nobody who does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backend.core import Delta, FinishReason, SpeculationStats
from backend.disaggregation.service import Disaggregation
from backend.engine import Engine
from backend.engine_process.calls import CorpusCall, GenerateCall, read_corpus_call, read_messages
from backend.engine_process.counts import Counts
from backend.engine_process.description import describe
from backend.engine_process.drafts import PassedDraftService
from backend.engine_process.intake_workers import LONG_CHARACTERS, IntakeWorkers
from backend.engine_process.line import Line
from backend.engine_process.news import News, pack
from backend.engine_process.setup import Setup
from backend.errors import EngineError, error_code
from backend.precedence import take_short_turns

logger = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
ANSWERED = ("submit", "cancel", "describe")
"""Messages that are requests, whose first values are the number and the key: their clients wait for an answer."""
LEAST_SECONDS = 1e-6
"""What is given to a request whose deadline is over when it gets to the engine: which ends it at once, as it ends all that are late."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that the engine does not have yet."""

    number: int
    key: str
    """The engine's name for it."""
    call: GenerateCall | CorpusCall
    deadline: float | None = None
    is_cancelled: bool = False

    @property
    def num_completions(self) -> int:
        return self.call.params.n if isinstance(self.call, GenerateCall) else 1

    @property
    def size(self) -> int:
        """In characters, by which it waits among the short or the long ones."""
        call = self.call
        if isinstance(call, CorpusCall) or call.params.structured_outputs is not None or call.tools is not None:
            return LONG_CHARACTERS + 1  # a grammar may have to be compiled
        return len(call.prompt)


class EngineHost:
    """`load` first, while `serve` runs on another thread."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._made: list[News] = []  # by the engine's thread, in the step that runs
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        self._drafts: PassedDraftService | None = None
        self._end_lock = threading.Lock()

    def load(self, setup: Setup) -> None:
        """Starts the engine. Raises ConfigError, ModelError."""
        take_short_turns()
        config = setup.config
        if setup.calls_drafter:
            self._drafts = PassedDraftService(self._line)
        self.engine = Engine(config, draft_service=self._drafts, greet=self._greet if setup.has_instances else None)
        if setup.has_instances and self.engine.group is not None:
            self.engine.group.on_silent = self._note_silent
        self._nodes = Disaggregation(self.engine) if config.disaggregation.is_on else None
        self.intake: IntakeWorkers[_Waiting] = IntakeWorkers(self._submit, config.max_batch_size + config.max_waiting)
        self._counts = Counts(self.engine, self._nodes)
        self.engine.after_deltas = self._pass_deltas_on

    def start(self) -> None:
        self.engine.start()
        if self._nodes is not None:
            self._nodes.start()

    def _greet(self, rank: int, spec: dict[str, Any]) -> None:
        self._line.send("greet", rank, spec)

    def _note_silent(self, rank: int) -> None:
        self._line.send("silent", rank)

    def _pass_deltas_on(self) -> None:
        """One message for all that a step made."""
        made, self._made = self._made, []
        if made:
            self._tell(made)

    def _tell(self, news: Sequence[News]) -> None:
        for item in news:
            if item.delta.error is not None and error_code(item.delta.error) == "INTERNAL":
                logger.error("request %r failed", item.delta.request_id, exc_info=item.delta.error)
        self._line.send_plain("news", pack(news))

    def _refuse(self, number: int, key: str, error: Exception) -> None:
        self._tell([News(number, Delta(key, error=error))])

    # -- the thread that reads the line -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the line's other end is gone."""
        while (message := self._line.receive()) is not None:
            try:
                getattr(self, f"_on_{message.kind}")(*message.values)
            except Exception as error:
                logger.exception("a message %r could not be dealt with", message.kind)
                if message.kind in ANSWERED:
                    self._refuse(message.values[0], message.values[1], error)
                elif message.kind == "ask":  # one that needs a thread, where none can be started
                    self._line.send("answer", message.values[0], None, f"{type(error).__name__}: {error}")

    def _on_submit(self, number: int, key: str, call: GenerateCall | CorpusCall, seconds: float | None) -> None:
        """Queues it to be tokenized. seconds: until its deadline."""
        self.engine.precedence.give_way()
        own = _Waiting(number, key, call, None if seconds is None else time.monotonic() + seconds)
        with self._lock:
            self._waiting[number] = own
        try:
            self.intake.put(own, own.size)
        except Exception as error:  # whatever it is, it belongs to this request only
            self._forget(own)
            self._refuse(number, key, error)

    def _on_end(self, number: int, key: str) -> None:
        """Its client is gone, or it cannot be answered."""
        self._end_early(number, key)

    def _on_cancel(self, number: int, key: str, found: Sequence[tuple[int, str]], is_refusing: bool) -> None:
        """Ends requests for another one; its answer's finish_reason is `cancelled` when one of them was open, else `stop`.

        The answer comes from the engine's thread, and after those of the requests that it ended: an unknown id asks whether that thread steps.
        is_refusing: new requests are refused; then that has an error: whoever asks whether this model serves must not hear that it does.
        """
        ended = tuple(one for one, name in found if self._end_early(one, name))
        answer = Delta(key, finish_reason="cancelled" if ended else "stop", stats=SpeculationStats())
        if is_refusing and not ended:
            answer = Delta(key, error=EngineError("the server is shutting down"))
        self._call(number, key, lambda: self._made.append(News(number, answer, ended)))

    def _on_describe(self, number: int, key: str, sampling_defaults: dict[str, Any]) -> None:
        def answer() -> None:
            text = describe(self.engine, sampling_defaults)
            self._made.append(News(number, Delta(key, text=text, finish_reason="stop", stats=SpeculationStats())))

        self._call(number, key, answer)

    def _call(self, number: int, key: str, action: Callable[[], object]) -> None:
        """On the engine's thread."""
        try:
            self.engine.call(action)
        except EngineError as error:
            self._refuse(number, key, error)

    def _on_drafted(self, number: int, answer: Any) -> None:
        assert self._drafts is not None
        self._drafts.answer(number, answer)

    def _on_ask(self, number: int, what: str, *values: Any) -> None:
        if what == "shut_down":  # news and drafts go on meanwhile
            threading.Thread(target=self._answer, args=(number, what, *values), name="end", daemon=True).start()
        else:
            self._answer(number, what, *values)

    def _answer(self, number: int, what: str, *values: Any) -> None:
        try:
            self._line.send("answer", number, getattr(self, f"_do_{what}")(*values), "")
        except Exception as error:
            logger.exception("%s", what)
            self._line.send("answer", number, None, f"{type(error).__name__}: {error}")

    def _do_counts(self) -> list[Any]:
        """Those that changed. Asked for ten times a second, which is when deadlines of what is not tokenized yet are looked at, too."""
        self.engine.precedence.give_way()
        self._end_late()
        return self._counts.news()

    def _do_leave(self) -> None:
        if self._nodes is not None:
            self._nodes.leave()

    def _do_num_jobs(self) -> int:
        """Prompts of other nodes."""
        return self._nodes.num_jobs if self._nodes is not None else 0

    def _do_end_all(self, why: str) -> None:
        """What is open has an error, and what is being tokenized is refused."""
        self.engine.refuse()
        error = EngineError(why)
        for own in self.intake.withdraw_all():
            self._forget(own)
            self._refuse(own.number, own.key, error)
        with contextlib.suppress(EngineError):  # it has ended by itself
            self.engine.call(lambda: self.engine.end_all(error))

    def _do_shut_down(self) -> None:
        """Ends the engine, which saves what it keeps: requests that are still open get an error."""
        with self._end_lock:  # several may ask
            if self._nodes is not None:
                self._nodes.stop()
            self.engine.shutdown()
            if self._nodes is not None:
                self._nodes.close()
            for own in self.intake.withdraw_all():
                self._forget(own)
                self._refuse(own.number, own.key, EngineError("the server was shut down"))
            self.intake.stop(JOIN_SECONDS)

    def _end_early(self, number: int, key: str) -> bool:
        """Cancels a request, wherever it is. False when its end is on its way already."""
        with self._lock:
            own = self._waiting.get(number)
            if own is not None:
                own.is_cancelled = True  # before the engine is asked: see _submit
        if own is not None and self.intake.withdraw(own):
            self._end(own, "cancelled")
            return True
        return self.engine.cancel(key) or own is not None

    def _end_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [own for own in self._waiting.values() if own.deadline is not None and now >= own.deadline]
        for own in late:
            if self.intake.withdraw(own):
                self._end(own, "timeout")

    def _end(self, own: _Waiting, reason: FinishReason) -> None:
        """Ends a request that the engine never had."""
        self._forget(own)
        count = own.num_completions
        self._counts.count_end(reason, count)
        self._tell([News(own.number, Delta(own.key, i, finish_reason=reason, stats=SpeculationStats())) for i in range(count)])

    def _forget(self, own: _Waiting) -> None:
        with self._lock:
            self._waiting.pop(own.number, None)

    # -- intake threads ---------------------------------------------------------------------------------------------------

    def _submit(self, own: _Waiting) -> None:
        """Tokenizes a request and gives it to the engine."""
        self.engine.precedence.give_way()
        call, number = own.call, own.number
        if isinstance(call, CorpusCall):
            self._add_corpus(own, call)
            return
        try:
            self.engine.submit(
                read_messages(call.prompt) if call.is_chat else call.prompt,
                call.params,
                lambda delta: self._made.append(News(number, delta)),
                request_id=own.key,
                speculative=call.speculative,
                tools=call.tools,
                template_variables=call.template_variables,
                truncation=call.truncation,
                priority=call.priority,
                timeout=None if own.deadline is None else max(own.deadline - time.monotonic(), LEAST_SECONDS),
                is_length_default=call.is_length_default,
            )
        except Exception as error:  # whatever it is, it belongs to this request only
            self._refuse(number, own.key, error)
        self._forget(own)
        if own.is_cancelled:  # while it was tokenized, when the engine did not know it
            self.engine.cancel(own.key)

    def _add_corpus(self, own: _Waiting, call: CorpusCall) -> None:
        """Tokenizes texts and gives them to the suffix cache, whose own thread takes them in: no step waits for them."""
        try:
            added = self.engine.drafters.add_corpus(read_corpus_call(call.text))
            answer = Delta(own.key, text=json.dumps(added._asdict()), finish_reason="stop", stats=SpeculationStats())
        except Exception as error:  # whatever it is, it belongs to this request only
            answer = Delta(own.key, error=error)
        self._forget(own)
        self._tell([News(own.number, answer)])
