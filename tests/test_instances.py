"""Tensor parallelism by an instance group, on a real server: whichever rank Triton gives a request to, and whichever of them goes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend import LLM, SamplingParams
from client import AsyncClient
from deploy.supervision.processes import Stub, find_engine, find_stubs
from tests.conftest import code_prompts
from tests.servers import serve  # noqa: F401 -- marks these tests as serving
from tests.supervised import Supervised, assert_serves, assert_told, open_streams, start, wait_for

OPTIONS = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def ranked(tmp_path_factory) -> Iterator[Supervised]:
    own = ("--tensor-parallel-size=2", "--ranks=instances", f"--speculative-config={json.dumps(OPTIONS)}", "--num-threads=1")
    with start(tmp_path_factory.mktemp("instances"), *own, "--max-restarts=20") as running:
        yield running


def stubs(ranked: Supervised) -> dict[int, Stub]:
    """Of the ranks: who holds which claim."""
    found = {}
    for stub in find_stubs(ranked.pid):
        for file in Path(f"/proc/{stub.pid}/fd").iterdir():
            name = os.readlink(file).rpartition("/")[2] if file.is_symlink() else ""
            if stub.model == "decode" and name.startswith("rank-"):
                found[int(name.removeprefix("rank-"))] = stub
    return found


def process_of(ranked: Supervised, rank: int, kind: str) -> int:
    """stub: that the server has; engine: that computes for it."""
    stub = stubs(ranked)[rank]
    found = stub.pid if kind == "stub" else find_engine(stub.pid)
    assert found is not None
    return found


def test_the_servers_processes_do_not_compute(ranked: Supervised) -> None:
    for kind, expected in (("stub", False), ("engine", True)):
        maps = [Path(f"/proc/{process_of(ranked, rank, kind)}/maps").read_text("utf-8", "replace") for rank in (0, 1)]
        assert ["libtorch" in text for text in maps] == [expected] * 2


def test_answers_are_one_process_s(ranked: Supervised, llm_plain: LLM) -> None:
    """Half of the requests come to the rank that does not answer them itself; those whose clients leave end there too."""
    prompts = code_prompts(12, (30, 120), seed=41)
    params = [{"max_tokens": 10, "ignore_eos": True, **({"temperature": 0.0} if i % 2 else {"seed": i, "top_p": 0.95})} for i in range(12)]

    async def run() -> list[list[int]]:
        async with AsyncClient(ranked.server.grpc) as client:
            answers = await asyncio.gather(*[client.generate(p, **k) for p, k in zip(prompts, params, strict=True)])
        async with AsyncClient(ranked.server.grpc) as client:
            streams = [client.stream(p, max_tokens=1900, ignore_eos=True) for p in prompts[:4]]
            for stream in streams:
                await anext(stream)
            for stream in streams:
                await stream.aclose()
        return [a[0].token_ids for a in answers]

    expected = [r.outputs[0].token_ids for r in llm_plain.generate(prompts, [SamplingParams(**k) for k in params], use_tqdm=False)]
    assert asyncio.run(run()) == expected
    assert sorted(stubs(ranked)) == [0, 1]
    wait_for(lambda: ranked.server.metric("foretoken_requests_running") == 0 == ranked.server.metric("foretoken_kv_pages_held"), "their end", 20)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize(("rank", "kind"), [(0, "stub"), (1, "stub"), (1, "engine")])
def test_a_rank_that_goes_under_load(ranked: Supervised, rank: int, kind: str, how: int) -> None:
    """All streams end in time with an error; the group is started anew and answers as before."""
    streams = open_streams(ranked.server)
    os.kill(process_of(ranked, rank, kind), how)
    assert_told(streams, time.monotonic())
    wait_for(lambda: ranked.health()[0] == 503, "the news of it", 10)
    ranked.await_ready()
    assert_serves(ranked.server)
    assert sorted(stubs(ranked)) == [0, 1]
