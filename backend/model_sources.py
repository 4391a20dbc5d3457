"""Where a model comes from: a folder, a GGUF file that is converted once, or a name on the Hugging Face hub. No torch before a conversion.

A path that exists is never taken for a name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backend import tiktoken_file
from backend.errors import ConfigError, ModelError
from backend.model_files import (
    GGUF_SUFFIX,
    PICKLED_FILES,
    SAMPLE_BYTES,
    SAMPLES,
    expand_user,
    find_gguf,
    find_gguf_parts,
    is_named,
    sample_bytes,
    settle_path,
)
from backend.special_tokens import ADDED, NAMES, SETTINGS

SENTENCEPIECE = "tokenizer.model"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""A repository's on the hub."""
FILES = ("*.json", "*.jinja", SENTENCEPIECE, f"*{tiktoken_file.SUFFIX}", *tiktoken_file.NAMES)
"""Of a repository, what a model is served from, beside its weights."""
UNREAD_FILES = ("*/*.safetensors", "*/*.json", "consolidated*.safetensors")
"""The same weights in another form, which many repositories have as well: of Mistral's own programs, or in folders of their own."""
FORMAT, TOKENIZER_FORMAT = 1, 2
"""Of folders of GGUF files, and of those with a tokenizer's file beside links: another number, and they are made anew."""
BRANCHES = ("main", "master")
MOVED = "rename it, or link to it from elsewhere"
"""What to do with a path that a server cannot read."""

Convert = Callable[[Path, Path], None]
"""Writes the folder of a GGUF file."""


def cache_directory() -> Path:
    """What can be made again at any time. Raises ModelError."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"
    except RuntimeError:
        raise ModelError(f"user {os.getuid()} has no home folder: set HOME, or XDG_CACHE_HOME to a folder for converted models") from None


def convert_here(path: Path, out: Path) -> None:
    """In this process."""
    from backend.models.gguf_folder import write_folder

    write_folder(path, out)


@dataclass(frozen=True, slots=True)
class Source:
    """How names on the hub and GGUF files are brought here."""

    revision: str | None = None
    """Branch, tag or commit of a name; None: its main branch."""
    download_dir: str | None = None
    """Of the hub's cache; None: where its package keeps it."""
    has_weights: bool = True
    """False where they are made up."""
    convert: Convert = convert_here
    is_served: bool = False
    """By a server, whose Python stub reads ASCII paths only: what would end up elsewhere is not brought there to begin with."""


def find_model(model: str | Path, source: Source | None = None) -> Path:
    """The folder of a model, absolute: itself, or the one that a GGUF file or a hub's name became.

    Raises ModelError for what is not there or not readable, ConfigError for a package that is needed and missing.
    """
    source = source or Source()
    path = expand_user(model)
    try:
        is_path = path.exists() or str(model).startswith(("/", "./", "../", "~"))
        (path / "config.json").exists()
    except OSError as error:  # a folder that may not be entered, or a name that is too long
        raise ModelError(f"model {model} cannot be read: {error}") from None
    if is_path and source.revision not in (None, *BRANCHES):
        raise ConfigError(f"revision {source.revision!r:.80} is of a name on the hub; {model} is a path")
    file = find_gguf(path) if path.is_dir() else path if path.suffix == GGUF_SUFFIX and (is_path or not NAME.fullmatch(str(model))) else None
    if file is not None:
        return _convert(file, source)
    if path.is_dir():
        _check_snapshot(path)
        return with_tokenizer(settle_path(path))
    if path.exists():
        raise ModelError(f"{model} is no model folder: name a folder with config.json, a GGUF file ({GGUF_SUFFIX}), or a name on the hub (ORG/NAME)")
    if is_path or not NAME.fullmatch(str(model)):
        quoted = "; a shell replaces no variable between single quotes" if "$" in str(model) else ""
        raise ModelError(f"model folder {model} does not exist, nor is it a name on the hub (ORG/NAME){quoted}")
    folder = download(str(model), source)
    if (file := find_gguf(folder)) is not None:  # which somebody has fetched before
        return _convert(file, source)
    if not is_named(folder / "config.json"):
        raise ModelError(f"{model} has no config.json: of a repository of GGUF files download one (all of its parts), and name the file")
    return with_tokenizer(folder)


def _check_snapshot(path: Path) -> None:
    """Raises ModelError for a repository in the hub's cache as a whole, whose files are in folders of it by their commits."""
    if not is_named(path / "config.json") and path.name.startswith("models--") and (snapshots := path / "snapshots").is_dir():
        named = path.name.removeprefix("models--").replace("--", "/")
        raise ModelError(f"{path} is the hub's cache of {named}: name that, or a folder in {snapshots}")


def _convert(file: Path, source: Source) -> Path:
    """The folder that a GGUF file became."""
    parts = find_gguf_parts(file)
    if source.is_served:
        check_ascii("the cache of converted models", cache_directory(), "set XDG_CACHE_HOME")
    return find_converted(parts, source.convert)


