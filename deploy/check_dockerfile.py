"""Runs the Dockerfile's CPU target without a container engine: every instruction, in a clean Debian root, up to a server that is healthy.

    debootstrap --variant=minbase --include=python3-dev,python3-venv,libpython3.11,ca-certificates bookworm BASE
    python -m deploy.check_dockerfile BASE [--target cpu] [--bind PATH ...] [--env NAME ...]

Needs root, for chroot and mount. BASE stands for the image that the target starts from: python:3.11-slim-bookworm is Debian 12 with a Python 3.11
of its own, BASE has Debian's. Not checked: layers, caches and what the engine itself does (the shared memory's size, health checks' times).
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).parent.parent
HEALTHY_SECONDS = 120
STOP_SECONDS = 60


@dataclass
class Stage:
    """A stage of the Dockerfile: its name, where it starts from, its instructions."""

    name: str
    source: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, keyword: str) -> str:
        return next((text for k, text in reversed(self.instructions) if k == keyword), "")


def parse_dockerfile(text: str) -> dict[str, Stage]:
    """Stages by name; lines that end in a backslash are joined, comments left out."""
    stages: dict[str, Stage] = {}
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "FROM":
            source, _, name = rest.partition(" AS ")
            stages[name] = stage = Stage(name, source)
        elif keyword and stages:
            stage.instructions.append((keyword, rest.strip()))
    return stages


def read_dockerignore(text: str) -> tuple[list[str], list[str]]:
    """(names let in, patterns left out) of a file that leaves out everything first."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*", "only a .dockerignore that begins with * is understood"
    return [line[1:] for line in lines if line.startswith("!")], [line.removeprefix("**/") for line in lines[1:] if not line.startswith("!")]


class Image:
    """A stage's root folder while its instructions run."""

    def __init__(self, root: Path, binds: list[Path], environment: dict[str, str]) -> None:
        self.root = root
        self.workdir = "/"
        self.user = "0:0"
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **environment}
        self._binds = binds

    @contextlib.contextmanager
    def mounted(self, is_read_only: bool = False) -> Iterator[None]:
        """/proc, /dev, shared memory and the folders named. is_read_only: as deploy/compose.yaml runs it, with /tmp and the state alone writable."""
        places = [("proc", "proc", []), ("/dev", "dev", ["--bind"]), ("tmpfs", "dev/shm", ["-o", "size=1g"])]
        places += [(str(path), str(path).lstrip("/"), ["--bind", "-o", "ro"]) for path in self._binds]
        if is_read_only:
            owner = "uid={},gid={}".format(*self.user.split(":"))
            places = [(str(self.root), "", ["--bind", "-o", "ro"]), *places, ("tmpfs", "tmp", []), ("tmpfs", "var/lib/foretoken", ["-o", owner])]
        with contextlib.ExitStack() as stack:
            for source, target, options in places:
                folder = self.root / target
                folder.mkdir(parents=True, exist_ok=True)
                kind = options if "--bind" in options else ["-t", source, *options]
                subprocess.run(["mount", *kind, source, str(folder)], check=True)
                stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            yield

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        words = ["chroot", f"--userspec={self.user}", str(self.root), "/usr/bin/env", f"--chdir={self.workdir}", *command]
        return subprocess.Popen(words, env=self.environment, start_new_session=True)

    def run(self, command: list[str]) -> int:
        return self.start(command).wait()

    def path(self, place: str) -> Path:
        return self.root / os.path.join(self.workdir, place).lstrip("/")

    def expand(self, text: str) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda m: self.environment.get(m[1], ""), text)


def copy_context(target: Path) -> None:
    """What `COPY . .` copies."""
    names, patterns = read_dockerignore((PROJECT / ".dockerignore").read_text())
    for name in names:
        source = PROJECT / name
        if source.is_dir():
            left_out = lambda folder, entries: {e for e in entries if any(fnmatch.fnmatch(e, p) for p in patterns)}  # noqa: E731
            shutil.copytree(source, target / name, ignore=left_out, symlinks=True)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)


