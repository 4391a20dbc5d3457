"""Trains a drafter: `foretoken train-mtp --model DIR --data FILE ... --out DIR`.

Writes the drafter (what the `mtp_drafter` model loads), checkpoints to go on from, `log.jsonl` (the loss curve) and `result.json`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from backend.errors import ModelError
from backend.model_files import read_config
from training.llama import load_model
from training.mtp import Mtp, Objective, evaluate, save
from training.optimizers import Muon, learning_rate
from training.tokenizer import load_tokenizer


def read_file(file: Path, vocab_size: int) -> np.ndarray | list[str]:
    """A file's token ids, or its documents' texts. Raises ValueError for what is neither."""
    if file.suffix in (".xz", ".u16"):
        content = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
        ids = np.frombuffer(content, dtype="<u2").astype(np.uint32)
        if len(ids) and ids.max() >= vocab_size:
            raise ValueError(f"it holds id {ids.max()}; the model's vocabulary has ids 0 to {vocab_size - 1}")
        return ids
    text = file.read_text("utf-8")
    if file.suffix != ".jsonl":
        return [text]
    texts = [json.loads(line)["text"] for line in text.split("\n") if line.strip()]
    if bad := [t for t in texts if not isinstance(t, str)]:
        raise ValueError(f'"text" must be a string, got {bad[0]!r:.80}')
    return texts


def read_ids(paths: Sequence[Path], directory: Path, option: str = "--data") -> np.ndarray:
    """Token ids of text files, folders of them (*.py, *.txt, *.md), *.jsonl (a "text" each line) and *.u16 or *.u16.xz ids, uint32.

    Every document opens with the end-of-text id. Raises ValueError naming the option and the file that cannot be used, and ModelError
    for the model's tokenizer.
    """
    try:
        tokenizer = load_tokenizer(directory)
    except Exception as error:  # the library has no kind of its own
        raise ModelError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from None
    config = read_config(directory)
    end = config.get("eos_token_id")
    start = [] if end is None else [end if isinstance(end, int) else end[0]]
    parts: list[np.ndarray] = []
    files = [f for path in paths for f in (sorted(path.rglob("*")) if path.is_dir() else [path]) if f.is_file()]
    files = [f for f in files if f.suffix in (".py", ".txt", ".md", ".jsonl", ".u16", ".xz") or f in paths]
    for file in tqdm(files, desc="tokens", unit="file", disable=len(files) < 50):
        try:
            content = read_file(file, config["vocab_size"])
        except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{option} {file} cannot be used: {error!r:.200}") from None
        if isinstance(content, np.ndarray):
            parts.append(content)
        else:
            for encoding in tokenizer.encode_batch(content, add_special_tokens=False):
                parts.append(np.array([*start, *encoding.ids], dtype=np.uint32))
    if not parts:
        raise ValueError(f"{option} {', '.join(map(str, paths))}: no *.py, *.txt, *.md, *.jsonl or *.u16 there")
    return np.concatenate(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the target: a Llama folder in Hugging Face layout")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="PATH", help="text files, folders of them, *.jsonl, *.u16")
    parser.add_argument("--heldout", type=Path, nargs="+", metavar="PATH", help="the same kinds of file, to measure acceptance on at the end")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the drafter and its checkpoints go")
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="layers, one for each draft step (default 1)")
    parser.add_argument("--inner", type=int, metavar="N", help="width of the feed-forward part (default: the target's)")
    parser.add_argument("--unroll", type=int, default=3, metavar="N", help="draft steps to train for (default 3)")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="optimizer steps (default 2000)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="sequences a step (default 64)")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens a sequence (default 1024)")
    parser.add_argument("--lr", type=float, default=4e-3, metavar="RATE", help="peak learning rate (default 4e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=500, metavar="N", help="steps between checkpoints (default 500)")
    parser.add_argument("--resume", action="store_true", help="go on from OUT's checkpoint; the other options must be those of that run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError naming the option, the value and the limit."""
    ranges = {"layers": (1, 8), "unroll": (1, 8), "steps": (1, 10**7), "batch_size": (1, 4096), "context": (16, 10**6)}
    ranges |= {"inner": (1, 10**6), "checkpoint_every": (1, 10**7), "seed": (0, 2**63 - 1)}
    for key, (low, high) in ranges.items():
        value = getattr(args, key)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{key.replace('_', '-')} must be from {low} to {high}, got {value}")
    if args.unroll < args.layers:
        raise ValueError(f"--unroll must be at least --layers ({args.layers}), got {args.unroll}: a layer that takes no step learns nothing")
    if not 0 < args.lr < 1:
        raise ValueError(f"--lr must be between 0 and 1, got {args.lr}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {args.device} cannot be used: {str(error).splitlines()[0]:.200}") from None


