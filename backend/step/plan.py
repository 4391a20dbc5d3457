"""What rank 0 tells every worker of one step: integers only, so that one int32 array carries it to another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from backend.core import NEVER
from kernels.request_state import Admission
from kernels.structs import COUNT, EMITS, FIRST, INDEX, LOOKUP_ALONE, LOOKUP_LIMIT, MASK, NUM_FIELDS, PREFIX_GROUP, Field

VERSION = 7
MILLION = 1_000_000


@dataclass(slots=True)
class Arrival:
    """A request that enters the request table."""

    admission: Admission
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that it may not spell."""


@dataclass(frozen=True, slots=True)
class PlanOutline:
    """Of a step plan what a log may say: nobody's tokens."""

    fields: np.ndarray
    num_prompts: int
    num_queries: int
    options: int

    def __str__(self) -> str:
        names = ", ".join(name.lower() for name in Field.__members__)
        rows = self.fields.T.tolist()
        return f"{len(rows)} rows, {self.num_prompts} of prompts; at most {self.num_queries} queries; options {self.options:#x}; {names}: {rows}"


@dataclass(slots=True)
class StepPlan:
    """One step of B requests. The first `num_prompts` rows compute known tokens that the host names (prompt chunks, mostly), and verify no
    drafts; the others are decoding: their newest token, and the drafts that the request table holds.

    Admissions come first, then page copies and clearing, then the writes, then the rows' forward, decide and draft.
    """

    fields: np.ndarray = field(default_factory=lambda: np.zeros((NUM_FIELDS, 0), dtype=np.int32))
    """[NUM_FIELDS, B] int32: see `kernels.structs.Field`."""
    num_prompts: int = 0
    num_queries: int = 1
    """Most tokens of a decoding row: its drafts and one more."""
    num_model_drafts: int = 0
    """Most drafts that the model drafter makes for a row."""
    least_standing: int = 0
    """Millionths of a request: the model makes no more drafts once all drafts so far stand for fewer requests than that. On CPU with one rank;
    elsewhere a step makes as many as it was planned with."""
    trust: int = MILLION
    """Millionths: the power of the greatest probability at a draft that says how likely it stands after those before it."""
    options: int = 0
    """Bits of `backend.step.options.Options`."""
    has_lookup: bool = False
    has_lookup_alone: bool = False
    """Some row's lookup may take the model drafter's place."""
    has_trees: bool = False
    """Some row's drafts are a tree."""
    has_prefixes: bool = False
    """Some rows share the beginning of their context, whose keys are read once."""
    reports_drafts: bool = False
    """The host wants to see what the step drafted."""
    prompt_seq_lens: list[int] = field(default_factory=list)
    """[P] tokens of each prompt row with those of this step."""
    drafter_counts: list[int] = field(default_factory=list)
    """[P] rows of the model drafter for each prompt row."""
    drafter_seq_lens: list[int] = field(default_factory=list)
    """[P] tokens that it has computed after them."""
    scored: list[tuple[int, int]] = field(default_factory=list)
    """(row, leading tokens of its chunk that another one of the prompt follows) of prompts that are scored."""
    admissions: list[Arrival] = field(default_factory=list)
    page_copies: list[tuple[int, int, int]] = field(default_factory=list)
    cleared_pages: list[int] = field(default_factory=list)
    page_writes: list[int] = field(default_factory=list)
    """Pairs (place in the page table, page)."""
    draft_writes: list[int] = field(default_factory=list)
    """Pairs (place among the drafts, token): what the host drafted."""
    num_draft_writes: list[int] = field(default_factory=list)
    """Pairs (request index, drafts)."""
    parent_writes: list[int] = field(default_factory=list)
    """Pairs (place among the drafts, number of the draft before it; -1: the newest token), of trees. From its admission on a request's drafts are
    a chain until this, or the step's drafter, says otherwise."""
    num_drawn_writes: list[int] = field(default_factory=list)
    """Pairs (request index, leading drafts that were drawn from a distribution): where the host's drafts take the place of the step's."""
    masks: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int32))
    """[M, W] int32: which tokens positions may choose, a bit each; each row's begin at its MASK. W = V / 32, rounded up."""
    awaits_masks: bool = False
    """They come by themselves, once the host knows what the step before emitted: this one's forward does not wait for that."""

    @property
    def write_lists(self) -> tuple[list[int], ...]:
        """For the page table, the drafts, their parents, their numbers, and the numbers of those that were drawn."""
        return self.page_writes, self.draft_writes, self.parent_writes, self.num_draft_writes, self.num_drawn_writes

    @property
    def written(self) -> list[int]:
        """The write lists one after the other."""
        return [word for pairs in self.write_lists for word in pairs]

    @property
    def num_rows(self) -> int:
        return int(self.fields.shape[1])

    @property
    def num_tokens(self) -> int:
        """That the target computes at most."""
        return self.prompt_rows + (self.num_rows - self.num_prompts) * self.num_queries

    @property
    def prompt_rows(self) -> int:
        """Tokens of the prompt rows."""
        return int(self.fields[COUNT, : self.num_prompts].sum()) if self.num_prompts else 0

    def padded_fields(self, num_rows: int, dummy_index: int) -> np.ndarray:
        """The fields with rows of nobody after the last, up to num_rows."""
        padded = np.zeros((NUM_FIELDS, num_rows), dtype=np.int32)
        padded[INDEX] = dummy_index
        padded[[FIRST, LOOKUP_LIMIT, PREFIX_GROUP, MASK]] = -1
        padded[COUNT] = padded[EMITS] = 1
        padded[LOOKUP_ALONE] = NEVER
        padded[:, : self.num_rows] = self.fields
        return padded

    def outline(self) -> PlanOutline:
        return PlanOutline(self.fields, self.num_prompts, self.num_queries, self.options)

    # -- as one array -------------------------------------------------------------------------------------------------

    def to_array(self) -> np.ndarray:
        """[N] int32: the version, all numbers and counts, and then what there are so many of."""
        head, parts = [VERSION], list[np.ndarray]()
        for name in _NAMES:
            value = getattr(self, name)
            if name == "fields":
                head.append(value.shape[1])
                parts.append(value.astype(np.int32, copy=False).ravel())
            elif name == "masks":
                head += value.shape
                parts.append(value.ravel())
            elif name == "admissions":
                head.append(len(value))
                parts += [_state_words(state) for state in value]
            elif isinstance(value, list):
                flat = [x for entry in value for x in entry] if name in _WIDTHS else value
                head.append(len(flat))
                parts.append(_ints(flat))
            else:
                head.append(int(value))
        return np.concatenate([_ints(head), *parts])

    @classmethod
    def from_array(cls, words: np.ndarray) -> StepPlan:
        """The reverse. Raises ValueError for another version's plan."""
        reader = _Reader(words)
        if (version := reader.one()) != VERSION:
            raise ValueError(f"the step plan is of version {version}; this worker reads version {VERSION}")
        plan, head = cls(), iter(reader.take(len(_NAMES) + 1).tolist())  # masks have two counts
        for name in _NAMES:
            current, count = getattr(plan, name), next(head)
            if name == "fields":
                plan.fields = reader.take(NUM_FIELDS * count).reshape(NUM_FIELDS, count).copy()
            elif name == "masks":
                width = next(head)
                plan.masks = reader.take(count * width).reshape(count, width).copy()
            elif name == "admissions":
                plan.admissions = [_read_state(reader) for _ in range(count)]
            elif isinstance(current, list):
                flat, width = reader.take(count).tolist(), _WIDTHS.get(name, 1)
                setattr(plan, name, flat if width == 1 else [tuple(flat[i : i + width]) for i in range(0, len(flat), width)])
            else:
                setattr(plan, name, type(current)(count))
        if reader.place != len(words):
            raise ValueError(f"the step plan has {len(words)} words, {reader.place} of them known")
        return plan


