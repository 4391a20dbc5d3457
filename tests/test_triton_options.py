"""Options of tritonserver itself that a command of `foretoken serve` hands on."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from client import Client
from deploy.cli import main
from tests.servers import serve, wait_until


def test_they_reach_the_server(tmp_path: Path) -> None:
    """Traces of requests, by the ids that clients gave them, and another form of the log."""
    trace = tmp_path / "trace.json"
    options = ["log-format=ISO8601", f"trace-config=triton,file={trace}", "trace-config=rate=1", "trace-config=level=TIMESTAMPS"]
    with serve(tmp_path / "log", "--drain-seconds=5", "--triton-options", *options) as server, Client(server.grpc) as client:
        assert len(client.generate("x = ", request_id="mine", max_tokens=4, ignore_eos=True)[0].token_ids) == 4
    assert wait_until(trace.is_file), "traces are written at the end"
    assert "mine" in [event.get("request_id") for event in json.loads(trace.read_text())]
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I ", (tmp_path / "log").read_text("utf-8", "replace"), re.MULTILINE)


def test_they_are_a_key_of_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text("triton_options: [rate-limit=execution_count, --metrics-interval-ms=500]\n")
    assert main(["serve", "--dry-run", f"--repository={tmp_path / 'own'}", f"--config={tmp_path / 'x.yaml'}"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[-2:] == ["--rate-limit=execution_count", "--metrics-interval-ms=500"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("http-port=1", "http-port is given by this program"),
        ("allow-http=false", "allow-http is given by this program, or what it watches the server by"),
        ("grpc-use-ssl=1", "grpc-use-ssl is given by this program"),
        ("http-restricted-api=health:a=b", "http-restricted-api is given by this program"),
        ("trace-confg=rate=1", 'this tritonserver has no such option; did you mean "trace-config"?'),
        ("", "this tritonserver has no such option"),
    ],
)
def test_which_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str) -> None:
    assert main(["serve", "--dry-run", f"--repository={tmp_path / 'own'}", "--triton-options", option]) == 2
    assert f"foretoken serve: triton_options {option!r}: {message}" in capsys.readouterr().err
