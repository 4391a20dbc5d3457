"""`foretoken serve`: renders a model repository for a model and starts tritonserver on it."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import secrets
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from backend import model_checks
from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, REPOSITORIES, REPOSITORY, EngineConfig, SpeculativeConfig, parse_bytes
from backend.errors import ConfigError, ModelError
from backend.model_files import read_config
from backend.section import Section, nearest
from deploy.server import (
    COMPLETE_OPTION,
    INPUT_LIMIT_OPTION,
    LOCK_FILE,
    LaunchError,
    Server,
    check_gpu,
    check_ports,
    check_shared_memory,
    find_server,
    lock_folder,
    state_directory,
)
from deploy.supervision.probe import KEY_HEADER, ServerApi
from deploy.supervision.processes import REGIONS_FILE, remove_regions
from deploy.supervision.status import serve_status
from deploy.supervision.supervisor import END_SECONDS, Supervisor

DEFAULT_SPECULATION = {"method": "mtp", "num_model_steps": 3, "mtp_strategy": "with_ngram", "num_speculative_tokens": 5}
"""Of the bundled model."""

RESTRICTED_APIS = "shared-memory,model-config,model-repository,statistics,trace,logging"
"""Of Triton's, over HTTP and gRPC: they want a key. Shared memory above all: who may register a region reads and writes other requests', and
the memory of the models' processes."""
SHARED_BYTES = 8 * 2**20
"""Of shared memory that each model's process begins with, and grows by. Release 24.10 begins with 1 MiB, and a process that reads a request while
the server makes the region larger can write beyond its own view of it and die: it should seldom grow."""
KEY_FILE, PASSWORD_FILE = ".key", ".scheduler-password"
"""In the repository's folder, for this user alone to read."""
DISAGGREGATION_FLAGS = (
    "role",
    *(f"scheduler_{name}" for name in ("name", "host", "port", "db", "topic", "ttl", "password_file")),
)
"""Keys of the section `disaggregation` that have flags."""
MODEL_CONTROL_MODES = ("none", "explicit")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Section):
    """The launcher's own keys; all others go to the engine."""

    http_port: int = 8000
    """Of Triton's HTTP interface."""
    grpc_port: int = 8001
    """Of Triton's gRPC interface, which the clients and the gateway use."""
    metrics_port: int = 8002
    """Of Triton's metrics, with the engine's counters."""
    host: str = "127.0.0.1"
    """Address to listen on. The server asks nobody who they are: beyond this machine (0.0.0.0) only on a private network (operations.md)."""
    max_request_size: int | str = "32MiB"
    """Of one HTTP request: bytes, or a string such as "32MiB". Needs a Triton that can limit it; older ones take anything."""
    repository: str | None = None
    """Where to render the model repository; default: the user's state folder, by HTTP port."""
    backend_directory: str | None = None
    """Where the server finds its backends; default: where it was installed."""
    drain_seconds: int = 30
    """How long running requests may go on after SIGTERM."""
    log_verbose: int = 0
    """Triton's own log level; above 0 it says what every request does."""
    supervise: bool = True
    """Watch the models and bring back what dies (deploy/supervision/); else this process becomes the server."""
    status_port: int = 8003
    """Of the supervisor's /health, /live and /metrics; 0: none."""
    hang_seconds: float = 30.0
    """A model that neither answers nor gets on with its work for this long is taken for hung: longer than the longest step."""
    max_restarts: int = 5
    """Restarts of the server at once, and attempts to load a model before the server is restarted. One more restart is earned every 30 seconds, so
    that a server that crashes again and again is always back within that time. 0: none, the first failure ends this process with status 1."""
    max_server_memory: int | str | None = "4GiB"
    """Of tritonserver itself, without its models: beyond it open requests are let end and the server is restarted, for some releases of Triton
    keep what clients sent. Null: no limit."""
    model_control_mode: str = "none"
    """Without supervision: none, or explicit: models can be unloaded and loaded again through the server's repository API."""

    def __post_init__(self) -> None:
        if not 1 <= self.hang_seconds <= 3600:
            raise ConfigError(f"hang_seconds must be from 1 to 3600, got {self.hang_seconds}")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts must be 0 or more, got {self.max_restarts}")
        if self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds must be 0 or more, got {self.drain_seconds}")
        if self.model_control_mode not in MODEL_CONTROL_MODES:
            raise ConfigError(f"model_control_mode must be one of {', '.join(MODEL_CONTROL_MODES)}, got {self.model_control_mode!r:.80}")
        if self.supervise and self.model_control_mode != "none":
            raise ConfigError("model_control_mode is the supervisor's own while it runs: add --no-supervise to control models yourself")
        for key in ("max_request_size", "max_server_memory"):
            if (value := getattr(self, key)) is not None:
                object.__setattr__(self, key, parse_bytes(key, value))


