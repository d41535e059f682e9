"""Draws several tokens of each row in one call, on a CPU (``native.py``) and on a GPU (``device.py``)."""
