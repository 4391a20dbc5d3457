"""`foretoken train` on a GPU, as it is called: the target's states by the engine's kernels, the drafter by torch, its worth in the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backend.config import BUNDLED_MODEL
from training.heldout import read_heldout

EXTRA = {
    "mtp": ["--drafts", "2", "--answers", "12"],
    "eagle3": ["--drafts", "3", "--draft-vocab-size", "1024"],
    "medusa": ["--drafts", "2", "--states", "states", "--lr", "0.02"],
    "dflash": ["--block-size", "4", "--layers", "2", "--steps", "600"],  # of 60 steps 5% of its drafts stand, on a CPU too
    "dspark": ["--block-size", "3", "--layers", "2", "--markov-rank", "16"],
}


@pytest.mark.parametrize("kind", EXTRA)
def test_a_drafter_is_trained_and_measured(kind: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name, source in read_heldout().items():
        (text / name.replace("/", "_")).write_text(source)
    options = ["--data", str(text), "--out", "out", "--steps", "60", "--batch-size", "8", "--context", "256", "--report-prompts", "4"]
    command = [sys.executable, "-m", "deploy.cli", "train", kind, "--model", str(BUNDLED_MODEL), *options, *EXTRA[kind]]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-3000:]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["options"]["kind"] == kind and result["last"]["step"] == result["options"]["steps"]
    assert result["report"]["accepted_length"] > 1.1, result["report"]
