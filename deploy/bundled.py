"""What the bundled model is served with where nobody says it. No torch."""

from __future__ import annotations

from backend.config import DEFAULT_DRAFTER
from backend.speculative_config import BUNDLED_METHOD

DEFAULT_SPECULATION = {
    "method": BUNDLED_METHOD,
    "model": str(DEFAULT_DRAFTER),
    "num_model_steps": 4,
    "mtp_strategy": "with_ngram",
    "num_speculative_tokens": 6,
}
"""As it measures best (benchmarks/bundled.py)."""
