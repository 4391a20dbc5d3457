"""Options of other servers' serve commands (vLLM, FastDeploy, PaddleNLP), and what each is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
_NO_STATES = "families with recurrent states are not served"
_WHITESPACE = "requests may say disable_any_whitespace in structured_outputs"
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
    "load_choice": Alias("load_format"),
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
    "hf_config_path": Refused("the configuration is config.json in the model's folder"),
    "hf_token": Refused("set HF_TOKEN in the environment, or log in with `hf auth login` (a command line can be read by others)"),
    "rope_theta": Refused("change rope_theta in the model's config.json"),
    "skip_tokenizer_init": Refused("text is made of tokens here: the tokenizer is needed", is_switch=True),
    "enable_prompt_embeds": Refused("prompts are text, token ids or messages", is_switch=True),
    "disable_sliding_window": Refused("windows are the model's: change config.json", is_switch=True),
    "override_attention_dtype": Refused("attention computes in the model's type (--dtype)"),
    "override_pooler_config": Refused("models that generate text are served"),
    "override_neuron_config": Refused("models run on CPU and on NVIDIA's GPUs"),
    "model_loader_extra_config": Needless("weights are read from safetensors, file by file"),
    "safetensors_load_strategy": Needless("weights are read from safetensors, file by file"),
    "ignore_patterns": Needless("of a name on the hub what is served is downloaded alone"),
    "use_tqdm_on_load": Needless("a bar shows how far loading is where the output is a terminal", is_switch=True),
    "pt_load_map_location": Needless("weights are read from safetensors straight to the device"),
    "rollout_model_loading": Refused("weights are read once, at the start", is_switch=True),
    "enable_sleep_mode": Refused("a server that is not needed is stopped", is_switch=True),
    "moe_gate_fp32": Needless("routers compute in float32", is_switch=True),
    "lora_dtype": Needless(_LORA),
    "max_cpu_loras": Needless(_LORA),
    "fully_sharded_loras": Needless(_LORA, is_switch=True),
    "allowed_local_media_path": Needless(_TEXT_ONLY),
    "media_io_kwargs": Needless(_TEXT_ONLY),
    "mm_processor_cache_gb": Needless(_TEXT_ONLY),
    "disable_mm_preprocessor_cache": Needless(_TEXT_ONLY, is_switch=True),
    "interleave_mm_strings": Needless(_TEXT_ONLY, is_switch=True),
    "skip_mm_profiling": Needless(_TEXT_ONLY, is_switch=True),
    "mm_encoder_tp_mode": Needless(_TEXT_ONLY),
    "enable_multimodal_encoder_data_parallel": Needless(_TEXT_ONLY, is_switch=True),
    "language_model_only": Needless(_TEXT_ONLY, is_switch=True),
    "max_encoder_cache": Needless(_TEXT_ONLY),
    "io_processor_plugin": Refused(_TEXT_ONLY),
    "deploy_modality": Refused(_TEXT_ONLY, ("text",)),
    "mamba_cache_dtype": Needless(_NO_STATES),
    "mamba_ssm_cache_dtype": Needless(_NO_STATES),
    "mamba_block_size": Needless(_NO_STATES),
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
    "max_num_scheduled_tokens": Alias("max_num_batched_tokens"),
    "max_num_queued_requests": Alias("max_waiting"),
    "max_waiting_time": Refused("each request may say its timeout_ms"),
    "num_cpu_blocks": Needless("requests that lose their pages are computed anew: none are kept in the host's memory"),
    "kv_offloading_size": Refused("pages of keys and values are kept on the device alone"),
    "kv_offloading_backend": Refused("pages of keys and values are kept on the device alone"),
    "write_policy": Refused("pages of keys and values are kept on the device alone"),
    "prefix_caching_hash_algo": Needless("beginnings are compared by a hash that is the same in every process"),
    "kv_sharing_fast_prefill": Needless("families that share keys and values between layers are not served", is_switch=True),
    "disable_hybrid_kv_cache_manager": Needless("every layer keeps its pages by the same table", is_switch=True),
    "num_lookahead_slots": Needless("room for drafts is made as they are planned"),
    "multi_step": Needless("the next step is planned while one runs (async_scheduling)"),
    "scheduler_cls": Refused("there is one scheduler"),
    "scheduler_reserve_full_isl": Needless("a request gets its next page when it needs it", is_switch=True),
    "disable_async_output_proc": Needless("a thread of its own sends what a step made", is_switch=True),
    "stream_interval": Needless("each step's tokens are sent, and those of steps that pile up together"),
    "max_parallel_loading_workers": Needless("each rank reads its own part of the weights"),
    "attention_config": Needless(_KERNELS),
    "plas_attention_config": Refused("attention is that of the model: no part of the context is left out"),
    "performance_mode": Needless(_KERNELS),
    "numa_bind": Needless("say --num-threads, and start the server under numactl", is_switch=True),
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
    "decode_context_parallel_size": Refused("one request's context is not spread over ranks", (1,)),
    "prefill_context_parallel_size": Refused("one request's context is not spread over ranks", (1,)),
    "data_parallel_rank": Refused(_ONE_HOST),
    "data_parallel_start_rank": Refused(_ONE_HOST),
    "data_parallel_address": Refused(_ONE_HOST),
    "data_parallel_rpc_port": Refused(_ONE_HOST),
    "data_parallel_backend": Needless(_ONE_HOST),
    "data_parallel_hybrid_lb": Refused(_ONE_HOST, is_switch=True),
    "data_parallel_external_lb": Refused(_ONE_HOST, is_switch=True),
    "headless": Refused("say --nnodes, --node-rank and --master: hosts after the first answer no clients", is_switch=True),
    "all2all_backend": Needless("experts' sums go over the ranks' own collectives"),
    "use_internode_ll_two_stage": Needless("experts' sums go over the ranks' own collectives", is_switch=True),
    "ep_prefill_use_worst_num_tokens": Needless("experts' sums go over the ranks' own collectives", is_switch=True),
    "disable_sequence_parallel_moe": Needless("ranks compute all tokens of a step", is_switch=True),
    "eplb_config": Refused("experts stay where they were loaded"),
    "expert_placement_strategy": Refused("experts are laid out in their order", ("linear",)),
    "num_redundant_experts": Refused("experts stay where they were loaded"),
    "ray_workers_use_nsight": Refused("start the server under nsys", is_switch=True),
    "worker_extension_cls": Refused("one process for each rank; its program is fixed"),
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
    "innode_prefill_ports": Refused("decode nodes find prefill nodes in Redis: say --scheduler-host"),
    "kv_events_config": Refused("gateways follow what they sent to a server; it publishes no events of its cache"),
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
    "early_stop_config": Refused("requests end at end-of-text, stop strings, max_tokens and timeout_ms"),
    "structured_outputs_config": Needless("requests may say the form of their answer, which llguidance holds them to"),
    "guided_decoding_disable_any_whitespace": Refused(_WHITESPACE, is_switch=True),
    "disable_any_whitespace": Refused(_WHITESPACE, is_switch=True),
    "tool_parser_plugin": Refused("calls are read by the model's family (docs/api.md, Tools)"),
    "tool_server": Refused("clients run the tools that a model calls"),
    "exclude_tools_when_tool_choice_none": Refused("a request that is to have no tools leaves them out", is_switch=True),
    "chat_template_content_format": Refused("templates are given texts", ("auto", "string")),
    "default_chat_template_kwargs": Refused("requests may say chat_template_kwargs; or write what is meant into chat_template.jinja"),
    "trust_request_chat_template": Refused("the template is the model's own", is_switch=True),
    "response_role": Refused("answers are the assistant's", ("assistant",)),
    "return_tokens_as_token_ids": Refused("requests may say return_tokens", is_switch=True),
    "enable_keep_sampling_mask": Refused("answers have log-probabilities alone", is_switch=True),
    "enable_entropy": Refused("answers have log-probabilities alone", is_switch=True),
    "enable_prompt_tokens_details": Needless("usage always has prompt_tokens_details", is_switch=True),
    "enable_force_include_usage": Refused("requests may say stream_options.include_usage", is_switch=True),
    "tokens_only": Refused("the gateway takes text and token ids", is_switch=True),
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
    "uds": Refused("the gateway listens on --host and --port"),
    "allow_credentials": Refused("requests from other origins carry a key, not cookies", is_switch=True),
    "allowed_methods": Needless("other origins may GET and POST"),
    "allowed_headers": Needless("other origins may send any header"),
    "enable_ssl_refresh": Refused(_TLS, is_switch=True),
    "ssl_cert_reqs": Refused(_TLS),
    "middleware": Refused("put a proxy before the gateway"),
    "disable_frontend_multiprocessing": Needless("the engine is a process of its own", is_switch=True),
    "enable_request_id_headers": Needless("each answer carries x-request-id", is_switch=True),
    "disable_fastapi_docs": Needless("the gateway shows no such pages", is_switch=True),
    "enable_server_load_tracking": Needless("load is on the metrics port", is_switch=True),
    "enable_tokenizer_info_endpoint": Refused("POST /tokenize and /detokenize say what tokens are", is_switch=True),
    "max_concurrency": Needless("what neither runs nor may wait (--max-batch-size, --max-waiting) is refused at once"),
    "timeout": Refused("each request may say its timeout_ms"),
    "shutdown_timeout": Alias("drain_seconds"),
    "timeout_graceful_shutdown": Alias("drain_seconds"),
    "controller_port": Refused("the supervisor's state is on --status-port"),
    "log_config_file": Needless(_LOG),
    "enable_log_outputs": Refused("answers are not logged", is_switch=True),
    "show_hidden_metrics_for_version": Needless("no metric is hidden"),
    "otlp_traces_endpoint": Refused("steps and requests are counted on the metrics port; there are no traces"),
    "collect_detailed_traces": Refused("steps and requests are counted on the metrics port; there are no traces"),
    "profiler_config": Refused("start the server under nsys or py-spy"),
}
"""By their keys; flags are the same with dashes."""

SHORT_FLAGS = {"data_parallel_size": ("-dp",), "pipeline_parallel_size": ("-pp",), "decode_context_parallel_size": ("-dcp",)}
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
