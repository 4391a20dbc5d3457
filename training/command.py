"""`foretoken train KIND --model DIR --data PATH ... --out DIR`: trains a drafter for a model, and says what it is worth."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.errors import ConfigError, ModelError, RequestError
from backend.model_checks import check_model
from backend.model_files import fingerprint
from backend.models.dflash_spec import MARKOV_KINDS
from backend.models.shards import held
from training.checkpoints import told
from training.data import PROMPT_SHARE, Reader, choose_draft_ids, choose_mask_token, cut_prompts, write_answers
from training.drafters import KINDS
from training.objective import LOSSES
from training.report import describe, measure
from training.run import Run, count_anchors
from training.trainer import train

DESCRIPTION = """\
Trains a drafter for a model: on a model of any family that is served, frozen, with the states that serving hands to drafters.
OUT gets the drafter (config.json, model.safetensors: `foretoken serve --speculative-config` reads it, and so do other
servers that know the kind), checkpoints to go on from, log.jsonl (the loss curve) and result.json, which ends with what the drafter
is worth in the engine itself on text that it was not trained on. Ctrl-C (or SIGTERM) saves and ends; --resume goes on."""
EXAMPLES = """\
examples:
  foretoken train mtp --model DIR --data CODE/ MORE.jsonl --out DRAFTER --layers 2
  foretoken train eagle3 --model DIR --data chats.jsonl --answers 20000 --out DRAFTER --draft-vocab-size 32000
  foretoken train dspark --model DIR --data chats.jsonl --answers 20000 --out DRAFTER --layers 3 --block-size 7
  foretoken train medusa --model DIR --data CODE/ --out DRAFTER --states CACHE --device cpu
