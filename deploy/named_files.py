"""Files, and origins, that options of `foretoken serve` name and that are read when parts of it run already: looked at before anything is started."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from backend.disaggregation_config import DisaggregationConfig, read_password
from backend.errors import ConfigError, ModelError
from backend.model_files import check_regular, settle_path
from backend.model_sources import MOVED, check_ascii
from backend.token_map import KEY, PICKLED, read_token_map
from deploy.options import ServeConfig

_PLAIN = re.compile(r"[A-Za-z0-9+/._~=-]{8,}")


def check_own_files(config: ServeConfig) -> None:
    """Of the launcher's own options. Raises ConfigError naming the option and the value."""
    from client.gateway.keys import check_origin, read_keys

    for flag, path in (("--api-keys", config.api_keys), ("--admin-keys", config.admin_keys)):
        try:
            if path is not None and not Path(path).is_fifo():  # which has its keys for one reader
                read_keys(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{flag} {path}: {_explain(error)}") from None
    for origin in config.cors_origins:
        try:
            check_origin(origin)
        except ValueError as error:
            raise ConfigError(f"cors_origins {error}") from None
    if config.triton_header_file is not None:
        read_own_header(config.triton_header_file)
    if config.grpc_server_cert is not None and config.grpc_server_key is not None:
        check_certificates(config.grpc_server_cert, config.grpc_server_key, config.grpc_root_cert)
    if config.backend_directory is not None and not Path(config.backend_directory).is_dir():
        raise ConfigError(f"--backend-directory {config.backend_directory}: there is no such folder")


def read_own_header(path: str) -> tuple[str, str]:
    """Name and value of what restricted interfaces want. Raises ConfigError, which does not say the value."""
    from client.headers import read_header_file

    try:
        found = [*read_header_file(path).items()]
    except ValueError as error:
        raise ConfigError(f"triton_header_file {error}") from None
    if len(found) > 1:
        raise ConfigError(f"triton_header_file {path} has {len(found)} headers; Triton wants one")
    name, value = found[0]
    if not _PLAIN.fullmatch(value):
        rule = "8 or more of letters, digits and +/._~=-, which Triton's options take"
        raise ConfigError(f"triton_header_file {path}: the value of {name} must be {rule}")
    return name, value


def check_certificates(certificate: str, key: str, roots: str | None) -> None:
    """Of Triton's gRPC port. Raises ConfigError: Triton starts with what is none, and then no client can connect."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for option, path in (("grpc_server_cert", certificate), ("grpc_server_key", key), ("grpc_root_cert", roots)):
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{option} {path} cannot be read: {_explain(error)}") from None
    try:
        context.load_cert_chain(certificate, key, password="")  # else OpenSSL asks on the terminal
    except ssl.SSLError:
        message = f"is not the certificate of grpc_server_key {key}, or one of them is not in PEM, or the key has a password"
        raise ConfigError(f"grpc_server_cert {certificate} {message}") from None
    if roots is not None:
        try:
            context.load_verify_locations(roots)
        except ssl.SSLError:
            raise ConfigError(f"grpc_root_cert {roots} holds no certificate in PEM") from None


def check_password(config: DisaggregationConfig) -> None:
    """Of the Redis server. Raises ConfigError, ModelError."""
    if config.is_on and config.scheduler_password_file:
        check_ascii("scheduler_password_file", Path(config.scheduler_password_file), MOVED)
    if config.is_on and not (config.scheduler_password_file and Path(config.scheduler_password_file).is_fifo()):
        read_password(config)


def find_corpus(paths: tuple[str, ...]) -> list[str]:
    """The files of `suffix_decoding_corpus`, by absolute paths. Raises ModelError."""
    return [str(_find("speculative_config.suffix_decoding_corpus", path)) for path in paths]


def find_token_map(path: str, vocab_size: int) -> str:
    """The file of `draft_token_map`, by its absolute path. Raises ConfigError, ModelError."""
    found = _find(KEY, path)
    if found.suffix.lower() not in PICKLED:  # which take torch to read
        read_token_map(found, vocab_size)
    return str(found)


def _find(key: str, path: str) -> Path:
    """A file that a key names, by its absolute path. Raises ModelError."""
    found = settle_path(Path(path))
    try:
        check_ascii("file", found, MOVED)
        check_regular(found)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from None
    return found


def _explain(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
