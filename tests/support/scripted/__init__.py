"""A target and a draft that speak the wire protocol over real sockets, with a made-up model.

Tests control their faults.
"""
