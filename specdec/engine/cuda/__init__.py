"""Kernels for GPUs, in Triton, and the parts of the engine that run on them. Only this package imports triton."""
