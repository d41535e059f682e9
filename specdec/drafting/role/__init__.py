"""Drafting with a model: a role over an engine. Start reading at `drafter.py`."""
