"""Requests that Triton gives to another rank's instance: what crosses to rank 0 and back, and what is left when either end is gone."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config import BUNDLED_MODEL, EngineConfig
from backend.engine_process.setup import Setup
from backend.errors import ConfigError, ModelError
from backend.parallel.claims import check_socket, claim_rank, meeting_folder
from backend.rank_processes import follow_in_process
from tests.servers import wait_until
from tests.triton_stand_in import InferenceRequest


class Pair:
    """Rank 0's model, and rank 1's instance, whose plans are nobody's: what it computes is test_parallel's to show."""

    def __init__(self, adapter: Any, folder: Path) -> None:
        (folder / "1").mkdir()
        relay, instance = (importlib.import_module(f"backend.adapters.{name}") for name in ("relay", "rank_instance"))
        self.ending = threading.Event()
        self.spec: dict[str, Any] = {}
        self.relay = relay.RequestRelay(folder / "relay")
        self.relay.greet(1, {"port": 7})

        def run(spec: dict[str, Any], report: Any, end: Any) -> None:
            self.spec = spec
            report({"ready": True})
            self.ending.wait(60)

        self.model = adapter.TritonPythonModel()
        parameters = {"model": {"string_value": str(BUNDLED_MODEL)}, "max_batch_size": {"string_value": "8"}}
        arguments = {"model_config": json.dumps({"parameters": parameters}), "model_repository": str(folder), "model_version": "1"}
        self.model.initialize({**arguments, "model_instance_kind": "CPU", "model_name": "decode"})
        self.left = threading.Event()
        self.relay.start(lambda request: self.model.execute([request]), self.left.set)
        self.instance = instance.RankInstance(1, folder / "relay", run, 30.0)

    def close(self) -> None:
        self.model.finalize()
        self.relay.close("rank 0 is being ended")
        self.ending.set()
        self.instance.finalize()


@pytest.fixture
def pair(adapter, tmp_path):
    made = Pair(adapter, tmp_path)
    yield made
    made.close()


def test_messages_are_what_was_packed(adapter):
    relay = importlib.import_module("backend.adapters.relay")
    arrays = [
        ("ids", np.arange(6, dtype=np.int32).reshape(2, 3)),
        ("none", np.zeros(0, dtype=np.float32)),
        ("texts", np.array([b"", b"a\nb\0\xff", b"\xc3\xa9"], dtype=object)),
        ("flag", np.array([True])),
    ]
    head, found = relay.unpack(relay.pack({"kind": "request", "id": "x\ny"}, arrays))
    assert head == {"kind": "request", "id": "x\ny"}
    for (name, array), (other, same) in zip(arrays, found, strict=True):
        assert name == other and array.dtype == same.dtype and array.shape == same.shape and (array == same).all()


def test_a_request_is_answered_through_rank_0(pair):
    values: dict[str, Any] = {"text_input": "def é(", "max_tokens": 9, "top_k": 1, "ignore_eos": True}
    here, there = InferenceRequest("a", **values), InferenceRequest("a", **values)
    pair.model.execute([here])
    pair.instance.execute([there])
    merged = [np.concatenate([r.values["output_ids"] for r in s.finish()]).tolist() for s in (here.sender, there.sender)]
    assert merged[0] == merged[1] and len(merged[0]) == 9
    assert there.sender.reasons() == [b"length"] and pair.spec == {"port": 7}


def test_what_is_refused_is_refused_as_by_rank_0(pair):
    for request_id, values, message in [
        ("bad", {"text_input": "x", "max_tokens": 0}, "[INVALID_ARG] request 'bad': max_tokens must be"),
        (b"\xff", {"text_input": "x"}, "the request's id is not valid UTF-8: byte 0xff at 0"),
        ("bad", {"text_input": "x", "parameters": '{"temperature": 0}'}, "temperature came as a parameter of the request"),
    ]:
        request = InferenceRequest(request_id, **values)
        pair.instance.execute([request])
        assert message in request.sender.message()
        assert request.sender.responses[0].error().code().name == "INVALID_ARG"


def test_a_client_that_is_gone_ends_its_request(pair):
    request = InferenceRequest("long", text_input="def f(", max_tokens=1900, ignore_eos=True)
    pair.instance.execute([request])
    request.sender.is_gone = True
    assert request.sender.reasons() == [b"cancelled"]
    assert wait_until(lambda: not pair.model._exchanges and not pair.instance._open)  # forgotten right behind the last response


def test_rank_0_that_ends_leaves_nobody_waiting(pair):
    held, late = (InferenceRequest(name, text_input="def f(", max_tokens=1900, ignore_eos=True) for name in ("held", "late"))
    pair.instance.execute([held])
    for line in pair.relay._lines:
        with socket.socket(fileno=os.dup(line.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
    assert "[UNAVAILABLE] request 'held': rank 0 has ended" in str(held.sender.finish()[-1].error())
    pair.instance.execute([late])
    assert "[UNAVAILABLE] request 'late': rank 0 has ended" in late.sender.message()


def test_a_rank_hears_why_rank_0_has_no_use_for_it(adapter, tmp_path):
    """Also where its reader is done before `close` goes on."""
    relay, rank_instance = (importlib.import_module(f"backend.adapters.{name}") for name in ("relay", "rank_instance"))
    own = relay.RequestRelay(tmp_path / "relay")
    own._can_take.set = lambda: (time.sleep(0.2), threading.Event.set(own._can_take))

    def close() -> None:
        assert wait_until(lambda: any(line.rank for line in own._lines), 30)
        own.close("there are too few GPUs")

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ModelError, match="rank 1: rank 0 has ended: there are too few GPUs"):
        rank_instance.RankInstance(1, tmp_path / "relay", lambda *arguments: None, 30.0)
    closing.join()


def test_clients_hear_which_rank_it_was_that_ended(pair, monkeypatch):
    """They were told of rank 0 where the instance's own process had died."""
    killed = [sys.executable, "-c", "import os; input(); os.kill(os.getpid(), 9)"]
    monkeypatch.setattr("backend.rank_processes.own_process.command", lambda module: killed)
    with pytest.raises(ModelError, match="its process has ended with status -9"):
        follow_in_process({}, print, pair.instance._note_lost)
    late = InferenceRequest("late", text_input="def f(", max_tokens=1900, ignore_eos=True)
    pair.instance.execute([late])
    assert "[UNAVAILABLE] request 'late': rank 1 cannot go on: its process has ended with status -9" in str(late.sender.finish()[-1].error())


