"""Which graphs the phases of a step take, and what is compiled before requests come. By stand-ins: no graph is captured without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend.speculative_config import SpeculativeConfig
from backend.step.distributions import Distributions, count_held
from backend.step.graphs import Graphs
from backend.step.options import Options
from backend.step.tensors import StepShape
from kernels import ops, warm_up
from kernels.request_table import RequestTable
from kernels.structs import IS_REJECTION

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [{}, {"placement": "bls"}, {"method": "ngram"}, {"tree_nodes": 4}], ids=str)
def test_distributions_are_all_made_at_the_start(kind: dict[str, Any]) -> None:
    """Requests may have more drafts, and other nodes hand more over: memory that was counted when pages were shared out was taken by those."""
    config = SpeculativeConfig.from_dict({"method": "mtp", "num_speculative_tokens": 2, **kind})
    table = RequestTable(2, 64, 16, 9, CPU)
    distributions, count = Distributions(table, config), count_held(config)
    assert count == (0 if "method" in kind or "tree_nodes" in kind else 2)
    distributions.put(0, torch.full((8, 9), 1 / 9))
    assert distributions.get(0).shape == (count, 9)
    table.flags[:2] = torch.tensor([IS_REJECTION, 0], dtype=table.flags.dtype)
    logits, chosen = torch.eye(9)[[3, 4]], torch.tensor([7, 8], dtype=torch.int32)
    drawn = distributions.draw(logits, torch.tensor([0, 1], dtype=torch.int32), chosen, 8, Options.REJECTION)
    assert drawn.tolist() == [3, 8] and distributions.get(0).shape == (count, 9)


def test_what_is_compiled_before_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's way through prompts, which is launched kernel by kernel beside trees; its own layers' attention; scores of many rows; and as many
    drafts as a request may choose, where one forward makes them."""
    heads, kinds = [ops.Heads(32, 8, 128), ops.Heads(8, 2, 64)], [frozenset[Any](), frozenset({(512, None)})]
    asked: list[tuple[ops.Heads, tuple[int, ...], set[Any], bool]] = []
    scored: list[int] = []
    ran: list[StepShape] = []

    def load_attention(*arguments: Any, has_trees: bool = False, **options: Any) -> None:
        _, widths, _, _, own, _, *more = arguments
        asked.append((own, tuple(widths), set(more[1] if len(more) > 1 else options.get("kinds", ())), has_trees))

    monkeypatch.setattr(warm_up, "load_attention", load_attention)
    monkeypatch.setattr(warm_up, "load_step", lambda *arguments: None)
    drafting = SimpleNamespace(tree_widths=[(heads[1], (3, 7))], block_attention=lambda counts: [], most_at_once=16)
    program = SimpleNamespace(all_heads=heads, all_kinds=kinds, attention_kinds=kinds[0], dtype=torch.bfloat16, is_e4m3=False, page_size=16)
    program.drafting, program.score_nothing = drafting, scored.append
    graphs: Any = SimpleNamespace(
        _program=program, _table=SimpleNamespace(vocab_size=512), _batch_sizes=[1, 2, 4, 8], _chain_widths=[1, 5], device=CPU
    )
    graphs._is_cascade, graphs._tree_width, graphs._tree_widths, graphs._drafts, graphs._run_once = False, 25, [25], [], ran.append
    Graphs._load_kernels(graphs, 300)
    assert {(own, has_trees): found for own, _, found, has_trees in asked} == {
        (heads[0], False): set(),
        (heads[0], True): set(),
        (heads[1], False): {(512, None)},
        (heads[1], True): {(512, None)},
    }
    assert scored == list(warm_up.TOKEN_COUNTS)
    prompts = [shape for shape in ran if shape.num_prompts]
    assert {shape.prompt_lens for shape in prompts} == {(min(count, 300),) for count in warm_up.TOKEN_COUNTS}
    assert all(shape.drafter_counts == shape.drafter_seq_lens == shape.prompt_lens and shape.asks_model for shape in prompts)
    assert [shape.batch for shape in ran if shape.num_model_drafts == 16] == [1, 2, 4, 8]
