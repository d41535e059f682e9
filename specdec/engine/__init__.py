"""The inference engine: paged KV cache, continuous batching, forks, trees and rollback for any decoder-only model.

One engine serves both roles; nothing here says draft or target. The map, from data to step:

    sequence.py    a session's tokens and the blocks that hold their keys and values
    tree.py        proposed tokens, as a tree hung from the last committed token
    block_pool.py  reference-counted blocks, prefix cache, copy-on-write
    scheduler.py   which rows run in the next step, and who gives up blocks for them
    batch.py       a scheduled step as tensors
    engine.py      schedule, run, postprocess
"""
