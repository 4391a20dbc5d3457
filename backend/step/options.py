"""What a request may ask of a step besides the target's choice. A step does what any of its requests asks for."""

from __future__ import annotations

import enum

from backend.core import Request


class Options(enum.IntFlag):
    """Bits; those of a step's requests are put together."""

    NONE = 0
    REJECTION = 1
    TOP_P = 2
    FILTERS = 4
    """Of those that `rejection` or `topp` verifies: top_k, top_p (which is no filter for `topp`) or min_p is on."""
    LOGPROBS = 8
    BAD_WORDS = 16
    FLOAT32 = 32
    """Penalties or biases: in a bfloat16 logit of 20 a penalty of 0.05 would be lost."""
    MASKS = 64
    """Some rows take token masks."""


def is_deterministic(request: Request) -> bool:
    """The likeliest token is the only choice."""
    return request.params.is_greedy or request.speculation.verify_strategy == "greedy"


def options_of(request: Request, policy: str) -> Options:
    """policy: the server's accept_policy; where it is not `normal`, it decides instead of the requests' strategies."""
    params, strategy = request.params, request.speculation.verify_strategy
    options = Options.NONE if params.logprobs is None else Options.LOGPROBS
    if request.bad_word_ids:
        options |= Options.BAD_WORDS
    if params.has_penalties or params.logit_bias:
        options |= Options.FLOAT32
    if policy != "normal" or is_deterministic(request) or not request.speculation.num_speculative_tokens:
        return options
    if request.speculation.num_nodes:  # `ops.verify_tree` says why its rule is `rejection` too
        return options
    if strategy not in ("rejection", "topp"):
        return options
    is_filtered = params.top_k > 0 or params.min_p > 0 or (strategy == "rejection" and params.top_p < 1)
    return options | (Options.REJECTION if strategy == "rejection" else Options.TOP_P) | (Options.FILTERS if is_filtered else Options.NONE)
