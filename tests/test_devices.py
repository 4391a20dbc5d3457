"""Which device and type `auto` stands for, on machines that have a GPU, half of one, and none; and CPU threads."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import backend
from backend import devices
from backend.config import BUNDLED_MODEL, EngineConfig
from backend.devices import pick_device, pick_dtype
from backend.errors import ConfigError
from backend.models.loading import load_model
from backend.parallel.ranks import Ranks
from backend.rank_hello import device_of_rank
from kernels._cpus import count_cpus
from kernels._load import KernelError
from tests.conftest import ROOT

NVCC = "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: install CUDA's compiler, or use --device cpu"


def config(**values: object) -> EngineConfig:
    return EngineConfig.from_dict(values)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes this machine one of another kind, as torch and the driver tell of it."""

    def set_up(num_gpus: int = 0, *, has_driver: bool = False, failure: str = "", visible: str | None = None) -> None:
        def check(device: torch.device) -> None:
            if failure:
                raise KernelError(failure)

        driver = tmp_path / "nvidiactl"
        driver.unlink(missing_ok=True)
        if has_driver:
            driver.touch()
        monkeypatch.setattr(devices, "DRIVER_FILE", driver)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: max(0, num_gpus - 1))
        monkeypatch.setattr(devices, "check_device", check)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return set_up


def test_the_gpu_when_there_is_one(machine) -> None:
    machine(2, has_driver=True)
    assert pick_device(config()) == pick_device(config(device="cuda")) == torch.device("cuda:1"), "the program's current one"
    assert pick_device(config(device="cuda:0")) == torch.device("cuda:0")
    assert pick_device(config(device="cuda:1")) == torch.device("cuda:1")
    assert pick_device(config(device="cpu")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="device cuda:2: this machine has 2 GPUs, from cuda:0"):
        pick_device(config(device="cuda:2"))


