"""Files of keys. Imports nothing of the gateway: who starts one looks at its files first."""

from __future__ import annotations

from pathlib import Path


def read_keys(path: str) -> list[str]:
    """One key a line; blank lines and those that begin with # do not count. Raises ValueError, OSError."""
    keys = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ValueError(f"{path} has no key: with it, nobody would be let in")
    return keys
