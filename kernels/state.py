"""What the device keeps of each request, by slot, so that a captured step needs nothing of the host.

A request has one slot from its admission until its slot is given to another. The last slot belongs to no request: padding rows name it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels._load import load
from kernels.reference import slots as reference_slots

MAX_BIASES, MAX_BANNED = 1024, 512
MAX_DRAFTS = 31
"""One warp verifies a request."""
GREEDY, HAS_PENALTIES, HAS_BIAS, HAS_BANS, IS_REJECTION, IS_TOP_P = 1, 2, 4, 8, 16, 32
IN_PROMPT = 1 << 30

SLOTS = "PPPPPPPPPPPiiii"
"""Types of `SlotTable.arguments`, the struct Slots of slots.cuh."""

_PARAMS = np.dtype(
    [
        *((name, np.float32) for name in ("temperature", "top_p", "min_p")),
        ("top_k", np.int32),
        *((name, np.float32) for name in ("repetition", "presence", "frequency")),
        ("flags", np.int32),
        ("seed", np.int64),
        *((name, np.int32) for name in ("min_known", "num_biases", "num_banned", "max_total_tokens", "num_prompt_tokens", "reserved")),
    ]
)


@dataclass(frozen=True)
class Admission:
    """A request that gets a slot: its tokens so far and its parameters."""

    slot: int
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

    @property
    def flags(self) -> int:
        penalties = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
        bans = len(self.banned_ids) > 0 and self.min_known > len(self.token_ids)
        strategy = IS_REJECTION * self.is_rejection | IS_TOP_P * self.is_top_p
        return GREEDY * self.is_greedy | HAS_PENALTIES * penalties | HAS_BIAS * bool(self.logit_bias) | HAS_BANS * bans | strategy


class SlotTable:
    """State of S = max_requests + 1 slots. V: vocab_size.

    tokens [S, max_len], num_tokens [S]: prompt and output. drafts [S, max_drafts], num_drafts [S]: proposed for the next step.
    seen [S, N, 2], num_seen [S], seen_place [S, V]: the distinct tokens of a request with penalties, each with its count. All int32.
    params [S, 16] int32: the parameters; each also has a name of its own here, a strided view [S].
    """

    def __init__(self, max_requests: int, max_len: int, max_drafts: int, vocab_size: int, device: torch.device) -> None:
        if not 0 <= max_drafts <= MAX_DRAFTS:
            raise ValueError(f"max_drafts is {max_drafts}; the limit is {MAX_DRAFTS}")
        self.device, self.vocab_size, self.max_drafts = device, vocab_size, max_drafts
        self.max_len = -(-max_len // 4) * 4  # rows are read four tokens at a time
        self.num_slots = slots = max_requests + 1
        self.max_seen = min(self.max_len, vocab_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens, self.num_tokens = zeros(slots, self.max_len), zeros(slots)
        self.drafts, self.num_drafts = zeros(slots, max(max_drafts, 1)), zeros(slots)
        self.params = zeros(slots, _PARAMS.itemsize // 4)
        self.seen, self.seen_place, self.num_seen = zeros(slots, self.max_seen, 2), zeros(slots, vocab_size), zeros(slots)
        self.bias_ids, self.biases = zeros(slots, MAX_BIASES), zeros(slots, MAX_BIASES, dtype=torch.float32)
        self.banned_ids = zeros(slots, MAX_BANNED)
        floats, longs = self.params.view(torch.float32), self.params.view(torch.int64)
        self.temperature, self.top_p, self.min_p = floats[:, 0], floats[:, 1], floats[:, 2]
        self.top_k = self.params[:, 3]
        self.repetition, self.presence, self.frequency = floats[:, 4], floats[:, 5], floats[:, 6]
        self.flags = self.params[:, 7]
        self.seeds = longs[:, 4]
        self.min_known, self.num_biases, self.num_banned = self.params[:, 10], self.params[:, 11], self.params[:, 12]
        self.max_total_tokens, self.num_prompt_tokens = self.params[:, 13], self.params[:, 14]
        self._staging: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """The struct Slots as a kernel takes it, of types SLOTS."""
        lists = (self.bias_ids, self.biases, self.banned_ids)
        tensors = (self.tokens, self.num_tokens, self.drafts, self.num_drafts, self.params, self.seen, self.seen_place, self.num_seen, *lists)
        return (*tensors, self.max_len, self.drafts.shape[1], self.max_seen, self.vocab_size)

    def admit(self, admissions: Sequence[Admission], ring: int = 0) -> None:
        """Fills the slots of a step's new requests: one copy and one kernel, with no wait.

        ring: index of the pinned buffer. It may be used again once the work of this call is done on the stream.
        """
        for admission in admissions:
            self._check(admission)
        if not admissions:
            return
        if self.device.type != "cuda":
            for admission in admissions:
                reference_slots.admit(self, admission)
            return
        records = [self._record(admission) for admission in admissions]
        starts = np.cumsum([len(records), *(len(r) for r in records[:-1])], dtype=np.int32)
        words = np.concatenate([starts, *records])
        pinned, staged = self._staged(ring, len(words))
        pinned[: len(words)].numpy()[:] = words
        staged[: len(words)].copy_(pinned[: len(words)], non_blocking=True)
        load(self.device, "state", "admit", SLOTS + "P")((len(records), 1), (1024, 1, 1), *self.arguments, staged)

    def pack_params(self, admission: Admission) -> np.ndarray:
        """One row of `params`."""
        row = np.zeros(1, _PARAMS)
        row["temperature"] = min(admission.temperature, 1e30)  # as far as float32 goes; beyond, it changes nothing
        row["top_k"] = min(max(admission.top_k, 0), self.vocab_size)
        row["num_biases"], row["num_banned"] = len(admission.logit_bias), len(admission.banned_ids)
        same = ("top_p", "min_p", "repetition", "presence", "frequency", "flags", "seed", "min_known", "max_total_tokens", "num_prompt_tokens")
        for name in same:
            row[name] = getattr(admission, name)
        return row.view(np.int32)

    def _check(self, admission: Admission) -> None:
        limits = (
            ("slot", admission.slot, self.num_slots - 2),
            ("number of tokens", len(admission.token_ids), self.max_len),
            ("max_total_tokens", admission.max_total_tokens, self.max_len),
            ("number of biases", len(admission.logit_bias), MAX_BIASES),
            ("number of banned ids", len(admission.banned_ids), MAX_BANNED),
        )
        for name, value, limit in limits:
            if not 0 <= value <= limit:
                raise ValueError(f"slot {admission.slot}: {name} is {value}; the limit is {limit}")

    def _record(self, admission: Admission) -> np.ndarray:
        head = np.array([admission.slot, len(admission.token_ids)], np.int32)
        ids, biases = np.array(list(admission.logit_bias), np.int32), np.array(list(admission.logit_bias.values()), np.float32)
        tokens, banned = np.asarray(admission.token_ids, np.int32), np.asarray(admission.banned_ids, np.int32)
        return np.concatenate([head, self.pack_params(admission), tokens, ids, biases.view(np.int32), banned])

    def _staged(self, ring: int, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pinned and the device buffer of a ring index, grown when a step admits more than any before."""
        if ring not in self._staging or len(self._staging[ring][0]) < num_words:
            size = max(1 << 16, 1 << (num_words - 1).bit_length())
            pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
            self._staging[ring] = (pinned, torch.empty(size, dtype=torch.int32, device=self.device))
        return self._staging[ring]


def commit(emitted: torch.Tensor, num_emitted: torch.Tensor, table: SlotTable, row_slots: torch.Tensor) -> None:
    """Appends emitted [B, K + 1] (the first num_emitted [B]) to the tokens of row_slots [B], and to the counts of requests with penalties.

    What goes past a request's max_total_tokens is cut, there and in emitted (-1) and num_emitted. Drafts of rows that emit are used up.
    """
    if emitted.ndim != 2 or emitted.shape[1] > MAX_DRAFTS + 1:
        raise ValueError(f"emitted has shape {list(emitted.shape)}; [B, K + 1] with K + 1 <= {MAX_DRAFTS + 1} is needed")
    if not emitted.is_cuda:
        return reference_slots.commit(emitted, num_emitted, table, row_slots)
    kernel = load(emitted.device, "state", "commit", "PP" + SLOTS + "Pi")
    kernel((len(emitted), 1), (32, 1, 1), emitted, num_emitted, *table.arguments, row_slots, emitted.shape[1])
