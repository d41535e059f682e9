"""Drafting with the target itself, with some of its sublayers skipped."""
