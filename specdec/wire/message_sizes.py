"""Sizes of messages, and how senders keep them below the receiver's limit.

The receiver of a gRPC message decides how large it may be, and ends the whole stream at a larger one. So peers exchange
their limits, and the sender cuts its messages. All sizes here are upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MIN_MESSAGE_BYTES = 64 * 1024
"""Bytes that every peer accepts (`max_message_bytes`): smaller messages need no limit of their own."""
MOST_MESSAGE_BYTES = 128 * 2**20
"""Bytes of the largest message that any service can be set to accept."""
MOST_CONVERSATION_VALUES = 100_000
"""Values in all JSON of a conversation: its memory and time depend on these rather than on its bytes."""
MAX_PROPOSAL_BYTES = 48 * 1024
"""Bytes of a proposal: 64 nodes with 64 probabilities each take 38 KB."""
MAX_STREAM_FRAME_BYTES = 4 * 2**20
"""Bytes of a frame, a quarter of the default limit: an urgent message waits behind one such frame at most."""
_MOST_FRAME_ENTRIES = 4096
"""Entries of a frame: a receiver reads a frame as a whole, and counts its parts."""
_FRAME_OVERHEAD_BYTES = 1024
"""Bytes of a stream's frame besides its entries: the load report, tags and lengths."""
ENTRY_OVERHEAD_BYTES = 8
"""Bytes of an entry's tag and length in its frame, with room to spare."""
_LOGPROB_BYTES = 13
"""Bytes of the largest TokenLogprob: tag, length, an id of five bytes with its tag, a float with its tag."""
_POSITION_BYTES = 9
"""Bytes of PositionLogprobs without alternatives: tag, length, a float with its tag."""
_OPENING_OVERHEAD_BYTES = 2048
"""Bytes of a session's opening besides tokens and sampling parameters: its id, names, salt, trace context."""
USUAL_SAMPLING_BYTES = 24 * 1024
"""Bytes of sampling parameters with 1024 biases and 1024 stop tokens."""
UINT32_MAX = 2**32 - 1


def most_bytes(told_bytes: int, own_bytes: int) -> int:
    """Bytes of the largest message that a peer accepts: `told_bytes`, or, where the peer sent 0, our own limit."""
    return min(max(MIN_MESSAGE_BYTES, told_bytes), MOST_MESSAGE_BYTES) if told_bytes else own_bytes


def most_entry_bytes(message_bytes: int) -> int:
    """Bytes of the largest entry in a stream's frame, for a peer that accepts messages of `message_bytes`."""
    return message_bytes - _FRAME_OVERHEAD_BYTES


def frame_bytes(message_bytes: int) -> int:
    """Most bytes of entries in one frame, unless a single entry is larger."""
    return min(MAX_STREAM_FRAME_BYTES, most_entry_bytes(message_bytes))


def frame_slices(sizes: Iterable[int], most: int) -> Iterator[slice]:
    """Cut entries of these sizes into frames of at most `most` bytes and 4096 entries, in order; an entry that is too
    large goes alone."""
    start = num = size = 0
    for entry_bytes in sizes:
        needed = entry_bytes + ENTRY_OVERHEAD_BYTES
        if num and (size + needed > most or num == _MOST_FRAME_ENTRIES):
            yield slice(start, start + num)
            start, num, size = start + num, 0, 0
        num, size = num + 1, size + needed
    if num:
        yield slice(start, start + num)


def position_bytes(num_top: int) -> int:
    """Bytes of one position's log-probabilities, with `num_top` alternatives."""
    return _POSITION_BYTES + _LOGPROB_BYTES * num_top


def varint_bytes(value: int) -> int:
    """Bytes of a number below 2**64 as a varint."""
    return max(1, -(-value.bit_length() // 7))


def tokens_bytes(num_tokens: int, vocab_size: int) -> int:
    """Bytes of `num_tokens` token ids of a vocabulary."""
    return num_tokens * varint_bytes(max(0, vocab_size - 1))


def opening_bytes(num_tokens: int, vocab_size: int, sampling_bytes: int = USUAL_SAMPLING_BYTES) -> int:
    """Bytes of the entry that opens a session with `num_tokens` tokens."""
    return tokens_bytes(num_tokens, vocab_size) + sampling_bytes + _OPENING_OVERHEAD_BYTES


def text_pieces(text: str, most: int) -> Iterator[str]:
    """A text in pieces of at most `most` bytes of UTF-8, at least 4; none of an empty one."""
    start = 0
    encoded = text.encode()
    while start < len(encoded):
        stop = min(len(encoded), start + most)
        while stop < len(encoded) and encoded[stop] & 0xC0 == 0x80:  # within a character
            stop -= 1
        yield encoded[start:stop].decode()
        start = stop


def uint32(value: float) -> int:
    """The nearest value of a uint32 field; 0 for NaN. Protobuf raises for others."""
    if 0 <= value <= UINT32_MAX:
        return int(value)
    return UINT32_MAX if value > 0 else 0


def microseconds(seconds: float) -> int:
    """A time for a uint32 field of microseconds, at most 71 minutes."""
    return uint32(seconds * 1e6)
