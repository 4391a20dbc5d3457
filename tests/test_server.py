"""The decode model, the tokenizer and the ensemble on a real tritonserver, through every way in."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from backend import SamplingParams
from client import AsyncClient, Client, GenerateError, HttpClient
from tests.conftest import code_prompts, greedy
from tests.servers import wait_until

PROMPT = "import os\n\n\ndef read_lines(path):"
NUM_SOLO = 24


@pytest.fixture(scope="module")
def server(servers):
    return servers.get()


@pytest.fixture(scope="module")
def client(server):
    with Client(server.grpc) as c:
        yield c


@pytest.fixture(scope="module")
def expected(llm_ngram):
    return llm_ngram.generate(PROMPT, greedy(40), use_tqdm=False)[0].outputs[0]


@pytest.fixture(scope="module")
def expected_long(llm_ngram):
    """For tests of what comes step by step: whoever sends is held up for as long as 40 tokens take, now and then, and sends them together."""
    return llm_ngram.generate(PROMPT, greedy(400), use_tqdm=False)[0].outputs[0]


GREEDY = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
LONG = GREEDY | {"max_tokens": 400}


class TestWaysIn:
    @pytest.mark.parametrize("model", ["decode", "generate"])
    def test_grpc_stream(self, server, expected_long, model):
        with Client(server.grpc, model=model) as client:
            chunks = list(client.stream(PROMPT, **LONG))
        assert len(chunks) > 5, "tokens must come step by step"
        assert [i for c in chunks for i in c.token_ids] == expected_long.token_ids
        assert "".join(c.text for c in chunks) == expected_long.text
        assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert chunks[-1].usage["completion_tokens"] == 400 and chunks[-1].usage["prompt_tokens"] > 5
        assert chunks[-1].speculation["emitted"] == 400 and chunks[-1].speculation["steps"] >= len(chunks)

    @pytest.mark.parametrize("model", ["decode", "generate"])
    def test_asyncio_stream(self, server, expected, model):
        async def run():
            async with AsyncClient(server.grpc, model=model) as client:
                return [c async for c in client.stream(PROMPT, **GREEDY)]

        chunks = asyncio.run(run())
        assert [i for c in chunks for i in c.token_ids] == expected.token_ids

    @pytest.mark.parametrize("model", ["decode", "generate"])
    def test_http_stream(self, server, expected_long, model):
        chunks = list(HttpClient(server.http, model=model).stream(PROMPT, **LONG))
        assert len(chunks) > 5
        assert [i for c in chunks for i in c.token_ids] == expected_long.token_ids
        assert "".join(c.text for c in chunks) == expected_long.text

    @pytest.mark.parametrize("model", ["decode", "generate"])
    def test_http_generate_gives_one_answer(self, server, expected, model):
        answer = HttpClient(server.http, model=model).generate_once(PROMPT, **GREEDY)
        assert answer["text_output"] == expected.text and answer["output_ids"] == expected.token_ids
        assert answer["finish_reason"] == "length" and json.loads(answer["usage"])["completion_tokens"] == 40

    def test_token_ids_in(self, client, expected, llm_ngram):
        ids = llm_ngram.engine.tokenizer.encode(PROMPT)
        assert client.generate(ids, **GREEDY)[0].token_ids == expected.token_ids

    def test_messages_in(self, client, llm_ngram):
        messages = [{"role": "user", "content": "read a file"}]
        result = llm_ngram.chat(messages, greedy(20), use_tqdm=False)[0].outputs[0]
        assert client.generate(messages=messages, max_tokens=20, temperature=0.0, ignore_eos=True)[0].token_ids == result.token_ids

    def test_plain_tritonclient(self, server, expected):
        """The documented interface, with nothing of ours on the client's side."""
        text = triton_grpc.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
        count = triton_grpc.InferInput("max_tokens", [1], "INT32")
        count.set_data_from_numpy(np.array([40], dtype=np.int32))
        heat = triton_grpc.InferInput("temperature", [1], "FP32")
        heat.set_data_from_numpy(np.array([0.0], dtype=np.float32))
        results = []
        client = triton_grpc.InferenceServerClient(server.grpc)
        client.start_stream(lambda result, error: results.append((result, error)))
        client.async_stream_infer("generate", [text, count, heat], request_id="mine")
        client.stop_stream()  # waits for the answer's end
        assert not [e for _, e in results if e]
        assert b"".join(t for r, _ in results for t in r.as_numpy("text_output")).decode() == expected.text
        assert {r.get_response().id for r, _ in results} == {"mine"}

    def test_every_parameter_reaches_the_engine(self, client, llm_ngram):
        parameters = {
            "max_tokens": 30, "min_tokens": 4, "temperature": 0.75, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.25,
            "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {300: 1.5}, "seed": 77, "stop": ("\n\n\n",), "stop_token_ids": (441,),
            "bad_words": ("import",), "include_stop": True, "ignore_eos": True, "logprobs": 2, "echo": True, "n": 2,
        }  # fmt: skip
        wanted = llm_ngram.generate(PROMPT, SamplingParams(**parameters), use_tqdm=False)[0].outputs
        got = client.generate(PROMPT, priority=3, timeout_ms=60000, speculative={"num_speculative_tokens": 2}, **parameters)
        for a, b in zip(wanted, got, strict=True):
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
            assert [p.token_id for p in a.logprobs] == [p["id"] for p in b.logprobs]
            assert [p.logprob for p in a.logprobs] == pytest.approx([p["logprob"] for p in b.logprobs], abs=1e-4)
            assert [len(p["top"]) for p in b.logprobs] == [2] * len(b.logprobs)
        assert got[0].text.startswith(PROMPT)

    def test_sources_name_who_drafted(self, client):
        code = "".join(f"    def get_{n}(self):\n        return self._{n}\n\n" for n in ("width", "height", "depth", "colour"))
        out = client.generate(f"class Box:\n{code}    def get_weight(self):", **GREEDY)[0]
        assert {"target"} < set(out.sources) <= {"target", "ngram", "mtp"} and len(out.sources) == 40
        assert len(out.sources) - out.sources.count("target") == out.speculation["accepted"]

    def test_non_ascii_text_is_never_split(self, bundled_server, llm_ngram):
        """By the model that goes on as the prompt did."""
        end = "é€🙂"
        ids = llm_ngram.engine.tokenizer.encode(end, add_special_tokens=False)
        with Client(bundled_server.grpc) as client:
            for chunk in client.stream("# " + end * 8, max_tokens=30, temperature=0.0, logit_bias=dict.fromkeys(ids, 6.0)):
                assert "�" not in chunk.text or chunk.finish_reason