def test_an_instance_that_is_ended_tells_rank_0(pair):
    pair.ending.set()
    thread = threading.Thread(target=pair.instance.finalize)
    thread.start()
    assert pair.left.wait(30)
    thread.join(60)
    assert not thread.is_alive()


def test_a_rank_that_rank_0_does_not_come_to(adapter, tmp_path):
    instance = importlib.import_module("backend.adapters.rank_instance")
    with pytest.raises(ModelError, match="rank 1: rank 0 did not come to"):
        instance.RankInstance(1, tmp_path / "relay", lambda spec, report, end: None, 0.2)
    relay = importlib.import_module("backend.adapters.relay").RequestRelay(tmp_path / "relay")

    def end() -> None:
        assert wait_until(lambda: bool(relay._lines))
        relay.close("no GPU")

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(ModelError, match="rank 1: rank 0 has ended: no GPU"):
        instance.RankInstance(1, tmp_path / "relay", lambda spec, report, end: None, 30.0)
    thread.join()


@pytest.mark.parametrize("step", ["has not come", "says nothing", "loads"])
def test_a_rank_hears_of_another_instance_s_end(adapter, tmp_path, step):
    """Whatever it waits for: it had been the time for which ranks are waited for."""
    relay, instance = (importlib.import_module(f"backend.adapters.{name}") for name in ("relay", "rank_instance"))
    own = relay.RequestRelay(tmp_path / ("other" if step == "has not come" else "relay"))
    ending, looks = threading.Event(), iter([None] * 3)
    if step == "loads":
        own.greet(1, {})

    def check() -> None:
        if next(looks, ModelError) is ModelError:
            raise ModelError("rank 2 of 3: its instance has ended")

    with pytest.raises(ModelError, match="rank 2 of 3: its instance has ended"):
        instance.RankInstance(1, tmp_path / "relay", lambda spec, report, end: ending.wait(60), 60.0, check)
    ending.set()
    own.close("")


