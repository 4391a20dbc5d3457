"""Prefill and decode apart, each node with a rank on either of two hosts: four tritonservers in two network namespaces, and a real Redis."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import pytest
import yaml

from backend import LLM, SamplingParams
from deploy.demo import FORETOKEN, free_ports
from tests.network import other_host
from tests.redis_server import redis_server
from tests.servers import RunningServer, serve
from tests.small import SMALL_MODEL, name_drafter
from tests.test_hosts import find_rank
from tests.test_nodes import PROMPTS, SECTION, SPECULATIVE, Pair, ask, expect, fresh


@dataclass
class Spread(Pair):
    second: RunningServer
    """Of the prefill node, on this host."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    """The decode node's first rank is on this host, the prefill node's on the other one: whatever a rank exchanges with others passes the network."""
    folder = tmp_path_factory.mktemp("nodes")
    with other_host() as other, ThreadPoolExecutor(4) as threads, contextlib.ExitStack() as stack:
        own = ("--bind", *dict.fromkeys(("127.0.0.1", other.own)), "--protected-mode", "no")
        redis = stack.enter_context(redis_server(free_ports(1)[0], folder, *own))
        values = {
            "model": str(SMALL_MODEL),
            "speculative_config": name_drafter(SPECULATIVE),
            "disaggregation": SECTION | {"transfer_backend": "nixl"},
            "num_threads": 1,
            "hang_seconds": 10,
        }
        values |= {"tensor_parallel_size": 2, "nnodes": 2, "scheduler_host": other.own, "scheduler_port": redis.port, "drain_seconds": 2}
        (folder / "node.yaml").write_text(yaml.safe_dump(values))
        ports = free_ports(2)
        # By TCP, though both could read each other's memory: the kernel of two hosts is one here.
        here, there = [("env", "UCX_TLS=tcp", f"UCX_NET_DEVICES={device}", *FORETOKEN) for device in other.devices]
        places = [("127.0.0.1", here), (other.address, (*other.prefix, *there))]
        starts = {}
        for role, order, master, port in (("decode", (0, 1), other.own, ports[0]), ("prefill", (1, 0), other.address, ports[1])):
            for rank, place in enumerate(order):
                host, program = places[place]
                options = (f"--config={folder / 'node.yaml'}", f"--role={role}", f"--node-rank={rank}", f"--master={master}:{port}")
                context = serve(folder / f"{role}-{rank}" / "log", *options, program=program, host=host)
                starts[role, rank] = threads.submit(stack.enter_context, context)
        wait(starts.values())
        servers = {key: start.result() for key, start in starts.items()}
        yield Spread(redis, servers["prefill", 0], servers["decode", 0], other, servers["prefill", 1])


def test_answers_are_those_of_one_rank(pair: Pair, llm_all: LLM) -> None:
    pair.wait_until_fetching()
    before, alone = pair.fetched(), pair.fallbacks()
    prompts = [fresh(p) for p in PROMPTS[:3]]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda p: ask(pair.decode, p).token_ids, prompts))
    assert answers == expect(llm_all, prompts)
    # What drafts were drawn from comes along, to every rank.
    own, prompt = {"method": "mtp", "verify_strategy": "rejection"}, fresh(PROMPTS[3])
    (expected,) = llm_all.generate([prompt], SamplingParams(max_tokens=16, temperature=0.8, seed=5, ignore_eos=True), speculative=own, use_tqdm=False)
    assert ask(pair.decode, prompt, temperature=0.8, seed=5, speculative=own).token_ids == expected.outputs[0].token_ids
    pair.decode.settle()
    assert (pair.fetched() - before, pair.fallbacks() - alone) == (len(prompts) + 1, 0)
    pair.wait_until_idle()


def test_a_rank_that_dies(pair: Spread, llm_all: LLM) -> None:
    """It ends its node, on both hosts; the other node computes its prompts itself until that is back."""
    prompts = [fresh(p) for p in PROMPTS]
    alone, rank = pair.fallbacks(), find_rank(pair.second)
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = [threads.submit(ask, pair.decode, p) for p in prompts[:3]]
        os.kill(rank, signal.SIGKILL)
        answers += [threads.submit(ask, pair.decode, p) for p in prompts[3:]]
        assert [answer.result().token_ids for answer in answers] == expect(llm_all, prompts)
    assert pair.fallbacks() > alone
    pair.wait_until_fetching()
    pair.wait_until_idle()
