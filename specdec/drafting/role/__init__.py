"""Drafting with a model. Start reading at `drafter.py`."""
