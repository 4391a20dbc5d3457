"""The decode model's threads, without a server: who touches a request's way back to its client, and when each request ends."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import marshal
import re
import resource
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backend.config import BUNDLED_MODEL, DEFAULT_DRAFTER
from backend.engine_process.main import describe_failure
from backend.errors import CapacityError, ConfigError, EngineError, ModelError
from backend.own_process import command
from client.gateway.limits import MAX_KEYS
from deploy.supervision.processes import is_running
from tests.conftest import ROOT
from tests.triton_stand_in import HostThread, InferenceRequest, Sender

LONG = "é" * 131_000


@contextlib.contextmanager
def running_model(adapter: Any, folder: Path, speculative: dict[str, Any], **options: str) -> Iterator[Any]:
    (folder / "1").mkdir()
    values = {"model": str(BUNDLED_MODEL), "max_batch_size": "8", "max_waiting": "24", "speculative_config": json.dumps(speculative), **options}
    parameters = {key: {"string_value": value} for key, value in values.items()}
    triton_model = adapter.TritonPythonModel()
    triton_model.initialize(
        {
            "model_config": json.dumps({"parameters": parameters}),
            "model_repository": str(folder),
            "model_version": "1",
            "model_instance_kind": "CPU",
            "model_name": "decode",
        }
    )
    triton_model.host = HostThread.last.host
    yield triton_model
    triton_model.finalize()


@pytest.fixture(scope="module")
def shared_model(adapter, tmp_path_factory) -> Iterator[Any]:
    with running_model(adapter, tmp_path_factory.mktemp("repository"), PLAIN) as triton_model:
        yield triton_model


@pytest.fixture
def speculative() -> dict[str, Any] | None:
    """Of a model of the test's own; None: the test leaves the model as it found it."""
    return None


@pytest.fixture
def model(request, adapter, tmp_path, speculative) -> Iterator[Any]:
    if speculative is None:
        yield request.getfixturevalue("shared_model")
    else:
        with running_model(adapter, tmp_path, speculative) as triton_model:
            yield triton_model


PLAIN = {"method": "none"}
ends_its_model = pytest.mark.parametrize("speculative", [PLAIN], ids=["own"])


@pytest.fixture
def gate(model, monkeypatch):
    """Holds up the tokenizer until it is set."""
    opened, encode = threading.Event(), model.host.engine.tokenizer.encode
    opened.begun = threading.Event()

    def wait(*args: Any, **options: Any) -> list[int]:
        opened.begun.set()
        assert opened.wait(60)
        return encode(*args, **options)

    monkeypatch.setattr(model.host.engine.tokenizer, "encode", wait)
    yield opened
    opened.set()


def ask(model, **values: Any) -> Sender:
    """Answers are drawn without a seed: one might end by itself."""
    if "max_tokens" in values:
        values = {"ignore_eos": True, **values}
    request = InferenceRequest(**values)
    model.execute([request])
    return request.sender


def wait_until(is_true) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_idle(model) -> None:
    wait_until(lambda: not model._exchanges and not model.host.engine.scheduler.num_open)
    assert model.host.engine.scheduler.pool.num_held == 0


def test_the_inputs_that_errors_name_are_the_repositorys(adapter):
    """Those of other servers' models are in the document."""
    own = importlib.import_module("backend.adapters.request_io")
    config = (ROOT / "model_repository/standalone/decode/config.pbtxt").read_text()
    inputs = re.findall(r'\{ name: "(\w+)"', config.partition("output [")[0])
    assert sorted(own.INPUTS) == sorted(inputs)
    text = (ROOT / "docs/api.md").read_text().partition("### Inputs of `decode`")[2]
    assert [name for name in own.INPUTS_ELSEWHERE if not re.search(rf"^\|[^|]*`{name}`", text, re.M)] == []


def test_the_gateway_counts_keys_as_what_an_input_holds(adapter):
    """No more of them than its JSON has room for: four characters each at least."""
    assert 4 * MAX_KEYS == importlib.import_module("backend.adapters.request_io").MAX_JSON_CHARACTERS


