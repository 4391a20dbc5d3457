"""What nodes write to each other: jobs, and what becomes of them. Redis stream entries, so flat maps of bytes."""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from backend.core import HandOff, Outcome, Request, Speculation
from backend.grammar.thinking import FORM
from backend.sampling_params import SamplingParams

VERSION = 10
"""Of these records, which have every field of what they are made of: whoever gives a request's parameters another one raises this. Nodes of
different versions do not work for each other."""

Fields = dict[str, bytes]

FALLBACKS = (
    "redis",
    "no_node",
    "fingerprint",
    "method",
    "too_long",
    "full",
    "refused",
    "failed",
    "timeout",
    "node_lost",
    "transfer",
    "lease",
    "internal",
)
"""Why a prompt is computed by the decode node itself."""
DEADLY = "deadly"
"""Why nobody is to compute it: nodes die of it."""


class RecordError(ValueError):
    """A record that this version does not understand."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt that a decode node wants computed."""

    job_id: str
    sender: str
    """The decode node."""
    request: Request
    """As the prefill node runs it; what its text has to be, by its tools too, is in `params`, and the grammar is yet to be compiled."""
    num_cached_pages: int
    """Leading pages that the decode node has."""
    fingerprint: str
    """Of the decode node's pages."""
    state: int = FORM
    """Of `grammar.thinking`: whether the answer begins with thoughts, before what has a form."""


@dataclass(frozen=True, slots=True)
class Message:
    """What nodes tell each other of a job."""

    kind: str
    """To the decode node: `taken` (the prefill node's engine has it), `pages` (some more are final), `done` (the last ones
    are, and what follows them), `failed`; to the prefill node: `stop` (the pages are read, or not wanted)."""
    job_id: str
    sender: str
    first_page: int = 0
    """Number within the prompt of the first of page_ids."""
    page_ids: list[int] = field(default_factory=list)
    """pages, done: on the prefill node, from first_page on."""
    reason: str = ""
    text: str = ""
    """failed: for the log."""
    hand_off: HandOff | None = None
    """done."""
    probs_pages: list[int] = field(default_factory=list)
    """done: pages on the prefill node that hold the hand-off's draft_probs."""
    probs_shape: tuple[int, int] = (0, 0)
    expires: float = 0.0
    """done: the Redis server's seconds until which the pages are held."""
    load: int = 0
    """taken, pages, done: prompt tokens that the sender has to compute."""
    time: float = 0.0
    """When that was so, in the Redis server's seconds."""


_REQUEST_FIELDS = ("seed", "index", "priority")
_JOB_NAMES = ("job_id", "sender", "fingerprint")
_LISTS, _NUMBERS, _INTEGERS = ("page_ids", "probs_pages", "probs_shape"), ("expires", "time"), ("first_page", "load")
_MAX_LISTED = 2**31
"""What is asked for page by page goes out as 32 bits: a larger number would be another page's."""


def write_job(job: Job) -> Fields:
    """The request as it stands: nothing of it is computed yet."""
    request = job.request
    params = _values_of(request.params) | {"structured_outputs": None}
    if request.grammar is not None:
        params["structured_outputs"] = request.grammar.asked.as_json()
    params["logit_bias"] = [[token_id, bias] for token_id, bias in request.params.logit_bias.items()]
    head = {
        "version": VERSION,
        "job_id": job.job_id,
        "sender": job.sender,
        "fingerprint": job.fingerprint,
        "num_cached_pages": job.num_cached_pages,
        "params": params,
        "state": FORM if request.grammar is None else request.grammar.state,
        "speculation": _values_of(request.speculation),
        "stop_ids": sorted(request.stop_ids),
        "bad_word_ids": [list(ids) for ids in request.bad_word_ids],
        **{name: getattr(request, name) for name in _REQUEST_FIELDS},
    }
    return {"head": json.dumps(head).encode(), "prompt": array("i", request.prompt_token_ids).tobytes()}


def _values_of(own: Any) -> dict[str, Any]:
    """A dataclass's fields, as they are."""
    return {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}


