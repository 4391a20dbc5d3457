"""What a node says of itself in Redis, and reading it: it may be of another version, or of somebody who is no node."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from typing import Any

from backend.disaggregation.records import VERSION
from backend.disaggregation.transfer import PageAddress, backend_of

logger = logging.getLogger(__name__)

TYPES: dict[str, type | tuple[type, ...]] = {
    "role": str,
    "fingerprint": str,
    "layout": dict,
    "methods": list,
    "max_model_len": int,
    "address": list,
    "load": int,
    "time": (int, float),
    "is_leaving": bool,
}


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself."""

    node_id: str
    role: str
    version: int
    fingerprint: str
    """Of its pages."""
    layout: dict[str, Any]
    """What the fingerprint is of, for messages."""
    methods: list[str]
    max_model_len: int
    address: list[dict[str, Any]]
    """`PageAddress.as_dict` of each of its ranks."""
    load: int = 0
    """Prompt tokens that it has to compute."""
    time: float = 0.0
    """When that was so, in the Redis server's seconds."""
    is_leaving: bool = False
    """It is to get no more jobs, and ends those that it has."""

    @property
    def transfer_backend(self) -> str:
        return backend_of(self.address[0]["kind"] if self.address else "")

    def differences(self, other: NodeInfo) -> str:
        """Both values of what keeps two nodes from exchanging pages; empty: nothing does."""
        if self.version != other.version:
            return f"version {self.version} here, {other.version} there"
        if self.transfer_backend != other.transfer_backend:
            return f"transfer_backend {self.transfer_backend} here, {other.transfer_backend} there"
        if self.fingerprint == other.fingerprint:
            return ""
        keys = [key for key in {**self.layout, **other.layout} if self.layout.get(key) != other.layout.get(key)]
        return ", ".join(f"{key} {self.layout.get(key)} here, {other.layout.get(key)} there" for key in keys) or "layouts differ"


def read_info(node_id: str, value: bytes) -> NodeInfo | None:
    """None: no node says this. Of another version that a node has, no more is read than that."""
    try:
        values = json.loads(value)
        if (version := values["version"]) != VERSION:
            return NodeInfo(node_id, str(values["role"]), int(version), "", {}, [], 0, [], is_leaving=bool(values.get("is_leaving")))
        wrong = [name for name, kind in TYPES.items() if not isinstance(values[name], kind)]
        if not wrong and not math.isfinite(values["time"]):  # what comes later would never be newer
            wrong = ["time"]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}")
        for own in values["address"]:
            PageAddress.from_dict(own)
        return NodeInfo(**{**values, "node_id": node_id})
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        logger.debug("node %s says what this version does not understand: %s: %s", node_id, type(error).__name__, error)
        return None