def test_an_answer(model):
    """With what clients of TensorRT-LLM's models send for nothing."""
    empty = {"bad_words": "", "stop": [""], "logit_bias": ""}
    sender = ask(model, text_input="x = 1", max_tokens=3, parameters='{"stop_words": "", "traceparent": "00-1"}', **empty)
    assert sender.reasons() == [b"length"] and len([i for r in sender.responses for i in r.values["output_ids"]]) == 3
    assert_idle(model)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_input": LONG}, "tokens; the context holds 2048"),
        ({}, "give one of text_input, input_ids, messages; got none"),
        ({"input_ids": [5] * 2048}, "the prompt has 2048 tokens; the context holds 2048"),
        ({"input_ids": [5, 4096]}, "input_ids[1] is 4096; the vocabulary has ids 0 to 4095"),
        ({"text_input": "x" * 600_000}, "text_input has 600000 bytes; the limit is 131072 characters"),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "the rendered chat is not valid Unicode: '\\ud800' at"),
        ({"messages": '[{"role": "user", "content": "' + "é" * 140_000 + '"}]'}, "messages has 140"),
        ({"messages": "[5]"}, "messages must be a list of objects with role and content"),
        ({"text_input": "x", "parameters": '{"stop_words": "a"}'}, "unknown input 'stop_words'; here it is stop"),
        ({"text_input": "x", "parameters": '{"id": "a", "triton_x": 1, "max_token": 3}'}, "unknown input 'max_token'; did you mean \"max_tokens\"?"),
        ({"text_input": "x", "parameters": '{"temperature": 0}'}, "temperature came as a parameter of the request: it is an input"),
        ({"text_input": "x", "stop": ["a"] * 65}, "stop has 65 strings; the limit is 64"),
        ({"text_input": "x", "stop": ["a", ""]}, "stop must be non-empty strings, got ''"),
        ({"text_input": "x", "logit_bias": '{"1_0": 1}'}, "logit_bias's keys must be token ids, got '1_0'"),
        ({"text_input": "x", "logit_bias": '{" 3": 1}'}, "logit_bias's keys must be token ids, got ' 3'"),
        ({"text_input": "x", "logit_bias": '{"3": 1, "03": 2}'}, "logit_bias's keys must be token ids, got '03'"),  # one token, two biases
        ({"text_input": "x", "logit_bias": "9" * 5000}, "logit_bias is not valid JSON: Exceeds the limit (4300 digits)"),
        ({"text_input": "x", "speculative": '{"method": 5}'}, "speculative.method must be a string, got 5"),
        ({"input_ids": [5] * 131_073, "truncate_prompt_tokens": 5}, "the prompt has 131073 tokens; at most 131072 are looked at"),
        ({"suffix_corpus": '["x"]'}, "suffix_corpus: the method suffix is not loaded"),
        ({"suffix_corpus": "[]"}, "suffix_corpus must be a list of texts or of lists of token ids, got '[]'"),
        ({"suffix_corpus": "[" + " " * 2_000_000}, "suffix_corpus has 2000001 characters; the limit is 2000000"),
        ({"request_id": b"\xff", "text_input": "x"}, "the request's id is not valid UTF-8: byte 0xff at 0"),
    ],
    ids=lambda v: v[:30] if isinstance(v, str) else "",
)
def test_a_refusal_goes_the_way_of_answers(model, values, message):
    """Also while the watcher asks for looks at the request."""
    sender = ask(model, **values)
    assert message in sender.message() and "[INVALID_ARG]" in sender.message()
    assert_idle(model)


@pytest.mark.parametrize("speculative", [{"method": "suffix"}])
def test_texts_for_the_suffix_trees(model, gate):
    """Neither who receives them nor a step waits for the tokenizer."""
    added = ask(model, suffix_corpus='["def parse(text):", [5, 6, 7]]')
    assert ask(model, input_ids=[5, 6], max_tokens=3).reasons() == [b"length"] and not added.responses
    gate.set()
    assert added.reasons() == [b"stop"]
    found = json.loads(added.responses[-1].values["text_output"][0])
    assert found["num_texts"] == 2 and found["num_tokens"] == found["num_all_tokens"] > 5 and found["max_tokens"] == 2**20
    assert "element 0 has token 100000" in ask(model, suffix_corpus="[[100000]]").message()
    assert_idle(model)


def test_the_execute_thread_does_not_tokenize(model, gate):
    senders = [ask(model, text_input=text, max_tokens=1) for text in ("x = 1", LONG, "y = 1")]
    wait_until(lambda: all(len(s.threads) == 1 for s in senders))
    assert not any(s.ended.is_set() for s in senders), "they are watched while they wait"
    gate.set()
    assert "the context holds 2048" in senders[1].message()
    assert senders[0].reasons() == senders[2].reasons() == [b"length"]


