"""Checkpoints in the formats that people have, as whole models on the GPU: a prompt, a token after it, and drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.families import VOCABULARY, Case, make_model, random_tokens
from tests.quantized import BLOCKS, FORMATS, GPTQ, MXFP4, Format, compressed, gptq, packed, scaled, write_checkpoints
from tests.steps import Row, Steps, make_worker
from tests.test_latents import DEEPSEEK
from tests.test_mixtures import QWEN2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": VOCABULARY + 1}
"""That the kernels know."""
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Of the logits' root mean square. Numbers of bfloat16 are 0.004 of each apart, and a layer rounds some ten times; a wrong row of the 39 would make
0.2."""
PROMPT, DRAFTS = 33, 5
MIXED: list[tuple[Case, Format]] = [
    (Case("deepseek_v3", config=DEEPSEEK | {"q_lora_rank": 16}), Format("blocks", BLOCKS, scaled(strategy="block", name="weight_scale_inv"))),
    (Case("qwen2_moe", config=QWEN2 | SIZES | EXPERTS), Format("int4", compressed("pack-quantized", strategy="group", group_size=32), packed())),
    (Case("phi3", config=SIZES), Format("fused", GPTQ | {"desc_act": True}, gptq(has_order=True))),
    (Case("llama", config=SIZES), MXFP4),
]


def logits_of(folder: Path, device: str, dtype: str) -> torch.Tensor:
    """[39, V] float32, of each kind of step."""
    memory = "4MiB" if device == "cpu" else "64MiB"
    steps = Steps(make_worker(folder, device=device, dtype=dtype, page_size=16, kv_cache_memory=memory))
    token_ids, found = random_tokens(PROMPT + 1 + DRAFTS), []
    steps.admit(0, token_ids, range(4))
    for begin, count in ((0, PROMPT), (PROMPT, 1), (PROMPT + 1, DRAFTS)):
        steps.run([Row(0, begin, count, is_end=begin + count == len(token_ids))])
        found.append(steps.logits().float().cpu())
    return torch.cat(found)


def tame(form: Format) -> Format:
    """Weights of 8 bits with the scales of those of 4 are so large that a rounding decides what attention looks at."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors, made = form.write(weight, generator)
        if "scales" in tensors and made.std() > 1:
            tensors["scales"], made = tensors["scales"] / 16, made / 16
        return tensors, made

    return form if form.is_by_name else replace(form, write=write)


def check(source: Path, form: Format, folder: Path) -> None:
    stored, plain = write_checkpoints(source, tame(form), folder)
    expected = logits_of(plain, "cpu", "float32")
    for dtype, tolerance in TOLERANCES.items():
        difference = ((logits_of(stored, "cuda", dtype) - expected).norm() / expected.norm()).item()
        assert difference <= tolerance, f"{dtype}: relative difference {difference:.2g}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(Case("llama", config=SIZES), folder)
    return folder


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_numbers_are_those_of_the_format(source: Path, tmp_path: Path, form: Format) -> None:
    check(source, form, tmp_path)


@pytest.mark.parametrize(("case", "form"), MIXED, ids=str)
def test_experts_latents_and_fused_projections(tmp_path: Path, case: Case, form: Format) -> None:
    make_model(case, tmp_path / "source")
    check(tmp_path / "source", form, tmp_path)
