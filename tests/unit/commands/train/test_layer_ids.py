"""Which layers a head reads is found by trying."""

from __future__ import annotations

from specdec.commands.train.layer_ids import neighbouring_layer_ids, try_layer_ids


def test_neighbours_are_one_higher_one_lower_and_the_usual_ones_each_once() -> None:
    assert neighbouring_layer_ids((3, 6, 9), 10) == [(4, 7, 10), (2, 5, 8), (2, 5, 7), (1, 4, 6)]
    assert neighbouring_layer_ids((1, 4, 6), 10) == [(2, 5, 7), (0, 3, 5)]


def test_no_neighbour_lies_outside_the_target_or_has_another_number_of_layers() -> None:
    assert neighbouring_layer_ids((0, 4), 4) == []
    assert neighbouring_layer_ids((10,), 10) == [(9,)]


def test_ids_that_are_off_by_one_are_found() -> None:
    verdict = try_layer_ids((1, 4, 6), 10, lambda ids: 0.589 if ids == (2, 5, 7) else 0.0121)
    assert verdict.trials[0].layer_ids == (1, 4, 6)
    assert verdict.advised == (2, 5, 7)


def test_a_head_that_is_right_or_right_nowhere_gets_no_advice() -> None:
    assert try_layer_ids((2, 5, 7), 10, lambda ids: 0.6 if ids == (2, 5, 7) else 0.1).advised is None
    assert try_layer_ids((2, 5, 7), 10, lambda ids: 0.001 * ids[0]).advised is None
    assert try_layer_ids((2, 5, 7), 10, lambda ids: 0.5 + 0.01 * ids[0]).advised is None
