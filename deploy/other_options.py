"""Options of other servers' serve commands (vLLM, FastDeploy, PaddleNLP), so that a pasted command starts, or says what differs.

None is lost without a word: it is another name of an option here, or nothing is needed and one line says why, or it is refused with the name of what
does it here. An option that this version has itself is not looked for in these tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from backend.errors import ConfigError


@dataclass(frozen=True)
class Alias:
    """Another name. own: the key, with its section in front where it has one."""

    own: str
    is_switch: bool = False
    is_inverted: bool = False
    """True there is false here."""


@dataclass(frozen=True)
class Needless:
    """Whatever it says, it would change nothing."""

    why: str
    is_switch: bool = False


@dataclass(frozen=True)
class Refused:
    """What it asks for is done otherwise, or not at all."""

    instead: str
    unless: tuple[Any, ...] = ()
    """Values that ask for nothing, beside null, false, 0 and what is empty."""
    is_switch: bool = False


Other = Alias | Needless | Refused

_KERNELS = "kernels are chosen by the device and the shape of each product"
_GRAPHS = "on a GPU steps run as CUDA graphs where one is captured, and eagerly else; the tokens are the same"
_CHUNKS = "prompts are cut into the room that a step has (max_num_batched_tokens)"
_PORTS = "the model's processes meet through shared memory, and nodes through Redis and NIXL: no port is needed"
_LOG = "the gateway logs one line for each request, and Triton's own log goes by --log-verbose"
_ONE_HOST = "a model is served by the processes of one host; for more of them put `foretoken gateway --upstream A,B` before several servers"
_TLS = "TLS is for a proxy before the gateway"
_TEXT_ONLY = "models of text alone are served"
_SCHEDULER = "nodes find each other's load in Redis by themselves (heartbeat_seconds in the section disaggregation)"
_LORA = "adapters (LoRA) are not served; merge one into the model's weights"
_MTP = "method mtp takes the target's hidden states whatever this says"

OTHERS: dict[str, Other] = {
    # the model
    "model_name_or_path": Alias("model"),
    "model_path": Alias("model"),
    "max_length": Needless("each request says its own max_tokens"),
    "total_max_length": Alias("max_model_len"),
    "session_len": Alias("max_model_len"),
    "tokenizer": Refused("the tokenizer is the one in the model's folder (tokenizer.json): put it there"),
    "tokenizer_mode": Refused("the tokenizer is read from tokenizer.json", ("auto", "hf", "fast")),
    "trust_remote_code": Needless("no code of a checkpoint is run: families are built in (docs/models.md)", is_switch=True),
    "code_revision": Refused("no code of a checkpoint is run"),
    "tokenizer_revision": Refused("the tokenizer is the model's: --revision is of both"),
    "model_impl": Refused("families are built in (docs/models.md)", ("auto", "fastdeploy")),
    "task": Refused("models that generate text are served", ("auto", "generate")),
    "runner": Refused("models that generate text are served", ("auto", "generate")),
    "convert": Refused("models that generate text are served", ("auto", "none")),
    "hf_overrides": Refused("change the model's config.json"),
    "rope_scaling": Refused("change rope_scaling in the model's config.json"),
    "quant_type": Alias("quantization"),
    "kv_cache_dtype": Refused("keys and values are kept in the model's type", ("auto",)),
    "calculate_kv_scales": Refused("keys and values are kept in the model's type", is_switch=True),
    "chat_template": Refused("the template is the model's own: put it into its folder as chat_template.jinja"),
    "config_format": Refused("--model is a folder in Hugging Face's layout", ("auto", "hf")),
    "load_choices": Alias("load_format"),
    "dynamic_load_weight": Refused("weights are read once, at the start", is_switch=True),
    "load_strategy": Needless("weights are read from safetensors, file by file", is_switch=False),
    "lm_head_fp32": Refused("the head's products are in the model's type; --dtype float32 computes all in it", is_switch=True),
    "enable_lora": Refused(_LORA, is_switch=True),
    "lora_modules": Refused(_LORA),
    "max_loras": Needless(_LORA),
    "max_lora_rank": Needless(_LORA),
    "limit_mm_per_prompt": Needless(_TEXT_ONLY),
    "mm_processor_kwargs": Needless(_TEXT_ONLY),
    "enable_mm": Refused(_TEXT_ONLY, is_switch=True),
    "disable_chunked_mm_input": Needless(_TEXT_ONLY, is_switch=True),
    "output_path": Refused("nothing is exported: a model is served from its Hugging Face folder, so `foretoken serve --model DIR` is all"),
    # speculation
    "speculative_model": Alias("speculative_config.model"),
    "num_speculative_tokens": Alias("speculative_config.num_speculative_tokens"),
    "speculate_method": Alias("speculative_config.method"),
    "speculate_max_draft_token_num": Alias("speculative_config.num_speculative_tokens"),
    "speculate_max_ngram_size": Alias("speculative_config.max_ngram_size"),
    "speculate_verify_window": Alias("speculative_config.verify_window"),
    "speculate_max_candidate_len": Alias("speculative_config.max_candidate_len"),
    "draft_model_name_or_path": Alias("speculative_config.model"),
    "draft_model_quant_type": Alias("speculative_config.quantization"),
    "mtp_path": Alias("speculative_config.model"),
    "mtp_quant": Alias("speculative_config.quantization"),
    "num_tokens": Refused('say one less as "num_speculative_tokens" in --speculative-config: a step gives its drafts and one token more', (1,)),
    "return_full_hidden_states": Needless(_MTP),
    # load and memory
    "max_num_seqs": Alias("max_batch_size"),
    "batch_size": Alias("max_batch_size"),
    "scheduler_max_size": Alias("max_waiting"),
    "block_size": Alias("page_size"),
    "kv_cache_memory_bytes": Alias("kv_cache_memory"),
    "num_gpu_blocks_override": Refused("say the memory for keys and values as --kv-cache-memory"),
    "cache_max_entry_count": Refused("say --gpu-memory-utilization, the share of the GPU's memory for weights, keys and values together"),
    "kv_cache_ratio": Needless("prompts and answers share all pages"),
    "static_decode_blocks": Needless("prompts and answers share all pages"),
    "prealloc_dec_block_slot_num_threshold": Needless("a request gets its next page when it needs it"),
    "swap_space": Needless("requests that lose their pages are computed anew: none are kept in the host's memory"),
    "cpu_offload_gb": Refused("weights lie on the device whole: split them with --tensor-parallel-size"),
    "kvcache_storage_backend": Refused("pages of keys and values are kept on the device alone"),
    "enable_output_caching": Needless("pages of answers stay in the prefix cache too", is_switch=True),
    "disable_cascade_attn": Alias("cascade_attention", is_switch=True, is_inverted=True),
    "enforce_eager": Needless(_GRAPHS, is_switch=True),
    "compilation_config": Needless(_GRAPHS),
    "optimization_level": Needless(_GRAPHS),
    "cuda_graph_sizes": Needless(_GRAPHS),
    "max_seq_len_to_capture": Needless(_GRAPHS),
    "graph_optimization_config": Needless(_GRAPHS),
    "use_cudagraph": Needless(_GRAPHS, is_switch=True),
    "additional_config": Refused("it has keys of another engine: say what you want of it as an option of `foretoken serve`"),
    "attention_backend": Needless(_KERNELS),
    "append_attn": Needless(_KERNELS),
    "block_attn": Needless(_KERNELS),
    "mla_use_matrix_absorption": Needless(_KERNELS),
    "moe_backend": Needless(_KERNELS),
    "disable_custom_all_reduce": Needless("ranks sum by NCCL on GPUs and by gloo on CPU", is_switch=True),
    "enable_flashinfer_allreduce_fusion": Needless("ranks sum by NCCL on GPUs and by gloo on CPU", is_switch=True),
    "inference_model": Needless("every model is served by the engine"),
    "mode": Needless("there is one mode: the model is built from its folder"),
    "use_warmup": Needless("each start warms up"),
    "enable_chunked_prefill": Needless(_CHUNKS, is_switch=True),
    "max_num_partial_prefills": Needless(_CHUNKS),
    "max_long_partial_prefills": Needless(_CHUNKS),
    "long_prefill_token_threshold": Needless(_CHUNKS),
    "scheduling_policy": Needless("requests go by their priority, and those of one priority in their order"),
    "num_scheduler_steps": Needless("the next step is planned while one runs (async_scheduling)"),
    "enable_overlap_schedule": Alias("async_scheduling", is_switch=True),
    # ranks
    "tp": Alias("tensor_parallel_size"),
    "mp_num": Alias("tensor_parallel_size"),
    "enable_expert_parallel": Alias("expert_parallel", is_switch=True),
    "pipeline_parallel_size": Refused("layers are not spread over devices: split the model with --tensor-parallel-size", (1,)),
    "data_parallel_size": Refused(
        "start so many servers (--device cuda:N, ports of their own), and `foretoken gateway --upstream A,B` before them", (1,)
    ),
    "data_parallel_size_local": Refused(_ONE_HOST, (1,)),
    "local_data_parallel_id": Refused(_ONE_HOST),
    "ips": Refused(_ONE_HOST),
    "dist_init_addr": Alias("master"),
    "master_addr": Refused("say --master HOST:PORT"),
    "master_port": Refused("say --master HOST:PORT"),
    "gpus": Needless("say --device cuda:N, or CUDA_VISIBLE_DEVICES in the environment; --tensor-parallel-size says how many"),
    "distributed_executor_backend": Needless("one process for each rank; Triton starts the first, and that the others"),
    "worker_cls": Refused("one process for each rank; its program is fixed", ("auto",)),
    "enable_eplb": Refused("experts stay where they were loaded", is_switch=True),
    # prefill and decode apart (docs/disaggregation.md)
    "splitwise_role": Alias("role"),
    "cache_transfer_protocol": Needless("NIXL chooses the way: memory of the same GPU host, RDMA or TCP"),
    "engine_worker_queue_port": Needless(_PORTS),
    "cache_queue_port": Needless(_PORTS),
    "pd_comm_port": Needless(_PORTS),
    "rdma_comm_ports": Needless(_PORTS),
    "kv_transfer_config": Refused("say --role prefill or decode, and --scheduler-host, the Redis server's (docs/disaggregation.md)"),
    "router": Refused("decode nodes find prefill nodes in Redis: say --scheduler-host"),
    "scheduler_min_load_score": Needless(_SCHEDULER),
    "scheduler_load_shards_num": Needless(_SCHEDULER),
    "scheduler_sync_period": Needless(_SCHEDULER),
    "scheduler_expire_period": Needless(_SCHEDULER),
    "scheduler_release_load_expire_period": Needless(_SCHEDULER),
    "scheduler_reader_parallel": Needless(_SCHEDULER),
    "scheduler_writer_parallel": Needless(_SCHEDULER),
    "scheduler_reader_batch_size": Needless(_SCHEDULER),
    "scheduler_writer_batch_size": Needless(_SCHEDULER),
    # requests and answers
    "seed": Needless("each request may say a seed, and without one its answer is drawn anew"),
    "override_generation_config": Refused("change generation_config.json in the model's folder, or say it in the requests"),
    "enable_logprob": Needless("each request may ask for logprobs, up to 20", is_switch=True),
    "max_logprobs": Needless("each request may ask for logprobs, up to 20"),
    "logprobs_mode": Refused("log-probabilities are those of the model, before any parameter acts", ("raw_logprobs",)),
    "logits_processors": Refused("requests may use logit_bias, bad_words and penalties"),
    "logits_processor_pattern": Refused("requests may use logit_bias, bad_words and penalties"),
    "enable_early_stop": Refused("requests end at end-of-text, stop strings, max_tokens and timeout_ms", is_switch=True),
    "guided_decoding_backend": Needless("requests may say the form of their answer, which llguidance holds them to"),
    "reasoning_parser": Needless("the model's template says how it thinks; what it thinks comes as reasoning_content"),
    "tool_call_parser": Needless("the model's template says how it calls tools"),
    "enable_auto_tool_choice": Needless("requests may say tools and tool_choice", is_switch=True),
    # OpenAI's interface
    "workers": Needless("one gateway takes all requests; the engine is a process of its own"),
    "api_server_count": Needless("one gateway takes all requests; the engine is a process of its own"),
    "api_key": Refused("put the keys into a file, one a line, and name it: --api-keys FILE (a command line can be read by others)"),
    "allowed_origins": Alias("cors_origins"),
    "ssl_keyfile": Refused(_TLS),
    "ssl_certfile": Refused(_TLS),
    "ssl_ca_certs": Refused(_TLS),
    "root_path": Refused("a proxy before the gateway takes the prefix off"),
    "uvicorn_log_level": Needless(_LOG),
    "log_level": Needless(_LOG),
    "disable_log_requests": Needless(_LOG, is_switch=True),
    "enable_log_requests": Needless(_LOG, is_switch=True),
    "disable_log_stats": Needless("counters are on the metrics port, not in the log", is_switch=True),
    "max_log_len": Needless(_LOG),
    "disable_uvicorn_access_log": Needless(_LOG, is_switch=True),
}
"""By their keys; flags are the same with dashes."""

SHORT_FLAGS = {"data_parallel_size": ("-dp",), "pipeline_parallel_size": ("-pp",)}
SHORT_FLAGS |= {"compilation_config": ("-cc",), "optimization_level": ("-O",)}
LISTS = ("lora_modules", "logits_processors", "api_key", "cuda_graph_sizes")
"""Their flags take several words."""
VALUES: dict[str, dict[Any, Any]] = {
    "generation_config": {"vllm": "none"},
    "load_format": {"auto": "safetensors", "default": "safetensors", "default_v1": "safetensors"},
    "dtype": {"half": "float16", "float": "float32"},
    "scheduler_name": {"global": "redis"},
}
"""What others call the values of own keys."""

_SPECULATE = {
    "SPECULATE_METHOD": "method",
    "SPECULATE_MODEL_PATH": "model",
    "SPECULATE_MAX_DRAFT_TOKEN_NUM": "num_speculative_tokens",
    "SPECULATE_MODEL_QUANT_TYPE": "quantization",
}
_STRATEGIES = {"SPECULATE_VERIFY_USE_TOPK": "greedy", "SPECULATE_VERIFY_USE_TARGET_SAMPLING": "target_match"}
_BESIDE = {
    "MODEL_PATH": "--model", "MP_NUM": "--tensor-parallel-size", "BATCH_SIZE": "--max-batch-size",
    "SERVICE_HTTP_PORT": "--port", "BLOCK_RATIO": None, "BLOCK_BS": None,
}  # fmt: skip
"""Names so common that they are looked at beside those above alone. None: nothing is needed."""
_PREFIXES = {"FD_": "FastDeploy", "VLLM_": "vLLM"}


def explain_environment(environment: Mapping[str, str]) -> list[str]:
    """A line for what the environment would tell another server: none of it acts here."""
    found = {name: value for name, value in environment.items() if value}
    lines = []
    if given := [name for name in _SPECULATE if name in found]:
        told: dict[str, Any] = {_SPECULATE[n]: int(found[n]) if found[n].isdigit() else found[n] for n in given}
        lines.append(f"{', '.join(given)} in the environment is not read: say --speculative-config '{json.dumps(told)}'")
        beside = {n: flag for n, flag in _BESIDE.items() if n in found}
        if named := [f"{n} as {flag} {found[n]}" for n, flag in beside.items() if flag]:
            lines.append(f"nor are others: say {', '.join(named)}")
    lines += [
        f'{name} in the environment is not read: say "verify_strategy": "{strategy}" in --speculative-config'
        for name, strategy in _STRATEGIES.items()
        if found.get(name) == "1"
    ]
    for prefix, program in _PREFIXES.items():
        if names := sorted(n for n in found if n.startswith(prefix)):
            lines.append(f"{', '.join(names)} in the environment: of {program}, and without effect here")
    return lines


@dataclass
class Translation:
    """A configuration in own keys."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """A line for each option that has no effect, which says why."""
    sources: dict[str, str] = field(default_factory=dict)
    """What own keys were given as, where that is another name."""

    def explain(self, error: Exception) -> str:
        """An error's message, with the names that its keys were given as."""
        message = str(error)
        named = [f"{own} was given as {theirs}" for own, theirs in self.sources.items() if own in message and theirs not in message]
        return f"{message} ({'; '.join(named)})" if named else message

    def put(self, key: str, value: Any, given_as: str) -> None:
        section, _, name = key.rpartition(".")
        place = self.values
        if section:
            place = self.values.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{section} must be an object of keys and values, got {place!r:.80}")
        if name in place and place[name] != value:
            raise ConfigError(f"{key} is given twice: {place[name]!r:.80}, and {value!r:.80} as {given_as}")
        place[name] = value
        if given_as != key:
            self.sources[name] = given_as


