"""Speculation on the answers of a chat model, on CPU: what lookups draft right, and what it brings where answers have a form.

    python -m benchmarks.chat [--model MODEL] [--repeats 3]

MODEL: a chat model's folder or GGUF file; default: SmolLM2, which `make serve MODEL=smollm2` installs. Answers are greedy, one at a time, on one
thread.
Runs of each kind take turns. Speed is by the process's own processor time: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from backend import LLM, SamplingParams
from backend.model_sources import find_model
from benchmarks.models import model_folder
from deploy.sample_models import find_sample

NOTE = (
    "The museum opens at nine on weekdays and at ten on weekends. Tickets cost twelve euros, six for students, and children under seven enter "
    "for free. The last visitors are let in an hour before the museum closes at six. Bags larger than a sheet of paper must be left at the cloakroom."
)
QUESTIONS = [
    "What is the difference between a list and a tuple in Python?",
    "Write a short story about a lighthouse keeper.",
    "How do I make pancakes? Give me the steps.",
    "Explain photosynthesis to a child.",
]
REWRITES = [
    f"Repeat the following text, but replace 'museum' with 'gallery':\n\n{NOTE}",
    f"Summarize this in one sentence, with the words of the text:\n\n{NOTE}",
    f"Write each sentence of this text on a line of its own:\n\n{NOTE}",
    "Fix the mistakes in this text: She go to school every day. He have two brother. They is playing in the garden since morning.",
]
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["engineer", "teacher", "doctor", "artist"]},
        "is_employed": {"type": "boolean"},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 30},
                "city": {"type": "string", "maxLength": 20},
                "country": {"enum": ["France", "Italy"]},
            },
            "required": ["street", "city", "country"],
            "additionalProperties": False,
        },
    },
    "required": ["first_name", "last_name", "age", "occupation", "is_employed", "address"],
    "additionalProperties": False,
}
ABOUT = [
    "Marie Dupont is 34 and teaches mathematics in Lyon, France; she lives at 12 Rue Garibaldi.",
    "Luca Rossi, a doctor of 51, works in Turin, Italy, and lives in Via Roma 8.",
    "At 28, Anna Bianchi paints for a living in Naples, Italy. Her flat is in Via Toledo 100.",
    "Paul Martin (62) builds bridges. He lives at 5 Quai Voltaire in Paris, France.",
]
TOKENS = 128
Speculative = dict[str, Any] | None
"""A request's choice; None: the engine's, which is no drafter, and what a form forces where the engine drafts that."""


def ask(llm: LLM, questions: list[str]) -> list[dict[str, list[int]]]:
    tokenizer = llm.engine.tokenizer
    texts = [tokenizer.render_chat([{"role": "user", "content": question}]) for question in questions]
    return [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]


def run(llm: LLM, prompts: list[dict[str, list[int]]], params: SamplingParams, speculative: Speculative) -> tuple[int, float, list[Any]]:
    """Tokens, seconds of the processor, statistics."""
    tokens, stats, start = 0, [], time.process_time()
    for prompt in prompts:
        (output,) = llm.generate(prompt, params, speculative=speculative, use_tqdm=False)
        tokens += len(output.outputs[0].token_ids)
        stats.append(output.outputs[0].stats)
    return tokens, time.process_time() - start, stats


def compare(title: str, kinds: dict[str, tuple[LLM, Speculative]], questions: list[str], params: SamplingParams, repeats: int) -> None:
    """The first kind is what the others are compared with."""
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    said = {}
    for _ in range(repeats):
        for name, (llm, speculative) in kinds.items():
            tokens, seconds, stats = run(llm, ask(llm, questions), params, speculative)
            speeds[name].append(tokens / seconds)
            drafted, accepted, steps = (sum(getattr(own, key) for own in stats) for key in ("drafted", "accepted", "steps"))
            said[name] = f"{tokens / steps:6.2f} {accepted / drafted if drafted else 0:9.3f} {tokens:7}"
    print(f"\n{title}\n{'':28} {'ratio':>6} {'tokens/s':>9} {'a step':>6} {'accepted':>9} {'tokens':>7}")
    first = next(iter(kinds))
    for name in kinds:
        ratio = statistics.median(own / base for own, base in zip(speeds[name], speeds[first]))
        print(f"{name:28} {ratio:6.2f} {statistics.median(speeds[name]):9.1f} {said[name]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, help="folder or GGUF file of a chat model")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    model = str(arguments.model or find_model(find_sample("smollm2")))

    def load(**options: Any) -> LLM:
        # Whatever is drafted is not paced by the clock, and no answer helps the next run.
        speculative = {"method": "none", "request_methods": ["ngram", "suffix"], "adaptive": False}
        speculative["suffix_decoding_max_cached_requests"] = 0
        more = {"kv_cache_memory": "256MiB", "max_model_len": 1024, "num_threads": 1, "enable_prefix_caching": False}
        return LLM(model, dtype="float32", speculative_config=speculative, **more, **options)

    free, unforced = load(), load(max_forced_tokens=0)
    lookups = [(method, {"method": method, "num_speculative_tokens": 5}) for method in ("ngram", "suffix")]
    methods: list[tuple[str, Speculative]] = [("none", None), *lookups]
    plain = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    for title, questions in (("Questions", QUESTIONS), ("Rewriting a text of the prompt", REWRITES)):
        compare(title, {name: (unforced, method) for name, method in methods}, questions, plain, arguments.repeats)
    formed = SamplingParams(max_tokens=TOKENS, temperature=0.0, structured_outputs={"json": PERSON, "disable_any_whitespace": True})
    kinds = {name: (unforced, method) for name, method in methods}
    kinds |= {f"{name}, forced tokens": (free, method) for name, method in methods}
    questions = [f"Describe this person as JSON: {text}" for text in ABOUT]
    compare("JSON of a schema", kinds, questions, formed, arguments.repeats)
    for llm in (free, unforced):
        llm.close()


if __name__ == "__main__":
    main()
