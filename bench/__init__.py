"""Measures specdec: ratios between systems, taken in one run on the same weights and prompts."""
