"""TLS between clients and a server: gRPC's own, also with clients' certificates, and a proxy's before HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import AsyncClient, Client, GenerateError, HttpClient, Tls
from client.gateway import fleet
from client.gateway.app import read_metrics
from client.gateway.metrics import Metrics
from deploy.cli import main
from deploy.demo import running_gateway
from deploy.supervision.processes import find_stubs
from tests.certificates import NAME, Certificates, make_certificates
from tests.servers import RunningServer, serve, wait_until

SHORT = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def own(certificates: Certificates) -> Tls:
    """Of a client that the server lets in."""
    return Tls(certificates.ca, certificates.client_key, certificates.client)


@pytest.fixture(scope="module")
def words(certificates: Certificates) -> list[str]:
    """The same as options."""
    return [f"--root-certificates={certificates.ca}", f"--private-key={certificates.client_key}", f"--certificate-chain={certificates.client}"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[RunningServer]:
    """By mutual TLS."""
    options = [f"--grpc-server-cert={certificates.server}", f"--grpc-server-key={certificates.server_key}", f"--grpc-root-cert={certificates.ca}"]
    with serve(tmp_path_factory.mktemp("tls") / "log", "--drain-seconds=5", *options) as running:
        yield running


@contextlib.contextmanager
def tls_proxy(certificates: Certificates, target: str) -> Iterator[int]:
    """Its port: by TLS it hands all on to HOST:PORT."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, certificates.server_key)
    host, _, port = target.rpartition(":")

    def hand_on(near: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(near, server_side=True) as secure, socket.create_connection((host, int(port))) as far:
            back = threading.Thread(target=copy, args=(far, secure))
            back.start()
            copy(secure, far)
            back.join()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                target.sendall(part)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=hand_on, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


# -- gRPC ---------------------------------------------------------------------------------------------------------------------------


def test_clients_speak_it(server: RunningServer, own: Tls) -> None:
    for model in ("decode", "generate"):
        with Client(f"grpcs://{server.grpc}", model=model, tls=own) as client:
            assert client.is_ready()
            (answer,) = client.generate("x = ", **SHORT)

    async def ask() -> str:
        async with AsyncClient(f"grpcs://{server.grpc}", tls=own) as client:
            assert (await client.describe())["max_model_len"] and (await client.infer("tokenizer", text_input="x"))["input_ids"]
            return (await client.generate("x = ", **SHORT))[0].text

    assert len(answer.token_ids) == 6 and asyncio.run(ask()) == answer.text


def test_who_is_not_who_it_should_be_gets_no_answer(server: RunningServer, certificates: Certificates, own: Tls) -> None:
    """Neither a client without a certificate, or with somebody else's, nor a server that the client does not trust, or of another name."""
    wrong = (
        Tls(certificates.ca),
        Tls(certificates.ca, certificates.stranger_key, certificates.stranger),
        Tls(certificates.stranger, own.private_key, own.certificate_chain),
        Tls(certificates.ca, own.private_key, own.certificate_chain, server_name="other.test"),
    )
    for tls in wrong:
        with Client(f"grpcs://{server.grpc}", tls=tls) as client, pytest.raises(GenerateError) as caught:
            client.generate("x = ", **SHORT)
        assert caught.value.code == "UNAVAILABLE", caught.value
        assert not client.is_ready()
    with Client(server.grpc) as client, pytest.raises(GenerateError, match=r"request '[0-9a-f]{32}': ") as caught:
        client.generate("x = ", **SHORT)
    assert caught.value.code == "UNAVAILABLE"
    with Client(f"grpcs://{server.grpc}", tls=Tls(own.root_certificates, own.private_key, own.certificate_chain, NAME)) as client:
        assert client.is_ready(), "any name that the certificate has"


def test_the_servers_own_certificate_may_be_trusted_alone(server: RunningServer, certificates: Certificates, own: Tls) -> None:
    with Client(f"grpcs://{server.grpc}", tls=Tls(certificates.server, own.private_key, own.certificate_chain)) as client:
        assert client.is_ready()


def test_commands_speak_it(server: RunningServer, certificates: Certificates, words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    url = f"--url=grpcs://{server.grpc}"
    assert main(["complete", url, *words, "--max-tokens=6", "--quiet", "x = "]) == 0
    with tls_proxy(certificates, server.metrics) as port:
        metrics = f"--metrics-url=https://localhost:{port}/metrics"
        assert main(["bench", url, *words, metrics, "--num-prompts=2", "--output-len=4", "--disable-tqdm"]) == 0
    assert "nothing will be said" not in capfd.readouterr().err
    assert main(["complete", url, words[0], "--max-tokens=6", "x = "]) == 1
    assert re.search(r"^foretoken complete: request '[0-9a-f]{32}': ", capfd.readouterr().err, re.MULTILINE)


def test_load_tests_speak_it(server: RunningServer, words: list[str]) -> None:
    command = [str(Path(sys.executable).parent / "locust"), "--headless", "--stop-timeout=30", "-f", "deploy/load/locustfile.py,tests/locust_end.py"]
    command += ["--run-time=60s", "--users=2", "--num-prompts=2", "--output-len=4", f"--grpc-url=grpcs://{server.grpc}", *words, "GrpcUser"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "two"])
def test_a_gateway_speaks_it(server: RunningServer, certificates: Certificates, words: list[str], tmp_path: Path, host: str) -> None:
    """Also to servers that it finds behind a name, of which their certificates are."""
    port = server.grpc.rpartition(":")[2]
    addresses = f"grpcs://127.0.0.1:{port},grpcs://localhost:{port}" if host == "two" else f"grpcs://{host}:{port}"
    with (
        tls_proxy(certificates, server.metrics) as metrics,
        running_gateway(tmp_path / "log", addresses, *words, f"--metrics-url=https://localhost:{metrics}/metrics") as (address, _),
    ):
        body = b'{"model": "foretoken", "prompt": "x = ", "max_tokens": 4}'
        request = urllib.request.Request(f"{address}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    assert "foretoken_steps_total" in text, "the server's own"
    assert host != "two" or f'server="grpcs://127.0.0.1:{port}"' in text


def test_a_name_is_what_certificates_are_of(monkeypatch: pytest.MonkeyPatch, server: RunningServer, own: Tls) -> None:
    port = server.grpc.rpartition(":")[2]

    def resolve(host: str, number: int, *_: object, **__: object) -> list:
        return [(socket.AF_INET, 0, 0, "", ("127.0.0.1", number))]

    async def ask(name: str) -> dict:
        servers = fleet.Fleet([f"grpcs://{name}:{port}"], "decode", Metrics(), own)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lambda *a, **o: asyncio.sleep(0, resolve(*a, **o)))
        await servers.start()
        try:
            assert [member.url for member in servers.members] == [f"grpcs://{server.grpc}"]
            return await servers.describe(5.0)
        finally:
            await servers.close()

    assert asyncio.run(ask(NAME))["max_model_len"]
    with pytest.raises(GenerateError):
        asyncio.run(ask("other.test"))


def test_files_that_vanish_do_not_end_the_search_for_servers(tmp_path: Path) -> None:
    tls = Tls(make_certificates(tmp_path).ca)

    async def follow() -> None:
        servers = fleet.Fleet(["grpcs://localhost:1"], "decode", Metrics(), tls)
        (tmp_path / "ca.pem").rename(tmp_path / "away")
        await servers._resolve()
        assert servers.members == []
        (tmp_path / "away").rename(tmp_path / "ca.pem")
        await servers._resolve()
        assert servers.members
        await servers.close()

    asyncio.run(follow())


def test_a_model_that_died_is_brought_back(server: RunningServer, own: Tls) -> None:
    """The supervisor has no certificate, and needs none."""

    def answers() -> bool:
        async def ask() -> bool:
            async with AsyncClient(f"grpcs://{server.grpc}", tls=own) as client:
                with contextlib.suppress(GenerateError):
                    return bool((await client.infer("tokenizer", text_input="x"))["input_ids"])
                return False

        return asyncio.run(ask())

    before = server.pid
    (stub,) = [stub for stub in find_stubs(server.pid) if stub.model == "tokenizer"]
    os.kill(stub.pid, signal.SIGKILL)
    assert wait_until(lambda: [s.pid for s in find_stubs(server.pid) if s.model == "tokenizer" and s.pid != stub.pid] != [])
    assert wait_until(answers)
    assert server.pid == before, "the tokenizer alone was loaded"


# -- HTTP ---------------------------------------------------------------------------------------------------------------------------


def test_http_by_a_proxy(server: RunningServer, certificates: Certificates) -> None:
    with tls_proxy(certificates, server.http) as port:
        trusted, name = Tls(certificates.ca), f"https://localhost:{port}"
        (answer,) = HttpClient(name, tls=trusted).generate("x = ", **SHORT)
        assert len(answer.token_ids) == 6 and HttpClient(name, tls=trusted).generate_once("x = ", **SHORT)["text_output"] == answer.text
        assert HttpClient(f"https://127.0.0.1:{port}/", tls=Tls(insecure=True)).generate("x = ", **SHORT)[0].text == answer.text
        for wrong in (Tls(), Tls(certificates.stranger), Tls(certificates.ca, server_name="other.test")):
            with pytest.raises(GenerateError, match="certificate verify failed") as caught:
                HttpClient(name, tls=wrong).generate("x = ", **SHORT)
            assert caught.value.code == "UNAVAILABLE"
        with server.cancels():
            assert next(HttpClient(name, tls=trusted).stream("x = ", max_tokens=1500, ignore_eos=True)).token_ids


# -- what cannot be -----------------------------------------------------------------------------------------------------------------


def test_certificates_that_cannot_be_used(certificates: Certificates, tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("no certificate\n")
    for files, message in (
        ({"root_certificates": str(tmp_path / "none")}, "root_certificates .*/none cannot be read: No such file or directory"),
        ({"root_certificates": str(text)}, "root_certificates .*text.pem holds no certificate in PEM"),
        ({"root_certificates": certificates.client_key}, "root_certificates .*client_key.pem holds no certificate in PEM"),
        ({"private_key": certificates.client_key}, "private_key .*: certificate_chain is missing"),
        ({"certificate_chain": certificates.client}, "certificate_chain .*: private_key is missing"),
        (
            {"certificate_chain": certificates.client, "private_key": certificates.server_key},
            "certificate_chain .*client.pem is not the certificate of private_key .*server_key.pem",
        ),
        ({"certificate_chain": certificates.client, "private_key": str(tmp_path / "none")}, "private_key .*/none cannot be read"),
        ({"certificate_chain": str(tmp_path / "none"), "private_key": certificates.client_key}, "certificate_chain .*/none cannot be read"),
        ({"insecure": True, "root_certificates": certificates.ca}, "insecure takes any certificate"),
    ):
        with pytest.raises(ValueError, match=message):
            Tls(**files)


def test_what_would_have_no_effect(certificates: Certificates, capsys: pytest.CaptureFixture[str]) -> None:
    tls = Tls(certificates.ca)
    for make in (Client, AsyncClient, HttpClient):
        with pytest.raises(ValueError, match=r"root_certificates has no effect on 127\.0\.0\.1:1: write grpcs://HOST:PORT"):
            make("127.0.0.1:1", tls=tls)
    with pytest.raises(ValueError, match="insecure: over gRPC certificates are always looked at"):
        Client("grpcs://127.0.0.1:1", tls=Tls(insecure=True))
    with pytest.raises(ValueError, match=r"https://127\.0\.0\.1:1 is of HTTP: gRPC by TLS is grpcs://HOST:PORT"):
        Client("https://127.0.0.1:1")
    option = f"--root-certificates={certificates.ca}"
    for command in ("complete", "chat", "gateway", "bench"):
        assert main([command, option]) == 2
        assert f"foretoken {command}: root_certificates has no effect on 127.0.0.1:8001" in capsys.readouterr().err
        assert main([command, "--url=grpcs://127.0.0.1:1", "--root-certificates=/none"]) == 2
        assert f"foretoken {command}: root_certificates /none cannot be read: No such file" in capsys.readouterr().err


def test_a_server_whose_certificates_cannot_be_used_does_not_start(
    certificates: Certificates, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pair = [f"--grpc-server-cert={certificates.server}", f"--grpc-server-key={certificates.server_key}"]
    for words, message in (
        (pair[:1], "grpc_server_cert '.*' has no effect without grpc_server_key"),
        (pair[1:], "grpc_server_key '.*' has no effect without grpc_server_cert"),
        ([f"--grpc-root-cert={certificates.ca}"], "grpc_root_cert '.*' has no effect without grpc_server_cert"),
        ([*pair, "--port=8080"], "grpc_server_cert is of the gRPC port, which with port"),
        ([pair[0], f"--grpc-server-key={certificates.client_key}"], "grpc_server_cert .* is not the certificate of grpc_server_key"),
        ([pair[0], "--grpc-server-key=/none"], "grpc_server_key /none cannot be read"),
        (["--grpc-server-cert=/none", pair[1]], "grpc_server_cert /none cannot be read"),
        ([*pair, f"--grpc-root-cert={certificates.ca_key}"], "grpc_root_cert .* holds no certificate in PEM"),
        ([*pair, f"--grpc-root-cert={tmp_path}"], "grpc_root_cert .* cannot be read: Is a directory"),
    ):
        assert main(["serve", "--dry-run", *words]) == 2
        assert re.search(f"foretoken serve: {message}", told := capsys.readouterr().err), told


def test_metrics_of_a_server_whose_certificates_are_gone_are_left_out(certificates: Certificates, tmp_path: Path) -> None:
    """The gateway's own are shown all the same."""
    path = tmp_path / "ca.pem"
    path.write_bytes(Path(certificates.ca).read_bytes())
    tls = Tls(str(path))
    path.unlink()
    assert read_metrics("https://127.0.0.1:9/metrics", tls) == b""