SERVE_KEYS = {f.name for f in dataclasses.fields(ServeConfig)}


def split_keys(values: dict[str, Any]) -> tuple[ServeConfig, EngineConfig]:
    """The launcher's and the engine's configuration from one mapping. Raises ConfigError naming the key."""
    own = {k: v for k, v in values.items() if k in SERVE_KEYS}
    rest = {k: v for k, v in values.items() if k not in SERVE_KEYS}
    known = {f.name for f in dataclasses.fields(EngineConfig)}
    if unknown := set(rest) - known:
        key = sorted(unknown)[0]
        raise ConfigError(f"unknown key {key!r:.80}{nearest(key, known | SERVE_KEYS)}")
    return ServeConfig.from_dict(own), EngineConfig.from_dict(rest)


def check_model(directory: str, max_model_len: int | None = None, load_format: str = "safetensors") -> Path:
    """The model's folder, absolute. Raises ModelError and ConfigError for what would only fail once the server runs, or serve nonsense."""
    folder = Path(directory).expanduser().resolve()
    config = read_config(folder)
    if not str(folder).isascii():
        raise ModelError(f"model folder {folder}: the server's Python stub reads ASCII paths only; rename it, or link to it from elsewhere")
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder / 'tokenizer.json'} is missing")
    has_weights = load_format != "dummy"
    if has_weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors")
    model_checks.check_model(folder, has_weights=has_weights)
    model_checks.check_max_model_len(max_model_len, config["max_position_embeddings"])
    model_checks.check_tokenizer(folder)
    return folder


def render_parameters(values: dict[str, Any]) -> str:
    """config.pbtxt's `parameters` block. JSON's string escapes are the text format's too."""
    lines = [
        f"  {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(value if isinstance(value, str) else json.dumps(value))} }} }}"
        for key, value in values.items()
    ]
    return "parameters [\n" + ",\n".join(lines) + "\n]\n"


def check_repository(target: Path) -> None:
    """Raises LaunchError when the folder holds anything that was not rendered."""
    if not target.exists():
        return
    if not target.is_dir():
        raise LaunchError(f"--repository {target} is not a folder")
    models, own = {source.name for source in REPOSITORIES.glob("*/*")}, {LOCK_FILE, KEY_FILE, PASSWORD_FILE, REGIONS_FILE}
    is_other = any(p.name not in models or not (p / "config.pbtxt").is_file() for p in target.iterdir() if p.name not in own)
    if is_other or any(target.rglob("*.safetensors")):
        raise LaunchError(f"--repository {target} holds something else; name an empty folder, or one that was rendered before")


