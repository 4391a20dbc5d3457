"""The drafter as a Triton model of its own, on a real server: called each step, killed, unloaded, loaded again."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend import SamplingParams
from client import AsyncClient, Client
from deploy.demo import free_ports
from deploy.launcher import server_command
from deploy.options import ServeConfig
from deploy.server import find_server
from tests.conftest import code_prompts, greedy
from tests.servers import RunningServer, plain_server, serve
from tests.small import LLM

PROMPTS = code_prompts(6, (60, 400), seed=21)
COUNTER = "foretoken_spec_decode_num_"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    speculative = {"method": "mtp", "num_speculative_tokens": 3, "placement": "bls", "adaptive": False}
    options = (f"--speculative-config={json.dumps(speculative)}", "--no-supervise", "--model-control-mode=explicit", "--drain-seconds=3")
    with serve(tmp_path_factory.mktemp("bls") / "log", *options) as running:
        yield running


@pytest.fixture(scope="module")
def offline() -> list:
    """The same requests with the drafter in this process."""
    llm = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3, "adaptive": False})
    return [r.outputs[0] for r in llm.generate(PROMPTS, greedy(40), use_tqdm=False)]


def ask(server: RunningServer, prompt: str, **options):
    with Client(server.grpc) as client:
        return client.generate(prompt, ignore_eos=True, **{"max_tokens": 40, "temperature": 0.0, **options})[0]


def ask_all(server: RunningServer, **options) -> list:
    """Of all prompts, at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda prompt: ask(server, prompt, **options), PROMPTS))


def stub_of(server: RunningServer, model: str) -> int:
    """Process id of a model's stub."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"triton_python_backend_stub" in words[0] and any(f"/{model}/".encode() in w and str(server.log.parent).encode() in w for w in words):
                return int(entry.name)
    raise AssertionError(f"no stub of {model} runs")


def wait_for(condition, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about in {seconds} s"
        time.sleep(0.2)


def accepted(server: RunningServer) -> float:
    return server.metric(f"{COUNTER}accepted_tokens_total", method="mtp")


def test_both_placements_draft_the_same(server, offline):
    for answer, expected in zip(ask_all(server), offline):
        assert answer.token_ids == expected.token_ids
        assert answer.sources == expected.sources
        assert answer.speculation["drafted"] == expected.stats.drafted > 0


@pytest.mark.parametrize(
    ("choice", "sampling"),
    [
        ({"num_speculative_tokens": 1}, {"temperature": 1.0, "seed": 5}),
        ({"num_speculative_tokens": 8}, {"temperature": 0.7, "seed": 6, "top_p": 0.9}),
        ({"verify_strategy": "rejection", "num_speculative_tokens": 4}, {"temperature": 1.0, "seed": 7}),
        ({"verify_strategy": "topp"}, {"temperature": 1.0, "seed": 8, "top_p": 0.8}),
    ],
    ids=["one draft", "eight drafts", "rejection: its probabilities cross too", "topp"],
)
def test_both_placements_sample_the_same(server, llm_all, choice, sampling):
    """Nothing of a draft is lost on the way: not even what rejection sampling needs to be exact."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
    results = llm_all.generate(PROMPTS, params, speculative={"method": "mtp", **choice}, use_tqdm=False)
    for answer, result in zip(ask_all(server, speculative=choice, max_tokens=24, **sampling), results):
        expected = result.outputs[0]
        assert answer.token_ids == expected.token_ids
        assert (answer.speculation["drafted"], answer.speculation["accepted"]) == (expected.stats.drafted, expected.stats.accepted)
    assert sum(r.outputs[0].stats.accepted for r in results) > 0


def test_counters_are_on_the_metrics_port(server, offline):
    """Every family of SPECULATION.md, with model and method."""
    server.settle()
    before = {name: server.metric(f"{COUNTER}{name}_total", model="decode", method="mtp") for name in ("drafts", "draft_tokens", "accepted_tokens")}
    length = server.metric("foretoken_spec_decode_accepted_length_sum")
    position = server.metric(f"{COUNTER}accepted_tokens_per_pos_total", method="mtp", position="0")
    ask(server, PROMPTS[0])
    stats = offline[0].stats
    server.settle()
    for name, value in (("drafts", stats.drafts), ("draft_tokens", stats.drafted), ("accepted_tokens", stats.accepted)):
        assert server.metric(f"{COUNTER}{name}_total", model="decode", method="mtp") - before[name] == value
    assert server.metric("foretoken_spec_decode_accepted_length_sum") - length == stats.drafts + stats.accepted
    assert server.metric(f"{COUNTER}accepted_tokens_per_pos_total", method="mtp", position="0") - position == stats.accepted_per_position[0]
    for name in ("propose", "forward", "verify"):
        assert server.metric(f"foretoken_step_{name}_seconds_total") > 0


def test_the_log_says_how_the_drafter_is_set_up(server):
    log = server.log.read_text("utf-8", "replace").replace("\\", "")
    assert "drafter ready: 2 layers" in log
    assert '"placement": "bls"' in log and '"num_model_steps": 3' in log


