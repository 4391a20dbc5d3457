"""Reads GGUF files, of one part or split, with the package `gguf`: metadata, and tensors as plain numbers."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backend.errors import ConfigError, ModelError
from backend.model_files import check_regular, find_gguf_parts

if TYPE_CHECKING:
    import gguf

MAX_FLOAT16 = 65504.0
HEADER = struct.Struct("<4sIQQ")
"""Of a file: magic, version, numbers of tensors and of values."""
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Of values, in bytes, by type."""
STRING, ARRAY = 8, 9


def import_gguf() -> Any:
    """The package. Raises ConfigError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ConfigError("GGUF files are read by the package gguf, which is not installed: pip install 'foretoken-triton[gguf]'") from None
    return gguf


class GgufFile:
    """A file's values by key, and its tensors by name. Tensors are read when asked for; the file is mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for what is no GGUF file, truncated, or lacks a part; ConfigError without the package."""
        self._gguf = import_gguf()
        kinds = self._gguf.GGMLQuantizationType
        self._known: dict[gguf.GGMLQuantizationType, bool] = {kinds.F32: True, kinds.F16: True}
        self.path = path
        self.values: Mapping[str, Any] = {}
        self._tensors: dict[str, tuple[Path, gguf.ReaderTensor]] = {}
        parts = find_gguf_parts(path)
        total: Any = None
        for number, part in enumerate(parts):
            reader = self._open(part)
            values = {key: self._read_value(part, key, field) for key, field in reader.fields.items() if number == 0 or key.startswith("split.")}
            _check_part(part, values, number, len(parts))
            if number == 0:
                self.values = {key: value for key, value in values.items() if not key.startswith("GGUF.")}
                total = values.get("split.tensors.count")
            elif values.get("split.tensors.count") != total:
                own = values.get("split.tensors.count")
                raise ModelError(f"{part}: split.tensors.count is {own!r:.40}, and in {parts[0].name} {total!r:.40}: it is a part of another model")
            for tensor in reader.tensors:
                if tensor.name in self._tensors:
                    raise ModelError(f"{part}: tensor {tensor.name} is in {self._tensors[tensor.name][0]} too")
                self._tensors[tensor.name] = part, tensor
        if len(parts) > 1 and total is not None and total != len(self._tensors):
            raise ModelError(f"{path}: its {len(parts)} parts have {len(self._tensors)} tensors, and split.tensors.count is {total!r:.40}")

    def _open(self, path: Path) -> gguf.GGUFReader:
        check_lengths(path)
        try:
            return self._gguf.GGUFReader(path)
        except Exception as error:  # a damaged file makes the package raise many kinds
            reason = str(error) or type(error).__name__
            raise ModelError(f"{path} cannot be read as a GGUF file (truncated download?): {reason:.200}") from None

    @staticmethod
    def _read_value(path: Path, key: str, field: gguf.ReaderField) -> Any:
        try:
            value = field.contents()
            return shortest(value) if field.types[-1].name == "FLOAT32" else value
        except (ValueError, IndexError, TypeError) as error:
            raise ModelError(f"{path}: {key} cannot be read: {error}") from None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, the slowest dimension first."""
        return {name: _shape(tensor) for name, (_, tensor) in self._tensors.items()}

    def kind(self, name: str) -> str:
        """How a tensor's numbers are stored: F32, F16, BF16, Q4_K and so on."""
        return self._tensors[name][1].tensor_type.name

    def check(self, name: str, shape: tuple[int, ...], index: int | None = None) -> None:
        """Raises ModelError unless the tensor is there, of `shape`, and known; of a stack of tensors, each. A dimension of 1 may be left out."""
        if name not in self._tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        path, tensor = self._tensors[name]
        found = _shape(tensor) if index is None else _shape(tensor)[1:]
        if [n for n in found if n != 1] != [n for n in shape if n != 1] or (index is not None and index >= _shape(tensor)[0]):
            number = "" if index is None else f", of which number {index} is asked for"
            raise ModelError(f"{path}: tensor {name} has shape {_shape(tensor)}{number}; the metadata make it {shape}")
        if not self._is_known(tensor.tensor_type):
            raise ModelError(f"{path}: tensor {name} is stored as {tensor.tensor_type.name}, which the package gguf does not expand")

    def _is_known(self, kind: gguf.GGMLQuantizationType) -> bool:
        """By one block of it, which is tried once."""
        if kind not in self._known:
            _, size = self._gguf.GGML_QUANT_SIZES[kind]
            try:
                self._gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
                self._known[kind] = True
            except NotImplementedError:
                self._known[kind] = False
        return self._known[kind]

    def read(self, name: str, shape: tuple[int, ...], index: int | None = None) -> torch.Tensor:
        """A tensor's numbers in float32, or of a stack of tensors one. Raises ModelError where `check` does."""
        self.check(name, shape, index)
        _, tensor = self._tensors[name]
        numbers = self._gguf.quants.dequantize(tensor.data if index is None else tensor.data[index], tensor.tensor_type)
        return torch.from_numpy(numbers.copy()).reshape(shape)


