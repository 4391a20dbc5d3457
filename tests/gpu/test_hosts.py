"""One model on two hosts with a GPU each, which reach each other by sockets alone, as two machines without a faster network."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from client import Client
from tests.conftest import greedy
from tests.small import LLM
from tests.supervised import LONG, Stream, assert_told, wait_for
from tests.test_hosts import PROMPTS, Hosts, find_rank, running_hosts

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or shutil.which("tritonserver") is None, reason="needs two GPUs, and tritonserver on PATH"
)

SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
MEMORY = "1GiB"


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = LLM(device="cuda", dtype="float32", kv_cache_memory=MEMORY, speculative_config={"method": "none"})
    try:
        return [r.outputs[0].token_ids for r in llm.generate(PROMPTS, greedy(48), use_tqdm=False)]
    finally:
        llm.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]) -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SOCKETS.items():
            patch.setenv(name, value)
        own = lambda rank: [f"--device=cuda:{rank}", "--dtype=float32", f"--kv-cache-memory={MEMORY}"]  # noqa: E731
        with running_hosts(tmp_path_factory.mktemp("hosts"), own) as running:
            yield running


def ask(hosts: Hosts) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as threads, Client(hosts.first.server.grpc) as client:
        return [a[0].token_ids for a in threads.map(lambda p: client.generate(p, max_tokens=48, temperature=0.0, ignore_eos=True), PROMPTS)]


def test_answers_are_those_of_one_gpu(hosts: Hosts, expected: list[list[int]]) -> None:
    assert ask(hosts) == expected


def test_a_rank_that_is_killed_is_told_and_mended(hosts: Hosts, expected: list[list[int]]) -> None:
    stream = Stream(Client(hosts.first.server.grpc), LONG)
    assert stream.has_begun.wait(30) and stream.error is None, stream.error
    since = time.monotonic()
    os.kill(find_rank(hosts.second), signal.SIGKILL)
    assert_told([stream], since)
    wait_for(lambda: hosts.health() != 200, "the second host's health")
    hosts.await_ready()
    assert ask(hosts) == expected
