"""What is tested: a supervised server and a gateway, as they are started for real, and their processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL
from client import Client, GenerateError
from client.loopback import open_url
from deploy.demo import free_ports, stop_server
from deploy.supervision.processes import Stub, find_engine, find_stubs, is_running, read_state
from tests.servers import RunningServer, serve

HANG_SECONDS = 10.0
START_SECONDS = 60.0
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.repeat %}{{ m.content * m.repeat }}{% endif %}"
    "{% if m.spin %}{% for a in range(m.spin) %}{% for b in range(m.spin) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)
"""The same prompt as the messages as one text, and for those who ask for it as long or as slow as they like."""
SPECULATION = {
    "method": "mtp", "mtp_strategy": "with_ngram", "num_model_steps": 3, "num_speculative_tokens": 5, "placement": "bls",
    "request_methods": ["suffix"], "suffix_decoding_max_cached_requests": 500, "model": str(BUNDLED_DRAFTER),
}  # fmt: skip
"""Every method, the drafter in a process of its own."""
OPTIONS = ("--max-batch-size=32", "--kv-cache-memory=256MiB", f"--hang-seconds={HANG_SECONDS:g}", "--max-restarts=20", "--drain-seconds=10")
MODELS = ("decode", "tokenizer", "mtp_drafter")
KINDS = (*MODELS, "engine", "tritonserver", "gateway", "supervisor")


def lay_out_model(folder: Path) -> Path:
    """The bundled model with a chat template: it has none of its own."""
    folder.mkdir()
    for source in BUNDLED_MODEL.iterdir():
        if source.is_file():
            (folder / source.name).symlink_to(source)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class System:
    def __init__(self, folder: Path, server: RunningServer, status: str) -> None:
        self.folder = folder
        self.server = server
        self._status = status
        (port,) = free_ports(1)
        self.gateway = f"127.0.0.1:{port}"
        self.gateway_log = folder / "gateway.log"
        self.gateway_process: subprocess.Popen[bytes]
        self.start_gateway()

    def start_gateway(self) -> None:
        """Again on the same port, as whoever runs one would."""
        host, _, port = self.gateway.partition(":")
        command = [sys.executable, "-m", "deploy.cli", "gateway", f"--url={self.server.grpc}", f"--host={host}", f"--port={port}"]
        with self.gateway_log.open("ab") as out:
            self.gateway_process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def start_server(self) -> None:
        """Again with the same command: its supervisor has ended."""
        with self.server.log.open("ab") as out:
            self.server.process = subprocess.Popen(self.server.process.args, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def health(self) -> dict[str, Any]:
        """What the supervisor says; {} while it cannot be asked."""
        try:
            with open_url(f"http://{self._status}/health", 5) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())
        except (OSError, ValueError):
            return {}

    def is_well(self) -> bool:
        """All models are up, and every way to a valid answer works."""
        models = self.health().get("models", {})
        if [m for m in MODELS if models.get(m, {}).get("state") != "up"]:
            return False
        try:
            with Client(self.server.grpc, inactivity_timeout=2.0) as client:
                for model in ("decode", "generate"):
                    client.generate("a", max_tokens=1, model=model)
            with open_url(f"http://{self.gateway}/health", 5) as response:
                return response.status == 200
        except (GenerateError, OSError):
            return False

    def wait_until_well(self, seconds: float) -> bool:
        ending = time.monotonic() + seconds
        while not self.is_well():
            if time.monotonic() > ending:
                return False
            time.sleep(0.2)
        return True

    @property
    def server_pid(self) -> int | None:
        """Of tritonserver, while there is one."""
        supervisor = self.server.process.pid
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and read_state(int(entry.name))[1] == supervisor and is_running(int(entry.name)):
                with contextlib.suppress(OSError):
                    if b"tritonserver" in (entry / "cmdline").read_bytes().split(b"\0")[0]:
                        return int(entry.name)
        return None

    def stubs(self) -> list[Stub]:
        pid = self.server_pid
        return find_stubs(pid) if pid else []

    def processes(self) -> dict[str, int]:
        """By kind; those that run."""
        found = {stub.model: stub.pid for stub in self.stubs()}
        engines = [find_engine(stub.pid) for stub in self.stubs() if stub.model == "decode"]
        if engines and engines[0] is not None:
            found["engine"] = engines[0]
        if pid := self.server_pid:
            found["tritonserver"] = pid
        for kind, process in (("gateway", self.gateway_process), ("supervisor", self.server.process)):
            if process.poll() is None:
                found[kind] = process.pid
        return found

    def touch_pages(self) -> None:
        """Fills the KV pool with prompts that have nothing in common, so that all its memory was in use once."""
        pages = int(self.server.metric("foretoken_kv_pages"))
        length = 1900
        with Client(self.server.grpc, inactivity_timeout=30.0) as client:
            for number in range(2 + pages * 16 // length):
                client.generate([2 + number, *((number * 7 + i * 13) % 4000 + 5 for i in range(length - 1))], max_tokens=8, ignore_eos=True)


@contextlib.contextmanager
def running_system(folder: Path) -> Iterator[System]:
    (port,) = free_ports(1)
    speculation = SPECULATION | {"suffix_decoding_cache_path": str(folder / "suffix.npz")}
    model = lay_out_model(folder / "model")
    options = (f"--model={model}", f"--speculative-config={json.dumps(speculation)}", *OPTIONS, f"--status-port={port}")
    with serve(folder / "server.log", *options) as server:
        system = System(folder, server, f"127.0.0.1:{port}")
        try:
            if not system.wait_until_well(START_SECONDS):
                raise RuntimeError(f"the server or the gateway does not answer; their logs are in {folder}")
            yield system
        finally:
            for process in (system.gateway_process, system.server.process):
                stop_server(process)
