"""Standard-library modules that the bundled model has never seen; tests and benchmarks take their prompts from them.

They are read from the running interpreter, so no third-party text is in the repository.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

STDLIB_HELDOUT = (
    "textwrap.py", "shelve.py", "calendar.py", "csv.py", "fractions.py", "graphlib.py", "heapq.py", "bisect.py",
    "sched.py", "statistics.py", "tempfile.py", "timeit.py", "zipapp.py", "cmd.py", "configparser.py", "difflib.py",
    "fileinput.py", "getopt.py", "glob.py", "html/parser.py", "http/cookies.py", "json/encoder.py", "logging/handlers.py",
    "queue.py", "reprlib.py", "selectors.py", "shlex.py", "socketserver.py", "string.py", "tabnanny.py",
    "urllib/robotparser.py", "wsgiref/handlers.py", "xml/dom/pulldom.py", "email/message.py", "concurrent/futures/thread.py",
    "asyncio/queues.py", "unittest/suite.py", "importlib/resources/abc.py", "test/test_queue.py", "test/test_textwrap.py",
)  # fmt: skip


def list_heldout() -> dict[str, Path]:
    """Every held-out module that this interpreter has, by name relative to its standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return {name: root / name for name in STDLIB_HELDOUT if (root / name).is_file()}


def read_heldout() -> dict[str, str]:
    """The same modules' text."""
    return {name: path.read_text("utf-8") for name, path in list_heldout().items()}
