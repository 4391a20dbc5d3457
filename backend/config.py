"""Configuration as frozen dataclasses. `from_dict` refuses unknown keys (naming the nearest known one) and wrong types.

Nothing here imports torch: the launcher reads this module too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from backend.core import Speculation
from backend.disaggregation_config import DisaggregationConfig
from backend.errors import ConfigError
from backend.quantization_config import QuantizationConfig, normalize_quantization, read_quantization
from backend.section import Section, choose, closest, nearest, require
from backend.speculative_names import ALIASES, read_other_names

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

REPOSITORIES = Path(__file__).parent.parent / "model_repository"
REPOSITORY = REPOSITORIES / "standalone"
BUNDLED_MODEL = REPOSITORY / "decode" / "1"
BUNDLED_DRAFTER = REPOSITORY / "mtp_drafter" / "1"
MAX_BATCH_SIZE = 256
MAX_SPECULATIVE_TOKENS = 16
MAX_CANDIDATES = 64
MAX_RANKS = 64
MAX_SUFFIX_LIMIT = 10**6
"""The trees count in 32 bits, and products that overflow them end all drafts without a word."""
VERIFY_STRATEGIES = ("target_match", "greedy", "rejection", "topp")
ACCEPT_POLICIES = ("normal", "accept_all", "reject_all", "simulated")
LOAD_FORMATS = ("safetensors", "dummy")
GENERATION_CONFIGS = ("auto", "none")
MODEL_METHODS = ("mtp", "draft_model", "eagle", "eagle3", "medusa", "hydra", "mlp_speculator")
"""Those that draft with weights of their own: a server has one of them at most."""
HEAD_METHODS = ("medusa", "hydra", "mlp_speculator")
METHODS = ("none", "naive", "ngram", "suffix", *MODEL_METHODS)
METHOD_ALIASES = {
    "ngram_match": "ngram",
    "inference_with_reference": "ngram",
    "deepseek_mtp": "mtp",
    "ernie_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "mimo_mtp": "mtp",
    "nextn": "mtp",
    "standalone": "draft_model",
}
"""Of FastDeploy, PaddleNLP, vLLM and SGLang."""
MTP_STRATEGIES = ("default", "with_ngram", "with_suffix")
SUFFIX_KEYS = tuple(
    f"suffix_decoding_{k}" for k in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob", "corpus", "cache_path")
)
KEY_METHODS = {
    **dict.fromkeys(("max_ngram_size", "min_ngram_size"), ("ngram",)),
    **dict.fromkeys(SUFFIX_KEYS, ("suffix",)),
    **dict.fromkeys(("model", "num_model_steps", "mtp_strategy", "draft_sampling", "quantization", "draft_tensor_parallel_size"), MODEL_METHODS),
    "placement": ("mtp",),
}
"""The methods of keys that do nothing where none of theirs is loaded."""
PLACEMENTS = ("auto", "in_process", "bls")
DRAFT_SAMPLINGS = ("shared_noise", "greedy")
DRAFT_SAMPLING_ALIASES = {"probabilistic": "shared_noise"}
"""vLLM's."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}
DEFAULT_STEP_MS = {"cuda": 50.0}
"""One H200, an 8B model, 128 requests: a limit of 50 ms halves the 99th percentile of the time per token for a few percent of the tokens."""


