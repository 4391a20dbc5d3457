"""What a model's publisher recommends for requests that say nothing of their own: the sampling parameters of generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.errors import ModelError
from backend.model_files import GENERATION_FILE, is_named, read_json
from backend.sampling_params import SamplingParams

NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Of the file, with what SamplingParams calls the same: those that vLLM takes from it. `do_sample` is not one: a request that wants the likeliest
tokens says temperature 0."""


def read_sampling_defaults(directory: str | Path) -> dict[str, Any]:
    """Of a model folder; empty where it recommends nothing. Raises ModelError for values that no request could have."""
    path = Path(directory) / GENERATION_FILE
    if not is_named(path):
        return {}
    values = {name: value for name, value in read_json(path).items() if name in NAMES and value is not None}
    return {NAMES[name]: value for name, value in values.items() if is_other(str(path), name, NAMES[name], value)}


def is_other(where: str, name: str, own: str, value: Any) -> bool:
    """Whether the value that a file calls `name` is not what a request has by itself. Raises ModelError for one that no request could have."""
    try:
        return bool(getattr(SamplingParams(**{own: value}), own) != getattr(SamplingParams(), own))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{where}: {name} {value!r:.80}: {error}") from None