class TestCommandLine:
    def run(self, server, *arguments, stdin=""):
        command = [sys.executable, "-m", "deploy.cli", *arguments, "--url", server.grpc]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)

    def test_complete(self, server, llm_ngram):
        wanted = llm_ngram.generate("def f(x):", SamplingParams(max_tokens=12, temperature=0.0), use_tqdm=False)[0].outputs[0].text
        result = self.run(server, "complete", "--max-tokens=12", "def f(x):")
        assert result.returncode == 0 and result.stdout.strip("\n") == wanted.strip("\n")
        assert "12 tokens, time to first token" in result.stderr and "drafts accepted" in result.stderr
        assert self.run(server, "complete", "--max-tokens=12", "--quiet", stdin="def f(x):").stdout.strip("\n") == wanted.strip("\n")

    def test_chat(self, server, llm_ngram):
        result = self.run(server, "chat", "--max-tokens=8", "--quiet", stdin="read a file\nand again\n\n")
        messages = [{"role": "user", "content": "read a file"}]
        for question in ("and again", None):
            answer = llm_ngram.chat(messages, SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)[0].outputs[0].text
            assert answer in result.stdout
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        assert result.returncode == 0

    def test_errors(self, server):
        result = self.run(server, "complete", "--top-p=0", "x")
        assert result.returncode == 1 and "top_p must be a number above 0" in result.stderr and "Traceback" not in result.stderr
        server_of_nobody = [sys.executable, "-m", "deploy.cli", "complete", "--url=127.0.0.1:9", "x"]
        result = subprocess.run(server_of_nobody, capture_output=True, text=True, timeout=60)
        assert result.returncode == 1 and "foretoken complete:" in result.stderr and "Traceback" not in result.stderr


