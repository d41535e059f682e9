"""Tensor parallelism: every rank holds a slice of each layer and of the KV cache.

Rank 0 leads: it schedules, samples and sends each pass to the other ranks, which follow: they run it over their slices.
All ranks run the same program from the weights to the last collective of a step.
"""