def read_job(fields: Mapping[bytes, bytes]) -> Job:
    """The reverse. Raises RecordError."""
    head = _read_head(fields)
    try:
        for name in _JOB_NAMES:
            _check_name(name, head[name])
        params = dict(head["params"])
        params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"]}
        if params["structured_outputs"] is not None:
            params["structured_outputs"] = json.loads(params["structured_outputs"])
        request = Request(
            request_id=head["job_id"],
            prompt_token_ids=np.frombuffer(fields[b"prompt"], dtype=np.int32).tolist(),
            params=SamplingParams(**params),
            speculation=Speculation(**head["speculation"]),
            stop_ids=frozenset(head["stop_ids"]),
            bad_word_ids=tuple(tuple(ids) for ids in head["bad_word_ids"]),
            is_prefill_only=True,
            **{name: head[name] for name in _REQUEST_FIELDS},
        )
        return Job(head["job_id"], head["sender"], request, head["num_cached_pages"], head["fingerprint"], head["state"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"a job cannot be read: {type(error).__name__}: {error}") from None


def who_waits(fields: Mapping[bytes, bytes]) -> tuple[str, str] | None:
    """The decode node of a job that `read_job` cannot read, and the job's id. None: that cannot be read either, or the node would not understand."""
    try:
        head = _read_head(fields)
        for name in ("sender", "job_id"):
            _check_name(name, head[name])
    except (KeyError, TypeError, ValueError):  # RecordError among them
        return None
    return head["sender"], head["job_id"]


def write_message(message: Message) -> Fields:
    head: dict[str, Any] = {
        "version": VERSION,
        **{f.name: getattr(message, f.name) for f in dataclasses.fields(message) if f.name != "hand_off"},
    }
    fields: Fields = {}
    if message.hand_off is not None:
        outcome = message.hand_off.outcome
        head["outcome"] = {name: getattr(outcome, name) for name in _OUTCOME_FIELDS}
        head["sources"] = message.hand_off.sources
        if outcome.scores is not None:
            head["scores_shape"] = outcome.scores.shape
            fields["scores"] = np.ascontiguousarray(outcome.scores, dtype=np.int32).tobytes()
    return {"head": json.dumps(head).encode(), **fields}


_OUTCOME_FIELDS = ("token_ids", "next_drafts", "next_parents", "num_drafter_tokens")


def read_message(fields: Mapping[bytes, bytes]) -> Message:
    """The reverse; what drafts were drawn from comes by the pages. Raises RecordError."""
    head = _read_head(fields)
    try:
        hand_off = None
        if "outcome" in head:
            outcome = Outcome(**{name: head["outcome"][name] for name in _OUTCOME_FIELDS})
            if "scores_shape" in head:
                outcome.scores = np.frombuffer(fields[b"scores"], dtype=np.int32).reshape(head["scores_shape"])
            hand_off = HandOff(outcome, head["sources"])
        values = {f.name: head[f.name] for f in dataclasses.fields(Message) if f.name != "hand_off"}
        _check_values(values)
        num_probs, width = values["probs_shape"]
        values["probs_shape"] = num_probs, width
        return Message(**values, hand_off=hand_off)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"a message cannot be read: {type(error).__name__}: {error}") from None


def _check_values(values: dict[str, Any]) -> None:
    """Of a message: each is of the type that is used without another look. Raises ValueError."""
    for name, value in values.items():
        if name in _LISTS:
            good = isinstance(value, (list, tuple)) and all(type(number) is int and 0 <= number < _MAX_LISTED for number in value)
        elif name in _NUMBERS:
            good = type(value) in (int, float) and math.isfinite(value)
        elif name in _INTEGERS:
            good = type(value) is int and value >= 0
        else:
            _check_name(name, value)
            continue
        if not good:
            raise ValueError(f"{name} is {value!r:.50}")


def _check_name(name: str, value: object) -> None:
    """Keys in Redis are made of it, and messages for others go with those to it. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.50}; a text is needed")
    value.encode()


def _read_head(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    try:
        head = json.loads(fields[b"head"])
        version = head["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"a record has no head that can be read: {type(error).__name__}: {error}") from None
    if version != VERSION:
        raise RecordError(f"a record is of version {version}; this node reads version {VERSION}")
    return head


def probs_to_pages(probs: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """[k, V] float32 as the bytes of whole pages [n, page_bytes] uint8: what drafts were drawn from travels as the keys and values do."""
    raw = probs.contiguous().view(torch.uint8).flatten()
    content = torch.zeros(-(-len(raw) // page_bytes), page_bytes, dtype=torch.uint8)
    content.view(-1)[: len(raw)] = raw
    return content


def probs_from_pages(content: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The reverse."""
    count = shape[0] * shape[1] * 4
    return content.cpu().view(-1)[:count].view(torch.float32).view(*shape)
