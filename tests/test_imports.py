"""Who may import whom, read from every file's syntax tree: an arrow that points back ends in one large module."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.together import FORETOKEN

ROOT = Path(__file__).parent.parent
PACKAGES = ("backend", "kernels", "client", "deploy", "model_repository")
PROJECT = (*PACKAGES, "training", "benchmarks", "tests")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name."""

    file: str
    line: int
    module: str
    is_type_only: bool
    """Under `if TYPE_CHECKING:`, so it does not happen at run time."""

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def is_in(self, *modules: str) -> bool:
        return any(self.module == m or self.module.startswith(f"{m}.") for m in modules)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def read_imports(source: str, file: str) -> list[Import]:
    """All imports, those inside functions too. `from package import module` counts as package.module."""
    found: list[Import] = []
    package = file.split("/")[:-1]

    def visit(node: ast.AST, is_type_only: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, is_type_only)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(file, node.lineno, alias.name, is_type_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])]) if node.level else node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}" if base else alias.name
                found.append(Import(file, node.lineno, full if is_module(full) else base, is_type_only))
        for child in ast.iter_child_nodes(node):
            visit(child, is_type_only)

    visit(ast.parse(source), False)
    return found


@functools.cache
def all_imports() -> list[Import]:
    return [i for path in FILES for i in read_imports(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())]


def imports_of(*places: str) -> list[Import]:
    """The imports of files, or of all files in folders."""
    for place in places:
        assert (ROOT / place).exists(), f"{place} is gone: the rule about it holds nothing"
    return [i for i in all_imports() if any(i.file == p or i.file.startswith(f"{p}/") for p in places)]


def of_project(imports: list[Import]) -> list[Import]:
    return [i for i in imports if i.top in PROJECT]


def none_of(imports: list[Import], rule: str) -> None:
    assert not imports, f"{rule}:\n" + "\n".join(map(str, imports))


# -- the reader itself ----------------------------------------------------------------------------------------------------------


def test_the_reader_sees_every_kind_of_import() -> None:
    source = """
import os, backend.engine as e
from backend import errors, LLM
from backend.core import Request
from .prefix_cache import ROOT
from . import pages
from .. import kernels
if TYPE_CHECKING:
    import torch
    from client import Client
else:
    import numpy
def f():
    try:
        import deploy.launcher
    except ImportError:
        from client.sync import Client
class C:
    import json
"""
    found = {(i.module, i.is_type_only) for i in read_imports(source, "backend/example.py")}
    assert found == {
        ("os", False),
        ("backend.engine", False),
        ("backend.errors", False),
        ("backend", False),
        ("backend.core", False),
        ("backend.prefix_cache", False),
        ("backend.pages", False),
        ("kernels", False),
        ("torch", True),
        ("client", True),
        ("numpy", False),
        ("deploy.launcher", False),
        ("client.sync", False),
        ("json", False),
    }


def test_there_is_something_to_read() -> None:
    assert {i.file.partition("/")[0] for i in all_imports()} >= set(PACKAGES)
    assert len(of_project(all_imports())) > 60


# -- the rules ------------------------------------------------------------------------------------------------------------------


def test_client_imports_no_sibling() -> None:
    none_of([i for i in of_project(imports_of("client")) if not i.is_in("client")], "a client needs tritonclient, and nothing of the server")


def test_the_gateway_is_an_extra() -> None:
    """A client, and the command line without `foretoken gateway`, need none of what it needs."""
    needs = ("fastapi", "starlette", "uvicorn", "pydantic", "orjson")
    none_of([i for i in imports_of("client", "deploy") if i.is_in(*needs) and not i.file.startswith("client/gateway/")], "the gateway is an extra")
    none_of([i for i in of_project(imports_of("client")) if i.is_in("client.gateway") and not i.file.startswith("client/gateway/")], "never back")


