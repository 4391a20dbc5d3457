"""The file of `--config`: the keys of `foretoken serve`, in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from backend.errors import ConfigError


def read_yaml(path: str) -> dict[str, Any]:
    """A configuration file. Raises ConfigError."""
    try:
        values = yaml.load(Path(path).read_text("utf-8"), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must hold keys and values, got {type(values).__name__}")
    return {str(k).replace("-", "_"): v for k, v in values.items()}


class _StrictLoader(yaml.SafeLoader):
    """YAML in which no key is given twice, by either spelling: the first would be lost without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:merge" and lines.setdefault(name, line) != line:
                raise yaml.constructor.ConstructorError(problem=f"{name} is given twice, in lines {lines[name]} and {line}")
        return super().construct_mapping(node, deep)
