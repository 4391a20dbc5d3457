"""The command: options, arrivals, the run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from client.bench.dataset import DatasetError, Prompt, read_prompts
from client.bench.report import METRICS, format_table, summarize
from client.bench.requests import Backend, GrpcBackend, OpenAIBackend, Outcome, send
from client.bench.speculation import Acceptance, Counters, compare, read_counters
from client.cli import read_json
from client.headers import add_header_arguments, read_headers
from client.loopback import check_address
from client.messages import DEFAULT_GRPC_URL
from client.tls import Tls, add_tls_arguments, read_tls

DEFAULT_OPENAI_URL = "http://127.0.0.1:8080"
DEFAULT_ENDPOINT = "/v1/completions"
DEFAULT_METRICS_URL = "http://127.0.0.1:8002/metrics"
MAX_REQUESTS = 10**6
"""Prompts are made before the first one is sent."""
SETTLE_SECONDS = 0.5
"""The server publishes its counters ten times a second."""

DESCRIPTION = """\
Sends prompts of real text to a running server and reports how fast the answers came, how many failed, and what speculation did.
Options are named as in `vllm bench serve`. Exit status: 0 when every request was answered rightly, 1 when any failed, 2 for wrong options."""
EXAMPLES = """\
examples:
  foretoken bench --num-prompts 64 --max-concurrency 8
  foretoken bench --request-rate 4 --burstiness 0.5 --goodput ttft:200 tpot:20 --metric-percentiles 50,90,99
  foretoken bench --backend openai --url http://127.0.0.1:8080 --dataset-path src/ --output-len 32:128
  foretoken bench --speculative '{"num_speculative_tokens": 0}' --save-result --result-filename plain.json
"""


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text!r:.80}")
    return value


def _count(text: str) -> int:
    if (value := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r:.80}")
    return value


def _count_from_zero(text: str) -> int:
    if (value := _whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text!r:.80}")
    return value


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r:.80}") from None
    if value > MAX_REQUESTS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_REQUESTS}, got {text!r:.80}")
    return value


def _length(text: str) -> tuple[int, int]:
    """`N`, or `MIN:MAX`: any length between the two."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"must be a number above 0, or MIN:MAX, got {text!r}")
    return bounds


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"unknown metric {unknown[0]!r}; known: {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(p) for p in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= p <= 100 for p in values):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 100 with commas between, got {text!r}")
    return values


def _goal(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in METRICS or name == "itl":
        raise argparse.ArgumentTypeError(f"unknown metric {name!r} in {text!r}; known: ttft, tpot, e2el")
    try:
        return name, _above_zero(value)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"must be METRIC:MILLISECONDS, got {text!r}: milliseconds {error}") from None


def _pair(text: str) -> tuple[str, str]:
    key, mark, value = text.partition("=")
    if not mark:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    return key, value


