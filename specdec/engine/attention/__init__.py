"""Paged attention: the cache, and kernels in torch."""
