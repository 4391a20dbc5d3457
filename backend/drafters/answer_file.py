"""The file that answers outlive a server in. Servers of one model may share it: each adds its own answers to what it finds."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import logging
import os
import stat
import time
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

logger = logging.getLogger(__name__)

FILE_VERSION = 1
LOCK_SECONDS = 10.0
"""A server holds the lock for as long as it reads and writes the file; one that is stopped meanwhile would hold it for ever."""
POLL_SECONDS = 0.05


class ForeignError(ValueError):
    """A sound file of another model or format."""


class AnswerFile:
    """One server's way to it. Nothing here raises for what a file may hold, or for a disk that is full: it costs a warning."""

    def __init__(self, path: str, fingerprint: str) -> None:
        """fingerprint: of model and tokenizer; answers of another one are not read."""
        self._path = path
        self._fingerprint = fingerprint
        self._own: set[int] = set()
        """Hashes of what this server has read from the file at its start, or written last: what it drops of these is to go."""
        self._may_replace = False
        """Since it was of no use at the start, and that was said."""

    def read(self) -> list[array[int]]:
        """All answers, oldest first; none of a file that cannot be used. Warns where nothing could be saved either, not only when that is tried."""
        if why := _why_not_writable(self._path):
            logger.warning("the suffix cache cannot be saved to %s: %s", self._path, why)
        try:
            answers = _read(self._path, self._fingerprint)
        except FileNotFoundError:
            logger.info("the suffix cache starts empty: there is no %s yet", self._path)
            return []
        except Exception as error:  # whatever numpy and zipfile make of a damaged file
            self._may_replace = True
            reason = str(error) if isinstance(error, ForeignError) else f"{type(error).__name__}: {error}"
            logger.warning("the suffix cache starts empty, not from %s: %s", self._path, reason)
            return []
        self._own = {hash(a.tobytes()) for a in answers}
        return answers

    def save(self, answers: Sequence[array[int]], max_tokens: int) -> bool:
        """Puts the answers of this server, oldest first, into the file, beside those of others; the oldest go beyond max_tokens tokens in all.

        What a reader finds is the file before or after, never a part. False, with a warning, where it could not be saved.
        """
        hashes = {hash(a.tobytes()) for a in answers}
        try:
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            with self._locked():
                others = [a for a in self._read_again() if hash(a.tobytes()) not in self._own | hashes]
                _write(self._path, self._fingerprint, _merge(answers, others, max_tokens))
        except (OSError, ValueError) as error:  # a path with a zero byte is one of values
            logger.warning("the suffix cache is not saved to %s: %s", self._path, error)
            return False
        self._own, self._may_replace = hashes, False
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Beside the file, which is replaced."""
        descriptor = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            ending = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > ending:
                        raise TimeoutError(f"another server has held its lock ({self._path}.lock) for {LOCK_SECONDS:g} s") from None
                    time.sleep(POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def _read_again(self) -> list[array[int]]:
        """What the file has now. Raises OSError; ForeignError where it became another model's since the start."""
        try:
            return _read(self._path, self._fingerprint)
        except FileNotFoundError:
            return []
        except ForeignError as error:
            if not self._may_replace:
                raise ForeignError(f"{error}: another server writes there, give each model a suffix_decoding_cache_path of its own") from None
        except OSError:
            raise
        except Exception:  # it may be no cache at all, but a file that the path names by mistake
            os.replace(self._path, f"{self._path}.unreadable")
        return []


def _why_not_writable(path: str) -> str:
    """Empty: it seems to be. Folders that lack are made when it is saved."""
    if os.path.exists(path) and not os.path.isfile(path):
        return "it is a folder" if os.path.isdir(path) else "it is no regular file"
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        return f"{folder} is no folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written to"


def _merge(own: Sequence[array[int]], others: Sequence[array[int]], max_tokens: int) -> list[array[int]]:
    """The newest of both in turns, as many as may stay; oldest first."""
    kept, num_tokens = [], 0
    for answer in itertools.chain.from_iterable(itertools.zip_longest(reversed(own), reversed(others))):
        if answer is not None:
            num_tokens += len(answer)
            if num_tokens > max_tokens:
                break
            kept.append(answer)
    return kept[::-1]


def _write(path: str, fingerprint: str, answers: Sequence[array[int]]) -> None:
    """Raises OSError."""
    temporary = f"{path}.tmp"  # the lock is this server's; what one left that was killed is written over
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:  # clients' texts are in it
            np.savez(
                file,
                version=np.array(FILE_VERSION),
                fingerprint=np.array(fingerprint),
                lengths=np.array([len(a) for a in answers], dtype=np.int64),
                token_ids=np.concatenate([np.array(a, dtype=np.int32) for a in answers]),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _read(path: str, fingerprint: str) -> list[array[int]]:
    """A file's answers, oldest first. Raises ForeignError, OSError, or what numpy raises for a damaged file."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe may never end, and a device would be replaced
        raise OSError("it is no regular file")
    with open(path, "rb") as opened:
        content = io.BytesIO(opened.read())
    try:
        with np.load(content, allow_pickle=False) as file:
            version, made_for = int(file["version"]), str(file["fingerprint"])
            if version != FILE_VERSION:
                raise ForeignError(f"it has format version {version}, not {FILE_VERSION}")
            if made_for != fingerprint:
                raise ForeignError(f"it is of another model ({made_for!r:.100}, not {fingerprint!r:.100})")
            lengths, token_ids = file["lengths"], file["token_ids"]
    except OSError as error:  # of its content: the disk has given all of it
        raise ValueError(f"{error}") from None
    is_sound = lengths.dtype == np.int64 and token_ids.dtype == np.int32 and lengths.ndim == token_ids.ndim == 1
    if not is_sound or (lengths < 1).any() or (token_ids < 0).any() or lengths.sum() != token_ids.size:
        raise ValueError("its lengths and token ids do not fit together")
    return [array("i", piece.tobytes()) for piece in np.split(token_ids, np.cumsum(lengths)[:-1])] if lengths.size else []