def batches(ids: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Random windows [batch, context], without end."""
    window = torch.arange(args.context, device=ids.device)
    while True:
        starts = torch.randint(len(ids) - args.context, (args.batch_size, 1), device=ids.device, generator=generator)
        yield ids[starts + window].long()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes the drafter, `log.jsonl` and `result.json`; returns the result. Raises ValueError and ModelError for bad input."""
    check(args)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    target = load_model(args.model).to(device).requires_grad_(False)
    limit = target.config["max_position_embeddings"]
    if args.context > limit:
        raise ValueError(f"--context {args.context} is beyond the model's own limit {limit}")
    ids = torch.from_numpy(read_ids(args.data, args.model).astype(np.int32)).to(device)
    if len(ids) <= args.context:
        raise ValueError(f"--data holds {len(ids)} tokens; one sequence takes {args.context} (--context)")
    held = torch.from_numpy(read_ids(args.heldout, args.model, "--heldout").astype(np.int64)) if args.heldout else None
    if held is not None and len(held) < args.context:
        raise ValueError(f"--heldout holds {len(held)} tokens; one sequence takes {args.context} (--context)")
    mtp = Mtp(target, args.layers, args.inner or target.config["intermediate_size"]).to(device)
    objective = Objective(target, mtp, args.unroll)
    others = [p for p in mtp.parameters() if p.dim() == 2]
    optimizers: list[torch.optim.Optimizer] = [
        Muon([p for p in mtp.parameters() if p.dim() == 3], lr=args.lr),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    generator = torch.Generator(device=device).manual_seed(args.seed)
    first, checkpoint, args.out = 0, args.out / "checkpoint.pt", args.out
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {args.out}: {error.strerror}") from None
    if args.resume:
        if not checkpoint.is_file():
            raise ValueError(f"--resume: {checkpoint} does not exist")
        try:
            state = torch.load(checkpoint, map_location=device, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(f"--resume: {checkpoint} cannot be read: {error!r:.200}") from None
        try:
            mtp.load_state_dict(state["mtp"])
        except RuntimeError as error:
            raise ValueError(f"--resume: {checkpoint} is of another drafter: {error}") from None
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"].cpu())
        first = state["step"]
    compiled = torch.compile(objective) if device.type == "cuda" else objective
    started, row = time.time(), {}
    source = batches(ids, args, generator)
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, desc="train-mtp", unit="step", mininterval=2.0)
    with (args.out / "log.jsonl").open("a" if args.resume else "w") as log:
        for step in bar:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss, agree = compiled(next(source))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * learning_rate(step, args.steps)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            done = step + 1
            if done % 50 == 0 or done == args.steps:
                row = {"step": done, "loss": round(loss.item(), 4), "agreement": [round(a, 4) for a in agree.tolist()]}
                log.write(json.dumps(row | {"seconds": round(time.time() - started, 1)}) + "\n")
                log.flush()
                bar.set_postfix_str(f"loss {row['loss']}, agreement {row['agreement']}")
            if done % args.checkpoint_every == 0 or done == args.steps:
                state = {
                    "mtp": mtp.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizers],
                    "generator": generator.get_state(),
                    "step": done,
                }
                torch.save(state, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
    save(mtp, target, args.out, args.unroll)
    result = {"steps": args.steps, "seconds": round(time.time() - started, 1), "torch": torch.__version__, "last": row}
    if held is not None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            result["heldout"] = evaluate(objective, held.to(device), args.batch_size, args.context)
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="foretoken train-mtp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        print(json.dumps(train(args)))
    except KeyboardInterrupt:
        print("foretoken train-mtp: stopped; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    except (ValueError, ModelError) as error:
        print(f"foretoken train-mtp: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