def test_short_prompts_do_not_wait_for_long_ones(model, monkeypatch):
    opened, encode = threading.Event(), model.host.engine.tokenizer.encode
    monkeypatch.setattr(model.host.engine.tokenizer, "encode", lambda text, *rest: (len(text) < 9 or opened.wait(60)) and encode(text, *rest))
    long = ask(model, text_input=LONG)
    assert ask(model, text_input="x = 1", max_tokens=1).reasons() == [b"length"]
    assert not long.ended.is_set()
    opened.set()
    assert "the context holds 2048" in long.message()


@pytest.mark.parametrize("place", ["queued", "begun"])
def test_what_is_not_tokenized_yet_can_be_cancelled(model, gate, place):
    """By another request, whose answer comes after; each of its completions ends once."""
    first = ask(model, text_input="x = 1", n=3, max_tokens=4, request_id="first")
    queued = ask(model, text_input="y = 1", n=3, max_tokens=4, request_id="queued")
    wait_until(lambda: len(model.host.intake._queues[0]) == 1)
    victim = first if place == "begun" else queued
    cancel = ask(model, cancel="first" if victim is first else "queued")
    if place == "begun":
        wait_until(lambda: any(thread._held for thread in model._responses.threads))
        assert not cancel.ended.is_set() and not victim.ended.is_set()
        gate.set()
    assert cancel.reasons() == [b"cancelled"] and victim.ended.is_set()
    assert victim.reasons() == [b"cancelled"] * 3
    gate.set()
    other = queued if victim is first else first
    assert other.reasons() == [b"length"] * 3
    assert ask(model, cancel="queued").reasons() == [b"stop"], "it is over"
    assert_idle(model)


@contextlib.contextmanager
def being_read(adapter, model, monkeypatch) -> Iterator[InferenceRequest]:
    """A long request that is read meanwhile, and passed on then."""
    begun, opened, read = threading.Event(), threading.Event(), adapter.read_request
    request = InferenceRequest("long", text_input="x = 1", max_tokens=2000, ignore_eos=True)

    def wait(other: Any, *rest: Any) -> Any:
        if other is request:
            begun.set()
            assert opened.wait(60)
        return read(other, *rest)

    monkeypatch.setattr(adapter, "read_request", wait)
    thread = threading.Thread(target=model.execute, args=([request],))
    thread.start()
    assert begun.wait(60)
    yield request
    opened.set()
    thread.join()


def test_a_cancel_that_overtakes_its_request(adapter, model, monkeypatch):
    """Which may be read beside it, where ranks are instances: it goes on, and its client is looked for as ever."""
    with being_read(adapter, model, monkeypatch) as request:
        assert ask(model, cancel="long").reasons() == [b"stop"]
    request.sender.is_gone = True
    assert request.sender.reasons() == [b"cancelled"]
    assert_idle(model)


def test_a_client_that_left_while_its_request_was_read(adapter, model, monkeypatch):
    with being_read(adapter, model, monkeypatch) as request:
        request.sender.is_gone = True
        wait_until(lambda: all(e.is_cancelled for e in list(model._exchanges.values())))
    assert request.sender.reasons() == [b"cancelled"]
    assert_idle(model)


def test_a_client_that_left_before_the_tokenizer_came_to_it(model, gate):
    begun, queued = (ask(model, text_input=f"{name} = 1", max_tokens=4) for name in "xy")
    queued.is_gone = True
    assert queued.reasons() == [b"cancelled"]
    begun.is_gone = True
    wait_until(lambda: all(e.is_cancelled for e in list(model._exchanges.values())))
    gate.set()
    assert begun.reasons() == [b"cancelled"]
    assert_idle(model)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_deadline_counts_from_the_arrival(model, gate, is_streamed):
    begun, queued = (ask(model, text_input=f"{name} = 1", n=2, max_tokens=2000, timeout_ms=100, stream=is_streamed) for name in "xy")
    reasons = [b"timeout"] * 2
    assert queued.reasons() == reasons
    gate.set()
    assert begun.reasons() == reasons
    assert_idle(model)


