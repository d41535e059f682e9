"""What is kept of outputs stays within its bounds, and what a step costs does not grow with what is kept."""

from __future__ import annotations

import gc
import random
import tracemalloc

from specdec.config.drafter_options import SuffixOptions
from specdec.drafting.interface import Context, Room
from specdec.drafting.lookup.suffix import SharedOutputs, Suffix
from tests.support.cost import lines_run


def test_no_more_requests_are_kept_than_are_allowed_and_the_oldest_tenant_loses_first() -> None:
    outputs = SharedOutputs(most_requests=3, max_bytes=2**20)
    for number in range(5):
        outputs.add(b"a" if number < 2 else b"b", [number] * 10)
    assert outputs.num_requests == 3
    assert outputs.of(b"a") is None
    assert outputs.of(b"b") is not None
    outputs.add(b"c", [9] * 10)
    assert outputs.num_requests == 3


def test_memory_stays_below_its_bound_with_outputs_of_which_no_two_pairs_of_tokens_are_alike() -> None:
    max_bytes = 4 * 2**20
    outputs = SharedOutputs(most_requests=10**6, max_bytes=max_bytes)
    rng = random.Random(1)
    gc.collect()
    tracemalloc.start()
    for number in range(100):
        outputs.add(b"%d" % (number % 7), [rng.randrange(1 << 20) for _ in range(1000)])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max_bytes / 4 < used <= max_bytes
    assert 0 < outputs.num_requests < 100


def test_an_output_that_is_larger_than_all_that_may_be_kept_is_kept_in_part() -> None:
    drafter = Suffix(SuffixOptions(max_bytes=2**20))
    tokens = list(range(1, 200_000))
    drafter.open(Context([0], 1)).close(Context([0, *tokens], 1))
    assert 0 < drafter.outputs.num_tokens <= 2**20 // 160


def test_no_outputs_are_kept_where_none_may_be() -> None:
    drafter = Suffix(SuffixOptions(suffix_decoding_max_cached_requests=0))
    drafter.open(Context([0], 1)).close(Context([0, *range(50)], 1))
    assert drafter.outputs.num_requests == drafter.outputs.num_tokens == 0


def test_a_step_costs_no_more_when_ever_more_is_kept() -> None:
    rng = random.Random(5)
    drafter = Suffix(SuffixOptions())
    context = Context([0, 1, 2, 3, 1, 2, 3, 1, 2], 1)
    costs: list[int] = []
    for _ in range(3):
        for _ in range(40):
            drafter.open(context).close(Context([0, *(rng.randrange(6) for _ in range(500))], 1))
        drafter.propose(context, Room(8, 8))
        costs.append(lines_run(lambda: drafter.propose(context, Room(8, 8))))
    assert max(costs) < 2 * min(costs)
    assert max(costs) < 6000
