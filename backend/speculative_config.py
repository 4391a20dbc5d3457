"""How the engine drafts and verifies, as a frozen dataclass: methods, their names and keys.

Nothing here imports torch: the launcher reads this module too.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from backend.errors import ConfigError
from backend.quantization_config import QuantizationConfig, normalize_quantization, read_quantization
from backend.section import Section, choose, closest, require
from backend.speculative_names import ALIASES, MOST_DRAFTS, read_other_names
from backend.trees import DEFAULT_DEPTH, DEFAULT_NODES, TREE_KEYS, DynamicTree, Tree, check_tree, make_static, shape_static

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

MAX_SPECULATIVE_TOKENS = MOST_DRAFTS
AUTO_TOKENS, AUTO_STEPS = 12, 5
"""Of method auto, where nothing else is said."""
MAX_CANDIDATES = 64
MAX_SUFFIX_LIMIT = 10**6
"""Places are counted in 32 bits."""
VERIFY_STRATEGIES = ("target_match", "greedy", "rejection", "topp")
ACCEPT_POLICIES = ("normal", "accept_all", "reject_all", "simulated")
BUNDLED_METHOD = "eagle3"
"""Of the drafter in the bundled model's folder."""
MODEL_METHODS = ("mtp", "draft_model", "eagle", "eagle3", "dflash", "dspark", "medusa", "hydra", "mlp_speculator")
"""Those that draft with weights of their own: a server has one of them at most."""
HEAD_METHODS = ("medusa", "hydra", "mlp_speculator")
BLOCK_METHODS = ("dflash", "dspark")
AUTO = "auto"
RECYCLING = "token_recycling"
"""Drafts without weights, in the step as model drafters do, and trees alone."""
STEP_METHODS = (*MODEL_METHODS, RECYCLING)
PLAIN_METHODS, LOOKUP_METHODS = ("none", "naive"), ("ngram", "suffix")
WEIGHTLESS_METHODS = (*LOOKUP_METHODS, RECYCLING)
"""They draft for every model."""
METHODS = (*PLAIN_METHODS, *LOOKUP_METHODS, *STEP_METHODS, AUTO)
TREE_METHODS = tuple(method for method in STEP_METHODS if method not in BLOCK_METHODS)
METHOD_ALIASES = {
    "ngram_match": "ngram",
    "inference_with_reference": "ngram",
    "ngram_gpu": "ngram",
    "hybrid_mtp_ngram": "mtp",
    "nextn": "mtp",
    "standalone": "draft_model",
    "arctic": "mlp_speculator",
}
"""Of FastDeploy, PaddleNLP, vLLM, Arctic and SGLang; vLLM has a name for the modules of each family, too, such as deepseek_mtp."""
MTP_STRATEGIES = ("default", "with_ngram", "with_suffix")
SUFFIX_KEYS = tuple(
    f"suffix_decoding_{k}" for k in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob", "corpus", "cache_path")
)
KEY_METHODS = {
    **dict.fromkeys(("max_ngram_size", "min_ngram_size"), ("ngram",)),
    **dict.fromkeys(SUFFIX_KEYS, ("suffix",)),
    **dict.fromkeys(("model", "num_model_steps", "mtp_strategy", "draft_sampling", "draft_token_map", "quantization"), MODEL_METHODS),
    "draft_tensor_parallel_size": MODEL_METHODS,
    "placement": ("mtp",),
    "parallel_drafting": ("draft_model", "eagle3"),
    "min_draft_confidence": ("dspark",),
    "draft_vocabulary": ("draft_model",),
    **dict.fromkeys(TREE_KEYS, TREE_METHODS),
}
"""The methods of keys that do nothing where none of theirs is loaded."""
PLACEMENTS = ("auto", "in_process", "bls")
DRAFT_SAMPLINGS = ("shared_noise", "greedy")
DRAFT_VOCABULARIES = ("same", "shared")
DRAFT_SAMPLING_ALIASES = {"probabilistic": "shared_noise"}
"""vLLM's."""


