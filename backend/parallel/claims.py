"""Which rank each of a server's instances is: by files that only one process locks, in a folder that only this user enters."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from backend.errors import ConfigError, ModelError

LOOK_SECONDS = 0.05
SOCKET = "relay"
PREFIX = "foretoken-ranks"
MAX_SOCKET_BYTES = 107
"""Of a Unix socket's path (sockaddr_un)."""
COUNT_SECONDS, START_SECONDS, EXPLAIN_SECONDS = 0.5, 8.0, 5.0
"""Between two looks at the instances; for the server to start them; and for who knows better why one has ended to say so."""


def meeting_folder(server: int, model: Path) -> Path:
    """Of the instances of one model of one server (its process id), made if need be. Raises ConfigError where somebody else has it."""
    name = f"{PREFIX}-{os.getuid()}-{server}-{zlib.crc32(os.fsencode(model.resolve())):08x}"
    folder = Path(tempfile.gettempdir()) / name
    _remove_left_over(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder}: the ranks of this model are to meet here, and it is not a folder of this user alone")
    return folder


def _remove_left_over(parent: Path) -> None:
    """Folders of servers that were killed: their process is gone, and nobody has their first rank."""
    for folder in parent.glob(f"{PREFIX}-{os.getuid()}-*"):
        server = folder.name.removeprefix(f"{PREFIX}-").split("-")[1]
        if Path("/proc", server).exists() or folder.is_symlink():
            continue
        with contextlib.suppress(OSError):
            file = os.open(folder / "rank-0", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)


def check_socket(folder: Path) -> None:
    """Raises ConfigError where ranks cannot meet in it: rank 0 would end by that alone, and the others wait for it."""
    path = folder / SOCKET
    if (size := len(os.fsencode(path))) > MAX_SOCKET_BYTES:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise ConfigError(
            f"{path}: the ranks of this model are to meet here: {size} bytes, of at most {MAX_SOCKET_BYTES} for a socket: shorten TMPDIR"
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A rank that is this process's for as long as it lives."""

    rank: int
    folder: Path
    file: int

    @property
    def socket(self) -> Path:
        return self.folder / SOCKET

    def is_free(self, rank: int) -> bool:
        """Whether nobody has this other rank."""
        try:
            file = os.open(self.folder / f"rank-{rank}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may ask
        except OSError:
            return False
        finally:
            os.close(file)
        return True

    def give_back(self) -> None:
        """Rank 0 takes the folder away: the others have opened what they need in it."""
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.file)


def claim_rank(folder: Path, ranks: list[int], seconds: float) -> Claim:
    """The first of these ranks that no other process has; waits so long for one that ends. Raises ModelError."""
    end = time.monotonic() + seconds
    while True:
        for rank in ranks:
            file = os.open(folder / f"rank-{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                continue
            return Claim(rank, folder, file)
        if time.monotonic() > end:
            raise ModelError(f"rank {', '.join(map(str, ranks))} is another process's, after {seconds:.0f} s: {folder}")
        time.sleep(LOOK_SECONDS)


class Instances:
    """All of the model that this process is an instance of, while they load: one that ends before the ranks have met tells nobody of it, and may not
    even have had a rank. They are the server's processes with this one's program and model."""

    def __init__(self, claim: Claim, size: int) -> None:
        self._claim, self._size = claim, size
        self._begin, self._looked = time.monotonic(), 0.0
        self._were_all = False
        self._others = set(range(size)) - {claim.rank}
        self._since: float | None = None
        """When some were missing first."""
        self._free: dict[int, float] = {}
        """Ranks that nobody has, and since when that is seen: of a process that ends its memory goes before its lock."""

    def check(self) -> None:
        """To be called again and again. Raises ModelError where one has ended, and nobody has said for a while why."""
        now = time.monotonic()
        if now - self._looked < COUNT_SECONDS:
            return
        self._looked = now
        if _count_siblings() >= self._size:
            self._were_all, self._since = True, None
            return
        if self._were_all or now - self._begin > START_SECONDS:
            if self._since is None:
                self._since, self._free = now, {}
            self._free = {rank: self._free.get(rank, now) for rank in self._others if self._claim.is_free(rank)}
            if now - self._since > EXPLAIN_SECONDS:
                # Others may end by the same reason just before this one does.
                first = [rank for rank, since in self._free.items() if since - self._since < EXPLAIN_SECONDS / 2]
                ranks = ", ".join(map(str, sorted(first))) or "unknown"
                raise ModelError(f"rank {ranks} of {self._size}: its instance has ended before the model was loaded")


def _count_siblings() -> int:
    """Processes that run what this one runs, and have its parent; this one among them."""
    server, own = os.getppid(), _command("self")
    found = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError):
            if name.isdigit():
                parent = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[1]
                found += int(parent) == server and _command(name) == own
    return found


def _command(process: str) -> list[bytes]:
    """Of the server's process of an instance: its program, and the model's file. What has ended has none."""
    return Path("/proc", process, "cmdline").read_bytes().split(b"\0")[:2]
