"""Flags and environment of other servers' serve commands (vLLM, FastDeploy, PaddleNLP, SGLang), so that a pasted command starts, or says what
differs (backend/other_servers/)."""

from __future__ import annotations

import argparse
import json
import re
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from backend.errors import ConfigError
from backend.other_servers.kinds import Alias
from backend.other_servers.tables import LISTS, OTHERS, SHORT_FLAGS
from backend.section import closest

_SPECULATE = {
    "SPECULATE_METHOD": "method",
    "SPECULATE_MODEL_PATH": "model",
    "SPECULATE_MAX_DRAFT_TOKEN_NUM": "num_speculative_tokens",
    "SPECULATE_MODEL_QUANT_TYPE": "quantization",
}
_STRATEGIES = {"SPECULATE_VERIFY_USE_TOPK": "greedy", "SPECULATE_VERIFY_USE_TARGET_SAMPLING": "target_match"}
_BESIDE = {
    "MODEL_PATH": "--model {}", "MP_NUM": "--tensor-parallel-size {}", "MP_NNODE": "--nnodes {}", "POD_0_IP": "--master {}:29500",
    "BATCH_SIZE": "--max-batch-size {}", "SERVICE_HTTP_PORT": "--port {}",
}  # fmt: skip
"""Names so common that they are looked at beside those above alone."""
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
"""Values of switches."""
_GLUED = re.compile(r"(?<=[\w.])--[a-z][\w-]*$")
"""A flag at a word's end: of a line that goes on by a backslash with no space before it."""
_PREFIXES = {"FD_": "FastDeploy", "VLLM_": "vLLM", "SGLANG_": "SGLang", "SGL_": "SGLang"}


def explain_environment(environment: Mapping[str, str]) -> list[str]:
    """A line for what the environment would tell another server: none of it acts here."""
    found = {name: value for name, value in environment.items() if value}
    lines = []
    if given := [name for name in _SPECULATE if name in found]:
        told: dict[str, Any] = {_SPECULATE[n]: int(found[n]) if found[n].isdigit() else found[n] for n in given}
        lines.append(f"{', '.join(given)} in the environment is not read: say --speculative-config '{json.dumps(told)}'")
        if named := [f"{n} as {flag.format(found[n])}" for n, flag in _BESIDE.items() if n in found]:
            lines.append(f"nor are others: say {', '.join(named)}")
    lines += [
        f'{name} in the environment is not read: say "verify_strategy": "{strategy}" in --speculative-config'
        for name, strategy in _STRATEGIES.items()
        if found.get(name) == "1"
    ]
    for prefix, program in _PREFIXES.items():
        if names := sorted(n for n in found if n.startswith(prefix)):
            lines.append(f"{', '.join(names)} in the environment: of {program}, and without effect here")
    return lines


def check_spaces(values: Mapping[str, Any], own: Collection[str]) -> None:
    """Raises ConfigError for an option that hangs on the word before it."""
    for key, value in values.items():
        glued = _GLUED.search(value) if isinstance(value, str) else None
        if glued and (name := glued[0][2:].replace("-", "_")) and (name in own or name in OTHERS) and not Path(value).exists():
            raise ConfigError(f"{key} {value!r:.80}: a space is missing before {glued[0]}")


def read_scalar(text: str) -> Any:
    """A flag's value as a file would have it: a number, true or false, or the text itself."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def add_other_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of other servers, which `--help` does not list: those that the parser does not have."""
    taken = {flag for action in parser._actions for flag in action.option_strings}
    for key, other in OTHERS.items():
        flags = [flag for flag in (f"--{key.replace('_', '-')}", *SHORT_FLAGS.get(key, ())) if flag not in taken]
        if not flags:
            continue
        if other.is_switch:
            parser.add_argument(*flags, dest=key, action=argparse.BooleanOptionalAction, default=None, help=argparse.SUPPRESS)
        else:
            # What has no effect, or is refused, may stand alone, as Hugging Face's parser takes switches.
            nargs = "*" if key in LISTS else None if isinstance(other, Alias) else "?"
            is_text = isinstance(other, Alias) and other.own.endswith("model")
            kind = str if is_text else read_scalar
            parser.add_argument(*flags, dest=key, nargs=nargs, const=True if nargs == "?" else None, type=kind, default=None, help=argparse.SUPPRESS)


class ServeParser(argparse.ArgumentParser):
    """Reads flags as others write them: `--max_num_seqs` for `--max-num-seqs`, `--speculative-config.method ngram` for a key of an object, and a
    switch's value after it (`--enable-chunked-prefill false`, `--trust-remote-code=1`).

    A flag is written in full: an abbreviation that is clear today may be another's name tomorrow.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options["allow_abbrev"] = False
        super().__init__(*args, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, left = super().parse_known_args(None if args is None else self._rewrite(list(args)), namespace)
        if left:
            name = left[0].partition("=")[0]
            if not name.startswith("-"):
                self.error(f"one word too many: {name!r:.80}")
            own = [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
            self.error(f"unknown option {name}{closest(name, own) or closest(name, self._option_string_actions)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Without the list of all options, behind which it would be looked for."""
        self.exit(2, f"{self.prog}: error: {message}\n({self.prog} --help lists the options)\n")

    def _rewrite(self, words: list[str]) -> list[str]:
        written: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        left = deque(words)
        while left:
            word = left.popleft()
            flag, has_value, value = word.partition("=")
            is_short_object = flag.partition(".")[0] in self._option_string_actions and "." in flag  # -cc.mode=3
            if flag == "--" or not (flag.startswith("--") or is_short_object):
                written.append(word)
                continue
            flag = flag.replace("_", "-")
            name, dot, key = flag.partition(".")
            if dot and name in self._option_string_actions:
                objects.setdefault(name, {})[key.replace("-", "_")] = read_scalar(value if has_value else left.popleft() if left else "")
                continue
            if isinstance(self._option_string_actions.get(flag), argparse.BooleanOptionalAction) and not flag.startswith("--no-"):
                if has_value and value.lower() in _SWITCHES:
                    written.append(flag if _SWITCHES[value.lower()] else f"--no-{flag[2:]}")
                    continue
                # A folder may be called 1, as those of Triton's versions are.
                if not has_value and left and left[0].lower() in _SWITCHES and not Path(left[0]).exists():
                    written.append(flag if _SWITCHES[left.popleft().lower()] else f"--no-{flag[2:]}")
                    continue
            written.append(flag + has_value + value)
        return [*written, *(f"{name}={json.dumps(values)}" for name, values in objects.items())]
