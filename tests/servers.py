"""Real servers for tests: started by the launcher, on loopback ports, stopped afterwards."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from deploy.demo import free_ports, running_server


@dataclass
class RunningServer:
    http: str
    grpc: str
    metrics: str
    log: Path
    process: Popen

    def get(self, path: str) -> tuple[int, str]:
        return self._ask(urllib.request.Request(f"http://{self.http}{path}"))

    def post(self, path: str, body: object) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._ask(urllib.request.Request(f"http://{self.http}{path}", data, {"Content-Type": "application/json"}))

    @staticmethod
    def _ask(request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode("utf-8", "replace")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's series that carry the labels; 0 when there is none."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as response:
            text = response.read().decode()
        total = 0.0
        for line in text.splitlines():
            match = re.match(rf"{name}(?:{{(.*)}})? ([-+.\deE]+)$", line)
            if match and all(f'{k}="{v}"' in (match[1] or "") for k, v in labels.items()):
                total += float(match[2])
        return total


@contextlib.contextmanager
def serve(log: Path, *options: str, ports: tuple[int, int, int] | None = None) -> Iterator[RunningServer]:
    http, grpc, metrics = ports or free_ports(3)
    with running_server(http, grpc, metrics, log, f"--repository={log.parent / f'repository-{http}'}", *options) as process:
        yield RunningServer(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"127.0.0.1:{metrics}", log, process)
