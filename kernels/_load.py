"""Compiles the project's CUDA sources with nvcc, keeps what it made on disk, and loads and launches it through PyCUDA.

PyCUDA, torch and CUDA graphs share the device's primary context and one stream. PyCUDA cannot adopt a stream of torch, so the
stream is PyCUDA's and torch runs on it: everything that launches kernels does so inside `device_stream`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from kernels._cpus import count_cpus
from kernels._signature import formats_of
from kernels.structs import header
from kernels.toolchain import KernelError, find_nvcc, locked

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What kernels are compiled for. Others from sm_80 on get the nearest one's PTX, which the driver finishes."""
FLAGS = ("-O3", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas=-v")
ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
"""CUDA's names of the types that tensors come in."""
HEADER = "generated.cuh"
"""Made of kernels/structs.py for every compilation."""

Defines = Mapping[str, "int | str"]


@functools.cache
def _nvcc_version(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, check=True, encoding="utf-8", errors="replace").stdout


def cache_folder() -> Path:
    """Where compiled kernels are kept, by content. Raises KernelError."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken" / "kernels"
    except RuntimeError:
        raise KernelError(f"user {os.getuid()} has no home folder: set HOME, or XDG_CACHE_HOME to a folder for compiled kernels") from None


def _number(architecture: str) -> int:
    return int(architecture[3:])


@functools.cache
def _known_to(nvcc: str) -> frozenset[str]:
    """The architectures that this nvcc compiles for."""
    return frozenset(subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split())


def target_of(architecture: str, known: Collection[str]) -> tuple[str, bool]:
    """What to compile for, of ARCHITECTURES, and whether as PTX that the driver finishes. known: what nvcc compiles for.

    Raises KernelError for an architecture that kernels are not made for.
    """
    if architecture in ARCHITECTURES and architecture in known:
        return architecture, False
    older = [a for a in ARCHITECTURES if a in known and _number(a) <= _number(architecture)]
    if not older:
        raise KernelError(f"kernels are made for {ARCHITECTURES[0]} and later, not for {architecture}; this nvcc knows {', '.join(sorted(known))}")
    return older[-1], True


def compile_source(name: str, architecture: str, defines: Defines | None = None) -> Path:
    """The cubin, or PTX, of <name>.cu for an architecture such as sm_90, compiled unless an equal one is on disk.

    Raises KernelError with the compiler's message.
    """
    nvcc, source = find_nvcc(), SOURCES / f"{name}.cu"
    target, is_ptx = target_of(architecture, _known_to(nvcc))
    if is_ptx:
        options = ["-ptx", f"-arch=compute_{target[3:]}"]
    else:
        # An `a` target has the architecture's own instructions (wgmma, setmaxnreg); it runs on that one alone, as every cubin does.
        own = {"sm_90": "sm_90a", "sm_100": "sm_100a"}.get(target, target)
        options = ["-cubin", f"-gencode=arch=compute_{own[3:]},code={own}"]
    options += [*FLAGS, *(f"-D{k}={v}" for k, v in sorted((defines or {}).items()))]
    headers = [header().encode(), *(path.read_bytes() for path in sorted(SOURCES.glob("*.cuh")))]
    parts = [source.read_bytes(), *headers, " ".join(options).encode(), _nvcc_version(nvcc).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    path = cache_folder() / f"{name}-{architecture}-{key}.{'ptx' if is_ptx else 'cubin'}"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (log := path.with_suffix(".log")).touch()
        with locked(log):
            if not path.is_file():  # others may have compiled it meanwhile
                _compile(nvcc, source, architecture, options, path, log)
    except OSError as error:
        said = f"{path.parent}, where compiled kernels are kept, cannot be written: {error}"
        raise KernelError(f"{said}; set XDG_CACHE_HOME to another folder") from None
    return path


def _compile(nvcc: str, source: Path, architecture: str, options: Sequence[str], path: Path, log: Path) -> None:
    """Raises KernelError, OSError."""
    logger.info("compiling kernels/%s.cu for %s ...", source.stem, architecture)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "out"
        (Path(folder) / HEADER).write_text(header())
        result = subprocess.run(
            [nvcc, *options, f"-I{folder}", "-o", str(made), str(source)], capture_output=True, encoding="utf-8", errors="replace"
        )
        if result.returncode:
            raise KernelError(f"nvcc could not compile {source.name} for {architecture}:\n{result.stderr.strip()}")
        log.write_text(result.stderr, "utf-8")  # registers, shared memory and spills of each kernel
        made.replace(path)  # whole or not at all


def compile_all(jobs: Sequence[tuple[str, Defines]], architecture: str) -> None:
    """Compiles several (source, defines) at once, on all CPUs that this process may use."""
    unique = {(name, tuple(sorted(defines.items()))) for name, defines in jobs}
    with ThreadPoolExecutor(count_cpus()) as pool:
        futures = [pool.submit(compile_source, name, architecture, dict(defines)) for name, defines in sorted(unique, key=str)]
        for future in futures:
            future.result()


class _Recorded:
    """In the place of every kernel inside `compiling`: does nothing."""

    num_registers = num_local_bytes = 0

    def count_clusters(self, size: int, threads: int) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> None:
        pass


_asked_for: list[tuple[str, Defines]] | None = None


@contextlib.contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Kernels do nothing inside, but those that are missing on disk are compiled at its end, all at once. For one thread, before others run."""
    global _asked_for
    _asked_for = []
    try:
        yield
        jobs = _asked_for
    finally:
        _asked_for = None
    compile_all(jobs, device_of(device).architecture)


def is_compiling() -> bool:
    """Whether kernels do nothing."""
    return _asked_for is not None


def check_device(device: torch.device) -> None:
    """Raises KernelError when kernels cannot run on a GPU that torch sees, saying what is missing."""
    find_nvcc()
    device_of(device)


class _Device:
    """One GPU's context and stream, and the modules loaded there."""

    def __init__(self, index: int) -> None:
        try:
            import pycuda.driver as driver
        except ImportError as error:
            raise KernelError(f"PyCUDA cannot be imported ({error}): pip install -e '.[gpu]' in the project's folder, or use --device cpu") from None
        torch.zeros(1, device=f"cuda:{index}")  # torch makes the primary context
        driver.init()
        self.driver = driver
        self.context = driver.Device(index).retain_primary_context()
        self.block_memory: int = driver.Device(index).get_attribute(driver.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        major, minor = torch.cuda.get_device_capability(index)
        self.architecture = f"sm_{major}{minor}"
        try:
            target_of(self.architecture, _known_to(find_nvcc()))
        except KernelError as error:
            raise KernelError(f"cuda:{index} is an {torch.cuda.get_device_name(index)}: {error}") from None
        self.context.push()
        self.stream = driver.Stream()
        driver.Context.pop()
        # At its end the interpreter destroys what is left in any order; torch notes on this stream when memory that the stream used is given back,
        # and the process would abort if it were gone before.
        for lasting in (self.context, self.stream):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(lasting))
        self.torch_stream = torch.cuda.ExternalStream(self.stream.handle, device=f"cuda:{index}")
        self._lock = threading.Lock()
        self._modules: dict[Path, Any] = {}

    def module(self, name: str, defines: Defines | None) -> Any:
        path = compile_source(name, self.architecture, defines)
        with self._lock:
            if path not in self._modules:
                self._modules[path] = self.driver.module_from_buffer(path.read_bytes())
            return self._modules[path]


@functools.cache
def _device(index: int) -> _Device:
    return _Device(index)


def _index_of(device: torch.device | None) -> int:
    return device.index if device is not None and device.index is not None else torch.cuda.current_device()


def device_of(device: torch.device) -> _Device:
    return _device(_index_of(device))


class Gpu(NamedTuple):
    """What the shapes of kernels depend on."""

    num_multiprocessors: int
    shared_memory: int
    """Bytes of one multiprocessor."""
    generation: int
    """Major compute capability: 8 Ampere and Ada, 9 Hopper (wgmma), 10 and 12 Blackwell."""
    block_memory: int = 227 * 1024
    """Most bytes of shared memory that a block may have."""

    @property
    def has_clusters(self) -> bool:
        """Blocks that run together and read each other's shared memory; GeForce Blackwell is left out, where nobody has tried it."""
        return self.generation in (9, 10)


@functools.cache
def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_multiprocessor, properties.major, _device(index).block_memory)


