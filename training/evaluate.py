"""Held-out bits per byte of the model as it is shipped (bfloat16 weights, float32 arithmetic), on CPU.

python -m training.evaluate            # the held-out standard-library modules of this interpreter
python -m training.evaluate --all      # every held-out file of the corpus (needs `python -m training.corpus build`)
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from training import MODEL_DIR
from training.corpus import DATA
from training.heldout import read_heldout
from training.llama import load_model
from training.tokenizer import load_tokenizer
from training.train import CONTEXT


@torch.inference_mode()
def file_bits(forward, ids: list[int]) -> float:
    """Bits of one file: ids start with the end-of-text id; every later token is scored once, half a window or more before it."""
    bits, scored, at = 0.0, 0, 0
    while scored < len(ids) - 1:
        window = torch.tensor(ids[at : at + CONTEXT + 1])
        losses = F.cross_entropy(forward(window[None, :-1])[0].float(), window[1:], reduction="none")
        bits += losses[scored - at :].sum().item() / math.log(2)
        scored, at = at + len(window) - 1, at + CONTEXT // 2
    return bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    model = load_model(args.model)
    forward = lambda ids: F.linear(model.hidden_states(ids), model.embed)  # noqa: E731
    if args.all:
        ids = np.fromfile(DATA / "heldout.u16", dtype="<u2").astype(int)
        starts = [*np.flatnonzero(ids == ids[0]), len(ids)]
        sizes = [entry["bytes"] for entry in json.loads((DATA / "heldout_files.json").read_text())]
        bits = [file_bits(forward, ids[a:b].tolist()) for a, b in zip(starts, starts[1:])]
        print(f"{len(bits)} files, {sum(sizes)} bytes: {sum(bits) / sum(sizes):.4f} bits per byte")
        return
    tokenizer = load_tokenizer()
    texts = [text.encode() for text in read_heldout().values()]
    total = sum(map(len, texts))
    bits = sum(file_bits(forward, tokenizer.encode(text.decode()).ids) for text in texts)
    print(f"{len(texts)} standard-library modules, {total} bytes: {bits / total:.4f} bits per byte")
    for name, pack in (("gzip", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        print(f"  {name:5s} {8 * sum(len(pack(text)) for text in texts) / total:.3f} (each file on its own)")


if __name__ == "__main__":
    main()
