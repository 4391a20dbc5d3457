"""Configuration as frozen dataclasses. `from_dict` refuses unknown keys (naming the nearest known one) and wrong types.

Nothing here imports torch: the launcher reads this module too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import logging
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from backend.core import Speculation
from backend.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).parent.parent / "model_repository" / "standalone"
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
METHODS = ("none", "naive", "ngram", "suffix", "mtp")
METHOD_ALIASES = {"ngram_match": "ngram", "inference_with_reference": "ngram", "deepseek_mtp": "mtp", "ernie_mtp": "mtp"}
MTP_STRATEGIES = ("default", "with_ngram", "with_suffix")
PLACEMENTS = ("auto", "in_process", "bls")
DRAFT_SAMPLINGS = ("shared_noise", "greedy")
QUANTIZATIONS = ("wint8", "wint4", "fp8")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}
DEFAULT_STEP_MS = {"cuda": 50.0}
"""One H200, an 8B model, 128 requests: a limit of 50 ms halves the 99th percentile of the time per token for a few percent of the tokens."""


def nearest(key: str, known: typing.Iterable[str]) -> str:
    """'; did you mean "x"?' when a known key is close to `key`, else the list of known keys."""
    known = sorted(known)
    match = difflib.get_close_matches(key, known, n=1)
    return f'; did you mean "{match[0]}"?' if match else f"; known keys: {', '.join(known)}"


def normalize_method(value: object, key: str = "method") -> str:
    """A method's own name from any accepted spelling. Raises ConfigError."""
    if value is None:
        return "none"
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a string, got {value!r:.80}")
    name = value.lower()
    name = METHOD_ALIASES.get(name, name)
    if name not in METHODS:
        raise ConfigError(f"{key} {value!r:.80} is not one of {', '.join(METHODS)} (case-insensitive){nearest(name, METHODS)}")
    return name


class Section:
    """What every configuration section shares: strict construction from a mapping."""

    aliases: ClassVar[dict[str, str]] = {}

    @classmethod
    def from_dict(cls, values: object, where: str = "") -> Self:
        """Raises ConfigError for an unknown key, a wrong type or a value out of range; `where` opens the message."""
        if not isinstance(values, dict):
            raise ConfigError(f"{where.rstrip('. ') or cls.__name__} must be an object of keys and values, got {values!r:.80}")
        hints = typing.get_type_hints(cls)
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            name = cls.aliases.get(key, key)
            if name not in known:
                raise ConfigError(
                    f"{where.rstrip('. :') + ': ' if where else ''}unknown key {key!r:.80}{nearest(str(key), known | set(cls.aliases))}"
                )
            if name in arguments:
                raise ConfigError(f"{where}{name} is given twice (as {key!r} too)")
            arguments[name] = _convert(f"{where}{name}", value, hints[name])
        return cls(**arguments)