def test_more_than_may_wait_are_refused(model, gate):
    senders = [ask(model, input_ids=[5, 6], max_tokens=1) for _ in range(8)]
    waiting = [ask(model, text_input="x = 1", max_tokens=1)]
    assert gate.begun.wait(60)  # else those before it leave room for the last of those that follow
    waiting += [ask(model, text_input="x = 1", max_tokens=1) for _ in range(39)]
    assert waiting[-1].ended.wait(60), "the last of many is refused, after those before it"
    refused = [s for s in waiting if s.ended.is_set()]
    gate.set()
    assert refused and all("[UNAVAILABLE]" in s.message() and "raise --max-waiting" in s.message() for s in refused)
    for sender in [s for s in senders + waiting if s not in refused]:
        (*_, last) = sender.finish()
        assert "[UNAVAILABLE]" in str(last.error()) if last.has_error() else sender.reasons() == [b"length"]
    assert_idle(model)


@ends_its_model
def test_draining_lets_what_was_taken_go_on(model, gate):
    senders = [ask(model, text_input=f"{name} = 1", max_tokens=2) for name in "xyz"]
    model._drain_file.write_text("60")
    wait_until(lambda: model._is_refusing)
    assert "[UNAVAILABLE]" in ask(model, text_input="late").message()
    gate.set()
    assert all(s.reasons() == [b"length"] for s in senders)
    wait_until(lambda: not model._drain_file.exists())
    assert "shutting down" in ask(model, text_input="later").message()
    assert "[UNAVAILABLE]" in ask(model, cancel="nobody").message()


@ends_its_model
def test_the_end_of_the_drain_ends_what_waits(model, gate):
    senders = [ask(model, text_input=f"{name} = 1", max_tokens=2) for name in "xyz"]
    model._drain_file.write_text("0")
    assert all("the time for open requests is over" in s.message() for s in senders[1:])
    gate.set()
    assert "shutting down" in senders[0].message()
    wait_until(lambda: not model._drain_file.exists())


@ends_its_model
def test_the_end_answers_everybody(adapter, model, gate):
    senders = [ask(model, text_input=f"{name} = 1", max_tokens=2) for name in "xyz"]
    running = ask(model, input_ids=[5] * 9, max_tokens=2000)
    threading.Timer(0.2, gate.set).start()
    model.finalize()
    assert all("[UNAVAILABLE]" in str(s.finish()[-1].error()) for s in [*senders, running])


def test_the_end_answers_what_waits_for_another_end(adapter):
    """Which another thread is still sending when no more is to come."""
    from backend.adapters.exchange import Exchange
    from backend.adapters.responses import Responses
    from backend.core import Delta, SpeculationStats

    opened = threading.Event()

    class SlowSender(Sender):
        def send(self, response: Any, flags: int = 0) -> None:
            assert opened.wait(60)
            super().send(response, flags)

    ended, cancel = Exchange(SlowSender(), 0, is_awaited=True), Exchange(Sender(), 1)
    cancel.waits_for = [ended]
    responses = Responses(SimpleNamespace(count_response=lambda: None), *[lambda *_: None] * 3)
    responses.start()
    responses.put([(e, Delta("", finish_reason="cancelled", stats=SpeculationStats())) for e in (ended, cancel)])
    responses.stop(0.0)
    wait_until(lambda: responses.threads[1]._outbox.empty())
    opened.set()
    for thread in responses.threads:
        thread.join(60)
    assert ended.sender.reasons() == cancel.sender.reasons() == [b"cancelled"]


def test_a_response_that_cannot_be_made_is_an_error(adapter, model, monkeypatch):
    """Which names no shared-memory region: whoever knows one can have the server map it."""
    from backend.adapters.answers import AnswerTensors

    def fail(*_: object) -> None:
        raise RuntimeError("Failed to increase the shared memory pool size for key 'triton_python_backend_shm_region_7' to 9 bytes")

    monkeypatch.setattr(AnswerTensors, "of", fail)
    sender = ask(model, text_input="x = 1")
    assert "[INTERNAL]" in sender.message() and "shared memory pool" in sender.message() and "region_7" not in sender.message()
    monkeypatch.undo()
    assert ask(model, text_input="x = 1", max_tokens=1).reasons() == [b"length"]
    assert_idle(model)


