"""What one request asks of drafting (its `speculative` object), over what the server does by itself."""

from __future__ import annotations

from backend.core import Speculation
from backend.errors import ConfigError
from backend.section import choose, nearest, require
from backend.speculative_config import (
    AUTO,
    MAX_SPECULATIVE_TOKENS,
    MODEL_METHODS,
    MTP_STRATEGIES,
    PLAIN_METHODS,
    VERIFY_STRATEGIES,
    SpeculativeConfig,
    normalize_method,
)
from backend.trees import DynamicTree


def resolve(config: SpeculativeConfig, choice: object) -> Speculation:
    """The speculation of one request: the server's, with the request's `speculative` object over it.

    Raises ConfigError for unknown keys, a method that is not loaded, or values out of range.
    """
    method, count, strategy = config.method or "none", config.num_speculative_tokens or 0, config.verify_strategy
    mtp_strategy = config.mtp_strategy
    if choice is None:
        choice = {}
    if not isinstance(choice, dict):
        raise ConfigError(f"speculative must be an object, got {choice!r:.80}")
    keys = ("method", "num_speculative_tokens", "adaptive", "verify_strategy", "mtp_strategy", "prediction")
    for key in choice:
        if key not in keys:
            raise ConfigError(f"speculative: unknown key {key!r:.80}{nearest(str(key), keys)}")
    if "method" in choice:
        method = normalize_method(choice["method"], "speculative.method")
        if method not in config.loaded_methods:
            raise ConfigError(f"speculative: method {method} is not loaded; loaded: {', '.join(sorted(config.loaded_methods))}")
    if "verify_strategy" in choice:
        strategy = choose("speculative.verify_strategy", choice["verify_strategy"], VERIFY_STRATEGIES)
    if "mtp_strategy" in choice:
        if method not in MODEL_METHODS:
            raise ConfigError(f"speculative: mtp_strategy has no effect with method {method}: it is a key of {', '.join(MODEL_METHODS)}")
        mtp_strategy = choose("speculative.mtp_strategy", choice["mtp_strategy"], MTP_STRATEGIES)
        lookup = mtp_strategy.removeprefix("with_")
        if lookup != "default" and lookup not in config.loaded_methods:
            raise ConfigError(f"speculative: mtp_strategy {mtp_strategy} needs method {lookup}, which is not loaded")
    tree = config.tree if method == config.model_method else None
    if tree is not None:
        require(mtp_strategy == "default", "speculative.mtp_strategy", mtp_strategy, "default where drafts are trees (tree_nodes or tree_paths)")
    if config.tree is not None:
        rule = "target_match, greedy or rejection on a server whose drafts may be trees (tree_nodes or tree_paths)"
        require(strategy != "topp", "speculative.verify_strategy", strategy, rule)
    is_adaptive = choice.get("adaptive", config.adaptive)
    require(isinstance(is_adaptive, bool), "speculative.adaptive", is_adaptive, "true or false")
    if "num_speculative_tokens" in choice:
        count, most = choice["num_speculative_tokens"], MAX_SPECULATIVE_TOKENS if tree is None else tree.depth
        good = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= most
        rule = f"from 0 (off) to {most}" + ("" if tree is None else ", the depth of the server's tree")
        if isinstance(tree, DynamicTree):
            good, rule = good and count in (0, most), f"0 (off) or {most}, the depth of the server's tree"
        require(good, "speculative.num_speculative_tokens", count, rule)
    elif tree is not None:
        count = tree.depth
    elif count == 0 and method not in PLAIN_METHODS:  # the server's own method drafts nothing
        count = 1
    if choice.get("prediction") is not None:
        asked = f"method {method}" if method in PLAIN_METHODS else "num_speculative_tokens 0" if not count else ""
        if asked:
            raise ConfigError(f"speculative: prediction has no effect with {asked}: choose a method and a number that draft")
        if "num_speculative_tokens" not in choice:  # what is right goes on being right for long
            count = MAX_SPECULATIVE_TOKENS
    is_own = mtp_strategy == config.mtp_strategy and "num_speculative_tokens" not in choice
    goes_on = mtp_strategy == "default" and not is_own and method != AUTO
    steps = count if goes_on else min(count, config.num_model_steps or 1)
    num_nodes = tree.count_within(count) if tree is not None else 0
    return Speculation(method, 0 if method in PLAIN_METHODS else count, strategy, steps, mtp_strategy, num_nodes, is_adaptive)
