"""llguidance, which grammars of answers are compiled by, against xgrammar: time to compile a schema, time of a mask, and what they cannot enforce.

    pip install xgrammar kubernetes-validate jsonschema
    python -m benchmarks.grammar_libraries [--model DIR] [--schemas 40] [--tokens 64] [--seconds 30]

Schemas are real ones: Kubernetes' own that stand alone, drawn by a seed, and those of OpenAI's Python types. Each library compiles each in a
process of its own, which has --seconds for it. Masks are timed at every token of answers that are drawn from what the library itself allows,
--tokens at most. Answers that came to their end are held against the schema by `jsonschema`: one that does not fulfil it was let through.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from backend.config import BUNDLED_MODEL
from backend.errors import ModelError
from backend.text import Tokenizer

ANSWERS, SEED = 8, 5
CLOSING = ('"', "}", "]", '"}', '",', '":', "},", "],", "]}")
"""What is drawn half of the time where it may be, lest texts go on for ever."""
Step = Callable[[int], bool]
"""Takes a token; whether it is allowed."""


def kubernetes_schemas(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    folder = next(f for f in (files("kubernetes_validate") / "kubernetes-json-schema").iterdir() if f.name.endswith("-local"))
    texts = {f.name: f.read_text() for f in sorted(folder.iterdir(), key=lambda f: f.name) if f.name.endswith(".json")}
    alone = [name for name, text in texts.items() if '"$ref"' not in text and len(json.loads(text).get("properties", {})) > 2]
    for name in random.Random(SEED).sample(alone, min(count, len(alone))):
        yield name.removesuffix(".json"), json.loads(texts[name])


def openai_schemas(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    import openai.types.chat
    import openai.types.responses
    import pydantic

    own = [getattr(module, name) for module in (openai.types.chat, openai.types.responses) for name in sorted(vars(module))]
    models = [model for model in own if inspect.isclass(model) and issubclass(model, pydantic.BaseModel)]
    for model in random.Random(SEED).sample(models, min(count, len(models))):
        yield model.__name__, model.model_json_schema()


class Llguidance:
    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self._size = tokenizer.inner.get_vocab_size()
        self._tokenizer = llguidance.LLTokenizer(tokenizer.inner.to_str(), n_vocab=self._size)
        self.end = self._tokenizer.eos_token

    def compile(self, schema: dict[str, Any]) -> None:
        from llguidance import LLMatcher

        self._grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"coerce_one_of": True})
        matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

    def begin(self) -> tuple[Callable[[np.ndarray], None], Step]:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0)
        return lambda mask: matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes), matcher.consume_token


class Xgrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        inner = tokenizer.inner
        words = [inner.id_to_token(i) or "" for i in range(inner.get_vocab_size())]
        self.end = Llguidance(tokenizer).end
        info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[self.end])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: dict[str, Any]) -> None:
        self._compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

    def begin(self) -> tuple[Callable[[np.ndarray], None], Step]:
        import torch
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled)
        return lambda mask: matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None]), matcher.accept_token


LIBRARIES = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def run(pipe: Any, library: str, model: Path, schema: dict[str, Any], count: int) -> None:
    """In a process of its own. Sends seconds of compiling, those of masks, and texts of answers that came to their end."""
    tokenizer = Tokenizer(model)
    own = LIBRARIES[library](tokenizer)
    pipe.send("ready")
    started = time.perf_counter()
    try:
        own.compile(schema)
    except (ValueError, RuntimeError) as error:
        pipe.send(("refused", str(error)[:200]))
        return
    closing = [i for i in range(tokenizer.inner.get_vocab_size()) if tokenizer.inner.decode([i]) in CLOSING]
    compiled, masks, texts, rng = time.perf_counter() - started, [], [], random.Random(SEED)
    mask = np.zeros(-(-tokenizer.inner.get_vocab_size() // 32), dtype=np.int32)
    for _ in range(ANSWERS):
        fill, step = own.begin()
        ids: list[int] = []
        while len(ids) < count:
            before = time.perf_counter()
            fill(mask)
            masks.append(time.perf_counter() - before)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if own.end in allowed or not len(allowed):  # as soon as it may end
                texts.append(tokenizer.inner.decode(ids))
                break
            ends = np.intersect1d(allowed, closing)
            ids.append(int(rng.choice(ends if len(ends) and rng.random() < 0.5 else allowed)))
            if not step(ids[-1]):
                raise RuntimeError(f"{library}: token {ids[-1]} was allowed, and is refused")
    pipe.send(("done", compiled, masks, texts))


def main() -> None:
    import jsonschema

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="whose tokenizer's vocabulary masks are of")
    parser.add_argument("--schemas", type=int, default=40, help="half of either kind")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    schemas = [*kubernetes_schemas(args.schemas // 2), *openai_schemas(args.schemas - args.schemas // 2)]
    try:
        size = Tokenizer(args.model).inner.get_vocab_size()
    except ModelError as error:
        parser.error(f"--model: {error}")
    sizes = sorted(len(json.dumps(schema)) for _, schema in schemas)
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    print(f"{platform.machine()}, {len(schemas)} schemas of {sizes[0]} to {sizes[-1]} characters, {size} tokens; {versions}\n")
    print("| | compiled, ms: p50, p90, most | not in time | refused | mask, us: p50, p99 | answers at their end | of them not of the schema |")
    print("|---|---|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    for library in LIBRARIES:
        compiled: list[float] = []
        masks: list[float] = []
        late, refused, ended, wrong = 0, 0, 0, 0
        for name, schema in schemas:
            pipe, other = context.Pipe()
            process = context.Process(target=run, args=(other, library, args.model, schema, args.tokens))
            process.start()
            assert pipe.poll(120) and pipe.recv() == "ready"
            if not pipe.poll(args.seconds):
                print(f"({library}: {name} not compiled and walked in {args.seconds:.0f} s)", flush=True)
                late += 1
                process.kill()
                continue
            what, *rest = pipe.recv()
            process.join()
            if what == "refused":
                print(f"({library}: {name}: {rest[0]})", flush=True)
                refused += 1
                continue
            compiled.append(1e3 * rest[0])
            masks += [1e6 * own for own in rest[1]]
            checker = jsonschema.validators.validator_for(schema)(schema)
            for text in rest[2]:
                ended += 1
                try:
                    wrong += not checker.is_valid(json.loads(text))
                except ValueError:
                    wrong += 1
        masks.sort()
        times = f"{statistics.median(compiled):.1f}, {sorted(compiled)[int(0.9 * len(compiled))]:.1f}, {max(compiled):.1f}"
        spread = f"{statistics.median(masks):.0f}, {masks[int(0.99 * len(masks))]:.0f}"
        print(f"| {library} | {times} | {late} | {refused} | {spread} | {ended} | {wrong} |", flush=True)


if __name__ == "__main__":
    main()