def test_a_last_response_that_cannot_be_sent_leaves_no_request_open(model, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to increase the shared memory pool size")

    for values in ({"max_tokens": 0}, {"max_tokens": 1, "stream": False}):
        request = InferenceRequest("lost", text_input="x = 1", **values)
        monkeypatch.setattr(request.sender, "send", fail)
        model.execute([request])
        assert_idle(model)


def test_counts_are_told_once(model):
    """All of them at first, and later what has changed."""
    from backend.engine_process.counts import Counts

    counts = Counts(model.host.engine)
    first = {(c.name, c.labels): c.value for c in counts.news()}
    assert first["requests_running", ()] == 0 and ("requests_finished_total", (("finish_reason", "timeout"),)) in first
    assert ask(model, text_input="x = 1", max_tokens=3).reasons() == [b"length"]
    assert_idle(model)
    later: dict[Any, float] = {}

    def is_settled() -> bool:  # a step is counted behind the news of it
        news = counts.news()
        later.update({(c.name, c.labels): c.value for c in news})
        return not news

    wait_until(is_settled)
    assert later["requests_finished_total", (("finish_reason", "length"),)] == first["requests_finished_total", (("finish_reason", "length"),)] + 1
    assert ("requests_running", ()) not in later and set(later) < set(first) and not counts.news()


def test_what_is_published_is_what_was_told(adapter, monkeypatch):
    from backend.adapters.metrics import MetricsPublisher, pb_utils
    from backend.engine_process.count import Count

    log: list[tuple[str, float]] = []
    own = threading.current_thread()  # a model of this file publishes, too
    for name in ("increment", "set"):
        note = lambda _, value, name=name: threading.current_thread() is own and log.append((name, value))  # noqa: E731
        monkeypatch.setattr(pb_utils.MetricFamily, name, note)
    told = [
        [Count("a", "", 3.0), Count("b", "", 0.0, is_gauge=True), Count("c", "", 0)],
        [Count("a", "", 5.0), Count("b", "", 7.0, is_gauge=True)],
        [],
    ]
    publisher = MetricsPublisher("decode", lambda: told.pop(0))
    for _ in range(3):
        publisher.publish()
    assert log == [("increment", 3.0), ("set", 0.0), ("increment", 2.0), ("set", 7.0)]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", r"ended while it loaded \(status 0\)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"ended while it loaded \(status -9\)"),
    ],
    ids=["ended", "killed"],
)
def test_an_engine_s_process_that_ends_while_it_loads(adapter, tmp_path, monkeypatch, code, message):
    def start(connection: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[connection.fileno()])
        connection.close()
        return process

    monkeypatch.setattr("backend.engine_process.client.start_process", start)
    with pytest.raises(ModelError, match=message), running_model(adapter, tmp_path, PLAIN):
        pass


def test_an_engine_s_process_whose_parent_died_while_it_was_started() -> None:
    """It loaded a model for nobody, which took the memory that the next one needed."""
    own, other = Pipe()
    with own, other:
        number = other.fileno()
        process = subprocess.Popen([*command("backend.engine_process.main"), str(number), "1"], pass_fds=[number])
        assert process.wait(60) == 1


LIMITED = """
import faulthandler, time
from backend.own_process import end_with_parent
def fail(*_, **__):
    raise RuntimeError("unable to start watchdog thread")
faulthandler.dump_traceback_later = fail
end_with_parent()
print("watched", flush=True)
time.sleep(60)
"""


def test_a_process_that_can_start_no_threads_ends_with_its_parent() -> None:
    """The limit of processes may be reached for a moment: it was not watched any more from then on."""
    parent = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {LIMITED!r}], stdout=-1); c.stdout.readline(); print(c.pid)"
    found = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    wait_until(lambda: not is_running(int(found.stdout)))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"model": "nothing"}, ModelError, "nothing"),
        ({"speculative_config": '{"method": "mtp", "model": "nothing"}'}, ModelError, "nothing"),
        ({"device": "cuda:97"}, (ConfigError, ModelError), "cuda:97|CUDA"),
    ],
    ids=["model", "drafter", "device"],
)
def test_an_engine_that_cannot_be_loaded_says_why(adapter, tmp_path, values, error, message):
    with pytest.raises(error, match=message), running_model(adapter, tmp_path, PLAIN, **values):
        pass


def test_a_drafter_that_says_its_method(adapter, tmp_path):
    """Its folder is named relative to the version folder, or whole."""
    (tmp_path / "1").mkdir()
    (tmp_path / "head").symlink_to(DEFAULT_DRAFTER)
    for drafter in ("../head", str(DEFAULT_DRAFTER)):
        values = {"model": str(BUNDLED_MODEL), "speculative_config": json.dumps({"model": drafter})}
        parameters = {key: {"string_value": value} for key, value in values.items()}
        config = {"model_config": json.dumps({"parameters": parameters}), "model_repository": str(tmp_path), "model_version": "1"}
        found = adapter.read_engine_config({**config, "model_instance_kind": "CPU", "model_name": "decode"}).speculative_config
        assert (found.method, found.model) == ("eagle3", str(DEFAULT_DRAFTER))


