"""Finds a tritonserver and checks what its Python stub needs, before anything is started."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import socket
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

SHM_NEEDED = 64 * 2**20
"""The stubs of two models, each with room to grow."""


class LaunchError(RuntimeError):
    """Something the server needs is missing; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Server:
    """A tritonserver executable and what it wants in its environment."""

    executable: Path
    backend_directory: Path | None = None
    """None: the server's own."""
    library_path: tuple[str, ...] = field(default=())


def state_directory() -> Path:
    """Where rendered repositories and the backend directory live."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "foretoken"


def find_server() -> Server:
    """The tritonserver on PATH (as in NVIDIA's container), else the one of the nvidia-pytriton wheel. Raises LaunchError."""
    check_numpy()
    if found := shutil.which("tritonserver"):
        return Server(Path(found))
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise LaunchError("no tritonserver: there is none on PATH, and the wheel is not installed: pip install --no-deps nvidia-pytriton==0.7.0")
    package = Path(spec.submodule_search_locations[0])
    root = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        known = sorted(p.name for p in (root / "python_backend_stubs").iterdir())
        raise LaunchError(f"the server's wheel has no stub for Python {version}; it has {', '.join(known)}: use one of those")
    libraries = (str(package.parent / "nvidia_pytriton.libs"), *find_libpython(version))
    return Server(root / "bin" / "tritonserver", _lay_out_backend(root, stub), libraries)


def _lay_out_backend(root: Path, stub: Path) -> Path:
    """The Python backend's folder as the server wants it: the wheel's parts by link, with this interpreter's stub."""
    installation = hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()  # another venv has a folder of its own
    directory = state_directory() / f"backends-{stub.parent.name}-{installation}"
    target = directory / "python"
    target.mkdir(parents=True, exist_ok=True)
    for source in (*(p for p in (root / "backends" / "python").iterdir() if p.is_file()), stub):
        link = target / source.name
        if not link.is_symlink() or link.readlink() != source:
            fresh = link.with_name(f"{link.name}.{os.getpid()}")
            fresh.symlink_to(source)
            fresh.replace(link)  # at once: another server may be starting
    return directory


def find_libpython(version: str) -> tuple[str, ...]:
    """Folders to search for the shared libpython that the stub is linked to; () when the system has it. Raises LaunchError."""
    name = f"libpython{version}.so.1.0"
    try:
        ctypes.CDLL(name)
        return ()
    except OSError:
        pass
    folders = [sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix) / "lib"), str(Path(sys.prefix) / "lib")]
    for folder in folders:
        if folder and (Path(folder) / name).is_file():
            return (folder,)
    raise LaunchError(f"{name} is missing, and the server's Python stub needs it: apt-get install libpython{version}")


def check_numpy() -> None:
    """Raises LaunchError for a NumPy that the stub would pass corrupt tensors with."""
    import numpy

    if int(numpy.__version__.split(".")[0]) >= 2:
        raise LaunchError(f"NumPy {numpy.__version__} in {sys.executable}: the server's Python stub needs NumPy < 2: pip install 'numpy<2'")


def check_gpu(device: str) -> None:
    """Raises LaunchError when a GPU is asked for by name and the machine has none."""
    if device.startswith("cuda") and not Path("/dev/nvidiactl").exists():
        raise LaunchError(f"device {device}: this machine has no NVIDIA GPU (no /dev/nvidiactl); use --device cpu")


def check_ports(ports: dict[str, int]) -> None:
    """Raises LaunchError when a port is out of range, named twice, or in use."""
    taken: dict[int, str] = {}
    for key, port in ports.items():
        if not 1 <= port <= 65535:
            raise LaunchError(f"{key} is {port}; ports go from 1 to 65535")
        if port in taken:
            raise LaunchError(f"{key} and {taken[port]} are both {port}")
        taken[port] = key
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                raise LaunchError(f"{key} {port} cannot be used: {error.strerror}: stop what holds it, or choose another") from None


def check_shared_memory() -> None:
    """Raises LaunchError when /dev/shm is too small for the stubs."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError as error:
        raise LaunchError(f"/dev/shm cannot be used, and the server's Python stubs need it: {error.strerror}") from None
    free = stats.f_bavail * stats.f_frsize
    if free < SHM_NEEDED:
        raise LaunchError(f"/dev/shm has {free >> 20} MiB free; the server needs {SHM_NEEDED >> 20} MiB: in Docker, use --shm-size=1g")
