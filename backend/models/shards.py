"""Writes weights to a new model folder, in files of a few gigabytes: no more than one of them is in memory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from backend.errors import ConfigError
from backend.model_files import INDEX_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_SHARD_BYTES = 4 * 2**30
PART_FOLDER = ".part"
"""In a new folder, what is written of it: a process that is killed leaves this alone."""


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Makes a folder, and yields the one to write to, the content of which becomes its own at the end; leaves nothing of it where that fails. What a
    process that was killed has left is removed. Raises ConfigError as `check_new` does."""
    check_new(out)
    is_made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with held(out):
        check_new(out)  # of two at once the other one may have ended meanwhile
        shutil.rmtree(part := out / PART_FOLDER, ignore_errors=True)
        try:
            part.mkdir()
            yield part
            for path in sorted(part.iterdir(), key=lambda path: path.name == "config.json"):  # last: what is ended before is no model
                path.rename(out / path.name)
            part.rmdir()
        except BaseException:
            for path in out.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if is_made:
                out.rmdir()
            raise


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Keeps others from writing to a folder (or file): of two at once it would have one's weights with the other's config.json.

    Raises ConfigError where another process does, which the kernel knows: one that was killed holds nothing.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{path} is in use by another process") from None
    except OSError:  # a file system without locks of folders
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def save_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a safetensors file, which may be read by whoever may read other new files. Raises SafetensorError, OSError."""
    save_file(tensors, path, metadata={"format": "pt"})
    mask = os.umask(0o077)  # there is no other way to ask for it
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # newer safetensors write to a temporary file, and those are for their user alone


def check_new(out: Path) -> None:
    """Raises ConfigError for a folder that has something in it."""
    if out.exists() and (not out.is_dir() or any(path.name != PART_FOLDER for path in out.iterdir())):
        raise ConfigError(f"{out} is there already, and no empty folder")


class ShardWriter:
    """Use as a context manager: the last file and the index are written at its end."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._shard: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._num_bytes = self._total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._finish()

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Tensors that go into the same file."""
        size = sum(own.nbytes for own in tensors.values())
        if self._shard and self._num_bytes + size > MAX_SHARD_BYTES:
            self._flush()
        self._shard |= {name: own.contiguous() for name, own in tensors.items()}
        self._num_bytes, self._total = self._num_bytes + size, self._total + size

    def _flush(self) -> None:
        self._shards.append(list(self._shard))
        path = self._out / f"shard-{len(self._shards)}.safetensors"
        try:
            save_weights(self._shard, path)
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from None
        self._shard.clear()
        self._num_bytes = 0

    def _finish(self) -> None:
        self._flush()
        if len(self._shards) == 1:
            (self._out / "shard-1.safetensors").rename(self._out / WEIGHTS_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            file = f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            (self._out / f"shard-{number}.safetensors").rename(self._out / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._out / INDEX_FILE).write_text(json.dumps(index, indent=2), "utf-8")