def _check_part(path: Path, values: Mapping[str, Any], number: int, count: int) -> None:
    """Raises ModelError unless a file says of itself that it is part `number`, from 0 on, of `count`; one alone may say nothing, or no parts."""
    found = values.get("split.count")
    if count == 1 and found in (None, 0, 1):  # 0: of parts that were put together again
        return
    if count == 1:
        no = values.get("split.no")
        place = f"{no + 1} " if isinstance(no, int) else ""
        rule = "each is named NAME-00001-of-00009.gguf, by its number and theirs, and all lie in one folder"
        raise ModelError(f"{path} is part {place}of {found!r:.40} (split.count), by another name: {rule}")
    for key, own in (("split.count", count), ("split.no", number)):
        if values.get(key) != own:
            raise ModelError(f"{path}: {key} is {values.get(key)!r:.40}; by its name it is {own}: it is another part, or one of another model")


def check_lengths(path: Path) -> None:
    """Raises ModelError where the metadata of a GGUF file would reach past its end: the package reads arrays of any length, for ever."""
    what = f"{path} cannot be read as a GGUF file (truncated download?)"
    if (num_bytes := check_regular(path)) < HEADER.size:  # before it is opened: to open a pipe waits for who writes it
        raise ModelError(f"{what}: it has {num_bytes} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        order = "<" if struct.unpack_from("<I", data, 4)[0] & 0xFFFF else ">"
        if data[:4] != b"GGUF" or struct.unpack_from(f"{order}I", data, 4)[0] < 2:
            return  # which the package says
        place, key = HEADER.size, "the first key"
        try:
            for _ in range(struct.unpack_from(f"{order}Q", data, HEADER.size - 8)[0]):
                (size,) = struct.unpack_from(f"{order}Q", data, place)
                key = data[place + 8 : place + 8 + min(size, 64)].decode("utf-8", "replace")
                (kind,) = struct.unpack_from(f"{order}I", data, place + 8 + size)
                place = _pass(data, order, kind, place + 12 + size)
        except (struct.error, OverflowError):
            raise ModelError(f"{what}: {key!r} reaches past its end") from None
        except KeyError as error:
            raise ModelError(f"{what}: {key!r} is of type {error}") from None


def _pass(data: mmap.mmap, order: str, kind: int, place: int) -> int:
    """Where the value ends that begins at `place`. Raises struct.error past the end of the file, and KeyError for types that no value has."""
    kinds, count = kind, 1
    if kind == ARRAY:
        kinds, count = struct.unpack_from(f"{order}IQ", data, place)
        place += 12
    if kinds == STRING:
        for _ in range(count):
            place += 8 + struct.unpack_from(f"{order}Q", data, place)[0]
    else:
        place += SIZES[kinds] * count
    if place > len(data):
        raise struct.error
    return place


def shortest(value: Any) -> Any:
    """Float32 numbers as who wrote them would: 1e-5, not 9.99999975e-06."""
    return [shortest(own) for own in value] if isinstance(value, list) else float(str(np.float32(value)))


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape.tolist()))


def stored_dtype(kind: str, numbers: torch.Tensor) -> torch.dtype:
    """What a tensor is written in: as it is, or in the 16 bits that keep more of numbers that were in fewer."""
    if kind == "BF16":
        return torch.bfloat16
    if kind in ("F32", "F64") or numbers.dim() < 2:
        return torch.float32
    return torch.float16 if bool(numbers.abs().max() <= MAX_FLOAT16) else torch.bfloat16
