"""Make schemas of clients enforceable. Pure functions."""
