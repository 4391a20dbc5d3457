"""Text models of checkpoints that read images too: their settings lie in `text_config`, their weights under other names, beside those of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.errors import ModelError
from backend.model_checks import check_model, read_model_config
from deploy.cli import main
from tests.families import Case, check_logits, edited, make_model, refused

GEMMA = "Gemma3ForConditionalGeneration"
PUBLISHED = ("language_model.model.", "language_model.lm_head.")
NEWER = ("model.language_model.", "lm_head.")
SIZES = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
GEMMA_4B = {
    "architectures": [GEMMA],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, **SIZES},
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
"""As it was published: what is the family's own is left out."""


def put_beside_images(folder: Path, architecture: str, names: tuple[str, str], tied: dict[str, Any]) -> None:
    """tied: what the file says of it, outside `text_config`."""
    body, head = names
    weights = {name.replace("model.", body, 1).replace("lm_head.", head, 1): own for name, own in load_file(folder / "model.safetensors").items()}
    save_file(weights | {"vision_tower.encoder.layers.0.mlp.fc1.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "tie_word_embeddings"):
        text.pop(key, None)
    config = {"architectures": [architecture], "model_type": "with images", "text_config": text, "vision_config": {}, "num_hidden_layers": None}
    (folder / "config.json").write_text(json.dumps(config | tied))


@pytest.mark.parametrize(
    ("case", "architecture", "names", "tied"),
    [
        (Case("gemma3_text", config={"head_dim": 16, "sliding_window": 9}), GEMMA, PUBLISHED, {}),
        (Case("mistral", config={"sliding_window": None}), "Mistral3ForConditionalGeneration", PUBLISHED, {"tie_word_embeddings": True}),
        (Case("ministral3", config={"tie_word_embeddings": True}), "Mistral3ForConditionalGeneration", NEWER, {"tie_word_embeddings": True}),
    ],
    ids=["gemma3", "mistral, a head of its own", "ministral3, tied"],
)
def test_as_the_text_model_alone(
    case: Case, architecture: str, names: tuple[str, str], tied: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(case, tmp_path / "model")
    put_beside_images(tmp_path / "model", architecture, names, tied)
    check_logits(model, tmp_path / "model")
    assert main(["inspect", str(tmp_path / "model")]) == 0
    assert f"{architecture}: 2 layers of " in capsys.readouterr().out
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "rounded"), "--quantization", "wint8"]) == 0
    assert check_model(tmp_path / "rounded").layers == check_model(tmp_path / "model").layers


def test_a_tied_head_alone_is_the_embedding(tmp_path: Path) -> None:
    """As safetensors' save_model writes such models: it keeps one name of two."""
    make_model(Case("mistral", config={"tie_word_embeddings": True}), tmp_path)
    put_beside_images(tmp_path, "Mistral3ForConditionalGeneration", NEWER, {"tie_word_embeddings": True})
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.language_model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors")
    spec = check_model(tmp_path)
    assert (spec.embedding, spec.is_tied, spec.norm) == ("lm_head", True, "model.language_model.norm.weight")


def test_what_the_file_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4B))
    spec, config = check_model(tmp_path, has_weights=False), read_model_config(tmp_path)
    part = spec.layers[5].attention
    assert (spec.vocab_size, spec.max_model_len, spec.is_tied, spec.eos_token_ids) == (262208, 131072, True, {1, 106})
    assert (part.heads, part.window, part.rope.kind, part.rope.factor) == ((8, 4, 256), None, "linear", 8.0)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (262208, 131072)  # of which drafters are told


@pytest.mark.parametrize("text", [{"model_type": "mistral4"}, {"model_type": ["mistral"]}, {}], ids=str)
def test_other_text_models(text: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4B | {"text_config": text}))
    with pytest.raises(ModelError, match=r"text models of model_type .* are not supported; known: gemma3_text, mistral, ministral3"):
        check_model(tmp_path, has_weights=False)


def test_a_layer_that_nobody_reads(tmp_path: Path) -> None:
    make_model(Case("gemma3_text", config={"head_dim": 16, "sliding_window": 9}), tmp_path / "model")
    put_beside_images(tmp_path / "model", GEMMA, PUBLISHED, {})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    short = edited(tmp_path / "model", tmp_path / "short", text_config=config["text_config"] | {"num_hidden_layers": 1, "layer_types": None})
    refused(short, "weight language_model.model.layers.1.", "would not be used: num_hidden_layers is 1")
