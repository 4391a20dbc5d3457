"""Prefill and decode on tritonservers of their own, with a real Redis: what clients see, also while nodes die."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import pytest
import yaml

from backend import LLM
from client import Client, GenerateError
from deploy.demo import FORETOKEN, free_ports
from deploy.supervision.processes import find_engine
from tests.conftest import ROOT, code_prompts, greedy
from tests.network import OtherHost, other_host
from tests.redis_server import RedisServer, redis_server
from tests.servers import RunningServer, serve
from tests.small import SMALL_MODEL, name_drafter
from tests.test_drafter_server import stub_of
from tests.test_drafter_server import wait_for as wait_until

SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
SECTION = {"heartbeat_seconds": 1.0, "lease_seconds": 5, "job_seconds": 8, "transfer_backend": "tcp"}
"""A node that a busy machine lets stand still for less than three heartbeats is not taken for dead."""
PROMPTS = code_prompts(6, (800, 1500), seed=71)
NUMBERS = itertools.count(1)


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Servers that are started again meanwhile answer nobody."""

    def is_so() -> object:
        try:
            return condition()
        except (OSError, http.client.HTTPException, GenerateError):
            return False

    wait_until(is_so, what)


@dataclass
class Pair:
    redis: RedisServer
    prefill: RunningServer
    """On another host."""
    decode: RunningServer
    other: OtherHost

    def fetched(self) -> float:
        return self.decode.metric("foretoken_pd_fetched_prompts_total")

    def fallbacks(self, **labels: str) -> float:
        return self.decode.metric("foretoken_pd_fallbacks_total", **labels)

    def wait_until_fetching(self) -> None:
        """The nodes know of each other, and the prompts of one go to the other. Counts are told some time after their events: what this asked
        is counted when this returns, so that whoever asks next may compare."""

        def is_fetched() -> bool:
            before = self.fetched()
            told = before + self.fallbacks()
            ask(self.decode, fresh(PROMPTS[0]), max_tokens=2)
            wait_for(lambda: self.fetched() + self.fallbacks() != told, "the request's count")
            self.decode.settle()
            return self.fetched() > before

        try:
            wait_for(is_fetched, "a prompt that the prefill node computed")
        except AssertionError as error:
            error.add_note(self.describe())
            raise

    def describe(self) -> str:
        """What the nodes told: their counts, and the ends of their logs."""
        told = []
        for server in (self.decode, self.prefill):
            with contextlib.suppress(OSError, http.client.HTTPException):
                told += [line for line in server.metrics_text().splitlines() if line.startswith("foretoken_pd_") and not line.endswith(" 0")]
            told += server.log.read_text(errors="replace").splitlines()[-40:]
        return "\n".join(told)

    def wait_until_alone(self, before: float) -> None:
        """The decode node has computed prompts since it counted so many: of those that were under way, or that come now, where none was any more."""

        def is_alone() -> bool:
            if self.fallbacks() == before:
                ask(self.decode, fresh(PROMPTS[0]), max_tokens=2)
            return self.fallbacks() > before

        wait_for(is_alone, "prompts computed by the decode node")

    def wait_until_idle(self) -> None:
        for server in (self.prefill, self.decode):
            wait_for(lambda server=server: server.metric("foretoken_kv_pages_held") == 0, "pages that come back")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nodes")
    with other_host() as other, ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as stack:
        own = ("--bind", *dict.fromkeys(("127.0.0.1", other.own)), "--protected-mode", "no")
        redis = stack.enter_context(redis_server(free_ports(1)[0], folder, *own))
        values = {
            "model": str(SMALL_MODEL),
            "speculative_config": name_drafter(SPECULATIVE),
            "disaggregation": SECTION,
            "num_threads": 1,
            "hang_seconds": 10,
        }
        (folder / "node.yaml").write_text(yaml.safe_dump(values))
        common = (f"--config={folder / 'node.yaml'}", f"--scheduler-host={other.own}", f"--scheduler-port={redis.port}", "--drain-seconds=2")
        with contextlib.ExitStack() as prefill, contextlib.ExitStack() as decode:
            starts = [
                threads.submit(own.enter_context, serve(folder / f"node-{role}" / "log", f"--role={role}", *common, program=program, host=host))
                for role, own, program, host in (
                    ("prefill", prefill, (*other.prefix, *FORETOKEN), other.address),
                    ("decode", decode, FORETOKEN, "127.0.0.1"),
                )
            ]
            wait(starts)
            yield Pair(redis, *(start.result() for start in starts), other)


def fresh(prompt: str) -> str:
    """That no cache knows."""
    return f"# {next(NUMBERS)}\n{prompt}"


def ask(server: RunningServer, prompt: str, model: str = "decode", **options):
    with Client(server.grpc, model=model) as client:
        return client.generate(prompt, ignore_eos=True, **{"max_tokens": 16, "temperature": 0.0, **options})[0]


def expect(llm: LLM, prompts: list[str]) -> list[list[int]]:
    return [r.outputs[0].token_ids for r in llm.generate(prompts, greedy(16), use_tqdm=False)]


@pytest.mark.parametrize("model", ["decode", "generate"])
def test_answers_are_those_of_one_node(pair: Pair, llm_all: LLM, model: str) -> None:
    pair.wait_until_fetching()
    before, alone = pair.fetched(), pair.fallbacks()
    prompts = [fresh(p) for p in PROMPTS]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda p: ask(pair.decode, p, model), prompts))
    assert [a.token_ids for a in answers] == expect(llm_all, prompts)
    assert any(source == "mtp" for a in answers for source in a.sources)
    pair.decode.settle()
    assert (pair.fetched() - before, pair.fallbacks() - alone) == (len(prompts), 0)
    assert pair.prefill.metric("foretoken_pd_jobs_total", result="done") >= before + len(prompts)
    assert pair.decode.metric("foretoken_pd_transferred_bytes_total") > 0 and pair.decode.metric("foretoken_pd_nodes") == 1
    pair.wait_until_idle()


