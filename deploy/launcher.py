"""`foretoken serve`: renders a model repository for a model and starts tritonserver on it."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend import model_checks
from backend.config import BUNDLED_MODEL, REPOSITORIES, REPOSITORY, EngineConfig, is_bundled
from backend.drafter_checks import settle_method
from backend.errors import ConfigError, ModelError
from backend.model_files import expand_user, read_config
from backend.model_sources import Source
from backend.other_servers.translation import Translation
from backend.sampling_defaults import read_sampling_defaults
from backend.section import closest
from deploy.bundled import DEFAULT_SPECULATION
from deploy.gpu import check_gpu
from deploy.named_files import check_own_files, check_password, read_own_header
from deploy.options import ANY_ADDRESS, SERVE_KEYS, ServeConfig, read_command, split_keys
from deploy.other_options import explain_environment
from deploy.rendering import check_repository, put_password, render_repository, write_key
from deploy.served_model import check_model, convert_apart, find_named_drafter, model_parameters
from deploy.server import (
    COMPLETE_OPTION,
    INPUT_LIMIT_OPTION,
    LaunchError,
    Server,
    check_file_limit,
    check_port_numbers,
    check_ports,
    check_server_path,
    check_shared_memory,
    find_server,
    free_ports,
    lock_folder,
    raise_file_limit,
    server_state,
    triton_addresses,
    writing,
)
from deploy.supervision.probe import KEY_HEADER, ServerApi
from deploy.supervision.processes import STOPPED_SECONDS, remove_regions
from deploy.supervision.status import serve_status
from deploy.supervision.supervisor import END_SECONDS, Supervisor
from deploy.together import FORETOKEN, run_together

RESTRICTED_APIS = "shared-memory,model-config,model-repository,statistics,trace,logging"
"""Of Triton's, over HTTP and gRPC: they want a key. Shared memory above all: who may register a region reads and writes other requests', and
the memory of the models' processes."""
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a server that listens on all addresses is asked; Triton's HTTP ports on :: take no IPv4."""
NOT_FOR_USERS = frozenset(
    (
        *("allow-http", "allow-grpc", "allow-metrics", "reuse-http-port", "reuse-grpc-port", "model-store", "load-model", "exit-on-error"),
        *("repository-poll-secs", "strict-model-config", "model-config-name", "backend-config", "http-restricted-api", "grpc-restricted-protocol"),
        *("grpc-use-ssl", "grpc-use-ssl-mutual", "grpc-server-cert", "grpc-server-key", "grpc-root-cert"),
    )
)
"""Of tritonserver's options: what the supervisor asks the server by, and what has keys here."""
SHARED_BYTES = 8 * 2**20
"""Of shared memory that each model's process begins with, and grows by: both processes map it anew each time. Release 24.10 begins with 1 MiB, which
a dozen long prompts fill."""

KEEPALIVE = {
    "grpc-keepalive-time": 60_000,
    "grpc-keepalive-timeout": 20_000,
    "grpc-keepalive-permit-without-calls": 1,
    "grpc-http2-max-pings-without-data": 0,
}
"""By which a gRPC client that says nothing is asked whether it is there; times in milliseconds. Without them a connection whose client vanished
without a word (a machine that sleeps, a network that is cut) stays for as long as the server lives, where nothing is under way on it."""


