"""`foretoken demo`: a real server, a real prompt, a streamed answer; everything started is stopped again."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from client.headers import NO_HEADERS, Headers
from client.loopback import open_url
from deploy.endings import raised_signals
from deploy.server import LaunchError, free_ports, state_directory
from deploy.together import FORETOKEN, end_with_parent

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
MAX_ENDING, MAX_TOLD = 3000, 8
"""Of a log whose server did not start: characters of its end, and lines before them."""


@contextlib.contextmanager
def running_server(
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    log: Path,
    *options: str,
    program: Sequence[str] = FORETOKEN,
    is_tied: bool = False,
    host: str = "127.0.0.1",
    headers: Headers = NO_HEADERS,
) -> Iterator[subprocess.Popen[bytes]]:
    """`foretoken serve` as a child process, ready to answer. Raises RuntimeError with the log's end when it does not start.

    is_tied: it ends when this process is killed, or the thread that starts it ends. headers: what a restricted one wants.
    """
    command = [*program, "serve", f"--host={host}", f"--http-port={http_port}", f"--grpc-port={grpc_port}"]
    command += [f"--metrics-port={metrics_port}", "--status-port=0", *options]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        tie = end_with_parent() if is_tied else None
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=tie)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(host, http_port, metrics_port, headers):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start (exit status {process.poll()}); of {log}:\n{_read_reasons(log)}")
            time.sleep(0.1)
        yield process
    finally:
        stop_server(process)


def _read_reasons(log: Path) -> str:
    """A log's first lines that tell of errors, as Triton marks them or this project's launcher begins, and its end."""
    text = log.read_text("utf-8", "replace")
    if not text:
        return f"nothing was written to it; its disk has {shutil.disk_usage(log.parent).free >> 10} KiB free"
    told = [line[:500] for line in text[:-MAX_ENDING].splitlines() if re.match(r"E\d{4} |foretoken serve: |\| \w+ +\| \d+ +\| UNAVAILABLE", line)]
    return "\n".join([*told[:MAX_TOLD], text[-MAX_ENDING:]])


def _is_ready(host: str, http_port: int, metrics_port: int, headers: Headers) -> bool:
    """Whether the server has all its models. Over HTTP, in which a signal may come at any place, and which is served after gRPC is; metrics
    come last."""
    try:
        with (
            open_url(f"http://{host}:{http_port}/v2/health/ready", 5, headers=headers) as ready,
            open_url(f"http://{host}:{metrics_port}/metrics", 5) as metrics,
        ):
            return ready.status == metrics.status == 200
    except OSError:
        return False


@contextlib.contextmanager
def running_gateway(log: Path, grpc_address: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`foretoken gateway` as a child process: its address, once it answers, and the process. Raises RuntimeError when it does not start."""
    (port,) = free_ports(1)
    command = [*FORETOKEN, "gateway", f"--url={grpc_address}", "--host=127.0.0.1", f"--port={port}", *options]
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


def _show(grpc_port: int, max_tokens: int) -> None:
    """A completion without speculation, and one with it. Raises GenerateError."""
    from client import Client
    from client.cli import stream_to_terminal

    lines = []
    with Client(f"127.0.0.1:{grpc_port}") as client:
        for title, choice in (("without speculation", {"method": "none"}), ("with speculation (eagle3 and ngram)", None)):
            print(f"\n[demo] {title}:\n\n{PROMPT}", end="", flush=True)
            _, line = stream_to_terminal(client, prompt=PROMPT, max_tokens=max_tokens, temperature=0.0, stop=["\n\n\n"], speculative=choice)
            lines.append(f"[demo] {title}: {line}")
    print("\n\n" + "\n".join(lines), flush=True)


def run(args: argparse.Namespace) -> int:
    """Whatever ends it, its server is ended with it."""
    with raised_signals():
        return _run(args.max_tokens)


def _run(max_tokens: int) -> int:
    ports = free_ports(3)
    what = "made"
    try:
        log = state_directory() / "demo.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        what = "written"
        log.write_bytes(bytes(4096))  # a disk that is full takes an empty file
        place = tempfile.TemporaryDirectory(prefix="demo-", dir=log.parent)
    except OSError as error:
        print(f"[demo] {log.parent} cannot be {what}: {error.strerror}: set XDG_STATE_HOME to another folder", file=sys.stderr)
        return 1
    except LaunchError as error:
        print(f"[demo] {error}", file=sys.stderr)
        return 1
    print(f"[demo] starting tritonserver with the bundled model on 127.0.0.1 (HTTP {ports[0]}, gRPC {ports[1]}, metrics {ports[2]}) ...", flush=True)
    started = time.monotonic()
    # In a thread of its own: a signal that comes while this one is within gRPC may leave a channel that cannot be closed any more.
    with place as folder, ThreadPoolExecutor(1) as client_thread:
        try:
            with running_server(ports[0], ports[1], ports[2], log, f"--repository={folder}", is_tied=True) as process:
                print(f"[demo] ready after {time.monotonic() - started:.1f} s (process {process.pid}, log {log})", flush=True)
                shown = client_thread.submit(_show, ports[1], max_tokens)
                while not shown.done():
                    time.sleep(0.05)
                shown.result()
        except RuntimeError as error:
            print(f"[demo] {error}", file=sys.stderr)
            return 1
    print("[demo] stopped. `make serve` starts a server that stays.")
    return 0
