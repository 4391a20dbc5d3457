"""A step's layout, logits processing, sampling, verification, commit and lookup on one GPU, against the time to read the logits once.

python -m benchmarks.gpu_sampling [--layout]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.models import check_gpus
from kernels._load import device_stream
from kernels.ngram import draft_ngram
from kernels.ops import Admission, RequestTable, commit
from kernels.sampling import choose, process_and_choose, process_logits
from kernels.step import append_draft, prepare_drafter, prepare_step
from kernels.step_rows import DrafterRows, StepRows
from kernels.structs import COUNT, DRAFTER_COUNT, EMITS, END, FIRST, INDEX, MODEL_LIMIT, NUM_FIELDS, NUM_PAGES, VERIFY_LIMIT, StepSizes
from kernels.verify import verify_drafts

VOCAB = 128256
L2_BYTES = 200e6


def measure(calls: Sequence[Callable[[], object]], replays: int = 9) -> float:
    """Median seconds of one call, all captured in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for call in calls:
            call()
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < 0.05:  # clocks rise
        graph.replay()
        torch.cuda.synchronize()
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a kernel that copies 2 GB."""
    source, target = torch.randn(2, 2**29, device=device).unbind()
    return 2 * source.nbytes / measure([lambda: torch.neg(source, out=target)] * 3)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of the fastest thing here that reads rows of logits once: greedy choice."""
    table, sets = make_table(128, device, known=4, is_greedy=True), logits_sets(512, "flat", device)
    cu = torch.arange(129, dtype=torch.int32, device=device) * 4
    indices = torch.arange(128, dtype=torch.int32, device=device)
    outputs = choose(sets[0], table, indices, cu)
    return sets[0].nbytes / measure([lambda x=x: choose(x, table, indices, cu, outputs) for x in sets])  # type: ignore[misc]


