"""gRPC streams that a client of ours would not send: inputs that are missing, and several models on one stream."""

from __future__ import annotations

import itertools
import json
import queue
import time

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype

from client import Client, GenerateError
from tests.servers import serve

ANSWER_SECONDS = 30
MANY, ROUNDS = 400, 4

VALUES = {
    "text_input": np.array([b"x = 1"], dtype=object),
    "input_ids": np.array([5, 6, 7], dtype=np.int32),
    "messages": np.array([b'[{"role": "user", "content": "x"}]'], dtype=object),
    "cancel": np.array([b"nobody"], dtype=object),
    "max_tokens": np.array([2], dtype=np.int32),
    "session": np.array([7, 0, 64, 16], dtype=np.int64),
    "tokens": np.array([3], dtype=np.int32),
    "hidden": np.zeros((1, 192), dtype=np.float32),
    "requests": np.array([[1, 1, 1, 1, 0, 0, 0]], dtype=np.int64),
    "filters": np.zeros((1, 3), dtype=np.float32),
    "pages": np.array([0], dtype=np.int32),
    "fresh_pages": np.array([0], dtype=np.int32),
}
INPUTS = {
    "decode": ("text_input", "input_ids", "messages", "cancel", "max_tokens"),
    "generate": ("text_input", "max_tokens"),
    "tokenizer": ("text_input", "input_ids"),
    "mtp_drafter": ("session", "tokens", "hidden", "requests", "filters", "pages", "fresh_pages"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    speculative = {"method": "mtp", "num_speculative_tokens": 2, "placement": "bls"}
    with serve(
        tmp_path_factory.mktemp("streams") / "log", f"--speculative-config={json.dumps(speculative)}", "--drain-seconds=3", "--max-model-len=64"
    ) as running:
        yield running


def make_tensors(names) -> list[InferInput]:
    tensors = []
    for name in names:
        value = VALUES[name]
        tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    return tensors


@pytest.mark.parametrize("model", INPUTS)
def test_whatever_is_missing_is_answered(server, model):
    """With tokens, or with an error: a stream without either leaves its client waiting for ever."""
    names = INPUTS[model]
    received: queue.SimpleQueue = queue.SimpleQueue()
    with InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: received.put((result, error)))
        for chosen in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1)):
            client.async_stream_infer(model, make_tensors(chosen), request_id="one", enable_empty_final_response=True)
            num_answers, is_last = 0, False
            while not is_last:
                try:
                    result, error = received.get(timeout=ANSWER_SECONDS)
                except queue.Empty:
                    raise AssertionError(f"{model} with {chosen or 'nothing'} got no answer") from None
                response = None if error is not None else result.get_response()
                is_last = response is None or response.parameters["triton_final_response"].bool_param
                num_answers += response is None or len(response.outputs) > 0
            assert num_answers, f"{model} with {chosen or 'nothing'} got an end, and no answer before it"
        client.stop_stream()


def test_several_models_on_one_stream(server):
    """The server (release 24.10) may end when one stream carries requests for the tokenizer and for a model that streams; it comes back."""
    for _ in range(ROUNDS):
        received: list = []
        with InferenceServerClient(server.grpc) as client:
            client.start_stream(lambda result, error: received.append(error))  # noqa: B023
            try:
                for i in range(MANY):
                    model = ("generate", "tokenizer")[i % 2]
                    client.async_stream_infer(model, make_tensors(INPUTS[model][:1]), request_id=str(i))
            except Exception:  # the stream is closed
                break
            deadline = time.monotonic() + ANSWER_SECONDS
            while time.monotonic() < deadline and len(received) < MANY and not any(received):
                time.sleep(0.1)
            client.stop_stream(cancel_requests=True)
            if any(received):
                break
    with Client(server.grpc) as client:
        deadline = time.monotonic() + 120
        while not is_answering(client):  # it may still be about to end when it first says that it is ready
            assert time.monotonic() < deadline, "it did not come back"
            time.sleep(0.5)


def is_answering(client: Client) -> bool:
    """Whether both models give an answer. Any error but that of a lost server fails."""
    if not (client.is_ready() and client.is_ready("generate")):
        return False
    try:
        answers = [client.generate("x = ", model=model, max_tokens=4, ignore_eos=True) for model in ("decode", "generate")]
    except GenerateError as error:
        assert error.code == "UNAVAILABLE", error
        return False
    return [len(completions[0].token_ids) for completions in answers] == [4, 4]
