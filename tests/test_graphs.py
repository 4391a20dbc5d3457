"""Which graphs the phases of a step take, and what is compiled before requests come. By stand-ins: no graph is captured without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from backend.speculative_config import SpeculativeConfig
from backend.step.captured_shapes import Phase
from backend.step.distributions import Distributions
from backend.step.graphs import Graphs
from backend.step.options import Options
from backend.step.tensors import StepShape
from kernels.request_table import RequestTable

CPU = torch.device("cpu")


def test_a_verdict_over_more_distributions_is_another_graph() -> None:
    """One that was captured while those of two drafts were held would take each draft behind them that the target could choose at all."""
    table = RequestTable(2, 64, 16, 9, CPU)
    distributions = Distributions(table, SpeculativeConfig(method="mtp", num_speculative_tokens=2), 2)
    program = SimpleNamespace(distributions=distributions, drafting=SimpleNamespace(asks_model=lambda shape: True))

    def phases(options: Options) -> list[list[Phase]]:
        graphs: Any = SimpleNamespace(_program=program)
        return Graphs._phases(graphs, StepShape(2, 12, num_model_drafts=8, options=options))

    seen: dict[Options, set[Phase]] = {}
    for count in (2, 8):
        distributions.put(0, torch.full((count, 9), 1 / 9))
        for options in (Options.NONE, Options.REJECTION):
            forward, verdict, drafting = phases(options)
            assert [own[0][0] for own in (forward, verdict, drafting)] == ["forward", "decide", "advance"]
            seen.setdefault(options, set()).update([*forward, *verdict, *drafting])
    assert [phase[0] for phase in sorted(seen[Options.NONE])] == ["advance", "decide", "draft", "forward"]
    assert [phase[0] for phase in sorted(seen[Options.REJECTION], key=str)] == ["advance", "decide", "decide", "draft", "forward"]
