"""The bundled model keeps its promises: size, shape, the same to transformers, good at code it has never seen."""

from __future__ import annotations

import ast
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from backend import LLM
from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, DEFAULT_DRAFTER
from tests.conftest import EVERY_METHOD, code_prompts, greedy
from tests.steps import Row, Steps, make_worker
from training.evaluate import file_bits
from training.heldout import read_heldout


@pytest.fixture(scope="module")
def hf_model():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm_ngram() -> LLM:
    return LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 4, "adaptive": False})


@pytest.fixture(scope="module")
def llm_all() -> LLM:
    return LLM(speculative_config=EVERY_METHOD)


def test_size_and_shape():
    files = [BUNDLED_MODEL / n for n in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")]
    assert sum(f.stat().st_size for f in files) <= 20 * 2**20
    weights = load_file(BUNDLED_MODEL / "model.safetensors")
    total = sum(w.numel() for w in weights.values())
    assert {w.dtype for w in weights.values()} == {torch.bfloat16} and total <= 10_000_000
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    assert config["num_hidden_layers"] >= 16 and config["max_position_embeddings"] == 2048 and config["vocab_size"] == 4096
    # What one more layer and the head would cost of a step, in weights read: a drafter must be cheap.
    layer = sum(w.numel() for name, w in weights.items() if ".layers.0." in name)
    assert (layer + 4096 * config["hidden_size"]) / total <= 0.15


def test_transformers_gives_the_same_logits_and_tokens(llm_ngram, hf_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    steps = Steps(make_worker(BUNDLED_MODEL, page_size=16, kv_cache_memory="64MiB"))
    for prompt in code_prompts(4, lengths=(400, 2000), seed=5):
        ids = llm_ngram.engine.tokenizer.encode(prompt)
        assert tokenizer(prompt)["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == prompt
        steps.admit(0, ids, range(-(-len(ids) // 16)))
        steps.run([Row(0, 0, len(ids))])
        with torch.inference_mode():
            theirs = hf_model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(steps.logits(), theirs, atol=1e-4, rtol=0)


def test_greedy_tokens_are_those_of_transformers(llm_all, hf_model):
    prompts = [llm_all.engine.tokenizer.encode(prompt) for prompt in code_prompts(3, lengths=(60, 300), seed=6)]
    theirs = [
        hf_model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=None)[0, len(ids) :].tolist() for ids in prompts
    ]
    for method in ("none", "ngram", "suffix", "mtp"):
        made = llm_all.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(32), speculative={"method": method}, use_tqdm=False)
        assert [result.outputs[0].token_ids for result in made] == theirs, method


def test_the_chat_template_is_the_same_to_transformers(llm_ngram):
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "read a file\nby lines"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "again"}]
    theirs = AutoTokenizer.from_pretrained(BUNDLED_MODEL).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert llm_ngram.engine.tokenizer.render_chat(messages) == theirs


def test_bits_per_byte_on_held_out_files(llm_ngram, hf_model):
    texts = sorted(read_heldout().values(), key=len)[:5]
    bits = sum(file_bits(lambda ids: hf_model(ids).logits, llm_ngram.engine.tokenizer.encode(text)) for text in texts)
    assert bits / sum(len(t.encode()) for t in texts) <= 1.25


def test_completions_look_like_python(llm_ngram):
    heads = [
        "import os\n\n\ndef read_lines(path):",
        "class Queue:\n    def __init__(self):",
        "def is_even(number):",
        "import json\n\n\ndef load(path):",
        "def test_add():",
        "class Error(Exception):",
        "import logging\n\nlogger =",
        "def main():",
    ]
    parsed = 0
    for result in llm_ngram.generate(heads, greedy(80), use_tqdm=False):
        lines = (result.prompt + result.outputs[0].text).split("\n")
        while len(lines) > 2 + result.prompt.count("\n"):
            try:
                ast.parse("\n".join(lines))
                parsed += 1
                break
            except SyntaxError:
                lines.pop()  # the last statement is cut off by the length
    assert parsed >= len(heads) - 1


@pytest.mark.parametrize(
    "name", ["README.md", "loss_curve.svg", "loss_curve.jsonl", "mtp_loss_curve.jsonl", "eagle3_loss_curve.jsonl", "packages.txt"]
)
def test_the_card_is_there(root, name):
    assert (root / "training" / name).stat().st_size > 500


def test_cross_entropy_of_the_card(llm_ngram, hf_model):
    """The loss that the card's curve ends with is that of this file: a wrong or stale weight file would not be near it."""
    losses = []
    for prompt in code_prompts(5, lengths=(1500, 3000), seed=8):
        ids = torch.tensor([llm_ngram.engine.tokenizer.encode(prompt)])
        with torch.inference_mode():
            losses.append(F.cross_entropy(hf_model(ids[:, :-1]).logits[0], ids[0, 1:]).item())
    assert 1.0 < sum(losses) / len(losses) < 2.4


@pytest.mark.parametrize("folder", [BUNDLED_DRAFTER, DEFAULT_DRAFTER], ids=["mtp", "eagle3"])
def test_the_drafters_are_small(folder):
    assert (folder / "model.safetensors").stat().st_size <= 6 * 2**20


def judge_drafts(llm: LLM) -> tuple[float, float]:
    """How many first drafts stand, and tokens a step: greedy, three drafts, after code of the standard library that no model has seen (the cards'
    figures are of more, and longer, answers)."""
    outputs = [r.outputs[0] for r in llm.generate(code_prompts(32, (200, 1600), seed=11), greedy(160), use_tqdm=False)]
    drafts = sum(o.stats.drafts for o in outputs)
    return sum(o.stats.accepted_per_position[0] for o in outputs) / drafts, 1 + sum(o.stats.accepted for o in outputs) / drafts


def test_the_drafters_are_as_good_as_their_cards_say(llm_all):
    first, length = judge_drafts(llm_all)
    assert first >= 0.75 and length >= 2.6, (first, length)
    own = {"method": "eagle3", "model": str(DEFAULT_DRAFTER), "num_model_steps": 3, "num_speculative_tokens": 3, "adaptive": False}
    better, longer = judge_drafts(LLM(speculative_config=own))
    assert better > first + 0.02 and longer > length + 0.05, "the default's is the better one"
