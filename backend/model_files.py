"""Reads the files of a Hugging Face model folder. No torch: the tokenizer model and the launcher read them too."""

from __future__ import annotations

import hashlib
import json
import os
import pickletools
import re
import stat
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from backend.errors import ModelError

MAX_JSON_BYTES = 64 * 2**20
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""What transformers calls one of several files."""
GENERATION_FILE = "generation_config.json"
TEMPLATES = "additional_chat_templates"
"""Folder of templates by name, beside the one for all chats."""
MODULES = "num_nextn_predict_layers"
MODULE_NAMES = ("mtp_num_hidden_layers", "num_mtp_layers")
"""What some files call the number of modules that predict tokens further ahead."""
PICKLED_FILES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Where drafters that were published before safetensors keep their weights: a torch archive of tensors."""

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"
OLD_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ wrote it, before transformers read their checkpoints."""

POINTER, MAX_POINTER_BYTES = b"version https://git-lfs", 1024
"""How a file begins that stands for one which Git LFS has, and how long such files may be."""
ADAPTER_FILE = "adapter_config.json"
MERGED = "adapters are not served: merge it into the model, with PEFT's merge_and_unload, and save that"
ADAPTER = re.compile(r"\.(lora_(A|B|E|embedding_A|embedding_B|magnitude_vector)|base_layer)\.")
"""Of a model that an adapter was put into: its own weights, and what the model's are called beside them."""
GGUF_SUFFIX = ".gguf"
GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""The end of the name of one of several files, counted from 1: llama.cpp's split ones."""

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".safetensors")
"""Of files that hold weights that are not read: pickles, which may run what is in them, and parts without their index."""

OTHER_TOKENIZERS = ("tekken.json", "vocab.json", "vocab.txt", "spiece.model")
"""Vocabularies in forms that are not read."""


def expand_user(path: str | Path) -> Path:
    """With the folder of a user for `~` or `~name` at its beginning. Raises ModelError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ModelError(f"{path}: there is no home folder {Path(path).parts[0]}") from None


def settle_path(path: Path) -> Path:
    """Absolute, with links followed; but a link is kept where it leads out of ASCII, for servers' Python stubs read ASCII paths only."""
    own = expand_user(path)
    found = own.resolve()
    return found if str(found).isascii() else Path(os.path.abspath(own))


def is_named(path: Path) -> bool:
    """Whether a folder has the name, be it of a link that leads nowhere: reading that is an error, where no file at all may be right."""
    return os.path.lexists(path)


def check_regular(path: Path) -> int:
    """The size of a file. Raises ModelError for what is not one: reading a pipe or a device may never end."""
    try:
        status = path.stat()
    except FileNotFoundError:
        of = f": the link to {os.readlink(path)} leads nowhere" if path.is_symlink() else ""
        raise ModelError(f"{path} is missing{of}") from None
    except (OSError, ValueError) as error:  # the latter of a name that no file can have
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} cannot be read: it is not a regular file")
    if status.st_size < MAX_POINTER_BYTES and _is_pointer(path):
        raise ModelError(f"{path} is Git LFS's pointer to a file, not the file itself: fetch that with `git lfs pull`, or download it")
    return status.st_size


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(POINTER)) == POINTER
    except OSError:  # whoever reads it says so
        return False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder. Raises ModelError naming the file."""
    if (size := check_regular(path)) > MAX_JSON_BYTES:
        raise ModelError(f"{path} has {size} bytes; the limit is {MAX_JSON_BYTES}")
    try:
        values = json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ModelError(f"{path} cannot be read: it is nested too deeply") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json, of the text model where there are other parts, with generation_config.json's end-of-text ids over it when there is one."""
    directory = Path(directory)
    if directory.is_file():
        raise ModelError(f"{directory} is a file, and a model is a folder; of a GGUF file `foretoken convert` makes one")
    if not directory.is_dir():
        raise ModelError(f"model folder {directory} does not exist")
    if is_named(adapter := directory / ADAPTER_FILE) and not is_named(directory / "config.json"):
        model = read_json(adapter).get("base_model_name_or_path")
        of = f" for {model!r:.200}" if model else ""
        raise ModelError(f"{directory} is an adapter (LoRA){of}, and no model: {MERGED}")
    config = _merge_text(read_json(directory / "config.json"))
    if config.get(MODULES) is None and (count := next((config[name] for name in MODULE_NAMES if config.get(name) is not None), None)) is not None:
        config[MODULES] = count
    if (path := find_end_tokens(directory)).name == GENERATION_FILE:
        config["eos_token_id"] = read_json(path)["eos_token_id"]
    return config


def _merge_text(config: dict[str, Any]) -> dict[str, Any]:
    """What models that read images too have of their text model in an object of its own, beside the rest."""
    own = config.get("text_config")
    if not isinstance(own, dict):
        return config
    outer = {key: value for key, value in config.items() if key != "text_config" and value is not None}
    found = outer | {key: value for key, value in own.items() if value is not None or key not in outer}
    # Of these the outer ones count: transformers ends answers by them, and ties what no file holds twice.
    found |= {key: outer[key] for key in ("architectures", "bos_token_id", "eos_token_id") if key in outer}
    if True in (own.get("tie_word_embeddings"), outer.get("tie_word_embeddings")):
        found["tie_word_embeddings"] = True
    return found


