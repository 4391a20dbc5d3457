"""Answers of a given form, exact under speculation: what is asked becomes a grammar (`compile`), each request follows it (`matcher`), and each
step's plan takes the tokens that it allows for every draft position (`masks`).

By llguidance, whose limits are counted work and not time: it compiles real schemas in a small part of xgrammar's time, makes masks about as fast, and
refuses what it cannot enforce, where the other widens it (`python -m benchmarks.grammar_libraries`, benchmarks/RESULTS.md).
"""

from backend.grammar.compile import Grammars
from backend.grammar.masks import SOURCE, fill_draft_masks, fill_masks, fit_drafts
from backend.grammar.matcher import Matcher

__all__ = ["SOURCE", "Grammars", "Matcher", "fill_draft_masks", "fill_masks", "fit_drafts"]