def render_repository(target: Path, parameters: dict[str, dict[str, Any]], device: str, source_folder: Path = REPOSITORY) -> None:
    """Writes a repository like a checked-in one: its models without parameters, and those named here with theirs.

    Weights are referenced, not copied. Raises LaunchError when the folder holds anything that was not rendered.
    """
    check_repository(target)
    for source in REPOSITORIES.glob("*/*"):  # it may have been of another role
        if (target / source.name).exists():
            shutil.rmtree(target / source.name)
    for source in sorted(source_folder.iterdir()):
        text = (source / "config.pbtxt").read_text()
        head, mark, tail = text.partition("parameters [")
        if mark and source.name not in parameters:
            continue
        version = target / source.name / "1"
        version.mkdir(parents=True)
        if mark:
            block_end = tail.index("\n]\n") + 3 if "\n]\n" in tail.split("input [")[0] else tail.index("\n") + 1
            text = head + render_parameters(parameters[source.name]) + tail[block_end:]
            if source.name != "tokenizer" and device.startswith("cuda"):
                number = device.partition(":")[2] or "0"
                text = text.replace("kind: KIND_CPU", f"kind: KIND_GPU gpus: [ {number} ]")
            shutil.copy(source / "1" / "model.py", version)
        (target / source.name / "config.pbtxt").write_text(text)


def server_command(server: Server, config: ServeConfig, repository: Path, key: str) -> tuple[list[str], dict[str, str]]:
    """tritonserver's command line and environment. key: what RESTRICTED_APIS ask for."""
    command = [
        str(server.executable),
        f"--model-repository={repository}",
        f"--http-address={config.host}",
        f"--http-port={config.http_port}",
        f"--grpc-address={config.host}",
        f"--grpc-port={config.grpc_port}",
        f"--metrics-address={config.host}",
        f"--metrics-port={config.metrics_port}",
        f"--log-verbose={config.log_verbose}",
        f"--exit-timeout-secs={END_SECONDS if config.supervise else config.drain_seconds}",
    ]
    if config.supervise or config.model_control_mode == "explicit":
        command += ["--model-control-mode=explicit", "--load-model=*"]
    command += [f"--{option}={RESTRICTED_APIS}:{KEY_HEADER}={key}" for option in ("http-restricted-api", "grpc-restricted-protocol")]
    command += [f"--backend-config=python,shm-{what}-byte-size={SHARED_BYTES}" for what in ("default", "growth")]
    if COMPLETE_OPTION in server.options:
        command.append(f"--{COMPLETE_OPTION}")
    if INPUT_LIMIT_OPTION in server.options:
        command.append(f"--{INPUT_LIMIT_OPTION}={config.max_request_size}")
    if backends := config.backend_directory or server.backend_directory:
        command.append(f"--backend-directory={backends}")
    return command, server.environment()


def write_secret(path: Path, secret: str) -> None:
    """For this user alone to read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secret}\n")


def write_key(repository: Path) -> str:
    """A new key for RESTRICTED_APIS, in the repository's folder too, where only this user reads it."""
    key = secrets.token_hex(16)
    write_secret(repository / KEY_FILE, key)
    return key


def put_password(values: dict[str, Any], repository: Path, password: str | None) -> None:
    """A password of the command line goes to a file: tritonserver's configuration names that. Raises ConfigError."""
    if password is None:
        (repository / PASSWORD_FILE).unlink(missing_ok=True)
        return
    print("foretoken serve: warning: other users of this machine can read --scheduler-password; use --scheduler-password-file", file=sys.stderr)
    section = values["disaggregation"] = dict(values.get("disaggregation") or {})
    if section.get("scheduler_password_file"):
        raise ConfigError("scheduler_password is given twice: as itself, and as scheduler_password_file")
    write_secret(repository / PASSWORD_FILE, password)
    section["scheduler_password_file"] = str(repository / PASSWORD_FILE)


def warn_of_old_server(server: Server) -> None:
    if server.is_old:
        version = ".".join(map(str, server.version)) if server.version else "of a release before 25.08"
        print(
            f"foretoken serve: warning: this Triton ({version}) has known faults: clients that reach its ports can fill its memory and, where the "
            "shared-memory APIs are open, read it. Keep its ports to clients you trust, or use a newer one (docs/operations.md)",
            file=sys.stderr,
        )