def find_quantization_file(config: Mapping[str, Any], directory: Path) -> Path | None:
    """What says how weights are quantized, beside a config.json that does not."""
    if any(config.get(key) for key in QUANTIZATION_KEYS):
        return None
    return next((path for name in (MODELOPT_FILE, *OLD_QUANTIZATION_FILES) if is_named(path := directory / name)), None)


def find_end_tokens(directory: Path) -> Path:
    """The file that names the end-of-text ids. Raises ModelError."""
    path = directory / GENERATION_FILE
    return path if is_named(path) and read_json(path).get("eos_token_id") is not None else directory / "config.json"


SAMPLES, SAMPLE_BYTES = 32, 4096
"""Pieces of a file of weights that are looked at to tell it from others."""


def fingerprint(directory: str | Path, *, samples_weights: bool = True) -> str:
    """Of what a model folder holds, wherever it lies: its configuration, how weights are quantized, and a sample of each. Raises ModelError.

    samples_weights: False gives what files have that were written before 2026-12.
    """
    directory = Path(directory)
    config = read_config(directory)
    found = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8)
    if (quantization := find_quantization_file(config, directory)) is not None:
        found.update(json.dumps([quantization.name, read_json(quantization)], sort_keys=True).encode())
    for path in sorted(path for path in directory.iterdir() if path.suffix == ".safetensors" or path.name in PICKLED_FILES):
        for piece in sample_bytes(path, SAMPLES, SAMPLE_BYTES):
            found.update(piece)
        if samples_weights and path.suffix == ".safetensors":
            for piece in _sample_weights(path):
                found.update(piece)
    return found.hexdigest()


def has_fingerprint(directory: str | Path, noted: object) -> bool:
    """Whether a file was written for this folder, by this version or an earlier one. noted: what it has. Raises ModelError."""
    return noted == fingerprint(directory) or noted == fingerprint(directory, samples_weights=False)


