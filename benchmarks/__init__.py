"""Measurements. Every script prints ratios of things measured side by side in one run, on code the model has never seen."""
