"""The gateway: OpenAI's HTTP interface in front of any number of coordinators. Start reading at `app.py`.

It translates HTTP requests to gRPC and the answers back; it holds no model, no tokenizer and no state of a request
beyond its connection. Neither torch, transformers nor a tokenizer is imported here.
"""
