"""Grammars of constraints: compiled on threads of their own, followed token by token on the engine's thread.

Needs llguidance and numpy, but no torch.
"""
