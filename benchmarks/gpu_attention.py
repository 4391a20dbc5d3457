"""Time of attention over the KV cache, and of append_kv: python -m benchmarks.gpu_attention [--quick]

Every time is that of one layer inside a replayed graph of many, each on KV of its own, so that the cache is read from memory; medians.
The copy bandwidth of the same run is the limit. SDPA is torch's scaled_dot_product_attention on KV that somebody gathered before.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.models import check_gpus
from kernels import attention
from kernels._load import compile_all, device_of, device_stream
from kernels.append_kv import append_kv
from kernels.attention import AttentionPlan, append_attention, choose_shape
from kernels.cache_scales import CacheScales
from kernels.toolchain import KernelError

HEADS, KV_HEADS, SIZE = 32, 8, 128
PEER = {1: {768: (10.0, 15.3, 34.6, 115), 4096: (14.2, 42.0, 133, 526)}, 6: {768: (10.8, 16.0, 36.2, 124), 4096: (14.3, 43.2, 137, 518)}}
"""FlashAttention-3 in vLLM 0.26.0 on another H200, us, at batch 1, 8, 32, 128."""
BATCHES = (1, 8, 32, 128)
IS_PLANAR = False
CODE_PIPELINES = ((3, 4, 64), (3, 3, 64), (2, 6, 64), (2, 5, 64), (2, 3, 128), (1, 5, 128))
"""CTAs per SM, stages and keys of a stage that are tried over codes."""


def measure(step: Callable[[int], object], count: int, repeats: int = 15) -> float:
    """Median microseconds of one of `count` calls in a graph."""
    step(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(count):
            step(i)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return sorted(times)[len(times) // 2]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per microsecond, by torch's copy or an elementwise kernel, whichever is faster."""
    source, target = (torch.empty(2**30, dtype=torch.float32, device=device).normal_() for _ in range(2))
    times = []
    for copy in (lambda: target.copy_(source), lambda: torch.neg(source, out=target)):
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            copy()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
    return 2 * source.nbytes / min(times)


