"""The parts of `foretoken bench` that need no server; tests/test_operations.py runs the whole of it on one."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path

import pytest

from client.bench import cli
from client.bench.dataset import DatasetError, Prompt, read_prompts
from client.bench.report import format_table, summarize
from client.bench.requests import OpenAIBackend, Outcome, Sent, send
from client.bench.speculation import compare
from training.heldout import list_heldout

HELDOUT = list(list_heldout().values())


class TestArrivals:
    @pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (100.0, 0.1)])
    def test_gaps_have_the_rate_and_the_shape(self, burstiness, variation):
        arrivals = cli.make_arrivals(40_000, 8.0, burstiness, seed=1)
        gaps = [b - a for a, b in zip(arrivals, arrivals[1:])]
        assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)

    def test_without_a_rate_all_at_once(self):
        assert cli.make_arrivals(3, float("inf"), 1.0, seed=0) == [0.0, 0.0, 0.0]

    def test_the_seed_decides(self):
        assert cli.make_arrivals(9, 2.0, 1.0, seed=5) == cli.make_arrivals(9, 2.0, 1.0, seed=5) != cli.make_arrivals(9, 2.0, 1.0, seed=6)


class TestDataset:
    def test_prompts_are_stretches_of_the_files(self):
        prompts = read_prompts(HELDOUT, 50, (60, 300), (8, 32), seed=3)
        texts = [f.read_text("utf-8") for f in HELDOUT]
        assert all(any(p.text in t for t in texts) for p in prompts)
        assert all(1 <= len(p.text) <= 300 and 8 <= p.output_len <= 32 for p in prompts)
        assert len({p.text for p in prompts}) > 40
        assert prompts == read_prompts(HELDOUT, 50, (60, 300), (8, 32), seed=3)

    def test_a_folder_and_a_short_file(self, tmp_path):
        (tmp_path / "a.md").write_text("one line")
        (tmp_path / "picture.png").write_bytes(b"\xff")
        assert read_prompts([tmp_path], 2, (5, 100), (1, 1), seed=0) == [Prompt("one line", 1)] * 2

    def test_json_lines(self, tmp_path):
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": "b"}\n')
        assert read_prompts([path], 3, (1, 1), (7, 7), seed=0) == [Prompt("a", 3), Prompt("b", 7), Prompt("a", 3)]

    @pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": 1}', '{"prompt": ""}', '{"prompt": "a", "output_tokens": 0}'])
    def test_a_bad_line_is_named(self, tmp_path, line):
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(DatasetError, match=r"prompts\.jsonl:2"):
            read_prompts([path], 1, (1, 1), (1, 1), seed=0)

    def test_nothing_to_read(self, tmp_path):
        (tmp_path / "empty.py").write_text("")
        (tmp_path / "latin.py").write_bytes(b"\xff\xfe")
        for paths, message in (
            ([tmp_path / "absent"], "no such file"),
            ([tmp_path / "empty.py"], "empty"),
            ([tmp_path / "latin.py"], "UTF-8"),
        ):
            with pytest.raises(DatasetError, match=message):
                read_prompts(paths, 1, (1, 1), (1, 1), seed=0)


def outcome(*arrivals: float, tokens: int, ended: float = 0.0, error: str | None = None) -> Outcome:
    return Outcome(started=10.0, ended=ended or arrivals[-1], arrivals=list(arrivals), prompt_tokens=5, output_tokens=tokens, error=error)


class TestFigures:
    def test_times_are_per_token_not_per_response(self):
        found = outcome(10.1, 10.2, 10.5, tokens=9)
        assert found.ttft == pytest.approx(0.1)
        assert found.tpot == pytest.approx(0.4 / 8)
        assert found.itl == pytest.approx([0.1, 0.3])
        assert found.e2el == pytest.approx(0.5)

    def test_summary(self):
        outcomes = [outcome(10.1, 10.5, tokens=5), outcome(10.3, tokens=1), outcome(tokens=0, ended=12.0, error="lost")]
        summary = summarize(outcomes, 2.0, ["ttft", "tpot"], [50, 99], {"ttft": 200})
        assert (summary["completed"], summary["failed"], summary["errors"]) == (2, 1, {"lost": 1})
        assert (summary["total_output_tokens"], summary["output_throughput"], summary["tokens_per_response"]) == (6, 3.0, 2.0)
        assert summary["request_goodput"] == 0.5
        assert summary["mean_ttft_ms"] == pytest.approx(200) and summary["p50_ttft_ms"] == pytest.approx(200)
        assert summary["mean_tpot_ms"] == pytest.approx(100)
        table = format_table(summary, ["ttft", "tpot"], [50, 99], [])
        assert "1 failed: lost" in table and "P99 TPOT" in table

    def test_all_failed(self):
        summary = summarize([outcome(tokens=0, ended=11.0, error="lost")], 1.0, ["ttft", "tpot", "itl", "e2el"], [99], {})
        assert summary["mean_ttft_ms"] is None and json.loads(json.dumps(summary))
        assert "Mean TTFT" in format_table(summary, ["ttft"], [99], [])


class TestSpeculation:
    BEFORE = {("drafts", "mtp", -1): 10.0, ("draft_tokens", "mtp", -1): 20.0, ("accepted_tokens", "mtp", -1): 5.0}
    AFTER = {
        ("drafts", "mtp", -1): 14.0,
        ("draft_tokens", "mtp", -1): 28.0,
        ("accepted_tokens", "mtp", -1): 10.0,
        ("draft_tokens_per_pos", "mtp", 0): 4.0,
        ("draft_tokens_per_pos", "mtp", 1): 4.0,
        ("accepted_tokens_per_pos", "mtp", 0): 4.0,
        ("accepted_tokens_per_pos", "mtp", 1): 1.0,
        ("emitted_tokens", "none", -1): 9.0,
    }

    def test_gains_of_the_run(self):
        (found,) = compare(self.BEFORE, self.AFTER)
        assert (found.method, found.num_drafts, found.draft_tokens, found.accepted_tokens) == ("mtp", 4, 8, 5)
        assert (found.rate, found.length, found.per_position) == (5 / 8, 2.25, [1.0, 0.25])

    def test_nothing_drafted(self):
        assert compare(self.AFTER, self.AFTER) == []

    def test_a_server_that_started_anew(self):
        with pytest.raises(ValueError, match="started anew"):
            compare(self.AFTER, self.BEFORE)


class Script:
    """A backend that says what it is told to."""

    def __init__(self, *sent: Sent) -> None:
        self.sent = sent

    async def stream(self, prompt, seed):
        for sent in self.sent:
            yield sent

    async def close(self) -> None: ...


USAGE = {"prompt_tokens": 3, "completion_tokens": 4}


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ([Sent(True, 4, USAGE, "length")], None),
        ([Sent(True, None), Sent(False, None, USAGE, "stop")], None),
        ([Sent(False, None), Sent(False, None, {"completion_tokens": 1}, "stop")], None),  # the end of text alone, which is no text
        ([Sent(True, 4)], "without a finish reason"),
        ([Sent(True, 4, None, "length")], "no usage"),
        ([Sent(True, 3, USAGE, "length")], "3 tokens came, usage says 4"),
        ([Sent(True, 5, {"completion_tokens": 5}, "length")], "4 tokens were asked for, 5 came"),
        ([Sent(True, 2, {"completion_tokens": 2}, "stop")], "4 tokens were asked for, 2 came"),
        ([Sent(False, None, USAGE, "length")], "none came"),
    ],
)
def test_a_wrong_answer_is_a_failure(sent, error):
    found = asyncio.run(send(Script(*sent), Prompt("p", 4), 0, must_be_full=error is not None))
    assert (found.error is None) if error is None else (error in found.error)


@pytest.mark.parametrize("part", ["content", "reasoning_content", "reasoning"])
def test_thoughts_are_tokens_too(part):
    """By our name and by vLLM's; the first one is the first token that a reader waits for."""
    assert OpenAIBackend._read({"choices": [{"delta": {part: "x"}}]}).has_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--request-rate", "0"], "above 0"),
        (["--request-rate", "fast"], "must be above 0, got 'fast'"),
        (["--num-prompts", "0"], "at least 1"),
        (["--num-warmups", str(10**30)], "must be at most 1000000, got '1000000000"),
        (["--num-prompts", "many"], "must be a whole number, got 'many'"),
        (["--num-warmups", "-1"], "0 or more"),
        (["--output-len", "9:3"], "MIN:MAX"),
        (["--goodput", "itl:3"], "unknown metric"),
        (["--goodput", "ttft:fast"], "METRIC:MILLISECONDS"),
        (["--percentile-metrics", "ttft,latency"], "unknown metric 'latency'"),
        (["--metric-percentiles", "101"], "0 to 100"),
        (["--metadata", "x"], "KEY=VALUE"),
    ],
)
def test_wrong_options_are_named(options, message, capsys):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser, [Path("unused")])
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(options)
    assert stop.value.code == 2
    assert options[0] in (error := capsys.readouterr().err) and message in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--result-filename=run.json"], "--result-filename has no effect: add --save-result"),
        (["--metadata", "a=b"], "--metadata has no effect: add --save-result"),
        (["--save-result", "--result-filename=none/run.json"], "--result-filename none/run.json: cannot be written"),
        (["--save-detailed", "--result-filename=."], "--result-filename .: is a directory"),
        (["--burstiness=0.5"], "--burstiness has no effect"),
        (["--endpoint=/v1/chat/completions"], "--endpoint has no effect with --backend grpc"),
        (["--url=localhost"], "--url: 'localhost' is no HOST:PORT"),
        (["--url=http://127.0.0.1:8001"], "--url: 'http://127.0.0.1:8001' is no HOST:PORT"),
    ],
)
def test_what_is_asked_for_in_vain_is_said_before_the_run(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser, [Path("unused")])
    assert cli.run(parser.parse_args(options)) == 2
    assert capsys.readouterr().err.startswith(f"foretoken bench: {message}")
