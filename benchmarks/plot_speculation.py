"""Draws the picture of the README from what `benchmarks.speculation` measured: `--svg FILE`, or later from its JSON:

python -m benchmarks.plot_speculation RESULTS.json PICTURE.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLOURS = {"ngram": "#888780", "suffix": "#378add", "mtp": "#1d9e75", "mtp+ngram": "#d85a30", "mtp+suffix": "#7f77dd"}
WIDTH, HEIGHT, LEFT, TOP, PANEL, GAP = 980, 330, 52, 46, 250, 66
STYLE = (
    "<style>text{font:12px sans-serif;fill:#333}.t{font-weight:600}.s{font-size:11px;fill:#666}line.g{stroke:#ddd}@media(prefers-color-scheme:dark)"
)
STYLE += "{text{fill:#ddd}.s{fill:#aaa}line.g{stroke:#444}}</style>"


class Panel:
    """One set of axes; y from `low` to `high`."""

    def __init__(self, number: int, title: str, subtitle: str, low: float, high: float, step: float, unit: str) -> None:
        self.x, self.low, self.high = LEFT + number * (PANEL + GAP), low, high
        self.height = HEIGHT - TOP - 60
        self.parts = [f'<text class="t" x="{self.x}" y="18">{title}</text><text class="s" x="{self.x}" y="34">{subtitle}</text>']
        value = low
        while value <= high + 1e-9:
            y = self.y(value)
            label = f"{value * 100:.0f}%" if unit == "%" else f"{value:g}{unit}"
            self.parts.append(f'<line class="g" x1="{self.x}" x2="{self.x + PANEL}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.parts.append(f'<text class="s" x="{self.x - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
            value += step

    def y(self, value: float) -> float:
        return TOP + self.height * (1 - (min(value, self.high) - self.low) / (self.high - self.low))

    def label(self, x: float, text: str) -> None:
        self.parts.append(f'<text class="s" x="{x:.1f}" y="{TOP + self.height + 16}" text-anchor="middle">{text}</text>')


def acceptance(number: int, rows: dict[str, Any]) -> Panel:
    panel = Panel(number, "Accepted drafts by position", "completion, greedy, 5 drafts at most", 0.0, 1.0, 0.25, "%")
    for name, colour in COLOURS.items():
        values = rows[f"{name} k=5"]["acceptance"][:5]
        points = [(panel.x + 20 + i * (PANEL - 40) / 4, panel.y(v)) for i, v in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        panel.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        panel.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    for i in range(5):
        panel.label(panel.x + 20 + i * (PANEL - 40) / 4, str(i + 1))
    return panel


def speed_up(number: int, set_name: str, results: dict[str, Any], high: float) -> Panel:
    panel = Panel(number, f"Speed-up over plain decoding: {set_name}", "by concurrent requests, as served by default", 0.0, high, 0.5, "x")
    slot = PANEL / 3
    for place, concurrency in enumerate((1, 8, 32)):
        for i, (name, colour) in enumerate(COLOURS.items()):
            value = results[f"{set_name}, {concurrency}"][name]["speed_up"]
            x, y = panel.x + place * slot + 8 + i * (slot - 16) / 5, panel.y(value)
            panel.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{(slot - 16) / 5 - 2:.1f}" height="{panel.y(0) - y:.1f}" fill="{colour}"/>')
        panel.label(panel.x + place * slot + slot / 2, str(concurrency))
    one = panel.y(1.0)
    panel.parts.append(f'<line x1="{panel.x}" x2="{panel.x + PANEL}" y1="{one:.1f}" y2="{one:.1f}" stroke="#c33" stroke-dasharray="4 3"/>')
    return panel


def draw(results: dict[str, Any]) -> str:
    """SVG from the parts `grid` and `default`."""
    speeds = [run["speed_up"] for rows in results["default"].values() for run in rows.values()]
    high = max(1.5, -(-max(speeds) // 0.5) * 0.5)
    panels = [
        acceptance(0, results["grid"]["completion, 1"]),
        *(speed_up(i, s, results["default"], high) for i, s in ((1, "completion"), (2, "editing"))),
    ]
    legend = "".join(
        f'<rect x="{LEFT + i * 120}" y="{HEIGHT - 16}" width="12" height="12" fill="{c}"/><text x="{LEFT + i * 120 + 18}" y="{HEIGHT - 6}">{n}</text>'
        for i, (n, c) in enumerate(COLOURS.items())
    )
    body = "".join(part for panel in panels for part in panel.parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">{STYLE}{body}{legend}</svg>\n'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("picture", type=Path, metavar="PICTURE.svg")
    args = parser.parse_args()
    args.picture.write_text(draw(json.loads(args.results.read_text())))
