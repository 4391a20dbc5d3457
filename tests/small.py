"""A model of three layers with its drafter, for tests that any trained model does for: the bundled one's twenty take a third of such tests' time.

Otherwise it is like that one: the same sizes, tokenizer and held-out text, 0.87 bits a byte of it for its 0.61. Made on one H200, of 45 MB of the
bundled model's corpus (training/README.md):

    python -m training.corpus build --keep-tokenizer --max-train-bytes 45000000
    python -m training.train --layers 3 --steps 1400 --batch-size 64 --out tests/small_model
    foretoken train mtp --model tests/small_model --data training/data/train.u16 --heldout training/data/heldout.u16 --out tests/small_drafter \
        --layers 2 --drafts 4 --steps 1500
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import backend

DEFAULT_SPECULATION = {"method": "mtp", "num_model_steps": 3, "mtp_strategy": "with_ngram", "num_speculative_tokens": 5}
"""Of its servers: there is no eagle3 for it."""
SMALL_MODEL, SMALL_DRAFTER = Path(__file__).parent / "small_model", Path(__file__).parent / "small_drafter"


def memory_of(num_pages: int, with_drafter: bool = False) -> int:
    """Bytes of so many pages of 16 tokens, in float32: two keys and two values of 64 in each of three layers, and in the drafter's two."""
    return num_pages * 16 * (5 if with_drafter else 3) * 4 * 64 * 4


def name_drafter(speculative_config: dict[str, Any]) -> dict[str, Any]:
    """With the small model's drafter, where one is needed and none is named."""
    needs_one = "mtp" in (speculative_config.get("method"), *speculative_config.get("request_methods", ()))
    return {"model": str(SMALL_DRAFTER), **speculative_config} if needs_one else speculative_config


def small_options(options: Sequence[str]) -> list[str]:
    """`foretoken serve`'s, with the small model and its drafter, where no model is named."""
    if any(option.startswith(("--model=", "--config=")) for option in options):
        return list(options)
    key, found, others = "--speculative-config=", DEFAULT_SPECULATION, list[str]()
    for option in options:
        if not option.startswith(key):
            others.append(option)
            continue
        try:
            found = json.loads(option.removeprefix(key))
        except json.JSONDecodeError:
            return list(options)  # it is to be refused
    return [f"--model={SMALL_MODEL}", *others, f"{key}{json.dumps(name_drafter(found))}"]


class LLM(backend.LLM):
    """backend.LLM of the small model, and of its drafter, where no others are named."""

    def __init__(self, model: str = str(SMALL_MODEL), *, speculative_config: dict[str, Any] | None = None, **options: Any) -> None:
        if model == str(SMALL_MODEL) and speculative_config is not None:
            speculative_config = name_drafter(speculative_config)
        super().__init__(model, speculative_config=speculative_config, **options)
