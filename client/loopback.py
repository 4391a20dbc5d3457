"""Servers' addresses, and the way to one on this machine, which no proxy of the environment (`http_proxy`) is to stand in."""

from __future__ import annotations

import ipaddress
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

SECURE_GRPC, SECURE_HTTP = "grpcs://", "https://"
"""How addresses begin that are spoken to by TLS."""


def check_address(text: str) -> str:
    """HOST:PORT of a gRPC server, or grpcs://HOST:PORT, as it is. Raises ValueError: gRPC itself takes port 443 where there is none, and says so to
    nobody."""
    address = text.removeprefix(SECURE_GRPC)
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")  # as whoever looks for its addresses does
    except UnicodeError:
        host = ""
    if not host or "/" in address or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r:.100} is no HOST:PORT, nor {SECURE_GRPC}HOST:PORT")
    return text


def is_loopback(address: str) -> bool:
    """Of "host:port" or a URL: whether it is this machine's own."""
    host = urllib.parse.urlsplit(address if "//" in address else f"//{address}").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def without_proxy(options: list[tuple[str, Any]], address: str) -> list[tuple[str, Any]]:
    """A gRPC channel's options for that address: gRPC takes the way of `http_proxy` to loopback addresses too."""
    return [*options, ("grpc.enable_http_proxy", 0)] if is_loopback(address) else options


def open_url(url: str, timeout: float, context: ssl.SSLContext | None = None, headers: Mapping[str, str] | None = None) -> Any:
    """`urllib.request.urlopen`, without a proxy where the URL is this machine's. context: of https:// ones."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    handlers += [urllib.request.ProxyHandler({})] if is_loopback(url) else []
    return urllib.request.build_opener(*handlers).open(urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout)
