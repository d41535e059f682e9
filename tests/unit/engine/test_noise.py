import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.engine.native.build import NativeUnavailable
from specdec.engine.native.sampling_ops import NativeSampling
from specdec.engine.sampling.noise import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    Purpose,
    gumbel,
    gumbel_from_bits,
    hash_u32,
    noise_key,
    noise_keys,
    uniform,
    uniform_from_bits,
)
from tests.support.engine.chi_square import FALSE_ALARM_RATE, p_value_of_fit, p_value_of_independence
from tests.support.for_each import for_each

NUM_HASHES = 2**32
FROZEN_TOKEN_IDS = [0, 1, 4095, 151935, 2**20]
FROZEN_HASHES = {
    # (seed, choice, purpose, t): (key, hashes of FROZEN_TOKEN_IDS, uniform)
    (0x0, 0, Purpose.PLAIN, 0): (
        (0x238275BC, 0x38FCBE91),
        [0x96CA4B2C, 0xC26D49CC, 0xDA5D03E3, 0x37CD37BE, 0x1F1279FC],
        "0x1.1c13ade1c7e5cp-3",
    ),
    (0x1, 0, Purpose.PLAIN, 0): (
        (0xB18A02F4, 0x6D8D86C3),
        [0xF4C6A812, 0x5DA71D43, 0x765A31FA, 0xE7EB6DF4, 0x55CF3660],
        "0x1.631405e8db1b1p-1",
    ),
    (0xFFFFFFFFFFFFFFFF, 3, Purpose.DRAFT, 17): (
        (0x2EC82944, 0xF1464A97),
        [0xE4A13094, 0x42A136AE, 0xAC3A0DD4, 0xA431D148, 0x85FFFB96],
        "0x1.76414a278a324p-3",
    ),
    (0xDEADBEEFCAFEF00D, 1, Purpose.ACCEPT, 131071): (
        (0x872D43C7, 0x67E4030C),
        [0x3845754E, 0x28ADE2CC, 0x383FDCA7, 0x75841430, 0x8930B1D5],
        "0x1.0e5a878ecfc81p-1",
    ),
    (0x2A, 7, Purpose.RESIDUAL, 5): (
        (0xEE3942CC, 0xA19B4975),
        [0xF1975577, 0xA5AF5AE7, 0x05E5972E, 0x6F216C9F, 0x5F543D41],
        "0x1.dc72859943369p-1",
    ),
}
FROZEN_GUMBELS = {
    # hash: bits of the float32
    0: 0x41B6FDA9,
    1: 0x41AE33B3,
    2: 0x41AA1D88,
    1000: 0x41745BF9,
    2**16: 0x41317208,
    2**24: 0x40B16211,
    2**30: 0x3F9F79A1,
    2**31: 0x3EBBA795,
    3 * 2**30: 0xBEA73C9B,
    2**32 - 2**16: 0xC019FD28,
    2**32 - 2: 0xC0452B66,
    2**32 - 1: 0xC04851D5,
}


def keys_of(arguments: list[tuple[int, int, Purpose, int]]) -> torch.Tensor:
    return torch.tensor([noise_key(*row) for row in arguments], dtype=torch.int64)


def hashes(arguments: list[tuple[int, int, Purpose, int]], num_tokens: int) -> np.ndarray:
    return hash_u32(keys_of(arguments), torch.arange(num_tokens)).numpy()


def native_sampling() -> NativeSampling:
    try:
        return NativeSampling()
    except NativeUnavailable as error:
        pytest.skip(str(error))


# ---- frozen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", FROZEN_HASHES, ids=str)
def test_keys_hashes_and_uniforms_never_change(arguments: tuple[int, int, Purpose, int]) -> None:
    key, expected, expected_uniform = FROZEN_HASHES[arguments]
    assert noise_key(*arguments) == key
    assert hash_u32(torch.tensor([key]), torch.tensor(FROZEN_TOKEN_IDS)).tolist() == [expected]
    assert uniform(*arguments).hex() == expected_uniform


def test_gumbel_bits_never_change() -> None:
    bits = gumbel_from_bits(torch.tensor(list(FROZEN_GUMBELS))).view(torch.int32)
    assert [value & 0xFFFFFFFF for value in bits.tolist()] == list(FROZEN_GUMBELS.values())


def test_frozen_gumbels_are_the_float64_formula_rounded_once() -> None:
    for h, bits in FROZEN_GUMBELS.items():
        exact = -math.log(-math.log1p(-(h + 0.5) / NUM_HASHES))
        assert int(np.float32(exact).view(np.uint32)) == bits


def test_bounds_are_the_noise_of_the_extreme_hashes() -> None:
    assert gumbel_from_bits(torch.tensor([0, NUM_HASHES - 1])).tolist() == [GUMBEL_MAX, GUMBEL_MIN]