_NAMES = tuple(f.name for f in dataclasses.fields(StepPlan))
_WIDTHS = {"page_copies": 3, "scored": 2}
"""Numbers of each entry of lists of tuples."""


class _Reader:
    def __init__(self, words: np.ndarray) -> None:
        self._words, self.place = words, 0

    def take(self, count: int) -> np.ndarray:
        if count < 0 or self.place + count > len(self._words):
            raise ValueError(f"the step plan ends after {len(self._words)} words; {self.place + count} are needed")
        self.place += count
        return self._words[self.place - count : self.place]

    def one(self) -> int:
        return int(self.take(1)[0])


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_BOOLS = ("is_greedy", "is_rejection", "is_top_p")
_INTS = ("index", "num_prompt_tokens", "max_total_tokens", "top_k", "min_known", "num_drafter_tokens")


def _state_words(state: Arrival) -> np.ndarray:
    admission = state.admission
    floats = np.array([min(getattr(admission, name), float(np.finfo(np.float32).max)) for name in _FLOATS], dtype=np.float32).view(np.int32)
    seed = np.array([admission.seed], dtype=np.int64).view(np.int32)
    scalars = _ints([min(int(getattr(admission, name)), 2**31 - 1) for name in (*_INTS, *_BOOLS)])
    biases = np.array(list(admission.logit_bias.values()), dtype=np.float32).view(np.int32)
    lists = [admission.token_ids, list(admission.logit_bias), admission.banned_ids, [len(w) for w in state.bad_words]]
    counts = _ints([len(own) for own in lists])
    words = [t for sequence in state.bad_words for t in sequence]
    return np.concatenate([scalars, floats, seed, counts, *(_ints(own) for own in lists), biases, _ints(words)])


def _read_state(reader: _Reader) -> Arrival:
    scalars = reader.take(len(_INTS) + len(_BOOLS)).tolist()
    values: dict[str, object] = dict(zip((*_INTS, *_BOOLS), scalars))
    values |= {name: bool(values[name]) for name in _BOOLS}
    values |= zip(_FLOATS, reader.take(len(_FLOATS)).copy().view(np.float32).tolist())
    values["seed"] = int(reader.take(2).copy().view(np.int64)[0])
    num_tokens, num_biases, num_banned, num_words = reader.take(4).tolist()
    values["token_ids"] = reader.take(num_tokens).tolist()
    bias_ids, values["banned_ids"] = reader.take(num_biases).tolist(), reader.take(num_banned).tolist()
    lengths = reader.take(num_words).tolist()
    values["logit_bias"] = dict(zip(bias_ids, reader.take(num_biases).copy().view(np.float32).tolist()))
    return Arrival(Admission(**values), [reader.take(n).tolist() for n in lengths])  # type: ignore[arg-type]
