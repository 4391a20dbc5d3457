"""Drafters of several kinds, trained on the same states for the same time and compared in the engine: the matched table of `RESULTS.md`.

    python -m benchmarks.drafters --data training/data/train.u16 --heldout training/data/heldout.u16 --out OUT --minutes 6   # a GPU
    python -m benchmarks.drafters --model DIR --data chats.jsonl --heldout chats-heldout.jsonl --answers 600 --kinds eagle3 dspark --out OUT

`python -m benchmarks.drafter_data` writes files for it. With --answers the model itself answers the data first, and all kinds are trained on that.
On a CPU the minutes are those of this process (one thread), so that others on the machine do not count; on a GPU they are those of the clock.
On a CPU the states of the data are made first, once for all kinds, and are in nobody's time; on a GPU each step makes its own, as the states
of much data fit on no disk; --states and --no-states say otherwise. Kinds have as many drafts and, where they have layers, one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.errors import ModelError
from training import MODEL_DIR
from training.command import free_memory, make_parser, run_command
from training.data import Reader, cut_prompts, write_answers
from training.drafters import KINDS
from training.report import measure

USUAL = ("mtp", "eagle3", "dflash", "dspark", "medusa", "hydra")


def answer(args: argparse.Namespace) -> Path:
    """The file of the model's answers, and the prompts before them."""
    path = args.out / "answers.u32"
    prompts = cut_prompts(Reader(args.model).read(args.data, "--data", as_prompts=True), args.context, args.answers, 0)
    device = "cpu" if args.device == "cpu" else "auto"
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    answers = write_answers(args.model, prompts, args.answer_tokens, 0.0, 0, dtype=dtype, device=device)
    np.concatenate(answers).astype("<u4").tofile(path)
    return path


def own_options(kind: str, args: argparse.Namespace) -> list[str]:
    """As many drafts and layers as the others have, and what is said of this kind."""
    before = KINDS[kind].rows_before_drafts
    words = ["--drafts", str(args.drafts)] if before is None else ["--block-size", str(args.drafts + before), "--layers", "1"]
    return words + [word for given in args.options if given.startswith(f"{kind} ") for word in given.split()[1:]]


def row(result: dict[str, Any]) -> str:
    """Of the table in Markdown."""
    report = result["report"]
    rates = " ".join("-" if rate is None else f"{100 * rate:.0f}" for rate in report["acceptance"])
    length, share, speed = report["accepted_length"], report["drafting_share"], report["speed_up"]
    steps, spent = (str(result["steps"]), f"{result['last']['seconds']:.0f}") if "last" in result else ("-", "-")
    return f"| {result['kind']} | {steps} | {spent} | {result['megabytes']:.1f} | {rates} | {length:.2f} | {100 * share:.0f}% | {speed:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--heldout", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True, help="a new folder: a folder of each kind, and results.json")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), help="default: all but mlp_speculator")
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="'KIND --OPTION VALUE'", help="further options of a kind; block drafters have one layer"
    )
    parser.add_argument("--also", nargs=2, action="append", default=[], metavar=("KIND", "DIR"), help="a drafter that is there, measured alike")
    parser.add_argument("--states", action=argparse.BooleanOptionalAction, help="keep the model's states on disk; default: on a CPU")
    parser.add_argument("--answers", type=int, help="of the model to the data, to train on")
    parser.add_argument("--answer-tokens", type=int, default=192)
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, each kind")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--report-prompts", type=int, default=32)
    parser.add_argument("--report-tokens", type=int, default=256)
    parser.add_argument("--report-batch-size", type=int, default=1, help="of the engine that measures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    is_gpu = args.device.startswith("cuda")
    clock = time.perf_counter if is_gpu else time.process_time
    if not is_gpu:
        torch.set_num_threads(1)
    try:
        args.out.mkdir(parents=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}; it must be a new folder")
    try:
        held = Reader(args.model).read(args.heldout, "--heldout", as_prompts=args.answers is not None)
        if missing := [path for path in args.data if not path.exists()]:
            raise ValueError(f"--data {missing[0]} does not exist")
    except (ModelError, ValueError) as error:
        args.out.rmdir()  # for the next try
        parser.error(str(error))
    data = args.data if args.answers is None else [answer(args)]
    common = ["--model", str(args.model), "--data", *map(str, data)]
    if args.states if args.states is not None else not is_gpu:
        common += ["--states", str(args.out / "states")]
    keys = ("batch_size", "context", "lr", "device")
    common += [word for key in keys for word in (f"--{key.replace('_', '-')}", str(getattr(args, key)))]
    prompts = cut_prompts(held, args.context, args.report_prompts, 0)
    engine = {"dtype": "bfloat16" if is_gpu else "float32", "device": args.device, "max_batch_size": args.report_batch_size}
    results: list[dict[str, Any]] = []

    def add(result: dict[str, Any], folder: Path, drafts: int) -> None:
        report = measure(args.model, folder, result["kind"], drafts, prompts, args.report_tokens, **engine)
        free_memory()
        results.append(result | {"megabytes": (folder / "model.safetensors").stat().st_size / 2**20, "report": report})
        (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        print(row(results[-1]), flush=True)

    for kind, folder in args.also:
        add({"kind": kind}, Path(folder), args.drafts)
    for kind in args.kinds or USUAL:
        options = [kind, *common, *own_options(kind, args)]
        words = ["--minutes", str(args.minutes), "--report-prompts", "0", "--out", str(args.out / kind)]
        result = run_command(make_parser().parse_args([*options, *words]), clock)
        if result is None:
            return
        free_memory()  # for the engine that measures
        add(result, args.out / kind, result["options"]["drafts"])
    print("\n| kind | steps | seconds | MiB | accepted by position, % | tokens a step | drafting | x plain |\n|---|---|---|---|---|---|---|---|")
    print("\n".join(map(row, results)))


if __name__ == "__main__":
    main()