class TestTritonInterface:
    def test_health_metadata_config_statistics(self, server):
        with triton_http.InferenceServerClient(server.http) as client:
            assert client.is_server_live() and client.is_server_ready()
            for model in ("decode", "generate", "tokenizer"):
                assert client.is_model_ready(model)
            metadata = client.get_model_metadata("decode")
            assert {i["name"] for i in metadata["inputs"]} >= {"text_input", "input_ids", "max_tokens", "speculative", "cancel"}
            outputs = {"text_output", "output_ids", "token_sources", "finish_reason", "logprobs", "usage", "speculation"}
            assert {o["name"] for o in metadata["outputs"]} >= outputs
            key = {"foretoken-key": server.key}
            assert client.get_model_config("decode", headers=key)["model_transaction_policy"]["decoupled"]
            before = client.get_inference_statistics("decode", headers=key)["model_stats"][0]["inference_count"]
            HttpClient(server.http).generate_once(PROMPT, max_tokens=2)
            assert client.get_inference_statistics("decode", headers=key)["model_stats"][0]["inference_count"] > before  # the supervisor asks too

    def test_metrics(self, server, client):
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
        read = lambda: [server.metric(f"foretoken_spec_decode_{n}_total", model="decode", method="mtp") for n in names]  # noqa: E731
        server.settle()
        before = read()
        ends = server.metric("foretoken_time_to_first_token_seconds_count")
        stats = client.generate("x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1", **GREEDY)[0].speculation
        wanted = [stats["drafts"], stats["drafted"], stats["accepted"], stats["emitted"]]
        server.settle()
        assert [b - a for a, b in zip(before, read())] == wanted
        assert server.metric("foretoken_spec_decode_num_accepted_tokens_per_pos_total", position="0") > 0
        assert server.metric("foretoken_time_to_first_token_seconds_count") == ends + 1
        assert server.metric("foretoken_time_to_first_token_seconds_bucket", le="+Inf") == ends + 1
        assert server.metric("foretoken_kv_pages") > 1000 and server.metric("foretoken_steps_total") > 0
        assert wait_until(lambda: server.metric("foretoken_kv_pages_held") == 0 == server.metric("foretoken_requests_running"))

    def test_tokenizer_model(self, server, llm_ngram):
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            text = triton_grpc.InferInput("text_input", [1], "BYTES")
            text.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
            ids = client.infer("tokenizer", [text]).as_numpy("input_ids").tolist()
        assert ids == llm_ngram.engine.tokenizer.encode(PROMPT)

    def test_duplicate_ids_do_not_collide(self, server, expected):
        async def run():
            async with AsyncClient(server.grpc) as client:
                return await asyncio.gather(*[client.generate(PROMPT, request_id="same", **GREEDY) for _ in range(4)])

        assert all(r[0].token_ids == expected.token_ids for r in asyncio.run(run()))


class TestManyStreams:
    def test_256_streams_equal_their_solo_runs(self, server, llm_ngram):
        prompts = code_prompts(256, lengths=(30, 120), seed=11)
        params = [{"max_tokens": 12, "ignore_eos": True, **({"temperature": 0.0} if i % 2 else {"seed": i, "top_p": 0.95})} for i in range(256)]

        async def run():
            async with AsyncClient(server.grpc, inactivity_timeout=60) as client:
                return await asyncio.gather(*[client.generate(p, **k) for p, k in zip(prompts, params)])

        together = asyncio.run(run())
        parameters = [SamplingParams(**k) for k in params]
        solo = [llm_ngram.generate(p, k, use_tqdm=False)[0].outputs[0] for p, k in zip(prompts[:NUM_SOLO], parameters)]
        # The others' in one batch without a server: that a batch changes nothing is test_engine's and test_sampling's to show.
        solo += [r.outputs[0] for r in llm_ngram.generate(prompts[NUM_SOLO:], parameters[NUM_SOLO:], use_tqdm=False)]
        for result, alone in zip(together, solo, strict=True):
            assert result[0].token_ids == alone.token_ids and result[0].text == alone.text
        assert wait_until(lambda: server.metric("foretoken_kv_pages_held") == 0)

    def test_5000_requests_at_once(self, server):
        """Within the limit they are answered, beyond it refused with what to change; none is lost."""

        async def one(client):
            try:
                return len((await client.generate([5, 6, 7], max_tokens=1))[0].token_ids)
            except GenerateError as error:
                return str(error)

        async def run():
            async with AsyncClient(server.grpc, inactivity_timeout=120) as client:
                return await asyncio.gather(*[one(client) for _ in range(5_000)])

        answers = asyncio.run(run())
        refused = [a for a in answers if a != 1]
        assert all("retry later, or raise --max-waiting" in a for a in refused), refused[:3]
        assert len(answers) - len(refused) >= 2304
        assert Client(server.grpc).generate(PROMPT, max_tokens=1)


