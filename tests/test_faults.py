"""Servers that are stopped, restarted, or cannot start: clients get an error, nothing hangs, and the reason is told."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL
from client import AsyncClient, Client, GenerateError, HttpClient
from deploy.demo import free_ports
from deploy.launcher import server_command
from deploy.options import ServeConfig
from deploy.server import COMPLETE_OPTION, find_server
from tests.conftest import ROOT
from tests.servers import plain_server, serve

LONG = {"max_tokens": 1900, "temperature": 0.0, "ignore_eos": True, "speculative": {"method": "none"}}


def test_killed_under_load_and_started_again(tmp_path):
    """On the same ports. Orderly ends are in test_supervision."""
    ports = free_ports(3)
    with serve(tmp_path / "log", "--drain-seconds=2", ports=ports) as server:

        async def load():
            async with AsyncClient(server.grpc) as client:
                with server.slowed():
                    tasks = [asyncio.create_task(client.generate(f"x{i} = ", **LONG)) for i in range(12)]
                    await asyncio.sleep(1.5)
                    http, grpc = HttpClient(server.http).stream("y = ", **LONG), Client(server.grpc).stream("z = ", **LONG)
                    next(http), next(grpc)
                    os.killpg(server.process.pid, signal.SIGKILL)
                results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

                def rest():
                    with pytest.raises(GenerateError):
                        list(http)
                    with pytest.raises(GenerateError) as caught:
                        list(grpc)
                    assert caught.value.code == "UNAVAILABLE"

                await asyncio.wait_for(asyncio.to_thread(rest), 60)
                return results

        for result in asyncio.run(load()):
            assert isinstance(result, GenerateError), result
        server.process.wait(60)
        with pytest.raises(GenerateError):
            Client(server.grpc, inactivity_timeout=5).generate("x", max_tokens=1)
    with serve(tmp_path / "log2", ports=ports) as server, Client(server.grpc) as client:
        assert len(client.generate("x = ", max_tokens=4, ignore_eos=True)[0].token_ids) == 4


@pytest.mark.parametrize(("name", "model"), [("standalone", "generate"), ("decode", "generate"), ("prefill", "prefill")])
def test_the_checked_in_repositories_load_as_they_are(root, tmp_path, name, model):
    """Plain tritonserver on model_repository/, without the launcher's rendering; nodes without a Redis answer by themselves."""
    http, grpc, metrics = free_ports(3)
    config = ServeConfig(host="127.0.0.1", http_port=http, grpc_port=grpc, metrics_port=metrics)
    command, environment = server_command(find_server(), config, root / "model_repository" / name, "key")
    command.remove(f"--{COMPLETE_OPTION}")  # one that nobody has told that the configurations are complete
    with plain_server(command, environment, tmp_path / "log", http):
        answer = HttpClient(f"127.0.0.1:{http}", model=model).generate_once("import os\n", max_tokens=5, ignore_eos=True)
        assert answer["num_tokens"] == 5, (tmp_path / "log").read_text()[-2000:]


