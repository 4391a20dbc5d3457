"""What rounding costs, on CPU: the bundled model's logits and perplexity by type of weights, and of keys and values, its drafter's acceptance,
answers with and without drafts, and the speed of products.

    python -m benchmarks.quantization [--files 8] [--prompts 24] [--only logits|speed|acceptance|answers]
    python -m benchmarks.quantization --model MODEL --text FILE FILE ...

Held-out standard-library modules, float32 arithmetic. The drafter is rounded while the target is not, and the other way round.
With --model, which a GGUF file may be too: logits and perplexity of that one, over the beginnings of texts; and of the same in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL, EngineConfig
from backend.parallel.ranks import Ranks
from backend.quantization import make_linear, quantize
from backend.quantization_config import ACTIVATION_ALIASES, SCHEMES
from backend.step.worker import Worker
from backend.text import Tokenizer
from benchmarks.models import model_folder, text_of
from tests.steps import Row, Steps
from training.heldout import read_heldout
from training.tokenizer import load_tokenizer

TYPES: dict[str, Any] = {
    "none": None,
    **{name: name for name in SCHEMES},
    "a8w8_fp8": "a8w8_fp8",
    "w4a8": "w4a8",
    "wint8, head wint8": {"dense_quant_type": "wint8", "head_quant_type": "wint8"},
}
CACHES: dict[str, dict[str, str]] = {
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 cache, scales 1": {"kv_cache_dtype": "fp8", "kv_cache_scales": "one"},
}
"""Of keys and values."""
CONTEXT = 512


def read_windows(num_files: int) -> list[list[int]]:
    """The first tokens of each held-out file."""
    tokenizer = load_tokenizer()
    return [tokenizer.encode(text).ids[:CONTEXT] for text in list(read_heldout().values())[:num_files]]


def logits_of(types: Any, windows: list[list[int]], model: str, dtype: str, cache: dict[str, str]) -> list[torch.Tensor]:
    """At every token of each window."""
    values = {"model": model, "device": "cpu", "dtype": dtype, "quantization": types, "kv_cache_memory": "64MiB", "max_batch_size": 2, **cache}
    worker = Worker(EngineConfig.from_dict(values), Ranks())
    worker.program.rounds_activations = isinstance(types, str) and types in ACTIVATION_ALIASES  # which a CPU does here alone
    steps = Steps(worker)
    found = []
    for window in windows:
        steps.admit(0, window, range(-(-CONTEXT // 16)))
        steps.run([Row(0, 0, len(window))])
        found.append(steps.logits())
    return found


@torch.inference_mode()
def compare_logits(windows: list[list[int]], model: str = str(BUNDLED_MODEL), dtypes: tuple[str, ...] = ("float32",)) -> None:
    """dtypes: of the plain weights; those that are rounded compute in the first."""
    exact: list[torch.Tensor] = []
    print(f"\n{sum(map(len, windows))} tokens of {len(windows)} files; logits against those of the plain weights")
    print(f"{'target':20} {'perplexity':>10} {'relative':>9} {'KL, nats':>9} {'same token':>10}")
    plain: dict[str, str] = {}
    rows = [(name, types, dtypes[0], plain) for name, types in TYPES.items()]
    rows[1:1] = [(dtype, None, dtype, plain) for dtype in dtypes[1:]]
    rows += [(name, None, dtypes[0], cache) for name, cache in CACHES.items()]
    rows.append(("wint8, fp8 cache", "wint8", dtypes[0], CACHES["fp8 cache"]))
    for name, types, dtype, cache in rows:
        found = [logits.float() for logits in logits_of(types, windows, model, dtype, cache)]
        exact = exact or found
        losses, kl, same, error, size = [], [], [], 0.0, 0.0
        for window, own, right in zip(windows, found, exact):
            losses.append(F.cross_entropy(own[:-1], torch.tensor(window[1:]), reduction="none"))
            kl.append(F.kl_div(own.log_softmax(-1), right.log_softmax(-1), log_target=True, reduction="none").sum(-1))
            same.append((own.argmax(-1) == right.argmax(-1)).float())
            error, size = error + float((own - right).square().sum()), size + float(right.square().sum())
        numbers = (math.exp(float(torch.cat(losses).mean())), math.sqrt(error / size), float(torch.cat(kl).mean()), float(torch.cat(same).mean()))
        print(f"{name:20} {numbers[0]:10.3f} {numbers[1]:9.4f} {numbers[2]:9.5f} {numbers[3]:10.4f}", flush=True)


def compare_acceptance(num_prompts: int) -> None:
    rng, texts = random.Random(0), list(read_heldout().values())
    prompts = []
    for _ in range(num_prompts):
        text = rng.choice(texts)
        start = rng.randrange(len(text) - 1200)
        prompts.append(text[start : start + 600])
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    print(f"\n{'rounded':30} {'accepted':>9} mtp, 3 drafts, {num_prompts} prompts, 64 tokens, greedy")
    weights = [("nothing", None), *((who, name) for who in ("drafter", "target", "both") for name in SCHEMES)]
    for who, name in [*weights, *(("", cache) for cache in CACHES)]:
        speculative = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False, "quantization": name if who in ("drafter", "both") else None}
        cache = CACHES.get(name or "", {})
        llm = LLM(quantization=name if who in ("target", "both") else None, speculative_config=speculative, **cache)
        stats = [output.outputs[0].stats for output in llm.generate(prompts, params, use_tqdm=False)]
        drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
        print(f"{who + ' ' + (name or ''):30} {accepted / drafted:9.3f}", flush=True)


def compare_answers(num_prompts: int) -> None:
    """How often a draft beside a token changes it, for the last bits of sums that e4m3 and bfloat16 make more of than float32 does."""
    texts, rng = list(read_heldout().values()), random.Random(1)
    prompts = [text[start : start + 600] for text in rng.choices(texts, k=num_prompts) for start in [rng.randrange(len(text) - 1200)]]
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    speculative = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    print(f"\n{'':30} answers of 64 tokens that are the same with and without drafts, of {num_prompts}")
    for name, options in {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "float32, fp8 cache": CACHES["fp8 cache"]}.items():
        llm = LLM(speculative_config=speculative, enable_prefix_caching=False, **options)
        answers = [
            [output.outputs[0].token_ids for output in llm.generate(prompts, params, speculative=choice, use_tqdm=False)]
            for choice in ({"method": "none"}, {"method": "mtp"})
        ]
        print(f"{name:30} {sum(one == other for one, other in zip(*answers))}", flush=True)


def time_of(call: Callable[[], object]) -> float:
    """Milliseconds, the least: the machine has other work."""
    times = []
    for _ in range(25):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


@torch.inference_mode()
def compare_speed() -> None:
    torch.set_num_threads(1)
    print(f"\n{'ms, 2048 x 2048':20} " + " ".join(f"{f'{dtype}'[6:]} {n:>3}" for dtype in (torch.float32, torch.bfloat16) for n in (1, 8, 128)))
    plain = torch.randn(2048, 2048) * 0.02
    for name in (None, "wint8, at once", *SCHEMES):
        cells = []
        for dtype in (torch.float32, torch.bfloat16):
            linear: Callable[[torch.Tensor], torch.Tensor] = make_linear(plain.to(dtype) if name is None else quantize(plain, name.split(",")[0]))
            if name == "wint8, at once":
                codes, scales = (
                    t.to(dtype) if t.is_floating_point() else t for t in (quantize(plain, "wint8").codes, quantize(plain, "wint8").scales)
                )
                linear = lambda x: F.linear(x, codes.to(dtype) * scales)  # noqa: B023, E731
            for num_tokens in (1, 8, 128):
                x = torch.randn(num_tokens, 2048).to(dtype)
                cells.append(time_of(lambda: linear(x)))  # noqa: B023
        print(f"{name or 'plain':20} " + " ".join(f"{cell:{w}.2f}" for cell, w in zip(cells, (11, 11, 11, 12, 12, 12))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--only", choices=("logits", "speed", "acceptance", "answers"), help="one of the four parts")
    parser.add_argument("--model", type=model_folder, help="another model than the bundled one: its logits alone")
    parser.add_argument("--text", type=text_of, nargs="+", default=[], metavar="FILE", help="with --model: texts that it has not seen")
    arguments = parser.parse_args()
    if bool(arguments.model) != bool(arguments.text):
        parser.error("--model and --text go together: logits of another model are compared over texts that it has not seen")
    if arguments.model:
        folder = arguments.model
        tokenizer = Tokenizer(folder)
        windows = [tokenizer.encode(text)[:CONTEXT] for text in arguments.text]
        compare_logits(windows, str(folder), ("float32", "bfloat16"))
        return
    parts: dict[str, Callable[[], None]] = {
        "logits": lambda: compare_logits(read_windows(arguments.files)),
        "speed": compare_speed,
        "acceptance": lambda: compare_acceptance(arguments.prompts),
        "answers": lambda: compare_answers(2 * arguments.prompts),
    }
    for name, measure in parts.items():
        if arguments.only in (None, name):
            measure()


if __name__ == "__main__":
    main()
