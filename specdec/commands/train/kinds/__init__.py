"""Kinds of drafters in training."""
