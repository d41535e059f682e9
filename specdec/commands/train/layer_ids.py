"""Trials of a head's layer ids and their neighbours: formats count layers differently, and files may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_BETTER = 1.5
"""Factor by which other ids must raise acceptance to be advised."""
_ENOUGH = 0.02
"""Acceptance that other ids must reach to be advised."""


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """Layer ids and their acceptance."""

    layer_ids: tuple[int, ...]
    acceptance: float
    """Share of first tokens that the target accepts."""


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """All trials, the head's own ids first."""

    trials: tuple[LayerTrial, ...]

    @property
    def best(self) -> LayerTrial:
        """The trial with the highest acceptance, the first of equals."""
        return max(self.trials, key=lambda trial: trial.acceptance)

    @property
    def advised(self) -> tuple[int, ...] | None:
        """Other ids that are clearly better; None if there are none."""
        own, best = self.trials[0], self.best
        is_better = best.acceptance >= _ENOUGH and best.acceptance > _BETTER * own.acceptance
        return best.layer_ids if best is not own and is_better else None


def neighbouring_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """Other ids to try: all one higher, all one lower, and the defaults for heads that name none.

    Ids are those of `specdec.engine.tap`, for a target of `num_layers` layers; all results differ, also from
    `layer_ids`.
    """
    found: list[tuple[int, ...]] = []
    shifted = [tuple(each + by for each in layer_ids) for by in (1, -1)]
    usual = [(2, num_layers // 2, num_layers - 3), (1, num_layers // 2 - 1, num_layers - 4)]
    for ids in [*shifted, *(each for each in usual if len(each) == len(layer_ids))]:
        is_possible = len(set(ids)) == len(ids) and all(0 <= each <= num_layers for each in ids)
        if is_possible and ids != layer_ids and ids not in found:
            found.append(ids)
    return found


def try_layer_ids(
    layer_ids: tuple[int, ...], num_layers: int, accept: Callable[[tuple[int, ...]], float]
) -> LayerVerdict:
    """Try a head's own ids and their neighbours; `accept` gives the acceptance with given ids."""
    tried = [layer_ids, *neighbouring_layer_ids(layer_ids, num_layers)]
    return LayerVerdict(tuple(LayerTrial(ids, accept(ids)) for ids in tried))
