"""The Open Inference Protocol over gRPC: requests become Generate calls, chunks become tensors. See `servicer.py`."""
