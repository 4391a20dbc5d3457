"""What is kept of each request, so that a step needs nothing of the host: the memory alone, which operations and their twins share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kernels.structs import (
    GREEDY,
    HAS_BANS,
    HAS_BIAS,
    HAS_PENALTIES,
    IS_REJECTION,
    IS_TOP_P,
    MAX_BANNED,
    MAX_BIASES,
    MAX_DRAFTS,
    MAX_NODES,
    RequestParams,
    Requests,
    dtype_of,
)

_PARAMS = dtype_of(RequestParams)


@dataclass(frozen=True)
class Admission:
    """A request that gets a place in the table: its tokens so far and its parameters."""

    index: int
    token_ids: Sequence[int]
    """Prompt, and output of a request that was preempted."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Known tokens at which the request ends."""
    is_greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """64 bits, as int64 holds them."""
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_ids: Sequence[int] = ()
    """Ids that rows may not choose while fewer than min_known tokens are known."""
    min_known: int = 0
    is_rejection: bool = False
    """Its drafts are verified by rejection."""
    is_top_p: bool = False
    """Its drafts are verified by topp."""
    num_drafter_tokens: int = 0
    """Leading tokens that the step's model drafter has computed."""

    @property
    def flags(self) -> int:
        penalties = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
        bans = len(self.banned_ids) > 0 and self.min_known > len(self.token_ids)
        strategy = IS_REJECTION * self.is_rejection | IS_TOP_P * self.is_top_p
        return GREEDY * self.is_greedy | HAS_PENALTIES * penalties | HAS_BIAS * bool(self.logit_bias) | HAS_BANS * bans | strategy


class Arrays(NamedTuple):
    """The tensors of a table on CPU as NumPy sees them: at these sizes its operations take a fraction of torch's time."""

    tokens: np.ndarray
    num_tokens: np.ndarray
    drafts: np.ndarray
    parents: np.ndarray
    num_drafts: np.ndarray
    num_drafter_tokens: np.ndarray
    params: np.ndarray
    """[S] of `RequestParams`."""
    seen: np.ndarray
    seen_place: np.ndarray
    num_seen: np.ndarray
    bias_ids: np.ndarray
    biases: np.ndarray
    banned_ids: np.ndarray