@pytest.mark.parametrize("depth", [100, 400, 600, 900, 5000])
@pytest.mark.parametrize("name", ["chat_template_kwargs", "speculative", "structured_outputs", "tools"])
def test_json_that_is_nested_deeply(model, name, depth):
    """Is taken or the request's fault, wherever it becomes too much."""
    deep = '{"a":' * depth + "1" + "}" * depth
    values = {"chat_template_kwargs": deep, "speculative": deep, "structured_outputs": f'{{"json": {deep}}}'}
    values["tools"] = f'[{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]'
    *_, last = ask(model, messages='[{"role": "user", "content": "x"}]', max_tokens=2, **{name: values[name]}).finish()
    assert "[INVALID_ARG]" in str(last.error()) if last.has_error() else depth < 500
    assert_idle(model)


def test_what_cannot_be_asked_is_answered() -> None:
    """As where no thread can be started for the end, which was waited for a minute then."""
    from backend.engine_process.host import EngineHost
    from backend.engine_process.line import Line

    own, other = map(Line, Pipe())
    host = EngineHost(other)
    threading.Thread(target=host.serve, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineHost, "_answer", lambda *_: 1 / 0)
        own.send("ask", 3, "counts")
        assert own.receive() == ("answer", (3, None, "ZeroDivisionError: division by zero"))
    own.close()


def test_who_asks_an_engine_that_is_gone_hears_of_it(adapter):
    """Whether it goes before it is asked, or then; and nobody waits for one that says nothing."""

    from backend.engine_process import client
    from backend.engine_process.line import Line

    ends: list[Line] = []
    lost: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "start_process", lambda connection: ends.append(Line(connection)) or SimpleNamespace(wait=lambda seconds: 3))
        own = client.EngineClient(lambda news: None, lost.append)
    (end,) = ends
    end.send("ready", 5)
    assert own.load(None) == 5 and end.receive().kind == "load" and own.is_alive()  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match=r"counts: the engine's process has not answered for 0\.01 s"):
        own.ask("counts", seconds=0.01)
    threading.Timer(0.1, end.close).start()
    with pytest.raises(EngineError, match="the engine's process has ended"):
        own.ask("counts")
    wait_until(lambda: lost)
    assert lost == ["the engine's process has ended (status 3)"]
    with pytest.raises(EngineError, match="the engine's process has ended"):
        own.ask("counts")
    with pytest.raises(EngineError, match="the engine's process has ended"):
        own.submit(1, "a", None, None)  # type: ignore[arg-type]


def test_news_come_as_they_were(adapter):
    """But for the names of requests, and errors, which become those that any process knows."""
    from backend.core import Delta, SpeculationStats, TokenLogprobs
    from backend.engine_process.news import News, pack, unpack
    from backend.errors import CapacityError, EngineError, InternalError, ModelError, RequestError

    plain = Delta("a", 1, [5, 6], "\ud800x", ["target", "ngram"], None, None, None, 7, 3, 9, 2, True)
    others = [
        Delta("a", 0, [5], "x", ["target"], num_output_tokens=1, num_prompt_tokens=4),
        Delta("a", 0, [5], "x", ["target"], [TokenLogprobs(5, -0.5, [(5, -0.5)])], num_output_tokens=3),
        Delta("a", 0, [5], "x", ["target"], finish_reason="stop", stats=SpeculationStats(), num_output_tokens=3),
        Delta("a", 0, [5], "x", ["target"], num_output_tokens=3, prompt_text="y", prompt_token_ids=[1]),
    ]
    news = [News(3, plain), *(News(number, delta) for number, delta in enumerate(others)), News(9, others[2], (1, 2))]
    sent = marshal.loads(marshal.dumps(pack(news)))
    assert len(sent[0]) == len(sent[1]) < len(sent[2])
    for item in news:
        item.delta.request_id = ""
    assert unpack(sent) == news
    kinds = {RequestError("a"): RequestError, ModelError("b"): RequestError, CapacityError("c"): EngineError, KeyError("d"): InternalError}
    found = unpack(marshal.loads(marshal.dumps(pack([News(1, Delta("a", error=error)) for error in kinds]))))
    assert [type(item.delta.error) for item in found] == list(kinds.values())
    assert [str(item.delta.error) for item in found] == ["a", "b", "c", "'d'"]


