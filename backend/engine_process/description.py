"""What `decode` says of itself when it is asked (`describe`): what gateways tell their clients, and what they choose a server by."""

from __future__ import annotations

import json
import uuid
from typing import Any

from backend.config import is_bundled
from backend.engine import Engine
from backend.version import VERSION

PROCESS = uuid.uuid4().hex
"""Another one has an empty prefix cache."""


def describe(engine: Engine, sampling_defaults: dict[str, Any]) -> str:
    """JSON. On the engine's thread: an answer also says that it steps."""
    speculative = engine.config.speculative_config
    return json.dumps(
        {
            "version": VERSION,
            "process": PROCESS,
            "max_model_len": engine.scheduler.max_model_len,
            "max_batch_size": engine.config.max_batch_size,
            "method": speculative.method,
            "methods": list(speculative.loaded_methods),
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "has_chat_template": engine.tokenizer.has_chat_template,
            "template_variables": engine.tokenizer.template_variables,
            "is_bundled": is_bundled(engine.config.model),
            "sampling_defaults": sampling_defaults,
            "num_running": len(engine.scheduler.running),
            "num_waiting": engine.scheduler.num_waiting,
        }
    )
