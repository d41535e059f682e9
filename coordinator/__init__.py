"""The coordinator serves the clients' calls. Start reading at `decode_loop.py`.

It validates and admits requests, opens each choice as a session on a target and a draft replica, relays proposals from
draft to target without parsing them, turns verdicts into text, streams the text, and survives the death of either
replica. It computes no tensors: neither torch, transformers nor the engine is imported here.
"""