def make_table(batch: int, device: torch.device, *, known: int = 640, **parameters: object) -> RequestTable:
    table = RequestTable(batch, max(known + 64, 1024), 5, VOCAB, device)
    for index in range(batch):
        ids = torch.randint(0, VOCAB, (known,)).tolist()
        table.admit([Admission(index, ids, known * 4 // 5, known + 60, seed=index, **parameters)])  # type: ignore[arg-type]
        torch.cuda.synchronize()
    return table


def logits_sets(rows: int, kind: str, device: torch.device) -> list[torch.Tensor]:
    """As many as exceed the cache. flat: normal logits as random weights give; peaked: a few likely tokens far above, as trained ones do."""
    count = max(2, min(64, int(L2_BYTES // (rows * VOCAB * 2)) + 1))
    made = []
    for _ in range(count):
        logits = torch.randn(rows, VOCAB, device=device) * (1.3 if kind == "flat" else 2)
        if kind == "peaked":
            logits += 14 * (torch.rand_like(logits) < 20 / VOCAB)
        made.append(logits.bfloat16())
    return made


def sampling_rows(device: torch.device, bandwidth: float) -> None:
    print(f"{'batch':>5} {'K':>2} {'rows':>4} {'logits':>7} {'parameters':>28} {'read us':>8} {'process':>8} {'choose':>8} {'fused':>8} {'ratio':>6}")
    penalties = {"repetition": 1.1, "presence": 0.1, "frequency": 0.1}
    cases: list[tuple[str, str, dict[str, object]]] = [
        ("greedy", "flat", {"is_greedy": True}),
        ("T .8", "flat", {"temperature": 0.8}),
        ("T .8 top_p .9", "flat", {"temperature": 0.8, "top_p": 0.9}),
        ("T .8 top_p .9 penalties", "flat", {"temperature": 0.8, "top_p": 0.9, **penalties}),
        ("T .8 top_p .9 penalties", "peaked", {"temperature": 0.8, "top_p": 0.9, **penalties}),
        ("T .7 top_p .8 top_k 20", "peaked", {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
        ("T .7 top_p .8 top_k 20", "flat", {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    ]
    for batch, width in ((1, 0), (1, 3), (8, 0), (32, 0), (32, 3), (128, 0), (128, 3)):
        rows = batch * (width + 1)
        cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * (width + 1)
        indices = torch.arange(batch, dtype=torch.int32, device=device)
        read = rows * VOCAB * 2 / bandwidth
        for name, kind, parameters in cases:
            if batch in (8, 32) and name not in ("greedy", "T .8 top_p .9 penalties"):
                continue
            table, sets = make_table(batch, device, **parameters), logits_sets(rows, kind, device)
            outputs = choose(sets[0], table, indices, cu)

            def process(x: torch.Tensor, t: RequestTable = table, r: torch.Tensor = indices, c: torch.Tensor = cu) -> None:
                process_logits(x, t, r, c)

            def pick(x: torch.Tensor, t: RequestTable = table, r: torch.Tensor = indices, c: torch.Tensor = cu, o=outputs) -> None:  # type: ignore[no-untyped-def]
                choose(x, t, r, c, o)

            def pick_raw(x: torch.Tensor, t: RequestTable = table, r: torch.Tensor = indices, c: torch.Tensor = cu, o=outputs) -> None:  # type: ignore[no-untyped-def]
                process_and_choose(x, t, r, c, o)

            picking = measure([lambda x=x: pick(x) for x in sets])  # type: ignore[misc]
            processing = measure([lambda x=x: process(x) for x in sets], 3)  # type: ignore[misc]
            both = measure([lambda x=x: pick_raw(x) for x in sets], 5)  # type: ignore[misc]
            times = " ".join(f"{1e6 * t:8.1f}" for t in (read, processing, picking, both))
            print(f"{batch:5} {width:2} {rows:4} {kind:>7} {name:>28} {times} {both / read:6.2f}")


def state_rows(device: torch.device) -> None:
    print(f"{'op':>14} {'batch':>5} {'context':>7} {'us':>7}")
    for batch, known in ((1, 2048), (32, 2048), (128, 2048), (1, 32768), (32, 32768), (128, 32768)):
        table = make_table(batch, device, known=known, presence=0.1)
        indices = torch.arange(batch, dtype=torch.int32, device=device)
        cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * 4
        limits = torch.full((batch,), 5, dtype=torch.int32, device=device)
        chosen = torch.randint(0, VOCAB, (batch * 4,), dtype=torch.int32, device=device)
        verdict = verify_drafts(chosen, table, indices, cu)

        def reset(t: RequestTable = table, n: int = known, v: tuple[torch.Tensor, ...] = verdict) -> None:
            t.num_tokens.fill_(n)
            v[1].fill_(4)

        calls = {
            "draft_ngram": lambda: draft_ngram(table, indices, limits, 5, 1),  # noqa: B023
            "verify_drafts": lambda: verify_drafts(chosen, table, indices, cu, outputs=verdict),  # noqa: B023
        }
        times = {name: measure([call] * 10) for name, call in calls.items()}
        # A request has room for a few steps only: each call begins anew, and that is taken off.
        with_reset = measure([lambda: (reset(), commit(verdict[0], verdict[1], table, indices))] * 10)  # noqa: B023
        times["commit"] = with_reset - measure([reset] * 10)
        for name, seconds in times.items():
            print(f"{name:>14} {batch:5} {known:7} {1e6 * seconds:7.2f}")


def layout_rows(device: torch.device) -> None:
    """Of a step with three drafts, and of one with a prompt beside them."""
    print(f"{'op':>15} {'batch':>5} {'prompt':>6} {'us':>7}")
    for batch, prompt in ((1, 0), (32, 0), (128, 0), (128, 8192)):
        table = make_table(batch, device, known=16384 if prompt else 640)
        rows = batch * 4 + prompt
        sizes = StepSizes(batch, int(prompt > 0), prompt, rows, table.max_len, 5, 2048, 16, 1024, 512, 32, 10**6, table.dummy_index)
        fields = torch.zeros(NUM_FIELDS, batch, dtype=torch.int32)
        fields[INDEX], fields[NUM_PAGES], fields[END], fields[FIRST] = torch.arange(batch), 2048, 2**20, -1
        fields[COUNT] = fields[EMITS] = 1
        fields[VERIFY_LIMIT], fields[DRAFTER_COUNT], fields[MODEL_LIMIT] = 3, 4, 3
        if prompt:
            fields[FIRST, 0], fields[COUNT, 0], fields[DRAFTER_COUNT, 0] = 0, prompt, prompt
        fields = fields.to(device)
        table.num_drafts.fill_(3)
        pages = torch.randint(0, 10**6, (batch + 1, 2048), dtype=torch.int32, device=device)
        target, known = StepRows.make(sizes, batch * 4, device), DrafterRows.make(sizes, rows, device)
        packed, lens = torch.zeros(3, batch, dtype=torch.long, device=device), torch.zeros(batch, dtype=torch.int32, device=device)
        calls = {
            "prepare_step": lambda: prepare_step(table, fields, pages, sizes, target),  # noqa: B023
            "prepare_drafter": lambda: prepare_drafter(table, fields, target, pages, sizes, known),  # noqa: B023
            "append_draft": lambda: append_draft(packed, lens, table, fields, fields[COUNT], pages, sizes, 0),  # noqa: B023
        }
        for name, call in calls.items():
            print(f"{name:>15} {batch:5} {prompt:6} {1e6 * measure([call] * 10):7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", action="store_true", help="a step's layout alone")
    args = parser.parse_args()
    check_gpus(parser)
    device = torch.device("cuda:0")
    with device_stream(device):
        bandwidth = copy_bandwidth(device)
        print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, greedy choice reads {read_bandwidth(device) / 1e12:.2f} TB/s")
        layout_rows(device)
        if args.layout:
            return
        state_rows(device)
        sampling_rows(device, bandwidth)


if __name__ == "__main__":
    main()
