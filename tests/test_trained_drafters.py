"""Drafters of every kind compute in training what the server computes, and are accepted once they are trained: where training and serving
disagree on a tap or a norm, nothing but the acceptance says so."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from backend import LLM
from backend.drafter_checks import check_drafter_folder
from backend.drafters.block import BlockDrafter
from backend.model_checks import check_model
from backend.models.rope import frequencies
from backend.models.rope_spec import read_rope
from backend.models.values import Values
from backend.sampling_params import SamplingParams
from tests.drafting import check_drafts, serve
from tests.families import CONTEXT, Case, make_model, rope
from tests.test_families import LAYER_TYPES, LONG, NESTED, SHORT
from tests.test_mixtures import GLM
from training import command
from training.drafters import KINDS, Drafter, Options
from training.target import Target

CPU = torch.device("cpu")
KINDS_OF_DRAFTERS: dict[str, tuple[str, dict[str, Any], Case]] = {
    "mtp": ("mtp", {"inner": 40}, Case("llama")),
    "mtp, two layers, on Qwen 3": ("mtp", {"layers": 2}, Case("qwen3")),
    "mtp, on GLM-4.5": ("mtp", {"inner": 40}, Case("glm4_moe", config=GLM)),
    "eagle3": ("eagle3", {}, Case("llama", config={"num_hidden_layers": 5})),
    "eagle3, few tokens, other taps, on Gemma 2": ("eagle3", {"taps": (1, 2), "few": True, "inner": 40}, Case("gemma2", config={"head_dim": 16})),
    "dflash": ("dflash", {"layers": 2, "taps": (0, 2), "mask_token_id": 7, "inner": 40}, Case("llama", config={"tie_word_embeddings": True})),
    "dflash, on Gemma 2": ("dflash", {"taps": (1, 2)}, Case("gemma2", config={"head_dim": 16})),
    "dflash, on Phi-4 mini": ("dflash", {"taps": (1, 2), "inner": 40}, Case("phi3", config={"partial_rotary_factor": 0.5})),
    "dspark": ("dspark", {"layers": 2, "markov_rank": 6}, Case("qwen3", config={"num_hidden_layers": 5})),
    "dspark, gated": ("dspark", {"markov_rank": 6, "markov_head_type": "gated", "taps": (1,)}, Case("llama")),
    "dspark, rnn": ("dspark", {"markov_rank": 6, "markov_head_type": "rnn", "taps": (1, 2)}, Case("llama")),
    "medusa": ("medusa", {"layers": 2}, Case("llama")),
    "hydra": ("hydra", {"layers": 2}, Case("llama", config={"tie_word_embeddings": True})),
    "mlp_speculator": ("mlp_speculator", {"inner": 24}, Case("llama")),
}


def make_drafter(target: Target, method: str, options: dict[str, Any]) -> Drafter:
    """One in which every weight matters, rounded as its file will be."""
    few = torch.arange(3, target.vocab_size, 4) if options.get("few") else None
    own = {key: value for key, value in options.items() if key != "few"}
    torch.manual_seed(1)
    drafter = KINDS[method](target, Options(drafts=4, draft_ids=few, **own)).requires_grad_(False)
    heads = {id(p) for p in drafter.vocabulary_heads()}
    for name, weight in drafter.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
        elif id(weight) in heads or not weight.any():
            weight.normal_(0, 0.2)
        weight.copy_(weight.bfloat16().float())
    return drafter


def watch_chances(llm: LLM) -> list[float]:
    """What a confidence head says of drafts, as it says it."""
    own, seen = llm.engine.worker.drafter, list[float]()
    assert isinstance(own, BlockDrafter)
    judge = own.judge

    def watched(states: list[torch.Tensor], step: int) -> torch.Tensor | None:
        chances = judge(states, step)
        assert chances is not None
        seen.extend(chances.tolist())
        return chances

    own.judge = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", KINDS_OF_DRAFTERS)
def test_the_server_drafts_what_training_would(name: str, tmp_path: Path) -> None:
    method, options, case = KINDS_OF_DRAFTERS[name]
    folder, out = tmp_path / "target", tmp_path / "drafter"
    make_model(case, folder)
    target = Target(folder, torch.float32, CPU)
    drafter = make_drafter(target, method, options)
    drafter.save(target, out, torch.bfloat16)
    check_drafter_folder(method, out, folder)

    is_block, chances = drafter.rows_before_drafts is not None, list[list[float]]()

    @torch.no_grad()
    def draft(token_ids: list[int], count: int) -> list[torch.Tensor]:
        ids, found = list(token_ids), []
        chances.append([])
        for step in range(count):
            # A block is whole, whatever its tokens are: none is seen before its draft.
            states = target.states(torch.tensor([[*ids, *[1] * (4 - step if is_block else 0)]]), drafter.layers)
            if is_block:
                states.anchors = torch.tensor([[2, len(token_ids) - 1]])
            for state in (states.hidden, *states.entering.values()):
                state[:, len(token_ids) - 1 :] = 5.0  # the target has not computed these
            rows = drafter(target, states)[step]
            logits = drafter.score(target, step, rows[0, -1:])[0]
            if (judged := drafter.judge(rows[0, -1:])) is not None:
                chances[-1].append(judged.sigmoid().item())
            if drafter.draft_ids is not None:
                logits = torch.full((target.vocab_size,), float("-inf")).index_copy(0, drafter.draft_ids, logits)
            found.append(logits)
            ids.append(int(logits.argmax()))
        return found

    for policy in ("reject_all", "accept_all"):
        least = {"min_draft_confidence": 1e-9} if method == "dspark" else {}
        llm = serve(folder, method=method, model=str(out), num_model_steps=4, accept_policy=policy, **least)
        judged = watch_chances(llm) if least else []
        chances.clear()
        check_drafts(llm, draft, policy)
        for step, row in enumerate(chances if least else []):
            torch.testing.assert_close(torch.tensor(judged[4 * step :][: len(row)]), torch.tensor(row), rtol=0, atol=1e-5)


OLDER = {"rope_theta": 1000.0, "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG}, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("case", "values"),
    [
        (Case("phi3", "longrope by its older name"), OLDER),
        (Case("llama", "llama3", rope("llama3", factor=8.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_position_embeddings=32)), {}),
        (Case("llama", "yarn", rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.2, original_max_position_embeddings=32, truncate=False)), {}),
        (Case("llama", "a context beside it", rope("yarn", factor=4.0, attention_factor=1.3)), {"original_max_position_embeddings": 32}),
        (Case("gemma3_text", "layers that differ", {"layer_types": LAYER_TYPES[::-1], "rope_parameters": NESTED, "head_dim": 16}), {}),
    ],
    ids=lambda own: str(own) if isinstance(own, Case) else "",
)
def test_a_drafters_heads_turn_as_the_targets(case: Case, values: dict[str, Any], tmp_path: Path) -> None:
    """Whatever its file calls it, and wherever it has it: the drafter's file says the same; of LongRoPE's factors those that it is trained with,
    for a server of short contexts has its target by the others."""
    make_model(case, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "rope_parameters" or "rope_scaling" not in values}))
    own, size, _ = check_model(tmp_path).layers[0].attention.turning
    found = read_rope(Values(Target(tmp_path, torch.float32, CPU).drafter_config(), "config.json"), size)
    assert found == dataclasses.replace(own, short_factor=own.long_factor)
    assert frequencies(found, 8)[0].equal(frequencies(own, CONTEXT)[0]) and frequencies(found, CONTEXT)[0].equal(frequencies(own, CONTEXT)[0])


# -- trained until they are accepted --------------------------------------------------------------------------------------------

WORDS, LENGTH, TARGET_STEPS = 6, 32, 160


def make_text(count: int, seed: int) -> torch.Tensor:
    """Sequences [count, LENGTH] in which the last two words say the next one, and the last one alone says nothing: a drafter that sees a token
    and the state before it needs both."""
    tables = torch.stack([torch.randperm(WORDS, generator=torch.Generator().manual_seed(word)) for word in range(WORDS)])
    rows = list(torch.randint(WORDS, (2, count), generator=torch.Generator().manual_seed(seed)))
    while len(rows) < LENGTH:
        rows.append(tables[rows[-1], rows[-2]])
    return torch.stack(rows, dim=1)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that has learned the rule, and text that follows it."""
    folder = tmp_path_factory.mktemp("learned")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, **sizes)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(TARGET_STEPS):
        ids = make_text(16, seed=step)
        loss = model(ids, labels=ids).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - step / TARGET_STEPS)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(WORDS)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    make_text(96, seed=1000).numpy().astype("<u2").tofile(folder / "text.u16")
    return folder, folder / "text.u16"


