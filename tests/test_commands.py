"""Commands as FastDeploy's, PaddleNLP's, vLLM's and SGLang's documentation has them, with `foretoken serve` for their programs and folders that
exist for theirs: each starts, or its message says what differs."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend import LLM
from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, DEFAULT_DRAFTER, EngineConfig
from backend.errors import ConfigError
from backend.other_servers.kinds import Alias, Needless, Refused
from backend.other_servers.tables import OTHERS
from backend.speculative_config import SpeculativeConfig
from backend.speculative_names import READ_HERE
from client.messages import Chunk
from deploy import demo, launcher
from deploy.cli import main, make_parser
from deploy.options import GATEWAY_KEYS, read_command, split_keys
from deploy.other_options import explain_environment
from deploy.server import free_ports
from deploy.together import FORETOKEN
from tests.test_config import parameters_of, read_pbtxt

FASTDEPLOY = "python -m fastdeploy.entrypoints.openai.api_server --model ${path_to_main_model} "
YAML = """\
max_model_len: 1024
max_num_seqs: 96
gpu_memory_utilization: 0.8
kv_cache_ratio: 0.71
tensor_parallel_size: 4
"""
"""Of the benchmarks that the commands name; the context is the bundled model's."""
PREFILL_YAML = (
    YAML
    + """\
splitwise_role: prefill
enable_prefix_caching: False
cache_queue_port: 55664
engine_worker_queue_port: 6677
cache_transfer_protocol: "rdma,ipc"
rdma_comm_ports: "7675,7676,7677,7678"
pd_comm_port: "2333"
"""
)
NODE = """python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${{path_to_main_model}} \\
    --port {port}0 \\
    --metrics-port {port}1 \\
    --engine-worker-queue-port {port}2 \\
    --cache-queue-port {port}3 \\
    --workers 2 \\
    --tensor-parallel-size 4 \\
    {quantization}--splitwise-role "{role}" \\
    --scheduler-name "splitwise" \\
    --scheduler-host "127.0.0.1" \\
    --scheduler-port 6379 \\
    --scheduler-ttl 9000 \\
    --scheduler-topic mtp \\
    --config {config} \\
    --scheduler-password "scheduler_mtp" \\
    --speculative-config '{{"method": "mtp", "num_speculative_tokens": 1, "model": "${{path_to_mtp_model}}"}}' &"""
PREDICTOR = """python -m paddle.distributed.launch {launch} predictor.py \\
    --model_name_or_path ${{MODEL_TAG}} --dtype bfloat16 --mode dynamic --inference_model 1 --append_attn 1 \\
    --total_max_length 2048 {quant}--max_length 2048 --speculate_method mtp --draft_model_name_or_path ${{DRAFT_MODEL_TAG}} \\
    --draft_model_quant_type ${{DRAFT_MODEL_QUANT_MODE}} --speculate_max_draft_token_num 1 --return_full_hidden_states 1 \\
    --mla_use_matrix_absorption 1"""

SGLANG = "python3 -m sglang.launch_server --model-path ${MODEL_TAG} "

STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp with a file": (
        FASTDEPLOY + "--tensor-parallel-size 4 --config ${file} "
        """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}'""",
        {"max_batch_size": 96, "parallel_config": {"tensor_parallel_size": 4}, "speculative_config.method": "mtp"},
    ),
    "a drafter without its method": (
        FASTDEPLOY + """--speculative-config '{"model": "${path_to_mtp_model}", "num_speculative_tokens": 2}'""",
        {"speculative_config.model": str(BUNDLED_DRAFTER)},
    ),
    "vLLM before 0.9, a drafter": (
        "vllm serve ${MODEL_TAG} --speculative-model ${DRAFT_MODEL_TAG} --num-speculative-tokens 3",
        {"speculative_config": {"model": str(BUNDLED_DRAFTER), "num_speculative_tokens": 3}},
    ),
    "verify_strategy": (
        FASTDEPLOY + """--speculative-config '{"method": "mtp", "verify_strategy": "greedy", "num_speculative_tokens": 1, "model": """
        """"${path_to_mtp_model}"}'""",
        {"speculative_config.verify_strategy": "greedy"},
    ),
    "accept_policy": (
        FASTDEPLOY + """--speculative-config '{"method": "mtp", "accept_policy": "accept_all", "num_speculative_tokens": 1}'""",
        {"speculative_config.accept_policy": "accept_all"},
    ),
    "hybrid": (
        FASTDEPLOY + """--speculative-config '{"method": "mtp", "num_model_steps": 2, "mtp_strategy": "with_ngram", "num_speculative_tokens": 5, """
        """"model": "${path_to_mtp_model}"}'""",
        {"speculative_config.mtp_strategy": "with_ngram", "speculative_config.num_speculative_tokens": 5},
    ),
    "ngram": (
        FASTDEPLOY + """--tensor-parallel-size 4 --config ${file} --speculative-config '{"method": "ngram", "num_speculative_tokens": 1}'""",
        {"speculative_config.method": "ngram"},
    ),
    "naive": (
        FASTDEPLOY + """--tensor-parallel-size 4 --speculative-config '{"method": "naive", "num_speculative_tokens": 1}'""",
        {"speculative_config.method": "naive"},
    ),
    "a prefill node": (
        NODE.format(port=818, quantization="", role="prefill", config="${prefill_file}"),
        {"port": 8180, "metrics_port": 8181, "parallel_config.tensor_parallel_size": 4, "disaggregation.role": "prefill",
         "disaggregation.scheduler_topic": "mtp"},
    ),
    "a decode node": (
        NODE.format(port=819, quantization="", role="decode", config="").replace("--config ", ""),
        {"port": 8190, "disaggregation.role": "decode", "disaggregation.scheduler_ttl": 9000},
    ),
    "two hosts, the first by the name of SGLang": (
        "vllm serve ${MODEL_TAG} --tp 2 --nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:29500",
        {"parallel_config": {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 0, "master": "10.0.0.1:29500"}},
    ),
    "a prefill node on two hosts": (
        NODE.format(port=818, quantization="", role="prefill", config="${prefill_file} --nnodes 2 --dist-init-addr 10.0.0.1:29500"),
        {"disaggregation.role": "prefill", "parallel_config.nnodes": 2, "parallel_config.master": "10.0.0.1:29500"},
    ),
    "PaddleNLP's predictor": (
        PREDICTOR.format(launch="--gpus ${CUDA_VISIBLE_DEVICES}", quant=""),
        {"max_model_len": 2048, "speculative_config.method": "mtp", "speculative_config.quantization": "weight_only_int8"},
    ),
    "PaddleNLP's quantization": (
        PREDICTOR.format(launch="", quant="--quant_type ${QUANT_MODE} "),
        {"quantization": "weight_only_int8", "speculative_config.quantization": "weight_only_int8"},
    ),
    "a quantized target": (FASTDEPLOY + "--quantization wint4", {"quantization": "wint4"}),
    "PaddleNLP's lookup": (
        "python predictor.py --model_name_or_path ${MODEL_TAG} --inference_model --dtype float16 --speculate_method inference_with_reference "
        "--speculate_max_draft_token_num 5 --speculate_max_ngram_size 2",
        {"dtype": "float16", "speculative_config.num_speculative_tokens": 5, "speculative_config.max_ngram_size": 2},
    ),
    "vLLM before 0.9, ngram": (
        "python -m vllm.entrypoints.openai.api_server --model ${MODEL_TAG} --speculative_model [ngram] --num_speculative_tokens 5 "
        "--ngram_prompt_lookup_max 4 --use-v2-block-manager --max-model-len 1K --disable-log-requests -O.level=3",
        {"max_model_len": 1024, "speculative_config": {"model": "[ngram]", "num_speculative_tokens": 5, "max_ngram_size": 4}},
    ),
    "vLLM, without the object": (
        "vllm serve ${MODEL_TAG} --spec-method ngram --spec-tokens 2 --max-model-len auto --reasoning-parser qwen3 -cc.mode=3",
        {"max_model_len": None, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ),
    "vLLM on Ascend, mtp": (
        "vllm serve /deepseek-ai/DeepSeek-V3.2-Exp-W8A8 --port 20004 --data-parallel-size 1 --tensor-parallel-size 4 --enable-expert-parallel "
        "--seed 1024 --served-model-name dsv3 --max-model-len 1024 --max-num-batched-tokens 5000 --max-num-seqs 10 --trust-remote-code "
        "--gpu-memory-utilization 0.9 --compilation-config '{\"cudagraph_mode\": \"FULL_DECODE_ONLY\"}' "
        """--speculative-config '{"num_speculative_tokens": 2, "method":"deepseek_mtp", "disable_padded_drafter_batch": "False"}'""",
        {"port": 20004, "served_model_name": "dsv3", "max_batch_size": 10, "parallel_config": {"tensor_parallel_size": 4, "expert_parallel": True}},
    ),
    "SGLang, a draft model": (
        SGLANG + "--speculative-algorithm STANDALONE --speculative-draft-model-path ${MODEL_TAG} --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --mem-fraction-static 0.75 --cuda-graph-max-bs 2 --dtype float16 "
        "--max-running-requests 48 --context-length 1024 --host 0.0.0.0 --port 30000 --log-level warning --skip-server-warmup",
        {"max_batch_size": 48, "max_model_len": 1024, "gpu_memory_utilization": 0.75, "speculative_config": {
            "speculative_algorithm": "STANDALONE", "model": str(BUNDLED_MODEL), "speculative_num_steps": 3, "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4}},
    ),
    "SGLang, a model's own modules": (
        "sglang serve --model-path ${MODEL_TAG} --tp 2 --speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 2 --trust-remote-code --disable-radix-cache --disable-overlap-schedule --chunked-prefill-size -1 "
        "--schedule-policy lpm --attention-backend fa3 --enable-metrics --watchdog-timeout 600 --random-seed 7 --sampling-defaults openai",
        {"parallel_config": {"tensor_parallel_size": 2}, "enable_prefix_caching": False, "async_scheduling": False, "hang_seconds": 600,
         "generation_config": "none"},
    ),
    "SGLang, ngram and a prefill node": (
        SGLANG + "--disaggregation-mode prefill --disaggregation-ib-device mlx5_0 --disaggregation-transfer-backend nixl "
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 6 --chunked-prefill-size 2048 --max-prefill-tokens 16384 --dp 1 --ep-size 1",
        {"disaggregation": {"role": "prefill"}, "max_num_batched_tokens": 2048},
    ),
}  # fmt: skip
"""By name: the command, and what it means here. The differences from the originals' words are sizes that the bundled model does not have, and the
options of REFUSALS."""

REFUSALS: dict[str, tuple[str, str]] = {
    "suffix keys under mtp": (
        FASTDEPLOY + """--speculative-config '{"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 32, """
        """"suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1}'""",
        "suffix_decoding_max_tree_depth has no effect with method mtp: it is a key of suffix",
    ),
    "a context beyond the model's": (FASTDEPLOY + "--max-model-len 32768", "max_model_len 32768 is beyond the model's own limit"),
    "two hosts": (
        PREDICTOR.format(launch='--ips "192.168.0.1,192.168.0.2" --gpus 0', quant=""),
        "ips '192.168.0.1,192.168.0.2' is not an option here",
    ),
    "two hosts, as the documentation has them": (
        PREDICTOR.format(launch='--ips "192.168.0.1,192.168.0.2"\\\n--gpus ${CUDA_VISIBLE_DEVICES}', quant=""),
        "ips '192.168.0.1,192.168.0.2--gpus': a space is missing before --gpus",
    ),
    "a variable of the shell that it does not replace": (
        FASTDEPLOY + """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${nowhere}"}'""",
        "model folder ${nowhere} does not exist, nor is it a name on the hub (ORG/NAME); a shell replaces no variable between single quotes",
    ),
    "another chip's weights": (
        "vllm serve ${MODEL_TAG} --quantization ascend",
        "quantization must be one of wint8, wint4, fp8, block_wise_fp8, got 'ascend': of a checkpoint that is quantized already it is left out",
    ),
    "exporting": (
        "python -m paddle.distributed.launch --gpus 0 export_model.py --model_name_or_path ${MODEL_TAG} --output_path /path/to/exported_model "
        "--inference_model 1 --block_attn 1 --speculate_method inference_with_reference --return_full_hidden_states 1",
        "output_path '/path/to/exported_model' is not an option here: nothing is exported",
    ),
    "a pipeline of another engine": (
        "python3 -m lmdeploy.mtp.pipeline --model-path ${MODEL_TAG} --mtp-path ${DRAFT_MODEL_TAG} --tp 8 --session-len 1024 --max-batch-size 16 "
        "--mtp-quant a8w8_fp8 --cache-max-entry-count 0.5 --num-tokens 8",
        "cache_max_entry_count 0.5 is not an option here: say --gpu-memory-utilization",
    ),
    "a number of drafts without a method": (
        FASTDEPLOY + """--speculative-config '{"num_speculative_tokens": 2}'""",
        "speculative_config.method must be given with other keys (num_speculative_tokens)",
    ),
    "names without the interface": ("vllm serve ${MODEL_TAG} --served-model-name dsv3", "served_model_name is an option of OpenAI's interface"),
    "no model": ("vllm serve ''", "the model's name is empty"),
    "a key on the command line": ("vllm serve ${MODEL_TAG} --port 8000 --api-key abc", "--api-keys FILE"),
    "attention apart": (SGLANG + "--tp 8 --dp 8 --enable-dp-attention", "enable_dp_attention True is not an option here: attention is split"),
    "another way to accept": (
        "vllm serve ${MODEL_TAG} --spec-decoding-acceptance-method typical_acceptance_sampler",
        "spec_decoding_acceptance_method 'typical_acceptance_sampler' is not an option here: say \"verify_strategy\"",
    ),
    "data parallelism": ("vllm serve ${MODEL_TAG} -dp 2", "`foretoken gateway --upstream A,B`"),
}  # fmt: skip


def words_of(command: str, folder: Path) -> list[str]:
    """A command's words after its program, with folders and values in the place of the shell's variables."""
    for name, text in (("file", YAML), ("prefill_file", PREFILL_YAML)):
        (folder / f"{name}.yaml").write_text(text)
        command = command.replace(f"${{{name}}}", str(folder / f"{name}.yaml"))
    for name in ("path_to_main_model", "MODEL_TAG"):
        command = command.replace(f"${{{name}}}", str(BUNDLED_MODEL))
    for name in ("path_to_mtp_model", "DRAFT_MODEL_TAG"):
        command = command.replace(f"${{{name}}}", str(BUNDLED_DRAFTER))
    command = re.sub(r"\$\{(DRAFT_MODEL_)?QUANT_MODE\}", "weight_only_int8", command).replace("${CUDA_VISIBLE_DEVICES}", "0,1,2,3")
    command = command.replace("/deepseek-ai/DeepSeek-V3.2-Exp-W8A8", str(BUNDLED_MODEL)).removesuffix("&")
    words = shlex.split(command.replace("\\\n", ""))  # as a shell joins lines
    if words[:2] in (["vllm", "serve"], ["sglang", "serve"]):
        return words[2:]
    program = max(
        (i for i, word in enumerate(words[:6]) if word.endswith((".py", "api_server", ".launch", ".launch_server", ".pipeline"))), default=0
    )
    # What comes between Paddle's launcher and its script are options of the launcher.
    scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
    return (
        [*words[program + 1 :]]
        if not scripts
        else [*words[words.index("-m") + 2 : scripts[0]], *words[scripts[0] + 1 :]]
        if "-m" in words
        else words[2:]
    )


@pytest.mark.parametrize("name", STARTS)
def test_what_people_paste_starts(state: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, meant = STARTS[name]
    words = words_of(command, tmp_path)
    values = read_command(make_parser().parse_args(["serve", *words])).values
    for key, value in meant.items():
        section, _, inner = key.rpartition(".")
        found = values[section][inner] if section else values[key]
        assert found == value, key
    assert main(["serve", *words, "--dry-run", f"--repository={tmp_path / 'rendered'}"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "foretoken serve: note:" in line]
    if name == "a prefill node":
        assert any("port 8180 has no effect: a prefill node answers no clients" in note for note in notes)
    needless = {w.lstrip("-").partition("=")[0].replace("-", "_") for w in words if w.startswith("--")}
    for key in needless:
        if isinstance(OTHERS.get(key), Needless):
            assert any(f"note: {key} has no effect" in note for note in notes), key
    model = "prefill" if values.get("disaggregation", {}).get("role") == "prefill" else "decode"
    told = parameters_of(read_pbtxt(tmp_path / "rendered" / model / "config.pbtxt"))
    assert told["model"] == str(BUNDLED_MODEL) and "speculative_config" in told
    drafting = values.get("speculative_config") or {}
    if drafting.get("model") == str(BUNDLED_DRAFTER) and "method" not in drafting:
        assert json.loads(told["speculative_config"])["method"] == "mtp" and any("speculative_config.method is mtp, which" in note for note in notes)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_start_says_what_differs(state: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, message = REFUSALS[name]
    assert main(["serve", *words_of(command, tmp_path), "--dry-run"]) == 2
    assert message in capsys.readouterr().err
    assert not state.exists(), "nothing is rendered"


@pytest.mark.parametrize(
    "config",
    [
        {"model": str(BUNDLED_MODEL), "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
        {"model": str(BUNDLED_MODEL), "tensor_parallel_size": 1, "enforce_eager": True,
         "speculative_config": {"method": "suffix", "num_speculative_tokens": 15}},
        {"model": str(BUNDLED_MODEL), "tensor_parallel_size": 1, "distributed_executor_backend": "mp", "enforce_eager": True, "max_num_seqs": 4,
         "async_scheduling": True, "speculative_config": {"method": "mtp", "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2}},
        {"model": str(BUNDLED_MODEL), "speculative_config": {"model": str(DEFAULT_DRAFTER), "num_speculative_tokens": 2}},
    ],
)  # fmt: skip
def test_engines_in_a_program(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(**config)
    assert len(llm.generate("x = ", use_tqdm=False)) == 1
    assert llm.engine.config.max_batch_size == config.get("max_num_seqs", 256)
    llm.close()
    assert ("enforce_eager has no effect" in caplog.text) == ("enforce_eager" in config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2 is not an option here"),
        ({"max_num_seqs": 512}, r"max_batch_size must be from 1 to 256, got 512 \(max_batch_size was given as max_num_seqs\)"),
        ({"max_num_sequences": 5}, "unknown key 'max_num_sequences'"),
        ({"parallel_config": {"tensor_parallel_size": 2}, "tensor_parallel_size": 3}, "tensor_parallel_size is given twice: 2, and 3"),
    ],
)
def test_engines_that_a_program_cannot_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


# -- the tables -----------------------------------------------------------------------------------------------------------------


def test_every_alias_leads_to_an_option() -> None:
    from deploy.options import PARALLEL_FLAGS, SERVE_KEYS

    sections = {"speculative_config": SpeculativeConfig}
    for name, other in OTHERS.items():
        if isinstance(other, Alias):
            section, _, key = other.own.rpartition(".")
            known = {*sections[section].__dataclass_fields__, *SpeculativeConfig.aliases, *READ_HERE} if section else set()
            own = {*EngineConfig.__dataclass_fields__, *SERVE_KEYS, *PARALLEL_FLAGS, "role", *OTHERS}
            assert key in (known or own), name


FASTDEPLOYS = """mm-processor-kwargs max-encoder-cache max-processor-cache enable-mm reasoning-parser chat-template tool-call-parser
tool-parser-plugin dynamic-load-weight load-strategy rsync-config engine-worker-queue-port graph-optimization-config plas-attention-config
guided-decoding-backend guided-decoding-disable-any-whitespace enable-logprob enable-keep-sampling-mask max-logprobs logprobs-mode enable-early-stop
early-stop-config lm-head-fp32 logits-processors enable-entropy model-impl disable-custom-all-reduce enable-flashinfer-allreduce-fusion
use-internode-ll-two-stage disable-sequence-parallel-moe num-gpu-blocks-override data-parallel-size local-data-parallel-id enable-expert-parallel
enable-eplb eplb-config routing-replay-config enable-chunked-moe chunked-moe-size shutdown-comm-group-if-worker-idle load-choices kv-cache-ratio
swap-space prealloc-dec-block-slot-num-threshold cache-queue-port static-decode-blocks kvcache-storage-backend write-policy ips enable-output-caching
max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold splitwise-role cache-transfer-protocol pd-comm-port rdma-comm-ports
router scheduler-name scheduler-max-size scheduler-db scheduler-min-load-score scheduler-load-shards-num scheduler-sync-period scheduler-expire-period
scheduler-release-load-expire-period scheduler-reader-parallel scheduler-writer-batch-size enable-overlap-schedule use-warmup moe-gate-fp32
workers controller-port max-concurrency max-waiting-time enable-mm-output timeout timeout-graceful-shutdown tokens-only"""
PADDLES = """src-length max-length min-length top-k top-p temperature repetition-penalty decode-strategy data-file output-file batch-size benchmark
lora-path prefix-path export-precache use-flash-attention use-fake-parameter inference-model append-attn block-attn total-max-length quant-type
cachekv-int8-type output-path speculate-method speculate-max-draft-token-num speculate-max-ngram-size draft-model-name-or-path"""


@pytest.mark.parametrize("name", [*FASTDEPLOYS.split(), *PADDLES.split()])
def test_options_of_fastdeploys_server_and_paddlenlps_predictor_are_known(name: str) -> None:
    parser = make_parser()
    (commands,) = [action for action in parser._actions if isinstance(action.choices, dict)]
    assert f"--{name}" in commands.choices["serve"]._option_string_actions


def serve_values(*words: str) -> tuple[dict[str, Any], list[str]]:
    found = read_command(make_parser().parse_args(["serve", *words]))
    return found.values, found.notes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max_num_seqs", "8"], {"max_batch_size": 8}),
        (["--max_num_seqs=8"], {"max_batch_size": 8}),
        (["-tp", "2"], {"parallel_config": {"tensor_parallel_size": 2}}),
        (["DIR", "--block-size", "32"], {"model": "DIR", "page_size": 32}),
        (["--disable-cascade-attn"], {"cascade_attention": False}),
        (["--load-format", "auto", "--dtype", "half"], {"load_format": "safetensors", "dtype": "float16"}),
        (["--speculative-config.method", "ngram", "--speculative-config.num-speculative-tokens=3"],
         {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        (["-sc", '{"method": "ngram"}'], {"speculative_config": {"method": "ngram"}}),
        (["-sc.method=ngram", "-sc.num_speculative_tokens", "3"], {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        (["--speculative-model", "DIR", "--num-speculative-tokens", "2"], {"speculative_config": {"model": "DIR", "num_speculative_tokens": 2}}),
        (["--max-num-batched-tokens", "2k", "--max-model-len=1.5K"], {"max_num_batched_tokens": 2000, "max_model_len": 1536}),
        (["--max-model-len", "-1"], {"max_model_len": None}),
        (["--dtype", "bf16", "--device=gpu"], {"dtype": "bfloat16", "device": "cuda"}),
        (["--data-parallel-size", "1", "--pipeline-parallel-size=1", "--no-enable-lora", "--cpu-offload-gb", "0"], {}),
        (["--enable-prefix-caching", "False", "--async-scheduling=true", "--enable_lora", "0", "DIR"],
         {"enable_prefix_caching": False, "async_scheduling": True, "model": "DIR"}),
        (["--quantization", "None", "--enable-expert-parallel=1"], {"quantization": None, "parallel_config": {"expert_parallel": True}}),
    ],
)  # fmt: skip
def test_flags_as_others_write_them(words: list[str], expected: dict[str, Any]) -> None:
    assert serve_values(*words) == (expected, [])


def test_the_file_may_use_other_names_too(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"max_num_seqs": 8, "enforce_eager": True, "splitwise-role": "decode", "scheduler_password": "x"}))
    values, notes = serve_values("--config", str(path))
    assert values == {"max_batch_size": 8, "disaggregation": {"role": "decode"}, "scheduler_password": "x"} and len(notes) == 1
    assert serve_values("--config", str(path), "--max-batch-size", "4")[0]["max_batch_size"] == 4, "flags win, whatever the names"
    path.write_text("base: &base\n  method: mtp\nspeculative_config:\n  <<: *base\n  method: ngram\n")
    assert serve_values("--config", str(path))[0]["speculative_config"] == {"method": "ngram"}, "what is merged in may be written over"
    path.write_text("max_model_len: -1")
    assert serve_values("--config", str(path))[0] == {"max_model_len": None}, "as the flag is taken"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["A", "--model", "B"], "the model is named twice: 'A', and 'B' by --model"),
        (["--max-num-seqs", "8", "--max-batch-size", "9"], "max_batch_size is given twice: 9, and 8 as max_num_seqs"),
        (["--speculative-config", '{"method": "ngram"}', "--speculate-method", "mtp"], "speculative_config.method is given twice"),
        (["--speculative-config", "[1]", "--speculate-method", "mtp"], "must be an object of keys and values"),
        (["--max-num-seqs", "many"], r"max_batch_size must be int, got 'many'"),
    ],
)
def test_contradictions(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_keys(serve_values(*words)[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-model-length", "5"], 'unknown option --max-model-length; did you mean "--max-model-len"?'),
        (["--mem-fraction-statics", "5"], 'unknown option --mem-fraction-statics; did you mean "--mem-fraction-static"?'),
        (["A", "B"], "one word too many: 'B'"),
        (["--xyzzy=5"], "unknown option --xyzzy\n"),
    ],
)
def test_what_nobody_knows_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["serve", *words])
    told = capsys.readouterr().err
    assert caught.value.code == 2 and message in told and told.count("\n") == 2, "not behind a list of all options"


def test_a_folder_may_be_called_like_a_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Triton's versions are."""
    (tmp_path / "1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert serve_values("--enable-prefix-caching", "1")[0] == {"enable_prefix_caching": True, "model": "1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seqs: 3\nmax-num-seqs: 4\n", "max_num_seqs is given twice, in lines 1 and 2"),
        ("port: 1\nspeculative_config:\n  method: mtp\n  method: ngram\n", "method is given twice, in lines 3 and 4"),
        ("""speculative_config: '{"method": "mtp", "method": "ngram"}'""", "speculative_config: 'method' is given twice in one object"),
    ],
)
def test_what_a_file_says_twice_is_no_guess(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        serve_values("--config", str(tmp_path / "x.yaml"))


def test_options_of_the_gateway_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that `serve` has for it, as the gateway's own command reads them."""
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    started: list[list[str]] = []
    monkeypatch.setattr(launcher, "run_together", lambda gateway, server: started.append(gateway) or 0)
    given = {"served_model_name": ["a"], "api_keys": str(keys), "admin_keys": str(keys), "vllm_metrics": True, "max_body_bytes": 8 * 2**20}
    given["cors_origins"] = ["https://pages.example"]
    assert set(given) == set(GATEWAY_KEYS)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"port": free_ports(1)[0], **given}))
    assert main(["serve", f"--config={tmp_path / 'config.yaml'}"]) == 0
    read = vars(make_parser().parse_args(started[0][len(FORETOKEN) :]))
    assert {key: read["cors_origin" if key == "cors_origins" else key] for key in given} == given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--http-port={free}"], "port and http_port are both {free}"),
        (["--grpc-port={busy}"], "grpc_port {busy} cannot be used on 127.0.0.1: Address already in use"),
        (["--metrics-port=0"], "metrics_port is 0"),
    ],
)
def test_ports_beside_the_gateway_are_looked_at_before_it_starts(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        ports = {"free": free_ports(1)[0], "busy": holder.getsockname()[1]}
        assert main(["serve", f"--port={ports['free']}", *(word.format(**ports) for word in words)]) == 2
    told = capsys.readouterr()
    assert message.format(**ports) in told.err and not told.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--http-port", "9100", "--grpc-port", "9100"], "http_port and grpc_port are both 9100"),
        (["--metrics-port", "8003"], "metrics_port and status_port are both 8003"),
        (["--port", "9100", "--http-port", "9100"], "port and http_port are both 9100"),
        (["--port", "9100", "--http-port", "9101", "--grpc-port", "9101"], "http_port and grpc_port are both 9101"),
        (["--grpc-port", "70000"], "grpc_port is 70000; ports go from 1 to 65535"),
    ],
)
def test_ports_that_cannot_be_are_known_before_anything_starts(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", *words]) == 2
    assert f"foretoken serve: {message}" in capsys.readouterr().err


def test_ports_that_are_not_listened_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a gateway free ones are taken where none are named; without supervision nobody has a status."""
    for words in (["--port", "8000"], ["--no-supervise", "--metrics-port", "8003"], ["--status-port", "0", "--port", "8001"]):
        assert main(["serve", "--dry-run", f"--repository={tmp_path / 'rendered'}", *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve", "--dry-run", "--port=9100"], ["gateway"]], ids=["serve", "gateway"])
def test_a_model_s_name_is_one_that_answers_can_have(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of a command line that are no UTF-8: each list of models, and each answer, failed."""
    try:
        assert main([*command, "--served-model-name", "a", "b\udcff"]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert r"must be UTF-8, which answers are written in, got 'b\udcff'" in capsys.readouterr().err


def test_ranks_meet_on_a_port_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Known before anything is started: the other host was waited for before the server failed to listen."""
    words = ["serve", "--dry-run", "-tp", "2", "--nnodes", "2"]
    for key, port in {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002, "status_port": 8003}.items():
        assert main([*words, "--node-rank", "0", "--master", f"10.0.0.1:{port}"]) == 2
        assert f"parallel_config.master is 10.0.0.1:{port}, and {key} is {port}: ranks meet on a port of their own" in capsys.readouterr().err
    for more in (["--node-rank", "1", "--master", "10.0.0.1:8000"], ["--node-rank", "0", "--master", "10.0.0.1:8003", "--no-supervise"]):
        _, engine = split_keys(serve_values(*words[2:], *more)[0])
        assert engine.parallel_config.nnodes == 2


def test_a_server_that_could_not_even_say_why(tmp_path: Path) -> None:
    """On a disk that became full its log is empty."""
    silent = (sys.executable, "-c", "raise SystemExit(1)")
    said = rf"did not start \(exit status 1\); of {tmp_path}/log:\nnothing was written to it; its disk has \d+ KiB free"
    with pytest.raises(RuntimeError, match=said), demo.running_server(*free_ports(3), tmp_path / "log", program=silent):
        pass


def test_a_demo_that_can_write_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder that was there already it ended with a traceback."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "foretoken/demo.log").mkdir(parents=True)
    assert main(["demo"]) == 1
    (tmp_path / "foretoken/demo.log").rmdir()
    (tmp_path / "foretoken/demo.log").symlink_to("/dev/full")
    assert main(["demo"]) == 1
    (tmp_path / "foretoken/demo.log").unlink()

    def refuse(*_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert main(["demo"]) == 1
    told, reasons = capsys.readouterr(), ("Is a directory", "No space left on device", "Read-only file system")
    assert told.err == "".join(f"[demo] {tmp_path}/foretoken cannot be written: {r}: set XDG_STATE_HOME to another folder\n" for r in reasons)
    assert not told.out


@pytest.mark.parametrize("name", ["my repository", "it's", "a;b", "$HOME", "a(b)", "a&b", "a*"])
def test_folders_that_would_be_commands_of_a_shell_are_refused(state: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The server starts its models' processes by one, without quotes: it waited for ever, or ran what the name says. Models may lie anywhere."""
    (tmp_path / name).mkdir()
    assert main(["serve", "--dry-run", f"--repository={tmp_path / name}"]) == 2
    assert "the server hands it to a shell, and it has more than letters" in capsys.readouterr().err
    assert main(["serve", "--dry-run", f"--backend-directory={tmp_path / name}"]) == 2
    assert f"backend directory {tmp_path / name}: the server hands it to a shell" in capsys.readouterr().err
    (tmp_path / name / "model").symlink_to(BUNDLED_MODEL)
    assert main(["serve", str(tmp_path / name / "model"), "--dry-run"]) == 0


def test_what_is_secret_is_not_said_again(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hf-token", "s3cret", "--admin-api-key=s3cret", "--api-key", "s3cret", "s3cret2", "--ssl-keyfile-password=s3cret", "--port=8000"]
    assert main(["serve", "--dry-run", *words]) == 2
    told = capsys.readouterr().err
    assert "hf_token is not an option here: set HF_TOKEN" in told and "api_key is not an option here" in told and "s3cret" not in told


def test_an_error_names_its_own_option_alone(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`model` is a word of many others."""
    words = ["--model_name_or_path", str(BUNDLED_MODEL), "--speculate_method", "mtp", "--draft_model_name_or_path", str(BUNDLED_DRAFTER)]
    assert main(["serve", *words, "--total_max_length", "8192", "--dry-run"]) == 2
    assert "limit 2048 (max_model_len was given as total_max_length)" in capsys.readouterr().err


NAMED_FILES = {
    "--api-keys": (["--port=8080", "--api-keys={path}"], "--api-keys {path}: No such file or directory"),
    "--admin-keys": (["--port=8080", "--admin-keys={path}"], "--admin-keys {path}: No such file or directory"),
    "a folder": (["--port=8080", "--api-keys={folder}"], "--api-keys {folder}: Is a directory"),
    "no key": (["--port=8080", "--api-keys={empty}"], "--api-keys {empty}: {empty} has no key"),
    "--cors-origins": (["--port=8080", "--cors-origins", "https://pages.example", "pages.example"], "cors_origins must be SCHEME://HOST or"),
    "--backend-directory": (["--backend-directory={path}"], "--backend-directory {path}: there is no such folder"),
    "--scheduler-password-file": (["--role=decode", "--scheduler-password-file={path}"], "scheduler_password_file {path} cannot be read"),
    "suffix_decoding_corpus": (
        ['--speculative-config={{"method": "suffix", "suffix_decoding_corpus": ["{path}"]}}'],
        "suffix_decoding_corpus: {path} is missing",
    ),
    "draft_token_map": (
        ['--speculative-config={{"method": "mtp", "draft_token_map": "{path}"}}'],
        "draft_token_map: {path} is missing",
    ),
    "no list": (
        ['--speculative-config={{"method": "mtp", "draft_token_map": "{empty}"}}'],
        "draft_token_map: {empty} cannot be read",
    ),
}


@pytest.mark.parametrize("name", NAMED_FILES)
def test_a_file_that_cannot_be_read_is_said_at_once(state: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the launcher itself, which has started nothing."""
    words, message = NAMED_FILES[name]
    (tmp_path / "empty").write_text("# nobody\n")
    places = {"path": tmp_path / "none", "folder": tmp_path, "empty": tmp_path / "empty"}
    assert main(["serve", *(word.format(**places) for word in words)]) == 2
    assert capsys.readouterr().err.startswith("foretoken serve: ") and not state.exists()
    assert main(["serve", "--dry-run", *(word.format(**places) for word in words)]) == 2
    assert message.format(**places) in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ["--quantization", "{moe}"],
        ["--speculative-config", '{{"method": "mtp", "quantization": {moe}}}'],
        ["--speculative-config", '{{"method": "eagle3", "model": "{drafter}", "quantization": {moe}}}'],
        ["--speculative-config", '{{"method": "draft_model", "model": "{model}", "quantization": {moe}}}'],
    ],
    ids=str,
)
def test_experts_alone_are_rounded_where_there_are_some(option: list[str], state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a drafter without any the option would do nothing, and nobody would be told."""
    places = {"moe": '{"moe_quant_type": "wint4"}', "drafter": DEFAULT_DRAFTER, "model": BUNDLED_MODEL}
    assert main(["serve", "--dry-run", *(word.format(**places) for word in option)]) == 2
    assert "quantization -/wint4/- rounds experts, and the model has none; name a dense_quant_type" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["localhost", "http://127.0.0.1:8001", "127.0.0.1:0", ":8001", ""])
def test_an_address_without_a_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC would ask port 443."""
    with pytest.raises(SystemExit) as caught:
        main(["complete", f"--url={address}", "x"])
    assert caught.value.code == 2 and f"argument --url: {address!r} is no HOST:PORT" in capsys.readouterr().err
    assert main(["bench", f"--url={address}"]) == 2 and f"--url: {address!r} is no HOST:PORT" in capsys.readouterr().err


def test_a_drafter_that_is_not_there_is_no_model_that_is_not_there(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", "--speculative-config", '{"method": "eagle3", "model": "/absent"}']) == 2
    assert "speculative_config.model: model folder /absent does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["complete", "x"], ["inspect", str(BUNDLED_MODEL)]])
def test_output_that_nobody_takes(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`| head` is no error, a full disk is one, and neither is a traceback: of what is printed piece by piece, and of what is kept until the end."""
    monkeypatch.setattr("client.cli.Client.stream", lambda self, **_: iter([Chunk("x", [1])]))
    full = f"foretoken {command[0]}: standard output: No space left on device\n"
    for size in (0, 8192):  # of the buffer: PYTHONUNBUFFERED means none
        reader, writer = os.pipe()
        os.close(reader)
        for target, status, message in ((writer, 141, ""), ("/dev/full", 1, full)):
            with io.TextIOWrapper(open(target, "wb", size), write_through=not size) as stdout, monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", stdout)
                assert main(command) == status
            assert capsys.readouterr().err == message


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_input_that_is_no_text(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Read as a terminal of UTF-8 has it, which takes nothing else."""
    with io.TextIOWrapper(io.BytesIO(b"x\xff\n"), "utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main([command, "--url=127.0.0.1:1"]) == 1
    assert "is not valid Unicode: '\\udcff' at" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "serve"])
def test_ctrl_c_while_a_command_is_imported_ends_it(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a traceback: torch takes seconds."""
    seen, own = set(), builtins.__import__

    def watched(name: str, *others: Any) -> Any:
        seen.update({signal.getsignal(signal.SIGINT)} if name in ("training", "deploy") else ())
        return own(name, *others)

    monkeypatch.setattr(builtins, "__import__", watched)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert seen == {signal.SIG_DFL} and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_ended_leaves_no_half_folder(number: int, tmp_path: Path) -> None:
    out, program = tmp_path / "out", "import time, backend.models.shards as s; s.save_weights = lambda tensors, path: (path.touch(), time.sleep(60))"
    words = ["quantize", str(BUNDLED_MODEL), str(out), "--quantization", "wint8"]
    with subprocess.Popen([sys.executable, "-c", f"{program}; from deploy.cli import main; raise SystemExit(main({words}))"]) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(out.rglob("*.safetensors")):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
            assert process.wait(30) == 128 + number and not out.exists()
        finally:
            process.kill()


@pytest.mark.parametrize("command", [["complete", "x"], ["bench"]])
def test_what_is_no_json_is_said(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([*command, "--speculative", "{bad"])
    assert "--speculative: '{bad' is not valid JSON: Expecting property name" in capsys.readouterr().err


def test_an_error_names_the_option_as_it_was_given(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max-num-seqs", "512", "--dry-run"]) == 2
    assert "max_batch_size must be from 1 to 256, got 512 (max_batch_size was given as max_num_seqs)" in capsys.readouterr().err


def test_tables_say_something_of_each() -> None:
    for name, other in OTHERS.items():
        text = other.why if isinstance(other, Needless) else other.instead if isinstance(other, Refused) else "alias"
        assert text and "_" + name not in text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "mtp", "verify_strategy": 0}, {"verify_strategy": "topp"}),
        ({"method": "mtp", "verify_strategy": 1}, {"verify_strategy": "greedy"}),
        ({"method": "mtp", "verify_strategy": 2}, {"verify_strategy": "target_match"}),
        ({"method": "mtp", "benchmark_mode": True}, {"accept_policy": "reject_all"}),
        ({"method": "mtp", "benchmark_mode": False}, {"accept_policy": "normal"}),
        ({"speculate_method": "mtp", "speculate_max_draft_token_num": 2, "draft_model_quant_type": "a8w8_fp8"},
         {"method": "mtp", "num_speculative_tokens": 2, "quantization": "fp8"}),
        ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}, {"method": "mtp", "num_speculative_tokens": 3}),
        ({"speculative_algorithm": "NEXTN", "speculative_use_rejection_sampling": True}, {"method": "mtp", "verify_strategy": "rejection"}),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "DIR", "speculative_num_steps": 5, "speculative_eagle_topk": 4,
          "speculative_num_draft_tokens": 16}, {"method": "eagle", "num_speculative_tokens": 5, "tree_top_k": 4, "tree_nodes": 15}),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}, {"method": "ngram", "num_speculative_tokens": 5}),
        ({"method": "mtp", "quantization": "weight_only_int4"}, {"quantization": "wint4"}),
        ({"model": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}, {"method": "ngram", "model": None, "max_ngram_size": 4}),
        ({"method": "hybrid_mtp_ngram"}, {"method": "mtp", "mtp_strategy": "with_ngram"}),
        ({"method": "suffix", "num_speculative_tokens": 32}, {"method": "suffix", "num_speculative_tokens": 16}),  # of vLLM's page on it
        ({"method": "mtp", "attention_backend": "FLASH_ATTN", "kv_cache_dtype": "auto", "use_local_argmax_reduction": True}, {"method": "mtp"}),
        ({"method": "mtp", "rejection_sample_method": "standard"}, {"verify_strategy": "rejection"}),
        ({"method": "mtp", "rejection_sample_method": "strict", "use_heterogeneous_vocab": False}, {"verify_strategy": "target_match"}),
        ({"method": "mtp", "acceptance_method": None, "posterior_threshold": None}, {"verify_strategy": "target_match"}),
        ({"method": "dspark", "model": "DIR", "enable_adaptive_verification": False}, {"adaptive": False}),
        ({"method": "draft_model", "model": "DIR", "use_heterogeneous_vocab": True}, {"draft_vocabulary": "shared"}),
        ({"method": "eagle", "model": "DIR", "speculative_token_map": "freq_32768.pt"}, {"draft_token_map": "freq_32768.pt"}),
        ({"method": "arctic", "model": "DIR", "num_speculative_tokens": 3, "enable_suffix_decoding": True},
         {"method": "mlp_speculator", "mtp_strategy": "with_suffix", "num_speculative_tokens": 3, "num_model_steps": 3}),
        ({"enable_suffix_decoding": True, "suffix_cache_max_requests": 9, "suffix_max_spec_offset": 0.0},
         {"method": "suffix", "suffix_decoding_max_cached_requests": 9}),
        ({"method": "ngram", "num_gpu_block_expand_ratio": 1.0, "enf_gen_phase_tag": False, "disable_padded_drafter_batch": "False"}, {}),
    ],
)  # fmt: skip
def test_names_of_speculation(values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = SpeculativeConfig.from_dict(values)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "mtp", "verify_strategy": 3}, "verify_strategy must be str, got 3"),
        ({"method": "mtp", "verify_strategy": True}, "verify_strategy must be"),
        ({"method": "mtp", "benchmark_mode": 1}, "benchmark_mode must be bool, got 1"),
        ({"method": "mtp", "benchmark_mode": True, "accept_policy": "normal"}, "benchmark_mode true is accept_policy reject_all"),
        ({"method": "mtp", "verify_strategy": "greedy", "speculative_use_rejection_sampling": True}, "true is verify_strategy rejection, and"),
        ({"method": "mtp", "enable_draft_logprob": True}, "enable_draft_logprob True is no key here: log-probabilities are those of the target"),
        (
            {"method": "mtp", "rejection_sample_method": "block"},
            "rejection_sample_method 'block' is none of standard, probabilistic, rejection_sampler",
        ),
        ({"method": "mtp", "rejection_sample_method": ["standard"]}, r"rejection_sample_method \['standard'\] is none of"),
        ({"method": "mtp", "rejection_sample_method": "standard", "verify_strategy": "topp"}, "standard is verify_strategy rejection, and"),
        ({"method": "mtp", "use_heterogeneous_vocab": 1}, "use_heterogeneous_vocab must be bool, got 1"),
        ({"method": "mtp", "kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8' is no key here: drafters keep keys and values in their own type"),
        ({"method": "mtp", "synthetic_acceptance_rates": [0.5]}, "say accept_policy simulated and simulated_acceptance_rate"),
        ({"speculate_method": float("nan")}, "method must be str or null, got nan"),
        ({"method": "mtp", "speculate_method": "ngram"}, "method is given twice: 'mtp', and 'ngram' as speculate_method"),
    ],
)
def test_names_of_speculation_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict(values)


def test_the_environment_of_others_is_explained() -> None:
    """Of a command with docker, which sets them and runs `start_server`."""
    given = {"SPECULATE_MODEL_QUANT_TYPE": "a8w8_fp8", "SPECULATE_METHOD": "mtp", "SPECULATE_MODEL_PATH": "/models-mtp"}
    given |= {"SPECULATE_MAX_DRAFT_TOKEN_NUM": "1", "MP_NUM": "8", "BLOCK_BS": "32", "BATCH_SIZE": "128", "PATH": "/bin", "FD_LOG_DIR": "log_prefill"}
    first, second, third = explain_environment(given)
    config = json.loads(first.partition("--speculative-config '")[2].rstrip("'"))
    assert config == {"method": "mtp", "model": "/models-mtp", "num_speculative_tokens": 1, "quantization": "a8w8_fp8"}
    assert SpeculativeConfig.from_dict(config).quantization == "fp8"
    assert second == "nor are others: say MP_NUM as --tensor-parallel-size 8, BATCH_SIZE as --max-batch-size 128"
    hosts = explain_environment({"SPECULATE_METHOD": "mtp", "MP_NUM": "16", "MP_NNODE": "2", "POD_0_IP": "192.168.0.1", "POD_IPS": "a,b"})[1]
    assert hosts.endswith("MP_NUM as --tensor-parallel-size 16, MP_NNODE as --nnodes 2, POD_0_IP as --master 192.168.0.1:29500")
    assert third.startswith("FD_LOG_DIR in the environment: of FastDeploy")
    assert explain_environment({"MP_NUM": "8", "SPECULATE_VERIFY_USE_TOPK": "0"}) == []
    assert "greedy" in explain_environment({"SPECULATE_VERIFY_USE_TOPK": "1"})[0]