def test_hash_equals_its_definition_in_plain_integers() -> None:
    def finalize(x: int, shifts: tuple[int, int, int], multipliers: tuple[int, int]) -> int:
        x = ((x ^ x >> shifts[0]) * multipliers[0]) % NUM_HASHES
        x = ((x ^ x >> shifts[1]) * multipliers[1]) % NUM_HASHES
        return x ^ x >> shifts[2]

    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(0, NUM_HASHES, (4, 2), generator=generator)
    token_ids = torch.randint(0, NUM_HASHES, (4, 300), generator=generator)
    actual = hash_u32(keys, token_ids).tolist()
    for (key_0, key_1), row, expected_row in zip(keys.tolist(), token_ids.tolist(), actual, strict=True):
        for token_id, expected in zip(row, expected_row, strict=True):
            x = finalize(token_id ^ key_0, (16, 15, 16), (0x7FEB352D, 0x846CA68B))
            assert finalize(x ^ key_1, (16, 15, 15), (0x21F0AAAD, 0xD35A2D97)) == expected


def test_noise_of_a_row_does_not_depend_on_the_tokens_and_rows_beside_it() -> None:
    arguments = [(seed, 0, Purpose.PLAIN, 9) for seed in range(5)]
    together = gumbel(keys_of(arguments), torch.arange(1003))
    for r, row in enumerate(arguments):
        for begin, end in ((0, 1), (7, 20), (500, 1003)):
            alone = gumbel(keys_of([row]), torch.arange(begin, end))
            assert torch.equal(alone[0], together[r, begin:end])


# ---- finite and monotone: gumbel_from_bits is a function of 32 bits ----------------------------------------------


def assert_finite_and_falling(first: int, step: int, count: int) -> None:
    noise = gumbel_from_bits(first + step * torch.arange(count))
    assert bool(torch.isfinite(noise).all())
    assert bool((noise[1:] <= noise[:-1]).all())
    assert float(noise.max()) <= GUMBEL_MAX
    assert float(noise.min()) >= GUMBEL_MIN


@pytest.mark.parametrize("first", [0, 2**24 - 2**15, 2**31 - 2**15, 2**32 - 2**24, 2**32 - 2**16])
def test_noise_is_finite_and_falls_with_the_hash_at_the_extremes(first: int) -> None:
    assert_finite_and_falling(first, 1, 2**16)


def test_noise_is_finite_and_falls_with_the_hash_all_along() -> None:
    assert_finite_and_falling(0, 1021, NUM_HASHES // 1021 + 1)


@pytest.mark.long
def test_noise_is_finite_and_falls_with_the_hash_for_every_hash() -> None:
    size = 2**24
    for first in range(0, NUM_HASHES, size):
        assert_finite_and_falling(max(first - 1, 0), 1, size + (first > 0))


def count_differences(native: NativeSampling, first: int, step: int, count: int) -> int:
    expected = gumbel_from_bits(first + step * torch.arange(count))
    actual = native.gumbel_range(first, step, torch.empty(count))
    differing = (actual != expected).nonzero().squeeze(1)
    # Where they differ, by the last bit of the float32 only.
    apart = actual[differing].view(torch.int32) - expected[differing].view(torch.int32)
    assert bool((apart.abs() <= 1).all())
    return len(differing)


def test_native_noise_is_that_of_torch() -> None:
    native = native_sampling()
    assert count_differences(native, 0, 1, 2**16) == 0
    assert count_differences(native, 0, 4093, NUM_HASHES // 4093) <= 1


@pytest.mark.long
def test_native_noise_differs_from_that_of_torch_in_less_than_one_hash_in_ten_million() -> None:
    native = native_sampling()
    size = 2**24
    total = sum(count_differences(native, first, 1, size) for first in range(0, NUM_HASHES, size))
    assert total < NUM_HASHES // 10_000_000


def test_uniform_is_strictly_between_zero_and_one_at_its_extremes() -> None:
    smallest, largest = uniform_from_bits(0), uniform_from_bits(2**64 - 1)
    assert smallest == 2.0**-53
    assert largest == 1.0 - 2.0**-53


# ---- distribution ------------------------------------------------------------------------------------------------

NUM_BINS = 256


def top_byte(h: np.ndarray) -> np.ndarray:
    return h >> 24


def low_byte(h: np.ndarray) -> np.ndarray:
    return h & 0xFF


VARIED = {
    "tokens": [(7, 0, Purpose.PLAIN, 3)],
    "positions": [(7, 0, Purpose.PLAIN, t) for t in range(4096)],
    "seeds": [(seed, 0, Purpose.PLAIN, 3) for seed in range(4096)],
    "distant seeds": [(seed << 52, 0, Purpose.PLAIN, 3) for seed in range(4096)],
    "choices": [(7, choice, Purpose.PLAIN, 3) for choice in range(4096)],
    "purposes and positions": [(7, 0, purpose, t) for t in range(1024) for purpose in Purpose],
}


@for_each("byte", [top_byte, low_byte])
@for_each("varied", VARIED)
def test_hashes_are_uniform_across(varied: str, byte: Callable[[np.ndarray], np.ndarray]) -> None:
    arguments = VARIED[varied]
    h = hashes(arguments, 2**20 // len(arguments))
    counts = np.bincount(byte(h).ravel(), minlength=NUM_BINS)
    assert p_value_of_fit(counts, np.ones(NUM_BINS)) > FALSE_ALARM_RATE


@pytest.mark.parametrize("byte", [top_byte, low_byte])
@pytest.mark.parametrize("varied", list(VARIED)[1:])
def test_noise_of_one_token_is_independent_across(varied: str, byte: Callable[[np.ndarray], np.ndarray]) -> None:
    h = byte(hashes(VARIED[varied], 512))
    assert p_value_of_independence(h[:-1], h[1:], NUM_BINS) > FALSE_ALARM_RATE


@pytest.mark.parametrize("byte", [top_byte, low_byte])
@pytest.mark.parametrize("distance", [1, 2, 64, 4096])
def test_noise_is_independent_across_tokens(distance: int, byte: Callable[[np.ndarray], np.ndarray]) -> None:
    h = byte(hashes([(seed, 0, Purpose.PLAIN, 3) for seed in range(16)], 2**17))
    assert p_value_of_independence(h[:, :-distance], h[:, distance:], NUM_BINS) > FALSE_ALARM_RATE


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(Purpose, 2)))
def test_noise_is_independent_across_purposes_of_one_position(first: Purpose, second: Purpose) -> None:
    a, b = (top_byte(hashes([(7, 0, purpose, t) for t in range(2048)], 1024)) for purpose in (first, second))
    assert p_value_of_independence(a, b, NUM_BINS) > FALSE_ALARM_RATE


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(Purpose, 2)))
def test_uniforms_are_independent_across_purposes_of_one_position(first: Purpose, second: Purpose) -> None:
    a, b = ([int(32 * uniform(7, 0, purpose, t)) for t in range(30_000)] for purpose in (first, second))
    assert p_value_of_independence(a, b, 32) > FALSE_ALARM_RATE


