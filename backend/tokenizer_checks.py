"""Checks a tokenizer before anything is loaded: its tokens are the model's, and a draft model's are the target's. No torch, nor tokenizers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from backend.errors import ModelError
from backend.model_files import read_json
from backend.models.spec import DecoderSpec
from backend.special_tokens import read_special_tokens

logger = logging.getLogger(__name__)

MIN_SHARE_OF_TOKENS = 0.9
"""Of a vocabulary, which a tokenizer has: models are published with some more rows than tokens, 2% at most."""


def check_tokenizer(directory: Path, spec: DecoderSpec, unknown_tokens: str) -> None:
    """Raises ModelError when the tokenizer's files are damaged as JSON (the rest is for the one who loads them), or as `check_vocabulary` does."""
    path = directory / "tokenizer.json"
    if not isinstance(read_json(path).get("model"), dict):
        raise ModelError(f"{path} has no object 'model': it is no tokenizer of the tokenizers library")
    read_special_tokens(directory)
    check_vocabulary(_read_tokens(directory), spec, unknown_tokens)


def check_vocabulary(tokens: Mapping[int, str], spec: DecoderSpec, unknown_tokens: str) -> None:
    """Raises ModelError for tokens as `find_unknown_tokens`. unknown_tokens: `EngineConfig.unknown_tokens`."""
    if (num_known := sum(i < spec.vocab_size for i in tokens)) < MIN_SHARE_OF_TOKENS * spec.vocab_size:
        what = "it may be another model's; a token of an answer that it does not have writes no text"
        logger.warning("the tokenizer has %d tokens of the model's vocabulary of %d: %s", num_known, spec.vocab_size, what)
    text = find_unknown_tokens(tokens, spec)
    if text and unknown_tokens == "error":
        raise ModelError(f"{spec.where}: {text}; with unknown_tokens refuse the model is served, and requests whose text becomes one are refused")
    if text:
        logger.warning("%s: %s; requests whose text becomes one are refused", spec.where, text)


def find_unknown_tokens(tokens: Mapping[int, str], spec: DecoderSpec) -> str:
    """Says which tokens of a tokenizer, by their ids, the model has no embedding of, beside its family's placeholders; empty where there are none."""
    unknown = {i: token for i, token in tokens.items() if i >= spec.vocab_size and token not in spec.placeholders}
    if not unknown:
        return ""
    first, count = min(unknown), f"{len(unknown)} tokens" if len(unknown) > 1 else "a token"
    return f"the tokenizer has {count} beyond the model's embedding (vocab_size {spec.vocab_size}), {first} ({unknown[first]!r:.50}) the first"


MAX_FOREIGN_TOKENS = 0.01
"""Share of the shared token ids that may mean something else to a draft model: some families give special tokens other names in each model."""


def check_same_tokens(directory: str | Path, target_directory: str | Path) -> None:
    """Raises ModelError when a draft model's token ids mean other tokens than the target's: every draft of it would be nonsense."""
    own, target = (_read_tokens(Path(folder)) for folder in (directory, target_directory))
    shared = own.keys() & target.keys()
    foreign = sorted(i for i in shared if own[i] != target[i])
    if len(foreign) > MAX_FOREIGN_TOKENS * len(shared):
        first = foreign[0]
        raise ModelError(
            f"{directory}/tokenizer.json: token {first} is {own[first]!r:.40}; the target's is {target[first]!r:.40}: {len(foreign)} of "
            f"{len(shared)} ids differ, {MAX_FOREIGN_TOKENS:.0%} may: a draft model needs the target's vocabulary, or the beginning of it; "
            "draft_vocabulary shared has one of another vocabulary draft the tokens that both have"
        )
    if foreign:
        logger.warning("%s/tokenizer.json: %d of %d token ids are other tokens than the target's", directory, len(foreign), len(shared))


def _read_tokens(directory: Path) -> dict[int, str]:
    """The tokens of a tokenizer, by id."""
    values = read_json(directory / "tokenizer.json")
    model, added = values.get("model"), values.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        found = {i: token for token, i in vocab.items() if isinstance(i, int)}
    elif isinstance(vocab, list):
        found = {i: str(entry[0]) for i, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    else:
        raise ModelError(f"{directory / 'tokenizer.json'} has no vocabulary: it is no tokenizer of the tokenizers library")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            found[token["id"]] = str(token.get("content"))
    return found
