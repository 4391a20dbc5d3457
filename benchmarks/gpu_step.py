"""Step times and tokens per second on one GPU, of a model with random weights in the shape of a real one.

    python -m benchmarks.gpu_step [--batches 1 8 32 128] [--methods none ngram mtp eagle3] [--outputs 256] [--shared 2048] [--options]

Prompts are real code; with random weights no draft would stand, so acceptance is simulated: each draft stands with a given
probability, by its place. The limit is what the memory gives: bytes of weights and of keys and values over the bandwidth that a copy
and a read of as many bytes reach in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL
from backend.quantization import schemes
from backend.step.draft_masks import Grammars
from backend.step.times import StepTimes
from backend.step.worker import Begun, Launched, Results
from backend.structured_outputs import StructuredOutputs
from benchmarks.models import check_gpus
from benchmarks.one_rank import one_rank_of
from benchmarks.step_bytes import counted_experts, profiled, read_bytes
from benchmarks.workloads import completion_prompts
from training.heldout import read_heldout

SHAPES = {
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "llama-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "ernie-21b-a3b": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "vocab_size": 103424,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 102400,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek-v3-4": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 4,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}
"""deepseek-v3-4 is DeepSeek-V3's shape cut to four layers."""
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
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "min_ngram_size": 1},
    "ngram3": {"method": "ngram", "num_speculative_tokens": 3, "min_ngram_size": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1, "num_model_steps": 1},
    "mtp3": {"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 5},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 5},
    "medusa": {"method": "medusa", "num_speculative_tokens": 4},
    "hydra": {"method": "hydra", "num_speculative_tokens": 4},
    "dflash": {"method": "dflash", "num_speculative_tokens": 7},
    "dspark": {"method": "dspark", "num_speculative_tokens": 7},
}
OWN_TOKENS = ("eagle3",)
"""Drafters that bring tokens of their own."""
DRAFT_VOCABULARY = 32000
"""Of EAGLE-3 heads, as published ones have it."""


