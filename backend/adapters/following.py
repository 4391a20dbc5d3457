"""The `decode` model of a host whose ranks all follow: it answers whoever asks whether it lives, and sends clients to the first host."""

from __future__ import annotations

import logging
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from backend.adapters.answers import Answer, AnswerTensors
from backend.adapters.request_io import read_id
from backend.adapters.stub import (
    check_interpreter,
    drain_file,
    log_to_server,
    read_engine_config,
    refuse,
)
from backend.core import Delta, SpeculationStats
from backend.errors import EngineError
from backend.following import FollowingHost
from backend.own_process import end_with_parent, has_begun

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.1
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """What the server loads."""

    def initialize(self, args: dict[str, str]) -> None:
        check_interpreter()
        end_with_parent()
        log_to_server()
        self._host = FollowingHost(read_engine_config(args))
        logger.info("the ranks of this host compute for %s", self._host.master)
        self._drain_file = drain_file(args)
        self._is_stopping = threading.Event()
        threading.Thread(target=self._watch, name="watcher", daemon=True).start()
        has_begun()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender, name = request.get_response_sender(), ""
            try:
                name = read_id(request)
                self._host.check()
                if pb_utils.get_input_tensor_by_name(request, "cancel") is None:
                    raise EngineError(f"this server's ranks compute for another host: send requests to the server there ({self._host.master})")
                answer = Answer([Delta("", finish_reason="stop", stats=SpeculationStats())])
                response = pb_utils.InferenceResponse(AnswerTensors().of(answer))
            except Exception as error:
                response = refuse(name, error)
            sender.send(response, flags=FINAL)

    def _watch(self) -> None:
        """Whoever stops the server says so by a file. Nothing is open here."""
        while not self._is_stopping.wait(WATCH_SECONDS):
            if self._drain_file.exists():
                self._host.close()
                self._drain_file.unlink(missing_ok=True)
                return

    def finalize(self) -> None:
        self._is_stopping.set()
        self._host.close()
