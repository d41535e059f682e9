"""Paged attention: the cache, its metadata, and the kernels in torch."""