def test_deploy_imports_configuration_at_most() -> None:
    allowed = (
        "deploy",
        "backend.config",
        "backend.speculative_config",
        "backend.speculative_names",
        "backend.disaggregation_config",
        "backend.quantization_config",
        "backend.other_servers",
        "backend.section",
        "backend.errors",
        "backend.model_files",
        "backend.model_checks",
        "backend.tokenizer_checks",
        "backend.model_sources",
        "backend.sampling_defaults",
        "backend.token_map",
        "backend.version",
        "kernels.toolchain",
        "backend.drafter_checks",
    )
    bad = [i for i in of_project(imports_of("deploy")) if not i.is_in(*allowed)]
    bad = [i for i in bad if not (i.is_in("client") and i.file in ("deploy/cli.py", "deploy/demo.py", "deploy/load/locustfile.py"))]
    bad = [i for i in bad if (i.file, i.module) != ("deploy/named_files.py", "client.gateway.keys")]  # which imports nothing of its package
    bad = [i for i in bad if (i.file, i.module) != ("deploy/named_files.py", "client.headers")]  # the same
    bad = [i for i in bad if (i.file, i.module) != ("deploy/cli.py", "training.command")]  # `foretoken train` is that program
    writers = ("backend.models.writing", "backend.models.gguf_folder", "backend.models.inspection")  # `foretoken quantize` and others, the same
    writers += ("training.data",)  # `foretoken token-map` reads texts
    bad = [i for i in bad if i.file != "deploy/model_commands.py" or i.module not in writers]
    bad = [i for i in bad if i.module != "training.heldout"]  # where load tests take their prompts from: names of files
    none_of(bad, "the launcher starts without torch and without the engine")


def test_model_repository_imports_adapters_only() -> None:
    none_of(
        [i for i in of_project(imports_of("model_repository")) if not i.is_in("backend.adapters", "backend.own_process")], "a model.py holds no logic"
    )


def test_adapters_alone_know_triton() -> None:
    none_of(
        [i for i in all_imports() if i.is_in("triton_python_backend_utils") and not i.file.startswith("backend/adapters/")],
        "the engine runs without Triton",
    )
    assert any(i.is_in("triton_python_backend_utils") for i in imports_of("backend/adapters"))


PURE = (
    "scheduler",
    "limits",
    "fetches",
    "waiting",
    "pages",
    "prefix_cache",
    "core",
    "sampling_params",
    "structured_outputs",
    "config",
    "speculative_config",
    "request_speculation",
    "disaggregation_config",
    "quantization_config",
    "speculative_names",
    "trees",
    "section",
    "errors",
)


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_each_other_only(name: str) -> None:
    allowed = [f"backend.{other}" for other in PURE]
    imports = imports_of(f"backend/{name}.py")
    none_of([i for i in of_project(imports) if not i.is_in(*allowed)], f"{name} is below the engine")
    none_of([i for i in imports if i.top == "torch" and not i.is_type_only], f"{name} handles integers and names")
    below = {"core": ("backend.sampling_params",), "sampling_params": ("backend.structured_outputs",), "errors": (), "structured_outputs": ()}
    if name in below:
        none_of([i for i in of_project(imports) if not i.is_in(*below[name])], f"{name} imports no other sibling")


@pytest.mark.parametrize("name", ["scheduler", "limits", "fetches", "waiting", "pages", "prefix_cache"])
def test_integers_only(name: str) -> None:
    none_of([i for i in imports_of(f"backend/{name}.py") if i.top in ("torch", "numpy")], f"{name} does not even name a tensor")


def test_the_planner_handles_integers() -> None:
    none_of([i for i in imports_of("backend/planner.py") if i.top == "torch" and not i.is_type_only], "a plan is integers only")