def sample_bytes(path: Path, count: int, size: int) -> Iterator[bytes]:
    """What tells a large file from others: name and length, and pieces spread over it. Raises ModelError."""
    length = check_regular(path)
    yield f"{path.name} {length}".encode()
    try:
        with path.open("rb") as file:
            for number in range(count):
                file.seek(number * max(0, length - size) // (count - 1))
                yield file.read(size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _sample_weights(path: Path) -> Iterator[bytes]:
    """From the middle of each weight: what was trained on may differ in a few of them alone, which pieces spread over the file miss. Raises
    ModelError."""
    open_weights(path, "np")
    header, first = _read_header(path)
    weights = sorted((*entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    try:
        with path.open("rb") as file:
            for begin, end, name in weights:
                yield f"{name} {header[name]['dtype']} {header[name]['shape']}".encode()
                file.seek(first + begin + max(0, end - begin - SAMPLE_BYTES) // 2)
                yield file.read(min(SAMPLE_BYTES, end - begin))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def open_weights(path: Path, framework: Literal["pt", "np"]) -> Any:
    """A safetensors file, open for reading. Raises ModelError."""
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        path.open("rb").close()  # safetensors calls a file that may not be read one that is not there
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read (truncated download?): {error}") from None


def has_same_weights(path: Path, name: str, other_path: Path, other: str) -> bool:
    """Whether two weights of safetensors files hold the same numbers in the same form, by samples of them."""
    places = [_find_weight(path, name), _find_weight(other_path, other)]
    (kind, shape, begin, end), (other_kind, other_shape, other_begin, _) = places
    if (kind, shape) != (other_kind, other_shape):
        return False
    step = max(SAMPLE_BYTES, (end - begin) // SAMPLES)
    with path.open("rb") as file, other_path.open("rb") as other_file:
        for place in range(0, end - begin, step):
            size = min(SAMPLE_BYTES, end - begin - place)
            file.seek(begin + place)
            other_file.seek(other_begin + place)
            if file.read(size) != other_file.read(size):
                return False
    return True


def find_nonzero(path: Path, names: Iterable[str]) -> list[str]:
    """Those of a safetensors file's weights whose numbers are not all zero."""
    header, first = _read_header(path)
    found = []
    with path.open("rb") as file:
        for name in names:
            begin, end = header[name]["data_offsets"]
            file.seek(first + begin)
            if any(file.read(end - begin)):
                found.append(name)
    return found


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Of a file that opened as safetensors: what it says of its weights, and where their numbers begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def _find_weight(path: Path, name: str) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first and last byte."""
    header, first = _read_header(path)
    entry = header[name]
    begin, end = entry["data_offsets"]
    return entry["dtype"], tuple(entry["shape"]), first + begin, first + end


def find_pickled(directory: Path) -> Path | None:
    """The archive of tensors of a drafter's folder that has no safetensors."""
    if (directory / INDEX_FILE).exists() or any(directory.glob("*.safetensors")):
        return None
    return next((path for name in PICKLED_FILES if (path := directory / name).exists()), None)


def list_pickled(path: Path) -> frozenset[str]:
    """The words in an archive of tensors, the names of all tensors among them: read, not run. None of what is no such archive, or of torch's older
    form."""
    try:
        with zipfile.ZipFile(path) as archive:
            entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl") and entry.file_size <= MAX_JSON_BYTES)
            return frozenset(argument for _, argument, _ in pickletools.genops(archive.read(entry)) if isinstance(argument, str))
    except Exception:  # whatever damaged and foreign files raise: loading them says it
        return frozenset()


def find_gguf(path: Path) -> Path | None:
    """A GGUF file itself, or the one of a folder that holds no other model, its first part where it is split; None: a folder has none.

    Raises ModelError for a folder of several.
    """
    if not path.is_dir():
        return path
    if is_named(path / "config.json"):
        return None
    by_model: dict[str, Path] = {}
    for file in sorted(path.glob(f"*{GGUF_SUFFIX}")):
        by_model.setdefault(GGUF_PART.sub(r"-of-\2", file.name), file)
    if len(by_model) > 1:
        named = ", ".join(file.name for file in list(by_model.values())[:5])
        raise ModelError(f"{path} has several GGUF files ({named}{', ...' if len(by_model) > 5 else ''}): name one of them")
    return next(iter(by_model.values()), None)


def find_gguf_parts(path: Path) -> list[Path]:
    """All files of a split GGUF file, any of which is named, be it by a link; else the file alone. Raises ModelError for those that are not there."""
    check_regular(path)
    # The hub's cache has links by the parts' names to files that are named otherwise; somebody's own link may be called as they like.
    for own in (path, path.resolve()):
        if found := GGUF_PART.search(own.name):
            break
    else:
        return [path]
    number, count = map(int, found.groups())
    if not 1 <= number <= count:
        raise ModelError(f"{own}: a part of {count} is numbered from 1 to {count}, not {number}")
    parts = [own.with_name(f"{own.name[: found.start()]}-{i:05}-of-{count:05}{GGUF_SUFFIX}") for i in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ModelError(f"{own} is one of {count} parts; missing beside it: {', '.join(missing[:5])}{more}")
    for part in parts:
        check_regular(part)
    return parts


def name_others(directory: Path) -> str:
    """The end of a message that a folder has no weights: what it has instead, and what to do."""
    found = sorted(path.name for path in directory.iterdir() if path.suffix in OTHER_WEIGHTS)
    if not found:
        own = min((path.name for path in directory.glob(f"*{GGUF_SUFFIX}")), default="")
        return f"; to serve {own}, which is a GGUF file, name that" if own else ""
    if found[0].endswith(".safetensors"):
        return f"; of {len(found)} files such as {found[0]} the index is missing"
    return f"; {found[0]} is a pickle, which is not read as a model: save it anew as safetensors, with transformers' save_pretrained"


def explain_missing(missing: Sequence[str], names: Collection[str]) -> str:
    """The end of a message that weights are missing: what has been put around the model, or taken away, where that is all. names: of the folder's."""
    if any(ADAPTER.search(name) for name in names):
        return f"; the weights are those of an adapter (LoRA): {MERGED}"
    before = next((name.removesuffix(missing[0]) for name in names if name.endswith(f".{missing[0]}")), "")
    if before and all(f"{before}{name}" in names for name in missing):
        return f"; all are there with {before!r} before their names, by what it was wrapped in: save the model inside"
    after = missing[0].partition(".")[2]
    if after in names and all(name.partition(".")[2] in names for name in missing):
        first = missing[0].removesuffix(after)
        return f"; all are there without {first!r} before their names: save the whole model"
    return ""


def name_tokenizers(directory: Path) -> str:
    """The end of a message that a folder has no tokenizer.json: what it has instead."""
    found = next((name for name in OTHER_TOKENIZERS if is_named(directory / name)), None)
    return f"; {found} is not read: take the tokenizer.json of a model of the same vocabulary" if found else ""


def find_weights(directory: Path) -> dict[str, Path]:
    """The file of every weight, by name, as the folder's index has it, or its only file's. Raises ModelError."""
    index, single = directory / INDEX_FILE, directory / WEIGHTS_FILE
    if is_named(index):
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict):
            raise ModelError(f"{index} has no weight_map")
        for name, file in files.items():
            if not isinstance(file, str) or not file or Path(file).name != file:
                raise ModelError(f"{index}: weight {name} is in {file!r:.80}, which is no file of this folder")
        # Of one file written over shards, transformers takes these away and leaves their index.
        is_left = bool(files) and is_named(single) and all(SHARD.fullmatch(file) and not is_named(directory / file) for file in set(files.values()))
        if not is_left:
            return {name: directory / file for name, file in files.items()}
    if not is_named(single) and len(named := list(directory.glob("*.safetensors"))) == 1:
        single = named[0]  # as AutoGPTQ called it: by bits and groups
    if not is_named(single):
        raise ModelError(f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{name_others(directory)}")
    with open_weights(single, "np") as file:
        return dict.fromkeys(file.keys(), single)
