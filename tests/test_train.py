"""`foretoken train`: it learns, goes on where it was stopped, from states of disk as from its own, in one process and in two; and refuses what it
cannot use. That the server drafts what was trained is in `test_trained_drafters.py`."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import lzma
import os
import shutil
import signal
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import multiprocessing

import benchmarks.drafters
from backend.drafter_checks import check_drafter_folder
from backend.engine import Engine
from backend.model_files import fingerprint
from backend.models.shards import held
from deploy.cli import main
from tests.test_loader import Kind, make_model, save
from training import command, plot_loss, trainer
from training.data import Reader, cut_prompts
from training.drafters.layers import attend_unrolled
from training.run import Run
from training.target import Target
from training.tokenizer import load_tokenizer

TINY = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
WORDS = ("width", "height", "depth", "colour", "weight", "name", "parent", "children", "index", "size")
CODE = "".join(f"def set_{a}(self, {b}):\n    self._{a} = {b} + self.{b}[{i}]\n\n\n" for i, (a, b) in enumerate(itertools.permutations(WORDS, 2)))
BLOCKS: dict[str, dict[str, object]] = {
    "dflash": {"block-size": 4, "taps": "1,2", "layers": 1},
    "dspark": {"block-size": 3, "taps": "1,2", "layers": 1, "markov-rank": 8},
}
WEIGHTS = ("config.json", "model.safetensors")


@pytest.fixture(autouse=True)
def keep_precision() -> Iterator[None]:
    """Training sets it for the process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(Kind("", TINY)), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_text(CODE)
    return path


def flags(folder: Path, text: Path, out: Path, *more: object, kind: str = "mtp", **options: object) -> list[str]:
    """A short run's arguments; later ones win."""
    values = {"steps": 4, "batch-size": 4, "context": 32, "drafts": 3, "device": "cpu", "report-prompts": 0, "inner": 40}
    if kind in ("medusa", "hydra"):
        values.pop("inner")
    if kind in BLOCKS:
        values = {key: value for key, value in values.items() if key != "drafts"} | BLOCKS[kind]
    values |= {k.replace("_", "-"): v for k, v in options.items()}
    own = [f"--{key}={value}" for key, value in values.items() if value is not None]
    return ["train", kind, "--model", str(folder), "--data", str(text), "--out", str(out), *own, *map(str, more)]


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def written(out: Path) -> list[bytes]:
    return [(out / name).read_bytes() for name in WEIGHTS]


# -- the whole run --------------------------------------------------------------------------------------------------------------


