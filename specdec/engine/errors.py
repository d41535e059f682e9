"""Errors of the engine.

EngineError
├── OutOfBlocks           fewer blocks are free than needed (the scheduler prevents it)
├── SequenceTooLong       a sequence that could never run: it exceeds the context or the pool
├── SequenceStateError    an operation that the sequence's state forbids, such as rolling back final tokens
├── TreeError             a malformed proposal tree: carries the field and the reason
├── NonFiniteLogits       a row of logits without a token to sample: a fault of the model or of its numerics
├── KVInvariantError      a broken invariant of the KV cache: always a bug, never bad input
└── ModelLoadError        a model that could not be loaded
    ├── TapRefused           hidden states that the model does not provide
    └── ModelNotSupported    a model that loads, but does not run correctly in the engine: carries the reason
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised by the engine."""


class OutOfBlocks(EngineError):
    """Fewer blocks are free than needed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free")
        self.needed = needed
        self.free = free


class SequenceTooLong(EngineError):
    """A sequence that can never run, even in an empty pool."""

    def __init__(self, num_tokens: int, max_tokens: int, limit: str) -> None:
        super().__init__(f"a sequence of {num_tokens} tokens exceeds the {max_tokens} that the {limit} holds")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class SequenceStateError(EngineError):
    """An operation that the sequence's state forbids."""


class TreeError(EngineError):
    """A malformed proposal tree."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class NonFiniteLogits(EngineError):
    """A row of logits holds NaN or plus infinity, or leaves no token to sample."""

    def __init__(self) -> None:
        super().__init__("the model's logits hold NaN or infinity, or leave no token to sample")


class KVInvariantError(EngineError):
    """A broken invariant of the KV cache: a bug of the engine, never the caller's input."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little free memory, which says nothing about its state."""
    text = str(error)
    told = "CUDA error: out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text
    return isinstance(error, RuntimeError) and (type(error).__name__ == "OutOfMemoryError" or told)


class ModelLoadError(EngineError):
    """A model that could not be loaded: missing files, a bad config, too little memory."""


class TapRefused(ModelLoadError):
    """Hidden states of layers that the model lacks, or of a model that cannot provide them."""


class ModelNotSupported(ModelLoadError):
    """A model that loads, but does not run correctly in the engine; ``reason`` says why."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} cannot be served: {reason} (docs/models.md lists what can)")
        self.model = model
        self.reason = reason
