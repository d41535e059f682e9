"""What a slot on a GPU has found is told beside what is aimed at and what is predicted, of the GPU that was there."""

import pytest

from bench.gpu_slot.__main__ import STEPS
from bench.gpu_slot.aims import AIMS, Aim, beside_aims, beside_predictions
from bench.gpu_slot.predicted import gpu_named, model_of, predicted_speed_ups, predicted_steps
from bench.gpu_slot.services import _check_fits
from bench.pairs import DRAFTS, TARGETS
from bench.roofline import GPUS, step_s
from tests.support.for_each import for_each

H100 = "NVIDIA H100 80GB HBM3"


def test_figures_are_told_beside_what_is_aimed_at() -> None:
    verdicts = [{"tokens": "equal"}, {"tokens": "VOID: differs at token 3"}]
    decode = [{"batch": 1, "temperature": t, "speedup": {"median": ratio}} for t, ratio in ((0.0, 2.5), (1.0, 1.2))]
    told = beside_aims(
        {
            "steps": {"found": {"8b: 1 rows at 1024, graph ms": 4.0, "8b: tree of 64 at 1024, graph ms": 6.0}},
            "draft": {"found": None},
            "speedup": {"found": {"results": {"decode": decode}}},
            "bitwise": {"found": {"fast: rows in chunks of 1": [3, 8], "deterministic: rows in chunks of 1": [0, 8]}},
            "assisted": {"found": {"results": {"systems": {"cases": [{"rows": verdicts}]}}}},
        }
    )
    assert told[:3] == [
        "8B, 1 row at 1k, ms: 4 (aim: at most 6.4): met",
        "8B, tree of 8 rows at 1k, ms: not measured (aim: at most 7; step steps)",
        "8B, tree of 64 rows over 1 row: 1.5 (aim: at most 1.3): MISSED",
    ]
    assert "1B, 8 drafted tokens, ms: not measured (aim: at most 7; step draft)" in told
    served = "1B/8B served, speculation over plain, temperature"
    assert f"{served} 0: 2.5 (aim: at least 2): met" in told
    assert f"{served} 1: 1.2 (aim: at least 1.4): MISSED" in told
    unknown = "speculation over plain, temperature 0: not measured (aim: at least 0.97; step loaded)"
    assert f"1B/8B at 32 streams, {unknown}" in told
    assert "deterministic, rows whose logits differ: 0 (aim: at most 0): met" in told
    assert [line.endswith("1 (aim: at most 0): MISSED") for line in told if "say other tokens" in line] == [True]


def test_an_aim_is_longer_on_a_gpu_whose_memory_is_slower_and_others_are_marked() -> None:
    found = {"copies, TB/s": 3.0, "8b: 1 rows at 1024, graph ms": 8.9, "8b: prefill of 4096, ms": 200.0}
    told = beside_aims({"steps": {"gpu": H100, "found": found}})
    assert (
        told[0] == "8B, 1 row at 1k, ms: 8.9 (aim: at most 6.4 on an H200; 9.17 on NVIDIA H100 80GB HBM3, whose copies "
        "move 3 TB/s): met"
    )
    assert f"8B, prefill of 4k, ms: 200 (aim: at most 250 on an H200; this is {H100}): met" in told
    assert "(aim: at most 6.4): MISSED" in beside_aims({"steps": {"gpu": "NVIDIA H200", "found": found}})[0]


def test_what_a_step_found_before_is_told_where_it_has_not_found_it_again() -> None:
    earlier = {"gpu": "NVIDIA H200", "found": {"8b: 1 rows at 1024, graph ms": 4.0}}
    told = beside_aims({"steps": {"status": "timeout", "found": None, "earlier": earlier}})
    assert told[0] == "8B, 1 row at 1k, ms: 4 (aim: at most 6.4): met"


@for_each("aim", AIMS)
def test_every_aim_is_measured_by_a_step(aim: Aim) -> None:
    assert aim.step in STEPS


def test_predictions_are_of_the_gpu_that_is_there() -> None:
    assert gpu_named(H100) is GPUS["H100 SXM"]
    assert gpu_named("NVIDIA H200") is GPUS["H200"]
    assert gpu_named("NVIDIA L40S") is gpu_named("NVIDIA H100 PCIe") is None
    predicted = predicted_steps("NVIDIA H200")
    assert predicted["8b: 1 rows at 1024, graph ms"] == round(step_s("8B", 1, GPUS["H200"]) * 1000, 3)
    assert set(predicted) == {f"{name}: {rows} rows at 1024, graph ms" for name in ("1b", "8b") for rows in (1, 8, 64)}
    assert predicted_steps("something else") == {}


def test_speed_ups_are_predicted_of_the_pair_that_is_served_and_of_what_it_accepts() -> None:
    decoded = [
        {"batch": batch, "temperature": 0.0, "acceptance_by_depth": [accepted, 0.5]}
        for batch, accepted in ((1, 0.9), (8, 0.1))
    ]
    target, draft = TARGETS["gpu-8b"], DRAFTS["draft-1b"]
    found = predicted_speed_ups("NVIDIA H200", target, draft, decoded)
    assert found["0"]["accepted"] == 0.9
    assert 1.5 < found["0"]["speed-up"] < 5
    assert step_s(model_of(target), 1, GPUS["H200"]) > 14.8 * 2**30 / 2 / GPUS["H200"].bandwidth
    assert predicted_speed_ups("something else", target, draft, decoded) == {}


def test_what_is_measured_confirms_or_refutes_what_is_predicted() -> None:
    name = "8b: {} rows at 1024, graph ms"
    predicted = {name.format(1): 3.9, name.format(8): 3.9, name.format(64): 4.3}
    found = {name.format(1): 4.2, name.format(8): 8.0, "predicted": predicted}
    decode = [{"batch": 1, "temperature": 1.0, "speedup": {"median": 2.0}}]
    speed_ups = {"1": {"accepted": 0.8, "speed-up": 1.9, "drafted": 4}}
    told = beside_predictions(
        {
            "steps": {"found": found},
            "speedup": {"found": {"results": {"decode": decode}, "predicted": speed_ups}},
            "large": {"found": None},
        }
    )
    assert told == [
        "8b: 1 rows at 1024, graph ms: 4.2 (predicted: 3.9): confirmed",
        "8b: 8 rows at 1024, graph ms: 8 (predicted: 3.9): REFUTED",
        "speedup: speed-up at temperature 1, 80% accepted: 2 (predicted: 1.9): confirmed",
    ]


def test_a_pair_that_a_gpu_cannot_hold_is_refused_before_it_is_made() -> None:
    for pair, num_copies in (("gpu-8b", 2), ("gpu-32b", 1)):
        _check_fits(pair, num_copies, 79 << 30)  # an H100
    with pytest.raises(MemoryError, match="gpu-32b needs 70 GiB of a GPU, and this one has 48"):
        _check_fits("gpu-32b", 1, 48 << 30)
