"""What `foretoken serve` may be told: its own keys, its flags, and a file of both."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from backend.config import EngineConfig, parse_bytes
from backend.disaggregation_config import is_text
from backend.errors import ConfigError
from backend.other_servers.translation import Translation, translate
from backend.quantization_config import QuantizationConfig, normalize_quantization, read_quantization
from backend.section import Section, nearest, require
from deploy.config_file import read_yaml
from deploy.other_options import add_other_arguments, check_spaces

MODEL_CONTROL_MODES = ("none", "explicit")
CLIENT_APIS = ("inference", "health", "metadata")
"""Of Triton's, those that clients use; the launcher restricts the others."""
DISAGGREGATION_FLAGS = (
    "role",
    *(f"scheduler_{name}" for name in ("name", "host", "port", "db", "topic", "ttl", "password_file")),
)
"""Keys of the section `disaggregation` that have flags."""
PARALLEL_FLAGS = ("tensor_parallel_size", "expert_parallel", "ranks", "nnodes", "node_rank", "master")
"""Of the section `parallel_config`."""
COMMAND_ONLY = ("config", "dry_run", "command", "run", "argv", "model_tag", "without_gateway")
"""What the command line holds beside keys."""
ANY_ADDRESS = ("0.0.0.0", "::")
LEAST_SERVER_MEMORY = 128 * 2**20
"""A tritonserver that answers holds some: one with a smaller limit would be drained and started again for ever."""
MAX_RESTARTS, MAX_DRAIN_SECONDS, MAX_START_SECONDS, MAX_LOG_VERBOSE = 10**6, 7 * 86400, 7 * 86400, 100
GATEWAY_KEYS = ("served_model_name", "api_keys", "admin_keys", "cors_origins", "vllm_metrics", "max_body_bytes")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Section):
    """The launcher's own keys; all others go to the engine."""

    revision: str | None = None
    """Of a model that is named by its name on the hub: branch, tag or commit."""
    download_dir: str | None = None
    """Where models are downloaded to; default: the hub's own cache."""
    http_port: int = 8000
    """Of Triton's HTTP interface."""
    grpc_port: int = 8001
    """Of Triton's gRPC interface, which the clients and the gateway use."""
    metrics_port: int = 8002
    """Of Triton's metrics, with the engine's counters."""
    port: int = 0
    """Of OpenAI's interface and the page: a gateway is started with the server, and ends with it. The other ports are then this machine's own, and
    free ones where they are not named. 0: none; `foretoken gateway` starts one by itself."""
    served_model_name: str | tuple[str, ...] | None = None
    """With port: what clients call the model; of several names the first is shown. Default: what the command calls it (a name on the hub, a path),
    and foretoken."""
    api_keys: str | None = None
    """With port: let in only who sends one of the keys in this file, one a line."""
    admin_keys: str | None = None
    """With port: keys, one a line, of those who may change the server while it runs (`POST /v1/suffix_corpus`); nobody else may."""
    cors_origins: tuple[str, ...] = ()
    """With port: web pages of these origins may call."""
    vllm_metrics: bool = False
    """With port: its /metrics has the server's once more by vLLM's names (`vllm:num_requests_waiting`, ...)."""
    max_body_bytes: int | str = "4MiB"
    """With port: larger requests are refused there; bytes, or a string such as "16MiB"."""
    host: str = "127.0.0.1"
    """Address to listen on. The server asks nobody who they are: beyond this machine (0.0.0.0) only on a private network (operations.md).
    With port it is the gateway's address, and the server itself is this machine's own."""
    grpc_server_cert: str | None = None
    """Triton's gRPC interface speaks TLS, with the certificates in this file (PEM, its own first); clients write grpcs://HOST:PORT (operations.md).
    HTTP has none: a proxy's."""
    grpc_server_key: str | None = None
    """With grpc_server_cert: its private key, a file in PEM without a password."""
    grpc_root_cert: str | None = None
    """With grpc_server_cert: let in only clients that have a certificate of these authorities (mutual TLS); a file in PEM."""
    restricted_apis: tuple[str, ...] = ()
    """Of Triton's interfaces over HTTP and gRPC, those that want the header of triton_header_file: inference, health, metadata. Others always want a
    key of the supervisor's own (operations.md)."""
    triton_header_file: str | None = None
    """With restricted_apis: a file with the header, NAME=VALUE, on one line; the gateway of port, and the supervisor, send it."""
    metrics_host: str | None = None
    """Address of Triton's metrics: host (the default), or 0.0.0.0, for Prometheus on other machines; the supervisor reads them too."""
    max_request_size: int | str = "32MiB"
    """Of one HTTP request: bytes, or a string such as "32MiB". Needs a Triton that can limit it; older ones take anything."""
    repository: str | None = None
    """Where to render the model repository; default: in the user's state folder, by port, or without one by http_port."""
    backend_directory: str | None = None
    """Where the server finds its backends; default: where it was installed."""
    drain_seconds: int = 30
    """How long running requests may go on after SIGTERM."""
    triton_options: tuple[str, ...] = ()
    """More of tritonserver's own options, as NAME=VALUE: `trace-config=rate=1`, `log-format=ISO8601`. Those that this program gives are refused."""
    log_verbose: int = 0
    """Triton's own log level; above 0 it says what every request does."""
    supervise: bool = True
    """Watch the models and bring back what dies (deploy/supervision/); else this process becomes the server."""
    status_port: int = 8003
    """Of the supervisor's /health, /live and /metrics; 0: none."""
    hang_seconds: float = 30.0
    """A model that neither answers nor gets on with its work for this long is taken for hung: longer than the longest step."""
    start_seconds: float | None = 3600.0
    """A model that is being loaded, and whose processes neither compute nor read for this long, has failed: the server is ended, and started again
    once. Whatever they do begins it anew, so that a checkpoint may take as long as it takes. One whose process has ended has hang_seconds. null: no
    limit."""
    max_restarts: int = 5
    """Restarts of the server at once, and attempts to load a model before the server is restarted. One more restart is earned every 30 seconds, so
    that a server that crashes again and again is always back within that time. 0: none, the first failure ends this process with status 1."""
    max_server_memory: int | str | None = "4GiB"
    """Of tritonserver itself, without its models: beyond it open requests are let end and the server is restarted, for some releases of Triton
    keep what clients sent. 128MiB or more; null: no limit."""
    model_control_mode: str = "none"
    """Without supervision: none, or explicit: models can be unloaded and loaded again through the server's repository API."""

    def __post_init__(self) -> None:
        if not 1 <= self.hang_seconds <= 3600:
            raise ConfigError(f"hang_seconds must be from 1 to 3600, got {self.hang_seconds}")
        if self.start_seconds is not None and not 10 <= self.start_seconds <= MAX_START_SECONDS:
            raise ConfigError(f"start_seconds must be from 10 to {MAX_START_SECONDS}, or null for no limit, got {self.start_seconds}")
        for key, most in (("max_restarts", MAX_RESTARTS), ("drain_seconds", MAX_DRAIN_SECONDS), ("log_verbose", MAX_LOG_VERBOSE)):
            require(0 <= getattr(self, key) <= most, key, getattr(self, key), f"from 0 to {most}")
        if self.model_control_mode not in MODEL_CONTROL_MODES:
            raise ConfigError(f"model_control_mode must be one of {', '.join(MODEL_CONTROL_MODES)}, got {self.model_control_mode!r:.80}")
        if self.supervise and self.model_control_mode != "none":
            raise ConfigError("model_control_mode is the supervisor's own while it runs: add --no-supervise to control models yourself")
        if self.metrics_host not in (None, self.host, *ANY_ADDRESS):
            raise ConfigError(f"metrics_host must be host ({self.host}), 0.0.0.0 or ::, got {self.metrics_host!r:.80}")
        for key, needed in (("grpc_server_cert", "grpc_server_key"), ("grpc_server_key", "grpc_server_cert"), ("grpc_root_cert", "grpc_server_cert")):
            if (value := getattr(self, key)) is not None and getattr(self, needed) is None:
                raise ConfigError(f"{key} {value!r:.80} has no effect without {needed}: TLS takes a certificate and its key")
        if unknown := [name for name in self.restricted_apis if name not in CLIENT_APIS]:
            raise ConfigError(f"restricted_apis must be of {', '.join(CLIENT_APIS)}, got {unknown[0]!r:.80}")
        if bool(self.restricted_apis) != (self.triton_header_file is not None):
            given, missing = ("restricted_apis", "triton_header_file") if self.restricted_apis else ("triton_header_file", "restricted_apis")
            raise ConfigError(f"{given} has no effect without {missing}: which of Triton's interfaces want which header")
        if self.port and self.grpc_server_cert is not None:
            raise ConfigError(f"grpc_server_cert is of the gRPC port, which with port ({self.port}) is for this machine alone: leave one of them out")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 1 to 65535, or 0 for none, got {self.port}")
        names = (self.served_model_name,) if isinstance(self.served_model_name, str) else self.served_model_name or ()
        if not all(name.strip() for name in names):
            raise ConfigError(f"served_model_name must be a name, or names, that have characters, got {self.served_model_name!r:.80}")
        if unwritable := [name for name in names if not is_text(name)]:
            raise ConfigError(f"served_model_name must be UTF-8, which answers are written in, got {unwritable[0]!r:.80}")
        for field in dataclasses.fields(self):
            if field.name in GATEWAY_KEYS and not self.port and getattr(self, field.name) != field.default:
                raise ConfigError(f"{field.name} is an option of OpenAI's interface, which runs with port: add --port 8080")
        for key in ("max_request_size", "max_body_bytes", "max_server_memory"):
            if (value := getattr(self, key)) is not None:
                object.__setattr__(self, key, parse_bytes(key, value))
        if isinstance(self.max_server_memory, int) and self.max_server_memory < LEAST_SERVER_MEMORY:
            raise ConfigError(f"max_server_memory must be 128MiB or more, got {self.max_server_memory} bytes")


