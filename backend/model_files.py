"""Reads the JSON files of a Hugging Face model folder. No torch: the tokenizer model and the launcher read them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backend.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder. Raises ModelError naming the file."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json, with generation_config.json's end-of-text ids over it when there is one."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(f"model folder {directory} does not exist")
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids = read_json(generation).get("eos_token_id")
        if ids is not None:
            config["eos_token_id"] = ids
    return config
