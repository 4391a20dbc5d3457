"""`foretoken demo`: a real server, a real prompt, a streamed answer; everything started is stopped again."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deploy.server import state_directory

PROMPT = '''class Circle:
    """A circle of a radius."""

    def __init__(self, x, y, radius):
        self.x = x
        self.y = y
        self.radius = radius

    def __repr__(self):
        return f"Circle(x={self.x!r}, y={self.y!r}, radius={self.radius!r})"

    def __eq__(self, other):
        return (self.x, self.y, self.radius) == (other.x, other.y, other.radius)


class Rectangle:
    """A rectangle of a width and a height."""

    def __init__(self, x, y, width, height):'''
START_SECONDS = 120


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@contextlib.contextmanager
def running_server(http_port: int, grpc_port: int, metrics_port: int, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`foretoken serve` as a child process, ready to answer. Raises RuntimeError with the log's end when it does not start."""
    from client import Client

    command = [sys.executable, "-m", "deploy.cli", "serve", "--host=127.0.0.1", f"--http-port={http_port}", f"--grpc-port={grpc_port}"]
    command += [f"--metrics-port={metrics_port}", "--status-port=0", *options]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        with Client(f"127.0.0.1:{grpc_port}") as client:
            while not client.is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    ending = log.read_text("utf-8", "replace")[-3000:]
                    raise RuntimeError(f"the server did not start (exit status {process.poll()}); the end of {log}:\n{ending}")
                time.sleep(0.2)
        yield process
    finally:
        stop_server(process)


@contextlib.contextmanager
def running_gateway(log: Path, grpc_address: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`foretoken gateway` as a child process: its address, once it answers, and the process. Raises RuntimeError when it does not start."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "deploy.cli", "gateway", f"--url={grpc_address}", "--host=127.0.0.1", f"--port={port}", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _accepts("127.0.0.1", port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the gateway did not start; the end of {log}:\n{log.read_text('utf-8', 'replace')[-3000:]}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        stop_server(process)


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
        return True
    except OSError:
        return False


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, then ends whatever of its process group is left."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N", help="tokens of each answer at most (default 160)")


def run(args: argparse.Namespace) -> int:
    from client import Client
    from client.cli import stream_to_terminal

    ports = free_ports(3)
    log = state_directory() / "demo.log"
    print(f"[demo] starting tritonserver with the bundled model on 127.0.0.1 (HTTP {ports[0]}, gRPC {ports[1]}, metrics {ports[2]}) ...", flush=True)
    started = time.monotonic()
    try:
        with running_server(ports[0], ports[1], ports[2], log) as process, Client(f"127.0.0.1:{ports[1]}") as client:
            print(f"[demo] ready after {time.monotonic() - started:.1f} s (process {process.pid}, log {log})", flush=True)
            lines = []
            for title, choice in (("without speculation", {"method": "none"}), ("with speculation (mtp and ngram)", None)):
                print(f"\n[demo] {title}:\n\n{PROMPT}", end="", flush=True)
                _, line = stream_to_terminal(client, prompt=PROMPT, max_tokens=args.max_tokens, temperature=0.0, stop=["\n\n\n"], speculative=choice)
                lines.append(f"[demo] {title}: {line}")
            print("\n\n" + "\n".join(lines))
    except RuntimeError as error:
        print(f"[demo] {error}", file=sys.stderr)
        return 1
    print("[demo] stopped. `make serve` starts a server that stays.")
    return 0
