"""`foretoken inspect`, `foretoken quantize`, `foretoken convert` and `foretoken token-map`: model folders of others."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from backend.config import DTYPES, MAX_RANKS
from backend.errors import ConfigError, ModelError
from backend.model_files import GGUF_SUFFIX, expand_user, find_gguf
from backend.quantization_config import normalize_cache_dtype
from backend.section import require
from deploy.endings import raised_signals

MAX_SEQUENCES = 2**20
"""Whose memory `inspect` sums up."""


def add_quantize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="folder of the model or drafter, not quantized yet")
    parser.add_argument("out", metavar="OUT", help="new folder")
    parser.add_argument("--quantization", metavar="TYPE", required=True, help="wint8, wint4, fp8, block_wise_fp8, or JSON of parts")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.gguf", help="the model's file; of a split one any part; or a folder that has no other")
    parser.add_argument("out", metavar="OUT", help="new folder")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default auto: as in the file, in 16 bits what has fewer)")


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a model or drafter, GGUF file, or name on the hub (its weights are not downloaded)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of each sequence (default: the model's context, 8192 at most)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default 1)")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help="ranks (default 1)")
    parser.add_argument("--dtype", choices=DTYPES[1:], help="of weights, and of keys and values (default: the checkpoint's)")
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE", help="of keys and values: model, fp8, or auto: as the checkpoint says")
    parser.add_argument("--target", metavar="MODEL", help="a model's folder: whether the first is a drafter for it, and of which method")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_token_map_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="folder of the model that is served, the drafter's target")
    files = 'text files, folders of them, *.jsonl ("text" or "messages"), *.u16, *.u32'
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="PATH", help=files)
    parser.add_argument("--size", type=int, required=True, metavar="N", help="tokens to choose: a quarter of the vocabulary, say")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="new file: a list of ids in JSON")


def inspect(args: argparse.Namespace) -> int:
    """Returns the exit status: 0 for what can be served."""
    from backend.model_sources import Source, find_model
    from backend.models.inspection import Load, inspect

    try:
        for key, most in (("batch", MAX_SEQUENCES), ("tensor_parallel_size", MAX_RANKS)):
            require(1 <= (value := getattr(args, key)) <= most, key, value, f"from 1 to {most}")
        require(args.max_model_len is None or args.max_model_len >= 1, "max_model_len", args.max_model_len, "1 or more")  # the model has a limit
        path = expand_user(args.model)
        is_here = os.path.exists(path)
        path = (find_gguf(path) if os.path.isdir(path) else None) or path
        if args.target or not (os.path.isfile(path) and path.suffix == GGUF_SUFFIX):
            path = find_model(args.model, Source(has_weights=False))
        target = find_model(args.target) if args.target else None
        cache = normalize_cache_dtype("kv_cache_dtype", args.kv_cache_dtype)
        load = Load(args.max_model_len, args.batch, args.tensor_parallel_size, args.dtype, cache)
        found = inspect(path, load, target, has_weights=is_here)
    except (ConfigError, ModelError) as error:
        print(f"foretoken inspect: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found))
        return 0
    for heading, text in found.items():
        print(f"{heading:13} {text}")
    return 0


def quantize(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    from backend.models.writing import write_quantized
    from deploy.options import read_types

    return _write("quantize", args.out, lambda: write_quantized(Path(args.model), Path(args.out), read_types(args.quantization)))


def convert(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    from backend.models.gguf_folder import write_folder

    def write() -> None:
        file = find_gguf(path := expand_user(args.file))
        if file is None:
            raise ModelError(f"{path} is no GGUF file, nor a folder with one alone")
        write_folder(file, expand_user(args.out), args.dtype)

    return _write("convert", args.out, write)


def write_token_map(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    import numpy as np

    from backend.model_checks import check_model
    from training.data import Reader, choose_draft_ids

    try:
        spec = check_model(args.model)
        if not 1 <= args.size <= spec.vocab_size:
            raise ConfigError(f"--size must be from 1 to {spec.vocab_size}, the model's vocabulary, got {args.size}")
        if args.out.exists():
            raise ConfigError(f"--out {args.out} exists already: name another file")
        documents = Reader(Path(args.model)).read(args.data, "--data")
        always = [token_id for token_id in spec.eos_token_ids if token_id < spec.vocab_size]  # texts have few of them, and each answer one
        chosen = choose_draft_ids(documents, spec.vocab_size, args.size, always)
        try:
            args.out.write_text(json.dumps(chosen.tolist()) + "\n")
        except OSError as error:
            args.out.unlink(missing_ok=True)
            raise ConfigError(f"--out {args.out}: {error.strerror}") from None
    except (ValueError, OSError) as error:  # among them ConfigError and ModelError
        print(f"foretoken token-map: {error}", file=sys.stderr)
        return 2
    count, found = sum(map(len, documents)), sum(int(np.isin(ids, chosen).sum()) for ids in documents)
    print(f"{args.out}: {len(chosen)} of {spec.vocab_size} tokens, {found / max(1, count):.2%} of the {count} in the texts")
    return 0


def _write(name: str, out: str, write: Callable[[], None]) -> int:
    try:
        with raised_signals():  # half a folder is no model
            write()
    except (ConfigError, ModelError, OSError) as error:  # a disk that is full or may not be written names its file
        print(f"foretoken {name}: {error}", file=sys.stderr)
        return 2
    print(f"written to {out}")
    return 0
