"""The planner of drafts: who drafts and how many, for each request and step. A new method brings its cost class and its evidence."""

from backend.budget.budget import DraftBudget
from backend.budget.costs import CostClass
from backend.budget.known import Ability
from backend.budget.survival import NUM_SHARES, by_branch, by_match, by_place, by_probability, by_shares
from backend.core import Chain, Evidence

__all__ = [
    "NUM_SHARES",
    "Ability",
    "Chain",
    "CostClass",
    "DraftBudget",
    "Evidence",
    "by_branch",
    "by_match",
    "by_place",
    "by_probability",
    "by_shares",
]
