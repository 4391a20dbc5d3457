"""What CUDA and Python have to agree on, defined once: the layout of structs, field numbers, flags and limits. `header` is the CUDA side.

A struct is a NamedTuple whose annotations say the C types; a value of it is passed to a kernel by value.
"""

from __future__ import annotations

import enum
import functools
import typing
from struct import calcsize
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

Unsigned = Annotated[int, "unsigned"]
Ints = Annotated["torch.Tensor | int", "int*"]
Floats = Annotated["torch.Tensor | int", "float*"]
Pairs = Annotated["torch.Tensor | int", "int2*"]
Params = Annotated["torch.Tensor | int", "RequestParams*"]
"""Pointers: a tensor, or 0 where the kernel does not look."""

MAX_BIASES, MAX_BANNED = 1024, 512
MAX_DRAFTS = 31
"""Of a chain: one warp verifies a request."""
MAX_NODES = 63
"""Drafts of a tree: a row says which of its request's rows it sees in 64 bits."""
MAX_DEPTH = 16
"""Drafts on one path of a tree."""
MAX_BATCH = 256
"""Requests of a step: one block lays them out, a thread for each."""
MAX_SCORE_PAST = 16
"""Tokens past the longest size that the score of a lookup counts."""
IN_PROMPT = 1 << 30
"""Beside the count in `Requests.seen`."""
RESULT_HEAD = 4
"""Before the tokens of a row of results: tokens emitted, drafts accepted, drafts verified, and 1 when a score was not finite."""

GREEDY, HAS_PENALTIES, HAS_BIAS, HAS_BANS, IS_REJECTION, IS_TOP_P = 1, 2, 4, 8, 16, 32
RULES = HAS_PENALTIES | HAS_BIAS | HAS_BANS
"""Flags of a request whose logits are changed before a token is chosen."""

SAMPLE_STREAM, ACCEPT_STREAM, RECOVER_STREAM, DRAFT_STREAM = 0, 1, 2, 3
"""Independent random numbers of one (seed, position): drawing a token, accepting a draft, replacing a rejected one, drafting."""


class Policy(enum.IntEnum):
    """Which drafts `verify_drafts` accepts."""

    NORMAL = 0
    ACCEPT_ALL = 1
    REJECT_ALL = 2


class Field(enum.IntEnum):
    """What the host says of each batch row of a step: the rows of `fields` [NUM_FIELDS, B] int32."""

    INDEX = 0
    """The request's place in the request table; the last place is a dummy, whose rows compute nothing."""
    NUM_PAGES = 1
    END = 2
    """Number of tokens at which the request ends."""
    FIRST = 3
    """Position of the first token to compute; -1: the newest known token, where the device alone knows it."""
    COUNT = 4
    """Known tokens to compute; 1 where FIRST is -1."""
    EMITS = 5
    """1: the logits of the row's last token, and of its drafts, are wanted."""
    VERIFY_LIMIT = 6
    """Most drafts to verify. Only rows whose FIRST is -1 have drafts."""
    DRAFTER_COUNT = 7
    """Rows that the model drafter computes, from the first token that it has not computed on. 0: none; -1: up to the newest token."""
    MODEL_LIMIT = 8
    """Most drafts that the model drafter makes."""
    LOOKUP_LIMIT = 9
    """Most drafts once a lookup lengthened them; -1: no lookup."""
    LOOKUP_ALONE = 10
    """Score from which a lookup alone drafts, and the model drafter is not asked."""
    PREFIX_GROUP = 11
    """Rows of one group (numbered by its first row) share their first tokens' pages; -1: none."""
    PREFIX_LEN = 12
    """How many tokens those are."""
    MASK = 13
    """Which of the step's token masks belongs to the row's first logits; those of its drafts follow. -1: it may choose any token."""


NUM_FIELDS = len(Field)
(INDEX, NUM_PAGES, END, FIRST, COUNT, EMITS, VERIFY_LIMIT, DRAFTER_COUNT, MODEL_LIMIT, LOOKUP_LIMIT, LOOKUP_ALONE, PREFIX_GROUP, PREFIX_LEN, MASK) = (
    range(NUM_FIELDS)
)
"""The same as plain numbers: tensors take no time over those."""


class RequestParams(NamedTuple):
    """A row of `RequestTable.params`: 16 words."""

    temperature: float
    top_p: float
    min_p: float
    top_k: int
    repetition: float
    presence: float
    frequency: float
    flags: int
    seed_low: Unsigned
    seed_high: Unsigned
    min_known: int
    num_biases: int
    num_banned: int
    max_total_tokens: int
    num_prompt_tokens: int
    num_drafter_tokens: int
    """At admission; later in `Requests.num_drafter_tokens`."""


class Requests(NamedTuple):
    """The request table as a kernel takes it; S places."""

    tokens: Ints = 0
    """[S, max_len] prompt and output."""
    num_tokens: Ints = 0
    drafts: Ints = 0
    """[S, max_drafts]"""
    parents: Ints = 0
    """[S, max_drafts] number of the draft before each; -1: the newest token. 0: all drafts are chains."""
    num_drafts: Ints = 0
    num_drafter_tokens: Ints = 0
    """[S] leading tokens that the step's model drafter has computed."""
    params: Params = 0
    seen: Pairs = 0
    """[S, max_seen] token, times emitted | IN_PROMPT; each token once, in no order."""
    seen_place: Ints = 0
    """[S, vocab_size] place in `seen` + 1, 0: none."""
    num_seen: Ints = 0
    bias_ids: Ints = 0
    """[S, MAX_BIASES]"""
    biases: Floats = 0
    banned_ids: Ints = 0
    """[S, MAX_BANNED]"""
    max_len: int = 0
    max_drafts: int = 0
    max_seen: int = 0
    vocab_size: int = 0