def test_the_independence_test_sees_noise_that_two_purposes_share() -> None:
    h = top_byte(hashes([(7, 0, Purpose.PLAIN, t) for t in range(64)], 1024))
    assert p_value_of_independence(h, h, NUM_BINS) < 1e-100


def test_the_independence_test_sees_a_hash_that_only_adds_the_key() -> None:
    keys = keys_of([(7, 0, Purpose.PLAIN, t) for t in range(4096)])
    h = ((torch.arange(512) * 0x9E3779B1 + keys[:, :1]) % NUM_HASHES).numpy()
    assert p_value_of_independence(top_byte(h[:, :-1]), top_byte(h[:, 1:]), NUM_BINS) < 1e-100


def test_each_bit_of_token_and_key_flips_each_bit_of_the_hash_half_of_the_time() -> None:
    # 1152 pairs of bits, each binomial(4096, 1/2); Bonferroni at the stated rate.
    generator = torch.Generator().manual_seed(2)
    num_trials = 4096
    keys = torch.randint(0, NUM_HASHES, (num_trials, 2), generator=generator)
    token_ids = torch.randint(0, 2**18, (num_trials, 1), generator=generator)
    base = hash_u32(keys, token_ids)
    flipped = [hash_u32(keys, token_ids ^ (1 << bit)) for bit in range(18)]
    for word in (0, 1):
        for bit in range(32):
            other = keys.clone()
            other[:, word] ^= 1 << bit
            flipped.append(hash_u32(other, token_ids))
    num_tests = len(flipped) * 32
    limit = stats.norm.isf(FALSE_ALARM_RATE / num_tests / 2) * math.sqrt(num_trials) / 2
    for h in flipped:
        for bit in range(32):
            num_flips = int((((h ^ base) >> bit) & 1).sum())
            assert abs(num_flips - num_trials / 2) < limit


def test_no_two_tokens_of_a_position_share_a_hash() -> None:
    h = hashes([(7, 0, Purpose.PLAIN, 3)], 2**20)
    assert len(np.unique(h)) == 2**20


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel(keys_of([(seed, 0, Purpose.PLAIN, 11) for seed in range(64)]), torch.arange(2**13)).numpy().ravel()
    assert stats.kstest(noise.astype(np.float64), stats.gumbel_r.cdf).pvalue > FALSE_ALARM_RATE


@pytest.mark.parametrize("count", [3, 200])
def test_keys_of_many_places_are_those_of_each(count: int) -> None:
    rng = random.Random(count)
    seeds = [0, 1, 2**63, 2**64 - 1]
    drawn = [(rng.choice(seeds), rng.randrange(4), rng.getrandbits(40)) for _ in range(count)]
    places = [None if number % 7 == 2 else place for number, place in enumerate(drawn)]
    expected: list[int] = []
    for place in places:
        expected += (0, 0) if place is None else noise_key(place[0], place[1], Purpose.PLAIN, place[2])
    assert noise_keys(places, Purpose.PLAIN) == expected