def translate(values: Mapping[str, Any], own: Collection[str]) -> Translation:
    """Keys of any server in those of this one; unknown ones stay as they are. Raises ConfigError for what is done otherwise here, or not at all."""
    found = Translation(
        {key: VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value for key, value in values.items() if key in own}
    )
    if isinstance(nested := found.values.get("speculative_config"), dict):
        found.values["speculative_config"] = dict(nested)
    refused = []
    for given_as, value in values.items():
        if given_as in own:
            continue
        key, other = given_as, OTHERS.get(given_as)
        while isinstance(other, Alias):
            key, value = other.own, not value if other.is_inverted else value
            other = None if key.split(".")[0] in own else OTHERS.get(key)
        if isinstance(other, Needless):
            found.notes.append(f"{given_as} has no effect, and none is needed: {other.why}")
        elif isinstance(other, Refused):
            if value and value not in other.unless:
                refused.append(f"{given_as} {value!r:.80} is not an option here: {other.instead}")
        else:
            found.put(key, VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value, given_as)
    if refused:
        raise ConfigError("; ".join(refused))
    return found


def read_scalar(text: str) -> Any:
    """A flag's value as a file would have it: a number, true or false, or the text itself."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def add_other_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of other servers, which `--help` does not list: those that the parser does not have."""
    taken = {flag for action in parser._actions for flag in action.option_strings}
    for key, other in OTHERS.items():
        flags = [flag for flag in (f"--{key.replace('_', '-')}", *SHORT_FLAGS.get(key, ())) if flag not in taken]
        if not flags:
            continue
        if other.is_switch:
            parser.add_argument(*flags, dest=key, action=argparse.BooleanOptionalAction, default=None, help=argparse.SUPPRESS)
        else:
            nargs = "+" if key in LISTS else None
            is_text = isinstance(other, Alias) and other.own.endswith("model")
            parser.add_argument(*flags, dest=key, nargs=nargs, type=str if is_text else read_scalar, default=None, help=argparse.SUPPRESS)


class ServeParser(argparse.ArgumentParser):
    """Reads flags as others write them: `--max_num_seqs` for `--max-num-seqs`, and `--speculative-config.method ngram` for a key of an object.

    A flag is written in full: an abbreviation that is clear today may be another's name tomorrow.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options["allow_abbrev"] = False
        super().__init__(*args, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(None if args is None else self._rewrite(list(args)), namespace)

    def _rewrite(self, words: list[str]) -> list[str]:
        written: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        left = iter(words)
        for word in left:
            flag, has_value, value = word.partition("=")
            if not flag.startswith("--") or flag == "--":
                written.append(word)
                continue
            flag = flag.replace("_", "-")
            name, dot, key = flag.partition(".")
            if dot and name in self._option_string_actions:
                objects.setdefault(name, {})[key.replace("-", "_")] = read_scalar(value if has_value else next(left, ""))
            else:
                written.append(flag + has_value + value)
        return [*written, *(f"{name}={json.dumps(values)}" for name, values in objects.items())]
