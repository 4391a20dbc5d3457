"""The server's entry point; the code is in backend/adapters/mtp_drafter.py."""

try:
    from backend import own_process

    own_process.begin()
    own_process.end_at_exit()
    from backend.adapters.mtp_drafter import TritonPythonModel  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("backend", "backend.adapters"):
        raise
    import sys

    raise ImportError(f"foretoken is not installed in {sys.executable}: run 'pip install -e .' there, in the project's folder") from error
