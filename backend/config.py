"""Configuration as frozen dataclasses. `from_dict` refuses unknown keys (naming the nearest known one) and wrong types.

Nothing here imports torch: the launcher reads this module too.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from backend.disaggregation_config import DisaggregationConfig
from backend.errors import ConfigError
from backend.quantization_config import (
    CACHE_SCALES,
    QuantizationConfig,
    asks_for_activations,
    normalize_cache_dtype,
    normalize_quantization,
    read_quantization,
)
from backend.section import Section, require
from backend.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

logger = logging.getLogger(__name__)

REPOSITORIES = Path(__file__).parent.parent / "model_repository"
REPOSITORY = REPOSITORIES / "standalone"
BUNDLED_MODEL = REPOSITORY / "decode" / "1"
BUNDLED_DRAFTER = REPOSITORY / "mtp_drafter" / "1"
"""mtp's, which a model of its own may run."""
DEFAULT_DRAFTER = BUNDLED_MODEL / "drafter"
"""Of an eagle3 head, with which the bundled model is served."""
MAX_BATCH_SIZE = 256
MAX_RANKS = 64
MAX_THREADS = 1024
"""Hundreds of thousands end the process when it starts them."""
MAX_ASKED_MASKED = 8
"""Drafts a step for which there are masks where requests choose their own methods and numbers."""
RANKS = ("processes", "instances")
MASTER = re.compile(r"(?P<host>[^\s/:@\[\]]+|\[[0-9A-Fa-f:.]+(%\w+)?\]):(?P<port>[0-9]{1,5})")
LOAD_FORMATS = ("safetensors", "dummy")
GENERATION_CONFIGS = ("auto", "none")
UNKNOWN_TOKENS = ("error", "refuse")
ACTIVATIONS = ("auto", "model", "fp8")
CPU_KERNELS = ("auto", "amx", "avx512", "avx2", "any", "none")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}


