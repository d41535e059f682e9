"""The gateway: OpenAI's HTTP interface before any number of coordinators. Start reading at `app.py`.

It turns requests into gRPC ones and what comes back into OpenAI's objects; it holds no model, no tokenizer and no state
of a request beyond its connection. Neither torch, transformers nor a tokenizer is imported here.
"""
