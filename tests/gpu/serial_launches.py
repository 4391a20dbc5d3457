"""pytest plugin: no kernel begins before the one ahead of it has ended. A tool that runs kernels of its own in between would break that order."""

from __future__ import annotations

from typing import Any

from kernels._load import _ProgrammaticLaunch


class _SerialLaunch(_ProgrammaticLaunch):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._config.num_attributes = 0


def pytest_configure() -> None:
    from kernels import _load

    _load._ProgrammaticLaunch = _SerialLaunch  # type: ignore[misc]
