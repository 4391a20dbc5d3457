"""The server's metrics by vLLM's names."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from client.gateway.aliases import FAMILIES, alias
from tests.conftest import ROOT

TEXT = """\
# HELP foretoken_requests_running Requests in the batch
# TYPE foretoken_requests_running gauge
foretoken_requests_running{model="decode"} 3
foretoken_kv_pages{model="decode"} 200
foretoken_kv_pages_held{model="decode"} 50
foretoken_kv_page_tokens{model="decode"} 16
foretoken_prompt_tokens_total{model="decode"} 90
foretoken_prompt_tokens_cached_total{model="decode"} 30
foretoken_spec_decode_num_emitted_tokens_total{method="mtp",model="decode"} 10
foretoken_spec_decode_num_emitted_tokens_total{method="none",model="decode"} 5
foretoken_spec_decode_num_accepted_tokens_per_pos_total{method="mtp",model="decode",position="1"} 4
foretoken_requests_finished_total{finish_reason="stop",model="decode"} 2
foretoken_request_seconds_bucket{le="0.5",model="decode"} 1
foretoken_request_seconds_sum{model="decode"} 7.25
foretoken_request_seconds_count{model="decode"} 2
foretoken_something_else{model="decode"} 1
nv_inference_count{model="decode"} 1
"""


def test_names_and_labels() -> None:
    text = alias(TEXT, ['a"b'])
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    name = r'engine="0",model_name="a\"b"'
    assert sorted(lines) == sorted(
        [
            f"vllm:num_requests_running{{{name}}} 3.0",
            f"vllm:kv_cache_usage_perc{{{name}}} 0.25",
            f'vllm:cache_config_info{{block_size="16",{name},num_gpu_blocks="200"}} 1.0',
            f"vllm:prompt_tokens_total{{{name}}} 90.0",
            f"vllm:prefix_cache_queries_total{{{name}}} 90.0",
            f"vllm:prefix_cache_hits_total{{{name}}} 30.0",
            f"vllm:generation_tokens_total{{{name}}} 15.0",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{name},position="1"}} 4.0',
            f'vllm:request_success_total{{{name},finished_reason="stop"}} 2.0',
            f'vllm:e2e_request_latency_seconds_bucket{{{name},le="0.5"}} 1.0',
            f"vllm:e2e_request_latency_seconds_sum{{{name}}} 7.25",
            f"vllm:e2e_request_latency_seconds_count{{{name}}} 2.0",
        ]
    )
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert {name: kind for name, kind in kinds.items() if kind == "gauge"} == dict.fromkeys(
        ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"), "gauge"
    )
    assert (
        kinds["vllm:e2e_request_latency_seconds"] == "histogram" and kinds["vllm:generation_tokens"] == "counter" and "unknown" not in kinds.values()
    )
    assert alias("", ["x"]) == alias("nv_x 1\n", ["x"]) == "", "while the server does not answer"


def test_every_name_is_one_that_is_exported() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert [name for name in FAMILIES if f"`foretoken_{name}`" not in page] == []
