"""Draws where prefill and decode apart pay, from what `benchmarks.disaggregation_plan --svg FILE` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.plot_speculation import STYLE

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, GAP = 58, 30, 64, 62, 70
WORST, EVEN, BEST = (216, 90, 48), (246, 243, 236), (29, 158, 117)
MOST = 1.6
"""Of a ratio or its inverse: from here on the colour is full."""


def colour_of(ratio: float) -> str:
    """Between WORST (nodes that do both are better) and BEST, EVEN at 1."""
    share = min(1.0, (max(ratio, 1 / ratio) - 1) / (MOST - 1)) if ratio > 0 else 1.0
    end = BEST if ratio >= 1 else WORST
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(EVEN, end, strict=True))


def draw(ratios: Mapping[int, Mapping[tuple[int, int], tuple[float, str]]], inputs: Sequence[int], outputs: Sequence[int], limits: str) -> str:
    """SVG: a panel for each number of nodes. ratios: by it and (input, output) tokens, goodput apart over goodput of nodes that do both, and the
    split; limits: what goodput counts."""
    parts, panel = [], LEFT + len(outputs) * CELL_WIDTH + GAP
    for number, (nodes, cells) in enumerate(ratios.items()):
        x0 = LEFT + number * panel
        parts.append(f'<text class="t" x="{x0}" y="18">{nodes} GPUs: goodput apart / all doing both</text>')
        parts.append(f'<text class="s" x="{x0}" y="35">{limits}; best split below</text>')
        for column, output in enumerate(outputs):
            parts.append(f'<text class="s" x="{x0 + (column + 0.5) * CELL_WIDTH:.0f}" y="{TOP - 6}" text-anchor="middle">{output}</text>')
        for row, prompt in enumerate(inputs):
            y = TOP + row * CELL_HEIGHT
            parts.append(f'<text class="s" x="{x0 - 6}" y="{y + 19}" text-anchor="end">{prompt}</text>')
            for column, output in enumerate(outputs):
                ratio, split = cells[prompt, output]
                x, middle = x0 + column * CELL_WIDTH, x0 + (column + 0.5) * CELL_WIDTH
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" fill="{colour_of(ratio)}"/>'
                    f'<text x="{middle:.0f}" y="{y + 14}" text-anchor="middle" style="fill:#222">{ratio:.2f}</text>'
                    f'<text x="{middle:.0f}" y="{y + 25}" text-anchor="middle" style="fill:#444;font-size:9px">{split}</text>'
                )
        parts.append(f'<text class="s" x="{x0}" y="{TOP + len(inputs) * CELL_HEIGHT + 16}">rows: tokens of a prompt; columns: of an answer</text>')
    width, height = LEFT + len(ratios) * panel - GAP + 12, TOP + len(inputs) * CELL_HEIGHT + 28
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">{STYLE}{"".join(parts)}</svg>\n'
