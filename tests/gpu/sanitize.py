"""compute-sanitizer's memcheck and racecheck over the correctness lists of the kernels: python -m tests.gpu.sanitize [tool ...] [kernel ...]

Kernels of others are not looked into but where they must be: racecheck reports hazards in cuDNN's own, and checking them takes most of the time.
Memory is taken for each tensor apart, so that what lies past one's end is nobody's. Exits with 1 when anything was found, or did not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

TOOLS = ["memcheck", "racecheck"]
SECONDS = 480
"""After which a run is given up."""
RUNS = {
    "attention": ("test_attention.py", "test_correctness"),
    "wide_linear": ("test_linear.py", "test_wide and dtype0 and (32-64 or 96-128 or 576-192 or 4256-320 or 12832-64)"),
    "prompt_linear": ("test_linear.py", "test_long and dtype0 and (256-32-64 or 193-96 or 257-576)"),
    "prompt_attention": ("test_prompt_attention.py", "test_pages"),
    "linear": ("test_linear.py", "test_linear and dtype0 and (576-192 or 192-512 or 32-32 or 4256-96)"),
    "rms_norm": ("test_norm.py", ""),
    "append_kv": ("test_append_kv.py", ""),
    "choose": ("test_sampling.py", "test_sample and not large and dtype0 and (8- or 40- or 300-16384-flat)"),
    "probabilities": ("test_distribution.py", "dtype0 and (test_mixed or not_finite)"),
    "draw_tokens": ("test_distribution.py", "test_draw"),
    "verify": ("test_verify.py", ""),
    "candidates": ("test_verify.py", "candidates"),
    "draft_ngram": ("test_ngram.py", ""),
    "prepare": ("test_step.py", ""),
    "quantized_expert_linear": ("test_quantized_experts.py", "few and (test_an_expert or test_a_rank)"),
    "wide_quantized_experts": ("test_quantized_experts.py", "wide and (test_an_expert or test_a_rank)"),
    "commit": ("test_request_table.py", ""),
}
"""Part of a kernel's name: the tests that launch it, and which of them."""
IN_CLUSTERS = {"wide_linear": "nvjet", "linear": "nvjet", "prompt_linear": "nvjet"}
"""Kernels of others that those tests launch in clusters of blocks, by part of their names: under racecheck (2025.3.1) such a launch ends
with an illegal address unless the kernel is looked into."""


def check(tool: str, kernel: str) -> tuple[bool, str]:
    """Runs a kernel's tests under a tool -> whether they passed and nothing was found, and a line that says so."""
    file, chosen = RUNS[kernel]
    names = filter(None, [kernel, IN_CLUSTERS.get(kernel)])
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    command += [word for name in names for word in ("--kernel-name", f"kernel_substring={name}")]
    command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/gpu/{file}", *(["-k", chosen] if chosen else [])]
    started = time.monotonic()
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    except subprocess.TimeoutExpired:
        return False, f"{tool} {kernel}: not done after {SECONDS} s"
    passed = re.search(r"\d+ passed.*", result.stdout)
    summary = re.findall(r"========= ((?:ERROR|RACECHECK) SUMMARY: .*)", result.stdout)
    is_clean = result.returncode == 0 and passed is not None and bool(summary)
    words = summary[-1] if summary else "no summary", passed[0] if passed else "no test passed", f"{time.monotonic() - started:.0f} s"
    line = f"{tool} {kernel}: {'; '.join(words)}"
    if is_clean:
        return True, line
    found = [text for text in result.stdout.splitlines() if text.startswith("=========")]
    return False, "\n".join([line, *found[:40], result.stdout[-1000:], result.stderr[-1000:]])


def main() -> None:
    tools = [name for name in TOOLS if name in sys.argv[1:]] or TOOLS
    kernels = [name for name in RUNS if name in sys.argv[1:]] or list(RUNS)
    with ThreadPoolExecutor(max(1, min(14, len(os.sched_getaffinity(0)) - 2))) as pool:
        futures = [pool.submit(check, tool, kernel) for tool in tools for kernel in kernels]
        results = []
        for future in as_completed(futures):
            results.append(future.result())
            print(results[-1][1], flush=True)
    print(f"{sum(is_clean for is_clean, _ in results)} of {len(results)} clean")
    sys.exit(not all(is_clean for is_clean, _ in results))


if __name__ == "__main__":
    main()
