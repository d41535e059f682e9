"""Drafters without weights, which propose tokens from text that they have seen."""