"""
ANCHOR_SHARE = 8
"""Without --num-anchors, a sequence has a block for so many of its tokens: DeepSeek's 512 for 4096."""
HELDOUT_SHARE = 50
"""Without --heldout, one in so many tokens is kept for the report."""
STEPS, MAX_MINUTES = 2000, 60 * 24 * 30
RANGES = {
    "layers": (1, 8),
    "inner": (1, 10**6),
    "drafts": (1, 16),
    "markov_rank": (1, 2**14),
    "mask_token_id": (0, 2**22),
    "steps": (1, 10**7),
    "batch_size": (1, 4096),
    "context": (16, 10**6),
    "seed": (0, 2**63 - 1),
    "checkpoint_every": (1, 10**7),
    "processes": (1, 64),
    "answers": (1, 10**8),
    "answer_tokens": (1, 10**6),
    "draft_vocab_size": (1, 2**22),
    "report_prompts": (0, 10**4),
    "report_tokens": (2, 10**6),
}
KIND_OPTIONS = ("layers", "inner", "taps", "draft_vocab_size", "markov_rank", "markov_head_type")
"""Of some kinds alone, as `Drafter.accepted_options` names them."""
BLOCK_OPTIONS = ("block_size", "num_anchors", "mask_token_id")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=sorted(KINDS), metavar="KIND", help=", ".join(KINDS))
    add = parser.add_argument_group("what it is trained on").add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="the target: a folder in Hugging Face layout, of any family that is served")
    add(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help='text files, folders of them, *.jsonl ("text" or "messages"), *.u16, *.u32',
    )
    add("--heldout", type=Path, nargs="+", metavar="PATH", help="the same kinds of file, for the report (default: the last fiftieth of the data)")
    add(
        "--answers", type=int, metavar="N", help="train on N answers that the model itself writes to the data as prompts (default: the data as it is)"
    )
    add("--answer-tokens", type=int, metavar="N", help="longest answer (default: three quarters of --context)")
    add("--temperature", type=float, metavar="T", help="of these answers (default 0)")
    add("--states", type=Path, metavar="CACHE", help="keep the model's states in this folder, and read them there again (default: compute them)")
    add = parser.add_argument_group("what is made").add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where the drafter and its checkpoints go")
    add("--drafts", type=int, metavar="N", help="steps to train for; of heads, their number (default: by kind; of dflash and dspark: --block-size)")
    add(
        "--layers",
        type=int,
        metavar="N",
        help="modules of mtp, residual blocks of medusa's and hydra's heads (default 1), layers of dflash and dspark (default 5)",
    )
    add("--inner", type=int, metavar="N", help="width of the feed-forward part, or of an MLP speculator's state (default: the target's)")
    add(
        "--taps",
        metavar="N,N,N",
        help="eagle3, dflash, dspark: layers of the target whose input it takes (default: 2, n / 2, n - 3; of blocks five, from 2 to n - 2)",
    )
    add("--draft-vocab-size", type=int, metavar="N", help="eagle3: it drafts the N tokens that the data has most (default: all)")
    add("--block-size", type=int, metavar="N", help="rows of a block: dflash makes one draft less (default 16), dspark as many (default 7)")
    add(
        "--mask-token-id", type=int, metavar="ID", help="dflash, dspark: what a block has for its drafts (default: the token that the data has least)"
    )
    add("--markov-rank", type=int, metavar="N", help="dspark: numbers that its Markov head keeps of each token (default 256)")
    add("--markov-head-type", choices=MARKOV_KINDS, help="dspark: what the Markov head makes of them (default vanilla)")
    add = parser.add_argument_group("how").add_argument
    add(
        "--loss",
        choices=LOSSES,
        help="divergence from the target's distribution, cross-entropy of the text, dspark's L1 (default: by kind, as its paper)",
    )
    add("--steps", type=int, metavar="N", help=f"optimizer steps (default {STEPS}, or as many as fit into --minutes)")
    add(
        "--minutes",
        type=float,
        metavar="M",
        help="as many steps as fit into M minutes; compiling, --states and the report come on top",
    )
    add("--batch-size", type=int, default=64, metavar="N", help="sequences a step, of all processes (default 64)")
    add("--context", type=int, default=1024, metavar="N", help="tokens a sequence (default 1024)")
    add("--num-anchors", type=int, metavar="N", help="dflash, dspark: blocks of each sequence in a step (default: --context / 8)")
    add("--lr", type=float, default=4e-3, metavar="RATE", help="peak learning rate (default 4e-3)")
    add("--dtype", choices=("float32", "bfloat16"), help="of the target and of products (default: bfloat16 on a GPU, float32 on a CPU)")
    add("--seed", type=int, default=0, help="of the weights that it begins with, and of the order of the data (default 0)")
    add("--checkpoint-every", type=int, default=500, metavar="N", help="steps between checkpoints (default 500)")
    add("--resume", action="store_true", help="go on from OUT's checkpoint; the other options must be those of that run")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:N or cpu (default: cuda where there is one)")
    add("--processes", type=int, default=1, metavar="N", help="share each step between so many GPUs, or processes of a CPU (default 1)")
    add("--report-prompts", type=int, default=16, metavar="N", help="held-out prompts of the report at the end; 0: none (default 16)")
    add("--report-tokens", type=int, default=256, metavar="N", help="longest answer to each (default 256, or what --context leaves)")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError naming the option, the value and the limit; fills in the kind's own defaults."""
    kind = KINDS[args.kind]
    for key, (low, high) in RANGES.items():
        value = getattr(args, key)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{key.replace('_', '-')} must be from {low} to {high}, got {value}")
    for key in (*KIND_OPTIONS, *BLOCK_OPTIONS):
        is_own = kind.rows_before_drafts is not None if key in BLOCK_OPTIONS else key in kind.accepted_options
        if getattr(args, key) is not None and not is_own:
            raise ValueError(f"--{key.replace('_', '-')} is no option of {args.kind}")
    if kind.rows_before_drafts is not None:
        _check_block(args, kind.rows_before_drafts)
    elif args.drafts is None:
        args.drafts = max(kind.default_drafts, args.layers or 1) if args.kind == "mtp" else kind.default_drafts
    args.layers, args.loss = args.layers or kind.default_layers, args.loss or kind.default_loss
    if args.kind == "mtp" and args.drafts < args.layers:
        raise ValueError(f"--drafts must be at least --layers ({args.layers}), got {args.drafts}: a layer that takes no step learns nothing")
    if args.minutes is not None and args.steps is not None:
        raise ValueError("--steps says how many steps are taken, --minutes has as many as fit: leave one of them out")
    if args.minutes is not None and not 0 < args.minutes <= MAX_MINUTES:
        raise ValueError(f"--minutes must be above 0 and at most {MAX_MINUTES}, got {args.minutes}")
    if args.minutes is None and args.steps is None:
        args.steps = STEPS
    if not 0 < args.lr < 1:
        raise ValueError(f"--lr must be between 0 and 1, got {args.lr}")
    if args.temperature is not None and not 0 <= args.temperature <= 10:
        raise ValueError(f"--temperature must be from 0 to 10, got {args.temperature}")
    if args.context <= args.drafts + 1:
        raise ValueError(f"--context {args.context} is too short for {args.drafts} drafts")
    if kind.rows_before_drafts is not None:
        most = count_anchors(args.context, args.drafts)
        args.num_anchors = min(max(1, args.context // ANCHOR_SHARE), most) if args.num_anchors is None else args.num_anchors
        if not 1 <= args.num_anchors <= most:
            raise ValueError(f"--num-anchors must be from 1 to {most} with --context {args.context} and {args.drafts} drafts, got {args.num_anchors}")
    for key in ("answer_tokens", "temperature"):
        if getattr(args, key) is not None and args.answers is None:
            raise ValueError(f"--{key.replace('_', '-')} says how answers are made; --answers says how many: it is missing")
    if args.heldout and not args.report_prompts:
        raise ValueError("--heldout is for the report, and --report-prompts 0 makes none: leave one of them out")
    if args.batch_size % args.processes:
        raise ValueError(f"--batch-size {args.batch_size} is no multiple of --processes {args.processes}")
    args.taps = _read_taps(args.taps)
    name, _, number = args.device.partition(":")
    if args.device not in ("cpu", "cuda") and not (name == "cuda" and number.isdecimal()):  # of others torch knows, and the engine does not
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {args.device!r:.80}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {args.device} cannot be used: {str(error).splitlines()[0]:.200}") from None
    is_gpu = args.device.startswith("cuda")
    if is_gpu and args.processes > 1 and (args.device != "cuda" or args.processes > torch.cuda.device_count()):
        raise ValueError(f"--processes {args.processes} take --device cuda and as many GPUs; got {args.device}, {torch.cuda.device_count()} GPUs")
    args.dtype = args.dtype or ("bfloat16" if is_gpu else "float32")
    for key, own in (("out", args.out), ("states", args.states)):
        if own is not None and os.path.realpath(own) in map(os.path.realpath, (*args.data, *(args.heldout or ()))):
            raise ValueError(f"--{key} {own} is data that the run reads: name another folder")
    holds = [name for name in ("checkpoint.pt", "config.json", "model.safetensors") if (args.out / name).exists()]
    if args.resume and "checkpoint.pt" not in holds:
        raise ValueError(f"--resume: {args.out / 'checkpoint.pt'} does not exist")
    if holds and not args.resume:
        raise ValueError(f"--out {args.out} has {', '.join(holds)} already: --resume goes on with that run; or name another folder")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {args.out}: {error.strerror}") from None


def _check_block(args: argparse.Namespace, rows_before: int) -> None:
    """The drafts of a block. Raises ValueError."""
    if args.drafts is not None:
        raise ValueError(f"--drafts is no option of {args.kind}: its --block-size says it")
    low, high = (bound + rows_before for bound in RANGES["drafts"])
    if args.block_size is not None and not low <= args.block_size <= high:
        raise ValueError(f"--block-size must be from {low} to {high}, got {args.block_size}")
    args.drafts = KINDS[args.kind].default_drafts if args.block_size is None else args.block_size - rows_before


def _read_taps(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        taps = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--taps must be numbers of layers like 2,10,17, got {text!r:.80}") from None
    if sorted(set(taps)) != list(taps):
        raise ValueError(f"--taps must go up, each layer once, got {text}")
    return taps


def prepare(args: argparse.Namespace, clock: Callable[[], float] = time.perf_counter) -> tuple[Run, torch.Tensor, list[np.ndarray]]:
    """The run, its token ids, and prompts for the report. Raises ValueError, ModelError."""
    spec, kind = check_model(args.model), KINDS[args.kind]
    limit, vocab_size = spec.max_model_len, spec.vocab_size
    if args.context > limit:
        raise ValueError(f"--context {args.context} is beyond the model's own limit {limit}")
    if args.draft_vocab_size is not None and args.draft_vocab_size > vocab_size:
        raise ValueError(f"--draft-vocab-size {args.draft_vocab_size} is more than the model's vocabulary, {vocab_size}")
    if args.mask_token_id is not None and args.mask_token_id >= vocab_size:
        raise ValueError(f"--mask-token-id {args.mask_token_id} is none of the model's tokens, 0 to {vocab_size - 1}")
    reader = Reader(args.model, [path for path in (args.out, args.states) if path is not None])
    held = reader.read(args.heldout, "--heldout", as_prompts=args.answers is not None) if args.heldout else None
    documents = reader.read(args.data, "--data", as_prompts=args.answers is not None)
    if held is not None:
        _check_length(held, args.context, "--heldout")
    if args.answers is not None:
        documents = _distil(args, documents)
    _check_length(documents, args.context, "--data")
    ids = np.concatenate(documents)
    if held is None and args.report_prompts:
        count = max(args.context, len(ids) // HELDOUT_SHARE)
        if len(ids) - count < args.context:
            raise ValueError(
                f"--data holds {len(ids)} tokens; one sequence takes {args.context} (--context), and as many are kept for the report: "
                "name a --heldout file, or --report-prompts 0"
            )
        held, ids = [ids[-count:]], ids[:-count]
    prompts = cut_prompts(held, args.context, args.report_prompts, args.seed) if held is not None and args.report_prompts else []
    draft_ids = None
    if args.draft_vocab_size is not None:
        draft_ids = torch.from_numpy(choose_draft_ids([ids], vocab_size, args.draft_vocab_size))
    if kind.rows_before_drafts is not None and args.mask_token_id is None:
        args.mask_token_id = choose_mask_token(ids, vocab_size)
    keys = ("kind", "model", "out", "steps", "batch_size", "context", "lr", "seed", "loss", "drafts", "layers", "inner", "taps", "dtype", "states")
    keys += ("num_anchors", "mask_token_id", "markov_rank", "markov_head_type", "minutes")
    data = {"tokens": len(ids), "hash": hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()}
    run = Run(
        **{key: getattr(args, key) for key in keys},
        draft_ids=draft_ids,
        device=args.device,
        processes=args.processes,
        checkpoint_every=args.checkpoint_every,
        resume=args.resume,
        data=data,
        target=fingerprint(args.model),
        clock=clock,
    )
    return run, torch.from_numpy(ids.view(np.int32).copy()), prompts


def _check_length(documents: list[np.ndarray], context: int, option: str) -> None:
    count = sum(map(len, documents))
    if count < context:
        raise ValueError(f"{option} holds {count} tokens; one sequence takes {context} (--context)")


def _distil(args: argparse.Namespace, documents: list[np.ndarray]) -> list[np.ndarray]:
    """The target's own answers; kept beside the checkpoints, so that a resumed run goes on with the same ones."""
    path = args.out / "answers.u32"
    if args.resume and path.is_file():
        return [np.fromfile(path, dtype="<u4").astype(np.uint32)]
    prompts = cut_prompts(documents, args.context, args.answers, args.seed)
    longest = max(map(len, prompts), default=0)
    most = args.answer_tokens or args.context - args.context // PROMPT_SHARE
    limit = check_model(args.model).max_model_len
    if longest + most > limit:
        raise ValueError(f"prompts of {longest} tokens and --answer-tokens {most} are more than the model's own limit {limit}")
    answers = write_answers(args.model, prompts, most, args.temperature or 0.0, args.seed, dtype=args.dtype, device=args.device)
    free_memory()  # for training, in this process or in others
    with told(args.out, args.out / "checkpoint.pt"):
        path.write_bytes(np.concatenate(answers).astype("<u4").tobytes())
    return answers


def free_memory() -> None:
    """Gives back what a trainer or an engine that is done had of a GPU: both refer to themselves."""
    gc.collect()
    torch.cuda.empty_cache()


def run_command(args: argparse.Namespace, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any] | None:
    """Trains and reports; None: a signal ended it, and all is saved. clock: of --minutes, in seconds. Raises ValueError, ModelError, ConfigError."""
    check(args)
    with held(args.out):
        return _run(args, clock)


def _run(args: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Any] | None:
    run, ids, prompts = prepare(args, clock)
    started = time.time()
    if not train(run, ids):
        return None
    result: dict[str, Any] = {"kind": run.kind, "steps": run.steps, "tokens": len(ids), "seconds": round(time.time() - started, 1)}
    result |= {"torch": torch.__version__, "options": run.identity()}
    if log := (run.out / "log.jsonl").read_text().splitlines():
        result["last"] = json.loads(log[-1])
        result["steps"] = result["last"]["step"]
    if prompts:
        longest = min(args.context - args.context // PROMPT_SHARE, args.report_tokens)
        engine = {"dtype": run.dtype, "device": args.device, "max_batch_size": 8}
        result["report"] = measure(run.model, run.out, run.kind, run.drafts, prompts, longest, **engine)
    with told(run.out, run.checkpoint):
        (run.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="foretoken train", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False)
    add_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        result = run_command(args)
    except (ValueError, ModelError, ConfigError, RequestError) as error:
        print(f"foretoken train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("foretoken train: stopped; --resume goes on from the last checkpoint, if there is one", file=sys.stderr)
        return 130
    if result is None:
        print(f"foretoken train: stopped and saved in {args.out}; --resume goes on", file=sys.stderr)
        return 130
    if "report" in result:
        print(describe(result["report"]), file=sys.stderr)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
