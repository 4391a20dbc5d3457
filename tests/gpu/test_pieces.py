"""Forwards with prompts, captured in pieces or whole: the same states as launched kernel by kernel, whatever ran between."""

from __future__ import annotations

import itertools

import pytest
import torch

from backend import LLM, SamplingParams
from backend.drafters.protocol import ATTENTION, HIDDEN
from kernels import ops
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
    assert pieces.fit(257) == (300 if method == "none" else 320)
    most = 300 if method == "none" else 300 + 16 * 2  # prompts, beside requests that all have drafts
    assert pieces.fit(most) == most
    assert pieces.fit(most + 1) == 0
    replay = pieces.forward

    def note(count, *others):
        used.add(count)
        return replay(count, *others)

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
    packed = pieces.packed(pieces.fit(count))
    packed[0] = torch.randint(0, model.vocab_size, (packed.shape[1],), generator=generator).cuda()
    packed[1] = packed[2] = torch.arange(packed.shape[1])
    ids, positions, slots, _ = packed

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
        for name in ("eager", "pieces", "again"):
            entering = dict.fromkeys(pieces._tapped)
            if name == "eager":
                states = model.forward(ids, positions, slots, cache, None, None, entering)
            else:
                states = pieces.forward(len(ids), None, None, entering)
            expected[name] = states.clone(), {n: t.clone() for n, t in entering.items()}
    finally:
        model.attend = before
    for name in ("pieces", "again"):
        torch.testing.assert_close(expected[name][0], expected["eager"][0])
        assert expected[name][1].keys() == expected["eager"][1].keys()
        for number, states in expected["eager"][1].items():
            torch.testing.assert_close(expected[name][1][number], states)


