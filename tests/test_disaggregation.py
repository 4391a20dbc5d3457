"""Prefill and decode apart, with a real Redis and NIXL: nodes of one process, and what goes wrong between them.

Whatever does, the tokens are those of one node, and no page is lost on either side.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from redis import Connection, RedisError
from redis import ConnectionError as RedisConnectionError

from backend import SamplingParams
from backend.core import Delta, HandOff, Outcome, Request, Speculation
from backend.disaggregation import choice as choosing
from backend.disaggregation import fetch as fetch_module
from backend.disaggregation import node as node_module
from backend.disaggregation import transfer, transfers
from backend.disaggregation.checks import check_done, check_job
from backend.disaggregation.choice import NodeChoice
from backend.disaggregation.inheritance import MAX_DEATHS
from backend.disaggregation.node import GROUP, Node, RedisState, connect, time_of
from backend.disaggregation.node_info import NodeInfo
from backend.disaggregation.prefill import count_waiting
from backend.disaggregation.records import VERSION, Job, Message, RecordError, read_job, read_message, who_waits, write_job, write_message
from backend.disaggregation.service import Disaggregation
from backend.disaggregation.tcp_transfer import TcpRead
from backend.disaggregation.transfer import PageAddress
from backend.disaggregation.transfers import Transport
from backend.disaggregation_config import DisaggregationConfig, read_password
from backend.errors import ConfigError, TransferError
from backend.kv_store import CacheSpec, KvStore
from backend.sampling_params import MAX_COMPLETIONS, MAX_SEED
from backend.speculative_config import SpeculativeConfig
from backend.step.scores import score_width
from backend.structured_outputs import StructuredOutputs
from backend.tools import FORMATS, Tools
from deploy.demo import free_ports
from tests.conftest import EVERY_METHOD, code_prompts, greedy
from tests.redis_server import RedisServer, redis_server
from tests.small import LLM, memory_of

WAIT_SECONDS = 60.0
SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, seed=7, ignore_eos=True)


def wait_for(condition: Callable[[], object], what: str = "") -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_SECONDS:.0f} s: {what}"
        time.sleep(0.01)


IDS = itertools.count()


@dataclasses.dataclass
class Answer:
    request_id: str
    token_ids: list[list[int]]
    reasons: list[str] = dataclasses.field(default_factory=list)
    is_over: threading.Event = dataclasses.field(default_factory=threading.Event)

    def add(self, delta: Delta) -> None:
        assert delta.error is None, delta.error
        self.token_ids[delta.index] += delta.token_ids
        if delta.is_final:
            self.reasons.append(str(delta.finish_reason))
        if len(self.reasons) == len(self.token_ids):
            self.is_over.set()

    def wait(self) -> list[list[int]]:
        assert self.is_over.wait(WAIT_SECONDS), f"{self.request_id} has no end"
        return self.token_ids


@dataclasses.dataclass
class One:
    """A node of this process."""

    llm: LLM
    nodes: Disaggregation

    @property
    def prefill(self):
        assert self.nodes.prefill is not None
        return self.nodes.prefill

    @property
    def fallbacks(self) -> dict[str, int]:
        return dict(self.llm.engine.hand_offs.fallbacks)

    @property
    def num_fetched(self) -> int:
        return self.llm.engine.hand_offs.num_fetched

    def submit(self, prompt: dict[str, list[int]], params: SamplingParams, choice: dict[str, Any] | None = None, **options: Any) -> Answer:
        answer = Answer(f"request {next(IDS)}", [[] for _ in range(params.n)])
        self.llm.engine.submit(prompt["prompt_token_ids"], params, answer.add, request_id=answer.request_id, speculative=choice, **options)
        return answer

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams, choice: dict[str, Any] | None = None) -> list[list[int]]:
        answers = [self.submit(prompt, params, choice) for prompt in prompts]
        return [tokens for answer in answers for tokens in answer.wait()]

    def take_no_jobs(self) -> None:
        """Once this is back: a look at the stream that began before would still take one."""
        is_asked = threading.Event()
        self.prefill._has_room = lambda: is_asked.set()  # type: ignore[method-assign]
        assert is_asked.wait(30)

    def check_idle(self) -> None:
        """No page is held, and nothing is open."""
        engine = self.llm.engine
        wait_for(lambda: engine.scheduler.pool.num_held == 0 and engine.scheduler.num_open == 0, "pages come back")
        engine.scheduler.check()


class Cluster:
    def __init__(self, redis: RedisServer) -> None:
        self.redis = redis
        self.topic = f"test{time.monotonic_ns()}"
        self.open: list[One] = []

    def make(self, role: str, *, engine: dict[str, Any] | None = None, **options: Any) -> One:
        config = {"scheduler_port": self.redis.port, "scheduler_topic": self.topic, "heartbeat_seconds": 0.5, "scheduler_ttl": 7200}
        config |= {"role": role, **options}
        llm = LLM(**{"speculative_config": EVERY_METHOD, "disaggregation": config, "kv_cache_memory": "256MiB", "num_threads": 1, **(engine or {})})
        one = One(llm, Disaggregation(llm.engine))
        self.open.append(one)
        llm.engine.start()
        one.nodes.start()
        return one

    def end(self, one: One) -> None:
        self.open.remove(one)
        one.nodes.stop()
        one.llm.close()
        one.nodes.close()

    def see(self, one: One, *others: One) -> None:
        wait_for(lambda: {o.nodes.node.node_id for o in others} <= set(one.nodes.node.state.peers), "nodes find each other")

    def close(self) -> None:
        for one in list(self.open):
            self.end(one)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(free_ports(1)[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def cluster(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Its nodes tell of each other soon, and are not taken for dead while a busy machine lets their process stand still for seconds."""
    monkeypatch.setattr(node_module, "HEARTBEATS", 60)
    own = Cluster(redis)
    yield own
    own.close()


SMALL_STEPS = {"max_num_batched_tokens": 64, "max_batch_size": 8}
"""Of nodes on which a prompt takes several."""


def prompts_of(llm: LLM, count: int, seed: int, lengths: tuple[int, int] = (320, 480)) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": llm.engine.tokenizer.encode(p)} for p in code_prompts(count, lengths, seed=seed)]


def expect(llm_all: LLM, prompts: list[dict[str, list[int]]], params: SamplingParams, choice: dict[str, Any] | None = None) -> list[list[int]]:
    """What one node answers."""
    return [o.token_ids for r in llm_all.generate(prompts, params, speculative=choice, use_tqdm=False) for o in r.outputs]


# -- records ------------------------------------------------------------------------------------------------------------


def as_read(fields: dict[str, bytes]) -> dict[bytes, bytes]:
    return {key.encode(): value for key, value in fields.items()}


def test_records_come_back_as_they_were() -> None:
    params = SamplingParams(max_tokens=9, stop=("a", "é"), bad_words=("x",), logit_bias={3: -1.5, 70000: 2.0}, seed=2**64 - 1, logprobs=3, top_k=4)
    request = Request("r", [5, 1, 2**31 - 1], params, Speculation("mtp", 3), seed=-5, index=2, priority=-1, stop_ids=frozenset({7, 2}))
    job = read_job(as_read(write_job(Job("job", "me", dataclasses.replace(request, bad_word_ids=((1, 2), (3,))), 4, "layout"))))
    assert (job.job_id, job.sender, job.num_cached_pages, job.fingerprint) == ("job", "me", 4, "layout")
    own = job.request
    assert own.is_prefill_only and own.request_id == "job" and own.params == params and own.prompt_token_ids == request.prompt_token_ids
    assert (own.speculation, own.seed, own.index, own.priority, own.stop_ids) == (request.speculation, -5, 2, -1, request.stop_ids)
    assert own.bad_word_ids == ((1, 2), (3,))
    scores = np.arange(12, dtype=np.int32).reshape(1, 3, 4)
    hand_off = HandOff(Outcome([8], scores=scores, next_drafts=[1, 2], num_drafter_tokens=4), ["mtp", "ngram"])
    message = Message("done", "job", "you", 2, [3, 4], "", "", hand_off, [9], (1, 50), 12.5)
    found = read_message(as_read(write_message(message)))
    assert found.hand_off is not None and np.array_equal(found.hand_off.outcome.scores, scores)
    found.hand_off.outcome.scores = hand_off.outcome.scores = None
    assert found == message


