"""Kinds of drafters that can be trained, one file each."""
