"""Headers for Triton: how they are given, and a real server whose interfaces are restricted, and want one."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from backend.errors import ConfigError
from client import AsyncClient, Client, GenerateError, HttpClient
from client.gateway.fleet import Fleet
from client.gateway.metrics import Metrics
from client.headers import VARIABLE, AddHeaders, add_header_arguments, check_headers, parse_headers, read_headers
from deploy.cli import main
from deploy.demo import FORETOKEN, free_ports, running_gateway, stop_server
from deploy.health import is_healthy
from deploy.named_files import read_own_header
from deploy.options import ServeConfig
from tests.servers import RunningServer
from tests.supervised import Supervised, start, wait_for

NAME, SECRET = "client-key", "b0d1e5=+/.~-"
HEADERS = {NAME: SECRET}
SHORT = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_header_arguments(parser)
    return parser.parse_args(words)


# -- how they are given -------------------------------------------------------------------------------------------------------------


def test_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_headers(parse()) == {}
    monkeypatch.setenv(VARIABLE, "a=1\nb=1\n\nc=1")
    (file := tmp_path / "headers").write_text("# of the server\nB = 2=2\n\nc=2\n")
    words = f"--triton-header-file={file}", "--triton-header", "c=3", "--triton-header=d=Bearer x"
    assert read_headers(parse(*words)) == {"a": "1", "b": "2=2", "c": "3", "d": "Bearer x"}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("SECRET", "must be NAME=VALUE, and has no ="),
        ("=SECRET", "a header of Triton's cannot be called ''"),
        ("a b=SECRET", "a header of Triton's cannot be called 'a b'"),
        ("key-bin=SECRET", "a header of Triton's cannot be called 'key-bin'"),
        ("grpc-timeout=SECRET", "a header of Triton's cannot be called 'grpc-timeout'"),
        ("Content-Length=SECRET", "a header of Triton's cannot be called 'Content-Length'"),
        ("a=", "the value of Triton's header 'a' must be characters of ASCII"),
        ("a=SECRETé", "the value of Triton's header 'a' must be characters of ASCII"),
        ("b=SECRET", "Triton's header 'b' is given twice, with two values"),
    ],
)
def test_what_is_none_is_refused_and_not_told(line: str, rule: str) -> None:
    with pytest.raises(ValueError, match=r"^of, line 2: ") as caught:
        parse_headers(["B=1", line], "of")
    assert rule in str(caught.value) and "SECRET" not in str(caught.value)
    with pytest.raises(ValueError, match="must be characters of ASCII"):
        Client("127.0.0.1:1", headers={"a": "x\r\nb: y"})
    with pytest.raises(ValueError, match="must be characters of ASCII"):
        HttpClient("127.0.0.1:1", headers={"a": "x\r\nb: y"})


def test_by_both_names() -> None:
    request = triton_grpc._client.Request({"other": "1"})
    AddHeaders(check_headers({"Key": "2", "triton-grpc-protocol-x": "3"}))(request)
    assert request.headers == {"other": "1", "key": "2", "triton-grpc-protocol-key": "2", "triton-grpc-protocol-x": "3"}


def test_of_serve(tmp_path: Path) -> None:
    file = tmp_path / "header"
    for text, rule in {
        "": "has no header",
        "a=12345678\nb=12345678": "has 2 headers; Triton wants one",
        "a=1234567": "the value of a must be 8 or more of letters",
        "a=1234567:": "the value of a must be 8 or more of letters",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"triton_header_file {file}.*{rule}"):
            read_own_header(str(file))
    with pytest.raises(ConfigError, match=r"triton_header_file .*/none cannot be read: No such file"):
        read_own_header(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="restricted_apis has no effect without triton_header_file"):
        ServeConfig(restricted_apis=("inference",))
    with pytest.raises(ConfigError, match="triton_header_file has no effect without restricted_apis"):
        ServeConfig(triton_header_file="x")
    with pytest.raises(ConfigError, match="restricted_apis must be of inference, health, metadata, got 'trace'"):
        ServeConfig(restricted_apis=("trace",), triton_header_file="x")


def test_headers_that_nobody_is_sent_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--backend=openai", "--triton-header=a=b"]) == 2
    assert "--triton-header has no effect with --backend openai" in capsys.readouterr().err
    for command in ("complete", "chat", "gateway", "bench"):
        assert main([command, "--triton-header=SECRET"]) == 2
        error = capsys.readouterr().err
        assert f"foretoken {command}: --triton-header, line 1: must be NAME=VALUE" in error and "SECRET" not in error


# -- a server that wants one --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("headers") / "header"
    path.write_text(f"{NAME}={SECRET}\n")
    return path


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Supervised]:
    options = "--drain-seconds=5", "--restricted-apis", "inference", "health", "metadata", f"--triton-header-file={file}"
    with start(tmp_path_factory.mktemp("restricted"), *options, headers=HEADERS) as running:
        yield running


@pytest.fixture(scope="module")
def server(supervised: Supervised) -> RunningServer:
    return supervised.server


@pytest.mark.serving
def test_clients_send_them(server: RunningServer) -> None:
    for model in ("decode", "generate"):
        with Client(server.grpc, model=model, headers=HEADERS) as client:
            assert client.is_ready()
            (answer,) = client.generate("x = ", **SHORT)
    over_http = HttpClient(server.http, headers=HEADERS)
    assert over_http.generate("x = ", **SHORT)[0].text == answer.text == over_http.generate_once("x = ", **SHORT)["text_output"]

    async def ask() -> str:
        async with AsyncClient(server.grpc, headers=HEADERS) as client:
            assert (await client.describe())["max_model_len"] and (await client.infer("tokenizer", text_input="x"))["input_ids"]
            assert not await client.cancel("nobody")
            return (await client.generate("x = ", **SHORT))[0].text

    assert asyncio.run(ask()) == answer.text
    for headers in ({}, {NAME: "wrong"}):
        with Client(server.grpc, headers=headers) as client:
            assert not client.is_ready()
            with pytest.raises(GenerateError, match="restricted"):
                client.generate("x = ", **SHORT)
        with pytest.raises(GenerateError, match="restricted"):
            HttpClient(server.http, headers=headers).generate("x = ", **SHORT)


@pytest.mark.serving
def test_commands_send_them(server: RunningServer, file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    words, url = [f"--triton-header-file={file}"], f"--url={server.grpc}"
    assert main(["complete", url, *words, "--max-tokens=6", "--quiet", "x = "]) == 0
    assert main(["bench", url, *words, "--num-prompts=2", "--output-len=4", "--disable-tqdm"]) == 0
    assert main(["complete", url, "--max-tokens=6", "x = "]) == 1 and "restricted" in capfd.readouterr().err
    monkeypatch.setenv(VARIABLE, f"{NAME}={SECRET}")
    assert main(["complete", url, "--max-tokens=6", "--quiet", "x = "]) == 0
    assert main(["chat", url, "--max-tokens=6", "--quiet", "x"]) == 0


@pytest.mark.serving
def test_load_tests_send_them(server: RunningServer, file: Path) -> None:
    command = [str(Path(sys.executable).parent / "locust"), "--headless", "--stop-timeout=30", "-f", "deploy/load/locustfile.py,tests/locust_end.py"]
    command += ["--run-time=60s", "--users=2", "--num-prompts=2", "--output-len=4", f"--grpc-url={server.grpc}", f"--triton-header-file={file}"]
    result = subprocess.run([*command, "GrpcUser"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.serving
def test_gateways_send_them(server: RunningServer, file: Path, tmp_path: Path) -> None:
    with running_gateway(tmp_path / "log", server.grpc, f"--triton-header-file={file}") as (address, _):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        body = json.dumps({"prompt": "x = ", "max_tokens": 4, "logprobs": 1})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and json.loads(answer.read())["usage"]["completion_tokens"] == 4
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200

    async def ask() -> int:
        servers = Fleet([server.grpc], "decode", Metrics(), headers=HEADERS)
        await servers.start()
        try:
            return len([chunk async for chunk in servers.stream("fleet", {"text_input": "x = ", **SHORT})])
        finally:
            await servers.close()

    assert asyncio.run(ask())


@pytest.mark.serving
def test_the_gateway_of_a_server_sends_them(file: Path, tmp_path: Path) -> None:
    (port, *rest) = free_ports(5)
    ports = [f"--{name}-port={own}" for name, own in zip(("http", "grpc", "metrics", "status"), rest)]
    command = [*FORETOKEN, "serve", f"--port={port}", *ports, f"--repository={tmp_path / 'repository'}", "--restricted-apis=inference"]
    with (tmp_path / "log").open("wb") as out:
        process = subprocess.Popen([*command, f"--triton-header-file={file}"], stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(lambda: is_healthy([port]), "an answer of the model")
    finally:
        stop_server(process)


@pytest.mark.serving
def test_the_supervisor_sends_them_and_nobody_reads_them(supervised: Supervised, server: RunningServer) -> None:
    """It has models answer, and brings back one that died; no command line shows the secret."""
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        for call in (client.is_server_live, client.is_server_ready, client.get_server_metadata):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
    before = supervised.counts()
    os.kill(supervised.stub("tokenizer"), signal.SIGKILL)
    wait_for(lambda: supervised.counts() != before, "the tokenizer's end")
    supervised.await_ready()
    supervised.assert_went(before, "tokenizer")
    assert f"{NAME}=***" in Path(f"/proc/{server.pid}/cmdline").read_text() and SECRET not in server.log.read_text("utf-8", "replace")
    processes = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert SECRET not in processes
