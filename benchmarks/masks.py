"""What answers with a form cost the engine's thread in a step, on CPU: masks, and what is done for them.

    python -m benchmarks.masks [--requests 32] [--drafts 0 3] [--rounds 30] [--answers]

Requests follow a JSON schema, a regular expression and a choice by turns, each at a place of its own. Ways are run by turns in one process,
each on copies of its own: together by llguidance's threads, and one after the other. A step of an 8B model on one H200 takes
some 4.7 ms at batch 32.

--answers: instead, what it brings that a model drafter (MTP, the bundled model's) drafts what the grammar allows: answers with and without, by
turns, one at a time on one thread; processor time, steps and accepted drafts.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL
from backend.grammar import Grammars, Matcher, fill_masks, fit_drafts
from backend.step import draft_phase
from backend.structured_outputs import StructuredOutputs
from backend.text import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "size": {"type": "object", "properties": {"width": {"type": "integer"}, "height": {"type": "number"}}, "required": ["width", "height"]},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
FORMS = (
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex=r"([a-z]{2,9} = [0-9]{1,4}\n){1,20}"),
    StructuredOutputs(choice=("yes", "no", "maybe")),
)
VOCABULARY, END = 4096, 0


def walk(matcher: Matcher, count: int, rng: random.Random) -> list[int]:
    """So many tokens that the grammar allows one after the other, fewer where it ends."""
    own, found = matcher.copy(), []
    for _ in range(count):
        masks, _ = fill_masks([(own, [])])
        allowed = [i for i in np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist() if i != END]
        if not allowed:
            break
        found.append(rng.choice(allowed))
        if own.advance(found[-1:]) and own.is_complete:
            break
    return found


def fill_one_by_one(asked: list[tuple[Matcher, list[int]]]) -> None:
    for one in asked:
        fill_masks([one])


def fit_all(asked: list[tuple[Matcher, list[int]]]) -> None:
    for matcher, drafts in asked:
        fit_drafts(matcher, drafts, ["ngram"] * len(drafts), 0, 8)


WAYS: dict[str, Callable[[list[tuple[Matcher, list[int]]]], object]] = {
    "masks, together": fill_masks,
    "masks, one by one": fill_one_by_one,
    "drafts fitted": fit_all,
}


def measure(num_requests: int, num_drafts: int, rounds: int) -> None:
    grammars, rng = Grammars(Tokenizer(BUNDLED_MODEL), VOCABULARY, [END]), random.Random(0)
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        asked: list[tuple[Matcher, list[int]]] = []
        for i in range(num_requests):
            matcher = grammars.compile(FORMS[i % len(FORMS)])
            matcher.advance(walk(matcher, rng.randint(0, 12), rng)[:-1])
            asked.append((matcher, walk(matcher, num_drafts, rng)))
        for name in rng.sample(list(WAYS), len(WAYS)):
            own_asked = [(matcher.copy(), drafts) for matcher, drafts in asked]
            started = time.perf_counter()
            WAYS[name](own_asked)
            times.setdefault(name, []).append(time.perf_counter() - started)
        tokens = [walk(m, 1, rng) for m, _ in asked]
        started = time.perf_counter()
        for (matcher, _), own in zip(asked, tokens):
            matcher.advance(own)
        times.setdefault("tokens taken in", []).append(time.perf_counter() - started)
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    print(f"\n{num_requests} requests, up to {num_drafts} drafts: ms a step (median of {rounds}), and over masks filled together")
    for name, value in medians.items():
        print(f"  {name:20} {value:8.2f} {value / medians['masks, together']:6.2f}")


@contextlib.contextmanager
def without_masks() -> Iterator[None]:
    own = draft_phase.mask_draft
    draft_phase.mask_draft = lambda logits, *_: logits
    try:
        yield
    finally:
        draft_phase.mask_draft = own


def measure_answers(rounds: int) -> None:
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False, "request_methods": ["ngram"]}
    llm = LLM(speculative_config=config, enable_prefix_caching=False)
    prompts = ["import json\n\n\ndefault = ", "person = ", "# The settings of the server\nsettings = ", "boxes = ["]
    forms = [{"json": SCHEMA}, {"json_object": True}]
    print("tokens of a step that has them (accepted of drafted; processor time over that without masks), drafters masked and not")
    for strategy, mtp_strategy in (("target_match", "default"), ("rejection", "default"), ("target_match", "with_ngram")):
        for temperature in (0.0, 1.0):
            found: dict[str, list[float]] = {}
            counts: dict[str, tuple[int, int, int]] = {}
            for _ in range(rounds):
                for name, way in (("masked", contextlib.nullcontext), ("not", without_masks)):
                    with way():
                        started, tokens, drafted, accepted = time.process_time(), 0, 0, 0
                        for number, prompt in enumerate(prompts * len(forms)):
                            form = StructuredOutputs(**forms[number // len(prompts)])
                            params = SamplingParams(max_tokens=120, temperature=temperature, seed=number, structured_outputs=form)
                            asked = {"verify_strategy": strategy, "mtp_strategy": mtp_strategy}
                            (output,) = llm.generate(prompt, params, speculative=asked, use_tqdm=False)[0].outputs
                            tokens, drafted, accepted = (
                                tokens + len(output.token_ids), drafted + output.stats.drafted, accepted + output.stats.accepted
                            )  # fmt: skip
                        found.setdefault(name, []).append((time.process_time() - started) / tokens)
                        counts[name] = tokens, drafted, accepted
            least = {name: min(values) for name, values in found.items()}
            cells = [f"{n / (n - a):.2f} ({a / d:.2f}; {least[name] / least['not']:.2f})" for name, (n, d, a) in counts.items()]
            print(f"  {strategy:12} {mtp_strategy:10} temperature {temperature:g}: " + "  |  ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--answers", action="store_true")
    args = parser.parse_args()
    if args.answers:
        torch.set_num_threads(1)
        measure_answers(args.rounds)
        return
    for num_drafts in args.drafts:
        measure(args.requests, num_drafts, args.rounds)


if __name__ == "__main__":
    main()
