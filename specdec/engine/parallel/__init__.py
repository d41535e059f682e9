"""One model over several ranks (tensor parallelism): every rank holds a slice of each layer and of the KV cache.

Rank 0 *leads*: it schedules, samples and tells the others what to run. The others *follow*: they run the same forward
passes over their slices. All ranks run the same program from the weights to the last collective of a step.
"""
