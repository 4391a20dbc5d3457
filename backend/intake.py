"""What a caller asks for -> the engine's requests, checked. Safe from any thread."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from backend.chat_template import count_characters
from backend.config import EngineConfig
from backend.core import MAX_CHARACTERS_PER_TOKEN, MAX_TIMEOUT, Request
from backend.errors import RequestError
from backend.final_message import CONTINUE_FINAL_MESSAGE
from backend.grammar import Grammars, Matcher
from backend.grammar.endless import is_endless
from backend.grammar.thinking import FORM, MAY_THINK, THINKING
from backend.request_speculation import resolve
from backend.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from backend.structured_outputs import StructuredOutputs
from backend.text import Tokenizer
from backend.thought import THINK, THOUGHT
from backend.tools import Tools, find_format, takes_one_call
from backend.truncation import Truncation, fit_messages

MAX_MARK_TOKENS = 16
"""Of a prompt that comes as tokens, whether a mark of thoughts is at its end is seen by so many of them."""

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""Text, token ids, or messages for the model's chat template."""


class Intake:
    """Makes requests for one model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, max_model_len: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        # The tokenizer's own, too, as vLLM: chats are written with it, and config.json of models that were trained on may still name another.
        self._eos_token_ids = eos_token_ids | {end for end in (tokenizer.end_id,) if end is not None and end < vocab_size}
        self._grammars = Grammars(tokenizer, vocab_size, self._eos_token_ids)
        self._mark_ids = {text: i for text, i in tokenizer.mark_ids.items() if i < vocab_size}

    def load(self) -> None:
        """What requests would wait for when it is first used."""
        self._grammars.load()

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        speculative: dict[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        tools: Tools | None = None,
        max_num_tokens: int | None = None,
        template_variables: dict[str, Any] | None = None,
        truncation: Truncation | None = None,
    ) -> list[Request]:
        """One request for each of params.n completions. Raises RequestError, ConfigError (both the request's fault).

        timeout: seconds from now; tools: that a chat may call; max_num_tokens: of prompt and output together, where params.max_tokens is a
        default that may be beyond it; template_variables: of a chat, beside those that every template is given; truncation: of a prompt that is
        too long.
        """
        received = time.monotonic()
        speculation = resolve(self._config.speculative_config, speculative)
        prediction_ids = self._read_prediction(speculative)
        if truncation is None:
            token_ids, text = self._read_prompt(prompt, tools, template_variables)
        else:
            most = truncation.max_prompt_tokens(self._max_model_len, params.max_tokens, max_num_tokens is None)
            read = self._fit_chat if truncation.drops_messages else self._read_prompt
            token_ids, text = read(prompt, tools, template_variables, most)
        self._check_vocabulary(params)
        if max_num_tokens is not None:
            params = dataclasses.replace(params, max_tokens=max(1, min(params.max_tokens, max_num_tokens - len(token_ids))))
        asked = self._form_of(params, tools)
        state = self._find_state(prompt, token_ids, text, tools, template_variables)
        grammars = [self.compile(asked, params, tools, state) for _ in range(params.n)]
        if asked is not None or prediction_ids:  # whose drafts are made from one text: a chain
            speculation = dataclasses.replace(speculation, num_nodes=0)
        if asked is not None and speculative is None and not speculation.num_speculative_tokens:
            speculation = dataclasses.replace(speculation, num_speculative_tokens=self._config.max_forced_tokens)
        if timeout is not None and not 0 < timeout < MAX_TIMEOUT:
            raise RequestError(f"timeout must be above 0 and below {MAX_TIMEOUT} seconds, got {timeout!r}")
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._eos_token_ids
        bad_words = tuple(ids for word in params.bad_words for ids in self._encode_bad_word(word))
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        deadline = None if timeout is None else received + timeout
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{i}",
                prompt_token_ids=token_ids,
                params=params,
                speculation=speculation,
                seed=seed + i,
                index=i,
                group_id=request_id,
                priority=priority,
                deadline=deadline,
                stop_ids=stop_ids,
                bad_word_ids=bad_words,
                grammar=grammars[i],
                may_call=tools is not None and tools.choice != "none",
                begins_thinking=state >= THINKING,
                prediction_ids=prediction_ids,
            )
            for i in range(params.n)
        ]

    def _find_state(
        self, prompt: Prompt, token_ids: Sequence[int], text: str, tools: Tools | None, template_variables: Mapping[str, Any] | None
    ) -> int:
        """Whether the answer to a prompt begins with thoughts, by `grammar.thinking`: it does, it may, or it does not."""
        bare = self._write_marks(text or self._tokenizer.decode(token_ids[-MAX_MARK_TOKENS:], skip_special_tokens=False)).rstrip()
        if bare.endswith(THINK):
            return THINKING
        own, is_chat = template_variables or {}, bool(text) and not isinstance(prompt, str)
        if is_chat and own.get(CONTINUE_FINAL_MESSAGE) is True:
            return THINKING if _is_thinking(prompt[-1]["content"]) else FORM  # type: ignore[index, call-overload]
        template = self._write_marks((self._tokenizer.chat_template if tools is None else self._tokenizer.tool_template) or "")
        is_off = any(own.get(name) is False for name in ("enable_thinking", "thinking"))
        # A template that says nothing of thoughts is of a model that has none; one that closes them at the prompt's end has switched them off.
        return MAY_THINK if is_chat and THOUGHT in template and not (is_off or bare.endswith(THOUGHT)) else FORM

    def _write_marks(self, text: str) -> str:
        """With the marks of thoughts as answers have them."""
        for mark, written in self._tokenizer.thought_marks.items():
            text = text.replace(mark, written)
        return text

    def compile(self, asked: StructuredOutputs | None, params: SamplingParams, tools: Tools | None = None, state: int = FORM) -> Matcher | None:
        """asked: the request's own, or with what its tools ask; tools: these, to be named in errors; state: of `grammar.thinking`, before the form.

        Raises RequestError.
        """
        if asked is None:
            return None
        own = params.structured_outputs
        if asked is not own:  # what requires itself is a grammar too: it would only never come to an end
            if own is not None and ((tools is not None and tools.choice == "required") or is_endless(own.schema)):  # required: it is left out
                self._grammars.compile(own)
            for tool in () if tools is None else tools.tools:
                if is_endless(tool["function"].get("parameters")):
                    self._check_parameters(tool["function"])
        try:
            return self._grammars.compile(asked, params.ignore_eos, state)
        except RequestError as error:
            if asked is own:
                raise
            for tool in () if tools is None else tools.tools:
                self._check_parameters(tool["function"])
            if own is not None:
                self._grammars.compile(own)
            beside = "" if own is None else " and structured_outputs"
            raise RequestError(
                f"tools{beside}: their schemas cannot be enforced: {str(error).removeprefix('structured_outputs.grammar: ')}"
            ) from None

    def _check_parameters(self, function: Mapping[str, Any]) -> None:
        """Of one tool by itself, where all together failed. Raises RequestError that names it."""
        if parameters := function.get("parameters"):
            try:
                self._grammars.compile(StructuredOutputs(json=parameters, is_lenient=not function.get("strict")))
            except ValueError as error:
                reason = str(error).removeprefix("structured_outputs.json: ")
                raise RequestError(f"tools: the parameters of {function['name']!r}: {reason}") from None

    def _form_of(self, params: SamplingParams, tools: Tools | None) -> StructuredOutputs | None:
        """What the text has to be: as it is asked for, or calls of tools, or either."""
        if tools is None:
            return params.structured_outputs
        template = self._tokenizer.tool_template
        if tools.choice == "required" and takes_one_call(template):
            tools = dataclasses.replace(tools, is_parallel=False)
        return tools.form(find_format(template), self._mark_ids, params.structured_outputs)

    def _fit_chat(self, prompt: Prompt, tools: Tools | None, template_variables: dict[str, Any] | None, most: int) -> tuple[list[int], str]:
        """As `_read_prompt`, of a chat whose oldest messages may be dropped. Raises RequestError where the context does not hold what is left."""
        if isinstance(prompt, str) or not len(prompt) or not isinstance(prompt[0], dict):
            raise RequestError("truncation auto drops messages of a chat: truncate_prompt_tokens shortens other prompts")
        limit = self._max_model_len * MAX_CHARACTERS_PER_TOKEN
        token_ids, text = fit_messages(
            prompt,  # type: ignore[arg-type]
            lambda messages: self._read_prompt(messages, tools, template_variables),  # type: ignore[arg-type]
            lambda made: len(made[0]) <= most,
            lambda messages: count_characters(messages, limit) <= limit,
        )
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"messages: without all that truncation auto may drop the prompt has {len(token_ids)} tokens; "
                f"the context holds {self._max_model_len}, one output token included"
            )
        return token_ids, text

    def _read_prompt(
        self, prompt: Prompt, tools: Tools | None, template_variables: dict[str, Any] | None, max_tokens: int | None = None
    ) -> tuple[list[int], str]:
        """Its tokens, the last max_tokens of them, and its text where it came as text or messages."""
        text = ""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty")
            text = prompt
            token_ids = self._encode(text, "the prompt", max_tokens=max_tokens)
        elif len(prompt) and isinstance(prompt[0], dict):
            # Limited before it is rendered, too. The template writes the special tokens itself.
            if tools is not None:
                find_format(self._tokenizer.tool_template)  # which says whether it takes any
            limit = self._max_model_len * MAX_CHARACTERS_PER_TOKEN
            variables = {"tools": list(tools.tools)} if tools is not None else {}
            text = self._tokenizer.render_chat(prompt, limit, template_variables, **variables)  # type: ignore[arg-type]
            token_ids = self._encode(text, "the rendered chat", add_special_tokens=False, max_tokens=max_tokens)
        else:
            token_ids = list(prompt)  # type: ignore[arg-type]
            for place, token_id in enumerate(token_ids):
                if not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                    raise RequestError(f"input_ids[{place}] is {token_id!r:.50}; the vocabulary has ids 0 to {self._vocab_size - 1}")
            token_ids = token_ids if max_tokens is None else token_ids[-max_tokens:]
        if not token_ids:
            raise RequestError("the prompt is empty: it has no tokens")
        return token_ids, text

    def _read_prediction(self, speculative: dict[str, Any] | None) -> tuple[int, ...]:
        """Of the `speculative` object: a text or token ids that the answer is expected to be like."""
        value = (speculative or {}).get("prediction")
        if value is None:
            return ()
        if isinstance(value, str):
            return tuple(self._encode(value, "speculative: prediction", add_special_tokens=False))
        if not isinstance(value, list):
            raise RequestError(f"speculative: prediction must be a text or a list of token ids, got {value!r:.80}")
        if len(value) > self._max_model_len:
            raise RequestError(f"speculative: prediction has {len(value)} tokens; the context holds {self._max_model_len}")
        for place, token_id in enumerate(value):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise RequestError(f"speculative: prediction[{place}] is {token_id!r:.50}; the vocabulary has ids 0 to {self._vocab_size - 1}")
        return tuple(value)

    def _encode(self, text: str, name: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        limit = self._max_model_len * MAX_CHARACTERS_PER_TOKEN
        if len(text) > limit:
            raise RequestError(f"{name} has {len(text)} characters; at most {limit} are looked at for a context of {self._max_model_len} tokens")
        check_unicode(text, name)
        token_ids = self._tokenizer.encode(text, add_special_tokens, max_tokens)
        self._check_embedded(token_ids, name)
        return token_ids

    def _encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        check_unicode(word, "bad_words")
        found = self._tokenizer.encode_bad_word(word)
        for token_ids in found:
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(f"bad_words: {word!r:.50} has {len(token_ids)} tokens; the limit is {MAX_BAD_WORD_TOKENS}")
            self._check_embedded(token_ids, f"bad_words: {word!r:.50}")
        return found

    def _check_embedded(self, token_ids: Sequence[int], name: str) -> None:
        """A tokenizer may know tokens that were added after the model was made: the model has no embedding of them."""
        if token_ids and (largest := max(token_ids)) >= self._vocab_size:
            raise RequestError(
                f"{name} becomes token {largest} ({self._tokenizer.inner.id_to_token(largest)!r:.50}), which the model does not know: "
                f"its vocabulary has ids 0 to {self._vocab_size - 1}"
            )

    def _check_vocabulary(self, params: SamplingParams) -> None:
        for key in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(params, key):
                if not 0 <= token_id < self._vocab_size:
                    raise RequestError(f"{key} names token {token_id}; the vocabulary has ids 0 to {self._vocab_size - 1}")


def _is_thinking(content: Any) -> bool:
    """Whether a message that the answer goes on with ends among thoughts: it writes their first mark itself, and not the last."""
    said = content if isinstance(content, str) else "".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return said.lstrip().startswith(THINK) and THOUGHT not in said


def check_unicode(text: str, name: str) -> None:
    """Raises RequestError for half a surrogate pair, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: {error.object[error.start]!r} at {error.start}") from None
