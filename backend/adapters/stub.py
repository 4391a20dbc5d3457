"""What every model of the repository checks and reads before its own work."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy
import triton_python_backend_utils as pb_utils

from backend.config import EngineConfig
from backend.drafter_checks import settle_method
from backend.errors import ConfigError, describe_error, error_code
from backend.model_files import settle_path

logger = logging.getLogger(__name__)

DRAIN_FILE = "drain-{pid}"
"""In the version folder; pid: of the server, this process's parent, so that another server's end is not taken for its own. Whoever stops the
server writes it: the seconds for which open requests may go on. New ones are refused; when none is open the engine ends, what it keeps is saved,
and the file is removed. A file, since the server itself refuses nobody until it stops, does not wait for streams, and may never come to
`finalize`: a stream that its client left at a bad moment holds the model (see finalize)."""


def check_interpreter() -> None:
    """Raises RuntimeError for an interpreter that the server's stub cannot work with."""
    if int(numpy.__version__.split(".")[0]) >= 2:
        raise RuntimeError(
            f"NumPy {numpy.__version__} in {sys.executable}: the server's Python stub needs NumPy < 2 and would pass corrupt tensors; "
            "run: pip install 'numpy<2'"
        )


def log_to_server(logger_name: str = "backend") -> None:
    """Sends the engine's log records to the server's log."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log = pb_utils.Logger
            level = record.levelno
            send = log.log_error if level >= logging.ERROR else log.log_warn if level >= logging.WARNING else log.log_info
            send(self.format(record))

    logger = logging.getLogger(logger_name)
    logger.handlers = [Handler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def model_folder(arguments: dict[str, str]) -> Path:
    """This model's version folder."""
    return Path(arguments["model_repository"]) / arguments["model_version"]


def drain_file(arguments: dict[str, str]) -> Path:
    """Where whoever stops the server says so (DRAIN_FILE)."""
    return model_folder(arguments) / DRAIN_FILE.format(pid=os.getppid())


def read_parameters(arguments: dict[str, str]) -> dict[str, Any]:
    """config.pbtxt's `parameters`: each value as JSON where it is JSON, else as text. Upper-case keys are the server's own."""
    config = json.loads(arguments["model_config"])
    values: dict[str, Any] = {}
    for key, value in config.get("parameters", {}).items():
        if key.isupper():
            continue
        text = value["string_value"].strip()
        if not text:
            continue
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError as error:
            if text[0] in "{[":
                raise ConfigError(f"parameter {key} is not valid JSON: {error}") from None
            values[key] = text
    return values


def resolve_model(values: dict[str, Any], arguments: dict[str, str]) -> str:
    """The weights' folder: the `model` parameter, relative to the version folder; default: the version folder itself."""
    return str(settle_path(model_folder(arguments) / values.get("model", ".")))


DRAFTER_FOLDER = "../../mtp_drafter/1"
"""Relative to the version folder."""


def read_engine_config(arguments: dict[str, str]) -> EngineConfig:
    """Of a model that has an engine, or a part of one. Raises ConfigError."""
    values = read_parameters(arguments)
    values["model"] = resolve_model(values, arguments)
    if arguments["model_instance_kind"] == "GPU" and "device" not in values:
        values["device"] = f"cuda:{arguments['model_instance_device_id']}"
    folder, has_weights = model_folder(arguments), values.get("load_format") != "dummy"
    drafting, line = settle_method(values.get("speculative_config"), lambda name: settle_path(folder / name), has_weights=has_weights)
    if line:
        values["speculative_config"] = drafting
        logger.info(line)
    config = EngineConfig.from_dict(values, f"{arguments['model_name']}: ")
    speculative = config.speculative_config
    if not speculative.has_weights:
        return config
    drafter = str(settle_path(folder / (speculative.model or DRAFTER_FOLDER)))
    return dataclasses.replace(config, speculative_config=dataclasses.replace(speculative, model=drafter))


def refuse(request_id: str, error: Exception) -> Any:
    """A response that tells the error, its code and the request, where it has a name: gRPC streams carry the message alone."""
    code = error_code(error)
    request = f"request {request_id!r:.100}: " if request_id else ""
    message = f"[{code}] {request}{describe_error(error)}"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))