class TestEndings:
    """Cancel, disconnect and deadline give the pages back at once."""

    LONG = {"max_tokens": 1900, "temperature": 0.0, "ignore_eos": True, "speculative": {"method": "none"}}

    def test_closing_a_grpc_stream(self, server, client):
        with server.cancels():
            stream = client.stream(PROMPT, **self.LONG)
            next(stream)
            with server.held_counting("foretoken_spec_decode_num_emitted_tokens_total") as emitted:
                stream.close()
                assert client.is_ready()  # whatever comes on a connection later is read later
        assert server.metric("foretoken_spec_decode_num_emitted_tokens_total") - emitted < 400

    def test_cancelling_a_task(self, server):
        async def run():
            async with AsyncClient(server.grpc) as client:
                task = asyncio.create_task(client.generate(PROMPT, **self.LONG))
                await asyncio.to_thread(wait_until, lambda: server.metric("foretoken_requests_running") == 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        with server.cancels():
            asyncio.run(run())

    @pytest.mark.parametrize("model", ["decode"])
    def test_hanging_up_http(self, server, model):
        with server.cancels():
            stream = HttpClient(server.http, model=model).stream(PROMPT, **self.LONG)
            next(stream)
            stream.close()

    @pytest.mark.parametrize("model", ["decode", "generate"])
    def test_cancel_by_id(self, server, client, model):
        with server.cancels(), Client(server.grpc, model=model) as other:
            stream = other.stream(PROMPT, request_id=f"victim-{model}", **self.LONG)
            next(stream)
            assert client.cancel(f"victim-{model}")
            assert [c.finish_reason for c in stream][-1] == "cancelled"
        assert not client.cancel(f"victim-{model}")

    def test_leaving_an_ensemble_stream(self, server):
        with server.cancels(), Client(server.grpc, model="generate") as client:
            stream = client.stream(PROMPT, **self.LONG)
            next(stream)
            stream.close()

    def test_deadline(self, server, client):
        for timeout_ms in (300, 1500, 5000):  # whoever computes may stand still for as long as the shorter ones
            out = client.generate(PROMPT, timeout_ms=timeout_ms, **self.LONG)[0]
            if out.token_ids:
                break
        assert out.finish_reason == "timeout" and 0 < len(out.token_ids) < 1900
        assert wait_until(server.is_idle)


BAD_REQUESTS = [
    ({}, "give one of text_input, input_ids, messages; got none"),
    ({"text_input": ""}, "the prompt is empty"),
    ({"input_ids": []}, "the prompt is empty"),
    ({"text_input": "x", "input_ids": [5]}, "got text_input and input_ids"),
    ({"input_ids": [5, 99999]}, "input_ids[1] is 99999; the vocabulary has ids 0 to 4095"),
    ({"input_ids": [-3]}, "input_ids[0] is -3"),
    ({"input_ids": [5] * 3000}, "the prompt has 3000 tokens; the context holds 2048"),
    ({"text_input": "x" * 1_000_000}, "text_input has 1000000 bytes; the limit is 131072 characters"),
    ({"text_input": "x" * 131_073}, "the prompt has 131073 characters"),
    ({"text_input": "x", "max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
    ({"text_input": "x", "max_tokens": -5}, "got -5"),
    ({"text_input": "x", "max_tokens": 100_000}, "max_tokens is 100000; the context holds 2048 tokens"),
    ({"text_input": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens must be an integer from 0 to max_tokens (3), got 9"),
    ({"text_input": "x", "temperature": float("nan")}, "temperature must be a finite number >= 0, got nan"),
    ({"text_input": "x", "temperature": -1.0}, "got -1.0"),
    ({"text_input": "x", "temperature": float("inf")}, "got inf"),
    ({"text_input": "x", "top_p": 0.0}, "top_p must be a number above 0 and at most 1, got 0.0"),
    ({"text_input": "x", "top_k": -7}, "top_k must be"),
    ({"text_input": "x", "min_p": 2.0}, "min_p must be"),
    ({"text_input": "x", "repetition_penalty": 0.0}, "repetition_penalty must be"),
    ({"text_input": "x", "logprobs": 1000}, "logprobs must be an integer from 0 to 20, got 1000"),
    ({"text_input": "x", "n": 1000}, "n must be an integer from 1 to 64"),
    ({"text_input": "x", "timeout_ms": 0}, "timeout_ms must be above 0 and below 1000000000000, got 0"),
    ({"text_input": "x", "logit_bias": "{"}, "logit_bias is not valid JSON"),
    ({"text_input": "x", "logit_bias": '{"a": 1}'}, "logit_bias's keys must be token ids"),
    ({"text_input": "x", "logit_bias": '{"70000": 1}'}, "logit_bias names token 70000"),
    ({"text_input": "x", "logit_bias": '{"7": "much"}'}, "logit_bias[7] must be a number from -100 to 100"),
    ({"text_input": "x", "speculative": "[1]"}, "speculative must be a JSON object"),
    ({"text_input": "x", "speculative": '{"methud": "ngram"}'}, 'unknown key \'methud\'; did you mean "method"?'),
    ({"text_input": "x", "speculative": '{"num_speculative_tokens": 100}'}, "from 0 (off) to 16, got 100"),
    ({"text_input": "x", "structured_outputs": '{"regex": "["}'}, "structured_outputs.regex: at 1"),
    ({"text_input": "x", "structured_outputs": "{}"}, "give one of json, json_object, regex, choice, grammar, allowed_token_ids; got none"),
    ({"text_input": "x", "tools": "[]"}, "tools are for messages"),
    ({"messages": '[{"role": "user", "content": "x"}]', "tools": "[]"}, "tools must be a list of functions"),
    ({"messages": '[{"role": "user", "content": "x"}]', "tool_choice": "auto"}, "tool_choice has no effect without tools"),
    ({"text_input": "x", "stop": ["y" * 100_000] * 100}, "stop has 100 strings; the limit is 64"),
    ({"text_input": "x", "stop": ["y" * 10_000_000]}, "stop has 10000000 bytes; the limit is 8192 characters"),
    ({"messages": "[" + "1" * 3_000_000}, "messages has 3000001 characters; the limit is 2000000"),
    ({"messages": "hello"}, "messages is not valid JSON"),
    ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "the rendered chat is not valid Unicode: '\\ud800' at"),
    ({"bad_words": ["x"] * 300, "text_input": "x"}, "bad_words has 300 strings; the limit is 256"),
    ({"stop_token_ids": [5] * 1000, "text_input": "x"}, "stop_token_ids has 1000 values; the limit is 256"),
    ({"messages": "[]"}, "messages must be a list of objects with role and content"),
]  # fmt: skip


class TestBadInput:
    """Each is a clear error on that request; a stream that runs meanwhile goes on."""

    @pytest.fixture(scope="class")
    def bystander(self, server):
        with Client(server.grpc) as client:
            stream = client.stream("import sys\n", max_tokens=1900, temperature=0.0, ignore_eos=True, speculative={"method": "none"})
            next(stream)
            yield stream
            assert next(stream).token_ids, "the stream beside must go on"
            stream.close()

    @pytest.mark.parametrize(("values", "message"), BAD_REQUESTS, ids=lambda v: v[:40] if isinstance(v, str) else "")
    def test_grpc(self, client, bystander, values, message):
        with pytest.raises(GenerateError) as caught:
            client.generate(request_id="bad-one", **values)
        assert message in str(caught.value) and "bad-one" in str(caught.value)

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b"{", ""),
            (b"[]", ""),
            ({"text_input": 5}, ""),
            ({"text_input": "x", "max_tokens": "many"}, ""),
            ({"text_input": "x", "max_tokens": [1, 2]}, ""),
            ({"text_input": "x", "temperature": -2}, "temperature must be a finite number >= 0, got -2.0"),
            ({"text_input": ""}, "the prompt is empty"),
        ],
    )
    @pytest.mark.parametrize("verb", ["generate", "generate_stream"])
    def test_http(self, server, bystander, verb, body, message):
        status, answer = server.post(f"/v2/models/decode/{verb}", body)
        assert (status >= 400 or '"error"' in answer) and message in answer

    def test_refusals_that_take_long(self, server, bystander):
        """Tokenized before they are refused, while the server looks whether their clients are still there."""

        text = "".join(chr(0x1F300 + i * 7 % 256) for i in range(131_000))

        def refused(number: int) -> str:
            with Client(server.grpc) as client, pytest.raises(GenerateError) as caught:
                client.generate(text[: 40_000 + 1_000 * number])
            return str(caught.value)

        with ThreadPoolExecutor(4) as threads:
            for message in threads.map(refused, range(0, 90, 2)):
                assert "tokens; the context holds 2048" in message

    def test_ensemble(self, server, bystander):
        wrong = [({"text_input": ""}, "the prompt is empty"), ({"text_input": "x", "top_p": 0.0}, "top_p must be")]
        wrong += [({"id": "a", "text_input": "x", "stop_words": "y"}, "request 'a': unknown input 'stop_words'; here it is stop")]
        for values, message in wrong:
            status, answer = server.post("/v2/models/generate/generate", {**values, "stream": False})
            assert status >= 400 and message in answer
        with pytest.raises(GenerateError, match="give one of text_input, messages, input_ids; got none"):
            HttpClient(server.http, model="generate").generate_once(max_tokens=5)
        with pytest.raises(GenerateError, match="give one of text_input, messages, input_ids; got none") as caught:
            Client(server.grpc, model="generate").generate(max_tokens=5)
        assert caught.value.code == "INVALID_ARG"

    def test_streaming_through_generate_is_refused_plainly(self, server):
        """/generate takes exactly one response, and says so without stream false."""
        _, answer = server.post("/v2/models/decode/generate", {"text_input": PROMPT, "max_tokens": 20, "ignore_eos": True})
        assert "exactly 1 response" in answer

    @pytest.mark.parametrize("model", ["decode", "tokenizer", "generate"])
    def test_an_id_that_is_no_text(self, server, bystander, model):
        status, answer = server.post(f"/v2/models/{model}/generate", b'{"id": "\xff", "text_input": "x"}')
        assert status == 400 and "[INVALID_ARG]" in answer and "the request's id is not valid UTF-8: byte 0xff at 0" in answer
        assert "Traceback" not in answer

    def test_half_a_surrogate_pair_in_a_chat_for_the_tokenizer(self, server, bystander):
        """JSON can write it, and no tokenizer reads it."""
        status, answer = server.post("/v2/models/tokenizer/generate", {"messages": '[{"role": "user", "content": "\\ud800"}]'})
        assert status == 400 and "[INVALID_ARG]" in answer and "the rendered chat is not valid Unicode" in answer

    @pytest.mark.parametrize("name", ["text_input", "stop"])
    def test_invalid_utf8(self, server, bystander, name):
        values = {"text_input": [b"x"], name: [b"ab\xff\xfe"]}
        inputs = []
        for key, value in values.items():
            tensor = triton_grpc.InferInput(key, [1], "BYTES")
            tensor.set_data_from_numpy(np.array(value, dtype=object))
            inputs.append(tensor)
        errors = []
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(lambda result, error: errors.append(error))
            client.async_stream_infer("decode", inputs)
            client.stop_stream()
        assert f"{name} is not valid UTF-8: byte 0xff at 2" in str(errors[0])

    @pytest.mark.parametrize(("kind", "shape", "values"), [("INT64", [1], [4]), ("INT32", [2], [4, 5]), ("FP32", [1], [4.0])])
    def test_wrong_dtype_or_shape(self, server, bystander, kind, shape, values):
        text = triton_grpc.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"x"], dtype=object))
        count = triton_grpc.InferInput("max_tokens", shape, kind)
        count.set_data_from_numpy(np.array(values, dtype={"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}[kind]))
        errors = []
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(lambda result, error: errors.append(error))
            client.async_stream_infer("decode", [text, count])
            client.stop_stream()
        assert "max_tokens" in str(errors[0])
