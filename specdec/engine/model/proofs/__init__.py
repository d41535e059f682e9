"""Checks of a model at load beyond the self-test's lengths."""
