"""The inference engine: paged KV cache, continuous batching, forks, trees and rollback for any decoder-only model.

One engine serves draft and target. The map, from data to step:

    tree.py        proposed tokens, as a tree below the last committed token sequence.py    committed or drafted tokens,
    and the blocks of their keys and values block_pool.py  reference-counted blocks, prefix cache, copy-on-write
    scheduler.py   which rows run in the next step, and which sequences lose blocks for them batch.py       a scheduled
    step as tensors attention/     the KV cache as tensors, and attention over its blocks native/        the CPU kernels
    in C++ parallel/      one model over several ranks model/         from a checkpoint to a forward pass, which is
    checked at load sampling/      from logits to tokens drawing/       several tokens of each row in one call ahead.py
    slots that were computed before their tokens were appended engine.py      schedule, run, postprocess
"""
