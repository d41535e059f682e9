"""Drafters that are heads over the target's hidden states: files, modules, keys and values, trees."""
