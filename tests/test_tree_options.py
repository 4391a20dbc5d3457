"""Shapes of trees and their options: what is a tree, what trees do not go with, and other servers' names for them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from backend import SamplingParams, trees
from backend.drafters.recycling import RecyclingDrafter
from backend.errors import ConfigError
from backend.request_speculation import resolve
from backend.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from backend.step.tensors import StepTensors
from backend.step.trees import TreeForward
from backend.trees import make_static, shape_static
from kernels import structs
from kernels.request_state import Admission
from kernels.request_table import RequestTable
from tests.small import LLM

PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]
RECYCLING = {"method": "token_recycling", "adaptive": False}

# -- shapes -------------------------------------------------------------------------------------------------------------


def test_limits_are_the_kernels() -> None:
    assert (trees.MAX_NODES, trees.MAX_DEPTH) == (structs.MAX_NODES, structs.MAX_DEPTH) == (63, MAX_SPECULATIVE_TOKENS)


def test_paths_make_a_tree() -> None:
    tree = make_static(random.Random(1).sample(PATHS, len(PATHS)), "tree_paths")
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))
    assert tree.parents == (-1, -1, 0, 0, 1, 2, 3, 5)
    assert (tree.num_nodes, tree.depth, tree.num_candidates, [tree.count_within(d) for d in range(5)]) == (8, 4, 2, [0, 2, 5, 7, 8])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0, 1, 2]], r"tree_paths: the path \[0, 1, 2\] goes on from \[0, 1\], which is no path of the tree: add it"),
        ([[0], [1], [0]], r"tree_paths: the path \[0\] is there twice"),
        ([[0], []], r"tree_paths: the path \[\] has 0 drafts; it must have from 1 to 16"),
        ([[0] * n for n in range(1, 18)], r"has 17 drafts; it must have from 1 to 16"),
        ([[0], [0, -1]], r"tree_paths: the path \[0, -1\] has -1; candidates are numbered from 0 to 31"),
        ([[32]], r"tree_paths: the path \[32\] has 32; candidates are numbered from 0 to 31"),
        ([], r"tree_paths has 0 paths; it must have from 1 to 63"),
        ([[i] for i in range(32)] + [[0, i] for i in range(32)], r"tree_paths has 64 paths; it must have from 1 to 63"),
    ],
)
def test_what_is_no_tree_is_said(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict({"method": "token_recycling", "tree_paths": paths})


@pytest.mark.parametrize(("num_nodes", "depth", "top_k"), [(1, 4, 8), (24, 4, 8), (63, 16, 32), (10, 1, 8), (7, 3, 1), (63, 2, 3)])
def test_shapes_of_so_many_drafts(num_nodes: int, depth: int, top_k: int) -> None:
    tree = shape_static(num_nodes, depth, top_k)
    assert make_static(tree.paths, "x") == tree and tree.depth <= depth and tree.num_candidates <= top_k
    assert tree.num_nodes == min(num_nodes, sum(top_k**d for d in range(1, depth + 1)))


# -- what trees do not go with ------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mtp_strategy": "with_ngram"}, "mtp_strategy must be default with tree_nodes: drafts are trees, got 'with_ngram'"),
    ({"placement": "bls"}, "placement must be auto or in_process with tree_nodes: drafts are trees, got 'bls'"),
    ({"verify_strategy": "topp"}, "verify_strategy must be target_match, greedy or rejection with tree_nodes: drafts are trees, got 'topp'"),
    ({"accept_policy": "simulated"}, "accept_policy must be normal, accept_all or reject_all with tree_nodes"),
    ({"num_speculative_tokens": 3, "num_model_steps": 2}, r"num_model_steps must be num_speculative_tokens \(3\) or left out with tree_nodes"),
    ({"tree_paths": [[0]]}, "tree_nodes must be left out with tree_paths, which say it all, got 8"),
    ({"tree_nodes": None, "tree_top_k": 3}, "tree_top_k must be left out without tree_nodes, got 3"),
    ({"tree_nodes": None, "tree_paths": [[0], [0, 0]], "num_speculative_tokens": 3}, "num_speculative_tokens must be 2 or left out with tree_paths"),
    ({"method": "dflash", "model": "x"}, "tree_nodes must be left out with method dflash, which makes all drafts of a chain at once, got 8"),
    ({"method": "draft_model", "model": "x", "parallel_drafting": True}, "parallel_drafting must be left out with tree_nodes"),
    ({"method": "suffix"}, "tree_nodes has no effect with method suffix: it is a key of mtp, .*token_recycling"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[" ".join(values) for values, _ in REFUSED])
def test_keys_that_trees_do_not_go_with(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict({"method": "mtp", "tree_nodes": 8, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_speculative_tokens": 9, "tree_top_k": 8},
            r"tree_top_k is 8, and 9 drafts follow one another: the drafter goes on from 64; the limit is 63",
        ),
        ({"num_speculative_tokens": 16, "tree_top_k": 16}, "the drafter goes on from 240; the limit is 63: take a smaller tree_top_k"),
    ],
)
def test_trees_that_grow_too_wide(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(speculative_config={"method": "mtp", "tree_nodes": 8, **values})


def test_trees_that_no_context_holds() -> None:
    with pytest.raises(ConfigError, match="tree_nodes makes trees; the drafter goes on from 24 drafts of one, and the context holds 24 tokens"):
        LLM(max_model_len=24, speculative_config={"method": "mtp", "tree_nodes": 8, "num_speculative_tokens": 4, "tree_top_k": 8})


def test_what_requests_may_choose() -> None:
    static, grown = (SpeculativeConfig.from_dict({**RECYCLING, "tree_paths": PATHS}), SpeculativeConfig.from_dict({"method": "mtp", "tree_nodes": 8}))
    assert [resolve(static, {"num_speculative_tokens": n}).num_nodes for n in range(5)] == [0, 2, 5, 7, 8]
    assert [resolve(config, None).max_drafts for config in (static, grown)] == [8, 8]
    assert [resolve(static, {"method": name}).num_nodes for name in ("ngram", "none")] == [0, 0]
    for config, choice, message in (
        (static, {"num_speculative_tokens": 5}, r"num_speculative_tokens must be from 0 \(off\) to 4, the depth of the server's tree, got 5"),
        (grown, {"num_speculative_tokens": 2}, r"num_speculative_tokens must be 0 \(off\) or 4, the depth of the server's tree, got 2"),
        (static, {"verify_strategy": "topp"}, "verify_strategy must be target_match, greedy or rejection on a server whose drafts may be trees"),
        (static, {"method": "ngram", "verify_strategy": "topp"}, "verify_strategy must be target_match, greedy or rejection on a server"),
        (grown, {"mtp_strategy": "with_ngram"}, "mtp_strategy must be default where drafts are trees"),
    ):
        with pytest.raises(ConfigError, match=f"speculative.{message}"):
            resolve(config, choice)


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_tree_that_is_cut_has_no_deeper_drafts(is_reported: bool) -> None:
    """Nor where there are fewer candidates than the shape has places, beside a request that wants all of it. is_reported: as on a CPU."""
    config = SpeculativeConfig.from_dict({**RECYCLING, "tree_paths": [[0], [1], [0, 0], [1, 0], [1, 0, 0]]})
    table = RequestTable(2, 64, 20, 9, torch.device("cpu"), has_trees=True)
    table.admit([Admission(i, [1], 1, 60) for i in range(2)])
    drafter = RecyclingDrafter(9, 2, torch.device("cpu"))
    drafter.learn(torch.tensor([1, 3, 4]), torch.eye(9)[[2, 4, 6]] + 0.5 * torch.eye(9)[[3, 5, 7]])  # nothing is known of what follows 2
    fields = torch.zeros(structs.NUM_FIELDS, 2, dtype=torch.int32)
    fields[structs.INDEX], fields[structs.END], fields[structs.DRAFTER_COUNT] = torch.arange(2), 60, -1
    fields[structs.MODEL_LIMIT] = torch.tensor([resolve(config, {"num_speculative_tokens": n}).num_nodes for n in (2, 3)])
    tree = TreeForward(config, drafter, table, torch.zeros(2, 8, dtype=torch.int32), 64, torch.float32)
    newest = torch.ones(2, dtype=torch.long)
    tree.draft(fields, newest, [newest[:, None]], 5, structs.StepSizes(*[0] * 13), torch.zeros(2, 20) if is_reported else None)
    assert table.num_drafts[:2].tolist() == [3, 4]
    assert table.drafts[:2, :4].tolist() == [[2, 3, 4, 0], [2, 3, 4, 6]] and table.parents[1, :4].tolist() == [-1, -1, 1, 2]


def test_answers_of_a_form_and_predictions_have_chains(llm_plain) -> None:
    """A grammar's forced tokens, and what a prediction says: with the tokens of a server without trees."""
    llm = LLM(speculative_config=RECYCLING)
    form = SamplingParams(max_tokens=24, temperature=0.0, structured_outputs={"choice": ["a long answer of many words", "another answer"]})
    plain = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    for params in (form, plain):
        theirs = llm_plain.generate(["def add(a, b):\n"], params, use_tqdm=False)[0].outputs[0]
        choice = {"prediction": theirs.token_ids} if params is plain else None
        own = llm.generate(["def add(a, b):\n"], params, speculative=choice, use_tqdm=False)[0].outputs[0]
        assert own.token_ids == theirs.token_ids and "token_recycling" not in own.sources and own.stats.accepted > 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"speculative_token_tree": "[(0,), (0, 0), (1,)]", "num_speculative_tokens": 3},
            {"tree_paths": ((0,), (0, 0), (1,)), "num_speculative_tokens": 2},
        ),
        ({"medusa_choices": [[0], [0, 0]]}, {"tree_paths": ((0,), (0, 0))}),
        (
            {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16},
            {"num_speculative_tokens": 5, "tree_top_k": 4, "tree_nodes": 15},
        ),
        (
            {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
            {"num_speculative_tokens": 3, "tree_nodes": None},
        ),
        ({"use_dynamic_tree": True, "dynamic_tree_max_topK": 6, "max_total_draft_tokens": 30}, {"tree_top_k": 6, "tree_nodes": 30}),
        ({"use_dynamic_tree": False, "dynamic_tree_max_topK": 6, "max_total_draft_tokens": 30}, {"tree_top_k": None, "tree_nodes": None}),
    ],
)
def test_other_servers_names(values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = SpeculativeConfig.from_dict({"method": "eagle3", "model": "x", **values})
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculative_token_tree": "[(0,"}, r"speculative_token_tree must be a list of paths such as \[\(0,\), \(0, 0\), \(1,\)\], got '\[\(0,'"),
        ({"speculative_eagle_topk": 4}, "speculative_eagle_topk 4 makes trees: say speculative_num_draft_tokens too, 2 to 64"),
        ({"speculative_eagle_topk": "4"}, "speculative_eagle_topk must be an integer from 1 on, got '4'"),
    ],
)
def test_other_servers_names_that_are_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict({"method": "eagle3", "model": "x", **values})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": "x"}, ("eagle3", 4, "x")),
        ({"decoding_type": "MTP", "num_nextn_predict_layers": 3, "max_draft_len": 3}, ("mtp", 3, None)),
        ({"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 3}, ("ngram", 4, None)),
        ({"decoding_type": "Draft_Target", "max_draft_len": 2, "speculative_model_dir": "x"}, ("draft_model", 2, "x")),
        ({"decoding_type": "Lookahead"}, "decoding_type 'Lookahead' is not one of ngram, sa, mtp, .*dspark"),
        ({"decoding_type": "MTP", "num_nextn_predict_layers": 3, "max_draft_len": 2}, "num_nextn_predict_layers 3 and max_draft_len 2 both say"),
        ({"decoding_type": "MTP", "method": "eagle3"}, "method is given twice: 'eagle3', and 'MTP' as decoding_type"),
    ],
)
def test_tensorrts_names(values: dict[str, Any], expected: tuple[object, ...] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            SpeculativeConfig.from_dict(values)
    else:
        config = SpeculativeConfig.from_dict(values)
        assert (config.method, config.num_speculative_tokens, config.model) == expected


def test_more_candidates_than_tokens() -> None:
    drafter = RecyclingDrafter(3, 5, torch.device("cpu"))
    drafter.learn(torch.tensor([1]), torch.tensor([[0.1, 0.3, 0.2]]))
    assert drafter.recall([torch.tensor([[1], [2]])], 5).tolist() == [[1, 2, 0, -1, -1], [-1] * 5]


def test_rows_of_nobody_teach_nothing() -> None:
    """A GPU's steps have more rows than tokens, which are all said to be the first row's. By the step's verdict, with such rows behind the others."""
    remembered = []
    for num_nobody in (0, 3):
        llm = LLM(speculative_config=RECYCLING)
        program, drafter = llm.engine.worker.program, llm.engine.worker.drafter
        assert isinstance(drafter, RecyclingDrafter)
        decide, noise = program.decide, torch.Generator().manual_seed(0)

        def decide_padded(step: StepTensors, decide: Any = decide, noise: Any = noise, num_nobody: int = num_nobody) -> None:
            rows, hidden = step.rows, step.hidden
            assert rows is not None
            logit_rows = torch.cat([rows.logit_rows, rows.logit_rows.new_zeros(num_nobody)])
            step.rows = dataclasses.replace(rows, logit_rows=logit_rows)
            step.hidden = torch.cat([hidden, torch.randn(num_nobody, hidden.shape[1], generator=noise)])
            decide(step)
            step.rows, step.hidden = rows, hidden

        program.decide = decide_padded  # type: ignore[method-assign]
        (result,) = llm.generate(["def add(a, b):\n"], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), use_tqdm=False)
        tokens = torch.arange(llm.engine.worker.model.vocab_size)[:, None]
        remembered.append((result.outputs[0].token_ids, drafter.recall([tokens], 4).clone()))
    (answer, known), (same, with_nobody) = remembered
    assert answer == same and (known >= 0).any() and torch.equal(known, with_nobody)
