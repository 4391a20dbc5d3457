"""Reads weights of Hugging Face folders: safetensors, in one file or sharded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from backend.errors import ModelError
from backend.model_files import read_json

if TYPE_CHECKING:
    from typing_extensions import Self


class Checkpoint:
    """Weights by Hugging Face name. Use as a context manager; tensors are read when asked for."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict):
                raise ModelError(f"{index} has no weight_map")
            self._files: dict[str, Path] = {name: self.directory / file for name, file in files.items()}
        else:
            single = self.directory / "model.safetensors"
            if not single.is_file():
                raise ModelError(f"{self.directory} has neither model.safetensors nor model.safetensors.index.json")
            self._files = dict.fromkeys(self._open(single).keys(), single)
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read (truncated download?): {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One weight, whole. Raises ModelError when it is missing, unreadable, or not of `shape`."""
        path = self._files.get(name)
        if path is None:
            raise ModelError(f"{self.directory}: weight {name} is missing")
        if path not in self._handles:
            self._handles[path] = self._open(path)
        try:
            tensor = self._handles[path].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path}: weight {name} cannot be read: {error}") from None
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{path}: weight {name} has shape {tuple(tensor.shape)}; config.json makes it {shape}")
        return tensor


class DummyCheckpoint(Checkpoint):
    """Random weights of any shape that is asked for, made where they are used: for benchmarks, whose time does not depend on values."""

    def __init__(self, directory: str | Path, device: torch.device, dtype: torch.dtype) -> None:
        self.directory = Path(directory)
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias")

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.randn(shape, dtype=self._dtype, device=self._device, generator=self._generator).mul_(shape[-1] ** -0.5)
