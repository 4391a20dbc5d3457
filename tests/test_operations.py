"""What operates a server, on a real one: `foretoken bench`, Locust, Prometheus with the alerts and the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from deploy.demo import free_ports, stop_server
from deploy.load.answers import Answer, Answers, WrongAnswer
from tests.conftest import ROOT
from tests.servers import serve, wait_until
from tests.small import DEFAULT_SPECULATION

DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/foretoken.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
TOOLS = Path(sys.prefix) / "prometheus/usr/bin"
"""Where deploy/setup.sh unpacks Debian's Prometheus."""


def find_tool(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path=str(TOOLS))
    if path is None:
        pytest.skip(f"no {name}: apt-get install prometheus")
    return path


def run(*command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def status_port():
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory, status_port):
    """Not paced: how much is drafted must not depend on the clock."""
    options = [f"--status-port={status_port}"]
    speculation = f"--speculative-config={json.dumps({**DEFAULT_SPECULATION, 'adaptive': False})}"
    with serve(tmp_path_factory.mktemp("server") / "log", "--num-threads=1", "--drain-seconds=5", speculation, *options) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server, tmp_path_factory):
    """`foretoken gateway` before the server; its address."""
    port = free_ports(1)[0]
    log = tmp_path_factory.mktemp("gateway") / "log"
    command = [sys.executable, "-m", "deploy.cli", "gateway", f"--url={server.grpc}", "--host=127.0.0.1", f"--port={port}"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not is_answering(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        stop_server(process)


def is_answering(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def prometheus(server, gateway, status_port, tmp_path_factory):
    """Prometheus with the project's configuration, the addresses and the interval of this run in it; its address."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(ROOT / "deploy/prometheus/alerts.yml", folder)
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    addresses = {"foretoken": server.metrics, "foretoken-supervisor": f"127.0.0.1:{status_port}", "foretoken-gateway": gateway or "127.0.0.1:1"}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [addresses[job["job_name"]]]}]
        job.pop("dns_sd_configs", None)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        find_tool("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not is_up(address):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield address
    finally:
        stop_server(process)


def is_up(address: str) -> bool:
    # It listens before it can answer queries.
    return is_answering(f"http://{address}/-/ready") and bool(query(address, 'up{job="foretoken"} == 1'))


def query(address: str, expression: str) -> list[dict]:
    """The series that an expression gives now. Raises AssertionError when Prometheus cannot read it."""
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=10) as response:
            return json.load(response)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expression}: {error.read().decode()}") from None


@pytest.fixture(scope="module")
def bench(server, tmp_path_factory):
    """Runs `foretoken bench` on the server."""

    def run_bench(*options: str) -> tuple[subprocess.CompletedProcess[str], dict]:
        path = tmp_path_factory.mktemp("bench") / "result.json"
        address = [f"--url={server.grpc}", f"--metrics-url=http://{server.metrics}/metrics"]
        result = run(sys.executable, "-m", "deploy.cli", "bench", *address, "--save-result", f"--result-filename={path}", *options)
        return result, json.loads(path.read_text()) if path.exists() else {}

    return run_bench


class TestBench:
    def test_figures_are_those_of_the_server(self, server, bench):
        names = ("drafts", "draft_tokens", "accepted_tokens")
        server.settle()
        before = {n: server.metric(f"foretoken_spec_decode_num_{n}_total") for n in names}
        options = "--num-prompts=6 --output-len=12:20 --ignore-eos --request-rate=20 --burstiness=0.5 --max-concurrency=4 --num-warmups=0"
        result, found = bench(
            *options.split(), "--metric-percentiles=50,99", "--goodput", "ttft:60000", "e2el:60000", "--metadata", "run=first", "--save-detailed"
        )
        assert result.returncode == 0, result.stderr
        assert (found["completed"], found["failed"], found["run"]) == (6, 0, "first")
        assert found["request_goodput"] == pytest.approx(found["request_throughput"])
        asked = [r["output_tokens"] for r in found["requests"]]
        assert sum(asked) == found["total_output_tokens"] and all(12 <= n <= 20 for n in asked)
        assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
        for request in found["requests"]:
            assert request["ttft_ms"] + sum(request["itl_ms"]) == pytest.approx(request["e2el_ms"], abs=500)
        (speculation,) = found["speculation"].values()
        server.settle()
        gained = {n: server.metric(f"foretoken_spec_decode_num_{n}_total") - before[n] for n in names}
        assert speculation["spec_decode_num_drafts"] == gained["drafts"] > 0
        assert speculation["spec_decode_acceptance_rate"] == pytest.approx(gained["accepted_tokens"] / gained["draft_tokens"])
        assert len(speculation["spec_decode_per_position_acceptance_rates"]) == 5
        for text in ("Acceptance rate (%)", "Accepted at position 4 (%)", "P99 TPOT", "Requests/s within ttft <= 60000 ms, e2el <= 60000 ms"):
            assert text in result.stdout

    def test_without_speculation_nothing_is_said_about_it(self, bench):
        result, found = bench("--num-prompts=2", "--output-len=4", "--speculative", '{"method": "none"}')
        assert result.returncode == 0 and found["speculation"] == {} and "Speculation" not in result.stdout

    def test_refused_requests_are_failures(self, server, bench):
        server.settle()
        before = server.metric("foretoken_request_errors_total", code="INVALID_ARG")
        result, found = bench("--num-prompts=3", "--output-len=1000000", "--num-warmups=0")
        assert result.returncode == 1
        assert (found["completed"], found["failed"], found["mean_ttft_ms"]) == (0, 3, None)
        assert "1000000" in result.stdout and "failed: " in result.stdout
        server.settle()
        assert server.metric("foretoken_request_errors_total", code="INVALID_ARG") == before + 3

    def test_a_server_that_is_not_there(self, bench):
        result, found = bench("--url=127.0.0.1:1", "--num-prompts=2")
        assert result.returncode == 1 and not found
        assert "the warm-up failed" in result.stderr and "Traceback" not in result.stderr

    @pytest.mark.parametrize("options", [[], ["--endpoint=/v1/chat/completions"]])
    def test_openais_protocol(self, gateway, bench, options):
        result, found = bench("--backend=openai", f"--url=http://{gateway}", "--num-prompts=3", "--output-len=8", "--ignore-eos", *options)
        assert result.returncode == 0, result.stdout + result.stderr
        assert (found["completed"], found["total_output_tokens"]) == (3, 24) and found["median_ttft_ms"] > 0
        result, found = bench("--backend=openai", f"--url=http://{gateway}", "--num-prompts=2", "--output-len=1000000", "--num-warmups=0", *options)
        assert result.returncode == 1 and found["failed"] == 2 and "status 400" in result.stdout

    def test_a_file_that_is_not_there(self, bench):
        result, _ = bench("--dataset-path=/absent")
        assert result.returncode == 2 and "/absent" in result.stderr


USAGE = {"completion_tokens": 8}


class TestRightAnswers:
    """What the load test calls wrong."""

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (Answer("text", 8, USAGE, "length"), None),
            (Answer("text", None, {"completion_tokens": 3}, "stop"), None),
            (Answer("text", 8, USAGE, None), "no final response"),
            (Answer("text", 8, None, "length"), "no usage"),
            (Answer("text", 7, USAGE, "length"), "7 tokens came, usage says 8"),
            (Answer("text", 9, {"completion_tokens": 9}, "length"), "8 tokens were asked for, 9 came"),
            (Answer("text", 5, {"completion_tokens": 5}, "length"), "8 tokens were asked for, 5 came"),
            (Answer("text", 5, {"completion_tokens": 5}, "timeout"), "finish reason is timeout"),
        ],
    )
    def test_whole_and_counted_right(self, answer, message):
        if message is None:
            answer.check(8)
        else:
            with pytest.raises(WrongAnswer, match=message):
                answer.check(8)

    def test_the_same_every_time(self):
        answers = Answers()
        answers.compare("a", "return x")
        answers.compare("a", "return x")
        with pytest.raises(WrongAnswer, match=r"at character 7 'y', not 'x'"):
            answers.compare("a", "return y")
        with pytest.raises(WrongAnswer, match="at character 6 '', not ' x'"):
            answers.compare("a", "return")


def locust(*options: str) -> subprocess.CompletedProcess[str]:
    """For as long as the options say, or until it has had answers enough."""
    end = ["deploy/load/locustfile.py"] if "--run-time" in " ".join(options) else ["deploy/load/locustfile.py,tests/locust_end.py", "--run-time=60s"]
    command = [str(Path(sys.executable).parent / "locust"), "--headless", "--json", "--stop-timeout=30", "-f", *end]
    return run(*command, "--num-prompts=4", "--output-len=8", "--users=3", "--spawn-rate=3", *options)


def statistics_of(result: subprocess.CompletedProcess[str]) -> dict[str, tuple[int, int]]:
    """(requests, failures) by name."""
    return {s["name"]: (s["num_requests"], s["num_failures"]) for s in json.loads(result.stdout)}


class TestLocust:
    def test_grpc_users_and_their_answers(self, server, tmp_path):
        """Answers of a run without speculation, then the same under load with it; then one that is known to be other."""
        path = tmp_path / "answers.json"
        common = ("GrpcUser", f"--grpc-url={server.grpc}", f"--answers={path}")
        first = locust(*common, "--run-time=4s", "--load-shape=ramp", "--speculative", '{"method": "none"}')
        assert first.returncode == 0, first.stderr
        found = statistics_of(first)
        assert set(found) == {"request", "first token", "time per token"}
        assert all(count and not failures for count, failures in found.values())
        second = locust(*common, "--run-time=4s", "--load-shape=spike")
        assert second.returncode == 0, second.stderr
        answers = json.loads(path.read_text())
        assert len(answers) == 4  # each prompt has its turn
        path.write_text(json.dumps({prompt: f"{text}?" for prompt, text in answers.items()}))
        third = locust(*common)
        assert third.returncode == 1 and "not the first answer to this prompt" in third.stderr
        count, failures = statistics_of(third)["request"]
        assert count == failures > 0

    def test_both_protocols_give_the_same_answers(self, server, gateway):
        result = locust("GrpcUser", "OpenAIUser", f"--grpc-url={server.grpc}", f"--openai-url=http://{gateway}")
        assert result.returncode == 0, result.stderr
        assert {s["method"] for s in json.loads(result.stdout) if s["name"] == "request" and s["num_requests"]} == {"grpc", "openai"}

    def test_a_server_that_is_not_there(self):
        result = locust("GrpcUser", "OpenAIUser", "--grpc-url=127.0.0.1:1", "--openai-url=http://127.0.0.1:1")
        assert result.returncode == 1, result.stderr
        found = statistics_of(result)
        assert found and all(count == failures for count, failures in found.values())

    @pytest.mark.parametrize("option", ["--dataset-path=/absent", "--answers=/absent/answers.json"])
    def test_files_that_are_not_there(self, option):
        """Answers of a whole run were lost at its end."""
        result = locust("GrpcUser", "--grpc-url=127.0.0.1:1", option)
        assert result.returncode == 1 and "/absent" in result.stderr and "Traceback" not in result.stderr and not result.stdout

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--processes=2", "--answers=new.json"], "make it by a run of one process"),
            (["--answers=none.json"], "none.json: there are no answers in it"),
            (["--num-prompts=0"], "--num-prompts must be at least 1, got 0"),
        ],
    )
    def test_answers_that_would_show_nothing(self, tmp_path, options, said):
        """The first of several processes that ended wrote its own, which were none: every answer of the next run was right then."""
        (tmp_path / "none.json").write_text("{}")
        result = locust("GrpcUser", "--grpc-url=127.0.0.1:1", *(option.replace("answers=", f"answers={tmp_path}/") for option in options))
        assert result.returncode == 1 and said in result.stderr and not (tmp_path / "new.json").exists()

    def test_a_server_that_answers_nothing(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            result = locust("GrpcUser", f"--grpc-url=127.0.0.1:{port}", "--run-time=1s", "--stop-timeout=0")
        assert result.returncode == 1 and "no request was answered" in result.stderr and not statistics_of(result)


NODES_METRICS = "foretoken_pd_"
"""Of prefill and decode apart, which this server knows nothing of: tests/test_nodes.py looks at them."""


def dashboard_expressions() -> list[tuple[str, str]]:
    """(panel, expression), with the variables as Grafana fills them in."""
    panels = [p for p in DASHBOARD["panels"] if p["type"] != "row"]
    texts = [(p["title"], t["expr"]) for p in panels for t in p["targets"]]
    shown = [(title, text.replace("$__rate_interval", "1m").replace("$instance", ".*")) for title, text in texts]
    return [(title, text) for title, text in shown if NODES_METRICS not in text]


def alert_expressions() -> list[tuple[str, str]]:
    rules = [(rule["alert"], rule["expr"]) for group in ALERTS["groups"] for rule in group["rules"]]
    return [(name, expression) for name, expression in rules if NODES_METRICS not in expression]


class TestPrometheus:
    @pytest.fixture(scope="class")
    def observed(self, server, gateway, prometheus, bench):
        """Prometheus's address, once it has seen the server before and after a run."""
        count, labels = "foretoken_requests_finished_total", {"finish_reason": "length"}

        def wait_for_scrape() -> None:
            assert wait_until(lambda: bool(query(prometheus, f'{count}{{finish_reason="length"}} >= {server.metric(count, **labels)}')))

        protocols = [[], ["--backend=openai", f"--url=http://{gateway}"]]
        for backend in protocols:  # an error of each part, which counts none before its first
            bench("--num-prompts=1", "--output-len=1000000", "--num-warmups=0", *backend)
        wait_for_scrape()
        for backend in protocols:
            result, _ = bench("--num-prompts=6", "--output-len=24", "--ignore-eos", *backend)
            assert result.returncode == 0, result.stderr
        wait_for_scrape()
        return prometheus

    @pytest.mark.parametrize(("panel", "expression"), dashboard_expressions())
    def test_panels_have_data(self, observed, panel, expression):
        series = query(observed, expression)
        assert series, f"{panel}: {expression} gives nothing"
        assert any(s["value"][1] != "NaN" for s in series), f"{panel}: {expression} gives no number"

    @pytest.mark.parametrize(("alert", "expression"), alert_expressions())
    def test_alerts_look_at_something(self, observed, alert, expression):
        """Nothing fires here; without its thresholds each expression has a value."""
        # A look that comes late leaves a server out for a moment, which is what one of them is about.
        assert wait_until(lambda: query(observed, expression) == [])
        unbounded, count = re.subn(r"\s(?:==|<|>) [\d.]+", "", expression)
        assert count
        assert query(observed, unbounded), f"{alert}: {unbounded} gives nothing"

    def test_every_metric_is_exported(self, server, gateway, status_port):
        """Those that dashboard and alerts use, and those that docs/metrics.md explains, are the exported ones, by name."""
        urls = [f"http://{address}/metrics" for address in (server.metrics, f"127.0.0.1:{status_port}", gateway)]
        exported: set[str] = set()
        for url in urls:
            with urllib.request.urlopen(url, timeout=10) as response:
                exported |= set(re.findall(r"^# TYPE (foretoken_\w+) ", response.read().decode(), re.M))
        parts = {n.removesuffix("_bucket") for n in exported if n.endswith("_bucket")}
        families = {re.sub("_(bucket|sum|count)$", "", n) if re.sub("_(bucket|sum|count)$", "", n) in parts else n for n in exported}
        families = {n for n in families if not n.endswith("_created")}
        used = {n for _, text in dashboard_expressions() + alert_expressions() for n in re.findall(r"\bforetoken_\w+", text)}
        used = {re.sub("_(bucket|sum|count)$", "", n) for n in used}
        assert len(used) > 20 and used <= families, used - families
        page = (ROOT / "docs/metrics.md").read_text().partition("## Asking")[0]
        documented = {name for name in re.findall(r"`(foretoken_\w+)`", page) if not name.startswith(NODES_METRICS)}
        assert documented == families, documented ^ families

    def test_configuration_and_alerts_as_promtool_reads_them(self):
        promtool = find_tool("promtool")
        result = run(promtool, "check", "config", "deploy/prometheus/prometheus.yml")
        assert result.returncode == 0, result.stderr
        tested = (ROOT / "deploy/prometheus/alerts_test.yml").read_text()
        names = [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]]
        assert all(f"alertname: {name}\n        exp_alerts" in tested for name in names), "each alert is seen to fire"
        result = run(promtool, "test", "rules", "deploy/prometheus/alerts_test.yml")
        assert result.returncode == 0, result.stdout + result.stderr

    def test_the_dashboard_is_whole(self):
        panels = DASHBOARD["panels"]
        assert len({p["id"] for p in panels}) == len(panels)
        variables = {v["name"] for v in DASHBOARD["templating"]["list"]}
        assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) <= variables | {"__rate_interval"}
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            place = panel["gridPos"]
            cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
            assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
            taken |= cells


def examples(pattern: str) -> list[tuple[str, str]]:
    return [(page.name, text) for page in sorted((ROOT / "docs").glob("*.md")) for text in re.findall(pattern, page.read_text(), re.M | re.S)]


class TestDocumentedExamples:
    """What docs/ shows, on the running server."""

    @staticmethod
    def fill_in(text: str, server, gateway) -> str:
        if "127.0.0.1:8080" in text and gateway is None:
            pytest.skip("this version has no gateway")
        for shown, real in (("127.0.0.1:8000", server.http), ("127.0.0.1:8001", server.grpc), ("127.0.0.1:8080", gateway)):
            text = text.replace(shown, str(real))
        return text

    @pytest.mark.parametrize(("page", "code"), examples(r"^```python\n(.*?)^```"))
    def test_python(self, server, gateway, page, code):
        result = run(sys.executable, "-c", self.fill_in(code, server, gateway))
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()

    @pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
    @pytest.mark.parametrize(("page", "command"), examples(r"^    (curl [^\n]+)"))
    def test_curl(self, server, gateway, page, command):
        result = run("bash", "-c", f"{self.fill_in(command, server, gateway)} --silent --show-error --fail")
        assert result.returncode == 0, result.stderr
        assert '"text' in result.stdout