class StepSizes(NamedTuple):
    """Bounds of one step, the same at each replay of its graph.

    Strides say how far apart pages lie, in tokens of the plane that is meant: a token's KV slot is page * stride + place in the page.
    """

    batch: int
    """Rows of `fields`: requests, and rows of the dummy."""
    num_prompts: int
    """Leading rows whose tokens the host names (FIRST is not -1)."""
    prompt_rows: int
    """Packed rows of those."""
    rows: int
    """Room for packed rows."""
    max_tokens: int
    """Width of `RequestTable.tokens`."""
    max_drafts: int
    """Width of `RequestTable.drafts`."""
    table_width: int
    """Width of the page table."""
    page_size: int
    page_stride: int
    """Of the target's keys and values."""
    tap_stride: int
    """Of the hidden states that drafters read."""
    drafter_stride: int
    """Of the model drafter's keys and values."""
    scratch_page: int
    """Where tokens go that belong to nobody, or lie past their request's pages."""
    dummy_index: int
    has_trees: int = 0
    """Other than 0: some row's drafts are a tree; positions, and what rows see, follow the parents."""


class PlanSizes(NamedTuple):
    """Bounds of `plan_attention`."""

    num_requests: int
    table_stride: int
    num_workers: int
    min_tiles: int
    num_items: int
    num_tokens: int


class RouteSizes(NamedTuple):
    """What `route` goes by: `backend.models.moe_spec.RouterSpec` says what it means."""

    num_tokens: int
    hidden_size: int
    x_stride: int
    num_experts: int
    num_chosen: int
    num_groups: int
    num_chosen_groups: int
    num_group_scores: int
    is_sigmoid: int
    is_normalized: int
    first_own: int
    """Of the rank's own experts the first, and their number."""
    num_own: int
    least_rows: int
    rows_per_chunk: int
    max_chunks: int
    num_parts: int
    """Of an expert's weights: 1, 2, 4 or 8."""
    warps_per_expert: int
    """As many, or one."""
    min_sum: float
    scale: float
    eps: float


class LatentSizes(NamedTuple):
    """Of `append_latent`; strides in numbers."""

    rank: int
    dim: int
    """Of what turns."""
    num_heads: int
    head_size: int
    """Of a query's head."""
    query_stride: int
    latent_stride: int
    slot_words: int
    """Ints of a slot."""
    eps: float


class LatentStrides(NamedTuple):
    """Of `latent_attention`, in numbers: from token to token and from head to head of the absorbed and the turned part of queries."""

    absorbed_token: int
    absorbed_head: int
    turned_token: int
    turned_head: int
    table: int
    page_bytes: int
    first_token: int
    """The packed row that is the first of the queries and of the output."""
    scale: float


STRUCTS: tuple[type[tuple[Any, ...]], ...] = (RequestParams, Requests, StepSizes, PlanSizes, RouteSizes, LatentSizes, LatentStrides)

_C_TYPES = {int: "int", float: "float"}
_FORMATS = {"int": "i", "unsigned": "I", "float": "f", "long long": "q", "int64_t": "q"}
_DTYPES = {"int": np.int32, "unsigned": np.uint32, "float": np.float32}


@functools.cache
def members_of(struct: type[tuple[Any, ...]]) -> tuple[tuple[str, str], ...]:
    """C type and name of each member."""
    hints = typing.get_type_hints(struct, include_extras=True)
    return tuple((hint.__metadata__[0] if hasattr(hint, "__metadata__") else _C_TYPES[hint], name) for name, hint in hints.items())


def format_of(c_type: str) -> str:
    """A C type as in Python's `struct`. Raises KeyError for one that is not known."""
    if c_type.endswith("*"):
        return "P"
    for struct in STRUCTS:
        if struct.__name__ == c_type:
            members = "".join(format_of(member) for member, _ in members_of(struct))
            return f"0P{members}0P" if "P" in members else members  # aligned as its widest member, and padded to that
    return _FORMATS[c_type]


def dtype_of(struct: type[tuple[Any, ...]]) -> np.dtype:
    """A struct of numbers as a dtype of NumPy."""
    return np.dtype([(name, _DTYPES[c_type]) for c_type, name in members_of(struct)])


@functools.cache
def header() -> str:
    """generated.cuh: the same in CUDA."""
    lines = ["// Made by kernels/structs.py, which says what all this is.", "#pragma once"]
    numbers = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int) and name not in Field.__members__}
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    for kind in (Field, Policy):
        lines.append(f"enum {kind.__name__} {{ {', '.join(f'{member.name} = {member.value}' for member in kind)} }};")
    for struct in STRUCTS:
        lines += [f"struct {struct.__name__} {{", *(f"  {c_type} {name};" for c_type, name in members_of(struct)), "};"]
        lines.append(f'static_assert(sizeof({struct.__name__}) == {calcsize(format_of(struct.__name__))}, "Python packs it so");')
    return "\n".join(lines) + "\n"
