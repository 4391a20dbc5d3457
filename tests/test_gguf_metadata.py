"""What GGUF files say of rotary embeddings and windows, as llama.cpp reads it; and what config.json cannot say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from backend.errors import ModelError
from backend.models.gguf_folder import read_file
from tests.families import Case, make_model
from tests.gguf_files import add_tokenizer, write_gguf
from tests.test_families import GEMMA
from tests.test_gguf import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    make_model(Case("llama"), found)
    return found


def with_values(**values: Any) -> Callable[[gguf.GGUFWriter], None]:
    """Of the architecture, in place of those that are there: `__` stands for a point."""

    def add(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer)
        for key, value in values.items():
            own = f"{writer.arch}.{key.replace('__', '.')}"
            writer.kv_data[0].pop(own, None)
            writer.add_key_value(own, value, gguf.GGUFValueType.get_type(value))

    return add


@pytest.mark.parametrize(
    "values",
    [{"rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}, {"rope__scaling__type": "linear", "rope__scale_linear": 4.0}],
    ids=lambda values: " ".join(values),
)
def test_a_factor_without_its_kind_is_linear(values: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """As llama.cpp has it: files of 2023 name no kind, or have the factor under another name."""
    _, config, spec = read_file(write_gguf(folder, tmp_path / "model.gguf", tokenizer=with_values(**values)))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0} and spec.layers[0].attention.rope.factor == 4.0
    none = with_values(**values, rope__scaling__type="none") if "rope__scaling__type" not in values else with_values(rope__scaling__factor=0.0)
    assert "rope_scaling" not in read_file(write_gguf(folder, tmp_path / "none.gguf", tokenizer=none))[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5}, "rope.scaling.attn_factor is 0.5"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.0}, "rope.scaling.yarn_ext_factor is 0.0; it must be 1"),
        ({"attention__causal": False}, "attention.causal is False; it must be true"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_values_that_config_json_cannot_say(values: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    refused(write_gguf(folder, tmp_path / "model.gguf", tokenizer=with_values(**values)), tmp_path / "out", message)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_windows_by_layer(family: str, tmp_path: Path) -> None:
    """Newer files say which layers have one: every so many-th has none, or each by itself."""
    make_model(Case(family, config=GEMMA | {"query_pre_attn_scalar": 16, "num_hidden_layers": 4}), tmp_path / "model")

    def windows(pattern: Any) -> list[bool]:
        path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", tokenizer=with_values(attention__sliding_window_pattern=pattern))
        return [layer.attention.window is not None for layer in read_file(path)[2].layers]

    assert windows(3) == [True, True, False, True]
    assert windows([False, True, True, False]) == [False, True, True, False]

    def without(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer)
        writer.kv_data[0].pop(f"{writer.arch}.attention.sliding_window")

    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", tokenizer=without)
    if family == "gemma2":
        assert read_file(path)[1]["sliding_window"] == 4096
    else:
        refused(path, tmp_path / "out", "has no 'attention.sliding_window'")
    with pytest.raises(ModelError, match=r"attention\.sliding_window_pattern is .*; it must be an integer, or true or false for each of 4 layers"):
        windows([True])
