"""Reads weights of Hugging Face folders: safetensors, in one file or sharded; and the archives of tensors that older drafters come as."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from backend.errors import ModelError
from backend.heap import give_back
from backend.model_files import check_regular, find_weights, open_weights
from backend.models.quantized import read_quantized
from backend.models.quantized_spec import CheckpointQuantization, Expected
from backend.quantization import Stored

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
IDS = (torch.int64, torch.int32)


def _check_type(tensor: torch.Tensor, known: tuple[torch.dtype, ...], what: str) -> torch.Tensor:
    """Raises ModelError: integers, and numbers of 8 bits without their scales, would pass for weights."""
    if tensor.dtype not in known:
        names = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *known))
        raise ModelError(f"{what} is of dtype {next(names)}; known: {', '.join(names)}")
    return tensor


class Checkpoint:
    """Weights by Hugging Face name. Use as a context manager; tensors are read when asked for."""

    def __init__(self, directory: str | Path, quantization: CheckpointQuantization | None = None) -> None:
        self.directory = Path(directory)
        self.quantization = quantization
        self._files = find_weights(self.directory)
        self._handles: dict[Path, Any] = {}
        self._sums: list[tuple[tuple[str, ...], torch.Tensor]] = []
        """Of weights that were watched since the last look: names, and a sum for each."""
        self.tolerated: set[str] | None = set()
        """Weights that cost no more than some requests, or a drafter's drafts, where they are not finite; None: all. They are warned of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.release()
        self._close()

    def watch(self, names: Sequence[str], tensor: torch.Tensor) -> None:
        """Has `release` look whether a weight, as it is used, is finite; of several names, each of the tensor's first dimension.

        A sum tells, since nothing that is added to NaN or infinity is a number again, and needs no room; it is waited for with those of a layer.
        """
        if all(name in self for name in names):
            self._sums.append((tuple(names), tensor.sum(tuple(range(1, tensor.dim()))) if len(names) > 1 else tensor.sum()[None]))

    def check_finite(self) -> None:
        """Raises ModelError that names the first weight watched that is not finite, and its file, or warns of it."""
        watched, self._sums = self._sums, []
        if not watched:
            return
        is_finite = torch.cat([sums.float() for _, sums in watched]).isfinite().tolist()
        named = ((name, sums.dtype) for names, sums in watched for name in names)
        for (name, dtype), is_good in zip(named, is_finite, strict=True):
            if is_good or not (message := self._explain(name, dtype)):
                continue
            if self.tolerated is not None and name not in self.tolerated:
                raise ModelError(message)
            logger.warning("%s", message)

    def _explain(self, name: str, dtype: torch.dtype) -> str:
        """What is wrong with a weight; nothing, where it was the sum alone that is no number."""
        path, stored = self.find(name)
        wrong = ~stored.to(dtype).isfinite()
        if not bool(wrong.any()):
            return ""
        place = wrong.nonzero()[0].tolist()
        value, count = stored[tuple(place)].item(), int(wrong.sum())
        rule = "weights must be finite"
        if math.isfinite(value):
            rule = f"{str(dtype).removeprefix('torch.')} holds up to {torch.finfo(dtype).max:.6g}: choose another dtype"
        return f"{path}: weight {name} has {value:g} at {place}, and {count} such of {stored.numel()} values in all: {rule}"

    def find(self, name: str) -> tuple[Path, torch.Tensor]:
        """A weight's file, and the weight."""
        return self._files[name], self._open(name).get_tensor(name)

    def release(self) -> None:
        """Looks whether what was watched is finite, and closes the files. Raises ModelError."""
        self.check_finite()
        self._close()

    def _close(self) -> None:
        """Unmaps the files, whose pages count as the process's memory: once nothing is a view of them. They are opened anew when asked for.

        Gives freed memory back too: weights that stay lie between the gaps that temporaries leave on the heap, and gaps of all layers together
        would cost as much again. Once a layer, since mapping each temporary by itself took 1.3 to 2.5 times as long as the heap does (measured).
        """
        self._handles.clear()
        give_back()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> tuple[str, ...]:
        """Of all weights."""
        return tuple(self._files)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One weight, whole. Raises ModelError when it is missing, unreadable, or not plain numbers of `shape`."""
        return _check_type(self._read(name, (shape,)), NUMBERS, f"{self._files[name]}: weight {name}")

    def get_one(self, name: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
        """The same of entry `number` of one of several dimensions, of which the others are not read."""
        path, entry = self._files[name], self._open(name).get_slice(name)
        if (found := tuple(entry.get_shape())) != shape:
            raise ModelError(f"{path}: weight {name} has shape {found}; config.json makes it {shape}")
        return _check_type(entry[number], NUMBERS, f"{path}: weight {name}")

    def get_ids(self, name: str, count: int) -> torch.Tensor:
        """The same of `count` integers, int64."""
        return _check_type(self.get_any(name, ((count,),)), IDS, f"{self.directory}: weight {name}").long()

    def get_any(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        """The same of a weight that may have any of these shapes."""
        return self._read(name, shapes)

    def is_quantized(self, name: str) -> bool:
        """Whether the weight of a projection (without `.weight`) is stored in fewer bits."""
        return self.quantization is not None and self.quantization.find(name, self._files) is not None

    def get_projection(self, name: str, out_features: int, in_features: int) -> Stored:
        """The weight [out, in] of a projection (without `.weight`), as it is stored. Raises ModelError."""
        layout = None if self.quantization is None else self.quantization.find(name, self._files)
        if layout is None:
            return self.get(f"{name}.weight", (out_features, in_features))
        try:
            expected = layout.tensors(out_features, in_features)
        except ValueError as error:
            raise ModelError(f"{self.directory}: {name} cannot be quantized as config.json says: {error}") from None
        if layout.kind == "gptq" and f"{name}.g_idx" in self._files:  # which holds whatever desc_act says
            expected["g_idx"] = Expected(((in_features,),))
        tensors = {part: self._read(f"{name}.{part}", own.shapes) for part, own in expected.items()}
        try:
            return read_quantized(layout, tensors, out_features, in_features)
        except ValueError as error:
            raise ModelError(f"{self.directory}: {name}.{error}") from None

    def _read(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        handle = self._open(name)
        path = self._files[name]
        try:
            tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path}: weight {name} cannot be read: {error}") from None
        if tuple(tensor.shape) not in shapes:
            raise ModelError(f"{path}: weight {name} has shape {tuple(tensor.shape)}; config.json makes it {shapes[0]}")
        return tensor

    def _open(self, name: str) -> Any:
        """The file of a weight."""
        path = self._files.get(name)
        if path is None:
            raise ModelError(f"{self.directory}: weight {name} is missing")
        if path not in self._handles:
            self._handles[path] = open_weights(path, "pt")
        return self._handles[path]


class PickledCheckpoint(Checkpoint):
    """A torch archive of tensors by name, read without running anything that is in it."""

    def __init__(self, path: Path) -> None:
        self.directory, self.quantization = path.parent, None
        self._path, self._sums, self.tolerated = path, [], set()
        check_regular(path)
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever unpickling a damaged or foreign file raises
            raise ModelError(f"{path} cannot be read as an archive of tensors: {str(error).splitlines()[0] if str(error) else error!r}") from None
        if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
            raise ModelError(f"{path} must hold tensors by name")
        self._tensors: dict[str, torch.Tensor] = {str(name): tensor for name, tensor in found.items()}

    def find(self, name: str) -> tuple[Path, torch.Tensor]:
        return self._path, self._tensors[name]

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.check_finite()
        self._tensors.clear()

    def _close(self) -> None:
        """It is in memory, and not mapped."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return _check_type(self._read(name, (shape,)), NUMBERS, f"{self._path}: weight {name}")

    def _read(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._path}: weight {name} is missing")
        if tuple(tensor.shape) not in shapes:
            raise ModelError(f"{self._path}: weight {name} has shape {tuple(tensor.shape)}; config.json makes it {shapes[0]}")
        return tensor


class DummyCheckpoint(Checkpoint):
    """Random weights of any shape that is asked for, made where they are used: for benchmarks, whose time does not depend on values."""

    def __init__(self, directory: str | Path, device: torch.device, dtype: torch.dtype) -> None:
        self.directory, self.quantization, self.tolerated = Path(directory), None, None
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def release(self) -> None:
        pass

    def watch(self, names: Sequence[str], tensor: torch.Tensor) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias")

    @property
    def names(self) -> tuple[str, ...]:
        """Not known: it has what it is asked for."""
        return ()

    def get_ids(self, name: str, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.long, device=self._device)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.randn(shape, dtype=self._dtype, device=self._device, generator=self._generator).mul_(shape[-1] ** -0.5)
