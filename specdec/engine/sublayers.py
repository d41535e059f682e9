"""Attention and MLP sublayers that a pass skips: a draft with the target's own weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SkippedSublayers:
    """Numbers of layers, from 0, whose attention or MLP is skipped."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()
    layers: frozenset[int] = field(init=False)
    """Layers that are skipped as a whole."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", self.attention & self.mlp)

    def __str__(self) -> str:
        return f"attention {_ranges(self.attention)}, mlp {_ranges(self.mlp)}"

    def check(self, num_layers: int) -> None:
        """Raise ValueError unless a model of `num_layers` has these layers and keeps some attention and some MLP."""
        for name, skipped in (("skip_attention_layers", self.attention), ("skip_mlp_layers", self.mlp)):
            strange = [layer for layer in skipped if not 0 <= layer < num_layers]
            if strange:
                raise ValueError(f"{name}: the model has layers 0 to {num_layers - 1}, not {_ranges(strange)}")
            if len(skipped) == num_layers:
                raise ValueError(f"{name}: must leave at least one layer")

    def left(self, num_layers: int) -> float:
        """The share of sublayers that still run."""
        return 1 - (len(self.attention) + len(self.mlp)) / (2 * num_layers)


def skipped_sublayers(
    num_layers: int, exit_layer: int | None, attention: Iterable[int], mlp: Iterable[int]
) -> SkippedSublayers:
    """The sublayers to skip if a model ends after `exit_layer` layers (None: all) and lacks these sublayers.

    Raises ValueError for layers outside the model, and if nothing would be left.
    """
    if exit_layer is not None and not 0 < exit_layer < num_layers:
        raise ValueError(f"exit_layer: {exit_layer} is not between 1 and {num_layers - 1}")
    late = frozenset(range(num_layers if exit_layer is None else exit_layer, num_layers))
    skipped = SkippedSublayers(frozenset(attention) | late, frozenset(mlp) | late)
    skipped.check(num_layers)
    return skipped


def read_layers(value: object) -> object:
    """Parse numbers and ranges such as `3-6,8` into a list; other types are returned unchanged.

    Raises ValueError for other text.
    """
    if not isinstance(value, str):
        return value
    layers: list[int] = []
    for part in value.strip().strip("[]").split(","):
        if not part.strip():
            continue
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither a layer nor a range of layers such as 3-6")
        layers += range(int(first), int(last or first) + 1)
    return layers


def _ranges(layers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
