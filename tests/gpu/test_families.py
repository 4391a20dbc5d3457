"""Every dense family on the GPU in float32, against transformers as on the CPU: heads as long as the kernels know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.families import check_greedy, check_logits, make_model
from tests.test_families import CASES

HEADS = {"head_dim": 64}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_tokens_are_those_of_transformers(case: Any, tmp_path: Path) -> None:
    case = replace(case, config=case.config | ({} if case.config.get("head_dim") == 256 else HEADS))
    if any(key in str(case.config) for key in ("short_factor", "partial_rotary_factor")):
        pytest.skip("its factors are as many as its own heads are long")
    if case.config.get("num_attention_heads") == 3:
        case = replace(case, config=case.config | {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40, "intermediate_size": 40})
    model = make_model(case, tmp_path)
    check_logits(model, tmp_path, "cuda", page_size=16)
    check_greedy(model, tmp_path, "cuda", page_size=16)
