"""One rank's part of the engine: weights, paged memory, request table, and the step that a plan describes. It schedules nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from backend.config import EngineConfig
from backend.core import Outcome, Speculation
from backend.devices import count_threads, cpu_threads, pick_cache_dtype, pick_device, pick_dtype, threads_for
from backend.drafters import Placement, find_place, load_step_drafter, make_placements, step_drafter_identity, tap_width
from backend.drafters.protocol import HIDDEN
from backend.kv_store import CacheSpec, KvStore
from backend.model_checks import check_max_model_len
from backend.model_files import fingerprint
from backend.models import Model, load_model
from backend.models.cache_scales import scale_cache
from backend.parallel.ranks import Ranks
from backend.request_speculation import resolve
from backend.step.draft_masks import Grammars
from backend.step.graphs import Graphs, Running
from backend.step.memory import StepNeeds, count_pages, mask_shape
from backend.step.options import Options
from backend.step.plan import MILLION, StepPlan
from backend.step.program import Program
from backend.step.tensors import REPORT_HEAD, StepShape, StepTensors
from backend.step.times import StepTimes
from kernels import ops
from kernels.request_table import RequestTable
from kernels.structs import COUNT, INDEX, NUM_FIELDS

logger = logging.getLogger(__name__)

NUM_BUFFERS = 3
"""Host buffers in turn: one is written while another's copy may be under way."""


@dataclass(slots=True)
class Results:
    """What the host reads of a step."""

    outcomes: list[Outcome]
    """[B], in the plan's order. Drafts that were not accepted are known to the worker alone."""
    rows: np.ndarray
    """[B, RESULT_HEAD + K + 1] int32, as the step wrote them: the same on every rank."""
    times: StepTimes = field(default_factory=StepTimes)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way; a call waits for its results."""

    read: Callable[[], Results]
    is_done: Callable[[], bool]
    """Whether a call would not wait."""

    def __call__(self) -> Results:
        return self.read()


@dataclass(slots=True)
class Begun:
    """A step whose forward was launched."""

    plan: StepPlan
    step: StepTensors
    running: Running | None = None
    """On a GPU."""
    forward_seconds: float = 0.0
    """On CPU, where it is over."""


@dataclass(slots=True)
class _Read:
    """Host copies of a step's results."""

    rows: np.ndarray
    report: np.ndarray | None
    scores: np.ndarray | None
    prompt_scores: dict[int, np.ndarray]
    chances: np.ndarray | None = None


def steps_to_capture(own: Speculation, place: Placement, num_model: int) -> tuple[set[int], set[tuple[int, bool]]]:
    """Drafts that steps verify, of requests with the server's own method: most of them, and fewer for large batches and the ends of requests, where
    a step may be a little wider than it has to be; and those that steps make, by the model and whether a lookup follows. num_model: at most."""
    most = own.num_nodes or (own.num_speculative_tokens if place.has_lookup or place.host else num_model)
    counts = {most} if own.num_nodes else {count for count in (1, 2, 3, 5, 7, 11) if count < most} | {most}
    return counts, {(0, False), *((min(count, num_model), place.has_lookup) for count in counts if most)}