INSTANCE = f"""
import os, pathlib, sys, time
sys.path.insert(0, {os.getcwd()!r})
from backend.parallel import claims
claims.COUNT_SECONDS, claims.EXPLAIN_SECONDS = 0.05, 1.0
if sys.argv[2] == "late":
    time.sleep(60)
claim = claims.claim_rank(pathlib.Path(sys.argv[1]), [0, 1, 2], 0)
instances = claims.Instances(claim, 3)
print(claim.rank, flush=True)
try:
    while True:
        instances.check()
        time.sleep(0.01)
except claims.ModelError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize("gone", ["has a rank", "has none yet"])
def test_instances_that_end_before_the_ranks_have_met(tmp_path, gone):
    """The others hear of it, and which rank it was, or would have been. Nobody had been told."""
    (tmp_path / "model.py").write_text(INSTANCE)
    begun = []
    for how in ("", "", "late" if gone == "has none yet" else ""):
        command = [sys.executable, str(tmp_path / "model.py"), str(tmp_path), how]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        if how == "":
            assert begun[-1].stdout.readline() == f"{len(begun) - 1}\n"
    try:
        time.sleep(1.0)
        assert [process.poll() for process in begun] == [None] * 3
        begun[2].kill()  # who has not waited for it yet sees a process that is over, and is there
        assert [process.stdout.readline() for process in begun[:2]] == ["rank 2 of 3: its instance has ended before the model was loaded\n"] * 2
    finally:
        for process in begun:
            process.kill()
            process.communicate()


def test_an_engine_whose_ranks_will_not_come_is_ended(monkeypatch):
    """While it loads: who loads it hears why, and its process is over."""
    from backend.engine_process import client

    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ends = []
    monkeypatch.setattr(client, "start_process", lambda connection: ends.append(connection) or sleeper)
    engine = client.EngineClient(lambda news: None, lambda why: None)

    def check() -> None:
        raise ModelError("rank 1 of 2: its instance has ended")

    with pytest.raises(ModelError, match="rank 1 of 2: its instance has ended"):
        engine.load(Setup(EngineConfig()), check)
    assert sleeper.poll() == -signal.SIGKILL
    sleeper.communicate()


def test_who_has_a_rank(tmp_path):
    first, second = (claim_rank(tmp_path, [0, 1, 2], 0) for _ in range(2))
    assert [first.is_free(rank) for rank in (1, 2)] == [False, True]
    os.close(second.file)
    assert first.is_free(1) and claim_rank(tmp_path, [0, 1, 2], 0).rank == 1


HUNG = """
import os, signal, sys
from multiprocessing.connection import Client
connection = Client(sys.argv[1], "AF_UNIX")
connection.send_bytes(b'{"rank": 1, "arrays": []}\\n')
connection.recv_bytes()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_rank_that_hangs_is_ended(adapter, tmp_path):
    """Its clients wait for the server's end, which comes when a process has died."""
    relay = importlib.import_module("backend.adapters.relay").RequestRelay(tmp_path / "relay")
    with subprocess.Popen([sys.executable, "-c", HUNG, str(tmp_path / "relay")]) as process:
        relay.greet(1, {})
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        relay.kill(2)
        assert process.poll() is None
        relay.kill(1)
        assert process.wait(30) == -signal.SIGKILL
    relay.kill(1)
    relay.close("the test is over")


class TestClaims:
    def test_each_rank_is_one_process_s(self, tmp_path):
        folder = meeting_folder(4711, tmp_path)
        first, second = claim_rank(folder, [0, 1], 0), claim_rank(folder, [0, 1], 0)
        assert (first.rank, second.rank) == (0, 1)
        with pytest.raises(ModelError, match="rank 0, 1 is another process's"):
            claim_rank(folder, [0, 1], 0.1)
        second.give_back()
        assert claim_rank(folder, [1], 0).rank == 1
        first.give_back()
        assert not folder.exists()

    def test_what_killed_servers_left_is_removed(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        gone, held, running = (meeting_folder(server, tmp_path) for server in (2**22 + 1, 2**22 + 2, os.getpid()))
        for folder in (gone, running):
            os.close(claim_rank(folder, [0], 0).file)
        claim = claim_rank(held, [0], 0)
        meeting_folder(os.getpid(), tmp_path)
        assert not gone.exists() and held.exists() and running.exists()
        claim.give_back()

    def test_a_folder_that_others_enter_is_refused(self, tmp_path):
        folder = meeting_folder(4712, tmp_path)
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match="not a folder of this user alone"):
            meeting_folder(4712, tmp_path)
        folder.rmdir()

    def test_a_folder_whose_path_is_too_long_for_a_socket_is_refused(self, tmp_path):
        """Rank 0 alone failed, by an error that named nothing, and the others waited for it for two minutes."""
        check_socket(Path("/", "a" * 100))
        with pytest.raises(ConfigError, match="108 bytes, of at most 107 for a socket: shorten TMPDIR"):
            check_socket(Path("/", "a" * 101))
