"""Drafters of every kind compute in training what the server computes, and are accepted once they are trained: where training and serving
disagree on a tap or a norm, nothing but the acceptance says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from backend import LLM
from backend.drafter_checks import check_drafter_folder
from backend.sampling_params import SamplingParams
from tests.drafting import check_drafts, serve
from tests.families import Case, make_model
from training import command
from training.drafters import KINDS, Drafter, Options
from training.target import Target

CPU = torch.device("cpu")
KINDS_OF_DRAFTERS: dict[str, tuple[str, dict[str, Any], Case]] = {
    "mtp": ("mtp", {"inner": 40}, Case("llama")),
    "mtp, two layers, on Qwen 3": ("mtp", {"layers": 2}, Case("qwen3")),
    "eagle3": ("eagle3", {}, Case("llama", config={"num_hidden_layers": 5})),
    "eagle3, few tokens, other taps, on Gemma 2": ("eagle3", {"taps": (1, 2), "few": True, "inner": 40}, Case("gemma2", config={"head_dim": 16})),
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


@pytest.mark.parametrize("name", KINDS_OF_DRAFTERS)
def test_the_server_drafts_what_training_would(name: str, tmp_path: Path) -> None:
    method, options, case = KINDS_OF_DRAFTERS[name]
    folder, out = tmp_path / "target", tmp_path / "drafter"
    make_model(case, folder)
    target = Target(folder, torch.float32, CPU)
    drafter = make_drafter(target, method, options)
    drafter.save(target, out, torch.bfloat16)
    check_drafter_folder(method, out, folder)

    @torch.no_grad()
    def draft(token_ids: list[int], count: int) -> list[torch.Tensor]:
        ids, found = list(token_ids), []
        for step in range(count):
            states = target.states(torch.tensor([ids]), drafter.layers)
            for state in (states.hidden, *states.entering.values()):
                state[:, len(token_ids) - 1 :] = 5.0  # the target has not computed these
            rows = drafter(target, states)[step]
            logits = drafter.score(target, step, rows[0, -1:])[0]
            if drafter.draft_ids is not None:
                logits = torch.full((target.vocab_size,), float("-inf")).index_copy(0, drafter.draft_ids, logits)
            found.append(logits)
            ids.append(int(logits.argmax()))
        return found

    for policy in ("reject_all", "accept_all"):
        llm = serve(folder, method=method, model=str(out), num_model_steps=4, accept_policy=policy)
        check_drafts(llm, draft, policy)


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
    config = LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config)
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
    tap = own.tap
    if shift:
        own.tap = lambda hidden, entering: tap(hidden.roll(shift, 0), {k: v.roll(shift, 0) for k, v in entering.items()})  # type: ignore[method-assign]
    return accepted(llm)


def accepted(llm: LLM) -> float:
    """By prompts that the drafter has not seen."""
    prompts = [{"prompt_token_ids": row[:8].tolist()} for row in make_text(6, seed=2000)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    stats = [result.outputs[0].stats for result in llm.generate(prompts, params, use_tqdm=False)]
    llm.close()
    return sum(s.accepted for s in stats) / sum(s.steps for s in stats)


EXTRA = {"eagle3": ["--taps", "1,2,3"]}
STEPS = {"medusa": 200, "hydra": 120, "mlp_speculator": 100, "eagle3": 35}
"""Short ones: no attention, and no layers to learn. EAGLE-3's learns by and by to make do with other layers' states than its own."""


@pytest.mark.parametrize("method", list(KINDS))
def test_a_trained_drafter_is_accepted_and_a_shifted_tap_is_not(method: str, learned: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = learned
    found = {}
    for name, steps in (("untrained", 1), ("trained", STEPS.get(method, 50))):
        out = tmp_path / name
        options = ["--steps", str(steps), "--batch-size", "8", "--context", str(LENGTH), "--drafts", "3", "--device", "cpu", "--report-prompts", "0"]
        options += ["--lr", "0.02", *EXTRA.get(method, [])]
        assert command.main([method, "--model", str(folder), "--data", str(text), "--out", str(out), *options]) == 0
        found[name] = measure(folder, out, method)
    found["a position on"] = measure(folder, tmp_path / "trained", method, shift=1)
    if method == "eagle3":
        config = json.loads((tmp_path / "trained" / "config.json").read_text())
        config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]
        (tmp_path / "trained" / "config.json").write_text(json.dumps(config))
        found["a layer on"] = measure(folder, tmp_path / "trained", method)
    best = found.pop("trained")
    assert best > 0.8, (best, found)
    assert max(found.values()) < 0.6 * best, (best, found)
