"""The documentation: links lead somewhere, commands and code are this version's own, what is generated is current."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from backend import sampling_params
from backend.speculative_config import SpeculativeConfig
from client.messages import PARAMETERS
from deploy.cli import EPILOG, PAGES, make_parser
from deploy.configuration_page import PAGE, make_page
from tests.conftest import ROOT
from training.command import make_parser as make_training_parser

PAGES_OF_DOCS = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES_OF_DOCS]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        assert place.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors_of(place.read_text()), f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_paths_exist(path):
    """Paths of the project in `code`."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    found = re.findall(r"(?<![\w/.])((?:deploy|docs|tests|benchmarks|backend|client|training|model_repository|kernels)/[\w./-]*\w)", text)
    assert not [p for p in found if not (ROOT / p).exists()]


def commands_in(path: Path) -> list[str]:
    """The lines of indented blocks, and of code between backticks, that run something of the project's."""
    text = path.read_text()
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")] + re.findall(r"`((?:foretoken|make) [^`\n]+)`", text)
    return [line for line in lines if re.match(r"(\.venv/bin/)?(foretoken|make|locust|python -m|docker|kubectl|MODEL=)\b", line)]


def split(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    return words[1:] if "=" in words[0] else words


@pytest.mark.parametrize(("path", "command"), [(p.name, c) for p in DOCUMENTS for c in commands_in(p)])
def test_commands_are_those_of_this_version(path, command):
    program, *words = split(command)
    program = Path(program).name
    if program == "foretoken":
        check_foretoken(words)
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in words if "=" not in word} <= set(targets)
    elif program == "locust":
        known = (ROOT / "deploy/load/locustfile.py").read_text()
        for word in words:
            if word.startswith("--") and word != "--headless":
                assert f'"{word}"' in known, word
            elif word.endswith("User"):
                assert f"class {word}(" in known
    elif program == "python":
        assert (ROOT / (words[1].replace(".", "/") + ".py")).exists()
    else:
        for word in words:
            if word.startswith("deploy/"):
                assert (ROOT / word).exists(), word
            elif word in ("cpu", "gpu"):
                assert f" AS {word}\n" in (ROOT / "Dockerfile").read_text()


def check_foretoken(words: list[str]) -> None:
    """Placeholders (`COMMAND`) and names of commands alone are fine; options are parsed by the program, their JSON by the configuration."""
    if words[:1] == ["COMMAND"] or words[-1] == "--help":
        return
    assert words[0] in PAGES, words
    if words[0] == "train":
        if any(word.startswith("--") for word in words):  # not a name alone
            make_training_parser().parse_args(words[1:])
        return
    args = make_parser().parse_args(words)
    if getattr(args, "speculative_config", None):
        SpeculativeConfig.from_dict(json.loads(args.speculative_config))


def code_in(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)


@pytest.mark.parametrize(("path", "code"), [(p.name, c) for p in DOCUMENTS for c in code_in(p)])
def test_code_calls_what_there_is(path, code):
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("client", "backend"):
            module = __import__(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in ("client.stream", "client.generate"):
            assert {k.arg for k in node.keywords} <= set(PARAMETERS)


def test_the_configuration_page_is_current():
    assert PAGE.read_text() == make_page(), "run `make docs`"


def test_every_input_and_output_is_explained():
    text = (ROOT / "docs/api.md").read_text()
    config = (ROOT / "model_repository/standalone/decode/config.pbtxt").read_text()
    assert [n for n in re.findall(r'\{ name: "(\w+)"', config) if f"`{n}`" not in text] == []
    assert [n for n in PARAMETERS if f"`{n}`" not in text] == []


def test_limits_of_a_request_are_said():
    text = (ROOT / "docs/api.md").read_text()
    rows = [line.split(" | ") for line in text.partition("### Inputs of `decode`")[2].splitlines() if line.startswith("| `")]
    limits = {"n": sampling_params.MAX_COMPLETIONS, "logprobs": sampling_params.MAX_LOGPROBS, "stop": sampling_params.MAX_STOP_STRINGS}
    limits |= {"stop_token_ids": sampling_params.MAX_STOP_TOKEN_IDS, "logit_bias": sampling_params.MAX_LOGIT_BIASES}
    for name, limit in limits.items():
        assert f"{limit:,}" in next(first for first, *_ in rows if f"`{name}`" in first), name


def test_the_tree_names_every_part():
    """Folders of code, and the engine's modules."""
    tree = (ROOT / "README.md").read_text().partition("\n## The tree\n")[2].partition("\n## ")[0]
    folders = [p.parent for top in ("backend", "kernels", "client", "deploy") for p in (ROOT / top).glob("*/__init__.py")]
    modules = [p for top in ("backend", "client", "deploy") for p in (ROOT / top).glob("[!_]*.py")]
    assert [name_of(p) for p in folders if f"{p.name}/" not in tree] + [name_of(p) for p in modules if p.name not in tree] == []


def test_commands_run_from_the_venv():
    assert [(p.name, line) for p in DOCUMENTS for line in re.findall(r"^    (?:foretoken|locust|python|pip) .*", p.read_text(), re.M)] == []
    # Within a text too, unless a command's name alone stands for it.
    assert [(p.name, line) for p in DOCUMENTS for line in re.findall(r"`foretoken \w+ [^`]+`", p.read_text())] == []


def test_every_alert_has_advice():
    alerts = set(re.findall(r"alert: (\w+)", (ROOT / "deploy/prometheus/alerts.yml").read_text()))
    assert set(re.findall(r"`(Foretoken\w+)`", (ROOT / "docs/operations.md").read_text())) == alerts


def test_figures_are_those_of_the_results():
    """Ratios in the pages' tables are in benchmarks/RESULTS.md."""
    results = (ROOT / "benchmarks/RESULTS.md").read_text()
    for path in DOCUMENTS:
        for line in path.read_text().splitlines():
            if line.startswith("|"):
                assert [n for n in re.findall(r"(?<![\w.:-])\d+\.\d\d(?![\w.])", line) if n not in results] == [], f"{path.name}: {line}"


class TestHelpPages:
    def test_every_command_has_one(self, capsys):
        for name in PAGES:
            if name != "train":
                with pytest.raises(SystemExit) as stop:
                    make_parser().parse_args([name, "--help"])
                assert stop.value.code == 0
                page = capsys.readouterr().out
                assert page.startswith(f"usage: foretoken {name}")

    def test_every_option_says_what_it_does(self):
        parser = make_parser()
        (commands,) = [a for a in parser._actions if isinstance(a.choices, dict)]
        for name, page in commands.choices.items():
            mute = [a.option_strings or a.dest for a in page._actions if not a.help]
            assert not mute, f"foretoken {name}: {mute}"

    @pytest.mark.parametrize("text", [EPILOG, *(end for _, _, end in PAGES.values())])
    def test_examples_work(self, text):
        for line in text.splitlines():
            if line.startswith("  foretoken "):
                command = re.split(r"\s{2,}", line.strip())[0].partition(" < ")[0].replace("$'", "'")
                check_foretoken(shlex.split(command)[1:])
