"""The server's metrics by the names that vLLM gives them: dashboards, autoscalers and Kubernetes' inference gateways look for those."""

from __future__ import annotations

import re
from collections.abc import Iterable

FAMILIES = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "preemptions_total": "num_preemptions_total",
    "prompt_tokens_total": "prompt_tokens_total",
    "prompt_tokens_cached_total": "prefix_cache_hits_total",
    "spec_decode_num_emitted_tokens_total": "generation_tokens_total",
    "spec_decode_num_drafts_total": "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total": "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total": "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total": "spec_decode_num_accepted_tokens_per_pos_total",
    "requests_finished_total": "request_success_total",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "inter_token_seconds": "inter_token_latency_seconds",
    "request_seconds": "e2e_request_latency_seconds",
    "request_queue_seconds": "request_queue_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_output_tokens": "request_generation_tokens",
}
"""vLLM's by ours, both without their prefix; a histogram's series follow its name."""
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
_SERIES = re.compile(r"^foretoken_(\w+?)(_bucket|_sum|_count)?(?:\{(.*)\})? (\S+)$", re.M)


def alias(text: str, model_names: Iterable[str]) -> str:
    """The same series once more, as `vllm:NAME{model_name=...}`; what differs by method alone is summed, as one server has one there.

    With their types: what reads gauges takes a series without a type for none.
    """
    model = next(iter(model_names)).replace("\\", "\\\\").replace('"', '\\"')
    own = f'engine="0",model_name="{model}"'  # dashboards choose by both
    sums: dict[tuple[str, str], float] = {}
    pages: dict[str, float] = {}
    queries = 0.0
    for name, part, labels, value in _SERIES.findall(text):
        pages[name] = float(value)
        whole = name + part
        theirs = FAMILIES.get(whole) or (FAMILIES[name] + part if name in FAMILIES and part else None)
        if theirs is None:
            continue
        kept = [label for label in re.findall(r'(\w+="(?:[^"\\]|\\.)*")', labels) if not label.startswith(("model=", "method="))]
        kept = [label.replace("finish_reason=", "finished_reason=") for label in kept]
        key = theirs, ",".join([own, *kept])
        sums[key] = sums.get(key, 0.0) + float(value)
        queries += float(value) if whole == "prompt_tokens_total" else 0.0
    if not sums:
        return ""
    sums["prefix_cache_queries_total", own] = queries
    if pages.get("kv_pages"):
        sums["kv_cache_usage_perc", own] = pages.get("kv_pages_held", 0.0) / pages["kv_pages"]
        size, count = (int(pages.get(name, 0)) for name in ("kv_page_tokens", "kv_pages"))
        sums["cache_config_info", f'block_size="{size}",{own},num_gpu_blocks="{count}"'] = 1.0
    lines, last = [], ""
    for (name, labels), value in sorted(sums.items()):
        family = re.sub("_(bucket|sum|count)$", "", name)
        if family != last:
            kind = "gauge" if name in _GAUGES else "counter" if name.endswith("_total") else "histogram"
            lines.append(f"# TYPE vllm:{family} {kind}\n")
            last = family
        lines.append(f"vllm:{name}{{{labels}}} {value!r}\n")
    return "".join(lines)
