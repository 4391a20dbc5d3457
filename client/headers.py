"""Headers for Triton: the key of a server whose interfaces are restricted (`--grpc-restricted-protocol`, `--http-restricted-api`), or a proxy's."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

VARIABLE = "FORETOKEN_TRITON_HEADERS"
"""Of the environment, whose lines are as a file's."""
GRPC_PREFIX = "triton-grpc-protocol-"
"""Before what `--grpc-restricted-protocol=APIS:NAME=VALUE` calls NAME, as gRPC's metadata has it; over HTTP it is NAME."""
_NAME = re.compile(r"[a-z0-9_.-]+")
_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")
_RESERVED = ("grpc-", "content-", "te", "host", "connection", "transfer-encoding", "user-agent", "inference-header-content-length")
"""What the protocols write themselves: names, or how they begin."""

Headers = Mapping[str, str]
"""By their names, in small letters."""
NO_HEADERS: Headers = MappingProxyType({})


def check_headers(headers: Mapping[str, str]) -> Headers:
    """By their names in small letters, as gRPC wants them. Raises ValueError that names the header, without its value: a secret."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        own = name.strip().lower()
        if not _NAME.fullmatch(own) or own.endswith("-bin") or any(own == word or (word[-1] == "-" and own.startswith(word)) for word in _RESERVED):
            raise ValueError(f"a header of Triton's cannot be called {name!r:.80}: letters, digits and _.- alone, and no name that is the protocol's")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise ValueError(f"the value of Triton's header {name!r:.80} must be characters of ASCII, with no white space around them")
        if found.setdefault(own, value) != value:
            raise ValueError(f"Triton's header {own!r} is given twice, with two values")
    return found


def parse_headers(lines: Iterable[str], source: str) -> Headers:
    """NAME=VALUE, one a line; blank lines and those that begin with # do not count. source: of the lines, for errors. Raises ValueError."""
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, mark, value = line.partition("=")
        try:
            if not mark:
                raise ValueError("must be NAME=VALUE, and has no =")
            own = check_headers({name: value.strip()})
            if any(found.get(key, known) != known for key, known in own.items()):
                raise ValueError(f"Triton's header {name.strip()!r:.80} is given twice, with two values")
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
        found |= own
    return found


def read_header_file(path: str) -> Headers:
    """Raises ValueError that names the file: one that cannot be read, or holds no header."""
    try:
        found = parse_headers(Path(path).read_text("utf-8").splitlines(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not found:
        raise ValueError(f"{path} has no header: NAME=VALUE, one a line")
    return found


def add_header_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--triton-header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="send it to Triton with every request, such as the key of restricted interfaces; others on this machine can read it",
    )
    parser.add_argument(
        "--triton-header-file", metavar="FILE", help=f"the same, of a file with one a line (or of the variable {VARIABLE}): for secrets"
    )


def read_headers(args: argparse.Namespace) -> Headers:
    """What those options and the variable ask for: an option goes before the file, and that before the variable. Raises ValueError."""
    found = dict(parse_headers(os.environ.get(VARIABLE, "").splitlines(), VARIABLE))
    if args.triton_header_file is not None:
        found |= read_header_file(args.triton_header_file)
    return {**found, **parse_headers(args.triton_header, "--triton-header")}


class AddHeaders:
    """A plug-in of tritonclient's gRPC clients: headers of every request, by the name under which Triton looks for a restricted interface's key, and
    by their own, under which a proxy does."""

    def __init__(self, headers: Headers) -> None:
        """Raises ValueError."""
        own = check_headers(headers)
        self._metadata = {**own, **{f"{GRPC_PREFIX}{name}": value for name, value in own.items() if not name.startswith(GRPC_PREFIX)}}

    def __call__(self, request: Any) -> None:
        """request: tritonclient's, with `headers`."""
        request.headers = {**(request.headers or {}), **self._metadata}