@pytest.mark.parametrize("text", [" x", "", "x" * 100, "\ud800"])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("num_before", [0, 6])
def test_tensors_that_are_kept_say_what_new_ones_say(adapter, monkeypatch, text, count, num_before):
    from backend.adapters.answers import Answer, AnswerTensors
    from backend.core import Delta

    def values(delta: Delta) -> dict[str, Any]:
        return {t.name(): (t.as_numpy().dtype, t.as_numpy().tolist()) for t in tensors.of(Answer([delta]))}

    def make(index: int) -> Delta:
        prompt = {"num_prompt_tokens": 7 + index, "num_cached_tokens": 2, "begins_thinking": index == 1}
        return Delta("a", index, list(range(count)), text, ["target"] * count, num_output_tokens=num_before + count, **prompt)

    tensors = AnswerTensors()
    kept = [values(make(index)) for index in (0, 1, 0)]
    monkeypatch.setattr(tensors, "_plain", lambda delta: None)
    assert [values(make(index)) for index in (0, 1, 0)] == kept


@pytest.mark.parametrize("count", [1, 2])
def test_log_probabilities_are_written_token_by_token(adapter, monkeypatch, count):
    """What is written in one call keeps Python's lock: 64 answers of a whole context would hold up everybody else's for seconds."""
    from backend.adapters import answers
    from backend.core import Delta, TokenLogprobs

    calls: list[str] = []
    monkeypatch.setattr(answers.json, "dumps", lambda value, dumps=json.dumps: calls.append(dumps(value)) or calls[-1])
    tokens = [[TokenLogprobs(5, -0.5, [(5, -0.5), (i, -1.25e-7)]) for i in range(30)] for _ in range(count)]
    deltas = [Delta("a", i, [5] * 30, "x", ["target"] * 30, own, num_output_tokens=90) for i, own in enumerate(tokens)]
    (text,) = next(t.as_numpy() for t in answers.AnswerTensors().of(answers.Answer(deltas)) if t.name() == "logprobs")
    monkeypatch.undo()
    found = [[{"id": p.token_id, "logprob": p.logprob, "top": [{"id": i, "logprob": v} for i, v in p.top]} for p in own] for own in tokens]
    assert json.loads(text) == (found if count > 1 else found[0]) and max(map(len, calls)) < 200


def test_log_probabilities_of_answers_that_are_not_streamed_are_kept_small(adapter):
    """Whole ones of 20 likeliest tokens took 2.8 KB a token, for as long as their requests ran."""
    from backend.adapters.answers import Answer, AnswerTensors
    from backend.core import Delta, TokenLogprobs

    def make(number: int) -> list[TokenLogprobs]:
        return [TokenLogprobs(number + 500, -number / 7, [(1000 + number + i, -i / 3 - number) for i in range(20)])]

    answer, count = Answer(), 400
    tracemalloc.start()
    for number in range(count):
        answer.add(Delta("a", 0, [5], "x", ["target"], make(number)))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / count < 800
    (text,) = next(t.as_numpy() for t in AnswerTensors().of(answer) if t.name() == "logprobs")
    (last,) = make(count - 1)
    assert json.loads(text)[-1] == {"id": last.token_id, "logprob": last.logprob, "top": [{"id": i, "logprob": v} for i, v in last.top]}
    assert len(json.loads(text)) == count


def test_workers_withdraw_and_end() -> None:
    from backend.engine_process.intake_workers import IntakeWorkers

    began, opened, handled = threading.Event(), threading.Event(), []

    def handle(job: list[str]) -> None:
        began.set()
        assert opened.wait(60)
        handled.append(job)
        if job == ["bad"]:
            raise ValueError(job)

    workers = IntakeWorkers(handle, max_queued=3)
    jobs = [["bad"], ["same"], ["same"], ["good"]]
    workers.put(jobs[0], 1)
    assert began.wait(60)
    for job in jobs[1:]:
        workers.put(job, 1)
    with pytest.raises(CapacityError, match="3 requests wait to be tokenized; the limit is 3"):
        workers.put(["more"], 1)
    assert workers.withdraw(jobs[1]) and not workers.withdraw(jobs[1]) and not workers.withdraw(jobs[0])
    opened.set()
    workers.stop(60)
    assert handled == [["bad"], ["same"], ["good"]] and handled[1] is jobs[2]
    with pytest.raises(CapacityError, match="shutting down"):
        workers.put(["more"], 1)


