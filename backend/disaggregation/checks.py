"""What comes from other nodes, looked at before the engine has it: one bad number there would end every request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from backend.core import Request
from backend.disaggregation.records import Job, Message, RecordError
from backend.errors import ConfigError
from backend.grammar.thinking import OPENS, THINKING
from backend.request_speculation import resolve
from backend.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_COMPLETIONS, MAX_SEED
from backend.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from backend.step.scores import score_width
from backend.trees import MAX_DEPTH
from kernels.structs import MAX_BANNED

MAX_WORDS = 2 * MAX_BAD_WORDS
"""Each is spelled at the start of a word, and inside one."""
MAX_INTEGER = 2**63


def check_job(job: Job, config: SpeculativeConfig, vocab_size: int, page_size: int) -> None:
    """Raises RecordError naming what cannot be."""
    request, speculation = job.request, job.request.speculation
    if not request.prompt_token_ids:
        raise RecordError("a job has no prompt")
    _check_ids("prompt", request.prompt_token_ids, vocab_size)
    _check_ids("logit_bias", request.params.logit_bias, vocab_size)
    if len(request.stop_ids) > MAX_BANNED:
        raise RecordError(f"a job has {len(request.stop_ids)} stop_ids; the limit is {MAX_BANNED}")
    _check_ids("stop_ids", request.stop_ids, vocab_size)
    if len(request.bad_word_ids) > MAX_WORDS:
        raise RecordError(f"a job has {len(request.bad_word_ids)} bad words; the limit is {MAX_WORDS}")
    for ids in request.bad_word_ids:
        _check_integer("the length of a bad word", len(ids), 1, MAX_BAD_WORD_TOKENS)
        _check_ids("bad_word_ids", ids, vocab_size)
    _check_integer("num_cached_pages", job.num_cached_pages, 0, len(request.prompt_token_ids) // page_size)
    _check_integer("state", job.state, OPENS, THINKING)
    _check_integer("seed", request.seed, -MAX_INTEGER, MAX_SEED + MAX_COMPLETIONS)  # completion i has seed + i
    for key in ("index", "priority"):
        _check_integer(key, getattr(request, key), -MAX_INTEGER, MAX_INTEGER)
    _check_integer("num_speculative_tokens", speculation.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
    _check_integer("num_model_steps", speculation.num_model_steps, 0, MAX_SPECULATIVE_TOKENS)
    _check_integer("num_nodes", speculation.num_nodes, 0, config.tree.num_nodes if config.tree is not None else 0)
    own = {"method": speculation.method, "verify_strategy": speculation.verify_strategy}
    try:
        resolve(config, own | ({"mtp_strategy": speculation.mtp_strategy} if speculation.mtp_strategy != config.mtp_strategy else {}))
    except ConfigError as error:
        raise RecordError(str(error)) from None


def check_done(message: Message, request: Request, vocab_size: int, num_pages: int, page_bytes: int) -> None:
    """Raises RecordError naming what cannot be in the hand-off of this request's prompt, which takes num_pages: nothing comes after it, and pages
    that it leaves out would be waited for."""
    if message.hand_off is None:
        raise RecordError("a prompt is done and nothing is handed over")
    outcome, sources = message.hand_off.outcome, message.hand_off.sources
    lists = {name: getattr(outcome, name) for name in ("token_ids", "next_drafts", "next_parents")} | {"sources": sources}
    for name, value in lists.items():
        if not isinstance(value, list):
            raise RecordError(f"{name} is {value!r:.50}; a list is needed")
    if bad := [source for source in sources if not isinstance(source, str)]:
        raise RecordError(f"sources has {bad[0]!r:.50}; names are needed")
    most = max(MAX_SPECULATIVE_TOKENS, request.speculation.num_nodes)
    if len(outcome.token_ids) != 1 or len(outcome.next_drafts) > most or len(sources) != len(outcome.next_drafts):
        raise RecordError(f"{len(outcome.token_ids)} tokens came, {len(outcome.next_drafts)} drafts and the sources of {len(sources)}")
    _check_ids("token_ids", outcome.token_ids, vocab_size)
    _check_ids("next_drafts", outcome.next_drafts, vocab_size)
    _check_parents(outcome.next_parents, len(outcome.next_drafts) if request.speculation.num_nodes else 0)
    _check_integer("num_drafter_tokens", outcome.num_drafter_tokens, 0, len(request.prompt_token_ids) + 1)
    _check_scores(outcome.scores, request.params.logprobs is not None, vocab_size)
    if (come := message.first_page + len(message.page_ids)) < num_pages:
        raise RecordError(f"{come} pages of the prompt came; it takes {num_pages}")
    count, width = message.probs_shape
    num_wanted = -(-count * width * 4 // page_bytes)
    if not 0 <= count <= len(outcome.next_drafts) or width != (vocab_size if count else 0) or len(message.probs_pages) != num_wanted:
        raise RecordError(
            f"distributions of {[count, width]} numbers came in {len(message.probs_pages)} pages, for {len(outcome.next_drafts)} drafts"
        )


def _check_scores(scores: np.ndarray | None, are_wanted: bool, vocab_size: int) -> None:
    width = score_width(vocab_size)
    if (scores is not None) != are_wanted or (scores is not None and scores.shape != (1, width)):
        raise RecordError(f"log-probabilities came as {None if scores is None else list(scores.shape)}")
    if scores is not None:
        _check_ids("scores", scores[0, 1 : 1 + width // 2].tolist(), vocab_size)


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    values = token_ids if isinstance(token_ids, list) else list(token_ids)
    if not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocab_size):
        return  # so far in a fraction of the time that a look at each takes
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise RecordError(f"{name} has token {value!r:.50}; the vocabulary has ids 0 to {vocab_size - 1}")


def _check_parents(parents: Sequence[int], num_drafts: int) -> None:
    """parents: empty, or of each draft the number of the one before it."""
    if parents and len(parents) != num_drafts:
        raise RecordError(f"the parents of {len(parents)} drafts came; the tree has {num_drafts}")
    depths: list[int] = []
    for number, parent in enumerate(parents):
        _check_integer(f"next_parents[{number}]", parent, -1, number - 1)
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
        _check_integer(f"the depth of draft {number}", depths[number], 1, MAX_DEPTH)


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RecordError(f"{name} is {value!r:.50}; an integer from {least} to {most} is needed")
