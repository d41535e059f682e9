"""Routes of a mixture in the self-test: rounding may exchange experts whose scores are nearly equal.

A pass that is judged follows the routes of the pass that it is compared with, so that an exchanged expert is no error.
How often routes differ is counted: near-ties are rare, a wrong router is not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from specdec.engine.model.mixtures.blocks import find_mixtures

MOST_CHANGED = 0.25
"""Largest share of a pass's routes that near-ties explain."""

_Route = tuple[torch.Tensor, torch.Tensor]
"""A row's experts and weights, each [k]."""


class Routes:
    """The routes of a model's rows, by a key of each row."""

    def __init__(self, model: nn.Module) -> None:
        self._mixtures = [experts for _, experts in find_mixtures(model)]
        self._known: dict[tuple[int, Hashable], _Route] = {}
        self._num_compared = self._num_changed = 0

    @property
    def share_changed(self) -> float:
        """Share of the followed routes that differed."""
        return self._num_changed / max(1, self._num_compared)

    @contextmanager
    def recording(self, keys: Sequence[Hashable]) -> Iterator[None]:
        """Keep the routes of passes whose rows have these keys."""

        def record(mixture: int, experts: torch.Tensor, weights: torch.Tensor) -> None:
            for key, row_experts, row_weights in zip(keys, experts, weights, strict=True):
                self._known[mixture, key] = row_experts.clone(), row_weights.clone()

        with self._hooked(len(keys), record):
            yield

    @contextmanager
    def following(self, keys: Sequence[Hashable]) -> Iterator[None]:
        """Use the kept routes for rows of these keys in passes that would take others."""

        def follow(mixture: int, experts: torch.Tensor, weights: torch.Tensor) -> _Route | None:
            known = [self._known.get((mixture, key)) for key in keys]
            changed = [
                row
                for row, route in enumerate(known)
                if route is not None and not torch.equal(route[0].sort().values, experts[row].sort().values)
            ]
            self._num_compared += len(known)
            self._num_changed += len(changed)
            if not changed:
                return None
            experts, weights = experts.clone(), weights.clone()
            for row in changed:
                experts[row], weights[row] = known[row] or (experts[row], weights[row])
            return experts, weights

        with self._hooked(len(keys), follow):
            yield

    @contextmanager
    def _hooked(
        self, num_rows: int, call: Callable[[int, torch.Tensor, torch.Tensor], _Route | None]
    ) -> Iterator[None]:
        def hook_of(mixture: int) -> Callable[..., Any]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
                if len(args) != 3 or len(args[1]) != num_rows:
                    return None  # all experts in one call, or another pass
                found = call(mixture, args[1], args[2])
                return None if found is None else (args[0], *found)

            return hook

        handles = [each.register_forward_pre_hook(hook_of(index)) for index, each in enumerate(self._mixtures)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
