"""`python -m tests.soak`: exit status 1 on any fault."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from client import Client
from tests.soak.book import Book
from tests.soak.checks import Checks
from tests.soak.disturbances import deal, disturbed
from tests.soak.questions import Question, ask_all
from tests.soak.storm import Worker, rage
from tests.soak.system import System, running_system


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of storm, beside warm-up and quiet (default 30)")
    parser.add_argument("--round-minutes", type=float, help="of storm between two looks at a quiet system (default 5, or a quarter of all)")
    parser.add_argument("--warm-seconds", type=float, help="of storm before memory is looked at first (default 30, or a tenth of all)")
    parser.add_argument(
        "--disturb-seconds", type=float, default=20.0, help="between two disturbances, about, in the second half; 0: none (default 20)"
    )
    parser.add_argument("--workers", type=int, default=12, help="clients at once (default 12)")
    parser.add_argument("--seed", type=int, help="of everything (default: one that is printed)")
    parser.add_argument("--report-seconds", type=float, default=15.0, help="between two lines of progress (default 15)")
    parser.add_argument("--logs", type=Path, help="folder for the logs (default: a new one under the temporary folder)")
    parser.add_argument("--repeat", metavar="WORKER/NUMBER", action="append", default=[], help="only these exchanges, one after the other")
    args = parser.parse_args()
    args.round_minutes = args.round_minutes or min(5.0, args.minutes / 4)
    args.warm_seconds = args.warm_seconds or max(30.0, 6 * args.minutes)
    args.seed = random.randrange(2**31) if args.seed is None else args.seed
    return args


def make_questions(system: System, seed: int) -> list[Question]:
    with Client(system.server.grpc, inactivity_timeout=30.0) as client:

        def tokenize(text: str) -> list[int]:
            (completion,) = client.generate(text, max_tokens=1, echo=True)
            return completion.token_ids[:-1]

        return ask_all(client, tokenize, random.Random(f"{seed}/questions"))


def soak(args: argparse.Namespace, system: System, book: Book, checks: Checks) -> None:
    checks.note_memory("fresh")
    questions = make_questions(system, args.seed)
    workers = [Worker(number, args.seed, system, questions, book) for number in range(args.workers)]
    disturber_rng = random.Random(f"{args.seed}/disturbances")
    deck = deal(disturber_rng)
    try:
        if args.repeat:
            for name in args.repeat:
                workers[0].exchange_once(name)
            return
        system.touch_pages()
        checks.note_memory("all pages touched")
        rage(workers, book, args.warm_seconds, args.report_seconds, checks.note_processes)
        checks.in_quiet("warm")
        ending, round_seconds = time.monotonic() + 60 * args.minutes, 60 * args.round_minutes
        for number in itertools.count(1):
            left = ending - time.monotonic()
            if (seconds := min(left, round_seconds)) < 1:
                break
            # The first half is calm, so that memory is that of processes which live long; and so is the last round, which must be as the first.
            is_disturbed = args.disturb_seconds > 0 and left < 30 * args.minutes + 1 and left > 1.5 * round_seconds
            before = checks.restarts()
            with disturbed(system, book, deck, disturber_rng, args.disturb_seconds) if is_disturbed else contextlib.nullcontext():
                rage(workers, book, seconds, args.report_seconds, checks.note_processes)
            if not is_disturbed:
                checks.unexpected_restarts(before)
            checks.in_quiet(f"round {number}{', disturbed' if is_disturbed else ''}")
    finally:
        for worker in workers:
            worker.close()


def main() -> int:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped then too
    folder = args.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"[soak] seed {args.seed}, {args.minutes:g} minutes, {args.workers} clients; logs in {folder}", flush=True)
    book, started = Book(), time.monotonic()
    with running_system(folder) as system:
        checks = Checks(system, book)
        soak(args, system, book, checks)
        checks.at_the_end()
        minutes = (time.monotonic() - started) / 60
        print(f"\n[soak] {minutes:.1f} minutes, seed {args.seed}: {book.line()}")
        print(book.table(), checks.memory_table(), checks.logged(), sep="\n")
    for fault in book.faults:
        print(f"FAULT {fault.splitlines()[0]}")
    return 1 if book.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
