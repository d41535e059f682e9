"""Triton kernels for GPUs, and the parts of the engine that run them. Only this package imports triton."""