@torch.inference_mode()
def test_whole_forwards_are_those_that_are_launched_kernel_by_kernel():
    """In bfloat16, whose attention finds prompts by itself: of any requests, by one and the same graph, to the bit."""
    llm = LLM(device="cuda", dtype="bfloat16", speculative_config=SPECULATION, max_batch_size=8, max_num_batched_tokens=128)
    worker = llm.engine.worker
    program, pieces, model = worker.program, worker.graphs.pieces, worker.model
    if pieces.attention(1) is None:
        pytest.skip("this GPU has no attention that finds prompts by itself")
    generator = torch.Generator().manual_seed(0)
    page = worker.store.page_size
    worker.page_table[:8] = torch.arange(8 * worker.page_table.shape[1]).view(8, -1).int() % (worker.store.num_pages - 1)
    for counts, pasts, num_prompts in (
        ([40, 7, 1, 3, 2], [0, 20, 33, 9, 150], 2),
        ([100], [0], 1),
        ([3, 1, 1, 1], [60, 5, 90, 33], 0),
        ([9, 30], [200, 0], 2),
    ):
        count = pieces.fit(sum(counts))
        packed = pieces.packed(count)
        packed.zero_()
        packed[2] = worker.store.scratch_page * worker.store.stride("attention")
        packed[0, : sum(counts)] = torch.randint(0, model.vocab_size, (sum(counts),), generator=generator).cuda()
        places = torch.cat([torch.arange(past, past + own) for own, past in zip(counts, pasts)]).cuda()
        owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).cuda()
        packed[1, : sum(counts)] = places
        packed[2, : sum(counts)] = worker.page_table[owners, places // page] * worker.store.stride("attention") + places % page
        cu_rows = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
        lens = torch.tensor([own + past for own, past in zip(counts, pasts)], dtype=torch.int32, device="cuda")
        ops.split_rows(pieces.split, cu_rows, lens, torch.arange(len(counts), dtype=torch.int32, device="cuda"), num_prompts)
        assert pieces.attention(1) is pieces.attention(3) is not pieces.attention(4) is pieces.attention(17)
        for attention in (pieces.attention(3), pieces.attention(17)):
            got = [pieces.forward(count, attention).clone() for _ in range(2)]
            attention.refresh()
            wanted = model.forward(*packed[:3], program._cache, attention)
            for states in got:
                assert torch.equal(states[: sum(counts)], wanted[: sum(counts)]), (counts, num_prompts)


@torch.inference_mode()
def test_a_drafter_comes_through_prompts_as_kernel_by_kernel():
    llm = LLM(device="cuda", dtype="bfloat16", speculative_config=SPECULATION, max_batch_size=8, max_num_batched_tokens=128)
    worker = llm.engine.worker
    advancing, drafting, store = worker.graphs.advancing, worker.program.drafting, worker.store
    if advancing is None:
        pytest.skip("this GPU has no attention that finds prompts by itself")
    generator = torch.Generator("cuda").manual_seed(0)
    page, strides = store.page_size, [store.stride(name) for name in (ATTENTION, HIDDEN)]
    worker.page_table[:8] = torch.arange(8 * worker.page_table.shape[1]).view(8, -1).int() % (store.num_pages - 1)
    store.rows(HIDDEN).normal_(generator=generator)
    for counts, pasts, num_prompts in (([40, 7, 1, 3], [0, 20, 33, 9], 2), ([100], [0], 1), ([9, 0, 2], [30, 0, 61], 2)):
        total, places = sum(counts), torch.cat([torch.arange(past, past + own) for own, past in zip(counts, pasts)]).cuda()
        rows = advancing.rows(len(counts), advancing.fit(total))
        packed = rows.packed
        packed.zero_()
        packed[2], packed[3], packed[4] = (store.scratch_page * strides[n] for n in (0, 1, 1))
        packed[0, :total] = torch.randint(0, worker.model.vocab_size, (total,), generator=generator, device="cuda")
        owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).cuda()
        before = (places - 1).clamp(min=0)
        packed[1, :total] = places
        for number, own, stride in ((2, places, strides[0]), (3, places, strides[1]), (4, before, strides[1])):
            packed[number, :total] = worker.page_table[owners, own // page] * stride + own % page
        cu_rows = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
        lens = torch.tensor([own + past if own else 0 for own, past in zip(counts, pasts)], dtype=torch.int32, device="cuda")
        lasts = (cu_rows[1:] - 1).clamp(min=0).long()
        ops.split_rows(advancing._split, cu_rows, lens, torch.arange(len(counts), dtype=torch.int32, device="cuda"), num_prompts, lasts)
        graph, made = advancing._graphs[packed.shape[1]]
        graph.replay()
        got = [states.clone() for states in made.first(len(counts)).states]
        wanted = drafting.compute(packed, advancing._split.last_rows, advancing._attention).first(len(counts)).states
        for own, states in zip(got, wanted, strict=True):
            assert torch.isfinite(own.float()).all() and torch.equal(own, states), (counts, num_prompts)


def test_a_drafter_is_as_good_after_prompts_that_are_captured():
    """An off-by-one there shows as drafts that are not accepted, and nowhere else."""
    sizes = {"max_batch_size": 16, "max_num_batched_tokens": 300, "enable_prefix_caching": False}
    llm = LLM(device="cuda", dtype="bfloat16", speculative_config=SPECULATION, **sizes)
    graphs, prompts = llm.engine.worker.graphs, code_prompts(32, seed=4)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    steps = []
    for advancing in (graphs.advancing, None):
        graphs.advancing = advancing
        before = llm.engine.num_finished
        llm.generate(prompts, params, use_tqdm=False)
        steps.append(llm.engine.num_finished - before)
    assert abs(steps[0] - steps[1]) <= 0.1 * steps[1], steps


@pytest.mark.parametrize("method", ["mtp", "ngram", "none"])
def test_answers_beside_prompts_and_without(method):
    """In bfloat16: a prompt's first token is the likeliest by a step of its own, whatever runs beside it; but for near ties."""
    speculation = {"method": "none"} if method == "none" else {**SPECULATION, "method": method}
    llm = LLM(device="cuda", dtype="bfloat16", speculative_config=speculation, max_batch_size=16, max_num_batched_tokens=300)
    prompts = code_prompts(32, seed=4)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    together = [r.outputs[0].token_ids for r in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    same = sum(a == b for a, b in zip(together, alone))
    assert same >= 24, same
    assert sum(a[0] == b[0] for a, b in zip(together, alone)) >= 30
    llm.engine.scheduler.check()
