"""Where a process computes: what `device` and `dtype` mean on this machine, streams and CPU threads."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.model_files import read_config
from backend.models.quantized_config import read_checkpoint_quantization
from backend.models.quantized_spec import FP8
from kernels import ops
from kernels._cpus import count_cpus
from kernels._load import KernelError, check_device, device_stream
from kernels._load_cpu import find_library, own_level, use_at_most

logger = logging.getLogger(__name__)

DRIVER_FILE = Path("/dev/nvidiactl")
"""There where NVIDIA's driver runs."""
GPU_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What kernels are tested in from end to end."""


def pick_device(config: EngineConfig) -> torch.device:
    """Where the engine runs. Raises ConfigError for a GPU that is not there, or that cannot be used.

    auto is the GPU when there is one. One that cannot be used is an error under auto too: who has bought it wants to know, and
    answers from the CPU are many times slower.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    is_auto = config.device == "auto"
    if not torch.cuda.is_available():
        reason = f"torch {torch.__version__} sees no GPU"
        if not is_auto:
            raise ConfigError(f"device {config.device}: {reason}; use --device cpu")
        if DRIVER_FILE.exists() and not is_hidden():
            raise ConfigError(f"device auto: this machine has a GPU ({DRIVER_FILE}), but {reason}: install a torch that does, or use --device cpu")
        return torch.device("cpu")
    named = torch.device("cuda" if is_auto else config.device)
    # With its number: the engine's thread begins with the first as its current one, whichever the program has chosen.
    device = named if named.index is not None else torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise ConfigError(f"device {config.device}: this machine has {torch.cuda.device_count()} GPUs, from cuda:0")
    try:
        check_device(device)
    except KernelError as error:
        raise ConfigError(f"device {config.device}: this machine has a GPU that cannot be used: {error}") from None
    return device


def is_hidden() -> bool:
    """Whether the machine's GPUs are taken from this process, by CUDA's own variable: then there is none for it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def choose_cpu_kernels(config: EngineConfig) -> None:
    """For this process, before anything is loaded. Raises ConfigError."""
    if config.cpu_kernels != "auto":
        try:
            use_at_most(config.cpu_kernels)
        except KernelError as error:
            raise ConfigError(f"cpu_kernels {config.cpu_kernels}: {error}") from None


def describe_processor(device: torch.device) -> str:
    """What the last bits of a sum depend on beside versions: what torch and this project's kernels were compiled for."""
    if device.type == "cpu":
        own = own_level() if find_library() is not None else "none"
        return f"cpu ({torch.backends.cpu.get_cpu_capability()}, kernels of its own: {own})"
    found = torch.cuda.get_device_properties(device)
    return f"cuda (sm_{found.major}{found.minor} with {found.multi_processor_count} multiprocessors)"


def pick_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """auto: float32 on CPU, the checkpoint's on GPU; one that the kernels are not tested in becomes bfloat16, and it is said."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        return torch.float32
    values = read_config(config.model)
    name = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in GPU_DTYPES:
        logger.warning(
            "the checkpoint is in %s and is served in bfloat16, which keeps 8 of its 11 bits of precision; --dtype float32 keeps all", name
        )
    return GPU_DTYPES.get(name, torch.bfloat16)


def pick_cache_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the target's keys and values are kept in; dtype: the model's. Raises ConfigError, ModelError.

    auto is what the checkpoint says, where that can be had: the model's dtype is always right, and it is said when it is taken instead.
    """
    asked = config.kv_cache_dtype
    if asked == "auto" and config.load_format != "dummy":
        found = read_checkpoint_quantization(read_config(config.model), config.model)
        said = found.cache if found is not None else None
        asked = "fp8" if said == FP8 else "model"
        if said is not None and asked == "model":
            logger.warning("the checkpoint's keys and values are meant for %s; on %s they are kept in %s", said, device, dtype)
    if asked == "fp8":
        return ops.E4M3
    if config.kv_cache_scales != "auto":
        raise ConfigError(
            f"kv_cache_scales is {config.kv_cache_scales}; keys and values are kept in {dtype}: leave it out, or say kv_cache_dtype fp8"
        )
    return dtype


def on_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """What everything on a device runs in: the stream that kernels, torch and graphs share."""
    return device_stream(device) if device.type == "cuda" else contextlib.nullcontext()


def beside_steps(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """What other threads than the engine's run on a device in. Torch's default stream would wait for the steps under way, and steps for it; and while
    a graph is captured on the engine's stream, CUDA lets nothing come to it."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def keep_temporaries_on_heap() -> None:
    """Stops glibc from mapping and unmapping every large temporary.

    A step's gathered keys and values are some megabytes, and page faults would dominate copying them.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD; glibc takes no more
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # another libc: slower, not wrong


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Runs torch on that many CPU threads, and leaves its setting as it was: it is the whole process's."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


THREADED_PRODUCTS = 75_000_000
"""Of a token's number and a weight, in a step: fewer are over before other threads are awake."""
SINGLE_THREAD_TOKENS = 8
"""At most, where the configuration says nothing."""


def count_threads(config: EngineConfig) -> int:
    """CPU threads of this process, where nothing speaks for fewer."""
    return config.num_threads or max(1, min(torch.get_num_threads(), count_cpus()) // config.parallel_config.host_size)


def threads_for(
    config: EngineConfig, num_weights: int = 0, num_threads: int | None = None
) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """CPU threads for a step of so many tokens. num_weights: that each is multiplied with; 0: few; num_threads: at most; None: `count_threads`."""
    num_threads = num_threads or count_threads(config)
    least = config.single_thread_tokens
    if least is None:
        least = min(SINGLE_THREAD_TOKENS, -(-THREADED_PRODUCTS // max(num_weights, 1)))
    return lambda num_tokens: cpu_threads(num_threads if num_tokens >= least else 1)
