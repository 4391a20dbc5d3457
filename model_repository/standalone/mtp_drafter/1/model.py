"""The server's entry point; the code is in backend/adapters/mtp_drafter.py."""

import sys
from pathlib import Path

PROJECT = [str(path) for path in Path(__file__).resolve().parents[4:5] if (path / "backend" / "adapters").is_dir()]
# Not the folder that the server was started in, whose `backend` may be another.
sys.path[:] = [path for place in sys.path for path in ([place] if place else PROJECT)]

try:
    from backend import own_process

    own_process.begin()
    own_process.end_at_exit()
    from backend.adapters.mtp_drafter import TritonPythonModel  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("backend", "backend.adapters"):
        raise
    raise ImportError(f"foretoken is not installed in {sys.executable}: run 'pip install -e .' there, in the project's folder") from error
