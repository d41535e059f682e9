"""Temperature, top-k, top-p and min-p on the device: what is cut off and what is left are the CPU's, to the bit."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.launches import LaunchCounter
from specdec.engine.cuda.sampling import CutKinds, cut_kinds, device_scores, launch_scores, start_draws
from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE, RowContext, cut_, row_numbers, temperature_scores
from specdec.engine.sampling.sampler import Sampler
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.drawn_rows import numbers_of
from tests.support.engine.triton_device import DEVICE

EXAMPLES = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
Cut = tuple[int, float, float]
OFF: Cut = (0, 1.0, -math.inf)


def compared(logits: torch.Tensor, temperatures: list[float], cuts: list[Cut]) -> None:
    """Rows with cuts against `cut_`, rows of temperature 0 against their logits."""
    top_k, top_p, min_score = (list(column) for column in zip(*cuts, strict=True))
    got = device_scores(logits.to(DEVICE), numbers_of(temperatures, cuts, logits.shape[1])).cpu()
    expected = cut_(temperature_scores(logits, temperatures), top_k, top_p, min_score)
    for row, temperature in enumerate(temperatures):
        want = expected[row] if temperature else logits[row]
        assert torch.equal(got[row].nan_to_num(nan=9.0), want.nan_to_num(nan=9.0)), (row, temperature, cuts[row])


@pytest.mark.parametrize("cut", [(3, 1.0, -math.inf), (0, 0.7, -math.inf), (0, 1.0, math.log(0.2)), (40, 0.9, -3.0)])
def test_each_cut_leaves_what_it_leaves_on_the_cpu(cut: Cut) -> None:
    logits = torch.randn(2, 4099, generator=torch.Generator().manual_seed(5)) * 3  # three chunks, the last one short
    compared(logits, [0.8, 0.0], [cut, OFF])


def test_equal_scores_are_cut_by_rising_id_across_chunks() -> None:
    logits = torch.zeros(3, 2100)
    logits[0, ::2] = -0.5
    compared(logits, [1.0, 1.0, 1e-30], [(0, 0.6, -math.inf), (2, 0.999, -math.inf), (0, 0.4, -math.inf)])


def test_masks_and_rows_that_are_not_finite_harm_no_other() -> None:
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    logits[0, 3], logits[1, 5], logits[2], logits[3, 9:] = math.nan, math.inf, -math.inf, -math.inf
    cuts = device_scores(logits.to(DEVICE), numbers_of([0.5] * 5, [(20, 0.9, -9.0)] * 5, 70)).cpu()
    assert cuts[:3].isnan().all()
    compared(logits[3:], [0.5] * 2, [(20, 0.9, -9.0)] * 2)


@EXAMPLES
@given(data=st.data())
def test_any_row_is_cut_as_on_the_cpu(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from((1, 2, 33, 70)))
    numbers = st.sampled_from((0.0, -0.0, 1.0, 1.0, -1.5, 30.0, 3.4e38, -3.4e38, 1e-45, -1e-45, -math.inf))
    num_rows = data.draw(st.integers(1, 2))
    rows = [[0.0, *data.draw(st.lists(numbers, min_size=69, max_size=69))][:vocab_size] for _ in range(num_rows)]
    temperatures = [data.draw(st.sampled_from((MIN_TEMPERATURE, 0.3, 1.0, 100.0))) for _ in rows]
    cut = st.tuples(
        st.sampled_from((0, 1, 2, 69, 2**31 - 1, 2**32 - 1)),
        st.sampled_from((1.0, 0.5, 5e-324, 0.999999, 1 - 2**-53)),
        st.sampled_from((-math.inf, 0.0, -1e-9, math.log(0.3))),
    )
    compared(torch.tensor(rows, dtype=torch.float64).to(torch.float32), temperatures, [data.draw(cut) for _ in rows])


@pytest.mark.parametrize(
    ("kinds", "num_launches"),
    [((False, False), 0), ((True, False), 9), ((False, True), 9), ((True, True), 18)],
)
def test_cuts_launch_a_few_kernels_and_wait_for_nothing(kinds: CutKinds, num_launches: int) -> None:
    with LaunchCounter() as counter:
        numbers = torch.empty(8, 5, dtype=torch.float64, device="meta")
        scores = launch_scores(torch.empty(8, 150_000, device="meta"), numbers, kinds)
    assert len(counter.launches) == num_launches
    assert len(counter.operations) <= num_launches + 9, "torch's, of which five are of more than a number per row"
    assert scores.shape == (8, 150_000)
    logits_bytes = 8 * 150_000 * 4
    assert sum(num_bytes for _, num_bytes in counter.operations) < (num_launches + 7) * logits_bytes * 1.1


def test_numbers_say_which_cuts_there_are() -> None:
    def numbers(*many: dict[str, float]) -> list[list[float]]:
        params = [SamplingParams(**{"max_tokens": 1, "seed": 0, **each}) for each in many]  # type: ignore[arg-type]
        found = row_numbers([RowContext(each, 0, 0) for each in params], 9)
        kinds.append(cut_kinds(found, 9))
        return [list(each) for each in found]

    kinds: list[CutKinds] = []
    assert numbers({"min_p": 1.0}) == [[1.0, 1.0, 9.0, 1.0, 0.0]]
    numbers({"top_k": 9})
    assert kinds == [(False, False), (False, False)], "as many as there are is no cut"
    rows = numbers({"top_k": 8, "top_p": 0.5, "temperature": 0.5}, {})
    assert (rows, kinds[2]) == (
        [[1.0, 0.5, 8.0, 0.5, -math.inf], [1.0, 1.0, 9.0, 1.0, -math.inf]],
        (True, True),
    )
    greedy = numbers({"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 0.0})
    assert (greedy, kinds[3]) == ([[0.0, 1.0, 9.0, 1.0, -math.inf]], (False, False)), "a greedy row is not cut"


def test_what_is_compiled_at_the_start_serves_every_mixture_of_cuts() -> None:
    def compiled(run: Callable[[], object]) -> set[tuple[str, str]]:
        with LaunchCounter() as counter:
            run()
        return {(launch.name, str(launch.constants)) for launch in counter.launches}

    sampler = Sampler(2100, DEVICE, native="off")
    sampler.use_device_kernels()
    at_start = compiled(sampler.compile)
    logits = torch.randn(3, 2112, generator=torch.Generator().manual_seed(5))[:, :2100].to(DEVICE)
    cuts: list[Cut] = [OFF, (5, 1.0, -math.inf), (0, 0.5, -math.inf), (7, 0.9, -2.0), (0, 1.0, -1.0)]
    for chosen in itertools.islice(itertools.combinations(cuts, 3), 0, None, 3):
        numbers = numbers_of([0.5, 0.0, 2.0], list(chosen), 2100)
        assert compiled(lambda n=numbers: start_draws(logits, n, [1, 2, 3, 4, 5, 6], 1)()) <= at_start  # type: ignore[misc]
