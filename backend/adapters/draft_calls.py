"""Calls of the drafter's model, for the engine's process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend.engine_process.calls import Arrays

OUTPUTS = ["drafts", "probs"]


class _Worker(threading.Thread):
    """Makes calls for a thread that must not wait for ever."""

    def __init__(self) -> None:
        super().__init__(name="drafter call", daemon=True)
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (request := self.calls.get()) is not None:
            try:
                self.answers.put(request.exec())
            except Exception as error:
                self.answers.put(error)


class DraftCaller:
    """Calls a model of the same server, one call after the other, on a thread of its own."""

    def __init__(self, model_name: str, seconds: float, answer: Callable[[int, Arrays | str], object]) -> None:
        """seconds: after which a model that has not answered counts as dead; answer: told each call's number and outputs, or why there are none."""
        self._model_name, self._seconds, self._answer = model_name, seconds, answer
        self._worker = _Worker()
        self._calls: queue.SimpleQueue[tuple[int, Arrays]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="drafter calls", daemon=True).start()

    def put(self, number: int, inputs: Arrays) -> None:
        """From any thread."""
        self._calls.put((number, inputs))

    def _run(self) -> None:
        while True:
            number, inputs = self._calls.get()
            try:
                answer: Arrays | str = self._call(inputs)
            except Exception as error:  # whatever it is, requests go on without these drafts
                answer = f"model {self._model_name!r}: {error}"
            self._answer(number, answer)

    def _call(self, inputs: Arrays) -> Arrays | str:
        tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
        self._worker.calls.put(pb_utils.InferenceRequest(model_name=self._model_name, requested_output_names=OUTPUTS, inputs=tensors))
        try:
            response = self._worker.answers.get(timeout=self._seconds)
        except queue.Empty:
            self._worker.calls.put(None)  # it ends if it ever gets its answer
            self._worker = _Worker()
            return f"model {self._model_name!r} did not answer within {self._seconds:g} s"
        if isinstance(response, Exception):
            raise response
        if response.has_error():
            return response.error().message()
        return {tensor.name(): np.array(tensor.as_numpy()) for tensor in response.output_tensors()}
