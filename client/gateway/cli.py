"""`foretoken gateway`."""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import socket
import sys
import urllib.parse

from client.gateway.keys import check_origin, read_keys
from client.gateway.log import log_to
from client.headers import add_header_arguments, read_headers
from client.messages import DEFAULT_GRPC_URL
from client.tls import add_tls_arguments, read_tls

DEFAULT_PORT = 8080
DRAIN_SECONDS = 30
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 620
"""Longer than clients and proxies keep an idle connection (nginx 60, Traefik 90, Caddy 120, Google's load balancers 600): whoever closes first loses
no request to the race. Those that are gone without a word end by SILENCE_SECONDS."""
FEW_FILES = 1024
"""A hard limit of open files below which it is said what it means."""
SILENCE_SECONDS = 42
"""Without a sign of life of a client's system, or room there, after which its connection ends: longer than a stream waits for its reader."""


def _origin(text: str) -> str:
    try:
        return check_origin(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _url(text: str) -> str:
    try:
        parts = urllib.parse.urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_url = False
    if not is_url:
        raise argparse.ArgumentTypeError(f"must be a URL such as http://127.0.0.1:8002/metrics, got {text!r:.100}")
    return text


def _name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"a model's name has characters, got {text!r:.100}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"a model's name must be UTF-8, which answers are written in, got {text!r:.100}") from None
    return text


def _bytes(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r:.100}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--upstream",
        "--url",
        dest="url",
        default=DEFAULT_GRPC_URL,
        metavar="HOST:PORT,...",
        help=f"the server's gRPC address (default {DEFAULT_GRPC_URL}); several, or a name that has several addresses, share the requests; "
        "grpcs://HOST:PORT: by TLS",
    )
    add_tls_arguments(parser, has_http=True)
    add_header_arguments(parser)
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1, and with --api-keys all: 0.0.0.0)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}")
    parser.add_argument(
        "--served-model-name", nargs="+", type=_name, default=["foretoken"], metavar="NAME", help="what clients call the model (default foretoken)"
    )
    parser.add_argument(
        "--metrics-url", type=_url, action="append", default=[], metavar="URL", help="of the server's metrics, which /metrics then has too"
    )
    parser.add_argument("--api-keys", metavar="FILE", help="let in only who sends one of the keys in FILE: one a line, # begins a comment")
    parser.add_argument("--admin-keys", metavar="FILE", help="keys of those who may change the server, as --api-keys has them (default: nobody may)")
    parser.add_argument(
        "--cors-origin", type=_origin, action="append", default=[], metavar="ORIGIN", help="web pages of ORIGIN may call (default: none)"
    )
    parser.add_argument("--vllm-metrics", action="store_true", help="/metrics has the server's once more by vLLM's names; needs --metrics-url")
    parser.add_argument("--max-body-bytes", type=_bytes, default=4 * 2**20, metavar="N", help="larger requests are refused (default 4 MiB)")


def listen_on(host: str | None, has_keys: bool) -> str:
    """The address: this machine alone, unless it was said who is let in, or where to listen."""
    return host or ("0.0.0.0" if has_keys else "127.0.0.1")


def listen(host: str, port: int, silence: int = SILENCE_SECONDS) -> socket.socket:
    """Its connections, which have these options from it, end when the other side has shown no sign of life for so many seconds, or has taken nothing
    of what is sent: of one that vanishes without a word (a machine that sleeps, a network that is cut) TCP by itself tells after a quarter of an
    hour, or never. Raises OSError, OverflowError, TypeError for an address, or a port, that can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_any = host == "::" and socket.has_dualstack_ipv6()  # IPv4's too, as everywhere else
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_any)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, silence // 6)
    for option, value in (
        (socket.TCP_KEEPIDLE, 3 * pause),
        (socket.TCP_KEEPINTVL, pause),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 1000 * silence),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
    return listener


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; then running requests may finish. Returns the exit status."""
    try:
        import uvicorn

        from client.gateway.app import Settings, create_app
        from client.gateway.fleet import split_addresses
        from client.gateway.protocol import LimitedHeadProtocol
    except ModuleNotFoundError as error:
        print(f"foretoken gateway: {error.name} is not installed: pip install 'foretoken-triton[gateway]'", file=sys.stderr)
        return 2
    found: dict[str, tuple[str, ...]] = {}
    for flag, path in (("--api-keys", args.api_keys), ("--admin-keys", args.admin_keys)):
        try:
            found[flag] = tuple(read_keys(path)) if path else ()
        except (OSError, ValueError) as error:
            print(f"foretoken gateway: {flag} {path}: {error}", file=sys.stderr)
            return 2
    keys, admin_keys = found["--api-keys"], found["--admin-keys"]
    if args.vllm_metrics and not args.metrics_url:
        print("foretoken gateway: --vllm-metrics has nothing to rename: name the server's metrics with --metrics-url", file=sys.stderr)
        return 2
    try:
        addresses = split_addresses(args.url)
    except ValueError as error:
        print(f"foretoken gateway: --upstream {args.url}: {error}", file=sys.stderr)
        return 2
    try:
        tls = read_tls(args)
        tls.check_use([*addresses, *args.metrics_url])
        headers = read_headers(args)
    except ValueError as error:
        print(f"foretoken gateway: {error}", file=sys.stderr)
        return 2
    host = listen_on(args.host, bool(keys))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[log_to(sys.stderr)])
    # A connection is a file, and the usual soft limit is 1,024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    if 0 <= hard < FEW_FILES:
        said = "the limit of open files is %d (ulimit -Hn): connections beyond it are closed at once; idle ones stay for %d s"
        logging.getLogger("foretoken.gateway").warning(said, hard, KEEP_ALIVE_SECONDS)
    # uvicorn raises the signal again once it has ended in order: by default that would be a death by it, with a status that tells of a failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        # A terminal that closes asks as SIGTERM does; uvicorn does not hear of it, and streams would be cut.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    names = tuple(args.served_model_name)
    origins, metrics_urls = tuple(args.cors_origin), tuple(args.metrics_url)
    settings = Settings(args.url, "decode", names, keys, admin_keys, origins, args.max_body_bytes, metrics_urls, args.vllm_metrics, tls, headers)
    app = create_app(settings)
    try:  # before anything is served: who started the gateway must learn of it
        listener = listen(host, args.port)
    except (OSError, OverflowError, TypeError) as error:
        message = f"cannot listen on {host}, port {args.port}: {error}; choose another address with --host, --port"
        print(f"foretoken gateway: {message}", file=sys.stderr)
        return 1
    address = f"[{host}]" if listener.family == socket.AF_INET6 else host
    logging.getLogger("foretoken.gateway").info("OpenAI's interface and the page: http://%s:%d", address, listener.getsockname()[1])
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=LimitedHeadProtocol,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener])
    return 0 if server.started else 1
