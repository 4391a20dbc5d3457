"""Forwards with prompts, captured in pieces: the same states as launched kernel by kernel, whatever ran between."""

from __future__ import annotations

import pytest
import torch

from backend import LLM, SamplingParams
from tests.conftest import code_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SPECULATION = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}


@pytest.mark.parametrize("method", ["mtp", "none"])
def test_answers_are_those_of_forwards_that_are_launched_kernel_by_kernel(method):
    """With a drafter that reads the states of all rows, and with none, where the last layer computes but a few; prompts in chunks beside
    requests that decode."""
    speculation = {**SPECULATION, "method": method} if method == "mtp" else {"method": "none"}
    llm = LLM(device="cuda", dtype="float32", speculative_config=speculation, max_batch_size=16, max_num_batched_tokens=300)
    graphs = llm.engine.worker.graphs
    assert graphs is not None
    pieces, used = graphs.pieces, set()
    assert pieces is not None
    assert pieces.fit(1) == 8
    assert pieces.fit(257) == 300
    assert pieces.fit(301) == 0
    replay = pieces.forward

    def note(token_ids, *others):
        used.add(len(token_ids))
        return replay(token_ids, *others)

    pieces.forward = note
    prompts = code_prompts(24, seed=3)
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)
    captured, eager = [], []
    for results in (captured, eager):
        for lasts in (params, SamplingParams(max_tokens=24, temperature=0.7, seed=5)):
            results += [r.outputs[0].token_ids for r in llm.generate(prompts, lasts, use_tqdm=False)]
        graphs.pieces = None
    assert captured == eager
    assert len(used) >= 3, used
    llm.engine.scheduler.check()


@torch.inference_mode()
def test_states_taps_and_rows_of_nobody():
    llm = LLM(device="cuda", dtype="float32", speculative_config=SPECULATION, max_batch_size=4, max_num_batched_tokens=128)
    program, graphs = llm.engine.worker.program, llm.engine.worker.graphs
    model, cache, count = program._model, program._cache, 40
    pieces = graphs.pieces
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (pieces.fit(count),), generator=generator).cuda()
    positions = torch.arange(len(ids)).cuda()
    slots = positions.clone()

    def attend(number, query, own, plan, out=None):
        """What some rows' queries find is made of the queries themselves."""
        made = query[..., : model.value_dim] * (number + 1)
        if out is None:
            out = torch.zeros_like(made)
        out[:count] = made[:count]
        return out

    model.attend, before = attend, model.attend
    try:
        expected = {}
        for name, run in (("eager", model.forward), ("pieces", pieces.forward), ("again", pieces.forward)):
            entering = dict.fromkeys(pieces._tapped)
            expected[name] = run(ids, positions, slots, cache, None, None, entering).clone(), {n: t.clone() for n, t in entering.items()}
    finally:
        model.attend = before
    for name in ("pieces", "again"):
        torch.testing.assert_close(expected[name][0], expected["eager"][0])
        assert expected[name][1].keys() == expected["eager"][1].keys()
        for number, states in expected["eager"][1].items():
            torch.testing.assert_close(expected[name][1][number], states)