def test_the_tokenizer_takes_what_the_model_takes(adapter, tmp_path):
    """Of a context that yarn stretches, too."""
    from backend.adapters.tokenizer import MAX_CHARACTERS, _max_characters
    from backend.core import MAX_CHARACTERS_PER_TOKEN

    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for values, expected in (({}, 128), ({"rope_scaling": yarn}, 256)):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 128, **values}))
        assert _max_characters(tmp_path) == expected * MAX_CHARACTERS_PER_TOKEN
    (tmp_path / "config.json").write_text("{}")
    assert _max_characters(tmp_path) == MAX_CHARACTERS


DRAFT_CALL: dict[str, Any] = {
    "session": [1, 0, 8, 16],
    "tokens": [3, 4],
    "hidden": [[0.0] * 6] * 2,
    "requests": [[2, 2, 3, 1, 0, 0, 0]],
    "filters": [[0.0] * 3],
    "pages": [7],
    "fresh_pages": [7],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"session": [1, 0, -5, -64], "requests": [[2, 2, 3, -1, 0, 0, 0]], "pages": [], "fresh_pages": []}, "session: -5 pages of -64 tokens"),
        ({"session": [1, 0, 8, -64], "requests": [[2, 2, 3, -1, 0, 0, 0]]}, "session: 8 pages of -64 tokens"),
        ({"requests": [[2, 2, 3, -1, 0, 0, 0]]}, "requests: 2 of 2 tokens with 3 drafts do not fit -1 pages of 16"),
        ({"requests": [[2, 2, 17, 2, 0, 0, 0]], "pages": [6, 7]}, "requests: 17 drafts of one request; the limit is 16"),
        ({"requests": [[2, 2, 3, 1, 3, 0, 0]]}, "requests: drafts are chosen in one of the ways 0, 1, 2, got 3"),
        ({"pages": [8]}, "pages: page 8 is not one of 0 to 7"),
        ({"fresh_pages": [-1]}, "fresh_pages: page -1 is not one of 0 to 7"),
        ({"pages": [6, 7]}, "pages: 2 came for requests that have 1"),
        ({"tokens": [3, -4]}, "tokens: id -4 is not one of 0 to 99"),
        ({"hidden": [[0.0] * 5] * 2}, "hidden: rows have 5 values; the model's have 6"),
    ],
)
def test_draft_calls_that_do_not_fit(adapter, changes, message):
    """Each names its input, what it has and what it may have; an engine's own call is read."""
    from backend.adapters.draft_io import read_call

    kinds = {"hidden": np.float32, "filters": np.float32, "session": np.int64, "requests": np.int64}

    def read(values: dict[str, Any]) -> Any:
        arrays = {name: np.array(value, dtype=kinds.get(name, np.int32)) for name, value in values.items()}
        tensors = [SimpleNamespace(name=lambda n=n: n, as_numpy=lambda a=a: a, is_cpu=lambda: True) for n, a in arrays.items()]
        return read_call(SimpleNamespace(inputs=lambda: tensors), 100, 6, 64)

    assert read(DRAFT_CALL)[0].page_ids == [[7]]
    with pytest.raises(ValueError, match=message):
        read({**DRAFT_CALL, **changes})


def test_the_tokenizer_names_the_byte_that_is_no_text(adapter):
    """As the decode model does: through the ensemble it is this error that a client gets."""
    from backend.adapters.tokenizer import TritonPythonModel

    model = object.__new__(TritonPythonModel)
    model._max_characters = 100
    with pytest.raises(ValueError, match="text_input is not valid UTF-8: byte 0xff at 2"):
        model._read_text("text_input", np.array([b"ab\xff\xfe"], dtype=object))


def test_the_tokenizer_knows_parameters_that_are_meant_to_be_inputs(adapter):
    """As the decode model does, behind which a client of the ensemble may be."""
    from backend.adapters.tokenizer import TritonPythonModel

    model = object.__new__(TritonPythonModel)
    response = model.execute([InferenceRequest(text_input="x", parameters='{"max_token": 3}')])[0]
    assert "unknown input 'max_token'; did you mean \"max_tokens\"?" in response.error().message()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_a_limit_denies(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine is loaded: with `ulimit -v` there is memory, and none to be had."""
    limits = [resource.RLIM_INFINITY, 1500 * 2**20]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits[-1],) * 2)
    assert describe_failure(error).startswith(f"{type(error).__name__}: ")
    assert "each process may have 1500 MiB of addresses (ulimit -v)" in describe_failure(error) and "ulimit" not in describe_failure(OSError("x"))
    limits.pop()
    assert "ulimit" not in describe_failure(error)
