"""Where a batch's states come from: computed when they are wanted (online), or once and then read from disk (offline)."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from tqdm import tqdm

from backend.model_files import fingerprint, has_fingerprint, read_json
from backend.models.shards import held
from training.target import States, Target

CACHED_DTYPE = {torch.float32: torch.float32, torch.bfloat16: torch.int16}
"""NumPy has no bfloat16: its bits are kept."""
FINAL = "final"
PART = ".part"
STATES_FILE = "states.json"
"""What the states are of."""


class OnlineStates:
    """Windows at any place of the ids."""

    def __init__(self, target: Target, ids: np.ndarray, context: int, layers: Sequence[int]) -> None:
        self._target, self._layers, self._context = target, tuple(layers), context
        self._ids = torch.from_numpy(ids.astype(np.int32)).to(target.device)
        self._window = torch.arange(context, device=target.device)
        self.num_starts = len(ids) - context + 1

    def read(self, starts: torch.Tensor) -> States:
        """starts [B], below num_starts."""
        return self._target.states(self._ids[starts.to(self._ids.device)[:, None] + self._window].long(), self._layers)


class OfflineStates:
    """Windows one after the other, with their states in files of a folder: the final states, and those of each layer that some kind takes."""

    def __init__(self, target: Target, ids: np.ndarray, context: int, layers: Sequence[int], folder: Path, *, is_writer: bool = True) -> None:
        """Computes what is not there yet. is_writer: this process does. Raises ValueError for a folder of other states, without room, or that
        another process writes to."""
        self._target, self._layers, self._context = target, tuple(layers), context
        self.num_starts = len(ids) // context
        self._ids = torch.from_numpy(ids[: self.num_starts * context].astype(np.int64)).view(-1, context)
        self._folder, self._stored = folder, CACHED_DTYPE[target.dtype]
        names = [FINAL, *map(str, self._layers)]
        if is_writer:
            self._check(ids)
            with held(folder / STATES_FILE):
                if missing := [name for name in names if not self._is_whole(name)]:
                    self._compute(missing)
        self._files = {name: torch.from_numpy(np.memmap(self._path(name), self._numpy, "c", shape=self._shape)) for name in names}

    @property
    def _numpy(self) -> type[np.generic]:
        return np.float32 if self._stored == torch.float32 else np.int16

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.num_starts, self._context, self._target.hidden_size

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.states"

    def _is_whole(self, name: str) -> bool:
        path = self._path(name)
        return path.is_file() and path.stat().st_size == math.prod(self._shape) * self._stored.itemsize

    def _check(self, ids: np.ndarray) -> None:
        """That the folder is of the same model, data, context and dtype."""
        data = hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()
        own = {"model": fingerprint(self._target.directory), "data": data, "context": self._context, "dtype": str(self._target.dtype)}
        path = self._folder / STATES_FILE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                held = read_json(path)
                if has_fingerprint(self._target.directory, held.get("model")):
                    held["model"] = own["model"]
                if other := [key for key in own if held.get(key) != own[key]]:
                    raise ValueError(f"--states {self._folder} holds states of another {', '.join(other)}: name another folder, or remove it")
            elif any(self._folder.iterdir()):
                raise ValueError(f"--states {self._folder} is no folder of states, and not empty")
            else:
                path.write_text(json.dumps(own, indent=2) + "\n")
        except OSError as error:
            raise ValueError(f"--states {self._folder}: {error.strerror}") from None

    def _compute(self, names: Sequence[str]) -> None:
        self._remove_parts()  # of a process that was killed
        count, context, hidden = self._shape
        wanted, free = len(names) * count * context * hidden * self._stored.itemsize, shutil.disk_usage(self._folder).free
        if wanted > free:
            raise ValueError(f"--states {self._folder}: the states take {wanted / 2**30:.2f} GiB, {free / 2**30:.2f} GiB of the disk are free")
        layers = [int(name) for name in names if name != FINAL]
        parts = {name: self._path(name).with_suffix(PART) for name in names}
        files: dict[str, BinaryIO] = {}
        try:
            files |= {name: path.open("wb") for name, path in parts.items()}
            for ids in tqdm(self._ids.split(8), desc="states", unit="batch", mininterval=2.0):
                found = self._target.states(ids.to(self._target.device), layers)
                for name, file in files.items():
                    state = found.hidden if name == FINAL else found.entering[int(name)]
                    file.write(state.contiguous().view(self._stored).cpu().numpy().tobytes())
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
            for name, path in parts.items():
                path.replace(self._path(name))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise ValueError(f"--states {self._folder}: the disk is full: {wanted / 2**30:.2f} GiB are needed") from None
            raise ValueError(f"--states {self._folder}: {error}") from None
        finally:
            for file in files.values():
                with suppress(OSError):  # what a full disk did not take is told above
                    file.close()
            self._remove_parts()

    def _remove_parts(self) -> None:
        """Half-written states: they take the room that whole ones need."""
        for path in self._folder.glob(f"*{PART}"):
            path.unlink(missing_ok=True)

    def read(self, starts: torch.Tensor) -> States:
        """starts [B]: numbers of windows, below num_starts."""
        device, dtype, rows = self._target.device, self._target.dtype, starts.cpu()

        def states(name: str) -> torch.Tensor:
            return self._files[name][rows].to(device).view(dtype)

        return States(self._ids[rows].to(device), states(FINAL), {layer: states(str(layer)) for layer in self._layers})