@pytest.fixture(autouse=True)
def keep_precision() -> Iterator[None]:
    """Training sets it for the process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def measure(folder: Path, drafter: Path, method: str, shift: int = 0) -> float:
    """Accepted drafts a step of three; shift: rows that the tap is wrong by."""
    llm = serve(folder, method=method, model=str(drafter), num_speculative_tokens=3, num_model_steps=3)
    own = llm.engine.worker.drafter
    assert own is not None
    if shift and isinstance(own, BlockDrafter):
        keep = own.keep
        own.keep = lambda entering, *to: keep({k: v.roll(shift, 0) for k, v in entering.items()}, *to)  # type: ignore[method-assign]
    elif shift:
        tap = own.tap
        own.tap = lambda hidden, entering: tap(hidden.roll(shift, 0), {k: v.roll(shift, 0) for k, v in entering.items()})  # type: ignore[method-assign]
    return accepted(llm)


def accepted(llm: LLM) -> float:
    """By prompts that the drafter has not seen."""
    prompts = [{"prompt_token_ids": row[:8].tolist()} for row in make_text(6, seed=2000)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    stats = [result.outputs[0].stats for result in llm.generate(prompts, params, use_tqdm=False)]
    llm.close()
    return sum(s.accepted for s in stats) / sum(s.steps for s in stats)


BLOCKS = ["--layers", "2", "--num-anchors", "24", "--mask-token-id", "1"]
EXTRA = {
    "eagle3": ["--taps", "1,2,3", "--drafts", "3"],
    "dflash": ["--block-size", "4", "--taps", "2,4", *BLOCKS],
    "dspark": ["--block-size", "3", "--markov-rank", "8", "--taps", "2", *BLOCKS],
}
SEEDS = {"dspark": (0, 1, 2)}
"""Of which the mean counts. dspark's Markov head makes up for layers that resemble their neighbours: of two taps the share that others left went from
0.5 to 0.8 with the seed and the processor's rounding, of this one from 0.4 to 0.6."""
OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "eagle3": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
    "dflash": {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]}},
    "dspark": {"target_layer_ids": [0]},
}
"""Taps off by one."""
STEPS = {"medusa": 200, "hydra": 120, "mlp_speculator": 100, "eagle3": 35}
"""Short ones: no attention, and no layers to learn. EAGLE-3's learns by and by to make do with other layers' states than its own."""