def gpu_of(device: torch.device | None = None) -> Gpu:
    """device: the current one when not given."""
    return _gpu(_index_of(device))


@contextlib.contextmanager
def device_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Makes the stream that kernels run on torch's own for this thread, too."""
    own = device_of(device)
    before, index = torch.cuda.current_device(), own.torch_stream.device.index
    if before != index and not torch._C._cuda_hasPrimaryContext(before):  # type: ignore[attr-defined]
        torch.cuda.set_device(index)  # to come back to a GPU that this process does not use makes a context there, of some 500 MB
    own.context.push()
    try:
        with torch.cuda.stream(own.torch_stream):
            yield own.torch_stream
    finally:
        own.driver.Context.pop()


class Kernel:
    """A CUDA function. Called with grid, block and arguments: tensors go as pointers, tuples as structs, and numbers."""

    def __init__(self, device: _Device, function: Any, formats: Sequence[str], shared: int, launch: Callable[..., None] | None = None) -> None:
        """formats: of each argument, as in Python's `struct`; launch: takes the place of PyCUDA's own."""
        function.prepare("".join(formats))
        if shared > 48 * 1024:
            function.set_attribute(device.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        self._launch = launch or function.prepared_async_call
        self._stream = device.stream
        self._torch_stream = device.torch_stream.cuda_stream
        self._index: int = device.torch_stream.device.index
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._shared = shared
        self._num_clusters: dict[tuple[int, int], int] = {}
        self.num_registers, self.num_local_bytes = function.num_regs, function.local_size_bytes

    def count_clusters(self, size: int, threads: int) -> int | None:
        """Clusters of `size` blocks that run at a time, where the driver tells: of a kernel that is launched programmatically, from sm_90 on."""
        if not isinstance(self._launch, _ProgrammaticLaunch):
            return None
        if (size, threads) not in self._num_clusters:
            self._num_clusters[size, threads] = self._launch.count_clusters(size, threads, self._shared)
        return self._num_clusters[size, threads]

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], *args: Any, shared: int | None = None) -> None:
        if self._current_stream(self._index) != self._torch_stream:
            raise KernelError("kernels are launched inside kernels.device_stream(device) only")
        values: list[Any] = []
        for argument in args:
            for value in argument if isinstance(argument, tuple) else (argument,):
                values.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
        self._launch(grid, block, self._stream, *values, shared_size=self._shared if shared is None else shared)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, with a value of up to three ints."""

    _fields_ = [("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int * 3), ("_rest", ctypes.c_char * 52)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class _ProgrammaticLaunch:
    """Launches a function so that it may start before the stream's previous kernel has ended (programmatic stream serialization).

    PyCUDA has no cuLaunchKernelEx and hands out no CUfunction, so the driver is called here. A captured launch becomes a
    programmatic edge of the graph.
    """

    CLUSTER_DIMENSION = 4
    PROGRAMMATIC_STREAM_SERIALIZATION = 6
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self, device: _Device, path: Path, name: str, formats: Sequence[str], shared: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), path.read_bytes()))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
        if shared > 48 * 1024:
            self._check(self._driver.cuFuncSetAttribute(self._function, self.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))
        self._types = struct.Struct("".join(formats))
        self._arguments = ctypes.create_string_buffer(self._types.size)
        # One by one: a kernel's parameters of larger alignment, such as tensor maps, lie elsewhere than in a struct.
        start = ctypes.addressof(self._arguments)
        places = [start + struct.calcsize("".join(formats[: i + 1])) - struct.calcsize(kind) for i, kind in enumerate(formats)]
        self._parameters = (ctypes.c_void_p * len(places))(*places)
        attribute = _Attribute(id=self.PROGRAMMATIC_STREAM_SERIALIZATION, value=(1, 0, 0))
        self._config = _LaunchConfig(stream=device.stream.handle, attributes=ctypes.pointer(attribute), num_attributes=1)
        self._last: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
        self._lock = threading.Lock()

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise KernelError(f"CUDA error {code}: {(text.value or b'unknown').decode()}")

    def count_clusters(self, size: int, threads: int, shared: int) -> int:
        """Clusters of so many blocks that run at a time: they lie within a GPC, and which of its multiprocessors work differs from chip to chip."""
        attribute = _Attribute(id=self.CLUSTER_DIMENSION, value=(size, 1, 1))
        config, count = _LaunchConfig(shared=shared, attributes=ctypes.pointer(attribute), num_attributes=1), ctypes.c_int()
        config.grid[:], config.block[:] = (size, 1, 1), (threads, 1, 1)
        self._check(self._driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config)))
        return count.value

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], stream: Any, *values: Any, shared_size: int) -> None:
        with self._lock:
            if (grid, block, shared_size) != self._last:  # to fill it takes as long as all else here
                config, self._last = self._config, (grid, block, shared_size)
                config.grid[:], config.block[:], config.shared = (*grid, 1, 1)[:3], (*block, 1, 1)[:3], shared_size
            self._types.pack_into(self._arguments, 0, *values)
            self._check(self._driver.cuLaunchKernelEx(ctypes.addressof(self._config), self._function, self._parameters, None))


@functools.cache
def _kernel(index: int, source: str, name: str, defines: tuple[tuple[str, int | str], ...], shared: int, programmatic: bool) -> Kernel:
    device, formats = _device(index), formats_of(SOURCES / f"{source}.cu", name)
    launch = None
    if programmatic and _gpu(index).generation >= 9:
        launch = _ProgrammaticLaunch(device, compile_source(source, device.architecture, dict(defines)), name, formats, shared)
    return Kernel(device, device.module(source, dict(defines)).get_function(name), formats, shared, launch)


def load(device: torch.device, source: str, name: str, defines: Defines | None = None, shared: int = 0, programmatic: bool = False) -> Kernel:
    """The function `name` (extern "C") of kernels/<source>.cu, compiled with `defines`; its arguments are what the source says.

    shared: most bytes of dynamic shared memory that a launch asks for. programmatic: from sm_90 on a launch may begin before the kernel
    ahead of it on the stream has ended; the function must execute griddepcontrol.wait before it touches what any earlier kernel writes,
    reads or frees, in at least one thread of the grid whatever the arguments are; or at its end, where it runs beside the kernel ahead
    (`wait_for_earlier` in programmatic.cuh says when it may). Raises KernelError.
    """
    if _asked_for is not None:
        _asked_for.append((source, defines or {}))
        return cast(Kernel, _Recorded())
    return _kernel(_index_of(device), source, name, tuple(sorted((defines or {}).items())), shared, programmatic)
