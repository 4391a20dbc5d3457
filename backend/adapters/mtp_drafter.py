"""The `mtp_drafter` model: drafts for the decode model of the same server, one call a step."""

from __future__ import annotations

import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from backend.adapters.draft_io import read_call, reply_tensors
from backend.adapters.stub import (
    check_interpreter,
    describe_error,
    log_to_server,
    model_folder,
    read_parameters,
    resolve_model,
)
from backend.config import EngineConfig
from backend.devices import choose_cpu_kernels, cpu_threads, on_stream, pick_device, pick_dtype, threads_for
from backend.drafters.calls import DraftError
from backend.drafters.recurrent import RecurrentDrafter
from backend.drafters.remote_service import RemoteDrafterService
from backend.drafters.sessions import DEFAULT_MEMORY, DraftSessions
from backend.errors import ConfigError
from backend.model_files import settle_path
from backend.models import load_model
from backend.models.mtp import Mtp
from backend.own_process import end_with_parent, has_begun
from backend.parallel.ranks import Ranks
from backend.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

SPECULATIVE_KEYS = ("quantization", "draft_token_map")
OWN_KEYS = ("target", "target_quantization", "num_model_steps", *SPECULATIVE_KEYS)
ENGINE_KEYS = ("dtype", "device", "num_threads", "single_thread_tokens", "cpu_kernels", "kv_cache_memory")


class TritonPythonModel:
    """Holds the drafter's weights, and paged memory for each instance of the decode model, numbered as that one numbers its own."""

    def initialize(self, args: dict[str, str]) -> None:
        check_interpreter()
        end_with_parent()
        log_to_server()
        values = read_parameters(args)
        if unknown := set(values) - {"model", *OWN_KEYS, *ENGINE_KEYS}:
            raise ConfigError(f"{args['model_name']}: unknown parameters {sorted(unknown)}; known: model, {', '.join((*OWN_KEYS, *ENGINE_KEYS))}")
        if args["model_instance_kind"] == "GPU" and "device" not in values:
            values["device"] = f"cuda:{args['model_instance_device_id']}"
        target = str(settle_path(model_folder(args) / values.get("target", ".")))
        options = {"model": target, "quantization": values.get("target_quantization"), **{k: values[k] for k in ENGINE_KEYS if k in values}}
        engine = EngineConfig.from_dict(options, f"{args['model_name']}: ")
        steps = values.get("num_model_steps", 1)
        config = SpeculativeConfig.from_dict(
            {"method": "mtp", "num_speculative_tokens": steps, "num_model_steps": steps, **{k: values[k] for k in SPECULATIVE_KEYS if k in values}},
            f"{args['model_name']}: ",
        )
        choose_cpu_kernels(engine)
        device = pick_device(engine)
        dtype = pick_dtype(engine, device)
        # The server may call from another thread: a pool of this one would stall that one's (see Worker).
        with cpu_threads(1), on_stream(device):
            rounding, token_map = engine.rounding, config.draft_token_map
            self._target = load_model(target, dtype, device, Ranks(), only_head=True, quantization=rounding, draft_token_map=token_map)
            model = Mtp(resolve_model(values, args), self._target, dtype, device, config.rounding)
        threads, steps = threads_for(engine), config.num_model_steps or 1

        def make_service() -> RemoteDrafterService:
            return RemoteDrafterService(RecurrentDrafter(model, steps), dtype, device, threads)

        with on_stream(device):
            make_service().warm_up(self._target.vocab_size, self._target.max_model_len, engine.page_size)
        self._sessions = DraftSessions(make_service, int(engine.kv_cache_memory or DEFAULT_MEMORY))
        self._device, self._dtype = device, dtype
        has_begun()
        logger.info("drafter ready: %d layers, %s on %s, %d steps", model.num_layers, dtype, device, config.num_model_steps)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            target = self._target
            call, number = read_call(request, target.vocab_size, target.hidden_size, target.max_model_len)
        except Exception as error:  # nobody's session ends by it: the supervisor asks with such calls whether this process answers
            return _refuse(error)
        try:
            with on_stream(self._device):
                call.hidden = call.hidden.to(self._device, self._dtype)
                return pb_utils.InferenceResponse(reply_tensors(self._sessions.draft(call, number), self._target.vocab_size))
        except Exception as error:  # whatever it is, the decode model goes on without these drafts
            if not isinstance(error, DraftError):
                logger.exception("a call failed")
            return _refuse(error)


def _refuse(error: Exception) -> Any:
    code = pb_utils.TritonError.INVALID_ARG if isinstance(error, ValueError) else pb_utils.TritonError.INTERNAL
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{type(error).__name__}: {describe_error(error)}", code))