class RequestState:
    """State of S = max_requests + 1 places. V: vocab_size. The last place belongs to no request: padding rows name it.

    tokens [S, max_len], num_tokens [S]: prompt and output. drafts [S, max_drafts], num_drafts [S]: proposed for the next step.
    parents [S, max_drafts]: where drafts may be trees, the number of the draft that each follows, which comes before it; -1: the newest token.
    num_drafter_tokens [S]: leading tokens that the step's model drafter has computed.
    seen [S, N, 2], num_seen [S], seen_place [S, V]: the distinct tokens of a request with penalties, each with its count. All int32.
    params [S, 16] int32: the parameters; each also has a name of its own here, a strided view [S].
    """

    def __init__(self, max_requests: int, max_len: int, max_drafts: int, vocab_size: int, device: torch.device, *, has_trees: bool = False) -> None:
        """has_trees: drafts of some requests may be trees."""
        most = MAX_NODES if has_trees else MAX_DRAFTS
        if not 0 <= max_drafts <= most:
            raise ValueError(f"max_drafts is {max_drafts}; the limit is {most}")
        self.device, self.vocab_size, self.max_drafts, self.has_trees = device, vocab_size, max_drafts, has_trees
        self.max_len = -(-max_len // 4) * 4  # rows are read four tokens at a time
        self.size = size = max_requests + 1
        self.dummy_index = max_requests
        self.max_seen = min(self.max_len, vocab_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens, self.num_tokens = zeros(size, self.max_len), zeros(size)
        self.drafts, self.num_drafts, self.num_drafter_tokens = zeros(size, max(max_drafts, 1)), zeros(size), zeros(size)
        self.parents = zeros(size if has_trees else 0, self.drafts.shape[1])
        self.parents += torch.arange(-1, self.drafts.shape[1] - 1, dtype=torch.int32, device=device)
        self.params = zeros(size, _PARAMS.itemsize // 4)
        self.seen, self.seen_place, self.num_seen = zeros(size, self.max_seen, 2), zeros(size, vocab_size), zeros(size)
        self.bias_ids, self.biases = zeros(size, MAX_BIASES), zeros(size, MAX_BIASES, dtype=torch.float32)
        self.banned_ids = zeros(size, MAX_BANNED)
        floats, longs = self.params.view(torch.float32), self.params.view(torch.int64)
        places = {name: number for number, name in enumerate(RequestParams._fields)}
        self.temperature, self.top_p, self.min_p = (floats[:, places[name]] for name in ("temperature", "top_p", "min_p"))
        self.repetition, self.presence, self.frequency = (floats[:, places[name]] for name in ("repetition", "presence", "frequency"))
        self.top_k, self.flags = self.params[:, places["top_k"]], self.params[:, places["flags"]]
        self.seeds = longs[:, places["seed_low"] // 2]
        self.min_known, self.num_biases, self.num_banned = (self.params[:, places[name]] for name in ("min_known", "num_biases", "num_banned"))
        self.max_total_tokens, self.num_prompt_tokens = (self.params[:, places[name]] for name in ("max_total_tokens", "num_prompt_tokens"))
        lists = (self.bias_ids, self.biases, self.banned_ids)
        tensors = (self.tokens, self.num_tokens, self.drafts, self.parents, self.num_drafts, self.num_drafter_tokens, self.params)
        self._tensors = (*tensors, self.seen, self.seen_place, self.num_seen, *lists)
        self.arguments = Requests(*self._tensors, self.max_len, self.drafts.shape[1], self.max_seen, vocab_size)
        if not has_trees:
            self.arguments = self.arguments._replace(parents=0)
        """The table as a kernel takes it."""
        if device.type == "cpu":
            arrays = [tensor.numpy() for tensor in self._tensors]
            arrays[Arrays._fields.index("params")] = self.params.numpy().view(_PARAMS)[:, 0]
            self.arrays = Arrays(*arrays)

    def are_greedy(self, request_indices: torch.Tensor) -> bool:
        """On CPU: whether none of these [B] int32 draws its tokens."""
        return bool((self.arrays.params["flags"].take(request_indices.numpy()) & GREEDY).all())

    def pack_params(self, admission: Admission) -> np.ndarray:
        """One row of `params`."""
        seed = admission.seed & 0xFFFFFFFFFFFFFFFF
        row = RequestParams(
            temperature=min(admission.temperature, 1e30),  # as far as float32 goes; beyond, it changes nothing
            top_p=admission.top_p,
            min_p=admission.min_p,
            top_k=min(max(admission.top_k, 0), self.vocab_size),
            repetition=admission.repetition,
            presence=admission.presence,
            frequency=admission.frequency,
            flags=admission.flags,
            seed_low=seed & 0xFFFFFFFF,
            seed_high=seed >> 32,
            min_known=admission.min_known,
            num_biases=len(admission.logit_bias),
            num_banned=len(admission.banned_ids),
            max_total_tokens=admission.max_total_tokens,
            num_prompt_tokens=admission.num_prompt_tokens,
            num_drafter_tokens=admission.num_drafter_tokens,
        )
        return np.array([row], _PARAMS)

    def check(self, admission: Admission) -> None:
        """Raises ValueError when an admission does not fit."""
        limits = (
            ("index", admission.index, self.size - 2),
            ("number of tokens", len(admission.token_ids), self.max_len),
            ("max_total_tokens", admission.max_total_tokens, self.max_len),
            ("number of drafter tokens", admission.num_drafter_tokens, len(admission.token_ids)),
            ("number of biases", len(admission.logit_bias), MAX_BIASES),
            ("number of banned ids", len(admission.banned_ids), MAX_BANNED),
        )
        for name, value, limit in limits:
            if not 0 <= value <= limit:
                raise ValueError(f"request index {admission.index}: {name} is {value}; the limit is {limit}")