def read_yaml(path: str) -> dict[str, Any]:
    """A configuration file. Raises ConfigError."""
    try:
        values = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must hold keys and values, got {type(values).__name__}")
    return {str(k).replace("-", "_"): v for k, v in values.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve`; each is also a key of --config FILE."""
    parser.add_argument("--config", metavar="FILE.yaml", help="the same keys as the flags; flags win")
    parser.add_argument("--dry-run", action="store_true", help="render the repository, print the command, start nothing")

    model = parser.add_argument_group("the model")
    model.add_argument("--model", metavar="DIR", help="model folder in Hugging Face layout (default: the bundled model)")
    model.add_argument("--speculative-config", metavar="JSON", help='such as \'{"method": "ngram", "num_speculative_tokens": 5}\'')
    model.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    model.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    model.add_argument(
        "--tensor-parallel-size", type=int, metavar="N", help="processes that the model is split over; on GPUs each has one (default 1)"
    )
    model.add_argument(
        "--expert-parallel", action=argparse.BooleanOptionalAction, default=None, help="each of them holds whole experts (default: a part of each)"
    )
    model.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and output together (default: the model's)")

    load = parser.add_argument_group("load and memory")
    load.add_argument("--max-batch-size", type=int, metavar="N", help="requests that run at once (default 256)")
    load.add_argument("--max-waiting", type=int, metavar="N", help="requests that may wait beyond those (default 2048)")
    load.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="known tokens one step computes (default 512 on CPU, 4096 on GPU)")
    load.add_argument("--max-step-ms", type=float, metavar="MS", help="a step with prompts takes no longer while others decode (default 50 on GPU)")
    load.add_argument("--kv-cache-memory", metavar="SIZE", help="bytes, or such as 2GiB")
    load.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="of the GPU's memory (default 0.9)")
    load.add_argument("--page-size", type=int, metavar="N", help="tokens a KV page holds (default 16)")
    load.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None, help="share the pages of equal beginnings (default: on)"
    )
    load.add_argument("--num-threads", type=int, metavar="N", help="CPU threads of the engine")
    load.add_argument("--single-thread-tokens", type=int, metavar="N", help="CPU: smaller steps run on one thread (default 8)")

    nodes = parser.add_argument_group("prefill and decode on nodes of their own (docs/disaggregation.md)")
    nodes.add_argument("--role", "--splitwise-role", metavar="ROLE", help="prefill, decode, or mixed (default)")
    nodes.add_argument("--scheduler-name", metavar="NAME", help="redis, also written splitwise; or local (default for role mixed)")
    nodes.add_argument("--scheduler-host", metavar="HOST", help="of the Redis server (default 127.0.0.1)")
    nodes.add_argument("--scheduler-port", type=int, metavar="PORT", help="of the Redis server (default 6379)")
    nodes.add_argument("--scheduler-db", type=int, metavar="N", help="number of the Redis database (default 0)")
    nodes.add_argument("--scheduler-topic", metavar="NAME", help="nodes of one topic work for each other (default foretoken)")
    nodes.add_argument("--scheduler-ttl", type=int, metavar="S", help="Redis forgets what nobody writes to for so long (default 900)")
    nodes.add_argument("--scheduler-password-file", metavar="FILE", help="its first line is the password of the Redis server")
    nodes.add_argument("--scheduler-password", metavar="PASSWORD", help="the password itself; others on this machine can read it")

    ports = parser.add_argument_group("where it listens")
    ports.add_argument("--host", help="address to listen on (default 127.0.0.1; 0.0.0.0: all, for a private network)")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        ports.add_argument(f"--{name}-port", type=int, metavar="PORT", help=f"default {port}")
    ports.add_argument("--status-port", type=int, metavar="PORT", help="the supervisor's /health, /live and /metrics (default 8003; 0: none)")
    ports.add_argument("--max-request-size", metavar="SIZE", help="of one HTTP request, where Triton can limit it (default 32MiB)")

    running = parser.add_argument_group("keeping it running, and stopping it")
    running.add_argument("--drain-seconds", type=int, metavar="S", help="how long running requests may go on after SIGTERM (default 30)")
    running.add_argument(
        "--supervise",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="watch the models and bring back what dies (default: on); without, this process becomes the server",
    )
    running.add_argument("--hang-seconds", type=float, metavar="S", help="a model without an answer or progress for so long is hung (default 30)")
    running.add_argument("--max-restarts", type=int, metavar="N", help="restarts at once; then one every 30 s (default 5; 0: none, end instead)")
    running.add_argument("--max-server-memory", metavar="SIZE", help="tritonserver beyond it is drained and restarted (default 4GiB)")
    running.add_argument("--model-control-mode", metavar="MODE", help="with --no-supervise: explicit lets you unload and load models (default none)")

    files = parser.add_argument_group("files and log")
    files.add_argument("--repository", metavar="DIR", help="where to render the model repository (default: the user's state folder)")
    files.add_argument("--backend-directory", metavar="DIR", help="the server's backends (default: where it was installed)")
    files.add_argument("--log-verbose", type=int, metavar="LEVEL", help="Triton's own log level (default 0)")


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Keys of --config with the flags over them."""
    values = read_yaml(args.config) if args.config else {}
    for key, value in vars(args).items():
        if value is not None and key not in ("config", "dry_run", "command", "run", "scheduler_password"):
            values[key] = value
    nodes = {key: values.pop(key) for key in DISAGGREGATION_FLAGS if key in values}
    if nodes:
        values["disaggregation"] = {**(values.get("disaggregation") or {}), **nodes}
    for key in ("tensor_parallel_size", "expert_parallel"):
        if key in values:
            values["parallel_config"] = {**(values.get("parallel_config") or {}), key: values.pop(key)}
    if isinstance(values.get("speculative_config"), str):
        try:
            values["speculative_config"] = json.loads(values["speculative_config"])
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"speculative_config is not valid JSON: {error}") from None
    return values


def check_nodes(engine: EngineConfig) -> None:
    """Raises LaunchError when the libraries of a node among others are missing."""
    if not engine.disaggregation.is_on:
        return
    if missing := [name for name in ("redis", "async_timeout") if importlib.util.find_spec(name) is None]:
        raise LaunchError(f"scheduler_name redis: {missing[0]} is not installed: pip install 'foretoken[disaggregation]'")
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12")):
        raise LaunchError("transfer_backend nixl is not installed: pip install nixl-cu12 (nixl-cu13 for CUDA 13)")


def is_bundled(model: str | Path) -> bool:
    return Path(model).expanduser().resolve() == BUNDLED_MODEL.resolve()


def check_drafter(config: SpeculativeConfig, model: Path, load_format: str = "safetensors") -> Path | None:
    """The drafter's folder, absolute, when a method needs one. Raises ConfigError, ModelError."""
    if "mtp" not in config.loaded_methods:
        return None
    found = model_checks.find_drafter_folder(config.model, model)
    if found is None and not is_bundled(model):
        raise ConfigError(f"speculative_config.model: method mtp needs a drafter trained for {model}: name its folder (see foretoken train-mtp)")
    folder = (found or BUNDLED_DRAFTER).expanduser().resolve()
    own, target = read_config(folder), read_config(model)
    if not str(folder).isascii():
        raise ModelError(f"drafter folder {folder}: the server's Python stub reads ASCII paths only; rename it, or link to it from elsewhere")
    has_weights = load_format != "dummy"
    if has_weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors")
    length = target["max_position_embeddings"]
    model_checks.check_fits_target(own, folder, hidden_size=target["hidden_size"], vocab_size=target["vocab_size"], max_model_len=length)
    model_checks.check_drafter(folder, has_weights=has_weights)
    return folder


def model_parameters(values: dict[str, Any], engine: EngineConfig, model: Path) -> dict[str, dict[str, Any]]:
    """What goes into each model's config.pbtxt. Raises ConfigError, ModelError."""
    decode = {k: v for k, v in values.items() if k not in SERVE_KEYS} | {"model": str(model)}
    is_prefill = engine.disaggregation.role == "prefill"
    parameters = {"prefill": decode} if is_prefill else {"decode": decode, "tokenizer": {"model": str(model)}}
    config = engine.speculative_config
    drafter = check_drafter(config, model, engine.load_format)
    speculative = dict(values.get("speculative_config") or {})
    if drafter is not None:
        speculative["model"] = str(drafter)
        if config.placement == "bls":
            own = {"model": str(drafter), "target": str(model), "num_model_steps": config.num_model_steps, "quantization": config.quantization}
            shared = {k: decode[k] for k in ("dtype", "device", "num_threads", "single_thread_tokens") if k in decode}
            parameters["mtp_drafter"] = {k: v for k, v in own.items() if v is not None} | shared
    if "suffix" in config.loaded_methods and config.suffix_decoding_cache_path is None:
        name = hashlib.blake2b(str(model).encode(), digest_size=6).hexdigest()
        speculative["suffix_decoding_cache_path"] = str(state_directory() / f"suffix-{name}.npz")
    if speculative:
        decode["speculative_config"] = speculative
    return parameters


def serve(args: argparse.Namespace) -> int:
    """Checks, renders, and runs tritonserver under supervision, or becomes it. Returns the exit status."""
    lock = None
    try:
        values = gather(args)
        if "speculative_config" not in values and is_bundled(str(values.get("model", BUNDLED_MODEL))):
            values["speculative_config"] = DEFAULT_SPECULATION
        config, engine = split_keys(values)
        check_nodes(engine)
        model = check_model(engine.model, engine.max_model_len, engine.load_format)
        model_parameters(values, engine, model)  # before anything is written
        check_gpu(engine.device)
        server = find_server()
        target = (Path(config.repository) if config.repository else state_directory() / f"repository-{config.http_port}").resolve()
        check_repository(target)
        lock = lock_folder(target)
        put_password(values, target, args.scheduler_password)
        if not args.dry_run:
            names = ("http_port", "grpc_port", "metrics_port", *(["status_port"] if config.supervise and config.status_port else []))
            check_ports({k: getattr(config, k) for k in names}, config.host)
            check_shared_memory()
        remove_regions(target)
        parameters = model_parameters(values, engine, model)
        source = REPOSITORY if engine.disaggregation.role == "mixed" else REPOSITORIES / engine.disaggregation.role
        render_repository(target, parameters, engine.device, source)
        key = write_key(target)
    except (ConfigError, ModelError, LaunchError) as error:
        print(f"foretoken serve: {error}", file=sys.stderr)
        if lock is not None:
            os.close(lock)
        return 2
    warn_of_old_server(server)
    command, environment = server_command(server, config, target, key)
    added = [f"{name}={environment[name]}" for name in ("PATH", "LD_LIBRARY_PATH") if environment.get(name) != os.environ.get(name)]
    shown = shlex.join(["env", *added, *(part.replace(key, "SECRET") for part in command)])
    print(f"model {model}\nrepository {target}\n{shown}", flush=True)
    if args.dry_run:
        os.close(lock)
        return 0
    if not config.supervise:
        os.set_inheritable(lock, True)  # the server keeps the folder
        os.execve(command[0], command, environment)
    return supervise(config, command, environment, target, list(parameters), key)


def supervise(config: ServeConfig, command: list[str], environment: dict[str, str], repository: Path, models: list[str], key: str) -> int:
    """Runs the server until a signal ends it. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s foretoken: %(message)s", stream=sys.stderr)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    api = ServerApi(host, config.http_port, config.grpc_port, config.metrics_port, key)
    supervisor = Supervisor(
        command,
        environment,
        repository,
        models,
        api,
        drain_seconds=config.drain_seconds,
        hang_seconds=config.hang_seconds,
        max_restarts=config.max_restarts,
        max_server_memory=None if config.max_server_memory is None else int(config.max_server_memory),
    )
    if config.status_port:
        serve_status(supervisor, config.host, config.status_port)
    return supervisor.run()
