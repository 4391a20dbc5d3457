"""A model repository for the configuration at hand, and the secrets beside it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from backend.config import REPOSITORIES, REPOSITORY
from backend.disaggregation_config import is_text
from backend.errors import ConfigError
from deploy.server import LOCK_FILE, LaunchError, keep_no_bytecode
from deploy.supervision.processes import REGIONS_FILE

KEY_FILE, PASSWORD_FILE = ".key", ".scheduler-password"
"""In the repository's folder, for this user alone to read."""
PART_FOLDER = ".part"
"""There, too, while models are rendered: a start that is killed leaves no model that is there in part, which would be taken for something else."""


def render_parameters(values: dict[str, Any]) -> str:
    """config.pbtxt's `parameters` block. JSON's string escapes are the text format's too."""
    lines = [
        f"  {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(value if isinstance(value, str) else json.dumps(value))} }} }}"
        for key, value in values.items()
    ]
    return "parameters [\n" + ",\n".join(lines) + "\n]\n"


def check_repository(target: Path) -> None:
    """Raises LaunchError when the folder holds anything that was not rendered."""
    if not target.exists():
        return
    if not target.is_dir():
        raise LaunchError(f"--repository {target} is not a folder")
    models, own = {source.name for source in REPOSITORIES.glob("*/*")}, {LOCK_FILE, KEY_FILE, PASSWORD_FILE, PART_FOLDER, REGIONS_FILE}
    is_other = any(p.name not in models or not (p / "config.pbtxt").is_file() for p in target.iterdir() if p.name not in own)
    if is_other or any(target.rglob("*.safetensors")):
        raise LaunchError(f"--repository {target} holds something else; name an empty folder, or one that was rendered before")


RANKED_MODELS = ("decode", "prefill")
"""Whose instances are ranks where `parallel_config.ranks` says so."""
ONE_INSTANCE = "instance_group [ { count: 1 kind: KIND_CPU } ]"
"""Of the checked-in repositories."""

FIND_PROJECT = "Path(__file__).resolve().parents[4:5]"
"""In the checked-in model.py, which has the project around it."""


def render_instances(device: str, count: int) -> str:
    """config.pbtxt's `instance_group`: on GPUs each instance has its own, from the device's on."""
    if not device.startswith("cuda"):
        return f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]"
    first = int(device.partition(":")[2] or 0)
    return f"instance_group [ {', '.join(f'{{ count: 1 kind: KIND_GPU gpus: [ {first + i} ] }}' for i in range(count))} ]"


def render_repository(target: Path, parameters: dict[str, dict[str, Any]], device: str, source_folder: Path = REPOSITORY, num_ranks: int = 1) -> None:
    """Writes a repository like a checked-in one: its models without parameters, and those named here with theirs, which a node may have of the
    standalone one.

    Weights are referenced, not copied. num_ranks: instances of the model that decodes. Raises LaunchError when the folder holds anything that was
    not rendered.
    """
    check_repository(target)
    part = target / PART_FOLDER
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    for name in {source.name for source in REPOSITORIES.glob("*/*")}:  # it may have been of another role
        if (target / name).exists():
            (target / name).rename(part / f"{name}.old")
    sources = {source.name: source for folder in (REPOSITORY, source_folder) for source in folder.iterdir()}
    for source in (sources[name] for name in sorted({*parameters, *(own.name for own in source_folder.iterdir())})):
        text = (source / "config.pbtxt").read_text("utf-8")
        head, mark, tail = text.partition("parameters [")
        if mark and source.name not in parameters:
            continue
        version = part / source.name / "1"
        version.mkdir(parents=True)
        if mark:
            block_end = tail.index("\n]\n") + 3 if "\n]\n" in tail.split("input [")[0] else tail.index("\n") + 1
            text = head + render_parameters(parameters[source.name]) + tail[block_end:]
            if source.name != "tokenizer":
                text = text.replace(ONE_INSTANCE, render_instances(device, num_ranks if source.name in RANKED_MODELS else 1))
            program = (source / "1" / "model.py").read_text("utf-8")
            (version / "model.py").write_text(program.replace(FIND_PROJECT, f"[Path({str(REPOSITORY.parents[1])!r})]"), "utf-8")
            keep_no_bytecode(version)
        (part / source.name / "config.pbtxt").write_text(text, "utf-8")
        (part / source.name).rename(target / source.name)
    shutil.rmtree(part)


def write_secret(path: Path, secret: str) -> None:
    """For this user alone to read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f"{secret}\n")


def write_key(repository: Path) -> str:
    """A new key for RESTRICTED_APIS, in the repository's folder too, where only this user reads it."""
    key = secrets.token_hex(16)
    write_secret(repository / KEY_FILE, key)
    return key


def put_password(values: dict[str, Any], repository: Path, password: object) -> None:
    """A password of the command line goes to a file: tritonserver's configuration names that. Raises ConfigError."""
    if password is None:
        (repository / PASSWORD_FILE).unlink(missing_ok=True)
        return
    section = values["disaggregation"] = dict(values.get("disaggregation") or {})
    for key in ("scheduler_password_file", "scheduler_password_variable"):
        if section.get(key):
            raise ConfigError(f"scheduler_password is given twice: as itself, and as {key}")
    if not isinstance(password, str):  # a number of a YAML file may have lost its leading zeros
        raise ConfigError(f"scheduler_password must be a text, got one of type {type(password).__name__}: put it in quotes")
    if not password:
        raise ConfigError("scheduler_password is empty: leave it out where the Redis server wants none")
    if password != password.strip() or "\n" in password or not is_text(password):  # a file's first line cannot say it
        raise ConfigError(
            "scheduler_password has a line break, a space at an end, or bytes that are no UTF-8: "
            "put it into an environment variable, and name that as scheduler_password_variable"
        )
    write_secret(repository / PASSWORD_FILE, password)
    section["scheduler_password_file"] = str(repository / PASSWORD_FILE)