def test_others_cannot_disturb_the_drafter(server, offline):
    """Its calls carry a session: a stranger's is answered with an error, and the decode model opens a new one."""
    import numpy as np
    from tritonclient.grpc import InferenceServerClient, InferInput
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype

    arrays = {
        "session": np.array([1, 5, 64, 16], dtype=np.int64),
        "tokens": np.array([3], dtype=np.int32),
        "hidden": np.zeros((1, 192), dtype=np.float32),
        "requests": np.array([[1, 1, 1, 1, 0, 0, 0]], dtype=np.int64),
        "filters": np.zeros((1, 3), dtype=np.float32),
        "pages": np.array([0], dtype=np.int32),
        "fresh_pages": np.array([], dtype=np.int32),
    }
    with InferenceServerClient(server.grpc) as client:
        long = np.array([[1, 2048, 1, 128, 0, 0, 0]], dtype=np.int64)
        for changes, message in (
            ({}, "open a new session"),
            ({"pages": np.array([64], dtype=np.int32)}, "pages: page 64 is not one of 0 to 63"),
            ({"tokens": np.array([4096], dtype=np.int32)}, "tokens: id 4096 is not one of 0 to 4095"),
            ({"requests": long, "pages": np.zeros(128, dtype=np.int32)}, "more than the context of 2048"),
            ({"hidden": np.zeros((2, 192), dtype=np.float32)}, "1 tokens, 2 hidden rows"),
        ):
            inputs = []
            for name, value in {**arrays, **changes}.items():
                tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
                tensor.set_data_from_numpy(value)
                inputs.append(tensor)
            with pytest.raises(InferenceServerException, match=message):
                client.infer("mtp_drafter", inputs)
    assert ask(server, PROMPTS[1]).token_ids == offline[1].token_ids
    before = accepted(server)
    assert ask(server, PROMPTS[1]).token_ids == offline[1].token_ids
    wait_for(lambda: accepted(server) > before, "an accepted draft")


@pytest.mark.parametrize("how", ["unload", "kill"])
def test_a_drafter_that_goes_away_under_load_and_comes_back(server, offline, how):
    answers: list = []
    is_over = threading.Event()

    def keep_asking() -> None:
        while not is_over.is_set():
            for prompt, expected in zip(PROMPTS, offline):
                answers.append(ask(server, prompt).token_ids == expected.token_ids)

    threads = [threading.Thread(target=keep_asking) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(answers) > 2, "an answer")
        failures = server.metric(f"{COUNTER}drafter_failures_total", method="mtp")
        if how == "kill":
            os.kill(stub_of(server, "mtp_drafter"), signal.SIGKILL)
        else:
            server.administer("/v2/repository/models/mtp_drafter/unload")
        wait_for(lambda: server.metric(f"{COUNTER}drafter_failures_total", method="mtp") > failures, "a counted failure")
        count = len(answers)
        wait_for(lambda: len(answers) > count + 2, "an answer without the drafter")
        assert server.metric(f"{COUNTER}undrafted_steps_total", method="mtp") > 0
        if how == "kill":
            server.administer("/v2/repository/models/mtp_drafter/unload")
            time.sleep(0.5)
        status, text = server.administer("/v2/repository/models/mtp_drafter/load")
        assert status == 200, text
        before = accepted(server)
        wait_for(lambda: accepted(server) > before, "an accepted draft of the drafter that came back")
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert all(answers) and not any(t.is_alive() for t in threads)
    settled = ask(server, PROMPTS[2])
    assert settled.speculation["drafted"] == offline[2].stats.drafted, "it drafts as if nothing had been"


def test_two_instances_of_decode_share_the_drafter(root, tmp_path):
    """The checked-in repository with an instance more: each has a session of its own, and no step goes without drafts."""
    repository = tmp_path / "repository"
    shutil.copytree(root / "model_repository" / "standalone", repository)
    config = repository / "decode" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    http, grpc, metrics = free_ports(3)
    command, environment = server_command(
        find_server(), ServeConfig(host="127.0.0.1", http_port=http, grpc_port=grpc, metrics_port=metrics), repository, "key"
    )
    log = tmp_path / "log"
    with plain_server(command, environment, log, http) as process:
        server = RunningServer(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"127.0.0.1:{metrics}", log, process, repository)
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(lambda i: ask(server, PROMPTS[i % len(PROMPTS)]), range(12)))
        assert all(answers[i].token_ids == answers[i % len(PROMPTS)].token_ids for i in range(12))
        wait_for(lambda: accepted(server) > 0, "an accepted draft")
        assert server.metric(f"{COUNTER}drafter_failures_total", method="mtp") == 0 == server.metric(f"{COUNTER}undrafted_steps_total", method="mtp")


async def add_corpus(server) -> dict[str, int]:
    async with AsyncClient(server.grpc) as client:
        return await client.add_suffix_corpus([[7] * 8, [9] * 4])


def test_the_suffix_cache_outlives_the_server(tmp_path):
    """Saved at shutdown, restored at start: the first answer of the second server is drafted from the first one's. A corpus that came by a call
    ends with the server."""
    path = tmp_path / "suffix.npz"
    speculative = {"method": "suffix", "num_speculative_tokens": 8, "adaptive": False, "suffix_decoding_cache_path": str(path)}
    answers = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with serve(folder / "log", f"--speculative-config={json.dumps(speculative)}") as server:
            if number:
                time.sleep(1.0)  # it is read in beside the server's start
            answers.append(ask(server, PROMPTS[3]))
            assert asyncio.run(add_corpus(server)) == {"num_texts": 2, "num_tokens": 12, "num_all_tokens": 12, "max_tokens": 2**20}
    first, second = answers
    assert path.is_file() and first.token_ids == second.token_ids
    assert second.speculation["accepted"] > first.speculation["accepted"]
    assert second.speculation["steps"] < first.speculation["steps"]  # by how many depends on the machine: drafts that come late are not waited for