def write_drafter(method: str, target: Path) -> Path | None:
    """The configuration of a drafter for a target, beside it; None: the method has none."""
    shape = json.loads((target / "config.json").read_text())
    # Of the target's shape as a Llama of one layer has it, with heads of 128 whatever the target's are.
    num_heads = shape["hidden_size"] // 128
    heads = {"head_dim": 128, "num_attention_heads": num_heads, "num_key_value_heads": math.gcd(num_heads, 8)}
    common = {"tie_word_embeddings": False, "eos_token_id": 0, **COMMON, **heads}
    kept = {key: shape[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")}
    layer = {**common, **kept, "num_hidden_layers": 1}
    tapped = [1 + i * (shape["num_hidden_layers"] - 3) // 4 for i in range(5)]
    block = {**layer, "num_hidden_layers": 5, "mask_token_id": 1, "target_layer_ids": tapped}
    drafters = {
        "mtp": {**layer, "architectures": ["LlamaMTP"], "num_nextn_predict_layers": 1},
        "eagle3": {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCABULARY},
        "draft_model": {**shape, **SHAPES["llama-1b"], "head_dim": 64},
        "medusa": {"medusa_num_heads": 4, "medusa_num_layers": 1},
        "hydra": {"hydra_num_heads": 4, "hydra_num_layers": 1, "hydra_head_arch": "mlp"},
        "dflash": {**block, "block_size": 8},
        "dspark": {**block, "block_size": 7, "markov_rank": 256, "enable_confidence_head": True},
    }
    name = METHODS[method]["method"]
    if name not in drafters:
        return None
    folder = target.parent / f"{name}-drafter"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(drafters[name]))
    return folder


def write_token_map(drafter: Path | None, target: Path, count: int | None) -> dict[str, str]:
    """The option that has a drafter score so many of the target's tokens."""
    if drafter is None or count is None:
        return {}
    vocab_size, path = json.loads((target / "config.json").read_text())["vocab_size"], target.parent / "tokens.json"
    path.write_text(json.dumps([number * vocab_size // count for number in range(count)]))
    return {"draft_token_map": str(path)}


def write_target(shape: str, folder: Path, **values: Any) -> Path:
    """The configuration of a target, with the bundled tokenizer. values: other ones than the shape's."""
    common = {"tie_word_embeddings": False, "eos_token_id": 0, **COMMON}
    target = {"architectures": ["LlamaForCausalLM"], **common, **SHAPES[shape], **values}
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(target))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if (BUNDLED_MODEL / file).is_file():
            shutil.copy(BUNDLED_MODEL / file, folder / "target")
    return folder / "target"


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


def load_target(target: Path, batch: int, length: int, speculation: dict[str, Any], **options: Any) -> LLM:
    """The target with random weights, for so many requests of so many tokens at most."""
    common = {"load_format": "dummy", "device": "cuda", "max_num_batched_tokens": 8192, "max_step_ms": 0.0}
    return LLM(model=str(target), max_batch_size=batch, max_model_len=length, speculative_config=speculation, **common, **options)


def greedy(outputs: int) -> SamplingParams:
    return SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)


def make_prompts(llm: LLM, count: int, length: int, alike: bool = False) -> list[list[int]]:
    """Stretches of real code, each other than the others; alike: all of them the first."""
    if alike:
        return make_prompts(llm, 1, length) * count
    text = "\n".join(read_heldout().values())
    ids = llm.engine.tokenizer.encode(text[: count * length * 8])
    while len(ids) < count * length:
        ids += ids
    return [ids[i * length : (i + 1) * length] for i in range(count)]


@dataclass
class WatchedStep:
    """What a step was, and what it took."""

    num_rows: int
    prompt_rows: int
    num_emitted: int
    times: StepTimes
    read_at: float


@contextlib.contextmanager
def watch_steps(llm: LLM) -> Iterator[list[WatchedStep]]:
    """The steps that are read inside."""
    worker, steps = llm.engine.worker, []
    go_on = worker.go_on

    def go_on_watched(begun: Begun, masks: np.ndarray, grammars: Grammars | None = None) -> Launched:
        plan, launched = begun.plan, go_on(begun, masks, grammars)

        def read_watched() -> Results:
            results = launched.read()
            emitted = sum(len(outcome.token_ids) for outcome in results.outcomes)
            steps.append(WatchedStep(plan.num_rows, plan.prompt_rows, emitted, results.times, time.perf_counter()))
            return results

        return dataclasses.replace(launched, read=read_watched)

    worker.go_on = go_on_watched  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        worker.go_on = go_on  # type: ignore[method-assign]


def run(
    llm: LLM, requests: list[dict[str, list[int]]], params: SamplingParams | list[SamplingParams], strategy: str = "target_match"
) -> dict[str, float]:
    """Decodes requests together -> seconds of the device's steps, and tokens a second once all of them decode."""
    batch = len(requests)
    with watch_steps(llm) as steps:
        llm.generate(requests, params, speculative={"verify_strategy": strategy}, use_tqdm=False)
    full = [step for step in steps if step.num_rows == batch and not step.prompt_rows]
    if len(full) < 4:
        raise RuntimeError(f"{len(full)} steps had all of {batch} requests in them, too few to measure: give more --outputs")
    skip = min(8, len(full) // 4)
    wall, own = full[-1].read_at - full[skip - 1].read_at, full[skip:]
    emitted = sum(step.num_emitted for step in own)
    return {
        "step_ms": 1000 * statistics.median(step.times.total for step in own),
        "forward_ms": 1000 * statistics.median(step.times.forward for step in own),
        "decide_ms": 1000 * statistics.median(step.times.decide for step in own),
        "draft_ms": 1000 * statistics.median(step.times.draft for step in own),
        "wall_ms": 1000 * wall / len(own),
        "tokens_per_step": emitted / len(own) / batch,
        "tokens_per_s": emitted / wall,
        "idle": 1 - sum(step.times.total for step in own) / wall,
        "steps": len(full),
    }


def compare_bundled(outputs: int, repeats: int = 3) -> None:
    """The bundled model on the GPU, batch 1, prompts of real code, wall-clock: speculation against none."""
    prompts = completion_prompts(16)
    params = greedy(outputs)
    llm = LLM(device="cuda", speculative_config={"method": "mtp", "num_model_steps": 3, "num_speculative_tokens": 3, "adaptive": False})
    speeds: dict[str, list[float]] = {"none": [], "mtp": []}
    for repeat in range(repeats + 1):
        for method, own in speeds.items():
            started = time.perf_counter()
            results = [llm.generate([f"# {repeat}\n{p}"], params, speculative={"method": method}, use_tqdm=False)[0] for p in prompts]
            own.append(outputs * len(prompts) / (time.perf_counter() - started))
        stats = [r.outputs[0].stats for r in results]
    none, mtp = (statistics.median(own[1:]) for own in speeds.values())
    length = 1 + sum(s.accepted for s in stats) / sum(s.drafts for s in stats)
    print(f"bundled model, batch 1, real code: mtp {mtp:.0f} / none {none:.0f} tokens/s = {mtp / none:.2f}, {length:.2f} tokens a step")


def compare_cascade(target: Path, shared: int, batches: list[int], outputs: int = 64) -> None:
    """Steps of requests whose first `shared` tokens are the same: their keys read once (cascade attention) against once each."""
    print(f"| {shared} shared tokens, 64 more | batch | each by itself, ms | once, ms | ratio |")
    print("|---|---|---|---|---|")
    for method in ("none", "ngram"):
        speculation = {**METHODS[method], "adaptive": False, "accept_policy": "simulated"}
        llm = load_target(target, max(batches), shared + outputs + 128, speculation, cascade_attention=True)
        beginning, *ends = make_prompts(llm, 1, shared) + make_prompts(llm, max(batches), 64)
        llm.generate({"prompt_token_ids": beginning}, greedy(1), use_tqdm=False)
        heads = llm.engine.planner._cascade_heads
        for batch in batches:
            times = []
            for is_cascade in (False, True):
                llm.engine.planner._cascade_heads = heads if is_cascade else None
                requests = [{"prompt_token_ids": beginning + end} for end in ends[:batch]]
                times.append(run(llm, requests, greedy(outputs))["step_ms"])
            print(f"| {method} | {batch} | {times[0]:.3f} | {times[1]:.3f} | {times[0] / times[1]:.2f} |", flush=True)
        del llm
        gc.collect()
        torch.cuda.empty_cache()


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "target_match": ("target_match", {}),
    "target_match, logprobs 5": ("target_match", {"logprobs": 5}),
    "target_match, penalties": ("target_match", {"presence_penalty": 0.5}),
    "rejection": ("rejection", {}),
    "rejection, top_p 0.9": ("rejection", {"top_p": 0.9}),
    "topp": ("topp", {"top_p": 0.9}),
}


def compare_options(target: Path, batches: list[int], prompt: int, outputs: int) -> None:
    """Steps that verify 3 lookup drafts by each strategy, and with log-probabilities: as they are first asked for, and captured."""
    llm = load_target(target, max(batches), prompt + outputs + 32, {**METHODS["ngram3"], "adaptive": False}, enable_prefix_caching=False)
    print("| temperature 0.8 | batch | first, ms | longest of these | captured, ms | of target_match | tokens a step |")
    print("|---|---|---|---|---|---|---|")
    for batch in batches:
        requests = [{"prompt_token_ids": ids} for ids in make_prompts(llm, batch, prompt)]
        base = 0.0
        for name, (strategy, sampling) in ASKED.items():
            params = SamplingParams(max_tokens=outputs, temperature=0.8, seed=1, ignore_eos=True, **sampling)
            with watch_steps(llm) as steps:
                first = run(llm, requests, params, strategy)
            longest = 1000 * max(step.times.total for step in steps if not step.prompt_rows)
            while llm.engine._capture():
                pass
            row = run(llm, requests, params, strategy)
            base = base or row["step_ms"]
            figures = f"{row['step_ms']:.3f} | {row['step_ms'] / base:.2f} | {row['tokens_per_step']:.2f}"
            print(f"| {name} | {batch} | {first['step_ms']:.3f} | {longest:.3f} | {figures} |", flush=True)


FORMS = (
    {"regex": r"([a-z]{2,9} = [0-9]{1,4}\n){100}"},
    {
        "json": {
            "type": "array",
            "minItems": 100,
            "items": {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}},
        }
    },
)
"""That no answer comes to the end of."""


def compare_forms(target: Path, batches: list[int], prompt: int, outputs: int, repeats: int = 3) -> None:
    """Plain steps whose requests all follow a form, a regular expression or a JSON schema by turns, against free ones, in turns."""
    llm = load_target(target, max(batches), prompt + outputs + 32, {"method": "none"}, enable_prefix_caching=False)
    forms = [dataclasses.replace(greedy(outputs), structured_outputs=StructuredOutputs(**form)) for form in FORMS]
    print("| batch | free: step, wall, ms | with a form | wall over free |")
    print("|---|---|---|---|")
    for batch in batches:
        requests = [{"prompt_token_ids": ids} for ids in make_prompts(llm, batch, prompt)]
        asked = {"free": [greedy(outputs)] * batch, "form": [forms[i % len(forms)] for i in range(batch)]}
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in asked}
        for _ in range(repeats + 1):
            for name, params in asked.items():
                rows[name].append(run(llm, requests, params))
        medians = {
            name: [statistics.median(row[key] for row in own[1:]) for key in ("step_ms", "wall_ms")] for name, own in rows.items()
        }  # the first time compiles
        (step, wall), (form_step, form_wall) = medians["free"], medians["form"]
        print(f"| {batch} | {step:.3f}, {wall:.3f} | {form_step:.3f}, {form_wall:.3f} | {form_wall / wall:.3f} |", flush=True)
    llm.close()


def count_bytes(target: Path, arguments: argparse.Namespace, speculation: dict[str, Any], options: dict[str, Any], bandwidth: float) -> None:
    """Prints what plain steps of each batch have to read, in bytes and in ms, by the experts that their tokens take."""
    outputs = 16
    with counted_experts() as count:
        llm = load_target(target, max(arguments.batches), arguments.prompt + outputs + 32, {**speculation, "method": "none"}, **options)
        cached = llm.engine.worker.store.page_bytes / llm.engine.worker.store.page_size
        for batch in arguments.batches:
            requests = [{"prompt_token_ids": ids} for ids in make_prompts(llm, batch, arguments.prompt)]
            llm.generate(requests, greedy(outputs), use_tqdm=False)
            taken = count.take(batch)
            total = read_bytes(target, taken, cached * batch * (arguments.prompt + arguments.outputs / 2))
            experts = "" if taken is None else f"{taken:.1f} experts a layer, "
            print(f"batch {batch}: {experts}{total / 1e9:.2f} GB, {1000 * total / bandwidth:.3f} ms", flush=True)
        llm.close()
    del llm
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=["none", "ngram", "mtp"])
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS")
    parser.add_argument("--one-of", type=int, default=1, metavar="RANKS", help="one of so many ranks alone, on one GPU, with no exchange")
    parser.add_argument("--layers", type=int, help="of the shape, in place of its own")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--outputs", type=int, default=256)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--shared", type=int, metavar="TOKENS", help="compares cascade attention for requests that begin alike, and nothing else")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts are spread over the ranks")
    parser.add_argument("--quantization", help="of the target's weights")
    parser.add_argument("--draft-quantization", help="of the drafter's weights")
    parser.add_argument("--draft-tokens", type=int, metavar="N", help="of the target's that drafters score (draft_token_map)")
    parser.add_argument("--group", type=int, default=schemes.GROUP, help="inputs that share a scale in wint4 and w4a8: 128 as most checkpoints have")
    parser.add_argument("--experts", action="store_true", help="counts the experts that steps take, in a run of its own, and says what is to be read")
    parser.add_argument("--alike", action="store_true", help="all requests of a batch have the same prompt, and so take the same experts")
    parser.add_argument("--profile", action="store_true", help="prints the kernels of each row's steps, prompts with them, in a run of its own")
    parser.add_argument("--forms", action="store_true", help="compares answers that follow a form with free ones, and nothing else")
    parser.add_argument("--options", action="store_true", help="compares strategies of verification, and log-probabilities, and nothing else")
    arguments = parser.parse_args()
    if arguments.group != schemes.GROUP and arguments.tensor_parallel > 1:
        parser.error("--group is of this process: other ranks would round in their own groups")
    check_gpus(parser, arguments.tensor_parallel)
    schemes.GROUP = arguments.group
    copy, read = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, read {read / 1e12:.2f} TB/s")
    with tempfile.TemporaryDirectory() as folder:
        target = write_target(arguments.shape, Path(folder), **({"num_hidden_layers": arguments.layers} if arguments.layers else {}))
        if arguments.shared:
            compare_cascade(target, arguments.shared, arguments.batches)
            return
        if arguments.forms:
            compare_forms(target, arguments.batches, arguments.prompt, arguments.outputs)
            return
        if arguments.options:
            compare_options(target, arguments.batches, arguments.prompt, arguments.outputs)
            return
        print("| method | batch | step ms | forward, decide, draft | wall ms | tokens a step | tokens/s | device idle |")
        print("|---|---|---|---|---|---|---|---|")
        for method in arguments.methods:
            started, drafter = time.perf_counter(), write_drafter(method, target)
            speculation = {
                **METHODS[method],
                **({"model": str(drafter)} if drafter is not None else {}),
                "adaptive": False,
                "accept_policy": "simulated",
                "simulated_acceptance_rate": arguments.acceptance,
                **({"quantization": arguments.draft_quantization} if drafter is not None and arguments.draft_quantization else {}),
                **write_token_map(drafter, target, arguments.draft_tokens if method not in OWN_TOKENS else None),
            }
            length = arguments.prompt + arguments.outputs + 32
            options = {
                "enable_prefix_caching": False,
                "parallel_config": {"tensor_parallel_size": arguments.tensor_parallel, "expert_parallel": arguments.expert_parallel},
                "quantization": arguments.quantization,
            }
            if arguments.experts:
                count_bytes(target, arguments, speculation, options, copy)
            with one_rank_of(arguments.one_of):
                llm = load_target(target, max(arguments.batches), length, speculation, **options)
            loaded = time.perf_counter() - started
            for batch in arguments.batches:
                requests = [{"prompt_token_ids": ids} for ids in make_prompts(llm, batch, arguments.prompt, arguments.alike)]
                row = run(llm, requests, greedy(arguments.outputs))
                phases = ", ".join(f"{row[key]:.3f}" for key in ("forward_ms", "decide_ms", "draft_ms"))
                speed = f"{row['tokens_per_step']:.2f} | {row['tokens_per_s']:.0f} | {row['idle']:.1%}"
                print(f"| {method} | {batch} | {row['step_ms']:.3f} | {phases} | {row['wall_ms']:.3f} | {speed} |", flush=True)
                if arguments.profile:
                    with profiled():
                        run(llm, requests, greedy(arguments.outputs))
            free, total = torch.cuda.mem_get_info()
            print(f"({method}: ready after {loaded:.1f} s; {(total - free) / 2**30:.2f} GiB of {total / 2**30:.2f} taken)")
            llm.close()
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    if (arguments.shape, arguments.tensor_parallel, arguments.quantization) == ("llama-8b", 1, None):
        compare_bundled(arguments.outputs)


if __name__ == "__main__":
    main()
