"""The asyncio client, over gRPC streaming."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from client.messages import DEFAULT_GRPC_URL, INACTIVITY_SECONDS, Chunk, Completion, GenerateError, collect, make_inputs, prompt_values, read_result

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncClient:
    """Completes prompts on a running server; all streams share one connection."""

    def __init__(self, url: str = DEFAULT_GRPC_URL, *, model: str = "decode", inactivity_timeout: float = INACTIVITY_SECONDS) -> None:
        self.model = model
        self.inactivity_timeout = inactivity_timeout
        self._connection = triton_aio.InferenceServerClient(url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    async def generate(self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", **parameters: Any) -> list[Completion]:
        """The n completions of a prompt (text or token ids), whole. Raises GenerateError."""
        return collect([chunk async for chunk in self.stream(prompt, request_id=request_id, **parameters)])

    async def stream(
        self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", model: str | None = None, **parameters: Any
    ) -> AsyncIterator[Chunk]:
        """As `Client.stream`. Cancelling the task, or closing the iterator, cancels the request on the server."""
        request_id, model = request_id or uuid.uuid4().hex, model or self.model
        inputs = make_inputs(prompt_values(prompt, parameters))
        is_done = asyncio.Event()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": model, "inputs": inputs, "request_id": request_id}
            await is_done.wait()  # the stream stays open until the answer is whole

        responses = self._connection.stream_infer(requests())
        try:
            while not is_done.is_set():
                try:
                    result, error = await asyncio.wait_for(anext(responses), self.inactivity_timeout)
                except asyncio.TimeoutError:
                    raise GenerateError(f"request {request_id!r}: the server sent nothing for {self.inactivity_timeout:g} s") from None
                except StopAsyncIteration:
                    raise GenerateError(f"request {request_id!r}: the server ended the stream early") from None
                if error is not None:
                    raise GenerateError(str(error))
                chunk, is_last = read_result(result)
                if is_last:
                    is_done.set()
                if chunk.token_ids or chunk.text or chunk.finish_reason:
                    yield chunk
        except (InferenceServerException, grpc.RpcError) as error:
            raise GenerateError(f"request {request_id!r}: {error}") from None
        finally:
            if not is_done.is_set():
                responses.cancel()
                is_done.set()
                if model != "decode":
                    await asyncio.shield(self.cancel(request_id))

    async def cancel(self, request_id: str) -> bool:
        """Ends a request by id. False when none with that id is open."""
        try:
            return [c.finish_reason async for c in self.stream(model="decode", cancel=request_id)] == ["cancelled"]
        except GenerateError:
            return False
