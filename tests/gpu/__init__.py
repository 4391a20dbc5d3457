"""Tests that need a GPU: `python -m pytest tests/gpu`. Without one they are skipped, as in CI."""
