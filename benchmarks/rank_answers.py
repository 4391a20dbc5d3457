"""How many greedy answers on several ranks are not those of one, where they part, and how near the two likeliest tokens were there.

    python -m benchmarks.rank_answers [--ranks 1 2 4] [--answers 1000] [--outputs 64] [--dtype bfloat16] [--model DIR] [--repeat-heads 2]

Each rank's part of a product is rounded before the parts are added, so that in bfloat16 a place where two tokens are all but equally likely may go
either way; from there on two answers have nothing to do with each other. In float32 none should. Prompts are real code; the model is the bundled one,
whose four heads are repeated for more ranks. Where there are fewer GPUs than ranks, several ranks share each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL
from backend.llm import Generation
from benchmarks.gpu_step import make_prompts
from benchmarks.models import model_folder
from benchmarks.shared_gpus import shared_gpus


def repeat_heads(count: int, folder: Path) -> Path:
    """The bundled model with each query head `count` times, a power of two, at that share of its weight: it computes the same, on more ranks."""
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    heads, weights = config["num_attention_heads"], load_file(BUNDLED_MODEL / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = weight.unflatten(0, (heads, -1)).repeat_interleave(count, dim=0).flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            weights[name] = weight.unflatten(1, (heads, -1)).repeat_interleave(count, dim=1).flatten(1) / count
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / file, folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": heads * count}))
    save_file(weights, folder / "model.safetensors")
    return folder


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def likeliest_gap(answer: Generation, place: int) -> float:
    """Between the log-probabilities of the two likeliest tokens of a place, in nats."""
    found = answer.outputs[0].logprobs
    assert found is not None, "log-probabilities were asked for"
    best = sorted((logprob for _, logprob in found[place].top), reverse=True)
    return best[0] - best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=128, help="its tokens")
    parser.add_argument("--outputs", type=int, default=64)
    parser.add_argument("--batch", type=int, default=125)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=model_folder, help="default: the bundled one")
    parser.add_argument("--repeat-heads", type=int, choices=(1, 2, 4, 8), default=1, help="each of the bundled model's, at that share of its weight")
    arguments = parser.parse_args()
    if arguments.repeat_heads == 1:
        compare(arguments, str(arguments.model or BUNDLED_MODEL))
        return
    if arguments.model:
        parser.error("--repeat-heads is of the bundled model: leave --model out")
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments, str(repeat_heads(arguments.repeat_heads, Path(folder))))


def compare(arguments: argparse.Namespace, model: str) -> None:
    """Prints a line for each number of ranks."""
    params = SamplingParams(max_tokens=arguments.outputs, temperature=0.0, ignore_eos=True, logprobs=2)
    where = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else f"CPU, {os.cpu_count()} cores"
    print(f"{where}, {arguments.dtype}; {arguments.answers} prompts of {arguments.prompt} tokens, {arguments.outputs} out\n")
    print("| ranks | answers that differ from the first line's | places | first such place: median, least | gap of the two likeliest there, nats |")
    print("|---|---|---|---|---|")
    plain: list[Generation] = []
    for size in arguments.ranks:
        with shared_gpus(arguments.device, size):
            llm = LLM(
                model,
                device=arguments.device,
                dtype=arguments.dtype,
                speculative_config={"method": "none"},
                max_batch_size=arguments.batch,
                enable_prefix_caching=False,
                max_step_ms=0.0,  # else prompts are cut by times, and batches differ with them
                tensor_parallel_size=size,
            )
        prompts = make_prompts(llm, arguments.answers, arguments.prompt)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        llm.close()
        plain = plain or answers
        tokens = [(own.outputs[0].token_ids, other.outputs[0].token_ids) for own, other in zip(plain, answers, strict=True)]
        found = {i: place for i, pair in enumerate(tokens) if (place := first_difference(*pair)) is not None}
        same = sum(len(own) for own, _ in tokens) - sum(len(tokens[i][0]) - place for i, place in found.items())
        gaps = sorted(likeliest_gap(plain[i], place) for i, place in found.items())
        places = f"{statistics.median(found.values()):.0f}, {min(found.values())}" if found else "-"
        near = f"median {statistics.median(gaps):.4f}, greatest {gaps[-1]:.4f}" if gaps else "-"
        print(f"| {size} | {len(found)} | {len(found)} of {same + len(found)} | {places} | {near} |", flush=True)


if __name__ == "__main__":
    main()
