"""TLS to servers: whose certificates are trusted, and a client's own."""

from __future__ import annotations

import argparse
import dataclasses
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.loopback import SECURE_GRPC, SECURE_HTTP, without_proxy


@dataclass(frozen=True)
class Tls:
    """How grpcs:// and https:// addresses are spoken to. Files are in PEM, by the names that tritonclient gives them.

    Raises ValueError, naming the file that cannot be used.
    """

    root_certificates: str | None = None
    """Of the authorities that a server's certificate must come from; None: those that gRPC brings, over HTTP this machine's."""
    private_key: str | None = None
    certificate_chain: str | None = None
    """The client's own, with private_key, for servers that ask for one (mutual TLS)."""
    server_name: str | None = None
    """What the server's certificate must be of; None: the address's host."""
    insecure: bool = False
    """Over HTTP: any certificate is taken, whoever it is of. gRPC has no such way."""

    def __post_init__(self) -> None:
        if (self.private_key is None) != (self.certificate_chain is None):
            given, missing = ("private_key", "certificate_chain") if self.certificate_chain is None else ("certificate_chain", "private_key")
            raise ValueError(f"{given} {getattr(self, given)}: {missing} is missing, which belongs to it")
        if self.insecure and self.root_certificates is not None:
            raise ValueError(f"root_certificates {self.root_certificates}: insecure takes any certificate: give one of the two")
        if self.root_certificates is not None or self.certificate_chain is not None:
            self.context()  # gRPC says of a file that is none that the connection failed

    def context(self) -> ssl.SSLContext:
        """Of a connection over HTTP."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a server's own certificate may be trusted alone, as gRPC does
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif self.root_certificates is None:
            context.load_default_certs()
        for name in ("root_certificates", "certificate_chain", "private_key"):
            try:
                _read(path := getattr(self, name))
            except OSError as error:
                raise ValueError(f"{name} {path} cannot be read: {error.strerror}") from None
        try:
            if self.root_certificates is not None:
                context.load_verify_locations(self.root_certificates)
        except ssl.SSLError:
            raise ValueError(f"root_certificates {self.root_certificates} holds no certificate in PEM") from None
        try:
            if self.certificate_chain is not None:
                context.load_cert_chain(self.certificate_chain, self.private_key, password="")  # else OpenSSL asks on the terminal
        except ssl.SSLError:
            said = f"is not the certificate of private_key {self.private_key}, or one of them is not in PEM, or the key has a password"
            raise ValueError(f"certificate_chain {self.certificate_chain} {said}") from None
        return context

    def at(self, address: str) -> Tls:
        """What of it is for one of several addresses: nothing, where that is not spoken to by TLS."""
        return self if address.startswith((SECURE_GRPC, SECURE_HTTP)) else DEFAULT_TLS

    def context_of(self, url: str) -> ssl.SSLContext | None:
        """None: it is not spoken to by TLS."""
        return self.context() if url.startswith(SECURE_HTTP) else None

    @property
    def given(self) -> list[str]:
        """The names of what is not as it is by default."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]

    def check_use(self, addresses: Iterable[str]) -> None:
        """Raises ValueError when something is given and none of the addresses is spoken to by TLS, or by one that cannot do what is asked."""
        named = list(addresses)
        if self.given and not any(address.startswith((SECURE_GRPC, SECURE_HTTP)) for address in named):
            raise ValueError(f"{self.given[0]} has no effect on {', '.join(named)}: write {SECURE_GRPC}HOST:PORT, or {SECURE_HTTP} for HTTP")
        if self.insecure and (found := [address for address in named if address.startswith(SECURE_GRPC)]):
            raise ValueError(f"insecure: over gRPC certificates are always looked at ({found[0]}): trust the server's own by root_certificates")

    def channel_arguments(self, address: str, options: list[tuple[str, Any]]) -> dict[str, Any]:
        """What tritonclient's gRPC clients are made with, for HOST:PORT or grpcs://HOST:PORT. Raises ValueError."""
        if address.startswith(SECURE_HTTP):
            raise ValueError(f"{address} is of HTTP: gRPC by TLS is {SECURE_GRPC}HOST:PORT")
        self.check_use([address])
        options = without_proxy(options, address)
        if not address.startswith(SECURE_GRPC):
            return {"url": address, "channel_args": options}
        import grpc

        root, key, chain = (_read(path) for path in (self.root_certificates, self.private_key, self.certificate_chain))
        if self.server_name is not None:
            options = [*options, ("grpc.ssl_target_name_override", self.server_name)]
        credentials = grpc.ssl_channel_credentials(root, key, chain)
        return {"url": address.removeprefix(SECURE_GRPC), "creds": credentials, "channel_args": options}


DEFAULT_TLS = Tls()


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def add_tls_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup, has_http: bool = False) -> None:
    """has_http: the command speaks HTTP to servers, too."""
    schemes = f"{SECURE_GRPC} and {SECURE_HTTP} addresses" if has_http else f"{SECURE_GRPC} addresses"
    parser.add_argument("--root-certificates", metavar="FILE", help=f"of {schemes}: whose certificates to trust, in PEM (default: public ones)")
    parser.add_argument("--certificate-chain", metavar="FILE", help="this client's own, for servers that ask for one (mutual TLS)")
    parser.add_argument("--private-key", metavar="FILE", help="of --certificate-chain")
    if has_http:
        parser.add_argument("--insecure", action="store_true", help=f"take any certificate of {SECURE_HTTP} addresses")


def read_tls(args: argparse.Namespace) -> Tls:
    """What those options ask for. Raises ValueError."""
    return Tls(args.root_certificates, args.private_key, args.certificate_chain, insecure=getattr(args, "insecure", False))