LEVELS = (
    ("errors", "core", "keyed_calls", "sampling_params", "schema_numbers", "structured_outputs", "version"),
    ("tools",),
    ("section", "speculative_names", "other_servers"),
    (
        "config",
        "speculative_config",
        "request_speculation",
        "disaggregation_config",
        "quantization_config",
        "model_files",
        "chat_template",
        "final_message",
        "detokenizer",
        "limited_process",
        "joiners",
        "metrics",
        "sampling_defaults",
        "trees",
    ),
    ("vocabularies", "special_tokens", "shared_tokens", "token_map", "budget"),
    (
        "pages",
        "precedence",
        "prefixes",
        "text",
        "thought",
        "truncation",
        "chunk_limit",
        "parallel",
        "quantization",
        "kv_store",
        "devices",
        "heap",
        "own_process",
        "models",
        "model_checks",
        "tokenizer_checks",
        "drafter_checks",
        "model_sources",
        "sentencepiece_file",
        "tiktoken_file",
    ),
    ("prefix_cache", "drafters", "grammar"),
    ("fetches", "limits", "waiting"),
    ("scheduler", "intake", "open_requests", "step"),
    ("planned",),
    ("step_drafting", "step_grammars", "rank_processes", "rank_hello"),
    ("planner",),
    ("hand_offs", "booking", "group", "following", "engine_parts"),
    ("launching",),
    ("under_way",),
    ("engine",),
    ("disaggregation",),
    ("follower", "engine_process"),
    ("llm", "adapters"),
)
"""Each part of backend imports parts of its own level and of those before it."""


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_imports_point_one_way() -> None:
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    parts = {
        part_of(f"backend.{path.relative_to(ROOT / 'backend').with_suffix('').parts[0]}") for path in FILES if path.is_relative_to(ROOT / "backend")
    }
    assert parts - {"__init__"} == set(level), "each part has its level"
    inside = [i for i in imports_of("backend") if i.is_in("backend") and i.file != "backend/__init__.py"]
    bad = [i for i in inside if level[part_of(i.module)] > level[i.file.split("/")[1].removesuffix(".py")]]
    none_of(bad, f"levels: {LEVELS}")


def test_nothing_imports_in_a_circle() -> None:
    """Not even inside functions."""
    graph: dict[str, set[str]] = {}
    for i in of_project(all_imports()):
        own = i.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if not i.is_type_only and own != i.module and own != "backend":  # which loads LLM when somebody asks for it
            graph.setdefault(own, set()).add(i.module)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


METHODS = ("ngram", "suffix", "mtp", "naive", "draft_model", "eagle", "eagle3", "dflash", "dspark", "medusa", "hydra", "mlp_speculator")
METHOD_FILES = {
    "backend/speculative_config.py",
    "backend/speculative_names.py",
    "backend/drafter_checks.py",
    "backend/models/dflash_spec.py",
    "backend/models/eagle_spec.py",
    "backend/models/heads_spec.py",
    "backend/adapters/decode.py",
    "backend/engine_process/counts.py",
    "backend/adapters/mtp_drafter.py",
}
"""What a user writes, what a drafter's folder is checked for, and the adapters of what a user runs. The detokenizer's "suffix" is Hugging Face's."""


def test_only_drafters_name_methods() -> None:
    bad = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("backend/") or name.startswith("backend/drafters/") or name in METHOD_FILES:
            continue
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        constants = [n for n in nodes if isinstance(n, ast.Constant) and n.value in METHODS and name != "backend/detokenizer.py"]
        bad += [f"{name}:{n.lineno} names {n.value}" for n in constants]
    assert not bad, "\n".join(bad)
    parts = ("recurrent", "heads", "ngram", "suffix", "hybrid")
    named = (*(f"backend.drafters.{name}" for name in parts), *(f"backend.models.{name}" for name in ("mtp", "eagle", "heads", "draft")))
    outside = [i for i in imports_of("backend", "kernels") if not i.file.startswith("backend/drafters/") and i.file not in METHOD_FILES]
    none_of([i for i in outside if i.is_in(*named)], "a step or an engine knows drafters by their protocol")


def test_drafters_import_what_they_draft_with() -> None:
    names = (
        "drafters",
        "budget",
        "model_checks",
        "drafter_checks",
        "core",
        "sampling_params",
        "config",
        "speculative_config",
        "section",
        "errors",
        "models",
        "kv_store",
        "model_files",
        "pages",
        "parallel",
    )
    allowed = (*(f"backend.{name}" for name in names), "kernels")
    none_of([i for i in of_project(imports_of("backend/drafters")) if not i.is_in(*allowed)], "a drafter knows neither engine nor scheduler")


