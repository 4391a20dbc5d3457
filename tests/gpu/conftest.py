"""Kernels run on the project's own stream: every test here does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

# transformers 5 takes these names for granted, and NumPy before 2, which the Triton server's Python stub needs, has not got them.
for name, dtype in (("long", np.int_), ("ulong", np.uint)):
    if not hasattr(np, name):
        setattr(np, name, dtype)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda:0")


@pytest.fixture(autouse=True)
def stream(request: pytest.FixtureRequest) -> Iterator[None]:
    from kernels._load import device_stream

    with device_stream(request.getfixturevalue("device")):
        yield
    torch.cuda.synchronize()