def normalize_method(value: object, key: str = "method") -> str:
    """A method's own name from any accepted spelling. Raises ConfigError."""
    if value is None:
        return "none"
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a string, got {value!r:.80}")
    name = value.lower()
    name = "mtp" if name.endswith("_mtp") else METHOD_ALIASES.get(name, name)
    if name not in METHODS:
        raise ConfigError(f"{key} {value!r:.80} is not one of {', '.join(METHODS)} (case-insensitive){closest(name, METHODS)}")
    return name


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(Section):
    """How the engine drafts and verifies (the `speculative_config` object)."""

    aliases: ClassVar[dict[str, str]] = ALIASES

    method: str | None = None
    """none (plain decoding), naive (the speculative path without drafts), ngram, suffix, token_recycling, a model drafter (mtp, draft_model,
    eagle, eagle3, dflash, dspark, medusa, hydra or mlp_speculator), or auto: of ngram and the request_methods, whichever is worth most in each
    step. Needed where any other key is given, but for the method of a drafter whose folder (`model`) says what it is."""
    num_speculative_tokens: int | None = None
    """Drafts a step at most, 1 to 16; of a tree: on one path. Default: 1; model drafters: num_model_steps; suffix: suffix_decoding_max_tree_depth,
    within 16; auto: 12; trees: what tree_paths say, else 4."""
    adaptive: bool = True
    """Who drafts and how many, for each request and step, follows measured times and what drafts are likely to bring: fewer in large batches, down
    to none. Not under topp, whose answers would follow the load. false: as many as there may be."""
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
    model's version folder; and eagle3 of the bundled model."""
    num_model_steps: int | None = None
    """Model drafters: drafts that the model makes in a step, 1 to 16. Default: num_speculative_tokens; auto: 5 of them; with_ngram and with_suffix:
    1."""
    parallel_drafting: bool | None = None
    """draft_model (PARD) and eagle3 (P-EAGLE): all drafts at once, from mask tokens. Default: where the drafter was made for it."""
    draft_vocabulary: str = "same"
    """draft_model: same (as the target's, nearly), or shared: its tokenizer is another one, and it drafts the tokens that both have."""
    draft_token_map: str | None = None
    """Model drafters: file of the target's token ids that they may draft, so that heads score these alone (FR-Spec, Zhao et al. 2025): a list in
    JSON, as the command token-map writes it, or of torch.save (.pt). Default: all tokens."""
    min_draft_confidence: float = 0.0
    """dspark: drafts end before the first one whose chance to stand the drafter's confidence head puts below this, 0 to 1."""
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
    tree_nodes: int | None = None
    """Model drafters, token_recycling: drafts of a tree, 1 to 63, in place of a chain. Default: no tree; token_recycling: 24."""
    tree_top_k: int | None = None
    """With tree_nodes: candidates that may follow a draft, 1 to 32. Default: 8; mtp, draft_model, eagle, eagle3: 4, and so many of a level go on."""
    tree_paths: tuple[tuple[int, ...], ...] | None = None
    """A tree of one's own in place of tree_nodes, as Medusa's choices: paths of candidates' ranks, such as [[0], [1], [0, 0]]."""
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
    """File that the suffix cache is saved to every two minutes and at shutdown, and restored from at start. It holds answers and the
    last 32 tokens of their prompts. Servers of one model may share it: each adds its answers. Default: none; `foretoken serve`: one for each model
    in the user's state folder."""

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
        if config.method in PLAIN_METHODS and (count := values.get(given.get("num_speculative_tokens"))) is not None and count > 1:  # its default
            logger.warning("method %s drafts nothing: num_speculative_tokens %d is set to 0", config.method, count)
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
            ("draft_vocabulary", DRAFT_VOCABULARIES),
        ):
            put(key, choose(key, getattr(self, key), known))
        put("quantization", normalize_quantization("quantization", self.quantization))
        head = self.rounding.head_quant_type
        require(head is None, "quantization.head_quant_type", head, "left out: the drafter's head is the target's")
        put("request_methods", tuple(normalize_method(m, "request_methods") for m in self.request_methods))
        for key in ("model", "draft_token_map", "suffix_decoding_cache_path"):
            require(getattr(self, key) != "", key, "", "a path")
        require("" not in self.suffix_decoding_corpus, "suffix_decoding_corpus", "", "paths")
        self._check_model_methods()
        if self.draft_vocabulary == "shared":
            rule = "left out with draft_vocabulary shared: mask tokens are of the same vocabulary"
            require(not self.parallel_drafting, "parallel_drafting", self.parallel_drafting, rule)
        require(0 <= self.min_draft_confidence <= 1, "min_draft_confidence", self.min_draft_confidence, "from 0 to 1")
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
        if self.model_method == RECYCLING and self.tree_paths is None and self.tree_nodes is None:
            put("tree_nodes", DEFAULT_NODES)
        check_tree(self, self.model_method, can_make=self.model_method in TREE_METHODS)
        require(self.draft_tensor_parallel_size >= 1, "draft_tensor_parallel_size", self.draft_tensor_parallel_size, ">= 1")
        self._settle_counts()
        put("min_ngram_size", self.min_ngram_size if self.min_ngram_size is not None else 2 if self.mtp_strategy == "with_ngram" else 1)
        assert self.min_ngram_size is not None
        require(self.min_ngram_size >= 1, "min_ngram_size", self.min_ngram_size, ">= 1")
        good = self.max_ngram_size >= self.min_ngram_size
        require(good, "max_ngram_size", self.max_ngram_size, f">= min_ngram_size ({self.min_ngram_size})")

    def _check_model_methods(self) -> None:
        own = [method for method in self.loaded_methods if method in STEP_METHODS]
        require(len(own) < 2, "request_methods", self.request_methods, f"without a second model drafter: {' and '.join(own)} would share `model`")
        if own and own[0] in MODEL_METHODS and own[0] != "mtp":
            good = self.draft_tensor_parallel_size == 1 or own[0] not in HEAD_METHODS
            require(good, "draft_tensor_parallel_size", self.draft_tensor_parallel_size, f"1 with method {own[0]}, whose heads are not split")
            require(self.placement != "bls", "placement", self.placement, f"auto or in_process with method {own[0]}: bls is for mtp")

    def find_drafter(self, bundled: str | None) -> Self:
        """With the folder of the drafter, where none is named. bundled: of the target's own one; None: it comes with none. Raises ConfigError."""
        method = self.model_method
        if self.model is not None or method in ("", "mtp", RECYCLING):
            return self
        good = bundled is not None and method == BUNDLED_METHOD
        require(good, "speculative_config.model", self.model, f"the folder of the drafter's weights with method {method}")
        return dataclasses.replace(self, model=bundled)

    def _check_suffix(self) -> None:
        prefix = "suffix_decoding_"
        depth, cached = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_cached_requests
        factor, probability = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        require(1 <= depth <= MAX_SUFFIX_LIMIT, f"{prefix}max_tree_depth", depth, f"from 1 to {MAX_SUFFIX_LIMIT}")
        require(cached >= -1, f"{prefix}max_cached_requests", cached, ">= 0, or -1 for no limit of its own")
        require(0 <= factor <= MAX_SUFFIX_LIMIT, f"{prefix}max_spec_factor", factor, f"from 0 to {MAX_SUFFIX_LIMIT}")
        require(0 <= probability <= 1, f"{prefix}min_token_prob", probability, "from 0 to 1")

    @property
    def _default_depth(self) -> int | None:
        """Of the tree where nothing else says it; None: there is no tree."""
        if self.model_method not in TREE_METHODS:
            return None
        if self.tree_paths is not None:
            return make_static(self.tree_paths, "tree_paths").depth
        return None if self.tree_nodes is None else DEFAULT_DEPTH

    def _settle_counts(self) -> None:
        """Fills in num_speculative_tokens and num_model_steps; each is checked where it is used."""
        count, steps = self.num_speculative_tokens, self.num_model_steps
        limit, rule = MAX_SPECULATIVE_TOKENS, f"from 1 to {MAX_SPECULATIVE_TOKENS}"
        require(count is None or count >= 0, "num_speculative_tokens", count, ">= 0")
        require(steps is None or 1 <= steps <= limit, "num_model_steps", steps, rule)
        if self.method in PLAIN_METHODS:
            count = 0
        elif count is None:
            model_count = {**dict.fromkeys(STEP_METHODS, steps or self._default_depth or 1), AUTO: max(AUTO_TOKENS, steps or 1)}
            count = {"suffix": min(self.suffix_decoding_max_tree_depth, limit), **model_count}.get(self.method or "", 1)
        else:
            require(1 <= count <= limit, "num_speculative_tokens", count, rule)
        if steps is None and self._default_depth and self.method not in STEP_METHODS:
            steps = self._default_depth
        if steps is None:
            steps = self._usual_steps(count)
        if self.method in (*STEP_METHODS, AUTO) and steps > count:
            logger.warning("num_speculative_tokens %d is raised to num_model_steps %d", count, steps)
            count = steps
        object.__setattr__(self, "num_speculative_tokens", count)
        object.__setattr__(self, "num_model_steps", steps)

    def _usual_steps(self, count: int) -> int:
        return min(count, AUTO_STEPS) if self.method == AUTO else max(1, count) if self.mtp_strategy == "default" else 1

    @property
    def has_usual_steps(self) -> bool:
        """Whether num_model_steps is what follows from a method that is not the drafter's own: then a drafter may make fewer."""
        return self.method not in STEP_METHODS and self.num_model_steps == self._usual_steps(self.num_speculative_tokens or 0)

    @property
    def rounding(self) -> QuantizationConfig:
        """`quantization` by parts."""
        return read_quantization(self.quantization)

    @property
    def model_method(self) -> str:
        """The drafter in the step among the loaded methods, of which a server has one at most; "": there is none."""
        return next((method for method in self.loaded_methods if method in STEP_METHODS), "")

    @property
    def has_weights(self) -> bool:
        """Whether the drafter in the step has weights, in a folder."""
        return self.model_method in MODEL_METHODS

    @property
    def tree(self) -> Tree | None:
        """What the step's drafter makes; None: chains."""
        if self.model_method not in TREE_METHODS:
            return None
        if self.tree_paths is not None:
            return make_static(self.tree_paths, "tree_paths")
        if self.tree_nodes is None:
            return None
        depth = self.num_model_steps or 1
        if self.model_method in (*HEAD_METHODS, RECYCLING):
            return shape_static(self.tree_nodes, depth, self.tree_top_k or 8)
        return DynamicTree(depth, self.tree_top_k or 4, self.tree_nodes)

    @property
    def max_own_drafts(self) -> int:
        """Of a request that chooses nothing."""
        return self.tree.num_nodes if self.tree is not None else self.num_speculative_tokens or 0

    @property
    def max_drafts(self) -> int:
        """Most drafts of a request in a step, whatever its method."""
        return max(MAX_SPECULATIVE_TOKENS, self.tree.num_nodes if self.tree is not None else 0)

    @property
    def can_draft(self) -> bool:
        """Whether some method that requests may have makes drafts."""
        return bool({*self.loaded_methods} - {*PLAIN_METHODS})

    @property
    def loaded_methods(self) -> tuple[str, ...]:
        """What requests may choose, `method` first. ngram costs nothing to have."""
        methods = [self.method or "none", *self.request_methods, *(["suffix"] if self.mtp_strategy == "with_suffix" else [])]
        return tuple(dict.fromkeys([*methods, *([] if set(methods) == {"none"} else ["ngram"]), "none", "naive"]))
