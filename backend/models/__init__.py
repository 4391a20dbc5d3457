"""Model families, and the models that are built from their parts. What needs torch is loaded on first use: the launcher has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.models.layers import ATTENTION, Wanted
    from backend.models.loading import Model, Passing, load_model, open_checkpoint

__all__ = ["ATTENTION", "Model", "Passing", "Wanted", "load_model", "open_checkpoint"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'backend.models' has no attribute {name!r}")
    from backend.models import layers, loading

    return getattr(layers if name in ("ATTENTION", "Wanted") else loading, name)