def test_the_loss_goes_down_and_the_end_is_a_report(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(trainer, "LOG_EVERY", 10)
    assert main(flags(folder, text, out, steps=30, report_prompts=2, report_tokens=8)) == 0
    rows = read_log(out)
    assert [row["step"] for row in rows] == [10, 20, 30] and rows[2]["loss"] < 0.95 * rows[0]["loss"] and len(rows[0]["agreement"]) == 3
    result, captured = json.loads((out / "result.json").read_text()), capsys.readouterr()
    assert json.loads(captured.out) == result and result["steps"] == 30 and result["last"] == rows[-1]
    report = result["report"]
    assert len(report["acceptance"]) == 3 and report["accepted_length"] >= 1 and set(report["tokens_per_second"]) == {"none", "mtp"}
    assert "acceptance by position" in captured.err
    check_drafter_folder("mtp", out, folder)


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [([0.1], 5 + 200), ([0.1] * 25 + [0.2], 5 + 133), ([3.0], 5 + 7), ([30.0], 6)],
    ids=["20 steps say it", "slower than they said", "the first one says it", "none fits"],
)
def test_as_many_steps_as_fit(seconds: list[float], steps: int, folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into 20 s, after five steps that are not counted; of steps that take so long, the last value from then on."""
    read, now, count = trainer.OnlineStates.read, [0.0], itertools.count()

    def timed(self: Any, starts: torch.Tensor) -> Any:
        now[0] += seconds[min(next(count), len(seconds) - 1)]
        return read(self, starts)

    monkeypatch.setattr(trainer.OnlineStates, "read", timed)
    words = flags(folder, text, tmp_path / "out", steps=None, minutes=20 / 60, batch_size=1, context=16)[1:]
    result = command.run_command(command.make_parser().parse_args(words), lambda: now[0])
    assert result is not None and result["steps"] == result["last"]["step"] == steps and result["options"]["minutes"] == 20 / 60
    saved = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert saved["step"] == saved["steps"] == steps


def test_a_run_of_minutes_is_resumed(folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody knows how many steps it has, and after."""
    read, now, count = trainer.OnlineStates.read, [0.0], itertools.count()

    def timed(self: Any, starts: torch.Tensor) -> Any:
        now[0] += 0.1
        if next(count) in (3, 40):
            signal.raise_signal(signal.SIGINT)
        return read(self, starts)

    monkeypatch.setattr(trainer.OnlineStates, "read", timed)
    found = []
    for more in ((), ("--resume",), ("--resume",)):
        words = flags(folder, text, tmp_path / "out", *more, steps=None, minutes=0.1, batch_size=1, context=16)[1:]
        result = command.run_command(command.make_parser().parse_args(words), lambda: now[0])
        saved = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
        found.append((saved["step"], saved["steps"], result is not None))
    assert found == [(4, None, False), (41, 4 + 5 + 60, False), (69, 69, True)]


def test_a_run_of_minutes_that_is_stopped_often_has_them_once(folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 s, of which half a second is spent each time before anybody knows how many steps it has."""
    read, now, count = trainer.OnlineStates.read, [0.0], itertools.count()

    def timed(self: Any, starts: torch.Tensor) -> Any:
        now[0] += 0.1
        if next(count) in (9, 19):
            signal.raise_signal(signal.SIGINT)
        return read(self, starts)

    monkeypatch.setattr(trainer.OnlineStates, "read", timed)
    for more in ((), ("--resume",), ("--resume",)):
        words = flags(folder, text, tmp_path / "out", *more, steps=None, minutes=0.1, batch_size=1, context=16)[1:]
        result = command.run_command(command.make_parser().parse_args(words), lambda: now[0])
    saved = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert result is not None and saved["step"] == 3 * 5 + 60 and saved["seconds"] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("own", "number"),
    [({"kind": "eagle3", "taps": "1,2", "draft_vocab_size": 64}, signal.SIGINT), ({"kind": "dspark"}, signal.SIGTERM)],
    ids=["eagle3", "dspark"],
)
def test_a_resumed_run_ends_as_one_that_was_never_stopped(
    own: dict[str, Any], number: int, folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal saves after the step under way; a run that is whole may be resumed too, and changes nothing."""
    options = own | {"steps": 6}
    assert main(flags(folder, text, tmp_path / "whole", **options)) == 0
    parts, read, count = tmp_path / "parts", trainer.OnlineStates.read, itertools.count()

    def interrupted(self: Any, starts: torch.Tensor) -> Any:
        if next(count) == 3:
            signal.raise_signal(number)
        return read(self, starts)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.OnlineStates, "read", interrupted)
        assert main(flags(folder, text, parts, **options)) == 130
    assert f"stopped and saved in {parts}; --resume goes on" in capsys.readouterr().err
    assert not (parts / "model.safetensors").exists() and torch.load(parts / "checkpoint.pt", weights_only=True)["step"] == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for _ in range(2):
        assert main(flags(folder, text, parts, "--resume", **options)) == 0
        assert written(parts) == written(tmp_path / "whole")


def test_states_of_disk_are_those_that_are_computed(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two kinds share a folder; the second one finds its states there, and another context is refused."""
    cache = tmp_path / "states"
    assert main(flags(folder, text, tmp_path / "a", states=cache, kind="medusa")) == 0
    kept = (cache / "final.states").stat().st_mtime_ns
    assert main(flags(folder, text, tmp_path / "b", states=cache, kind="eagle3", taps="1,2", dtype="float32")) == 0
    assert main(flags(folder, text, tmp_path / "block", states=cache, kind="dflash")) == 0
    assert (cache / "final.states").stat().st_mtime_ns == kept and (cache / "2.states").exists() and not list(cache.glob("*.part"))
    target = Target(folder, torch.float32, torch.device("cpu"))
    reader = Reader(folder)
    ids = np.concatenate(reader.read([text], "--data"))
    offline = trainer.OfflineStates(target, ids, 32, (1, 2), cache, is_writer=False).read(torch.tensor([3, 0]))
    online = trainer.OnlineStates(target, ids, 32, (1, 2)).read(torch.tensor([96, 0]))
    assert torch.equal(offline.ids, online.ids)
    (cache / "final.states").write_bytes(b"cut off")
    again = trainer.OfflineStates(target, ids, 32, (1, 2), cache).read(torch.tensor([3, 0]))
    assert torch.equal(again.hidden, offline.hidden)
    for own, other in ((offline.hidden, online.hidden), *((offline.entering[n], online.entering[n]) for n in (1, 2))):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-5)
    capsys.readouterr()
    with held(cache / "states.json"):
        refused(flags(folder, text, tmp_path / "c", states=cache), capsys, f"{cache / 'states.json'} is in use by another process")
    refused(flags(folder, text, tmp_path / "c", states=cache, context=16), capsys, f"--states {cache} holds states of another context")
    (cache / "states.json").write_text("{")
    refused(flags(folder, text, tmp_path / "c", states=cache), capsys, f"{cache / 'states.json'} cannot be read")
    refused(flags(folder, text, tmp_path / "d", states=text.parent), capsys, f"--states {text.parent} is no folder of states, and not empty")


def test_a_full_disk_is_said(folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("training.states.shutil.disk_usage", lambda _: usage)
    refused(flags(folder, text, tmp_path / "a", states=tmp_path / "states"), capsys, "GiB of the disk are free")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoint.tmp").symlink_to("/dev/full")
    refused(flags(folder, text, tmp_path / "b"), capsys, f"--out {tmp_path / 'b'}: No space left on device; no checkpoint was written yet")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "log.jsonl").symlink_to("/dev/full")
    (tmp_path / "c" / "result.json").symlink_to("/dev/full")
    last = "No space left on device; --resume goes on from the checkpoint there"
    refused(flags(folder, text, tmp_path / "c", steps=2, checkpoint_every=1), capsys, f"--out {tmp_path / 'c'}: {last}")
    (tmp_path / "c" / "log.jsonl").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("training.drafters.drafter.save_weights", full)
        refused(flags(folder, text, tmp_path / "d", steps=2), capsys, f"--out {tmp_path / 'd'}: {last}")
    assert not (tmp_path / "d" / "config.json").exists(), "half a drafter is none"
    refused(flags(folder, text, tmp_path / "c", "--resume", steps=2, checkpoint_every=1), capsys, f"--out {tmp_path / 'c'}: {last}")


def test_half_written_states_are_removed(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a process that was killed before the room is measured, and those of one that finds none as it ends."""
    usage, found, count, states = shutil.disk_usage, [], itertools.count(), Target.states

    def measured(path: Path) -> Any:
        found.append(list(path.glob("*.part")))
        return usage(path)

    def full(*args: Any) -> Any:
        if next(count) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return states(*args)

    monkeypatch.setattr("training.states.shutil.disk_usage", measured)
    monkeypatch.setattr(Target, "states", full)
    own = flags(folder, text, tmp_path / "out", states=tmp_path / "states")
    refused(own, capsys, f"--states {tmp_path / 'states'}: the disk is full")
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["states.json"]
    (tmp_path / "states" / "2.part").write_bytes(bytes(99))
    assert main(own) == 0 and found == [[], []]


def test_a_process_that_fails_is_said(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Context:
        processes = ()

        def join(self) -> bool:
            raise multiprocessing.ProcessRaisedException("-- Process 1 --\nTraceback\nConfigError: in use", 1, 2)

    monkeypatch.setattr(multiprocessing, "start_processes", lambda *_, **__: Context())
    refused(flags(folder, text, tmp_path / "out", processes=2), capsys, "a process of 2 ended: ConfigError: in use")


@pytest.mark.parametrize(
    "error",
    [
        multiprocessing.ProcessExitedException("process 1 terminated with exit code 130", 1, 2, 130),
        multiprocessing.ProcessExitedException("process 1 terminated with signal SIGINT", 1, 2, -2, "SIGINT"),
    ],
    ids=["it hears the signal", "the signal ends it"],
)
def test_several_processes_are_stopped_before_they_train(
    error: Exception, folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no checkpoint yet: as where one process is stopped so early."""

    class Context:
        processes = ()

        def join(self) -> bool:
            signal.raise_signal(signal.SIGINT)
            raise error

    monkeypatch.setattr(multiprocessing, "start_processes", lambda *_, **__: Context())
    assert main(flags(folder, text, tmp_path / "out", processes=2)) == 130
    assert "stopped; --resume goes on from the last checkpoint, if there is one" in capsys.readouterr().err


def test_a_process_that_is_stopped_before_it_trains_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would end it: it may wait for others where no handler runs, its parent may be dead, and jobs of scripts ignore SIGINT."""
    heard: list[Any] = []
    monkeypatch.setattr(trainer.dist, "init_process_group", lambda *_, **__: heard.append(signal.getsignal(signal.SIGINT)))
    monkeypatch.setattr(trainer.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(trainer, "_train", lambda *_: True)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    args = command.make_parser().parse_args(flags(tmp_path, tmp_path, tmp_path / "out", processes=2)[1:])
    keys = ("kind", "model", "out", "steps", "batch_size", "context", "lr", "seed", "loss", "drafts", "layers", "inner", "taps", "dtype")
    run = Run(**{key: getattr(args, key) for key in keys}, processes=2)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        trainer._join(1, run, torch.zeros(1, dtype=torch.int32), str(tmp_path / "meeting"))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIG_DFL]


def test_a_curve_without_what_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"training\.plot_loss: .* pip install matplotlib$"):
        plot_loss.main()


def test_what_killed_runs_met_by_is_removed(folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of each was left in the folder of the drafter."""
    (out := tmp_path / "out").mkdir()
    left = [out / f".meeting-{number}" for number in (2**22, 2**22 + 1)]
    for path in left:
        path.touch()

    def start(*_: Any, **__: Any) -> None:
        assert not any(path.exists() for path in left)
        raise KeyboardInterrupt

    monkeypatch.setattr(multiprocessing, "start_processes", start)
    assert main(flags(folder, text, out, processes=2)) == 130
    assert not list(out.glob(".meeting-*"))


def test_a_process_that_is_killed_after_it_was_stopped_is_said(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Context:
        processes = ()

        def join(self) -> bool:
            signal.raise_signal(signal.SIGINT)
            raise multiprocessing.ProcessExitedException("process 1 terminated with signal SIGKILL", 1, 2, -9, "SIGKILL")

    monkeypatch.setattr(multiprocessing, "start_processes", lambda *_, **__: Context())
    refused(flags(folder, text, tmp_path / "out", processes=2), capsys, "a process of 2 ended: process 1 terminated with signal SIGKILL")


def test_two_processes_are_one(folder: Path, text: Path, tmp_path: Path) -> None:
    """Means of gradients are the same up to the order of sums. Optimizers make the rounding of the smallest ones as large as any step, so that a few
    weights may go the other way."""
    for count in (1, 2):
        assert main(flags(folder, text, tmp_path / str(count), kind="dspark", processes=count, steps=2)) == 0
    one, two = (torch.load(tmp_path / str(count) / "checkpoint.pt", weights_only=True) for count in (1, 2))
    for optimizer, other in zip(one["optimizers"], two["optimizers"], strict=True):
        for number, state in optimizer["state"].items():
            for name in state.keys() & {"momentum", "exp_avg", "exp_avg_sq"}:
                apart = (other["state"][number][name] - state[name]).norm() / state[name].norm()
                assert state[name].numel() == 1 or apart < 2e-3, (number, name)
    for name, weight in one["drafter"].items():
        is_apart = (two["drafter"][name] - weight).abs() > 2e-3
        assert is_apart.float().mean() < 1e-3, name


def test_a_run_that_goes_on_in_more_processes(folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same data in the same order; of rows, as many of which count in one process as there happen to be, each has the same weight."""
    own: dict[str, Any] = {"kind": "eagle3", "taps": "1,2", "draft_vocab_size": 64, "steps": 2}
    read, count = trainer.OnlineStates.read, itertools.count()

    def interrupted(self: Any, starts: torch.Tensor) -> Any:
        if next(count) == 0:
            signal.raise_signal(signal.SIGINT)
        return read(self, starts)

    assert main(flags(folder, text, tmp_path / "one", **own)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(trainer.OnlineStates, "read", interrupted)
        assert main(flags(folder, text, tmp_path / "two", **own)) == 130
    assert main(flags(folder, text, tmp_path / "two", "--resume", processes=2, **own)) == 0
    one, two = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("one", "two"))
    assert torch.equal(one["generator"], two["generator"]) and two["step"] == 2
    for optimizer, other in zip(one["optimizers"], two["optimizers"], strict=True):
        for number, state in optimizer["state"].items():
            for name in state.keys() & {"momentum", "exp_avg", "exp_avg_sq"}:
                apart = (other["state"][number][name] - state[name]).norm() / state[name].norm()
                assert state[name].numel() == 1 or apart < 1e-4, (number, name)
    (row,), (other,) = read_log(tmp_path / "one"), read_log(tmp_path / "two")
    assert other["loss"] == pytest.approx(row["loss"], rel=1e-4) and other["agreement"] == row["agreement"]


def test_the_engine_that_wrote_answers_is_gone_before_training(folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has most of a GPU's memory."""
    engines: list[weakref.ref[Engine]] = []
    shut_down = Engine.shutdown

    def note(engine: Engine, *arguments: Any) -> None:
        engines.append(weakref.ref(engine))
        shut_down(engine, *arguments)

    def train(run: Run, ids: torch.Tensor) -> bool:
        assert len(engines) == 1 and engines[0]() is None
        return False

    monkeypatch.setattr(Engine, "shutdown", note)
    monkeypatch.setattr(command, "train", train)
    gc.disable()
    try:
        assert main(flags(folder, text, tmp_path / "out", answers=4, answer_tokens=12)) == 130
    finally:
        gc.enable()
    assert engines


def test_answers_of_the_model_itself(folder: Path, tmp_path: Path) -> None:
    """Self-distilled: they are kept beside the checkpoints, and begin with the prompts."""
    lines = [{"messages": [{"role": "user", "content": f"what is {word}?"}, {"role": "assistant", "content": "I forgot"}]} for word in WORDS]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out = tmp_path / "out"
    assert main(flags(folder, tmp_path / "chats.jsonl", out, answers=8, answer_tokens=12, kind="hydra", dtype="bfloat16", steps=1)) == 0
    ids = np.fromfile(out / "answers.u32", dtype="<u4")
    prompts = cut_prompts(Reader(folder).read([tmp_path / "chats.jsonl"], "--data", as_prompts=True), 32, 8, 0)
    assert ids[: len(prompts[0])].tolist() == prompts[0].tolist() and sum(map(len, prompts)) < len(ids) <= sum(map(len, prompts)) + 8 * 12
    assert json.loads((out / "result.json").read_text())["tokens"] == len(ids)


# -- what is refused ------------------------------------------------------------------------------------------------------------


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """Exit status 2, and one line that says what and why."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    *_, line = captured.err.splitlines()
    assert line.startswith("foretoken train: ") and all(part in line for part in parts), line
    assert len(line) < 600 and not captured.out


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mtp", {"layers": 9}, "--layers must be from 1 to 8, got 9"),
        ("mtp", {"drafts": 0}, "--drafts must be from 1 to 16, got 0"),
        ("mtp", {"layers": 3, "drafts": 2}, "--drafts must be at least --layers (3), got 2"),
        ("mtp", {"steps": 0}, "--steps must be from 1 to 10000000, got 0"),
        ("mtp", {"minutes": 1}, "--steps says how many steps are taken, --minutes has as many as fit: leave one of them out"),
        ("mtp", {"steps": None, "minutes": 0}, "--minutes must be above 0 and at most 43200, got 0.0"),
        ("mtp", {"steps": None, "minutes": "nan"}, "--minutes must be above 0 and at most 43200, got nan"),
        ("mtp", {"batch_size": 4097}, "--batch-size must be from 1 to 4096, got 4097"),
        ("mtp", {"batch_size": 5, "processes": 2}, "--batch-size 5 is no multiple of --processes 2"),
        ("mtp", {"context": 129}, "--context 129 is beyond the model's own limit 128"),
        ("mtp", {"context": 16, "drafts": 15}, "--context 16 is too short for 15 drafts"),
        ("mtp", {"lr": "nan"}, "--lr must be between 0 and 1, got nan"),
        ("mtp", {"lr": 1}, "--lr must be between 0 and 1, got 1.0"),
        ("mtp", {"temperature": -1}, "--temperature must be from 0 to 10, got -1.0"),
        ("mtp", {"inner": 0}, "--inner must be from 1 to"),
        ("mtp", {"checkpoint_every": 0}, "--checkpoint-every must be from 1 to"),
        ("mtp", {"seed": 2**70}, "--seed must be from 0 to"),
        ("mtp", {"device": "gpu"}, "--device must be cpu, cuda or cuda:N, got 'gpu'"),
        ("mtp", {"device": "meta"}, "--device must be cpu, cuda or cuda:N, got 'meta'"),
        ("mtp", {"device": "cpu:0"}, "--device must be cpu, cuda or cuda:N, got 'cpu:0'"),
        ("mtp", {"device": "cuda:99"}, "--device cuda:99 cannot be used"),
        ("mtp", {"taps": "1,2"}, "--taps is no option of mtp"),
        ("mtp", {"answer_tokens": 5}, "--answers says how many: it is missing"),
        ("mtp", {"temperature": 0.5}, "--temperature says how answers are made"),
        ("mtp", {"heldout": "x.txt"}, "--heldout is for the report, and --report-prompts 0 makes none"),
        ("mtp", {"block_size": 4}, "--block-size is no option of mtp"),
        ("eagle3", {"num_anchors": 4}, "--num-anchors is no option of eagle3"),
        ("medusa", {"mask_token_id": 4}, "--mask-token-id is no option of medusa"),
        ("dflash", {"drafts": 4}, "--drafts is no option of dflash: its --block-size says it"),
        ("dflash", {"markov_rank": 4}, "--markov-rank is no option of dflash"),
        ("dflash", {"draft_vocab_size": 64}, "--draft-vocab-size is no option of dflash"),
        ("dflash", {"block_size": 1}, "--block-size must be from 2 to 17, got 1"),
        ("dspark", {"block_size": 17}, "--block-size must be from 1 to 16, got 17"),
        ("dspark", {"markov_rank": 0}, "--markov-rank must be from 1 to 16384, got 0"),
        ("dspark", {"num_anchors": 29}, "--num-anchors must be from 1 to 28 with --context 32 and 3 drafts, got 29"),
        ("dspark", {"mask_token_id": 4096}, "--mask-token-id 4096 is none of the model's tokens, 0 to 4095"),
        ("dspark", {"taps": "1,3"}, "--taps 1,3: the target's layers have inputs 0 to 2"),
        ("dspark", {"block_size": 16, "context": 17}, "--context 17 is too short for 16 drafts"),
        ("medusa", {"inner": 8}, "--inner is no option of medusa"),
        ("eagle3", {"layers": 2}, "--layers is no option of eagle3"),
        ("eagle3", {"taps": "2,1"}, "--taps must go up, each layer once, got 2,1"),
        ("eagle3", {"taps": "a"}, "--taps must be numbers of layers like 2,10,17, got 'a'"),
        ("eagle3", {"taps": "1,3"}, "--taps 1,3: the target's layers have inputs 1 to 2"),
        ("eagle3", {}, "which has 2: name others with --taps"),
        ("eagle3", {"draft_vocab_size": 4097, "taps": "1,2"}, "--draft-vocab-size 4097 is more than the model's vocabulary, 4096"),
    ],
)
def test_options_that_cannot_be(
    folder: Path, text: Path, tmp_path: Path, kind: str, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(flags(folder, text, tmp_path / "out", kind=kind, **options), capsys, message)


@pytest.mark.parametrize("arguments", [["eagle9", "--model", "x"], ["mtp", "--layers", "two"], ["mtp", "--unknown"], ["mtp", "--mod", "x"], []])
def test_options_that_do_not_parse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments])
    assert caught.value.code == 2 and "foretoken train: error: " in capsys.readouterr().err


BAD_FILES: dict[str, tuple[str, bytes]] = {
    "no JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n'),
    "no text": ("a.jsonl", b'{"txt": "x"}\n'),
    "no object": ("a.jsonl", b"[1]\n"),
    "text that is none": ("a.jsonl", b'{"text": 5}\n'),
    "messages that are none": ("a.jsonl", b'{"messages": 5}\n'),
    "messages of strings": ("a.jsonl", b'{"messages": ["a"]}\n'),
    "half a surrogate pair": ("a.jsonl", b'{"text": "\\ud800"}\n'),
    "nested": ("a.jsonl", b"[" * 100_000),
    "binary": ("a.bin", bytes(range(256))),
    "latin": ("a.txt", b"caf\xe9"),
    "damaged archive": ("a.u16.xz", b"no archive"),
    "half an id in an archive": ("a.u16.xz", lzma.compress(b"abc")),
    "half an id": ("a.u32", b"abcdef"),
    "ids of another vocabulary": ("a.u16", np.full(99, 4096, dtype="<u2").tobytes()),
}


@pytest.mark.parametrize(("name", "content"), BAD_FILES.values(), ids=BAD_FILES)
def test_files_that_cannot_be_used(folder: Path, tmp_path: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(content)
    line = f": line {content.count(10) or 1}: " if name.endswith(".jsonl") else ": "
    for more in ([], ["--answers=2"]):
        refused(flags(folder, tmp_path / name, tmp_path / "out", *more), capsys, f"--data {tmp_path / name} cannot be used{line}")


def test_data_that_is_not_there_or_too_little(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out data is looked at before anything is trained."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for name in ("empty", "empty.jsonl"):
        refused(flags(folder, tmp_path / name, tmp_path / "out"), capsys, f"--data {tmp_path / name}: no *.py")
    missing = tmp_path / "missing.txt"
    refused([*flags(folder, text, tmp_path / "out"), "--data", str(text), str(missing)], capsys, f"--data {missing} does not exist")
    with held(tmp_path / "out"):
        refused(flags(folder, text, tmp_path / "out"), capsys, f"{tmp_path / 'out'} is in use by another process")
    (tmp_path / "a.txt").write_text("x")
    refused(flags(folder, tmp_path / "a.txt", tmp_path / "out"), capsys, "--data holds 2 tokens; one sequence takes 32 (--context)")
    refused(flags(folder, text, tmp_path / "out", heldout=tmp_path / "a.txt", report_prompts=1), capsys, "--heldout holds 2 tokens")
    np.arange(2, 42, dtype="<u2").tofile(tmp_path / "a.u16")
    refused(flags(folder, tmp_path / "a.u16", tmp_path / "out", report_prompts=1), capsys, "--data holds 40 tokens", "name a --heldout file")
    assert not list((tmp_path / "out").iterdir())


def test_what_a_run_writes_is_no_data(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is, by its name: of a folder that lies among the data a run could not be gone on from."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(text, tmp_path)
    own = flags(folder, Path(), Path("out"), states="states", kind="medusa")
    assert main(own) == 0 and main([*own, "--resume"]) == 0
    capsys.readouterr()
    for key in ("out", "states"):
        refused([*own, f"--{key}={tmp_path}"], capsys, f"--{key} {tmp_path} is data that the run reads")


def test_folders_that_cannot_be_written(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "loop"):
        refused(flags(folder, text, out), capsys, f"--out {out}")
    refused(flags(folder, text, tmp_path / "out", states=tmp_path / "loop"), capsys, f"--states {tmp_path / 'loop'}: ")
    refused(flags(folder, tmp_path / "loop", tmp_path / "out"), capsys, f"--data {tmp_path / 'loop'} does not exist")
    refused(flags(folder, text, tmp_path / "out", "--resume"), capsys, "--resume: ", f"{tmp_path / 'out' / 'checkpoint.pt'} does not exist")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "model.safetensors").touch()
    refused(flags(folder, text, tmp_path / "held"), capsys, f"--out {tmp_path / 'held'} has model.safetensors already: --resume goes on")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("run", "[]", "is of a run with kind None"),
        ("run", "[1]", "cannot be read"),
        ("step", -1, "step -1 is none of the run's 2"),
        ("drafter", None, "is of another drafter"),
        ("optimizers", None, "is of another drafter"),
        ("generator", torch.zeros(3), "is of another drafter"),
    ],
)
def test_a_checkpoint_of_other_things(
    folder: Path, stopped: Path, text: Path, tmp_path: Path, part: str, value: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(torch.load(stopped / "checkpoint.pt", weights_only=True) | {part: value}, tmp_path / "checkpoint.pt")
    refused(flags(folder, text, tmp_path, "--resume", steps=2), capsys, f"--resume: {tmp_path / 'checkpoint.pt'} ", message)


@pytest.fixture(scope="module")
def stopped(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped")
    assert main(flags(folder, text, out, steps=2)) == 0
    return out


def test_a_damaged_log_costs_its_lines(folder: Path, stopped: Path, text: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(stopped, tmp_path / "out"))
    (out / "log.jsonl").write_bytes(b'\xff\n{"step": null}\n[]\n{"step": 1}\n{"step": 3}\n{"st')
    assert main(flags(folder, text, out, "--resume", steps=2)) == 0
    assert read_log(out) == [{"step": 1}]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_of_before_there_were_minutes(
    folder: Path, stopped: Path, text: Path, tmp_path: Path, processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not say how many steps there are to be. Of a whole run, none is written anew."""
    out = Path(shutil.copytree(stopped, tmp_path / "out"))
    saved = torch.load(out / "checkpoint.pt", weights_only=True)
    torch.save({key: value for key, value in saved.items() if key != "steps"}, out / "checkpoint.pt")
    assert main(flags(folder, text, out, "--resume", steps=2, processes=processes)) == 0
    assert written(out) == written(stopped)
    capsys.readouterr()
    if processes == 1:
        torch.save({key: value for key, value in saved.items() if key != "steps"}, out / "checkpoint.pt")
        refused(flags(folder, text, out, "--resume", steps=None, minutes=1), capsys, "is of a run with steps 2 (now None), minutes None (now 1.0)")


def test_files_of_before_each_weight_was_sampled(folder: Path, stopped: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An upgrade is no other model: of checkpoints and states the fingerprint of an earlier version counts, too."""
    out, cache = Path(shutil.copytree(stopped, tmp_path / "out")), tmp_path / "states"
    saved = torch.load(out / "checkpoint.pt", weights_only=True)
    run = json.loads(saved["run"])
    assert run["target"] == fingerprint(folder)
    earlier = fingerprint(folder, samples_weights=False)
    torch.save(saved | {"run": json.dumps(run | {"target": earlier})}, out / "checkpoint.pt")
    assert main(flags(folder, text, out, "--resume", steps=2)) == 0
    assert written(out) == written(stopped)
    assert main(flags(folder, text, tmp_path / "a", states=cache)) == 0
    kept, noted = (cache / "final.states").stat().st_mtime_ns, json.loads((cache / "states.json").read_text())
    (cache / "states.json").write_text(json.dumps(noted | {"model": earlier}))
    assert main(flags(folder, text, tmp_path / "b", states=cache)) == 0
    assert (cache / "final.states").stat().st_mtime_ns == kept
    (cache / "states.json").write_text(json.dumps(noted | {"model": earlier[::-1]}))
    capsys.readouterr()
    refused(flags(folder, text, tmp_path / "c", states=cache), capsys, f"--states {cache} holds states of another model")


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 truncated"])
def test_a_damaged_checkpoint(folder: Path, text: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    refused(flags(folder, text, tmp_path, "--resume"), capsys, f"--resume: {tmp_path / 'checkpoint.pt'} cannot be read")


def test_resuming_another_run(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(flags(folder, text, out, steps=1)) == 0
    checkpoint = (out / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    for other, told in (({"inner": 56}, "inner 40 (now 56)"), ({"seed": 1}, "seed 0 (now 1)"), ({"kind": "medusa"}, "kind 'mtp' (now 'medusa')")):
        refused(flags(folder, text, out, "--resume", **{"steps": 1, **other}), capsys, f"--resume: {out / 'checkpoint.pt'} is of a run with", told)
    assert (out / "checkpoint.pt").read_bytes() == checkpoint


def test_resuming_on_another_model(folder: Path, stopped: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which may have moved, but not changed; a checkpoint of before that was kept is of whatever model."""
    out, other = Path(shutil.copytree(stopped, tmp_path / "out")), Path(shutil.copytree(folder, tmp_path / "moved"))
    assert main(flags(other, text, out, "--resume", steps=2)) == 0
    capsys.readouterr()
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors")
    refused(flags(other, text, out, "--resume", steps=2), capsys, f"--resume: {out / 'checkpoint.pt'} is of a run with target '", "(now '")
    assert written(out) == written(stopped)
    saved = torch.load(out / "checkpoint.pt", weights_only=True)
    run = {key: value for key, value in json.loads(saved["run"]).items() if key != "target"}
    torch.save(saved | {"run": json.dumps(run)}, out / "checkpoint.pt")
    assert main(flags(other, text, out, "--resume", steps=2)) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", {}, "tokenizer.json"),
        ("config.json", {"architectures": ["GPT2LMHeadModel"]}, "architectures ['GPT2LMHeadModel'] are not supported"),
        ("config.json", {"intermediate_size": 40}, "config.json makes it (40, 32)"),
        ("config.json", {"max_position_embeddings": None}, "has no 'max_position_embeddings'"),
        ("config.json", {"vocab_size": "4096"}, "vocab_size is '4096'"),
        ("model.safetensors", None, "has neither model.safetensors"),
    ],
    ids=["no tokenizer", "damaged tokenizer", "unknown family", "other sizes", "no context", "a vocabulary that is none", "no weights"],
)
def test_targets_that_cannot_be_used(
    folder: Path, text: Path, tmp_path: Path, name: str, content: dict[str, Any] | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    if content is None:
        (other / name).unlink()
    else:
        values = json.loads((folder / name).read_text()) if content else {}
        (other / name).write_text(json.dumps(values | content))
    refused(flags(other, text, tmp_path / "out"), capsys, message)


def test_texts_with_tokens_that_the_model_has_no_embedding_of(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Gemma 3's have, for images: other texts are trained on, answered and reported on."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    values = json.loads((other / "tokenizer.json").read_text())
    values["added_tokens"].append(values["added_tokens"][0] | {"id": 4096, "content": "<image>"})
    (other / "tokenizer.json").write_text(json.dumps(values))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"eos_token_id": [5000, 0]}))
    told = "its text becomes id 4096 ('<image>'); the model's vocabulary has ids 0 to 4095"
    (tmp_path / "text.py").write_text(CODE + "<image>")
    refused(flags(other, tmp_path / "text.py", tmp_path / "a"), capsys, f"--data {tmp_path / 'text.py'} cannot be used: {told}")
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n{"messages": [{"role": "user", "content": "<image>"}]}\n')
    refused(flags(other, tmp_path / "lines.jsonl", tmp_path / "b"), capsys, f"cannot be used: line 2: {told}")
    assert main(flags(other, text, tmp_path / "c", answers=8, answer_tokens=24, report_prompts=1, report_tokens=4, steps=1)) == 0
    assert Reader(other).read([text], "--data")[0][0] == 0


# -- parts ----------------------------------------------------------------------------------------------------------------------


def test_read_ids_of_every_kind(folder: Path, tmp_path: Path) -> None:
    """Documents open with the end-of-text id (0); ids are taken as they are; folders are searched, by kind and in order."""
    tokenizer = load_tokenizer(folder)

    def encoded(*texts: str) -> list[int]:
        return [i for t in texts for i in (0, *tokenizer.encode(t, add_special_tokens=False).ids)]

    def read(*paths: Path) -> list[int]:
        ids = np.concatenate(Reader(folder).read(paths, "--data"))
        assert ids.dtype == np.uint32
        return ids.tolist()

    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "one.py").write_text("x = 1\n")
    (tmp_path / "b" / "deep" / "two.md").write_text("# Títle\n")
    (tmp_path / "b" / "three.bin").write_bytes(b"not looked at \xff")
    (tmp_path / "lines.jsonl").write_text('{"text": "a = b"}\n\n{"text": "c\\nd", "more": 1}\n')
    np.array([5, 4095, 2], dtype="<u4").tofile(tmp_path / "ids.u32")
    (tmp_path / "packed.u16.xz").write_bytes(lzma.compress(np.array([7, 8], dtype="<u2").tobytes()))
    assert read(tmp_path / "b") == encoded("# Títle\n", "x = 1\n")
    assert read(tmp_path / "lines.jsonl", tmp_path / "ids.u32") == [*encoded("a = b", "c\nd"), 5, 4095, 2]
    assert read(tmp_path / "packed.u16.xz", tmp_path / "b" / "one.py") == [7, 8, *encoded("x = 1\n")]
    (tmp_path / "code.sh").write_text("echo\n")
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a = b"}\r\n')
    assert read(tmp_path / "marked.jsonl") == encoded("a = b")
    assert read(tmp_path / "code.sh") == encoded("echo\n"), "a file that is named is text, whatever its name"


def test_lines_end_where_json_lines_does(folder: Path, tmp_path: Path) -> None:
    """JSON may hold U+2028, U+0085 and their like as they are; only a line feed ends a line."""
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    (ids,) = Reader(folder).read([tmp_path / "lines.jsonl"], "--data")
    assert ids.tolist()[1:] == load_tokenizer(folder).encode("a\u2028b\x85c", add_special_tokens=False).ids


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("passes", [0, 1, 2, 3])
def test_attend_unrolled_against_its_plain_statement(passes: int, heads: int, kv_heads: int) -> None:
    """A row sees the first pass's keys up to `passes` positions back, and of each later pass m the one passes - m back."""
    length, size = 7, 8
    generator = torch.Generator().manual_seed(passes)
    q = torch.randn(2, heads, length, size, generator=generator)
    keys, values = ([torch.randn(2, kv_heads, length, size, generator=generator) for _ in range(passes + 1)] for _ in range(2))
    found = attend_unrolled(q, keys, values)
    assert found.shape == q.shape
    for b, h, row in itertools.product(range(2), range(heads), range(length)):
        own = h // (heads // kv_heads)
        seen = [(0, place) for place in range(row - passes + 1)]
        seen += [(m, row - (passes - m)) for m in range(1, passes + 1) if row - (passes - m) >= 0]
        scores = torch.stack([q[b, h, row] @ keys[m][b, own, place] for m, place in seen]) / size**0.5
        wanted = sum(w * values[m][b, own, place] for w, (m, place) in zip(scores.softmax(0), seen))
        torch.testing.assert_close(found[b, h, row], wanted, rtol=0, atol=1e-5)


def test_a_comparison_wants_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["drafters", "--data", "x", "--heldout", "x", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        benchmarks.drafters.main()
    assert f"--out {tmp_path}: File exists; it must be a new folder" in capsys.readouterr().err


def test_a_comparison_of_files_that_are_not_there_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text := tmp_path / "x.py").write_text("x = 1\n" * 99)
    for data, heldout, option in ((text, "absent", "--heldout"), ("absent", text, "--data")):
        monkeypatch.setattr("sys.argv", ["drafters", "--data", str(data), "--heldout", str(heldout), "--out", str(tmp_path / "out")])
        with pytest.raises(SystemExit, match="2"):
            benchmarks.drafters.main()
        assert f"{option} absent does not exist" in capsys.readouterr().err and not (tmp_path / "out").exists()
