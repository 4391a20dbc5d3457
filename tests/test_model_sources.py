"""Where a model comes from: folders, GGUF files, names on the hub (from a real cache of it, without a network)."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from backend.config import BUNDLED_MODEL
from backend.errors import ConfigError, ModelError
from backend.model_sources import Source, find_model
from deploy import served_model
from deploy.cli import main
from kernels._load import cache_folder
from kernels.toolchain import KernelError
from tests.conftest import ROOT
from tests.servers import wait_until

COMMIT = "a" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A cache that has the bundled model by the name org/model, at its main branch and as v1."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "cache" / "models--org--model"
    shutil.copytree(BUNDLED_MODEL, repository / "snapshots" / COMMIT, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (repository / "refs").mkdir()
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text(COMMIT)
    return Source(download_dir=str(tmp_path / "cache"))


def test_a_name_on_the_hub(hub: Source) -> None:
    snapshot = Path(str(hub.download_dir)).resolve() / "models--org--model/snapshots" / COMMIT
    for revision in (None, "v1", COMMIT):
        assert find_model("org/model", Source(revision, hub.download_dir)) == snapshot
    assert served_model.check_model("org/model", source=hub) == snapshot


def test_weights_are_downloaded_once(hub: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral's repositories have them in the form of its own programs too; others in folders beside."""
    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "additional_chat_templates/tool_use.jinja"]
    others = ["consolidated.safetensors", "consolidated-00001-of-00010.safetensors", "fp16/model.safetensors", "original/params.json", "README.md"]
    asked: dict[str, Any] = {}
    download = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *own, **options: (asked.update(options), download(*own, **options))[1])
    find_model("org/model", hub)
    rules = {key: value for key, value in asked.items() if key.endswith("_patterns")}
    assert list(filter_repo_objects([*files, *others], **rules)) == files


def test_a_folder_is_never_taken_for_a_name(hub: Source, tmp_path: Path) -> None:
    (tmp_path / "org/model").mkdir(parents=True)
    assert find_model("org/model", hub) == tmp_path / "org/model"
    with pytest.raises(ConfigError, match="revision 'v1' is of a name on the hub; org/model is a path"):
        find_model("org/model", Source("v1", hub.download_dir))
    assert find_model("org/model", Source("main", hub.download_dir)) == tmp_path / "org/model"


def test_what_the_hubs_cache_has_of_gguf_files(hub: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fetched before is served; the cache of a repository is no model, but says what to name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "converted"))
    repository = tmp_path / "cache" / "models--org--model"
    with pytest.raises(ModelError, match=f"{repository} is the hub's cache of org/model: name that, or a folder in {repository / 'snapshots'}"):
        find_model(repository)
    shutil.rmtree(snapshot := repository / "snapshots" / COMMIT)
    snapshot.mkdir()
    with pytest.raises(ModelError, match=r"org/model has no config\.json: of a repository of GGUF files download one"):
        find_model("org/model", hub)
    (repository / "blob").write_bytes(b"GGUF")
    (snapshot / "model.gguf").symlink_to("../../blob")
    made: list[Path] = []
    source = Source(download_dir=hub.download_dir, convert=lambda path, out: (made.append(path), out.mkdir()))
    assert find_model("org/model", source) == find_model(snapshot / "model.gguf", source) and made == [snapshot / "model.gguf"]


@pytest.mark.parametrize(("name", "revision", "where"), [("org/none", None, ""), ("org/model", "v2", " at revision v2")])
def test_what_cannot_be_downloaded(name: str, revision: str | None, where: str, hub: Source) -> None:
    with pytest.raises(ModelError, match=f"{name} is no folder here, and could not be downloaded{where}: .+; without a network, name a folder"):
        find_model(name, Source(revision, hub.download_dir))


def test_without_the_package(hub: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"org/model is no folder here; .* pip install 'foretoken-triton\[hub\]'"):
        find_model("org/model", hub)


@pytest.mark.parametrize("name", ["./org/model", "/org/model", "model", "a/b/c", "", "org/mo del", "~/org/model"])
def test_paths_that_are_not_there(name: str, hub: Source, tmp_path: Path) -> None:
    if name == "":  # the folder that one is in
        assert find_model(name) == tmp_path
        return
    with pytest.raises(ModelError, match="does not exist, nor is it a name on the hub"):
        find_model(name, hub)