def add_arguments(parser: argparse.ArgumentParser, dataset: Sequence[Path]) -> None:
    """dataset: the files that prompts are cut from when none are named."""
    parser.description, parser.epilog, parser.formatter_class = DESCRIPTION, EXAMPLES, argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=("grpc", "openai"), default="grpc", help="how to ask: Triton's gRPC stream (default), or OpenAI's API")
    server.add_argument("--url", help=f"address, by TLS grpcs:// or https:// (default: grpc {DEFAULT_GRPC_URL}, openai {DEFAULT_OPENAI_URL})")
    server.add_argument("--endpoint", default=DEFAULT_ENDPOINT, help=f"openai: or /v1/chat/completions (default {DEFAULT_ENDPOINT})")
    server.add_argument("--model", help="grpc: decode (default) or generate; openai: the model's name (default: the first that the server lists)")
    server.add_argument(
        "--metrics-url", default=DEFAULT_METRICS_URL, help=f"Triton's metrics, for speculation's counters (default {DEFAULT_METRICS_URL})"
    )
    server.add_argument(
        "--timeout", type=_above_zero, default=60.0, metavar="S", help="a server that sends nothing for so long has failed (default 60)"
    )
    add_tls_arguments(server, has_http=True)
    add_header_arguments(server)
    data = parser.add_argument_group("prompts")
    text = "text files or folders, or one .jsonl file of {prompt, output_tokens} (default: code of Python's standard library)"
    data.add_argument("--dataset-path", type=Path, nargs="+", default=list(dataset), metavar="PATH", help=text)
    data.add_argument("--num-prompts", type=_count, default=64, metavar="N", help="requests in all (default 64)")
    data.add_argument("--input-characters", type=_length, default=(200, 1600), metavar="N|MIN:MAX", help="a prompt's length (default 200:1600)")
    data.add_argument("--output-len", type=_length, default=(64, 64), metavar="N|MIN:MAX", help="tokens to ask for (default 64)")
    data.add_argument("--ignore-eos", action="store_true", help="go on past the end of text, to the length asked for; any other length then fails")
    data.add_argument("--temperature", type=float, default=0.0, help="default 0, greedy")
    data.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that have this share together")
    data.add_argument("--speculative", type=read_json, metavar="JSON", help="the requests' own, such as '{\"num_speculative_tokens\": 0}'")
    data.add_argument("--seed", type=int, default=0, help="of prompts, arrivals and sampling (default 0)")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=_above_zero, default=math.inf, metavar="RPS", help="requests a second (default: all at once)")
    text = "of arrivals at a request rate: 1 is a Poisson process (default), less comes in bursts, more comes evenly (gamma distribution)"
    load.add_argument("--burstiness", type=_above_zero, default=1.0, metavar="SHAPE", help=text)
    load.add_argument("--max-concurrency", type=_count, metavar="N", help="requests under way at most (default: no limit)")
    load.add_argument(
        "--num-warmups", type=_count_from_zero, default=1, metavar="N", help="requests sent before, not measured, of other prompts (default 1)"
    )
    out = parser.add_argument_group("report")
    out.add_argument("--percentile-metrics", type=_metrics, default=list(METRICS), metavar="LIST", help=f"default {','.join(METRICS)}")
    out.add_argument("--metric-percentiles", type=_percentiles, default=[99.0], metavar="LIST", help="default 99")
    text = "count requests within all of these, such as ttft:200 tpot:20 (milliseconds)"
    out.add_argument("--goodput", type=_goal, nargs="+", default=[], metavar="METRIC:MS", help=text)
    out.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    out.add_argument("--save-detailed", action="store_true", help="and those of every request")
    out.add_argument("--result-filename", type=Path, metavar="FILE", help="default: bench-BACKEND-TIME.json")
    out.add_argument("--metadata", type=_pair, nargs="+", default=[], metavar="KEY=VALUE", help="to be written with the figures")
    out.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def make_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When to send each request, in seconds from the start: gaps of a gamma distribution of mean 1/rate (shape 1: a Poisson process)."""
    rng = random.Random(seed)
    at, arrivals = 0.0, []
    for _ in range(count):
        arrivals.append(at)
        if math.isfinite(rate):
            at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return arrivals


async def send_all(
    backend: Backend, prompts: Sequence[Prompt], arrivals: Sequence[float], args: argparse.Namespace, progress: tqdm[Any]
) -> tuple[list[Outcome], float]:
    """Outcomes in the order of the prompts, and the seconds from the first request to the last answer."""
    room = asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else contextlib.nullcontext()

    async def ask(index: int) -> Outcome:
        async with room:
            outcome = await send(backend, prompts[index], args.seed + index, args.ignore_eos)
        progress.update()
        return outcome

    started = time.perf_counter()
    tasks = []
    for index, at in enumerate(arrivals):
        if (left := started + at - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.create_task(ask(index)))
    outcomes = list(await asyncio.gather(*tasks))
    return outcomes, time.perf_counter() - started


def make_backend(args: argparse.Namespace) -> Backend:
    parameters = {"temperature": args.temperature, "top_p": args.top_p, "ignore_eos": args.ignore_eos or None, "speculative": args.speculative}
    parameters = {k: v for k, v in parameters.items() if v is not None}
    tls = read_tls(args)
    if args.backend == "grpc":
        url = args.url or DEFAULT_GRPC_URL
        return GrpcBackend(url, args.model, parameters, args.timeout, tls.at(url), read_headers(args))
    return OpenAIBackend(args.url or DEFAULT_OPENAI_URL, args.endpoint, args.model, parameters, args.timeout, tls)


def _read_counters(url: str, tls: Tls) -> Counters | None:
    try:
        return read_counters(url, context=tls.context_of(url))
    except (OSError, ValueError) as error:
        print(f"foretoken bench: {url}: {error}: nothing will be said about speculation", file=sys.stderr)
        return None


async def _measure(args: argparse.Namespace, prompts: Sequence[Prompt]) -> tuple[list[Outcome], float, list[Acceptance]]:
    """Warm-ups, then the run between two readings of the counters. Raises RuntimeError when a warm-up fails."""
    backend = make_backend(args)
    try:
        for index, prompt in enumerate(prompts[args.num_prompts :]):
            outcome = await send(backend, prompt, args.seed + args.num_prompts + index, args.ignore_eos)
            if outcome.error is not None:
                raise RuntimeError(f"the warm-up failed, so nothing was measured: {outcome.error}")
        await asyncio.sleep(SETTLE_SECONDS)
        before = await asyncio.to_thread(_read_counters, args.metrics_url, read_tls(args))
        arrivals = make_arrivals(args.num_prompts, args.request_rate, args.burstiness, args.seed)
        with tqdm(total=args.num_prompts, unit="request", disable=args.disable_tqdm or not sys.stderr.isatty()) as progress:
            outcomes, duration = await send_all(backend, prompts, arrivals, args, progress)
        await asyncio.sleep(SETTLE_SECONDS)
        after = await asyncio.to_thread(_read_counters, args.metrics_url, read_tls(args)) if before is not None else None
    finally:
        await backend.close()
    if before is None or after is None:
        return outcomes, duration, []
    try:
        return outcomes, duration, compare(before, after)
    except ValueError as error:
        print(f"foretoken bench: {error}: nothing will be said about speculation", file=sys.stderr)
        return outcomes, duration, []


def find_contradiction(args: argparse.Namespace) -> str | None:
    """What an option asks for in vain: better known before the run than after it."""
    is_saved = args.save_result or args.save_detailed
    if not is_saved and (args.result_filename or args.metadata):
        return f"{'--result-filename' if args.result_filename else '--metadata'} has no effect: add --save-result"
    if args.burstiness != 1 and not math.isfinite(args.request_rate):
        return "--burstiness has no effect where all requests come at once: add --request-rate"
    if args.endpoint != DEFAULT_ENDPOINT and args.backend != "openai":
        return f"--endpoint has no effect with --backend {args.backend}: add --backend openai"
    if args.backend == "grpc" and args.url is not None:
        try:
            check_address(args.url)
        except ValueError as error:
            return f"--url: {error}"
    try:
        read_tls(args).check_use([args.url or (DEFAULT_GRPC_URL if args.backend == "grpc" else DEFAULT_OPENAI_URL), args.metrics_url])
        read_headers(args)
    except ValueError as error:
        return str(error)
    if args.backend != "grpc" and (args.triton_header or args.triton_header_file):
        return f"--triton-header has no effect with --backend {args.backend}, which does not ask Triton"
    path = args.result_filename
    if path and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        return f"--result-filename {path}: {'is a directory' if path.is_dir() else 'cannot be written'}"
    return None


def run(args: argparse.Namespace) -> int:
    """0: all answered rightly; 1: some failed, or nothing could be measured; 2: something that the options ask for cannot be had."""
    if message := find_contradiction(args):
        print(f"foretoken bench: {message}", file=sys.stderr)
        return 2
    if args.backend == "openai" and importlib.util.find_spec("aiohttp") is None:
        print("foretoken bench: --backend openai: aiohttp is not installed: pip install 'foretoken-triton[load]'", file=sys.stderr)
        return 2
    try:
        prompts = read_prompts(args.dataset_path, args.num_prompts + args.num_warmups, args.input_characters, args.output_len, args.seed)
    except (DatasetError, OSError) as error:
        print(f"foretoken bench: --dataset-path: {error}", file=sys.stderr)
        return 2
    try:
        outcomes, duration, speculation = asyncio.run(_measure(args, prompts))
    except RuntimeError as error:
        print(f"foretoken bench: {error}", file=sys.stderr)
        return 1
    summary = summarize(outcomes, duration, args.percentile_metrics, args.metric_percentiles, dict(args.goodput))
    print(format_table(summary, args.percentile_metrics, args.metric_percentiles, speculation))
    if args.save_result or args.save_detailed:
        now = datetime.now(timezone.utc)
        path = args.result_filename or Path(f"bench-{args.backend}-{now:%Y%m%d-%H%M%S}.json")
        try:
            path.write_text(json.dumps(make_result(args, now, summary, speculation, outcomes), indent=1) + "\n")
        except OSError as error:
            print(f"foretoken bench: --result-filename {path}: {error.strerror}", file=sys.stderr)
            return 1
        print(f"written to {path}")
    return 1 if summary["failed"] else 0


def make_result(
    args: argparse.Namespace, now: datetime, summary: dict[str, Any], speculation: Sequence[Acceptance], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """What `--save-result` writes: the conditions, the figures, each method's speculation."""
    result = {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "backend": args.backend,
        "endpoint": args.endpoint if args.backend == "openai" else None,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "ignore_eos": args.ignore_eos,
        "temperature": args.temperature,
        "speculative": args.speculative,
        **dict(args.metadata),
        **summary,
        "speculation": {method.method: method.as_dict() for method in speculation},
    }
    if args.save_detailed:
        result["requests"] = [
            {
                "input_tokens": o.prompt_tokens,
                "output_tokens": o.output_tokens,
                "error": o.error,
                "ttft_ms": 1e3 * o.ttft if o.arrivals else None,
                "e2el_ms": 1e3 * o.e2el,
                "itl_ms": [1e3 * gap for gap in o.itl],
            }
            for o in outcomes
        ]
    return result
