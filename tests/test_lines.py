"""Connections between ranks: who comes to rank 0's port, and is no rank; who is at its address, and is not rank 0."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch.distributed as dist

from backend import follower
from backend.config import EngineConfig
from backend.errors import EngineError, ModelError
from backend.follower import reach_store
from backend.group import ALL_THERE, open_store
from backend.parallel import lines
from backend.parallel.lines import ORDERS, PLANS, SILENT, Orders, RankTakenError, Switchboard, connect, listen
from backend.parallel.pulse import Pulse
from tests.small import SMALL_MODEL

HOST = "127.0.0.1"


@pytest.fixture
def board():
    made = Switchboard(HOST, 3, lambda: None)
    yield made
    made.close()


def message(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no json": message(b"\xff" * 9),
    "deep": message(b"[" * 1020),
    "long": struct.pack("<I", 2**27) + b"x" * 2000,
    "list": message(b"[1]"),
    "rank 0": message(b'{"rank": 0, "kind": "orders"}'),
    "rank 3": message(b'{"rank": 3, "kind": "orders"}'),
    "true": message(b'{"rank": true, "kind": "orders"}'),
    "kind": message(b'{"rank": 1, "kind": "beats"}'),
}


@pytest.mark.parametrize("content", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_sent_away(board: Switchboard, content: bytes) -> None:
    with socket.create_connection((HOST, board.port), timeout=30) as stranger:
        stranger.sendall(content)
        with contextlib.suppress(ConnectionResetError):  # it has not read all of it
            assert stranger.recv(1) == b""
    line = connect(HOST, board.port, 1, ORDERS)
    assert board.wait_for(1, ORDERS, 30) and not board.lost
    line.close()


def test_strangers_who_say_nothing_hold_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are listened to at a time: the others wait, and so may a rank, until their time is over."""
    monkeypatch.setattr(lines, "MAX_GREETED", 2)
    monkeypatch.setattr(lines, "HELLO_SECONDS", 0.2)
    board = Switchboard(HOST, 3, lambda: None)
    strangers = [socket.create_connection((HOST, board.port), timeout=30) for _ in range(6)]
    own = [connect(HOST, board.port, 2, kind) for kind in (ORDERS, PLANS)]
    assert all(board.wait_for(2, kind, 30) for kind in (ORDERS, PLANS))
    for each in (*strangers, *own, board):
        each.close()


def test_rank_0_that_ends_before_the_ranks_have_met() -> None:
    """No words of the library's alone."""
    store: list[dist.TCPStore] = [open_store(HOST, 0)]
    config = EngineConfig.from_dict({"model": str(SMALL_MODEL), "device": "cpu", "parallel_config": {"tensor_parallel_size": 2}})
    other = reach_store(HOST, store[0].port, 2)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(follower.meet, other, config, 1, HOST, lambda now: 0.0)
        await_true(lambda: store[0].check(["hello"]))
        store.clear()
        with pytest.raises(ModelError, match=r"rank 0 has ended, or said nothing, before the ranks had met: .*Connection was likely closed"):
            meeting.result(30)


@pytest.mark.parametrize(("host", "other"), [(HOST, "127.0.0.2"), ("::1", HOST)])
def test_ranks_meet_at_the_address_that_was_named_alone(host: str, other: str) -> None:
    """The library's own listener would be at all of the machine's."""
    try:
        listen(host, 0).close()
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    store, board = open_store(host, 0), Switchboard(host, 2, lambda: None)
    reach_store(host, store.port, 2).set("met", "there")
    assert store.get("met") == b"there"
    for port in (store.port, board.port):
        socket.create_connection((host, port), timeout=30).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=30)
    board.close()


def test_nobody_is_listened_to_once_all_are_there(board: Switchboard) -> None:
    line = connect(HOST, board.port, 1, ORDERS)
    assert board.wait_for(1, ORDERS, 30)
    board.stop_listening()
    with pytest.raises(ConnectionError):
        connect(HOST, board.port, 2, ORDERS)
    board.order(1, {"do": "something"})
    end = time.monotonic() + 30
    while (order := line.receive_order(1)) != {"do": "something"}:
        assert order in ({"do": "beat"}, None) and time.monotonic() < end
    line.close()