def test_a_prefill_node_answers_clients_too(pair: Pair, llm_all: LLM) -> None:
    """Whoever asks whether it lives."""
    assert [ask(pair.prefill, PROMPTS[0], "prefill").token_ids] == expect(llm_all, PROMPTS[:1])


def load(pair: Pair, llm_all: LLM, act: Callable[[], object]) -> None:
    """Every answer is right although `act` comes between."""
    prompts = [fresh(p) for _ in range(2) for p in PROMPTS]
    jobs = pair.prefill.metric("foretoken_pd_jobs_total")

    def act_early() -> None:
        wait_for(lambda: pair.prefill.metric("foretoken_pd_jobs_total") > jobs, "a job")
        act()

    actor = threading.Thread(target=act_early)
    actor.start()
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda p: ask(pair.decode, p), prompts))
    actor.join()
    assert [a.token_ids for a in answers] == expect(llm_all, prompts)


def test_a_prefill_node_that_is_killed(pair: Pair, llm_all: LLM) -> None:
    """Its supervisor brings it back, and it gets prompts again."""
    pair.wait_until_fetching()
    alone = pair.fallbacks()
    supervisor = pair.prefill.process.pid

    def kill() -> None:
        os.kill(supervisor, signal.SIGSTOP)  # brought back at once, it would take its own jobs over
        os.kill(stub_of(pair.prefill, "prefill"), signal.SIGKILL)

    try:
        load(pair, llm_all, kill)
        pair.wait_until_alone(alone)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    pair.prefill.wait_until_ready()
    pair.wait_until_fetching()
    pair.wait_until_idle()


def test_a_prefill_node_that_hangs(pair: Pair, llm_all: LLM) -> None:
    """The process that computes: the one that answers has no part in other nodes' prompts."""
    pair.wait_until_fetching()
    engine, alone = find_engine(stub_of(pair.prefill, "prefill")), pair.fallbacks()
    assert engine is not None
    try:
        load(pair, llm_all, lambda: os.kill(engine, signal.SIGSTOP))
        pair.wait_until_alone(alone)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its supervisor may have lost patience
            os.kill(engine, signal.SIGCONT)
    pair.wait_until_fetching()
    pair.wait_until_idle()


def test_redis_that_is_killed(pair: Pair, llm_all: LLM) -> None:
    pair.wait_until_fetching()
    load(pair, llm_all, pair.redis.kill)
    wait_for(lambda: pair.decode.metric("foretoken_pd_redis_up") == 0, "the gauge")
    assert [ask(pair.decode, PROMPTS[1]).token_ids] == expect(llm_all, PROMPTS[1:2])
    pair.redis.start()
    pair.wait_until_fetching()
    pair.wait_until_idle()


def test_a_network_that_is_cut(pair: Pair, llm_all: LLM) -> None:
    """While pages are read, and while nothing is: the decode node does not wait for what cannot come. All is as before once it is mended."""
    if not pair.other.cable:
        pytest.skip("this process may not make network namespaces")
    pair.wait_until_fetching()
    alone = pair.fallbacks()
    try:
        load(pair, llm_all, pair.other.cut)
        pair.wait_until_alone(alone)
        prompt = fresh(PROMPTS[2])
        assert [ask(pair.decode, prompt).token_ids] == expect(llm_all, [prompt])
    finally:
        pair.other.mend()
    pair.wait_until_fetching()
    pair.wait_until_idle()


def test_a_decode_node_that_is_killed(pair: Pair) -> None:
    """Its clients are told; the prefill node gives its pages to others by itself."""
    pair.wait_until_fetching()
    errors: list[Exception] = []

    def expect_error(prompt: str) -> None:
        try:
            with Client(pair.decode.grpc, inactivity_timeout=5) as client:
                client.generate(prompt, ignore_eos=True, max_tokens=400, temperature=0.0)
        except GenerateError as error:
            errors.append(error)

    threads = [threading.Thread(target=expect_error, args=(fresh(p),)) for p in PROMPTS]
    jobs = pair.prefill.metric("foretoken_pd_jobs_total")
    with pair.decode.slowed():  # so that none of them has its answer first
        for thread in threads:
            thread.start()
        wait_for(lambda: pair.prefill.metric("foretoken_pd_jobs_total") > jobs, "a job")
        os.kill(stub_of(pair.decode, "decode"), signal.SIGKILL)
        for thread in threads:
            thread.join()
    assert len(errors) == len(PROMPTS), "each open request ended with an error"
    wait_for(lambda: pair.prefill.metric("foretoken_kv_pages_held") == 0, "leases that end")
    pair.decode.wait_until_ready()
    pair.wait_until_fetching()


def test_metrics_are_those_that_are_drawn_and_explained(pair: Pair) -> None:
    """By name: on one of the two nodes or on the other."""
    exported: set[str] = set()
    for server in (pair.prefill, pair.decode):
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as response:
            exported |= set(re.findall(r"^# TYPE (foretoken_pd_\w+) ", response.read().decode(), re.M))
    assert set(re.findall(r"`(foretoken_pd_\w+)`", (ROOT / "docs/metrics.md").read_text())) == exported
    for name in ("grafana/dashboards/foretoken.json", "prometheus/alerts.yml"):
        used = set(re.findall(r"\bforetoken_pd_\w+", (ROOT / "deploy" / name).read_text()))
        assert used and used <= exported, name