@pytest.mark.parametrize("method", list(KINDS))
def test_a_trained_drafter_is_accepted_and_a_shifted_tap_is_not(method: str, learned: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = learned
    each = [measure_trained(method, folder, text, tmp_path / str(seed), seed) for seed in SEEDS.get(method, (0,))]
    found = {name: statistics.fmean(own[name] for own in each) for name in each[0]}
    best = found.pop("trained")
    assert best > 0.8, (best, found)
    assert max(found.values()) < 0.6 * best, (best, found)


def measure_trained(method: str, folder: Path, text: Path, out: Path, seed: int) -> dict[str, float]:
    """What is accepted of a drafter that was trained, of one that was not, and of the first one with taps that are wrong."""
    out.mkdir()
    found = {}
    for name, steps in (("untrained", 1), ("trained", STEPS.get(method, 50))):
        options = ["--steps", str(steps), "--batch-size", "8", "--context", str(LENGTH), "--device", "cpu", "--report-prompts", "0"]
        options += ["--lr", "0.02", "--seed", str(seed), *EXTRA.get(method, ["--drafts", "3"])]
        assert command.main([method, "--model", str(folder), "--data", str(text), "--out", str(out / name), *options]) == 0
        found[name] = measure(folder, out / name, method)
    found["a position on"] = measure(folder, out / "trained", method, shift=1)
    if method in OTHER_LAYERS:
        config = json.loads((out / "trained" / "config.json").read_text())
        (out / "trained" / "config.json").write_text(json.dumps(config | OTHER_LAYERS[method]))
        found["a layer off"] = measure(folder, out / "trained", method)
    return found