def test_of_two_that_are_one_rank_one_is_taken(board: Switchboard) -> None:
    """Both lines are one process's: the second one had the line for plans where it was the quicker one there."""
    first = connect(HOST, board.port, 1, ORDERS)
    with pytest.raises(RankTakenError, match="rank 1 is there already"):
        connect(HOST, board.port, 1, ORDERS)
    plans = connect(HOST, board.port, 1, PLANS)
    assert board.wait_for(1, PLANS, 30) and not board.lost
    board.send_words(1, np.arange(3, dtype=np.int32))
    assert plans.receive(30) == np.arange(3, dtype="<i4").tobytes()
    for line in (first, plans):
        line.close()


@pytest.mark.parametrize("are_all_there", [False, True])
def test_two_that_are_one_rank_and_hear_the_verdict_together(board: Switchboard, monkeypatch: pytest.MonkeyPatch, are_all_there: bool) -> None:
    """The second one hears what one that comes later does. It had an error of the rank for rank 0: its connection had ended, or was refused."""
    store = open_store(HOST, 0)
    config = EngineConfig.from_dict({"model": str(SMALL_MODEL), "device": "cpu", "parallel_config": {"tensor_parallel_size": 2}})
    other = reach_store(HOST, store.port, 2)
    store.set("lines", str(board.port))
    store.set("verdict", "")
    line, _ = follower.meet(other, config, 1, HOST, lambda now: 0.0)
    if are_all_there:
        store.set("verdict", ALL_THERE)
        board.stop_listening()
    monkeypatch.setattr(follower, "hear_verdict", lambda store, silence: "")
    with pytest.raises(follower.NotWanted, match="all ranks are there already"):
        follower.meet(other, config, 1, HOST, lambda now: 0.0)
    assert board.wait_for(1, ORDERS, 30) and not board.lost
    line.close()


@pytest.mark.parametrize("answer", [b"", b"-ERR unknown command\r\n"], ids=["nothing", "something else"])
def test_a_master_that_is_none(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MEET_SECONDS", 0.2)
    monkeypatch.setattr(follower, "MEET_SLACK_SECONDS", 0.2 if not answer else 30.0)
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(100)
                        connection.sendall(answer)

        if answer:
            threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ModelError, match=f"parallel_config.master {HOST}:{port}: no rank 0 within 0 s: .*{'says nothing' if not answer else ''}"):
            follower.reach_store(HOST, port, 2)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_rank_0_that_has_ended_before_the_ranks_had_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for as one is that is to come; this rank knew that it was there."""
    monkeypatch.setattr(follower, "LISTENS_SECONDS", 0.2)
    with listen(HOST, 0) as listener:
        port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        reaching = pool.submit(follower.reach_store, HOST, port, 2)
        with pytest.raises(ModelError, match=f"^parallel_config.master {HOST}:{port}: rank 0 has ended before the ranks had met$"):
            reaching.result(30)


BUSY = """
import re, sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
re.match("(a+)+$", "a" * 64 + "b")  # for ever, and with Python's lock in its hands
"""


def test_rank_0_s_pulse_is_its_process_s() -> None:
    """It goes on while no thread of Python can run there, and stops with the process."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            store = follower.reach_store(HOST, int(process.stdout.readline()), 2)
            answers: list[bool] = []

            class Counted:
                def check(self, keys: list[str]) -> None:
                    answers.append(store.check(keys))

            pulse = Pulse(Counted())  # type: ignore[arg-type]
            pulse.start()
            await_true(lambda: len(answers) > 2)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            await_true(lambda: pulse.silence(time.monotonic()) > 1.0)
            process.send_signal(signal.SIGCONT)
            await_true(lambda: pulse.silence(time.monotonic()) < 1.0)
        finally:
            process.kill()
    pulse.join(30)
    assert not pulse.is_alive()