def server_command(
    server: Server, config: ServeConfig, repository: Path, key: str, header: tuple[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """tritonserver's command line and environment. key: what RESTRICTED_APIS ask for; header: name and value, the same of config.restricted_apis.

    Raises LaunchError for a host that is no address.
    """
    http_address, grpc_address = triton_addresses(config.host)
    command = [
        str(server.executable),
        f"--model-repository={repository}",
        f"--http-address={http_address}",
        f"--http-port={config.http_port}",
        f"--grpc-address={grpc_address}",
        f"--grpc-port={config.grpc_port}",
        f"--metrics-address={triton_addresses(config.metrics_host or config.host)[0]}",
        f"--metrics-port={config.metrics_port}",
        f"--log-verbose={config.log_verbose}",
        f"--exit-timeout-secs={END_SECONDS if config.supervise else config.drain_seconds}",
    ]
    if config.supervise or config.model_control_mode == "explicit":
        command += ["--model-control-mode=explicit", "--load-model=*"]
    command += [f"--{option}={RESTRICTED_APIS}:{KEY_HEADER}={key}" for option in ("http-restricted-api", "grpc-restricted-protocol")]
    if header is not None:
        apis = ",".join(config.restricted_apis)
        command += [f"--{option}={apis}:{header[0]}={header[1]}" for option in ("http-restricted-api", "grpc-restricted-protocol")]
    command += [f"--backend-config=python,shm-{what}-byte-size={SHARED_BYTES}" for what in ("default", "growth")]
    if config.grpc_server_cert is not None:
        command += ["--grpc-use-ssl=1", f"--grpc-server-cert={config.grpc_server_cert}", f"--grpc-server-key={config.grpc_server_key}"]
    if config.grpc_root_cert is not None:
        command += ["--grpc-use-ssl-mutual=1", f"--grpc-root-cert={config.grpc_root_cert}"]
    given = {option.removeprefix("--").partition("=")[0] for option in config.triton_options}
    command += [f"--{name}={value}" for name, value in KEEPALIVE.items() if name not in given]
    if COMPLETE_OPTION in server.options:
        command.append(f"--{COMPLETE_OPTION}")
    if INPUT_LIMIT_OPTION in server.options:
        command.append(f"--{INPUT_LIMIT_OPTION}={config.max_request_size}")
    if backends := config.backend_directory or server.backend_directory:
        command.append(f"--backend-directory={backends}")
    return [*command, *more_options(config.triton_options, server, command)], server.environment()


def more_options(options: Sequence[str], server: Server, command: Sequence[str]) -> list[str]:
    """tritonserver's own, after those of a command. Raises LaunchError for one that it does not know, or that is not the user's to give."""
    own = {word.partition("=")[0].removeprefix("--") for word in command[1:]}
    found = []
    for option in options:
        name, is_given, value = option.removeprefix("--").partition("=")
        if name in own or name in NOT_FOR_USERS:
            raise LaunchError(f"triton_options {option!r:.80}: {name} is given by this program, or what it watches the server by")
        if name not in server.options:
            raise LaunchError(f"triton_options {option!r:.80}: this tritonserver has no such option{closest(name, server.options)}")
        found.append(f"--{name}={value}" if is_given else f"--{name}")
    return found


def _hide(word: str, *secrets: str) -> str:
    """Of a command that is shown."""
    for secret in secrets:
        word = word.replace(f"={secret}", "=SECRET")
    return word


def warn_of_old_server(server: Server) -> None:
    if server.is_old:
        version = ".".join(map(str, server.version)) if server.version else "of a release before 25.08"
        print(
            f"foretoken serve: warning: this Triton ({version}) has known faults: clients that reach its ports can fill its memory and, where the "
            "shared-memory APIs are open, read it. Keep its ports to clients you trust, or use a newer one (docs/operations.md)",
            file=sys.stderr,
        )


def check_nodes(engine: EngineConfig) -> None:
    """Raises LaunchError when the libraries of a node among others are missing."""
    if not engine.disaggregation.is_on:
        return
    needs = ("redis",) if sys.version_info >= (3, 12) else ("redis", "async_timeout")  # which a server's stub of an older 3.11 wants as well
    if missing := [name for name in needs if importlib.util.find_spec(name) is None]:
        raise LaunchError(f"scheduler_name redis: {missing[0]} is not installed: pip install 'foretoken-triton[disaggregation]'")
    if engine.disaggregation.transfer_backend == "nixl" and not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12")):
        raise LaunchError("transfer_backend nixl is not installed: pip install nixl-cu12 (nixl-cu13 for CUDA 13)")


def find_source(engine: EngineConfig) -> Path:
    """The checked-in repository that a server's own is rendered from."""
    if engine.parallel_config.node_rank:
        return REPOSITORIES / "follower"
    return REPOSITORY if engine.disaggregation.role == "mixed" else REPOSITORIES / engine.disaggregation.role


def why_no_clients(values: dict[str, Any]) -> str:
    """Why a server with these keys answers none; empty: it does."""
    if (values.get("disaggregation") or {}).get("role") == "prefill":
        return "a prefill node answers no clients; they ask decode nodes"
    if (values.get("parallel_config") or {}).get("node_rank"):
        return "the first host (node_rank 0) answers clients"
    return ""


def why_no_nodes(values: dict[str, Any]) -> str:
    """What of these keys is for nodes that a server of them does not know; empty: nothing."""
    section = values.get("disaggregation") or {}
    given = [key for key in section if key.startswith("scheduler_")]
    if not given or section.get("role", "mixed") != "mixed" or section.get("scheduler_name") is not None:
        return ""
    return f"{given[0]} has no effect: a server of role mixed works for others with --scheduler-name redis alone"


def serve(args: argparse.Namespace) -> int:
    """Checks, renders, and runs tritonserver under supervision, or becomes it; with a port, a gateway beside it. Returns the exit status."""
    command = Translation()
    try:
        command = read_command(args)
        config = ServeConfig.from_dict({key: value for key, value in command.values.items() if key in SERVE_KEYS})
        check_own_files(config)
        check_port_numbers(named_ports(config, command.values))
    except (ConfigError, LaunchError) as error:
        return refuse(command.explain(error))
    if config.port and (why := why_no_clients(command.values)):
        command.notes.append(f"port {config.port} has no effect: {why}")
    elif config.port and not args.dry_run and not args.without_gateway:
        return serve_with_gateway(args, config, command.values)
    if why := why_no_nodes(command.values):
        command.notes.append(why)
    for note in [*command.notes, *explain_environment(os.environ)]:
        print(f"foretoken serve: note: {note}", file=sys.stderr)
    return serve_alone(args, command)


def refuse(message: str) -> int:
    print(f"foretoken serve: {message}", file=sys.stderr)
    return 2


DEFAULT_NAME = "foretoken"
INNER_PORTS = ("http_port", "grpc_port", "metrics_port", "status_port")


def inner_ports(config: ServeConfig) -> dict[str, int]:
    """The server's own, by their keys."""
    return {key: getattr(config, key) for key in INNER_PORTS if key != "status_port" or (config.supervise and config.status_port)}


def named_ports(config: ServeConfig, values: dict[str, Any]) -> dict[str, int]:
    """Those that are known before anything runs: beside a gateway the server's own are free ones where they are not named."""
    if not config.port or why_no_clients(values):
        return inner_ports(config)
    return {"port": config.port} | {key: port for key, port in inner_ports(config).items() if key in values}


def served_names(config: ServeConfig, values: dict[str, Any]) -> list[str]:
    """What clients call the model: as vLLM's and SGLang's users do, by what the command calls it, unless the command says."""
    names = config.served_model_name or dict.fromkeys([str(values.get("model") or DEFAULT_NAME), DEFAULT_NAME])
    return [names] if isinstance(names, str) else [*names]


def serve_with_gateway(args: argparse.Namespace, config: ServeConfig, values: dict[str, Any]) -> int:
    """The same command again, without its port, and a gateway on it. What is not for clients listens for this machine alone."""
    ports = {key: getattr(config, key) for key in INNER_PORTS if key in values}
    named = {key: port for key, port in ports.items() if port or key != "status_port"}
    ports |= dict(zip([key for key in INNER_PORTS if key not in ports], free_ports(len(INNER_PORTS)), strict=False))
    host = config.host if "host" in values else "0.0.0.0" if config.api_keys else config.host
    try:
        check_ports({"port": config.port}, host)
        check_ports(named, ServeConfig.host)
    except LaunchError as error:
        return refuse(str(error))
    server = [*FORETOKEN, "serve", *args.argv, "--without-gateway", f"--host={ServeConfig.host}"]
    server += [f"--{key.replace('_', '-')}={port}" for key, port in ports.items()]
    if "metrics_port" in values and host in ANY_ADDRESS:
        server.append(f"--metrics-host={host}")
    gateway = [*FORETOKEN, "gateway", f"--upstream=127.0.0.1:{ports['grpc_port']}", f"--host={host}", f"--port={config.port}"]
    metrics_host = "[::1]" if "metrics_port" in values and host == "::" else "127.0.0.1"
    gateway += [f"--metrics-url=http://{metrics_host}:{ports['metrics_port']}/metrics"]
    gateway += [f"--metrics-url=http://127.0.0.1:{ports['status_port']}/metrics"] if ports["status_port"] else []
    gateway += ["--served-model-name", *served_names(config, values)]
    gateway += [f"--api-keys={config.api_keys}"] if config.api_keys else []
    gateway += [f"--admin-keys={config.admin_keys}"] if config.admin_keys else []
    gateway += [f"--triton-header-file={config.triton_header_file}"] if config.triton_header_file else []
    gateway += ["--vllm-metrics"] if config.vllm_metrics else []
    gateway += [f"--cors-origin={origin}" for origin in config.cors_origins]
    gateway += [f"--max-body-bytes={config.max_body_bytes}"]
    return run_together(gateway, server)


def serve_alone(args: argparse.Namespace, command_line: Translation) -> int:
    """A server without a gateway. Returns the exit status."""
    lock, values = None, command_line.values
    try:
        password = values.pop("scheduler_password", None)
        if args.scheduler_password is not None:  # not of a file
            message = "other users of this machine can read --scheduler-password; use --scheduler-password-file"
            print(f"foretoken serve: warning: {message}", file=sys.stderr)
        if is_bundled(str(values.get("model", BUNDLED_MODEL))):
            values.setdefault("speculative_config", DEFAULT_SPECULATION)
        folder = expand_user(str(values.get("model", BUNDLED_MODEL)))
        if "quantization" in values and folder.is_dir():
            option, line = model_checks.settle_quantization(values.pop("quantization"), folder)
            values |= {} if line else {"quantization": option}
            if line:
                print(f"foretoken serve: note: {line}", file=sys.stderr)
        load_format = str(values.get("load_format", EngineConfig.load_format))
        downloads = values.get("download_dir")
        drafting, line = settle_method(
            values.get("speculative_config"), lambda name: find_named_drafter(name, load_format, downloads), has_weights=load_format != "dummy"
        )
        if line:
            values["speculative_config"] = drafting
            print(f"foretoken serve: note: {line}", file=sys.stderr)
        config, engine = split_keys(values)
        check_nodes(engine)
        check_password(engine.disaggregation)
        name = f"repository-{config.port or config.http_port}"
        state = server_state()
        target = (Path(config.repository) if config.repository else state / name).resolve()
        check_server_path("repository", target, "name another folder with --repository")
        if config.backend_directory is not None:
            check_server_path("backend directory", Path(config.backend_directory), "link to it from elsewhere")
        origin = Source(config.revision, config.download_dir, engine.load_format != "dummy", convert_apart, is_served=True)
        check_gpu(engine.device)
        server = find_server()  # before a model is fetched
        model = check_model(engine.model, engine.max_model_len, engine.load_format, origin, engine.parallel_config, engine.unknown_tokens)
        model_checks.check_rounding(read_config(model), model, engine.rounding)
        model_checks.check_experts(model, engine.rounding)
        defaults = read_sampling_defaults(model) if engine.generation_config == "auto" else {}
        model_parameters(values, engine, model)  # before anything is written
        check_repository(target)
        lock = lock_folder(target)
        with writing(target):
            put_password(values, target, password)
        if not args.dry_run:
            check_ports(inner_ports(config), config.host)
            check_shared_memory()
            check_file_limit()
        remove_regions(target)
        parameters = model_parameters(values, engine, model)
        with writing(target):
            render_repository(target, parameters, engine.device, find_source(engine), engine.parallel_config.num_instances)
            key = write_key(target)
        header = None if config.triton_header_file is None else read_own_header(config.triton_header_file)
        command, environment = server_command(server, config, target, key, header)
    except (ConfigError, ModelError, LaunchError) as error:
        if lock is not None:
            os.close(lock)
        return refuse(command_line.explain(error))
    warn_of_old_server(server)
    added = [f"{name}={environment[name]}" for name in ("PATH", "LD_LIBRARY_PATH") if environment.get(name) != os.environ.get(name)]
    shown = shlex.join(["env", *added, *(_hide(part, key, *(header or ())[1:]) for part in command)])
    if defaults:
        said = ", ".join(f"{key} {value}" for key, value in defaults.items())
        print(f"requests that say nothing of their own have, by the model's generation_config.json (--generation-config none: not): {said}")
    print(f"model {model}\nrepository {target}\n{shown}", flush=True)
    if args.dry_run:
        os.close(lock)
        return 0
    raise_file_limit()
    if not config.supervise:
        os.set_inheritable(lock, True)  # the server keeps the folder
        os.execve(command[0], command, environment)
    # A model alone that is held keeps nobody else waiting, and may be let go on; ranks wait for each other.
    stopped_seconds = STOPPED_SECONDS if engine.parallel_config.tensor_parallel_size > 1 else math.inf
    return supervise(config, command, environment, target, list(parameters), key, stopped_seconds, header)


def supervise(
    config: ServeConfig,
    command: list[str],
    environment: dict[str, str],
    repository: Path,
    models: list[str],
    key: str,
    stopped_seconds: float,
    header: tuple[str, str] | None,
) -> int:
    """Runs the server until a signal ends it. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s foretoken: %(message)s", stream=sys.stderr)
    host, metrics_host = (LOOPBACK.get(at, at) for at in (config.host, config.metrics_host or config.host))
    has_tls, own = config.grpc_server_cert is not None, {} if header is None else dict([header])
    api = ServerApi(host, config.http_port, config.grpc_port, config.metrics_port, key, metrics_host, has_tls, own)
    supervisor = Supervisor(
        command,
        environment,
        repository,
        models,
        api,
        drain_seconds=config.drain_seconds,
        hang_seconds=config.hang_seconds,
        max_restarts=config.max_restarts,
        stopped_seconds=stopped_seconds,
        start_seconds=math.inf if config.start_seconds is None else config.start_seconds,
        max_server_memory=None if config.max_server_memory is None else int(config.max_server_memory),
    )
    if config.status_port:
        serve_status(supervisor, config.host, config.status_port)
    return supervisor.run()
