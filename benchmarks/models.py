"""What a measurement is asked to take: models, texts, GPUs. What is not there ends it in one line, before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from backend.errors import ConfigError, ModelError
from backend.model_checks import check_model
from backend.model_sources import find_model
from kernels._load import check_device
from kernels.toolchain import KernelError


def model_folder(name: str) -> Path:
    """Of an option's value, as `serve` takes models. Raises argparse's error for one that cannot be loaded: nothing is measured then."""
    try:
        folder = find_model(name)
        check_model(folder)
    except (ConfigError, ModelError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return folder


def text_of(name: str) -> str:
    """What is in the file that an option names. Raises argparse's error for one that cannot be read, or is no UTF-8."""
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{name}: {getattr(error, 'strerror', None) or error}") from None


def check_gpus(parser: argparse.ArgumentParser, count: int = 1) -> None:
    """Ends the process with the parser's error where there are fewer GPUs than a measurement wants, or kernels cannot run on the first: on others
    this process is to have no context."""
    if (found := torch.cuda.device_count()) < count:
        parser.error(f"{count} GPU{'s' * (count > 1)} needed, and torch {torch.__version__} sees {found}")
    try:
        check_device(torch.device("cuda", 0))
    except KernelError as error:
        parser.error(str(error))
