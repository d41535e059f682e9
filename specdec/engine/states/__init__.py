"""States of recurrent layers: who holds which, and how a step changes them.

sessions.py  each sequence's committed state, kept inputs and snapshots, as numbers of slots; without torch
plan.py      a step's states as arrays
memory.py    the tensors
"""
