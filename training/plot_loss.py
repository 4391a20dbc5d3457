"""Draws loss_curve.svg from loss_curve.jsonl (needs matplotlib): `python -m training.plot_loss`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    try:
        import matplotlib
    except ImportError as error:
        sys.exit(f"training.plot_loss: {error}: pip install matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "foretoken"
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (HERE / "loss_curve.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], linewidth=1, color="#2a6")
    axes.set(xlabel="step (262,144 tokens each)", ylabel="training loss, nats per token", ylim=(1.0, 3.0), title="Bundled model: training loss")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "loss_curve.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
