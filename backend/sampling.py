"""Logits -> the target's choice per row, under every sampling parameter, with the step's earlier drafts in the history."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backend.core import Request, Scheduled, TokenLogprobs
from kernels import ops

PROMPT_ROWS = 128
"""Tokens of a prompt that are scored at a time: each takes a row as wide as the vocabulary."""


class _History:
    """Counts that penalties need, for one request. Caught up with the request's tokens when they are asked for."""

    def __init__(self, request: Request, vocab_size: int, device: torch.device) -> None:
        self.request = request
        self.prompt_mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt_mask[torch.tensor(request.prompt_token_ids, device=device)] = True
        self._counts = torch.zeros(vocab_size, device=device)
        self._num_counted = len(request.prompt_token_ids)

    def counts(self, drafts: Sequence[int]) -> torch.Tensor:
        """Times each token was emitted before each row [1 + drafts, V]: row j has the first j drafts in it."""
        fresh = self.request.token_ids[self._num_counted :]
        if fresh:
            tokens = torch.tensor(fresh, device=self._counts.device)
            self._counts.index_add_(0, tokens, torch.ones(len(fresh), device=self._counts.device))
            self._num_counted += len(fresh)
        rows = self._counts.repeat(1 + len(drafts), 1)
        for place, token_id in enumerate(drafts):
            rows[place + 1 :, token_id] += 1
        return rows


def is_deterministic(request: Request) -> bool:
    """The likeliest token is the only choice."""
    return request.params.is_greedy or request.speculation.verify_strategy == "greedy"


class Sampler:
    """Owns what sampling remembers of each request. Called by the engine thread only."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._histories: dict[str, _History] = {}

    def stop(self, request: Request) -> None:
        self._histories.pop(request.request_id, None)

    @torch.inference_mode()
    def process(self, entries: Sequence[Scheduled], drafts: Sequence[Sequence[int]], logits: torch.Tensor, row_starts: Sequence[int]) -> None:
        """Applies every entry's penalties, biases and bans to its rows of logits [R, V], in place."""
        for b, entry in enumerate(entries):
            if row_starts[b] < row_starts[b + 1]:
                self._process(entry.request, drafts[b], logits[row_starts[b] : row_starts[b + 1]])

    @torch.inference_mode()
    def choose(self, entries: Sequence[Scheduled], logits: torch.Tensor, row_starts: Sequence[int]) -> torch.Tensor:
        """The target's token for every row of processed logits [R, V] -> int64 [R]: the likeliest, or a draw."""
        chosen = logits.argmax(dim=-1)
        drawn = [b for b, e in enumerate(entries) if row_starts[b] < row_starts[b + 1] and not is_deterministic(e.request)]
        if drawn:
            rows = [row for b in drawn for row in range(row_starts[b], row_starts[b + 1])]
            arguments = self.parameters([entries[b] for b in drawn], [row_starts[b + 1] - row_starts[b] for b in drawn])
            if len(rows) == len(logits):
                return ops.sample(logits, *arguments)
            index = torch.tensor(rows, device=self._device)
            chosen[index] = ops.sample(logits[index], *arguments)
        return chosen

    def parameters(self, entries: Sequence[Scheduled], num_rows: Sequence[int]) -> list[torch.Tensor]:
        """temperature, top_k, top_p, min_p, seed and position of each row [sum of num_rows], as `kernels.reference.sample` takes them."""
        rows: list[tuple[float, int, float, float, int, int]] = []
        for entry, count in zip(entries, num_rows, strict=True):
            params, seed, position = entry.request.params, entry.request.signed_seed, len(entry.request.token_ids)
            # As far as float32 and the vocabulary go; beyond, they change nothing.
            temperature, top_k = min(params.temperature, 1e30), min(max(params.top_k, 0), self._vocab_size)
            rows += [(temperature, top_k, params.top_p, params.min_p, seed, position + i) for i in range(count)]
        kinds = (torch.float32, torch.long, torch.float32, torch.float32, torch.long, torch.long)
        return [torch.tensor(c, dtype=k, device=self._device) for c, k in zip(zip(*rows, strict=True), kinds, strict=True)]

    def _process(self, request: Request, drafts: Sequence[int], rows: torch.Tensor) -> None:
        """Applies what changes the distribution before temperature, in place: penalties, bias, bans. rows [1 + drafts, V]."""
        params = request.params
        if params.has_penalties:
            history = self._histories.get(request.request_id)
            if history is None:
                history = self._histories[request.request_id] = _History(request, self._vocab_size, self._device)
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            columns = [torch.full((len(rows),), p, device=self._device) for p in penalties]
            rows.copy_(ops.apply_penalties(rows, history.prompt_mask.expand(len(rows), -1), history.counts(drafts), *columns))
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=self._device)
            rows[:, ids] += torch.tensor([float(b) for b in params.logit_bias.values()], device=self._device)
        early = params.min_tokens - request.num_output_tokens
        if early > 0 and request.stop_ids:
            rows[:early, torch.tensor(sorted(request.stop_ids), device=self._device)] = float("-inf")
        for words in request.bad_word_ids:
            *before, banned = words
            for place in range(len(rows)):
                history_ids = [*request.token_ids[-len(before) :], *drafts[:place]] if before else []
                if not before or history_ids[-len(before) :] == before:
                    rows[place, banned] = float("-inf")


@torch.inference_mode()
def score_prompt(request: Request, states: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt's tokens that follow those of states [chunk, hidden], the next ones to be computed."""
    scored: list[TokenLogprobs] = []
    following = request.prompt_token_ids[request.num_computed_tokens + 1 :]
    for part in states.split(PROMPT_ROWS):
        scored += pick_logprobs(logits(part), following[len(scored) : len(scored) + len(part)], request.params.logprobs or 0)
    return scored


def pick_logprobs(rows: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of one entry's emitted tokens: rows [>= len(token_ids), V] of unprocessed logits."""
    scores = rows[: len(token_ids)].log_softmax(dim=-1)
    chosen = scores.gather(1, torch.tensor(token_ids, device=rows.device)[:, None])[:, 0].tolist()
    values, ids = scores.topk(num_top, dim=-1) if num_top else (scores[:, :0], scores[:, :0].long())
    return [
        TokenLogprobs(token_id, logprob, list(zip(top_ids, top_values, strict=True)))
        for token_id, logprob, top_ids, top_values in zip(token_ids, chosen, ids.tolist(), values.tolist(), strict=True)
    ]
