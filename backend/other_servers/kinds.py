"""What an option of another server's serve command can be here, and why many of them change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Alias:
    """Another name. own: the key, with its section in front where it has one."""

    own: str
    is_switch: bool = False
    is_inverted: bool = False
    """True there is false here."""
    unless: tuple[Any, ...] = ()
    """Values that ask for what holds anyway, for the reason `why`."""
    why: str = ""


@dataclass(frozen=True)
class Needless:
    """Whatever it says, it would change nothing."""

    why: str
    is_switch: bool = False


@dataclass(frozen=True)
class Refused:
    """What it asks for is done otherwise, or not at all."""

    instead: str
    unless: tuple[Any, ...] = ()
    """Values that ask for nothing, beside null, false, 0 and what is empty."""
    is_switch: bool = False


Other = Alias | Needless | Refused


def each(names: str, other: Other) -> dict[str, Other]:
    """The same of several options."""
    return dict.fromkeys(names.split(), other)


def needless(why: str, switches: str = "", others: str = "") -> dict[str, Other]:
    return {**each(switches, Needless(why, is_switch=True)), **each(others, Needless(why))}


def refused(instead: str, switches: str = "", others: str = "", unless: tuple[Any, ...] = ()) -> dict[str, Other]:
    return {**each(switches, Refused(instead, is_switch=True)), **each(others, Refused(instead, unless))}


KERNELS = "kernels are chosen by the device and the shape of each product"
GRAPHS = "on a GPU steps run as CUDA graphs where one is captured, and eagerly else; the tokens are the same"
CHUNKS = "prompts are cut into the room that a step has (max_num_batched_tokens)"
PORTS = "the model's processes meet through shared memory, and nodes through Redis and NIXL: no port is needed"
LOG = "the gateway logs one line for each request, and Triton's own log goes by --log-verbose"
ONE_HOST = "one model on several hosts: say --nnodes, --node-rank and --master (docs/ranks.md); several servers: `foretoken gateway --upstream A,B`"
TLS = "TLS is for a proxy before the gateway"
TEXT_ONLY = "models of text alone are served"
SCHEDULER = "nodes find each other's load in Redis by themselves (heartbeat_seconds in the section disaggregation)"
NO_STATES = "families with recurrent states are not served"
SAMPLED = "each request says how it is sampled; what those that say nothing have is in generation_config.json in the model's folder"
WORKERS = "one gateway takes all requests; the engine is a process of its own"
WHITESPACE = "requests may say disable_any_whitespace in structured_outputs"
LORA = "adapters (LoRA) are not served; merge one into the model's weights"
EIGHT_BITS = "keys and values in 8 bits are e4m3, not integers: --kv-cache-dtype fp8"
CACHE_SCALES = "scales of keys and values are the checkpoint's (k_scale, v_scale), or found at the start: leave it out (--kv-cache-scales)"
MTP = "method mtp takes the target's hidden states whatever this says"
SUMS = "ranks sum by NCCL on GPUs, and on CPU by memory that they share or by gloo, experts' sums too"
OVERLAP = "ranks compute all tokens of a step"
SETTLED_EXPERTS = "experts stay where they were loaded"
HOST_MEMORY = "pages of keys and values are kept on the device alone"
NO_TRACES = "steps and requests are counted on the metrics port; there are no traces"
