"""What an engine is made of, loaded."""

from __future__ import annotations

from dataclasses import dataclass

from backend.config import EngineConfig
from backend.core import Request
from backend.drafters import Drafters, cost_class, count_block_rows, count_tokens_after_step
from backend.drafters.calls import DraftService
from backend.errors import ConfigError
from backend.model_checks import read_spec
from backend.parallel.ranks import Ranks
from backend.planner import Planner
from backend.scheduler import Scheduler
from backend.step.pieces import whole_rows
from backend.step.worker import Worker
from backend.text import Tokenizer
from backend.tokenizer_checks import check_vocabulary


@dataclass(frozen=True, slots=True)
class EngineParts:
    tokenizer: Tokenizer
    worker: Worker
    """Warmed up."""
    drafters: Drafters
    scheduler: Scheduler
    planner: Planner


def load_parts(config: EngineConfig, ranks: Ranks, draft_service: DraftService | None) -> EngineParts:
    """draft_service: see `Engine`. Raises ConfigError, ModelError."""
    speculative = config.speculative_config
    tokenizer = Tokenizer(config.model)
    check_vocabulary(tokenizer.tokens, read_spec(config.model), config.unknown_tokens)
    worker = Worker(config, ranks)
    has_step_drafter = worker.drafter is not None

    def make_service() -> DraftService:
        if draft_service is None:
            raise ConfigError("speculative_config.placement bls needs a server: offline, use in_process")
        return draft_service

    drafters = Drafters(
        speculative,
        worker.model.vocab_size,
        has_step_drafter=has_step_drafter,
        make_service=make_service,
        fingerprint=tokenizer.fingerprint,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        is_layout_exact=worker.graphs is None,
        cost_class=cost_class(worker.drafter),
        max_model_drafts=worker.drafter.max_drafts if worker.drafter is not None else 0,
    )
    drafters.attach(worker.store)

    def count_after_step(request: Request) -> int:
        num_model = request.speculation.num_model_steps if drafters.place(request).has_model else 0
        return count_tokens_after_step(speculative, worker.drafter, num_model)

    scheduler = Scheduler(
        num_pages=worker.store.num_pages,
        page_size=config.page_size,
        count_tokens_after_step=count_after_step,
        max_batch_size=config.max_batch_size,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        max_model_len=worker.max_model_len,
        max_waiting=config.max_waiting,
        enable_prefix_caching=config.enable_prefix_caching,
        whole_rows=whole_rows if worker.graphs is not None else None,
    )
    heads = worker.model.heads
    planner = Planner(
        speculative,
        drafters,
        max_batch_size=config.max_batch_size,
        max_model_len=worker.max_model_len,
        num_pages=worker.store.num_pages,
        page_size=config.page_size,
        max_drafter_tokens=worker.max_num_batched_tokens + 1,
        has_step_drafter=has_step_drafter,
        has_state_keeper=worker.drafter is not None and worker.drafter.keeper is not None,
        is_layout_exact=worker.graphs is None,
        max_masked_drafts=config.max_masked_drafts,
        drafts_forced=config.max_forced_tokens > 0,
        cascade_heads=(heads[0], heads[1]) if config.cascade_attention and worker.graphs is not None else None,
        max_model_drafts=worker.drafter.max_drafts if worker.drafter is not None else 0,
        num_block_rows=count_block_rows(worker.drafter),
    )
    worker.warm_up()
    return EngineParts(tokenizer, worker, drafters, scheduler, planner)
