"""Fields that clients send though they change nothing: taken at the values that ask for nothing. What would change the answer stays an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from client.gateway.strict import drop_others

ANY: Callable[[Any], bool] = lambda value: True  # noqa: E731


def one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values)


NO_OPS: dict[str, tuple[Callable[[Any], bool], str]] = {
    # of OpenAI's
    "suffix": (one_of(""), "''"),
    "service_tier": (one_of("auto", "default", "flex", "scale", "priority"), "'auto', 'default', 'flex', 'scale' or 'priority'"),
    "parallel_tool_calls": (ANY, "anything"),
    "tools": (one_of([]), "[]"),
    "tool_choice": (one_of("none", "auto"), "'none' or 'auto'"),
    "functions": (one_of([]), "[]: send them as tools"),
    "function_call": (one_of("none", "auto"), "'none' or 'auto': send tool_choice"),
    "response_format": (one_of({"type": "text"}), "{'type': 'text'}"),
    "modalities": (one_of(["text"]), "['text']"),
    "prediction": (ANY, "anything"),
    "verbosity": (one_of("medium"), "'medium'"),
    "prompt_cache_key": (ANY, "anything"),
    "prompt_cache_retention": (ANY, "anything"),
    "prompt_cache_options": (ANY, "anything"),
    "safety_identifier": (ANY, "anything"),
    "background": (one_of(False), "false: nothing is stored"),
    "max_tool_calls": (ANY, "anything"),
    "context_management": (one_of([]), "[]"),
    # of vLLM's and FastDeploy's
    "use_beam_search": (one_of(False), "false"),
    "length_penalty": (one_of(1.0), "1.0"),
    "early_stopping": (one_of(False), "false"),
    "skip_special_tokens": (one_of(True), "true"),
    "spaces_between_special_tokens": (one_of(True), "true"),
    "detokenize": (one_of(True), "true"),
    "add_generation_prompt": (one_of(True), "true"),
    "continue_final_message": (one_of(False), "false"),
    "chat_template_kwargs": (one_of({}), "{}"),
    "mm_processor_kwargs": (one_of({}), "{}"),
    "documents": (one_of([]), "[]"),
    "logits_processors": (one_of([]), "[]"),
    "bad_words_token_ids": (one_of([]), "[]"),
    "truncation_side": (one_of("left"), "'left'"),
    "return_token_ids": (one_of(False), "false"),
    "return_tokens_as_token_ids": (one_of(False), "false"),
    "include_reasoning": (ANY, "anything"),
    "guided_decoding_backend": (ANY, "anything"),
    "media_io_kwargs": (one_of({}), "{}"),
    "vllm_xargs": (one_of({}), "{}"),
    "return_prompt_text": (one_of(False), "false"),
    "watermarking": (one_of(False), "false"),
    # of SGLang's
    "separate_reasoning": (one_of(True), "true"),
    "stream_reasoning": (one_of(True), "true"),
    "return_hidden_states": (one_of(False), "false"),
    "return_routed_experts": (one_of(False), "false"),
    "return_cached_tokens_details": (one_of(False), "false"),
    "return_prompt_token_ids": (one_of(False), "false"),
    "return_meta_info": (one_of(False), "false"),
    "use_audio_in_video": (one_of(False), "false"),
    "custom_params": (one_of({}), "{}"),
    "session_params": (one_of({}), "{}"),
    "echo": (one_of(False), "false"),
}
"""By name: what asks for nothing, and how that is said. A field that a request has itself is not looked up here."""
RENAMED = {
    "include_stop_str_in_output": "include_stop",
    "no_stop_trim": "include_stop",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
    "json_schema": "guided_json",
}
"""vLLM's and SGLang's names of what is there."""
_STATELESS = "nothing is stored: send the whole conversation"
REASONS = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "audio": "models of text alone are served",
    "web_search_options": "no tools run here: send a function that searches",
    "moderation": "nothing is moderated here",
    "cache_salt": "cached beginnings of prompts are shared by all",
    "chat_template": "the template is the model's own",
    "lora_path": "no adapters are served",
    "enable_thinking": "chats have it in chat_template_kwargs",
    "thinking": "chats have what their template knows of it in chat_template_kwargs",
}
"""Why what is known elsewhere is refused whatever its value."""


_KNOWN = NO_OPS.keys() | RENAMED.keys() | {"best_of"}


def drop_no_ops(values: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A body without them, and without what nobody knows but for the first of it. own: the fields of the request."""
    values = drop_others(values, own.keys() | _KNOWN)
    found = {RENAMED.get(key, key) if RENAMED.get(key) not in values else key: value for key, value in values.items()}
    if "best_of" in found and found["best_of"] == (found.get("n") or 1) and not isinstance(found["best_of"], bool):
        del found["best_of"]
    return {key: value for key, value in found.items() if key in own or key not in NO_OPS or not NO_OPS[key][0](value)}


def say_rule(name: str) -> str:
    """What may be sent under a name that is refused; empty for one that nobody knows."""
    if name == "best_of":
        return ": it may be left out, or n"
    if name in REASONS:
        return f": {REASONS[name]}"
    return f": it may be left out, or {NO_OPS[name][1]}" if name in NO_OPS else ""
