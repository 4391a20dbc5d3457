"""Options of other servers' serve commands (vLLM, FastDeploy, PaddleNLP, SGLang), so that a pasted command starts, or says what differs.

None is lost without a word: it is another name of an option here, or nothing is needed and one line says why, or it is refused with the name of what
does it here. An option that this version has itself is not looked for in these tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from backend.errors import ConfigError
from backend.section import closest
from deploy.other_kinds import Alias, Needless, Refused
from deploy.other_tables import LISTS, OTHERS, SHORT_FLAGS, VALUES

_SPECULATE = {
    "SPECULATE_METHOD": "method",
    "SPECULATE_MODEL_PATH": "model",
    "SPECULATE_MAX_DRAFT_TOKEN_NUM": "num_speculative_tokens",
    "SPECULATE_MODEL_QUANT_TYPE": "quantization",
}
_STRATEGIES = {"SPECULATE_VERIFY_USE_TOPK": "greedy", "SPECULATE_VERIFY_USE_TARGET_SAMPLING": "target_match"}
_BESIDE = {
    "MODEL_PATH": "--model", "MP_NUM": "--tensor-parallel-size", "BATCH_SIZE": "--max-batch-size",
    "SERVICE_HTTP_PORT": "--port", "BLOCK_RATIO": None, "BLOCK_BS": None,
}  # fmt: skip
"""Names so common that they are looked at beside those above alone. None: nothing is needed."""
_PREFIXES = {"FD_": "FastDeploy", "VLLM_": "vLLM", "SGLANG_": "SGLang", "SGL_": "SGLang"}


def explain_environment(environment: Mapping[str, str]) -> list[str]:
    """A line for what the environment would tell another server: none of it acts here."""
    found = {name: value for name, value in environment.items() if value}
    lines = []
    if given := [name for name in _SPECULATE if name in found]:
        told: dict[str, Any] = {_SPECULATE[n]: int(found[n]) if found[n].isdigit() else found[n] for n in given}
        lines.append(f"{', '.join(given)} in the environment is not read: say --speculative-config '{json.dumps(told)}'")
        beside = {n: flag for n, flag in _BESIDE.items() if n in found}
        if named := [f"{n} as {flag} {found[n]}" for n, flag in beside.items() if flag]:
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


@dataclass
class Translation:
    """A configuration in own keys."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """A line for each option that has no effect, which says why."""
    sources: dict[str, str] = field(default_factory=dict)
    """What own keys were given as, where that is another name."""

    def explain(self, error: Exception) -> str:
        """An error's message, with the names that its keys were given as."""
        message = str(error)
        named = [f"{own} was given as {theirs}" for own, theirs in self.sources.items() if own in message and theirs not in message]
        return f"{message} ({'; '.join(named)})" if named else message

    def put(self, key: str, value: Any, given_as: str) -> None:
        section, _, name = key.rpartition(".")
        place = self.values
        if section:
            place = self.values.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{section} must be an object of keys and values, got {place!r:.80}")
        if name in place and place[name] != value:
            raise ConfigError(f"{key} is given twice: {place[name]!r:.80}, and {value!r:.80} as {given_as}")
        place[name] = value
        if given_as != key:
            self.sources[name] = given_as


def translate(values: Mapping[str, Any], own: Collection[str]) -> Translation:
    """Keys of any server in those of this one; unknown ones stay as they are. Raises ConfigError for what is done otherwise here, or not at all."""
    found = Translation({key: _own_value(key, value) for key, value in values.items() if key in own})
    if isinstance(nested := found.values.get("speculative_config"), dict):
        found.values["speculative_config"] = dict(nested)
    refused = []
    for given_as, value in values.items():
        if given_as in own:
            continue
        key, other = given_as, OTHERS.get(given_as)
        while isinstance(other, Alias):
            if value in other.unless:
                other = Needless(other.why)
                break
            key, value = other.own, not value if other.is_inverted else value
            other = None if key.split(".")[0] in own else OTHERS.get(key)
        if isinstance(other, Needless):
            found.notes.append(f"{given_as} has no effect, and none is needed: {other.why}")
        elif isinstance(other, Refused):
            if value and value not in other.unless:
                refused.append(f"{given_as} {value!r:.80} is not an option here: {other.instead}")
        else:
            found.put(key, _own_value(key, value), given_as)
    if refused:
        raise ConfigError("; ".join(refused))
    return found


def _own_value(key: str, value: Any) -> Any:
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str | int) else value


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
            nargs = "*" if key in LISTS else None
            is_text = isinstance(other, Alias) and other.own.endswith("model")
            parser.add_argument(*flags, dest=key, nargs=nargs, type=str if is_text else read_scalar, default=None, help=argparse.SUPPRESS)


class ServeParser(argparse.ArgumentParser):
    """Reads flags as others write them: `--max_num_seqs` for `--max-num-seqs`, and `--speculative-config.method ngram` for a key of an object.

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
        left = iter(words)
        for word in left:
            flag, has_value, value = word.partition("=")
            is_short_object = flag.partition(".")[0] in self._option_string_actions and "." in flag  # -cc.mode=3
            if flag == "--" or not (flag.startswith("--") or is_short_object):
                written.append(word)
                continue
            flag = flag.replace("_", "-")
            name, dot, key = flag.partition(".")
            if dot and name in self._option_string_actions:
                objects.setdefault(name, {})[key.replace("-", "_")] = read_scalar(value if has_value else next(left, ""))
            else:
                written.append(flag + has_value + value)
        return [*written, *(f"{name}={json.dumps(values)}" for name, values in objects.items())]
