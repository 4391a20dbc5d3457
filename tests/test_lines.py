"""Connections between ranks: who comes to rank 0's port, and is no rank; who is at its address, and is not rank 0."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import pytest

from backend import follower
from backend.errors import ModelError
from backend.parallel import lines
from backend.parallel.lines import ORDERS, PLANS, Switchboard, connect

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