def is_bundled(model: str | Path) -> bool:
    return Path(os.path.expanduser(model)).resolve() == BUNDLED_MODEL.resolve()  # of nobody's home: no error, but no such folder


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How one model is spread over devices."""

    tensor_parallel_size: int = 1
    """Ranks that one model is split over, each a process; on GPUs each with its own. 1 to 64."""
    expert_parallel: bool = False
    """Mixtures of experts: each rank holds whole experts, as many as the others; else a part of every expert."""
    ranks: str = "processes"
    """What the ranks of a server are: processes that the decode model's one instance starts, or the instances of its instance group, each of which
    answers the requests that the server gives it."""
    nnodes: int = 1
    """Hosts that the ranks are spread over, as many on each; each host runs a server of its own."""
    node_rank: int = 0
    """Which of them this one is. The first, 0, answers clients; the others compute with it."""
    master: str | None = None
    """HOST:PORT where the first host meets the others, by an address that all of them reach. With nnodes above 1."""

    def __post_init__(self) -> None:
        size = self.tensor_parallel_size
        require(1 <= size <= MAX_RANKS, "tensor_parallel_size", size, f"from 1 to {MAX_RANKS}")
        require(1 <= self.nnodes <= MAX_RANKS, "nnodes", self.nnodes, f"from 1 to {MAX_RANKS}")
        require(size % self.nnodes == 0, "nnodes", self.nnodes, f"a divisor of tensor_parallel_size ({size}): as many ranks on each host")
        require(0 <= self.node_rank < self.nnodes, "node_rank", self.node_rank, f"from 0 to {self.nnodes - 1} (nnodes is {self.nnodes})")
        require(self.ranks in RANKS, "ranks", self.ranks, " or ".join(RANKS))
        require(self.ranks == "processes" or self.nnodes == 1, "ranks", self.ranks, f"processes where nnodes is {self.nnodes}")
        if self.nnodes == 1:
            require(self.master is None, "master", self.master, "left out where nnodes is 1")
            return
        found = MASTER.fullmatch(self.master or "")
        good = found is not None and 1 <= int(found["port"]) <= 65535 and found["host"] not in ("0.0.0.0", "[::]")
        require(good, "master", self.master, f"HOST:PORT, by which other hosts reach the first one, where nnodes is {self.nnodes}")

    @property
    def num_instances(self) -> int:
        """Of the model that decodes."""
        return self.tensor_parallel_size if self.ranks == "instances" else 1

    @property
    def host_size(self) -> int:
        """Ranks on each host."""
        return self.tensor_parallel_size // self.nnodes

    @property
    def first_rank(self) -> int:
        """Of this host."""
        return self.node_rank * self.host_size

    @property
    def meeting_place(self) -> tuple[str, int]:
        """Host and port of `master`; without one, this host and any port."""
        host, _, port = (self.master or "127.0.0.1:0").rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Section):
    """Everything the engine is built from."""

    model: str = str(BUNDLED_MODEL)
    """Folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json. `foretoken serve` and LLM(...) also take a GGUF file, which is
    converted once, and a name on the hub (ORG/NAME), which is downloaded."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: float32 on CPU, the checkpoint's on GPU."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: the GPU when there is one; one that cannot be used is an error."""
    max_batch_size: int = MAX_BATCH_SIZE
    """Requests that run at once, 1 to 256."""
    max_waiting: int = 2048
    """Requests that may wait beyond those; one more is refused."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; default: the model's own limit."""
    max_num_batched_tokens: int | None = None
    """Known tokens that one step computes: one of each running request, then prompts; drafts come on top. Default: 512 on CPU, 4096 on GPU."""
    max_step_ms: float | None = None
    """Milliseconds that a step with prompts in it may take while other requests decode: prompts are cut accordingly. 0: no limit. Default: 50 on
    GPU, 2000 on CPU, where steps are held to two seconds while nobody else decodes, too: who cancels or asks for health waits for their end."""
    page_size: int = 16
    """Tokens a KV page holds: a power of two, 1 to 1024."""
    kv_cache_memory: int | str | None = None
    """Bytes, or a string such as "2GiB"; default: 4 GiB on CPU, else by gpu_memory_utilization, where steps and their graphs, 1 to 3 GiB of a GPU
    beside weights and pages, are counted; never more than the batch can use."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights and KV cache may take."""
    kv_cache_dtype: str = "auto"
    """What the target's keys and values are kept in: model, which is the model's dtype; fp8 (fp8_e4m3), e4m3 with a scale for each head of keys
    and of values: half of bfloat16's bytes; auto: fp8 where the checkpoint says so (kv_cache_scheme), else model. Drafters keep theirs in the
    model's dtype."""
    kv_cache_scales: str = "auto"
    """With fp8: auto, which is the checkpoint's scales, or where it has none such as cover what the model keeps of a fixed prompt, found when it is
    loaded; one: 1 for all."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished requests, for those that begin alike."""
    num_threads: int | None = None
    """CPU threads of the engine, or of each rank, 1 to 1024; default: torch's choice, as far as the container's share of the machine's CPUs goes,
    spread over the ranks of this host; all ranks take as many as the one with the fewest. Idle ones sleep after some 0.2 ms (GOMP_SPINCOUNT, where
    the environment does not set it)."""
    cpu_kernels: str = "auto"
    """CPU: what the project's compiled kernels use of the processor at most: amx, avx512, avx2, any (what each one has); none: torch computes all;
    auto: whatever it has. One choice for all engines of a process."""
    async_scheduling: bool | None = None
    """Launch each decoding step before the one before it is read, on state that stays on the device. Default: on GPU."""
    max_forced_tokens: int = 8
    """Of the only continuation that an answer's form allows, so many tokens are drafted a step for requests whose method drafts nothing, 0 to 16.
    0: nor are any for the others."""
    cascade_attention: bool = False
    """GPU: read the keys of a beginning that several requests share once a step. For many requests with one long beginning."""
    quantization: str | QuantizationConfig | None = None
    """Weights are rounded when they are loaded: wint8 or fp8 (a scale for each output), wint4 (for 64 inputs), block_wise_fp8 (for 128 x 128), by one
    of these names or an object of names (below). Not for a checkpoint that is quantized: such are read as they are, and the name of their own format
    (awq, gptq, auto-round, compressed-tensors, fp8, fbgemm_fp8, modelopt) asks for nothing."""
    activations: str = "auto"
    """fp8: bfloat16 models on Hopper GPUs round the inputs of products with e4m3 weights (w8a8) and with weights of 4 bits (w4a8) to e4m3, too, with
    a scale for each token: faster and less exact. Experts' products, and the head's, have inputs in the model's dtype. On later GPUs it is products
    of 385 tokens and more, of e4m3 weights that have a scale for each output. A CPU never does. model: all have the model's dtype.
    auto: fp8 where quantization is a name that asks for it (a8w8_fp8, wfp8afp8, w4a8, w4afp8, a8w8_fp8_wint4), or that of dense parts is."""
    generation_config: str = "auto"
    """auto: requests that say nothing of their own are sampled as generation_config.json in the model's folder recommends (temperature, top_p,
    top_k, min_p, repetition_penalty, max_new_tokens); none: they are not."""
    unknown_tokens: str = "error"
    """Where the tokenizer has tokens beyond the model's embedding: error when it is loaded; or refuse, by name, the requests whose text becomes one.
    Those that a family has for what is no text, such as Gemma 3's for images, are refused either way."""
    load_format: str = "safetensors"
    """safetensors, or for benchmarks dummy: random weights of config.json's shapes."""
    single_thread_tokens: int | None = None
    """CPU: steps of fewer tokens run on one thread, since waking the others costs more than they bring. Default: 8 for 10 million weights, as the
    bundled model has, fewer for larger models; from 75 million on all steps run on all threads."""
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Below. Default: no speculation; `foretoken serve` with the bundled model: eagle3 and ngram."""
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    """Below."""
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    """Below."""

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, "one of " + ", ".join(DTYPES))
        require(self.activations in ACTIVATIONS, "activations", self.activations, "one of " + ", ".join(ACTIVATIONS))
        if self.activations == "auto":
            object.__setattr__(self, "activations", "fp8" if asks_for_activations(self.quantization) else "model")
        object.__setattr__(self, "quantization", normalize_quantization("quantization", self.quantization, has_cache=True))
        object.__setattr__(self, "kv_cache_dtype", normalize_cache_dtype("kv_cache_dtype", self.kv_cache_dtype))
        if isinstance(parts := self.quantization, QuantizationConfig) and parts.kv_cache_quant_type not in (None, "auto"):
            other = parts.kv_cache_quant_type
            good = self.kv_cache_dtype in ("auto", other)
            require(good, "kv_cache_dtype", self.kv_cache_dtype, f"{other}, or left out, where quantization.kv_cache_quant_type is {other}")
            object.__setattr__(self, "kv_cache_dtype", other)
        known = ", ".join(CPU_KERNELS)
        require(self.cpu_kernels in CPU_KERNELS, "cpu_kernels", self.cpu_kernels, f"one of {known}")
        known = ", ".join(CACHE_SCALES)
        require(self.kv_cache_scales in CACHE_SCALES, "kv_cache_scales", self.kv_cache_scales, f"one of {known}")
        require(self.load_format in LOAD_FORMATS, "load_format", self.load_format, "one of " + ", ".join(LOAD_FORMATS))
        known = ", ".join(GENERATION_CONFIGS)
        require(self.generation_config in GENERATION_CONFIGS, "generation_config", self.generation_config, f"one of {known}")
        known = ", ".join(UNKNOWN_TOKENS)
        require(self.unknown_tokens in UNKNOWN_TOKENS, "unknown_tokens", self.unknown_tokens, f"one of {known}")
        kind, _, number = self.device.partition(":")
        good = self.device in ("auto", "cpu", "cuda") or (kind == "cuda" and number.isdigit())
        require(good, "device", self.device, "auto, cpu, cuda or cuda:N")
        require(1 <= self.max_batch_size <= MAX_BATCH_SIZE, "max_batch_size", self.max_batch_size, f"from 1 to {MAX_BATCH_SIZE}")
        require(self.max_waiting >= 0, "max_waiting", self.max_waiting, ">= 0")
        require(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", self.max_model_len, ">= 2")
        good = self.max_num_batched_tokens is None or self.max_num_batched_tokens >= self.max_batch_size
        require(good, "max_num_batched_tokens", self.max_num_batched_tokens, f">= max_batch_size ({self.max_batch_size})")
        good = 1 <= self.page_size <= 1024 and self.page_size & (self.page_size - 1) == 0
        require(good, "page_size", self.page_size, "a power of two from 1 to 1024")
        require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1")
        require(self.max_step_ms is None or self.max_step_ms >= 0, "max_step_ms", self.max_step_ms, ">= 0")
        require(self.num_threads is None or 1 <= self.num_threads <= MAX_THREADS, "num_threads", self.num_threads, f"from 1 to {MAX_THREADS}")
        good = 0 <= self.max_forced_tokens <= MAX_SPECULATIVE_TOKENS
        require(good, "max_forced_tokens", self.max_forced_tokens, f"from 0 to {MAX_SPECULATIVE_TOKENS}")
        require(self.single_thread_tokens is None or self.single_thread_tokens >= 0, "single_thread_tokens", self.single_thread_tokens, ">= 0")
        bundled = str(DEFAULT_DRAFTER) if is_bundled(self.model) else None
        object.__setattr__(self, "speculative_config", self.speculative_config.find_drafter(bundled))
        own, target = self.speculative_config.draft_tensor_parallel_size, self.parallel_config.tensor_parallel_size
        require(own in (1, target), "speculative_config.draft_tensor_parallel_size", own, f"1 or the target's tensor_parallel_size ({target})")
        good = target == 1 or self.speculative_config.placement != "bls"
        require(good, "speculative_config.placement", "bls", f"in_process where tensor_parallel_size is {target}")
        if self.kv_cache_memory is not None:
            object.__setattr__(self, "kv_cache_memory", parse_bytes("kv_cache_memory", self.kv_cache_memory))

    @property
    def rounding(self) -> QuantizationConfig:
        """`quantization` by parts."""
        return read_quantization(self.quantization)

    def max_num_batched_tokens_on(self, device_type: str) -> int:
        """Or its default: on a GPU so many as keep its products busy."""
        return self.max_num_batched_tokens or max(self.max_batch_size, DEFAULT_BATCHED_TOKENS.get(device_type, 512))

    def max_step_rows_on(self, device_type: str) -> int:
        """Known tokens and drafts that one step has at most, where no request chooses more drafts than the server's method makes."""
        return self.max_num_batched_tokens_on(device_type) + self.max_batch_size * self.speculative_config.max_own_drafts

    @property
    def max_masked_drafts(self) -> int:
        """Most drafts a step of a request whose answer has a form; the engine's own method may be none where requests choose one that drafts."""
        asked = MAX_ASKED_MASKED if self.speculative_config.can_draft else 0
        return max(self.speculative_config.num_speculative_tokens or 0, self.max_forced_tokens, asked)

    def as_json(self) -> str:
        """The resolved configuration on one line, for the start-up log."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def parse_bytes(key: str, value: int | str) -> int:
    """Bytes from an integer or from a string such as "512MiB" or "2 GB". Raises ConfigError."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "k": 2**10, "m": 2**20, "g": 2**30}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
    text = str(value).strip().lower()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(digits) :].strip()
    try:
        result = int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f'{key} must be bytes or a string such as "2GiB", got {value!r:.80}') from None
    require(result > 0, key, value, "above 0")
    return result