def test_what_the_text_has_to_be_goes_along(llm_all: LLM) -> None:
    """Also where the tools say it, and as much of it as there may be."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    called = Tools.from_values([tool], "required").form(FORMATS[0], {})
    assert called is not None
    long = StructuredOutputs(choice=["x" * 1000 + str(number) for number in range(100)])
    for asked in (called, long, StructuredOutputs(json={"type": "integer"}, disable_any_whitespace=True), StructuredOutputs(json_object=True)):
        params = greedy(4, structured_outputs=None if asked is called else asked)
        matcher = llm_all.engine.compile_grammar(dataclasses.replace(params, structured_outputs=asked))
        request = dataclasses.replace(REQUEST, params=params, grammar=matcher, token_ids=[])
        job = read_job(as_read(write_job(Job("job", "me", request, 0, "layout"))))
        assert job.request.params == dataclasses.replace(params, structured_outputs=asked) and job.request.grammar is None


@pytest.mark.parametrize(
    "form", [3, {}, {"regex": "a", "choice": ["b"]}, {"regex": "a" * 200_000}, {"other": 1}], ids=["number", "none", "two", "long", "unknown"]
)
def test_a_job_whose_text_has_to_be_what_cannot_be(form: object) -> None:
    fields = as_read(write_job(Job("job", "me", REQUEST, 0, "layout")))
    head = json.loads(fields[b"head"])
    head["params"]["structured_outputs"] = json.dumps(form)
    with pytest.raises(RecordError, match="a job cannot be read: ValueError: structured_outputs"):
        read_job({**fields, b"head": json.dumps(head).encode()})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"head": b"{"},
        {b"head": b"[]"},
        {b"head": b"null"},
        {b"head": b"{}"},
        {b"head": b"[" * 100_000},
        {b"head": json.dumps({"version": 99}).encode()},
        {b"head": json.dumps({"version": VERSION}).encode()},
        {b"head": json.dumps({"version": VERSION, "job_id": "j", "sender": "s", "params": 3}).encode(), b"prompt": b"123"},
    ],
    ids=["empty", "cut", "list", "null", "no version", "deep", "another version", "no fields", "wrong types"],
)
def test_damaged_records_are_errors_of_their_own(fields: dict[bytes, bytes]) -> None:
    for read in (read_job, read_message):
        with pytest.raises(RecordError):
            read(fields)


def test_records_of_a_version_have_its_fields() -> None:
    """A node of another state of this software would not read those of this one, and whoever asked it would wait for as long as a job may take:
    `skip_special_tokens` once came without a new version."""
    head = json.loads(write_job(Job("job", "me", REQUEST, 0, "layout"))["head"])
    hand_off = HandOff(Outcome([5], [3], [], 1), ["mtp"])
    message = json.loads(write_message(Message("done", "job", "me", hand_off=hand_off))["head"])
    fields = [sorted(part) for part in (head, head["params"], head["speculation"], message, message["outcome"])]
    assert (VERSION, zlib.crc32(json.dumps(fields).encode())) == (10, 3470025403), f"raise VERSION, and note here what it has: {fields}"


REQUEST = Request("r", [5, 1, 7], greedy(4), Speculation("mtp", 3))


@pytest.mark.parametrize("value", [None, 5, [], {}, "\ud800", True], ids=repr)
@pytest.mark.parametrize("name", ["job_id", "sender", "fingerprint", "kind", "reason"])
def test_names_that_are_none(name: str, value: object) -> None:
    """They are keys, here and in Redis, and go out with what is written for others."""
    made: list[tuple[Any, dict[str, bytes]]] = [
        (read_job, write_job(Job("j", "s", REQUEST, 0, "f"))),
        (read_message, write_message(Message("stop", "j", "s"))),
    ]
    for read, fields in made:
        head = json.loads(fields["head"])
        if name in head:
            with pytest.raises(RecordError):
                read({b"head": json.dumps({**head, name: value}).encode(), b"prompt": b""})


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("expires", "time") for value in (None, "x", [], float("nan"), float("inf"), 10**400, True)),
        *({name: value} for name in ("first_page", "load") for value in (None, "x", 1.5, -1, True)),
        *({name: value} for name in ("page_ids", "probs_pages", "probs_shape") for value in (None, "xy", {}, 5, [1.5, 1], [-1, 1], [None, 1])),
        *({name: [1, 2**31]} for name in ("page_ids", "probs_pages", "probs_shape")),
        {"probs_shape": [1]},
    ],
    ids=repr,
)
def test_messages_that_cannot_be(change: dict[str, Any]) -> None:
    """Deadlines and places that cannot be compared would end the look at all prompts that are on their way."""
    head = json.loads(write_message(Message("done", "j", "s"))["head"])
    assert read_message({b"head": json.dumps(head).encode()}) == Message("done", "j", "s")
    with pytest.raises(RecordError):
        read_message({b"head": json.dumps(head | change).encode()})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt_token_ids": []}, "has no prompt"),
        ({"prompt_token_ids": [1, 10**6]}, "prompt has token 1000000; the vocabulary has ids 0 to 99"),
        ({"prompt_token_ids": [-1]}, "prompt has token -1"),
        ({"params": greedy(4, logit_bias={100: 1.0})}, "logit_bias has token 100"),
        ({"stop_ids": frozenset({"x"})}, "stop_ids has token 'x'"),
        ({"stop_ids": frozenset({None})}, "stop_ids has token None"),
        ({"bad_word_ids": ((1, 200),)}, "bad_word_ids has token 200"),
        ({"stop_ids": frozenset(range(513))}, "a job has 513 stop_ids; the limit is 512"),
        ({"bad_word_ids": ((1,),) * 513}, "a job has 513 bad words; the limit is 512"),
        ({"bad_word_ids": ((1, 2), (1,) * 129)}, "the length of a bad word is 129; an integer from 1 to 128 is needed"),
        ({"seed": "7"}, "seed is '7'"),
        ({"seed": 2**64 + 64}, "seed is 18446744073709551680"),
        ({"priority": 1.5}, "priority is 1.5"),
        ({"speculation": Speculation("mtp", 99)}, "num_speculative_tokens is 99"),
        ({"speculation": Speculation("mtp", 3, num_model_steps=17)}, "num_model_steps is 17"),
        ({"speculation": Speculation("mtp", 3, num_nodes=8)}, "num_nodes is 8; an integer from 0 to 0 is needed"),
        ({"speculation": Speculation("mtp", 3, verify_strategy="hope")}, "verify_strategy"),
        ({"speculation": Speculation("suffix", 3)}, "method suffix is not loaded"),
        ({"speculation": Speculation("mtp", 3, mtp_strategy="with_suffix")}, "needs method suffix"),
    ],
)
def test_jobs_that_cannot_be(change: dict[str, Any], text: str) -> None:
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    last = dataclasses.replace(REQUEST, token_ids=[], seed=MAX_SEED + MAX_COMPLETIONS - 1)
    check_job(Job("j", "s", last, 0, "layout"), config, 100, 16)
    with pytest.raises(RecordError, match=re.escape(text)):
        check_job(Job("j", "s", dataclasses.replace(REQUEST, token_ids=[], **change), 0, "layout"), config, 100, 16)


def test_a_job_that_is_nowhere_before_its_form() -> None:
    with pytest.raises(RecordError, match="state is 1; an integer from -3 to 0 is needed"):
        check_job(Job("j", "s", REQUEST, 0, "layout", 1), SpeculativeConfig(method="mtp"), 100, 16)


def test_a_job_with_more_pages_than_its_prompt() -> None:
    with pytest.raises(RecordError, match="num_cached_pages is 1"):
        check_job(Job("j", "s", REQUEST, 1, "layout"), SpeculativeConfig(method="mtp"), 100, 16)


@pytest.mark.parametrize(
    ("outcome", "more", "text"),
    [
        ({"token_ids": []}, {}, "0 tokens came"),
        ({"token_ids": [1, 2]}, {}, "2 tokens came"),
        ({"token_ids": [100]}, {}, "token_ids has token 100"),
        ({"next_drafts": [1, -1]}, {}, "next_drafts has token -1"),
        ({"next_drafts": [1]}, {}, "the sources of 2"),
        ({"next_drafts": 5}, {}, "next_drafts is 5; a list is needed"),
        ({"next_parents": [-1, 0]}, {}, "the parents of 2 drafts came; the tree has 0"),
        ({"num_drafter_tokens": 5}, {}, "num_drafter_tokens is 5"),
        ({"scores": np.zeros((1, 3, 4), np.int32)}, {}, "log-probabilities came"),
        ({}, {"probs_shape": (3, 100), "probs_pages": [1]}, "distributions of [3, 100] numbers came in 1 pages, for 2 drafts"),
        ({}, {"probs_shape": (1, 99), "probs_pages": [1]}, "distributions of [1, 99]"),
        ({}, {"probs_shape": (1, 100), "probs_pages": []}, "in 0 pages"),
        ({}, {"probs_shape": (2, 100), "probs_pages": [1]}, "distributions of [2, 100] numbers came in 1 pages"),
        ({}, {"page_ids": [7]}, "2 pages of the prompt came; it takes 3"),
    ],
)
def test_hand_offs_that_cannot_be(outcome: dict[str, Any], more: dict[str, Any], text: str) -> None:
    hand_off = HandOff(Outcome([8], next_drafts=[1, 2], num_drafter_tokens=4), ["mtp", "mtp"])

    def check(own: HandOff, **values: Any) -> None:
        check_done(Message("done", "j", "s", **{"hand_off": own, "first_page": 1, "page_ids": [7, 3], **values}), REQUEST, 100, 3, 512)

    check(hand_off)
    check(hand_off, probs_shape=(2, 100), probs_pages=[1, 2])
    changed = dataclasses.replace(hand_off, outcome=dataclasses.replace(hand_off.outcome, **outcome))
    with pytest.raises(RecordError, match=re.escape(text)):
        check(changed, **more)


@pytest.mark.parametrize("source", [None, 5, [], {}])
def test_drafts_of_nobody(source: Any) -> None:
    hand_off = HandOff(Outcome([8], next_drafts=[1, 2], num_drafter_tokens=4), ["mtp", source])
    with pytest.raises(RecordError, match=r"sources has .*; names are needed"):
        check_done(Message("done", "j", "s", hand_off=hand_off), REQUEST, 100, 0, 512)


def test_log_probabilities_that_cannot_be() -> None:
    request, width = dataclasses.replace(REQUEST, token_ids=[], params=greedy(4, logprobs=3)), score_width(100)

    def check(scores: np.ndarray) -> None:
        check_done(Message("done", "j", "s", hand_off=HandOff(Outcome([8], scores=scores, num_drafter_tokens=4))), request, 100, 0, 512)

    check(np.zeros((1, width), np.int32))
    for shape in ((), (1,), (width,), (1, width - 1), (2, width), (1, 1, width)):
        with pytest.raises(RecordError, match="log-probabilities came as"):
            check(np.zeros(shape, np.int32))
    with pytest.raises(RecordError, match="scores has token 100; the vocabulary has ids 0 to 99"):
        check(np.full((1, width), 100, np.int32))


@pytest.mark.parametrize(
    ("parents", "text"),
    [
        ([-1], "the parents of 1 drafts came; the tree has 20"),
        ([-1, 1] + 18 * [0], "next_parents[1] is 1; an integer from -1 to 0 is needed"),
        ([-1, -2] + 18 * [0], "next_parents[1] is -2"),
        ([-1, True] + 18 * [0], "next_parents[1] is True"),
        (list(range(-1, 19)), "the depth of draft 16 is 17; an integer from 1 to 16 is needed"),
        ({"0": -1}, "next_parents is {'0': -1}; a list is needed"),
    ],
)
def test_trees_that_cannot_be(parents: Any, text: str) -> None:
    request = dataclasses.replace(REQUEST, token_ids=[], speculation=Speculation("mtp", 3, num_nodes=20))

    def check(parents: Any) -> None:
        outcome = Outcome([8], next_drafts=list(range(20)), next_parents=parents, num_drafter_tokens=4)
        check_done(Message("done", "j", "s", hand_off=HandOff(outcome, 20 * ["mtp"])), request, 100, 0, 512)

    check([-1, -1, 0] + 17 * [2])
    with pytest.raises(RecordError, match=re.escape(text)):
        check(parents)


def test_bad_records_in_redis_end_nothing(cluster: Cluster, llm_all: LLM) -> None:
    """Whatever somebody writes there: both nodes go on."""
    there, here = cluster.make("prefill"), cluster.make("decode")
    cluster.see(here, there)
    node = here.nodes.node
    request = dataclasses.replace(REQUEST, prompt_token_ids=[5, 10**8], token_ids=[])
    bad = write_job(Job("bad", node.node_id, request, 0, here.llm.engine.worker.store.fingerprint))
    for stream, owner in (("jobs", there), ("inbox", there), ("inbox", here)):
        for fields in ({"head": b"{"}, {"other": b"x"}, bad, write_message(Message("pages", "unknown", "nobody", 3, [10**9]))):
            cluster.redis.client.xadd(node.key(stream, owner.nodes.node.node_id), fields)
    (prompt,) = prompts_of(llm_all, 1, seed=67)
    assert here.generate([prompt], greedy(6)) == expect(llm_all, [prompt], greedy(6)) and here.num_fetched == 1
    assert there.prefill.held.results["refused"] == 1
    for one in (here, there):
        one.check_idle()


def test_nodes_of_another_version_are_told_apart(caplog) -> None:
    here = NodeInfo("here", "decode", VERSION, "layout", {}, ["mtp"], 100, [])
    there = dataclasses.replace(here, node_id="there", role="prefill")
    choice = NodeChoice("layout", 16, "nixl")
    changes: list[dict[str, Any]] = [{"version": VERSION}, {"version": VERSION + 1}, {"address": [{"kind": "TCP"}]}]
    good, old, other = (RedisState({"there": dataclasses.replace(there, **change)}, is_connected=True) for change in changes)
    assert choice.fitting(good, REQUEST) and choice.choose(good, REQUEST, {}) == there
    assert not choice.fitting(old, REQUEST) and choice.choose(old, REQUEST, {}) is None
    assert choice.why_none(old, REQUEST) == "fingerprint"
    assert not choice.fitting(other, REQUEST) and here.differences(other.peers["there"]) == "transfer_backend nixl here, tcp there"
    for _ in range(2):
        choice.tell_refused(here, good)
        choice.tell_refused(here, old)
    (record,) = (r for r in caplog.records if "cannot work for this one" in r.getMessage())
    assert f"version {VERSION} here, {VERSION + 1} there" in record.getMessage()


def test_entries_of_nodes_that_cannot_be_read(cluster: Cluster, llm_all: LLM) -> None:
    """Of another version no more is read than that it is one; what is none is left out, and nobody's heartbeat ends by it."""
    here = cluster.make("decode")
    node, client = here.nodes.node, cluster.redis.client
    own = json.loads(json.dumps({f: getattr(node.describe(), f) for f in NodeInfo.__slots__}))
    entries = {
        "new": json.dumps({"version": VERSION + 1, "role": "prefill", "more": 1}),
        "good": json.dumps({**own, "role": "prefill"}),
        "types": json.dumps({**own, "methods": None}),
        "time": json.dumps({**own, "time": "now"}),
        "nowhere": json.dumps({**own, "address": [{"metadata": "xyz"}]}),
        "addresses": json.dumps({**own, "address": [7]}),
        "list": "[]",
        "text": "x",
        b"\xff": "",
    }
    for name, value in entries.items():
        client.set(node.key("node", name) if isinstance(name, str) else node.key("node").encode() + b":" + name, value)
        client.sadd(node.key("nodes"), name)
    wait_for(lambda: set(node.state.peers) == {"new", "good"}, "the two that can be read")
    assert (node.state.peers["new"].version, node.state.peers["good"].node_id) == (VERSION + 1, "good")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"scheduler_ttl": 29}, "scheduler_ttl must be from 30 (job_seconds) to 1000000000, got 29"),
        ({"scheduler_ttl": 10**12}, "scheduler_ttl must be from 30 (job_seconds) to 1000000000, got 1000000000000"),
        ({"job_seconds": 900.5}, "scheduler_ttl must be from 901 (job_seconds) to 1000000000, got 900"),
        ({"job_seconds": float("nan")}, "job_seconds must be from 0.1 to 86400, got nan"),
        ({"heartbeat_seconds": 0.01}, "heartbeat_seconds must be from 0.05 to 86400, got 0.01"),
        ({"lease_seconds": 1}, "lease_seconds must be from 2.0 to 86400, got 1"),
        ({"scheduler_port": 0}, "scheduler_port must be from 1 to 65535, got 0"),
        ({"node_id": ""}, "node_id must be a name, got ''"),
        *(
            ({"scheduler_host": host}, f"scheduler_host must be a host's name or address alone; scheduler_port is a key of its own, got '{host}'")
            for host in ("redis:6379", "redis://redis", "[::1]", "/run/redis.sock", "::1:x", "me@redis", "a,b")
        ),
        ({"scheduler_topic": "a\udcff"}, "scheduler_topic must be a name, got 'a\\udcff'"),
        ({"transfer_host": "0.0.0.0"}, "transfer_host must be an IP address of this host, got '0.0.0.0'"),
        ({"transfer_host": "node-1"}, "transfer_host must be an IP address of this host, got 'node-1'"),
        ({"transfer_backend": "nixl", "transfer_host": "127.0.0.1"}, "transfer_host must be left out with transfer_backend nixl"),
        ({"role": "decode", "scheduler_name": "local"}, "scheduler_name must be redis for role decode, got 'local'"),
    ],
)
def test_options_that_cannot_be(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        DisaggregationConfig(**values)


@pytest.mark.parametrize("host", ["::1", "fe80::1%eth0", "127.0.0.1", "redis", "redis.svc.cluster.local.", "under_score"])
def test_hosts(host: str) -> None:
    assert DisaggregationConfig(scheduler_host=host).scheduler_host == host


def test_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text("secret \nmore\n")
    assert read_password(DisaggregationConfig(scheduler_password_file=str(file))) == "secret"
    monkeypatch.setenv("MY_PASSWORD", "other")
    assert read_password(DisaggregationConfig(scheduler_password_variable="MY_PASSWORD")) == "other"
    assert read_password(DisaggregationConfig()) is None
    file.write_text(" a\x0cb\u2028c\u00e9\r\nmore", encoding="utf-8")
    assert read_password(DisaggregationConfig(scheduler_password_file=str(file))) == "a\x0cb\u2028cé", "its line ends at its end"
    file.write_text("")
    for key, value, text in (
        ("scheduler_password_file", str(file), "is empty"),
        ("scheduler_password_file", str(tmp_path / "none"), "cannot be read"),
        ("scheduler_password_variable", "NO_SUCH_VARIABLE", "the environment has no NO_SUCH_VARIABLE"),
    ):
        with pytest.raises(ConfigError, match=text):
            read_password(DisaggregationConfig(**{key: value}))


# -- pages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nixl", "tcp"])
def test_pages_are_read_from_another_node(backend: str) -> None:
    transport = Transport(backend, ("127.0.0.1", 1))
    spec = [CacheSpec("keys", (4, 8), torch.float32, 2)]
    here, there = (KvStore(spec, 8, 6, torch.device("cpu")) for _ in range(2))
    there.memory.copy_(torch.randint(0, 255, there.memory.shape, dtype=torch.uint8))
    one, other = transport.open("reader", here, num_scratch_bytes=1), transport.open("offerer", there)

    def is_read() -> bool:
        other.serve()
        return one.is_done(handle)

    handle = one.read(other.address, [5, 0, 2], [1, 3, 4])
    wait_for(is_read, "a read")
    assert torch.equal(here.memory[[5, 0, 2]], there.memory[[1, 3, 4]]) and not here.memory[[1, 3, 4]].any()
    for own, remote in (([0, 1, 2, 3], [2, 3, 4, 5]), ([5, 4, 3, 1], [3, 2, 1, 0]), ([0, 1, 2], [3, 2, 1]), ([4, 2, 3], [1, 4, 0])):
        here.memory.zero_()
        handle = one.read(other.address, own, remote)
        wait_for(is_read, "a read of pages that lie side by side on one node, or on both")
        rest = [page for page in range(6) if page not in own]
        assert torch.equal(here.memory[own], there.memory[remote]) and not here.memory[rest].any()
    handle = one.read(other.address, [0], [2], to_scratch=True)
    wait_for(is_read, "a read")
    assert torch.equal(one.scratch[0], there.memory[2])
    with pytest.raises(TransferError, match="page 7 does not exist; there are 7"):
        one.read(other.address, [7], [0])
    with pytest.raises(TransferError, match="page -1 does not exist on the other node"):
        one.read(other.address, [1, 2], [0, -1])
    with pytest.raises(TransferError, match="pages of 4 bytes cannot be read"):
        one.read(dataclasses.replace(other.address, page_bytes=4), [0], [0])
    with pytest.raises(TransferError):
        handle = one.read(dataclasses.replace(other.address, metadata=b"nonsense" * 2), [0], [0])
        wait_for(is_read, "a read from nobody")
    with pytest.raises(TransferError, match=f"transfer_backend is {backend} here, {'tcp' if backend == 'nixl' else 'nixl'} on the other node"):
        one.read(dataclasses.replace(other.address, kind="DRAM" if backend == "tcp" else "TCP"), [0], [0])
    one.forget(other.address)
    handle = one.read(other.address, [1], [0])
    wait_for(is_read, "a read after the peer was forgotten")
    one.close()
    other.close()


def test_what_moves_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of `auto`; and the addresses of a rank that may be on another host than the one whose address was given."""
    monkeypatch.setattr(transfers, "RDMA_DEVICES", tmp_path / "none")
    auto = DisaggregationConfig(transfer_host="192.0.2.1")
    own = [Transport.choose(auto, torch.device(name)) for name in ("cpu", "cuda")]
    assert [(o.backend, o.has_near) for o in own] == [("tcp", False), ("tcp", True)]
    monkeypatch.setattr(transfers, "RDMA_DEVICES", tmp_path)
    assert Transport.choose(auto, torch.device("cpu")).backend == "tcp", "there are no devices"
    (tmp_path / "mlx5_0").touch()
    own = [Transport.choose(auto, torch.device(name)) for name in ("cpu", "cuda")]
    assert [(o.backend, o.has_near) for o in own] == [("nixl", False), ("nixl", False)]
    given = Transport.choose(DisaggregationConfig(transfer_backend="tcp"), torch.device("cuda"))
    assert (given.backend, given.has_near) == ("tcp", False)
    store = KvStore([CacheSpec("keys", (4, 8), torch.float32, 2)], 8, 6, torch.device("cpu"))
    given = Transport.from_dict(json.loads(json.dumps(Transport("tcp", ("127.0.0.1", 1), "192.0.2.1").as_dict())))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        given.open("node", store)
    rank = given.open("node rank 1", store, is_follower=True)
    assert rank.address.hosts[0] == "127.0.0.1" and "192.0.2.1" not in rank.address.hosts
    rank.close()


def test_nodes_in_reach_are_read_by_nixl_and_others_over_tcp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    """As `auto` has it on GPUs without RDMA; here with memory that both can read. Nodes that are told to use tcp are read, and read, so."""
    transport = Transport.from_dict(json.loads(json.dumps(Transport("tcp", ("127.0.0.1", 1), "127.0.0.1", has_near=True).as_dict())))
    stores = [KvStore([CacheSpec("keys", (4, 8), torch.float32, 2)], 8, 6, torch.device("cpu")) for _ in range(3)]
    stores[0].memory.copy_(torch.randint(0, 255, stores[0].memory.shape, dtype=torch.uint8))
    there, here = (transport.open(name, store, 1) for name, store in zip(("there", "here"), stores, strict=False))
    plain = dataclasses.replace(transport, has_near=False).open("plain", stores[2])
    address = PageAddress.from_dict(json.loads(json.dumps(there.address.as_dict())))
    assert address == there.address and address.backend == "tcp"

    def is_read() -> bool:
        there.serve()
        return reader.is_done(handle)

    elsewhere = dataclasses.replace(address, place="elsewhere")
    for reader, store, own, is_far in ((here, stores[1], address, False), (here, stores[1], elsewhere, True), (plain, stores[2], address, True)):
        for to_scratch in (False, True) if reader is here else (False,):
            store.memory.zero_()
            handle = reader.read(own, [0, 1], [2, 4], to_scratch=to_scratch) if not to_scratch else reader.read(own, [0], [2], to_scratch=True)
            assert isinstance(handle, TcpRead) == is_far
            wait_for(is_read, "a read")
            found = reader.scratch if to_scratch else store.memory[:2]
            assert torch.equal(found, stores[0].memory[[2, 4][: len(found)]])
        reader.forget(own)
    for one in (there, here, plain):
        one.close()
    monkeypatch.setattr(transfers, "BOOT_ID", tmp_path / "none")
    unknown = transport.open("unknown", stores[0])
    assert unknown.address.near is None and not unknown.is_served, "nobody knows who else is there"
    unknown.close()
    monkeypatch.undo()
    monkeypatch.setattr(transfer, "MODULES", ("no_such_module",))
    without = transport.open("without", stores[0])
    assert without.address.near is None and "no_such_module" in caplog.text
    without.close()


def test_jobs_that_wait_are_counted(redis: RedisServer) -> None:
    """Also while one is under way that is older than one that is done, of which the server's own count knows nothing."""
    client, stream = redis.client, "waiting"
    client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    assert count_waiting(client, stream) == (0, 0.0)
    ids = [client.xadd(stream, {"job": number}) for number in range(5)]
    assert count_waiting(client, stream) == (5, time_of(ids[0]))
    client.xreadgroup(GROUP, "node", {stream: ">"}, count=2)
    client.xack(stream, GROUP, ids[1])
    client.xdel(stream, ids[1])
    assert count_waiting(client, stream) == (3, time_of(ids[2]))


def test_a_redis_that_is_slow_does_not_slow_the_signs_of_life(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With answers that took 0.6 s nodes had three heartbeats between two signs of life, and took each other for dead."""
    now, pauses, took = 100.0, list[float](), [0.25, 0.75, 0.0]
    config = DisaggregationConfig(role="prefill", scheduler_port=redis.port, heartbeat_seconds=0.5)
    node = Node(config, lambda node_id: NodeInfo(node_id, "prefill", VERSION, "", {}, [], 0, []), lambda message: None)

    def exchange() -> None:
        nonlocal now
        now += took.pop()
        if not took:
            node._is_stopping.set()

    monkeypatch.setattr(node_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(node, "_exchange", exchange)
    monkeypatch.setattr(node._is_stopping, "wait", pauses.append)
    node._beat()
    assert pauses == [0.5, 0.0, 0.25]
    monkeypatch.undo()
    client, stream, sent = redis.client, "idle", list[object]()
    client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    send = Connection.send_packed_command
    monkeypatch.setattr(Connection, "send_packed_command", lambda self, *command, **options: (sent.append(command), send(self, *command, **options)))
    assert count_waiting(client, stream) == (0, 0.0) and len(sent) == 1, "round trips, for which the next one waits"


# -- nodes that do as they should ----------------------------------------------------------------------------------------


def test_tokens_are_those_of_one_node(cluster: Cluster, llm_all: LLM) -> None:
    """Many at once, by two prefill nodes; with what drafts were drawn from for `rejection`. Every method: tests/test_hand_offs.py."""
    nodes = [cluster.make("prefill", engine=SMALL_STEPS) for _ in range(2)]
    here = cluster.make("decode")
    cluster.see(here, *nodes)
    prompts = prompts_of(llm_all, 6, seed=41, lengths=(320, 800))
    asked: list[tuple[dict[str, Any], SamplingParams]] = [
        ({"method": "ngram"}, greedy(10)),
        ({"method": "mtp", "verify_strategy": "rejection"}, dataclasses.replace(SAMPLED, n=2)),
        ({"method": "mtp"}, dataclasses.replace(SAMPLED, max_tokens=32, structured_outputs={"regex": "<(class|def) [a-z]+>[0-9]{4}"})),
    ]
    for number, (choice, params) in enumerate(asked):
        own = [{"prompt_token_ids": [4 + number, *p["prompt_token_ids"]]} for p in prompts]  # that no cache knows
        assert here.generate(own, params, choice) == expect(llm_all, own, params, choice)
    assert not here.fallbacks and here.num_fetched >= 6 * len(asked)
    for one in (here, *nodes):
        one.check_idle()
    assert all(one.prefill.held.results["done"] > 2 for one in nodes), "work is shared out"
    assert sum(one.prefill.held.results["done"] for one in nodes) == here.num_fetched
    assert here.nodes.fetcher is not None and here.nodes.fetcher.reads.num_bytes > 0


def test_log_probabilities_of_another_request(cluster: Cluster, llm_all: LLM) -> None:
    """Of one step of the prefill node some prompts want them, and some do not."""
    there, here = cluster.make("prefill"), cluster.make("decode")
    cluster.see(here, there)
    there.take_no_jobs()
    prompts = [{"prompt_token_ids": p["prompt_token_ids"][:70]} for p in prompts_of(llm_all, 4, seed=42, lengths=(400, 600))]
    answers = [here.submit(prompt, greedy(4, logprobs=number % 2 or None)) for number, prompt in enumerate(prompts)]
    wait_for(lambda: len(here.llm.engine.scheduler.fetches) == 4)
    del there.nodes.prefill._has_room  # type: ignore[union-attr]
    assert [tokens for answer in answers for tokens in answer.wait()] == expect(llm_all, prompts, greedy(4))
    assert here.num_fetched == 4 and not here.fallbacks


def test_a_prompt_goes_where_its_beginning_is(cluster: Cluster, llm_all: LLM) -> None:
    """And what the decode node has of it does not travel."""
    nodes = [cluster.make("prefill") for _ in range(3)]
    here = cluster.make("decode", engine={"enable_prefix_caching": False})
    cluster.see(here, *nodes)
    (prompt,) = prompts_of(llm_all, 1, seed=43, lengths=(1200, 1250))
    ids = prompt["prompt_token_ids"]
    for number in range(4):
        here.generate([{"prompt_token_ids": [*ids, *range(10 + number, 90)]}], greedy(4))
    done = sorted(one.prefill.held.results["done"] for one in nodes)
    assert done == [0, 0, 4]
    (chosen,) = (one for one in nodes if one.prefill.held.results["done"])
    assert chosen.llm.engine.scheduler.num_cached_tokens > 3 * (len(ids) - 16)
    cached = cluster.make("decode")
    cluster.see(cached, *nodes)
    cached.generate([prompt], greedy(4))
    assert cached.nodes.fetcher is not None
    first = cached.nodes.fetcher.reads.num_bytes
    longer = {"prompt_token_ids": [*ids, *range(10, 110)]}
    assert cached.generate([longer], greedy(6)) == expect(llm_all, [longer], greedy(6))
    assert cached.num_fetched == 2 and cached.nodes.fetcher.reads.num_bytes - first < first / 2
    cached.generate([longer], greedy(4))
    assert cached.num_fetched == 2, "what it has it computes"
    for one in (here, cached, *nodes):
        one.check_idle()


def test_pages_are_read_while_the_prompt_is_computed(cluster: Cluster, llm_all: LLM) -> None:
    there, here = cluster.make("prefill", engine=SMALL_STEPS), cluster.make("decode")
    cluster.see(here, there)
    told: list[tuple[str, int]] = []
    assert here.nodes.fetcher is not None
    take = here.nodes.fetcher.on_message
    here.nodes.fetcher.on_message = lambda m: (told.append((m.kind, len(m.page_ids))), take(m))[1]  # type: ignore[method-assign]
    (prompt,) = prompts_of(llm_all, 1, seed=44, lengths=(1200, 1250))
    here.generate([prompt], greedy(4))
    pages = [count for kind, count in told if kind in ("pages", "done")]
    assert len(pages) >= 3 and told[-1][0] == "done" and pages[-1] > 0, told
    assert sum(pages) == -(-(len(prompt["prompt_token_ids"]) + 1) // 16)


def test_short_and_scored_prompts_stay_here(cluster: Cluster, llm_all: LLM) -> None:
    there, here = cluster.make("prefill"), cluster.make("decode", min_remote_tokens=100)
    cluster.see(here, there)
    (prompt,) = prompts_of(llm_all, 1, seed=45)
    ids = prompt["prompt_token_ids"][:150]
    here.generate([{"prompt_token_ids": ids[:99]}], greedy(3))
    here.generate([{"prompt_token_ids": ids}], greedy(3, echo=True, logprobs=1))
    assert here.num_fetched == 0 and not here.fallbacks and there.prefill.num_open == 0
    here.generate([{"prompt_token_ids": ids[::-1]}], greedy(3))
    assert here.num_fetched == 1


def test_a_mixed_node_computes_its_own_prompts_and_others(cluster: Cluster, llm_all: LLM) -> None:
    mixed, here = cluster.make("mixed", scheduler_name="redis"), cluster.make("decode")
    cluster.see(here, mixed)
    prompts = prompts_of(llm_all, 2, seed=46)
    expected = expect(llm_all, prompts, greedy(6))
    assert here.generate(prompts, greedy(6)) == expected and here.num_fetched == 2
    assert mixed.generate(prompts, greedy(6)) == expected


def test_completions_of_a_prompt_fetch_it_once(cluster: Cluster, llm_all: LLM) -> None:
    """The others find its pages in the cache, also when the one that fetches is ended."""
    there, here = cluster.make("prefill"), cluster.make("decode")
    cluster.see(here, there)
    prompts, params = prompts_of(llm_all, 2, seed=50), dataclasses.replace(SAMPLED, n=4)
    assert here.generate(prompts, params) == expect(llm_all, prompts, params)
    assert here.num_fetched == 2 and not here.fallbacks
    there.take_no_jobs()
    answer = here.submit(prompts_of(llm_all, 1, seed=51)[0], params)
    wait_for(lambda: len(here.llm.engine.scheduler.fetches) == 1, "the first completion's prompt")
    here.llm.engine.cancel(answer.request_id)
    answer.wait()
    assert answer.reasons == ["cancelled"] * 4
    here.check_idle()


def test_reads_wait_for_steps_that_were_under_way(cluster: Cluster, llm_all: LLM) -> None:
    """They may write to the pages for a request that had them before."""
    there, here = cluster.make("prefill"), cluster.make("decode")
    transfer = here.nodes.transfer
    read = transfer.read(there.nodes.transfer.address, [0], [0], after=here.llm.engine.num_finished + 1)
    assert not transfer.is_done(read)
    here.generate([{"prompt_token_ids": list(range(10, 30))}], greedy(2))

    def is_read() -> bool:
        there.nodes.transfer.serve(time.monotonic())
        return transfer.is_done(read)

    wait_for(is_read, "the read")


def test_a_read_that_cannot_begin_is_not_over(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keeps it: nothing was read."""
    there, here = (cluster.make(role, transfer_backend="tcp") for role in ("prefill", "decode"))
    transfer, address = here.nodes.transfer, there.nodes.transfer.address

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    read = transfer.read(address, [0], [0], after=here.llm.engine.num_finished + 1)
    here.generate([{"prompt_token_ids": list(range(10, 30))}], greedy(2))
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        with pytest.raises(TransferError, match="can't start new thread"):
            transfer.is_done(read)
    with pytest.raises(TransferError, match="can't start new thread"):
        transfer.read(address, [0], [0])
    monkeypatch.undo()


def test_ranks_read_their_own_parts(cluster: Cluster, llm_all: LLM, caplog) -> None:
    """Two ranks on each node: tokens are those of one, with what drafts were drawn from on both; a node of one rank is told apart."""
    two = {"parallel_config": {"tensor_parallel_size": 2}, **SMALL_STEPS}
    there, here = (cluster.make(role, engine=two) for role in ("prefill", "decode"))
    cluster.see(here, there)
    prompts = prompts_of(llm_all, 3, seed=47, lengths=(320, 800))
    for number, choice in enumerate(({"method": "ngram"}, {"method": "mtp", "verify_strategy": "rejection"})):
        own = [{"prompt_token_ids": [4 + number, *p["prompt_token_ids"]]} for p in prompts]
        assert here.generate(own, SAMPLED, choice) == expect(llm_all, own, SAMPLED, choice)
    assert not here.fallbacks and here.num_fetched == 6
    right = there.nodes._address
    there.nodes._address = [right[0], {**right[1], "metadata": "00" * 16}]
    wait_for(lambda: any(info.address != right for info in here.nodes.node.state.peers.values()), "a wrong address of rank 1")
    check_alone(here, llm_all, "transfer", 48, count=1)
    there.check_idle()
    one = cluster.make("decode")
    cluster.see(one, there)
    check_alone(one, llm_all, "fingerprint", 49, count=1)
    wait_for(lambda: "tensor_parallel_size 1 here, 2 there" in caplog.text, "both sizes in the log")


# -- what goes wrong ------------------------------------------------------------------------------------------------------


def check_alone(here: One, llm_all: LLM, reason: str, seed: int, count: int = 3) -> None:
    """Prompts get their answers from this node, and the reason is counted."""
    prompts, before = prompts_of(llm_all, count, seed=seed), here.num_fetched
    expected = expect(llm_all, prompts, SAMPLED)
    assert here.generate(prompts, SAMPLED) == expected
    assert here.num_fetched == before and here.fallbacks.get(reason, 0) >= count, here.fallbacks
    here.check_idle()


def test_alone(cluster: Cluster, llm_all: LLM) -> None:
    here = cluster.make("decode")
    wait_for(lambda: here.nodes.node.state.is_connected)
    check_alone(here, llm_all, "no_node", 51)


@pytest.mark.parametrize(
    "there, reason, text",
    [
        ({"page_size": 32}, "fingerprint", "page_size 16 here, 32 there"),
        ({"speculative_config": {"method": "ngram"}}, "fingerprint", "drafter"),
        ({"dtype": "bfloat16"}, "fingerprint", "torch.float32 here, .* torch.bfloat16 there"),
        ({"kv_cache_dtype": "fp8"}, "fingerprint", "cache_scales None here, calibrated [0-9a-f]{16} there"),
        ({"max_model_len": 40}, "too_long", ""),
    ],
    ids=["pages", "drafter", "dtype", "scales", "context"],
)
def test_nodes_that_do_not_fit(cluster: Cluster, llm_all: LLM, caplog, there, reason, text) -> None:
    other, here = cluster.make("prefill", engine=there), cluster.make("decode")
    cluster.see(here, other)
    check_alone(here, llm_all, reason, 52)
    if text:
        wait_for(lambda: "cannot work for this one" in caplog.text)
        assert any(re.search(text, r.getMessage()) for r in caplog.records if "cannot work" in r.getMessage()), caplog.text


def test_a_method_that_the_prefill_node_lacks(cluster: Cluster, llm_all: LLM) -> None:
    other = cluster.make("prefill", engine={"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}})
    here = cluster.make("decode")
    cluster.see(here, other)
    (prompt,) = prompts_of(llm_all, 1, seed=53)
    here.generate([prompt], greedy(4), {"method": "suffix"})
    assert here.fallbacks == {"method": 1} and here.num_fetched == 0
    here.generate([{"prompt_token_ids": prompt["prompt_token_ids"][::-1]}], greedy(4), {"method": "mtp"})
    assert here.num_fetched == 1


def test_a_password_of_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's stub reads an environment as ASCII: what is more comes as halves of surrogate pairs."""
    monkeypatch.setenv("MY_PASSWORD", 'p "w#é'.encode().decode("ascii", "surrogateescape"))
    with redis_server(free_ports(1)[0], tmp_path, "--requirepass", 'p "w#é') as server:
        client = connect(DisaggregationConfig(role="decode", scheduler_port=server.port, scheduler_password_variable="MY_PASSWORD"))
        assert client.ping()


def test_a_wrong_password(tmp_path: Path, cluster: Cluster, llm_all: LLM) -> None:
    with redis_server(free_ports(1)[0], tmp_path, "--requirepass", "right") as server:
        right, wrong = tmp_path / "right", tmp_path / "wrong"
        right.write_text("right\n")
        wrong.write_text("wrong\n")
        there = cluster.make("prefill", scheduler_port=server.port, scheduler_password_file=str(right))
        good = cluster.make("decode", scheduler_port=server.port, scheduler_password_file=str(right))
        bad = cluster.make("decode", scheduler_port=server.port, scheduler_password_file=str(wrong))
        cluster.see(good, there)
        good.generate(prompts_of(llm_all, 1, seed=54), greedy(4))
        assert good.num_fetched == 1
        check_alone(bad, llm_all, "redis", 55)


def in_flight(here: One, there: One, llm_all: LLM, seed: int, act: Callable[[], object], count: int = 4) -> None:
    """Prompts whose tokens are right although `act` comes while they are computed elsewhere: before the third step of it."""
    prompts = prompts_of(llm_all, count, seed=seed, lengths=(700, 800))
    expected = expect(llm_all, prompts, SAMPLED)
    worker, begin, steps = there.llm.engine.worker, there.llm.engine.worker.begin, itertools.count()
    is_there, has_acted = threading.Event(), threading.Event()

    def begin_later(plan: Any) -> Any:
        if next(steps) == 2:
            is_there.set()
            assert has_acted.wait(WAIT_SECONDS)
        return begin(plan)

    def act_early() -> None:
        assert is_there.wait(WAIT_SECONDS), "no job"
        act()
        has_acted.set()

    worker.begin = begin_later  # type: ignore[method-assign]
    thread = threading.Thread(target=act_early)
    thread.start()
    assert here.generate(prompts, SAMPLED) == expected
    thread.join()
    worker.begin = begin  # type: ignore[method-assign]
    here.check_idle()


def test_redis_killed_and_started_empty(redis: RedisServer, cluster: Cluster, llm_all: LLM) -> None:
    there, here = cluster.make("prefill", engine=SMALL_STEPS, lease_seconds=5), cluster.make("decode")
    cluster.see(here, there)
    in_flight(here, there, llm_all, 56, redis.kill)
    assert here.fallbacks.get("redis", 0) > 0
    check_alone(here, llm_all, "redis", 57)
    redis.start()
    cluster.see(here, there)
    before = here.num_fetched
    here.generate(prompts_of(llm_all, 2, seed=58), greedy(4))
    assert here.num_fetched == before + 2, "all is as before"
    there.check_idle()


def test_what_nodes_were_told_to_stop_is_told_again_where_redis_has_forgotten_it(redis: RedisServer, cluster: Cluster, llm_all: LLM) -> None:
    """Else pages are held until the lease is over, and prompts computed that nobody waits for."""
    there, here = cluster.make("prefill", lease_seconds=3600), cluster.make("decode")
    cluster.see(here, there)
    node = here.nodes.node

    def tell(*args: Any, **options: Any) -> None:
        del node.tell
        redis.client.flushall()

    node.tell = tell  # type: ignore[method-assign]
    here.generate(prompts_of(llm_all, 1, seed=77), greedy(4))
    assert here.num_fetched == 1
    for one in (here, there):
        one.check_idle()


def test_redis_that_answers_nobody(redis: RedisServer, cluster: Cluster, llm_all: LLM) -> None:
    there, here = cluster.make("prefill", lease_seconds=2), cluster.make("decode", job_seconds=1.5)
    cluster.see(here, there)
    redis.pause()
    try:
        prompts = prompts_of(llm_all, 3, seed=59)
        expected = expect(llm_all, prompts, SAMPLED)
        assert here.generate(prompts, SAMPLED) == expected
        assert sum(here.fallbacks.values()) >= 3
    finally:
        redis.go_on()
    cluster.see(here, there)
    for one in (here, there):
        one.check_idle()


def test_a_prefill_node_that_leaves_ends_its_jobs(cluster: Cluster, llm_all: LLM) -> None:
    there, here = cluster.make("prefill", engine=SMALL_STEPS), cluster.make("decode")
    cluster.see(here, there)
    in_flight(here, there, llm_all, 60, there.nodes.leave)
    assert here.num_fetched > 0
    wait_for(lambda: all(info.is_leaving for info in here.nodes.node.state.peers.values()))
    check_alone(here, llm_all, "no_node", 61)
    there.check_idle()


def test_jobs_that_came_before_others_knew_of_the_leave(cluster: Cluster, llm_all: LLM) -> None:
    """They are done: else they would wait for as long as the node has other work."""
    there, here = cluster.make("prefill", heartbeat_seconds=3600), cluster.make("decode")  # it tells nobody
    cluster.see(here, there)
    there.nodes.leave()
    prompts = prompts_of(llm_all, 1, seed=79)
    assert here.generate(prompts, greedy(4)) == expect(llm_all, prompts, greedy(4)) and here.num_fetched == 1


def test_jobs_of_a_dead_node_go_on_elsewhere(cluster: Cluster, llm_all: LLM) -> None:
    """Taken over in Redis: the node had them in its stream, and never came to them."""
    first = cluster.make("prefill")
    here = cluster.make("decode")
    cluster.see(here, first)
    first.take_no_jobs()
    prompts = prompts_of(llm_all, 3, seed=62)
    expected = expect(llm_all, prompts, SAMPLED)

    def replace() -> None:
        wait_for(lambda: len(here.llm.engine.scheduler.fetches) == 3)
        second = cluster.make("prefill")
        cluster.see(here, second)
        first.nodes.node.stop()

    thread = threading.Thread(target=replace)
    thread.start()
    assert here.generate(prompts, SAMPLED) == expected
    thread.join()
    assert here.num_fetched == 3 and not here.fallbacks
    for one in cluster.open:
        one.check_idle()
    wait_for(lambda: not here.nodes.node.state.dead, "the dead node is forgotten")


def test_a_prompt_of_which_nodes_die_ends_by_name(cluster: Cluster, llm_all: LLM) -> None:
    """With all of its completions, and not after every node has died of it in turn. Those that waited behind it are computed."""
    here = cluster.make("decode", job_seconds=3600)
    errors: list[tuple[int, Exception | None]] = []
    ends = threading.Semaphore(0)

    def note(delta: Delta) -> None:
        errors.append((delta.index, delta.error))
        ends.release()

    def make() -> One:
        made = cluster.make("prefill", engine=SMALL_STEPS | {"max_batch_size": 1})
        cluster.see(here, made)
        return made

    def take_and_hang(one: One) -> list[str]:
        taken: list[str] = []
        one.prefill._take = lambda entry_id, fields: taken.append(read_job(fields).job_id)  # type: ignore[method-assign, func-returns-value]
        return taken

    deadly, other = prompts_of(llm_all, 2, seed=88)
    one = make()
    taken = take_and_hang(one)
    here.llm.engine.submit(deadly["prompt_token_ids"], dataclasses.replace(greedy(4), n=2), note, request_id="deadly")
    wait_for(lambda: len(taken) == 1)
    answer = here.submit(other, greedy(4))
    for number in range(MAX_DEATHS):
        wait_for(lambda taken=taken: len(taken) == 2)
        last, one = one, make()
        if number < MAX_DEATHS - 1:
            taken = take_and_hang(one)
        last.nodes.node.stop()
    assert answer.wait() == expect(llm_all, [other], greedy(4))
    assert all(ends.acquire(timeout=30) for _ in range(2))
    text = f"{MAX_DEATHS} prefill nodes have died while they computed its prompt; the limit is {MAX_DEATHS}"
    assert sorted((index, str(error)) for index, error in errors) == [(0, text), (1, text)]
    assert one.prefill.held.results == {"failed": 1, "done": 1} and not here.fallbacks
    for own in (here, one):
        own.check_idle()


def test_a_job_for_a_node_that_was_buried(cluster: Cluster, llm_all: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died, and the one that came in its place has found no job of it, before this node's next sign of life: until then it was chosen."""
    first, here = cluster.make("prefill"), cluster.make("decode", job_seconds=3600)
    cluster.see(here, first)
    node = here.nodes.node
    info = node.state.peers[first.nodes.node.node_id]
    first.nodes.node.stop()
    second = cluster.make("prefill")
    cluster.see(here, second)
    wait_for(lambda: info.node_id.encode() not in cluster.redis.client.smembers(node.key("nodes")), "the first one is forgotten")
    assert here.nodes.fetcher is not None
    monkeypatch.setattr(here.nodes.fetcher._choice, "choose", lambda *values: info)
    prompts = prompts_of(llm_all, 1, seed=87)
    assert here.generate(prompts, greedy(4)) == expect(llm_all, prompts, greedy(4))
    assert here.num_fetched == 1 and not here.fallbacks
    for one in (here, second):
        one.check_idle()
    wait_for(lambda: not cluster.redis.client.exists(node.key("jobs", info.node_id)), "the first one is forgotten again")


def test_jobs_of_a_dead_node_that_nobody_waits_for(cluster: Cluster, llm_all: LLM) -> None:
    """It is started again, and takes its own queue over, which the decode node has computed meanwhile: prompts that come now do not wait for that."""
    first, here = cluster.make("prefill"), cluster.make("decode")
    cluster.see(here, first)
    first.take_no_jobs()
    prompts = prompts_of(llm_all, 8, seed=86, lengths=(1400, 1500))
    answers = [here.submit(prompt, greedy(2)) for prompt in prompts]
    stream = here.nodes.node.key("jobs", first.nodes.node.node_id)
    wait_for(lambda: cluster.redis.client.xlen(stream) == 8, "the jobs")
    first.nodes.node.stop()
    assert [tokens for answer in answers for tokens in answer.wait()] == expect(llm_all, prompts, greedy(2))
    assert here.fallbacks == {"node_lost": 8}
    second = cluster.make("prefill", engine={"max_num_batched_tokens": 2048})  # a step for each prompt: of no pages it tells before the last ones
    wait_for(lambda: sum(second.prefill.held.results.values()) == 8, "the jobs' ends")
    assert second.prefill.held.results["stopped"] >= 4, second.prefill.held.results
    for one in (here, second):
        one.check_idle()


def test_a_dead_node_leaves_jobs_to_those_that_can_do_them(cluster: Cluster, llm_all: LLM) -> None:
    """Whoever waits for one is not told that a node of another layout, or version, cannot do it. What is no stream is in nobody's way."""
    there, here = cluster.make("prefill"), cluster.make("decode", job_seconds=3600)
    cluster.see(here, there)
    node, client = there.nodes.node, cluster.redis.client
    client.set(node.key("jobs", "dead 1"), "x")
    job = Job("a", here.nodes.node.node_id, dataclasses.replace(REQUEST, prompt_token_ids=[10**8], token_ids=[]), 0, "another layout")
    own = write_job(dataclasses.replace(job, fingerprint=here.llm.engine.worker.store.fingerprint))
    newer = {"head": json.dumps({**json.loads(own["head"]), "version": VERSION + 1}).encode(), "prompt": own["prompt"]}
    for fields in [write_job(job), newer] * 9 + [own]:
        client.xadd(node.key("jobs", "dead 2"), fields)  # type: ignore[arg-type]
    client.sadd(node.key("nodes"), "dead 1", "dead 2")
    wait_for(lambda: there.prefill.held.results, "the job that can be done")
    assert there.prefill.held.results == {"refused": 1}, "it was looked at, and has a token that is none"
    assert client.xlen(node.key("jobs", "dead 2")) == 18
    wait_for(lambda: node.state.dead == ["dead 2"] and not client.exists(node.key("jobs", "dead 1")), "what is no stream is removed")
    (prompt,) = prompts_of(llm_all, 1, seed=81)
    assert here.generate([prompt], greedy(4)) == expect(llm_all, [prompt], greedy(4)) and here.num_fetched == 1


@pytest.mark.parametrize("change", [{"params": None}, {"num_cached_pages": None, "params": {"new": 1}}, {"speculation": {"other": 1}}], ids=repr)
def test_who_sent_a_job_that_cannot_be_read_is_told(cluster: Cluster, llm_all: LLM, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """Else it waits for as long as a job may take, with every prompt."""
    there, here = cluster.make("prefill"), cluster.make("decode", job_seconds=3600)
    cluster.see(here, there)

    def write(job: Job) -> dict[str, bytes]:
        fields = write_job(job)
        return {**fields, "head": json.dumps(json.loads(fields["head"]) | change).encode()}

    monkeypatch.setattr(fetch_module, "write_job", write)
    prompts = prompts_of(llm_all, 1, seed=88)
    assert here.generate(prompts, greedy(4)) == expect(llm_all, prompts, greedy(4))
    assert here.fallbacks == {"failed": 1} and there.prefill.held.results == {"failed": 1}
    for one in (here, there):
        one.check_idle()


def test_of_a_job_that_cannot_be_read_at_all_nobody_is_told() -> None:
    head = {"version": VERSION, "job_id": "j", "sender": "s"}
    assert who_waits({b"head": json.dumps(head).encode()}) == ("s", "j")
    for other in ({**head, "version": VERSION + 1}, {**head, "sender": 5}, {**head, "job_id": "\ud800"}, {"version": VERSION}, [], None):
        assert who_waits({b"head": json.dumps(other).encode()}) is None
    assert who_waits({}) is None


def test_a_job_that_two_nodes_have(cluster: Cluster, llm_all: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one was silent for a while, and ends it all the same: what is left to read lies there, whatever the other one says."""
    there, other, here = cluster.make("prefill"), cluster.make("prefill"), cluster.make("decode")
    cluster.see(here, there, other)
    other.take_no_jobs()
    here.nodes.fetcher._choice._loads[other.nodes.node.node_id] = time.time() + 3600, 10**6  # type: ignore[union-attr]
    take = here.nodes.fetcher._take_message  # type: ignore[union-attr]

    def take_more(message: Message) -> None:
        take(message)
        if message.kind == "done":
            for kind in ("taken", "failed"):
                take(Message(kind, message.job_id, other.nodes.node.node_id))

    monkeypatch.setattr(here.nodes.fetcher, "_take_message", take_more)
    (prompt,), choice = prompts_of(llm_all, 1, seed=84), {"method": "mtp", "verify_strategy": "rejection"}
    assert here.generate([prompt], SAMPLED, choice) == expect(llm_all, [prompt], SAMPLED, choice)
    assert here.num_fetched == 1 and not here.fallbacks


def test_nodes_that_come_and_go_leave_nothing(cluster: Cluster, llm_all: LLM) -> None:
    """Connections of nodes that are gone end, and what is read from others goes on."""
    stays, here = cluster.make("prefill"), cluster.make("decode")
    cluster.see(here, stays)
    prompts = prompts_of(llm_all, 2, seed=80)
    here.generate(prompts[:1], greedy(2))
    goes = cluster.make("prefill")
    cluster.see(here, goes)
    stays.take_no_jobs()
    here.nodes.fetcher._choice._loads[stays.nodes.node.node_id] = time.time() + 3600, 10**6  # type: ignore[union-attr]
    here.generate(prompts[1:], greedy(2))
    peers = here.nodes.transfer._own._peers
    assert here.num_fetched == 2 and len(peers) == 2
    cluster.end(goes)
    wait_for(lambda: len(peers) == 1, "the end of its connection")
    del stays.prefill._has_room
    again = [{"prompt_token_ids": p["prompt_token_ids"][::-1]} for p in prompts]
    assert here.generate(again, greedy(4)) == expect(llm_all, again, greedy(4)) and here.num_fetched == 4 and len(peers) == 1


def test_nodes_that_fail_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that fails at once would have the least to do, and be asked for every prompt. Each time for longer, until something comes from it."""
    now = [1000.0]
    monkeypatch.setattr(choosing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    good, bad = (NodeInfo(name, "prefill", VERSION, "layout", {}, ["mtp"], 100, []) for name in ("good", "bad"))
    own, both, alone = (
        NodeChoice("layout", 16, "nixl"),
        *(RedisState({i.node_id: i for i in infos}, is_connected=True) for infos in ((good, bad), (bad,))),
    )
    for reason in ("redis", "node_lost", "full", "refused", "too_long"):
        own.note_failed("bad", reason)
    own.note_failed("", "timeout")
    assert own.choose(both, REQUEST, {}) == bad, "the one with the first name"
    for seconds in (5, 10, 20, 40, 80, 160, 320, 320):
        own.note_failed("bad", "timeout")
        now[0] += seconds - 0.5
        own.note_failed("bad", "transfer")  # of a prompt that it was asked for before
        assert own.choose(both, REQUEST, {}) == good and not own.fitting(alone, REQUEST) and own.why_none(alone, REQUEST) == "timeout"
        now[0] += 0.5
        assert own.choose(both, REQUEST, {}) == bad
    for reason in ("failed", "failed", "internal"):  # one may be the request's own fault
        own.note_good("bad")
        own.note_failed("bad", reason)
    own.note_failed("bad", "failed")
    assert own.choose(both, REQUEST, {}) == bad
    own.note_failed("bad", "failed")
    assert own.choose(both, REQUEST, {}) == good
    now[0] += 5
    assert own.choose(both, REQUEST, {}) == bad
    own.note_failed("bad", "lease")
    assert own.choose(both, REQUEST, {}) == good
    own.note_alive([good], 1.0)
    assert own.choose(both, REQUEST, {}) == bad, "it was gone since"


def test_loads_that_were_told_by_a_clock_that_was_set_back_since() -> None:
    """They would count until it has caught up."""
    first, second = (NodeInfo(name, "prefill", VERSION, "layout", {}, ["mtp"], 100, [], load=0, time=40.0) for name in ("first", "second"))
    own, state = NodeChoice("layout", 16, "nixl"), RedisState({i.node_id: i for i in (first, second)}, is_connected=True)
    own.note_load("first", 3600.0, 5000)
    own.note_alive([first, second], 3601.0)
    assert own.choose(state, REQUEST, {}) == second
    own.note_alive([first, second], 41.0)
    assert own.choose(state, REQUEST, {}) == first
    own.note_load("first", 42.0, 5000)
    assert own.choose(state, REQUEST, {}) == second


@pytest.mark.parametrize(("backend", "wrong"), [("nixl", {"begin": 2**40}), ("tcp", {"metadata": "00" * 16})])
def test_pages_that_cannot_be_read(cluster: Cluster, llm_all: LLM, monkeypatch: pytest.MonkeyPatch, backend: str, wrong: dict[str, Any]) -> None:
    """Memory that the other node has not offered, or not to this one: the transfer fails, and the next one, of memory that it has, does not."""
    monkeypatch.setattr(choosing, "REST_SECONDS", 0.01)
    there, here = (cluster.make(role, transfer_backend=backend) for role in ("prefill", "decode"))
    right = there.nodes._address
    there.nodes._address = [{**right[0], **wrong}]
    wait_for(lambda: any(info.address != right for info in here.nodes.node.state.peers.values()), "the wrong address")
    check_alone(here, llm_all, "transfer", 68)
    there.nodes._address = right
    wait_for(lambda: all(info.address == right for info in here.nodes.node.state.peers.values()), "the right one")
    wait_for(lambda: not here.nodes.fetcher._choice._rests_now(there.nodes.node.node_id), "its rest")  # type: ignore[union-attr]
    here.generate(prompts_of(llm_all, 1, seed=69), greedy(4))
    assert here.num_fetched == 1
    there.check_idle()


def test_a_job_that_takes_too_long(cluster: Cluster, llm_all: LLM) -> None:
    there, here = cluster.make("prefill"), cluster.make("decode", job_seconds=0.5)
    cluster.see(here, there)
    there.take_no_jobs()
    check_alone(here, llm_all, "timeout", 63)
    del there.nodes.prefill._has_room  # type: ignore[union-attr]
    wait_for(lambda: there.prefill.held.results["stopped"] == 3, "late jobs are not computed")
    there.check_idle()


def test_a_prefill_node_with_little_room(cluster: Cluster, llm_all: LLM) -> None:
    """It takes as many jobs as its engine does, and not none. One that cannot be taken takes no other along."""
    there, here = cluster.make("prefill", engine={"max_batch_size": 2, "max_waiting": 1}), cluster.make("decode")
    cluster.see(here, there)
    there.take_no_jobs()
    prompts = prompts_of(llm_all, 6, seed=78)
    answers = [here.submit(prompt, greedy(4)) for prompt in prompts]
    stream = here.nodes.node.key("jobs", there.nodes.node.node_id)
    wait_for(lambda: cluster.redis.client.xlen(stream) == 6, "the jobs")
    begin, failed = there.prefill._begin, []

    def fail_once(entry_id: bytes, job: Job) -> Any:
        if not failed:
            failed.append(job)
            here.nodes.fetcher.on_message(Message("failed", job.job_id, there.nodes.node.node_id, reason="failed"))  # type: ignore[union-attr]
            raise RuntimeError("a fault of this test's")
        return begin(entry_id, job)

    there.prefill._begin = fail_once
    del there.prefill._has_room
    assert [tokens for answer in answers for tokens in answer.wait()] == expect(llm_all, prompts, greedy(4))
    assert here.num_fetched == 5 and here.fallbacks == {"failed": 1}
    for one in (here, there):
        one.check_idle()


def test_nobody_waits_for_anothers_grammar(cluster: Cluster, llm_all: LLM) -> None:
    """One that is slow to compile, on the node that computes prompts. Its own prompt is computed there when it is done; if it is wanted then."""
    there, here = cluster.make("prefill"), cluster.make("decode", job_seconds=3600)
    cluster.see(here, there)
    compile_grammar, is_done, begun = there.llm.engine.compile_grammar, threading.Event(), []

    def compile_late(params: SamplingParams, state: int) -> Any:
        if params.structured_outputs is not None:
            begun.append(params)
            assert is_done.wait(WAIT_SECONDS)
        return compile_grammar(params, state)

    there.llm.engine.compile_grammar = compile_late  # type: ignore[method-assign]
    prompts = prompts_of(llm_all, 4, seed=82)
    formed = greedy(12, structured_outputs={"regex": "[a-z]{12,40}"})
    left, answer = (here.submit(prompt, formed) for prompt in prompts[:2])
    wait_for(lambda: begun, "the first grammar")
    assert here.generate(prompts[2:], greedy(4)) == expect(llm_all, prompts[2:], greedy(4)) and here.num_fetched == 2
    here.llm.engine.cancel(left.request_id)
    wait_for(lambda: len(set(there.prefill._stopped)) == 3, "its stop, after those of the prompts that were read")
    assert there.nodes.num_jobs == 2, "a node that leaves sees them through"
    is_done.set()
    assert answer.wait() == expect(llm_all, prompts[1:2], formed)
    assert here.num_fetched == 3 and not here.fallbacks and there.prefill.held.results == {"done": 3, "stopped": 1}
    for one in (here, there):
        one.check_idle()


def test_a_job_that_waited_too_long_is_told(cluster: Cluster, llm_all: LLM) -> None:
    """By the prefill node's limit, not by the decode node's: who waits still hears of other prompts from there."""
    there, here = cluster.make("prefill", job_seconds=0.1), cluster.make("decode", job_seconds=3600)
    cluster.see(here, there)
    there.take_no_jobs()
    (prompt,) = prompts_of(llm_all, 1, seed=70)
    answer = here.submit(prompt, greedy(4))
    stream = here.nodes.node.key("jobs", there.nodes.node.node_id)
    wait_for(lambda: cluster.redis.client.xlen(stream), "the job")
    time.sleep(0.2)
    del there.nodes.prefill._has_room  # type: ignore[union-attr]
    assert answer.wait() == expect(llm_all, [prompt], greedy(4))
    assert here.fallbacks == {"timeout": 1} and there.prefill.held.results == {"late": 1}
    for one in (here, there):
        one.check_idle()


def test_a_job_that_is_lost(cluster: Cluster, llm_all: LLM) -> None:
    """Its node tells of others all the time: it is waited for no longer than a job waits there. One that the node has told of is."""
    there, here = cluster.make("prefill"), cluster.make("decode", job_seconds=3600)
    cluster.see(here, there)
    there.take_no_jobs()
    (prompt,) = prompts_of(llm_all, 1, seed=77)
    answer = here.submit(prompt, greedy(4))
    fetcher, sender = here.nodes.fetcher, there.nodes.node.node_id
    assert fetcher is not None
    wait_for(lambda: fetcher._fetches, "the job")
    (fetch,) = fetcher._fetches.values()
    fetcher._take_message(Message("taken", "another job", sender))
    assert sender not in fetcher._heard, "whatever computes may hang"
    fetcher._heard[sender] = fetch.begun + 3000
    # A sum of times is rounded, by less than the thousandth.
    assert not fetcher._why_late(fetch, fetch.begun + 3599) and fetcher._why_late(fetch, fetch.begun + 3600.001) == "timeout"
    kinds, take = [], fetcher._take_message

    def note(message: Message) -> None:
        take(message)
        fetcher._heard[sender] = fetch.begun + 3000
        kinds.append((message.kind, fetcher._why_late(fetch, fetch.begun + 3600.001), fetcher._why_late(fetch, fetch.begun + 6600.001)))

    fetcher._take_message = note  # type: ignore[method-assign]
    del there.nodes.prefill._has_room  # type: ignore[union-attr]
    assert answer.wait() == expect(llm_all, [prompt], greedy(4)) and here.num_fetched == 1
    wait_for(lambda: ("taken", "", "timeout") in kinds, "the node has told that it has the job")


def test_an_answer_with_jobs_that_is_lost(cluster: Cluster, llm_all: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection broke when Redis had given them out. They are asked for again; those that the node has are not computed twice."""
    there, here = cluster.make("prefill", engine=SMALL_STEPS), cluster.make("decode", job_seconds=3600)
    cluster.see(here, there)
    client, lost = there.nodes.node.redis, []
    read = client.xreadgroup

    def lose(*values: Any, **options: Any) -> Any:
        found = read(*values, **options)
        if found and len(there.prefill.held.jobs) == 1 and not lost:
            lost.append(found)
            raise RedisConnectionError("a fault of this test's")
        return found

    monkeypatch.setattr(client, "xreadgroup", lose)
    prompts = prompts_of(llm_all, 2, seed=85, lengths=(1500, 1600))
    first = here.submit(prompts[0], greedy(4))
    wait_for(lambda: there.prefill.held.jobs, "the first job")
    second = here.submit(prompts[1], greedy(4))
    assert first.wait() + second.wait() == expect(llm_all, prompts, greedy(4))
    assert lost and here.num_fetched == 2 and not here.fallbacks and there.prefill.held.results == {"done": 2}
    for one in (here, there):
        one.check_idle()


def test_a_message_that_is_lost(cluster: Cluster, llm_all: LLM) -> None:
    """Redis was full for a moment, or a connection broke: what comes after it is not taken for what it was."""
    there, here = cluster.make("prefill", engine=SMALL_STEPS), cluster.make("decode", job_seconds=3600)
    cluster.see(here, there)
    tell, lost = there.prefill.held.tell, []

    def tell_later(own: Any, kind: str, **values: Any) -> None:
        if kind == "pages" and not lost:
            lost.append(kind)
        else:
            tell(own, kind, **values)

    there.prefill.held.tell = tell_later
    prompts = prompts_of(llm_all, 2, seed=83)
    for prompt in prompts:
        assert here.generate([prompt], greedy(4)) == expect(llm_all, [prompt], greedy(4))
    assert here.fallbacks == {"redis": 1} and here.num_fetched == 1
    for one in (here, there):
        one.check_idle()


@pytest.mark.parametrize("kind", ["done", "failed"])
def test_a_last_message_that_is_lost(cluster: Cluster, llm_all: LLM, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Nothing comes after it, and its node tells of others all the time: it says that there was one once Redis takes messages again."""
    there, here = cluster.make("prefill"), cluster.make("decode", job_seconds=3600)
    cluster.see(here, there)
    node, lost = there.nodes.node, []
    post = node.post

    def refuse(stream: str, node_id: str, fields: Any, on_failure: Any = None, **options: Any) -> None:
        if len(lost) < 2 and read_message(as_read(fields)).kind in (kind, "failed"):  # what says so is lost, too
            lost.append(stream)
            node.write(lambda pipe: pipe.execute_command("XADD", "no"), on_failure)  # an error of this one's, as where Redis is full
        else:
            post(stream, node_id, fields, on_failure, **options)

    monkeypatch.setattr(node, "post", refuse)
    if kind == "failed":
        monkeypatch.setattr(there.prefill, "_why_not", lambda job: ("method", "a fault of this test's"))
    prompts = prompts_of(llm_all, 1, seed=84)
    assert here.generate(prompts, greedy(4)) == expect(llm_all, prompts, greedy(4))
    assert here.fallbacks == {"redis": 1} and lost == ["inbox"] * 2
    for one in (here, there):
        one.check_idle()


def test_redis_that_has_forgotten_everything(cluster: Cluster, llm_all: LLM) -> None:
    """No connection breaks by that. Jobs that are lost are not waited for."""
    there, here = cluster.make("prefill"), cluster.make("decode", job_seconds=3600)
    cluster.see(here, there)
    there.take_no_jobs()
    prompts = prompts_of(llm_all, 3, seed=71)
    answers = [here.submit(prompt, greedy(4)) for prompt in prompts]
    wait_for(lambda: len(here.llm.engine.scheduler.fetches) == 3)
    node, is_forgotten = here.nodes.node, threading.Event()
    on_heartbeat = node._on_heartbeat

    def forget(state: RedisState) -> None:
        """Between two exchanges: in the middle of one it looks as if the other node alone were gone."""
        if not is_forgotten.is_set():
            cluster.redis.client.flushall()
            is_forgotten.set()
        on_heartbeat(state)

    node._on_heartbeat = forget
    assert [tokens for answer in answers for tokens in answer.wait()] == expect(llm_all, prompts, greedy(4))
    assert here.fallbacks == {"redis": 3}
    del there.nodes.prefill._has_room  # type: ignore[union-attr]
    cluster.see(here, there)
    here.generate(prompts_of(llm_all, 1, seed=72), greedy(4))
    assert here.num_fetched == 1
    for one in (here, there):
        one.check_idle()


def test_keys_that_are_something_else(cluster: Cluster, llm_all: LLM) -> None:
    """Somebody has put it in the place of streams, and of the set of nodes."""
    there, here = cluster.make("prefill"), cluster.make("decode", job_seconds=5)
    cluster.see(here, there)
    node, prompts = here.nodes.node, iter(prompts_of(llm_all, 60, seed=73, lengths=(300, 400)))
    for one, kind in ((there, "jobs"), (there, "inbox"), (here, "inbox")):
        cluster.redis.client.set(node.key(kind, one.nodes.node.node_id), "x")
    cluster.redis.client.set(node.key("nodes"), "x")

    def is_fetched() -> bool:
        prompt = next(prompts)
        assert here.generate([prompt], greedy(2)) == expect(llm_all, [prompt], greedy(2))
        return here.num_fetched > 0

    wait_for(is_fetched, "a prompt that the prefill node computed")
    for one in (here, there):
        one.check_idle()


@pytest.mark.parametrize(("reason", "job_seconds", "lease_seconds"), [("transfer", 4, 60), ("lease", 3600, 4)])
def test_pages_that_do_not_come(cluster: Cluster, llm_all: LLM, reason: str, job_seconds: float, lease_seconds: float) -> None:
    """The network is cut, though Redis still tells of the other node: prompts are computed here, and where reads hang their node is not asked."""
    there = cluster.make("prefill", lease_seconds=lease_seconds)
    here = cluster.make("decode", job_seconds=job_seconds)
    cluster.see(here, there)
    node, transfer, fetcher = here.nodes.node, here.nodes.transfer, here.nodes.fetcher
    assert fetcher is not None

    def is_done(read: object) -> bool:
        """Never; and Redis's clock is set back while pages are read that were told of."""
        if any(fetch.done is not None for fetch in fetcher._fetches.values()):
            node.server_time = lambda: Node.server_time(node) - 3600  # type: ignore[method-assign]
        return False

    transfer.is_done = is_done  # type: ignore[method-assign]
    prompts = prompts_of(llm_all, 2, seed=74)
    assert here.generate(prompts[:1], SAMPLED) == expect(llm_all, prompts[:1], SAMPLED)
    assert here.fallbacks == {reason: 1}
    assert here.llm.engine.scheduler.pool.num_held > 0, "what may still be written to is nobody else's"
    if reason == "transfer":
        assert here.generate(prompts[1:], SAMPLED) == expect(llm_all, prompts[1:], SAMPLED)
        assert here.fallbacks == {reason: 2} and sum(there.prefill.held.results.values()) == 1
    else:
        wait_for(lambda: there.prefill.held.num_expired_leases == 1, "the lease's end")
    del transfer.is_done, node.server_time  # the reads go on, and are served until they end
    for one in (here, there):
        one.check_idle()
    wait_for(lambda: not there.prefill.held._late, "the end of all reads")
    here.generate([{"prompt_token_ids": prompts[1]["prompt_token_ids"][::-1]}], SAMPLED)
    assert here.num_fetched == 1, "the network is mended"


def test_drafts_whose_distribution_has_no_room(cluster: Cluster, llm_all: LLM) -> None:
    """Another request's read of one hangs: the drafts are left out, and the prompt goes on."""
    there, here = cluster.make("prefill"), cluster.make("decode", job_seconds=4)
    cluster.see(here, there)
    transfer, hung = here.nodes.transfer, []
    read, is_done = transfer.read, transfer.is_done

    def note(*args: Any, to_scratch: bool = False, **options: Any) -> Any:
        made = read(*args, to_scratch=to_scratch, **options)
        hung.extend([made] if to_scratch else [])
        return made

    transfer.read, transfer.is_done = note, lambda one: one not in hung and is_done(one)  # type: ignore[method-assign]
    prompts, choice = prompts_of(llm_all, 2, seed=75, lengths=(300, 900)), {"method": "mtp", "verify_strategy": "rejection"}
    assert here.generate(prompts[:1], SAMPLED, choice) == expect(llm_all, prompts[:1], SAMPLED, choice)
    assert here.fallbacks == {"transfer": 1}
    other = cluster.make("prefill")
    cluster.see(here, other)
    here.generate(prompts[1:], SAMPLED, choice)
    assert here.num_fetched == 1 and len(hung) == 1
    hung.clear()
    for one in (here, there, other):
        one.check_idle()


def test_two_nodes_of_one_name(cluster: Cluster, llm_all: LLM) -> None:
    """Each is one of its own: pages of one are not read from the other."""
    nodes = [cluster.make("prefill", node_id="same") for _ in range(2)]
    here = cluster.make("decode", node_id="same")
    cluster.see(here, *nodes)
    prompts = prompts_of(llm_all, 4, seed=76)
    assert here.generate(prompts, SAMPLED) == expect(llm_all, prompts, SAMPLED)
    assert here.num_fetched == 4 and all(one.prefill.held.results["done"] for one in nodes)


def test_pages_that_nobody_comes_for(cluster: Cluster, llm_all: LLM) -> None:
    """A decode node that dies: its prompts' pages go to others when their lease is over."""
    there, here = cluster.make("prefill", lease_seconds=5), cluster.make("decode")
    cluster.see(here, there)
    assert here.nodes.fetcher is not None
    here.nodes.fetcher._take_message = lambda message: None  # type: ignore[method-assign]
    here.nodes.fetcher._tell_stop = lambda node_id, job_id: None  # type: ignore[method-assign]
    answers = [here.submit(prompt, greedy(4)) for prompt in prompts_of(llm_all, 3, seed=64)]
    wait_for(lambda: there.prefill.held.results["done"] == 3)
    assert there.llm.engine.scheduler.pool.num_held > 0
    is_seen = threading.Event()
    there.llm.engine.call(lambda: is_seen.wait(WAIT_SECONDS))  # a long step
    wait_for(lambda: time.monotonic() > max(own.end for own in there.prefill.held.jobs.values()), "the time of the leases")
    for _ in range(2):
        there.prefill.on_heartbeat()
    is_seen.set()
    wait_for(lambda: not there.prefill.held.jobs, "leases end")
    assert there.prefill.held.num_expired_leases == 3
    there.check_idle()
    for answer in answers:
        here.llm.engine.cancel(answer.request_id)
        answer.wait()


def test_requests_that_end_while_they_are_fetched(cluster: Cluster, llm_all: LLM) -> None:
    """Cancelled, or late: on both nodes nothing is left of them, also of those that were never taken."""
    there, here = cluster.make("prefill", engine=SMALL_STEPS), cluster.make("decode")
    cluster.see(here, there)
    prompts = prompts_of(llm_all, 9, seed=65, lengths=(700, 800))
    # Those that are ended have long answers, which do not come to their end before that.
    answers = [here.submit(p, greedy(1000 if number % 3 else 4), timeout=0.1 if number % 3 == 2 else None) for number, p in enumerate(prompts)]
    for answer in answers[1::3]:
        here.llm.engine.cancel(answer.request_id)
    for answer in answers:
        answer.wait()
    assert [answer.reasons for answer in answers] == [["length"], ["cancelled"], ["timeout"]] * 3
    for one in (here, there):
        one.check_idle()
    wait_for(lambda: there.prefill.num_open == 0)
    stream = here.nodes.node.key("jobs", there.nodes.node.node_id)
    wait_for(lambda: not cluster.redis.client.xlen(stream), "the end of all jobs in Redis: whoever took this node's over would compute them")


def test_too_few_pages(cluster: Cluster, llm_all: LLM) -> None:
    """On both nodes: prompts wait for room, are set back, and come to their end with the same tokens."""
    small = {"kv_cache_memory": memory_of(37, with_drafter=True), "max_num_batched_tokens": 256}
    there, here = cluster.make("prefill", engine=small), cluster.make("decode", engine=small)
    cluster.see(here, there)
    prompts = prompts_of(llm_all, 6, seed=66, lengths=(300, 700))
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True)
    assert here.generate(prompts, params) == expect(llm_all, prompts, params)
    assert here.num_fetched > 0
    for one in (here, there):
        one.check_idle()


def test_a_redis_that_is_too_old(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks commands that are needed now and then: that is said, and not found out by the first node that dies."""
    config = DisaggregationConfig(role="decode", scheduler_port=redis.port, scheduler_topic="old")
    node = Node(config, lambda node_id: NodeInfo(node_id, "decode", VERSION, "", {}, [], 0, []), lambda message: None)
    for told in ("6.0.16", "5.0.7"):
        monkeypatch.setattr(node.redis, "info", lambda section, told=told: {"redis_version": told})
        with pytest.raises(RedisError, match=f"version {told} is too old; 6.2 or newer is needed"):
            node._exchange()
    assert not redis.client.exists("old:nodes")
    for told in ("6.2.0", "7.4", "10.0.1", "unknown"):
        monkeypatch.setattr(node.redis, "info", lambda section, told=told: {"redis_version": told})
        node._exchange()
    assert node.state.is_connected


def test_what_is_written_together_fails_apart(redis: RedisServer) -> None:
    """What is in no hurry waits for what is, and goes in one exchange, in order; an answer that is an error is its own item's."""
    config = DisaggregationConfig(role="decode", scheduler_port=redis.port, scheduler_topic="outbox")
    node = Node(config, lambda node_id: NodeInfo(node_id, "decode", VERSION, "", {}, [], 0, []), lambda message: None)
    redis.client.set("outbox:inbox:broken", "no stream")
    failed: list[str] = []
    for name, is_urgent in (("a", False), ("broken", False), ("a", True), ("a", False)):
        node.post("inbox", name, {"urgent": str(is_urgent).encode()}, lambda name=name: failed.append(name), is_urgent=is_urgent)  # type: ignore[misc]
    node.write(lambda pipe: pipe.set("outbox:last", "x"))
    node._outgoing.put(None)
    items = node._take_outgoing()
    assert len(items) == 6 and items[-1] is None
    node._write_all([item for item in items if item is not None])
    assert failed == ["broken"] and redis.client.get("outbox:last") == b"x"
    assert [fields[b"urgent"] for _, fields in redis.client.xrange("outbox:inbox:a")] == [b"False", b"True", b"False"]
    node.post("inbox", "a", {"urgent": b"False"}, lambda: failed.append("a"), is_urgent=False)
    assert len(node._take_outgoing()) == 1, "it is sent though nothing else comes"
