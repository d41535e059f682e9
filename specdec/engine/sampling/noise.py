"""Counter-based noise: every random number is a hash of its place of use.

There is no state, so that draft and target, or a request before and after a crash, get the same numbers. Integers are
identical on every device. The Gumbel values are computed in float64 and rounded once to float32: two math libraries
that differ in the last bit of a float64 agree on the float32 in all but a few of 10^9 arguments.

The random numbers of one (seed, choice, purpose, position) derive from a 64-bit key, made by the output function of
SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). Over the token ids the key
drives two rounds of 32-bit xorshift-multiply mixing with constants of low measured bias (C. Wellons, "Prospecting for
hash functions"). For a fixed key this is a bijection, so no two tokens share a value.
"""

import enum
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

GUMBEL_MAX = 22.873857498168945
"""The largest value of `gumbel`, at hash 0; a float32."""
GUMBEL_MIN = -3.1299946308135986
"""The smallest value of `gumbel`, at hash 2^32 - 1; a float32."""

_FEW_PLACES = 12
"""Number of places below which a call for each costs less than array operations."""
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15
# Multipliers as signed 32-bit numbers, so that products with a u32 fit in int64.
_MUL_1A = 0x7FEB352D
_MUL_1B = 0x846CA68B - (1 << 32)
_MUL_2A = 0x21F0AAAD
_MUL_2B = 0xD35A2D97 - (1 << 32)


class Purpose(enum.IntEnum):
    """Purpose of a random number. Numbers of different purposes are independent; sharing one would bias the output."""

    PLAIN = 0
    """Gumbel noise of coupled sampling, and plain samples of the target in rejection mode."""
    DRAFT = 1
    """The draft's sample from q in rejection mode."""
    ACCEPT = 2
    """The accept test."""
    RESIDUAL = 3
    """The sample after a rejection."""


def _mix64(x: int) -> int:
    """SplitMix64's output function of a u64, a bijection."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@lru_cache(1 << 12)
def _stream(seed: int, choice: int) -> int:
    return _mix64((_mix64((seed + _GAMMA) & _MASK64) + (choice + 1) * _GAMMA) & _MASK64)


def _key64(seed: int, choice: int, purpose: Purpose, t: int) -> int:
    return _mix64((_stream(seed, choice) + (4 * t + purpose + 1) * _GAMMA) & _MASK64)


def noise_key(seed: int, choice: int, purpose: Purpose, t: int) -> tuple[int, int]:
    """The two u32 from which all per-token noise of a position derives.

    Args:
        seed: unsigned 64-bit.
        choice: index of the choice within its request, >= 0.
        purpose: use of the noise.
        t: absolute position (index in prompt plus output) of the sampled token.
    """
    key = _key64(seed, choice, purpose, t)
    return key >> 32, key & _MASK32


def noise_keys(places: Sequence[tuple[int, int, int] | None], purpose: Purpose) -> list[int]:
    """The two u32 of each place, row by row: `noise_key` of many (seed, choice, position); zeros for None."""
    if len(places) < _FEW_PLACES:
        few: list[int] = []
        for place in places:
            few += (0, 0) if place is None else noise_key(place[0], place[1], purpose, place[2])
        return few
    streams = [0 if place is None else _stream(place[0], place[1]) for place in places]
    steps = [0 if place is None else 4 * place[2] + purpose + 1 for place in places]
    x = np.array(streams, np.uint64) + np.array(steps, np.uint64) * np.uint64(_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x[[place is None for place in places]] = 0
    halves: list[int] = np.stack([x >> np.uint64(32), x & np.uint64(_MASK32)], axis=1).reshape(-1).tolist()
    return halves


def uniform(seed: int, choice: int, purpose: Purpose, t: int, chain: int | None = None) -> float:
    """A uniform number strictly inside (0, 1), on a grid of 2^-52.

    Args:
        seed: as for `noise_key`.
        choice: the same.
        purpose: the same.
        t: the same.
        chain: number of the chain, >= 0; each chain has its own random number at a position. None: one number for all.
    """
    bits = _key64(seed, choice, purpose, t)
    if chain is not None:
        bits = _mix64((bits + (chain + 1) * _GAMMA) & _MASK64)
    return uniform_from_bits(bits)


def uniform_from_bits(bits: int) -> float:
    """The uniform number of a u64: (b + 1/2) 2^-52 of its upper 52 bits, never 0 or 1."""
    # With 53 bits the largest number would round to 1.
    return ((bits >> 12) + 0.5) * 2.0**-52


def hash_u32(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Hash token ids under the key of their row; the same integers on every device.

    Args:
        keys: [R, 2] int64, rows as `noise_key` returns them.
        token_ids: [N] or [R, N] int64, in [0, 2^32).

    Returns:
        [R, N] int64 in [0, 2^32).
    """
    x = token_ids ^ keys[:, :1]
    _mix32_(x, 16, _MUL_1A, 15, _MUL_1B, 16)
    x ^= keys[:, 1:]
    _mix32_(x, 16, _MUL_2A, 15, _MUL_2B, 15)
    return x


def _mix32_(x: Tensor, shift_1: int, mul_1: int, shift_2: int, mul_2: int, shift_3: int) -> None:
    x ^= x >> shift_1
    x *= mul_1
    x &= _MASK32
    x ^= x >> shift_2
    x *= mul_2
    x &= _MASK32
    x ^= x >> shift_3


def gumbel_from_bits(h: Tensor) -> Tensor:
    """The standard Gumbel quantile of u32 hashes: finite, and decreasing in the hash.

    u = (h + 1/2) 2^-32 is exact in float64 and strictly inside (0, 1); -log(-log1p(-u)) is rounded once.

    Args:
        h: int64 in [0, 2^32), any shape.

    Returns:
        float32 of the same shape, within [GUMBEL_MIN, GUMBEL_MAX].
    """
    u = h.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return u.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The Gumbel noise of tokens, [R, N] float32; arguments as for `hash_u32`."""
    return gumbel_from_bits(hash_u32(keys, token_ids))
