"""A real redis-server on a port of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

UNPACKED = Path(__file__).parent.parent / ".venv" / "redis" / "usr"
"""By deploy/setup.sh, where the machine has none."""
EXECUTABLE = shutil.which("redis-server") or str(UNPACKED / "bin" / "redis-server")


class RedisServer:
    """Empty at every start: nothing is written to disk."""

    def __init__(self, port: int, folder: Path, *options: str) -> None:
        self.port, self._folder, self._options = port, folder, options
        self._process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(
            port=port, socket_timeout=5, password=options[options.index("--requirepass") + 1] if "--requirepass" in options else None
        )

    def start(self) -> None:
        command = [EXECUTABLE, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        libraries = ":".join([*map(str, UNPACKED.glob("lib/*")), os.environ.get("LD_LIBRARY_PATH", "")])
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries} if EXECUTABLE.startswith(str(UNPACKED)) else None
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.DEVNULL, env=environment)
        end = time.monotonic() + 60
        while True:
            try:
                self.client.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError):
                assert time.monotonic() < end and self._process.poll() is None, "redis-server did not start"
                time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """It answers nobody, and keeps all connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()


@contextmanager
def redis_server(port: int, folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(port, folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.stop()
