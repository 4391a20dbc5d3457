"""Models that a measurement is asked to take."""

from __future__ import annotations

import argparse
from pathlib import Path

from backend.errors import ConfigError, ModelError
from backend.model_checks import check_model
from backend.model_sources import find_model


def model_folder(name: str) -> Path:
    """Of an option's value, as `serve` takes models. Raises argparse's error for one that cannot be loaded: nothing is measured then."""
    try:
        folder = find_model(name)
        check_model(folder)
    except (ConfigError, ModelError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return folder
