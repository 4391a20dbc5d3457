"""What one exchange between ranks costs, in a graph of many: our kernels, and NCCL's collectives.

    python -m benchmarks.gpu_exchange [--ranks 2] [--hidden 4096] [--vocabulary 128256] [--rows 1 8 32 128]

Sums are added to the residual stream, as after each attention and each MLP, large ones by shares too; gathers are of the scores of a vocabulary
that is split, whole on each rank, or a share of the rows on each, which tells the others a token for each ("told").
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import statistics
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from backend.parallel.ranks import await_rows, make_ranks
from benchmarks.models import check_gpus
from kernels import scattered
from kernels._load import device_stream

EXCHANGES, REPEATS = 100, 9
MEET = timedelta(seconds=60)


def microseconds(exchange: Callable[[], object]) -> float:
    """Of one among EXCHANGES in a graph: the median of REPEATS runs."""
    exchange()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(EXCHANGES):
            exchange()
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / EXCHANGES)
    return statistics.median(times[1:])


def add_as_it_is(memory: scattered.ScatterMemory, x: torch.Tensor, part: torch.Tensor) -> None:
    """A sum by shares alone: nothing is computed while it is on its way."""
    await_rows(scattered.add_product(x, part, lambda rows: rows, memory))


def measure(rank: int, arguments: argparse.Namespace, port: int) -> None:
    size, device = arguments.ranks, torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=MEET)
    with device_stream(device):
        ours = make_ranks(rank, size, store, device, MEET)
        nccl = dataclasses.replace(ours, peers=None, scattered=None)
        if rank == 0:
            print(f"{size} x {torch.cuda.get_device_name(device)}, bfloat16, us an exchange\n")
            columns = [f"sum of {arguments.hidden}", "NCCL and an addition", "by shares", f"gather of {arguments.vocabulary}", "NCCL and a copy"]
            print(f"| rows | {' | '.join([*columns, 'a share of the rows', 'told'])} |")
            print("|---|---|---|---|---|---|---|---|")
        for rows in arguments.rows:
            x, part = (torch.zeros(rows, arguments.hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
            scores = torch.zeros(rows, arguments.vocabulary // size, device=device, dtype=torch.bfloat16)
            sums = [microseconds(partial(own.add_sum, x, part)) for own in (ours, nccl)]
            shares = "-"
            if ours.scattered is not None and scattered.can_scatter(x, size):
                shares = f"{microseconds(partial(add_as_it_is, ours.scattered, x, part)):.1f}"
            gathers = [microseconds(partial(own.gather_vocabulary, scores, arguments.vocabulary)) for own in (ours, nccl)]
            words = torch.zeros(-(-rows // (4 * size)) * 8, device=device, dtype=torch.int32)
            gathers += [microseconds(partial(ours.share_rows, scores)), microseconds(partial(ours.gather_words, words))]
            if rank == 0:
                print(f"| {rows} | {sums[0]:.1f} | {sums[1]:.1f} | {shares} | {' | '.join(f'{own:.1f}' for own in gathers)} |", flush=True)
        ours.least(0, device)
        ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    arguments = parser.parse_args()
    check_gpus(parser, arguments.ranks)
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = int(own.getsockname()[1])
    mp.spawn(measure, (arguments, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
