"""Finds a tritonserver and checks what its Python stub needs, before anything is started."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SHM_NEEDED = 64 * 2**20
"""The stubs of two models, each with room to grow."""
SHM_ROOM = 2**28
"""Beyond which what requests hold fits for a while: a dozen of 12 MB at once end a server that has Docker's 64 MB."""
MOST_FILES = 65536
"""That a server may have open, as the gateway, where its hard limit allows as many."""
FILES_NEEDED, FILES_ROOM = 128, 1024
"""Of open files: the server has some 70 with its models, before anybody connects; below the second it is said how few connections are left."""
INPUT_LIMIT_OPTION = "http-max-input-size"
COMPLETE_OPTION = "disable-auto-complete-config"
"""The models' configurations are complete. A server that asks for more starts each model's process twice: 3 s more at each start."""
SAFE_VERSION = (2, 60)
"""Of Triton (release 25.08). Older ones name their shared memory to any client that sends too much, and read too much of what clients write there
(CVE-2025-23319, -23320, -23334: before 25.07), or run what a model's name says (CVE-2025-23316: before 25.08)."""
HELP_SECONDS = 30
OWN_BACKENDS = Path("/opt/tritonserver/backends")
"""Where tritonserver looks for backends, wherever it is itself."""
LOCK_FILE = ".owner"
"""In the repository's folder; the server reads folders only. Who holds its lock owns the folder, and it says who that is."""


class LaunchError(RuntimeError):
    """Something the server needs is missing; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Server:
    """A tritonserver executable and what it wants in its environment."""

    executable: Path
    backend_directory: Path | None = None
    """None: the server's own."""
    library_path: tuple[str, ...] = field(default=())
    options: frozenset[str] = frozenset()
    """The names of the options that it has, as far as they are known: releases differ."""
    version: tuple[int, ...] | None = None
    """Triton's own, such as (2, 51, 0); None: it does not say before it runs."""

    def environment(self) -> dict[str, str]:
        """What it is run in: this process's environment, with the interpreter and the libraries that it needs in front."""
        environment = dict(os.environ)
        # The stub runs the first python3 on PATH: it must be the one that this project is installed in.
        # os.defpath: the server starts stubs by bash, and waits for ever where there is none (a service without PATH).
        environment["PATH"] = ":".join([str(Path(sys.executable).parent), *filter(None, [environment.get("PATH")]), os.defpath])
        if self.library_path:
            environment["LD_LIBRARY_PATH"] = ":".join([*self.library_path, *filter(None, [environment.get("LD_LIBRARY_PATH")])])
        return environment

    @property
    def is_old(self) -> bool:
        """It has faults that let clients read and write its memory. One that does not tell its version is known by an option that it lacks."""
        return self.version < SAFE_VERSION if self.version else INPUT_LIMIT_OPTION not in self.options


