"""Training a drafter: it learns, goes on where it was stopped, refuses what it cannot use, and computes what the server will."""

from __future__ import annotations

import contextlib
import itertools
import json
import lzma
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from backend.drafters.calls import LIKELIEST, DraftCall
from backend.drafters.recurrent import RecurrentDrafter
from backend.drafters.remote_service import RemoteDrafterService
from backend.models import load_model as load_served
from backend.models.mtp import Mtp as ServedMtp
from backend.parallel.ranks import Ranks
from deploy.cli import main
from tests.test_loader import Kind, make_model, save
from training import mtp, train_mtp
from training.llama import Llama, load_model
from training.tokenizer import load_tokenizer

CPU = torch.device("cpu")
TINY = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
WORDS = ("width", "height", "depth", "colour", "weight", "name", "parent", "children", "index", "size")
CODE = "".join(f"def set_{a}(self, {b}):\n    self._{a} = {b} + self.{b}[{i}]\n\n\n" for i, (a, b) in enumerate(itertools.permutations(WORDS, 2)))


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
def target(folder: Path) -> Llama:
    return load_model(folder).requires_grad_(False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_text(CODE)
    return path


def flags(folder: Path, text: Path, out: Path, *more: object, **options: object) -> list[str]:
    """A short run's arguments; later ones win."""
    values = {"steps": 6, "batch-size": 4, "context": 32, "unroll": 3, "device": "cpu", **{k.replace("_", "-"): v for k, v in options.items()}}
    own = [f"--{key}={value}" for key, value in values.items()]
    return ["train-mtp", "--model", str(folder), "--data", str(text), "--out", str(out), *own, *map(str, more)]


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# -- the whole run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
def test_the_loss_goes_down_and_the_server_reads_what_is_written(
    folder: Path, target: Llama, text: Path, tmp_path: Path, layers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(flags(folder, text, out, steps=100, layers=layers, inner=40, heldout=text)) == 0
    ids = torch.from_numpy(train_mtp.read_ids([text], folder).astype(np.int64))
    batch = ids[: len(ids) // 64 * 64].view(-1, 64)[:16]
    torch.manual_seed(0)
    objective = mtp.Objective(target, mtp.Mtp(target, layers, 40), 3)
    with torch.no_grad():
        before, _ = objective(batch)
        objective.mtp.load_state_dict(torch.load(out / "checkpoint.pt", weights_only=True)["mtp"])
        after, agreement = objective(batch)
    assert after < 0.8 * before
    rows = read_log(out)
    assert [row["step"] for row in rows] == [50, 100] and rows[1]["loss"] < rows[0]["loss"] < before
    assert rows[-1]["loss"] == pytest.approx(after.item(), rel=0.3) and len(agreement) == 3
    result = json.loads((out / "result.json").read_text())
    assert json.loads(capsys.readouterr().out) == result and result["steps"] == 100
    assert {name: len(part["acceptance"]) for name, part in result["heldout"].items()} == {"text": 3, "greedy": 3}

    config = json.loads((out / "config.json").read_text())
    original = json.loads((folder / "config.json").read_text())
    wanted = {"architectures": ["LlamaMTP"], "num_nextn_predict_layers": layers, "intermediate_size": 40, "num_model_steps_trained": 3}
    shared = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    wanted |= {key: original[key] for key in shared} | {"head_dim": 8}
    assert {key: config[key] for key in wanted} == wanted
    weights = load_file(out / "model.safetensors")
    assert len(weights) == 13 * layers and {w.dtype for w in weights.values()} == {torch.bfloat16}
    for name, weight in objective.mtp.named().items():
        assert torch.equal(weights[name], weight.detach().bfloat16()), name
    served = ServedMtp(out, load_served(folder, torch.float32, CPU, Ranks(), only_head=True), torch.float32, CPU)
    specs = RecurrentDrafter(served, max_steps=8).cache_specs(torch.float32)
    assert served.num_layers == layers and sum(spec.num_planes for spec in specs) == 3 * layers - 1


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when that many batches are done."""
    original = train_mtp.batches

    def some(*args: Any) -> Iterator[torch.Tensor]:
        yield from itertools.islice(original(*args), count)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_mtp, "batches", some)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_resumed_run_ends_as_one_that_was_never_stopped(
    folder: Path, text: Path, tmp_path: Path, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"steps": 9, "checkpoint_every": 3, "layers": layers}
    assert main(flags(folder, text, tmp_path / "whole", **options)) == 0
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        stop_after(8, patch)
        main(flags(folder, text, tmp_path / "parts", **options))
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["step"] == 6
    assert main(flags(folder, text, tmp_path / "parts", "--resume", **options)) == 0
    whole, parts = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["step"] == parts["step"] == 9
    for name, weight in whole["mtp"].items():
        assert torch.equal(weight, parts["mtp"][name]), name
    names = ("config.json", "model.safetensors")
    assert [(tmp_path / "whole" / n).read_bytes() for n in names] == [(tmp_path / "parts" / n).read_bytes() for n in names]
    assert main(flags(folder, text, tmp_path / "other", **options, seed=1)) == 0
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_finished_run_may_be_resumed(folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(flags(folder, text, out)) == 0
    before, log = (out / "model.safetensors").read_bytes(), read_log(out)
    assert main(flags(folder, text, out, "--resume")) == 0
    assert (out / "model.safetensors").read_bytes() == before and read_log(out) == log


# -- what is refused ------------------------------------------------------------------------------------------------------------


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """Exit status 2, and one line that says what and why."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    *_, line = captured.err.splitlines()
    assert line.startswith("foretoken train-mtp: ") and all(part in line for part in parts), line
    assert len(line) < 500 and not captured.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "--layers must be from 1 to 8, got 0"),
        ({"layers": 9}, "--layers must be from 1 to 8, got 9"),
        ({"unroll": 0}, "--unroll must be from 1 to 8, got 0"),
        ({"unroll": 9}, "--unroll must be from 1 to 8, got 9"),
        ({"layers": 3, "unroll": 2}, "--unroll must be at least --layers (3), got 2"),
        ({"steps": 0}, "--steps must be from 1 to 10000000, got 0"),
        ({"batch_size": 0}, "--batch-size must be from 1 to 4096, got 0"),
        ({"batch_size": 4097}, "--batch-size must be from 1 to 4096, got 4097"),
        ({"context": 15}, "--context must be from 16 to 1000000, got 15"),
        ({"context": 129}, "--context 129 is beyond the model's own limit 128"),
        ({"lr": 0}, "--lr must be between 0 and 1, got 0.0"),
        ({"lr": 1}, "--lr must be between 0 and 1, got 1.0"),
        ({"lr": "nan"}, "--lr must be between 0 and 1, got nan"),
        ({"lr": -1}, "--lr must be between 0 and 1, got -1.0"),
    ],
)
def test_options_out_of_range(
    folder: Path, text: Path, tmp_path: Path, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(flags(folder, text, tmp_path / "out", **options), capsys, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--layers", "two"], ["--model"], ["--unknown"], []])
def test_options_that_do_not_parse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train-mtp", *arguments])
    assert caught.value.code == 2 and "foretoken train-mtp: error: " in capsys.readouterr().err


BAD_FILES: dict[str, tuple[str, bytes]] = {
    "no JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n'),
    "no text": ("a.jsonl", b'{"txt": "x"}\n'),
    "no object": ("a.jsonl", b"[1]\n"),
    "binary": ("a.bin", bytes(range(256))),
    "latin": ("a.txt", b"caf\xe9"),
}


@pytest.mark.parametrize(("name", "content"), BAD_FILES.values(), ids=BAD_FILES)
def test_files_that_cannot_be_used(folder: Path, tmp_path: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(content)
    refused(flags(folder, tmp_path / name, tmp_path / "out"), capsys, f"--data {tmp_path / name} cannot be used")


def test_data_that_is_not_there(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for name in ("empty", "missing.txt", "empty.jsonl"):
        refused(flags(folder, tmp_path / name, tmp_path / "out"), capsys, f"--data {tmp_path / name}: no *.py")


def test_too_little_data(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.txt"
    for content in ("", "x = 1\n", "x"):
        path.write_text(content)
        count = len(train_mtp.read_ids([path], folder))
        refused(flags(folder, path, tmp_path / "out"), capsys, f"--data holds {count} tokens; one sequence takes 32 (--context)")
    ids = np.arange(2, 34, dtype="<u2")
    ids.tofile(tmp_path / "a.u16")
    refused(flags(folder, tmp_path / "a.u16", tmp_path / "out"), capsys, "--data holds 32 tokens")
    np.append(ids, ids[:1]).tofile(tmp_path / "a.u16")
    assert main(flags(folder, tmp_path / "a.u16", tmp_path / "out", steps=1)) == 0


def test_resuming_what_is_not_there(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(flags(folder, text, tmp_path / "out", "--resume"), capsys, "--resume: ", f"{tmp_path / 'out' / 'checkpoint.pt'} does not exist")


@pytest.mark.parametrize("other", [{"layers": 2}, {"inner": 56}])
def test_resuming_another_drafter(folder: Path, text: Path, tmp_path: Path, other: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(flags(folder, text, out, steps=1)) == 0
    checkpoint = (out / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    assert main(flags(folder, text, out, "--resume", **other)) == 2
    assert f"foretoken train-mtp: --resume: {out / 'checkpoint.pt'} is of another drafter" in capsys.readouterr().err
    assert (out / "checkpoint.pt").read_bytes() == checkpoint


def test_targets_that_cannot_be_used(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(flags(tmp_path / "none", text, tmp_path / "out"), capsys, f"model folder {tmp_path / 'none'} does not exist")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    values = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, "architectures": ["GPT2LMHeadModel"]}))
    refused(flags(other, text, tmp_path / "out"), capsys, f"{other}: architectures ['GPT2LMHeadModel'] cannot be trained on")
    (other / "config.json").write_text(json.dumps({**values, "intermediate_size": 40}))
    refused(flags(other, text, tmp_path / "out"), capsys, "gate_proj.weight has shape (48, 32); config.json makes it (40, 32)")
    (other / "model.safetensors").unlink()
    refused(flags(other, text, tmp_path / "out"), capsys, f"{other} has neither model.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": 0}, "--inner must be from 1 to"),
        ({"inner": -3}, "--inner must be from 1 to"),
        ({"checkpoint_every": 0}, "--checkpoint-every must be from 1 to"),
        ({"checkpoint_every": -1}, "--checkpoint-every must be from 1 to"),
        ({"seed": 2**70}, "--seed must be from 0 to"),
        ({"device": "gpu"}, "--device gpu"),
        pytest.param({"device": "cuda:7"}, "--device cuda:7", marks=pytest.mark.skipif(torch.cuda.device_count() > 7, reason="it is there")),
    ],
)
def test_further_options_out_of_range(
    folder: Path, text: Path, tmp_path: Path, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(flags(folder, text, tmp_path / "out", **options), capsys, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": 5}\n'),
        ("a.u16.xz", b"no archive"),
        ("a.u16.xz", lzma.compress(b"abc")),
        ("a.u16", b"abc" * 99),
        ("a.u16", np.full(99, 4096, dtype="<u2").tobytes()),
    ],
    ids=["text that is none", "damaged archive", "half an id in an archive", "half an id", "ids of another vocabulary"],
)
def test_further_files_that_cannot_be_used(folder: Path, tmp_path: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(content)
    refused(flags(folder, tmp_path / name, tmp_path / "out"), capsys, f"--data {tmp_path / name} cannot be used")


def test_held_out_data_is_looked_at_first(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not after hours of training."""
    (tmp_path / "short.txt").write_text("x")
    for name, message in (("missing.txt", f"--heldout {tmp_path / 'missing.txt'}"), ("short.txt", "--heldout holds 2 tokens")):
        refused(flags(folder, text, tmp_path / "out", heldout=tmp_path / name), capsys, message)
        assert not (tmp_path / "out" / "log.jsonl").exists()


def test_an_output_folder_that_is_none(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(flags(folder, text, out), capsys, f"--out {out}")


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 truncated"])
def test_a_damaged_checkpoint(folder: Path, text: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    refused(flags(folder, text, tmp_path, "--resume"), capsys, f"--resume: {tmp_path / 'checkpoint.pt'} cannot be read")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", {}, "tokenizer.json"),
        ("config.json", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("config.json", {"hidden_size": None}, "config.json has no 'hidden_size'"),
    ],
    ids=["no tokenizer", "damaged tokenizer", "another activation", "no hidden size"],
)
def test_further_targets_that_cannot_be_used(
    folder: Path, text: Path, tmp_path: Path, name: str, content: dict[str, Any] | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    values = json.loads((folder / name).read_text()) if content else {}
    (other / name).write_text(json.dumps({k: v for k, v in (values | (content or {})).items() if v is not None}))
    if content is None:
        (other / name).unlink()
    refused(flags(other, text, tmp_path / "out"), capsys, message)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_a_target_with_biases_is_refused(text: Path, tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A drafter that is trained on it without them learns another model's hidden states."""
    folder = save(make_model(Kind("", {**TINY, key: True})), tmp_path / "target")
    refused(flags(folder, text, tmp_path / "out"), capsys, str(folder), ".bias")


# -- reading data ---------------------------------------------------------------------------------------------------------------


def test_read_ids_of_every_kind(folder: Path, tmp_path: Path) -> None:
    """Documents open with the end-of-text id (0); ids are taken as they are; folders are searched, by kind and in order."""
    tokenizer = load_tokenizer(folder)

    def encoded(*texts: str) -> list[int]:
        return [i for t in texts for i in (0, *tokenizer.encode(t, add_special_tokens=False).ids)]

    def read(*paths: Path) -> list[int]:
        ids = train_mtp.read_ids(paths, folder)
        assert ids.dtype == np.uint32
        return ids.tolist()

    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "one.py").write_text("x = 1\n")
    (tmp_path / "b" / "deep" / "two.md").write_text("# Títle\n")
    (tmp_path / "b" / "three.bin").write_bytes(b"not looked at \xff")
    (tmp_path / "lines.jsonl").write_text('{"text": "a = b"}\n\n{"text": "c\\nd", "more": 1}\n')
    np.array([5, 4095, 2], dtype="<u2").tofile(tmp_path / "ids.u16")
    (tmp_path / "packed.u16.xz").write_bytes(lzma.compress(np.array([7, 8], dtype="<u2").tobytes()))
    assert read(tmp_path / "b") == encoded("# Títle\n", "x = 1\n")
    assert read(tmp_path / "lines.jsonl", tmp_path / "ids.u16") == [*encoded("a = b", "c\nd"), 5, 4095, 2]
    assert read(tmp_path / "packed.u16.xz", tmp_path / "b" / "one.py") == [7, 8, *encoded("x = 1\n")]
    (tmp_path / "code.sh").write_text("echo\n")
    assert read(tmp_path / "code.sh") == encoded("echo\n"), "a file that is named is text, whatever its name"


def test_lines_end_where_json_lines_does(folder: Path, tmp_path: Path) -> None:
    """JSON may hold U+2028, U+0085 and their like as they are; only a line feed ends a line."""
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    assert (
        train_mtp.read_ids([tmp_path / "lines.jsonl"], folder).tolist()[1:]
        == load_tokenizer(folder).encode("a\u2028b\x85c", add_special_tokens=False).ids
    )


# -- the module -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("passes", [0, 1, 2, 3])
def test_attend_unrolled_against_its_plain_statement(passes: int, heads: int, kv_heads: int) -> None:
    """A row sees the first pass's keys up to `passes` positions back, and of each later pass m the one passes - m back."""
    length, size = 7, 8
    generator = torch.Generator().manual_seed(passes)
    q = torch.randn(2, heads, length, size, generator=generator)
    keys, values = ([torch.randn(2, kv_heads, length, size, generator=generator) for _ in range(passes + 1)] for _ in range(2))
    found = mtp.attend_unrolled(q, keys, values)
    assert found.shape == q.shape
    for b, h, row in itertools.product(range(2), range(heads), range(length)):
        own = h // (heads // kv_heads)
        seen = [(0, place) for place in range(row - passes + 1)]
        seen += [(m, row - (passes - m)) for m in range(1, passes + 1) if row - (passes - m) >= 0]
        scores = torch.stack([q[b, h, row] @ keys[m][b, own, place] for m, place in seen]) / size**0.5
        wanted = sum(w * values[m][b, own, place] for w, (m, place) in zip(scores.softmax(0), seen))
        torch.testing.assert_close(found[b, h, row], wanted, rtol=0, atol=1e-5)


def make_module(target: Llama, layers: int, seed: int = 0) -> mtp.Mtp:
    """A module in which every weight matters, rounded as its file will be."""
    torch.manual_seed(seed)
    module = mtp.Mtp(target, layers, 40).requires_grad_(False)
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            weight.uniform_(0.5, 1.5)
        setattr(module, name, torch.nn.Parameter(weight.bfloat16().float(), requires_grad=False))
    return module


def test_a_step_uses_nothing_of_later_tokens(target: Llama) -> None:
    """Row s of step j: tokens up to s, and the target's states up to s - j - 1, for later ones are not known when it is drafted."""
    module, steps, length, changed = make_module(target, 2), 4, 12, 6
    ids = torch.randint(2, 4096, (1, length), generator=torch.Generator().manual_seed(0))
    embedded, hidden = F.embedding(ids, target.embed), target.hidden_states(ids)
    outputs = module(target, embedded, hidden, steps)
    other = hidden.clone()
    other[:, changed:] = 3.0
    for step, (before, after) in enumerate(zip(outputs, module(target, embedded, other, steps))):
        is_same = (before == after).all(dim=-1)[0].tolist()
        first = changed + step + 1
        assert is_same[:first] == [True] * first, step
        assert first >= length or not is_same[first], "the first row that may change does"
    other = embedded.clone()
    other[:, changed:] = 3.0
    for before, after in zip(outputs, module(target, other, hidden, steps)):
        is_same = (before == after).all(dim=-1)[0].tolist()
        assert is_same == [True] * changed + [False] * (length - changed)


def test_measured_acceptance_against_its_plain_statement(target: Llama) -> None:
    """A chain of drafts starts after each known token from `first` on and ends where one is wrong, or the text goes another way."""
    torch.manual_seed(0)
    steps, first = 3, 5
    prompt = torch.randint(2, 4096, (6, 6))
    written = target.generate(prompt, 18, torch.zeros(6))
    batch = torch.cat([written, torch.randint(2, 4096, (2, 24))])
    objective = mtp.Objective(target, make_module(target, 2), steps)
    best = F.linear(target.hidden_states(batch), target.head).argmax(dim=-1)
    rigged = torch.where(torch.rand(steps, *best.shape) < 0.7, best, best + 1)  # seven of ten drafts are right

    class Rigged(torch.nn.Module):
        def forward(self, *_: object) -> list[torch.Tensor]:
            return [F.one_hot(row % 4096, 4096).float() @ inverse.T for row in rigged]

    inverse = torch.linalg.pinv(target.head)
    objective.mtp = Rigged()  # type: ignore[assignment]
    hits, tries = mtp.measure_drafts(objective, batch, first)
    wanted_hits, wanted_tries = [0] * steps, [0] * steps
    for b, start in itertools.product(range(len(batch)), range(first, batch.shape[1])):
        for step in range(steps):
            row = start + step
            if row >= batch.shape[1]:
                break
            wanted_tries[step] += 1
            if rigged[step, b, row] != best[b, row]:
                break
            wanted_hits[step] += 1
            if row + 1 < batch.shape[1] and batch[b, row + 1] != best[b, row]:
                break
    assert (hits.tolist(), tries.tolist()) == (wanted_hits, wanted_tries)
    assert all(0 < hit < tried for hit, tried in zip(wanted_hits, wanted_tries))


# -- the same in training and in serving ----------------------------------------------------------------------------------------


class Served:
    """A drafter as the server runs it, on pages that hold rubbish until they are handed out."""

    NUM_PAGES, PAGE = 64, 4

    def __init__(self, folder: Path, drafter: Path, max_steps: int) -> None:
        model = ServedMtp(drafter, load_served(folder, torch.float32, CPU, Ranks(), only_head=True), torch.float32, CPU)
        self.scores: list[torch.Tensor] = []
        own_logits = model.logits

        def logits(layer: int, states: torch.Tensor) -> torch.Tensor:
            self.scores.append(own_logits(layer, states))
            return self.scores[-1]

        model.logits = logits  # type: ignore[method-assign]
        self.service = RemoteDrafterService(RecurrentDrafter(model, max_steps), torch.float32, CPU, lambda count: contextlib.nullcontext())
        self.service.open(self.NUM_PAGES, self.PAGE)
        assert self.service._store is not None
        self.service._store.memory.fill_(255)  # as float32: not a number
        self._free = random.Random(0).sample(range(self.NUM_PAGES), self.NUM_PAGES)
        self._pages: dict[int, list[int]] = {}
        self._seen: dict[int, int] = {}

    def draft(self, wanted: dict[int, tuple[list[int], int]], target: Llama) -> dict[int, tuple[list[int], torch.Tensor]]:
        """request -> (known tokens, drafts): shows each what it has not seen; request -> drafts and the scores behind them [drafts, V]."""
        call = DraftCall()
        hidden = []
        for request, (ids, count) in wanted.items():
            seen, pages = self._seen.get(request, 0), self._pages.setdefault(request, [])
            while len(pages) * self.PAGE < len(ids) + max(count - 1, 0):
                pages.append(self._free.pop())
                call.fresh_pages.append(pages[-1])
            call.token_ids += ids[seen:]
            hidden.append(F.pad(target.hidden_states(torch.tensor([ids]))[0], (0, 0, 1, 0))[seen : len(ids)])
            call.query_lens.append(len(ids) - seen)
            call.seq_lens.append(len(ids))
            call.page_ids.append(list(pages))
            call.num_drafts.append(count)
            call.choices.append((LIKELIEST, 0, 0))
            call.filters.append((0.0, 1.0, 0.0))
            self._seen[request] = len(ids)
        call.hidden = torch.cat(hidden)
        self.scores.clear()
        reply = self.service.draft(call)
        found: dict[int, tuple[list[int], torch.Tensor]] = {}
        for b, (request, (_, count)) in enumerate(wanted.items()):
            rows = [self.scores[step][sum(n > step for n in call.num_drafts[:b])] for step in range(count)]
            found[request] = reply.token_ids[b], torch.stack(rows) if rows else torch.empty(0)
        return found


def trained_scores(target: Llama, module: mtp.Mtp, ids: list[int], drafts: list[int]) -> torch.Tensor:
    """What training says at the rows where the drafts were made [drafts, V]; the target's states from the last token on are rubbish."""
    everything = torch.tensor([[*ids, *drafts]])
    hidden = target.hidden_states(everything).clone()
    hidden[:, len(ids) - 1 :] = 5.0
    outputs = module(target, F.embedding(everything, target.embed), hidden, len(drafts))
    return torch.stack([F.linear(output[0, len(ids) - 1 + step], target.head) for step, output in enumerate(outputs)])


def same_drafts(target: Llama, module: mtp.Mtp, served: Served, wanted: dict[int, tuple[list[int], int]]) -> dict[int, list[int]]:
    found = served.draft(wanted, target)
    for request, (ids, count) in wanted.items():
        drafts, scores = found[request]
        assert len(drafts) == count
        if count:
            expected = trained_scores(target, module, ids, drafts)
            torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)
            assert expected.std() > 0.5 and drafts == expected.argmax(dim=-1).tolist()
    return {request: drafts for request, (drafts, _) in found.items()}


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_the_server_drafts_what_training_would(folder: Path, target: Llama, tmp_path: Path, layers: int) -> None:
    """Several requests and numbers of drafts in a call, chunks that only catch up, and a second round after drafts were rejected."""
    module = make_module(target, layers)
    mtp.save(module, target, tmp_path, 5)
    served = Served(folder, tmp_path, max_steps=5)
    rng = random.Random(layers)
    prompts = {number: [rng.randrange(2, 4096) for _ in range(length)] for number, length in enumerate((1, 9, 21, 30, 12))}
    served.draft({3: (prompts[3][:13], 0), 2: (prompts[2][:8], 0)}, target)
    drafts = same_drafts(target, module, served, dict(zip(prompts, zip(prompts.values(), (5, 3, 0, 5, 1)))))
    assert len({tuple(own[:3]) for own in drafts.values()}) == 5, "drafts that are all the same would show nothing"
    for number, accepted in enumerate((0, 1, 0, 2)):
        prompts[number] += [*drafts[number][:accepted], 77]  # then the target goes on
    same_drafts(target, module, served, {3: (prompts[3], 4), 0: (prompts[0], 5), 2: (prompts[2], 2), 1: (prompts[1], 5)})


def test_layers_that_are_left_out(folder: Path, target: Llama, tmp_path: Path) -> None:
    """One draft a step needs one layer; a request that wants more goes on with that one, as a module of one layer would."""
    module = make_module(target, 2)
    mtp.save(module, target, tmp_path, 2)
    served = Served(folder, tmp_path, max_steps=1)
    module.num_layers = 1
    ids = [random.Random(1).randrange(2, 4096) for _ in range(14)]
    same_drafts(target, module, served, {0: (ids, 4)})
