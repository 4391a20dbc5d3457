"""The engine's counts, as they are told to the process that publishes them."""

from __future__ import annotations

import threading
from collections import Counter

from backend.disaggregation.prefill import RESULTS
from backend.disaggregation.records import FALLBACKS
from backend.disaggregation.service import Disaggregation
from backend.engine import Engine
from backend.engine_process.count import Count
from backend.metrics import Histogram

FINISH_REASONS = ("stop", "length", "cancelled", "timeout")


class Counts:
    """What there is to be told of an engine."""

    def __init__(self, engine: Engine, nodes: Disaggregation | None = None) -> None:
        self._engine = engine
        self._nodes = nodes
        self._told: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._news: list[Count] = []
        self._ends = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._lock = threading.Lock()
        loaded = engine.config.speculative_config.loaded_methods
        self._methods = [m for m in loaded if m not in ("none", "naive")]

    def count_end(self, reason: str, count: int) -> None:
        """So many completions ended before the engine had them. May be called from any thread."""
        with self._lock:
            self._ends[reason] += count

    def news(self) -> list[Count]:
        """Those that changed since the last call; the first has all."""
        self._news = []
        self._look()
        return self._news

    def _look(self) -> None:
        metrics, scheduler, faults = self._engine.metrics, self._engine.scheduler, self._engine.drafters.faults
        budget = self._engine.budget
        for name, counter, text in (
            ("drafts", metrics.drafts, "Steps of a request that verified at least one draft"),
            ("draft_tokens", metrics.draft_tokens, "Tokens drafted"),
            ("accepted_tokens", metrics.accepted_tokens, "Drafted tokens accepted"),
            ("predicted_tokens", budget.predicted, "Drafted tokens that were expected to be accepted when they were verified"),
            ("emitted_tokens", metrics.emitted_tokens, "Tokens emitted"),
            ("drafter_failures", faults.failures, "Times a drafter raised or could not be reached"),
            ("invalid_drafts", faults.invalid, "Proposals refused: too long, or with ids outside the vocabulary"),
            ("undrafted_steps", faults.undrafted, "Steps of a request decoded plainly because its drafter was down"),
        ):
            # From zero on, those of loaded methods too: a rate does not see the step from absent to one.
            for method in dict.fromkeys([*self._methods, *counter]):
                self._count(f"spec_decode_num_{name}_total", text, counter[method], method=method)
        for name, positions, text in (
            ("draft_tokens", metrics.drafted_per_position, "Tokens drafted, by position in the draft"),
            ("accepted_tokens", metrics.accepted_per_position, "Drafted tokens accepted, by position in the draft"),
        ):
            for (method, position), value in list(positions.items()):
                self._count(f"spec_decode_num_{name}_per_pos_total", text, value, method=method, position=str(position))
        for name, seconds, text in (
            ("propose", metrics.propose_seconds, "Seconds of drafting"),
            ("forward", metrics.forward_seconds, "Seconds of the target's forward pass"),
            ("verify", metrics.verify_seconds, "Seconds of sampling and verification"),
        ):
            self._count(f"step_{name}_seconds_total", text, seconds)
        for reason in FINISH_REASONS:
            self._count(
                "requests_finished_total",
                "Completions that came to an end, by finish reason",
                metrics.finished_requests[reason] + self._ends[reason],
                finish_reason=reason,
            )
        self._count("steps_total", "Steps run", metrics.steps)
        self._count("preemptions_total", "Requests set back for want of KV pages", metrics.preemptions)
        self._count("prompt_tokens_total", "Prompt tokens admitted", scheduler.num_prompt_tokens)
        self._count("prompt_tokens_cached_total", "Prompt tokens that the prefix cache gave", scheduler.num_cached_tokens)
        self._histogram("time_to_first_token_seconds", "Time to first token", metrics.time_to_first_token)
        self._histogram("time_per_output_token_seconds", "Time per output token after the first", metrics.time_per_output_token)
        self._histogram("inter_token_seconds", "From one step with tokens of a completion to the next", metrics.inter_token)
        self._histogram("request_seconds", "From a request to its completion's end", metrics.request_time)
        self._histogram("request_queue_seconds", "From a request to the step that computes the first of it", metrics.queue_time)
        self._histogram("request_prompt_tokens", "Prompt tokens of completions that came to an end", metrics.prompt_tokens)
        self._histogram("request_output_tokens", "Tokens of completions that came to an end", metrics.output_tokens)
        self._histogram("step_seconds", "Time of one step", metrics.step_time)
        self._histogram("spec_decode_accepted_length", "Tokens that a step with drafts emitted", metrics.accepted_length)
        self._histogram("spec_decode_budget", "Drafts that a step verified for a request", budget.chosen)
        self._gauge(
            "spec_decode_regret", "Share of speed that the best fixed number of drafts would have added lately, by measured times", budget.regret
        )
        self._gauge("requests_running", "Requests in the batch", len(scheduler.running))
        self._gauge("requests_waiting", "Requests waiting for room", scheduler.num_waiting)
        self._gauge("kv_pages_held", "KV pages held by requests", scheduler.pool.num_held)
        self._gauge("kv_pages", "KV pages in all", scheduler.pool.num_pages)
        self._gauge("kv_page_tokens", "Tokens that a KV page holds", scheduler.pool.page_size)
        hit_rate = scheduler.num_cached_tokens / max(1, scheduler.num_prompt_tokens)
        self._gauge("prefix_cache_hit_rate", "Share of prompt tokens that the prefix cache gave", hit_rate)

        if self._nodes is not None:
            self._look_at(self._nodes)

    def _look_at(self, nodes: Disaggregation) -> None:
        """Of prefill and decode apart."""
        hand_offs = self._engine.hand_offs
        self._gauge("pd_nodes", "Other nodes that live", len(nodes.node.state.peers))
        self._gauge("pd_redis_up", "Whether Redis answered last", int(nodes.node.state.is_connected))
        if nodes.fetcher is not None:
            self._count("pd_fetched_prompts_total", "Prompts that other nodes computed", hand_offs.num_fetched)
            self._count("pd_transferred_bytes_total", "Bytes of pages read from other nodes", nodes.fetcher.reads.num_bytes)
            self._count("pd_transfer_seconds_total", "Time of those reads, each until it was seen to be done", nodes.fetcher.reads.seconds)
            self._gauge("pd_fetches", "Prompts that other nodes are computing", len(self._engine.scheduler.fetches))
            for reason in FALLBACKS:
                text = "Prompts computed here though another node was to, by reason"
                self._count("pd_fallbacks_total", text, hand_offs.fallbacks[reason], reason=reason)
        if nodes.prefill is not None:
            for result in RESULTS:
                self._count("pd_jobs_total", "Prompts computed for other nodes, by result", nodes.prefill.held.results[result], result=result)
            self._gauge("pd_jobs", "Prompts of other nodes whose pages are held", nodes.prefill.num_open)
            self._gauge("pd_prefill_tokens", "Prompt tokens that are to be computed", nodes.prefill.held.num_tokens)
            self._gauge("pd_queue_seconds", "Greatest age of jobs that wait, or were taken lately", nodes.prefill.queue_seconds)
            self._gauge("pd_queue_jobs", "Jobs in this node's queue that nobody has taken", nodes.prefill.queue_length)
            self._count("pd_expired_leases_total", "Prompts whose pages nobody came for", nodes.prefill.held.num_expired_leases)

    def _tell(self, count: Count) -> None:
        key = count.name, count.labels
        if self._told.get(key) != count.value:
            self._told[key] = count.value
            self._news.append(count)

    def _count(self, name: str, text: str, value: float, **labels: str) -> None:
        self._tell(Count(name, text, value, tuple(labels.items())))

    def _gauge(self, name: str, text: str, value: float) -> None:
        self._tell(Count(name, text, value, is_gauge=True))

    def _histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """As counters: this server's Python API has no histogram, and Prometheus computes quantiles from the buckets."""
        total = 0
        for bound, count in zip([*map(str, histogram.bounds), "+Inf"], list(histogram.counts), strict=True):
            total += count
            self._count(f"{name}_bucket", f"{text}, cumulative by upper bound", total, le=bound)
        self._count(f"{name}_sum", f"{text}, sum", histogram.sum)
        self._count(f"{name}_count", f"{text}, count", total)