SERVE_KEYS = {f.name for f in dataclasses.fields(ServeConfig)}


def split_keys(values: dict[str, Any]) -> tuple[ServeConfig, EngineConfig]:
    """The launcher's and the engine's configuration from one mapping. Raises ConfigError naming the key."""
    own = {k: v for k, v in values.items() if k in SERVE_KEYS}
    rest = {k: v for k, v in values.items() if k not in SERVE_KEYS}
    known = {f.name for f in dataclasses.fields(EngineConfig)}
    if unknown := set(rest) - known:
        key = sorted(unknown)[0]
        raise ConfigError(f"unknown key {key!r:.80}{nearest(key, known | SERVE_KEYS)}")
    config, engine = ServeConfig.from_dict(own), EngineConfig.from_dict(rest)
    check_master_port(config, engine)
    return config, engine


def check_master_port(config: ServeConfig, engine: EngineConfig) -> None:
    """Raises ConfigError where the ranks would take a port that the server listens on later: it waited for the other host first, and failed then."""
    parallel = engine.parallel_config
    if parallel.nnodes == 1 or parallel.node_rank:
        return
    for key in ("port", "http_port", "grpc_port", "metrics_port", *(["status_port"] if config.supervise else [])):
        if getattr(config, key) == parallel.meeting_place[1]:
            raise ConfigError(f"parallel_config.master is {parallel.master}, and {key} is {getattr(config, key)}: ranks meet on a port of their own")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve`; each is also a key of --config FILE."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE.yaml", help="the same keys as the flags; flags win")
    parser.add_argument("--dry-run", action="store_true", help="render the repository, print the command, start nothing")
    parser.add_argument("--without-gateway", action="store_true", help=argparse.SUPPRESS)  # the server beside the gateway that `--port` starts

    model = parser.add_argument_group("the model")
    model.add_argument(
        "--model", metavar="MODEL", help="folder in Hugging Face layout, GGUF file, or ORG/NAME on the hub (default: the bundled model)"
    )
    model.add_argument("--revision", metavar="NAME", help="of a name on the hub: branch, tag or commit (default: its main branch)")
    model.add_argument("--download-dir", metavar="DIR", help="where models are downloaded to (default: the hub's cache)")
    words = ("--speculative-config", "-sc")  # vLLM has both
    model.add_argument(*words, metavar="JSON", help='such as \'{"method": "ngram", "num_speculative_tokens": 5}\'')
    model.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    model.add_argument(
        "--quantization", "-q", metavar="TYPE", help="round weights as they are loaded: wint8, wint4, fp8, block_wise_fp8, or JSON of parts"
    )
    model.add_argument("--kv-cache-dtype", metavar="TYPE", help="of keys and values: auto, model (the model's dtype) or fp8 (e4m3)")
    model.add_argument("--kv-cache-scales", metavar="WHICH", help="with fp8: auto (the checkpoint's, else calibrated at the start), or one")
    model.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    model.add_argument(
        "--tensor-parallel-size", "-tp", type=int, metavar="N", help="processes that the model is split over; on GPUs each has one (default 1)"
    )
    model.add_argument(
        "--expert-parallel", action=argparse.BooleanOptionalAction, default=None, help="each of them holds whole experts (default: a part of each)"
    )
    model.add_argument(
        "--ranks", metavar="KIND", help="what they are: processes of one instance (the default), or instances, each of which answers requests"
    )
    model.add_argument("--nnodes", type=int, metavar="N", help="hosts that these processes are spread over, each with a server (docs/ranks.md)")
    model.add_argument("--node-rank", type=int, metavar="R", help="which of them this is; 0, the first, answers clients")
    model.add_argument("--master", metavar="HOST:PORT", help="where the first host meets the others")
    model.add_argument("--load-format", metavar="NAME", help="safetensors (default), or dummy: random weights of config.json's shapes")
    model.add_argument("--generation-config", metavar="WHICH", help="auto: sampling defaults of the model's generation_config.json; none (vllm): not")
    model.add_argument(
        "--unknown-tokens",
        metavar="WHAT",
        help="tokens of the tokenizer that the model does not embed: error (default), or refuse texts with one",
    )
    model.add_argument("--max-model-len", type=read_tokens, metavar="N", help="tokens of prompt and output together (default: the model's)")

    load = parser.add_argument_group("load and memory")
    load.add_argument("--max-batch-size", type=int, metavar="N", help="requests that run at once (default 256)")
    load.add_argument("--max-waiting", type=int, metavar="N", help="requests that may wait beyond those (default 2048)")
    load.add_argument(
        "--max-num-batched-tokens", type=read_tokens, metavar="N", help="known tokens one step computes (default 512 on CPU, 4096 on GPU)"
    )
    load.add_argument(
        "--max-step-ms", type=float, metavar="MS", help="a step with prompts takes no longer while others decode (default: 50 on GPU, 2000 on CPU)"
    )
    load.add_argument("--kv-cache-memory", metavar="SIZE", help="bytes, or such as 2GiB")
    load.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="of the GPU's memory (default 0.9)")
    load.add_argument("--page-size", type=int, metavar="N", help="tokens a KV page holds (default 16)")
    load.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None, help="share the pages of equal beginnings (default: on)"
    )
    load.add_argument(
        "--max-forced-tokens", type=int, metavar="N", help="drafted where an answer's form leaves one continuation (default 8; 0: none)"
    )
    load.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction, default=None, help="plan each step while one runs (default: on GPU)"
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

    gateway = parser.add_argument_group("OpenAI's interface on a port of its own, with a page (docs/api.md)")
    gateway.add_argument("--port", type=int, metavar="PORT", help="start a gateway too, on this port; the others are for this machine alone then")
    gateway.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="what clients call the model (default: MODEL, as it is written, and foretoken)"
    )
    gateway.add_argument("--api-keys", metavar="FILE", help="let in only who sends one of the keys in FILE, one a line")
    gateway.add_argument("--admin-keys", metavar="FILE", help="keys of those who may change the server while it runs (default: nobody may)")
    gateway.add_argument(
        "--vllm-metrics", action=argparse.BooleanOptionalAction, default=None, help="its /metrics has the server's once more by vLLM's names"
    )
    gateway.add_argument("--cors-origins", nargs="+", metavar="ORIGIN", help="web pages of these origins may call")
    gateway.add_argument("--max-body-bytes", metavar="SIZE", help="larger requests are refused (default 4MiB)")

    ports = parser.add_argument_group("where it listens")
    ports.add_argument("--host", help="address to listen on (default 127.0.0.1; 0.0.0.0: all, for a private network)")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        ports.add_argument(f"--{name}-port", type=int, metavar="PORT", help=f"default {port}")
    ports.add_argument("--grpc-server-cert", metavar="FILE", help="speak TLS on the gRPC port, with this certificate, in PEM (default: no TLS)")
    ports.add_argument("--grpc-server-key", metavar="FILE", help="its private key")
    ports.add_argument("--grpc-root-cert", metavar="FILE", help="let in only clients with a certificate of these authorities (mutual TLS)")
    ports.add_argument("--restricted-apis", nargs="+", metavar="API", help=f"of Triton's, want a header: {', '.join(CLIENT_APIS)} (default: none)")
    ports.add_argument("--triton-header-file", metavar="FILE", help="holds that header: NAME=VALUE")
    ports.add_argument("--metrics-host", help="address of the metrics port: as --host (default), or 0.0.0.0")
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
    running.add_argument("--start-seconds", type=float, metavar="S", help="a load that does not get on for so long has failed (default 3600)")
    running.add_argument("--max-restarts", type=int, metavar="N", help="restarts at once; then one every 30 s (default 5; 0: none, end instead)")
    running.add_argument("--max-server-memory", metavar="SIZE", help="tritonserver beyond it is drained and restarted (default 4GiB)")
    running.add_argument("--model-control-mode", metavar="MODE", help="with --no-supervise: explicit lets you unload and load models (default none)")

    files = parser.add_argument_group("files and log")
    files.add_argument("--repository", metavar="DIR", help="where to render the model repository (default: the user's state folder)")
    files.add_argument("--backend-directory", metavar="DIR", help="the server's backends (default: where it was installed)")
    files.add_argument("--triton-options", nargs="+", metavar="NAME=VALUE", help="more of tritonserver's own, such as log-format=ISO8601")
    files.add_argument("--log-verbose", type=int, metavar="LEVEL", help="Triton's own log level (default 0)")
    add_other_arguments(parser)


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Keys of --config with the flags over them, as `read_command` has them."""
    return read_command(args).values


def read_command(args: argparse.Namespace) -> Translation:
    """What a command asks for, in this version's keys. Raises ConfigError."""
    given = {key: value for key, value in vars(args).items() if value is not None and key not in COMMAND_ONLY}
    own = {*SERVE_KEYS, *(f.name for f in dataclasses.fields(EngineConfig)), *DISAGGREGATION_FLAGS, *PARALLEL_FLAGS, "scheduler_password"}
    check_spaces(given, own)
    if (tag := getattr(args, "model_tag", None)) is not None:
        if given.get("model", tag) != tag:
            raise ConfigError(f"the model is named twice: {tag!r:.80}, and {given['model']!r:.80} by --model")
        given["model"] = tag
    file = read_yaml(args.config) if args.config else {}
    for values in (file, given):
        if isinstance(values.get("speculative_config"), str):
            values["speculative_config"] = parse_json("speculative_config", values["speculative_config"])
        if isinstance(text := values.get("quantization"), str):
            values["quantization"] = parse_quantization(text)
    # Each by itself: a flag wins over the file, whatever names the two use.
    found, flags = translate(file, own), translate(given, own)
    if isinstance(found.values.get("speculative_config"), dict) and "speculative_config" not in given and "speculative_config" in flags.values:
        flags.values["speculative_config"] = {**found.values["speculative_config"], **flags.values["speculative_config"]}
    values = {**found.values, **flags.values}
    if isinstance(names := values.get("served_model_name"), list) and len(names) == 1:
        values["served_model_name"] = names[0]
    for section, keys in (("disaggregation", DISAGGREGATION_FLAGS), ("parallel_config", PARALLEL_FLAGS)):
        if inner := {key: values.pop(key) for key in keys if key in values}:
            values[section] = {**(values.get(section) or {}), **inner}
    return Translation(values, [*found.notes, *flags.notes], {**found.sources, **flags.sources})


def read_tokens(text: str) -> int | str:
    """A number of tokens as vLLM's users write it: 32k (thousands), 32K (of 1,024), 1.5M; other words for what reads the key."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmKM])", text)
    if found is None:
        return int(text) if re.fullmatch(r"-?\d+", text) and text != "-1" else text
    size = float(found[1]) * {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}[found[2]]
    return int(size) if size == int(size) else text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's keys and values. Raises ConfigError for a key that is given twice: one would be lost without a word."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ConfigError(f"{next(key for key in keys if keys.count(key) > 1)!r:.80} is given twice in one object")
    return values


def parse_json(key: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{key} is not valid JSON: {error}") from None


def parse_quantization(text: str) -> Any:
    """A type's name, or an object of names. Raises ConfigError."""
    return parse_json("quantization", text) if text.lstrip().startswith("{") else text


def read_types(text: str) -> QuantizationConfig:
    """The types that such an option names. Raises ConfigError."""
    value = parse_quantization(text)
    config = QuantizationConfig.from_dict(value, "quantization.") if isinstance(value, dict) else value
    return read_quantization(normalize_quantization("quantization", config))
