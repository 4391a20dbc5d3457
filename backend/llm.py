"""Offline generation with the engine that also serves: `LLM().generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from backend.config import BUNDLED_MODEL, EngineConfig, ParallelConfig
from backend.core import Delta, SpeculationStats, TokenLogprobs
from backend.drafter_checks import settle_method
from backend.engine import Engine
from backend.errors import ConfigError, RequestError
from backend.final_message import ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE
from backend.intake import check_unicode
from backend.model_checks import settle_quantization
from backend.model_sources import find_model
from backend.open_requests import DeltaSink
from backend.other_servers.translation import translate
from backend.request_speculation import resolve
from backend.sampling_defaults import read_sampling_defaults
from backend.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

PARALLEL = tuple(f.name for f in dataclasses.fields(ParallelConfig))
"""Keys of the section `parallel_config` that are options by themselves, as in `foretoken serve`."""


@dataclass(slots=True)
class Completion:
    """One of the n completions of a prompt."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    sources: list[str] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(slots=True)
class Generation:
    """A prompt's result. `outputs` has n completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0


class LLM:
    """A model in this process: a folder, a GGUF file, or a name on the hub; so is a drafter (`model` of speculative_config).

    Keyword arguments beyond these are those of `EngineConfig`, by the names that vLLM has for them too; what changes nothing here is said in the log,
    and unknown ones are errors.
    """

    def __init__(
        self,
        model: str = str(BUNDLED_MODEL),
        *,
        speculative_config: dict[str, Any] | None = None,
        dtype: str = "auto",
        tensor_parallel_size: int | None = None,
        **options: Any,
    ) -> None:
        given = {"dtype": dtype, "speculative_config": speculative_config, "tensor_parallel_size": tensor_parallel_size}
        options |= {key: value for key, value in given.items() if value is not None}
        command = translate(options, {*(f.name for f in dataclasses.fields(EngineConfig)), *PARALLEL})
        for note in command.notes:
            logger.warning(note)
        values = {**command.values, "model": str(find_model(command.values.get("model", model)))}
        if inner := {key: values.pop(key) for key in PARALLEL if key in values}:
            section = values.get("parallel_config") or {}
            for key in inner.keys() & section.keys():
                if inner[key] != section[key]:
                    raise ConfigError(f"{key} is given twice: {section[key]!r:.80}, and {inner[key]!r:.80}")
            values["parallel_config"] = {**section, **inner}
        if isinstance(values.get("quantization"), str) and Path(values["model"]).is_dir():
            values["quantization"], line = settle_quantization(values["quantization"], values["model"])
            if line:
                logger.info(line)
        has_weights = values.get("load_format") != "dummy"
        drafting, line = settle_method(values.get("speculative_config"), find_model, has_weights=has_weights)
        if line:
            values["speculative_config"] = drafting
            logger.info(line)
        try:
            config = EngineConfig.from_dict(values)
        except ConfigError as error:
            raise ConfigError(command.explain(error)) from None
        speculative = config.speculative_config
        if speculative.model is not None and (folder := str(find_model(speculative.model))) != speculative.model:  # likewise of any kind
            config = dataclasses.replace(config, speculative_config=dataclasses.replace(speculative, model=folder))
        self.engine = Engine(config)
        self.sampling_defaults = read_sampling_defaults(config.model) if config.generation_config == "auto" else {}
        """Of prompts that come without SamplingParams."""
        self._ids = itertools.count()

    def generate(
        self,
        prompts: str | dict[str, Any] | Sequence[str | dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        use_tqdm: bool = True,
        is_length_default: bool = False,
    ) -> list[Generation]:
        """Completes prompts (text, or {"prompt_token_ids": [...]}) and returns results in their order.

        sampling_params, speculative: one for all prompts, or a list of one for each. is_length_default: max_tokens is not asked for, and is at most
        what a prompt leaves of the context, as where there are no sampling_params.
        Raises RequestError for the first prompt that is wrong, before any is run; and the error of a request that fails, when the others are ended.
        """
        if isinstance(prompts, (str, dict)):
            prompts = [prompts]
        if sampling_params is None:
            sampling_params, is_length_default = SamplingParams(**self.sampling_defaults), True
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(sampling_params)} sampling parameters")
        choices: list[Any] = list(speculative) if isinstance(speculative, (list, tuple)) else [speculative] * len(prompts)
        if len(choices) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(choices)} choices of speculation")
        for choice in choices:
            resolve(self.engine.config.speculative_config, choice)  # before any prompt is run
        contents = [self._content(p) for p in prompts]
        results: list[Generation] = []
        room = self.engine.config.max_batch_size + self.engine.config.max_waiting
        num_open = 0

        errors: list[Exception] = []

        def sink_for(result: Generation, bar: tqdm) -> DeltaSink:
            def sink(delta: Delta) -> None:
                nonlocal num_open
                num_open -= delta.is_final
                if delta.error is not None:  # raised below, when the step is over: others' tokens of it are booked
                    errors.append(delta.error)
                    return
                collect(result, delta)
                bar.update(all(c.finish_reason for c in result.outputs))

            return sink

        try:
            with tqdm(total=len(prompts), desc="Completions", unit="prompt", disable=not use_tqdm) as bar:
                while len(results) < len(prompts) or num_open:
                    while len(results) < len(prompts) and (not num_open or num_open + sampling_params[len(results)].n <= room):
                        content, params = contents[len(results)], sampling_params[len(results)]
                        choice = choices[len(results)]
                        text = content if isinstance(content, str) else None
                        ids = (self.engine.tokenizer.encode(content) if content else []) if isinstance(content, str) else content
                        result = Generation(f"llm-{next(self._ids)}", text, ids, [Completion(i) for i in range(params.n)])
                        own = {"request_id": result.request_id, "speculative": choice, "is_length_default": is_length_default}
                        self.engine.submit(ids, params, sink_for(result, bar), **own)
                        num_open += params.n
                        results.append(result)
                    self.engine.step()
                    if errors:
                        raise errors[0]
        except BaseException:
            for result in results:
                self.engine.cancel(result.request_id)
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self.engine.step()
            raise
        return results

    def close(self) -> None:
        """Ends the engine; what drafters keep on disk is saved. A GPU's memory that requests had is free for the next engine, whoever still refers
        to this one."""
        self.engine.shutdown()
        self.engine.worker.free()

    @staticmethod
    def _content(prompt: object) -> str | list[int]:
        if isinstance(prompt, str):
            check_unicode(prompt, "the prompt")
            return prompt
        if isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
            return list(prompt["prompt_token_ids"])
        raise RequestError(f'a prompt must be text or {{"prompt_token_ids": [...]}}, got {prompt!r:.80}')

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Completes one conversation, rendered by the model's chat template, with more variables if it is to have them (such as enable_thinking).

        add_generation_prompt: the assistant's turn is opened; None: unless continue_final_message, by which the answer goes on with the final
        message's text.
        """
        turn = {
            CONTINUE_FINAL_MESSAGE: continue_final_message,
            **({} if add_generation_prompt is None else {ADD_GENERATION_PROMPT: add_generation_prompt}),
        }
        prompt = self.engine.tokenizer.render_chat(messages, own={**turn, **(chat_template_kwargs or {})})
        ids = self.engine.tokenizer.encode(prompt, add_special_tokens=False)
        if sampling_params is None:  # as long as it takes
            sampling_params = SamplingParams(**{"max_tokens": self.engine.scheduler.limits.max_num_tokens, **self.sampling_defaults})
            options = {"is_length_default": True, **options}
        return self.generate({"prompt_token_ids": ids}, sampling_params, **options)


def collect(result: Generation, delta: Delta) -> None:
    """Adds a delta to its completion."""
    completion = result.outputs[delta.index]
    if delta.prompt_text is not None:
        completion.text += delta.prompt_text
        completion.token_ids += delta.prompt_token_ids or []
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    completion.sources += delta.sources
    if delta.logprobs is not None:
        completion.logprobs = (completion.logprobs or []) + delta.logprobs
    if delta.finish_reason is not None:
        completion.finish_reason = delta.finish_reason
        result.num_cached_tokens = delta.num_cached_tokens
        if delta.stats is not None:
            completion.stats = delta.stats
