"""The coordinator: what clients talk to. Start reading at `decode_loop.py`.

It validates and admits requests, opens each choice as a session on a target and a draft replica, relays proposals from
draft to target unopened, turns verdicts into text, streams it, and survives the death of either side. It knows no
tensors: neither torch, transformers nor the engine is imported here.
"""
