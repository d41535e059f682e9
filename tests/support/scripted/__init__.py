"""A target and a draft that speak the wire protocol over real sockets, with a made-up model.

What they do wrong, and when, is under a test's control.
"""
