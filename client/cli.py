"""`foretoken complete` and `foretoken chat`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from client.headers import add_header_arguments, read_headers
from client.loopback import check_address
from client.messages import DEFAULT_GRPC_URL, Completion, GenerateError
from client.sync import Client
from client.tls import add_tls_arguments, read_tls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="the prompt (complete: default standard input; chat: the first message)")
    parser.add_argument(
        "--url",
        type=read_address,
        default=DEFAULT_GRPC_URL,
        metavar="HOST:PORT",
        help=f"the server's gRPC address, by TLS grpcs://HOST:PORT (default {DEFAULT_GRPC_URL})",
    )
    add_tls_arguments(parser)
    add_header_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens of the answer at most (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token (default)")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that have this share together")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    parser.add_argument("--speculative", type=read_json, metavar="JSON", help="this request's own, such as '{\"num_speculative_tokens\": 0}'")
    parser.add_argument("--quiet", action="store_true", help="no statistics")


def read_address(text: str) -> str:
    """An option's value."""
    try:
        return check_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_json(text: str) -> Any:
    """An option's value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not valid JSON: {error}") from None


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "speculative")
    return {name: getattr(args, name) for name in names}


def stream_to_terminal(client: Client, **values: Any) -> tuple[Completion, str]:
    """Prints a completion as it comes; returns it with a line of statistics."""
    started, first = time.perf_counter(), 0.0
    completion = Completion()
    for chunk in client.stream(**values):
        first = first or time.perf_counter()
        completion.add(chunk)
        print(chunk.text, end="", flush=True)
    ended = time.perf_counter()
    count = len(completion.token_ids)
    line = f"{count} tokens, time to first token {1e3 * (first - started):.0f} ms"
    if count > 1 and ended > first:
        line += f", {(count - 1) / (ended - first):.0f} tokens/s after it"
    if statistics := completion.speculation:
        line += f"; {statistics['accepted']} of {statistics['drafted']} drafts accepted, {count / max(1, statistics['steps']):.2f} tokens a step"
    return completion, line


def connect(args: argparse.Namespace) -> Client | None:
    """None: with these certificates or headers it cannot be, which was said."""
    try:
        return Client(args.url, tls=read_tls(args), headers=read_headers(args))
    except ValueError as error:
        print(f"foretoken {args.command}: {error}", file=sys.stderr)
        return None


def complete(args: argparse.Namespace) -> int:
    if (made := connect(args)) is None:
        return 2
    prompt = " ".join(args.prompt) or sys.stdin.read()
    with made as client:
        try:
            _, line = stream_to_terminal(client, prompt=prompt, **_parameters(args))
        except GenerateError as error:
            print(f"\nforetoken complete: {error}", file=sys.stderr)
            return 1
    print() if args.quiet else print(f"\n\n[{line}]", file=sys.stderr)
    return 0


def chat(args: argparse.Namespace) -> int:
    """A conversation; an empty line or the end of input leaves it."""
    if (made := connect(args)) is None:
        return 2
    messages: list[dict[str, str]] = []
    opening = " ".join(args.prompt)
    with made as client:
        while True:
            if opening:
                text, opening = opening, ""
            else:
                try:
                    text = input("> ")
                except EOFError:
                    return 0
            if not text.strip():
                return 0
            messages.append({"role": "user", "content": text})
            try:
                completion, line = stream_to_terminal(client, messages=messages, **_parameters(args))
            except GenerateError as error:
                print(f"\nforetoken chat: {error}", file=sys.stderr)
                return 1
            messages.append({"role": "assistant", "content": completion.text})
            print() if args.quiet else print(f"\n[{line}]", file=sys.stderr)
            if not sys.stdin.isatty() and args.prompt:
                return 0