def normalize_method(value: object, key: str = "method") -> str:
    """A method's own name from any accepted spelling. Raises ConfigError."""
    if value is None:
        return "none"
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a string, got {value!r:.80}")
    name = value.lower()
    name = METHOD_ALIASES.get(name, name)
    if name not in METHODS:
        raise ConfigError(f"{key} {value!r:.80} is not one of {', '.join(METHODS)} (case-insensitive){closest(name, METHODS)}")
    return name


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(Section):
    """How the engine drafts and verifies (the `speculative_config` object)."""

    aliases: ClassVar[dict[str, str]] = ALIASES

    method: str | None = None
    """none (plain decoding), naive (the speculative path without drafts), ngram, suffix, or a model drafter: mtp, draft_model, eagle, eagle3,
    medusa, hydra or mlp_speculator. Needed where any other key is given."""
    num_speculative_tokens: int | None = None
    """Drafts a step at most, 1 to 16. Default: 1; model drafters: num_model_steps; suffix: suffix_decoding_max_tree_depth, within 16."""
    adaptive: bool = True
    """Draft fewer when measured times and acceptance say that fewer give more tokens a second, as in large batches. Not under topp, whose
    answers would follow the load."""
    request_methods: tuple[str, ...] = ()
    """Further methods to load, for requests to choose."""
    verify_strategy: str = "target_match"
    """target_match (the tokens of plain decoding for the same seed), greedy, rejection (exact in distribution) or topp (FastDeploy's
    rule: accepts what is likely enough, which changes the distribution)."""
    accept_policy: str = "normal"
    """normal; for debugging accept_all and reject_all; for benchmarks with random weights simulated."""
    simulated_acceptance_rate: float = 0.8
    """accept_policy simulated: the share of drafts that stand, position by position."""
    max_candidate_len: int = 5
    """topp: most tokens a draft is looked for among, and a token is drawn from, in every step."""
    verify_window: int = 2
    """topp: likeliest drafts that must follow one that was only second."""
    max_ngram_size: int = 5
    """ngram: longest run of last tokens that is looked for."""
    min_ngram_size: int | None = None
    """ngram: shortest run. Default: 1; with_ngram: 2."""
    model: str | None = None
    """Model drafters: folder of the drafter's weights. Only mtp has a default: the model's own, where it has such weights, else the mtp_drafter
    model's version folder."""
    num_model_steps: int | None = None
    """Model drafters: drafts that the model makes in a step, 1 to 16. Default: num_speculative_tokens; with_ngram and with_suffix: 1."""
    mtp_strategy: str = "default"
    """Model drafters: default, or with_ngram and with_suffix: lookups lengthen the model's drafts up to num_speculative_tokens."""
    placement: str = "auto"
    """mtp: in_process (the decode model runs the drafter), bls (the mtp_drafter model does, called each step), or auto: in_process."""
    draft_sampling: str = "shared_noise"
    """Model drafters, target_match at temperature > 0: drafts drawn with the target's noise (Daliri et al. 2024), or the likeliest (greedy)."""
    quantization: str | QuantizationConfig | None = None
    """Model drafters: how the drafter's weights are rounded, as the engine's quantization."""
    draft_tensor_parallel_size: int = 1
    """Ranks that the drafter's layers are split over: 1 (whole on every rank), or the target's tensor_parallel_size. Heads are whole."""
    suffix_decoding_max_tree_depth: int = 64
    """Longest match, in tokens."""
    suffix_decoding_max_cached_requests: int = -1
    """Finished requests whose answers are searched too; -1: as many as memory's own limit allows, 0: none."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Drafts at most, as a multiple of the length of the match."""
    suffix_decoding_min_token_prob: float = 0.1
    """Tokens less likely than this by the tree's counts are not drafted."""
    suffix_decoding_corpus: tuple[str, ...] = ()
    """Files whose texts are searched as answers are, from the start on: texts, or .jsonl with a text or a list of token ids in each line (plain, or
    as `text` or `token_ids` of an object). At most 1048576 tokens in all."""
    suffix_decoding_cache_path: str | None = None
    """File that the suffix cache is saved to every two minutes and at shutdown, and restored from at start. Servers of one model may share it:
    each adds its answers. Default: none; `foretoken serve`: one for each model in the user's state folder."""

    @classmethod
    def from_dict(cls, values: object, where: str = "") -> Self:
        """As of any section; keys that would have no effect are errors too: those of a method that is not loaded, and any without a method."""
        values = read_other_names(values, where)
        config = super().from_dict(values, where)
        assert isinstance(values, dict)
        given: dict[str, str] = {str(cls.aliases.get(key, key)): str(key) for key in values}
        method_key = given.pop("method", "method")
        if given and values.get(method_key) is None:
            hints = "".join(f"; {key} is a key of {', '.join(KEY_METHODS[name])}" for name, key in given.items() if name in KEY_METHODS)
            raise ConfigError(f"{where}method must be given with other keys ({', '.join(given.values())}): one of {', '.join(METHODS)}{hints}")
        loaded = config.loaded_methods
        if idle := {name: key for name, key in given.items() if name in KEY_METHODS and not set(KEY_METHODS[name]) & set(loaded)}:
            without = super().from_dict({key: value for key, value in values.items() if key not in idle.values()}, where)
            for name, key in idle.items():
                if getattr(config, name) != getattr(without, name):  # else it says what holds anyway, as a settled configuration does
                    own = KEY_METHODS[name]
                    also = ", or take mtp_strategy with_suffix" if name in SUFFIX_KEYS and config.model_method else ""
                    raise ConfigError(
                        f"{where}{key} has no effect with method {config.method}: it is a key of {', '.join(own)}; choose "
                        f"{'that method' if len(own) == 1 else 'one of them'}, or name it in request_methods{also}"
                    )
        if "simulated_acceptance_rate" in given and config.accept_policy != "simulated":
            rate = config.simulated_acceptance_rate
            rule = f"left out unless accept_policy is simulated (it is {config.accept_policy})"
            require(rate == cls.simulated_acceptance_rate, f"{where}simulated_acceptance_rate", rate, rule)
        return config

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("method", normalize_method(self.method))
        put("draft_sampling", DRAFT_SAMPLING_ALIASES.get(self.draft_sampling.lower(), self.draft_sampling))
        for key, known in (
            ("verify_strategy", VERIFY_STRATEGIES),
            ("accept_policy", ACCEPT_POLICIES),
            ("mtp_strategy", MTP_STRATEGIES),
            ("placement", PLACEMENTS),
            ("draft_sampling", DRAFT_SAMPLINGS),
        ):
            put(key, choose(key, getattr(self, key), known))
        put("quantization", normalize_quantization("quantization", self.quantization))
        head = self.rounding.head_quant_type
        require(head is None, "quantization.head_quant_type", head, "left out: the drafter's head is the target's")
        put("request_methods", tuple(normalize_method(m, "request_methods") for m in self.request_methods))
        for key in ("model", "suffix_decoding_cache_path"):
            require(getattr(self, key) != "", key, "", "a path")
        require("" not in self.suffix_decoding_corpus, "suffix_decoding_corpus", "", "paths")
        self._check_model_methods()
        require(1 <= self.max_candidate_len <= MAX_CANDIDATES, "max_candidate_len", self.max_candidate_len, f"from 1 to {MAX_CANDIDATES}")
        good = 1 <= self.verify_window <= MAX_SPECULATIVE_TOKENS
        require(good, "verify_window", self.verify_window, f"from 1 to {MAX_SPECULATIVE_TOKENS}")
        if self.verify_strategy == "topp":
            logger.warning("verify_strategy topp accepts every likely draft: sampled answers do not follow the model's distribution exactly")
        rate = self.simulated_acceptance_rate
        require(0 <= rate <= 1, "simulated_acceptance_rate", rate, "from 0 to 1")
        if self.accept_policy != "normal":
            logger.warning("accept_policy %s is for debugging: answers are not the model's", self.accept_policy)
        self._check_suffix()
        require(self.draft_tensor_parallel_size >= 1, "draft_tensor_parallel_size", self.draft_tensor_parallel_size, ">= 1")
        self._settle_counts()
        put("min_ngram_size", self.min_ngram_size if self.min_ngram_size is not None else 2 if self.mtp_strategy == "with_ngram" else 1)
        assert self.min_ngram_size is not None
        require(self.min_ngram_size >= 1, "min_ngram_size", self.min_ngram_size, ">= 1")
        good = self.max_ngram_size >= self.min_ngram_size
        require(good, "max_ngram_size", self.max_ngram_size, f">= min_ngram_size ({self.min_ngram_size})")

    def _check_model_methods(self) -> None:
        own = [method for method in self.loaded_methods if method in MODEL_METHODS]
        require(len(own) < 2, "request_methods", self.request_methods, f"without a second model drafter: {' and '.join(own)} would share `model`")
        if own and own[0] != "mtp":
            require(self.model is not None, "model", self.model, f"the folder of the drafter's weights with method {own[0]}")
            good = self.draft_tensor_parallel_size == 1 or own[0] not in HEAD_METHODS
            require(good, "draft_tensor_parallel_size", self.draft_tensor_parallel_size, f"1 with method {own[0]}, whose heads are not split")
            require(self.placement != "bls", "placement", self.placement, f"auto or in_process with method {own[0]}: bls is for mtp")

    def _check_suffix(self) -> None:
        prefix = "suffix_decoding_"
        depth, cached = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_cached_requests
        factor, probability = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        require(1 <= depth <= MAX_SUFFIX_LIMIT, f"{prefix}max_tree_depth", depth, f"from 1 to {MAX_SUFFIX_LIMIT}")
        require(cached >= -1, f"{prefix}max_cached_requests", cached, ">= 0, or -1 for no limit of its own")
        require(0 <= factor <= MAX_SUFFIX_LIMIT, f"{prefix}max_spec_factor", factor, f"from 0 to {MAX_SUFFIX_LIMIT}")
        require(0 <= probability <= 1, f"{prefix}min_token_prob", probability, "from 0 to 1")

    def _settle_counts(self) -> None:
        """Fills in num_speculative_tokens and num_model_steps; each is checked where it is used."""
        count, steps = self.num_speculative_tokens, self.num_model_steps
        limit, rule = MAX_SPECULATIVE_TOKENS, f"from 1 to {MAX_SPECULATIVE_TOKENS}"
        require(count is None or count >= 0, "num_speculative_tokens", count, ">= 0")
        require(steps is None or 1 <= steps <= limit, "num_model_steps", steps, rule)
        if self.method in ("none", "naive"):
            if count is not None and count > 1:  # 1 is the default
                logger.warning("method %s drafts nothing: num_speculative_tokens %d is set to 0", self.method, count)
            count = 0
        elif count is None:
            model_count = dict.fromkeys(MODEL_METHODS, steps or 1)
            count = {"suffix": min(self.suffix_decoding_max_tree_depth, limit), **model_count}.get(self.method or "", 1)
        else:
            require(1 <= count <= limit, "num_speculative_tokens", count, rule)
        if steps is None:
            steps = max(1, count) if self.mtp_strategy == "default" else 1
        if self.method in MODEL_METHODS and steps > count:
            logger.warning("num_speculative_tokens %d is raised to num_model_steps %d", count, steps)
            count = steps
        object.__setattr__(self, "num_speculative_tokens", count)
        object.__setattr__(self, "num_model_steps", steps)

    @property
    def rounding(self) -> QuantizationConfig:
        """`quantization` by parts."""
        return read_quantization(self.quantization)

    @property
    def model_method(self) -> str:
        """The model drafter among the loaded methods; "": there is none."""
        return next((method for method in self.loaded_methods if method in MODEL_METHODS), "")

    @property
    def loaded_methods(self) -> tuple[str, ...]:
        """What requests may choose, `method` first. ngram costs nothing to have."""
        methods = [self.method or "none", *self.request_methods, *(["suffix"] if self.mtp_strategy == "with_suffix" else [])]
        return tuple(dict.fromkeys([*methods, *([] if set(methods) == {"none"} else ["ngram"]), "none", "naive"]))

    def resolve(self, choice: object) -> Speculation:
        """The speculation of one request: this configuration, with the request's `speculative` object over it.

        Raises ConfigError for unknown keys, a method that is not loaded, or values out of range.
        """
        method, count, strategy = self.method or "none", self.num_speculative_tokens or 0, self.verify_strategy
        mtp_strategy = self.mtp_strategy
        if choice is None:
            choice = {}
        if not isinstance(choice, dict):
            raise ConfigError(f"speculative must be an object, got {choice!r:.80}")
        keys = ("method", "num_speculative_tokens", "verify_strategy", "mtp_strategy", "prediction")
        for key in choice:
            if key not in keys:
                raise ConfigError(f"speculative: unknown key {key!r:.80}{nearest(str(key), keys)}")
        if "method" in choice:
            method = normalize_method(choice["method"])
            if method not in self.loaded_methods:
                raise ConfigError(f"speculative: method {method} is not loaded; loaded: {', '.join(sorted(self.loaded_methods))}")
        if "verify_strategy" in choice:
            strategy = choose("speculative.verify_strategy", choice["verify_strategy"], VERIFY_STRATEGIES)
        if "mtp_strategy" in choice:
            if method not in MODEL_METHODS:
                raise ConfigError(f"speculative: mtp_strategy has no effect with method {method}: it is a key of {', '.join(MODEL_METHODS)}")
            mtp_strategy = choose("speculative.mtp_strategy", choice["mtp_strategy"], MTP_STRATEGIES)
            lookup = mtp_strategy.removeprefix("with_")
            if lookup != "default" and lookup not in self.loaded_methods:
                raise ConfigError(f"speculative: mtp_strategy {mtp_strategy} needs method {lookup}, which is not loaded")
        if "num_speculative_tokens" in choice:
            count = choice["num_speculative_tokens"]
            good = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MAX_SPECULATIVE_TOKENS
            require(good, "speculative.num_speculative_tokens", count, f"from 0 (off) to {MAX_SPECULATIVE_TOKENS}")
        elif count == 0 and method not in ("none", "naive"):  # the server's own method drafts nothing
            count = 1
        if choice.get("prediction") is not None:
            asked = f"method {method}" if method in ("none", "naive") else "num_speculative_tokens 0" if not count else ""
            if asked:
                raise ConfigError(f"speculative: prediction has no effect with {asked}: choose a method and a number that draft")
            if "num_speculative_tokens" not in choice:  # what is right goes on being right for long
                count = MAX_SPECULATIVE_TOKENS
        is_own = mtp_strategy == self.mtp_strategy and "num_speculative_tokens" not in choice
        steps = count if mtp_strategy == "default" and not is_own else min(count, self.num_model_steps or 1)
        return Speculation(method, 0 if method in ("none", "naive") else count, strategy, steps, mtp_strategy)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How one model is spread over devices."""

    tensor_parallel_size: int = 1
    """Ranks that one model is split over, each a process; on GPUs each with its own. 1 to 64."""
    expert_parallel: bool = False
    """Mixtures of experts: each rank holds whole experts, as many as the others; else a part of every expert."""

    def __post_init__(self) -> None:
        require(1 <= self.tensor_parallel_size <= MAX_RANKS, "tensor_parallel_size", self.tensor_parallel_size, f"from 1 to {MAX_RANKS}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Section):
    """Everything the engine is built from."""

    model: str = str(BUNDLED_MODEL)
    """Folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json."""
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
    GPU, no limit on CPU."""
    page_size: int = 16
    """Tokens a KV page holds."""
    kv_cache_memory: int | str | None = None
    """Bytes, or a string such as "2GiB"; default: 4 GiB on CPU, else by gpu_memory_utilization; never more than the batch can use."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights and KV cache may take."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished requests, for those that begin alike."""
    num_threads: int | None = None
    """CPU threads of the engine; default: torch's choice."""
    async_scheduling: bool | None = None
    """Launch each decoding step before the one before it is read, on state that stays on the device. Default: on GPU."""
    max_forced_tokens: int = 8
    """Of the only continuation that an answer's form allows, so many tokens are drafted a step for requests whose method drafts nothing, 0 to 16."""
    cascade_attention: bool = False
    """GPU: read the keys of a beginning that several requests share once a step. For many requests with one long beginning."""
    quantization: str | QuantizationConfig | None = None
    """Weights are rounded when they are loaded: wint8 or fp8 (a scale for each output), wint4 (for 64 inputs), block_wise_fp8 (for 128 x 128), by one
    of these names or an object of names (below). Not for a checkpoint that is quantized: such are read as they are."""
    generation_config: str = "auto"
    """auto: requests that say nothing of their own are sampled as generation_config.json in the model's folder recommends (temperature, top_p,
    top_k, min_p, repetition_penalty, max_new_tokens); none: they are not."""
    load_format: str = "safetensors"
    """safetensors, or for benchmarks dummy: random weights of config.json's shapes."""
    single_thread_tokens: int = 8
    """CPU: steps of fewer tokens run on one thread, since waking the others costs more than they bring."""
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Below. Default: no speculation; `foretoken serve` with the bundled model: its drafter and ngram."""
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    """Below."""
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    """Below."""

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, "one of " + ", ".join(DTYPES))
        object.__setattr__(self, "quantization", normalize_quantization("quantization", self.quantization))
        require(self.load_format in LOAD_FORMATS, "load_format", self.load_format, "one of " + ", ".join(LOAD_FORMATS))
        known = ", ".join(GENERATION_CONFIGS)
        require(self.generation_config in GENERATION_CONFIGS, "generation_config", self.generation_config, f"one of {known}")
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
        require(self.num_threads is None or self.num_threads >= 1, "num_threads", self.num_threads, ">= 1")
        good = 0 <= self.max_forced_tokens <= MAX_SPECULATIVE_TOKENS
        require(good, "max_forced_tokens", self.max_forced_tokens, f"from 0 to {MAX_SPECULATIVE_TOKENS}")
        require(self.single_thread_tokens >= 0, "single_thread_tokens", self.single_thread_tokens, ">= 0")
        own, target = self.speculative_config.draft_tensor_parallel_size, self.parallel_config.tensor_parallel_size
        require(own in (1, target), "speculative_config.draft_tensor_parallel_size", own, f"1 or the target's tensor_parallel_size ({target})")
        good = target == 1 or self.speculative_config.placement != "bls"
        require(good, "speculative_config.placement", "bls", f"in_process where tensor_parallel_size is {target}")
        require(target == 1 or not self.disaggregation.is_on, "tensor_parallel_size", target, "1 where disaggregation.scheduler_name is redis")
        if self.kv_cache_memory is not None:
            object.__setattr__(self, "kv_cache_memory", parse_bytes("kv_cache_memory", self.kv_cache_memory))

    @property
    def rounding(self) -> QuantizationConfig:
        """`quantization` by parts."""
        return read_quantization(self.quantization)

    def max_num_batched_tokens_on(self, device_type: str) -> int:
        """Or its default: on a GPU so many as keep its products busy."""
        return self.max_num_batched_tokens or max(self.max_batch_size, DEFAULT_BATCHED_TOKENS.get(device_type, 512))

    @property
    def max_masked_drafts(self) -> int:
        """Most drafts a step of a request whose answer has a form."""
        return max(self.speculative_config.num_speculative_tokens or 0, self.max_forced_tokens)

    def max_step_ms_on(self, device_type: str) -> float:
        """Or its default; 0: no limit."""
        return self.max_step_ms if self.max_step_ms is not None else DEFAULT_STEP_MS.get(device_type, 0.0)

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
