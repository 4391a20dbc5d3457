"""The kinds of drafters that `foretoken train` makes, each a small part of its own: module, loss and file."""

from __future__ import annotations

from training.drafters.dflash import Dflash
from training.drafters.drafter import Drafter, Options
from training.drafters.dspark import Dspark
from training.drafters.eagle3 import Eagle3
from training.drafters.heads import Hydra, Medusa, MlpSpeculator
from training.drafters.mtp import Mtp

KINDS: dict[str, type[Drafter]] = {kind.method: kind for kind in (Mtp, Eagle3, Dflash, Dspark, Medusa, Hydra, MlpSpeculator)}

__all__ = ["KINDS", "Drafter", "Options"]
