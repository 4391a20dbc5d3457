"""Who is let in: files of keys, and origins of web pages. Imports nothing of the gateway: who starts one looks at them first."""

from __future__ import annotations

import re
from pathlib import Path

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\s]+")


def read_keys(path: str) -> list[str]:
    """One key a line; blank lines and those that begin with # do not count. Raises ValueError, OSError."""
    keys = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ValueError(f"{path} has no key: with it, nobody would be let in")
    return keys


def check_origin(text: str) -> str:
    """As browsers send it: with anything else, pages of it would not be let in. Raises ValueError."""
    if not _ORIGIN.fullmatch(text):
        raise ValueError(f"must be SCHEME://HOST or SCHEME://HOST:PORT with nothing behind it, or *, got {text!r:.100}")
    return text
