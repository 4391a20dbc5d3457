"""What strangers reach of a running server: which of Triton's APIs, on which address, and what they read of its start."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from client import Client
from client.gateway import cli as gateway
from deploy.supervision.processes import is_running, read_state
from tests.servers import RunningServer, ServerPool, wait_until

pytestmark = pytest.mark.serving

CALLS: dict[str, Callable[[Any, dict[str, str]], object]] = {
    "register system memory": lambda c, h: c.register_system_shared_memory("mine", "/stolen", 64, headers=h),
    "register CUDA memory": lambda c, h: c.register_cuda_shared_memory("mine", b"A" * 64, 0, 64, headers=h),
    "list system memory": lambda c, h: c.get_system_shared_memory_status(headers=h),
    "list CUDA memory": lambda c, h: c.get_cuda_shared_memory_status(headers=h),
    "unregister system memory": lambda c, h: c.unregister_system_shared_memory(headers=h),
    "unregister CUDA memory": lambda c, h: c.unregister_cuda_shared_memory(headers=h),
    "model configuration": lambda c, h: c.get_model_config("decode", headers=h),
    "repository index": lambda c, h: c.get_model_repository_index(headers=h),
    "load": lambda c, h: c.load_model("decode", headers=h),
    "unload": lambda c, h: c.unload_model("tokenizer", headers=h),
    "statistics": lambda c, h: c.get_inference_statistics(headers=h),
    "read trace": lambda c, h: c.get_trace_settings(headers=h),
    "write trace": lambda c, h: c.update_trace_settings(settings={"trace_rate": "1"}, headers=h),
    "read log": lambda c, h: c.get_log_settings(headers=h),
    "write log": lambda c, h: c.update_log_settings({"log_info": True}, headers=h),
}
HARMLESS = ("list system memory", "list CUDA memory", "model configuration", "repository index", "statistics", "read trace", "read log")


@pytest.fixture(scope="module", params=["--supervise", "--no-supervise"])
def server(request: pytest.FixtureRequest, servers: ServerPool) -> RunningServer:
    return servers.get() if request.param == "--supervise" else servers.get("--no-supervise", "--model-control-mode=explicit")


def connect(server: RunningServer, protocol: str) -> Any:
    return triton_http.InferenceServerClient(server.http) if protocol == "http" else triton_grpc.InferenceServerClient(server.grpc)


def header(protocol: str, key: str) -> dict[str, str]:
    return {"foretoken-key" if protocol == "http" else "triton-grpc-protocol-foretoken-key": key}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_for_clients_wants_the_key(server: RunningServer, protocol: str, name: str) -> None:
    """A region of shared memory that a client may register is every request's, and the memory of the models' processes."""
    with connect(server, protocol) as client:
        for key in ({}, header(protocol, "wrong"), header(protocol, "")):
            with pytest.raises(InferenceServerException, match="is restricted"):
                CALLS[name](client, key)
        if name in HARMLESS:
            CALLS[name](client, header(protocol, server.key))
    with Client(server.grpc) as client:
        assert client.generate("x = ", max_tokens=1)[0].token_ids


def test_the_key_is_not_on_the_command_line(server: RunningServer) -> None:
    """Every user of the machine reads those. Without supervision nobody is there to take it away, as docs/operations.md says."""
    own = server.process.pid
    pids = [own, *(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and read_state(int(p.name))[1] == own)]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if is_running(pid)]
    assert any(b"tritonserver" in line for line in lines)
    is_shown = any(server.key.encode() in line for line in lines)
    assert is_shown == (b"--model-repository" in lines[0]), "it is there only where the launcher has become the server"
    assert server.key not in server.log.read_text("utf-8", "replace")


def test_only_this_machine_reaches_it(tmp_path: Path) -> None:
    """Without --host."""
    command = [sys.executable, "-m", "deploy.cli", "serve", "--dry-run", f"--repository={tmp_path / 'repository'}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    for kind in ("http", "grpc", "metrics"):
        assert f"--{kind}-address=127.0.0.1" in result.stdout
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    args = parser.parse_args([])
    assert gateway.listen_on(args.host, bool(args.api_keys)) == "127.0.0.1", "nor the gateway, which lets in whoever comes unless it is given keys"
    assert gateway.listen_on(None, True) == "0.0.0.0" and gateway.listen_on("10.0.0.1", True) == gateway.listen_on("10.0.0.1", False) == "10.0.0.1"


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy in the environment that answers nobody."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{holder.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield


def test_a_proxy_does_not_stand_between_what_is_on_one_machine(dead_proxy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher with its supervisor, and the clients."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = subprocess.run([sys.executable, "-m", "deploy.cli", "demo", "--max-tokens=8"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[demo] stopped." in result.stdout
    assert not list(tmp_path.glob("foretoken/demo-*")), "its repository is gone"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_a_demo_that_is_ended_ends_its_server(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "deploy.cli", "demo", "--max-tokens=2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True) as demo:
        assert demo.stdout is not None
        line = ""
        while "ready after" not in line:
            line = demo.stdout.readline()
            assert line, "the demo has ended by itself"
        launcher = int(line.partition("(process ")[2].partition(",")[0])
        assert is_running(launcher)
        os.kill(demo.pid, number)
        demo.stdout.read()
        assert demo.wait(60) == {signal.SIGINT: 130, signal.SIGKILL: -9}.get(number, 128 + number)
    assert wait_until(lambda: not is_running(launcher)), "its server goes on"
