"""Options of SGLang's `sglang.launch_server` (release 0.5.23, and older names that guides still have) beside those that it shares with vLLM."""

from __future__ import annotations

from backend.other_servers.kinds import (
    CHUNKS,
    GRAPHS,
    HOST_MEMORY,
    KERNELS,
    LOG,
    LORA,
    NO_STATES,
    NO_TRACES,
    OVERLAP,
    PORTS,
    SETTLED_EXPERTS,
    SUMS,
    TEXT_ONLY,
    TLS,
    WHITESPACE,
    WORKERS,
    Alias,
    Needless,
    Other,
    Refused,
    needless,
    refused,
)

_ATTENTION_RANKS = "attention is split by heads over all ranks (--tensor-parallel-size)"
_ENCODERS = "models of text alone are served: they have no encoders"
_OWN_STATES = "answers have tokens and log-probabilities alone"
_RELOADED = "weights are read once, at the start, from the model's folder"
_FILES = "weights are read from safetensors, file by file"
_NGRAM = "ngram looks in the request's own text; method suffix looks in other answers too (suffix_decoding_* in --speculative-config)"
_BATCHES = "a step takes what fits into max_num_batched_tokens, and prompts no longer than max_step_ms while others decode"
_BUCKETS = "histograms have the bounds of docs/metrics.md"
_CANARY = "it checks SGLang's own memory"
_DUMPS = "nothing is dumped: start the server under a debugger"


