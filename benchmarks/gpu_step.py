"""Step times and tokens per second on one GPU, of a model with random weights in the shape of a real one.

    python -m benchmarks.gpu_step [--batches 1 8 32 128] [--methods none ngram mtp] [--outputs 256]

Prompts are real code; with random weights no draft would stand, so acceptance is simulated: each draft stands with a given
probability, by its place. The limit is what the memory gives: bytes of weights and of keys and values over the bandwidth that a copy
and a read of as many bytes reach in the same run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL
from training.heldout import read_heldout

SHAPES = {
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
}
COMMON = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
METHODS = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "min_ngram_size": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1, "num_model_steps": 1},
    "mtp3": {"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 3},
}


def write_folders(shape: str, folder: Path) -> tuple[Path, Path]:
    """Configurations of a target and its drafter, with the bundled tokenizer."""
    target = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "eos_token_id": 0, **COMMON, **SHAPES[shape]}
    drafter = {**target, "architectures": ["LlamaMTP"], "num_nextn_predict_layers": 1}
    for name, values in (("target", target), ("drafter", drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if (BUNDLED_MODEL / file).is_file():
            shutil.copy(BUNDLED_MODEL / file, folder / "target")
    return folder / "target", folder / "drafter"


def measure_bandwidth(num_bytes: int = 4 * 2**30) -> tuple[float, float]:
    """Bytes a second of a copy (read and written), and of a read alone (a sum)."""
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    speeds = []
    for run, moved in ((lambda: target.copy_(source), 2 * num_bytes), (lambda: source.sum(), num_bytes)):
        times = []
        for _ in range(8):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        speeds.append(moved / statistics.median(times))
    return speeds[0], speeds[1]


def make_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Stretches of real code, each other than the others."""
    text = "\n".join(read_heldout().values())
    ids = llm.engine.tokenizer.encode(text[: count * length * 8])
    while len(ids) < count * length:
        ids += ids
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def run(llm: LLM, batch: int, length: int, outputs: int) -> dict[str, float]:
    """Decodes `batch` requests together -> seconds of the device's steps, and tokens a second once all of them decode."""
    engine = llm.engine
    steps = engine.device_steps
    assert steps is not None
    seconds: list[float] = []
    emitted: list[int] = []
    land = steps.land

    def note(flight):  # type: ignore[no-untyped-def]
        result = land(flight)
        if len(flight.entries) == batch:
            seconds.append(result[2])
            emitted.append(sum(map(len, result[1].token_ids)))
            ends.append(time.perf_counter())
        return result

    ends: list[float] = []
    steps.land = note  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts(llm, batch, length)]
    llm.generate(prompts, SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True), use_tqdm=False)
    steps.land = land  # type: ignore[method-assign]
    skip = min(8, len(seconds) // 4)
    wall = ends[-1] - ends[skip - 1]
    busy = sum(seconds[skip:])
    return {
        "step_ms": 1000 * statistics.median(seconds[skip:]),
        "wall_ms": 1000 * wall / len(seconds[skip:]),
        "tokens_per_step": sum(emitted[skip:]) / len(emitted[skip:]) / batch,
        "tokens_per_s": sum(emitted[skip:]) / wall,
        "idle": 1 - busy / wall,
        "steps": len(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=["none", "ngram", "mtp"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--outputs", type=int, default=256)
    parser.add_argument("--acceptance", type=float, default=0.8)
    arguments = parser.parse_args()
    copy, read = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, read {read / 1e12:.2f} TB/s")
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = write_folders(arguments.shape, Path(folder))
        print("| method | batch | step ms | wall ms a step | tokens a step | tokens/s | device idle |\n|---|---|---|---|---|---|---|")
        for method in arguments.methods:
            started = time.perf_counter()
            llm = LLM(
                model=str(target),
                load_format="dummy",
                device="cuda",
                max_batch_size=max(arguments.batches),
                max_num_batched_tokens=8192,
                max_model_len=arguments.prompt + arguments.outputs + 32,
                enable_prefix_caching=False,
                speculative_config={
                    **METHODS[method],
                    **({"model": str(drafter)} if method.startswith("mtp") else {}),
                    "adaptive": False,
                    "accept_policy": "simulated",
                    "simulated_acceptance_rate": arguments.acceptance,
                },
            )
            loaded = time.perf_counter() - started
            for batch in arguments.batches:
                row = run(llm, batch, arguments.prompt, arguments.outputs)
                print(
                    f"| {method} | {batch} | {row['step_ms']:.3f} | {row['wall_ms']:.3f} | {row['tokens_per_step']:.2f} | {row['tokens_per_s']:.0f} "
                    f"| {row['idle']:.1%} |",
                    flush=True,
                )
            print(f"({method}: ready after {loaded:.1f} s)")
            del llm
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
