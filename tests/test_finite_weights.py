"""Weights that are no numbers: found at the start, by their name and file, and not in answers."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backend.errors import ModelError
from backend.models import load_model
from backend.models.loader import Checkpoint, PickledCheckpoint
from backend.models.loading import open_drafter
from backend.models.mtp import Mtp
from backend.parallel.ranks import Ranks
from tests.families import Case, load, make_model
from tests.small import SMALL_DRAFTER, SMALL_MODEL

CPU, NAN, INFINITE = torch.device("cpu"), float("nan"), float("inf")
LLAMA = Case("llama", "untied, biases", {"attention_bias": True, "tie_word_embeddings": False})
TIED = Case("llama", "tied", {"tie_word_embeddings": True})
OLMOE = Case("olmoe", "", {"num_experts": 5, "num_experts_per_tok": 2})
FUSED = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, case in {"llama": LLAMA, "tied": TIED, "olmoe": OLMOE}.items():
        make_model(case, found.setdefault(name, tmp_path_factory.mktemp(name)))
    found["fused"] = tmp_path_factory.mktemp("fused")
    model = transformers.AutoModelForCausalLM.from_pretrained(found["olmoe"], dtype=torch.float32)
    model.save_pretrained(found["fused"], save_original_format=False)
    return found


def spoil(folder: Path, out: Path, name: str, place: tuple[int, ...], value: float, dtype: torch.dtype | None = None) -> Path:
    """A copy with one value of one weight that is another."""
    shutil.copytree(folder, out)
    weights = load_file(out / "model.safetensors")
    own = weights[name] if dtype is None else weights[name].to(dtype)
    own[place] = value
    save_file(weights | {name: own}, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("kind", "name", "place", "value"),
    [
        ("llama", "model.norm.weight", (3,), NAN),
        ("llama", "model.layers.1.input_layernorm.weight", (0,), INFINITE),
        ("llama", "model.layers.0.self_attn.k_proj.weight", (1, 2), -INFINITE),
        ("llama", "model.layers.1.self_attn.o_proj.weight", (0, 63), NAN),
        ("llama", "model.layers.1.self_attn.q_proj.bias", (5,), NAN),
        ("llama", "model.layers.1.mlp.down_proj.weight", (4, 5), INFINITE),
        ("llama", "lm_head.weight", (17, 1), NAN),
        ("tied", "model.embed_tokens.weight", (17, 1), NAN),
        ("olmoe", "model.layers.1.mlp.gate.weight", (1, 1), NAN),
        ("olmoe", "model.layers.0.mlp.experts.3.gate_proj.weight", (1, 1), NAN),
        ("olmoe", "model.layers.1.mlp.experts.0.up_proj.weight", (1, 1), NAN),
        ("olmoe", "model.layers.1.mlp.experts.4.down_proj.weight", (1, 1), NAN),
        ("fused", f"{FUSED}.gate_up_proj", (2, 1, 1), NAN),
        ("fused", f"{FUSED}.gate_up_proj", (4, -1, 1), NAN),
        ("fused", f"{FUSED}.down_proj", (3, 1, 1), INFINITE),
    ],
)
def test_of_a_model_they_are_an_error(folders: dict[str, Path], kind: str, name: str, place: tuple[int, ...], value: float, tmp_path: Path) -> None:
    folder = spoil(folders[kind], tmp_path / "model", name, place, value)
    with pytest.raises(ModelError) as caught:
        load(folder)
    size = load_file(folder / "model.safetensors")[name].shape
    where = [index % count for index, count in zip(place, size)]
    said = f"{folder}/model.safetensors: weight {name} has {value:g} at {where}, and 1 such of {size.numel()} values in all: weights must be finite"
    assert str(caught.value) == said
    load(folders[kind])


def test_the_file_of_several_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, :3] = NAN
    shutil.copytree(folders["llama"], folder := tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(folder, max_shard_size="40KB")
    (file,) = [path.name for path in folder.glob("*.safetensors") if "model.layers.1.mlp.up_proj.weight" in load_file(path)]
    assert len(list(folder.glob("*.safetensors"))) > 2
    with pytest.raises(ModelError, match=rf"/{file}: weight model.layers.1.mlp.up_proj.weight has nan at \[0, 0\], and 3 such of "):
        load(folder)


def test_what_the_dtype_does_not_hold(folders: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    folder = spoil(folders["llama"], tmp_path / "model", name, (0, 1), 1e5)
    load_model(folder, torch.bfloat16, CPU, Ranks())
    with pytest.raises(
        ModelError, match=rf"weight {name} has 100000 at \[0, 1\], and 1 such of \d+ .*: float16 holds up to 65504: choose another dtype"
    ):
        load_model(folder, torch.float16, CPU, Ranks())


def test_a_sum_that_is_no_number_says_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = spoil(folders["llama"], tmp_path / "model", "model.norm.weight", (0,), 60_000.0)
    folder = spoil(folder, tmp_path / "both", "model.norm.weight", (1,), 60_000.0)
    load_model(folder, torch.float16, CPU, Ranks())


def test_a_token_that_is_none_is_warned_of(folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests without it are answered as ever."""
    folder = spoil(folders["llama"], tmp_path / "model", "model.embed_tokens.weight", (7, 0), NAN)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert f"{folder}/model.safetensors: weight model.embed_tokens.weight has nan at [7, 0]" in caplog.text


def test_of_a_drafter_they_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They cost it its drafts, and nobody the answer."""
    name = next(name for name in load_file(SMALL_DRAFTER / "model.safetensors") if name.endswith("mlp.up_proj.weight"))
    folder = spoil(SMALL_DRAFTER, tmp_path / "drafter", name, (1, 0), NAN)
    target = load_model(SMALL_MODEL, torch.float32, CPU, Ranks())
    with caplog.at_level(logging.WARNING):
        Mtp(SMALL_DRAFTER, target, torch.float32, CPU)
        assert "finite" not in caplog.text
        Mtp(folder, target, torch.float32, CPU)
    assert f"{folder}/model.safetensors: weight {name} has nan at [1, 0]" in caplog.text


def test_of_an_archive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pytorch_model.bin"
    weights = {"a": torch.ones(3), "b": torch.tensor([[1.0, NAN]])}
    torch.save(weights, path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"{path}: weight b has nan at \[0, 1\], and 1 such of 2 values"), PickledCheckpoint(path) as checkpoint:
        for name, weight in weights.items():
            checkpoint.watch([name], weight)
    with caplog.at_level(logging.WARNING), open_drafter(tmp_path, torch.float32, CPU, "safetensors") as checkpoint:
        checkpoint.watch(["b"], weights["b"])
    assert f"{path}: weight b has nan" in caplog.text


def test_an_error_of_a_load_is_told_and_no_other(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([NAN])}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="weight c is missing"), Checkpoint(tmp_path) as checkpoint:
        checkpoint.watch(["a"], checkpoint.get("a", (1,)))
        checkpoint.get("c", (1,))
