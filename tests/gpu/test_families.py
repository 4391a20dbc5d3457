"""Every family on the GPU in float32, against transformers as on the CPU: with their own small heads, which torch's operations attend with, and with
heads as long as the kernels know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backend.errors import ModelError
from backend.model_checks import check_model
from backend.models.loading import check_gpu
from tests.families import Case, check_greedy, check_logits, make_model
from tests.test_families import ALL_CASES, CASES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ODD_SIZES = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40, "intermediate_size": 40}
"""In place of sizes that 16 bytes do not divide."""


def fit(case: Case) -> Case:
    return replace(case, config=case.config | ODD_SIZES) if case.config.get("num_attention_heads") == 3 else case


LONG_HEADS = [
    replace(fit(case), name=f"{case.name}, heads of 64", config=fit(case).config | {"head_dim": 64})
    for case in CASES
    if case.config.get("head_dim") != 256 and not any(key in str(case.config) for key in ("short_factor", "partial_rotary_factor"))
]
"""But those whose factors are as many as their own heads are long."""


@pytest.mark.parametrize("case", [*map(fit, ALL_CASES), *LONG_HEADS], ids=str)
def test_logits_and_tokens_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    model = make_model(case, tmp_path)
    try:
        check_gpu(check_model(tmp_path), torch.float32)
    except ModelError as error:  # sizes that 16 bytes do not divide
        pytest.skip(str(error))
    check_logits(model, tmp_path, "cuda", page_size=16)
    check_greedy(model, tmp_path, "cuda", page_size=16)
