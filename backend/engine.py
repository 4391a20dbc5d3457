"""The engine: requests in, deltas out. One thread runs the steps; any thread may submit and cancel."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from backend.booking import Booking
from backend.chunk_limit import limit_chunks
from backend.config import EngineConfig
from backend.core import Request
from backend.devices import choose_cpu_kernels, on_stream, pick_device
from backend.drafters.calls import DraftService
from backend.engine_parts import load_parts
from backend.errors import ConfigError, EngineError, ModelError
from backend.grammar import Matcher
from backend.grammar.thinking import FORM
from backend.group import Greeting, Group
from backend.hand_offs import HandOffs
from backend.intake import Intake, Prompt
from backend.launching import Launching
from backend.metrics import Metrics
from backend.open_requests import DeltaSink, OpenRequests
from backend.parallel.ranks import Ranks
from backend.precedence import Precedence
from backend.sampling_params import SamplingParams
from backend.tools import Tools
from backend.truncation import Truncation
from backend.under_way import UnderWay

logger = logging.getLogger(__name__)


def do_nothing() -> None:
    pass


class Engine:
    """Continuous batching with speculation over one model.

    `submit` and `cancel` are safe from any thread. `step` belongs to one thread: the caller's, or the one that `start` makes.
    Deltas are given to each request's sink on the engine thread; a sink must not block. `after_deltas` is called after each
    group of them, so that whoever passes them on can do it once a step.
    """

    def __init__(self, config: EngineConfig, draft_service: DraftService | None = None, greet: Greeting | None = None) -> None:
        """draft_service: the drafter's model in another process, for placement bls; greet: for ranks that are instances. Raises ConfigError,
        ModelError."""
        choose_cpu_kernels(config)
        self.config = config
        self._device = pick_device(config)
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._is_refusing = False
        self._failure: Exception | None = None
        if config.parallel_config.num_instances > 1 and greet is None:
            raise ConfigError("parallel_config.ranks: instances are a server's; offline, leave it out")
        self._group = Group(config, greet) if config.parallel_config.tensor_parallel_size > 1 else None
        try:
            with on_stream(self._device):
                parts = load_parts(config, (self._group.ranks if self._group is not None else None) or Ranks(), draft_service)
                if self._group is not None:
                    self._group.await_loaded(self._device)
            if self._group is not None:
                self._group.on_lost = self._note_lost_rank
        except Exception as error:
            why = error if isinstance(error, (ConfigError, ModelError)) else self._explain(error)
            if is_full := isinstance(error, torch.OutOfMemoryError):
                why = ModelError(f"{config.model} does not fit the memory of {self._device}: {str(error).splitlines()[0]}")
            self._close_group(why=str(why) or type(why).__name__)
            if why is error:
                raise
            raise ModelError(str(why)) from (None if is_full else error)
        self.tokenizer, self.worker, self.drafters = parts.tokenizer, parts.worker, parts.drafters
        self.scheduler, self.planner = parts.scheduler, parts.planner
        is_wanted = config.async_scheduling
        self._num_ahead = int(self.worker.graphs is not None if is_wanted is None else is_wanted)
        """Steps that may be under way while the next one is planned."""
        model = self.worker.model
        self._intake = Intake(config, self.tokenizer, self.worker.max_model_len, model.vocab_size, model.eos_token_ids)
        self.metrics = Metrics()
        self.budget = self.drafters.budget
        self._chunks = limit_chunks(config.max_step_ms, self._device.type, model.num_layers, model.hidden_size)
        self.after_deltas: Callable[[], None] = do_nothing
        self._open = OpenRequests(self.tokenizer, self.metrics, self._release)
        self.scheduler.on_run = self._open.note_run
        self._booking = Booking(self.scheduler, self.planner, self._open, self.metrics, self.worker.dtype)
        self.hand_offs = HandOffs(self.scheduler, self.planner, self.worker, self._open, self._booking.book_tokens)
        self._booking.report = self.hand_offs.report
        self._thread: threading.Thread | None = None
        self._launching = Launching(self.worker, self.scheduler, self.planner, self._group, self._device)
        self._under_way = UnderWay(self._booking, self.planner, self._open, self.metrics, self._chunks, self._group, self._check_ranks)
        self._is_short = False
        self._has_ended = False
        """A request, since the ranks were told."""
        # What loading made is seen through now; else the first full collection comes between steps and takes 100 ms.
        gc.collect()
        store = self.worker.store
        logger.info(
            "engine ready: %d KV pages of %d tokens (%.0f MB; keys and values in %s), %s on %s, context %d, %d tokens a step, configuration %s",
            store.num_pages,
            config.page_size,
            store.num_pages * store.page_bytes / 1e6,
            self.worker.cache_dtype,
            self.worker.dtype,
            self._device,
            self.worker.max_model_len,
            self.worker.max_num_batched_tokens,
            config.as_json(),
        )

    # -- any thread -------------------------------------------------------------------------------------------------

    @property
    def num_launched(self) -> int:
        """Steps."""
        return self._launching.num_launched

    @property
    def num_finished(self) -> int:
        """Steps that were read."""
        return self._under_way.num_finished

    @property
    def has_steps_under_way(self) -> bool:
        """The device has something to do while this thread waits."""
        return bool(self._under_way)

    @property
    def precedence(self) -> Precedence:
        """Of steps that are launched, over what else this process does."""
        return self._launching.precedence

    @property
    def group(self) -> Group | None:
        """The other ranks, where there are some."""
        return self._group

    def _note_lost_rank(self) -> None:
        """The loop sees to it, also where no step waits for that rank."""
        with self._wake:
            self._wake.notify()

    @property
    def _has_lost_rank(self) -> bool:
        return self._group is not None and self._group.has_lost

    @property
    def is_healthy(self) -> bool:
        return self._failure is None and not self._is_stopping

    @property
    def room(self) -> int:
        """Requests that would be taken beside those that are open."""
        return self.scheduler.limits.max_open - self._open.count

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_delta: DeltaSink,
        *,
        request_id: str,
        speculative: dict[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        tools: Tools | None = None,
        is_length_default: bool = False,
        template_variables: dict[str, Any] | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        """Queues a prompt (text, token ids or messages); its deltas go to `on_delta`, the last one final, for each of params.n completions.

        timeout: seconds from now after which it ends with finish_reason `timeout`; tools: that a chat may call. is_length_default: the request does
        not say max_tokens: at most what the prompt leaves of the context, or of what the cache holds. template_variables: of a chat, beside those
        that every template is given; truncation: of a prompt that is too long.
        Raises RequestError, ConfigError (both the request's fault), CapacityError or EngineError; then no delta follows.
        """
        most = self.scheduler.limits.max_num_tokens if is_length_default else None
        requests = self._intake.make(prompt, params, request_id, speculative, priority, timeout, tools, most, template_variables, truncation)
        self.submit_requests(requests, on_delta)

    def submit_requests(self, requests: list[Request], on_delta: DeltaSink) -> None:
        """Queues the completions of one call. Raises as `submit` does."""
        params = requests[0].params
        max_tokens = 1 if requests[0].is_prefill_only else params.max_tokens
        self.scheduler.limits.check_fits(len(requests[0].prompt_token_ids), max_tokens, len(requests))
        now = time.monotonic()
        with self._wake:
            self._check_healthy()
            if self._is_refusing:
                raise EngineError("the server is shutting down: send the request to another, or again later")
            self.scheduler.limits.check_room(len(requests), self._open.count)
            self._open.reserve(requests)
            self._inbox.append(lambda: self._admit(requests, on_delta, now))
            self._wake.notify()

    def compile_grammar(self, params: SamplingParams, state: int = FORM) -> Matcher | None:
        """Of what an answer's text has to be, at its beginning; state: of `grammar.thinking`, before that.

        Takes milliseconds: not for the engine's thread. Raises RequestError."""
        return self._intake.compile(params.structured_outputs, params, state=state)

    def cancel(self, request_id: str) -> bool:
        """Ends a request with finish_reason `cancelled` before the next step. False when no such request is open."""
        with self._wake:
            if not self._open.has(request_id):
                return False
            self._inbox.append(lambda: self._open.end_group(request_id, "cancelled"))
            self._wake.notify()
        return True

    def call(self, action: Callable[[], object]) -> None:
        """Runs `action` on the engine's thread before its next step. Raises EngineError when there is none to come."""
        with self._wake:
            self._check_healthy()
            self._inbox.append(action)
            self._wake.notify()

    def _check_healthy(self) -> None:
        """With the lock held, where the loop's end cannot come between."""
        if not self.is_healthy:
            raise EngineError(f"the engine is down: {self._failure or 'it is shutting down'}")

    def refuse(self) -> None:
        """Takes no more requests; those that are open go on."""
        with self._wake:
            self._is_refusing = True

    # -- engine thread ----------------------------------------------------------------------------------------------

    def _admit(self, requests: list[Request], sink: DeltaSink, submitted: float) -> None:
        for request in requests:
            try:
                own = self._open.begin(request, sink, submitted)
            except Exception as error:
                self._open.refuse(request, sink, error)
                continue
            try:
                self.hand_offs.admit(request)
                self.scheduler.add(request)
                self.drafters.start(request)
            except Exception as error:
                self._open.fail_internally(own, error)

    def _release(self, request: Request) -> None:
        """Frees what is held of a request that ends. What cannot be freed does not keep the rest."""
        self._has_ended = True
        for free in (self.hand_offs.stop, self.scheduler.finish, self.drafters.stop, self.planner.stop):
            try:
                free(request)
            except Exception:
                logger.exception("request %r: not all that was held of it could be freed", request.group_id)

    def step(self) -> bool:
        """One step on the stream that the device's work shares."""
        with on_stream(self._device):
            return self._step()

    def _step(self) -> bool:
        """Takes in what was submitted and cancelled, then launches one step and reads the one before it, or this one where nothing may be
        under way meanwhile. False when there was nothing to run."""
        self._check_ranks()
        if self._inbox:
            while self._inbox:
                self._inbox.popleft()()
            self.after_deltas()  # a first token that another node computed does not wait for this step
        if self._open.has_deadlines:
            self._open.end_late()
        started, num_read, waited = time.perf_counter(), self.num_finished, self._under_way.waited_seconds
        budget = self.budget
        budget.begin(decoding := [r for r in self.scheduler.running if r.is_decoding])
        if self._is_short:
            self._under_way.finish_all()
        held = self._find_held(decoding)
        batch = self.scheduler.schedule(
            budget.limit,
            may_preempt=not self._under_way,
            is_held=(lambda r: r.request_id in held) if held else None,
            max_prompt_tokens=self._chunks.choose(self.scheduler.num_decoding) if self._chunks is not None and self.scheduler.has_prompts else None,
        )
        self._is_short = batch.is_short
        self.metrics.preemptions += len(batch.preempted)
        for request in batch.preempted:
            self.planner.stop(request)
        self.hand_offs.begin(batch)
        if not batch:
            is_done = not self._under_way and not batch.preempted and not batch.fetches
            self._end_step()  # whoever was ended hears of it before the wait
            if self._under_way.await_one(self._wake, self._has_news, self._open.next_deadline):
                self._under_way.finish_all()
                self._end_step()
            return not is_done
        self.drafters.begin_step(batch)
        step = self.planner.plan(batch)
        self._under_way.add(self._launching.launch(step, self._under_way.finish_all))
        while len(self._under_way) > self._num_ahead:
            self._under_way.finish()
        self._end_step()
        seconds = time.perf_counter() - started
        self.metrics.add_step(seconds)
        if not self._num_ahead:
            if not step.plan.num_prompts:
                budget.note_rest(seconds - self._under_way.phase_seconds)
        elif self.num_finished == num_read + 1:
            waited = self._under_way.waited_seconds - waited
            budget.note_host(len(step.entries), seconds - waited, step.is_waited_for, step.plan.num_prompts > 0, **step.effort)
            if step.is_waited_for:  # and so is the one before it, which was read for it
                budget.note_wait(waited, self._under_way.device_seconds, step.plan.num_prompts > 0)
        return True

    def _has_news(self) -> bool:
        return bool(self._inbox) or self._is_stopping or self._has_lost_rank

    def _find_held(self, decoding: list[Request]) -> set[str]:
        """Ids of those that have to sit the next step out for what the host must see of a step under way first.

        Where they are the half of those that decode, that step is waited for: two halves in turn would take twice as many steps.
        """
        if not self._under_way:
            return set()
        held = {r.request_id for r in decoding if self.planner.is_held(r)}
        if 2 * len(held) < len(decoding) or not held:
            return held
        self._under_way.finish_all()
        return set()

    def _end_step(self) -> None:
        self.after_deltas()
        if self._has_ended and self._group is not None:
            self._group.note_end(self._device)
        self._has_ended = False

    def _check_ranks(self) -> None:
        """Raises EngineError when one is gone. What a step under way has made without it is nobody's."""
        if self._group is not None and self._group.has_lost:
            self._group.check()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Runs the loop in a thread of its own until `shutdown`."""
        assert self._thread is None, "the engine runs already"
        self._intake.load()
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Steps while there is work, sleeps while there is none. An error in a step ends every open request with it."""
        try:
            if self._group is not None:
                self._group.watch()
            while not self._is_stopping:
                if not self.step() and not self._capture():
                    with self._wake:
                        if not self._has_news():
                            self._wake.wait(timeout=self._sleep())
        except Exception as error:
            logger.exception("the engine failed")
            why = self._explain(error)
            self._fail(EngineError(f"the engine failed: {why if why is not error else f'{type(error).__name__}: {error}'}"))
        else:
            self._fail(EngineError("the engine was shut down"))

    def _explain(self, error: Exception) -> Exception:
        return error if self._group is None else self._group.explain(error)

    def _close_group(self, release: Callable[[], None] = do_nothing, why: str = "") -> None:
        if self._group is not None:
            with on_stream(self._device):
                self._group.close(release, why)

    def _capture(self) -> bool:
        """One graph that steps went without, while nobody waits."""
        if not self.worker.is_capture_waiting:
            return False
        with on_stream(self._device):
            if self._group is not None:
                self._group.send_capture()
            return self.worker.capture_waiting()

    def _sleep(self) -> float | None:
        """Seconds until the next deadline; None: until woken."""
        deadline = self._open.next_deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._failure = error
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception:  # the others want their answers all the same
                logger.exception("after the engine's end")
        self.end_all(error)
        self.after_deltas()

    def end_all(self, error: Exception) -> None:
        """Ends every open request with an error. On the engine's thread, between two steps."""
        self._open.end_all(error)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Ends the loop; requests that are still open get an EngineError."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)
        self.drafters.close()
        if self._group is not None:  # before the group goes, what holds exchanges
            self._under_way.drop()
        self._close_group(self.worker.release)
