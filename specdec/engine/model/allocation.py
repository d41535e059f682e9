"""What transformers does about a GPU's memory before it loads weights, and why it is not to."""

import contextlib
from collections.abc import Iterator

from transformers import modeling_utils

_AHEAD = "caching_allocator_warmup"


@contextlib.contextmanager
def allocated_one_by_one() -> Iterator[None]:
    """Have each weight that transformers loads meanwhile in memory of its own, which is given back when it is freed.

    transformers takes the memory of all in one piece first, to save some hundred allocations of a millisecond. A
    decoder joins weights, and the pieces leave holes in it that are neither given back nor large enough for what comes:
    of 60 GiB, 16 more were kept (a model of torch's allocator, with weights in the order of four threads that load).
    """
    ahead = getattr(modeling_utils, _AHEAD, None)
    if ahead is None:
        yield
        return
    setattr(modeling_utils, _AHEAD, lambda *_args, **_kwargs: None)
    try:
        yield
    finally:
        setattr(modeling_utils, _AHEAD, ahead)
