"""Trains the bundled model on one GPU.

    python -m training.train --minutes 16 --out OUT      # fixes the number of steps from the measured speed, and prints it
    python -m training.train --steps N --out OUT         # the same run, by its number of steps

Writes the model (Hugging Face layout), `log.jsonl` (the loss curve) and `result.json` (held-out bits per byte).
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from training.corpus import DATA
from training.llama import CONFIG, Llama
from training.optimizers import Muon, learning_rate

CONTEXT = 2048


def load_ids(name: str) -> np.ndarray:
    """Token ids of one split, from `name`.u16 or its xz."""
    path = DATA / f"{name}.u16"
    if path.exists():
        return np.fromfile(path, dtype="<u2")
    return np.frombuffer(lzma.decompress((DATA / f"{name}.u16.xz").read_bytes()), dtype="<u2")


@torch.no_grad()
def bits_per_byte(model: Llama, device: str) -> float:
    """Over every held-out file: windows of CONTEXT tokens, each token scored once, with at least half a window before it."""
    ids = load_ids("heldout").astype(np.int64)
    sizes = [entry["bytes"] for entry in json.loads((DATA / "heldout_files.json").read_text())]
    starts = np.flatnonzero(ids == ids[0])
    windows = []  # (ids, number of leading targets that an earlier window scored)
    for begin, end in zip(starts, [*starts[1:], len(ids)]):
        file_ids, scored, at = ids[begin:end], 0, 0
        while scored < len(file_ids) - 1:
            window = file_ids[at : at + CONTEXT + 1]
            windows.append((window, scored - at))
            scored, at = at + len(window) - 1, at + CONTEXT // 2
    total = 0.0
    windows.sort(key=lambda w: len(w[0]))
    for i in range(0, len(windows), 16):
        group = windows[i : i + 16]
        width = max(len(w) for w, _ in group)
        batch = torch.zeros(len(group), width, dtype=torch.long)
        weight = torch.zeros(len(group), width - 1)
        for row, (window, skip) in enumerate(group):
            batch[row, : len(window)] = torch.from_numpy(window)
            weight[row, skip : len(window) - 1] = 1
        batch, weight = batch.to(device), weight.to(device)
        logits = F.linear(model.hidden_states(batch[:, :-1]), model.embed).float()
        losses = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        total += (losses * weight.flatten()).sum().item()
    return total / math.log(2) / sum(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=16.0, help="used when --steps is not given")
    parser.add_argument("--batch-size", type=int, default=128, help="sequences of 2048 tokens a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="default: the bundled model's; tests' own has 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Llama({**CONFIG, "num_hidden_layers": args.layers}).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.3f}M parameters", flush=True)
    ids = torch.from_numpy(load_ids("train").copy().view(np.int16)).to(device)
    print(f"{len(ids) / 1e6:.1f}M tokens", flush=True)
    matrices = [p for p in model.parameters() if p.dim() == 3]
    others = [p for p in model.parameters() if p.dim() != 3]
    optimizers = [
        Muon(matrices, lr=args.lr),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"),
    ]
    compiled = torch.compile(model) if device == "cuda" else model
    generator = torch.Generator(device=device).manual_seed(args.seed)
    window = torch.arange(CONTEXT + 1, device=device)
    steps, step, started = args.steps or 10**9, 0, time.time()
    timed_at = started
    with (args.out / "log.jsonl").open("w") as log:
        while step < steps:
            starts = torch.randint(len(ids) - CONTEXT - 1, (args.batch_size, 1), device=device, generator=generator)
            batch = ids[starts + window].long() & 0xFFFF
            with torch.autocast(device, torch.bfloat16):
                loss = compiled(batch[:, :-1], batch[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * learning_rate(step, steps)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            if step == 20:
                torch.cuda.synchronize() if device == "cuda" else None
                timed_at = time.time()
            if step == 60 and not args.steps:
                torch.cuda.synchronize() if device == "cuda" else None
                per_step = (time.time() - timed_at) / 40
                steps = int((args.minutes * 60 - (time.time() - started)) / per_step) + step
                print(f"{per_step * 1e3:.1f} ms a step, {args.batch_size * CONTEXT / per_step / 1e6:.2f}M tokens/s: --steps {steps}", flush=True)
            if step % 50 == 0 or step == steps:
                row = {"step": step, "loss": round(loss.item(), 4), "seconds": round(time.time() - started, 1)}
                log.write(json.dumps(row) + "\n")
                log.flush()
                if step % 250 == 0:
                    print(row, flush=True)
    model.save(args.out)
    with torch.autocast(device, torch.bfloat16):
        score = bits_per_byte(model, device)
    result = {"steps": steps, "heldout_bits_per_byte": round(score, 4), "seconds": round(time.time() - started, 1), "torch": torch.__version__}
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(result, flush=True)


if __name__ == "__main__":
    main()
