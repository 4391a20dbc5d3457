"""The engine: requests in, deltas out. One thread runs the steps; any thread may submit and cancel."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backend.config import BUNDLED_DRAFTER, EngineConfig
from backend.core import Batch, Delta, Draft, Request, SamplingParams, Scheduled, TokenLogprobs, Verdict
from backend.drafters import load_drafters
from backend.drafters.calls import DraftService
from backend.errors import ConfigError, EngineError, ModelError
from backend.intake import Intake
from backend.metrics import Metrics
from backend.open_requests import DeltaSink, OpenRequest, OpenRequests
from backend.pacing import Pacer
from backend.parallel.ranks import Ranks
from backend.runner import Runner, cpu_threads, make_plane, on_stream, pick_device
from backend.sampling import Sampler
from backend.scheduler import Scheduler, cut_at_end
from backend.speculate import StepTimes, speculate
from backend.text import Tokenizer

if TYPE_CHECKING:
    from backend.device.steps import DeviceSteps, Flight
    from backend.drafters.mtp_service import MtpService

logger = logging.getLogger(__name__)


def do_nothing() -> None:
    pass


class Engine:
    """Continuous batching with speculation over one model.

    `submit` and `cancel` are safe from any thread. `step` belongs to one thread: the caller's, or the one that `start` makes.
    Deltas are given to each request's sink on the engine thread; a sink must not block. `after_deltas` is called after each
    group of them, so that whoever passes them on can do it once a step.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks | None = None, draft_service: DraftService | None = None) -> None:
        """draft_service: the drafter's model in another process, for placement bls. Raises ConfigError, ModelError."""
        self.config = config
        device = pick_device(config)
        try:
            with on_stream(device):
                self._load(ranks or Ranks(), draft_service)
        except torch.OutOfMemoryError as error:
            raise ModelError(f"{config.model} does not fit the memory of {device}: {str(error).splitlines()[0]}") from None
        model = self.runner.model
        self._intake = Intake(config, self.tokenizer, self.runner.max_model_len, model.vocab_size, model.eos_token_ids)
        self.metrics = Metrics()
        self.times = StepTimes()
        self._pacer = Pacer() if config.speculative_config.adaptive else None
        self.after_deltas: Callable[[], None] = do_nothing
        self._open = OpenRequests(self.tokenizer, self.metrics, self._release)
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._is_refusing = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._flights: deque[Flight] = deque()
        self._is_short = False
        # What loading made is seen through now; else the first full collection comes between steps and takes 100 ms.
        gc.collect()
        logger.info(
            "engine ready: %d KV pages of %d tokens (%.0f MB), %s on %s, context %d, configuration %s",
            self.runner.num_pages,
            config.page_size,
            self.runner.num_pages * self.runner.page_bytes / 1e6,
            self.runner.dtype,
            self.runner.device,
            self.runner.max_model_len,
            config.as_json(),
        )

    def _load(self, ranks: Ranks, draft_service: DraftService | None) -> None:
        """Model, drafters, memory, and what runs steps on them."""
        config = self.config
        self._service: MtpService | None = None
        self.tokenizer = Tokenizer(config.model)
        self.runner = Runner(config, ranks)
        self.drafters = load_drafters(
            config.speculative_config,
            self.runner.model.vocab_size,
            config.max_num_batched_tokens,
            lambda: draft_service or self._load_drafter(),
            self.tokenizer.fingerprint,
        )
        self.runner.allocate_cache(self.drafters.taps, self.drafters.page_entries)
        self.drafters.attach(self.runner.num_pages, config.page_size, self.runner.taps)
        self.scheduler = Scheduler(
            num_pages=self.runner.num_pages,
            page_size=config.page_size,
            num_tokens_after_step=(config.speculative_config.num_model_steps or 1) if self._runs_ahead and self._service is not None else 0,
            max_batch_size=config.max_batch_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.runner.max_model_len,
            max_waiting=config.max_waiting,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.sampler = Sampler(self.runner.model.vocab_size, self.runner.device)
        self.device_steps = self._load_device_steps()

    @property
    def _runs_ahead(self) -> bool:
        is_wanted = self.config.async_scheduling
        return self.runner.device.type == "cuda" if is_wanted is None else is_wanted

    def _load_device_steps(self) -> DeviceSteps | None:
        """What runs decoding steps on the device's own state, ahead of the host; None: every step is computed before the next is prepared."""
        if not self._runs_ahead:
            return None
        from backend.device.steps import DeviceSteps

        steps = DeviceSteps(self.config, self.runner, self.drafters.model_drafter, self._service)
        steps.warm_up()
        return steps

    def _load_drafter(self) -> DraftService:
        """The drafter's model in this process."""
        from backend.drafters.mtp_service import MtpService
        from backend.models.mtp import Mtp

        config, runner = self.config.speculative_config, self.runner
        if config.placement == "bls":
            raise ConfigError("speculative_config.placement bls needs a server: offline, use in_process")
        with cpu_threads(1):
            folder = config.model or BUNDLED_DRAFTER
            model = Mtp(folder, runner.model, runner.dtype, runner.device, config.quantization, self.config.load_format)
        make = functools.partial(make_plane, dtype=runner.dtype, device=runner.device)
        self._service = MtpService(model, make, runner.threads_for, config.num_model_steps or 1)
        return self._service

    # -- any thread -------------------------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        return self._failure is None and not self._is_stopping

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        on_delta: DeltaSink,
        *,
        request_id: str,
        speculative: dict[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Queues a prompt (text or token ids); its deltas go to `on_delta`, the last one final, for each of params.n completions.

        timeout: seconds from now after which it ends with finish_reason `timeout`. Raises RequestError, ConfigError (both
        the request's fault), CapacityError or EngineError; then no delta follows.
        """
        requests = self._intake.make(prompt, params, request_id, speculative, priority, timeout)
        self.scheduler.check_fits(len(requests[0].prompt_token_ids), params.max_tokens)
        now = time.monotonic()
        with self._wake:
            self._check_healthy()
            if self._is_refusing:
                raise EngineError("the server is shutting down: send the request to another, or again later")
            self.scheduler.check_room(params.n, self._open.count)
            self._open.reserve(requests)
            self._inbox.append(lambda: self._admit(requests, on_delta, now))
            self._wake.notify()

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
            self._open.begin(request, sink, submitted)
            self.scheduler.add(request)
            self.drafters.start(request)

    def _release(self, request: Request) -> None:
        """Frees what is held of a request that ends."""
        self.scheduler.finish(request)
        self.drafters.stop(request)
        self.sampler.stop(request)
        if self.device_steps is not None:
            self.device_steps.stop(request)

    def step(self) -> bool:
        """One step on the stream that the device's work shares."""
        with self.runner.on_stream():
            return self._step()

    def _step(self) -> bool:
        """Takes in what was submitted and cancelled, then runs one step. False when there was nothing to run.

        Entries that the device steps take are launched, and read when the next step is launched; the others are computed now.
        """
        while self._inbox:
            self._inbox.popleft()()
        if self._open.has_deadlines:
            self._open.end_late()
        started = time.perf_counter()
        if self._pacer is not None:
            self._pacer.choose([r for r in self.scheduler.running if r.is_decoding])
        if self._must_land():
            self._land_all()
        batch = self.scheduler.schedule(self._pacer.limit if self._pacer is not None else None, may_preempt=not self._flights)
        self._is_short = batch.is_short
        self.metrics.preemptions += len(batch.preempted)
        if self.device_steps is not None:
            for request in batch.preempted:
                self.device_steps.stop(request)
        if not batch:
            is_done = not self._flights and not batch.preempted
            self._land_all()
            self.after_deltas()
            return not is_done
        self.runner.prepare(batch)
        self.drafters.begin_step(batch)
        ahead, rest = self._split(batch)
        if ahead:
            self._launch(ahead)
        while len(self._flights) > (1 if ahead else 0):
            self._land()
        if rest:
            draft, verdict = speculate(rest, self.drafters, self.runner, self.sampler, self.config.speculative_config, self.times)
            self._book(rest.entries, draft, verdict, self.times.propose, self.times.forward + self.times.verify)
        self.after_deltas()
        self.metrics.add_step(time.perf_counter() - started, self.times)
        return True

    def _split(self, batch: Batch) -> tuple[list[Scheduled], Batch]:
        """Entries for a device step, and the others."""
        if self.device_steps is None:
            return [], batch
        ahead = [e for e in batch.entries if self.device_steps.takes(e)]
        if len(ahead) == len(batch.entries):
            return ahead, Batch()
        taken = {id(e) for e in ahead}
        return ahead, Batch([e for e in batch.entries if id(e) not in taken])

    def _must_land(self) -> bool:
        """Whether what steps under way emit has to be known before the next step."""
        if not self._flights:
            return False
        assert self.device_steps is not None
        steps, limit = self.device_steps, self._pacer.limit if self._pacer is not None else (lambda r: r.speculation.num_speculative_tokens)
        return self._is_short or any(r.num_steps_ahead and not steps.is_ready(r, limit(r) > 0) for r in self.scheduler.running)

    def _launch(self, entries: list[Scheduled]) -> None:
        assert self.device_steps is not None
        self._flights.append(self.device_steps.launch(entries, self.drafters))
        for entry in entries:
            self.scheduler.run_ahead(entry)

    def _land(self) -> None:
        """Reads the oldest step under way. Requests that ended meanwhile are left out."""
        assert self.device_steps is not None
        flight = self._flights.popleft()
        draft, verdict, self.times.forward = self.device_steps.land(flight)
        self._book(flight.entries, draft, verdict, 0.0, self.times.forward)
        self.device_steps.follow(flight, self._open.is_open)

    def _land_all(self) -> None:
        while self._flights:
            self._land()

    def _book(self, entries: Sequence[Scheduled], draft: Draft, verdict: Verdict, propose_seconds: float, rest_seconds: float) -> None:
        if self._pacer is not None:
            self._pacer.observe(entries, draft, verdict, propose_seconds, rest_seconds)
        for b, entry in enumerate(entries):
            own = self._open.get(entry.request)
            if own is None:
                continue  # it ended while this step was under way
            if b in verdict.prompt_logprobs:
                own.score_prompt(entry.request.num_computed_tokens, verdict.prompt_logprobs[b])
            if verdict.is_broken[b]:
                self._break(own)
            elif entry.emits:
                num_drafts, num_accepted = len(draft.token_ids[b]), verdict.num_accepted[b]
                self._commit(own, entry, verdict.token_ids[b], num_drafts, draft.sources[b], num_accepted, verdict.logprobs[b])
            else:
                self.scheduler.commit(entry, ())

    def _break(self, own: OpenRequest) -> None:
        """Ends a request whose scores are not finite; the others of the batch go on."""
        place, dtype = len(own.request.token_ids), self.runner.dtype
        error = EngineError(f"the model's scores after token {place} are not finite: the weights may be damaged, or too large for {dtype}")
        logger.error("request %r: %s", own.request.group_id, error)
        self._open.fail(own, error)

    def _commit(
        self,
        own: OpenRequest,
        entry: Scheduled,
        token_ids: list[int],
        num_drafts: int,
        drafters: list[str],
        num_accepted: int,
        logprobs: list[TokenLogprobs] | None,
    ) -> None:
        """Cuts an emitted span at what ends the request, books it, and sends the delta."""
        request = entry.request
        token_ids, reason = cut_at_end(request, token_ids, self.scheduler.max_model_len)
        token_ids, text, is_stopped = own.read(token_ids)
        num_accepted = min(num_accepted, len(token_ids))
        self.scheduler.commit(entry, token_ids)
        request.stats.add(num_drafts, num_accepted, len(token_ids))
        self.metrics.add_verdict(request.speculation.method, num_drafts, num_accepted, len(token_ids))
        delta = Delta(
            request.group_id,
            request.index,
            token_ids=token_ids,
            text=text,
            sources=drafters[:num_accepted] + ["target"] * (len(token_ids) - num_accepted),
            logprobs=logprobs[: len(token_ids)] if logprobs is not None else None,
            finish_reason="stop" if is_stopped else reason,
        )
        self._open.send(own, delta)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Runs the loop in a thread of its own until `shutdown`."""
        assert self._thread is None, "the engine runs already"
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Steps while there is work, sleeps while there is none. An error in a step ends every open request with it."""
        try:
            while not self._is_stopping:
                if not self.step():
                    with self._wake:
                        if not self._inbox and not self._is_stopping:
                            self._wake.wait(timeout=self._sleep())
        except Exception as error:
            logger.exception("the engine failed")
            self._fail(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
        else:
            self._fail(EngineError("the engine was shut down"))

    def _sleep(self) -> float | None:
        """Seconds until the next deadline; None: until woken."""
        deadline = self._open.next_deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._failure = error
        while self._inbox:
            self._inbox.popleft()()
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