def test_files_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model.bin is no model folder: name a folder with config.json, a GGUF file \(.gguf\), or a name"):
        find_model(path)
    with pytest.raises(ModelError, match=r"none.gguf is missing"):
        find_model(tmp_path / "none.gguf")


def test_without_a_home_what_to_set_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container's user that has only a number."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")
    (path := tmp_path / "model.gguf").write_bytes(b"one")
    with pytest.raises(ModelError, match=r"user \d+ has no home folder: set HOME, or XDG_CACHE_HOME to a folder for converted models"):
        find_model(path)
    with pytest.raises(KernelError, match="has no home folder: set HOME, or XDG_CACHE_HOME to a folder for compiled kernels"):
        cache_folder()


def test_a_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the user's cache; anew when it has changed; one that fails leaves nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (path := tmp_path / "model.gguf").write_bytes(b"one")
    calls = []

    def convert(source: Path, out: Path) -> None:
        calls.append(source)
        out.mkdir()
        (out / "config.json").write_text("{}")
        if path.read_bytes() == b"bad":
            raise ModelError("no")

    found = [find_model(path, Source(convert=convert)) for _ in range(2)]
    assert found[0] == found[1] and found[0].parent == tmp_path / "cache/foretoken/models" and calls == [path]
    path.write_bytes(b"two")
    assert find_model(path, Source(convert=convert)) != found[0] and len(calls) == 2
    path.write_bytes(b"bad")
    with pytest.raises(ModelError, match=r"^no$"):
        find_model(path, Source(convert=convert))
    assert len([own for own in found[0].parent.iterdir() if own.is_dir()]) == 2


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A read-only one, as a container may have, does for what was converted before; else it is said what to set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (path := tmp_path / "model.gguf").write_bytes(b"one")
    source = Source(convert=lambda path, out: out.mkdir())
    made = find_model(path, source)
    (lock := made.with_name(f"{made.name}.lock")).unlink()
    lock.mkdir()  # which even root cannot write
    assert find_model(path, source) == made
    made.rmdir()
    said = f"{made.parent}, where converted models are kept, cannot be written: {{}}; set XDG_CACHE_HOME to another folder"
    with pytest.raises(ConfigError, match=re.escape(said.format("Is a directory"))):
        find_model(path, source)
    assert main(["serve", str(path), "--dry-run"]) == 2
    assert capsys.readouterr().err == f"foretoken serve: {said.format('Is a directory')}\n"
    lock.rmdir()

    def fail(number: int) -> Source:
        def convert(_: Path, out: Path) -> None:
            out.mkdir()
            raise OSError(number, os.strerror(number))

        return Source(convert=convert)

    with pytest.raises(ConfigError, match=re.escape(said.format("No space left on device"))):
        find_model(path, fail(errno.ENOSPC))
    with pytest.raises(OSError, match="Input/output error"):  # of what is read
        find_model(path, fail(errno.EIO))
    assert sorted(made.parent.iterdir()) == [lock]


