"""Sampling: processors of logits, noise, search for the best tokens, rejection."""
