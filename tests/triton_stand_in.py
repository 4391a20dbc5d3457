"""What stands in for `triton_python_backend_utils`, which exists in the server's process only.

It keeps the rules whose breach ends that process: one thread sends, and nothing touches a response sender after its final response.
"""

from __future__ import annotations

import enum
import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FINAL = 1


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class ErrorCode(enum.Enum):
    """As the server's, no text."""

    INVALID_ARG = enum.auto()
    UNAVAILABLE = enum.auto()
    INTERNAL = enum.auto()


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE, INTERNAL = ErrorCode

    def __init__(self, message: str, code: ErrorCode) -> None:
        assert isinstance(code, ErrorCode)
        message.encode()
        super().__init__(message)
        self._code = code

    def message(self) -> str:
        return str(self)

    def code(self) -> ErrorCode:
        return self._code


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._tensors, self._error = output_tensors or [], error
        self.values = {t.name(): t.as_numpy().tolist() for t in self._tensors}

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Sender:
    """A response sender that notes who uses it, and what for."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.threads: set[str] = set()
        self.is_gone = False
        self.ended = threading.Event()

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        assert not self.ended.is_set(), "a response after the final one"
        self.threads.add(threading.current_thread().name)
        self.responses.append(response)
        if flags == FINAL:
            self.ended.set()

    def is_cancelled(self) -> bool:
        self.threads.add(threading.current_thread().name)
        if self.ended.is_set():
            self.threads.add("after the final response")
        return self.is_gone

    def finish(self) -> list[InferenceResponse]:
        assert self.ended.wait(60)
        assert len(self.threads) == 1 and min(self.threads).startswith("sender")
        return self.responses

    def reasons(self) -> list[bytes]:
        return [reason for r in self.finish() for reason in r.values["finish_reason"] if reason]

    def message(self) -> str:
        (response,) = self.finish()
        return str(response.error())


class InferenceRequest:
    def __init__(self, request_id: str | bytes = "", parameters: str = "", **values: Any) -> None:
        self._id, self._parameters = request_id, parameters
        self.sender = Sender()
        self._tensors = []
        for name, value in values.items():
            items = value if isinstance(value, list) else [value]
            if isinstance(items[0], str):
                array = np.array([v.encode() for v in items], dtype=object)
            else:
                array = np.array(items, dtype=np.bool_ if isinstance(items[0], bool) else np.int32)
            self._tensors.append(Tensor(name, array))

    def request_id(self) -> str:
        return self._id if isinstance(self._id, str) else self._id.decode()

    def parameters(self) -> str:
        return self._parameters

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def get_response_sender(self) -> Sender:
        return self.sender


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"

    def __init__(self, **_: Any) -> None:
        pass

    def Metric(self, labels: dict[str, str]) -> MetricFamily:
        return self

    def increment(self, value: float) -> None:
        pass

    def set(self, value: float) -> None:
        pass


def stand_in() -> ModuleType:
    module: Any = ModuleType("triton_python_backend_utils")
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.Tensor, module.InferenceResponse, module.InferenceRequest, module.TritonError = Tensor, InferenceResponse, InferenceRequest, TritonError
    module.MetricFamily, module.TritonModelException = MetricFamily, RuntimeError
    module.Logger = type("Logger", (), {name: staticmethod(print) for name in ("log_info", "log_warn", "log_error")})
    return module


class HostThread(threading.Thread):
    """The engine's process as a thread of this one, whose parts a test can reach."""

    last: HostThread
    """The newest."""

    def __init__(self, connection: Any) -> None:
        super().__init__(name="engine's process", daemon=True)
        from backend.engine_process.host import EngineHost
        from backend.engine_process.line import Line

        HostThread.last = self
        self.line = Line(connection)
        self.host = EngineHost(self.line)
        self.start()

    def run(self) -> None:
        from backend.engine_process.main import serve

        serve(self.line, self.host)
        self.line.close()

    def wait(self, seconds: float) -> int:
        self.join(seconds)
        assert not self.is_alive()
        return 0


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    """backend.adapters.decode, as the server's process has it."""
    names = [name for name in sys.modules if name.startswith("backend.adapters.")]
    assert not names, "adapters are imported by the server's process alone"
    sys.modules["triton_python_backend_utils"] = stand_in()
    logger = logging.getLogger("backend")
    handlers, patch = logger.handlers, pytest.MonkeyPatch()
    try:
        module = importlib.import_module("backend.adapters.decode")
        module.end_with_parent = lambda: None
        patch.setattr("backend.engine_process.client.start_process", HostThread)
        yield module
    finally:
        patch.undo()
        for name in [n for n in sys.modules if n.startswith("backend.adapters.")] + ["triton_python_backend_utils"]:
            del sys.modules[name]
        logger.handlers, logger.propagate = handlers, True
