"""`foretoken quantize` and `foretoken convert`: model folders of others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from backend.config import DTYPES
from backend.errors import ConfigError, ModelError


def add_quantize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="folder of the model or drafter, not quantized yet")
    parser.add_argument("out", metavar="OUT", help="new folder")
    parser.add_argument("--quantization", metavar="TYPE", required=True, help="wint8, wint4, fp8, block_wise_fp8, or JSON of parts")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.gguf", help="the model's file; of a split one any part, the others beside it")
    parser.add_argument("out", metavar="OUT", help="new folder")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default auto: as in the file, in 16 bits what has fewer)")


def quantize(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    from backend.models.writing import write_quantized
    from deploy.options import read_types

    return _write("quantize", args.out, lambda: write_quantized(Path(args.model), Path(args.out), read_types(args.quantization)))


def convert(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    from backend.models.gguf_folder import write_folder

    return _write("convert", args.out, lambda: write_folder(Path(args.file).expanduser(), Path(args.out).expanduser(), args.dtype))


def _write(name: str, out: str, write: Callable[[], None]) -> int:
    try:
        write()
    except (ConfigError, ModelError) as error:
        print(f"foretoken {name}: {error}", file=sys.stderr)
        return 2
    print(f"written to {out}")
    return 0