def _convert(key: str, value: object, hint: Any) -> object:
    """`value` when it is of the annotated type; sections are built from mappings, ints widen to floats."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if isinstance(option, type) and issubclass(option, Section):
            return value if isinstance(value, option) else option.from_dict(value, f"{key}.")
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an integer that no float holds
                return float(value)
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            (element, _) = typing.get_args(option)
            return tuple(_convert(f"{key}[{i}]", v, element) for i, v in enumerate(value))
        if isinstance(option, type) and isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return value
    names = " or ".join("null" if o is type(None) else "a list" if typing.get_origin(o) is tuple else o.__name__ for o in options)
    raise ConfigError(f"{key} must be {names}, got {value!r:.80}")


def _choose(key: str, value: object, known: tuple[str, ...]) -> str:
    """One of the known names, whatever its case. Raises ConfigError."""
    _require(isinstance(value, str) and value.lower() in known, key, value, "one of " + ", ".join(known))
    return str(value).lower()


def _require(is_good: bool, key: str, value: object, rule: str) -> None:
    if not is_good:
        raise ConfigError(f"{key} must be {rule}, got {value!r:.80}")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(Section):
    """How the engine drafts and verifies (the `speculative_config` object)."""

    aliases: ClassVar[dict[str, str]] = {"prompt_lookup_max": "max_ngram_size", "prompt_lookup_min": "min_ngram_size"}

    method: str | None = None
    """none (plain decoding), naive (the speculative path without drafts), ngram, suffix or mtp."""
    num_speculative_tokens: int | None = None
    """Drafts a step at most, 1 to 16. Default: 1; mtp: num_model_steps; suffix: suffix_decoding_max_tree_depth, within 16."""
    adaptive: bool = True
    """Draft fewer when measured times and acceptance say that fewer give more tokens a second, as in large batches."""
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
    """topp: most tokens a draft is looked for among."""
    verify_window: int = 2
    """topp: likeliest drafts that must follow one that was only second."""
    max_ngram_size: int = 5
    """ngram: longest run of last tokens that is looked for."""
    min_ngram_size: int | None = None
    """ngram: shortest run. Default: 1; with_ngram: 2."""
    model: str | None = None
    """mtp: folder of the drafter's weights; default: the model's own, where it has such weights, else the mtp_drafter model's version folder."""
    num_model_steps: int | None = None
    """mtp: drafter forwards a step, 1 to 16. Default: num_speculative_tokens; with_ngram and with_suffix: 1."""
    mtp_strategy: str = "default"
    """default, or with_ngram and with_suffix: lookups lengthen the model's drafts up to num_speculative_tokens."""
    placement: str = "auto"
    """mtp: in_process (the decode model runs the drafter), bls (the mtp_drafter model does, called each step), or auto: in_process."""
    draft_sampling: str = "shared_noise"
    """mtp, target_match at temperature > 0: drafts drawn with the target's noise (Daliri et al. 2024), or the likeliest (greedy)."""
    quantization: str | None = None
    """mtp: wint8, wint4 or fp8 for the drafter's weights."""
    draft_tensor_parallel_size: int = 1
    """1, or the target's tensor_parallel_size."""
    suffix_decoding_max_tree_depth: int = 64
    """Longest match, in tokens."""
    suffix_decoding_max_cached_requests: int = -1
    """Finished requests whose answers are searched too; -1: as many as memory's own limit allows, 0: none."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Drafts at most, as a multiple of the length of the match."""
    suffix_decoding_min_token_prob: float = 0.1
    """Tokens less likely than this by the tree's counts are not drafted."""
    suffix_decoding_cache_path: str | None = None
    """File that the suffix cache is saved to at shutdown and restored from at start; default: none."""

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("method", normalize_method(self.method))
        for key, known in (
            ("verify_strategy", VERIFY_STRATEGIES),
            ("accept_policy", ACCEPT_POLICIES),
            ("mtp_strategy", MTP_STRATEGIES),
            ("placement", PLACEMENTS),
            ("draft_sampling", DRAFT_SAMPLINGS),
        ):
            put(key, _choose(key, getattr(self, key), known))
        if self.quantization is not None:
            put("quantization", _choose("quantization", self.quantization, QUANTIZATIONS))
        put("request_methods", tuple(normalize_method(m, "request_methods") for m in self.request_methods))
        for key in ("model", "suffix_decoding_cache_path"):
            _require(getattr(self, key) != "", key, "", "a path")
        _require(1 <= self.max_candidate_len <= MAX_CANDIDATES, "max_candidate_len", self.max_candidate_len, f"from 1 to {MAX_CANDIDATES}")
        good = 1 <= self.verify_window <= MAX_SPECULATIVE_TOKENS
        _require(good, "verify_window", self.verify_window, f"from 1 to {MAX_SPECULATIVE_TOKENS}")
        if self.verify_strategy == "topp":
            logger.warning("verify_strategy topp accepts every likely draft: sampled answers do not follow the model's distribution exactly")
        rate = self.simulated_acceptance_rate
        _require(0 <= rate <= 1, "simulated_acceptance_rate", rate, "from 0 to 1")
        if self.accept_policy != "normal":
            logger.warning("accept_policy %s is for debugging: answers are not the model's", self.accept_policy)
        self._check_suffix()
        _require(self.draft_tensor_parallel_size >= 1, "draft_tensor_parallel_size", self.draft_tensor_parallel_size, ">= 1")
        self._settle_counts()
        put("min_ngram_size", self.min_ngram_size if self.min_ngram_size is not None else 2 if self.mtp_strategy == "with_ngram" else 1)
        assert self.min_ngram_size is not None
        _require(self.min_ngram_size >= 1, "min_ngram_size", self.min_ngram_size, ">= 1")
        good = self.max_ngram_size >= self.min_ngram_size
        _require(good, "max_ngram_size", self.max_ngram_size, f">= min_ngram_size ({self.min_ngram_size})")

    def _check_suffix(self) -> None:
        prefix = "suffix_decoding_"
        depth, cached = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_cached_requests
        factor, probability = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        _require(1 <= depth <= MAX_SUFFIX_LIMIT, f"{prefix}max_tree_depth", depth, f"from 1 to {MAX_SUFFIX_LIMIT}")
        _require(cached >= -1, f"{prefix}max_cached_requests", cached, ">= 0, or -1 for no limit of its own")
        _require(0 <= factor <= MAX_SUFFIX_LIMIT, f"{prefix}max_spec_factor", factor, f"from 0 to {MAX_SUFFIX_LIMIT}")
        _require(0 <= probability <= 1, f"{prefix}min_token_prob", probability, "from 0 to 1")

    def _settle_counts(self) -> None:
        """Fills in num_speculative_tokens and num_model_steps; each is checked where it is used."""
        count, steps = self.num_speculative_tokens, self.num_model_steps
        limit, rule = MAX_SPECULATIVE_TOKENS, f"from 1 to {MAX_SPECULATIVE_TOKENS}"
        _require(count is None or count >= 0, "num_speculative_tokens", count, ">= 0")
        _require(steps is None or 1 <= steps <= limit, "num_model_steps", steps, rule)
        if self.method in ("none", "naive"):
            if self.method == "naive" and count is not None and count > 1:  # 1 is the default
                logger.warning("method naive drafts nothing: num_speculative_tokens %d is set to 0", count)
            count = 0
        elif count is None:
            count = {"suffix": min(self.suffix_decoding_max_tree_depth, limit), "mtp": steps or 1}.get(self.method or "", 1)
        else:
            _require(1 <= count <= limit, "num_speculative_tokens", count, rule)
        if steps is None:
            steps = max(1, count) if self.mtp_strategy == "default" else 1
        if self.method == "mtp" and steps > count:
            logger.warning("num_speculative_tokens %d is raised to num_model_steps %d", count, steps)
            count = steps
        object.__setattr__(self, "num_speculative_tokens", count)
        object.__setattr__(self, "num_model_steps", steps)

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
        keys = ("method", "num_speculative_tokens", "verify_strategy", "mtp_strategy")
        for key in choice:
            if key not in keys:
                raise ConfigError(f"speculative: unknown key {key!r:.80}{nearest(str(key), keys)}")
        if "method" in choice:
            method = normalize_method(choice["method"])
            if method not in self.loaded_methods:
                raise ConfigError(f"speculative: method {method} is not loaded; loaded: {', '.join(sorted(self.loaded_methods))}")
        if "verify_strategy" in choice:
            strategy = _choose("speculative.verify_strategy", choice["verify_strategy"], VERIFY_STRATEGIES)
        if "mtp_strategy" in choice:
            mtp_strategy = _choose("speculative.mtp_strategy", choice["mtp_strategy"], MTP_STRATEGIES)
            lookup = mtp_strategy.removeprefix("with_")
            if lookup != "default" and lookup not in self.loaded_methods:
                raise ConfigError(f"speculative: mtp_strategy {mtp_strategy} needs method {lookup}, which is not loaded")
        if "num_speculative_tokens" in choice:
            count = choice["num_speculative_tokens"]
            good = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MAX_SPECULATIVE_TOKENS
            _require(good, "speculative.num_speculative_tokens", count, f"from 0 (off) to {MAX_SPECULATIVE_TOKENS}")
        elif count == 0 and method not in ("none", "naive"):  # the server's own method drafts nothing
            count = 1
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
        _require(1 <= self.tensor_parallel_size <= MAX_RANKS, "tensor_parallel_size", self.tensor_parallel_size, f"from 1 to {MAX_RANKS}")


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
    cascade_attention: bool = False
    """GPU: read the keys of a beginning that several requests share once a step. For many requests with one long beginning."""
    load_format: str = "safetensors"
    """safetensors, or for benchmarks dummy: random weights of config.json's shapes."""
    single_thread_tokens: int = 8
    """CPU: steps of fewer tokens run on one thread, since waking the others costs more than they bring."""
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Below. Default: no speculation; `foretoken serve` with the bundled model: its drafter and ngram."""
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    """Below."""

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, "dtype", self.dtype, "one of " + ", ".join(DTYPES))
        _require(self.load_format in LOAD_FORMATS, "load_format", self.load_format, "one of " + ", ".join(LOAD_FORMATS))
        kind, _, number = self.device.partition(":")
        good = self.device in ("auto", "cpu", "cuda") or (kind == "cuda" and number.isdigit())
        _require(good, "device", self.device, "auto, cpu, cuda or cuda:N")
        _require(1 <= self.max_batch_size <= MAX_BATCH_SIZE, "max_batch_size", self.max_batch_size, f"from 1 to {MAX_BATCH_SIZE}")
        _require(self.max_waiting >= 0, "max_waiting", self.max_waiting, ">= 0")
        _require(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", self.max_model_len, ">= 2")
        good = self.max_num_batched_tokens is None or self.max_num_batched_tokens >= self.max_batch_size
        _require(good, "max_num_batched_tokens", self.max_num_batched_tokens, f">= max_batch_size ({self.max_batch_size})")
        good = 1 <= self.page_size <= 1024 and self.page_size & (self.page_size - 1) == 0
        _require(good, "page_size", self.page_size, "a power of two from 1 to 1024")
        _require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1")
        _require(self.max_step_ms is None or self.max_step_ms >= 0, "max_step_ms", self.max_step_ms, ">= 0")
        _require(self.num_threads is None or self.num_threads >= 1, "num_threads", self.num_threads, ">= 1")
        _require(self.single_thread_tokens >= 0, "single_thread_tokens", self.single_thread_tokens, ">= 0")
        own, target = self.speculative_config.draft_tensor_parallel_size, self.parallel_config.tensor_parallel_size
        _require(own in (1, target), "speculative_config.draft_tensor_parallel_size", own, f"1 or the target's tensor_parallel_size ({target})")
        good = target == 1 or self.speculative_config.placement != "bls"
        _require(good, "speculative_config.placement", "bls", f"in_process where tensor_parallel_size is {target}")
        if self.kv_cache_memory is not None:
            object.__setattr__(self, "kv_cache_memory", parse_bytes("kv_cache_memory", self.kv_cache_memory))

    def max_num_batched_tokens_on(self, device_type: str) -> int:
        """Or its default: on a GPU so many as keep its products busy."""
        return self.max_num_batched_tokens or max(self.max_batch_size, DEFAULT_BATCHED_TOKENS.get(device_type, 512))

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
    _require(result > 0, key, value, "above 0")
    return result