def broken_model(tmp_path: Path, change) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copy(BUNDLED_MODEL / name, folder)
    change(folder)
    return folder


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def replace(name: str, old: str, new: str):
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), [], "has no *.safetensors"),
        (lambda f: (f / "config.json").unlink(), [], "config.json is missing"),
        (lambda f: (f / "tokenizer.json").unlink(), [], "tokenizer.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), [], "config.json cannot be read"),
        (truncate, [], "model.safetensors cannot be read (truncated download?)"),
        (replace("config.json", '"intermediate_size": 512', '"intermediate_size": 500'), [], "has shape (512, 192); config.json makes it (500, 192)"),
        (lambda f: None, ["--max-model-len=999999"], "max_model_len 999999 is beyond the model's own limit 2048"),
    ],
)
def test_a_model_that_cannot_load_says_why(tmp_path, change, options, message):
    folder = broken_model(tmp_path, change)
    with pytest.raises(RuntimeError) as caught, serve(tmp_path / "log", f"--model={folder}", *options):
        pass
    assert message in str(caught.value) + (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("placement", "change", "message"),
    [
        ("in_process", truncate, "model.safetensors cannot be read (truncated download?)"),
        ("bls", replace("config.json", '"hidden_size": 192', '"hidden_size": 96'), "hidden_size is 96; the target's is 192"),
    ],
)
def test_a_drafter_that_cannot_load_says_why(tmp_path, placement, change, message):
    """At the start; a drafter that fails later costs its drafts only."""
    folder = Path(shutil.copytree(BUNDLED_DRAFTER, tmp_path / "drafter"))
    change(folder)
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": 2, "placement": placement, "model": str(folder)})
    with pytest.raises(RuntimeError) as caught, serve(tmp_path / "log", f"--speculative-config={speculative}"):
        pass
    assert message in str(caught.value) + (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative-config={"], "speculative_config is not valid JSON"),
        (["--speculative-config=" + '{"methode": "ngram"}'], "unknown key 'methode'; did you mean \"method\""),
        (["--max-batch-size=1000"], "max_batch_size must be from 1 to 256, got 1000"),
        (["--dtype=float8"], "dtype must be one of auto, float32, bfloat16"),
        (["--device=cuda:0"], "this machine has no NVIDIA GPU"),
        (["--model=/nowhere"], "/nowhere does not exist"),
    ],
)
def test_a_wrong_configuration_says_why(tmp_path, options, message):
    if "cuda:0" in options[0] and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError) as caught, serve(tmp_path / "log", *options):
        pass
    assert message in str(caught.value) + (tmp_path / "log").read_text()


def test_a_port_in_use(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        command = [sys.executable, "-m", "deploy.cli", "serve", f"--grpc-port={port}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and f"grpc_port {port} cannot be used on 127.0.0.1: Address already in use" in result.stderr


def test_a_second_server_on_the_same_folder(tmp_path):
    """It would remove the tree under the running one; and its end was the first one's, who refused everything from then on."""
    with serve(tmp_path / "log") as server:
        command = [sys.executable, "-m", "deploy.cli", "serve", f"--repository={server.repository}"]
        for port, own in zip(free_ports(4), ("http", "grpc", "metrics", "status")):
            command.append(f"--{own}-port={port}")
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 2 and f"repository {server.repository} is in use by process {server.process.pid} on" in result.stderr
        assert (server.repository / "decode" / "config.pbtxt").is_file()
        with Client(server.grpc) as client:
            assert len(client.generate("x = ", max_tokens=4, ignore_eos=True)[0].token_ids) == 4
    assert subprocess.run([*command, "--dry-run"], capture_output=True, timeout=60).returncode == 0, "it is free again"


def test_a_killed_server_leaves_its_folder_free(tmp_path):
    with serve(tmp_path / "log") as server:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(60)
        command = [sys.executable, "-m", "deploy.cli", "serve", "--dry-run", f"--repository={server.repository}"]
        assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def ended_pair(*options: str) -> tuple[int, str]:
    """Of a server with a gateway: the exit status, and what they said."""
    command = [sys.executable, "-m", "deploy.cli", "serve", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    return result.returncode, result.stdout + result.stderr


def test_the_server_and_its_gateway_end_together(tmp_path):
    """A gateway whose port is taken was left out in silence."""
    http, grpc, metrics, status = free_ports(4)
    server = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", f"--status-port={status}", f"--repository={tmp_path / 'r'}"]
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, text = ended_pair(f"--port={port}", *server)
        assert code == 2 and f"port {port} cannot be used on 127.0.0.1" in text and "--port PORT" in text
        code, text = ended_pair(f"--port={free_ports(1)[0]}", f"--http-port={port}", *server[1:])
        assert code == 2 and f"http_port {port} cannot be used" in text
    with socket.socket() as holder:  # nobody holds what the server had
        holder.bind(("127.0.0.1", http))
