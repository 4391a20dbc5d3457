"""gRPC requests, whole or broken, as messages; and streams of them with a deadline."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.loopback import without_proxy
from client.messages import _NUMPY, _TYPES, CHANNEL_OPTIONS, Chunk, read_result
from tests.soak.book import ANSWER_SECONDS, Hung, Lost

JSON_INPUTS = ("logit_bias", "speculative", "structured_outputs", "tools", "tool_choice", "messages")


@dataclass
class Tensor:
    name: str
    datatype: str
    shape: list[int]
    raw: bytes


def pack_bytes(values: list[bytes]) -> bytes:
    return b"".join(len(v).to_bytes(4, "little") + v for v in values)


def pack(values: dict[str, Any]) -> list[Tensor]:
    """Inputs by name as tensors. Half surrogate pairs become the bytes that UTF-8 has no right to hold."""
    tensors = []
    for name, value in values.items():
        kind = _TYPES[name]
        if name in JSON_INPUTS and not isinstance(value, (str, bytes)):
            value = json.dumps(value, ensure_ascii=False)
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if kind == "BYTES":
            raw = pack_bytes([v.encode("utf-8", "surrogatepass") if isinstance(v, str) else v for v in items])
        else:
            raw = np.array(items).astype(_NUMPY[kind]).tobytes()
        tensors.append(Tensor(name, kind, [len(items)], raw))
    return tensors


def make_request(model: str, tensors: list[Tensor], request_id: str, version: str = "") -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw)
    return request


def open_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, without_proxy(CHANNEL_OPTIONS, address))


class Stream:
    """One gRPC stream. What is not over by its deadline hangs."""

    def __init__(self, channel: grpc.Channel, seconds: float = ANSWER_SECONDS) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(self._requests.get, None), timeout=seconds)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def send(self, request: service_pb2.ModelInferRequest) -> None:
        self._requests.put(request)

    def responses(self) -> Iterator[tuple[str, list[Chunk], bool, str]]:
        """Of each: request id ("" where an error has none), chunks, whether it is the request's last, error. Raises Lost, Hung."""
        try:
            for response in self._call:
                if response.error_message:
                    yield response.infer_response.id, [], True, response.error_message
                else:
                    chunks, is_last = read_result(triton_grpc.InferResult(response.infer_response))
                    yield response.infer_response.id, chunks, is_last, ""
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() > self._deadline - 1:
                raise Hung(f"the stream was not over after {self._seconds:g} s") from None
            raise Lost(f"stream: {error.code()}: {error.details()}") from None

    def finish(self) -> None:
        """No more requests; waits for the server to end the stream too."""
        self._requests.put(None)
        for _ in self.responses():
            pass

    def cancel(self) -> None:
        self._call.cancel()
        self._requests.put(None)