def test_a_group_is_on_the_gpus_from_its_first_ranks_on(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's exchanges are made on `device_of_rank`'s, and the first rank computes on `pick_device`'s: they are one GPU."""
    machine(3, has_driver=True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    ranks = {"parallel_config": {"tensor_parallel_size": 2}}
    for device in ("auto", "cuda"):
        own = config(device=device, **ranks)
        assert [device_of_rank(own, rank) for rank in range(2)] == ["cuda:1", "cuda:2"]
        assert pick_device(own) == torch.device(device_of_rank(own, 0))
    assert [device_of_rank(config(device="cuda:0", **ranks), rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2: this machine has 3 GPUs, and rank 0 is on cuda:2"):
        device_of_rank(config(device="cuda", **ranks), 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device_of_rank(config(device="cuda", **ranks), 1) == "cuda:1", "a process that has no GPU of its own is not given one"


def test_the_cpu_when_there_is_none(machine) -> None:
    machine(0)
    assert pick_device(config()) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device cuda: torch .* sees no GPU; use --device cpu"):
        pick_device(config(device="cuda"))


@pytest.mark.parametrize("failure", [NVCC, "PyCUDA cannot be imported", "cuda:0 is an A10 (sm_86); kernels are made for sm_80, sm_90"])
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_cannot_be_used_is_an_error(machine, failure: str, device: str) -> None:
    machine(1, has_driver=True, failure=failure)
    with pytest.raises(ConfigError) as caught:
        pick_device(config(device=device))
    assert str(caught.value) == f"device {device}: this machine has a GPU that cannot be used: {failure}"
    assert pick_device(config(device="cpu")) == torch.device("cpu")


def test_a_gpu_that_torch_does_not_see_is_an_error(machine) -> None:
    """As with a build of torch for the CPU. Unless whoever runs this has hidden the GPU."""
    machine(0, has_driver=True)
    with pytest.raises(ConfigError, match=r"device auto: this machine has a GPU .*, but torch .* sees no GPU: install a torch that does"):
        pick_device(config())
    for visible in ("", "-1"):
        machine(0, has_driver=True, visible=visible)
        assert pick_device(config()) == torch.device("cpu")


@pytest.mark.parametrize(
    ("stored", "expected", "is_said"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16, False),
        ({"dtype": "float32"}, torch.float32, False),
        ({}, torch.bfloat16, False),
        ({"torch_dtype": "float16"}, torch.float16, False),
        ({"dtype": "torch.float16"}, torch.float16, False),
        ({"dtype": "float8_e4m3fn"}, torch.bfloat16, True),
    ],
)
def test_the_checkpoints_type_on_a_gpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: dict[str, str], expected: torch.dtype, is_said: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stored))
    own = config(model=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert pick_dtype(own, torch.device("cuda")) == expected
    assert ("is served in bfloat16" in caplog.text) == is_said
    assert pick_dtype(own, torch.device("cpu")) == torch.float32
    assert pick_dtype(config(model=str(tmp_path), dtype="float32"), torch.device("cuda")) == torch.float32


def test_a_group_without_exchanges_does_not_pretend_to_exchange() -> None:
    """A sum over two ranks that is one rank's own part makes wrong answers that look right."""
    x = torch.ones(3)
    alone = Ranks()
    assert all(torch.equal(exchange(x), torch.ones(3)) for exchange in (alone.all_reduce, lambda x: alone.gather_vocabulary(x, 3)))
    pair = Ranks(rank=0, size=2)
    for exchange in (pair.all_reduce, lambda x: pair.gather_vocabulary(x, 6)):
        with pytest.raises(AssertionError, match="a group of several ranks has exchanges"):
            exchange(x)


LOADING = """
import os, threading, torch
from backend import LLM

def count_native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

torch.set_num_threads(2)
before = count_native()
llm = LLM(kv_cache_memory="16MiB", speculative_config={"method": "mtp"})
print("left behind:", count_native() - before)
torch.zeros(10**6).add_(1)
print("of one operation:", count_native() - before)
"""


def test_loading_leaves_no_pool_of_threads_behind() -> None:
    """A second one beside that of the thread which runs steps makes OpenMP sleep at every barrier: served tokens took half as long again."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120, check=True)
    assert ran.stdout.splitlines()[-2:] == ["left behind: 0", "of one operation: 1"], ran.stdout


V1, V2 = "4:cpu,cpuacct:/a/b\n3:memory:/c\n0::/\n", "0::/a/b\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (V2, {}, 64),
        (V2, {"a/b/cpu.max": "max 100000"}, 64),
        (V2, {"a/b/cpu.max": "250000 100000"}, 3),
        (V2, {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 2),
        (V2, {"cpu.max": "20000 100000"}, 1),
        (V2, {"cpu.max": "nonsense", "a/cpu.max": "", "a/b/cpu.max": "800000 0"}, 64),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, 64),
        (V1, {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"memory/c/cpu.max": "100000 100000"}, 64),
        ("", {"cpu.max": "100000 100000"}, 64),
        ("x", {"cpu.max": "100000 100000"}, 64),
    ],
)
def test_a_containers_share_of_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], expected: int) -> None:
    """Which group's limit counts: a container may see its own as the root, and one further up may be tighter."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert count_cpus(tmp_path / "groups", tmp_path / "own") == expected
    assert count_cpus(tmp_path / "groups", tmp_path / "nothing") == 64


@pytest.mark.parametrize(("values", "expected"), [({}, 3), ({"num_threads": 5}, 5), ({"parallel_config": {"tensor_parallel_size": 2}}, 1)], ids=str)
def test_threads_are_those_that_may_run(monkeypatch: pytest.MonkeyPatch, values: dict, expected: int) -> None:
    monkeypatch.setattr(devices, "count_cpus", lambda: 3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        with devices.threads_for(config(**values))(10_000):
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("values", "num_weights", "least"),
    [
        ({}, 0, 8),
        ({}, 9_630_720, 8),
        ({}, 20_000_000, 4),
        ({}, 135_000_000, 1),
        ({"single_thread_tokens": 3}, 10**9, 3),
        ({"single_thread_tokens": 0}, 9, 0),
    ],
    ids=str,
)
def test_which_steps_run_on_one_thread(values: dict, num_weights: int, least: int) -> None:
    """Fewer tokens are a long step of a larger model."""
    threads, before = devices.threads_for(config(num_threads=2, **values), num_weights), torch.get_num_threads()
    for tokens in range(12):
        with threads(tokens):
            assert torch.get_num_threads() == (2 if tokens >= least else 1)
    assert torch.get_num_threads() == before


def test_weights_that_tokens_are_multiplied_with() -> None:
    """The bundled model's, of whole and of split projections: 20 layers, and the head, which is its embedding."""
    layer = (256 + 2 * 128) * 192 + 192 * 256 + 3 * 512 * 192
    for size in (1, 2):
        own = Ranks(0, size)
        model = load_model(BUNDLED_MODEL, torch.float32, torch.device("cpu"), own)
        assert model.num_multiplied == (20 * layer + 4096 * 192) // size


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, backend.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None), ({"LATE": "1"}, None)],
    ids=str,
)
def test_idle_threads_sleep_soon(given: dict[str, str], expected: str | None) -> None:
    """Unless the user has said otherwise; it is too late where torch is loaded."""
    code = f"import os; {'import torch; ' if 'LATE' in given else ''}import backend; print(os.environ.get('GOMP_SPINCOUNT'))"
    own = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    result = subprocess.run([sys.executable, "-c", code], env={**own, **given}, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == f"{expected}\n", result.stderr