def download(name: str, source: Source) -> Path:
    """A repository's files, those that are not in the hub's cache yet. Raises ModelError, and ConfigError without `huggingface_hub`."""
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:
        raise ConfigError(
            f"{name} is no folder here; to download it by its name on the hub: pip install 'foretoken-triton[hub]'; or download it into a folder"
        ) from None

    if source.is_served:
        check_ascii("the hub's cache", Path(source.download_dir or constants.HF_HUB_CACHE), "name another with --download-dir, or set HF_HOME")

    def fetch(*patterns: str) -> Path:
        own, others = [*FILES, *patterns], list(UNREAD_FILES)
        return Path(snapshot_download(name, revision=source.revision, cache_dir=source.download_dir, allow_patterns=own, ignore_patterns=others))

    try:
        if not source.has_weights:
            return settle_path(fetch())
        folder = fetch("*.safetensors")
        return settle_path(folder if any(folder.glob("*.safetensors")) else fetch(*PICKLED_FILES))
    except Exception as error:  # of the package, of its HTTP library, of the disk: many kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        where = f" at revision {source.revision}" if source.revision else ""
        raise ModelError(
            f"{name} is no folder here, and could not be downloaded{where}: {lines[0]:.300}; without a network, name a folder that has it"
        ) from None


def check_ascii(what: str, path: Path, advice: str) -> None:
    """Raises ModelError for a path that a server cannot read."""
    if not str(settle_path(path)).isascii():
        raise ModelError(f"{what} {path}: the server's Python stub reads ASCII paths only; {advice}")


def with_tokenizer(folder: Path) -> Path:
    """The folder, or where it has a file of SentencePiece's or tiktoken's alone one with links to its files and a tokenizer.json beside them.

    Raises ModelError, ConfigError.
    """
    if (folder / "tokenizer.json").exists() or not (folder / "config.json").exists():
        return folder
    ranks = tiktoken_file.find_tiktoken(folder)
    if ranks is None and not (folder / SENTENCEPIECE).exists():
        return folder
    own = ranks or folder / SENTENCEPIECE
    digest = hashlib.blake2b(f"{TOKENIZER_FORMAT} {folder} {own.name}".encode(), digest_size=8)
    for path in (own, *(folder / name for name in (SETTINGS, NAMES, ADDED))):
        digest.update(path.read_bytes() if path.is_file() else b"")

    def link(out: Path) -> None:
        from backend.sentencepiece_file import convert_sentencepiece

        out.mkdir()
        made = convert_sentencepiece(folder) if ranks is None else tiktoken_file.convert_tiktoken(ranks)
        (out / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False), "utf-8")

    made = _make_once(f"{folder.name}-{digest.hexdigest()}", link)
    with _keeping(made.parent):
        for own in made.iterdir():
            if own.is_symlink() and not own.exists():
                own.unlink(missing_ok=True)
        for path in folder.iterdir():
            if not (made / path.name).exists():
                with contextlib.suppress(FileExistsError):  # another server starts, too
                    (made / path.name).symlink_to(path)
    return made


def find_converted(parts: Sequence[Path], convert: Convert = convert_here) -> Path:
    """The folder that a GGUF file of these parts was converted to, converted now if it was not yet. Raises what `convert` raises."""
    # By its name here: the files that links in the hub's cache lead to are named otherwise.
    path = settle_path(parts[0].parent) / parts[0].name
    digest = hashlib.blake2b(f"{FORMAT} {path.name}".encode(), digest_size=8)
    for part in parts:
        for piece in sample_bytes(part, SAMPLES, SAMPLE_BYTES):
            digest.update(piece)
    return _make_once(f"{path.stem}-{digest.hexdigest()}", lambda out: convert(path, out))


def _make_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder of the cache, made now if it is not there. Raises ConfigError, and what `make` raises."""
    models = cache_directory() / "models"
    name = name.encode("ascii", "replace").decode().replace("?", "_")  # which the file may be called, and a server's folder not
    folder = models / name
    if folder.is_dir():  # whole: it has its name since then; the cache may be read-only
        return folder
    with contextlib.ExitStack() as stack:
        with _keeping(models):
            models.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((models / f"{name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # two servers that start at once convert a file once
        if not folder.is_dir():
            begun = models / f"{name}.part"
            shutil.rmtree(begun, ignore_errors=True)  # of a conversion that was ended
            try:
                with _keeping(models, _NO_ROOM):
                    make(begun)
                    begun.rename(folder)
            finally:
                shutil.rmtree(begun, ignore_errors=True)
    return folder


_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Errors of what is written; others may be of what is read."""


@contextlib.contextmanager
def _keeping(models: Path, numbers: Container[int | None] = range(1, 2**16)) -> Iterator[None]:
    """Raises ConfigError where the folder of converted models cannot be written. numbers: of the errors that tell of it."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
        said = f"{models}, where converted models are kept, cannot be written: {error.strerror}"
        raise ConfigError(f"{said}; set XDG_CACHE_HOME to another folder") from None