def test_the_step_is_below_the_engine() -> None:
    """A worker on another rank has no scheduler, and decides nothing."""
    above = tuple(
        f"backend.{name}" for name in ("engine", "scheduler", "planner", "pages", "prefix_cache", "budget", "chunk_limit", "intake", "open_requests")
    )
    none_of([i for i in imports_of("backend/step", "backend/models", "backend/kv_store.py") if i.is_in(*above)], "they compute what a plan says")


def test_backend_knows_nobody_above_it() -> None:
    bad = [i for i in of_project(imports_of("backend")) if not i.is_in("backend", "kernels")]
    none_of(bad, "the engine is used by servers and clients and knows none")
    inside = [i for i in imports_of("backend") if i.is_in("backend.adapters") and not i.file.startswith("backend/adapters/")]
    none_of(inside, "adapters -> engine, never back")


def test_kernels_import_nothing_of_the_project() -> None:
    none_of([i for i in of_project(imports_of("kernels")) if not i.is_in("kernels")], "kernels know tensors only")


def test_pycuda_has_one_importer() -> None:
    none_of([i for i in all_imports() if i.top == "pycuda" and i.file != "kernels/_load.py"], "kernels/_load.py owns the CUDA context")


def test_the_kernels_package_imports_nothing() -> None:
    """transformers probes a package of that name."""
    none_of([i for i in imports_of("kernels/__init__.py") if i.module != "__future__"], "importing `kernels` has no side effects")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_compiles(path: Path) -> None:
    """On this interpreter, and as the oldest one that pyproject.toml promises."""
    source = path.read_text("utf-8")
    compile(source, str(path), "exec", dont_inherit=True)
    ast.parse(source, str(path), feature_version=(3, 10))


# -- at run time ----------------------------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted(m for m in sys.modules if '.' not in m), sep='\\n')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("backend.text", {"torch", "transformers", "tritonclient"}),
        ("deploy.launcher", {"torch", "transformers", "tritonclient", "grpc", "tokenizers"}),
        ("client.gateway.keys", {"torch", "numpy", "tritonclient", "grpc", "fastapi"}),
        ("client.headers", {"torch", "numpy", "tritonclient", "grpc", "fastapi"}),
        ("deploy.cli", {"torch", "transformers", "tritonclient", "grpc", "tokenizers", "training"}),
        ("backend.rank_processes", {"torch", "tokenizers", "llguidance"}),
        ("backend.engine_process.client", {"torch", "tokenizers", "llguidance"}),
        ("backend.scheduler", {"torch", "numpy"}),
        ("backend.config", {"torch", "numpy"}),
        ("client", {"torch", "backend", "fastapi", "uvicorn"}),
        ("client.gateway.cli", {"torch", "backend", "fastapi", "uvicorn"}),
        ("client.gateway.app", {"torch", "backend", "uvicorn", "openai"}),
        ("kernels", {"torch", "numpy"}),
        ("backend", {"torch", "numpy"}),
    ],
)
def test_light_imports_stay_light(module: str, absent: set[str]) -> None:
    """The tokenizer model and the launcher start in a second: torch alone takes longer, and memory for every stub process."""
    loaded = loaded_by(f"import {module}")
    assert module.partition(".")[0] in loaded
    assert not loaded & absent


@pytest.mark.parametrize("model", ["standalone/decode", "standalone/mtp_drafter", "standalone/tokenizer", "prefill/prefill", "follower/decode"])
def test_modules_are_this_projects_in_whatever_folder_it_runs(tmp_path: Path, model: str) -> None:
    """One may have a `backend` of its own, and is where a server's stub looks first."""
    for name in ("backend", "deploy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('another one')")
    assert subprocess.run([*FORETOKEN, "serve", "--help"], cwd=tmp_path, capture_output=True).returncode == 0
    program = f"import runpy, sys; sys.path.insert(0, ''); runpy.run_path({str(ROOT / 'model_repository' / model / '1' / 'model.py')!r})"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'triton_python_backend_utils'", "all else was found"


def test_the_check_for_torch_can_fail() -> None:
    assert "torch" in loaded_by("from backend import LLM")
