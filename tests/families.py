"""Tiny random models of a family, and what is held against transformers in float32 of each."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from backend import LLM
from backend.config import BUNDLED_MODEL
from backend.errors import ModelError
from backend.models import load_model
from backend.parallel.ranks import Ranks
from backend.sampling_params import SamplingParams
from tests.steps import Row, Steps, make_worker

TOLERANCE = 1e-4
"""Of the largest logit."""
PROMPT, ALONE, DRAFTED, VOCABULARY = 45, 20, 12, 301
CONTEXT = 128
MEMORY = {"cpu": "4MiB", "cuda": "64MiB"}
"""Of pages; a GPU's are twice as long."""


@dataclass(frozen=True)
class Case:
    """A configuration of a family: transformers' config class is that of the model_type."""

    family: str
    name: str = "plain"
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}, {self.name}"


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0} | values}


def make_model(case: Case, folder: Path) -> Any:
    """Saves a tiny model in which every weight matters: transformers starts biases at zero and norms at one."""
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 if case.config.get("num_key_value_heads") == 1 else 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "attn_implementation": "eager",
        **case.config,
    }
    if "head_dim" not in values:
        values["hidden_size"] = 64  # heads of 16
    elif values["num_attention_heads"] == 3:
        values["hidden_size"] = 33
    config = transformers.AutoConfig.for_model(case.family, **values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(-0.4, 0.4) if "gemma" in case.family else weight.uniform_(0.6, 1.4)
            elif name.endswith("bias"):
                weight.normal_(0, 0.3)
            else:
                weight.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # as large as what tells experts apart
                buffer.normal_(0, 0.2)
    model.save_pretrained(folder)
    put_tokenizer(folder, config.vocab_size)
    return model


def put_tokenizer(folder: Path, vocab_size: int) -> None:
    """The bundled model's, of its first tokens alone: one token more than the model has is an error."""
    values = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    own = values["model"]
    own["vocab"] = {token: i for token, i in own["vocab"].items() if i < vocab_size}
    own["merges"] = [pair for pair in own["merges"] if {*pair, "".join(pair)} <= own["vocab"].keys()]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    shutil.copy(BUNDLED_MODEL / "tokenizer_config.json", folder)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(1, VOCABULARY) for _ in range(count)]


@torch.inference_mode()
def expected_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """At every token, in one pass, without a cache."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


def assert_close(own: torch.Tensor, expected: torch.Tensor) -> None:
    assert own.shape == expected.shape
    assert expected.std() > 0.1, "logits this flat would agree with anything"
    difference = ((own - expected).abs().max() / expected.abs().max()).item()
    assert difference <= TOLERANCE, f"relative difference {difference:.2g}"


def check_logits(model: Any, folder: Path, device: str = "cpu", page_size: int = 8, alone: int = ALONE) -> None:
    """Of a prompt, and of tokens after it: so many one by one, and more as drafts. Of the same in chunks, and after another request's pages."""
    end = PROMPT + alone
    steps = Steps(make_worker(folder, device=device, page_size=page_size, kv_cache_memory=MEMORY[device]))
    token_ids = random_tokens(end + DRAFTED)
    expected = expected_logits(model, token_ids)
    pages = random.Random(1).sample(range(steps.worker.store.num_pages), 28)
    steps.admit(0, token_ids[:PROMPT], pages[:10])
    steps.run([Row(0, 0, PROMPT)])
    assert_close(steps.logits(), expected[:PROMPT])
    # Known tokens one by one, in chunks that other rows' lengths differ from; then drafts.
    steps.admit(1, token_ids, pages[10:26])
    steps.run([Row(1, 0, 13, is_end=False)])
    assert_close(steps.logits(), expected[:13])
    steps.run([Row(1, 13, 33, is_end=False)])
    assert_close(steps.logits(), expected[13:46])
    for place in range(46, end):
        steps.run([Row(1, place, 1, is_end=False)])
        assert_close(steps.logits(), expected[place : place + 1])
    cached = pages[10 : 10 + 64 // page_size]
    steps.admit(2, token_ids[:65], cached + pages[26:28])  # a prefix hit: 64 tokens of request 1
    steps.run([Row(1, end, DRAFTED), Row(2, 64, 1)])
    assert_close(steps.logits(), torch.cat([expected[end:], expected[64:65]]))
    steps.run([Row(2, drafts=token_ids[65:72])])
    # The newest token is the model's own choice: the drafts follow that one.
    chosen = int(expected[64].argmax())
    assert_close(steps.logits(), expected_logits(model, [*token_ids[:65], chosen, *token_ids[65:72]])[65:])


def check_greedy(model: Any, folder: Path, device: str = "cpu", page_size: int = 8) -> None:
    """Through the whole engine, with and without drafts, and again from the prefix cache."""
    prompts = [random_tokens(40, 3), (random_tokens(9, 4) * 5)[:41]]
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    answers = {}
    for method in ("none", "ngram"):
        config = {"method": method, "num_speculative_tokens": 4} if method == "ngram" else {"method": method}
        llm = LLM(
            str(folder),
            dtype="float32",
            device=device,
            kv_cache_memory="4MiB" if device == "cpu" else "64MiB",
            page_size=page_size,
            speculative_config=config,
        )
        for turn in ("first", "again"):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            answers[method, turn] = [output.outputs[0].token_ids for output in outputs]
    for prompt, own in zip(prompts, answers["none", "first"]):
        scores = expected_logits(model, [*prompt, *own])[len(prompt) - 1 : -1]
        assert own == scores.argmax(dim=-1).tolist()
    assert all(answer == answers["none", "first"] for answer in answers.values())


def check_case(case: Case, model: Any, folder: Path, cases: Sequence[Case]) -> None:
    """Logits of each; of each family the first's for 64 steps, and its answers, which take longer."""
    is_first = case is next(first for first in cases if first.family == case.family)
    check_logits(model, folder, alone=64 if is_first else ALONE)
    if is_first:
        check_greedy(model, folder)


def edited(folder: Path, target: Path, **values: Any) -> Path:
    """A copy whose config.json has these values; `...` takes a key away."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((target / "config.json").read_text()) | values
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return target


def load(folder: Path, ranks: Ranks | None = None, **options: Any) -> Any:
    return load_model(folder, torch.float32, torch.device("cpu"), ranks or Ranks(), **options)


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
