"""Bounds and positions of encoded proposals, for those that pass them on without parsing them.

Between two commits a draft proposes a few times: it drafts at most 64 tokens ahead, with a few messages for each. What
exceeds these bounds no target could use. A coordinator that relays drops it; a target that a draft reaches directly
sends the draft back to its coordinator.
"""

from __future__ import annotations

MOST_PROPOSALS = 256
"""Proposals of a draft between two commits, at most."""
MOST_PROPOSED_BYTES = 4 * 2**20
"""Bytes of these proposals, at most; the largest (64 distributions over 64 tokens) has 40 KB."""
_START_TAG = 1 << 3
"""Tag byte of `Proposal.start_position`: field 1, a varint."""
_MOST_VARINT_BYTES = 5
"""Bytes of a varint of 32 bits."""
_PAYLOAD = 0x7F
"""Bits of a varint's byte that belong to its value."""
_PAYLOAD_BITS = 7


def start_position(proposal: bytes) -> int | None:
    """Start position of an encoded Proposal; None if it is not the first field. Nothing else is parsed.

    It equals the end of the last commit that the draft knows.

    Args:
        proposal: the bytes, which may be anything.
    """
    if not proposal or proposal[0] != _START_TAG:
        return None
    value = shift = 0
    for byte in proposal[1 : 1 + _MOST_VARINT_BYTES]:
        value |= (byte & _PAYLOAD) << shift
        if byte <= _PAYLOAD:
            return value
        shift += _PAYLOAD_BITS
    return None