def test_a_link_is_a_way_out_of_paths_that_servers_cannot_read(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the message says; else links are followed."""
    shutil.copytree(BUNDLED_MODEL, tmp_path / "é", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (tmp_path / "é" / "corpus.py").write_text("x = 1")
    (tmp_path / "link").symlink_to(tmp_path / "é")
    (tmp_path / "even").symlink_to(BUNDLED_MODEL)
    assert find_model(tmp_path / "even") == BUNDLED_MODEL.resolve()
    for folder, status in ((tmp_path / "é", 2), (tmp_path / "link", 0)):
        corpus = json.dumps({"method": "suffix", "suffix_decoding_corpus": [str(folder / "corpus.py")]})
        assert main(["serve", str(folder), "--dry-run"]) == status
        assert main(["serve", "--dry-run", f"--speculative-config={corpus}"]) == status
        cache = json.dumps({"method": "suffix", "suffix_decoding_cache_path": str(folder / "cache.npz")})
        assert main(["serve", "--dry-run", f"--speculative-config={cache}"]) == status
        assert capsys.readouterr().err.count("the server's Python stub reads ASCII paths only") == (3 if status else 0)


def test_a_converted_folder_is_one_that_servers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file is called."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("modèle.gguf", "modále.gguf"):
        (tmp_path / name).write_bytes(b"one")
    found = [find_model(tmp_path / name, Source(convert=lambda _, out: out.mkdir())) for name in ("modèle.gguf", "modále.gguf")]
    assert all(path.name.startswith("mod_le-") for path in found) and found[0] != found[1]


@pytest.mark.parametrize(
    "words",
    [
        ["ORG/NAME", "--download-dir={odd}"],
        ["ORG/NAME", "--repository={odd}"],
        ["--download-dir={odd}", "--speculative-config=" + json.dumps({"method": "eagle", "model": "ORG/DRAFTER"})],
    ],
)
def test_nothing_is_downloaded_that_no_server_reads(
    words: list[str], state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("downloaded"))
    assert main(["serve", "--dry-run", *(word.replace("{odd}", str(tmp_path / "é")) for word in words)]) == 2
    assert "the server's Python stub reads ASCII paths only" in capsys.readouterr().err


def test_the_state_folder_is_one_that_servers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its links to the backend are in it, and the cache of suffix."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "é"))
    assert main(["serve", "--dry-run", f"--repository={tmp_path / 'repository'}"]) == 2
    assert "ASCII paths only: set XDG_STATE_HOME to another folder" in capsys.readouterr().err
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/none")
    assert main(["serve", "--dry-run", f"--repository={tmp_path / 'repository'}"]) == 2
    assert "cannot be made: Not a directory: set XDG_STATE_HOME to another folder" in capsys.readouterr().err
    assert main(["demo"]) == 1
    assert "[demo] /dev/null/none/foretoken cannot be made" in capsys.readouterr().err
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "~")  # what is left of a user who has no home
    for command in (["serve", "--dry-run"], ["demo"]):
        assert main(command) and "has no home folder: set HOME, or XDG_STATE_HOME" in capsys.readouterr().err


def test_nothing_is_converted_that_no_server_reads(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "é"))
    (path := tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main(["serve", str(path), "--dry-run"]) == 2
    assert "ASCII paths only; set XDG_CACHE_HOME" in capsys.readouterr().err and not (tmp_path / "é").exists()


def test_a_conversion_that_fails_ends_the_launch(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (path := tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main(["serve", str(path), "--dry-run"]) == 2
    said = capfd.readouterr().err
    assert f"foretoken convert: {path} cannot be read as a GGUF file" in said and f"foretoken serve: {path} could not be converted" in said


def test_a_conversion_ends_with_the_launch(tmp_path: Path) -> None:
    """Even where that is killed: the next launch would write to the same folder beside it."""
    (convert := tmp_path / "python").write_text('#!/bin/sh\nexec > "$0.begun"; echo x; exec sleep 60\n')
    convert.chmod(0o755)
    program = "import sys; sys.executable = sys.argv[1]; from deploy import served_model as own; own.convert_apart(own.Path(), own.Path())"
    launch = subprocess.Popen([sys.executable, "-c", program, str(convert)], cwd=ROOT, start_new_session=True)
    try:
        assert wait_until(lambda: (tmp_path / "python.begun").exists())
        launch.kill()
        assert wait_until(lambda: not [p for p in Path("/proc").glob("[0-9]*") if is_of_session(p, launch.pid)])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launch.pid, signal.SIGKILL)
        launch.wait()


def is_of_session(process: Path, session: int) -> bool:
    """Of /proc's: one that runs."""
    try:
        state, _, _, own = (process / "stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return False
    return int(own) == session and state != "Z"


GPU_MEASUREMENTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("gpu_*.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.parametrize("name", GPU_MEASUREMENTS)
def test_a_measurement_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended with a traceback of PyCUDA's, torch's or a rank's."""
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert re.search(r"error: \d GPUs? needed, and torch .* sees 0", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["trees", "draft_tokens", "cpu_kernels", "grammar_libraries"])
def test_a_measurement_of_a_model_that_is_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with a traceback, or its processes did."""
    monkeypatch.setattr("sys.argv", [name, "--model", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert re.search(rf"error: (argument )?--model: {tmp_path}", capsys.readouterr().err)


def test_a_measurement_of_a_text_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import quantization

    for words in (["--text", str(tmp_path / "none")], ["--model", str(ROOT / "tests/small_model")]):
        monkeypatch.setattr("sys.argv", ["quantization", *words])
        with pytest.raises(SystemExit, match="2"):
            quantization.main()
        assert re.search(r"none: No such file|--model and --text go together", capsys.readouterr().err)