def make_plan(q: int, lengths: list[int], page: int, device: torch.device, prefix: int = 0, *, is_e4m3: bool = False) -> tuple[AttentionPlan, int]:
    """prefix: tokens that all requests share; is_e4m3: pages hold codes."""
    needed = [-(-n // page) for n in lengths]
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    ids = torch.randperm(sum(needed), dtype=torch.int32)
    for row, own in zip(table, ids.split(needed)):
        row[: len(own)] = own
        row[: prefix // page] = table[0, : prefix // page]
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = AttentionPlan(
        cu_query_lens=torch.arange(len(lengths) + 1, dtype=torch.int32, device=device) * q,
        seq_lens=lens,
        page_table=table.to(device),
        table_rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
        max_query_len=q,
        max_seq_len=max(lengths),
        page_size=page,
        heads=(HEADS, KV_HEADS, SIZE),
        dtype=torch.bfloat16,
        prefixes=(torch.zeros_like(lens), torch.full_like(lens, prefix)) if prefix else None,
        is_e4m3=is_e4m3,
    )
    plan.refresh()
    return plan, sum(needed)


def make_planes(pool: torch.Tensor, layers: int, num_pages: int, page: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer: a page is contiguous over all of them, unless IS_PLANAR."""
    own = pool[: layers * 2 * num_pages * page * KV_HEADS * SIZE]
    if IS_PLANAR:
        planes = own.view(layers, 2, num_pages, page, KV_HEADS, SIZE)
        return [(planes[i, 0], planes[i, 1]) for i in range(layers)]
    planes = own.view(num_pages, layers, 2, page, KV_HEADS, SIZE)
    return [(planes[:, i, 0], planes[:, i, 1]) for i in range(layers)]


def measure_attention(q: int, lengths: list[int], page: int, pool: torch.Tensor, has_sdpa: bool, prefix: int = 0) -> tuple[float, float, float]:
    """us of append_attention, of torch's SDPA, and the bytes of keys and values."""
    device = pool.device
    batch, longest = len(lengths), max(lengths)
    num_bytes = sum(lengths) * KV_HEADS * SIZE * 4
    layers = max(2, min(64, int(400e6 / num_bytes)))
    plan, num_pages = make_plan(q, lengths, page, device, prefix)
    plane = num_pages * page * KV_HEADS * SIZE
    layers = min(layers, len(pool) // (2 * plane))
    planes = make_planes(pool, layers, num_pages, page)
    query = torch.randn(batch * q, HEADS, SIZE, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(query)
    own = measure(lambda i: append_attention(query, *planes[i], plan, out), layers)
    peer = float("nan")
    if has_sdpa and min(lengths) == longest:
        whole = pool[: layers * 2 * batch * KV_HEADS * longest * SIZE].view(layers, 2, batch, KV_HEADS, longest, SIZE)
        queries = query.view(batch, q, HEADS, SIZE).transpose(1, 2).contiguous()
        peer = measure(lambda i: F.scaled_dot_product_attention(queries, whole[i, 0], whole[i, 1], enable_gqa=True), layers)
    return own, peer, num_bytes


class Shape(NamedTuple):
    """How a kernel over codes is made."""

    pipelines: tuple[tuple[int, int, int], ...]
    """To choose from."""
    cluster_ctas: int
    """CTAs per SM where several share an item, at most."""
    three_cta_rows: range
    """Rows for which three are tried."""

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Plans are made so inside."""
        before = attention.CODE_PIPELINES, attention.CODE_CLUSTER_CTAS, attention.THREE_CTA_ROWS
        attention.CODE_PIPELINES, attention.CODE_CLUSTER_CTAS, attention.THREE_CTA_ROWS = self
        attention._choose_shape.cache_clear()
        try:
            yield
        finally:
            attention.CODE_PIPELINES, attention.CODE_CLUSTER_CTAS, attention.THREE_CTA_ROWS = before
            attention._choose_shape.cache_clear()


def code_shapes(batch: int, q: int) -> dict[str, tuple[Shape, dict[str, int]]]:
    """By name, with what a kernel is compiled with: first as it is chosen."""
    known = Shape(attention.CODE_PIPELINES, attention.CODE_CLUSTER_CTAS, attention.THREE_CTA_ROWS)
    found: dict[str, tuple[Shape, dict[str, int]]] = {}
    for shape in (known, *(Shape((p,), most, range(33)) for most in (4, 2) for p in CODE_PIPELINES)):
        with shape.used(), contextlib.suppress(KernelError, IndexError):  # there is no room for it
            defines = attention.choose_shape(batch, q, 16, (HEADS, KV_HEADS, SIZE), torch.bfloat16, is_e4m3=True)
            name = "x".join(str(defines[key]) for key in ("CLUSTER", "MIN_CTAS", "STAGES", "TILE"))
            found.setdefault(name, (shape, defines))
    return found


def compare_codes(pool: torch.Tensor) -> None:
    """Pages of bfloat16 against such of e4m3 (`kv_cache_dtype: fp8`), whose kernels are tried in several shapes, too."""
    device, codes = pool.device, pool.view(torch.uint8)[: 6 * 2**30].bitwise_and_(0xF7)  # none that is no number
    scales = CacheScales(*(torch.full((KV_HEADS,), 0.01, device=device) for _ in range(2)))
    cases = [(q, *sizes) for q in (1, 2, 4, 6) for sizes in ((1, 4096), (8, 4096), (32, 4096), (32, 16384), (1, 32768))]
    shapes = {(batch, q): code_shapes(batch, q) for q, batch, _ in cases}
    compile_all([("attention", defines) for own in shapes.values() for _, defines in own.values()], device_of(device).architecture)

    def time(q: int, batch: int, context: int, is_e4m3: bool) -> float:
        plan, num_pages = make_plan(q, [context] * batch, 16, device, is_e4m3=is_e4m3)
        layers = max(2, min(32, int(400e6 / (batch * context * KV_HEADS * SIZE * 2))))
        planes = make_planes(codes.view(torch.float8_e4m3fn) if is_e4m3 else pool, layers, num_pages, 16)
        query = torch.randn(batch * q, HEADS, SIZE, dtype=torch.bfloat16, device=device)
        return measure(lambda i: append_attention(query, *planes[i], plan, scales=scales if is_e4m3 else None), layers)

    print("e4m3: as it is chosen, then in other shapes: CTAs that share an item x CTAs per SM x stages x keys of a stage")
    for case in cases:
        plain, own = time(*case, is_e4m3=False), {}
        for name, (shape, _) in shapes[case[1], case[0]].items():
            with shape.used():
                own[name] = time(*case, is_e4m3=True)
        chosen = next(iter(own.values()))
        others = ", ".join(f"{name} {us:.1f}" for name, us in own.items())
        print(f"q {case[0]}, {case[1]} x {case[2]}: bf16 {plain:.1f} us, e4m3 {chosen:.1f}: {plain / chosen:.2f} x ({others})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--planar", action="store_true", help="each layer's keys, and values, in a piece of their own instead of page by page")
    parser.add_argument("--codes", action="store_true", help="pages of bfloat16 against such of e4m3, and nothing else")
    arguments = parser.parse_args()
    check_gpus(parser)
    global IS_PLANAR
    IS_PLANAR = arguments.planar
    device = torch.device("cuda:0")
    with device_stream(device), torch.inference_mode():
        contexts = (768, 4096) if arguments.quick else (512, 768, 2048, 4096, 32768)
        counts = (1, 6) if arguments.quick else (1, 4, 6)
        jobs = {
            str(d): d
            for b in (*BATCHES, 32)
            for q in counts
            for p in (16, 64)
            for d in [choose_shape(b, q, p, (HEADS, KV_HEADS, SIZE), torch.bfloat16)]
        }
        compile_all([("attention", d) for d in jobs.values()], device_of(device).architecture)
        limit = copy_bandwidth(device)
        print(f"{torch.cuda.get_device_name()}: a copy moves {limit / 1e6:.2f} TB/s", flush=True)
        pool = torch.empty(10 * 2**30, dtype=torch.bfloat16, device=device)
        for chunk in pool.split(2**28):
            chunk.normal_()
        if arguments.codes:
            compare_codes(pool)
            return
        print("q context batch | us | TB/s, of the copy | SDPA us | FA3 us (PEERS.md)")
        for q in counts:
            for context in contexts:
                for column, batch in enumerate(BATCHES):
                    if batch * context > 2**20 * 2:
                        continue
                    own, peer, num_bytes = measure_attention(q, [context] * batch, 16, pool, has_sdpa=q != 4)
                    fa3 = PEER.get(q, {}).get(context)
                    rate = num_bytes / own
                    print(
                        f"{q} {context:5} {batch:3} | {own:7.1f} | {rate / 1e6:.2f} {rate / limit:4.0%} | {peer:7.1f} | {fa3[column] if fa3 else ''}",
                        flush=True,
                    )
        generator = torch.Generator().manual_seed(0)
        mixed = torch.randint(200, 16000, (32,), generator=generator).tolist()
        for name, lengths, page in (
            ("32 of 200 to 16k", mixed, 16),
            ("the same, page 64", mixed, 64),
            ("one 32k, 31 of 500", [32768] + [500] * 31, 16),
        ):
            for q in (1, 6):
                own, _, num_bytes = measure_attention(q, lengths, page, pool, has_sdpa=False)
                print(f"mixed, q {q}: {name}: {own:.1f} us, {num_bytes / own / limit:.0%}", flush=True)
        for batch in (1, 32, 128):
            plan, _ = make_plan(6, [768] * batch, 16, device)
            print(f"plan for batch {batch}: {measure(lambda _: plan.refresh(), 20):.1f} us")  # noqa: B023
        for q in (1, 6):
            for batch, length, prefix in ((32, 4096, 3840), (128, 2304, 2048)):
                apart, _, _ = measure_attention(q, [length] * batch, 16, pool, has_sdpa=False)
                shared, _, _ = measure_attention(q, [length] * batch, 16, pool, has_sdpa=False, prefix=prefix)
                print(f"{batch} requests of {length} tokens, q {q}, that share {prefix}: {shared:.1f} us, read apart {apart:.1f}", flush=True)
        for count in (1, 6, 32, 192, 768):
            measure_step(count, pool)
        for past in (0, 8192):
            for chunk in (512, 2048):
                measure_prefill(past, chunk, pool)


def measure_step(count: int, pool: torch.Tensor) -> None:
    """append_kv alone, and with the attention after it, as in a layer: one query each."""
    device = pool.device
    batch = count if count < 6 else count // 6
    q = count // batch
    plan, num_pages = make_plan(q, [768] * batch, 16, device)
    plane = num_pages * 16 * KV_HEADS * SIZE
    layers = max(4, min(64, 10**8 // plane))
    planes = make_planes(pool, layers, num_pages, 16)
    stride = planes[0][0].stride(0) // (KV_HEADS * SIZE)
    qkv = torch.randn(count, HEADS + 2 * KV_HEADS, SIZE, dtype=torch.bfloat16, device=device)
    tables = torch.randn(2, 4096, 1, SIZE, dtype=torch.bfloat16, device=device)
    places = torch.randperm(num_pages * 16, device=device)[:count]
    slots, positions = (places // 16 * stride + places % 16).int(), (places % 4096).int()

    def append(layer: int) -> torch.Tensor:
        return append_kv(qkv, tables[0], tables[1], slots, *planes[layer], positions)

    alone = measure(append, layers)
    both = measure(lambda i: append_attention(append(i), *planes[i], plan), layers)
    print(f"append_kv of {count} tokens: {alone:.2f} us; with attention of {batch} x {q} at 768 after it: {both:.2f}", flush=True)


def measure_prefill(past: int, chunk: int, pool: torch.Tensor) -> None:
    """Torch's SDPA on keys and values gathered from their pages, as the engine computes prompts."""
    device, length = pool.device, past + chunk
    num_pages = length // 16
    planes = pool[: 2 * num_pages * 16 * KV_HEADS * SIZE].view(2, num_pages, 16 * KV_HEADS * SIZE)
    ids = torch.randperm(num_pages, device=device)
    query = torch.randn(1, chunk, HEADS, SIZE, dtype=torch.bfloat16, device=device).transpose(1, 2)

    def gather() -> list[torch.Tensor]:
        return [plane.index_select(0, ids).view(1, length, KV_HEADS, SIZE).transpose(1, 2) for plane in planes]

    if past:
        from torch.nn.attention.bias import causal_lower_right

        whole = measure(lambda _: F.scaled_dot_product_attention(query, *gather(), attn_mask=causal_lower_right(chunk, length), enable_gqa=True), 4)
    else:
        whole = measure(lambda _: F.scaled_dot_product_attention(query, *gather(), is_causal=True, enable_gqa=True), 4)
    gathering = measure(lambda _: gather(), 4)
    flops = 4 * HEADS * SIZE * (chunk * past + chunk * chunk / 2)
    print(
        f"prefill of {chunk} after {past} (SDPA): {whole:.1f} us, {flops / whole / 1e6:.0f} TFLOP/s, {gathering:.1f} us of it gathering", flush=True
    )


if __name__ == "__main__":
    main()
