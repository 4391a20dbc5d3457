"""What drafters are trained on: token ids of texts and conversations, and answers that the target itself writes."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from backend.errors import ModelError, RequestError
from backend.model_checks import read_model_config
from backend.text import Tokenizer

SUFFIXES = (".py", ".txt", ".md", ".jsonl", ".u16", ".u32", ".xz")
PROMPT_SHARE = 4
"""Of a piece of text, the first one of so many parts is the prompt that the target goes on from."""


class Reader:
    """Files as documents of token ids."""

    def __init__(self, model: Path, own: Sequence[Path] = ()) -> None:
        """own: folders that a run writes to, which may lie in folders of data. Raises ModelError for the model's tokenizer."""
        self._own = [Path(os.path.realpath(path)) for path in own]
        try:
            self._tokenizer = Tokenizer(model)
        except Exception as error:  # the library has no kind of its own
            raise ModelError(f"{model / 'tokenizer.json'} cannot be read: {error}") from None
        config = read_model_config(model)
        self._vocab_size, end = config["vocab_size"], config.get("eos_token_id")
        self._start = [i for i in ([end] if isinstance(end, int) else end or []) if i < self._vocab_size][:1]

    def read(self, paths: Sequence[Path], option: str, *, as_prompts: bool = False) -> list[np.ndarray]:
        """Documents [T] uint32 of text files, folders of them (*.py, *.txt, *.md), *.jsonl (each line with "text" or "messages"), and ids
        (*.u16, *.u32, also *.u16.xz: little-endian).

        A text opens with the end-of-text id. as_prompts: a conversation ends where an answer is to come. Raises ValueError naming the option
        and the file that cannot be used.
        """
        if missing := [path for path in paths if not path.exists()]:
            raise ValueError(f"{option} {missing[0]} does not exist")
        files = [f for path in paths for f in (self._list(path) if path.is_dir() else [path]) if f.is_file()]
        files = [f for f in files if f.suffix in SUFFIXES or f in paths]
        found: list[np.ndarray] = []
        for file in tqdm(files, desc="tokens", unit="file", mininterval=2.0, disable=len(files) < 500):
            try:
                found += self._read_file(file, as_prompts)
            except (OSError, lzma.LZMAError, ValueError) as error:
                told = f"it is no UTF-8 ({error.reason})" if isinstance(error, UnicodeDecodeError) else error
                raise ValueError(f"{option} {file} cannot be used: {told!s:.300}") from None
        if not found:
            raise ValueError(f"{option} {', '.join(map(str, paths))}: no *.py, *.txt, *.md, *.jsonl, *.u16 or *.u32 there")
        return found

    def _list(self, folder: Path) -> list[Path]:
        """All that is in it, but for what the run itself writes: a run that goes on reads what it began with."""
        root = Path(os.path.realpath(folder))
        own = [folder / path.relative_to(root) for path in self._own if path.is_relative_to(root)]
        return [path for path in sorted(folder.rglob("*")) if not any(map(path.is_relative_to, own))]

    def _read_file(self, file: Path, as_prompts: bool) -> list[np.ndarray]:
        if file.suffix in (".xz", ".u16", ".u32"):
            content = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
            ids = np.frombuffer(content, dtype="<u4" if ".u32" in file.suffixes else "<u2").astype(np.uint32)
            if len(ids) and ids.max() >= self._vocab_size:
                raise ValueError(f"it holds id {ids.max()}; the model's vocabulary has ids 0 to {self._vocab_size - 1}")
            return [ids]
        text = file.read_text("utf-8-sig")  # some programs begin a file with the mark of its encoding
        if file.suffix != ".jsonl":
            return [self._encode(text)]
        found = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    found.append(self._read_line(json.loads(line), as_prompts))
                except (ValueError, TypeError, RecursionError, RequestError) as error:  # TypeError: text with half of a surrogate pair
                    raise ValueError(f"line {number}: {error!s:.200}") from None
        return found

    def _read_line(self, line: Any, as_prompts: bool) -> np.ndarray:
        if not isinstance(line, dict) or not line.keys() & {"messages", "text"}:
            raise ValueError(f'it must be an object with "text" or "messages", got {line!r:.80}')
        if "messages" not in line:
            if not isinstance(text := line["text"], str):
                raise ValueError(f'"text" must be a string, got {text!r:.80}')
            return self._encode(text)
        messages = line["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError(f'"messages" must be a list of objects, got {messages!r:.80}')
        if as_prompts and messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        rendered = self._tokenizer.render_chat(messages, add_generation_prompt=as_prompts)
        return self._to_ids(rendered)

    def _encode(self, text: str) -> np.ndarray:
        return self._to_ids(text, self._start)

    def _to_ids(self, text: str, before: Sequence[int] = ()) -> np.ndarray:
        """Raises ValueError for tokens that the model has no embedding of."""
        ids = np.array([*before, *self._tokenizer.encode(text, add_special_tokens=False)], dtype=np.uint32)
        if len(ids) and (last := int(ids.max())) >= self._vocab_size:
            token = self._tokenizer.tokens.get(last)
            raise ValueError(f"its text becomes id {last} ({token!r:.50}); the model's vocabulary has ids 0 to {self._vocab_size - 1}")
        return ids


def cut_prompts(documents: Sequence[np.ndarray], context: int, count: int, seed: int) -> list[np.ndarray]:
    """Prompts for at most `count` answers: short documents whole, of longer ones the beginning of each piece of `context` tokens. Shuffled."""
    length = max(1, context // PROMPT_SHARE)
    prompts = [piece for ids in documents for at in range(0, len(ids), context) if len(piece := ids[at : at + length])]
    order = np.random.default_rng(seed).permutation(len(prompts))
    return [prompts[i] for i in order[:count]]


def write_answers(model: Path, prompts: Sequence[np.ndarray], max_tokens: int, temperature: float, seed: int, **engine: Any) -> list[np.ndarray]:
    """Prompts with what the engine writes after them: text of the target's own (self-distillation). Raises RequestError, ConfigError."""
    from backend import LLM, SamplingParams

    # None of the prompts has a token that the model has no embedding of.
    llm = LLM(str(model), speculative_config={"method": "ngram"}, unknown_tokens="refuse", **engine)
    try:
        params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + i) for i in range(len(prompts))]
        results = llm.generate([{"prompt_token_ids": ids.tolist()} for ids in prompts], params)
    finally:
        llm.close()
    return [np.array([*result.prompt_token_ids, *result.outputs[0].token_ids], dtype=np.uint32) for result in results]


def choose_mask_token(ids: np.ndarray, vocab_size: int) -> int:
    """The token that the ids have least, mostly one that they do not have; of several the last one."""
    counts = np.bincount(ids, minlength=vocab_size)
    return vocab_size - 1 - int(np.argmin(counts[::-1]))


def choose_draft_ids(documents: Sequence[np.ndarray], vocab_size: int, count: int, always: Collection[int] = ()) -> np.ndarray:
    """The `count` most frequent token ids, ascending, `always` among them; ids that do not occur fill up."""
    counts = np.bincount(np.concatenate(documents), minlength=vocab_size)
    counts[list(always)] = np.iinfo(counts.dtype).max
    return np.sort(np.argsort(-counts, kind="stable")[:count])
