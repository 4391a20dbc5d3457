"""The tokens that a model drafter may draft, of a file: its head scores them alone (FR-Spec, Zhao et al. 2025).

Most of what is written is made of few of a vocabulary's tokens, and a drafter's head is most of its weights: of 128,256 tokens the 32,768 that
texts have most take a quarter of the time. What is drafted is verified as ever, so answers do not change.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from backend.errors import ConfigError, ModelError
from backend.model_files import check_regular

KEY = "speculative_config.draft_token_map"
MAX_BYTES = 64 * 2**20
PICKLED = (".pt", ".pth", ".bin")
"""Files of torch.save, as SGLang's speculative_token_map and FR-Spec's authors have them; any other is a list in JSON."""


def read_token_map(path: str | Path, vocab_size: int) -> list[int]:
    """The ids of a file, ascending. Raises ConfigError for what is no list of ids from 0 to vocab_size - 1, each once."""
    path = Path(path)
    try:
        if (size := check_regular(path)) > MAX_BYTES:
            raise ConfigError(f"{KEY}: {path} has {size} bytes; the limit is {MAX_BYTES}")
        ids = _load(path) if path.suffix.lower() in PICKLED else json.loads(path.read_text("utf-8-sig"))
    except (ModelError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error!s:.200}") from None
    if not isinstance(ids, list) or not ids:
        raise ConfigError(f"{KEY}: {path} must hold a list of token ids, got {ids!r:.80}")
    for number, token_id in enumerate(ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ConfigError(f"{KEY}: {path}: element {number} must be a token id from 0 to {vocab_size - 1}, got {token_id!r:.80}")
    if num_double := len(ids) - len(set(ids)):
        raise ConfigError(f"{KEY}: {path} holds {len(ids)} token ids, {num_double} of them twice; each may come once")
    return sorted(ids)


def token_map_digest(path: str | Path | None) -> str | None:
    """What the ranks of a group must agree on: of the file's bytes. Raises ConfigError."""
    if path is None:
        return None
    try:
        check_regular(Path(path))
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    except (ModelError, OSError) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error}") from None


def _load(path: Path) -> object:
    """What torch.save wrote: a tensor or a list; nothing else of such a file is read. Raises ValueError."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by where the file is damaged
        raise ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    if isinstance(found, torch.Tensor):
        return found.tolist() if found.dim() == 1 and not found.is_floating_point() else f"a tensor {list(found.shape)} of {found.dtype}"
    if isinstance(found, list):
        return [own.item() if isinstance(own, torch.Tensor) and own.numel() == 1 else own for own in found]
    return found
