"""Token masks against their twin, and the engine with them: eager, captured, and with steps under way."""

from __future__ import annotations

import random

import pytest
import torch

from backend import LLM, SamplingParams
from kernels.ops import mask_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("requests", "vocab_size"), [(1, 31), (3, 4096), (40, 50_257), (256, 1000)])
def test_masks(requests: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    for _ in range(4):
        counts = [random.randint(0, 6) for _ in range(requests)]
        starts, num_masks = [], 0
        for count in counts:
            starts.append(num_masks if random.random() < 0.6 else -1)
            num_masks += count if starts[-1] >= 0 else 0
        cu = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        masks = torch.randint(-(2**31), 2**31 - 1, (num_masks + 2, -(-vocab_size // 32)), dtype=torch.int32)
        logits = torch.randn(sum(counts) + 3, vocab_size).to(dtype)  # rows of padding come last
        here = logits.to(device)
        mask_logits(here, masks.to(device), torch.tensor(starts, dtype=torch.int32, device=device), cu.to(device))
        mask_logits(logits, masks, torch.tensor(starts, dtype=torch.int32), cu)
        assert torch.equal(here.cpu(), logits)


def test_answers_have_their_form_and_are_those_of_plain_decoding() -> None:
    """Free requests beside them, so that their steps alternate with the others'; twice, since the second time steps are captured."""
    pytest.importorskip("llguidance")
    forms = [{"regex": r"def [a-z_]{3,10}\(self\):\n    return [0-9]{1,4}"}, {"choice": ["self.width", "self.height"]}, None]
    own = LLM(dtype="float32", speculative_config={"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}, max_batch_size=16)
    asked = [SamplingParams(max_tokens=48, temperature=0.7 * (i % 2), seed=i, structured_outputs=forms[i % 3]) for i in range(12)]
    prompts = [f"class Box{i}:\n    def area(self):\n        return " for i in range(12)]
    expected = None
    for choice in (
        {"method": "none"},
        {"method": "mtp"},
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "mtp", "verify_strategy": "rejection"},
    ):
        for _ in range(2):
            outputs = [r.outputs[0] for r in own.generate(prompts, asked, speculative=choice, use_tqdm=False)]
            for index, output in enumerate(outputs):
                if forms[index % 3] == forms[1]:
                    assert output.text in ("self.width", "self.height")
            if "verify_strategy" not in choice:
                expected = expected or [o.token_ids for o in outputs]
                assert [o.token_ids for o in outputs] == expected
            while own.engine.worker.capture_waiting():
                pass
    own.close()
