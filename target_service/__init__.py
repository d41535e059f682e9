"""The target service: verifies proposals, and samples every token that is streamed. Start reading at `verifier.py`."""
