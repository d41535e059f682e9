"""Drafting with the target's own weights and keys, of which a pass leaves sublayers out."""
