"""What other servers call keys and values of `speculative_config`: vLLM with Arctic's plug-in, SGLang, TensorRT-LLM, FastDeploy, and PaddleNLP
before it."""

from __future__ import annotations

import ast
import logging
from typing import Any

from backend.errors import ConfigError

logger = logging.getLogger(__name__)

ALIASES = {
    "prompt_lookup_max": "max_ngram_size",
    "prompt_lookup_min": "min_ngram_size",
    "speculate_max_ngram_size": "max_ngram_size",
    "speculate_max_draft_token_num": "num_speculative_tokens",
    "speculate_verify_window": "verify_window",
    "speculate_max_candidate_len": "max_candidate_len",
    "draft_model_name_or_path": "model",
    "model_name_or_path": "model",
    "draft_model_quant_type": "quantization",
    "draft_sample_method": "draft_sampling",
    "speculative_algorithm": "method",
    "speculative_draft_model_path": "model",
    "speculative_token_map": "draft_token_map",
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_token_tree": "tree_paths",
    "medusa_choices": "tree_paths",
    "eagle_choices": "tree_paths",
    "dynamic_tree_max_topk": "tree_top_k",
    "max_total_draft_tokens": "tree_nodes",
    "max_draft_len": "num_speculative_tokens",
    "max_matching_ngram_size": "max_ngram_size",
    "speculative_model": "model",
    "speculative_model_dir": "model",
    "enable_adaptive_verification": "adaptive",
    "suffix_cache_max_depth": "suffix_decoding_max_tree_depth",
    "suffix_cache_max_requests": "suffix_decoding_max_cached_requests",
    "suffix_max_spec_factor": "suffix_decoding_max_spec_factor",
    "suffix_min_token_prob": "suffix_decoding_min_token_prob",
}
"""Keys that mean the same."""
READ_HERE = (
    "speculate_method",
    "decoding_type",
    "num_nextn_predict_layers",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_use_rejection_sampling",
    "rejection_sample_method",
    "acceptance_method",
    "use_heterogeneous_vocab",
    "enable_suffix_decoding",
)
"""Keys that stand for what ALIASES cannot say; `read_other_names` takes them away."""
PARALLEL = {"pard": "draft_model", "peagle": "eagle3", "p-eagle": "eagle3"}
"""Methods that others have for parallel drafting (TensorRT-LLM, speculators)."""
DECODING_TYPES = {"ngram": "ngram", "sa": "suffix", "mtp": "mtp", "drafttarget": "draft_model", "pard": "pard", "medusa": "medusa"}
DECODING_TYPES |= {"eagle": "eagle3", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""TensorRT-LLM's, of which Eagle is EAGLE-3 where it runs on PyTorch."""
REJECTION_RULES = {"standard": "rejection", "probabilistic": "rejection", "rejection_sampler": "rejection", "strict": "target_match"}
"""vLLM's, of several releases."""
VERIFY_STRATEGIES = {0: "topp", 1: "greedy", 2: "target_match"}
"""FastDeploy's numbers."""
NEEDLESS = {
    "num_gpu_block_expand_ratio": "a drafter's keys and values lie in the target's own pages",
    "disable_padded_drafter_batch": "drafts are not padded",
    "model_type": "the drafter's config.json says what it is",
    "return_full_hidden_states": "method mtp takes the target's hidden states whatever this says",
    "enforce_eager": "drafters run as the target does",
    "max_model_len": "a drafter's context is the target's",
    "revision": "model is a folder",
    "code_revision": "no code of a checkpoint is run",
    "draft_load_config": "a drafter's weights are read as the target's are",
    "attention_backend": "kernels are chosen by type, shape and device",
    "moe_backend": "kernels are chosen by type, shape and device",
    "use_local_argmax_reduction": "ranks exchange of the scores what the step needs",
    "dspark_draft_topk": "drafters score their whole vocabulary",
    "xpress_topc": "drafters score their whole vocabulary",
    "disable_mqa_scorer": "all drafts of a step are verified in one pass",
    "disable_logprobs": "requests may ask for logprobs, with drafts too",
    "disable_eagle_block_drop": "a hit in the prefix cache has the drafter's pages too",
    "disable_lookahead_block_hashes": "a hit in the prefix cache has the drafter's pages too",
    "suffix_decoding_corpus_tokens": "finished answers are kept up to memory's own limit; suffix_decoding_max_cached_requests may say less",
    "index_share_for_mtp_iteration": "no model with an index of its tokens is served",
    "eagle3_one_model": "drafters run in the step of the model",
    "mtp_eagle_one_model": "drafters run in the step of the model",
}
"""Keys that change nothing here, and why."""
REFUSED = {
    "enf_gen_phase_tag": "answers are not held to phases of reasoning",
    "enable_draft_logprob": "log-probabilities are those of the target",
    "disable_by_batch_size": "adaptive true (the default) measures when drafts pay",
    "num_speculative_tokens_per_batch_size": "adaptive true (the default) measures when drafts pay",
    "max_concurrency": "adaptive true (the default) measures when drafts pay",
    "hard_disable_by_batch_size": "adaptive true (the default) measures when drafts pay",
    **dict.fromkeys(
        ("synthetic_acceptance_rate", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
        "say accept_policy simulated and simulated_acceptance_rate",
    ),
    **dict.fromkeys(("posterior_threshold", "posterior_alpha"), "say it as verify_strategy: target_match, greedy, rejection or topp"),
    "draft_lm_head_quantization": "the drafter's head is the target's, or as the drafter's checkpoint has it",
    "kv_cache_dtype": "drafters keep keys and values in their own type",
    "hf_overrides": "change the drafter's config.json",
    "suffix_max_spec_offset": "suffix_decoding_max_spec_factor alone says how long drafts are",
    "suffix_speculative_tokens": "num_speculative_tokens is of the model and the lookup together",
}
"""Keys that ask for what is done otherwise; false, 0, null and auto ask for nothing."""


MOST_DRAFTS, MOST_OF_VLLM = 16, 32
"""Drafts that a step verifies here, and vLLM's default for suffix decoding, as many as there may be."""
LOOKUPS = ("ngram", "[ngram]")
"""What vLLM has for a drafter's folder where the drafter is a lookup."""


METHOD_KEYS = ("method", "speculate_method", "speculative_algorithm")


def find_unnamed(values: object) -> tuple[str, str, str] | None:
    """Of a configuration that names a drafter and no method, as vLLM's do: the key of the drafter, where that is, and the key of the method."""
    if not isinstance(values, dict) or "decoding_type" in values or any(values.get(key) is not None for key in METHOD_KEYS):
        return None
    own = next((key for key in METHOD_KEYS if key in values), METHOD_KEYS[0])
    for key, value in values.items():
        if ALIASES.get(key, key) == "model" and isinstance(value, str) and value and value not in LOOKUPS:
            return key, value, own
    return None


def read_other_names(values: object, where: str = "") -> Any:
    """The same configuration in this version's names, but for ALIASES. Raises ConfigError for what is done otherwise here."""
    if not isinstance(values, dict):
        return values
    found = dict(values)
    for key, why in NEEDLESS.items():
        if key in found:
            logger.warning("%s%s %r has no effect, and none is needed: %s", where, key, found.pop(key), why)
    for key, instead in REFUSED.items():
        if key in found and (value := found.pop(key)) not in (None, False, "False", "auto"):
            raise ConfigError(f"{where}{key} {value!r:.80} is no key here: {instead}")
    _read_tensorrt(found, where)
    if "speculate_method" in found:
        if "method" in found and found["method"] != found["speculate_method"]:
            raise ConfigError(f"{where}method is given twice: {found['method']!r:.80}, and {found['speculate_method']!r:.80} as speculate_method")
        found["method"] = found.pop("speculate_method")
    if found.get("model") in LOOKUPS and found.get("method", "ngram") == "ngram":
        del found["model"]
        found["method"] = "ngram"
    key = next((key for key in ("method", "speculative_algorithm") if key in found), "method")
    if isinstance(method := found.get(key), str) and method.lower() in PARALLEL:
        if found.get("parallel_drafting") is False:
            own = PARALLEL[method.lower()]
            raise ConfigError(f"{where}method {method!r:.80} drafts in parallel, and parallel_drafting is false: leave that out, or say method {own}")
        found |= {"parallel_drafting": True, key: PARALLEL[method.lower()]}
    elif found.get("parallel_drafting") is False and method not in PARALLEL.values():
        del found["parallel_drafting"]  # as vLLM writes it for every method
    if key == "speculative_algorithm" and str(method).lower() == "eagle" and not {"model", "speculative_draft_model_path"} & {*found}:
        found[key] = "mtp"  # SGLang's EAGLE without a drafter's folder is for models that have modules of their own
    _read_method(found, key, where)
    if str(found.get(key)).lower() == "suffix" and found.get("num_speculative_tokens") == MOST_OF_VLLM:
        logger.warning("%snum_speculative_tokens %d: a step verifies %d drafts at most, which suffix drafts then", where, MOST_OF_VLLM, MOST_DRAFTS)
        found["num_speculative_tokens"] = MOST_DRAFTS
    if "speculative_use_rejection_sampling" in found:
        _read_rejection(found, where)
    for name in ("rejection_sample_method", "acceptance_method"):
        if name in found:
            _read_rejection_rule(found, name, where)
    strategy = found.get("verify_strategy")
    if isinstance(strategy, int) and not isinstance(strategy, bool) and strategy in VERIFY_STRATEGIES:
        found["verify_strategy"] = VERIFY_STRATEGIES[strategy]
    _read_tree(found, where)
    if "benchmark_mode" in found:
        _read_benchmark_mode(found, where)
    return found


def _read_tensorrt(found: dict[str, Any], where: str) -> None:
    """TensorRT-LLM's method, and its number of drafts of models that have modules of their own."""
    if (count := found.pop("num_nextn_predict_layers", None)) is not None and found.setdefault("max_draft_len", count) != count:
        raise ConfigError(f"{where}num_nextn_predict_layers {count!r:.80} and max_draft_len {found['max_draft_len']!r:.80} both say how many drafts")
    if "decoding_type" not in found:
        return
    kind = found.pop("decoding_type")
    method = DECODING_TYPES.get(kind.lower().replace("_", "")) if isinstance(kind, str) else None
    if method is None:
        raise ConfigError(f"{where}decoding_type {kind!r:.80} is not one of {', '.join(DECODING_TYPES)} (case-insensitive)")
    if found.setdefault("method", method) != method:
        raise ConfigError(f"{where}method is given twice: {found['method']!r:.80}, and {kind!r:.80} as decoding_type")


def _read_tree(found: dict[str, Any], where: str) -> None:
    """vLLM's tree as a text, TensorRT-LLM's switch, and SGLang's two keys, which mean a chain where one candidate follows each draft; its number of
    drafts counts the newest token."""
    if isinstance(tree := found.get("speculative_token_tree"), str):
        try:
            found["speculative_token_tree"] = ast.literal_eval(tree)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ConfigError(f"{where}speculative_token_tree must be a list of paths such as [(0,), (0, 0), (1,)], got {tree!r:.80}") from None
    own = found.get("speculative_token_tree")
    if isinstance(own, list | tuple) and found.get("num_speculative_tokens") == len(own):  # vLLM counts the drafts of the tree
        del found["num_speculative_tokens"]
    if "use_dynamic_tree" in found and not found.pop("use_dynamic_tree"):
        for key in ("dynamic_tree_max_topk", "dynamic_tree_max_topK", "max_total_draft_tokens"):
            found.pop(key, None)
    if "dynamic_tree_max_topK" in found:
        found["dynamic_tree_max_topk"] = found.pop("dynamic_tree_max_topK")
    top_k, count = found.pop("speculative_eagle_topk", None), found.pop("speculative_num_draft_tokens", None)
    for key, value in (("speculative_eagle_topk", top_k), ("speculative_num_draft_tokens", count)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where}{key} must be an integer from 1 on, got {value!r:.80}")
    if top_k is None or top_k == 1:
        if count is not None and "speculative_num_steps" not in found and "num_speculative_tokens" not in found:
            found["num_speculative_tokens"] = max(1, count - 1)
        return
    if count is None or count < 2:
        raise ConfigError(f"{where}speculative_eagle_topk {top_k} makes trees: say speculative_num_draft_tokens too, 2 to 64, with the newest token")
    found["tree_top_k"], found["tree_nodes"] = top_k, count - 1


def _read_method(found: dict[str, Any], key: str, where: str) -> None:
    """Names and switches that stand for a strategy or a vocabulary beside the method. key: of the method."""
    method = str(found[key]).lower() if found.get(key) is not None else None
    if method == "hybrid_mtp_ngram":
        found.setdefault("mtp_strategy", "with_ngram")
    if _take_switch(found, "enable_suffix_decoding", where):
        if method in (None, "suffix"):
            found[key] = "suffix"
        else:  # all drafts are the model's, or the lookup's where those are likelier
            found.setdefault("mtp_strategy", "with_suffix")
            if "num_speculative_tokens" in found:
                found.setdefault("num_model_steps", found["num_speculative_tokens"])
    if _take_switch(found, "use_heterogeneous_vocab", where) and found.setdefault("draft_vocabulary", "shared") != "shared":
        value = found["draft_vocabulary"]
        raise ConfigError(f"{where}use_heterogeneous_vocab true is draft_vocabulary shared, and draft_vocabulary is {value!r:.80}")


def _take_switch(found: dict[str, Any], key: str, where: str) -> bool:
    value = found.pop(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}{key} must be bool, got {value!r:.80}")
    return value


def _read_rejection_rule(found: dict[str, Any], key: str, where: str) -> None:
    """vLLM's name of a rule."""
    value = found.pop(key)
    if value is None:
        return
    if not isinstance(value, str) or value not in REJECTION_RULES:
        raise ConfigError(
            f"{where}{key} {value!r:.80} is none of {', '.join(REJECTION_RULES)}: say it as verify_strategy, or accept_policy simulated"
        )
    strategy = found.setdefault("verify_strategy", REJECTION_RULES[value])
    if strategy != REJECTION_RULES[value]:
        raise ConfigError(f"{where}{key} {value} is verify_strategy {REJECTION_RULES[value]}, and verify_strategy is {strategy!r:.80}")


def _read_rejection(found: dict[str, Any], where: str) -> None:
    """SGLang's switch."""
    value = found.pop("speculative_use_rejection_sampling")
    if not isinstance(value, bool):
        raise ConfigError(f"{where}speculative_use_rejection_sampling must be bool, got {value!r:.80}")
    if value and found.setdefault("verify_strategy", "rejection") != "rejection":
        strategy = found["verify_strategy"]
        raise ConfigError(f"{where}speculative_use_rejection_sampling true is verify_strategy rejection, and verify_strategy is {strategy!r:.80}")


def _read_benchmark_mode(found: dict[str, Any], where: str) -> None:
    """FastDeploy's: every draft is refused, so that what drafting costs can be measured."""
    value = found.pop("benchmark_mode")
    if not isinstance(value, bool):
        raise ConfigError(f"{where}benchmark_mode must be bool, got {value!r:.80}")
    if value:
        if found.get("accept_policy", "reject_all") != "reject_all":
            raise ConfigError(f"{where}benchmark_mode true is accept_policy reject_all, and accept_policy is {found['accept_policy']!r:.80}")
        found["accept_policy"] = "reject_all"
