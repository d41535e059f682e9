"""Recurrent layers of transformers' models over committed states.

layers.py       runs a model's own layers with our recurrences in place of transformers' functions
convolution.py  short causal convolutions
scans.py        gated delta rules and state-space scans
native.py       the same in C++
"""
