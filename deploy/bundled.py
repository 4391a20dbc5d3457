"""What the bundled model is served with where nobody says it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.config import BUNDLED_MODEL, DEFAULT_DRAFTER
from backend.model_files import expand_user
from backend.speculative_names import ALIASES

DEFAULT_SPECULATION = {
    "method": "eagle3",
    "model": str(DEFAULT_DRAFTER),
    "num_model_steps": 4,
    "mtp_strategy": "with_ngram",
    "num_speculative_tokens": 6,
}
"""As it measures best (benchmarks/bundled.py)."""


def is_bundled(model: str | Path) -> bool:
    return expand_user(model).resolve() == BUNDLED_MODEL.resolve()


def with_default_drafter(speculative: Any) -> Any:
    """The bundled model's `speculative_config`, which need not name the folder of the drafter that comes with it."""
    if not isinstance(speculative, dict):
        return speculative
    named = {ALIASES.get(key, key): value for key, value in speculative.items()}
    others = named.get("request_methods")
    methods = (named.get("method"), *(others if isinstance(others, list) else ()))
    is_default = DEFAULT_SPECULATION["method"] in methods and named.get("model") is None
    return {**speculative, "model": DEFAULT_SPECULATION["model"]} if is_default else speculative