ENDING = """
import atexit, time
atexit.register(lambda: print([each.is_alive() for each in own]))  # after all handlers that come later
from backend.follower import reach_store
from backend.group import open_store
from backend.parallel import pulse
pulse.PULSE_SECONDS = 0.0
store = open_store("127.0.0.1", 0)
own = [pulse.Pulse(reach_store("127.0.0.1", store.port, 2)) for _ in range(2)]
for each in own:
    each.start()
time.sleep(0.1)
own[0].stop()
print([each.is_alive() for each in own])
"""


def test_pulses_are_over_before_python_ends() -> None:
    """A call of the library that came back meanwhile ended the process by `terminate called without an active exception`."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[False, True]\n[False, False]\n"), done.stderr


def test_a_rank_0_that_vanishes_before_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library tells after the 120 s for which it waits for ranks."""
    monkeypatch.setattr(follower, "MASTER_HANG_SECONDS", 0.5)
    spec = {"rank": 1, "host": HOST, "ring": None, "config": {"model": str(SMALL_MODEL), "device": "cpu"}}
    spec["config"]["parallel_config"] = {"tensor_parallel_size": 2}
    reports = queue.Queue[dict]()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process, ThreadPoolExecutor(1) as pool:
        try:
            assert process.stdout is not None
            spec["port"] = int(process.stdout.readline())
            store = follower.reach_store(HOST, spec["port"], 2)
            rank = pool.submit(follower.run_rank, spec, reports.put, lambda why: None)
            await_true(lambda: store.check(["hello"]))
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(follower.MasterSilent, match=f"rank 0: {SILENT} for .* before the ranks had met"):
                rank.result(30)
            assert SILENT in reports.get(timeout=30)["error"]
        finally:
            process.kill()
        await_true(lambda: not {"verdict", "pulse"} & {thread.name for thread in threading.enumerate()})


def await_true(is_so) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_rank_0_that_says_nothing_is_gone_once_its_process_is_silent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "HANG_SECONDS", 0.1)
    monkeypatch.setattr(Switchboard, "_beat", lambda self: None)
    held = Switchboard(HOST, 2, lambda: None)
    silence, num_looks, lost = [0.0], [0], threading.Event()

    def look(now: float) -> float:
        num_looks[0] += 1
        return silence[0]

    orders = Orders(connect(HOST, held.port, 1, ORDERS), look, lambda why: lost.set())
    orders.start()
    assert held.wait_for(1, ORDERS, 30)
    held.watch()
    await_true(lambda: num_looks[0] > 4)
    assert not lost.is_set()
    silence[0] = 0.2
    assert lost.wait(30)
    held.close()


def test_who_hangs_while_ranks_load_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the seconds that hold for steps, nor never: each side sees it."""
    monkeypatch.setattr(lines, "HANG_SECONDS", 0.0)
    monkeypatch.setattr(lines, "LOADING_HANG_SECONDS", 1.0)
    lost, reasons = threading.Event(), queue.Queue[str]()
    board = Switchboard(HOST, 2, lost.set)
    line = connect(HOST, board.port, 1, ORDERS)  # of a rank that says no more
    assert lost.wait(30)
    board.close()
    line.close()
    monkeypatch.setattr(Switchboard, "_beat", lambda self: None)
    silent = Switchboard(HOST, 2, lambda: None)
    Orders(connect(HOST, silent.port, 1, ORDERS), lambda now: 9.0, reasons.put).start()
    for why in (board.lost[1], reasons.get(timeout=30)):
        found = re.search(rf"{SILENT} for (\S+) s", why)
        assert found and float(found[1]) >= 1.0
    silent.close()


def test_who_hangs_and_has_orders_that_it_does_not_read_is_gone() -> None:
    """More of them than fit its connection: neither who sends them waits for ever, nor who looks whether it lives."""
    lost = threading.Event()
    board = Switchboard(HOST, 2, lost.set)
    line = connect(HOST, board.port, 1, ORDERS)
    assert board.wait_for(1, ORDERS, 30)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(board.order, 1, {"do": "read", "pages": "0" * 2**25})
        await_true(lambda: board._lines[1, ORDERS]._lock.locked())
        board._hang_seconds = 0.6
        is_lost = lost.wait(30)
        line.close()
        with pytest.raises(EngineError, match=f"rank 1 of 2 is gone: {SILENT}"):
            sent.result(30)
    board.close()
    assert is_lost