class Worker:
    """Called by one thread, on the device's stream (`backend.devices.on_stream`)."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        """Raises ConfigError, ModelError."""
        self._config = config
        self.device = pick_device(config)
        self.dtype = pick_dtype(config, self.device)
        self.cache_dtype = pick_cache_dtype(config, self.dtype, self.device)
        """Of the target's keys and values."""
        # Ranks that stop at different drafts, for the last bits of a sum, would wait for one another.
        self._stops_early = self.device.type == "cpu" and ranks.size == 1
        num_threads = count_threads(config)
        # OpenMP keeps a pool for every thread that ever ran in parallel, and sleeps at each barrier once the pools together
        # outnumber the cores: loading must not leave one behind, for the steps may run on another thread.
        with cpu_threads(1):
            self._load(config, ranks)
        # The last bits of a sum depend on how many there are, and some sums every rank makes by itself: a router's, a whole drafter's.
        self._threads_for = threads_for(config, self.model.num_multiplied, ranks.least(num_threads, self.device))

    def _load(self, config: EngineConfig, ranks: Ranks) -> None:
        self.model: Model = load_model(
            config.model,
            self.dtype,
            self.device,
            ranks,
            load_format=config.load_format,
            max_model_len=config.max_model_len,
            is_expert_parallel=config.parallel_config.expert_parallel,
            quantization=config.rounding,
            reads_cache_scales=self.cache_dtype == ops.E4M3 and config.kv_cache_scales == "auto",
            draft_token_map=None if config.speculative_config.placement == "bls" else config.speculative_config.draft_token_map,
        )
        self.drafter = load_step_drafter(config, self.model, self.dtype, self.device, ranks)
        check_max_model_len(config.max_model_len, self.model.max_model_len)
        is_e4m3 = self.cache_dtype == ops.E4M3
        scales = {"cache_scales": scale_cache(config, self.model, self.dtype, self.device, ranks)} if is_e4m3 else {}
        self.max_model_len = config.max_model_len or self.model.max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens_on(self.device.type)
        specs = self.model.cache_specs(self.cache_dtype)
        if width := tap_width(config.speculative_config, self.drafter, self.model):
            specs.append(CacheSpec(HIDDEN, (width,), self.dtype))
        specs += self.drafter.cache_specs(self.dtype) if self.drafter is not None else []
        activations = " fp8 activations" if config.activations == "fp8" else ""
        weights = f"{fingerprint(config.model)} {config.load_format} {config.rounding.names}{activations}"
        drafter = step_drafter_identity(config)
        identity = {"model": weights, "drafter": drafter, "tensor_parallel_size": ranks.size, "rank": ranks.rank, **scales}
        self._mask_shape = mask_shape(config, self.model.vocab_size)
        needs = StepNeeds(self.model, self.dtype, self.max_model_len, self.max_num_batched_tokens)
        num_pages = ranks.least(count_pages(config, specs, needs, self.device), self.device)
        self.store = KvStore(specs, config.page_size, num_pages, self.device, identity)
        if self.drafter is not None:
            self.drafter.attach(self.store)
        speculative = config.speculative_config
        sizes = (config.max_batch_size, self.max_model_len, speculative.max_drafts, self.model.vocab_size)
        self.table = RequestTable(*sizes, self.device, has_trees=speculative.tree is not None)
        width = -(-self.max_model_len // config.page_size)
        shape = (self.table.size, width)
        self.page_table = torch.full(shape, self.store.scratch_page, dtype=torch.int32, device=self.device)
        self.program = Program(speculative, self.model, self.store, self.table, self.page_table, self.drafter, self.max_model_len, self.dtype)
        # On CPU it would cost time, and the sums of a row depend on how many there are: answers with and without drafts would part.
        self.program.rounds_activations = config.activations == "fp8" and self.device.type == "cuda"
        if self.device.type == "cuda":
            self.program.masks = torch.zeros(self._mask_shape, dtype=torch.int32, device=self.device)
        self.graphs = Graphs(config, self.program, self.table, self.device, self._stage_words) if self.device.type == "cuda" else None
        self._turn = 0
        self._pinned: list[torch.Tensor] = []
        self._pinned_masks = [torch.empty(0, 0, dtype=torch.int32)] * NUM_BUFFERS
        self._pinned_results = [torch.empty(0, dtype=torch.int32)] * NUM_BUFFERS

    def warm_up(self) -> None:
        """Captures the steps that requests with the server's own method will need."""
        if self.graphs is None:
            return
        speculative = self._config.speculative_config
        own = resolve(speculative, None)
        place = find_place(make_placements(speculative, has_step_drafter=self.drafter is not None), own)
        num_model = min(own.num_model_steps, self.drafter.max_drafts) if place.has_model and self.drafter is not None else 0
        counts, drafts = steps_to_capture(own, place, own.num_nodes or num_model)
        self.graphs.warm_up({1, *(1 + n for n in counts)}, drafts, self.max_model_len - 1)

    def release(self) -> None:
        """Gives the graphs back. Nothing is launched afterwards."""
        self.graphs = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Gives a GPU's pages and graphs back, which have most of its memory. Of an engine that has ended."""
        if self.device.type == "cuda":
            self.release()
            self.store.free()

    # -- one step -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Begun:
        """Starts a step with its forward; on CPU that is over when this returns. `go_on` is to follow before anything else."""
        with self._threads_for(plan.num_tokens):
            self._turn = (self._turn + 1) % NUM_BUFFERS
            self._prepare(plan)
            if self.graphs is not None:
                return self._begin_on_gpu(plan, self.graphs)
            fields, words = torch.from_numpy(plan.fields), torch.tensor(plan.written, dtype=torch.int32)
            self._write(plan, words)
            step = self.program.make_tensors(self._shape(plan, plan.num_rows), fields)
            started = time.perf_counter()
            self.program.forward(step)
            return Begun(plan, step, forward_seconds=time.perf_counter() - started)

    @torch.inference_mode()
    def go_on(self, begun: Begun, masks: np.ndarray, grammars: Grammars | None = None) -> Launched:
        """Starts what follows a step's forward. masks: the plan's, or those that it awaits.

        grammars: that the model drafter's drafts are to follow. On CPU alone: what is allowed after a draft is known once that is chosen, and on
        a GPU nobody waits for the host in the middle of a step.
        """
        plan, step = begun.plan, begun.step
        with self._threads_for(plan.num_tokens):
            if begun.running is not None:
                return self._go_on_on_gpu(plan, begun.running, masks)
            self.program.masks, self.program.drafting.grammars = torch.from_numpy(masks), grammars or {}
            times = self.program.finish(step)
            phases = [begun.forward_seconds, *(end - begin for begin, end in zip(times, times[1:]))]
            drafts = tuple(end - times[-2] for end in step.draft_ends)
            seconds = StepTimes(*phases, drafts=drafts, is_first=self.program.has_recorded())
            read = _host_copies(step)
            results = Results(self._read(plan, read), read.rows[: plan.num_rows], seconds)
        return Launched(lambda: results, lambda: True)

    def _prepare(self, plan: StepPlan) -> None:
        """Pages and admissions."""
        # Kernels never read past a request's tokens; on CPU what lies there is multiplied by zero, and must be finite.
        cleared = plan.cleared_pages if self.device.type == "cpu" else []
        if plan.page_copies or cleared:
            self.store.copy(plan.page_copies, cleared)
        for arrival in plan.admissions:
            self.program.bad_words.put(arrival.admission.index, arrival.bad_words)
        self.table.admit([arrival.admission for arrival in plan.admissions], self._turn)

    def put_draft_probs(self, index: int, probs: torch.Tensor) -> None:
        """What the leading drafts [k, V] that the next plan writes for a request were drawn from."""
        self.program.distributions.put(index, probs)

    def read_draft_probs(self, index: int) -> torch.Tensor:
        """What the leading drafts that a request has now were drawn from [k, V] float32, on the host."""
        return self.program.distributions.get(index)

    def _write(self, plan: StepPlan, words: torch.Tensor) -> None:
        """What the plan writes into the page table and the request table; words: `plan.written` on the device."""
        table, begin = self.table, 0
        targets = (self.page_table, table.drafts, table.parents, table.num_drafts, self.program.distributions.num_drawn)
        for target, pairs in zip(targets, plan.write_lists):
            if pairs:
                ops.write_values(target, words[begin:], len(pairs) // 2)
                begin += len(pairs)

    def _shape(self, plan: StepPlan, batch: int) -> StepShape:
        return StepShape(
            batch=batch,
            num_queries=plan.num_queries,
            num_model_drafts=plan.num_model_drafts,
            least_standing=plan.least_standing / MILLION if self._stops_early else 0.0,
            trust=plan.trust / MILLION if self._stops_early else 1.0,
            has_lookup=plan.has_lookup,
            has_lookup_alone=plan.has_lookup_alone,
            has_prefixes=plan.has_prefixes,
            has_trees=plan.has_trees,
            reports_drafts=plan.reports_drafts,
            options=Options(plan.options),
            prompt_lens=tuple(plan.fields[COUNT, : plan.num_prompts].tolist()),
            prompt_seq_lens=tuple(plan.prompt_seq_lens),
            drafter_counts=tuple(plan.drafter_counts),
            drafter_seq_lens=tuple(plan.drafter_seq_lens),
            scored=tuple(plan.scored),
        )

    # -- on a GPU -----------------------------------------------------------------------------------------------------

    @property
    def _stage_words(self) -> int:
        """Fields of the widest step, and per request a full table of pages and all drafts: what one launch can bring at most."""
        return self.table.size * (NUM_FIELDS + 2 * (self.page_table.shape[1] + 2 * self.table.max_drafts + 2))

    def _begin_on_gpu(self, plan: StepPlan, graphs: Graphs) -> Begun:
        if not self._pinned:
            self._pinned = [torch.zeros(self._stage_words, dtype=torch.int32, pin_memory=True) for _ in range(NUM_BUFFERS)]
        shape = graphs.fit(self._shape(plan, plan.num_rows))
        fields = plan.padded_fields(shape.batch, self.table.dummy_index).ravel()
        words = np.concatenate([fields, np.asarray(plan.written, dtype=np.int32)])
        pinned = self._pinned[self._turn]
        pinned[: len(words)].numpy()[:] = words
        graphs.staged[: len(words)].copy_(pinned[: len(words)], non_blocking=True)
        self._write(plan, graphs.staged[len(fields) :])
        running = graphs.run(shape)
        return Begun(plan, running.step, running)

    def _go_on_on_gpu(self, plan: StepPlan, running: Running, masks: np.ndarray) -> Launched:
        if len(masks):
            self.program.masks[: len(masks)].copy_(self._pin_masks(masks), non_blocking=True)
        running.finish()
        copies = self._start_copies(running.step, plan.reports_drafts)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> Results:
            copied.synchronize()
            seconds = [begin.elapsed_time(end) / 1000 for begin, end in running.spans]
            arrays = _as_arrays(copies)
            return Results(self._read(plan, arrays), arrays.rows[: plan.num_rows], StepTimes(*seconds))

        return Launched(read, copied.query)

    def _start_copies(self, step: StepTensors, is_reported: bool) -> tuple[list[torch.Tensor | None], dict[int, torch.Tensor]]:
        """On their way to pinned memory: what most steps have to this turn's, the rest to memory of its own, which torch keeps for the next ones.
        is_reported: the report is looked at, which a captured step makes for others, too."""

        def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

        report = step.report if is_reported else None
        pinned, begin, copies = self._pin_results(step.results.numel() + (0 if report is None else report.numel())), 0, list[torch.Tensor | None]()
        for tensor in (step.results, report):
            if tensor is None:
                copies.append(None)
                continue
            end = begin + tensor.numel()
            copies.append(pinned[begin:end].view(tensor.shape).copy_(tensor, non_blocking=True))
            begin = end
        prompts = {row: own for row, scores in step.prompt_scores.items() if (own := copy(scores)) is not None}
        return [*copies, copy(step.scores)], prompts

    def _pin_results(self, count: int) -> torch.Tensor:
        pinned = self._pinned_results[self._turn]
        if len(pinned) < count:
            pinned = self._pinned_results[self._turn] = torch.empty(2 * count, dtype=torch.int32, pin_memory=True)
        return pinned

    def _pin_masks(self, masks: np.ndarray) -> torch.Tensor:
        """A copy in pinned memory. To allocate that waits for the device."""
        pinned = self._pinned_masks[self._turn]
        if len(pinned) < len(masks):
            rows = min(self._mask_shape[0], 2 * len(masks))
            pinned = self._pinned_masks[self._turn] = torch.empty(rows, masks.shape[1], dtype=torch.int32, pin_memory=True)
        pinned[: len(masks)].numpy()[:] = masks
        return pinned[: len(masks)]

    @property
    def is_capture_waiting(self) -> bool:
        return self.graphs is not None and self.graphs.is_capture_waiting

    def capture_waiting(self) -> bool:
        """Captures one shape that steps ran eagerly for want of a graph. For when nobody waits; False: there is none."""
        return self.graphs is not None and self.graphs.capture_waiting()

    # -- results ------------------------------------------------------------------------------------------------------

    def _read(self, plan: StepPlan, read: _Read) -> list[Outcome]:
        outcomes = []
        for num_emitted, num_accepted, num_drafts, is_broken, *emitted in read.rows[: plan.num_rows].tolist():
            outcomes.append(Outcome(emitted[:num_emitted], num_drafts, num_accepted, is_broken != 0))
        if read.report is not None:
            for outcome, row in zip(outcomes, read.report.tolist()):
                outcome.num_drafter_tokens, outcome.lookup_score = row[:2]
                outcome.next_drafts = row[REPORT_HEAD : REPORT_HEAD + row[2]]
                if self.table.has_trees:
                    parents = row[REPORT_HEAD + self.table.drafts.shape[1] :][: row[2]]
                    outcome.next_parents = parents if parents != list(range(-1, row[2] - 1)) else []
        if read.chances is not None:
            for outcome, row in zip(outcomes, read.chances[plan.fields[INDEX]].tolist()):
                outcome.draft_chances = row[: row.index(0.0)] if 0.0 in row else row
        if read.scores is not None:
            for b, outcome in enumerate(outcomes):
                outcome.scores = read.scores[b]
        for b, scores in read.prompt_scores.items():
            outcomes[b].prompt_scores = scores
        return outcomes


def _host_copies(step: StepTensors) -> _Read:
    prompts = {row: scores.numpy() for row, scores in step.prompt_scores.items()}
    report, scores = step.report, step.scores
    chances = None if step.chances is None else step.chances.numpy()
    return _Read(step.results.numpy(), None if report is None else report.numpy(), None if scores is None else scores.numpy(), prompts, chances)


def _as_arrays(copies: tuple[list[torch.Tensor | None], dict[int, torch.Tensor]]) -> _Read:
    (results, *others), prompts = copies
    assert results is not None
    report, scores = (None if tensor is None else tensor.numpy() for tensor in others)
    return _Read(results.numpy(), report, scores, {row: own.numpy() for row, own in prompts.items()})