def build(stage: Stage, base: Path, folder: Path, binds: list[Path], given: dict[str, str], stages: dict[str, Stage]) -> Image:
    """Runs a stage's instructions, those of the stages it copies from first. Raises RuntimeError naming the one that fails."""
    image = Image(folder / stage.name, binds, given)
    subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(image.root)], check=True)
    shutil.copy("/etc/resolv.conf", image.root / "etc/resolv.conf")
    with image.mounted():
        for keyword, text in stage.instructions:
            print(f"[{stage.name}] {keyword} {text}", flush=True)
            started = time.monotonic()
            if keyword == "RUN":
                command = re.sub(r"^(--\S+ )+", "", text)
                if status := image.run(["/bin/sh", "-c", command]):
                    raise RuntimeError(f"stage {stage.name}: RUN {command}: exit status {status}")
                print(f"[{stage.name}] done after {time.monotonic() - started:.1f} s", flush=True)
            elif keyword == "COPY" and text.startswith("--from="):
                source, place, target = text.removeprefix("--from=").split()
                built = build(stages[source], base, folder, binds, given, stages)
                subprocess.run(["cp", "-a", str(built.path(place)), str(image.path(target))], check=True)
                shutil.rmtree(built.root)
            elif keyword == "COPY":
                assert text == ". .", text
                copy_context(image.path("."))
            elif keyword == "ENV":
                image.environment |= {k: image.expand(v) for k, v in (word.split("=", 1) for word in shlex.split(text))}
            elif keyword == "WORKDIR":
                image.workdir = text
                image.path(".").mkdir(parents=True, exist_ok=True)
            elif keyword == "USER":
                image.user, image.environment["HOME"] = text, "/nonexistent"
    return image


def serve(image: Image, stage: Stage) -> None:
    """Starts what the image starts, waits until its health check is content, ends it as Docker does. Raises RuntimeError."""
    command = json.loads(stage.last("ENTRYPOINT")) + json.loads(stage.last("CMD"))
    check = json.loads(re.sub(r"^(--\S+\s+)*CMD ", "", stage.last("HEALTHCHECK")))
    with image.mounted(is_read_only=True):
        process = image.start(command)
        try:
            started = time.monotonic()
            while image.run(check) != 0:
                if process.poll() is not None or time.monotonic() - started > HEALTHY_SECONDS:
                    raise RuntimeError(f"{shlex.join(command)}: not healthy after {time.monotonic() - started:.0f} s, status {process.poll()}")
                time.sleep(1)
            print(f"[{stage.name}] {shlex.join(command)}: healthy after {time.monotonic() - started:.1f} s", flush=True)
            process.terminate()
            if status := process.wait(STOP_SECONDS):
                raise RuntimeError(f"{shlex.join(command)}: exit status {status} after SIGTERM")
            print(f"[{stage.name}] ended in order after SIGTERM", flush=True)
        finally:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="a Debian root with Python")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--bind", type=Path, action="append", default=[], help="folder to show inside at the same place, such as one of wheels")
    parser.add_argument("--env", action="append", default=[], help="variable to pass on, such as PIP_FIND_LINKS")
    args = parser.parse_args()
    stages = parse_dockerfile((PROJECT / "Dockerfile").read_text())
    given = {name: os.environ[name] for name in args.env if name in os.environ}
    folder = tempfile.mkdtemp(prefix="dockerfile-", dir=args.base.parent)
    try:
        image = build(stages[args.target], args.base, Path(folder), args.bind, given, stages)
        serve(image, stages[args.target])
    except RuntimeError as error:
        print(f"check_dockerfile: {error}", file=sys.stderr)
        return 1
    finally:
        if folder not in Path("/proc/mounts").read_text():  # what is still mounted there would go too
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
