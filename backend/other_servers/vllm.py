"""Options of `vllm serve` that only its oldest releases have (before 0.9, whose commands guides still show), or only its newest."""

from __future__ import annotations

from backend.other_servers.kinds import (
    GRAPHS,
    HOST_MEMORY,
    KERNELS,
    LOG,
    LORA,
    NO_STATES,
    NO_TRACES,
    ONE_HOST,
    OVERLAP,
    TEXT_ONLY,
    TLS,
    WORKERS,
    Alias,
    Other,
    Refused,
    needless,
    refused,
)

_ACCEPTANCE = 'say "verify_strategy" in --speculative-config: target_match, greedy, rejection or topp'
_PAGES = "a request gets its next page when it needs it; where none is left the newest of the least urgent is computed anew later"

VLLM: dict[str, Other] = {
    # speculation, before it was one object
    "ngram_prompt_lookup_max": Alias("speculative_config.max_ngram_size"),
    "ngram_prompt_lookup_min": Alias("speculative_config.min_ngram_size"),
    "speculative_model_quantization": Alias("speculative_config.quantization"),
    "speculative_draft_tensor_parallel_size": Alias("speculative_config.draft_tensor_parallel_size"),
    **needless("a drafter's context is the target's", others="speculative_max_model_len"),
    **needless("all drafts of a step are verified in one pass", "speculative_disable_mqa_scorer"),
    **refused("adaptive drafting, the default, measures when drafts pay", others="speculative_disable_by_batch_size"),
    "spec_decoding_acceptance_method": Refused(_ACCEPTANCE, ("rejection_sampler",)),
    **refused(_ACCEPTANCE, others="typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha"),
    **needless("requests may ask for logprobs, with drafts too", "disable_logprobs_during_spec_decoding"),
    # and beside it
    "spec_method": Alias("speculative_config.method"),
    "spec_model": Alias("speculative_config.model"),
    "spec_tokens": Alias("speculative_config.num_speculative_tokens"),
    # the model
    **needless("text is made of tokens as they come, byte by byte", others="intial_incremental_detokenization_offset"),
    **needless(WORKERS, others="tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers"),
    **refused(LORA, "enable_lora_bias enable_prompt_adapter enable_tower_connector_lora",
              "qlora_adapter_name_or_path default_mm_loras prompt_adapters"),
    **needless(LORA, "specialize_active_lora", "lora_extra_vocab_size long_lora_scaling_factors max_prompt_adapters max_prompt_adapter_token"),
    **needless(TEXT_ONLY, "enable_mm_embeds enable_mm_processor_stats enable_flash_late_interaction",
               "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_attn_backend video_pruning_rate allowed_media_domains"),
    **refused(TEXT_ONLY, "mm_encoder_only omni"),
    **refused("models that generate text are served", others="pooler_config"),
    **needless("the checkpoint says how its weights are stored; --quantization rounds others", "allow_deprecated_quantization"),
    **refused("the checkpoint says how its weights are stored; say --quantization for others", others="quantization_config"),
    **needless("weights are read from safetensors, file by file", others="safetensors_prefetch_num_threads safetensors_prefetch_block_size"),
    **refused("weights are read once, at the start", others="weight_transfer_config"),
    **refused("answers have tokens and log-probabilities alone", "enable_return_routed_experts"),
    # load and memory
    **needless("pages are the only way that keys and values are kept", "use_v2_block_manager"),
    **needless(_PAGES, others="preemption_mode"),
    **needless("requests begin as soon as there is room", others="scheduler_delay_factor max_paddings"),
    **needless("each step's tokens are sent", "multi_step_stream_outputs"),
    **needless("a thread of its own sends what a step made", "use_async_output_proc"),
    **refused("weights lie on the device whole: split them with --tensor-parallel-size", others="offload_backend offload_params cpu_offload_params"),
    **refused(HOST_MEMORY, others="ec_transfer_config"),
    **needless(GRAPHS, others="max_context_len_to_capture cudagraph_capture_sizes max_cudagraph_capture_size"),
    **needless(KERNELS, "enable_flashinfer_autotune", "kernel_config ir_op_priority mamba_backend linear_backend"),
    **needless(NO_STATES, "enable_mamba_cache_stochastic_rounding", "mamba_cache_mode"),
    # ranks
    **needless("one process for each rank; the first starts the others", "worker_use_ray engine_use_ray"),
    **needless(OVERLAP, "enable_dbo", "dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size"),
    **needless("attention is split by heads over all ranks", others="cp_kv_cache_interleave_size dcp_kv_cache_interleave_size dcp_comm_backend"),
    **needless(ONE_HOST, "disable_nccl_for_dp_synchronization", "data_parallel_supervisor_port dp_supervisor_probe_interval_s "
               "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold"),
    **refused("the number of ranks is settled at the start", "enable_elastic_ep"),
    **needless("each rank reads its own part of the weights", "enable_ep_weight_filter"),
    **needless("ranks tell each other that they live: one that says nothing for 3.5 seconds ends the group", others="distributed_timeout_seconds"),
    **needless("a model that dies or hangs is brought back (--hang-seconds, --max-restarts)",
               "enable_fault_tolerance shutdown_on_fault_tolerance_failure",
               "engine_recovery_timeout internal_fault_report_port external_fault_notify_port gloo_comm_timeout"),
    # requests and answers
    **needless("the model's template says how it thinks; what it thinks comes as reasoning_content", "enable_reasoning"),
    **refused("the model's template says how it thinks", others="reasoning_parser_plugin reasoning_config"),
    **needless("there is one compiler of forms, and what it cannot enforce it refuses", "guided_decoding_disable_fallback"),
    **refused("say additionalProperties false in the schemas", "guided_decoding_disable_additional_properties"),
    # OpenAI's interface, its log and its counters
    **needless("each choice has what speculation brought, and Server-Timing the time to the first token", "enable_per_request_metrics"),
    **needless(LOG, "enable_log_deltas log_error_stack enable_logging_iteration_details aggregate_engine_logging",
               "disable_access_log_for_endpoints"),
    **needless("counters are on the metrics port", "kv_cache_metrics cudagraph_metrics enable_mfu_metrics", "kv_cache_metrics_sample"),
    **refused(NO_TRACES, "enable_layerwise_nvtx_tracing"),
    **needless("that interface is not served", "cohere_is_reasoning_model", "cohere_format"),
    **needless("answers have no system_fingerprint; /version says what is served", others="fingerprint_mode fingerprint_value"),
    **refused(TLS, others="ssl_ciphers"),
    **needless("a request's head may have 65,536 bytes", others="h11_max_incomplete_event_size h11_max_header_count"),
    **needless("the gateway shows no such pages", "enable_offline_docs"),
    **refused("Triton's own gRPC is on --grpc-port", "grpc"),
    **needless("what the environment would tell another server is said at the start", "fail_on_environ_validation"),
}  # fmt: skip
"""By their keys, as `OTHERS`."""

VLLM_LISTS = ("cudagraph_capture_sizes", "offload_params", "cpu_offload_params", "prompt_adapters", "allowed_media_domains")