def state_directory() -> Path:
    """Where rendered repositories and the backend directory live. Raises LaunchError."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "foretoken"
    except RuntimeError:  # as of a container's user that has only a number
        raise LaunchError(f"user {os.getuid()} has no home folder: set HOME, or XDG_STATE_HOME to a folder for what servers keep") from None


def server_state() -> Path:
    """That folder, for what the server itself reads. Raises LaunchError."""
    check_server_path("state folder", folder := state_directory(), "set XDG_STATE_HOME to another folder")
    return folder


def check_server_path(what: str, path: Path, advice: str) -> None:
    """Raises LaunchError for a path by which the server cannot start a model's process: it is a word of a shell's command line then, unquoted."""
    if not str(path).isascii():
        raise LaunchError(f"{what} {path}: the server's Python stub reads ASCII paths only: {advice}")
    if shlex.quote(str(path)) != str(path):
        raise LaunchError(f"{what} {path}: the server hands it to a shell, and it has more than letters, digits and @%+=:,./_-: {advice}")


def find_server() -> Server:
    """The tritonserver on PATH (as in NVIDIA's container), else the one of the nvidia-pytriton wheel. Raises LaunchError."""
    check_numpy()
    server = _locate_server()
    return dataclasses.replace(server, options=read_options(server), version=read_version(server.executable))


def read_options(server: Server) -> frozenset[str]:
    """The names of its options, from its own help. Raises LaunchError when it cannot run at all."""
    try:
        result = subprocess.run(
            [server.executable, "--help"], env=server.environment(), capture_output=True, encoding="utf-8", errors="replace", timeout=HELP_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{server.executable} cannot be run: {error}") from None
    options = frozenset(re.findall(r"--([a-z][a-z0-9-]*[a-z0-9])", result.stdout + result.stderr))
    if "model-repository" not in options:
        raise LaunchError(f"{server.executable} --help says nothing of --model-repository (exit status {result.returncode}): {result.stderr[-500:]}")
    return options


def read_version(executable: Path) -> tuple[int, ...] | None:
    """From the file that NVIDIA's container has beside the server; the wheel has none."""
    path = executable.resolve().parent.parent / "TRITON_VERSION"
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", path.read_text("utf-8", "replace")) if path.is_file() else None
    return tuple(map(int, match.groups())) if match else None


def _locate_server() -> Server:
    if found := shutil.which("tritonserver"):
        return Server(Path(found), _find_backends(Path(found)))
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


def _find_backends(executable: Path) -> Path | None:
    """Backends that were unpacked with a server elsewhere than in the one folder that it looks in by itself. Raises LaunchError."""
    beside = executable.resolve().parent.parent / "backends"
    if (OWN_BACKENDS / "python").is_dir() or not (beside / "python").is_dir():
        return None
    check_server_path("backend directory", beside, "move the server's folder")
    return beside


def _lay_out_backend(root: Path, stub: Path) -> Path:
    """The Python backend's folder as the server wants it: the wheel's parts by link, with this interpreter's stub."""
    installation = hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()  # another venv has a folder of its own
    directory = server_state() / f"backends-{stub.parent.name}-{installation}"
    target = directory / "python"
    try:
        target.mkdir(parents=True, exist_ok=True)
        for source in (*(p for p in (root / "backends" / "python").iterdir() if p.is_file()), stub):
            link = target / source.name
            if not link.is_symlink() or link.readlink() != source:
                fresh = link.with_name(f"{link.name}.{os.getpid()}")
                fresh.unlink(missing_ok=True)  # of one that was killed: in a container all have the same number
                fresh.symlink_to(source)
                fresh.replace(link)  # at once: another server may be starting
        keep_no_bytecode(target)
    except OSError as error:
        raise LaunchError(f"{target} cannot be made: {error.strerror}: set XDG_STATE_HOME to another folder") from None
    return directory


def keep_no_bytecode(folder: Path) -> None:
    """Lets Python keep no bytecode of the modules in a folder: a file is where it would make its own one. Where a disk has no room it keeps half of a
    module's without a word, and every later start fails on that (EOFError), also when there is room again. Raises OSError."""
    cache = folder / "__pycache__"
    if cache.is_dir():
        shutil.rmtree(cache, ignore_errors=True)  # of an earlier version of this project, whose server may run still
    cache.touch()


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
    try:
        version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:  # it may have been unpacked without
        import numpy

        version = numpy.__version__
    if int(version.split(".")[0]) >= 2:
        raise LaunchError(f"NumPy {version} in {sys.executable}: the server's Python stub needs NumPy < 2: pip install 'numpy<2'")


FREE_PORTS = range(10000, 32768)
"""Below those that Linux gives connections of its own choice: such a one may begin before a server has come to listen."""
_places = itertools.count(14071 * os.getpid())
"""Processes that look at the same time begin far from each other: the golden section of the range keeps neighbouring process ids apart."""
_given_ports: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nothing listens on; each is given once by a process, which may not listen on all of them yet."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            own, port = stack.enter_context(socket.socket()), FREE_PORTS[next(_places) % len(FREE_PORTS)]
            with contextlib.suppress(OSError):  # it is in use
                own.bind(("127.0.0.1", port))
                if port not in _given_ports:
                    ports.append(port)
        _given_ports.update(ports)
    return ports


def check_port_numbers(ports: Mapping[str, int]) -> None:
    """Raises LaunchError when a port is out of range or named twice."""
    taken: dict[int, str] = {}
    for key, port in ports.items():
        if not 1 <= port <= 65535:
            raise LaunchError(f"{key} is {port}; ports go from 1 to 65535")
        if port in taken:
            raise LaunchError(f"{taken[port]} and {key} are both {port}")
        taken[port] = key


def resolve_host(host: str) -> tuple[int, str]:
    """The family and the numbers of the address that a name stands for, or that they are already. Raises LaunchError."""
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise LaunchError(f"host {host!r:.80} is no address of this machine: {error.strerror}") from None
    return family, str(address)


def triton_addresses(host: str) -> tuple[str, str]:
    """An address as Triton's HTTP ports and its gRPC port take it. For a name, and for IPv6's numbers alone, the first listen on 255.255.255.255, and
    for the latter the second says that its port is in use. Raises LaunchError."""
    family, address = resolve_host(host)
    return (f"ipv6:{address}", f"[{address}]") if family == socket.AF_INET6 else (address, address)


def check_ports(ports: Mapping[str, int], host: str) -> None:
    """Raises LaunchError when a port is one that cannot be, or in use on the address that the server will listen on."""
    check_port_numbers(ports)
    family, address = resolve_host(host)
    for key, port in ports.items():
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                flag = f"--{key.replace('_', '-')}"
                message = f"{key} {port} cannot be used on {host}: {error.strerror}: stop what holds it, or choose another with {flag} PORT"
                raise LaunchError(message) from None


def check_shared_memory() -> None:
    """Raises LaunchError when /dev/shm is too small for the stubs; warns where there is little room for requests, which pass through it."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError as error:
        raise LaunchError(f"/dev/shm cannot be used, and the server's Python stubs need it: {error.strerror}") from None
    free = stats.f_bavail * stats.f_frsize
    if free < SHM_NEEDED:
        raise LaunchError(f"/dev/shm has {free >> 20} MiB free; the server needs {SHM_NEEDED >> 20} MiB: in Docker, use --shm-size=1g")
    if free < SHM_ROOM:
        message = f"/dev/shm has {free >> 20} MiB free: large requests, or many, fill that and end the server; in Docker, use --shm-size=1g"
        print(f"foretoken serve: warning: {message}", file=sys.stderr)


def check_file_limit() -> None:
    """Raises LaunchError where fewer files may be open than the server needs for itself: it would never be ready, and fill the disk with its log.
    Warns where that leaves little room for connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 0 <= hard < FILES_ROOM:
        return
    said, advice = f"the limit of open files is {hard}", f"raise it to {FILES_ROOM} or more (ulimit -Hn; in Docker, --ulimit nofile=65536)"
    if hard < FILES_NEEDED:
        raise LaunchError(f"{said}; the server needs {FILES_NEEDED}, and one more for each connection: {advice}")
    message = f"{said}: beyond some {hard - FILES_NEEDED} connections at once the server answers nobody, and says so without an end: {advice}"
    print(f"foretoken serve: warning: {message}", file=sys.stderr)


def raise_file_limit() -> None:
    """For the server. A connection is a file, and the usual soft limit is 1,024: beyond it a server answers nobody, nor its supervisor, and says so
    in its log a hundred thousand times a second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises LaunchError for a folder that what is rendered cannot be written to: a full disk is no traceback."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"repository {folder} cannot be written: {error.strerror}") from None


def lock_folder(folder: Path) -> int:
    """Makes the folder this process's own until it ends (or what it becomes by exec). Returns the lock's file descriptor.

    Raises LaunchError when another process has it: what is rendered here would be removed under a running server. The lock
    is the kernel's, so it holds between containers that share a volume, and none is left by a process that was killed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LaunchError(f"repository {folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "another process"
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise LaunchError(f"repository {folder} is in use by {owner}: name another folder with --repository, or stop that server") from None
        raise LaunchError(f"repository {folder} cannot be locked: {error.strerror}") from None
    with writing(folder):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor
