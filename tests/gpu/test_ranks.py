"""Several GPUs: sums over ranks, and the tokens of one rank."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import kernels.all_reduce
from backend import LLM, SamplingParams
from backend.models import embedding
from backend.parallel.ranks import Ranks, await_rows, make_ranks
from kernels import scattered
from kernels._load import device_stream
from kernels.all_reduce import MAX_GATHERED_BYTES, MAX_TWO_SHOT_BYTES, can_all_gather, can_all_reduce, can_share_rows, meet_peers
from tests.conftest import code_prompts, greedy
from tests.families import Case, make_model, random_tokens
from tests.test_latents import DEEPSEEK
from tests.test_mixtures import EXPERTS
from tests.test_own_drafters import DEEPSEEK_NAMES, Own, make_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MEET = timedelta(seconds=60)
SHAPES = [(1, 8), (1, 4096), (3, 4096), (128, 4096), (7, 1032), (64, 8192), (250, 2048), (192, 5120), (2, 16), (33, 576), (301, 4104)]
GATHERED = [(1, 64128), (8, 64128), (32, 64128), (128, 64128), (129, 64128), (770, 64128), (5, 8), (3, 1032), (192, 512)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SAVES = (kernels.all_reduce.TWO_SHOT_SAVES, 0)
"""What is added in shares: large sums, and all that go by the kernels."""
ODD = [0.0, -0.0, -0.0, -0.0, 0.0, 0.0, -0.0, 0.0, float("inf"), -float("inf"), float("nan"), 1.0]
"""A pair of +0 and -0, or a float32 of -0, has the bits of an empty place."""


def check_sums(rank: int, size: int, port: int) -> None:
    """One rank's side: every rank makes all ranks' parts from the same seeds. Raises AssertionError."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=MEET)
    with device_stream(device):
        ranks = make_ranks(rank, size, store, device, MEET)
        assert ranks.peers is not None, "these GPUs cannot write each other's memory"
        for turn in range(6):
            kernels.all_reduce.TWO_SHOT_SAVES = SAVES[turn % 2]
            for dtype in DTYPES:
                for i, shape in enumerate(SHAPES):
                    generator = torch.Generator().manual_seed(1000 * turn + i)
                    parts = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(size)]
                    residual = torch.randn(shape, generator=generator).to(device, dtype)
                    total = sum((part.float() for part in parts[1:]), parts[0].float()).to(dtype)
                    x, summed = residual.clone(), parts[rank].clone()
                    ranks.add_sum(x, parts[rank].clone())
                    ranks.all_reduce(summed)
                    if can_all_reduce(summed, size):  # NCCL adds in an order of its own
                        assert torch.equal(x, residual + total) and torch.equal(summed, total)
                    else:
                        torch.testing.assert_close(summed, total)
                for i, (rows, width) in enumerate(GATHERED):
                    generator = torch.Generator().manual_seed(5000 * turn + i)
                    parts = [torch.randn(rows, width, generator=generator).to(device, dtype) for _ in range(size)]
                    num_bytes = rows * width * parts[rank].element_size()
                    assert can_all_gather(parts[rank], size) == (num_bytes * (size - 1) <= MAX_GATHERED_BYTES)
                    assert torch.equal(ranks.gather_vocabulary(parts[rank], size * width), torch.cat(parts, dim=1))
                    check_shares(ranks, parts)
                check_odd_values(ranks, device, dtype)
        large = torch.full((MAX_TWO_SHOT_BYTES // 4 + 4,), float(rank + 1), device=device)
        assert not can_all_reduce(large, size) and float(ranks.all_reduce(large)[-1]) == size * (size + 1) / 2
        # Captured, with many exchanges one after the other: each reads what the one before left.
        x, part = torch.ones(16, 4096, device=device, dtype=torch.bfloat16), torch.ones(16, 4096, device=device, dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            for _ in range(50):
                part.mul_(0).add_(1)
                ranks.add_sum(x, part)
                gathered = ranks.gather_vocabulary(x, size * 4096)
                shared = ranks.share_rows(x)
        for _ in range(3):
            x.zero_()
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, torch.full_like(x, 50 * size)) and torch.equal(gathered, torch.cat([x] * size, dim=1))
        assert torch.equal(shared, gathered[: len(shared)])
        check_embedding(ranks, device)
        ranks.least(0, device)
        ranks.close()


def check_embedding(ranks: Ranks, device: torch.device) -> None:
    """Split by its columns, of few tokens and of many, and captured."""
    embedding.MIN_SAVED_BYTES = 0
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(1000, 4096, generator=generator).to(device, torch.bfloat16)
    token_ids = torch.randint(1000, (5000,), generator=generator).to(device)
    own = embedding.Embedding(weight, ranks, None, is_tied=False)
    assert own.is_split and own.is_same(weight) and not own.is_same(weight + 1)
    for count in (1, 33, 700, 5000):
        assert torch.equal(own(token_ids[:count]), weight[token_ids[:count]])
    few, graph = token_ids[:48].clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        found = own(few)
    few.copy_(token_ids[100:148])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, weight[token_ids[100:148]])


def check_shared_gpus(rank: int, size: int, port: int) -> None:
    """As `check_sums`, of more ranks than there are GPUs: NCCL takes one on each, so that our kernels alone are called."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=MEET)

    def exchange(name: str, words: bytes) -> list[bytes]:
        store.set(f"{name} {rank}", words)
        return [store.get(f"{name} {r}") for r in range(size)]

    with device_stream(device):
        peers = meet_peers(device, rank, size, exchange)
        assert peers is not None, "these GPUs cannot write each other's memory"
        ranks = Ranks(rank, size, peers=peers)
        for dtype, kernels.all_reduce.TWO_SHOT_SAVES in itertools.product(DTYPES, SAVES):
            for i, shape in enumerate([*SHAPES, (1, 16032), (8, 16032)]):
                parts = [torch.randn(shape, generator=torch.Generator().manual_seed(100 * i + r)).to(device, dtype) for r in range(size)]
                if can_all_reduce(parts[rank], size):
                    total = sum((part.float() for part in parts[1:]), parts[0].float()).to(dtype)
                    x = torch.ones_like(total)
                    ranks.add_sum(x, parts[rank].clone())
                    assert torch.equal(x, torch.ones_like(total) + total)
                if can_all_gather(parts[rank], size):
                    assert torch.equal(ranks.gather_vocabulary(parts[rank], size * shape[1]), torch.cat(parts, dim=1))
                if can_share_rows(parts[rank]):
                    check_shares(ranks, parts)
            check_odd_values(ranks, device, dtype)
        torch.cuda.synchronize()
        exchange("through", b"")
        peers.close()


def check_shares(ranks: Ranks, parts: list[torch.Tensor]) -> None:
    """Each row whole on one rank, also of more than one exchange takes; and what each rank says to all of its rows."""
    whole, size, rank = torch.cat(parts, dim=1), len(parts), ranks.rank
    share = -(-len(whole) // size)
    own = ranks.share_rows(parts[rank])
    assert own.shape == (share, whole.shape[1])
    assert torch.equal(own[: max(0, len(whole) - rank * share)], whole[rank * share : (rank + 1) * share])
    said = [torch.arange(-1, 4 * share + 3, dtype=torch.int32, device=whole.device) * (r + 1) for r in range(size)]
    assert torch.equal(ranks.gather_words(said[rank]), torch.stack(said))


class Times:
    """A projection: times a matrix."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def takes_pieces(self, x: torch.Tensor) -> bool:
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._weight

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual.add_(self(x))

    def write_to(self, out: torch.Tensor, x: torch.Tensor, is_ready: bool = False) -> None:
        out.copy_(self(x))


def add_products(ranks: Ranks, x: torch.Tensor, y: torch.Tensor, projection: Times) -> torch.Tensor:
    """Four, one behind the other -> what was read of x as it came."""
    read = torch.zeros_like(x)
    for _ in range(4):
        for rows in ranks.add_product(x, y, projection):
            read[rows] = x[rows]
    return read


def check_large_sums(rank: int, size: int, port: int) -> None:
    """Products of many rows, whose sums are made by shares: bit for bit, eager and captured, and what is read of rows as they come."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=MEET)
    with device_stream(device) as stream:
        ranks = make_ranks(rank, size, store, device, MEET)
        assert ranks.scattered is not None, "these GPUs cannot write each other's memory"
        shapes = [(1024, 8192), (2049, 4096), (1400, 8192), (128 * size, 65536 // size), (4095, 2056)]
        for dtype, (num_rows, width) in itertools.product(DTYPES, shapes):
            generator = torch.Generator().manual_seed(num_rows)
            make = partial(torch.randint, -8, 8, generator=generator)
            parts = [make((num_rows, 16)).to(device, dtype) / 16 for _ in range(size)]  # products are exact before they are rounded
            weights = [make((16, width)).to(device, dtype) / 16 for _ in range(size)]
            x = make((num_rows, width)).to(device, dtype)
            assert scattered.can_scatter(x, size)
            products = [own @ weight for own, weight in zip(parts, weights)]
            total = sum((own.float() for own in products[1:]), products[0].float()).to(dtype)
            wanted, own = x.clone(), (parts[rank], Times(weights[rank]))
            read = add_products(ranks, x, *own)
            for _ in range(4):
                wanted += total
            assert torch.equal(x, wanted) and torch.equal(read, wanted), (num_rows, width, dtype)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                read = add_products(ranks, x, *own)
            for _ in range(3):
                graph.replay()
            for _ in range(12):
                wanted += total
            assert torch.equal(x, wanted) and torch.equal(read, wanted), (num_rows, width, dtype)
            torch.cuda.synchronize()
            del graph, read
        ranks.least(0, device)
        ranks.close()


def test_large_sums_are_made_by_shares() -> None:
    mp.spawn(check_large_sums, (torch.cuda.device_count(), free_port()), nprocs=torch.cuda.device_count())


def check_odd_values(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> None:
    """Each place of a vector holds each of these once, against each of them of the next rank."""
    table = torch.tensor(ODD, device=device, dtype=dtype)
    places = torch.arange(16 * len(ODD) ** 2, device=device)
    parts = [table[(places // (16 * len(ODD) ** r) + places * (r + 1)) % len(ODD)].view(16, -1) for r in range(ranks.size)]
    part, size = parts[ranks.rank], ranks.size
    total = sum((own.float() for own in parts[1:]), parts[0].float()).to(dtype)
    exactly = partial(torch.testing.assert_close, rtol=0.0, atol=0.0, equal_nan=True)
    exactly(ranks.gather_vocabulary(part, size * part.shape[1]), torch.cat(parts, dim=1))
    exactly(ranks.all_reduce(part.clone()), total)


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def test_sums_are_exact_and_the_same_on_every_rank() -> None:
    mp.spawn(check_sums, (torch.cuda.device_count(), free_port()), nprocs=torch.cuda.device_count())


@pytest.mark.parametrize("size", [4, 8])
def test_sums_of_more_ranks(size: int) -> None:
    mp.spawn(check_shared_gpus, (size, free_port()), nprocs=size)


def check_gone(rank: int, size: int, port: int, folder: str) -> None:
    """Rank 1 goes; rank 0's GPU waits for it, with more behind that, until rank 0 gives up."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=MEET)
    with device_stream(device) as stream:
        ranks = make_ranks(rank, size, store, device, MEET)
        x = torch.ones(16, 4096, device=device, dtype=torch.bfloat16)
        many, weight = torch.ones(2048, 4096, device=device, dtype=torch.bfloat16), torch.ones(16, 4096, device=device, dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        ranks.all_reduce(x)
        await_rows(ranks.add_product(many, many[:, :16], Times(weight)))
        torch.cuda.synchronize()
        if rank:
            os._exit(0)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(100):
                ranks.all_reduce(x)
            for _ in range(20):
                await_rows(ranks.add_product(many, many[:, :16], Times(weight)))
        graph.replay()
        graph.replay()
        ended = torch.cuda.Event()
        ended.record()
        ranks.abort()
        end = time.monotonic() + 30
        while not ended.query() and time.monotonic() < end:
            time.sleep(0.01)
        (Path(folder) / "ended").write_text(str(ended.query()))
        os._exit(0)  # a GPU that waits would keep the interpreter from its end


def test_nobody_waits_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    mp.spawn(check_gone, (2, free_port(), str(tmp_path)), nprocs=2)
    assert (tmp_path / "ended").read_text() == "True"


SPECULATION = {"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 3, "adaptive": False}


ON_SECOND = """
import torch
from backend import LLM, SamplingParams
found = []
for device in ("cuda:1", "cuda:0"):
    llm = LLM(device=device, dtype="float32", speculative_config={"method": "mtp"}, kv_cache_memory="64MiB", max_batch_size=4)
    (result,) = llm.generate("def area(self):", SamplingParams(max_tokens=24, temperature=0.0), use_tqdm=False)
    found.append((result.outputs[0].token_ids, torch._C._cuda_hasPrimaryContext(0)))
    llm.close()
assert found[0][0] == found[1][0] and not found[0][1] and found[1][1], found
"""


def test_an_engine_on_the_second_gpu_takes_nothing_of_the_first() -> None:
    made = subprocess.run([sys.executable, "-c", ON_SECOND], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-3000:]


RANKS_FROM_SECOND = """
import torch
from backend import LLM, SamplingParams
from backend.errors import ConfigError
torch.cuda.set_device(1)
found = []
for size in (1, 2):
    options = {"tensor_parallel_size": size, "dtype": "float32", "speculative_config": {"method": "mtp"}, "kv_cache_memory": "64MiB"}
    try:
        llm = LLM(device="cuda", max_batch_size=4, **options)
    except ConfigError as error:
        assert size == 2 and torch.cuda.device_count() == 2 and "this machine has 2 GPUs, and rank 0 is on cuda:1" in str(error), error
        break
    (result,) = llm.generate("def area(self):", SamplingParams(max_tokens=24, temperature=0.0), use_tqdm=False)
    found.append(result.outputs[0].token_ids)
    llm.close()
assert found[0] == found[-1] and len(found) == min(2, torch.cuda.device_count() - 1), found
"""


def test_ranks_are_on_the_gpus_from_the_programs_current_one_on() -> None:
    """With two GPUs the second rank has none, and it is said."""
    made = subprocess.run([sys.executable, "-c", RANKS_FROM_SECOND], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-3000:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_those_of_one_rank(dtype: str) -> None:
    """In bfloat16 a product's parts are rounded apart: near-ties may differ, and how many is printed."""
    prompts = code_prompts(32, seed=11)
    answers = {}
    for size in (1, 2, 4):
        if size > torch.cuda.device_count():
            break
        llm = LLM(device="cuda", dtype=dtype, speculative_config=SPECULATION, max_batch_size=32, tensor_parallel_size=size, kv_cache_memory="2GiB")
        for name, params in {"greedy": greedy(64), "seeded": SamplingParams(max_tokens=64, temperature=0.8, seed=7, top_p=0.9)}.items():
            for method in ("none", "ngram", "mtp"):
                results = llm.generate(prompts, params, speculative={"method": method}, use_tqdm=False)
                answers[size, name, method] = [r.outputs[0].token_ids for r in results]
        llm.close()
    for (size, name, method), found in answers.items():
        different = sum(a != b for a, b in zip(found, answers[1, name, "none"], strict=True))
        print(f"{dtype}, {size} ranks, {name}, {method}: {different} of {len(found)} answers differ from one rank's plain ones")
        assert not different or dtype == "bfloat16"


def _generate(folder: Path, prompts: list[list[int]], methods: tuple[str, ...], length: int, **options: Any) -> dict[str, list[list[int]]]:
    llm = LLM(str(folder), device="cuda", dtype="float32", **options)
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = {m: [r.outputs[0].token_ids for r in llm.generate(asked, params, speculative={"method": m}, use_tqdm=False)] for m in methods}
    llm.close()
    return answers


def test_prompts_whose_sums_go_by_shares(tmp_path: Path) -> None:
    """Steps of 4,096 tokens in float32: sums of 16 MiB, in pieces that the products between them do not wait for."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1536, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    make_model(Case("llama", config=sizes | {"max_position_embeddings": 2304}), tmp_path)
    assert scattered.can_scatter(torch.empty(4096, sizes["hidden_size"]), 2)
    prompts = [random_tokens(2048, seed) for seed in range(5)]
    options = {"max_num_batched_tokens": 4096, "kv_cache_memory": "256MiB", "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    one, two = (_generate(tmp_path, prompts, ("none", "ngram"), 24, tensor_parallel_size=size, **options) for size in (1, 2))
    assert one == two and two["none"] == two["ngram"]


MODELS = {
    "latents, experts and a drafter of its own": Own(Case("deepseek_v3", config=DEEPSEEK), DEEPSEEK_NAMES, is_norm_recycled=True),
    "a mixture": Case("qwen3_moe", config=EXPERTS | {"head_dim": 64, "num_experts": 6}),
}


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("experts", ["split", "whole"])
@pytest.mark.parametrize("name", MODELS)
def test_mixtures_and_caches_in_e4m3(name: str, experts: str, cache: str, tmp_path: Path) -> None:
    """The tokens of one rank, whose cache is in the same type, with and without drafts."""
    model = MODELS[name]
    make_checkpoint(model, tmp_path) if isinstance(model, Own) else make_model(model, tmp_path)
    methods = ("none", "ngram", "mtp") if isinstance(model, Own) else ("none", "ngram")
    options = {"kv_cache_memory": "64MiB", "kv_cache_dtype": cache}
    options["speculative_config"] = {"method": methods[-1], "num_speculative_tokens": 2, "adaptive": False}
    prompts = [random_tokens(30 + seed, seed) for seed in range(4)]
    answers = []
    for size in (1, 2):
        parallel = {"tensor_parallel_size": size, "expert_parallel": experts == "whole"}
        answers.append(_generate(tmp_path, prompts, methods, 32, parallel_config=parallel, **options))
    assert answers[0] == answers[1]
    assert all(found == answers[1]["none"] for found in answers[1].values())