SGLANG: dict[str, Other] = {
    # the model
    "context_length": Alias("max_model_len"),
    "tokenizer_path": Alias("tokenizer"),
    **needless("the tokenizer is read from tokenizer.json", others="tokenizer_backend"),
    **refused("models that generate text are served", "is_embedding enable_mis prefill_only_disable_kv_cache"),
    **refused("change the model's config.json", others="json_model_override_args", unless=("{}",)),
    **refused("the configuration is config.json in the model's folder", others="model_config_parser decrypted_config_file "
               "decrypted_draft_config_file",
               unless=("auto",)),
    **refused("keys and values are kept in the model's type", others="speculative_draft_kv_cache_dtype qsa_indexer_dtype "
               "prefill_kv_cache_dequant_dtype", unless=("auto", "bf16")),
    **refused("say --quantization, or serve a checkpoint that is quantized (docs/quantization.md)", "quantize_and_serve",
               "modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path torchao_config"),
    **refused(_RELOADED, "checkpoint_engine_wait_weights_before_ready delete_ckpt_after_loading enable_memory_saver enable_weights_cpu_backup "
               "enable_draft_weights_cpu_backup", "custom_weight_loader rl_quant_profile rl_on_policy_target model_checksum modelexpress_config "
               "remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port weight_cache_mode "
               "remote_instance_weight_loader_send_weights_group_ports weight_cache_socket", unless=("off",)),
    **needless(_RELOADED, "remote_instance_weight_loader_start_seed_via_transfer_engine",
                "remote_instance_weight_loader_backend engine_info_bootstrap_port weight_cache_timeout weight_version"),
    **needless(_FILES, "weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_drop_cache_after_load",
                "weight_loader_prefetch_num_threads startup_weight_load_mode"),
    **refused("the head's products are in the model's type; --dtype float32 computes all in it", "enable_fp32_lm_head"),
    **refused("products are as exact as their type (--dtype)", "enable_tf32_matmul"),
    "hf_chat_template_name": Alias("chat_template"),
    "completion_template": Refused("completions are given to the model as they are; chats by its own template"),
    "sampling_defaults": Alias("generation_config"),
    "preferred_sampling_params": Alias("override_generation_config"),
    **refused(LORA, "enable_lora_overlap_loading", "lora_paths lora_target_modules uno_lora_path"),
    **needless(LORA, "experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading",
                "max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size lora_drain_wait_threshold"),
    **refused(TEXT_ONLY, "enable_multimodal encoder_only"),
    **needless(_ENCODERS, "enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder trust_mm_content_hashes language_only "
                "enable_mm_global_cache disable_fast_image_processor keep_mm_feature_on_device enable_adaptive_dispatch_to_encoder",
                "mm_attention_backend mm_process_config mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb "
                "mm_preprocess_cache_size_mb limit_mm_data_per_request image_processor_backend mm_global_cache_backend mm_feature_transport "
                "mm_max_concurrent_calls mm_per_request_timeout encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls "
                "asr_max_buffer_seconds asr_max_concurrent_sessions"),
    **needless(NO_STATES, "enable_mamba_cache_stochastic_rounding enable_int8_mamba_checkpoint enable_linear_replayssm enable_linear_replayssm_spec "
                "enable_scattered_sconv", "mamba_backend mamba_ssm_dtype mamba_max_states_per_path mamba_cache_philox_rounds mamba_track_interval "
                "mamba_radix_cache_strategy mamba_scheduler_strategy int8_mamba_ckpt_size linear_attn_backend linear_attn_decode_backend "
                "linear_attn_prefill_backend linear_attn_verify_backend linear_replayssm_cache_len max_mamba_cache_size mamba_full_memory_ratio"),
    **refused("models that write from left to right are served, not diffusion", others="dllm_algorithm dllm_algorithm_config"),
    **needless("models that write from left to right are served, not diffusion", "dllm_fdfo"),
    # speculation
    "speculative_algorithm": Alias("speculative_config.speculative_algorithm"),
    "speculative_algo": Alias("speculative_config.speculative_algorithm"),
    "speculative_draft_model_path": Alias("speculative_config.model"),
    "speculative_draft_model": Alias("speculative_config.model"),
    "speculative_draft_model_quantization": Alias("speculative_config.quantization"),
    "speculative_num_steps": Alias("speculative_config.speculative_num_steps"),
    "speculative_eagle_topk": Alias("speculative_config.speculative_eagle_topk"),
    "speculative_num_draft_tokens": Alias("speculative_config.speculative_num_draft_tokens"),
    "speculative_dflash_block_size": Alias("speculative_config.speculative_num_draft_tokens"),
    "speculative_dspark_block_size": Alias("speculative_config.num_speculative_tokens"),
    "speculative_use_rejection_sampling": Alias("speculative_config.speculative_use_rejection_sampling", is_switch=True),
    "speculative_adaptive": Alias("speculative_config.adaptive", is_switch=True),
    "speculative_ngram_min_match_window_size": Alias("speculative_config.min_ngram_size"),
    "speculative_ngram_max_match_window_size": Alias("speculative_config.max_ngram_size"),
    "speculative_draft_model_revision": Refused("the drafter is a folder: download it, and name that", ("main",)),
    "speculative_draft_load_format": Refused("a drafter's weights are read as the target's are: --load-format is of both", ("auto", "safetensors")),
    **refused('say "verify_strategy": "topp" in --speculative-config, or leave it out: drafts stand where the target chooses them (docs/methods.md)',
               others="speculative_accept_threshold_single speculative_accept_threshold_acc", unless=(1,)),
    **refused('drafts are verified one after the other: say "verify_strategy": "rejection" in --speculative-config',
               "speculative_use_block_verification"),
    "speculative_token_map": Alias("speculative_config.speculative_token_map"),
    **refused("a drafter has the windows that its folder says, and no sinks", others="speculative_draft_window_size speculative_draft_sink_size"),
    **refused("drafters run in the servers of their targets", others="decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints "
               "decoupled_spec_role "
               "decoupled_spec_rank", unless=("null",)),
    **needless("every layer that the drafter's checkpoint has is used", "enable_multi_layer_eagle"),
    **needless(KERNELS, "speculative_enable_w4a4_mxfp4_megamoe", "speculative_attention_mode speculative_draft_attention_backend "
                "speculative_dsa_topk_backend speculative_moe_runner_backend"),
    **needless(SUMS, others="speculative_moe_a2a_backend"),
    **needless("who drafts and how much follows measured times (docs/methods.md, How many drafts)",
                "speculative_dspark_align_verify_tokens_to_graph_tier",
                "speculative_adaptive_config speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path"),
    **needless("drafters score their whole vocabulary", others="speculative_domino_candidate_pool_size"),
    **needless(_NGRAM, others="speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth speculative_ngram_match_type "
                "speculative_ngram_max_trie_depth speculative_ngram_capacity speculative_ngram_branch_length "
                "speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens"),
    "speculative_ngram_external_corpus_path": Refused('say "method": "suffix" and "suffix_decoding_corpus" in --speculative-config'),
    "spec_trace_dir": Refused("acceptance is on the metrics port (docs/metrics.md)"),
    # load and memory
    "mem_fraction_static": Alias("gpu_memory_utilization"),
    "max_running_requests": Alias("max_batch_size"),
    "max_queued_requests": Alias("max_waiting"),
    "max_total_tokens": Alias("num_gpu_blocks_override"),
    "chunked_prefill_size": Alias("max_num_batched_tokens", unless=(-1,), why=CHUNKS),
    "disable_radix_cache": Alias("enable_prefix_caching", is_switch=True, is_inverted=True),
    "disable_overlap_schedule": Alias("async_scheduling", is_switch=True, is_inverted=True),
    "schedule_policy": Alias("scheduling_policy"),
    **needless(CHUNKS, "enable_mixed_chunk enable_dynamic_chunking", "max_prefill_tokens"),
    **needless(_BATCHES, "enable_prefill_delayer", "prefill_decode_interval prefill_decode_interval_min_bs prefill_max_requests "
                "prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
                "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay"),
    **needless("requests may say a priority, smaller numbers go first, and a running one gives way only where pages are short",
                "enable_priority_scheduling abort_on_priority_when_disabled disable_priority_preemption schedule_low_priority_values_first",
                "priority_scheduling_preemption_threshold"),
    "default_priority_value": Refused("requests may say a priority; without one it is 0"),
    **needless("a request gets its next page when it needs it; where none is left the newest of the least urgent is computed anew later",
                "disable_hybrid_swa_memory", "retraction_policy schedule_conservativeness num_reserved_decode_tokens swa_full_tokens_ratio "
                "swa_prefix_tails c128_page_size"),
    **needless("the next step is planned while one runs (async_scheduling)", others="num_continuous_decode_steps scheduler_recv_interval"),
    **needless("a hit in the prefix cache is read where it lies", "disable_chunked_prefix_cache enable_page_major_kv_layout enable_unified_memory "
                "strip_thinking_cache", "radix_cache_backend"),
    **needless("of pages that nobody uses the one used longest ago goes first", "enable_session_radix_cache", "radix_eviction_policy "
                "radix_eviction_policy_config"),
    **refused(HOST_MEMORY, "enable_hierarchical_cache enable_hicache enable_unified_cache_external_linker enable_lmcache enable_flexkv "
               "enable_hisparse",
               "hicache_storage_backend"),
    **needless(HOST_MEMORY, "enable_linker_mla_dedup", "hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction "
                "hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_prefetch_policy hicache_storage_backend_extra_config "
                "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts unified_cache_external_linker_backend "
                "unified_cache_external_linker_config lmcache_config_file flexkv_config_file hisparse_config "
                "hierarchical_sparse_attention_extra_config"),
    **refused("weights lie on the device whole: split them with --tensor-parallel-size", "enable_paged_experts ple_offload_embedding",
               "offload_group_size kt_weight_path paged_experts_num_resident", unless=(-1,)),
    **needless("weights lie on the device whole", others="offload_num_in_group offload_prefetch_step offload_mode ple_offload_backend "
                "ple_offload_dir "
                "kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token"),
    **needless(GRAPHS, "disable_cuda_graph disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph_padding "
                "enable_profile_cuda_graph "
                "enable_cudagraph_gc debug_cuda_graph enable_torch_compile enable_torch_compile_debug_mode disable_piecewise_cuda_graph "
                "enable_piecewise_cuda_graph", "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode "
                "cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context "
                "context_bucket cuda_graph_max_bs cuda_graph_bs torch_compile_max_bs"),
    **needless(KERNELS, "enable_lean_attention enable_nvidia_megakernel enable_amd_monokernel disable_flashinfer_autotune enable_fused_qk_norm_rope "
                "triton_attention_reduce_in_fp32 flashinfer_mla_disable_ragged enable_precise_embedding_interpolation enable_deepseek_v4_fp4_indexer "
                "enable_dsa_fused_indexer enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay enable_flashinfer_mla disable_mla "
                "disable_shared_experts_fusion enforce_shared_experts_fusion enable_w4a4_mxfp4_megamoe disable_flashinfer_cutlass_moe_fp4_allgather "
                "enable_waterfill mlx_enable_sampling", "decode_attention_backend prefill_attention_backend sampling_backend fp8_gemm_runner_backend "
                "fp8_gemm_backend fp4_gemm_runner_backend fp4_gemm_backend bf16_gemm_backend dsa_prefill_backend dsv4_prefill_backend "
                "dsa_triton_union "
                "dsa_decode_backend dsv4_attn_backend dsa_paged_mqa_logits_backend dsa_topk_backend flashinfer_autotune_skip_ops "
                "triton_attention_num_kv_splits triton_attention_split_tile_size moe_runner_backend flashinfer_mxfp4_moe_precision "
                "monokernel_backend"),
    **needless(OVERLAP, "enable_two_batch_overlap enable_single_batch_overlap", "tbo_token_distribution_threshold"),
    **refused("in float32 (--dtype float32) answers do not depend on what else runs; in bfloat16 near-ties may", "enable_deterministic_inference"),
    "allow_auto_truncate": Refused("a prompt that is too long is an error: cut it, or raise --max-model-len", is_switch=True),
    # ranks
    "tp_size": Alias("tensor_parallel_size"),
    "pp": Alias("pipeline_parallel_size"),
    "pp_size": Alias("pipeline_parallel_size"),
    "dp": Alias("data_parallel_size"),
    "dp_size": Alias("data_parallel_size"),
    "dcp_size": Alias("decode_context_parallel_size"),
    **refused("say --expert-parallel: each rank holds whole experts", others="ep ep_size expert_parallel_size", unless=(1,)),
    **refused(_ATTENTION_RANKS, "enable_dp_attention enable_prefill_cp enable_dsa_cache_layer_split enable_cp_decode_attn_tp "
               "enable_kv_cache_sharding",
               "attn_dp_size attention_data_parallel_size attn_cp_size attention_context_parallel_size dwdp_size cp_strategy", unless=(1,)),
    **refused("every layer is split over all ranks (--tensor-parallel-size)", others="moe_dp_size moe_data_parallel_size moe_dense_tp_size "
               "shared_experts_tp_size", unless=(1,)),
    **needless(_ATTENTION_RANKS, "enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all dcp_replicate_q_proj "
                "enable_attn_tp_input_scattered enable_shared_experts_attn_tp enable_dense_mlp_attn_tp enable_layernorm_sp disable_attn_tp_gather "
                "enable_megamoe_for_layernorm_sp speculative_skip_dp_mlp_sync", "dcp_comm_backend"),
    **needless(SUMS, "enable_nccl_nvls enable_symm_mem enable_mscclpp enable_torch_symm_mem enable_fused_moe_sum_all_reduce pre_warm_nccl "
                "enable_p2p_check "
                "enforce_disable_flashinfer_allreduce_fusion enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill "
                "disable_aiter_allreduce_fusion_in_decode enable_quant_communications enable_deepep_moe", "moe_a2a_backend deepep_mode "
                "deepep_v2_mode "
                "fuseep_mode deepep_config deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type flashinfer_allreduce_fusion_backend "
                "boundary_reduction mooncake_ib_device"),
    **refused(SETTLED_EXPERTS, "enable_elastic_expert_backup", "ep_num_redundant_experts elastic_ep_backend ep_join_mode elastic_ep_join_mode "
               "max_ep_size "
               "ep_join_rank_offset elastic_ep_join_rank_offset elastic_ep_initial_size init_expert_location expert_distribution_recorder_mode",
               unless=("trivial",)),
    **needless(SETTLED_EXPERTS, others="ep_dispatch_algorithm eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
                "eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_buffer_size expert_balancedness_report_mode "
                "elastic_ep_scale_timeout"),
    **needless("layers are not spread over devices", others="pp_max_micro_batch_size pp_async_batch_depth"),
    **needless("of several servers the gateway chooses by open requests, load and prefixes (--upstream)", others="load_balance_method"),
    "nccl_init_addr": Alias("master"),
    "dist_timeout": Needless("ranks tell each other that they live: one that says nothing for 3.5 seconds ends the group"),
    **needless(PORTS, others="nccl_port gated_launch_port"),
    "base_gpu_id": Refused("say --device cuda:N, the first rank's GPU"),
    "gpu_id_step": Refused("ranks take GPUs in a row from --device on; choose them by CUDA_VISIBLE_DEVICES in the environment", (1,)),
    "use_ray": Needless("one process for each rank; the first starts the others", is_switch=True),
    "numa_node": Needless("say --num-threads, and start the server under numactl"),
    # prefill and decode apart (docs/disaggregation.md)
    "disaggregation_mode": Alias("role"),
    "disaggregation_transfer_backend": Alias("cache_transfer_protocol"),
    "disaggregation_ib_device": Alias("cache_transfer_protocol"),
    **needless("decode nodes find prefill nodes in Redis (--scheduler-host)", others="disaggregation_bootstrap_port"),
    **needless("a decode node asks its own prefix cache, and fetches what lacks into its own pages", "disaggregation_decode_enable_radix_cache "
                "disaggregation_enable_kv_checksum", "disaggregation_decode_allocation_policy disaggregation_decode_retraction_backup "
                "disaggregation_decode_extra_slots disaggregation_decode_polling_interval disaggregation_decode_host_receive_threshold"),
    **refused(HOST_MEMORY, "disaggregation_decode_enable_offload_kvcache"),
    **refused("a node that does both is --role mixed", "enable_pdmux enable_pd_role_switch", "pdmux_config_path"),
    **needless("a decode node computes a prompt itself where no prefill node does", others="optimistic_prefill_attempts sm_group_num"),
    # requests and answers
    "random_seed": Alias("seed"),
    "grammar_backend": Alias("guided_decoding_backend"),
    "constrained_json_disable_any_whitespace": Refused(WHITESPACE, is_switch=True),
    **refused(WHITESPACE, others="constrained_json_whitespace_pattern constrained_json_max_whitespace_cnt"),
    **needless("forms are compiled in memory", "disable_outlines_disk_cache"),
    "enable_strict_thinking": Refused("what a model thinks is free: the form of an answer holds after it", is_switch=True),
    "enable_custom_logit_processor": Refused("requests may use logit_bias, bad_words and penalties", is_switch=True),
    **refused(_OWN_STATES, "enable_return_hidden_states enable_return_aux_hidden_states enable_return_routed_experts enable_return_indexer_topk "
               "enable_watermark", "return_hidden_states_mode return_aux_hidden_state_layer_ids watermark_config"),
    **needless(_OWN_STATES, others="sampling_mask_max_tokens"),
    **refused("requests may say return_tokens", "return_input_ids return_output_ids"),
    "enable_cache_report": Needless("usage always has prompt_tokens_details.cached_tokens", is_switch=True),
    "stream_response_default_include_usage": Alias("enable_force_include_usage", is_switch=True),
    **needless("streams carry what is new", "incremental_streaming_output"),
    **refused("nothing is stored: the whole conversation comes with each request", "enable_response_store enable_streaming_session",
               "file_storage_path"),
    # the interface, its log and its counters
    "admin_api_key": Refused("put the keys into a file, one a line, and name it: --admin-keys FILE (a command line can be read by others)"),
    "fastapi_root_path": Alias("root_path"),
    "ssl_keyfile_password": Refused(TLS),
    **refused("Triton's own gRPC is on --grpc-port", "grpc_mode smg_grpc_mode"),
    **refused("start other programs by themselves", others="sidecar sidecar_args"),
    **refused("put a proxy before the gateway", "enable_http2"),
    **needless("the gateway speaks HTTP/1.1", others="http2_max_concurrent_streams http2_initial_connection_window_size"),
    **needless(WORKERS, "enable_http_worker_reuseport enable_dynamic_batch_tokenizer enable_tokenizer_batch_encode disable_tokenizer_batch_decode",
                "tokenizer_worker_num detokenizer_worker_num grpc_worker_threads batch_notify_size dynamic_batch_tokenizer_batch_size "
                "dynamic_batch_tokenizer_batch_timeout smg_http_sidecar_port grpc_http_sidecar_port grpc_response_timeout_secs gc_threshold "
                "gc_warning_threshold_secs"),
    **needless("each start warms up", "skip_server_warmup", "warmups"),
    "watchdog_timeout": Alias("hang_seconds"),
    **needless("a model that hangs is brought back (--hang-seconds)", others="soft_watchdog_timeout crash_dump_folder"),
    **needless("the engine's thread sleeps where there is nothing to do", "sleep_on_idle"),
    **needless(LOG, "log_requests show_time_cost enable_request_time_stats_logging", "log_level_http log_requests_level log_requests_format "
                "log_requests_target uvicorn_access_log_exclude_prefixes decode_log_interval"),
    **needless("counters are always on the metrics port (docs/metrics.md)", "enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers "
                "enable_forward_pass_metrics", "load_snapshot_publish_interval tokenizer_metrics_custom_labels_header forward_pass_metrics_worker_id "
                "forward_pass_metrics_ipc_name"),
    **refused(_BUCKETS, others="bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets "
               "generation_tokens_buckets"),
    **refused("Prometheus adds labels where it collects", others="extra_metric_labels tokenizer_metrics_allowed_custom_labels"),
    **refused("counters are on the metrics port (docs/metrics.md)", "export_metrics_to_file", "export_metrics_to_file_dir load_publish_endpoint"),
    **refused(NO_TRACES, "enable_trace enable_layerwise_nvtx_marker"),
    **needless(NO_TRACES, others="trace_modules otlp_service_name"),
    **needless(_CANARY, others="kv_canary kv_canary_real_data kv_canary_sweep_interval"),
    **refused(_DUMPS, others="debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file forward_hooks "
               "msprobe_dump_config"),
}  # fmt: skip
"""By their keys, as `OTHERS`."""

SGLANG_LISTS = (
    "flashinfer_autotune_skip_ops", "lora_target_modules", "lora_paths", "custom_weight_loader", "cuda_graph_bs", "cuda_graph_bs_decode",
    "cuda_graph_bs_prefill", "log_requests_target", "uvicorn_access_log_exclude_prefixes", "bucket_time_to_first_token", "bucket_inter_token_latency",
    "bucket_e2e_request_latency", "prompt_tokens_buckets", "generation_tokens_buckets", "prefill_delayer_forward_passes_buckets",
    "prefill_delayer_wait_seconds_buckets",
    "return_aux_hidden_state_layer_ids", "encoder_urls",
    "debug_tensor_dump_layers", "numa_node", "gc_threshold", "decoupled_spec_connect_endpoints", "allowed_media_domains", "sidecar_args",
    "model_checksum", "tokenizer_metrics_allowed_custom_labels", "remote_instance_weight_loader_send_weights_group_ports", "forward_hooks",
    "encoder_register_urls",
)  # fmt: skip
