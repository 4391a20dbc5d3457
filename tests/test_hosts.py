"""One model on two hosts: two tritonservers in network namespaces. What clients see, and what each server says of itself, also when one fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest

from backend import LLM
from backend.config import EngineConfig
from backend.errors import ModelError
from backend.following import FollowingHost
from backend.group import Group
from client import Client, GenerateError, HttpClient
from deploy.demo import FORETOKEN, free_ports
from deploy.supervision.processes import read_state
from tests.conftest import code_prompts, greedy
from tests.network import OtherHost, other_host
from tests.servers import RunningServer, serve
from tests.supervised import LONG, Stream, Supervised, assert_told, wait_for

READY_SECONDS = 180.0
PROMPTS = code_prompts(3, (200, 600), seed=81)


@dataclass
class Hosts:
    first: Supervised
    second: RunningServer
    status: str
    """The second one's address for /health."""
    other: OtherHost

    def health(self) -> int:
        """What the second host's server says of itself; 0: nothing."""
        try:
            with urllib.request.urlopen(f"http://{self.status}/health", timeout=5) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def await_ready(self) -> None:
        wait_for(lambda: self.health() == 200 and self._first_health() == 200, "both hosts", READY_SECONDS)

    def _first_health(self) -> int:
        with contextlib.suppress(OSError):
            return self.first.health()[0]
        return 0


def find_rank(server: RunningServer) -> int:
    """Process id of the only rank that a server has started."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and b"backend.follower" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    own = [pid for pid in found if server.process.pid in ancestors(pid)]
    assert len(own) == 1, f"{len(own)} ranks"
    return own[0]


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = read_state(pid)[1]
        found.append(pid)
    return found


@contextlib.contextmanager
def running_hosts(folder: Path, own_options: Callable[[int], Sequence[str]] = lambda rank: ()) -> Iterator[Hosts]:
    """own_options: of each host's server."""
    with other_host() as other, ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        port, *status = free_ports(3)
        common = (
            f"--master={other.own}:{port}",
            "--tensor-parallel-size=2",
            "--nnodes=2",
            "--num-threads=1",
            "--drain-seconds=2",
            "--max-restarts=9",
        )
        starts = [
            threads.submit(own.enter_context, serve(folder / str(rank) / "log", *options, *common, program=(*prefix, *FORETOKEN), host=host))
            for rank, own, prefix, host in ((0, first, (), "127.0.0.1"), (1, second, other.prefix, other.address))
            for options in [(f"--node-rank={rank}", f"--status-port={status[rank]}", *own_options(rank))]
        ]
        wait(starts)
        own = Hosts(Supervised(starts[0].result(), status[0]), starts[1].result(), f"{other.address}:{status[1]}", other)
        own.await_ready()
        yield own


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with running_hosts(tmp_path_factory.mktemp("hosts")) as own:
        yield own


def test_answers_are_those_of_one_rank(hosts: Hosts, llm_plain: LLM) -> None:
    with ThreadPoolExecutor(3) as threads, Client(hosts.first.server.grpc) as client:
        answers = list(threads.map(lambda p: client.generate(p, max_tokens=12, temperature=0.0, ignore_eos=True)[0], PROMPTS))
    assert [a.token_ids for a in answers] == [r.outputs[0].token_ids for r in llm_plain.generate(PROMPTS, greedy(12), use_tqdm=False)]


def test_the_second_host_sends_clients_to_the_first(hosts: Hosts) -> None:
    with (
        Client(hosts.second.grpc) as client,
        pytest.raises(GenerateError, match=f"send requests to the server there \\({re.escape(hosts.other.own)}:") as caught,
    ):
        client.generate("x = ", max_tokens=2)
    assert caught.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("fault", ["a rank of the second host hangs", "the network is cut"])
def test_a_fault_is_told_and_mended(hosts: Hosts, fault: str) -> None:
    """Open requests have their error in time; both servers say that they do not serve, and do again by themselves. (The first host's server, and with
    it rank 0, is started again in both cases: the second host sees that end, too.)"""
    if "network" in fault and not hosts.other.cable:
        pytest.skip("this process may not make network namespaces")
    hosts.await_ready()
    rank = find_rank(hosts.second)
    streams = [Stream(client, LONG) for client in (Client(hosts.first.server.grpc), HttpClient(hosts.first.server.http))]
    for stream in streams:
        assert stream.has_begun.wait(30) and stream.error is None, stream.error
    since = time.monotonic()
    if "hangs" in fault:
        os.kill(rank, signal.SIGSTOP)
    else:
        hosts.other.cut()
    try:
        assert_told(streams, since)
        wait_for(lambda: hosts._first_health() != 200, "the first host's health")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGCONT)
        if "network" in fault:
            hosts.other.mend()
    wait_for(lambda: hosts.health() != 200, "the second host's health")
    hosts.await_ready()
    with Client(hosts.first.server.grpc) as client:
        assert len(client.generate("x = ", max_tokens=4, ignore_eos=True)[0].token_ids) == 4


def test_hosts_that_do_not_fit() -> None:
    """Both say the same: the values here and there."""
    (port,) = free_ports(1)
    place = {"nnodes": 2, "master": f"127.0.0.1:{port}"}
    errors: list[str] = []

    def follow() -> None:
        try:
            FollowingHost(
                EngineConfig.from_dict({"max_batch_size": 8, "parallel_config": {**place, "tensor_parallel_size": 4, "nnodes": 4, "node_rank": 1}})
            )
        except ModelError as error:
            errors.append(str(error))

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(ModelError) as caught:
        Group(EngineConfig.from_dict({"max_batch_size": 16, "parallel_config": {"tensor_parallel_size": 2, **place}}))
    thread.join()
    for text in (str(caught.value), *errors):
        assert "tensor_parallel_size 2 on rank 0, 4 on rank" in text and "max_batch_size 16 on rank 0, 8 on rank" in text
    assert len(errors) == 1


def test_a_host_too_many() -> None:
    """It hears that its rank is there already, which goes on."""
    (port,) = free_ports(1)
    place = {"tensor_parallel_size": 2, "nnodes": 2, "master": f"127.0.0.1:{port}"}
    config = EngineConfig.from_dict({"num_threads": 1, "parallel_config": {**place, "node_rank": 1}})
    follower: list[FollowingHost] = []
    thread = threading.Thread(target=lambda: follower.append(FollowingHost(config)))
    thread.start()
    llm = LLM(num_threads=1, parallel_config=place)
    thread.join()
    with pytest.raises(ModelError, match=r"rank 1 has ended: .*all ranks are there already: does another host have this node_rank"):
        FollowingHost(config)
    assert len(llm.generate(PROMPTS[:1], greedy(4), use_tqdm=False)[0].outputs[0].token_ids) == 4
    llm.close()
    follower[0].close()
